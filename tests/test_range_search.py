"""What the search for the first non-finite tensor promises."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
from keras import layers, ops

import precision_bert as pb
from precision_bert.range_causes import CAUSES, REMEDIES
from precision_bert.range_search import RangeSearch, search_range


class MaskedSoftmax(layers.Layer):
    """A softmax as many write it: what is masked gets a large negative number added."""

    def __init__(self, constant=-1e9, **kwargs):
        super().__init__(**kwargs)
        self.constant = constant

    def call(self, x):
        return ops.softmax(ops.where(x > 0, x, ops.cast(self.constant, x.dtype)))


class Standardize(layers.Layer):
    """A normalisation as many write it, in the layer's own dtype."""

    def __init__(self, epsilon=1e-8, **kwargs):
        super().__init__(**kwargs)
        self.epsilon = epsilon

    def call(self, x):
        centred = x - ops.mean(x, -1, keepdims=True)
        variance = ops.mean(centred * centred, -1, keepdims=True)
        return centred / ops.sqrt(variance + ops.cast(self.epsilon, x.dtype))


def tanh_gelu(x):
    return keras.activations.gelu(x, approximate=True)


def net(*body, policy="mixed_float16", loss="mse", units=4):
    """A model with the layers of `body` between two Dense layers, compiled."""
    first = layers.Dense(units, kernel_initializer="ones", name="first")
    last = layers.Dense(1, dtype="float32", name="last")
    model = keras.Sequential([keras.Input((4,)), first, *body, last], name="net")
    model.compile(keras.optimizers.SGD(0.01), loss)
    pb.switch_precision(model, policy, keep_float32=["last"])
    return model


X = np.linspace(0.1, 1.0, 32, dtype="float32").reshape(8, 4)
Y = X[:, :1].copy()


def test_a_step_that_is_finite_has_no_finding():
    finding = search_range(net(policy="float32"), (X, Y))
    assert (finding.cause, finding.layer, finding.is_healthy) == ("none", "", True)
    assert np.isfinite(finding.loss)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("policy", ["mixed_float16", "float32"])
def test_an_input_that_is_not_finite_is_named(value, policy):
    x = X.copy()
    x[3, 2] = value
    finding = search_range(net(policy=policy), (x, Y))
    assert (finding.cause, finding.tensor, finding.direction) == ("input", "x", "forward")


def test_an_input_beyond_halfs_range_is_told_from_one_that_is_not_finite():
    finding = search_range(net(), (X * 1e6, Y))
    assert (finding.cause, finding.dtype) == ("input range", "float16")
    assert "1e+06" in finding.seen
    assert search_range(net(policy="mixed_bfloat16"), (X * 1e6, Y)).cause == "none"


def test_of_several_inputs_the_one_is_named_that_is_not_finite():
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    model = keras.Model({"a": a, "b": b}, layers.Dense(1)(layers.Add()([a, b])))
    model.compile("sgd", "mse")
    finding = search_range(model, ({"a": X, "b": X * np.nan}, Y))
    assert (finding.cause, finding.tensor) == ("input", "x['b']")


@pytest.mark.parametrize("part", ["y", "sample_weight"])
def test_a_label_or_a_weight_that_is_not_finite_is_named(part):
    batch = {"x": X, "y": Y.copy(), "sample_weight": np.ones(8, "float32")}
    batch[part][2] = np.nan
    finding = search_range(net(), tuple(batch.values()))
    assert (finding.cause, finding.tensor) == ("labels", part)


def test_a_label_that_the_loss_casts_to_half_is_told_from_a_bad_label():
    def in_half(y, y_pred):
        return ops.mean(ops.abs(ops.cast(y, "float16") - ops.cast(y_pred, "float16")))

    finding = search_range(net(loss=in_half), (X, Y * 1e6))
    assert (finding.cause, finding.layer) == ("label cast", "(loss)")


def test_a_loss_that_is_not_finite_on_finite_outputs_is_the_losss_fault():
    def log_of_zero(y, y_pred):
        return -ops.mean(ops.log(ops.relu(-ops.abs(y_pred))))

    finding = search_range(net(loss=log_of_zero), (X, Y))
    assert (finding.cause, finding.layer, finding.direction) == ("loss", "(loss)", "forward")
    assert finding.loss == np.inf


def test_the_mask_constant_is_found_where_a_whole_row_is_masked():
    model = net(MaskedSoftmax(name="masked"))
    finding = search_range(model, (-X, Y))
    assert (finding.cause, finding.layer) == ("mask constant", "net/masked")
    assert np.isnan(finding.loss)
    assert search_range(net(MaskedSoftmax(-3e4)), (-X, Y)).is_healthy


def test_a_mask_of_minus_infinity_that_does_no_harm_is_no_finding():
    partly = X * np.array([1, -1, 1, -1], "float32")
    model = net(MaskedSoftmax(), layers.Dense(4))
    model.get_layer("first").kernel.assign(np.eye(4))
    assert search_range(model, (partly, Y)).is_healthy


def test_an_epsilon_that_vanishes_in_half_is_found_at_zero_variance():
    same = np.ones((8, 4), "float32")
    finding = search_range(net(Standardize(name="norm")), (same, Y))
    assert (finding.cause, finding.layer) == ("epsilon", "net/norm")
    assert "1e-08" in finding.seen
    assert search_range(net(Standardize(1e-3)), (same, Y)).is_healthy


@pytest.mark.parametrize("value", [300.0, -300.0])
def test_the_gradient_of_the_tanh_gelu_is_found_though_the_loss_is_finite(value):
    model = net(layers.Dense(4, tanh_gelu, name="ffn"))
    model.get_layer("ffn").bias.assign([value, 0, 0, 0])
    finding = search_range(model, (X, Y))
    assert (finding.cause, finding.layer, finding.direction) == (
        "GELU gradient",
        "net/ffn",
        "backward",
    )
    assert np.isfinite(finding.loss)


def test_the_remedy_it_offers_mends_the_gelu_gradient():
    model = net(layers.Dense(4, tanh_gelu, name="ffn"))
    model.get_layer("ffn").bias.assign([300, 0, 0, 0])
    finding = search_range(model, (X, Y))
    assert f"keep_float32=['{finding.layer}']" in finding.remedy
    pb.switch_precision(model, "mixed_float16", keep_float32=[finding.layer])
    assert search_range(model, (X, Y)).is_healthy


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_the_gelu_is_no_finding_where_its_range_suffices(policy):
    model = net(layers.Dense(4, tanh_gelu, name="ffn"), policy=policy)
    model.get_layer("ffn").bias.assign([300, 0, 0, 0])
    assert search_range(model, (X, Y)).cause == "none"


def test_an_activation_beyond_halfs_range_is_found_in_its_layer():
    model = net(layers.Dense(4, name="wide"))
    model.get_layer("wide").kernel.assign(np.full((4, 4), 4e4))
    finding = search_range(model, (X, Y))
    assert (finding.cause, finding.layer, finding.direction) == ("overflow", "net/wide", "forward")


def test_a_weight_beyond_halfs_range_is_named():
    model = net()
    model.get_layer("first").bias.assign([1e6, 0, 0, 0])
    finding = search_range(model, (X, Y))
    assert (finding.cause, finding.layer) == ("overflow", "net/first")
    assert model.get_layer("first").bias.path in finding.seen


def test_a_weight_that_is_not_finite_is_named():
    model = net()
    model.get_layer("first").bias.assign([np.nan, 0, 0, 0])
    finding = search_range(model, (X, Y))
    assert (finding.cause, finding.tensor) == ("weights", model.get_layer("first").bias.path)


def test_a_gradient_that_only_the_scale_overflows_is_healthy():
    model = net()
    model.optimizer.build(model.trainable_variables)
    model.optimizer.dynamic_scale.assign(2.0**24)
    finding = search_range(model, (X * 100, Y))
    assert (finding.cause, finding.is_healthy) == ("loss scale", True)
    model.optimizer.dynamic_scale.assign(1.0)
    assert search_range(model, (X * 100, Y)).cause == "none"


def test_an_overflow_in_float32_is_found_too():
    model = net(layers.Lambda(lambda x: ops.exp(x * 1000), name="exp"), policy="float32")
    finding = search_range(model, (X, Y))
    assert (finding.cause, finding.layer, finding.dtype) == ("overflow", "net/exp", "float32")


def trained(search):
    keras.utils.set_random_seed(7)
    model = net(layers.Dense(8, "gelu"), layers.BatchNormalization(), layers.Dropout(0.5), units=8)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    pb.switch_precision(model, "mixed_float16")
    model.fit(X, Y, batch_size=4, verbose=0, shuffle=False)
    function = model.train_function
    if search:
        before = [v.numpy().tobytes() for v in (*model.variables, *model.metrics_variables)]
        slots = [v.numpy().tobytes() for v in model.optimizer.variables]
        losses = len(model.losses)
        RangeSearch(model)((X[:4], Y[:4]))
        assert before == [v.numpy().tobytes() for v in (*model.variables, *model.metrics_variables)]
        assert slots == [v.numpy().tobytes() for v in model.optimizer.variables]
        assert losses == len(model.losses)
        assert model.train_function is function
    history = model.fit(X, Y, batch_size=4, epochs=2, verbose=0, shuffle=False).history
    return history, [v.numpy().tobytes() for v in (*model.variables, *model.optimizer.variables)]


def test_a_search_changes_nothing_of_the_model_nor_of_its_further_training():
    assert trained(search=True) == trained(search=False)


def test_a_search_before_the_first_step_leaves_the_training_as_it_is():
    def run(search):
        keras.utils.set_random_seed(3)
        model = net(layers.Dropout(0.5))
        if search:
            search_range(model, (X, Y))
        return model.fit(X, Y, batch_size=4, epochs=2, verbose=0, shuffle=False).history

    assert run(True) == run(False)


def test_the_finding_says_all_in_one_text_and_is_frozen():
    finding = search_range(net(), (X * np.nan, Y))
    text = str(finding)
    assert "Cause: input" in text and "x holds NaN" in text and "Remedy: Drop or mend" in text
    with pytest.raises(dataclasses.FrozenInstanceError):
        finding.cause = "none"


def test_every_cause_has_a_remedy():
    assert set(REMEDIES) == set(CAUSES)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"model must be a keras\.Model"):
        search_range(layers.Dense(1), (X, Y))


def test_a_model_without_a_loss_is_refused():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    with pytest.raises(ValueError, match="is not compiled, so it has no loss"):
        search_range(model, (X, Y))
