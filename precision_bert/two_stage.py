"""Trains one model through stages of different precision: `two_stage_fit` and `staged_fit`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from precision_bert.callbacks.loss_scale_monitor import LossScaleMonitor
from precision_bert.callbacks.stage_recorder import StageRecorder
from precision_bert.input_checks import check_training_data
from precision_bert.learning_rate import set_learning_rate
from precision_bert.policies import PolicyName, check_policy
from precision_bert.schedules import PrecisionSchedule, Stage, check_count
from precision_bert.staged_history import StagedHistory
from precision_bert.switching import precision_scope, renew_functions, switch_precision


def two_stage_fit(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    epochs: int,
    switch_epoch: int,
    low: PolicyName = "mixed_float16",
    high: PolicyName = "float32",
    learning_rate: Any = None,
    high_learning_rate: Any = None,
    validation_data: Any = None,
    callbacks: Sequence[keras.callbacks.Callback] | None = None,
    optimizer: Any = None,
    loss: Any = None,
    metrics: Any = None,
    **fit_arguments: Any,
) -> StagedHistory:
    r"""Trains a model in one precision and finishes it in another.

    Epoch $e$, counted from 0, runs in `low` for $e < \text{switch\_epoch}$ and in `high` from
    there to the last epoch.

    Args:
        model: Any Keras model with float32 variables: Functional, Sequential or subclassed. It is
            trained in place and stays in the precision of the last stage that ran.
        x: Training data, whatever `model.fit` takes: arrays, dicts, a `tf.data.Dataset`, a
            `keras.utils.PyDataset`.
        y: Targets, where `x` does not hold them.
        epochs: Epochs of the whole training.
        switch_epoch: The epoch to switch before, counted from 0. With 0 all epochs run in `high`,
            with `epochs` all run in `low`.
        low: The policy of the first stage.
        high: The policy of the second stage.
        learning_rate: A float or a `LearningRateSchedule` from the first step on; `None` keeps the
            compiled optimizer's.
        high_learning_rate: The same for the second stage, counted from its first step; `None` lets
            the first stage's go on over the switch.
        validation_data: As in `model.fit`; evaluated after each epoch, in that epoch's precision.
        callbacks: Keras callbacks; they see one training of `epochs` epochs.
        optimizer: For a model that is not compiled: what `compile` takes.
        loss: For a model that is not compiled: what `compile` takes.
        metrics: For a model that is not compiled: what `compile` takes.
        **fit_arguments: Other arguments of `model.fit`: `batch_size`, `verbose`, `class_weight`, …

    Returns:
        A `StagedHistory`. Print it for a table of the stages.

    Raises:
        TypeError: If an argument has a wrong type, or is unknown to `fit`.
        ValueError: If an argument is out of range or the data cannot be trained on. All is checked
            before the first step.

    Example:

    >>> import numpy as np
    >>> x = np.linspace(-1, 1, 64, dtype="float32").reshape(32, 2)
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(keras.optimizers.Adam(0.01), "mse")
    >>> history = two_stage_fit(model, x, x[:, :1], epochs=4, switch_epoch=3, verbose=0)
    >>> [stage.policy for stage in history.stages], len(history.history["loss"])
    (['mixed_float16', 'float32'], 4)

    float16 stages train under a loss scale, float32 stages without; weights, optimizer state and
    step count go on over the switch. For more than two stages, or stages with their own data, use
    `staged_fit`; for a plain `fit`, the callback `PrecisionSwitch`.
    """
    check_count(epochs, "epochs", minimum=1)
    check_count(switch_epoch, "switch_epoch", minimum=0)
    if switch_epoch > epochs:
        raise ValueError(
            f"switch_epoch must lie between 0 and epochs={epochs}: the switch happens before epoch "
            f"switch_epoch, counted from 0. Received: switch_epoch={switch_epoch}."
        )
    check_policy(low, "low")
    check_policy(high, "high")
    if high_learning_rate is None and switch_epoch == 0:
        high_learning_rate = learning_rate  # the second stage is then the whole training
    stages = [
        Stage(low, switch_epoch, learning_rate),
        Stage(high, epochs - switch_epoch, high_learning_rate),
    ]
    return staged_fit(
        model,
        stages,
        x,
        y,
        validation_data=validation_data,
        callbacks=callbacks,
        optimizer=optimizer,
        loss=loss,
        metrics=metrics,
        **fit_arguments,
    )


def staged_fit(
    model: keras.Model,
    stages: Sequence[Stage] | PrecisionSchedule,
    x: Any = None,
    y: Any = None,
    *,
    validation_data: Any = None,
    callbacks: Sequence[keras.callbacks.Callback] | None = None,
    optimizer: Any = None,
    loss: Any = None,
    metrics: Any = None,
    **fit_arguments: Any,
) -> StagedHistory:
    """Trains a model through any number of precision stages.

    Args:
        model: Any Keras model with float32 variables, compiled or not.
        stages: The stages in order, or a `PrecisionSchedule`.
        x: Training data for the stages that bring none of their own, as in `model.fit`.
        y: Targets, where `x` does not hold them.
        validation_data: As in `model.fit`; evaluated after each epoch, in that epoch's precision.
        callbacks: Keras callbacks. They see one training, unless a stage has its own data: then a
            new `fit` begins there, and `on_train_begin` and `on_train_end` are called once more.
        optimizer: For a model that is not compiled: what `compile` takes.
        loss: For a model that is not compiled: what `compile` takes.
        metrics: For a model that is not compiled: what `compile` takes.
        **fit_arguments: Other arguments of `model.fit`; they hold for every stage.

    Returns:
        A `StagedHistory`: Keras' history over all stages, and a record of each.

    Raises:
        TypeError: If an argument has a wrong type, or is unknown to `fit`.
        ValueError: If an argument is out of range or the data cannot be trained on. All is checked
            before the first step.

    Example:

    >>> import numpy as np
    >>> x = np.linspace(-1, 1, 64, dtype="float32").reshape(32, 2)
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> stages = [Stage("mixed_float16", 1), Stage("mixed_bfloat16", 1), Stage("float32", 1, 1e-4)]
    >>> history = staged_fit(model, stages, x, x[:, :1], verbose=0)
    >>> [stage.policy for stage in history.stages]
    ['mixed_float16', 'mixed_bfloat16', 'float32']

    A callback that stops the training stops all of it: later stages do not run. Keras' global
    policy is set for each stage and restored at the end, also when training fails; the model stays
    in the policy of the stage that ran last.
    """
    schedule = stages if isinstance(stages, PrecisionSchedule) else PrecisionSchedule(stages)
    _check_fit_arguments(fit_arguments)
    _check_compiled(model, optimizer, loss)
    runs = _runs(schedule, x, y, fit_arguments.get("sample_weight"))
    runs = [(first, last, _checked(model, loss, data)) for first, last, data in runs]
    if not model.compiled:
        model.compile(optimizer=optimizer, loss=loss, metrics=metrics)

    entrance = _StageEntrance(schedule, verbose=fit_arguments.get("verbose", "auto") != 0)
    recorder = StageRecorder(schedule)
    all_callbacks = [entrance, recorder, LossScaleMonitor(), *(callbacks or ())]
    history: dict[str, list[Any]] = {}
    epochs_run: list[int] = []
    shuffle = fit_arguments.pop("shuffle", None)
    fit_arguments.pop("sample_weight", None)
    with precision_scope(schedule.stage_at(0).policy):
        for first_epoch, end_epoch, (run_x, run_y, run_weight) in runs:
            entrance.enter(model, first_epoch)
            part = model.fit(
                run_x,
                run_y,
                sample_weight=run_weight,
                shuffle=_can_be_shuffled(run_x) if shuffle is None else shuffle,
                initial_epoch=first_epoch,
                epochs=end_epoch,
                validation_data=validation_data,
                callbacks=all_callbacks,
                **fit_arguments,
            )
            epochs_run += part.epoch
            for name, values in part.history.items():
                history.setdefault(name, []).extend(values)
            if len(epochs_run) < end_epoch:
                break
        recorder.close()
    return StagedHistory(
        history, epochs_run, recorder.stages, stopped_early=len(epochs_run) < schedule.epochs
    )


class _StageEntrance(keras.callbacks.Callback):
    """Enters each stage at its first epoch: policy, learning rate, Keras' global policy."""

    def __init__(self, schedule: PrecisionSchedule, *, verbose: bool) -> None:
        super().__init__()
        self._schedule = schedule
        self._verbose = verbose
        self._entered: int | None = None

    def enter(self, model: keras.Model, epoch: int) -> None:
        """Puts `model` into the stage that `epoch` belongs to, if it is not in it yet.

        Called before `fit` too, so that nothing is traced in a precision that is not used.
        """
        index = self._schedule.index_at(epoch)
        if index == self._entered:
            return
        self._entered = index
        stage = self._schedule.stages[index]
        keras.config.set_dtype_policy(stage.policy)
        report = switch_precision(model, stage.policy)
        if stage.learning_rate is not None and set_learning_rate(
            model.optimizer, stage.learning_rate
        ):
            renew_functions(model)
        if self._verbose:
            print(f"Stage {index} from epoch {epoch + 1}/{self._schedule.epochs}: {report}")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Enters the epoch's stage inside a running `fit`."""
        self.enter(self.model, epoch)


# What `staged_fit` sets itself.
_OWN_FIT_ARGUMENTS = ("self", "x", "y", "epochs", "initial_epoch", "callbacks", "validation_data")


def _check_fit_arguments(fit_arguments: dict[str, Any]) -> None:
    allowed = [
        n for n in inspect.signature(keras.Model.fit).parameters if n not in _OWN_FIT_ARGUMENTS
    ]
    for name in fit_arguments:
        if name in allowed:
            continue
        if name in _OWN_FIT_ARGUMENTS:
            raise TypeError(f"{name} is set by the stages and cannot be given. Received: {name}.")
        raise TypeError(
            f"Unknown argument {name}. Besides its own arguments this function takes those of "
            f"model.fit: {', '.join(allowed)}."
        )


def _check_compiled(model: keras.Model, optimizer: Any, loss: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"model must be a keras.Model. Received: {model!r} of type {type(model).__name__}."
        )
    if model.compiled:
        if optimizer is not None or loss is not None:
            raise ValueError(
                "The model is compiled already, so optimizer and loss cannot be given: they would "
                "silently replace its own. Drop the arguments, or compile the model yourself."
            )
        if model.optimizer is None:
            raise ValueError("The model was compiled without an optimizer; compile it with one.")
    elif optimizer is None or loss is None:
        raise ValueError(
            "The model is not compiled: give optimizer= and loss= (and metrics=), or call "
            f"model.compile first. Received: optimizer={optimizer!r}, loss={loss!r}."
        )


def _runs(
    schedule: PrecisionSchedule, x: Any, y: Any, sample_weight: Any
) -> list[tuple[int, int, tuple[Any, Any, Any]]]:
    """Groups the stages into calls of `fit`: a new one begins where a stage brings its own data.

    Stages on the same data share one call, so that shuffling, early stopping and every other
    callback see what they would see in a plain fit.
    """
    runs: list[tuple[int, int, tuple[Any, Any, Any]]] = []
    previous: Any = object()
    for stage, first, end in zip(
        schedule.stages, schedule.boundaries, schedule.boundaries[1:], strict=False
    ):
        if stage.epochs == 0:
            continue
        if stage.data is None and x is None:
            raise ValueError(
                f"Stage {schedule.stages.index(stage)} has no data: give x, or the stage's data."
            )
        if runs and stage.data is previous:
            runs[-1] = (runs[-1][0], end, runs[-1][2])
            continue
        previous = stage.data
        if stage.data is None:
            runs.append((first, end, (x, y, sample_weight)))
        else:
            runs.append((first, end, keras.utils.unpack_x_y_sample_weight(stage.data)))
    return runs


def _can_be_shuffled(x: Any) -> bool:
    # fit's default, except where Keras would warn at every call that it cannot obey it.
    if isinstance(x, keras.utils.PyDataset):
        return x.num_batches is not None
    return not isinstance(x, (tf.data.Dataset, Iterator))


def _checked(model: keras.Model, loss: Any, data: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    x, y, sample_weight = data
    x = check_training_data(model, x, y, loss=loss if loss is not None else model.loss)
    return x, y, sample_weight
