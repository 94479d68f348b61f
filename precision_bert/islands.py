"""Float32 islands: the layers that compute in float32 whatever their model is switched to."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import keras

from precision_bert.layer_policies import HALF, is_container, set_policy

# Layers that compute in float32 whatever their model is switched to. Weak, so that a layer is
# forgotten with its model; kept here rather than as an attribute, so that users' layers stay clean.
_pinned: weakref.WeakSet[keras.Layer] = weakref.WeakSet()

# Layers that a switch has set. Their policy tells nothing about what their author wanted.
_switched: weakref.WeakSet[keras.Layer] = weakref.WeakSet()


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
    >>> from precision_bert.switching import switch_precision
    >>> print(switch_precision(model, "mixed_float16"))
    mixed_float16: 2 layers changed, 0 had it, 1 stay in float32; loss scaling none
    """
    for layer in layers:
        if not isinstance(layer, keras.Layer):
            raise TypeError(f"pin_float32 takes Keras layers. Received: {layer!r}.")
        for part in layer._flatten_layers():
            set_policy(part, "float32")
            _pinned.add(part)


def find_islands(layers: list[keras.Layer]) -> set[keras.Layer]:
    """Returns the layers that compute in full precision among layers in half, or are pinned.

    Their author put them there. Layers that a switch has set count on neither side: a backbone that
    was switched with another model makes no island of this model's head. In a model with no layer
    in half there is nothing to tell an island by, and only pinned layers are islands.
    """
    islands = {layer for layer in layers if layer in _pinned}
    parts = [
        layer
        for layer in layers
        if not is_container(layer) and layer not in islands and layer not in _switched
    ]
    if any(layer.compute_dtype in HALF for layer in parts):
        islands |= {layer for layer in parts if layer.compute_dtype not in HALF}
    return islands


def keep_islands(islands: Iterable[keras.Layer]) -> None:
    """Remembers layers as islands, so that they stay ones when the whole model is in float32."""
    _pinned.update(islands)


def note_switched(layer: keras.Layer) -> None:
    """Remembers that a layer's policy is a switch's doing, and no sign of its author's wish."""
    _switched.add(layer)
