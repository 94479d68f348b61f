"""Moves a live Keras model from one precision policy to another, in place."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import keras

from precision_bert.loss_scale_optimizer import scales_loss, unwrap_optimizer, wrap_optimizer
from precision_bert.policies import SWITCHABLE_POLICIES, PolicyName, check_policy

# Layers that compute in float32 whatever their model is switched to. Weak, so that a layer is
# forgotten with its model; kept here rather than as an attribute, so that users' layers stay clean.
_pinned: weakref.WeakSet[keras.Layer] = weakref.WeakSet()

# Layers that a switch has set. Their policy tells nothing about what their author wanted.
_switched: weakref.WeakSet[keras.Layer] = weakref.WeakSet()

_HALF = ("float16", "bfloat16")


@dataclass(frozen=True)
class SwitchReport:
    """What `switch_precision` did to a model.

    Attributes:
        policy: The policy that the model has now.
        changed: Paths of the layers whose policy changed.
        unchanged: Paths of the layers that had the policy already.
        pinned: Paths of the layers that stay in float32, as their author wanted.
        loss_scaling: What happened to the optimizer: `"added"`, `"removed"`, `"kept"`, or `"none"`
            where there was none and none is needed.
    """

    policy: PolicyName
    changed: tuple[str, ...]
    unchanged: tuple[str, ...]
    pinned: tuple[str, ...]
    loss_scaling: str

    def __str__(self) -> str:
        """Returns the report in one line."""
        return (
            f"{self.policy}: {len(self.changed)} layers changed, {len(self.unchanged)} had it, "
            f"{len(self.pinned)} stay in float32; loss scaling {self.loss_scaling}"
        )


def pin_float32(*layers: keras.Layer) -> None:
    """Makes layers float32 islands: they compute in float32 whatever their model is switched to.

    Use it for a softmax or a head that must not run in half precision, in a model that is built in
    float32. (In a model built in a mixed policy, a layer built with `dtype="float32"` is recognised
    as an island by itself; in a float32 model nothing tells it from its neighbours.) The mark lives
    as long as the layer object and is not saved with the model.

    Args:
        *layers: The layers; nested layers are pinned with them.

    Raises:
        TypeError: If one is no Keras layer.

    Example:

    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Softmax()])
    >>> pin_float32(model.layers[-1])
    >>> print(switch_precision(model, "mixed_float16"))
    mixed_float16: 2 layers changed, 0 had it, 1 stay in float32; loss scaling none
    """
    for layer in layers:
        if not isinstance(layer, keras.Layer):
            raise TypeError(f"pin_float32 takes Keras layers. Received: {layer!r}.")
        for part in layer._flatten_layers():
            _set_policy(part, "float32")
            _pinned.add(part)


@contextlib.contextmanager
def precision_scope(policy: PolicyName) -> Iterator[None]:
    """Sets Keras' global dtype policy for a `with` block, and restores it whatever happens.

    Use it to build a model in a policy without leaving that policy behind for the next notebook
    cell.

    Args:
        policy: The policy within the block.

    Raises:
        ValueError: If the policy is unknown.

    Example:

    >>> with precision_scope("mixed_float16"):
    ...     layer = keras.layers.Dense(2)
    >>> layer.compute_dtype, keras.config.dtype_policy().name
    ('float16', 'float32')
    """
    check_policy(policy)
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(previous)


def switch_precision(model: keras.Model, policy: PolicyName) -> SwitchReport:
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

    Returns:
        A `SwitchReport`; print it for a summary.

    Raises:
        TypeError: If `model` is no Keras model.
        ValueError: If the policy is unknown, or if a layer cannot be switched in place: one with
            half-precision variables or a quantised one. The model is then as it was.

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
    layers = _switchable_layers(model)
    islands = _islands(layers)
    _pinned.update(islands)

    changed, unchanged, pinned = [], [], []
    before = [(layer, layer._dtype_policy) for layer in layers]
    optimizer_before = getattr(model, "optimizer", None)
    factor_before = getattr(optimizer_before, "loss_scale_factor", None)
    try:
        for layer in layers:
            if layer in islands:
                pinned.append(_path(layer))
            elif _policy_name(layer) == policy:
                unchanged.append(_path(layer))
            else:
                _set_policy(layer, policy)
                _switched.add(layer)
                changed.append(_path(layer))
        loss_scaling = _fit_optimizer(model, layers)
    except BaseException:  # an interrupt too must not leave half a switch
        for layer, previous in before:
            layer._dtype_policy = previous
            _refresh_frozen_state(layer)
        if optimizer_before is not None:
            _set_optimizer(model, optimizer_before)
            optimizer_before.loss_scale_factor = factor_before
        raise
    if changed or getattr(model, "optimizer", None) is not optimizer_before:
        renew_functions(model)
    return SwitchReport(policy, tuple(changed), tuple(unchanged), tuple(pinned), loss_scaling)


def check_model(model: object) -> None:
    """Refuses what is no Keras model, and a model that cannot be switched in place.

    Raises:
        TypeError: If it is no `keras.Model`.
        ValueError: Naming the layer that is in the way.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"model must be a keras.Model. Received: {model!r} of type {type(model).__name__}."
        )
    layers = _switchable_layers(model)
    _check_switchable(layers, _islands(layers))


def _switchable_layers(model: keras.Model) -> list[keras.Layer]:
    # Keras' own way down: children of Functional graphs, attributes of subclassed models, cells,
    # wrapped layers. An InputLayer computes nothing, and its dtype is its data's; a layer with a
    # policy that is no float (a tokenizer, a lookup) has its dtype for its output.
    return [
        layer
        for layer in model._flatten_layers()
        if not isinstance(layer, keras.layers.InputLayer)
        and keras.backend.is_float_dtype(layer.compute_dtype)
    ]


def _path(layer: keras.Layer) -> str:
    return layer.path or layer.name  # an unbuilt layer has no path yet


def _policy_name(layer: keras.Layer) -> str:
    policy = layer._dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return policy[layer.path].name
    return policy.name


def _set_policy(layer: keras.Layer, policy: str) -> None:
    # Not through the public setter: for a layer with a DTypePolicyMap that one writes into the
    # user's map, which other layers and other models share.
    layer._dtype_policy = keras.DTypePolicy(policy)
    _refresh_frozen_state(layer)


def _refresh_frozen_state(layer: keras.Layer) -> None:
    # keras.layers.Normalization casts its mean and variance to the compute dtype once, when it is
    # adapted or built. Both are recomputed from what it was given, in full precision.
    if isinstance(layer, keras.layers.Normalization) and layer.built:
        if layer.input_mean is None:
            layer.finalize_state()
        else:
            layer.build(layer.get_build_config()["input_shape"])


def _check_switchable(layers: list[keras.Layer], islands: set[keras.Layer]) -> None:
    for layer in layers:
        if layer.quantization_mode is not None:
            raise ValueError(
                f"Layer {_path(layer)!r} is quantised ({_policy_name(layer)}) and cannot be "
                "switched in place. Switch the model first, then quantise it."
            )
        for variable in layer._trainable_variables + layer._non_trainable_variables:
            # By the variable's real dtype: a policy that was set later says what it would be.
            if variable.dtype in _HALF or (variable.dtype == "float64" and layer not in islands):
                raise ValueError(
                    f"Layer {_path(layer)!r} keeps its variable {variable.name!r} in "
                    f"{variable.dtype}, which a switch in place cannot change. Build the model "
                    "with a policy that keeps variables in float32 (one of "
                    f"{', '.join(map(repr, SWITCHABLE_POLICIES))})."
                )


def _is_container(layer: keras.Layer) -> bool:
    # A model computes nothing itself, and its own policy is often not what its layers have.
    return isinstance(layer, keras.Model)


def _islands(layers: list[keras.Layer]) -> set[keras.Layer]:
    """Returns the layers that compute in full precision among layers in half, or are pinned.

    Their author put them there. Layers that a switch has set count on neither side: a backbone that
    was switched with another model makes no island of this model's head. In a model with no layer
    in half there is nothing to tell an island by, and only pinned layers are islands.
    """
    islands = {layer for layer in layers if layer in _pinned}
    parts = [
        layer
        for layer in layers
        if not _is_container(layer) and layer not in islands and layer not in _switched
    ]
    if any(layer.compute_dtype in _HALF for layer in parts):
        islands |= {layer for layer in parts if layer.compute_dtype not in _HALF}
    return islands


def _computes_gradients_in_float16(model: keras.Model, layers: list[keras.Layer]) -> bool:
    # Gradients of a trainable layer pass through frozen ones too, so any layer counts. A container
    # counts where it has weights of its own, or has not made its layers yet.
    return (not model.built or bool(model.trainable_variables)) and any(
        layer.compute_dtype == "float16"
        for layer in layers
        if not _is_container(layer) or layer._trainable_variables or not layer.built
    )


def _fit_optimizer(model: keras.Model, layers: list[keras.Layer]) -> str:
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
    _set_optimizer(model, fitted)
    if needs_scale:
        return "kept" if had_scale else "added"
    return "removed"


def _set_optimizer(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    model.optimizer = optimizer
    # Keras saves the optimizer that compile was given, not the one that the model has. Without
    # this, a model saved in a float16 stage would come back without loss scale and moments.
    compile_config = getattr(model, "_compile_config", None)
    if compile_config is not None:
        compile_config.config["optimizer"] = optimizer


def renew_functions(model: keras.Model) -> None:
    """Makes the next step of each compiled function of `model` be traced anew.

    Args:
        model: Any Keras model, within a running `fit` or not.
    """
    # compile() would renew them too, but kills a running fit and resets more than that. Inside a
    # fit the train function is looked up anew for each step, so it must never be None.
    for part in model._flatten_layers():
        if not _is_container(part):
            continue
        part.test_function = None
        part.predict_function = None
        if getattr(part, "train_function", None) is not None:
            part.make_train_function(force=True)


def compute_dtypes(model: keras.Model) -> dict[str, str]:
    """Returns the dtype that each layer of `model` computes in, by the layer's path.

    Args:
        model: Any Keras model.

    Example:

    >>> head = keras.layers.Dense(2, name="head")
    >>> model = keras.Sequential([keras.Input((4,)), head], name="net")
    >>> _ = switch_precision(model, "mixed_bfloat16")
    >>> compute_dtypes(model)["net/head"]
    'bfloat16'
    """
    return {
        _path(layer): layer.compute_dtype
        for layer in _switchable_layers(model)
        if not _is_container(layer)
    }
