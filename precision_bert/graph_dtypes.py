"""The dtypes that a model's graph recorded beside its layers, and that can follow a switch."""

from __future__ import annotations

import weakref

import keras

from precision_bert.policies import HALF

# Operations whose half dtype a switch has replaced: in float32 stages nothing else tells them from
# casts to float32 that their author wrote.
_following: weakref.WeakSet[keras.Operation] = weakref.WeakSet()


def functional_graphs(model: keras.Model) -> list[keras.Function]:
    """Returns the Functional graphs of `model`, those of nested models included."""
    return [part for part in model._flatten_layers() if isinstance(part, keras.Function)]


def following_operations(model: keras.Model) -> dict[keras.Operation, str]:
    """Returns the operations that recorded a half dtype and can follow a switch, with their dtypes.

    There are two kinds. `keras.ops.cast(h, "float16")` between two layers of a Functional graph
    belongs to no layer, so no policy reaches it. And a `Sequential` model that was not told its
    input makes an `InputLayer` in what its first layer computes in at the time.

    Args:
        model: Any Keras model; graphs of nested models are looked through too.
    """
    casts = [
        operation
        for graph in functional_graphs(model)
        for operation in graph.operations
        if not isinstance(operation, keras.Layer)
        and (operation in _following or getattr(operation, "dtype", None) in HALF)
    ]
    inputs = [
        part._layers[0]
        for part in model._flatten_layers()
        if isinstance(part, keras.Sequential) and part._functional is not None
    ]
    return {operation: operation.dtype for operation in casts} | {
        layer: layer.dtype
        for layer in inputs
        # One that its author made was given a shape.
        if isinstance(layer, keras.layers.InputLayer)
        and layer.dtype in HALF
        and layer._auto_config.config["shape"] is None
    }


def follow(operation: keras.Operation, compute_dtype: str) -> bool:
    """Lets one of `following_operations` follow a switch.

    Args:
        operation: The operation.
        compute_dtype: What the new policy computes in.

    Returns:
        Whether its dtype changed.
    """
    if isinstance(operation, keras.layers.InputLayer):
        # float32 will do in each policy: the first layer casts by itself.
        set_dtype(operation, "float32")
        return True
    _following.add(operation)
    changed = operation.dtype != compute_dtype
    set_dtype(operation, compute_dtype)
    return changed


def set_dtype(operation: keras.Operation, dtype: str) -> None:
    """Gives one of `following_operations` a dtype."""
    if isinstance(operation, keras.layers.InputLayer):
        # Both are read: the layer's when inputs are cast, its tensor's when they are checked.
        operation._dtype = dtype
        operation.output._dtype = dtype
        return
    operation.dtype = dtype
    # What Keras saves is what the operation was made with.
    made_with = operation._auto_config.config
    if "dtype" in made_with:
        made_with["dtype"] = dtype
