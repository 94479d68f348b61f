"""The batches of what a model is trained with, as a train step is given them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf


def batches_of(data: Any, batch_size: int | None, limit: int) -> Iterator[Any]:
    """Yields the first batches of data, as a train step is given them.

    Args:
        data: As in `gradient_range`.
        batch_size: Of arrays; `None` for 32.
        limit: How many batches to read at most.

    Raises:
        TypeError: If it is no such data.
        ValueError: If its parts differ in length, or a data set is given a batch size.
    """
    if isinstance(data, (tf.data.Dataset, keras.utils.PyDataset)):
        if batch_size is not None:
            raise ValueError(
                f"batch_size is for arrays: a {type(data).__name__} has batches of its own. "
                f"Received: batch_size={batch_size}."
            )
        # TensorFlow reads ahead of what is taken from an iterator, but not of what `take` allows.
        bounded = data.take(limit) if isinstance(data, tf.data.Dataset) else data
        for batch in itertools.islice(bounded, limit):
            yield keras.tree.map_structure(_as_fit_takes, batch)
        return
    parts = data if isinstance(data, tuple) else (data,)
    if not 1 <= len(parts) <= 3:
        raise TypeError(
            "data must be x, (x, y) or (x, y, sample_weight), a tf.data.Dataset or a PyDataset. "
            f"Received a tuple of {len(parts)} parts."
        )
    lengths = {_length(leaf) for leaf in keras.tree.flatten(parts) if leaf is not None}
    if len(lengths) != 1:
        raise ValueError(
            f"All parts of data must have as many examples. Received: {sorted(lengths)}."
        )
    size = batch_size or 32
    for start in range(0, lengths.pop(), size)[:limit]:
        part = functools.partial(_part, start=start, size=size)
        yield keras.tree.map_structure(part, parts)


def _part(leaf: Any, start: int, size: int) -> Any:
    return None if leaf is None else _as_fit_takes(leaf[start : start + size])


def _length(leaf: Any) -> int:
    if not hasattr(leaf, "dtype") or not getattr(leaf, "shape", ()):
        raise TypeError(
            "data must be arrays or tensors, x, (x, y) or (x, y, sample_weight), a tf.data.Dataset "
            f"or a PyDataset. Received a {type(leaf).__name__}: {leaf!r}. Of a generator, pass one "
            "batch."
        )
    return leaf.shape[0]


def _as_fit_takes(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return leaf
    is_float = np.issubdtype(leaf.dtype, np.floating)
    return tf.convert_to_tensor(leaf, keras.config.floatx() if is_float else None)
