"""Layers that stay in float32: their author's, the user's, and none by mistake."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest
from keras import layers, ops
from models import dense_model

from precision_bert import (
    compute_dtypes,
    pin_float32,
    precision_scope,
    switch_precision,
    unpin_float32,
)


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

    @pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
    def test_unpin_float32_lets_a_layer_follow_again(self, policy):
        model = dense_model()
        head = model.get_layer("head")
        pin_float32(head)
        switch_precision(model, policy)
        unpin_float32(head)
        assert head.compute_dtype == "float32"  # until the next switch
        assert switch_precision(model, policy).changed == (head.path,)
        assert head.compute_dtype == keras.DTypePolicy(policy).compute_dtype

    def test_unpin_float32_refuses_what_is_no_layer(self):
        with pytest.raises(TypeError, match="takes Keras layers"):
            unpin_float32("head")


def attention_model(policy="float32"):
    with precision_scope(policy):
        inputs = keras.Input((5, 8))
        attended = layers.MultiHeadAttention(2, 4, dropout=0.1, name="attention")(inputs, inputs)
        return keras.Model(inputs, layers.Dense(2, name="head")(attended))


class TestKeepFloat32:
    @pytest.mark.parametrize("born", ["float32", "mixed_float16", "mixed_bfloat16"])
    @pytest.mark.parametrize(
        "wanted",
        [lambda softmax: layers.Softmax, "attention/{}".format, "*/softmax*".format, "{}".format],
        ids=["class", "path", "pattern", "name"],
    )
    def test_a_layer_may_be_named_in_each_way(self, wanted, born):
        model = attention_model(born)
        # Keras numbers the names that it gives itself.
        softmax = model.get_layer("attention")._softmax.name
        report = switch_precision(model, "mixed_float16", keep_float32=[wanted(softmax)])
        assert report.pinned == (f"attention/{softmax}",)
        dtypes = compute_dtypes(model)
        assert [path for path in dtypes if dtypes[path] == "float32"] == [f"attention/{softmax}"]

    def test_a_layer_object_may_be_given(self):
        model = attention_model()
        report = switch_precision(model, "mixed_float16", keep_float32=[model.get_layer("head")])
        assert report.pinned == ("head",)

    def test_the_softmax_of_attention_then_is_computed_in_float32(self):
        model = attention_model()
        attention = model.get_layer("attention")
        seen = []
        softmax = attention._softmax
        softmax_call = softmax.call
        softmax.call = lambda x, mask=None: seen.append(x.dtype.name) or softmax_call(x, mask)
        x = np.random.RandomState(1).randn(2, 5, 8).astype("float32")
        switch_precision(model, "mixed_float16")
        seen.clear()  # a switch traces what runs code of the user's own, as this lambda
        model(x)
        assert seen == ["float16"]
        switch_precision(model, "mixed_float16", keep_float32=[layers.Softmax])
        seen.clear()
        assert model(x).dtype == "float16" and seen == ["float32"]

    def test_it_holds_for_later_switches_too(self):
        model = attention_model()
        switch_precision(model, "mixed_float16", keep_float32=["head"])
        for policy in ("float32", "mixed_bfloat16", "mixed_float16"):
            assert switch_precision(model, policy).pinned == ("head",)

    def test_functions_are_renewed_when_only_an_island_changes(self):
        model = attention_model("mixed_float16")
        x = np.random.RandomState(1).randn(2, 5, 8).astype("float32")
        model.predict(x, verbose=0)
        switch_precision(model, "mixed_float16", keep_float32=["head"])
        assert model.predict(x, verbose=0).dtype == np.float32

    def test_a_failing_switch_pins_nothing(self):
        inputs = keras.Input((4,))
        hidden = ops.add(layers.Dense(3)(inputs), np.float16(0.1))
        model = keras.Model(inputs, layers.Dense(2, name="head")(hidden))
        with pytest.raises(ValueError, match="has a constant in float16"):
            switch_precision(model, "mixed_bfloat16", keep_float32=["head"])
        assert switch_precision(model, "mixed_float16").pinned == ()

    @pytest.mark.parametrize("wanted", ["sofmax", layers.LSTM, layers.Dense(2)])
    def test_what_names_no_layer_is_an_error_that_lists_them(self, wanted):
        model = attention_model()
        with pytest.raises(ValueError, match=r"names no layer of the model.*attention/softmax"):
            switch_precision(model, "mixed_float16", keep_float32=[wanted])
        assert set(compute_dtypes(model).values()) == {"float32"}

    @pytest.mark.parametrize("wanted", ["softmax", layers.Softmax, layers.Dense(1)])
    def test_what_is_no_list_is_an_error(self, wanted):
        with pytest.raises(TypeError, match="keep_float32 must be a list"):
            switch_precision(attention_model(), "mixed_float16", keep_float32=wanted)

    @pytest.mark.parametrize("wanted", [3, None, int, keras.Model.fit])
    def test_what_can_name_no_layer_is_an_error(self, wanted):
        with pytest.raises(TypeError, match="keep_float32 takes layers"):
            switch_precision(attention_model(), "mixed_float16", keep_float32=[wanted])


class TestPolicyMaps:
    """A `DTypePolicyMap` is its author's word on single layers."""

    def model(self, **policies):
        policy_map = keras.dtype_policies.DTypePolicyMap(
            "mixed_float16", {path: keras.DTypePolicy(name) for path, name in policies.items()}
        )
        inputs = keras.Input((4,))
        hidden = layers.Dense(3, dtype=policy_map, name="a")(inputs)
        hidden = layers.Dense(3, dtype=policy_map, name="b")(hidden)
        return keras.Model(inputs, layers.Dense(2, dtype=policy_map, name="c")(hidden)), policy_map

    def test_each_layer_keeps_what_its_map_says_in_every_half_precision_stage(self):
        model, _ = self.model(b="mixed_bfloat16", c="float32")
        for _ in range(2):
            switch_precision(model, "float32")
            assert set(compute_dtypes(model).values()) == {"float32"}
            switch_precision(model, "mixed_float16")
            assert compute_dtypes(model) == {"a": "float16", "b": "bfloat16", "c": "float32"}
            switch_precision(model, "mixed_bfloat16")
            assert compute_dtypes(model) == {"a": "bfloat16", "b": "bfloat16", "c": "float32"}

    def test_the_map_of_the_user_is_not_written_to(self):
        model, policy_map = self.model(b="mixed_bfloat16")
        before = {path: policy.name for path, policy in policy_map.items()}
        for policy in ("float32", "mixed_bfloat16"):
            switch_precision(model, policy)
        assert {path: policy.name for path, policy in policy_map.items()} == before
        assert policy_map.default_policy.name == "mixed_float16"

    def test_a_map_without_a_default_keeps_its_policies_names(self):
        policy_map = keras.dtype_policies.DTypePolicyMap(
            policy_map={"b": keras.DTypePolicy("mixed_float16")}
        )
        inputs = keras.Input((4,))
        hidden = layers.Dense(3, dtype=policy_map, name="a")(inputs)
        model = keras.Model(inputs, layers.Dense(2, dtype=policy_map, name="b")(hidden))
        switch_precision(model, "float32")
        assert policy_map["b"].name == "mixed_float16"
        assert set(compute_dtypes(model).values()) == {"float32"}

    def test_a_saved_model_comes_back_with_its_map(self, tmp_path):
        model, _ = self.model(b="mixed_bfloat16")
        switch_precision(model, "mixed_float16")
        model.save(tmp_path / "model.keras")
        again = keras.models.load_model(tmp_path / "model.keras")
        assert compute_dtypes(again) == compute_dtypes(model)
