"""Examples to token arrays, by way of a keras_nlp preprocessor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from precision_bert.data.examples import TextExamples

_CHUNK = 256  # examples a call: enough to outweigh a call's cost, and to share out among cores


def encode_examples(examples: TextExamples, preprocessor: Any) -> dict[str, np.ndarray]:
    """Encodes all examples at full length.

    Args:
        examples: Single texts or pairs.
        preprocessor: A keras_nlp text classifier preprocessor, or a callable of the same form: it
            has a `sequence_length`, and `preprocessor((first, second), labels)` gives
            `(features, labels)`; single texts are passed as `(text,)`. It is traced by `tf.data`.

    Returns:
        The features, among them `token_ids` and `padding_mask`, each `(n, sequence_length)` int32.

    Raises:
        ValueError: If the preprocessor has no `sequence_length`, returns something of another form,
            gives floats, pads on the left, or leaves out the second text of every pair.
    """
    length = _sequence_length(preprocessor)
    texts = tuple(tf.constant(text.tolist()) for text in examples.texts)
    chunks = tf.data.Dataset.from_tensor_slices((texts, examples.labels)).batch(_CHUNK)
    # In tf.data and not called directly: there keras_nlp tokenizes with TensorFlow's ops on all
    # cores, outside with Python. And always with the labels: keras_nlp reads
    # preprocessor((first, second)) as text and label, and drops the second text.
    encoded = chunks.map(
        lambda text, label: preprocessor(text, label), num_parallel_calls=tf.data.AUTOTUNE
    )
    _check_spec(encoded.element_spec)
    parts = [features for features, _ in encoded.as_numpy_iterator()]
    features = {
        name: np.concatenate([part[name] for part in parts]).astype(np.int32) for name in parts[0]
    }
    _check_content(features, (len(examples), length), is_pair=len(examples.texts) == 2)
    return features


def true_lengths(features: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns how many positions of each row hold tokens, special ones included: (n,) int32."""
    return features["padding_mask"].sum(axis=1, dtype=np.int32)


def sort_by_length(examples: TextExamples, preprocessor: Any) -> TextExamples:
    """Returns the examples from the shortest to the longest, as the preprocessor counts them.

    Use it before `encode_batches(..., shuffle=False)` to evaluate with little padding. Batches keep
    the order of the examples they are made from, so predictions belong to the *sorted* examples,
    row by row: join them by `ids`.

    Args:
        examples: Single texts or pairs.
        preprocessor: As for `encode_batches`.

    Returns:
        The same examples with their labels and ids. Equal lengths keep their order.

    Raises:
        ValueError: As `encode_batches` does.

    Example:

    >>> import keras_nlp
    >>> vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "it", "rained"]
    >>> tokenizer = keras_nlp.models.BertTokenizer(vocabulary)
    >>> preprocessor = keras_nlp.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=8)
    >>> examples = TextExamples((["it rained", "it", "rained it rained"],), [0, 1, 0])
    >>> ordered = sort_by_length(examples, preprocessor)
    >>> [int(i) for i in ordered.ids]
    [1, 0, 2]

    To restore the order of the examples after `predictions = model.predict(batches)`:
    `predictions[np.argsort(ordered.ids)]`, where the ids of the original ascend.
    """
    lengths = true_lengths(encode_examples(examples, preprocessor))
    return examples.select(np.argsort(lengths, kind="stable"))


def _sequence_length(preprocessor: Any) -> int:
    length = getattr(preprocessor, "sequence_length", None)
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 1:
        raise ValueError(
            "preprocessor must have a sequence_length, the number of tokens it pads to, as "
            "keras_nlp.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=128) has. "
            f"Received: {type(preprocessor).__name__} with sequence_length={length!r}."
        )
    return int(length)


def _check_spec(spec: Any) -> None:
    if not (isinstance(spec, tuple) and len(spec) == 2 and isinstance(spec[0], Mapping)):
        raise ValueError(
            "preprocessor(texts, labels) must return (features, labels), features a mapping. "
            f"Received: {spec!r}."
        )
    features = spec[0]
    if not {"token_ids", "padding_mask"} <= set(features):
        raise ValueError(
            "The preprocessor's features must have token_ids and padding_mask. "
            f"Received: {', '.join(features) or 'none'}."
        )
    for name, value in features.items():
        if not (value.dtype.is_integer or value.dtype.is_bool):
            raise ValueError(
                f"The preprocessor must give integer {name}: half precision, to which Keras would "
                "cast floats, rounds 2049 to 2048, another word. "
                f"Received: {name} of dtype {value.dtype.name}. Build it with dtype='int32'."
            )


def _check_content(
    features: Mapping[str, np.ndarray], shape: tuple[int, int], *, is_pair: bool
) -> None:
    for name, array in features.items():
        if array.shape != shape:
            raise ValueError(
                f"The preprocessor must give {name} of shape (n, sequence_length) = {shape}. "
                f"Received: {array.shape}."
            )
    # Batches are cut on the right, which would take a left-padded row's words away.
    grows = (np.diff(features["padding_mask"], axis=1) > 0).any(axis=1)
    if grows.any():
        raise ValueError(
            "The preprocessor must pad on the right. Received: a padding_mask that goes from 0 to "
            f"1, in row {int(np.argmax(grows))}."
        )
    if is_pair and "segment_ids" in features and not features["segment_ids"].any():
        raise ValueError(
            "The preprocessor left out the second text of every pair: its segment_ids are 0 "
            "throughout. Does it take a tuple of two, and is sequence_length large enough?"
        )
