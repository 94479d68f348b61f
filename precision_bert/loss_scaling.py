"""Puts a loss scale on an optimizer, takes it off, and reads what it has counted."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, replace
from typing import Any

import keras
from keras import ops

from precision_bert.loss_scale import LossScaleRule
from precision_bert.loss_scale_optimizer import DynamicLossScaleOptimizer
from precision_bert.loss_scale_variables import (
    OLDER_LAYOUTS,
    assign_by_name,
    loss_scale_factors,
    own_variables,
)


@dataclass(frozen=True)
class ParkedLossScale:
    """A loss-scale optimizer without its inner optimizer: enough to put it back on."""

    optimizer_class: type[keras.optimizers.Optimizer]
    config: dict[str, Any]
    values: dict[str, Any]  # its own variables' values by name, empty if it was never built


# Keyed by the inner optimizer, weakly: what is parked lives exactly as long as that optimizer, and
# holds no reference back to it. Nothing is stored on the user's objects.
parked_loss_scales: weakref.WeakKeyDictionary[keras.optimizers.Optimizer, ParkedLossScale] = (
    weakref.WeakKeyDictionary()
)


def variable_value(variable: keras.Variable) -> Any:
    """Returns the value of a variable as a NumPy array, on one device or mirrored over several."""
    # Through a tensor: a mirrored variable has no value of its own to read.
    return ops.convert_to_numpy(ops.convert_to_tensor(variable))


def scales_loss(optimizer: keras.optimizers.Optimizer) -> bool:
    """Tells whether `optimizer` is a loss-scale optimizer around another."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def wrap_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns a loss-scale optimizer around `optimizer`, going on with the scale it last had.

    The inner optimizer object stays the same, so its moments, step count, accumulators and
    learning-rate schedule go on. Keras' own `LossScaleOptimizer` is replaced by
    `DynamicLossScaleOptimizer` with the same scale and settings; a subclass of it made by the user
    is returned as it is.

    Args:
        optimizer: Any Keras optimizer.

    Raises:
        TypeError: If it scales the loss twice: a loss-scale optimizer around another.
        ValueError: If it is Keras' own with a scale or growth period that is out of range.
    """
    if type(optimizer) is keras.optimizers.LossScaleOptimizer:
        known = own_variables.get(optimizer.inner_optimizer)
        optimizer = unwrap_optimizer(optimizer)
        if known and not _has_moved(parked_loss_scales[optimizer]):
            # A `compile` has put a new scale around an optimizer whose scale is known.
            values = {variable.name: variable_value(variable) for variable in known}
            parked_loss_scales[optimizer] = replace(parked_loss_scales[optimizer], values=values)
    if scales_loss(optimizer):
        _check_scales_once(optimizer)
        return optimizer
    factor = optimizer.loss_scale_factor
    if factor is not None:
        loss_scale_factors[optimizer] = factor
    parked = parked_loss_scales.get(optimizer)
    if parked is None:
        wrapper = DynamicLossScaleOptimizer(optimizer)
    elif parked.optimizer_class is keras.optimizers.LossScaleOptimizer:
        wrapper = _counting(optimizer, parked)
    else:
        wrapper = parked.optimizer_class(optimizer, **parked.config)
    if optimizer.built:
        # Built now rather than in the next trace, because the parked scale must be in its
        # variables before the first step uses them.
        wrapper.build(optimizer._trainable_variables)
        if parked is not None:
            set_loss_scale_values(wrapper, parked.values)
    return wrapper


def _counting(
    optimizer: keras.optimizers.Optimizer, parked: ParkedLossScale
) -> DynamicLossScaleOptimizer:
    """Returns ours in the place of Keras' own."""
    first, default = parked.config["initial_scale"], LossScaleRule()
    scale = float(parked.values.get("dynamic_scale", first))
    # A scale that was set up outside our default bounds is the user's choice: it stays. (Nobody
    # chooses 0 or infinity.)
    chosen = [first, scale] if 0 < scale < math.inf else [first]
    lowest, highest = min(*chosen, default.min_scale), max(*chosen, default.max_scale)
    return DynamicLossScaleOptimizer(
        optimizer, **parked.config, min_scale=lowest, max_scale=highest
    )


def _check_scales_once(optimizer: keras.optimizers.Optimizer) -> None:
    inner = optimizer.inner_optimizer
    if scales_loss(inner):
        raise TypeError(
            f"The optimizer {optimizer.name!r} scales the loss, and so does {inner.name!r} inside "
            "it: the scales multiply, and the outer one sees only what the inner one lets through. "
            "Compile the model with one around the optimizer itself."
        )


def _has_moved(parked: ParkedLossScale) -> bool:
    """Tells whether a loss-scale optimizer has applied or skipped a step."""
    moved = parked.values.get("dynamic_scale", parked.config["initial_scale"])
    return bool(parked.values.get("step_counter", 0)) or moved != parked.config["initial_scale"]


def unwrap_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer inside a loss-scale optimizer; any other optimizer as it is.

    The scale, its streak and the counts are remembered, and `wrap_optimizer` puts them back. A
    `loss_scale_factor` that the user had set on the inner optimizer is restored.

    Args:
        optimizer: Any Keras optimizer.
    """
    if not scales_loss(optimizer):
        return optimizer
    _check_scales_once(optimizer)
    inner = optimizer.inner_optimizer
    parked_loss_scales[inner] = ParkedLossScale(
        type(optimizer), settings(optimizer), loss_scale_values(optimizer)
    )
    inner.loss_scale_factor = loss_scale_factors.pop(inner, None)
    return inner


def settings(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Returns the arguments of a loss-scale optimizer, without its inner optimizer."""
    # Not from get_config, which serialises the inner optimizer too: that fails where a user's
    # learning-rate schedule has no get_config, and would end a training at its switch.
    if type(optimizer) is DynamicLossScaleOptimizer:
        return {"name": optimizer.name, "rule": optimizer.rule}
    if type(optimizer) is keras.optimizers.LossScaleOptimizer:
        return {
            "name": optimizer.name,
            "initial_scale": optimizer.initial_scale,
            "dynamic_growth_steps": optimizer.dynamic_growth_steps,
        }
    config = optimizer.get_config()
    del config["inner_optimizer"]
    return config


def count_steps(optimizer: keras.optimizers.Optimizer) -> tuple[int, int | None]:
    """Returns how many steps `optimizer` has applied and how many it has skipped.

    A step is one batch's gradients: under gradient accumulation the batches count, not the updates.

    Args:
        optimizer: Any Keras optimizer.

    Returns:
        The tuple `(applied, skipped)`. Without a loss scale nothing is skipped, and the count of a
        loss scale that was put aside stands. `skipped` is `None` for a loss-scale optimizer that
        does not count its skipped steps.
    """
    # `iterations` counts updates; only `_iterations` counts the batches of an accumulation window.
    applied = int(variable_value(unwrapped(optimizer)._iterations))
    if scales_loss(optimizer) and not isinstance(optimizer, DynamicLossScaleOptimizer):
        return applied, None
    return applied, int(loss_scale_values(optimizer).get("skipped_steps", 0))


def count_skipped_in_a_row(optimizer: keras.optimizers.Optimizer) -> int | None:
    """Returns how many steps were skipped in a row up to now; as `count_steps` for other cases.

    Args:
        optimizer: Any Keras optimizer.
    """
    if scales_loss(optimizer) and not isinstance(optimizer, DynamicLossScaleOptimizer):
        return None
    return int(loss_scale_values(optimizer).get("consecutive_skipped_steps", 0))


def current_loss_scale(optimizer: keras.optimizers.Optimizer) -> float | None:
    """Returns the loss scale that the next step will use; `None` where the loss is not scaled.

    Args:
        optimizer: Any Keras optimizer.
    """
    if not scales_loss(optimizer):
        return None
    if not optimizer.built:
        return float(optimizer.initial_scale)
    return float(variable_value(optimizer.dynamic_scale))


def unwrapped(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer inside a loss-scale optimizer, changing nothing.

    Args:
        optimizer: Any Keras optimizer.
    """
    return optimizer.inner_optimizer if scales_loss(optimizer) else optimizer


def loss_scale_values(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Returns the loss scale, its streak and its counts by name, in use or put aside.

    Args:
        optimizer: Any Keras optimizer.

    Returns:
        The values of the loss-scale optimizer's own variables; empty if there is none, or if it has
        not trained yet.
    """
    if scales_loss(optimizer):
        return {v.name: variable_value(v) for v in optimizer._variables} if optimizer.built else {}
    parked = parked_loss_scales.get(optimizer)
    return dict(parked.values) if parked is not None else {}


def set_loss_scale_values(optimizer: keras.optimizers.Optimizer, values: dict[str, Any]) -> None:
    """Gives back what `loss_scale_values` returned.

    Args:
        optimizer: A built Keras optimizer. Where it does not scale the loss, the values are put
            aside, and `wrap_optimizer` goes on with them.
        values: By name; if empty, nothing changes. Counts that are not there, as in files of
            earlier versions, begin at 0.

    Raises:
        ValueError: If the scale or its streak is not there, or a value is no scalar; nothing is
            set then.
    """
    if not values:
        return
    if scales_loss(optimizer):
        own = optimizer._variables
        ours = isinstance(optimizer, DynamicLossScaleOptimizer)
        rule = optimizer.rule if ours else LossScaleRule()
        assign_by_name(own, values, (rule.min_scale, rule.max_scale))
        return
    # A scale that was put aside by another process: one with its own settings was compiled with
    # them and is parked here too, so what is missing is one that was made with the defaults.
    parked = parked_loss_scales.get(optimizer) or ParkedLossScale(DynamicLossScaleOptimizer, {}, {})
    parked_loss_scales[optimizer] = replace(parked, values=dict(values))


def has_older_layout(optimizer: keras.optimizers.Optimizer, values: list[Any]) -> bool:
    """Tells whether values are those of a loss-scale optimizer that counted less than ours does.

    Args:
        optimizer: Any Keras optimizer. If it is true of it, its `set_weights` takes the values.
        values: Of all its variables.
    """
    own = len(values) - len(unwrapped(optimizer).variables)
    return isinstance(optimizer, DynamicLossScaleOptimizer) and own in OLDER_LAYOUTS and own > 0
