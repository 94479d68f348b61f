"""Proves that a switched model computes in no half precision but its new policy's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import keras

from precision_bert.audit import PrecisionAudit, audit_step
from precision_bert.frozen_precision import frozen_precision
from precision_bert.layer_policies import is_container
from precision_bert.policies import PolicyName

# Their layers follow their policies: that is tested of each, and need not be seen each time.
_KNOWN = ("keras.", "keras_hub.", "precision_bert.", "builtins.", "functools.", "tensorflow.")

_FOREIGN = (
    keras.layers.Lambda,
    keras.layers.TFSMLayer,
    keras.layers.JaxLayer,
    keras.layers.FlaxLayer,
    keras.layers.TorchModuleWrapper,
)
"""Keras' own layers that run what others wrote."""


@dataclass(frozen=True)
class Proof:
    """How it can be proved what a model computes in.

    Attributes:
        trace: Traces the model and audits it; `None` where that is not needed, or not possible.
        untraced: The layers that it would be needed for, where it is not possible.
    """

    trace: Callable[[], PrecisionAudit] | None
    untraced: tuple[keras.Layer, ...]


def prepare_proof(model: keras.Model, layers: Iterable[keras.Layer]) -> Proof:
    """Finds out whether a model has to be traced to know what it computes in, and can be.

    Layers may run code of the user's own, which casts as it likes. Some models cannot be traced:
    they are not built, do not tell what their inputs are, or run eagerly only.

    Args:
        model: The model, before its switch.
        layers: Its layers.
    """
    own = tuple(layer for layer in layers if _runs_own_code(layer))
    if not own:
        return Proof(None, ())
    unbuilt = tuple(layer for layer in own if not layer.built)
    for trace in (
        lambda: audit_step(model, "train"),
        lambda: audit_step(model, "predict"),
        # A subclassed model tells the shapes of its inputs only; these may be token ids.
        lambda: audit_step(model, "predict", integer_inputs=True),
    ):
        try:
            trace()
        except Exception:  # whatever the reason is, it is none of the switch's
            continue
        return Proof(trace, unbuilt)
    return Proof(None, own)


def check_switched(
    model: keras.Model,
    layers: dict[keras.Layer, str],
    islands: Collection[keras.Layer],
    policy: PolicyName,
    proof: Proof,
) -> None:
    """Refuses a model that does not compute as its new policy says.

    Args:
        model: The model, whose layers have their new policies.
        layers: Its layers with their paths.
        islands: Those that need not follow the policy.
        policy: The policy.
        proof: From before the switch.

    Raises:
        ValueError: Naming what is in the way, and the remedy.
    """
    followers = {layer: path for layer, path in layers.items() if layer not in islands}
    compute_dtype = keras.DTypePolicy(policy).compute_dtype
    for finding in frozen_precision(model, followers, compute_dtype):
        raise _refusal(policy, finding)
    if proof.trace is not None:
        _check_trace(proof.trace, layers, policy)


def _runs_own_code(layer: keras.Layer) -> bool:
    if isinstance(layer, (keras.Sequential, keras.Function)):
        # It runs its layers, unless its class has a call of its own. (All of keras-nlp's models
        # are such graphs.)
        return not _is_known(type(layer).call)
    if isinstance(layer, _FOREIGN) or not _is_known(type(layer)):
        return True
    # An activation, an initializer, a wrapped function.
    return any(callable(one) and not _is_known(one) for one in vars(layer).values())


def _is_known(thing: Any) -> bool:
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return f"{module}.".startswith(_KNOWN)


def _check_trace(
    trace: Callable[[], PrecisionAudit], layers: dict[keras.Layer, str], policy: PolicyName
) -> None:
    was_filtering = keras.config.is_traceback_filtering_enabled()
    keras.config.disable_traceback_filtering()  # filtered, a traceback does not show the layer
    try:
        audit = trace()
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
