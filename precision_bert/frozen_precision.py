"""Finds the precision that no layer's policy reaches: dtypes recorded when a model was made."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import keras

from precision_bert.graph_dtypes import functional_graphs
from precision_bert.policies import HALF

_FULL = ("float32", "float64")

# What Keras itself records on a layer: never read again by `call`.
_BOOKKEEPING = frozenset({"_dtype_policy", "_losses", "_loss_ids"})


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
            for dtype in _constants_that_stay(node, compute_dtype):
                yield f"operation {node.operation.name!r} has a constant in {dtype}"
    for layer, path in layers.items():
        held = _held_dtypes(layer)
        for name, dtypes in held.items():
            for dtype in dtypes:
                if _is_other_half(dtype, layer.compute_dtype):
                    yield f"layer {path!r} keeps {name!r} in {dtype}"
        if layer.compute_dtype in HALF and any(
            dtype in _FULL for dtypes in held.values() for dtype in dtypes
        ):
            for finding in _behind_its_twin(layer, held):
                yield f"layer {path!r} keeps {finding}"


def _behind_its_twin(layer: keras.Layer, held: dict[str, set[str]]) -> Iterator[str]:
    """Compares what a layer in half keeps in full precision with a layer built in its policy.

    A constant in float32 may be what the author wanted, or what `compute_dtype` was at the time.
    """
    random_state = random.getstate()  # initializers and dropout draw their seeds from it
    try:
        twin = type(layer).from_config(layer.get_config())
        if layer.built:
            twin.build_from_config(layer.get_build_config())
    except Exception:  # a layer that cannot be made anew cannot be compared, whatever the reason
        return
    finally:
        random.setstate(random_state)
    twins = _held_dtypes(twin)
    for name, dtypes in held.items():
        if twins.get(name, dtypes) != dtypes:
            yield (
                f"{name!r} in {', '.join(sorted(dtypes))} (built in this policy it is in "
                f"{', '.join(sorted(twins[name]))})"
            )


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


def _constants_that_stay(node: Any, compute_dtype: str) -> Iterator[str]:
    """Yields the dtypes of a node's constants that a model built in the policy would not have."""
    values = keras.tree.flatten((node.arguments.args, node.arguments.kwargs))
    for value in values:
        if _is_other_half(value, compute_dtype):
            yield str(_dtype(value))
    if compute_dtype not in HALF or isinstance(node.operation, keras.Layer):
        return
    # `h * ops.cast(0.5, h.dtype)`, written for a float32 h: in half it would promote the product.
    # A constant that only meets the model's inputs, which are float32 in any policy, would not.
    if any(_follows_policy(tensor) for tensor in node.input_tensors):
        for value in values:
            if keras.ops.is_tensor(value) and _dtype(value) in _FULL:
                yield str(_dtype(value))


def _follows_policy(tensor: Any) -> bool:
    """Tells whether a tensor of a Functional graph is a layer's output, or computed from one."""
    if isinstance(tensor, keras.KerasTensor) and not keras.backend.is_float_dtype(tensor.dtype):
        return False
    operation, index, _ = tensor._keras_history
    if operation is None or isinstance(operation, keras.Layer):
        return operation is not None and not isinstance(operation, keras.layers.InputLayer)
    return any(map(_follows_policy, operation._inbound_nodes[index].input_tensors))


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
        value = value.dtype
    try:
        return keras.backend.standardize_dtype(value)
    except (TypeError, ValueError):  # most attributes have nothing to do with dtypes
        return None
