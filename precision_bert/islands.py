"""Float32 islands: the layers that compute in float32 whatever their model is switched to."""

from __future__ import annotations

import fnmatch
import weakref
from collections import Counter
from collections.abc import Iterable

import keras

from precision_bert.layer_policies import computes_in_float, is_container, set_policy
from precision_bert.policies import HALF
from precision_bert.policy_scope import is_default

# Layers that compute in float32 whatever their model is switched to. Weak, so that a layer is
# forgotten with its model; kept here rather than as an attribute, so that users' layers stay clean.
_pinned: weakref.WeakSet[keras.Layer] = weakref.WeakSet()

# Layers that a switch has set, with the policy object that it gave them. As long as they have it,
# their policy tells nothing about what their author wanted.
_switched: weakref.WeakKeyDictionary[keras.Layer, keras.DTypePolicy] = weakref.WeakKeyDictionary()


def pin_float32(*layers: keras.Layer) -> None:
    """Makes layers float32 islands: they compute in float32 whatever their model is switched to.

    Use it for a softmax or a head that must not run in half precision, in a model that is built in
    float32. (In a model built in a mixed policy, a layer built with `dtype="float32"` is recognised
    as an island by itself; in a float32 model nothing tells it from its neighbours.) The mark lives
    as long as the layer object; `save_model` keeps it, Keras' own saving does not.

    Args:
        *layers: The layers; nested layers are pinned with them.

    Raises:
        TypeError: If one is no Keras layer.
        ValueError: If one is quantised.

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
    parts = [
        part for layer in layers for part in layer._flatten_layers() if computes_in_float(part)
    ]
    for part in parts:
        if part.quantization_mode is not None:
            raise ValueError(
                f"Layer {part.name!r} is quantised and computes in what it was quantised to; "
                "pin_float32 cannot change that."
            )
    for part in parts:
        set_policy(part, "float32")
        _pinned.add(part)


def unpin_float32(*layers: keras.Layer) -> None:
    """Takes back `pin_float32`: the layers follow their model's next switch again.

    Args:
        *layers: The layers; nested layers are unpinned with them. One that is no island is left as
            it is.

    Raises:
        TypeError: If one is no Keras layer.

    Example:

    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    >>> pin_float32(model.layers[0])
    >>> unpin_float32(model.layers[0])
    >>> from precision_bert.switching import switch_precision
    >>> switch_precision(model, "mixed_float16").pinned
    ()
    """
    for layer in layers:
        if not isinstance(layer, keras.Layer):
            raise TypeError(f"unpin_float32 takes Keras layers. Received: {layer!r}.")
    for part in (part for layer in layers for part in layer._flatten_layers()):
        if part in _pinned:
            _pinned.discard(part)
            # What it computes in now is no longer its author's wish.
            note_switched(part)


def select_layers(
    layers: dict[keras.Layer, str], wanted: Iterable[keras.Layer | type | str]
) -> list[keras.Layer]:
    """Returns those of `layers` that `wanted` names.

    Args:
        layers: A model's layers with their paths.
        wanted: Layers, layer classes, or paths or names, in which `*` stands for anything.

    Raises:
        TypeError: If `wanted` holds something else, or is no list.
        ValueError: If one of it names none of `layers`: a typing error would otherwise train in
            half precision what should not.
    """
    if isinstance(wanted, (str, keras.Layer, type)):
        raise TypeError(f"keep_float32 must be a list, as in [{wanted!r}]. Received: {wanted!r}.")
    found: dict[keras.Layer, None] = {}
    for one in wanted:
        if isinstance(one, str):
            chosen = [
                layer
                for layer, path in layers.items()
                if fnmatch.fnmatchcase(path, one) or layer.name == one
            ]
        elif isinstance(one, type) and issubclass(one, keras.Layer):
            chosen = [layer for layer in layers if isinstance(layer, one)]
        elif isinstance(one, keras.Layer):
            chosen = [layer for layer in layers if layer is one]
        else:
            raise TypeError(
                "keep_float32 takes layers, layer classes, and layer paths or names. Received: "
                f"{one!r} of type {type(one).__name__}."
            )
        if not chosen:
            raise ValueError(
                f"keep_float32 names no layer of the model. Received: {one!r}. Its layers: "
                f"{', '.join(layers.values())}."
            )
        found |= dict.fromkeys(chosen)
    # TimeDistributed runs its layer's `call` directly, in its own precision.
    wrappers = [
        layer
        for layer in layers
        if isinstance(layer, keras.layers.TimeDistributed) and layer.layer in found
    ]
    return [*found, *wrappers]


def find_islands(layers: Iterable[keras.Layer]) -> set[keras.Layer]:
    """Returns the layers that compute in full precision by their author's wish, or are pinned.

    Among layers in half, those are the ones in full precision. In a model with no layer in half
    only what a layer was given inside its parent can tell; see `_given_their_own_policy`. Layers
    that a switch has set count on neither side: a backbone that was switched with another model
    makes no island of this model's head.
    """
    layers = list(layers)
    islands = {layer for layer in layers if layer in _pinned or _was_set_by_hand(layer)}
    # Containers run their layers, and their own policy is often not what those have. A model that
    # is subclassed and lies in another one computes like a layer.
    parts = [
        layer
        for layer in layers
        if layer not in islands
        and not _is_switched(layer)
        and not (layer is layers[0] and is_container(layer))
        and not isinstance(layer, (keras.Sequential, keras.Function))
    ]
    if any(layer.compute_dtype in HALF for layer in parts):
        return islands | {layer for layer in parts if layer.compute_dtype not in HALF}
    return islands | (_given_their_own_policy(layers) & set(parts))


def _given_their_own_policy(layers: list[keras.Layer]) -> set[keras.Layer]:
    """Returns the layers that their parent made with `dtype="float32"`, and others with its own.

    keras-nlp's decoders do so with the softmax of their attention. In a float32 model the dtype is
    the same, but not the object: a layer that is given its parent's policy, or none, has the
    parent's object or the global one, and one that is given a name has an object to itself.
    """
    num_users = Counter(id(layer._dtype_policy) for layer in layers)
    found = set()
    for parent in layers:
        if is_container(parent):
            continue
        children = parent._flatten_layers(include_self=False, recursive=False)
        if any(child._dtype_policy is parent._dtype_policy for child in children):
            found |= {
                child
                for child in children
                if num_users[id(child._dtype_policy)] == 1 and not is_default(child._dtype_policy)
            }
    return found


def keep_islands(islands: Iterable[keras.Layer]) -> None:
    """Remembers layers as islands, so that they stay ones when the whole model is in float32."""
    _pinned.update(islands)


def note_switched(layer: keras.Layer) -> None:
    """Remembers that a layer's policy is a switch's doing, and no sign of its author's wish."""
    _switched[layer] = layer._dtype_policy


def _is_switched(layer: keras.Layer) -> bool:
    return _switched.get(layer) is layer._dtype_policy


def _was_set_by_hand(layer: keras.Layer) -> bool:
    """Tells whether a layer has got full precision since a switch gave it another policy."""
    return layer in _switched and not _is_switched(layer) and layer.compute_dtype not in HALF


def marks(layer: keras.Layer) -> tuple[bool, bool]:
    """Returns what is remembered of a layer, for `restore_marks`."""
    return layer in _pinned, _is_switched(layer)


def restore_marks(layer: keras.Layer, before: tuple[bool, bool]) -> None:
    """Gives a layer the marks that it had before; it must have its policy of then already."""
    was_pinned, was_switched = before
    (_pinned.add if was_pinned else _pinned.discard)(layer)
    _switched.pop(layer, None)
    if was_switched:
        note_switched(layer)
