from __future__ import annotations

import numpy as np
import pytest

from precision_bert.data import demo_pairs, demo_vocabulary

# What a first sentence may say, by meaning; written out again, to check the labels without the
# generator's own tables.
MEANINGS = {
    "claim": [{"said", "stated", "confirmed"}, {"denied", "disputed", "rejected"}],
    "move": [{"rose", "climbed", "gained"}, {"fell", "dropped", "declined"}],
    "bound": [{"over", "above"}, {"under", "below"}],
    "sector": [
        {"bank", "lender"},
        {"airline", "carrier"},
        {"oil", "petroleum"},
        {"car", "automobile"},
        {"store", "retail"},
        {"film", "movie"},
        {"drug", "medicine"},
        {"phone", "telephone"},
    ],
    "number": [
        {word} for word in ("two", "three", "four", "five", "six", "seven", "eight", "nine")
    ],
    "day": [{word} for word in ["monday", "tuesday", "wednesday", "thursday", "friday"]],
}


def _meaning(sentence: str) -> dict[str, int | None]:
    words = set(sentence.split())
    found = {}
    for slot, groups in MEANINGS.items():
        hits = [index for index, group in enumerate(groups) if group & words]
        assert len(hits) <= 1
        found[slot] = hits[0] if hits else None
    return found


def _changed_facts(one: str, two: str) -> list[str]:
    first, second = _meaning(one), _meaning(two)
    return [slot for slot in MEANINGS if first[slot] != second[slot]]


@pytest.fixture(scope="module")
def demo():
    return demo_pairs()


def test_has_the_form_of_mrpc(demo):
    assert list(demo) == ["train", "validation"]
    assert len(demo["train"]) == 6000 and len(demo["validation"]) == 600
    for split in demo.values():
        assert len(split.texts) == 2 and set(split.label_counts) == {0, 1}
    assert np.concatenate([split.ids for split in demo.values()]).tolist() == list(range(6600))


def test_a_pair_differs_in_at_most_one_fact_and_4_percent_of_labels_are_flipped(demo):
    first, second = demo["train"].texts
    changes = [_changed_facts(one, two) for one, two in zip(first, second, strict=True)]
    assert {len(change) for change in changes} == {0, 1}
    truth = np.array([not change for change in changes])
    # Three standard errors around the documented shares, at n = 6000 (and 2100 changed pairs).
    assert abs(truth.mean() - 0.65) < 3 * np.sqrt(0.65 * 0.35 / 6000)
    flipped = truth != demo["train"].labels
    assert abs(flipped.mean() - 0.04) < 3 * np.sqrt(0.04 * 0.96 / 6000)
    named = [change[0] for change in changes if change]
    for slot, share in {"claim": 0.30, "move": 0.35, "bound": 0.25, "sector": 0.10}.items():
        error = np.sqrt(share * (1 - share) / len(named))
        assert abs(named.count(slot) / len(named) - share) < 3 * error, slot
    assert {"number", "day"}.isdisjoint(named)


def test_always_answering_1_scores_about_64_percent(demo):
    expected = 0.65 * 0.96 + 0.35 * 0.04
    for split in demo.values():
        assert abs(split.majority_share - expected) < 3 * np.sqrt(0.36 * 0.64 / len(split))


def test_rare_words_in_first_sentences_are_the_documented_cue(demo):
    first = [_meaning(sentence) for sentence in demo["train"].texts[0]]
    for slot, share in {"claim": 0.05, "move": 0.08, "bound": 0.08}.items():
        measured = np.mean([meaning[slot] == 1 for meaning in first])
        assert abs(measured - share) < 3 * np.sqrt(share * (1 - share) / len(first)), slot


def test_no_pair_occurs_twice_in_either_order(demo):
    pairs = [frozenset(pair) for split in demo.values() for pair in zip(*split.texts, strict=True)]
    assert len(set(pairs)) == len(pairs)


def test_equal_arguments_give_equal_pairs_and_the_seed_changes_them():
    def content(**arguments):
        splits = demo_pairs(num_train=50, num_validation=20, **arguments)
        return [
            (split.texts[0].tolist(), split.texts[1].tolist(), split.labels.tolist())
            for split in splits.values()
        ]

    np.random.seed(1)
    once = content()
    np.random.seed(2)
    assert content() == once == content(seed=0)
    assert content(seed=1) != once


def test_the_validation_pairs_do_not_depend_on_the_number_of_training_pairs():
    few = demo_pairs(num_train=1, num_validation=30)["validation"]
    many = demo_pairs(num_train=500, num_validation=30)["validation"]
    assert few.texts[0].tolist() == many.texts[0].tolist()
    assert few.labels.tolist() == many.labels.tolist()


def test_the_vocabulary_holds_every_word_whole_and_none_besides(demo):
    vocabulary = demo_vocabulary()
    assert vocabulary[:5] == ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    assert len(set(vocabulary)) == len(vocabulary)
    words = {word for text in demo["train"].texts for sentence in text for word in sentence.split()}
    assert words == set(vocabulary[5:])


def test_a_pair_fits_in_23_wordpieces_with_specials(demo, preprocessor):
    train = demo["train"][:1000]
    features, _ = preprocessor(tuple(text.tolist() for text in train.texts), train.labels)
    mask, ids = np.asarray(features["padding_mask"]), np.asarray(features["token_ids"])
    assert mask.sum(axis=1).max() == 23 and mask.sum(axis=1).min() == 19
    assert not (ids == 1).any()  # no [UNK]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_train": 0}, "num_train must lie in 1 to 100000. Received: num_train=0"),
        ({"num_train": 100_001}, "num_train must lie in 1 to 100000"),
        ({"num_validation": 0}, "num_validation must lie in 1 to 100000"),
        ({"num_validation": 100_001}, "num_validation must lie in 1 to 100000"),
        ({"num_train": 2.0}, "num_train must be an int. Received: num_train=2.0"),
        ({"num_validation": True}, "num_validation must be an int"),
        ({"seed": -1}, "seed must be an int from 0"),
        ({"seed": 2**32}, "seed must be an int from 0"),
        ({"seed": None}, "seed must be an int from 0"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        demo_pairs(**arguments)


def test_the_smallest_numbers_and_the_largest_seed_work():
    demo = demo_pairs(num_train=1, num_validation=1, seed=2**32 - 1)
    assert [len(split) for split in demo.values()] == [1, 1]
    assert [split.ids.tolist() for split in demo.values()] == [[0], [1]]
