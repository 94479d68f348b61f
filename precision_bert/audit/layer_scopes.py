"""Finds the layer that an operation of a traced function belongs to, by the operation's name."""

from __future__ import annotations

import re

import keras

LOSS = "(loss)"
OPTIMIZER = "(optimizer)"
OUTSIDE = "(outside layers)"

_GRADIENT = re.compile(r"gradient_tape|gradients(_\d+)?")
_NUMBERED = re.compile(r"(.+)_\d+")


class LayerScopes:
    """The name scopes that the layers of a model open while a function is traced.

    A Keras layer opens a scope of its name twice a call, first to see whether it must be built and
    then to compute, and TensorFlow numbers scopes of the same name. What a layer `dense` computes
    is therefore found under `dense_1`, what its second call computes under `dense_3`, and what its
    neighbour `dense_1` computes under `dense_1_1` or later: the number behind a layer's name is
    never a part of it, and is always there.

    Where a name does not tell (two layers of one name in one container) the operation belongs to
    the container. A wrapper that runs a layer's `call` directly, as `TimeDistributed` does, opens
    no scope for it, and the operation belongs to the wrapper.

    Args:
        model: Any Keras model.
        operations: Names of all operations of the function, each behind the names of the function
            calls that it lies in.
    """

    def __init__(self, model: keras.Model, operations: set[tuple[str, ...]]) -> None:
        self._model = model
        self._operations = operations
        self._below: dict[keras.Layer | None, dict[str | None, list[keras.Layer]]] = {}
        optimizer = getattr(model, "optimizer", None)
        inner = getattr(optimizer, "inner_optimizer", None)  # of a LossScaleOptimizer
        self._optimizers = {one.name for one in (optimizer, inner) if one is not None}

    def find(self, operation: tuple[str, ...]) -> keras.Layer | str:
        """Returns the layer of one of the operations, or one of the rows outside layers."""
        layer: keras.Layer | None = None
        outside = OUTSIDE
        for index, name in enumerate(operation):
            start, scopes = layer, name.split("/")[:-1]  # the last is the operation's own name
            begin = 0
            for end, scope in enumerate(scopes, start=1):
                if _GRADIENT.fullmatch(scope):
                    # What follows is the whole name of what this is a gradient of.
                    layer, begin = start, end
                    continue
                base = _base(scope)
                if layer is None:
                    if "compile_loss" in (scope, base):
                        outside = LOSS
                    elif scope in self._optimizers or base in self._optimizers:
                        outside = OPTIMIZER
                # `x + y` opens a scope too, for the gradient; but it shares it with an operation,
                # which no layer does.
                if (*operation[:index], "/".join(scopes[begin:end])) in self._operations:
                    continue
                found = self._nearest(layer).get(base, [])
                if len(found) > 1:
                    return OUTSIDE if layer is None else layer
                if found:
                    layer = found[0]
        return outside if layer is None else layer

    def _nearest(self, layer: keras.Layer | None) -> dict[str | None, list[keras.Layer]]:
        """Returns the layers below one by name: of each name those that are least deep."""
        # Not only the children: a container that runs another's `call` directly opens no scope for
        # it, and a custom train step may call parts of the model by themselves.
        if layer not in self._below:
            below: dict[str | None, list[keras.Layer]] = {}
            seen = {id(layer)}
            level = [self._model] if layer is None else children(layer)
            while level:
                level = [one for one in dict.fromkeys(level) if id(one) not in seen]
                seen |= {id(one) for one in level}
                names = {one.name for one in level} - below.keys()
                for one in level:
                    if one.name in names:
                        below.setdefault(one.name, []).append(one)
                level = [child for one in level for child in children(one)]
            self._below[layer] = below
        return self._below[layer]


def is_gradient(operation: tuple[str, ...]) -> bool:
    """Tells whether an operation, named as in `LayerScopes`, is part of a gradient."""
    return any(_GRADIENT.fullmatch(scope) for name in operation for scope in name.split("/")[:-1])


def _base(scope: str) -> str | None:
    numbered = _NUMBERED.fullmatch(scope)
    return numbered[1] if numbered else None


def children(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the layers that a layer holds itself."""
    # Keras' own way down, one step of it: there is no public one that knows cells and wrapped
    # layers as well as a Functional graph's.
    return layer._flatten_layers(include_self=False, recursive=False)
