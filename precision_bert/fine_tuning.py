"""The fine-tuning recipe that works by default: learning rate, optimizer, loss and metrics."""

from __future__ import annotations

import numbers
from typing import Any

import keras

from precision_bert.sparse_f1 import SparseF1


@keras.saving.register_keras_serializable("precision_bert")
class WarmupLinearDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Warms the learning rate up to its peak, then lets it fall in a straight line.

    Use it to fine-tune a pretrained transformer: at the full rate, the first steps, taken with
    Adam's averages still empty, can undo the pretraining. At step t, counted from 0,

        learning rate = peak_learning_rate (t + 1) / (warmup_steps + 1)     if t < warmup_steps
        learning rate = end_learning_rate + (peak_learning_rate - end_learning_rate)
                        (num_steps - t) / (num_steps - warmup_steps)        if t < num_steps
        learning rate = end_learning_rate                                   otherwise

    so the first step already moves, step `warmup_steps` has the peak, and the last step has not
    reached the end. Steps are those that the optimizer applied: a step that loss scaling skips
    because a gradient is not finite does not advance the schedule.

    See Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language
    Understanding", NAACL 2019, appendix A.

    Args:
        peak_learning_rate: Highest rate, at step `warmup_steps`.
        num_steps: Steps of the whole training: batches in an epoch times epochs.
        warmup_steps: Steps below the peak, less than `num_steps`. Default 0: starts at the peak.
        end_learning_rate: Rate from step `num_steps` on. Default 0.

    Raises:
        TypeError: If a number has the wrong type.
        ValueError: If a number is out of its range.

    Example:

    >>> schedule = WarmupLinearDecay(1.0, num_steps=5, warmup_steps=1)
    >>> [float(schedule(step)) for step in range(7)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """

    def __init__(
        self,
        peak_learning_rate: float,
        num_steps: int,
        warmup_steps: int = 0,
        end_learning_rate: float = 0.0,
    ) -> None:
        _check_number("peak_learning_rate", peak_learning_rate, above=0.0)
        _check_steps("num_steps", num_steps, at_least=1)
        _check_steps("warmup_steps", warmup_steps, at_least=0)
        _check_number("end_learning_rate", end_learning_rate, at_least=0.0)
        if warmup_steps >= num_steps:
            raise ValueError(
                "warmup_steps must be less than num_steps, or the peak is never reached. "
                f"Received: warmup_steps={warmup_steps}, num_steps={num_steps}."
            )
        if end_learning_rate > peak_learning_rate:
            raise ValueError(
                "end_learning_rate must not exceed peak_learning_rate. Received: "
                f"end_learning_rate={end_learning_rate}, peak_learning_rate={peak_learning_rate}."
            )
        self.peak_learning_rate = float(peak_learning_rate)
        self.num_steps = int(num_steps)
        self.warmup_steps = int(warmup_steps)
        self.end_learning_rate = float(end_learning_rate)

    def __call__(self, step: Any) -> Any:
        """Returns the learning rate at a step, a float32 scalar."""
        step = keras.ops.cast(step, "float32")
        warm = self.peak_learning_rate * (step + 1.0) / (self.warmup_steps + 1.0)
        left = keras.ops.maximum(self.num_steps - step, 0.0) / (self.num_steps - self.warmup_steps)
        fallen = self.end_learning_rate + (self.peak_learning_rate - self.end_learning_rate) * left
        return keras.ops.where(step < self.warmup_steps, warm, fallen)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {
            "peak_learning_rate": self.peak_learning_rate,
            "num_steps": self.num_steps,
            "warmup_steps": self.warmup_steps,
            "end_learning_rate": self.end_learning_rate,
        }


@keras.saving.register_keras_serializable("precision_bert")
class FineTuningAdamW(keras.optimizers.AdamW):
    """AdamW that decays kernels and embeddings, not biases and normalisation parameters.

    Use `fine_tuning_optimizer` to make one. It is a class of its own because Keras does not save
    what `exclude_from_weight_decay` was told: a plain `keras.optimizers.AdamW` read back from a
    `.keras` file, to go on training, decays everything.

    Args:
        *args: Of `keras.optimizers.AdamW`.
        **kwargs: Of `keras.optimizers.AdamW`.

    Example:

    >>> optimizer = FineTuningAdamW(1e-3, weight_decay=0.1)
    >>> type(FineTuningAdamW.from_config(optimizer.get_config())).__name__
    'FineTuningAdamW'
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Keras looks for these in the variable's own name, not in its path.
        self.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])


def fine_tuning_optimizer(
    num_steps: int,
    *,
    learning_rate: float = 3e-5,
    warmup: float = 0.1,
    weight_decay: float = 0.01,
    global_clipnorm: float | None = 1.0,
    epsilon: float = 1e-6,
) -> FineTuningAdamW:
    """Makes the optimizer that BERT is fine-tuned with.

    The defaults are those of Devlin et al., NAACL 2019 (appendix A) and of their code.

    Args:
        num_steps: Steps of the whole training: `len(train) * epochs`.
        learning_rate: Peak rate. Default 3e-5, the middle of the paper's 2e-5 to 5e-5. Small or
            randomly initialised models need more, 1e-4 to 1e-3.
        warmup: Fraction of the steps before the peak, in [0, 1), rounded down to whole
            steps. Default 0.1.
        weight_decay: Decoupled decay, a fraction of the learning rate, for kernels and embeddings.
        global_clipnorm: Norm to which all gradients together are shortened; None for no limit.
        epsilon: Adam's. Default 1e-6 as in BERT's code. The optimizer's averages are float32 under
            every mixed policy, so it does not vanish.

    Returns:
        A `keras.optimizers.AdamW`. `compile` wraps it with loss scaling in a mixed_float16 model.

    Raises:
        TypeError: If a number has the wrong type.
        ValueError: If a number is out of its range.

    Example:

    >>> optimizer = fine_tuning_optimizer(1000)
    >>> float(optimizer.learning_rate) < 3e-5 / 100
    True
    """
    _check_steps("num_steps", num_steps, at_least=1)
    _check_number("learning_rate", learning_rate, above=0.0)
    _check_number("warmup", warmup, at_least=0.0)
    if warmup >= 1:
        raise ValueError(
            "warmup is a fraction of num_steps, in [0, 1); for a number of steps, divide it by "
            f"num_steps. Received: warmup={warmup}."
        )
    _check_number("weight_decay", weight_decay, at_least=0.0)
    if global_clipnorm is not None:
        _check_number("global_clipnorm", global_clipnorm, above=0.0)
    _check_number("epsilon", epsilon, above=0.0)
    return FineTuningAdamW(
        WarmupLinearDecay(learning_rate, num_steps, int(warmup * num_steps)),
        weight_decay=weight_decay,
        global_clipnorm=global_clipnorm,
        epsilon=epsilon,
    )


def compile_classifier(
    model: keras.Model,
    num_steps: int,
    *,
    learning_rate: float = 3e-5,
    warmup: float = 0.1,
    weight_decay: float = 0.01,
    global_clipnorm: float | None = 1.0,
    epsilon: float = 1e-6,
) -> None:
    """Compiles a classifier or a regression with the recipe that works by default.

    Use it on a `BertClassifier`, or on any model with a `num_classes` that returns logits. Two or
    more classes get the cross-entropy and `accuracy`, two classes `f1` besides; a regression gets
    the mean squared error and `rmse`.

    Args:
        model: Has an attribute `num_classes`, and logits `(batch, num_classes)` as its output.
            Labels are `(batch,)`: int in [0, num_classes), or float for a regression.
        num_steps: Steps of the whole training: `len(train) * epochs`.
        learning_rate: See `fine_tuning_optimizer`, as the following ones.
        warmup: See there.
        weight_decay: See there.
        global_clipnorm: See there.
        epsilon: See there.

    Raises:
        TypeError: If the model has no integer `num_classes`, or a number has the wrong type.
        ValueError: If a number is out of its range.

    Example:

    >>> from precision_bert.bert import BertConfig, bert_classifier
    >>> vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]
    >>> config = BertConfig(vocabulary, 1, num_heads=2, hidden_dim=8, intermediate_dim=16)
    >>> model = bert_classifier(config, num_classes=2)
    >>> compile_classifier(model, num_steps=4, learning_rate=1e-3)
    >>> history = model.fit(
    ...     ["good", "bad"], [1, 0], batch_size=1, epochs=2, shuffle=False, verbose=0
    ... )
    >>> sorted(history.history)
    ['accuracy', 'f1', 'loss']

    Compiling is starting anew: optimizer state and loss scale are fresh. To change the precision of
    a compiled model, use `switch_precision`.
    """
    num_classes = getattr(model, "num_classes", None)
    if isinstance(num_classes, bool) or not isinstance(num_classes, numbers.Integral):
        raise TypeError(
            "compile_classifier needs a model with an integer attribute num_classes, such as a "
            f"BertClassifier. Received: {model!r} with num_classes={num_classes!r}."
        )
    optimizer = fine_tuning_optimizer(
        num_steps,
        learning_rate=learning_rate,
        warmup=warmup,
        weight_decay=weight_decay,
        global_clipnorm=global_clipnorm,
        epsilon=epsilon,
    )
    metrics: list[keras.metrics.Metric]
    if num_classes == 1:
        loss = keras.losses.MeanSquaredError()
        metrics = [keras.metrics.RootMeanSquaredError(name="rmse")]
    else:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        metrics = [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
        if num_classes == 2:
            metrics.append(SparseF1())
    model.compile(optimizer=optimizer, loss=loss, metrics=metrics)


def _check_steps(name: str, value: object, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer. Received: {name}={value!r}.")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}. Received: {name}={value!r}.")


def _check_number(
    name: str, value: object, above: float | None = None, at_least: float | None = None
) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number. Received: {name}={value!r}.")
    number = float(value)
    if above is not None and not above < number < float("inf"):
        raise ValueError(f"{name} must be above {above} and finite. Received: {name}={value!r}.")
    if at_least is not None and not at_least <= number < float("inf"):
        raise ValueError(
            f"{name} must be at least {at_least} and finite. Received: {name}={value!r}."
        )
