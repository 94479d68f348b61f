"""What `rebuild_precision` promises: the same model in another precision, made anew."""

from __future__ import annotations

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from models import MODELS, dense_model

from precision_bert import (
    BertConfig,
    DynamicLossScaleOptimizer,
    bert_classifier,
    compute_dtypes,
    pin_float32,
    precision_scope,
    rebuild_precision,
    switch_precision,
)
from precision_bert.policies import SWITCHABLE_POLICIES

# Keras' UnitNormalization meets its epsilon in half precision, also in a model built that way.
pytestmark = pytest.mark.filterwarnings("ignore:.*overflow encountered in cast:RuntimeWarning")

X = np.random.RandomState(3).randn(4, 4).astype("float32")


def bits(tensor):
    return ops.convert_to_numpy(tensor).tobytes()


def built(name, policy):
    """A model of `MODELS`, all of whose layers have the policy, also one with half variables."""
    shape, build = MODELS[name]
    keras.utils.set_random_seed(7)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = build()
        model(np.zeros((1, *shape), "float32"))
    finally:
        keras.config.set_dtype_policy(before)
    return model


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("float32", "mixed_float16"),
        ("mixed_float16", "float32"),
        ("mixed_float16", "mixed_bfloat16"),
        ("float32", "float32"),
    ],
)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "subclassed"])
def test_it_computes_what_a_model_built_in_the_target_policy_computes(name, source, target):
    x = np.random.RandomState(2).randn(4, *MODELS[name][0]).astype("float32")
    model = built(name, source)
    outputs = bits(model(x))
    rebuilt = rebuild_precision(model, target)
    reference = built(name, target)
    reference.set_weights(model.get_weights())
    assert rebuilt is not model and bits(rebuilt(x)) == bits(reference(x))
    assert bits(model(x)) == outputs  # and the old one is as it was


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["dense", "conv2d", "batch_normalization", "layer_normalization", "nested"]
)
class TestHalfVariables:
    """The policies `float16` and `bfloat16`, whose variables a switch in place cannot reach."""

    @pytest.mark.parametrize("target", SWITCHABLE_POLICIES)
    def test_they_become_float32_variables_with_the_same_values(self, name, half, target):
        model = built(name, half)
        assert {v.dtype for v in model.trainable_variables} == {half}
        rebuilt = rebuild_precision(model, target)
        for ours, theirs in zip(rebuilt.variables, model.variables, strict=True):
            np.testing.assert_array_equal(
                ops.convert_to_numpy(ours), ops.convert_to_numpy(theirs).astype(ours.dtype)
            )
        assert {v.dtype for v in rebuilt.trainable_variables} == {"float32"}
        switch_precision(rebuilt, "float32")  # what it refused of the old one
        with pytest.raises(ValueError, match=r"rebuild_precision\(model, policy\)"):
            switch_precision(model, "float32")

    def test_and_the_other_way_they_are_rounded_once(self, name, half):
        model = built(name, "float32")
        rebuilt = rebuild_precision(model, half)
        for ours, theirs in zip(rebuilt.variables, model.variables, strict=True):
            np.testing.assert_array_equal(
                ops.convert_to_numpy(ours), ops.convert_to_numpy(theirs).astype(ours.dtype)
            )
        assert {v.dtype for v in rebuilt.trainable_variables} == {half}


class Constant(layers.Layer):
    def build(self, shape):
        self.factor = ops.cast(0.1, self.compute_dtype)

    def call(self, x):
        return x * self.factor


class TestWhatASwitchRefuses:
    @pytest.mark.parametrize("source", SWITCHABLE_POLICIES)
    @pytest.mark.parametrize("target", SWITCHABLE_POLICIES)
    def test_a_layer_that_froze_its_dtype_is_made_anew(self, source, target):
        def build(policy):
            keras.utils.set_random_seed(1)
            with precision_scope(policy):
                return keras.Sequential([keras.Input((4,)), layers.Dense(3), Constant()])

        rebuilt, reference = rebuild_precision(build(source), target), build(target)
        assert bits(rebuilt(X)) == bits(reference(X))
        assert rebuilt.layers[1].factor.dtype == keras.DTypePolicy(target).compute_dtype

    def test_an_input_in_half_is_declared_anew(self):
        inputs = keras.Input((4,), dtype="float16", name="pixels")
        model = keras.Model(inputs, layers.Dense(2, dtype="mixed_float16")(inputs))
        rebuilt = rebuild_precision(model, "float32")
        assert rebuilt.inputs[0].dtype == "float32" and model.inputs[0].dtype == "float16"
        switch_precision(rebuilt, "mixed_bfloat16")

    def test_a_cast_in_the_graph_follows(self):
        inputs = keras.Input((4,))
        hidden = ops.cast(layers.Dense(3, dtype="mixed_float16")(inputs), "float16")
        model = keras.Model(inputs, layers.Dense(2, dtype="mixed_float16")(hidden))
        (cast,) = [op for op in model.operations if not isinstance(op, keras.Layer)]
        rebuilt = rebuild_precision(model, "float32")
        (new_cast,) = [op for op in rebuilt.operations if not isinstance(op, keras.Layer)]
        assert (cast.dtype, new_cast.dtype) == ("float16", "float32")


@pytest.mark.parametrize("name", ["adam", "sgd"])
@pytest.mark.parametrize(
    ("source", "target"), [("mixed_float16", "float32"), ("float32", "mixed_float16")]
)
def test_a_training_goes_on_as_after_a_switch_bit_for_bit(name, source, target, xy):
    x, y = xy

    def trained():
        keras.utils.set_random_seed(3)
        model = dense_model(source, optimizer=name, loss="mse", metrics=["mae"])
        model.optimizer.learning_rate = 0.05
        model.fit(x, y, batch_size=8, verbose=0)
        return model

    switched = trained()
    switch_precision(switched, target)
    old = trained()
    before = [bits(v) for v in old.variables + old.optimizer.variables]
    rebuilt = rebuild_precision(old, target)
    assert type(rebuilt.optimizer) is type(switched.optimizer)
    for model in (switched, rebuilt):
        keras.utils.set_random_seed(4)
        model.fit(x, y, batch_size=8, verbose=0)
    ours, theirs = (m.variables + m.optimizer.variables for m in (rebuilt, switched))
    for one, other in zip(ours, theirs, strict=True):
        assert bits(one) == bits(other), one.path
    assert rebuilt.get_metrics_result().keys() == switched.get_metrics_result().keys()
    assert [bits(v) for v in old.variables + old.optimizer.variables] == before


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_moments_in_half_become_float32_with_the_step_count(half, xy):
    model = dense_model_in(half)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(*xy, batch_size=8, verbose=0)
    rebuilt = rebuild_precision(model, "mixed_float16")
    assert isinstance(rebuilt.optimizer, DynamicLossScaleOptimizer)
    inner = rebuilt.optimizer.inner_optimizer
    assert int(inner.iterations) == 4
    for ours, theirs in zip(inner.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(
            ops.convert_to_numpy(ours), ops.convert_to_numpy(theirs).astype(ours.dtype)
        )
    rebuilt.fit(*xy, verbose=0)


def dense_model_in(policy):
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(1, dtype=policy)(inputs))


@pytest.mark.parametrize("target", ["mixed_float16", "float32"])
def test_scale_and_counts_are_carried(target, xy):
    model = dense_model(optimizer="sgd", loss="mse")
    switch_precision(model, "mixed_float16")
    model.fit(*xy, batch_size=8, verbose=0)
    model.optimizer.dynamic_scale.assign(4096.0)
    model.optimizer.skipped_steps.assign(3)
    rebuilt = rebuild_precision(model, target)
    switch_precision(rebuilt, "mixed_float16")
    assert float(rebuilt.optimizer.dynamic_scale) == 4096.0
    assert int(rebuilt.optimizer.skipped_steps) == 3
    assert int(rebuilt.optimizer.step_counter) == 4


def test_islands_and_what_is_frozen_stay(xy):
    model = dense_model()
    pin_float32(model.get_layer("head"))
    model.get_layer("hidden").trainable = False
    rebuilt = rebuild_precision(model, "mixed_float16")
    assert compute_dtypes(rebuilt) == {"hidden": "float16", "head": "float32"}
    assert not rebuilt.get_layer("hidden").trainable and rebuilt.get_layer("head").trainable
    assert switch_precision(rebuilt, "mixed_bfloat16").pinned == ("head",)


def test_a_bert_classifier_is_rebuilt_whole():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
    config = BertConfig(words, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=16)
    with precision_scope("mixed_float16"):
        model = bert_classifier(config, num_classes=2)
    x = model.preprocessor(["a b", "b"])
    rebuilt = rebuild_precision(model, "float32")
    switch_precision(model, "float32")
    assert type(rebuilt) is type(model) and bits(rebuilt(x)) == bits(model(x))


def test_it_draws_no_random_number_and_leaves_the_global_policy():
    model = built("dropout", "float32")
    state = random.getstate()
    rebuild_precision(model, "mixed_float16")
    assert random.getstate() == state
    assert keras.config.dtype_policy().name == "float32"


class TestRefusals:
    @pytest.mark.parametrize("policy", ["float64", "mixed_float8", "", None, 16])
    def test_an_unknown_policy(self, policy):
        with pytest.raises(ValueError, match=r"policy must be one of .*'bfloat16'\. Received"):
            rebuild_precision(dense_model(), policy)

    @pytest.mark.parametrize("model", [None, "model", layers.Dense(1)])
    def test_what_is_no_model(self, model):
        with pytest.raises(TypeError, match=r"model must be a keras\.Model"):
            rebuild_precision(model, "float32")

    def test_a_model_that_is_not_built(self):
        with pytest.raises(ValueError, match="is not built: call it on one batch"):
            rebuild_precision(keras.Sequential([layers.Dense(1)]), "float32")

    def test_a_model_without_a_configuration(self):
        class NoConfig(keras.Model):
            def __init__(self, units, *, activation):
                super().__init__()
                self.body = layers.Dense(units, activation)

            def call(self, x):
                return self.body(x)

            def get_config(self):
                return {}

        model = NoConfig(2, activation="relu")
        model(X)
        with pytest.raises(ValueError, match="cannot be made from its configuration"):
            rebuild_precision(model, "mixed_float16")
        assert set(compute_dtypes(model).values()) == {"float32"}

    def test_a_quantised_layer(self):
        model = dense_model()
        model.get_layer("hidden").quantize("int8")
        with pytest.raises(ValueError, match="Layer 'hidden' is quantised"):
            rebuild_precision(model, "float32")

    @pytest.mark.parametrize(("value", "fits"), [(65504.0, True), (65520.0, False)])
    def test_a_value_that_the_new_variables_cannot_hold(self, value, fits):
        model = dense_model()
        model.get_layer("head").bias.assign([value])
        if fits:
            assert float(rebuild_precision(model, "float16").get_layer("head").bias[0]) == value
            return
        with pytest.raises(ValueError, match=r"'head/bias' holds 6.55e\+04, which float16 cannot"):
            rebuild_precision(model, "float16")

    def test_an_infinity_is_carried_as_it_is(self):
        model = dense_model()
        model.get_layer("head").bias.assign([np.inf])
        assert np.isinf(rebuild_precision(model, "float16").get_layer("head").bias[0])

    @pytest.mark.parametrize(
        ("shapes", "message"),
        [([(2,), (2,)], "2 for 1"), ([(3,)], r"fickle/\S+ \(3,\) for fickle/\S+ \(2,\)")],
    )
    def test_other_variables_in_the_other_precision(self, shapes, message):
        class Fickle(layers.Layer):
            def build(self, shape):
                for one in shapes if self.compute_dtype == "float16" else [(2,)]:
                    self.add_weight(shape=one)

            def call(self, x):
                return x

        inputs = keras.Input((4,))
        model = keras.Model(inputs, Fickle(name="fickle")(inputs))
        with pytest.raises(ValueError, match=f"the model has other variables: {message}"):
            rebuild_precision(model, "mixed_float16")

    def test_optimizers_of_the_models_own(self):
        class Own(keras.Sequential):
            def compile(self, first, second, **kwargs):
                super().compile(**kwargs)
                self.first, self.second = first, second

            def get_compile_config(self):
                return {}

            def compile_from_config(self, config):
                self.compile("sgd", "sgd", loss="mse", optimizer=None)

        model = Own([keras.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "sgd", loss="mse", optimizer=None)
        with pytest.raises(ValueError, match="has optimizers of its own"):
            rebuild_precision(model, "mixed_float16")


def test_a_lambda_is_made_anew_unless_it_needs_names_from_around_it():
    def around(function):
        inputs = keras.Input((4,))
        return keras.Model(inputs, layers.Lambda(function)(inputs))

    np.testing.assert_array_equal(rebuild_precision(around(lambda x: x * 2), "float32")(X), 2 * X)
    with pytest.raises(ValueError, match="cannot be made from its configuration"):
        rebuild_precision(around(lambda x: tf.multiply(x, 2)), "float32")


def test_what_the_user_compiled_with_is_carried(xy):
    def my_loss(y, outputs):
        return ops.mean(ops.abs(ops.subtract(y, outputs)))

    class MyMetric(keras.metrics.MeanSquaredError):
        pass

    model = dense_model(optimizer="sgd", loss=my_loss, metrics=[MyMetric(name="mine"), my_loss])
    model.fit(*xy, verbose=0)
    rebuilt = rebuild_precision(model, "mixed_bfloat16")
    assert set(rebuilt.evaluate(*xy, return_dict=True, verbose=0)) == {"loss", "mine", "my_loss"}


def test_a_schedule_that_cannot_be_made_anew_is_named():
    class Schedule(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.1

    model = dense_model(optimizer=keras.optimizers.SGD(Schedule()), loss="mse")
    with pytest.raises(ValueError, match=r"cannot be made anew.*learning-rate schedules"):
        rebuild_precision(model, "mixed_float16")


def test_a_class_of_the_users_that_is_named_like_one_of_keras_stays_the_users():
    class Dense(layers.Dense):
        def call(self, x, training=None):
            return super().call(x, training=training) * 10.0

    model = keras.Sequential([keras.Input((4,)), Dense(4), layers.Dense(1)])
    rebuilt = rebuild_precision(model, "float32")
    assert bits(rebuilt(X)) == bits(model(X))


def test_two_classes_of_the_users_with_one_name_are_refused():
    def make():
        class Twice(layers.Layer):
            def call(self, x):
                return x * 2

        return Twice()

    model = keras.Sequential([keras.Input((4,)), make(), make()])
    with pytest.raises(ValueError, match="two classes named 'Twice'"):
        rebuild_precision(model, "float32")


def test_vocabularies_are_carried():
    words = keras.Input((2,), dtype="string")
    lookup = layers.StringLookup(vocabulary=["a", "b"])
    model = keras.Model(words, layers.Embedding(4, 3)(lookup(words)))
    rebuilt = rebuild_precision(model, "mixed_float16")
    x = tf.constant([["a", "b"], ["b", "c"]])
    assert rebuilt.get_layer(lookup.name).get_vocabulary() == lookup.get_vocabulary()
    switch_precision(model, "mixed_float16")
    assert bits(rebuilt(x)) == bits(model(x))
