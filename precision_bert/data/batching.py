"""Examples to batches that are padded to their own length and no further."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from precision_bert.data.encoding import encode_examples, true_lengths
from precision_bert.data.epoch_order import shuffled_batches
from precision_bert.data.examples import TextExamples


def encode_batches(
    examples: TextExamples,
    preprocessor: Any,
    *,
    batch_size: int = 32,
    bucket_by_length: bool = True,
    pad_to_multiple_of: int = 8,
    shuffle: bool = False,
    seed: int = 0,
    first_epoch: int = 0,
) -> tf.data.Dataset:
    """Encodes examples once and gives them in batches, each padded to its own longest example.

    Use it in place of a preprocessor inside the model: the text is tokenized once and not in every
    epoch, and a batch of short texts costs what short texts cost. A BERT takes the features as
    they are, since what is left out is padding, which the mask hides from it anyway.

    Args:
        examples: Single texts or pairs.
        preprocessor: A keras_nlp text classifier preprocessor, or a callable of the same form: it
            has a `sequence_length`, and `preprocessor((first, second), labels)` gives
            `(features, labels)`; single texts are passed as `(text,)`. It is traced by `tf.data`.
        batch_size: Examples in a batch. Where it does not divide their number, one batch of every
            epoch has fewer: the last, or with `shuffle` and `bucket_by_length` any.
        bucket_by_length: Whether batches are trimmed, and with `shuffle` made of examples of about
            the same length. False pads every batch to `sequence_length`: one fixed shape, as XLA
            and memory measurements want it.
        pad_to_multiple_of: Trimmed batches are this much or a multiple of it long, in tokens, but
            never longer than `sequence_length`. The default, 8, is what half-precision matrix units
            of GPUs ask for, and leaves few shapes for a library to plan.
        shuffle: Whether the order changes from epoch to epoch, for training. False keeps the order
            of the examples exactly, for evaluation.
        seed: Of the shuffling, 0 to 2**32 - 1.
        first_epoch: Number of the epoch that the first iteration gives the order of. To go on
            with a run after `k` epochs in another process, as if it had not been interrupted, pass
            what that run passed plus `k`.

    Returns:
        A dataset of `(features, labels)`: features are `token_ids`, `segment_ids` and
        `padding_mask` (whichever the preprocessor gives), each `(batch, seq_len)` int32; labels are
        `(batch,)`, int32 classes or float32 targets. It has `len()`, `ceil(n / batch_size)`, and
        every iteration over it gives each example once.

    Raises:
        ValueError: If a number is out of range, or the preprocessor has no `sequence_length`, gives
            floats, pads on the left, or leaves out the second text of every pair.

    Example:

    >>> import keras_nlp
    >>> from precision_bert.data import demo_pairs, demo_vocabulary
    >>> tokenizer = keras_nlp.models.BertTokenizer(demo_vocabulary())
    >>> preprocessor = keras_nlp.models.BertTextClassifierPreprocessor(
    ...     tokenizer, sequence_length=64
    ... )
    >>> train = demo_pairs(num_train=100)["train"]
    >>> batches = encode_batches(train, preprocessor, shuffle=True)
    >>> len(batches)
    4
    >>> sorted({features["token_ids"].shape[1] for features, _ in batches})
    [24]

    With `shuffle=True` an epoch goes like this: all examples are shuffled; pools of 32 batches are
    cut off and each is sorted by length; the batches are cut from these, and their order is
    shuffled. The order is a function of `seed` and the epoch's number alone, on every machine and
    whatever other seeds are set: the number is `first_epoch` for the first iteration that gives a
    batch, and one more for each one after, also where one is broken off.

    With `shuffle=False` nothing is sorted behind your back: row `i` of the concatenated predictions
    belongs to `examples.ids[i]`. Long and short texts then share batches and padding; to evaluate
    faster, sort the examples themselves with `sort_by_length`, which carries labels and ids along.

    Pass `shuffle=False` to `fit`, whose own shuffling is for arrays: with a dataset it only warns.

    All features are held in memory: 12 bytes for each token of `sequence_length`, so 6 MB for
    MRPC's training split at 128.
    """
    _check_int("batch_size", batch_size, minimum=1)
    _check_int("pad_to_multiple_of", pad_to_multiple_of, minimum=1)
    _check_int("seed", seed, minimum=0)
    _check_int("first_epoch", first_epoch, minimum=0)
    encoded = encode_examples(examples, preprocessor)
    true_length = true_lengths(encoded)
    full_length = encoded["token_ids"].shape[1]
    # On the CPU, where tf.data runs: on a GPU they would take memory there and be copied back.
    with tf.device("CPU"):
        features = {name: tf.constant(array) for name, array in encoded.items()}
        lengths = tf.constant(true_length)
        labels = tf.constant(examples.labels)

    def batch_at(positions: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        rows = {name: tf.gather(tensor, positions) for name, tensor in features.items()}
        if bucket_by_length:
            longest = tf.reduce_max(tf.gather(lengths, positions))
            rounded = -(-longest // pad_to_multiple_of) * pad_to_multiple_of
            # Slicing stops at the full length by itself where rounding went beyond it.
            rows = {name: row[:, :rounded] for name, row in rows.items()}
        else:
            rows = {name: tf.ensure_shape(row, (None, full_length)) for name, row in rows.items()}
        return rows, tf.gather(labels, positions)

    if shuffle:
        epochs = itertools.count(first_epoch)

        # Not tf.data's shuffle: its order depends on the global seed too, and two of them in a row
        # no longer match once an iteration is broken off.
        def one_epoch() -> Iterator[np.ndarray]:
            yield from shuffled_batches(
                true_length,
                batch_size,
                bucket_by_length=bucket_by_length,
                seed=seed,
                epoch=next(epochs),
            )

        spec = tf.TensorSpec((None,), tf.int64)
        order = tf.data.Dataset.from_generator(one_epoch, output_signature=spec)
        count = -(-len(examples) // batch_size)
        order = order.apply(tf.data.experimental.assert_cardinality(count))
    else:
        order = tf.data.Dataset.range(len(examples)).batch(batch_size)
    return order.map(batch_at).prefetch(tf.data.AUTOTUNE)


def _check_int(name: str, value: int, *, minimum: int) -> None:
    # 2**32 - 1 is the largest number that NumPy takes for a seed; nothing here needs a larger one.
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_int or not minimum <= value < 2**32:
        raise ValueError(
            f"{name} must be an int from {minimum} to 2**32 - 1. Received: {name}={value!r}."
        )
