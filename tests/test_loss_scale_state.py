"""State that is set whole or not at all, and gradients that carry no loss scale."""

from __future__ import annotations

import io
import zipfile

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import dense_model
from test_loss_scale_faults import GRADIENT, NAN, START, made, same, step, values

from precision_bert import (
    DynamicLossScaleOptimizer,
    load_model,
    load_state,
    save_model,
    switch_precision,
)
from precision_bert.loss_scaling import (
    count_skipped_in_a_row,
    count_steps,
    current_loss_scale,
    loss_scale_values,
    set_loss_scale_values,
)

OWN = ["iteration", "learning_rate", "step_counter", "dynamic_scale", "skipped_steps"]
OWN += ["consecutive_skipped_steps", "bad_since_growth", "bad_since_move", "steps_since_move"]


def trained():
    """Two applied steps, then two skipped ones."""
    optimizer, variable = made(keras.optimizers.Adam(0.1))
    for gradient in (GRADIENT, GRADIENT, NAN, NAN):
        step(optimizer, variable, gradient)
    return optimizer


def loaded_by(how, optimizer, weights):
    if how == "set_weights":
        optimizer.set_weights(weights)
    else:
        optimizer.load_own_variables({str(i): value for i, value in enumerate(weights)})


HOW = pytest.mark.parametrize("how", ["set_weights", "load_own_variables"])


@HOW
def test_all_variables_come_back(how):
    optimizer, (other, _) = trained(), made(keras.optimizers.Adam(0.1))
    assert [v.name for v in optimizer.variables[:9]] == OWN
    loaded_by(how, other, values(optimizer))
    assert same(values(other), values(optimizer))
    assert (count_steps(other), count_skipped_in_a_row(other)) == ((2, 2), 2)


@HOW
@pytest.mark.parametrize("own", [4, 5])
def test_what_keras_own_or_an_earlier_version_wrote_is_taken_with_later_counts_at_0(how, own):
    source, other = trained(), trained()
    weights = values(source)
    loaded_by(how, other, weights[:own] + weights[9:])
    assert same(values(other)[:own], weights[:own]) and same(values(other)[9:], weights[9:])
    assert all(int(v) == 0 for v in other.variables[own:9])


@HOW
def test_the_state_of_a_float32_stage_is_taken_and_leaves_the_scale_as_it_is(how):
    source, (other, _) = trained(), made(keras.optimizers.Adam(0.1), 64.0)
    before = values(other)
    loaded_by(how, other, values(source.inner_optimizer))
    assert same(values(other)[9:], values(source)[9:]) and same(values(other)[:9], before[:9])


@HOW
@pytest.mark.parametrize("change", ["one less", "one more", "none", "3 own", "shape", "no scalar"])
def test_what_does_not_fit_is_an_error_and_nothing_is_set(how, change):
    source, (other, _) = trained(), made(keras.optimizers.Adam(0.1))
    before, weights = values(other), values(source)
    changed = {
        "one less": weights[:-1],
        "one more": [*weights, weights[-1]],
        "none": [],
        "3 own": weights[:3] + weights[9:],
        "shape": [*weights[:-1], np.zeros(4, "float32")],
        "no scalar": [*weights[:3], np.ones(1, "float32"), *weights[4:]],
    }[change]
    with pytest.raises(ValueError, match=r"has 13 variables, 4 of them|has the shape"):
        loaded_by(how, other, changed)
    assert same(values(other), before)


def test_setting_an_optimizer_that_is_not_built_is_an_error():
    optimizer = DynamicLossScaleOptimizer(keras.optimizers.Adam(0.1))
    for setting in (lambda: optimizer.set_weights([]), lambda: optimizer.assign_loss_scale({})):
        with pytest.raises(ValueError, match=r"is not built.*build\(model.trainable_variables\)"):
            setting()
    with pytest.warns(UserWarning, match="Skipping variable loading"):  # as Keras does
        optimizer.load_own_variables({"0": np.zeros(())})


def test_a_state_by_name_comes_back():
    source, (other, _) = trained(), made(keras.optimizers.Adam(0.1))
    set_loss_scale_values(other, loss_scale_values(source))
    assert same(values(other)[:9], values(source)[:9])
    assert current_loss_scale(other) == 2.0**13


def test_a_state_by_name_of_an_earlier_version_is_taken_with_later_counts_at_0():
    other = trained()
    set_loss_scale_values(other, {"dynamic_scale": 8.0, "step_counter": 3, "skipped_steps": 4})
    assert [float(v) for v in other.variables[2:9]] == [3, 8, 4, 0, 0, 0, 0]


@pytest.mark.parametrize("missing", ["dynamic_scale", "step_counter"])
def test_a_state_by_name_without_scale_or_streak_is_an_error_and_nothing_is_set(missing):
    source, other = loss_scale_values(trained()), trained()
    before = values(other)
    del source[missing]
    with pytest.raises(ValueError, match=f"must hold '{missing}'.*Nothing was set"):
        set_loss_scale_values(other, source | {"skipped_steps": 77})
    with pytest.raises(ValueError, match="has the shape"):
        set_loss_scale_values(other, loss_scale_values(other) | {"skipped_steps": [1, 2]})
    assert same(values(other), before)


@pytest.mark.parametrize(("dead", "mended"), [(0.0, 1.0), (-1.0, 1.0), (np.inf, 2.0**24)])
def test_a_saved_scale_that_nothing_can_be_divided_by_is_mended_and_said(dead, mended):
    optimizer = trained()
    with pytest.warns(RuntimeWarning, match="by which no gradient can be divided"):
        optimizer.assign_loss_scale({"dynamic_scale": dead, "step_counter": 0})
    assert current_loss_scale(optimizer) == mended


# Gradients that carry no loss scale


class Custom(keras.Sequential):
    """A train_step of the user's own, that scales its loss or forgets it."""

    scales = False

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = keras.ops.cast(self(x, training=True), "float32")
            loss = keras.ops.mean(keras.ops.square(outputs - y))
            loss = self.optimizer.scale_loss(loss) if self.scales else loss
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


COMPILED = pytest.mark.parametrize(
    "how", [{}, {"jit_compile": True}, {"steps_per_execution": 3}, {"run_eagerly": True}], ids=str
)


def custom(how, scales):
    model = Custom([keras.Input((4,)), layers.Dense(1)])
    model.scales = scales
    model.compile("sgd", "mse", **how)
    switch_precision(model, "mixed_float16")
    return model


@COMPILED
def test_a_train_step_that_scales_no_loss_is_warned_of_however_it_is_compiled(how, xy):
    model = custom(how, scales=False)
    with pytest.warns(RuntimeWarning, match="scale_loss was never called"):
        model.fit(*xy, batch_size=8, verbose=0)


@COMPILED
def test_a_train_step_that_scales_its_loss_is_not(how, xy):
    model = custom(how, scales=True)
    model.fit(*xy, batch_size=8, epochs=2, verbose=0)
    model.fit(xy[0][:5], xy[1][:5], batch_size=4, verbose=0)  # traced anew for another shape
    assert count_steps(model.optimizer) == (10, 0)


@pytest.mark.parametrize("how", [{}, {"jit_compile": True}, {"steps_per_execution": 3}], ids=str)
def test_a_recompile_to_a_step_that_scales_no_loss_is_warned_of_after_one_that_did(how, xy):
    model = custom(how, scales=True)
    model.fit(*xy, batch_size=8, verbose=0)
    model.scales = False
    model.compile(model.optimizer, "mse", **how)
    with pytest.warns(RuntimeWarning, match="scale_loss was never called"):
        model.fit(*xy, batch_size=8, verbose=0)


def test_gradients_of_a_rule_that_scales_nothing_need_no_scaled_loss():
    optimizer, variable = made(
        keras.optimizers.SGD(0.5), initial_scale=1.0, min_scale=1.0, max_scale=1.0
    )
    optimizer.apply([keras.ops.convert_to_tensor(GRADIENT)], [variable])
    np.testing.assert_array_equal(variable, START - 0.5 * GRADIENT)


# Files of an earlier version


def without_later_counts(file):
    """Takes out of a saved model what an earlier version's loss scale did not have."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    weights = io.BytesIO(members["model.weights.h5"])
    with h5py.File(weights, "r+") as opened:
        stored = opened["optimizer/vars"]
        kept = [stored[str(i)][()] for i in range(len(stored)) if not 5 <= i < 9]
        for name in list(stored):
            del stored[name]
        for i, value in enumerate(kept):
            stored[str(i)] = value
    members["model.weights.h5"] = weights.getvalue()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


@pytest.mark.parametrize("read", ["load_model", "load_state", "keras"])
def test_a_file_of_an_earlier_version_is_read_with_its_state(read, xy, tmp_path):
    def made():
        model = dense_model(optimizer="adam", loss="mse")
        switch_precision(model, "mixed_float16")
        model.fit(*xy, batch_size=8, verbose=0)
        return model

    model, file = made(), tmp_path / "model.keras"
    model.optimizer.assign_loss_scale(
        {"dynamic_scale": 64.0, "step_counter": 3, "skipped_steps": 2}
    )
    save_model(model, file)
    without_later_counts(file)
    if read == "load_state":
        load_state(again := made(), file)
    else:
        again = load_model(file) if read == "load_model" else keras.saving.load_model(file)
    assert type(again.optimizer) is DynamicLossScaleOptimizer
    assert same(values(again.optimizer), values(model.optimizer))
