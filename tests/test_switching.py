"""What `switch_precision` promises of any model."""

from __future__ import annotations

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from models import MODELS, dense_model

from precision_bert import compute_dtypes, precision_scope, switch_precision
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


def test_a_model_with_lora_switches_like_one_that_was_built_in_the_target_policy():
    def with_lora(policy):
        keras.utils.set_random_seed(4)
        model = dense_model(policy)
        model.get_layer("hidden").enable_lora(2)
        return model

    x = np.random.RandomState(2).randn(4, 4).astype("float32")
    switched = with_lora("float32")
    for layer_weight in switched.trainable_variables:
        layer_weight.assign(layer_weight + 0.1)  # LoRA's second matrix begins at zero
    for policy in ("mixed_float16", "mixed_bfloat16", "float32"):
        reference = with_lora(policy)
        reference.set_weights(switched.get_weights())
        switch_precision(switched, policy)
        assert bits(switched(x)) == bits(reference(x))


class TestSharedLayers:
    """A backbone in two models: both compute in its precision, each has functions of its own."""

    def two_models(self):
        backbone = dense_model()
        models = []
        for name in ("one", "two"):
            inputs = keras.Input((4,))
            models.append(keras.Model(inputs, layers.Dense(1, name=name)(backbone(inputs))))
            models[-1].compile("sgd", "mse")
        return models

    def test_switching_the_second_too_makes_all_of_it_right(self, xy):
        one, two = self.two_models()
        two.predict(xy[0], verbose=0)
        switch_precision(one, "mixed_float16")
        report = switch_precision(two, "mixed_float16")
        assert report.pinned == () and report.loss_scaling == "added"
        assert set(compute_dtypes(two).values()) == {"float16"}
        assert two.predict(xy[0], verbose=0).dtype == np.float16

    def test_they_may_be_switched_back_in_any_order(self):
        one, two = self.two_models()
        for model in (one, two, two, one):
            switch_precision(model, "mixed_float16")
        for model in (two, one):
            switch_precision(model, "float32")
            assert set(compute_dtypes(model).values()) == {"float32"}
        assert not isinstance(two.optimizer, keras.optimizers.LossScaleOptimizer)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_switch_between_two_batches_of_a_running_fit_holds_from_the_next_batch_on(after, xy):
    x, y = xy

    class Switch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == after:
                switch_precision(self.model, "mixed_float16")

    def compiled():
        keras.utils.set_random_seed(5)
        return dense_model(optimizer=keras.optimizers.Adam(0.1), loss="mse")

    fitted, stepped = compiled(), compiled()
    fitted.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0, callbacks=[Switch()])
    for batch in range(4):
        stepped.train_on_batch(x[8 * batch : 8 * batch + 8], y[8 * batch : 8 * batch + 8])
        if batch == after:
            switch_precision(stepped, "mixed_float16")
    for one, other in zip(fitted.variables, stepped.variables, strict=True):
        assert bits(one) == bits(other)
    assert int(fitted.optimizer.inner_optimizer.iterations) == 4
    assert set(compute_dtypes(fitted).values()) == {"float16"}


def alive():
    """How many objects of each kind there are."""
    gc.collect()
    objects = gc.get_objects()
    kinds = {
        "tensors": tf.Tensor,
        "variables": (tf.Variable, keras.Variable),
        "layers": keras.Layer,
        "optimizers": keras.Optimizer,
    }
    counts = {name: sum(isinstance(o, kind) for o in objects) for name, kind in kinds.items()}
    return counts | {"functions": sum(type(o).__name__ == "FuncGraph" for o in objects)}


def there_and_back(model):
    for policy in ("mixed_float16", "float32"):
        switch_precision(model, policy)
        yield


def test_switching_a_hundred_times_leaves_nothing_behind(xy):
    model = dense_model(optimizer="adam", loss="mse")
    model.train_on_batch(*xy)
    model.predict_on_batch(xy[0])
    list(there_and_back(model))
    before = alive()
    for _ in range(100):
        list(there_and_back(model))
    assert alive() == before


def test_a_new_trace_after_a_switch_leaves_behind_what_it_does_in_keras_and_no_more(xy):
    # TensorFlow never forgets the custom gradients of a traced function, nor its graph with them:
    # that is so whenever a model is compiled and trained again.
    model = dense_model(optimizer="adam", loss="mse")

    def anew_by_keras():
        for _ in range(2):
            model.make_train_function(force=True)
            yield

    def growth(renewing):
        for _ in renewing():
            model.train_on_batch(*xy)
        before = alive()
        for _ in range(2):
            for _ in renewing():
                model.train_on_batch(*xy)
        return {kind: count - before[kind] for kind, count in alive().items()}

    keras_own, ours = growth(anew_by_keras), growth(lambda: there_and_back(model))
    assert ours["functions"] <= keras_own["functions"] + 2 * 2  # two branches around a loss scale
    for kind in ("variables", "layers", "optimizers"):
        assert ours[kind] <= keras_own[kind] == 0, kind


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
