"""Checks what is to be given to `fit`, and groups the stages into calls of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from precision_bert.input_checks import check_training_data
from precision_bert.schedules import PrecisionSchedule

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


def check_compiled(model: keras.Model, optimizer: Any, loss: Any) -> None:
    """Refuses a model that cannot be trained, or one that is to be compiled twice.

    Raises:
        TypeError: If it is no model.
        ValueError: If optimizer and loss are missing, or given for a model that has its own.
    """
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


def fit_runs(
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


def can_be_shuffled(x: Any) -> bool:
    """Tells whether `fit` can shuffle `x`."""
    # fit's default, except where Keras would warn at every call that it cannot obey it.
    if isinstance(x, keras.utils.PyDataset):
        return x.num_batches is not None
    return not isinstance(x, (tf.data.Dataset, Iterator))


def checked_data(model: keras.Model, loss: Any, data: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Returns `(x, y, sample_weight)` to give to `fit`, checked by `check_training_data`."""
    x, y, sample_weight = data
    return check_training_data(model, x, y, loss=loss), y, sample_weight
