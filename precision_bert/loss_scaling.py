"""Puts a loss scale on an optimizer, takes it off, and reads what it has counted."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
from keras import ops

from precision_bert.loss_scale_optimizer import DynamicLossScaleOptimizer, own_variables


@dataclass(frozen=True)
class _Parked:
    """A loss-scale optimizer without its inner optimizer: enough to put it back on."""

    optimizer_class: type[keras.optimizers.Optimizer]
    config: dict[str, Any]
    values: dict[str, Any]  # its own variables' values by name, empty if it was never built


# Keyed by the inner optimizer, weakly: what is parked lives exactly as long as that optimizer, and
# holds no reference back to it. Nothing is stored on the user's objects.
_parked: weakref.WeakKeyDictionary[keras.optimizers.Optimizer, _Parked] = (
    weakref.WeakKeyDictionary()
)
_loss_scale_factors: weakref.WeakKeyDictionary[keras.optimizers.Optimizer, float] = (
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
    """
    if type(optimizer) is keras.optimizers.LossScaleOptimizer:
        known = own_variables.get(optimizer.inner_optimizer)
        optimizer = unwrap_optimizer(optimizer)
        if known and not _has_moved(_parked[optimizer]):
            # A `compile` has put a new scale around an optimizer whose scale is known.
            values = {variable.name: variable_value(variable) for variable in known}
            _parked[optimizer] = replace(_parked[optimizer], values=values)
    if scales_loss(optimizer):
        return optimizer
    factor = optimizer.loss_scale_factor
    if factor is not None:
        _loss_scale_factors[optimizer] = factor
    parked = _parked.get(optimizer)
    if parked is None:
        wrapper = DynamicLossScaleOptimizer(optimizer)
    elif parked.optimizer_class is keras.optimizers.LossScaleOptimizer:
        # A scale that was set up outside our default bounds is the user's choice: it stays.
        settings = dict(parked.config)
        scale = float(parked.values.get("dynamic_scale", settings["initial_scale"]))
        lowest = min(settings["initial_scale"], scale, 1.0)
        highest = max(settings["initial_scale"], scale, 2.0**24)
        wrapper = DynamicLossScaleOptimizer(
            optimizer, **settings, min_scale=lowest, max_scale=highest
        )
    else:
        wrapper = parked.optimizer_class(optimizer, **parked.config)
    if optimizer.built:
        # Built now rather than in the next trace, because the parked scale must be in its
        # variables before the first step uses them.
        wrapper.build(optimizer._trainable_variables)
        if parked is not None:
            for variable in wrapper._variables:
                if variable.name in parked.values:
                    variable.assign(parked.values[variable.name])
    return wrapper


def _has_moved(parked: _Parked) -> bool:
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
    inner = optimizer.inner_optimizer
    config = _settings(optimizer)
    _parked[inner] = _Parked(type(optimizer), config, loss_scale_values(optimizer))
    inner.loss_scale_factor = _loss_scale_factors.pop(inner, None)
    return inner


def _settings(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """Returns the arguments of a loss-scale optimizer, without its inner optimizer."""
    if type(optimizer) in (DynamicLossScaleOptimizer, keras.optimizers.LossScaleOptimizer):
        # Not from get_config, which serialises the inner optimizer too: that fails where a user's
        # learning-rate schedule has no get_config, and would end a training at its switch.
        settings = {
            "name": optimizer.name,
            "initial_scale": optimizer.initial_scale,
            "dynamic_growth_steps": optimizer.dynamic_growth_steps,
        }
        if isinstance(optimizer, DynamicLossScaleOptimizer):
            settings |= {
                "min_scale": optimizer.rule.min_scale,
                "max_scale": optimizer.rule.max_scale,
            }
        return settings
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
    parked = _parked.get(optimizer)
    return dict(parked.values) if parked is not None else {}


def set_loss_scale_values(optimizer: keras.optimizers.Optimizer, values: dict[str, Any]) -> None:
    """Gives back what `loss_scale_values` returned.

    Args:
        optimizer: A built Keras optimizer. Where it does not scale the loss, the values are put
            aside, and `wrap_optimizer` goes on with them.
        values: By name; if empty, nothing changes.
    """
    if not values:
        return
    if scales_loss(optimizer):
        for variable in optimizer._variables:
            variable.assign(values[variable.name])
        return
    # A scale that was put aside by another process: one with its own settings was compiled with
    # them and is parked here too, so what is missing is one that was made with the defaults.
    parked = _parked.get(optimizer) or _Parked(DynamicLossScaleOptimizer, {}, {})
    _parked[optimizer] = replace(parked, values=dict(values))


def describe_parked(optimizer: keras.optimizers.Optimizer) -> dict[str, Any] | None:
    """Returns the loss scale that was put aside for an optimizer, ready for JSON.

    Args:
        optimizer: An optimizer without a loss scale.

    Returns:
        `"optimizer"`, the serialized loss-scale optimizer around one that does nothing (so that
        Keras keeps the class too, also a user's own), and `"values"` of its variables by name;
        `None` if none was put aside.
    """
    parked = _parked.get(optimizer)
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
    _parked[optimizer] = _Parked(type(scaling), _settings(scaling), values)


def parked_loss_scale_factor(optimizer: keras.optimizers.Optimizer) -> float | None:
    """Returns the `loss_scale_factor` that `optimizer` gets back when its loss scale goes."""
    return _loss_scale_factors.get(optimizer)


def park_loss_scale_factor(optimizer: keras.optimizers.Optimizer, factor: float) -> None:
    """Sets the `loss_scale_factor` that `optimizer` gets back when its loss scale goes."""
    _loss_scale_factors[optimizer] = factor
