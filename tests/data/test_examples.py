from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from precision_bert.data import TextExamples


def _letters(count: int) -> TextExamples:
    return TextExamples(
        ([f"first {i}" for i in range(count)], [f"second {i}" for i in range(count)]),
        [(i % 3 == 0 and 1) or 0 for i in range(count)],
        [10 * i for i in range(count)],
    )


def test_holds_texts_as_str_and_numbers_as_int32():
    examples = TextExamples((["a", "b"], np.array(["c", "d"])), np.array([1, 0]), [7, 9])
    assert len(examples) == 2
    assert [text.tolist() for text in examples.texts] == [["a", "b"], ["c", "d"]]
    assert all(type(item) is str for text in examples.texts for item in text)
    assert examples.labels.dtype == np.int32 and examples.labels.tolist() == [1, 0]
    assert examples.ids.dtype == np.int32 and examples.ids.tolist() == [7, 9]
    assert not examples.is_regression


def test_numbers_the_examples_from_0_without_ids():
    assert TextExamples((["a", "b", "c"],), [0, 0, 0]).ids.tolist() == [0, 1, 2]


def test_float_labels_are_float32_targets_of_a_regression():
    examples = TextExamples((["a", "b"],), [2.5, -1.0])
    assert examples.is_regression
    assert examples.labels.dtype == np.float32 and examples.labels.tolist() == [2.5, -1.0]
    assert repr(examples) == "TextExamples(n=2, texts=1, labels=float32)"
    with pytest.raises(ValueError, match="regression has no classes"):
        _ = examples.label_counts
    with pytest.raises(ValueError, match="regression has no classes"):
        _ = examples.majority_share


def test_cannot_be_changed_nor_through_what_it_was_made_from():
    labels, texts = np.array([0, 1], np.int32), np.array(["a", "b"], object)
    examples = TextExamples((texts,), labels)
    labels[0], texts[0] = 1, "z"
    assert examples.labels.tolist() == [0, 1] and examples.texts[0].tolist() == ["a", "b"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        examples.labels = labels
    for array in (examples.labels, examples.ids, examples.texts[0]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = array[1]


def test_counts_labels_and_the_majority():
    examples = TextExamples((list("abcde"),), [2, 0, 2, 2, 0])
    assert examples.label_counts == {0: 2, 2: 3}
    assert examples.majority_share == 0.6
    assert repr(examples) == "TextExamples(n=5, texts=1, labels={0: 2, 2: 3})"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), [0]), "tuple of one sequence of str, or of two.*Received: tuple of length 0"),
        (((["a"],) * 3, [0]), "Received: tuple of length 3"),
        (("a", [0]), "Received: str"),
        ((("a",), [0]), r"texts\[0\] must be a sequence of str. Received: str"),
        (((iter("a"),), [0]), r"texts\[0\] must be a sequence of str"),
        ((([],), []), "at least one example"),
        (((["a", 3],), [0, 0]), r"texts\[0\]\[1\] must be str. Received: int"),
        (((["a"], [b"a"]), [0]), r"texts\[1\]\[0\] must be str. Received: bytes.*decode"),
        (((["a", "b"], ["c"]), [0, 1]), r"texts=\[2, 1\], labels=2, ids=2"),
        (((["a", "b"],), [0]), r"texts=\[2\], labels=1, ids=2"),
        (((["a", "b"],), [0, 1], [0]), r"texts=\[2\], labels=2, ids=1"),
        (((["a"],), ["0"]), "labels must be integers .classes. or floats"),
        (((["a"],), [True]), "labels must be integers .classes. or floats"),
        (((["a"],), [[0]]), r"of shape \(1, 1\)"),
        (((["a", "b"],), [0, -1]), "classes counted from 0.*Received: -1 at position 1"),
        (((["a"],), [2**31]), "Received: 2147483648 at position 0"),
        (((["a", "b"],), [0.5, np.nan]), "finite float32 numbers. Received: nan at position 1"),
        (((["a"],), [1e39]), "finite float32 numbers. Received: inf at position 0"),
        (((["a"],), [0], [0.0]), "ids must be integers"),
        (((["a"],), [0], [2**31]), "ids must fit in int32"),
    ],
)
def test_refuses_what_is_not_one_text_label_and_id_each(arguments, message):
    with pytest.raises(ValueError, match=message):
        TextExamples(*arguments)


def test_takes_the_largest_int32_label_and_id():
    largest = 2**31 - 1
    examples = TextExamples((["a"],), [largest], [largest])
    assert examples.labels.tolist() == examples.ids.tolist() == [largest]


def test_a_slice_keeps_texts_labels_and_ids_together():
    part = _letters(6)[2:5]
    assert part.texts[0].tolist() == ["first 2", "first 3", "first 4"]
    assert part.texts[1].tolist() == ["second 2", "second 3", "second 4"]
    assert part.labels.tolist() == [0, 1, 0]
    assert part.ids.tolist() == [20, 30, 40]
    with pytest.raises(TypeError, match=r"takes a slice.*Received: 3"):
        _letters(6)[3]
    with pytest.raises(ValueError, match="at least one example"):
        _letters(6)[6:]


def test_select_takes_positions_in_the_order_given():
    part = _letters(6).select([5, 0, 0])
    assert part.ids.tolist() == [50, 0, 0] and part.texts[0][0] == "first 5"
    for wrong in ([], [0.5], [True], [[0]]):
        with pytest.raises(ValueError, match="at least one example to select"):
            _letters(6).select(wrong)
    with pytest.raises(IndexError):
        _letters(6).select([6])


@pytest.mark.parametrize(
    ("held_out", "count"),
    [(1, 1), (9, 9), (0.1, 1), (0.25, 2), (0.26, 3), (0.9, 9), (np.int64(3), 3)],
)
def test_split_parts_share_nothing_and_leave_nothing_out(held_out, count):
    whole = _letters(10)
    kept, held = whole.split(held_out)
    assert (len(kept), len(held)) == (10 - count, count)
    assert sorted([*kept.ids, *held.ids]) == whole.ids.tolist()
    for part in (kept, held):
        assert part.ids.tolist() == sorted(part.ids)  # the order of the whole
        assert part.texts[1].tolist() == [f"second {i // 10}" for i in part.ids]


def test_split_is_decided_by_the_seed_alone():
    whole = _letters(50)
    np.random.seed(1)
    first = whole.split(10, seed=3)[1].ids.tolist()
    np.random.seed(2)
    assert whole.split(10, seed=3)[1].ids.tolist() == first
    assert whole.split(0.2, seed=3)[1].ids.tolist() == first  # a share is a count
    assert whole.split(10, seed=4)[1].ids.tolist() != first
    drawn = np.random.RandomState(3).permutation(50)[:10]
    assert first == sorted((10 * drawn).tolist())


@pytest.mark.parametrize(
    "held_out", [0, 10, -1, 0.0, 1.0, 0.04, 0.96, 1.5, np.nan, True, "3", None]
)
def test_split_refuses_an_empty_part(held_out):
    with pytest.raises(ValueError, match="held_out must"):
        _letters(10).split(held_out)
