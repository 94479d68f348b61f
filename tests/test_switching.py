"""What `switch_precision` promises of any model."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from models import MODELS, dense_model

from precision_bert import (
    DynamicLossScaleOptimizer,
    compute_dtypes,
    pin_float32,
    precision_scope,
    switch_precision,
)
from precision_bert.policies import SWITCHABLE_POLICIES

# Keras' UnitNormalization meets its epsilon in half precision, also in a model built that way.
pytestmark = pytest.mark.filterwarnings("ignore:.*overflow encountered in cast:RuntimeWarning")

PAIRS = [(a, b) for a in SWITCHABLE_POLICIES for b in SWITCHABLE_POLICIES if a != b]


def bits(tensor):
    return ops.convert_to_numpy(tensor).tobytes()


def built(name, policy):
    """A model of `MODELS` built in `policy`, with the same weights whatever the policy."""
    shape, build = MODELS[name]
    keras.utils.set_random_seed(7)
    with precision_scope(policy):
        model = build()
        model(np.zeros((1, *shape), "float32"))
    return model


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("name", MODELS)
def test_a_switched_model_computes_what_one_built_in_the_target_policy_computes(
    name, source, target
):
    shape, _ = MODELS[name]
    x = np.random.RandomState(2).randn(4, *shape).astype("float32")
    switched, rebuilt = built(name, source), built(name, target)
    rebuilt.set_weights(switched.get_weights())
    switched.predict(x, verbose=0)  # a compiled function that must not go on in the old precision

    switch_precision(switched, target)

    assert bits(switched(x)) == bits(rebuilt(x))
    assert switched.predict(x, verbose=0).tobytes() == rebuilt.predict(x, verbose=0).tobytes()


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("name", ["dense", "conv2d", "lstm", "multi_head_attention"])
def test_a_step_after_the_switch_equals_a_step_of_a_model_built_in_the_target_policy(
    name, source, target
):
    shape, _ = MODELS[name]
    x = np.random.RandomState(2).randn(4, *shape).astype("float32")
    switched, rebuilt = built(name, source), built(name, target)
    rebuilt.set_weights(switched.get_weights())
    y = np.ones(switched(x).shape, "float32")
    for model in (switched, rebuilt):
        model.compile(keras.optimizers.SGD(0.1), "mse")
    switch_precision(switched, target)

    losses = []
    for model in (switched, rebuilt):
        keras.utils.set_random_seed(1)
        losses.append(model.train_on_batch(x, y))

    assert losses[0] == losses[1]
    for ours, theirs in zip(switched.weights, rebuilt.weights, strict=True):
        assert bits(ours) == bits(theirs), ours.path


@pytest.mark.parametrize("name", MODELS)
def test_switching_there_and_back_gives_the_same_outputs_and_weights(name):
    shape, _ = MODELS[name]
    x = np.random.RandomState(2).randn(4, *shape).astype("float32")
    model = built(name, "float32")
    outputs, weights = bits(model(x)), [bits(w) for w in model.weights]
    for policy in ("mixed_float16", "mixed_bfloat16", "float32"):
        switch_precision(model, policy)
    assert bits(model(x)) == outputs
    assert [bits(w) for w in model.weights] == weights


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_every_compiled_function_runs_in_the_new_precision(policy, xy):
    x, y = xy
    model = dense_model(optimizer=keras.optimizers.SGD(0.0), loss="mse")
    before = (
        model.predict(x, verbose=0).tobytes(),
        model.evaluate(x, y, verbose=0),
        model.train_on_batch(x, y),
    )
    reference = dense_model(policy, optimizer=keras.optimizers.SGD(0.0), loss="mse")
    reference.set_weights(model.get_weights())

    switch_precision(model, policy)

    after = (
        model.predict(x, verbose=0).tobytes(),
        model.evaluate(x, y, verbose=0),
        model.train_on_batch(x, y),
    )
    assert after == (
        reference.predict(x, verbose=0).tobytes(),
        reference.evaluate(x, y, verbose=0),
        reference.train_on_batch(x, y),
    )
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_the_functions_of_an_inner_model_are_renewed_too(xy):
    x, _ = xy
    inner = dense_model(optimizer="sgd", loss="mse")
    inner.predict(x, verbose=0)
    inputs = keras.Input((4,))
    outer = keras.Model(inputs, inner(inputs))
    switch_precision(outer, "mixed_bfloat16")
    reference = dense_model("mixed_bfloat16")
    reference.set_weights(inner.get_weights())
    assert inner.predict(x, verbose=0).tobytes() == reference.predict(x, verbose=0).tobytes()


def test_all_layers_are_reached_not_only_the_container():
    model = dense_model()
    model.dtype_policy = "mixed_float16"  # what users try first: it reaches no layer
    assert set(compute_dtypes(model).values()) == {"float32"}
    report = switch_precision(model, "mixed_float16")
    assert set(compute_dtypes(model).values()) == {"float16"}
    assert model.dtype_policy.name == "mixed_float16"
    assert report.pinned == ()


@pytest.mark.parametrize("name", MODELS)
def test_the_report_names_every_layer_once(name):
    model = built(name, "float32")
    report = switch_precision(model, "mixed_float16")
    named = report.changed + report.unchanged + report.pinned
    assert len(named) == len(
        [la for la in model._flatten_layers() if not isinstance(la, layers.InputLayer)]
    )
    assert report.unchanged == ()
    again = switch_precision(model, "mixed_float16")
    assert again.changed == () and sorted(again.unchanged) == sorted(report.changed)


class TestLossScaling:
    @pytest.mark.parametrize(
        ("policy", "scaled"),
        [("mixed_float16", True), ("mixed_bfloat16", False), ("float32", False)],
    )
    def test_it_is_there_exactly_where_gradients_are_computed_in_float16(self, policy, scaled):
        model = dense_model(optimizer="adam", loss="mse")
        switch_precision(model, policy)
        assert isinstance(model.optimizer, DynamicLossScaleOptimizer) is scaled

    def test_it_is_decided_from_the_layers_not_from_the_container(self):
        inputs = keras.Input((4,))
        model = keras.Model(inputs, layers.Dense(1, dtype="mixed_float16")(inputs))
        model.compile("sgd", "mse")  # the container is float32: Keras adds no loss scale
        assert not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        report = switch_precision(model, "mixed_float16")
        assert report.loss_scaling == "added"

    def test_a_model_with_a_policy_map_gets_it(self):
        policies = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_float16")
        inputs = keras.Input((4,))
        model = keras.Model(inputs, layers.Dense(1, dtype=policies, name="d")(inputs))
        model.compile("sgd", "mse")
        assert not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        switch_precision(model, "mixed_float16")
        assert isinstance(model.optimizer, DynamicLossScaleOptimizer)

    def test_a_policy_map_of_the_user_is_not_written_to(self):
        policies = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_float16")
        policies["d"] = keras.DTypePolicy("float32")
        inputs = keras.Input((4,))
        hidden = layers.Dense(1, dtype=policies, name="h")(inputs)
        model = keras.Model(inputs, layers.Dense(1, dtype=policies, name="d")(hidden))
        before = policies.get_config()
        switch_precision(model, "mixed_bfloat16")
        assert policies.get_config() == before
        assert compute_dtypes(model) == {"h": "bfloat16", "d": "float32"}

    def test_frozen_layers_in_float16_need_none(self):
        model = dense_model(optimizer="adam", loss="mse")
        model.trainable = False
        assert switch_precision(model, "mixed_float16").loss_scaling == "none"

    def test_a_model_with_weights_of_its_own_gets_it(self):
        class Own(keras.Model):
            def build(self, shape):
                self.w = self.add_weight(shape=(4, 1), name="w")

            def call(self, x):
                return keras.ops.matmul(x, self.w)

        model = Own()
        model.build((None, 4))
        model.compile("sgd", "mse")
        assert switch_precision(model, "mixed_float16").loss_scaling == "added"

    def test_a_frozen_float16_layer_between_float32_ones_needs_it(self):
        inputs = keras.Input((4,))
        hidden = layers.Dense(4, dtype="float32")(inputs)
        frozen = layers.Dense(4, dtype="mixed_float16", trainable=False)
        model = keras.Model(inputs, layers.Dense(1, dtype="float32")(frozen(hidden)))
        model.compile("sgd", "mse")
        assert switch_precision(model, "mixed_float16").loss_scaling == "added"

    def test_a_schedule_without_a_config_is_no_obstacle(self, xy):
        class Custom(keras.optimizers.schedules.LearningRateSchedule):
            def __call__(self, step):
                return 0.01

        model = dense_model(optimizer=keras.optimizers.SGD(Custom()), loss="mse")
        for policy in ("mixed_float16", "float32", "mixed_float16"):
            switch_precision(model, policy)
            assert np.isfinite(model.fit(*xy, verbose=0).history["loss"]).all()

    @pytest.mark.parametrize("policy", ["mixed_float16", "float32"])
    def test_a_saved_model_comes_back_with_optimizer_and_loss_scale(self, policy, xy, tmp_path):
        model = dense_model(optimizer="adam", loss="mse")
        switch_precision(model, "mixed_float16")
        model.fit(*xy, batch_size=8, verbose=0)
        switch_precision(model, policy)
        model.save(tmp_path / "model.keras")
        again = keras.models.load_model(tmp_path / "model.keras")
        assert type(again.optimizer) is type(model.optimizer)
        for one, other in zip(again.optimizer.variables, model.optimizer.variables, strict=True):
            assert bits(one) == bits(other)

    def test_a_train_step_that_never_scales_its_loss_is_warned_of(self, xy):
        class Unscaled(keras.Sequential):
            def train_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    outputs = keras.ops.cast(self(x, training=True), "float32")
                    loss = keras.ops.mean(keras.ops.square(outputs - y))
                gradients = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply_gradients(
                    zip(gradients, self.trainable_variables, strict=True)
                )
                return {"loss": loss}

        model = Unscaled([keras.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        switch_precision(model, "mixed_float16")
        with pytest.warns(RuntimeWarning, match="scale_loss was never called"):
            model.fit(*xy, verbose=0)

    def test_an_uncompiled_model_needs_none_yet(self):
        assert switch_precision(dense_model(), "mixed_float16").loss_scaling == "none"

    def test_the_inner_optimizer_goes_on_as_the_same_object_with_its_state(self, xy):
        x, y = xy
        model = dense_model(optimizer=keras.optimizers.Adam(0.01), loss="mse")
        model.fit(x, y, epochs=2, batch_size=8, verbose=0)
        inner = model.optimizer
        state = [bits(v) for v in inner.variables]
        for policy in ("mixed_float16", "mixed_bfloat16", "mixed_float16", "float32"):
            switch_precision(model, policy)
            wrapped = model.optimizer
            assert getattr(wrapped, "inner_optimizer", wrapped) is inner
            assert [bits(v) for v in inner.variables] == state
        assert model.optimizer is inner
        assert int(inner.iterations) == 8

    def test_scale_and_streak_are_carried_over_a_float32_stage(self, xy):
        x, y = xy
        model = dense_model(optimizer="sgd", loss="mse")
        switch_precision(model, "mixed_float16")
        model.fit(x, y, batch_size=8, verbose=0)
        model.optimizer.dynamic_scale.assign(4096.0)
        model.optimizer.step_counter.assign(4)
        for policy in ("float32", "mixed_float16", "mixed_bfloat16", "mixed_float16"):
            switch_precision(model, policy)
        assert float(model.optimizer.dynamic_scale) == 4096.0
        assert int(model.optimizer.step_counter) == 4


class TestIslands:
    def test_a_layer_pinned_by_its_author_stays_pinned(self):
        with precision_scope("mixed_float16"):
            inputs = keras.Input((4,))
            hidden = layers.Dense(3, name="d")(inputs)
            soft = layers.Activation("softmax", dtype="float32", name="soft")(hidden)
            model = keras.Model(inputs, soft)
        for policy in ("float32", "mixed_float16", "mixed_bfloat16", "float32", "mixed_float16"):
            report = switch_precision(model, policy)
            assert report.pinned == ("soft",)
            assert compute_dtypes(model) == {
                "d": keras.DTypePolicy(policy).compute_dtype,
                "soft": "float32",
            }

    def test_a_head_built_in_float32_on_a_mixed_body_is_an_island(self):
        inputs = keras.Input((4,))
        hidden = layers.Dense(3, name="body", dtype="mixed_float16")(inputs)
        model = keras.Model(inputs, layers.Dense(2, name="head")(hidden))
        switch_precision(model, "mixed_bfloat16")
        assert compute_dtypes(model) == {"body": "bfloat16", "head": "float32"}

    def test_a_backbone_switched_with_another_model_makes_no_island_of_this_ones_head(self):
        backbone = layers.Dense(3, name="body")
        first, second = (keras.Input((4,)) for _ in range(2))
        one = keras.Model(first, layers.Dense(2, name="h1")(backbone(first)))
        two = keras.Model(second, layers.Dense(2, name="h2")(backbone(second)))
        switch_precision(one, "mixed_float16")
        assert switch_precision(two, "mixed_float16").pinned == ()
        assert compute_dtypes(two) == {"body": "float16", "h2": "float16"}
        switch_precision(one, "float32")
        with precision_scope("mixed_float16"):
            third = keras.Input((4,))
            three = keras.Model(third, layers.Dense(2, name="h3")(backbone(third)))
        switch_precision(three, "mixed_bfloat16")
        assert compute_dtypes(three) == {"body": "bfloat16", "h3": "bfloat16"}

    def test_a_float32_model_has_none(self):
        assert switch_precision(dense_model(), "mixed_float16").pinned == ()

    def test_pin_float32_makes_one_in_a_float32_model(self):
        model = dense_model()
        pin_float32(model.get_layer("head"))
        switch_precision(model, "mixed_float16")
        assert compute_dtypes(model) == {"hidden": "float16", "head": "float32"}

    def test_pin_float32_brings_a_half_layer_back(self):
        layer = layers.Dense(2, dtype="mixed_float16")
        pin_float32(layer)
        assert layer.compute_dtype == "float32"

    def test_pin_float32_reaches_the_layers_inside(self):
        layer = layers.Bidirectional(layers.LSTM(2))
        model = keras.Sequential([keras.Input((3, 4)), layer, layers.Dense(1, name="d")])
        pin_float32(layer)
        report = switch_precision(model, "mixed_float16")
        assert len(report.pinned) == len(layer._flatten_layers())

    def test_pin_float32_refuses_what_is_no_layer(self):
        with pytest.raises(TypeError, match="takes Keras layers"):
            pin_float32("head")

    def test_a_layer_whose_dtype_is_no_float_is_none_of_the_switchs_business(self):
        words = keras.Input((3,), dtype="string")
        hashing = layers.Hashing(4, name="hashing")
        model = keras.Model(words, layers.Embedding(4, 2, name="embed")(hashing(words)))
        before = hashing.dtype_policy.name
        assert before == "int64"
        report = switch_precision(model, "mixed_float16")
        assert hashing.dtype_policy.name == before
        assert report.changed == (model.name, "embed")

    def test_pinning_keeps_no_layer_alive(self):
        layer = layers.Dense(2)
        pin_float32(layer)
        alive = weakref.ref(layer)
        del layer
        gc.collect()
        assert alive() is None


class TestRefusals:
    @pytest.mark.parametrize(
        "policy", ["float16", "bfloat16", "float64", "mixed_float8", "", None, 16]
    )
    def test_an_unknown_policy(self, policy):
        with pytest.raises(ValueError, match=r"policy must be one of 'float32'.*Received"):
            switch_precision(dense_model(), policy)

    def test_the_message_for_half_variables_names_the_mixed_policy(self):
        with pytest.raises(ValueError, match="you probably want 'mixed_float16'"):
            switch_precision(dense_model(), "float16")

    @pytest.mark.parametrize("model", [None, "model", layers.Dense(1)])
    def test_what_is_no_model(self, model):
        with pytest.raises(TypeError, match=r"model must be a keras\.Model"):
            switch_precision(model, "float32")

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_half_variables_are_seen_by_their_real_dtype(self, dtype):
        inputs = keras.Input((4,))
        model = keras.Model(inputs, layers.Dense(1, dtype=dtype, name="d")(inputs))
        model.get_layer("d").dtype_policy = "float32"  # the policy lies, the kernel is half
        with pytest.raises(ValueError, match=f"Layer 'd' keeps its variable 'kernel' in {dtype}"):
            switch_precision(model, "mixed_float16")

    def test_float64_variables_are_refused(self):
        inputs = keras.Input((4,))
        model = keras.Model(inputs, layers.Dense(1, dtype="float64", name="d")(inputs))
        with pytest.raises(ValueError, match="Layer 'd' keeps its variable 'kernel' in float64"):
            switch_precision(model, "mixed_float16")

    def test_a_float64_island_in_a_mixed_model_stays(self):
        inputs = keras.Input((4,))
        hidden = layers.Dense(2, dtype="mixed_float16", name="h")(inputs)
        model = keras.Model(inputs, layers.Dense(1, dtype="float64", name="d")(hidden))
        switch_precision(model, "float32")
        assert compute_dtypes(model) == {"h": "float32", "d": "float64"}

    def test_a_quantised_layer_is_named(self):
        model = dense_model()
        model.get_layer("hidden").quantize("int8")
        before = compute_dtypes(model)
        with pytest.raises(ValueError, match="Layer 'hidden' is quantised"):
            switch_precision(model, "mixed_float16")
        assert compute_dtypes(model) == before

    def test_a_failure_midway_leaves_the_model_as_it_was(self, monkeypatch):
        model = dense_model(optimizer="sgd", loss="mse")
        optimizer, before = model.optimizer, [la.dtype_policy.name for la in model.layers]

        def fail(*_):
            raise RuntimeError("no more memory")

        monkeypatch.setattr("precision_bert.switching.wrap_optimizer", fail)
        with pytest.raises(RuntimeError, match="no more memory"):
            switch_precision(model, "mixed_float16")
        assert [la.dtype_policy.name for la in model.layers] == before
        assert model.optimizer is optimizer


class TestPrecisionScope:
    def test_it_restores_the_policy_when_the_body_raises(self):
        with pytest.raises(KeyError), precision_scope("mixed_float16"):
            assert keras.config.dtype_policy().name == "mixed_float16"
            raise KeyError
        assert keras.config.dtype_policy().name == "float32"

    def test_scopes_nest(self):
        with precision_scope("mixed_float16"):
            with precision_scope("mixed_bfloat16"):
                assert keras.config.dtype_policy().name == "mixed_bfloat16"
            assert keras.config.dtype_policy().name == "mixed_float16"

    def test_it_restores_what_the_body_changed(self):
        with precision_scope("mixed_float16"):
            keras.config.set_dtype_policy("mixed_bfloat16")
        assert keras.config.dtype_policy().name == "float32"

    def test_it_refuses_an_unknown_policy_and_changes_nothing(self):
        with pytest.raises(ValueError, match="policy must be one of"), precision_scope("half"):
            pass
        assert keras.config.dtype_policy().name == "float32"
