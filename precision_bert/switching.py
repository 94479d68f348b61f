"""Moves a live Keras model from one precision policy to another, in place."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import keras

from precision_bert.compiled_functions import renew_functions
from precision_bert.graph_dtypes import follow, following_operations, set_dtype
from precision_bert.islands import (
    find_islands,
    keep_islands,
    marks,
    note_switched,
    pin_float32,
    restore_marks,
    select_layers,
)
from precision_bert.layer_policies import (
    check_keras_model,
    has_policy,
    is_container,
    policy_name,
    refresh_frozen_state,
    set_policy,
    switchable_layers,
)
from precision_bert.loss_scaling import (
    scales_loss,
    unwrap_optimizer,
    unwrapped,
    wrap_optimizer,
)
from precision_bert.policies import HALF, SWITCHABLE_POLICIES, PolicyName, check_policy
from precision_bert.switch_proof import check_switched, prepare_proof

# The policies of a model's layers, in order, and its optimizer when a switch last renewed its
# functions. What was set by hand since, or before the first switch, is not what they were traced
# with. (The optimizer by identity; it holds no reference to the model.)
_renewed_for: weakref.WeakKeyDictionary[keras.Model, list[object]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class SwitchReport:
    """What `switch_precision` did to a model.

    Attributes:
        policy: The policy that the model has now.
        changed: Paths of the layers whose policy changed.
        unchanged: Paths of the layers that had the policy already.
        pinned: Paths of the float32 islands: the layers that stay in float32, as their author or
            `keep_float32` wanted.
        rebuilt: What was kept in the compute dtype and is computed anew: paths of layers with such
            a state (an adapted `Normalization`), names of casts in a Functional graph and of inputs
            that a `Sequential` model derived from its first layer.
        untraced: Paths of layers that run code of the user's own which could not be traced (they
            are not built yet, or run eagerly only): what it computes in is not proved.
        loss_scaling: What happened to the optimizer: `"added"`, `"removed"`, `"kept"`, or `"none"`
            where there was none and none is needed.
    """

    policy: PolicyName
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]
    pinned: tuple[str, ...]
    rebuilt: tuple[str, ...]
    untraced: tuple[str, ...]
    loss_scaling: str

    def __str__(self) -> str:
        """Returns the report in one line."""
        rebuilt = f", rebuilt {', '.join(self.rebuilt)}" if self.rebuilt else ""
        untraced = f", not traced {', '.join(self.untraced)}" if self.untraced else ""
        return (
            f"{self.policy}: {len(self.changed)} layers changed, {len(self.unchanged)} had it, "
            f"{len(self.pinned)} stay in float32{rebuilt}{untraced}; "
            f"loss scaling {self.loss_scaling}"
        )


def switch_precision(
    model: keras.Model,
    policy: PolicyName,
    *,
    keep_float32: Iterable[keras.Layer | type | str] = (),
) -> SwitchReport:
    """Moves a live model to another precision policy, in place.

    Use it between two calls of `fit`, `evaluate` or `predict`; inside one `fit` use the callback
    `PrecisionSwitch`, which calls this. Weights, optimizer state, step count and learning-rate
    schedule stay as they are, and every compiled function of the model is renewed, so that the next
    step of each runs in the new precision. Where a trainable layer computes in float16 the
    optimizer scales the loss from then on; elsewhere it does not. Going back to float16 goes on
    with the scale it last had.

    Args:
        model: Any Keras model whose variables are float32, compiled or not.
        policy: `"float32"`, `"mixed_float16"` or `"mixed_bfloat16"`.
        keep_float32: Layers that stay in float32 from now on, as with `pin_float32`: layers, layer
            classes, or paths or names with `*` for anything. `[keras.layers.Softmax]` keeps the
            softmax of attention layers in float32, as PyTorch's autocast does.

    Returns:
        A `SwitchReport`; print it for a summary.

    Raises:
        TypeError: If `model` is no Keras model, or `keep_float32` holds what is no layer.
        ValueError: If the policy is unknown, if `keep_float32` names no layer of the model, or if a
            layer cannot be switched in place: one with half-precision variables, a quantised one,
            one that recorded a dtype or a constant when it was made. The message names it, and the
            model is as it was.

    Example:

    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> model.compile("adam", "mse")
    >>> print(switch_precision(model, "mixed_float16"))
    mixed_float16: 2 layers changed, 0 had it, 0 stay in float32; loss scaling added

    Another model that shares layers with this one computes in the new precision too, but its own
    compiled functions are not renewed: switch it as well.
    """
    policy = check_policy(policy)
    check_model(model)
    layers = switchable_layers(model)
    kept = select_layers(layers, keep_float32)
    proof = prepare_proof(model, layers)
    before = _Before(model, layers)
    rebuilt = []
    try:
        pin_float32(*kept)
        islands = find_islands(layers)
        keep_islands(islands)
        followers = {layer: path for layer, path in layers.items() if layer not in islands}
        for island in islands:
            if island.compute_dtype in HALF:  # set so by hand since it became one
                set_policy(island, "float32")
        for layer, path in followers.items():
            if not has_policy(layer, policy):
                if set_policy(layer, policy):
                    rebuilt.append(path)
                note_switched(layer)
        compute_dtype = keras.DTypePolicy(policy).compute_dtype
        for operation in before.dtypes:
            if follow(operation, compute_dtype):
                rebuilt.append(operation.name)
        check_switched(model, layers, islands, policy, proof)
        loss_scaling = fit_loss_scale(model)
        present = [model.optimizer if model.compiled else None, *map(policy_name, layers)]
        if rebuilt or _renewed_for.get(model) != present:
            renew_functions(model)
        _renewed_for[model] = present
    except BaseException:  # an interrupt too must not leave half a switch
        before.restore()
        raise
    changed = before.changed_policies()
    return SwitchReport(
        policy,
        changed=tuple(path for layer, path in followers.items() if layer in changed),
        unchanged=tuple(path for layer, path in followers.items() if layer not in changed),
        pinned=tuple(layers[layer] for layer in layers if layer in islands),
        rebuilt=tuple(rebuilt),
        untraced=tuple(layers[layer] for layer in proof.untraced),
        loss_scaling=loss_scaling,
    )


class _Before:
    """What a switch may change of a model, so that a failing one can leave it as it was."""

    def __init__(self, model: keras.Model, layers: Iterable[keras.Layer]) -> None:
        self._model = model
        self._policies = {la: (la._dtype_policy, policy_name(la), marks(la)) for la in layers}
        self.dtypes = following_operations(model)
        self.optimizer = getattr(model, "optimizer", None)
        self._factor = None
        if isinstance(self.optimizer, keras.optimizers.Optimizer):
            self._factor = unwrapped(self.optimizer).loss_scale_factor

    def changed_policies(self) -> set[keras.Layer]:
        return {la for la, (_, name, _) in self._policies.items() if policy_name(la) != name}

    def restore(self) -> None:
        for layer, (policy, _, remembered) in self._policies.items():
            layer._dtype_policy = policy
            refresh_frozen_state(layer)
            restore_marks(layer, remembered)
        for operation, dtype in self.dtypes.items():
            set_dtype(operation, dtype)
        if isinstance(self.optimizer, keras.optimizers.Optimizer):
            set_optimizer(self._model, self.optimizer)
            unwrapped(self.optimizer).loss_scale_factor = self._factor


def check_model(model: object) -> None:
    """Refuses what is no Keras model, and a model that cannot be switched in place.

    Raises:
        TypeError: If it is no `keras.Model`.
        ValueError: Naming the layer that is in the way.
    """
    check_keras_model(model)
    layers = switchable_layers(model)
    _check_switchable(layers, find_islands(layers))


def _check_switchable(layers: dict[keras.Layer, str], islands: set[keras.Layer]) -> None:
    for layer, path in layers.items():
        if layer.quantization_mode is not None:
            raise ValueError(
                f"Layer {path!r} is quantised ({policy_name(layer)}) and cannot be "
                "switched in place. Switch the model first, then quantise it."
            )
        for variable in layer._trainable_variables + layer._non_trainable_variables:
            # By the variable's real dtype: a policy that was set later says what it would be.
            if variable.dtype in HALF or (variable.dtype == "float64" and layer not in islands):
                raise ValueError(
                    f"Layer {path!r} keeps its variable {variable.name!r} in "
                    f"{variable.dtype}, which a switch in place cannot change. Build the model "
                    "anew with rebuild_precision(model, policy), in a policy that keeps variables "
                    f"in float32 (one of {', '.join(map(repr, SWITCHABLE_POLICIES))})."
                )


def _computes_gradients_in_float16(model: keras.Model, layers: Iterable[keras.Layer]) -> bool:
    # Gradients of a trainable layer pass through frozen ones too, so any layer counts. A container
    # counts where it has weights of its own, or has not made its layers yet.
    return (not model.built or bool(model.trainable_variables)) and any(
        layer.compute_dtype == "float16"
        for layer in layers
        if not is_container(layer) or layer._trainable_variables or not layer.built
    )


def fit_loss_scale(model: keras.Model) -> str:
    """Puts a loss scale on a model's optimizer, or takes it off, as its layers need it.

    Args:
        model: Any Keras model, compiled or not.

    Returns:
        `SwitchReport.loss_scaling`.
    """
    layers = switchable_layers(model)
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        return "none"
    had_scale = scales_loss(optimizer)
    needs_scale = _computes_gradients_in_float16(model, layers)
    if not needs_scale and not had_scale:
        return "none"
    # Variables are made where the model's own live, also under tf.distribute.
    with model.distribute_strategy.scope():
        fitted = wrap_optimizer(optimizer) if needs_scale else unwrap_optimizer(optimizer)
    set_optimizer(model, fitted)
    if not needs_scale:
        return "removed"
    others = [
        name
        for name, one in vars(model).items()
        if isinstance(one, keras.optimizers.Optimizer) and one not in (optimizer, fitted)
    ]
    if others:
        warnings.warn(
            f"Model {model.name!r} has other optimizers than its own, {', '.join(others)}, which "
            "do not scale the loss: what they train in float16 may underflow. Wrap them in "
            "DynamicLossScaleOptimizer, and scale their losses.",
            RuntimeWarning,
            stacklevel=3,
        )
    return "kept" if had_scale else "added"


def set_optimizer(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Gives a compiled model another optimizer, also in what `model.save` writes.

    Args:
        model: The model.
        optimizer: One whose variables belong to the model's, or that is not built yet.
    """
    model.optimizer = optimizer
    # Keras saves the optimizer that compile was given, not the one that the model has. Without
    # this, a model saved in a float16 stage would come back without loss scale and moments.
    compile_config = getattr(model, "_compile_config", None)
    if compile_config is not None:
        compile_config.config["optimizer"] = optimizer
