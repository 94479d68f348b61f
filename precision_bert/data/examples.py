"""The record that every data source gives: texts, labels and ids of one split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False, repr=False)
class TextExamples:
    """The examples of one split: one or two texts each, a label and an id.

    Use it for your own text in the place of GLUE's: everything in `precision_bert.data` takes and
    gives this record. What it holds is copied and made read-only, so an encoding that was computed
    from it stays true.

    Args:
        texts: One or two sequences of `str`, each of shape `(n,)`. Two are a sentence pair. Held as
            NumPy arrays of dtype object, since a fixed-width string array would pad every text to
            the longest.
        labels: Shape `(n,)`. Integers are classes counted from 0 and held as int32; floats are the
            targets of a regression and held as float32, finite.
        ids: Integers of shape `(n,)`, held as int32: what predictions are joined by. None numbers
            the examples from 0.

    Raises:
        ValueError: If there are no examples, not one or two texts, lengths differ, something other
            than `str` is among the texts, or labels or ids are not numbers of the kind above.

    Example:

    >>> pairs = TextExamples((["a dog ran", "it rained"], ["a dog was running", "snow"]), [1, 0])
    >>> len(pairs), pairs.label_counts, pairs.majority_share
    (2, {0: 1, 1: 1}, 0.5)
    >>> pairs
    TextExamples(n=2, texts=2, labels={0: 1, 1: 1})

    GLUE marks a label that it keeps to itself with -1; such examples are refused here, since a
    metric computed on them would mean nothing. Two records are equal only if they are the same
    object: compare the arrays.
    """

    texts: tuple[np.ndarray, ...]
    labels: np.ndarray
    ids: np.ndarray

    def __init__(
        self,
        texts: Sequence[Sequence[str] | np.ndarray],
        labels: Sequence[int] | Sequence[float] | np.ndarray,
        ids: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        if not isinstance(texts, (tuple, list)) or len(texts) not in (1, 2):
            raise ValueError(
                "texts must be a tuple of one sequence of str, or of two for sentence pairs. "
                f"Received: {_describe(texts)}. A single text field is written (sentences,)."
            )
        fields = tuple(_as_text(text, index) for index, text in enumerate(texts))
        count = len(fields[0])
        if count == 0:
            raise ValueError("There must be at least one example. Received: empty texts.")
        label_array = _as_labels(labels)
        id_array = _as_ids(np.arange(count) if ids is None else ids)
        lengths = [len(field) for field in fields] + [len(label_array), len(id_array)]
        if len(set(lengths)) != 1:
            raise ValueError(
                "texts, labels and ids must have one entry an example. Received lengths: "
                f"texts={lengths[:-2]}, labels={lengths[-2]}, ids={lengths[-1]}."
            )
        for array in (*fields, label_array, id_array):
            array.setflags(write=False)
        object.__setattr__(self, "texts", fields)
        object.__setattr__(self, "labels", label_array)
        object.__setattr__(self, "ids", id_array)

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        labels = "float32" if self.is_regression else repr(self.label_counts)
        return f"TextExamples(n={len(self)}, texts={len(self.texts)}, labels={labels})"

    def __getitem__(self, index: slice) -> TextExamples:
        if not isinstance(index, slice):
            raise TypeError(
                "TextExamples takes a slice, as in examples[:100]. For positions use "
                f"examples.select([...]). Received: {index!r}."
            )
        return self.select(np.arange(len(self))[index])

    @property
    def is_regression(self) -> bool:
        """Whether the labels are float32 targets, not classes."""
        return self.labels.dtype == np.float32

    @property
    def label_counts(self) -> dict[int, int]:
        """How many examples each class has, by class; only classes that occur.

        Raises:
            ValueError: If the labels are those of a regression.
        """
        if self.is_regression:
            raise ValueError("A regression has no classes to count. Its labels are float32.")
        values, counts = np.unique(self.labels, return_counts=True)
        return {int(value): int(count) for value, count in zip(values, counts, strict=True)}

    @property
    def majority_share(self) -> float:
        """The accuracy of always answering the most frequent class, 0 to 1.

        Raises:
            ValueError: If the labels are those of a regression.
        """
        return max(self.label_counts.values()) / len(self)

    def select(self, indices: Sequence[int] | np.ndarray) -> TextExamples:
        """Returns the examples at `indices` (counted from 0), in the order given.

        Raises:
            ValueError: If `indices` is empty or not integers.
            IndexError: If one lies outside the examples.
        """
        chosen = np.asarray(indices)
        if chosen.ndim != 1 or chosen.size == 0 or chosen.dtype.kind not in "iu":
            raise ValueError(
                "There must be at least one example to select, by integers of shape (n,). "
                f"Received: {chosen.dtype} of shape {chosen.shape}."
            )
        return TextExamples(
            tuple(text[chosen] for text in self.texts), self.labels[chosen], self.ids[chosen]
        )

    def split(self, held_out: float, seed: int = 0) -> tuple[TextExamples, TextExamples]:
        """Holds out a part at random, for choosing among settings without the test split.

        Args:
            held_out: How much goes to the second part. An int is a number of examples; a float
                between 0 and 1 is a share, and `round(share * n)` examples are held out.
            seed: Of the draw. It alone decides which examples are held out, on every machine.

        Returns:
            `(kept, held)`. Examples are drawn without replacement and without regard to their
            class; each part keeps the order of the whole.

        Raises:
            ValueError: If one of the two parts would be empty.

        Example:

        >>> kept, held = TextExamples((list("abcde"),), [0, 1, 0, 1, 0]).split(0.4, seed=1)
        >>> [int(i) for i in kept.ids], [int(i) for i in held.ids]
        ([0, 3, 4], [1, 2])
        """
        size = len(self)
        if isinstance(held_out, bool) or not isinstance(held_out, (int, float, np.number)):
            raise ValueError(
                "held_out must be a number of examples (int) or a share between 0 and 1 (float). "
                f"Received: held_out={held_out!r}."
            )
        is_count = isinstance(held_out, (int, np.integer))
        is_share = not is_count and 0 < held_out < 1
        count = int(held_out) if is_count else round(held_out * size) if is_share else 0
        if not 0 < count < size:
            raise ValueError(
                "held_out must leave at least one example in both parts: an int from 1 to "
                f"{size - 1}, or a share between 0 and 1. Received: held_out={held_out!r}."
            )
        # RandomState's streams are frozen by NumPy's compatibility policy; Generator's are not.
        drawn = np.random.RandomState(seed).permutation(size)
        return self.select(np.sort(drawn[count:])), self.select(np.sort(drawn[:count]))


def _describe(value: Any) -> str:
    size = f" of length {len(value)}" if isinstance(value, (tuple, list)) else ""
    return f"{type(value).__name__}{size}"


def _as_text(text: Sequence[str] | np.ndarray, index: int) -> np.ndarray:
    if isinstance(text, (str, bytes)) or not hasattr(text, "__len__"):
        raise ValueError(
            f"texts[{index}] must be a sequence of str. Received: {type(text).__name__}."
        )
    array = np.empty(len(text), dtype=object)
    for position, item in enumerate(text):
        if not isinstance(item, str):
            raise ValueError(
                f"texts[{index}][{position}] must be str. Received: {type(item).__name__}. "
                "Decode bytes with .decode('utf-8')."
            )
        array[position] = str(item)
    return array


def _as_labels(labels: Any) -> np.ndarray:
    array = np.array(labels)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise ValueError(
            "labels must be integers (classes) or floats (a regression) of shape (n,). "
            f"Received: {array.dtype} of shape {array.shape}."
        )
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):  # what overflows is reported below, with its position
            array = array.astype(np.float32)
        bad = np.flatnonzero(~np.isfinite(array))
        expected = "finite float32 numbers"
    else:
        bad = np.flatnonzero((array < 0) | (array > np.iinfo(np.int32).max))
        expected = "classes counted from 0 (-1 marks a label that is not public)"
    if bad.size:
        raise ValueError(
            f"labels must be {expected}. Received: {array[bad[0]]} at position {bad[0]}, and "
            f"{bad.size - 1} more such."
        )
    return array if array.dtype == np.float32 else array.astype(np.int32)


def _as_ids(ids: Any) -> np.ndarray:
    array = np.array(ids)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"ids must be integers of shape (n,). Received: {array.dtype} of shape {array.shape}."
        )
    limits = np.iinfo(np.int32)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise ValueError(f"ids must fit in int32. Received: {array.min()} to {array.max()}.")
    return array.astype(np.int32)
