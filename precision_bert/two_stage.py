"""Trains one model through stages of different precision: `two_stage_fit` and `staged_fit`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import keras

from precision_bert.callbacks.loss_scale_monitor import LossScaleMonitor
from precision_bert.callbacks.stage_entrance import StageEntrance
from precision_bert.callbacks.stage_recorder import StageRecorder
from precision_bert.callbacks.stall_guard import StallGuard
from precision_bert.fit_arguments import (
    can_be_shuffled,
    check_callbacks,
    check_compiled,
    check_data,
    check_fit_arguments,
    fit_runs,
)
from precision_bert.policies import PolicyName, check_policy
from precision_bert.policy_scope import precision_scope
from precision_bert.resuming import TrainingCheckpoints, check_checkpoint_dir
from precision_bert.schedules import PrecisionSchedule, Stage, check_count
from precision_bert.staged_history import StagedHistory


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
    checkpoint_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
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
            the first stage's go on over the switch. Unused where no second stage runs.
        validation_data: As in `model.fit`; evaluated after each epoch, in that epoch's precision.
        callbacks: Keras callbacks; they see one training of `epochs` epochs.
        optimizer: For a model that is not compiled: what `compile` takes.
        loss: For a model that is not compiled: what `compile` takes.
        metrics: For a model that is not compiled: what `compile` takes.
        checkpoint_dir: Folder to save the training to after each epoch; the last two are kept.
        resume: Whether to go on after the last epoch that `checkpoint_dir` holds; with none there,
            the training begins. The model must be built and compiled as it was at the start.
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
    epochs = check_count(epochs, "epochs", minimum=1)
    switch_epoch = check_count(switch_epoch, "switch_epoch", minimum=0)
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
        checkpoint_dir=checkpoint_dir,
        resume=resume,
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
    checkpoint_dir: str | os.PathLike[str] | None = None,
    resume: bool = False,
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
        checkpoint_dir: Folder to save the training to after each epoch; the last two are kept.
        resume: Whether to go on after the last epoch that `checkpoint_dir` holds; with none there,
            the training begins. The model must be built and compiled as it was at the start.
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

    A resumed training has the weights, optimizer state, loss scale, dropout seeds, learning rate,
    history and stage records of the one that was interrupted. It goes on bit for bit where the data
    does: give a data set that begins at the right epoch (`completed_epochs` tells which). The order
    in which Keras shuffles arrays starts anew, and so does what callbacks keep to themselves.
    """
    schedule = stages if isinstance(stages, PrecisionSchedule) else PrecisionSchedule(stages)
    check_fit_arguments(fit_arguments)
    check_callbacks(callbacks or ())
    check_compiled(model, optimizer, loss, metrics)
    if checkpoint_dir is not None:
        check_checkpoint_dir(checkpoint_dir, resume=resume)
    runs = check_data(
        model,
        model.loss if loss is None else loss,
        fit_runs(schedule, x, y, fit_arguments.pop("sample_weight", None)),
        is_split=bool(fit_arguments.get("validation_split")),
    )
    if not model.compiled:
        model.compile(optimizer=optimizer, loss=loss, metrics=metrics)
    shuffle = fit_arguments.pop("shuffle", None)
    verbose = fit_arguments.get("verbose", "auto") != 0

    entrance = StageEntrance(schedule, verbose=verbose)
    recorder = StageRecorder(schedule)
    guards = [callback for callback in callbacks or () if isinstance(callback, StallGuard)]
    for guard in guards:
        guard.join_stages(entrance, recorder)
    all_callbacks = [entrance, recorder, LossScaleMonitor(), *(callbacks or ())]
    history: dict[str, list[Any]] = {}
    epochs_run: list[int] = []
    with precision_scope(schedule.stage_at(0).policy):
        if checkpoint_dir is not None:
            checkpoints = TrainingCheckpoints(model, schedule, entrance, recorder, checkpoint_dir)
            history = checkpoints.begin()
            epochs_run = list(range(checkpoints.epochs_done))
            all_callbacks.append(checkpoints.saver(history))
            if verbose and epochs_run:
                print(f"Resuming after epoch {len(epochs_run)}/{schedule.epochs}.")
            if checkpoints.stopped:
                runs = []
        for first_epoch, end_epoch, (run_x, run_y, run_weight) in runs:
            if end_epoch <= len(epochs_run):
                continue
            first_epoch = max(first_epoch, len(epochs_run))
            entrance.enter(model, first_epoch)
            for guard in guards:
                guard.see(run_x, run_y, run_weight, fit_arguments.get("batch_size"))
            part = model.fit(
                run_x,
                run_y,
                sample_weight=run_weight,
                shuffle=can_be_shuffled(run_x) if shuffle is None else shuffle,
                initial_epoch=first_epoch,
                epochs=end_epoch,
                validation_data=validation_data,
                callbacks=all_callbacks,
                **fit_arguments,
            )
            epochs_run += part.epoch
            for name, values in part.history.items():
                history.setdefault(name, []).extend(values)
            if model.stop_training:
                break
        recorder.close()
    return StagedHistory(
        history, epochs_run, recorder.stages, stopped_early=len(epochs_run) < schedule.epochs
    )
