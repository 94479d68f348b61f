"""Checks what is to be given to `fit`, and groups the stages into calls of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from precision_bert.input_checks import check_training_data
from precision_bert.schedules import PrecisionSchedule
from precision_bert.switching import check_model

# First epoch, epoch after the last, and (x, y, sample_weight) of one call of fit.
FitRun = tuple[int, int, tuple[Any, Any, Any]]

# What `staged_fit` sets itself.
_OWN_FIT_ARGUMENTS = ("self", "x", "y", "epochs", "initial_epoch", "callbacks", "validation_data")


def check_fit_arguments(fit_arguments: dict[str, Any]) -> None:
    """Refuses what `fit` does not know, and what the stages set.

    Raises:
        TypeError: Naming the argument.
    """
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


def check_callbacks(callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Refuses callbacks that cannot work over a switch.

    Raises:
        ValueError: With what to use instead.
    """
    if any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in callbacks):
        raise ValueError(
            "BackupAndRestore loses the optimizer's state where it restores in another precision "
            "than it saved in, and skips later stages. Give checkpoint_dir= and resume=True "
            "instead."
        )


def check_compiled(model: keras.Model, optimizer: Any, loss: Any, metrics: Any) -> None:
    """Refuses a model that cannot be trained, or one that is to be compiled twice.

    Raises:
        TypeError: If it is no model.
        ValueError: If optimizer and loss are missing, or given for a model that has its own.
    """
    check_model(model)
    if model.compiled:
        if any(given is not None for given in (optimizer, loss, metrics)):
            raise ValueError(
                "The model is compiled already, so optimizer, loss and metrics cannot be given: "
                "they would silently replace its own. Drop the arguments, or compile the model "
                "yourself."
            )
        if model.optimizer is None:
            raise ValueError("The model was compiled without an optimizer; compile it with one.")
    elif optimizer is None or loss is None:
        raise ValueError(
            "The model is not compiled: give optimizer= and loss= (and metrics=), or call "
            f"model.compile first. Received: optimizer={optimizer!r}, loss={loss!r}."
        )


def fit_runs(schedule: PrecisionSchedule, x: Any, y: Any, sample_weight: Any) -> list[FitRun]:
    """Groups the stages into calls of `fit`: a new one begins where a stage brings its own data.

    Stages on the same data share one call, so that shuffling, early stopping and every other
    callback see what they would see in a plain fit.
    """
    runs: list[FitRun] = []
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


def can_be_shuffled(x: Any) -> bool:
    """Tells whether `fit` can shuffle `x`."""
    # fit's default, except where Keras would warn at every call that it cannot obey it.
    if isinstance(x, keras.utils.PyDataset):
        return x.num_batches is not None
    return not isinstance(x, (tf.data.Dataset, Iterator))


def check_data(
    model: keras.Model, loss: Any, runs: list[FitRun], *, is_split: bool
) -> list[FitRun]:
    """Returns the runs with the data to give to `fit`, checked by `check_training_data`.

    Args:
        model: The model.
        loss: Its loss.
        runs: What `fit_runs` returned.
        is_split: Whether a part of the data is to be split off for validation.

    Raises:
        ValueError: If the data cannot be trained on, or not be split.
    """
    # Each data once: of a generator that serves two runs, a batch is read ahead.
    checked: dict[int, Any] = {}
    for _, _, (x, y, _) in runs:
        if is_split and isinstance(x, (tf.data.Dataset, keras.utils.PyDataset, Iterator)):
            raise ValueError(
                "validation_split splits arrays only; give validation_data instead. Received: x of "
                f"type {type(x).__name__}."
            )
        if id(x) not in checked:
            checked[id(x)] = check_training_data(model, x, y, loss=loss)
    return [(first, end, (checked[id(x)], y, w)) for first, end, (x, y, w) in runs]
