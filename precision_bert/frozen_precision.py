"""Finds the precision that no layer's policy reaches: dtypes recorded when a model was made."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from precision_bert.graph_dtypes import functional_graphs
from precision_bert.policies import HALF

_FULL = ("float32", "float64")

# What Keras itself records on a layer: never read again by `call`.
_BOOKKEEPING = frozenset({"_dtype_policy", "_losses", "_loss_ids", "name", "_name", "_path"})


def frozen_precision(
    model: keras.Model, layers: dict[keras.Layer, str], compute_dtype: str
) -> Iterator[str]:
    """Describes what would not follow although the layers have their new policy.

    Args:
        model: Any Keras model whose layers have their new policies.
        layers: Those of its layers that must follow the policy, with their paths.
        compute_dtype: What the policy computes in.

    Yields:
        One description a finding, with the layer's or operation's name, for an error message.
    """
    for graph in functional_graphs(model):
        for layer in graph.operations:
            if isinstance(layer, keras.layers.InputLayer) and _is_other_half(
                layer.dtype, compute_dtype
            ):
                yield f"input {layer.name!r} is declared as {layer.dtype}"
        for node in itertools.chain.from_iterable(graph._nodes_by_depth.values()):
            for dtype in _constants_that_stay(graph, node, compute_dtype):
                yield f"operation {node.operation.name!r} has a constant in {dtype}"
    for layer, path in layers.items():
        for finding in _held_beside_the_policy(layer):
            yield f"layer {path!r} keeps {finding}"


def _held_beside_the_policy(layer: keras.Layer) -> Iterator[str]:
    """Describes what a layer holds in another dtype than one that was built in its policy.

    A constant in another dtype may be what the author wanted, or what `compute_dtype` was when it
    was made; a layer made anew tells. What only the live layer has, a call has left there.
    """
    # In full precision all of it is safe that is in full precision.
    relevant = {*HALF, *_FULL} if layer.compute_dtype in HALF else {*HALF}
    held = {
        name: dtypes
        for name, dtypes in _held_dtypes(layer).items()
        if (dtypes & relevant) - {layer.compute_dtype}
    }
    if not held:
        return
    twin = _twin(layer)
    twins = {} if twin is None else _held_dtypes(twin)
    for name, dtypes in held.items():
        described = f"{name!r} in {', '.join(sorted(dtypes))}"
        if twin is None:
            # Float32 is safe; half under another policy is not.
            if any(_is_other_half(dtype, layer.compute_dtype) for dtype in dtypes):
                yield described
        elif name in twins and twins[name] != dtypes:
            yield f"{described} (built in this policy it is in {', '.join(sorted(twins[name]))})"


def _twin(layer: keras.Layer) -> keras.Layer | None:
    """Makes a layer anew from its configuration; `None` where that fails, whatever the reason."""
    # Initializers and dropout draw seeds from Python's generator, builds perhaps from NumPy's.
    random_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        twin = type(layer).from_config(layer.get_config())
        if layer.built:
            twin.build_from_config(layer.get_build_config())
    except Exception:
        return None
    finally:
        random.setstate(random_state)
        np.random.set_state(numpy_state)
    return twin


def _held_dtypes(layer: keras.Layer) -> dict[str, set[str]]:
    """Returns the float dtypes that a layer's attributes are, or are held in, by attribute."""
    held: dict[str, set[str]] = {}
    for name, value in vars(layer).items():
        if name in _BOOKKEEPING:
            continue
        dtypes = {dtype for dtype in map(_dtype, _leaves(value)) if dtype in (*HALF, *_FULL)}
        if dtypes:
            held[name] = dtypes
    return held


def _constants_that_stay(graph: keras.Function, node: Any, compute_dtype: str) -> Iterator[str]:
    """Yields the dtypes of a node's constants that a model built in the policy would not have."""
    values = keras.tree.flatten((node.arguments.args, node.arguments.kwargs))
    for value in values:
        if _is_other_half(value, compute_dtype):
            yield str(_dtype(value))
    # `h * ops.cast(0.5, h.dtype)`, written for a float32 h: in half it would promote the product.
    # That is known only of a graph that its class makes anew in each precision. A graph that was
    # wired by hand is made anew with the same constants.
    if (
        compute_dtype in HALF
        and not type(graph).__module__.startswith("keras.")
        and not isinstance(node.operation, keras.Layer)
        and any(_was_float32_as_its_layer(tensor) for tensor in node.input_tensors)
    ):
        for value in values:
            if keras.ops.is_tensor(value) and _dtype(value) in _FULL:
                yield str(_dtype(value))


def _was_float32_as_its_layer(tensor: Any) -> bool:
    """Tells whether a tensor of a graph was recorded in float32 and comes from a layer.

    The model's inputs are float32 in any policy, and what met them is the same in each.
    """
    if tensor.dtype not in _FULL:
        return False
    operation, index, _ = tensor._keras_history
    if operation is None or isinstance(operation, keras.Layer):
        return operation is not None and not isinstance(operation, keras.layers.InputLayer)
    return any(map(_was_float32_as_its_layer, operation._inbound_nodes[index].input_tensors))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple, set)):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _is_other_half(value: Any, compute_dtype: str) -> bool:
    dtype = _dtype(value)
    return dtype in HALF and dtype != compute_dtype


def _dtype(value: Any) -> str | None:
    """Returns the dtype that a value is, or is held in; `None` where it has to do with none."""
    # Variables and nested layers are looked at as such; a KerasTensor is what the graph was made
    # with, and computes nothing.
    if value is None or isinstance(value, (keras.Variable, keras.Layer, keras.KerasTensor)):
        return None
    if isinstance(value, keras.DTypePolicy):
        return value.compute_dtype
    if hasattr(value, "dtype") and hasattr(value, "shape"):  # a tensor or an array
        if value.dtype is None or hasattr(value, "graph"):
            return None  # an InputSpec without dtype, a tensor that tracing has left behind
        value = value.dtype
    try:
        return keras.backend.standardize_dtype(value)
    except (TypeError, ValueError):  # most attributes have nothing to do with dtypes
        return None
