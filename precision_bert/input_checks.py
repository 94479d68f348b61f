"""Checks on training data, before any training: what `fit` would silently learn wrong from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

_SPARSE_LOSSES = ("SparseCategoricalCrossentropy", "sparse_categorical_crossentropy")


def check_training_data(model: keras.Model, x: Any, y: Any, *, loss: Any) -> Any:
    """Refuses empty data, floating token ids and labels that the model has no output for.

    Arrays are checked whole, of a generator or a `PyDataset` the first batch. A `tf.data.Dataset`
    is not read, since reading it would move on its shuffling: its `element_spec` tells the types,
    and its labels are checked batch by batch on the way to the model.

    Args:
        model: The model that will be trained.
        x: What `fit` takes as `x`.
        y: What `fit` takes as `y`.
        loss: The loss that the model is or will be compiled with.

    Returns:
        What to give to `fit` as `x`: `x` itself; for a generator, one that begins with the batch
        that was read; for a data set, one that gives the same and raises
        `tf.errors.InvalidArgumentError` at a label without an output.

    Raises:
        ValueError: If there is no example, if token ids are floating point, or if a class label
            lies outside the model's outputs.
    """
    if isinstance(x, tf.data.Dataset):
        if x.cardinality() == 0:
            _raise_empty(x)
        batch_x, _, _ = keras.utils.unpack_x_y_sample_weight(x.element_spec)
        _check_token_ids(model, batch_x)
        return _with_checked_labels(x, _num_classes(model, loss), _ignored(loss))
    replacement = x
    if isinstance(x, keras.utils.PyDataset):
        batch = _first_batch(x)
    elif isinstance(x, Iterator):
        batch = next(x, None)
        replacement = _resumed(batch, x)
    else:
        batch = None if _num_examples(x) == 0 else (x, y)
    if batch is None:
        _raise_empty(x)
    batch_x, batch_y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    _check_token_ids(model, batch_x)
    _check_labels(batch_y, _num_classes(model, loss), _ignored(loss))
    return replacement


def _raise_empty(x: Any) -> NoReturn:
    raise ValueError(f"The training data is empty. Received: x of type {type(x).__name__}.")


def _first_batch(dataset: keras.utils.PyDataset) -> Any:
    if dataset.num_batches == 0:
        return None
    # A data set that augments draws from NumPy's and Python's global generators: training must
    # find them where it would without this check.
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        return dataset[0]
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def _with_checked_labels(
    dataset: tf.data.Dataset, num_classes: int | None, ignored: int | None
) -> tf.data.Dataset:
    if num_classes is None:
        return dataset

    def check(*element: Any) -> Any:
        batch = element if len(element) > 1 else element[0]
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        leaves = keras.tree.flatten(y)
        if len(leaves) != 1 or leaves[0] is None:
            return batch
        # Wide enough for num_classes, whatever the labels are stored in.
        labels = tf.cast(leaves[0], "float64" if leaves[0].dtype.is_floating else "int64")
        inside = (labels >= 0) & (labels < num_classes)
        if labels.dtype.is_floating:
            inside &= labels == tf.floor(labels)
        if ignored is not None:
            inside |= labels == ignored
        rule = tf.debugging.Assert(tf.reduce_all(inside), [_label_rule(num_classes), labels])
        with tf.control_dependencies([rule]):
            y = keras.tree.map_structure(tf.identity, y)
        return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)

    return dataset.map(check)


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
            f"Input {name!r} is looked up in an embedding or declared as whole numbers, so it must "
            f"hold int32. Received dtype {_numpy_dtype(value)}: in half precision ids above 2048 "
            "are rounded (2049 becomes 2048). Cast it to int32 in the data pipeline."
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


def _num_classes(model: keras.Model, loss: Any) -> int | None:
    """Returns how many classes the labels may name; None where that cannot be told."""
    name = loss if isinstance(loss, str) else type(loss).__name__
    outputs = getattr(model, "outputs", None)
    if name not in _SPARSE_LOSSES or not outputs or len(outputs) != 1:
        return None
    if getattr(loss, "axis", -1) != -1:
        return None
    return outputs[0].shape[-1]


def _ignored(loss: Any) -> int | None:
    """Returns the label that the loss leaves out, as in token classification."""
    return getattr(loss, "ignore_class", None)


def _label_rule(num_classes: int) -> str:
    return (
        f"Labels must be whole numbers from 0 to {num_classes - 1}, because the model has "
        f"{num_classes} outputs. (GLUE's test splits carry the label -1: they are not meant for "
        "training.)"
    )


def _check_labels(y: Any, num_classes: int | None, ignored: int | None) -> None:
    leaves = keras.tree.flatten(y)
    if num_classes is None or len(leaves) != 1 or leaves[0] is None:
        return
    labels = np.asarray(keras.ops.convert_to_numpy(leaves[0]))
    outside = (labels < 0) | (labels >= num_classes) | (labels != np.floor(labels))
    if ignored is not None:
        outside &= labels != ignored
    bad = labels[outside]
    if bad.size:
        raise ValueError(
            f"{_label_rule(num_classes)} Received {bad.size} others, among them {bad.flat[0]}."
        )


def _numpy_dtype(value: Any) -> np.dtype:
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        return np.asarray(value).dtype
    return np.dtype(getattr(dtype, "as_numpy_dtype", dtype))
