"""What no policy reaches is handled or refused by name; a refusal leaves all as it was."""

from __future__ import annotations

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from precision_bert import compute_dtypes, precision_scope, switch_precision
from precision_bert.policies import SWITCHABLE_POLICIES

HALF_OF = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}
OTHERS = [(a, b) for a in HALF_OF for b in SWITCHABLE_POLICIES if a != b]
X = np.random.RandomState(3).randn(4, 4).astype("float32")


def between(operation, policy="mixed_float16"):
    """Dense, an operation in the Functional graph, Dense."""
    keras.utils.set_random_seed(5)
    with precision_scope(policy):
        inputs = keras.Input((4,))
        hidden = operation(layers.Dense(3, name="first")(inputs))
        return keras.Model(inputs, layers.Dense(2, name="last")(hidden))


def around(layer_class, policy):
    """Dense and a layer of the user's, in a Sequential model."""
    with precision_scope(policy):
        return keras.Sequential(
            [keras.Input((4,)), layers.Dense(3, name="first"), layer_class(name="odd")]
        )


class Constant(layers.Layer):
    def build(self, shape):
        self.factor = ops.cast(0.1, self.compute_dtype)

    def call(self, x):
        return x * self.factor


class NestedConstants(layers.Layer):
    def build(self, shape):
        self.factors = {"all": [np.full(3, 0.1, self.compute_dtype), 1]}

    def call(self, x):
        return x * self.factors["all"][0]


class Name(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.my_dtype = self.compute_dtype

    def call(self, x):
        return tf.cast(x, self.my_dtype)


class TensorFlowDtype(Name):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.my_dtype = tf.as_dtype(self.compute_dtype)


class Policy(Name):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.my_policy = keras.DTypePolicy(self.dtype_policy.name)

    def call(self, x):
        return tf.cast(x, self.my_policy.compute_dtype)


FREEZERS = [Constant, NestedConstants, Name, TensorFlowDtype, Policy]


def assert_unchanged_by(model, act):
    """Runs `act`, which must raise a ValueError; returns its message."""
    policies = [layer.dtype_policy for layer in model._flatten_layers()]
    outputs = ops.convert_to_numpy(model(X)).tobytes()
    with pytest.raises(ValueError) as raised:
        act()
    assert [layer.dtype_policy for layer in model._flatten_layers()] == policies
    assert ops.convert_to_numpy(model(X)).tobytes() == outputs
    return str(raised.value)


class TestCastsInAFunctionalGraph:
    @pytest.mark.parametrize(("source", "target"), OTHERS)
    @pytest.mark.parametrize("cast", [ops.cast, ops.saturate_cast])
    def test_a_half_cast_follows_the_policy(self, cast, source, target):
        model = between(lambda h: cast(h, HALF_OF[source]), source)
        reference = between(lambda h: cast(h, keras.DTypePolicy(target).compute_dtype), target)
        reference.set_weights(model.get_weights())
        report = switch_precision(model, target)
        assert len(report.rebuilt) == 1 and "cast" in report.rebuilt[0]
        assert ops.convert_to_numpy(model(X)).tobytes() == (
            ops.convert_to_numpy(reference(X)).tobytes()
        )

    def test_it_is_half_again_after_a_float32_stage(self):
        model = between(lambda h: ops.cast(h, "float16"))
        before = ops.convert_to_numpy(model(X)).tobytes()
        for policy in ("float32", "mixed_bfloat16", "float32", "mixed_float16"):
            switch_precision(model, policy)
        assert ops.convert_to_numpy(model(X)).tobytes() == before

    def test_a_cast_to_float32_is_what_its_author_wanted(self):
        model = between(lambda h: ops.cast(h, "float32"))
        (cast,) = [op for op in model.operations if not isinstance(op, keras.Layer)]
        for policy in ("float32", "mixed_bfloat16"):
            assert switch_precision(model, policy).rebuilt == ()
            assert cast.dtype == "float32"

    def test_one_in_a_nested_model_is_found(self):
        inner = between(lambda h: ops.cast(h, "float16"))
        inputs = keras.Input((4,))
        assert len(switch_precision(keras.Model(inputs, inner(inputs)), "float32").rebuilt) == 1

    def test_an_integer_cast_is_left_alone(self):
        model = between(lambda h: ops.cast(ops.cast(h, "int32"), "float32"))
        assert switch_precision(model, "float32").rebuilt == ()

    def test_a_failing_switch_puts_it_back(self):
        model = between(lambda h: ops.cast(h, "float16") + np.float16(0.1))
        message = assert_unchanged_by(model, lambda: switch_precision(model, "float32"))
        assert "operation 'add" in message and "constant in float16" in message


class TestConstantsInAFunctionalGraph:
    @pytest.mark.parametrize(
        "constant",
        [ops.full((3,), 0.1, "float16"), np.full(3, 0.1, "float16"), np.float16(0.1)],
        ids=["tensor", "array", "scalar"],
    )
    @pytest.mark.parametrize("target", ["float32", "mixed_bfloat16"])
    def test_a_half_constant_is_refused_by_name_since_its_digits_are_gone(self, constant, target):
        model = between(lambda h: ops.add(h, constant))
        message = assert_unchanged_by(model, lambda: switch_precision(model, target))
        assert "'add" in message and "constant in float16" in message

    def test_one_that_is_given_to_a_layer_is_found_too(self):
        model = between(lambda h: layers.Add(name="sum")([h, ops.ones((1, 3), "float16")]))
        message = assert_unchanged_by(model, lambda: switch_precision(model, "float32"))
        assert "operation 'sum' has a constant in float16" in message

    def test_a_python_number_or_a_float32_constant_is_no_obstacle(self):
        model = between(lambda h: ops.add(h * 0.5, np.full(3, 0.1, "float32")))
        for policy in ("float32", "mixed_bfloat16", "mixed_float16"):
            switch_precision(model, policy)

    def test_a_half_input_is_refused_by_name(self):
        inputs = keras.Input((4,), dtype="float16", name="pixels")
        model = keras.Model(inputs, layers.Dense(2, dtype="mixed_float16")(inputs))
        message = assert_unchanged_by(model, lambda: switch_precision(model, "float32"))
        assert "input 'pixels' is declared as float16" in message
        assert "rebuild_precision(model, 'float32')" in message

    def test_a_half_input_of_the_dtype_that_the_policy_computes_in_is_none(self):
        inputs = keras.Input((4,), dtype="float16")
        model = keras.Model(inputs, layers.Dense(2)(inputs))
        switch_precision(model, "mixed_float16")
        assert set(compute_dtypes(model).values()) == {"float16"}


class TestLayersThatFrozeADtype:
    @pytest.mark.parametrize("target", SWITCHABLE_POLICIES)
    @pytest.mark.parametrize("source", SWITCHABLE_POLICIES)
    @pytest.mark.parametrize("layer_class", FREEZERS)
    def test_one_is_refused_by_name_and_the_model_stays_as_it_was(
        self, layer_class, source, target
    ):
        model = around(layer_class, source)
        if source == target:
            assert switch_precision(model, target).changed == ()
            return
        message = assert_unchanged_by(model, lambda: switch_precision(model, target))
        frozen = keras.DTypePolicy(source).compute_dtype
        assert "odd' keeps " in message and f"in {frozen}" in message
        assert "rebuild_precision" in message

    @pytest.mark.parametrize(("source", "target"), OTHERS)
    def test_a_cast_written_into_a_function_is_seen_by_tracing_it(self, source, target):
        dtype = HALF_OF[source]

        class Hidden(layers.Layer):
            def call(self, x):
                return tf.cast(tf.cast(x, dtype) * 0.5, x.dtype)

        model = around(Hidden, source)
        message = assert_unchanged_by(model, lambda: switch_precision(model, target))
        assert f"odd' has 1 Cast to {dtype}" in message

        with precision_scope(source):
            model = keras.Sequential(
                [
                    keras.Input((4,)),
                    layers.Lambda(lambda x: tf.cast(tf.cast(x, dtype) * 0.5, x.dtype), name="odd"),
                ]
            )
        message = assert_unchanged_by(model, lambda: switch_precision(model, target))
        assert f"odd' has 1 Cast to {dtype}" in message

    @pytest.mark.parametrize("policy", HALF_OF)
    def test_a_layer_that_would_fail_in_its_call_is_named_with_its_error(self, policy):
        constant = tf.constant(0.5)  # float32, whatever the policy

        class Failing(layers.Layer):
            def call(self, x):
                return tf.multiply(x, constant)

        model = around(Failing, "float32")
        message = assert_unchanged_by(model, lambda: switch_precision(model, policy))
        assert "/odd' fails when it is called" in message
        assert keras.config.is_traceback_filtering_enabled()

        class Containing(keras.Model):
            def __init__(self):
                super().__init__()
                self.odd = Failing(name="odd")

            def call(self, x):
                return self.odd(x)

        model = Containing()
        message = assert_unchanged_by(model, lambda: switch_precision(model, policy))
        assert "odd' fails when it is called" in message

    def test_one_that_is_kept_in_float32_is_no_obstacle(self):
        constant = tf.constant(0.5)

        class Failing(layers.Layer):
            def call(self, x):
                return tf.multiply(x, constant)

        model = around(Failing, "float32")
        report = switch_precision(model, "mixed_float16", keep_float32=[Failing])
        assert report.pinned == (f"{model.name}/odd",)
        assert np.isfinite(model(X)).all()

    def test_a_model_that_cannot_be_traced_is_switched_all_the_same(self):
        class Eager(layers.Layer):
            def call(self, x):
                return ops.convert_to_tensor(np.asarray(x) * 0.5, x.dtype)

            def compute_output_spec(self, x):
                return keras.KerasTensor(x.shape, self.compute_dtype)

        inputs = keras.Input((4,))
        model = keras.Model(inputs, Eager(name="odd")(inputs))
        switch_precision(model, "mixed_float16")
        assert model(X).dtype == "float16"

    @pytest.mark.parametrize("source", SWITCHABLE_POLICIES)
    def test_a_float32_constant_that_its_author_wanted_is_no_obstacle(self, source):
        class Deliberate(layers.Layer):
            def build(self, shape):
                self.factor = tf.constant(0.1)

            def call(self, x):
                return x * tf.cast(self.factor, x.dtype)

        model = around(Deliberate, source)
        for policy in SWITCHABLE_POLICIES:
            switch_precision(model, policy)
            assert np.isfinite(model(X)).all()

    def test_comparing_with_a_new_layer_draws_no_random_number(self):
        model = around(Name, "float32")
        state = random.getstate()
        with pytest.raises(ValueError):
            switch_precision(model, "mixed_float16")
        assert random.getstate() == state

    def test_the_attributes_of_the_model_itself_count(self):
        class Own(keras.Model):
            def __init__(self):
                super().__init__(dtype="mixed_float16")
                self.body = layers.Dense(2, dtype="mixed_float16")
                self.cast_to = self.compute_dtype

            def call(self, x):
                return tf.cast(self.body(x), self.cast_to)

        model = Own()
        message = assert_unchanged_by(model, lambda: switch_precision(model, "float32"))
        assert "keeps 'cast_to' in float16" in message
