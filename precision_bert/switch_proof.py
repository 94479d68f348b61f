"""Proves that a switched model computes in no half precision but its new policy's."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from types import TracebackType
from typing import Any

import keras

from precision_bert.audit import audit_precision
from precision_bert.frozen_precision import frozen_precision
from precision_bert.layer_policies import is_container
from precision_bert.policies import PolicyName

# Their layers follow their policies: that is tested of each, and need not be seen each time.
_KNOWN = ("keras.", "keras_hub.", "precision_bert.")


def can_be_traced(model: keras.Model, layers: Iterable[keras.Layer]) -> bool:
    """Tells whether a model has to be traced to know what it computes in, and can be.

    Layers may run code of the user's own, which casts as it likes. Some models cannot be traced:
    they do not tell what their inputs are, or run eagerly only.

    Args:
        model: The model, before its switch.
        layers: Its layers.
    """
    if not model.built or not any(map(_runs_own_code, layers)):
        return False
    try:
        audit_precision(model, "predict")
    except Exception:  # whatever the reason is, it is none of the switch's
        return False
    return True


def check_switched(
    model: keras.Model,
    layers: dict[keras.Layer, str],
    islands: Collection[keras.Layer],
    policy: PolicyName,
    *,
    trace: bool,
) -> None:
    """Refuses a model that does not compute as its new policy says.

    Args:
        model: The model, whose layers have their new policies.
        layers: Its layers with their paths.
        islands: Those that need not follow the policy.
        policy: The policy.
        trace: Whether to trace the forward pass too, besides looking at what layers hold.

    Raises:
        ValueError: Naming what is in the way, and the remedy.
    """
    followers = {layer: path for layer, path in layers.items() if layer not in islands}
    compute_dtype = keras.DTypePolicy(policy).compute_dtype
    for finding in frozen_precision(model, followers, compute_dtype):
        raise _refusal(policy, finding)
    if trace:
        _check_trace(model, layers, policy)


def _runs_own_code(layer: keras.Layer) -> bool:
    if is_container(layer) and isinstance(layer, (keras.Sequential, keras.Function)):
        return False  # it runs its layers
    return isinstance(layer, keras.layers.Lambda) or not f"{type(layer).__module__}.".startswith(
        _KNOWN
    )


def _check_trace(model: keras.Model, layers: dict[keras.Layer, str], policy: PolicyName) -> None:
    was_filtering = keras.config.is_traceback_filtering_enabled()
    keras.config.disable_traceback_filtering()  # filtered, a traceback does not show the layer
    try:
        audit = audit_precision(model, "predict")
    except Exception as error:
        raise _failure(error, layers, policy) from error
    finally:
        if was_filtering:
            keras.config.enable_traceback_filtering()
    for finding in audit.stray_half(policy):
        raise _refusal(policy, finding)


def _failure(error: Exception, layers: dict[keras.Layer, str], policy: PolicyName) -> ValueError:
    layer = _innermost_layer(error.__traceback__, layers)
    where = "the model" if layer is None else f"layer {layers[layer]!r}"
    return _refusal(policy, f"{where} fails when it is called ({type(error).__name__}: {error})")


def _innermost_layer(
    traceback: TracebackType | None, layers: dict[keras.Layer, str]
) -> keras.Layer | None:
    found: Any = None
    while traceback is not None:
        one = traceback.tb_frame.f_locals.get("self")
        if isinstance(one, keras.Layer) and one in layers and not is_container(one):
            found = one
        traceback = traceback.tb_next
    return found


def _refusal(policy: PolicyName, finding: str) -> ValueError:
    return ValueError(
        f"The model cannot be switched to {policy!r} in place: {finding}, which no policy reaches. "
        f"Build the model anew with rebuild_precision(model, {policy!r}), write the layer so that "
        "it takes its dtype from self.compute_dtype or its inputs when it is called, or keep it in "
        "float32 with keep_float32=[...]."
    )
