"""What users do beside a switch: policies set by hand, functions traced, tensors kept."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from models import dense_model

import precision_bert as pb
from precision_bert import compute_dtypes, pin_float32, precision_scope, switch_precision


class TestPoliciesSetByHand:
    @pytest.mark.parametrize("target", ["float32", "mixed_float16"])
    def test_a_pinned_layer_that_was_set_to_half_is_set_back(self, target):
        model = dense_model(optimizer="adam", loss="mse")
        pin_float32(model.get_layer("head"))
        model.get_layer("head").dtype_policy = "mixed_float16"
        report = switch_precision(model, target)
        assert report.pinned == ("head",) and compute_dtypes(model)["head"] == "float32"

    def test_functions_that_were_traced_before_a_pin_are_renewed(self, xy):
        model = dense_model("mixed_float16", optimizer="sgd", loss="mse")
        assert model.predict(xy[0], verbose=0).dtype == np.float16
        pin_float32(model.get_layer("head"))
        assert switch_precision(model, "mixed_float16").changed == ()
        assert model.predict(xy[0], verbose=0).dtype == np.float32

    def test_functions_that_were_traced_before_policies_were_set_are_renewed(self, xy):
        model = dense_model(optimizer="sgd", loss="mse")
        model.predict(xy[0], verbose=0)
        for layer in model.layers:
            layer.dtype_policy = "mixed_bfloat16"
        switch_precision(model, "mixed_bfloat16")
        assert model.predict(xy[0], verbose=0).dtype == "bfloat16"

    def test_a_second_switch_to_the_same_policy_renews_nothing(self, xy):
        model = dense_model(optimizer="sgd", loss="mse")
        switch_precision(model, "mixed_float16")
        model.fit(*xy, verbose=0)
        function = model.train_function
        switch_precision(model, "mixed_float16")
        assert model.train_function is function

    def test_a_head_set_to_float32_after_a_switch_is_an_island(self):
        model = dense_model()
        switch_precision(model, "mixed_float16")
        model.get_layer("head").dtype_policy = "float32"
        assert switch_precision(model, "mixed_bfloat16").pinned == ("head",)

    def test_a_policy_map_assigned_after_a_switch_counts(self):
        inputs = keras.Input((4,))
        policies = keras.dtype_policies.DTypePolicyMap("mixed_float16")
        layer = layers.Dense(2, dtype=policies, name="d")
        model = keras.Model(inputs, layer(inputs))
        switch_precision(model, "float32")
        layer._dtype_policy = keras.dtype_policies.DTypePolicyMap(
            "float32", {"d": keras.DTypePolicy("mixed_bfloat16")}
        )
        switch_precision(model, "mixed_float16")
        assert layer.compute_dtype == "bfloat16"


class TestPinning:
    def test_a_quantised_layer_is_refused_and_stays_as_it_was(self):
        model = dense_model()
        hidden = model.get_layer("hidden")
        hidden.quantize("int8")
        with pytest.raises(ValueError, match="'hidden' is quantised"):
            pin_float32(model.get_layer("head"), hidden)
        assert hidden.quantization_mode == "int8"

    def test_integer_layers_inside_are_left_alone(self):
        hashing = layers.Hashing(4)
        model = keras.Sequential([keras.Input((2,), dtype="int64"), hashing])
        pin_float32(model)
        assert hashing.dtype_policy.name == "int64"

    def test_a_layer_under_time_distributed_takes_its_wrapper_along(self):
        inputs = keras.Input((3, 4))
        wrapped = layers.TimeDistributed(layers.Dense(2, name="inside"), name="outside")
        model = keras.Model(inputs, wrapped(inputs))
        switch_precision(model, "mixed_float16", keep_float32=["*/inside"])
        assert model(np.ones((1, 3, 4))).dtype == "float32"


class Block(layers.Layer):
    """Gives one sublayer its policy, and the other none."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.body = layers.Dense(4, dtype=self.dtype_policy)
        self.gate = layers.Dense(4)

    def build(self, shape):
        self.body.build(shape)
        self.gate.build(shape)

    def call(self, x):
        return self.body(x) * ops.cast(ops.sigmoid(self.gate(x)), self.compute_dtype)


class TestFalseIslands:
    """A sublayer that was given no dtype is none, wherever its model comes from."""

    def model(self, policy="float32"):
        with precision_scope(policy):
            inputs = keras.Input((4,))
            return keras.Model(inputs, layers.Dense(1)(Block()(inputs)))

    def test_in_a_live_model(self):
        assert switch_precision(self.model(), "mixed_float16").pinned == ()

    def test_in_a_rebuilt_one(self):
        rebuilt = pb.rebuild_precision(self.model(), "float32")
        assert switch_precision(rebuilt, "mixed_float16").pinned == ()

    @pytest.mark.parametrize("load", [pb.load_model, keras.saving.load_model])
    def test_in_a_loaded_one(self, load, tmp_path):
        pb.save_model(self.model(), tmp_path / "model.keras")
        loaded = load(tmp_path / "model.keras", custom_objects={"Block": Block})
        assert switch_precision(loaded, "mixed_float16").pinned == ()

    def test_in_the_stages_of_a_training(self, xy):
        model = self.model()
        model.compile("sgd", "mse")
        record = pb.two_stage_fit(model, *xy, epochs=2, switch_epoch=1, verbose=0)
        assert set(record.stages[0].computes_in["multiplies"]) == {"float16"}

    def test_in_a_mixed_model_that_keras_saved(self, tmp_path):
        self.model("mixed_float16").save(tmp_path / "model.keras")
        loaded = pb.load_model(tmp_path / "model.keras", custom_objects={"Block": Block})
        assert set(compute_dtypes(loaded).values()) == {"float16"}
        assert switch_precision(loaded, "mixed_bfloat16").pinned == ()


def test_a_subclassed_head_in_float32_on_a_mixed_body_is_an_island():
    class Head(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = layers.Dense(2, dtype="float32")

        def call(self, x):
            return self.dense(x)

    inputs = keras.Input((4,))
    hidden = layers.Dense(3, dtype="mixed_float16")(inputs)
    hidden = layers.Activation("relu", dtype="float32")(hidden)
    model = keras.Model(inputs, Head(dtype="float32", name="odd")(hidden))
    x = np.random.RandomState(0).randn(3, 4).astype("float32")
    before = ops.convert_to_numpy(model(x)).tobytes()
    assert "odd" in switch_precision(model, "mixed_float16").pinned
    assert ops.convert_to_numpy(model(x)).tobytes() == before


class TestFunctionsOfTheUsersOwn:
    @pytest.mark.parametrize(
        ("low", "high"), [("float32", "mixed_float16"), ("mixed_float16", "float32")]
    )
    def test_a_train_step_under_tf_function_runs_in_the_new_precision(self, low, high, xy):
        class Own(keras.Sequential):
            @tf.function
            def train_step(self, data):
                return super(Own, self).train_step(data)

        model = Own([keras.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        record = pb.two_stage_fit(
            model, *xy, epochs=2, switch_epoch=1, low=low, high=high, verbose=0
        )
        for stage in record.stages:
            dtype = keras.DTypePolicy(stage.policy).compute_dtype
            assert set(stage.computes_in["multiplies"]) == {dtype}

    def test_a_call_under_tf_function_runs_in_the_new_precision(self):
        class Own(layers.Layer):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.table = layers.Embedding(5, 4)

            @tf.function
            def call(self, ids):
                return self.table(ids)

        inputs = keras.Input((3,), dtype="int32")
        model = keras.Model(inputs, Own()(inputs))
        ids = np.array([[1, 2, 3]])
        assert model(ids).dtype == "float32"
        switch_precision(model, "mixed_bfloat16")
        assert model(ids).dtype == "bfloat16"

    def test_a_make_train_function_without_force_is_renewed_too(self, xy):
        class Own(keras.Sequential):
            def make_train_function(self):
                if self.train_function is None:
                    super().make_train_function()
                return self.train_function

        model = Own([keras.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        model.make_train_function()
        switch_precision(model, "mixed_float16")
        assert model.train_function is not None

    def test_optimizers_beside_the_models_own_are_warned_of(self):
        class Own(keras.Sequential):
            def compile(self, second, **kwargs):
                super().compile(**kwargs)
                self.second = second

        model = Own([keras.Input((4,)), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(), optimizer="sgd", loss="mse")
        with pytest.warns(RuntimeWarning, match="has other optimizers than its own, second"):
            switch_precision(model, "mixed_float16")


class Remembering(layers.Layer):
    """Keeps its last attention scores, as Transformer tutorials do."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, 4)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        out, self.last_scores = self.attention(x, x, return_attention_scores=True)
        return out


class TestWhatACallLeavesBehind:
    def model(self):
        inputs = keras.Input((3, 4))
        outputs = layers.Dense(1)(layers.Flatten()(Remembering(name="remembering")(inputs)))
        return keras.Model(inputs, outputs)

    def test_it_is_no_obstacle_to_a_switch(self):
        model, x = self.model(), np.ones((2, 3, 4), "float32")
        switch_precision(model, "mixed_float16")
        model(x)
        assert model.get_layer("remembering").last_scores.dtype == "float16"
        switch_precision(model, "float32")
        model.compile("sgd", "mse")
        pb.two_stage_fit(model, x, np.ones((2, 1)), epochs=2, switch_epoch=1, verbose=0)

    def test_an_audit_leaves_it_as_it_was(self):
        model, x = self.model(), np.ones((2, 3, 4), "float32")
        model(x)
        scores = model.get_layer("remembering").last_scores
        pb.audit_precision(model, "train")
        assert model.get_layer("remembering").last_scores is scores


class TestNoFalseRefusal:
    @pytest.mark.parametrize("born", ["float32", "mixed_float16"])
    @pytest.mark.parametrize(
        "act",
        [
            lambda h: h * ops.sqrt(8.0),
            lambda h: h + tf.constant(np.linspace(0, 1, 24).reshape(3, 8), "float32"),
            lambda h: ops.where(ops.greater(h, 0), h, tf.constant(0.0)),
        ],
        ids=["scale", "positions", "where"],
    )
    def test_of_float32_constants_in_a_graph_that_was_wired_by_hand(self, act, born):
        with precision_scope(born):
            ids = keras.Input((3,), dtype="int32")
            model = keras.Model(ids, layers.Dense(1)(act(layers.Embedding(10, 8)(ids))))
        for policy in ("mixed_float16", "float32", "mixed_float16"):
            switch_precision(model, policy)

    @pytest.mark.parametrize("name", ["float16", "bfloat16"])
    def test_of_a_layer_that_is_named_like_a_dtype(self, name):
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1, name=name)], name=name)
        for policy in ("mixed_bfloat16", "mixed_float16", "float32"):
            switch_precision(model, policy)

    def test_of_a_dtype_that_a_layer_keeps_whatever_its_policy(self):
        class Cached(layers.Layer):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.cache_dtype = "bfloat16"

            def call(self, x):
                return x * 2

        model = keras.Sequential([keras.Input((4,)), Cached()])
        for policy in ("float32", "mixed_float16", "float32"):
            switch_precision(model, policy)


class TestCodeOfTheUsersOwn:
    def refusal(self, model, policy="mixed_float16"):
        before = compute_dtypes(model)
        with pytest.raises(ValueError, match="cannot be switched") as raised:
            switch_precision(model, policy)
        assert compute_dtypes(model) == before
        return str(raised.value)

    def test_in_training_only_is_seen(self):
        class Noise(layers.Layer):
            def call(self, x, training=False):
                return tf.add(x, tf.random.normal(tf.shape(x))) if training else x

        model = keras.Sequential([keras.Input((4,)), Noise(name="noise")])
        assert "noise' fails when it is called" in self.refusal(model)

    def test_behind_integer_inputs_of_a_subclassed_model_is_seen(self):
        class Own(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = layers.Dense(4, name="dense")

            def call(self, ids):
                table = tf.ones((5, 4))
                return tf.multiply(self.dense(tf.gather(table, ids)), tf.constant(2.0))

        model = Own()
        model(np.array([[1, 2]]))
        assert "fails when it is called" in self.refusal(model)

    def test_in_an_activation_is_seen(self):
        def doubled(x):
            return tf.multiply(x, tf.constant(2.0))

        model = keras.Sequential([keras.Input((4,)), layers.Dense(2, doubled, name="odd")])
        assert "odd' fails when it is called" in self.refusal(model)

    def test_in_the_call_of_a_functional_subclass_is_seen(self):
        class Own(keras.Model):
            def call(self, x):
                return tf.multiply(super().call(x), tf.constant(2.0))

        inputs = keras.Input((4,))
        model = Own(inputs, layers.Dense(2)(inputs))
        assert "fails when it is called" in self.refusal(model)

    def test_that_cannot_be_traced_is_said(self):
        class Own(keras.Model):
            def __init__(self):
                super().__init__(name="own")
                self.dense = layers.Dense(1, name="dense")

            def call(self, x):
                return self.dense(x)

        report = switch_precision(Own(), "mixed_float16")
        assert report.untraced == ("own",) and "not traced own" in str(report)
