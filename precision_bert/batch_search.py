"""Searches the batches of training data for what is not finite, whatever the data is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from precision_bert.range_causes import RangeFinding
from precision_bert.range_search import RangeSearch
from precision_bert.training_state import capture, restore


class BatchSearch:
    """Searches training data as `fit` takes it, from its first batch on.

    Args:
        data: `(x, y)` or `(x, y, sample_weight)` of arrays, a `tf.data.Dataset`, a `PyDataset`, or
            None. Of a generator nothing is read: a batch that was read would be missing.
        batch_size: Of arrays; None is `fit`'s own default, 32.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x = np.ones((64, 2))
    >>> x[40] = np.nan
    >>> findings, _ = BatchSearch((x, x[:, :1]))(model, limit=8)
    >>> [one.cause for one in findings]
    ['none', 'input']
    >>> BatchSearch(None)(model, limit=8)
    ([], 'No batch at hand to search: give StallGuard data=.')
    """

    def __init__(self, data: Any, batch_size: int | None = None) -> None:
        self._data = data
        self._batch_size = batch_size or 32

    def __call__(
        self, model: keras.Model, limit: int, state: dict[str, np.ndarray] | None = None
    ) -> tuple[list[RangeFinding], str]:
        """Returns the findings of the first batches, and in words why there are none.

        Args:
            model: The model, left as it is.
            limit: Batches to search at most.
            state: What `training_state.capture` returned, to search at that state of the model.
        """
        present = None if state is None else capture(model)
        try:
            if state is not None:
                restore(model, state)
            search = RangeSearch(model)
            batches = itertools.islice(self._batches(), limit)
            findings = [search(_prepared(model, batch)) for batch in batches]
        except Exception as error:
            # A training that can go on must not end because its data cannot be searched.
            return [], f"The search for the cause failed: {error}"
        finally:
            if present is not None:
                restore(model, present)
        return findings, "" if findings else "No batch at hand to search: give StallGuard data=."

    def _batches(self) -> Iterator[Any]:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(self._data)
        if isinstance(x, tf.data.Dataset):
            yield from x
        elif isinstance(x, keras.utils.PyDataset):
            numbers = itertools.count() if x.num_batches is None else range(x.num_batches)
            yield from (x[i] for i in numbers)
        elif x is not None and not isinstance(x, Iterator):
            parts = [part for part in (x, y, sample_weight) if part is not None]
            for start in range(0, len(keras.tree.flatten(x)[0]), self._batch_size):
                of_batch = slice(start, start + self._batch_size)
                yield tuple(
                    keras.tree.map_structure(lambda leaf, cut=of_batch: leaf[cut], part)
                    for part in parts
                )


def _prepared(model: keras.Model, batch: Any) -> Any:
    # A keras-nlp task takes raw text, which its fit prepares.
    if not hasattr(model, "preprocess_samples"):
        return batch
    return model.preprocess_samples(*keras.utils.unpack_x_y_sample_weight(batch))
