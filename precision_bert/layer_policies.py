"""One layer's precision policy: how it is read and set, and which layers have one to switch."""

from __future__ import annotations

import keras

HALF = ("float16", "bfloat16")
"""The dtypes that a layer in half precision computes in."""


def switchable_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers of `model` that compute in a float dtype, containers included."""
    # Keras' own way down: children of Functional graphs, attributes of subclassed models, cells,
    # wrapped layers. An InputLayer computes nothing, and its dtype is its data's; a layer with a
    # policy that is no float (a tokenizer, a lookup) has its dtype for its output.
    return [
        layer
        for layer in model._flatten_layers()
        if not isinstance(layer, keras.layers.InputLayer)
        and keras.backend.is_float_dtype(layer.compute_dtype)
    ]


def layer_path(layer: keras.Layer) -> str:
    """Returns the path of a layer, or its name while it has no path because it is not built."""
    return layer.path or layer.name


def policy_name(layer: keras.Layer) -> str:
    """Returns the name of the policy that holds for a layer, also under a `DTypePolicyMap`."""
    policy = layer._dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return policy[layer.path].name
    return policy.name


def set_policy(layer: keras.Layer, policy: str) -> None:
    """Gives a layer a policy of its own, and renews what it computed from the one before."""
    # Not through the public setter: for a layer with a DTypePolicyMap that one writes into the
    # user's map, which other layers and other models share.
    layer._dtype_policy = keras.DTypePolicy(policy)
    refresh_frozen_state(layer)


def refresh_frozen_state(layer: keras.Layer) -> None:
    """Recomputes what a layer keeps in its compute dtype."""
    # keras.layers.Normalization casts its mean and variance to the compute dtype once, when it is
    # adapted or built. Both are recomputed from what it was given, in full precision.
    if isinstance(layer, keras.layers.Normalization) and layer.built:
        if layer.input_mean is None:
            layer.finalize_state()
        else:
            layer.build(layer.get_build_config()["input_shape"])


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
        layer_path(layer): layer.compute_dtype
        for layer in switchable_layers(model)
        if not is_container(layer)
    }
