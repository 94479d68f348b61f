"""What `save_model`, `load_model` and `load_state` promise."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile

import keras
import keras_nlp
import numpy as np
import pytest
from keras import layers
from models import dense_model

from precision_bert import (
    DynamicLossScaleOptimizer,
    compile_classifier,
    compute_dtypes,
    pin_float32,
    precision_scope,
    switch_precision,
)
from precision_bert.bert import bert_classifier
from precision_bert.bert_config import BertConfig
from precision_bert.loss_scaling import count_steps, current_loss_scale
from precision_bert.policies import SWITCHABLE_POLICIES
from precision_bert.saving import load_model, load_state, save_model

PAIRS = [(a, b) for a in SWITCHABLE_POLICIES for b in SWITCHABLE_POLICIES if a != b]
WORDPIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "play", "so"]


def data(shape=(4,), n=24):
    x = np.random.RandomState(0).randn(n, *shape).astype("float32") * 0.1
    return x, x.reshape(n, -1)[:, :1]


def functional():
    inputs = keras.Input((4,))
    hidden = layers.Dense(8, "relu")(inputs)
    hidden = layers.BatchNormalization()(layers.Dropout(0.3)(hidden))
    return keras.Model(inputs, layers.Dense(1)(hidden))


def sequential():
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, "gelu"), layers.Dropout(0.3), layers.Dense(1)]
    )


@keras.saving.register_keras_serializable("tests")
class WithConfig(keras.Model):
    """A subclassed model that saves its arguments, and makes some layers only when it is built."""

    def __init__(self, units=8, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.blocks = [layers.Dense(units, "gelu"), layers.Dropout(0.3)]
        self.head = layers.Dense(1)

    def build(self, shape):
        self.norm = layers.LayerNormalization()
        for layer in (*self.blocks, self.norm, self.head):
            layer.build(shape)
            shape = layer.compute_output_shape(shape)
        super().build(shape)

    def call(self, x, training=None):
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(self.norm(x))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def subclassed():
    model = WithConfig()
    model.build((None, 4))
    return model


def nested():
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(1)(sequential()(functional_body()(inputs))))


def functional_body():
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(4, "tanh")(layers.Dropout(0.1)(inputs)), name="body")


def task(**arguments):
    """A keras-nlp task, without our help."""
    backbone = keras_nlp.models.BertBackbone(
        len(WORDPIECES), 1, 2, 8, 16, max_sequence_length=8, num_segments=2
    )
    tokenizer = keras_nlp.models.BertTokenizer(WORDPIECES)
    preprocessor = keras_nlp.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=8)
    return keras_nlp.models.BertTextClassifier(backbone, 2, preprocessor, **arguments)


def classifier():
    return bert_classifier(
        BertConfig(WORDPIECES, 1, 2, 8, 16, max_sequence_length=8), 2, sequence_length=8
    )


REGRESSIONS = {
    "functional": functional,
    "sequential": sequential,
    "subclassed": subclassed,
    "nested": nested,
}
CLASSIFIERS = {"task": task, "bert_classifier": classifier}
MODELS = REGRESSIONS | CLASSIFIERS

# A BERT takes many times as long, and has nothing more to say of the other policies.
NAMES_AND_POLICIES = [
    *((name, policy) for name in REGRESSIONS for policy in SWITCHABLE_POLICIES),
    *((name, "mixed_float16") for name in CLASSIFIERS),
]


def made(name, policy, optimizer=None):
    """A model of `MODELS` in a policy, compiled."""
    with precision_scope(policy):
        model = MODELS[name]()
    schedule = keras.optimizers.schedules.ExponentialDecay(1e-2, 2, 0.5)
    optimizer = optimizer or keras.optimizers.AdamW(schedule, weight_decay=0.01)
    if name in CLASSIFIERS:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
    else:
        model.compile(optimizer, "mse", metrics=["mae"], loss_weights=[0.5])
    return model


def train(*models):
    """Trains each model three steps, always on the same batches."""
    for model in models:
        if hasattr(model, "preprocessor"):
            texts = ["good film", "bad play", "so so", "good", "bad film so", "play"]
            x = {k: np.asarray(v) for k, v in model.preprocessor(texts).items()}
            preprocessor, model.preprocessor = model.preprocessor, None
            model.fit(x, np.array([1, 0, 0, 1, 0, 1]), batch_size=2, shuffle=False, verbose=0)
            model.preprocessor = preprocessor
        else:
            model.fit(*data(), batch_size=8, shuffle=False, verbose=0)


def state(model):
    """Every number that training changes, as bytes."""
    numbers = {f"weight {i}": v for i, v in enumerate(model.variables)}
    if getattr(model, "optimizer", None) is not None:
        numbers |= {f"optimizer {i}": v for i, v in enumerate(model.optimizer.variables)}
    return {name: np.asarray(v).tobytes() for name, v in numbers.items()}


def policies(model):
    # Text layers make some of their parts only when they are first called.
    text = getattr(model, "preprocessor", None)
    apart = text._flatten_layers() if text else []
    return [
        (type(layer).__name__, layer.dtype_policy.name, layer.trainable)
        for layer in model._flatten_layers()
        if layer not in apart and not isinstance(layer, layers.InputLayer)
    ]


def description(model):
    """Policies, how it is compiled, and the optimizer with its settings."""
    compiled = model.compiled and {**model.get_compile_config(), "optimizer": None}
    optimizer = model.optimizer and (type(model.optimizer), model.optimizer.get_config())
    return (type(model), policies(model), compiled, optimizer, model.jit_compile)


# The model as it was


@pytest.mark.parametrize(("name", "policy"), NAMES_AND_POLICIES)
def test_a_training_goes_on_after_loading_bit_for_bit(name, policy, tmp_path):
    model = made(name, policy)
    train(model)
    save_model(model, tmp_path / "model.keras")
    before, as_saved = description(model), state(model)

    again = load_model(tmp_path / "model.keras")

    assert description(again) == before
    assert state(again) == as_saved == state(model)
    train(model, again)
    assert state(again) == state(model) != as_saved


@pytest.mark.parametrize(
    ("name", "source", "target"),
    [("functional", *pair) for pair in PAIRS]
    + [(name, "mixed_float16", "float32") for name in MODELS if name != "functional"]
    + [("task", "float32", "mixed_float16"), ("subclassed", "mixed_bfloat16", "mixed_float16")],
)
def test_loading_in_another_policy_equals_a_switch_of_the_live_model(
    name, source, target, tmp_path
):
    model = made(name, source)
    train(model)
    save_model(model, tmp_path / "model.keras")
    switch_precision(model, target)

    again = load_model(tmp_path / "model.keras", policy=target)

    assert policies(again) == policies(model)
    assert type(again.optimizer) is type(model.optimizer)
    assert state(again) == state(model)
    train(model, again)
    assert state(again) == state(model)


@pytest.mark.parametrize("policy", ["mixed_float16", "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_an_uncompiled_model_comes_back_uncompiled(name, policy, tmp_path):
    with precision_scope(policy):
        model = task(compile=False) if name == "task" else MODELS[name]()
    assert not model.compiled
    save_model(model, tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras")
    assert not again.compiled and again.metrics == []
    assert getattr(again, "optimizer", None) is None
    assert policies(again) == policies(model)
    assert state(again) == state(model)


@pytest.mark.parametrize("trained", [False, True])
def test_a_model_that_was_switched_comes_back_with_the_counting_loss_scale(trained, tmp_path):
    model = dense_model(optimizer="adam", loss="mse")
    switch_precision(model, "mixed_float16")
    if trained:
        train(model)
    save_model(model, tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras")
    assert type(again.optimizer) is DynamicLossScaleOptimizer
    assert again.optimizer.built is trained
    train(model, again)
    assert state(again) == state(model)


def test_a_model_that_is_not_built_yet_comes_back_to_be_built(tmp_path):
    model = keras.Sequential([layers.Dense(2, dtype="mixed_float16")])
    model.compile("adam", "mse")
    with pytest.warns(UserWarning, match="not yet been built"):
        save_model(model, tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras")
    assert not again.built and again.layers[0].dtype_policy.name == "mixed_float16"
    again.fit(*data(), verbose=0)


def test_saving_changes_nothing_of_the_model(tmp_path):
    policies_of_map = keras.dtype_policies.DTypePolicyMap()
    policies_of_map["head"] = keras.DTypePolicy("mixed_bfloat16")
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1, dtype=policies_of_map, name="head")(inputs))
    model.compile("adam", "mse")
    train(model)
    before = description(model), state(model)
    save_model(model, tmp_path / "model.keras")
    assert (description(model), state(model)) == before


# The loss scale, the optimizer and how a model is compiled


@pytest.mark.parametrize("stage", ["mixed_float16", "float32", "mixed_bfloat16"])
@pytest.mark.parametrize("target", [None, *SWITCHABLE_POLICIES])
def test_the_loss_scale_is_carried_also_where_a_stage_has_put_it_aside(stage, target, tmp_path):
    model = dense_model(optimizer="adam", loss="mse")
    switch_precision(model, "mixed_float16")
    train(model)
    model.optimizer.dynamic_scale.assign(4096.0)
    model.optimizer.step_counter.assign(7)
    model.optimizer.skipped_steps.assign(2)
    switch_precision(model, stage)
    save_model(model, tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras", target)
    assert count_steps(again.optimizer) == (3, 2)
    switch_precision(again, "mixed_float16")
    assert current_loss_scale(again.optimizer) == 4096.0
    assert int(again.optimizer.step_counter) == 7
    assert int(again.optimizer.skipped_steps) == 2


@pytest.mark.parametrize(
    "wrapper", [DynamicLossScaleOptimizer, keras.optimizers.LossScaleOptimizer]
)
@pytest.mark.parametrize("trained", [False, True])
def test_settings_of_a_loss_scale_that_was_put_aside_are_carried(wrapper, trained, tmp_path):
    optimizer = wrapper(keras.optimizers.SGD(0.1), initial_scale=512.0, dynamic_growth_steps=50)
    model = dense_model("mixed_float16", optimizer=optimizer, loss="mse")
    if trained:
        train(model)
    switch_precision(model, "float32")
    save_model(model, tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras", "mixed_float16")
    assert again.optimizer.initial_scale == 512.0
    assert again.optimizer.dynamic_growth_steps == 50
    assert current_loss_scale(again.optimizer) == 512.0


@pytest.mark.parametrize("scaled", [False, True])
def test_a_loss_scale_factor_of_the_users_is_carried(scaled, tmp_path):
    optimizer = keras.optimizers.SGD(0.1, loss_scale_factor=8.0)
    model = dense_model(optimizer=optimizer, loss="mse")
    if scaled:
        switch_precision(model, "mixed_float16")
    save_model(model, tmp_path / "model.keras")
    assert load_model(tmp_path / "model.keras", "float32").optimizer.loss_scale_factor == 8.0


def test_a_mixed_float16_model_that_was_compiled_without_loss_scale_comes_back_without(tmp_path):
    optimizer = keras.optimizers.SGD(0.1, loss_scale_factor=1024.0)
    model = dense_model("mixed_float16")
    model.compile(optimizer, "mse", auto_scale_loss=False)
    train(model)
    save_model(model, tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras")
    assert type(again.optimizer) is keras.optimizers.SGD
    assert again.optimizer.loss_scale_factor == 1024.0
    train(model, again)
    assert state(again) == state(model)


def optimizers():
    excluding = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    excluding.exclude_from_weight_decay(var_names=["bias"])
    return {
        "averages": keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=4),
        "accumulating": keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
        "clipping": keras.optimizers.RMSprop(0.01, global_clipnorm=0.1),
        "excluding": excluding,
        "muon": keras.optimizers.Muon(0.01),
    }


@pytest.mark.parametrize("policy", [None, "mixed_float16"])
@pytest.mark.parametrize("kind", optimizers())
def test_settings_and_state_of_any_optimizer_are_carried(kind, policy, tmp_path):
    model = dense_model(optimizer=optimizers()[kind], loss="mse")
    train(model)
    save_model(model, tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras", policy)
    if policy:
        switch_precision(model, policy)
    train(model, again)
    assert state(again) == state(model)


def test_a_learning_rate_that_was_changed_in_training_is_carried(tmp_path):
    model = dense_model(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    train(model)
    model.optimizer.learning_rate = 0.125
    save_model(model, tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras", "mixed_float16")
    assert float(again.optimizer.learning_rate) == 0.125


@pytest.mark.parametrize("name", ["functional", "task", "bert_classifier"])
def test_how_it_was_compiled_is_carried(name, tmp_path):
    model = MODELS[name]()
    loss = "mse" if name == "functional" else keras.losses.SparseCategoricalCrossentropy(True)
    model.compile(
        "sgd",
        loss,
        loss_weights=[0.25],
        weighted_metrics=[],
        metrics=None,
        run_eagerly=name == "task",
        steps_per_execution=2,
        jit_compile=False,
    )
    save_model(model, tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras")
    assert description(again) == description(model)
    assert again.steps_per_execution == 2
    assert again.run_eagerly is (name == "task")


def test_our_recipe_comes_back_with_its_metrics_and_schedule(tmp_path):
    model = classifier()
    compile_classifier(model, num_steps=6, learning_rate=1e-3)
    train(model)
    save_model(model, tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras", "mixed_float16")
    switch_precision(model, "mixed_float16")
    train(model, again)
    assert state(again) == state(model)
    assert [m.name for m in again._compile_metrics.metrics] == ["accuracy", "f1"]


def squared(y, outputs):
    return keras.ops.mean(keras.ops.square(y - outputs), -1)


def test_custom_objects_are_taken_for_layers_losses_and_optimizers(tmp_path):
    class Own(layers.Dense):
        pass

    class OwnSGD(keras.optimizers.SGD):
        pass

    inputs = keras.Input((4,))
    model = keras.Model(inputs, Own(1)(inputs))
    model.compile(OwnSGD(0.1), squared)
    train(model)
    save_model(model, tmp_path / "model.keras")
    with pytest.raises(TypeError, match="Could not locate class 'Own'"):
        load_model(tmp_path / "model.keras")
    known = {"Own": Own, "OwnSGD": OwnSGD, "squared": squared}
    again = load_model(tmp_path / "model.keras", custom_objects=known)
    assert type(again.optimizer) is OwnSGD and again.loss is squared
    train(model, again)
    assert state(again) == state(model)


def test_a_lambda_is_loaded_only_where_it_is_allowed(tmp_path):
    model = keras.Sequential([keras.Input((4,)), layers.Lambda(lambda x: x * 2)])
    save_model(model, tmp_path / "model.keras")
    with pytest.raises(ValueError, match="safe_mode"):
        load_model(tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras", safe_mode=False)
    assert float(again(np.ones((1, 4)))[0, 0]) == 2.0


@keras.saving.register_keras_serializable("tests")
class OwnCompile(keras.Sequential):
    """Takes an argument in compile that Keras does not save."""

    def compile(self, optimizer, loss, *, factor, **kwargs):
        self.factor = factor
        super().compile(optimizer, loss, **kwargs)


@keras.saving.register_keras_serializable("tests")
class TwoOptimizers(keras.Model):
    """Saves and restores its compilation by itself, with optimizers of its own names."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(1)

    def build(self, shape):
        self.dense.build(shape)
        super().build(shape)

    def call(self, x):
        return self.dense(x)

    def compile(self, first, second):
        super().compile(optimizer=None)
        self.first, self.second = first, second

    def get_compile_config(self):
        return keras.saving.serialize_keras_object({"first": self.first, "second": self.second})

    def compile_from_config(self, config):
        self.compile(**keras.saving.deserialize_keras_object(config))
        self.first.build(self.trainable_variables)
        self.second.build(self.trainable_variables)


def test_a_compile_that_cannot_be_repeated_is_warned_of(tmp_path):
    model = OwnCompile([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse", factor=2)
    save_model(model, tmp_path / "model.keras")
    with pytest.warns(UserWarning, match=r"OwnCompile takes arguments .*'factor'"):
        again = load_model(tmp_path / "model.keras")
    assert type(again) is OwnCompile and not again.compiled


def test_a_class_that_restores_its_own_compilation_does_so_with_its_state(tmp_path):
    model = TwoOptimizers()
    model.build((None, 4))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam(0.1))
    for optimizer in (model.first, model.second):
        optimizer.apply([np.ones(v.shape) for v in model.trainable_variables], model.weights)
    save_model(model, tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras")
    for one, other in ((model.first, again.first), (model.second, again.second)):
        for theirs, ours in zip(one.variables, other.variables, strict=True):
            np.testing.assert_array_equal(theirs.numpy(), ours.numpy())


# The layers: policies, islands, what is trainable


@pytest.mark.parametrize("stage", SWITCHABLE_POLICIES)
def test_islands_stay_islands(stage, tmp_path):
    with precision_scope("mixed_float16"):
        inputs = keras.Input((4,))
        soft = layers.Activation("softmax", dtype="float32", name="soft")
        model = keras.Model(inputs, soft(layers.Dense(3, name="d")(inputs)))
    switch_precision(model, stage)
    save_model(model, tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras")
    assert compute_dtypes(again) == compute_dtypes(model)
    assert switch_precision(again, "mixed_float16").pinned == ("soft",)
    assert switch_precision(again, "float32").pinned == ("soft",)
    assert switch_precision(again, "mixed_bfloat16").pinned == ("soft",)


@pytest.mark.parametrize("policy", [None, "float32"])
@pytest.mark.parametrize("name", MODELS)
def test_pinned_layers_stay_pinned_also_inside_other_layers(name, policy, tmp_path):
    with precision_scope("float32"):
        model = MODELS[name]()
    inside = [la for la in model._flatten_layers() if isinstance(la, layers.Dense)]
    pin_float32(*inside)
    switch_precision(model, "mixed_bfloat16")
    save_model(model, tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras", policy)
    report = switch_precision(again, "mixed_float16")
    assert len(report.pinned) == len(switch_precision(model, "mixed_float16").pinned)
    assert policies(again) == policies(model)


def test_a_head_that_no_one_pinned_follows_a_switch_after_loading_as_before(tmp_path):
    backbone = layers.Dense(3, name="body")
    first, second = (keras.Input((4,)) for _ in range(2))
    one = keras.Model(first, layers.Dense(2, name="h1")(backbone(first)))
    two = keras.Model(second, layers.Dense(2, name="h2")(backbone(second)))
    switch_precision(one, "mixed_float16")  # the body of the other model too
    save_model(two, tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras")
    assert compute_dtypes(again) == {"body": "float16", "h2": "float32"}
    assert switch_precision(again, "mixed_float16").pinned == ()


@pytest.mark.parametrize("default", [None, "mixed_float16"])
@pytest.mark.parametrize("trip", [(), ("float32",)])
def test_policy_maps_come_back(default, trip, tmp_path):
    own = keras.dtype_policies.DTypePolicyMap(default)
    own["h"] = keras.DTypePolicy("mixed_bfloat16")
    inputs = keras.Input((4,))
    hidden = layers.Dense(3, dtype=own, name="h")(inputs)
    model = keras.Model(inputs, layers.Dense(1, dtype=own, name="d")(hidden))
    for policy in trip:
        switch_precision(model, policy)
    save_model(model, tmp_path / "model.keras")
    with precision_scope("mixed_bfloat16"):
        again = load_model(tmp_path / "model.keras")
    assert compute_dtypes(again) == compute_dtypes(model)
    for each in (model, again):
        switch_precision(each, "mixed_float16")
    assert compute_dtypes(again) == compute_dtypes(model)


def test_casts_in_a_graph_come_back_and_go_on_following(tmp_path):
    inputs = keras.Input((4,))
    hidden = keras.ops.cast(layers.Dense(3, dtype="mixed_float16")(inputs), "float16")
    model = keras.Model(inputs, layers.Dense(1, dtype="mixed_float16")(hidden))
    switch_precision(model, "float32")
    save_model(model, tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras")
    x = np.random.RandomState(0).randn(8, 4).astype("float32")
    for policy in ("float32", "mixed_float16"):
        for each in (model, again):
            switch_precision(each, policy)
        assert np.asarray(again(x)).tobytes() == np.asarray(model(x)).tobytes()


@pytest.mark.parametrize("policy", [None, "mixed_float16"])
def test_what_is_frozen_comes_back_frozen_also_inside_a_backbone(policy, tmp_path):
    model = made("task", "float32")
    model.backbone.get_layer("transformer_layer_0").trainable = False
    model.compile(keras.optimizers.Adam(0.01), model.loss)
    train(model)
    model.backbone.get_layer("token_embedding").trainable = False  # the optimizer knows it yet
    save_model(model, tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras", policy)
    assert [v.path for v in again.trainable_variables] == [
        v.path for v in model.trainable_variables
    ]
    if policy:
        switch_precision(model, policy)
    else:
        model.make_train_function(force=True)  # a traced one goes on with what was trainable then
    train(model, again)
    assert state(again) == state(model)


def test_layers_that_keras_does_not_save_are_no_obstacle(tmp_path):
    model = dense_model()
    model.teacher = layers.Dense(2)
    save_model(model, tmp_path / "model.keras")
    assert compute_dtypes(load_model(tmp_path / "model.keras", "mixed_float16")) == {
        "hidden": "float16",
        "head": "float16",
    }


def test_pure_half_models_come_back_and_are_refused_by_a_switch(tmp_path):
    with precision_scope("float32"):
        keras.config.set_dtype_policy("bfloat16")
        model = functional()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    train(model)
    save_model(model, tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras")
    assert state(again) == state(model)
    with pytest.raises(ValueError, match="keeps its variable 'kernel' in bfloat16"):
        load_model(tmp_path / "model.keras", "mixed_bfloat16")


# The global policy


@pytest.mark.parametrize(
    ("name", "around"),
    [("subclassed", policy) for policy in ("float16", "bfloat16", *SWITCHABLE_POLICIES)]
    + [(name, "float16") for name in MODELS if name != "subclassed"],
)
def test_the_global_policy_has_no_say_and_stays(name, around, tmp_path):
    model = made(name, "mixed_float16")
    train(model)
    with precision_scope("float32"):
        keras.config.set_dtype_policy(around)
        save_model(model, tmp_path / "model.keras")
        again = load_model(tmp_path / "model.keras")
        assert keras.config.dtype_policy().name == around
    assert policies(again) == policies(model)
    assert state(again) == state(model)


def test_the_global_policy_stays_when_loading_fails(tmp_path):
    model = dense_model("mixed_float16", optimizer="sgd", loss=squared)
    save_model(model, tmp_path / "model.keras")
    with pytest.raises(TypeError, match="squared"):
        load_model(tmp_path / "model.keras")
    assert keras.config.dtype_policy().name == "float32"


# What Keras itself saves and loads


@pytest.mark.parametrize(("name", "policy"), NAMES_AND_POLICIES)
def test_what_model_save_wrote_is_read_with_optimizer_and_state(name, policy, tmp_path):
    model = made(name, policy)
    train(model)
    model.save(tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras")
    assert description(again) == description(model)
    assert [np.asarray(v).tobytes() for v in again.optimizer.variables] == [
        np.asarray(v).tobytes() for v in model.optimizer.variables
    ]
    assert again.get_weights()[0].tobytes() == model.get_weights()[0].tobytes()


@pytest.mark.parametrize("stages", [("mixed_float16",), ("mixed_float16", "float32")])
@pytest.mark.parametrize("name", MODELS)
def test_what_model_save_wrote_after_a_switch_is_read(name, stages, tmp_path):
    model = made(name, "float32")
    for policy in stages:
        switch_precision(model, policy)
        train(model)
    model.save(tmp_path / "model.keras")
    again = load_model(tmp_path / "model.keras")
    assert description(again) == description(model)
    assert [np.asarray(v).tobytes() for v in again.optimizer.variables] == [
        np.asarray(v).tobytes() for v in model.optimizer.variables
    ]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", ["functional", "task"])
def test_an_untrained_or_uncompiled_model_of_model_save_is_read(name, trained, tmp_path):
    model = made(name, "mixed_float16")
    model.save(tmp_path / "compiled.keras")
    again = load_model(tmp_path / "compiled.keras")
    assert type(again.optimizer) is keras.optimizers.LossScaleOptimizer
    assert int(again.optimizer.iterations) == 0
    plain = functional() if name == "functional" else task(compile=False)
    plain.save(tmp_path / "plain.keras")
    assert not load_model(tmp_path / "plain.keras").compiled


def test_an_optimizer_that_model_save_does_not_describe_well_enough_is_warned_of(tmp_path):
    model = dense_model(optimizer="adam", loss="mse")
    train(model)
    model.get_layer("hidden").trainable = False  # not compiled since
    model.save(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match=r"holds 10 variables .*'adam.*has 6 for"):
        load_model(tmp_path / "model.keras")
    save_model(model, tmp_path / "model.keras")
    assert state(load_model(tmp_path / "model.keras")) == state(model)


def test_a_loaded_mixed_float16_model_gets_a_loss_scale_when_it_is_compiled_anew(tmp_path):
    # Keras' own loading leaves the container in float32, by which its compile decides.
    model = made("functional", "mixed_float16")
    model.save(tmp_path / "plain.keras")
    save_model(model, tmp_path / "ours.keras")
    for name in ("plain", "ours"):
        again = load_model(tmp_path / f"{name}.keras")
        again.compile("adam", "mse")
        assert isinstance(again.optimizer, keras.optimizers.LossScaleOptimizer)


@pytest.mark.parametrize("policy", SWITCHABLE_POLICIES)
@pytest.mark.parametrize("name", REGRESSIONS)
def test_keras_reads_our_files(name, policy, tmp_path):
    model = made(name, "float32")
    switch_precision(model, policy)
    train(model)
    save_model(model, tmp_path / "model.keras")
    # A subclassed model's layers take the global policy.
    with precision_scope(policy if name == "subclassed" else "float32"):
        again = keras.saving.load_model(tmp_path / "model.keras")
    assert list(compute_dtypes(again).values()) == list(compute_dtypes(model).values())
    assert type(again.optimizer) is type(model.optimizer)
    assert [np.asarray(v).tobytes() for v in again.optimizer.variables] == [
        np.asarray(v).tobytes() for v in model.optimizer.variables
    ]


def test_a_file_is_read_in_another_process(tmp_path):
    model = made("sequential", "float32")
    switch_precision(model, "mixed_float16")
    train(model)
    save_model(model, tmp_path / "model.keras")
    code = (
        "from precision_bert.saving import load_model\n"
        f"model = load_model({str(tmp_path / 'model.keras')!r})\n"
        "print(type(model.optimizer).__name__, int(model.optimizer.iterations),\n"
        "      float(model.optimizer.dynamic_scale), model.dtype_policy.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["DynamicLossScaleOptimizer", "3", "32768.0", "mixed_float16"]


# A live model


def write(model, file):
    """Writes the kind of file that its name says."""
    if file.suffix == ".h5":
        model.save_weights(file)
    elif file.stem == "own":
        save_model(model, file)
    else:
        model.save(file)


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize(("source", "target"), [*PAIRS, ("mixed_float16", "mixed_float16")])
@pytest.mark.parametrize("kind", ["model.keras", "own.keras", "model.weights.h5"])
def test_load_state_carries_weights_step_and_moments(kind, source, target, built, tmp_path):
    model = dense_model(source, optimizer=keras.optimizers.Adam(0.01), loss="mse")
    train(model)
    file = tmp_path / kind
    write(model, file)
    other = dense_model(target, optimizer=keras.optimizers.Adam(0.01), loss="mse")
    if built:
        train(other)
        train(other)
    optimizer = other.optimizer

    load_state(other, file)

    assert other.optimizer is optimizer
    assert policies(other) == policies(dense_model(target))
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    saved = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    assert int(inner.iterations) == 3
    for ours, theirs in zip(inner.variables, saved.variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    for ours, theirs in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", ["own.keras", "model.keras", "model.weights.h5"])
def test_load_state_carries_the_loss_scale_into_float32_and_back(kind, tmp_path):
    model = dense_model(optimizer="adam", loss="mse")
    switch_precision(model, "mixed_float16")
    train(model)
    model.optimizer.dynamic_scale.assign(64.0)
    model.optimizer.skipped_steps.assign(5)
    file = tmp_path / kind
    write(model, file)
    single = dense_model(optimizer="adam", loss="mse")
    load_state(single, file)
    assert count_steps(single.optimizer) == (3, 5)
    switch_precision(single, "mixed_float16")
    assert current_loss_scale(single.optimizer) == 64.0
    half = dense_model("mixed_float16", optimizer="adam", loss="mse")
    load_state(half, file)  # Keras' own loss scale, which counts nothing
    assert current_loss_scale(half.optimizer) == 64.0


def test_load_state_carries_a_loss_scale_that_was_put_aside(tmp_path):
    model = dense_model(optimizer="adam", loss="mse")
    switch_precision(model, "mixed_float16")
    train(model)
    model.optimizer.dynamic_scale.assign(64.0)
    switch_precision(model, "float32")
    save_model(model, tmp_path / "model.keras")
    other = dense_model(optimizer="adam", loss="mse")
    switch_precision(other, "mixed_float16")
    load_state(other, tmp_path / "model.keras")
    assert current_loss_scale(other.optimizer) == 64.0


def test_load_state_reads_what_backup_and_restore_left(tmp_path):
    model = dense_model("mixed_float16", optimizer="adam", loss="mse")
    backup = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    model.fit(*data(), batch_size=8, verbose=0, callbacks=[backup])
    other = dense_model(optimizer="adam", loss="mse")
    load_state(other, tmp_path / "latest.weights.h5")
    assert int(other.optimizer.iterations) == 3
    np.testing.assert_array_equal(
        other.optimizer.variables[2].numpy(), model.optimizer.inner_optimizer.variables[2].numpy()
    )


def test_load_state_goes_on_with_the_same_dropout(tmp_path):
    model = made("sequential", "float32")
    train(model)
    save_model(model, tmp_path / "model.keras")
    other = made("sequential", "float32")
    load_state(other, tmp_path / "model.keras")
    train(model, other)
    assert state(other) == state(model)


def test_load_state_refuses_an_optimizer_that_does_not_fit_and_changes_nothing(tmp_path):
    model = dense_model("mixed_float16", optimizer="adam", loss="mse")
    train(model)
    model.save_weights(tmp_path / "model.weights.h5")
    other = dense_model(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    train(other)
    before = state(other)
    with pytest.raises(ValueError, match=r"does not fit to the model's optimizer, SGD with 6"):
        load_state(other, tmp_path / "model.weights.h5")
    assert state(other) == before


@pytest.mark.parametrize("compiled", [False, True])
def test_load_state_needs_a_model_that_is_built_and_compiled(compiled, tmp_path):
    model = keras.Sequential([layers.Dense(1)]) if compiled else dense_model()
    if compiled:
        model.compile("sgd", "mse")
    save_model(dense_model(optimizer="sgd", loss="mse"), tmp_path / "model.keras")
    with pytest.raises(ValueError, match="built and compiled"):
        load_state(model, tmp_path / "model.keras")


# Files and arguments


@pytest.fixture
def saved(tmp_path):
    model = dense_model(optimizer="adam", loss="mse")
    train(model)
    save_model(model, tmp_path / "model.keras")
    return tmp_path / "model.keras"


@pytest.mark.parametrize("keep", [0, 1, 30, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_named(keep, saved):
    content = saved.read_bytes()
    saved.write_bytes(content[: keep if keep >= 1 or keep == 0 else int(keep * len(content))])
    for read in (load_model, lambda file: load_state(dense_model(optimizer="adam"), file)):
        with pytest.raises(ValueError, match=r"model\.keras is damaged"):
            read(saved)


@pytest.mark.parametrize("member", ["config.json", "model.weights.h5", "precision_bert.json"])
def test_a_changed_byte_is_seen_in_any_member(member, saved):
    with zipfile.ZipFile(saved) as archive:
        info = archive.getinfo(member)
    content = bytearray(saved.read_bytes())
    content[info.header_offset + 30 + len(member) + info.file_size // 2] ^= 1
    saved.write_bytes(content)
    with pytest.raises(ValueError, match=rf"model\.keras is damaged.*{member}"):
        load_model(saved)


def test_a_damaged_weights_file_is_named(tmp_path):
    file = tmp_path / "model.weights.h5"
    file.write_bytes(b"no weights")
    with pytest.raises(ValueError, match=r"model\.weights\.h5 is damaged"):
        load_state(dense_model(optimizer="adam", loss="mse"), file)


def test_another_archive_is_no_model(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.keras", "w") as archive:
        archive.writestr("something", "else")
    with pytest.raises(ValueError, match="no model of Keras"):
        load_model(tmp_path / "model.keras")


def test_a_later_format_is_refused(saved, tmp_path):
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(tmp_path / "later.keras", "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "precision_bert.json":
                content = json.dumps({**json.loads(content), "format": 2, "precision_bert": "9.0"})
            new.writestr(name, content)
    with pytest.raises(ValueError, match=r"written by precision_bert 9\.0 in format 2"):
        load_model(tmp_path / "later.keras")


@pytest.mark.parametrize("read", [load_model, lambda f: load_state(dense_model(), f)])
def test_a_missing_file_is_named(read, tmp_path):
    for path in (tmp_path / "none.keras", str(tmp_path / "none.keras")):
        with pytest.raises(FileNotFoundError, match=r"There is no file .*none\.keras"):
            read(path)
    (tmp_path / "folder.keras").mkdir()
    with pytest.raises(FileNotFoundError, match="folder"):
        read(tmp_path / "folder.keras")


@pytest.mark.parametrize("path", ["model.h5", "model", "", "model.keras.zip", None, 3])
def test_a_path_that_is_none_of_keras_is_refused(path):
    with pytest.raises(ValueError, match=r"path must end in \.keras"):
        save_model(dense_model(), path)
    with pytest.raises(ValueError, match=r"path must end in \.keras"):
        load_model(path)
    with pytest.raises(ValueError, match=r"path must end in \.keras or \.weights\.h5"):
        load_state(dense_model(), path)


@pytest.mark.parametrize("policy", ["float16", "half", "", 16])
def test_an_unknown_policy_is_refused_before_anything_is_read(policy):
    with pytest.raises(ValueError, match="policy must be one of"):
        load_model("no/such.keras", policy)


@pytest.mark.parametrize("model", [None, "model", layers.Dense(1)])
def test_what_is_no_model_is_refused(model, tmp_path):
    with pytest.raises(TypeError, match=r"model must be a keras\.Model"):
        save_model(model, tmp_path / "model.keras")
    with pytest.raises(TypeError, match=r"model must be a keras\.Model"):
        load_state(model, tmp_path / "model.keras")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_unless_that_is_forbidden(saved):
    before = saved.read_bytes()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_model(dense_model(), saved, overwrite=False)
    assert saved.read_bytes() == before
    save_model(dense_model(), saved)
    assert not load_model(saved).compiled


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="folder of path="):
        save_model(dense_model(), tmp_path / "none" / "model.keras")


def test_a_save_that_fails_leaves_the_old_file_and_no_other(saved):
    class Unsavable(layers.Dense):
        def get_config(self):
            raise RuntimeError("no config")

    inputs = keras.Input((4,))
    before = saved.read_bytes()
    for layer in (Unsavable(1), FailsLate(1)):
        with pytest.raises(RuntimeError, match=r"no config|no weights"):
            save_model(keras.Model(inputs, layer(inputs)), saved)
        assert saved.read_bytes() == before
        assert [file.name for file in saved.parent.iterdir()] == ["model.keras"]
    shutil.copy(saved, saved.with_name("copy.keras"))
    assert int(load_model(saved.with_name("copy.keras")).optimizer.iterations) == 3


class FailsLate(layers.Dense):
    def save_own_variables(self, store):
        raise RuntimeError("no weights")


def test_a_link_stays_a_link(saved, tmp_path):
    (tmp_path / "link.keras").symlink_to(saved)
    save_model(dense_model(), tmp_path / "link.keras")
    assert (tmp_path / "link.keras").is_symlink()
    assert not load_model(saved).compiled
