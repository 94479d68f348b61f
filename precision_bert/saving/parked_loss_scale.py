"""A loss scale that a stage in another precision has put aside, as a file holds it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from precision_bert.loss_scale_variables import loss_scale_factors
from precision_bert.loss_scaling import ParkedLossScale, parked_loss_scales, settings


def describe_parked(optimizer: keras.optimizers.Optimizer) -> dict[str, Any] | None:
    """Returns the loss scale that was put aside for an optimizer, ready for JSON.

    Args:
        optimizer: An optimizer without a loss scale.

    Returns:
        `"optimizer"`, the serialized loss-scale optimizer around one that does nothing (so that
        Keras keeps the class too, also a user's own), and `"values"` of its variables by name;
        `None` if none was put aside.
    """
    parked = parked_loss_scales.get(optimizer)
    if parked is None:
        return None
    around_nothing = parked.optimizer_class(keras.optimizers.SGD(), **parked.config)
    return {
        "optimizer": keras.saving.serialize_keras_object(around_nothing),
        "values": {name: np.asarray(value).tolist() for name, value in parked.values.items()},
    }


def restore_parked(
    optimizer: keras.optimizers.Optimizer,
    scaling: keras.optimizers.Optimizer,
    values: dict[str, Any],
) -> None:
    """Puts a loss scale aside for an optimizer, as `describe_parked` has described it.

    Args:
        optimizer: An optimizer without a loss scale.
        scaling: A loss-scale optimizer with the settings, around any other.
        values: Of its variables, by name.
    """
    parked_loss_scales[optimizer] = ParkedLossScale(type(scaling), settings(scaling), values)


def parked_loss_scale_factor(optimizer: keras.optimizers.Optimizer) -> float | None:
    """Returns the `loss_scale_factor` that `optimizer` gets back when its loss scale goes."""
    return loss_scale_factors.get(optimizer)


def park_loss_scale_factor(optimizer: keras.optimizers.Optimizer, factor: float) -> None:
    """Sets the `loss_scale_factor` that `optimizer` gets back when its loss scale goes."""
    loss_scale_factors[optimizer] = factor
