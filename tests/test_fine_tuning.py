"""What is promised of the fine-tuning recipe."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest

from precision_bert.bert import BertConfig, bert_classifier
from precision_bert.fine_tuning import (
    FineTuningAdamW,
    WarmupLinearDecay,
    compile_classifier,
    fine_tuning_optimizer,
)
from precision_bert.sparse_f1 import SparseF1

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]


def tiny_bert(num_classes=2, dtype="float32"):
    config = BertConfig(VOCABULARY, 1, 2, 8, 16, max_sequence_length=8)
    return bert_classifier(config, num_classes=num_classes, sequence_length=8, dtype=dtype)


def encoded(model, *texts):
    return {name: np.asarray(value) for name, value in model.preprocessor(list(texts)).items()}


# The learning rate


def expected_rate(step, peak, steps, warmup, end):
    """The docstring's equation through NumPy's interpolation, in float64."""
    return (
        np.interp(step, [-1, warmup, steps], [0.0 if warmup else peak, peak, end])
        if step < steps
        else end
    )


@pytest.mark.parametrize("warmup", [0, 1, 10, 99])
@pytest.mark.parametrize("end", [0.0, 1e-5])
def test_every_step_has_the_rate_of_the_equation(warmup, end):
    schedule = WarmupLinearDecay(1e-3, 100, warmup, end)
    actual = [float(schedule(step)) for step in range(110)]
    expected = [expected_rate(step, 1e-3, 100, warmup, end) for step in range(110)]
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-12)


def test_the_rate_is_exact_at_its_boundaries():
    schedule = WarmupLinearDecay(1.0, num_steps=12, warmup_steps=3, end_learning_rate=0.125)
    rates = {step: float(schedule(step)) for step in (0, 2, 3, 4, 11, 12, 13)}
    slope = (1 - 0.125) / 9
    assert rates[0] == 0.25  # the first step moves
    assert rates[2] == 0.75
    assert rates[3] == 1.0  # the peak
    assert rates[4] == pytest.approx(1 - slope)
    assert rates[11] == pytest.approx(0.125 + slope)  # the last step
    assert rates[12] == rates[13] == 0.125


def test_a_schedule_of_one_step_has_the_peak():
    assert [float(WarmupLinearDecay(0.5, 1)(step)) for step in (0, 1)] == [0.5, 0.0]


def test_a_schedules_config_makes_the_same_schedule():
    schedule = WarmupLinearDecay(1e-3, 100, 10, 1e-6)
    copy = keras.optimizers.schedules.deserialize(keras.optimizers.schedules.serialize(schedule))
    assert type(copy) is WarmupLinearDecay
    assert copy.get_config() == schedule.get_config()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0.0, 10), ValueError, "peak_learning_rate must be above 0.0.*peak_learning_rate=0.0"),
        ((math.inf, 10), ValueError, "peak_learning_rate=inf"),
        ((math.nan, 10), ValueError, "peak_learning_rate=nan"),
        (("1", 10), TypeError, "peak_learning_rate='1'"),
        ((True, 10), TypeError, "peak_learning_rate=True"),
        ((1.0, 0), ValueError, "num_steps must be at least 1"),
        ((1.0, 10.0), TypeError, "num_steps=10.0"),
        ((1.0, True), TypeError, "num_steps=True"),
        ((1.0, 10, -1), ValueError, "warmup_steps must be at least 0"),
        ((1.0, 10, 10), ValueError, "warmup_steps=10, num_steps=10"),
        ((1.0, 10, 0, -1.0), ValueError, "end_learning_rate must be at least 0.0"),
        ((1.0, 10, 0, 2.0), ValueError, "end_learning_rate=2.0, peak_learning_rate=1.0"),
    ],
)
def test_bad_schedules_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        WarmupLinearDecay(*arguments)


# The optimizer


def test_the_optimizer_is_the_papers():
    optimizer = fine_tuning_optimizer(1000)
    assert isinstance(optimizer, keras.optimizers.AdamW)
    config = optimizer.get_config()
    assert (config["weight_decay"], config["global_clipnorm"]) == (0.01, 1.0)
    assert (config["beta_1"], config["beta_2"], config["epsilon"]) == (0.9, 0.999, 1e-6)
    schedule = optimizer._learning_rate
    assert schedule.get_config() == WarmupLinearDecay(3e-5, 1000, 100).get_config()


def test_kernels_and_embeddings_decay_and_nothing_else_does():
    model = tiny_bert()
    optimizer = fine_tuning_optimizer(10)
    optimizer.build(model.trainable_variables)
    decayed = {v.path for v in model.trainable_variables if optimizer._use_weight_decay(v)}
    matrices = {v.path for v in model.trainable_variables if len(v.shape) > 1}
    biases_of_attention = {path for path in matrices if path.endswith("bias")}  # (heads, dim)
    assert decayed == matrices - biases_of_attention
    assert {path.rsplit("/", 1)[1] for path in decayed} == {"kernel", "embeddings"}


def test_the_decay_really_moves_kernels_only():
    model = tiny_bert()
    optimizer = fine_tuning_optimizer(
        1, learning_rate=0.5, warmup=0.0, weight_decay=0.5, global_clipnorm=None
    )
    before = [v.numpy() for v in model.trainable_variables]
    zeros = [keras.ops.zeros_like(v) for v in model.trainable_variables]
    optimizer.apply(zeros, model.trainable_variables)
    for variable, value in zip(model.trainable_variables, before, strict=True):
        kept = 1.0 if variable.name in ("bias", "gamma", "beta") else 0.75  # 1 - 0.5 * 0.5
        np.testing.assert_allclose(variable.numpy(), kept * value, rtol=1e-6, err_msg=variable.path)


def test_a_saved_models_optimizer_still_spares_the_biases(tmp_path):
    model = tiny_bert()
    compile_classifier(model, num_steps=4, learning_rate=1e-3)
    variables = model.trainable_variables
    model.optimizer.apply([keras.ops.zeros_like(v) for v in variables], variables)
    model.save(tmp_path / "model.keras")
    optimizer = keras.models.load_model(tmp_path / "model.keras").optimizer
    assert type(optimizer) is FineTuningAdamW
    assert int(optimizer.iterations) == 1
    assert optimizer._learning_rate.get_config() == WarmupLinearDecay(1e-3, 4).get_config()
    decays = {v.name: optimizer._use_weight_decay(v) for v in model.trainable_variables}
    assert decays == {
        "kernel": True,
        "embeddings": True,
        "bias": False,
        "gamma": False,
        "beta": False,
    }


def test_the_warmup_fraction_is_rounded_down():
    for warmup, steps in [(0.0, 0), (0.1, 1), (0.19, 1), (0.2, 2), (0.99, 9)]:
        optimizer = fine_tuning_optimizer(10, warmup=warmup)
        assert optimizer._learning_rate.warmup_steps == steps


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_steps": 0}, ValueError, "num_steps=0"),
        ({"num_steps": 1.5}, TypeError, "num_steps=1.5"),
        ({"learning_rate": 0}, ValueError, "learning_rate=0"),
        ({"warmup": 1.0}, ValueError, r"\[0, 1\).*warmup=1.0"),
        ({"warmup": 100}, ValueError, "divide it by num_steps"),
        ({"warmup": -0.1}, ValueError, "warmup=-0.1"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay=-1.0"),
        ({"weight_decay": None}, TypeError, "weight_decay=None"),
        ({"global_clipnorm": 0.0}, ValueError, "global_clipnorm=0.0"),
        ({"epsilon": 0.0}, ValueError, "epsilon=0.0"),
    ],
)
def test_bad_recipes_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        fine_tuning_optimizer(**{"num_steps": 10, **arguments})
    with pytest.raises(error, match=message):
        compile_classifier(tiny_bert(), **{"num_steps": 10, **arguments})


def test_no_clipping_and_no_decay_are_accepted():
    optimizer = fine_tuning_optimizer(10, weight_decay=0.0, global_clipnorm=None)
    assert (optimizer.weight_decay, optimizer.global_clipnorm) == (0.0, None)


# The F1 score


def one_hot(classes):
    return np.eye(2, dtype="float32")[classes]


@pytest.mark.parametrize(
    ("labels", "predicted", "expected"),
    [
        ([1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0], 4 / 6),  # TP 2, FP 1, FN 1
        ([1, 0], [1, 0], 1.0),
        ([1, 0], [0, 1], 0.0),
        ([0, 0], [0, 0], 0.0),  # 0/0
        ([1, 1, 1, 0], [1, 1, 1, 1], 6 / 7),  # TP 3, FP 1
        ([1, 1, 1, 1], [1, 0, 0, 0], 2 / 5),  # TP 1, FN 3
    ],
)
def test_f1_has_the_value_calculated_by_hand(labels, predicted, expected):
    metric = SparseF1()
    metric.update_state(np.array(labels), one_hot(predicted))
    assert float(metric.result()) == pytest.approx(expected, abs=1e-7)


def test_f1_counts_over_batches_and_starts_anew_after_a_reset():
    metric = SparseF1()
    assert float(metric.result()) == 0.0
    metric.update_state([1, 1], one_hot([1, 0]))
    metric.update_state([[0], [1]], one_hot([1, 1]))  # labels (batch, 1)
    assert float(metric.result()) == pytest.approx(4 / 6)
    metric.update_state([0, 0], one_hot([1, 1]))
    assert float(metric.result()) == pytest.approx(4 / 8)  # a mean over batches would be 4/9
    metric.reset_state()
    assert float(metric.result()) == 0.0


def test_f1_takes_logits_in_any_dtype_and_equal_ones_are_class_0():
    metric = SparseF1()
    metric.update_state([1, 1, 1], np.array([[-3, -2], [5, 5], [-1, -4]], "float16"))
    assert float(metric.result()) == pytest.approx(2 / 4)  # TP 1, FN 2


def test_f1_weighs_samples():
    metric = SparseF1()
    metric.update_state([1, 0, 1], one_hot([1, 1, 0]), sample_weight=[2.0, 1.0, 0.0])
    assert float(metric.result()) == pytest.approx(4 / 5)  # TP 2, FP 1


def test_f1_counts_past_what_float16_can():
    keras.config.set_dtype_policy("mixed_float16")
    metric = SparseF1()
    keras.config.set_dtype_policy("float32")
    metric.update_state(np.ones(5000), one_hot(np.ones(5000, int)))
    assert float(metric.true_positives) == 5000


def test_f1_refuses_other_than_two_classes():
    for shape in [(4, 3), (4, 1), (4,)]:
        with pytest.raises(ValueError, match=r"\(batch, 2\)"):
            SparseF1().update_state(np.zeros(4), np.zeros(shape))


def test_an_f1s_config_makes_the_same_metric():
    metric = SparseF1(name="score")
    copy = keras.metrics.deserialize(keras.metrics.serialize(metric))
    assert type(copy) is SparseF1
    assert copy.get_config() == metric.get_config() == {"name": "score", "dtype": "float32"}


# Compiling


@pytest.mark.parametrize(
    ("num_classes", "labels", "names"),
    [
        (1, [0.5, 2.0], {"loss", "rmse"}),
        (2, [0, 1], {"loss", "accuracy", "f1"}),
        (3, [0, 2], {"loss", "accuracy"}),
    ],
)
def test_loss_and_metrics_follow_the_number_of_classes(num_classes, labels, names):
    model = tiny_bert(num_classes)
    compile_classifier(model, num_steps=1)
    model.run_eagerly = True
    features = encoded(model, "good", "bad")
    values = model.evaluate(features, np.array(labels), return_dict=True, verbose=0)
    assert set(values) == names
    logits = np.asarray(model(features), "float64")
    if num_classes == 1:
        expected = np.mean((logits[:, 0] - labels) ** 2)  # (batch,) against (batch, 1)
        assert values["rmse"] == pytest.approx(math.sqrt(expected), rel=1e-5)
    else:
        log_sums = np.log(np.exp(logits).sum(axis=1))
        expected = np.mean(log_sums - logits[np.arange(2), labels])
        assert values["accuracy"] == np.mean(logits.argmax(axis=1) == labels)
    assert values["loss"] == pytest.approx(expected, rel=1e-5)


def test_regression_labels_are_not_broadcast_against_each_other():
    # Errors of 0, 10 and 20; a (batch, batch) matrix of differences would have other ones.
    model = tiny_bert(1)
    compile_classifier(model, num_steps=1)
    model.run_eagerly = True
    features = encoded(model, "good", "bad", "film")
    labels = np.asarray(model(features))[:, 0] + np.array([0.0, 10.0, 20.0], "float32")
    values = model.evaluate(features, labels, return_dict=True, verbose=0)
    assert values["loss"] == pytest.approx(500 / 3, rel=1e-5)
    assert values["rmse"] == pytest.approx(math.sqrt(500 / 3), rel=1e-5)


def test_a_half_precision_model_gets_loss_scaling_and_a_float32_one_does_not():
    for dtype, scaled in [("mixed_float16", True), ("float32", False)]:
        model = tiny_bert(dtype=dtype)
        compile_classifier(model, num_steps=1)
        wrapped = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        assert wrapped is scaled


def test_a_skipped_step_does_not_advance_the_schedule():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.LossScaleOptimizer(fine_tuning_optimizer(10, warmup=0.5))
    optimizer.build(model.trainable_variables)
    rates = []
    for gradient in (1.0, math.inf, 1.0):
        optimizer.apply(
            [keras.ops.full(v.shape, gradient) for v in model.trainable_variables],
            model.trainable_variables,
        )
        rates.append(float(optimizer.inner_optimizer.learning_rate))
    expected = [expected_rate(step, 3e-5, 10, 5, 0.0) for step in (1, 1, 2)]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


def test_any_model_with_num_classes_can_be_compiled_and_no_other():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(TypeError, match="num_classes=None"):
        compile_classifier(model, num_steps=1)
    model.num_classes = 2
    compile_classifier(model, num_steps=1)
    assert model.compiled
