"""Checks on training data, before any training: what `fit` would silently learn wrong from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_SPARSE_LOSSES = ("SparseCategoricalCrossentropy", "sparse_categorical_crossentropy")


def check_training_data(model: keras.Model, x: Any, y: Any, *, loss: Any) -> Any:
    """Refuses empty data, floating token ids and labels that the model has no output for.

    Arrays are checked whole. Of a data set or a generator the first batch is read and checked.

    Args:
        model: The model that will be trained.
        x: What `fit` takes as `x`.
        y: What `fit` takes as `y`.
        loss: The loss that the model is or will be compiled with.

    Returns:
        What to give to `fit` as `x`: `x` itself, or for a generator a generator that begins with
        the batch that was read.

    Raises:
        ValueError: If there is no example, if token ids are floating point, or if a class label
            lies outside the model's outputs.
    """
    replacement = x
    if isinstance(x, tf.data.Dataset):
        batch = next(iter(x.take(1)), None)
    elif isinstance(x, keras.utils.PyDataset):
        batch = x[0] if x.num_batches != 0 else None
    elif isinstance(x, Iterator):
        batch = next(x, None)
        replacement = _resumed(batch, x)
    else:
        batch = (x, y)
        if _num_examples(x) == 0:
            batch = None
    if batch is None:
        raise ValueError(f"The training data is empty. Received: x of type {type(x).__name__}.")
    batch_x, batch_y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    _check_token_ids(model, batch_x)
    _check_labels(model, batch_y, loss)
    return replacement


def _resumed(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    # A generator function, because Keras takes no other iterator.
    yield first
    yield from rest


def _num_examples(x: Any) -> int | None:
    leaves = keras.tree.flatten(x)
    if leaves and hasattr(leaves[0], "shape") and len(leaves[0].shape) > 0:
        return leaves[0].shape[0]
    return len(x) if isinstance(x, (list, tuple)) and not leaves else None


def _check_token_ids(model: keras.Model, x: Any) -> None:
    """Refuses floating values where the model looks something up by them.

    float16 holds whole numbers exactly only up to 2048, and the cast to the compute dtype comes
    before the lookup: token 2049 becomes 2048, 30521 becomes 30528, in silence.
    """
    for name, value in _named_inputs(model, x):
        if not np.issubdtype(_numpy_dtype(value), np.floating):
            continue
        raise ValueError(
            f"Input {name!r} is looked up in an embedding, so it must hold int32 ids. Received "
            f"dtype {_numpy_dtype(value)}: in half precision ids above 2048 are rounded (2049 "
            "becomes 2048). Cast it to int32 in the data pipeline."
        )


def _named_inputs(model: keras.Model, x: Any) -> Iterator[tuple[str, Any]]:
    """Yields the parts of `x` that the model takes as ids: integer inputs, embedded inputs."""
    values = x if isinstance(x, dict) else None
    inputs = getattr(model, "inputs", None)
    if inputs:
        embedded = _embedded_inputs(model)
        leaves = keras.tree.flatten(x)
        for position, tensor in enumerate(inputs):
            if "int" not in str(tensor.dtype) and tensor.name not in embedded:
                continue
            if values is not None:
                if tensor.name in values:
                    yield tensor.name, values[tensor.name]
            elif position < len(leaves):
                yield tensor.name, leaves[position]
    elif values is not None:
        # A subclassed model tells nothing about its inputs; the field's names for ids do.
        for name in ("token_ids", "input_ids", "input_word_ids"):
            if name in values:
                yield name, values[name]


def _embedded_inputs(model: keras.Model) -> set[str]:
    """Returns the names of inputs that go straight into an Embedding."""
    names = {tensor.name: id(tensor) for tensor in model.inputs}
    embedded: set[str] = set()
    for layer in model._flatten_layers():
        if not isinstance(layer, keras.layers.Embedding):
            continue
        for node in layer._inbound_nodes:
            taken = {id(tensor) for tensor in node.input_tensors}
            embedded |= {name for name, key in names.items() if key in taken}
    return embedded


def _check_labels(model: keras.Model, y: Any, loss: Any) -> None:
    name = loss if isinstance(loss, str) else type(loss).__name__
    outputs = getattr(model, "outputs", None)
    if name not in _SPARSE_LOSSES or y is None or not outputs or len(outputs) != 1:
        return
    num_classes = outputs[0].shape[-1]
    labels = np.asarray(keras.ops.convert_to_numpy(y))
    if num_classes is None or labels.size == 0:
        return
    bad = labels[(labels < 0) | (labels >= num_classes) | (labels != np.floor(labels))]
    if bad.size:
        raise ValueError(
            f"Labels must be whole numbers from 0 to {num_classes - 1}, because the model has "
            f"{num_classes} outputs. Received {bad.size} others, among them {bad.flat[0]}. (GLUE's "
            "test splits carry the label -1: they are not meant for training.)"
        )


def _numpy_dtype(value: Any) -> np.dtype:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return np.asarray(value).dtype
    return np.dtype(getattr(dtype, "as_numpy_dtype", dtype))
