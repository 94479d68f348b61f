"""What used to go wrong silently with loss scaling, each fault with its neighbours."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from models import dense_model

from precision_bert import (
    DynamicLossScaleOptimizer,
    LossScaleRule,
    Stage,
    staged_fit,
    switch_precision,
)
from precision_bert.loss_scaling import (
    count_skipped_in_a_row,
    count_steps,
    current_loss_scale,
    loss_scale_values,
    unwrap_optimizer,
    wrap_optimizer,
)

START = np.array([0.5, -0.25, 2.0], "float32")
GRADIENT = np.array([3.0, -4.0, 12.0], "float32")  # of norm 13
NAN = np.array([0.0, np.nan, 0.0], "float32")


def step(optimizer, variable, gradient):
    """One step of a loss that has this gradient, scaled where the optimizer scales."""
    optimizer.apply([optimizer.scale_loss(ops.convert_to_tensor(gradient))], [variable])


def made(inner, *arguments, **keywords):
    """A built loss-scale optimizer, and the variable that it trains."""
    variable = keras.Variable(START)
    optimizer = DynamicLossScaleOptimizer(inner, *arguments, **keywords)
    optimizer.build([variable])
    return optimizer, variable


def values(optimizer):
    return [np.array(v) for v in optimizer.variables]


def same(one, other):
    return [a.tobytes() for a in one] == [b.tobytes() for b in other]


# The scale at its bounds


@pytest.mark.parametrize(("bad", "scale"), [(14, 2.0), (15, 1.0), (16, 1.0), (142, 1.0)])
def test_a_good_step_is_applied_after_any_number_of_bad_ones(bad, scale):
    optimizer, variable = made(keras.optimizers.SGD(0.5))
    for _ in range(bad):
        step(optimizer, variable, NAN)
    assert current_loss_scale(optimizer) == scale
    assert count_skipped_in_a_row(optimizer) == bad
    step(optimizer, variable, GRADIENT)
    np.testing.assert_array_equal(variable, START - 0.5 * GRADIENT)
    assert count_steps(optimizer) == (1, bad)
    assert count_skipped_in_a_row(optimizer) == 0


def test_every_step_is_applied_below_at_and_on_the_ceiling():
    optimizer, variable = made(keras.optimizers.SGD(0.5), 2.0**22, 1)
    for applied, scale in enumerate([2.0**23, 2.0**24, 2.0**24, 2.0**24], start=1):
        step(optimizer, variable, GRADIENT)
        assert (current_loss_scale(optimizer), count_steps(optimizer)) == (scale, (applied, 0))
    np.testing.assert_array_equal(variable, START - 2.0 * GRADIENT)


@pytest.mark.parametrize(("dead", "mended"), [(0.0, 1.0), (np.inf, 2.0**24), (np.nan, 1.0)])
def test_a_scale_that_keras_own_has_lost_is_mended_and_said_when_it_is_replaced(dead, mended):
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    variable = keras.Variable(START)
    theirs.build([variable])
    theirs.dynamic_scale.assign(dead)
    with pytest.warns(RuntimeWarning, match=rf"loss scale was {dead}, .* goes on at {mended}"):
        ours = wrap_optimizer(theirs)
    step(ours, variable, GRADIENT)
    np.testing.assert_array_equal(variable, START - 0.5 * GRADIENT)


def test_a_static_rule_skips_bad_steps_and_stays():
    optimizer, variable = made(keras.optimizers.SGD(0.5), rule=LossScaleRule.static(8.0))
    for gradient in (NAN, GRADIENT, NAN):
        step(optimizer, variable, gradient)
    assert (current_loss_scale(optimizer), count_steps(optimizer)) == (8.0, (1, 2))
    np.testing.assert_array_equal(variable, START - 0.5 * GRADIENT)


def test_the_optimizer_follows_its_rule_with_hysteresis_and_tolerance():
    rule = LossScaleRule(64.0, 3, hysteresis=2, tolerance=0.3)
    optimizer, variable = made(keras.optimizers.SGD(0.0), rule=rule)
    state = rule.start()
    for finite in np.random.RandomState(1).rand(40) < 0.6:
        step(optimizer, variable, GRADIENT if finite else NAN)
        state = rule.update(state, bool(finite))
        own = loss_scale_values(optimizer)
        names = ["dynamic_scale", "step_counter", "bad_since_growth", "bad_since_move"]
        assert [own[n] for n in [*names, "steps_since_move"]] == [float(v) for v in state]


# A step that is skipped


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("good_steps", [0, 1, 2, 3])
def test_a_skipped_step_leaves_every_variable_as_it_was(good_steps, bad):
    inner = keras.optimizers.AdamW(
        0.1, 0.1, use_ema=True, ema_overwrite_frequency=2, gradient_accumulation_steps=2
    )
    optimizer, variable = made(inner)
    for _ in range(good_steps):  # to each position in the window
        step(optimizer, variable, GRADIENT)
    before = [*values(inner), np.array(variable)]
    step(optimizer, variable, np.array([0.0, 0.0, bad], "float32"))
    assert same(before, [*values(inner), np.array(variable)])


def test_a_schedule_goes_by_applied_steps_and_a_later_stage_begins_at_its_own_first(xy):
    x, y = xy
    broken = y.copy()
    broken[8:16] = np.nan  # the second of four steps
    batches = [tf.data.Dataset.from_tensor_slices((x, labels)).batch(8) for labels in (broken, y)]
    decay = keras.optimizers.schedules.PolynomialDecay(0.5, 4, 0.1)
    model = dense_model(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    stages = [
        Stage("mixed_float16", 2, data=batches[0]),
        Stage("float32", 1, data=batches[1], learning_rate=decay),
    ]
    record = staged_fit(model, stages, verbose=0)
    assert [(s.applied_steps, s.skipped_steps) for s in record.stages] == [(6, 2), (4, 0)]
    assert record.history["skipped_steps"] == [1, 1, 0]
    schedule = model.optimizer._learning_rate
    assert [float(schedule(6 + k)) for k in range(5)] == [float(decay(k)) for k in range(5)]
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)  # after 4 steps of its own


# Settings of the inner optimizer


@pytest.mark.parametrize("stages", [("half",), ("single",), ("half", "single"), ("single", "half")])
@pytest.mark.parametrize(
    ("setting", "clipped"),
    [
        ({"clipnorm": 6.5}, GRADIENT / 2),
        ({"clipnorm": 13.0}, GRADIENT),
        ({"clipnorm": 26.0}, GRADIENT),
        ({"global_clipnorm": 6.5}, GRADIENT / 2),
        ({"clipvalue": 4.0}, np.array([3.0, -4.0, 4.0], "float32")),
    ],
    ids=str,
)
def test_unscaled_gradients_are_clipped_in_both_stages(stages, setting, clipped):
    optimizer, variable = made(keras.optimizers.SGD(0.5, **setting), 2.0**10)
    for stage in stages:
        optimizer = {"half": wrap_optimizer, "single": unwrap_optimizer}[stage](optimizer)
        step(optimizer, variable, GRADIENT)
    np.testing.assert_allclose(variable, START - 0.5 * len(stages) * clipped, rtol=1e-6)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("skipped_at", [None, 0, 1, 2])
@pytest.mark.parametrize("switched_at", [0, 1, 2, 3, 4])
def test_a_switch_anywhere_in_an_accumulation_window_loses_nothing(switched_at, skipped_at, back):
    optimizer, variable = made(keras.optimizers.SGD(1.0, gradient_accumulation_steps=3))
    if back:
        optimizer = unwrap_optimizer(optimizer)
    gradients = np.random.RandomState(0).randint(-8, 8, (6, 3)).astype("float32")
    for index, gradient in enumerate(gradients):
        if index == switched_at:
            optimizer = wrap_optimizer(optimizer) if back else unwrap_optimizer(optimizer)
        if index == skipped_at and current_loss_scale(optimizer):
            step(optimizer, variable, NAN)
        step(optimizer, variable, gradient)
    expected = START - gradients[:3].sum(0) / 3 - gradients[3:].sum(0) / 3
    np.testing.assert_allclose(variable, expected, rtol=1e-6)


@pytest.mark.parametrize("factor", [None, 8.0])
def test_a_loss_scale_factor_comes_back_on_unwrapping_and_from_a_file(factor):
    inner = keras.optimizers.SGD(0.5, loss_scale_factor=factor)
    optimizer = DynamicLossScaleOptimizer(inner)
    again = DynamicLossScaleOptimizer.from_config(optimizer.get_config())
    for wrapped in (optimizer, again):
        assert wrapped.inner_optimizer.loss_scale_factor is None  # it would scale twice
        assert unwrap_optimizer(wrapped).loss_scale_factor == factor


# Arguments


def test_a_growth_period_shorter_than_the_streak_still_grows():
    optimizer, variable = made(keras.optimizers.SGD(0.1), 8.0, 2)
    optimizer.step_counter.assign(7)
    step(optimizer, variable, GRADIENT)
    assert (current_loss_scale(optimizer), int(optimizer.step_counter)) == (16.0, 0)


@pytest.mark.parametrize("outer", [wrap_optimizer, unwrap_optimizer])
def test_a_wrapper_in_a_wrapper_is_refused_also_keras_own(outer):
    keras_own = keras.optimizers.LossScaleOptimizer
    for inner in (keras_own, DynamicLossScaleOptimizer):
        twice = keras_own(inner(keras.optimizers.SGD()))
        with pytest.raises(TypeError, match="the scales multiply"):
            outer(twice)
        model = dense_model(optimizer=twice, loss="mse")
        with pytest.raises(TypeError, match="the scales multiply"):
            switch_precision(model, "mixed_float16")
        assert model.optimizer is twice and model.dtype_policy.name == "float32"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial_scale": 0.0}, "initial_scale must be finite and positive"),
        ({"initial_scale": -1.0}, "initial_scale must be finite and positive"),
        ({"dynamic_growth_steps": 0}, "dynamic_growth_steps must be an int of at least 1"),
    ],
)
def test_values_that_keras_own_accepts_silently_are_refused(arguments, message):
    inner = keras.optimizers.SGD(loss_scale_factor=4.0)
    with pytest.raises(ValueError, match=message):
        DynamicLossScaleOptimizer(inner, **arguments)
    assert inner.loss_scale_factor == 4.0  # a refused one takes nothing
    with pytest.raises(ValueError, match=message):
        wrap_optimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), **arguments))


def test_a_rule_and_its_values_are_not_both_taken():
    with pytest.raises(ValueError, match="Give either rule or initial_scale"):
        DynamicLossScaleOptimizer(keras.optimizers.SGD(), 64.0, rule=LossScaleRule())
    for rule in ("dynamic", 64.0):
        with pytest.raises(TypeError, match="rule must be a LossScaleRule"):
            DynamicLossScaleOptimizer(keras.optimizers.SGD(), rule=rule)


@pytest.mark.parametrize("wrapped_again", [False, True])
def test_a_whole_rule_is_serialised_by_both_routes_and_kept_over_a_switch(wrapped_again):
    rule = LossScaleRule(64.0, 7, 2.0, 128.0, 4.0, 0.25, 3, 0.2)
    optimizer = DynamicLossScaleOptimizer(keras.optimizers.Adam(0.3), rule=rule)
    if wrapped_again:
        optimizer = wrap_optimizer(unwrap_optimizer(optimizer))
    saved = keras.saving.serialize_keras_object(optimizer)
    assert keras.saving.deserialize_keras_object(saved).rule == rule
    again = keras.optimizers.get(keras.optimizers.serialize(optimizer))
    assert (again.rule, again.initial_scale, again.dynamic_growth_steps) == (rule, 64.0, 7)


def test_the_configuration_of_an_earlier_version_is_read():
    optimizer = DynamicLossScaleOptimizer(keras.optimizers.SGD(0.1), 64.0, 7, 2.0, 128.0)
    flat = {"initial_scale": 64.0, "dynamic_growth_steps": 7, "min_scale": 2.0, "max_scale": 128.0}
    config = {k: v for k, v in optimizer.get_config().items() if k != "rule"}
    assert DynamicLossScaleOptimizer.from_config(config | flat).rule == optimizer.rule
