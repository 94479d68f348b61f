"""The variables of loss-scale optimizers: remembering them, and setting all of them or none."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

# Keyed by the inner optimizer, weakly, so that an entry lives as long as that: a `compile` with it
# throws the loss scale around it away. Variables hold no reference to an optimizer.
own_variables: weakref.WeakKeyDictionary[keras.optimizers.Optimizer, list[keras.Variable]] = (
    weakref.WeakKeyDictionary()
)
# The `loss_scale_factor` that an inner optimizer gets back when its loss scale is taken off.
loss_scale_factors: weakref.WeakKeyDictionary[keras.optimizers.Optimizer, float] = (
    weakref.WeakKeyDictionary()
)

# How many variables of their own loss-scale optimizers have had: none (a float32 stage), those of
# Keras' own, ours before skipped steps in a row were counted. They are the first ones of ours.
OLDER_LAYOUTS = (0, 4, 5)
# Counts that not all files have, and what a loss-scale optimizer has but does not use.
_OPTIONAL = {
    "iteration",
    "learning_rate",
    "skipped_steps",
    "consecutive_skipped_steps",
    "bad_since_growth",
    "bad_since_move",
    "steps_since_move",
}


def assign_by_name(
    variables: Sequence[keras.Variable], values: Mapping[str, Any], bounds: tuple[float, float]
) -> None:
    """Sets a loss-scale optimizer's own variables by name, all of them or none.

    Args:
        variables: All of them.
        values: At least `dynamic_scale` and `step_counter`, and what a class of the user's adds;
            counts that are not there, which older files do not have, begin at 0.
        bounds: The floor and the ceiling of the scale; see `usable_scale`.

    Raises:
        ValueError: If one of them is missing, or a value has another shape.
    """
    for variable in variables:
        if variable.name not in values and variable.name not in _OPTIONAL:
            raise ValueError(
                f"The values of a loss scale must hold {variable.name!r}. Received: "
                f"{sorted(values)}. Nothing was set."
            )
    chosen = [values.get(variable.name, 0) for variable in variables]
    _check_shapes(variables, chosen)
    scale = usable_scale(values["dynamic_scale"], bounds)
    for variable, value in zip(variables, chosen, strict=True):
        variable.assign(scale if variable.name == "dynamic_scale" else value)


def assign_by_position(
    own: Sequence[keras.Variable],
    inner: Sequence[keras.Variable],
    values: Sequence[Any],
    bounds: tuple[float, float],
) -> None:
    """Sets all variables of a loss-scale optimizer and of the one inside it, or none.

    Args:
        own: The loss-scale optimizer's own variables.
        inner: Those of the inner optimizer.
        values: For both, or for the inner ones and as many of the own as an older layout has.
        bounds: See `assign_by_name`.

    Raises:
        ValueError: If their number or a shape does not fit.
    """
    count = len(values) - len(inner)
    if count not in (*OLDER_LAYOUTS, len(own)):
        raise ValueError(
            f"The loss-scale optimizer has {len(own) + len(inner)} variables, {len(inner)} of them "
            f"the inner optimizer's. Received: {len(values)} values. Take those of the same inner "
            "optimizer, built for the same variables."
        )
    _check_shapes([*own[:count], *inner], values)
    if count:
        names = [variable.name for variable in own[:count]]
        assign_by_name(own, dict(zip(names, values[:count], strict=True)), bounds)
    for variable, value in zip(inner, values[count:], strict=True):
        variable.assign(value)


def usable_scale(scale: Any, bounds: tuple[float, float]) -> float:
    """Returns a scale as it is; the bound that it has passed, with a warning, if it is 0 or inf.

    Keras' own optimizer, which has no bounds, can arrive at either: a step at scale 0 writes NaN,
    and none is ever applied at infinity.

    Args:
        scale: The scale.
        bounds: The floor and the ceiling.
    """
    value = float(np.asarray(scale))
    if math.isfinite(value) and value > 0:
        return value
    bound = bounds[1] if value == math.inf else bounds[0]
    warnings.warn(
        f"The loss scale was {value}, by which no gradient can be divided. It goes on at {bound}.",
        RuntimeWarning,
        stacklevel=2,
    )
    return bound


def _check_shapes(variables: Sequence[keras.Variable], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        if np.shape(value) != tuple(variable.shape):
            raise ValueError(
                f"The variable {variable.path!r} has the shape {tuple(variable.shape)}. Received: "
                f"a value of shape {np.shape(value)}. Nothing was set."
            )
