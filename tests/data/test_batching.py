from __future__ import annotations

import itertools

import keras
import keras_nlp
import numpy as np
import pytest
import tensorflow as tf

from precision_bert.data import (
    TextExamples,
    demo_pairs,
    demo_vocabulary,
    encode_batches,
    sort_by_length,
)

POOL = 32  # batches, as documented
WORD_IDS = {word: index for index, word in enumerate(demo_vocabulary())}


class CountingPreprocessor:
    """Reads a number for a text and gives that many tokens 1, 2, 3, ...: quick to trace."""

    sequence_length = 32

    def __call__(self, texts, labels):
        lengths = tf.strings.to_number(texts[0], tf.int32)
        mask = tf.sequence_mask(lengths, self.sequence_length, tf.int32)
        ids = mask * tf.range(1, self.sequence_length + 1)
        return {"token_ids": ids, "padding_mask": mask, "segment_ids": tf.zeros_like(mask)}, labels


@pytest.fixture
def counting():
    return CountingPreprocessor()


def _of_lengths(lengths) -> TextExamples:
    """Examples of these lengths, read by `counting`; label and id are the position."""
    return TextExamples(([str(length) for length in lengths],), np.arange(len(lengths)))


def _row(*texts: str) -> tuple[list[int], list[int]]:
    """Token and segment ids of one example, by the definition of BERT's input."""
    tokens, segments = [2], [0]
    for index, text in enumerate(texts):
        ids = [WORD_IDS[word] for word in text.split()] + [3]
        tokens += ids
        segments += [index] * len(ids)
    return tokens, segments


def _read(dataset):
    return [({k: v.numpy() for k, v in x.items()}, y.numpy()) for x, y in dataset]


def _labels(dataset) -> list[list[int]]:
    return [y.tolist() for _, y in _read(dataset)]


@pytest.fixture
def lengths():
    return np.random.RandomState(5).randint(4, 30, size=300)


@pytest.mark.parametrize("bucket_by_length", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("size", [1, 3, 4, 5, 4 * POOL - 1, 4 * POOL, 4 * POOL + 1, 300])
def test_an_epoch_has_each_example_once_in_as_few_batches_as_can_be(
    size, shuffle, bucket_by_length, lengths, counting
):
    batches = encode_batches(
        _of_lengths(lengths[:size]),
        counting,
        batch_size=4,
        shuffle=shuffle,
        bucket_by_length=bucket_by_length,
    )
    expected = (size + 3) // 4
    assert len(batches) == expected
    for _ in range(2):
        read = _labels(batches)
        assert len(read) == expected
        assert sorted(label for batch in read for label in batch) == list(range(size))
        assert sorted(map(len, read), reverse=True)[: size // 4] == [4] * (size // 4)


@pytest.mark.parametrize("fields", [1, 2])
def test_features_are_those_of_bert_and_both_sentences_are_kept(fields, preprocessor):
    first = ["bank shares rose", "on friday", "oil", "film stocks fell over six percent"]
    second = ["lender stocks climbed over", "monday", "petroleum shares", "movie"]
    examples = TextExamples((first, second)[:fields], [0, 1, 1, 0])
    read = _read(encode_batches(examples, preprocessor, batch_size=2))
    for start, (features, _) in zip((0, 2), read, strict=True):
        assert set(features) == {"token_ids", "segment_ids", "padding_mask"}
        for offset in range(2):
            tokens, segments = _row(*(text[start + offset] for text in examples.texts))
            padding = [0] * (features["token_ids"].shape[1] - len(tokens))
            assert features["token_ids"][offset].tolist() == tokens + padding
            assert features["padding_mask"][offset].tolist() == [1] * len(tokens) + padding
            assert features["segment_ids"][offset].tolist() == segments + padding
    assert any(features["segment_ids"].any() for features, _ in read) == (fields == 2)


@pytest.mark.parametrize(
    ("longest", "multiple", "expected"),
    [(7, 8, 8), (8, 8, 8), (9, 8, 16), (16, 8, 16), (17, 8, 24), (25, 8, 32), (9, 1, 9),
     (9, 5, 10), (10, 5, 10), (29, 14, 32), (9, 33, 32), (32, 8, 32)],
)  # fmt: skip
def test_a_batch_is_as_long_as_its_longest_example_rounded_up(
    longest, multiple, expected, counting
):
    batches = encode_batches(_of_lengths([4, longest, 5]), counting, pad_to_multiple_of=multiple)
    ((features, _),) = _read(batches)
    assert {array.shape for array in features.values()} == {(3, expected)}


def test_each_batch_has_its_own_length(counting):
    batches = encode_batches(_of_lengths([4, 9, 20, 4, 4, 4]), counting, batch_size=2)
    assert [x["token_ids"].shape for x, _ in _read(batches)] == [(2, 16), (2, 24), (2, 8)]


def test_text_that_is_too_long_is_cut_to_the_sequence_length(counting):
    ((features, _),) = _read(encode_batches(_of_lengths([40, 5]), counting))
    assert features["padding_mask"].sum(axis=1).tolist() == [32, 5]


@pytest.mark.parametrize("shuffle", [True, False])
def test_without_buckets_every_batch_has_the_full_length(shuffle, lengths, counting):
    batches = encode_batches(
        _of_lengths(lengths), counting, bucket_by_length=False, shuffle=shuffle
    )
    assert {x["token_ids"].shape[1] for x, _ in _read(batches)} == {32}
    assert batches.element_spec[0]["token_ids"].shape.as_list() == [None, 32]


def test_unshuffled_batches_keep_the_order_of_the_examples(lengths, counting):
    batches = encode_batches(_of_lengths(lengths), counting, batch_size=7)
    for _ in range(2):
        assert list(itertools.chain(*_labels(batches))) == list(range(300))


def test_within_a_pool_batches_are_cut_from_the_examples_sorted_by_length(lengths, counting):
    part = lengths[: 4 * POOL]
    batches = encode_batches(_of_lengths(part), counting, batch_size=4, shuffle=True)
    for _ in range(2):
        read = [sorted(part[batch].tolist()) for batch in _labels(batches)]
        expected = np.sort(part).reshape(-1, 4).tolist()
        assert sorted(read) == expected
        assert read != expected  # the batches themselves come in random order


def test_pools_are_mixed_anew_each_epoch(lengths, counting):
    batches = encode_batches(_of_lengths(lengths), counting, batch_size=4, shuffle=True)
    first, second = _labels(batches), _labels(batches)
    assert first != second
    partners = [{frozenset(batch) for batch in epoch} for epoch in (first, second)]
    assert len(partners[0] & partners[1]) < 10  # of 75: not the same batches in another order


def test_sorting_saves_most_of_the_padding(lengths, counting):
    def tokens(**arguments):
        batches = encode_batches(_of_lengths(lengths), counting, batch_size=4, **arguments)
        return sum(x["token_ids"].size for x, _ in _read(batches))

    fixed = tokens(bucket_by_length=False)
    assert fixed == 300 * 32
    bucketed = tokens(shuffle=True, pad_to_multiple_of=1)
    assert lengths.sum() < bucketed < 1.1 * lengths.sum()
    assert bucketed < tokens(pad_to_multiple_of=1) < fixed


@pytest.mark.parametrize("bucket_by_length", [True, False])
def test_the_order_is_a_function_of_seed_and_epoch_alone(lengths, counting, bucket_by_length):
    def batches(**arguments):
        return encode_batches(
            _of_lengths(lengths),
            counting,
            batch_size=4,
            shuffle=True,
            bucket_by_length=bucket_by_length,
            **arguments,
        )

    whole = batches(seed=3)
    once = [_labels(whole) for _ in range(3)]
    assert once[0] != once[1] != once[2] != once[0]
    assert _labels(batches(seed=4)) != once[0]
    keras.utils.set_random_seed(99)  # has no say in it
    assert _labels(batches(seed=3)) == once[0]
    resumed = batches(seed=3, first_epoch=1)
    assert [_labels(resumed), _labels(resumed)] == once[1:]


def test_an_iteration_that_is_broken_off_counts_as_an_epoch(lengths, counting):
    def batches():
        return encode_batches(_of_lengths(lengths), counting, batch_size=4, shuffle=True)

    whole = batches()
    once = [_labels(whole) for _ in range(2)]
    broken = batches()
    iter(broken)  # gives no batch, so doesn't count
    _, labels = next(iter(broken))
    assert labels.numpy().tolist() == once[0][0]
    assert _labels(broken) == once[1]


def test_a_fit_in_two_parts_sees_the_epochs_of_a_fit_in_one(lengths, counting):
    def epochs_seen(*parts):
        seen = []

        class Recorder(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(1)

            def call(self, features):
                return self.dense(keras.ops.cast(features["padding_mask"][:, :1], "float32"))

            def train_step(self, data):
                seen.append(data[1].numpy().tolist())
                return super().train_step(data)

        model = Recorder()
        model.compile("sgd", "mse", run_eagerly=True)
        batches = encode_batches(_of_lengths(lengths), counting, batch_size=32, shuffle=True)
        for epochs in parts:
            model.fit(batches, epochs=epochs, verbose=0, shuffle=False)
        return seen

    assert epochs_seen(2) == epochs_seen(1, 1)


def test_examples_of_equal_length_are_mixed_too(counting):
    batches = encode_batches(_of_lengths([6] * 40), counting, batch_size=4, shuffle=True)
    flat = list(itertools.chain(*_labels(batches)))
    assert flat != list(range(40)) and sorted(flat) == list(range(40))


def test_shapes_and_dtypes_are_declared_so_that_a_function_is_traced_once(lengths, counting):
    batches = encode_batches(_of_lengths(lengths), counting, batch_size=7, shuffle=True)
    spec, label_spec = batches.element_spec
    assert {value.dtype for value in spec.values()} == {tf.int32}
    assert {tuple(value.shape.as_list()) for value in spec.values()} == {(None, None)}
    assert label_spec == tf.TensorSpec((None,), tf.int32)
    traced = []

    @tf.function(input_signature=[batches.element_spec])
    def count(batch):
        traced.append(1)
        return tf.reduce_sum(batch[0]["padding_mask"])

    assert len({x["token_ids"].shape for x, _ in _read(batches)}) > 2
    assert sum(int(count(batch)) for batch in batches) == lengths.sum()
    assert len(traced) == 1


def test_regression_targets_stay_float32(counting):
    examples = TextExamples((["3", "5", "4"],), [0.25, 5.0, 3.2])
    ((_, labels),) = _read(encode_batches(examples, counting))
    assert labels.dtype == np.float32 and labels.shape == (3,)
    assert labels.tolist() == np.array([0.25, 5.0, 3.2], np.float32).tolist()


def test_sorting_the_examples_carries_labels_and_ids_along(lengths, counting):
    examples = _of_lengths(lengths)
    ordered = sort_by_length(examples, counting)
    expected = sorted(range(300), key=lambda position: (lengths[position], position))
    assert ordered.ids.tolist() == expected == ordered.labels.tolist()
    assert ordered.texts[0].tolist() == [examples.texts[0][position] for position in expected]
    # Predictions in the sorted order go back to the original one by their ids.
    read = np.concatenate([y for _, y in _read(encode_batches(ordered, counting))])
    assert read[np.argsort(ordered.ids)].tolist() == examples.labels.tolist()


def test_bert_gives_the_same_answer_to_a_trimmed_batch_as_to_a_padded_one(preprocessor):
    demo = demo_pairs(num_train=1, num_validation=8)["validation"]
    backbone = keras_nlp.models.BertBackbone(
        vocabulary_size=len(demo_vocabulary()), num_layers=1, num_heads=2, hidden_dim=8,
        intermediate_dim=16, max_sequence_length=32,
    )  # fmt: skip
    answers = []
    for bucket_by_length in (True, False):
        batches = encode_batches(demo, preprocessor, bucket_by_length=bucket_by_length)
        ((features, _),) = list(batches)
        answers.append(backbone(features)["pooled_output"])
    np.testing.assert_allclose(*answers, atol=1e-6)


def test_keras_fits_and_predicts_in_the_order_of_the_examples(lengths, counting):
    inputs = {
        name: keras.Input((None,), dtype="int32", name=name)
        for name in ("token_ids", "segment_ids", "padding_mask")
    }
    mask = keras.ops.cast(inputs["padding_mask"], "float32")
    length = keras.ops.sum(mask, axis=1, keepdims=True)
    model = keras.Model(inputs, length)
    examples = _of_lengths(lengths)
    predicted = model.predict(encode_batches(examples, counting), verbose=0)
    assert predicted[:, 0].tolist() == lengths.tolist()

    trained = keras.Model(inputs, keras.layers.Dense(1)(length))
    trained.compile("sgd", "mse")
    batches = encode_batches(examples, counting, shuffle=True)
    history = trained.fit(batches, epochs=2, verbose=0, shuffle=False)
    assert len(history.history["loss"]) == 2
    assert int(trained.optimizer.iterations) == 2 * len(batches)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, r"batch_size must be an int from 1 to .*Received: batch_size=0"),
        ({"batch_size": 2.0}, "batch_size must be an int"),
        ({"batch_size": True}, "batch_size must be an int"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of must be an int from 1 to"),
        ({"pad_to_multiple_of": None}, "pad_to_multiple_of must be an int from 1 to"),
        ({"seed": -1}, "seed must be an int from 0 to .*Received: seed=-1"),
        ({"seed": 2**32}, "seed must be an int from 0 to"),
        ({"seed": 0.5}, "seed must be an int"),
        ({"first_epoch": -1}, "first_epoch must be an int from 0 to"),
        ({"first_epoch": None}, "first_epoch must be an int from 0 to"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, message, counting):
    with pytest.raises(ValueError, match=message):
        encode_batches(_of_lengths([5]), counting, **arguments)


def test_the_smallest_numbers_work(counting):
    batches = encode_batches(
        _of_lengths([5, 6]), counting, batch_size=1, pad_to_multiple_of=1, shuffle=True
    )
    assert sorted(x["token_ids"].shape for x, _ in _read(batches)) == [(1, 5), (1, 6)]


class _Preprocessor:
    """Gives two tokens and two of padding for every text, but for what a test changes."""

    sequence_length = 4

    def __init__(self, **changes):
        self.changes = changes

    def __call__(self, texts, labels):
        rows = tf.shape(texts[0])[:1]

        def repeat(*values):
            return tf.tile(tf.constant([values], tf.int32), tf.concat([rows, [1]], axis=0))

        features = {
            "token_ids": repeat(2, 3, 0, 0),
            "padding_mask": repeat(1, 1, 0, 0),
            "segment_ids": repeat(0, 1, 0, 0),
        }
        changed = {name: change(repeat) for name, change in self.changes.items()}
        return {**features, **changed}, labels


def test_a_callable_of_the_same_form_will_do():
    examples = TextExamples((["a", "b"], ["c", "d"]), [0, 1])
    ((features, labels),) = _read(encode_batches(examples, _Preprocessor(), pad_to_multiple_of=1))
    assert features["token_ids"].tolist() == [[2, 3], [2, 3]] and labels.tolist() == [0, 1]


@pytest.mark.parametrize("length", [None, 0, 4.0, True, "4"])
def test_a_preprocessor_without_a_length_is_refused(length):
    preprocessor = _Preprocessor()
    preprocessor.sequence_length = length
    for broken in (preprocessor, lambda texts, labels: (texts, labels)):
        with pytest.raises(ValueError, match="must have a sequence_length"):
            encode_batches(_of_lengths([5]), broken)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["token_ids", "padding_mask", "segment_ids"])
def test_a_preprocessor_that_gives_floats_is_refused(name, dtype):
    preprocessor = _Preprocessor(**{name: lambda repeat: tf.cast(repeat(1, 1, 0, 0), dtype)})
    with pytest.raises(ValueError, match=rf"integer {name}: .*2049 to 2048.*{name} of .*{dtype}"):
        encode_batches(_of_lengths([5]), preprocessor)


def test_a_preprocessor_that_pads_on_the_left_is_refused():
    preprocessor = _Preprocessor(padding_mask=lambda repeat: repeat(0, 0, 1, 1))
    with pytest.raises(ValueError, match=r"must pad on the right.*in row 0"):
        encode_batches(_of_lengths([5]), preprocessor)


def test_a_preprocessor_of_another_length_than_it_says_is_refused():
    preprocessor = _Preprocessor(token_ids=lambda repeat: repeat(2, 3, 0))
    with pytest.raises(ValueError, match=r"shape \(n, sequence_length\) = \(1, 4\).*\(1, 3\)"):
        encode_batches(_of_lengths([5]), preprocessor)


def test_a_preprocessor_that_drops_the_second_text_is_refused():
    preprocessor = _Preprocessor(segment_ids=lambda repeat: repeat(0, 0, 0, 0))
    with pytest.raises(ValueError, match="left out the second text"):
        encode_batches(TextExamples((["a"], ["b"]), [0]), preprocessor)
    assert len(encode_batches(_of_lengths([6]), preprocessor)) == 1  # right for single texts


@pytest.mark.parametrize(
    "result",
    [
        lambda texts, labels: labels,
        lambda texts, labels: (labels, labels),
        lambda texts, labels: ({"token_ids": labels}, labels, labels),
    ],
)
def test_a_preprocessor_that_returns_something_else_is_refused(result):
    result.sequence_length = 4
    with pytest.raises(ValueError, match=r"must return \(features, labels\)"):
        encode_batches(_of_lengths([5]), result)


def test_a_preprocessor_without_a_mask_is_refused():
    def only_ids(texts, labels):
        return {"token_ids": tf.ones((1, 4), tf.int32)}, labels

    only_ids.sequence_length = 4
    with pytest.raises(ValueError, match=r"must have token_ids and padding_mask\. Received: token"):
        encode_batches(_of_lengths([5]), only_ids)
