"""One layer's precision policy: how it is read and set, and which layers have one to switch."""

from __future__ import annotations

import weakref

import keras

from precision_bert.policies import HALF

# The DTypePolicyMap that a layer was made with. A switch gives the layer a map of its own, derived
# from this one each time, so that what its author wrote for single layers is there again after a
# float32 stage.
_author_maps: weakref.WeakKeyDictionary[keras.Layer, keras.dtype_policies.DTypePolicyMap] = (
    weakref.WeakKeyDictionary()
)
_derived_maps: weakref.WeakKeyDictionary[keras.Layer, keras.dtype_policies.DTypePolicyMap] = (
    weakref.WeakKeyDictionary()
)


def check_keras_model(model: object) -> None:
    """Refuses what is no Keras model.

    Raises:
        TypeError: If it is no `keras.Model`.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"model must be a keras.Model. Received: {model!r} of type {type(model).__name__}."
        )


def switchable_layers(model: keras.Model) -> dict[keras.Layer, str]:
    """Returns the layers of `model` that compute in a float dtype, containers included.

    Returns:
        The layers in Keras' order, each with a path that no other of them has; see `layer_paths`.
    """
    return {layer: path for layer, path in layer_paths(model).items() if computes_in_float(layer)}


def computes_in_float(layer: keras.Layer) -> bool:
    """Tells whether a layer has a precision to compute in."""
    # An InputLayer computes nothing, and its dtype is its data's; a layer with a policy that is no
    # float (a tokenizer, a lookup) has its dtype for its output.
    return not isinstance(layer, keras.layers.InputLayer) and keras.backend.is_float_dtype(
        layer.compute_dtype
    )


def layer_paths(model: keras.Model) -> dict[keras.Layer, str]:
    """Returns the path of every layer of `model`, each path once.

    A path is what Keras says. Where a layer never entered its parent's name scope (the softmax of
    an attention layer) it is the parent's path and the layer's name; where Keras' own is taken
    already (layers of the same name in two containers) a number is added.
    """
    paths: dict[keras.Layer, str] = {}
    taken: set[str] = set()

    def visit(layer: keras.Layer, parent: keras.Layer | None) -> None:
        if layer in paths:
            return
        path = layer.path or layer.name
        # A container's layers have no common prefix: in Functional models none at all.
        if parent is not None and not is_container(parent):
            prefix = f"{paths[parent]}/"
            path = path if path.startswith(prefix) else prefix + layer.name
        number, unique = 1, path
        while unique in taken:
            number += 1
            unique = f"{path}#{number}"
        paths[layer] = unique
        taken.add(unique)
        # Keras' own way down: children of Functional graphs, attributes of subclassed models,
        # cells, wrapped layers.
        for child in layer._flatten_layers(include_self=False, recursive=False):
            visit(child, layer)

    visit(model, None)
    return paths


def policy_name(layer: keras.Layer) -> str:
    """Returns the name of the policy that holds for a layer, also under a `DTypePolicyMap`."""
    policy = layer._dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        policy = policy[layer.path] if layer.path else policy.default_policy
    return policy.name


def author_map(layer: keras.Layer) -> keras.dtype_policies.DTypePolicyMap | None:
    """Returns the `DTypePolicyMap` that a layer had before its first switch, if it had one."""
    return _author_maps.get(layer)


def remember_author_map(layer: keras.Layer, policies: keras.dtype_policies.DTypePolicyMap) -> None:
    """Lets later switches of a layer derive its policy, now a map derived from it, from a map."""
    _author_maps[layer] = policies
    _derived_maps[layer] = layer._dtype_policy


def has_policy(layer: keras.Layer, policy: str) -> bool:
    """Tells whether `set_policy` would leave a layer as it is."""
    present = layer._dtype_policy
    if isinstance(present, keras.dtype_policies.DTypePolicyMap):
        # Not by get_config: Keras' own takes the names off the policies of a map without default.
        own = _author_maps[layer] if _derived_maps.get(layer) is present else present
        return _names(_map_for(own, policy)) == _names(present)
    return present.name == policy


def set_policy(layer: keras.Layer, policy: str, *, refresh: bool = True) -> bool:
    """Gives a layer a policy, and renews what it computed from the one before.

    A layer with a `DTypePolicyMap` gets a map of its own with another default: in a half precision
    stage single layers keep what the map says of them, in a float32 stage all are in float32.

    Args:
        layer: The layer.
        policy: The policy's name.
        refresh: Whether to renew what it computed from the one before.

    Returns:
        Whether the layer had to renew something.
    """
    # Not through the public setter: for a layer with a DTypePolicyMap that one writes into the
    # user's map, which other layers and other models share.
    present = layer._dtype_policy
    if isinstance(present, keras.dtype_policies.DTypePolicyMap):
        if _derived_maps.get(layer) is not present:  # its author's, or a new one since
            _author_maps[layer] = present
        layer._dtype_policy = _derived_maps[layer] = _map_for(_author_maps[layer], policy)
    else:
        layer._dtype_policy = keras.DTypePolicy(policy)
    return refresh and refresh_frozen_state(layer)


def _names(policies: keras.dtype_policies.DTypePolicyMap) -> dict[str, str]:
    return {"": policies.default_policy.name} | {path: p.name for path, p in policies.items()}


def _map_for(
    author_map: keras.dtype_policies.DTypePolicyMap, policy: str
) -> keras.dtype_policies.DTypePolicyMap:
    default = keras.DTypePolicy(policy)
    is_half = default.compute_dtype in HALF
    return keras.dtype_policies.DTypePolicyMap(
        default,
        {
            path: own if is_half or own.compute_dtype not in HALF else default
            for path, own in author_map.items()
        },
    )


def refresh_frozen_state(layer: keras.Layer) -> bool:
    """Recomputes what a layer keeps in its compute dtype; tells whether there was something."""
    # keras.layers.Normalization casts its mean and variance to the compute dtype once, when it is
    # adapted or built. Both are recomputed from what it was given, in full precision.
    if not isinstance(layer, keras.layers.Normalization) or not layer.built:
        return False
    if layer.input_mean is None:
        layer.finalize_state()
    else:
        layer.build(layer.get_build_config()["input_shape"])
    return True


def is_container(layer: keras.Layer) -> bool:
    """Tells whether a layer is a model, made of other layers."""
    # A model computes nothing itself, and its own policy is often not what its layers have.
    return isinstance(layer, keras.Model)


def compute_dtypes(model: keras.Model) -> dict[str, str]:
    """Returns the dtype that each layer of `model` computes in, by the layer's path.

    Args:
        model: Any Keras model.

    Example:

    >>> head = keras.layers.Dense(2, name="head")
    >>> model = keras.Sequential([keras.Input((4,)), head], name="net")
    >>> from precision_bert.switching import switch_precision
    >>> _ = switch_precision(model, "mixed_bfloat16")
    >>> compute_dtypes(model)["net/head"]
    'bfloat16'
    """
    return {
        path: layer.compute_dtype
        for layer, path in switchable_layers(model).items()
        if not is_container(layer)
    }
