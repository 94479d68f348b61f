"""The built-in demo: generated sentence pairs that a tiny BERT learns from scratch in minutes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from precision_bert.data.examples import TextExamples

_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

# Each inner tuple is one meaning, by the words that may stand for it.
_SPEAKERS = (("officials", "managers", "analysts"),)
_CLAIMS = (("said", "stated", "confirmed"), ("denied", "disputed", "rejected"))
_SECTORS = (
    ("bank", "lender"),
    ("airline", "carrier"),
    ("oil", "petroleum"),
    ("car", "automobile"),
    ("store", "retail"),
    ("film", "movie"),
    ("drug", "medicine"),
    ("phone", "telephone"),
)
_PAPERS = (("shares", "stocks"),)
_MOVES = (("rose", "climbed", "gained"), ("fell", "dropped", "declined"))
_BOUNDS = (("over", "above"), ("under", "below"))
_NUMBERS = (("two",), ("three",), ("four",), ("five",), ("six",), ("seven",), ("eight",), ("nine",))
_DAYS = (("monday",), ("tuesday",), ("wednesday",), ("thursday",), ("friday",))
_TABLES = (_SPEAKERS, _CLAIMS, _SECTORS, _PAPERS, _MOVES, _BOUNDS, _NUMBERS, _DAYS)
_FUNCTION_WORDS = ("on", "percent")

_PARAPHRASE_SHARE = 0.65
_FLIPPED_SHARE = 0.04
# The second word group of a table is rare in what is stated, so that meeting it in a pair speaks
# for a change. A tiny transformer finds that cue in some hundred steps and refines it into a
# comparison afterwards. With both groups equally frequent there is no cue, and in a trial it had
# not begun to compare the sentences after 750 steps from a random start.
_DENIED_SHARE = 0.05
_FALL_SHARE = 0.08
_BELOW_SHARE = 0.08
_DAY_SHARE = 0.7
_DAY_FIRST_SHARE = 0.3
_CHANGES = ("claim", "move", "bound", "sector")
_CHANGE_SHARES = (0.30, 0.35, 0.25, 0.10)

_MAX_PAIRS = 100_000  # far below what the grammar can say, so looking for a new pair ends


@dataclass(frozen=True)
class _Statement:
    """What a sentence says, by index into the tables above; `day` is None where none is named."""

    claim: int
    sector: int
    move: int
    bound: int
    number: int
    day: int | None


def demo_pairs(
    *, num_train: int = 6000, num_validation: int = 600, seed: int = 0
) -> dict[str, TextExamples]:
    r"""Generates the demo: labelled sentence pairs in the form of MRPC, without any download.

    Use it to see a training run through, from text to a verdict, in minutes on a CPU: in examples,
    tests and a first look. **It is a demo and no benchmark: a figure measured on it says nothing
    about BERT, and nothing about a precision policy on real text.**

    A sentence states by how much some shares rose or fell. In a paraphrase (label 1) the second
    sentence states the same in words drawn anew: synonyms, another speaker, the day in front or at
    the end. Otherwise (label 0) one fact differs: said or denied (30 % of these pairs), risen or
    fallen (35 %), over or under (25 %), or the branch of business (10 %). The first three leave a
    cue in the words, since "denied", "fell" and "under" are rare in first sentences; only
    comparing the two sentences finds the last one, and these pairs stay hard for a tiny model.
    Answering 0 wherever a rare word stands scores 82 %, answering 0 where their number is odd 92 %.

    Args:
        num_train: Number of training pairs, 1 to 100000. With 6000, four epochs in batches of 32
            are 752 steps, about what a 2-layer BERT needs from a random start.
        num_validation: Number of validation pairs, 1 to 100000. 600 give an accuracy a standard
            error of about 1.3 points.
        seed: Of the generator, at least 0. Equal arguments give equal pairs, on every machine.

    Returns:
        `{"train": ..., "validation": ...}`. No pair occurs twice, within or across the two. The
        validation pairs don't depend on `num_train`. Ids are unique over both.

    Raises:
        ValueError: If a number lies outside its range.

    Example:

    >>> demo = demo_pairs(num_train=200, num_validation=50)
    >>> demo["train"]
    TextExamples(n=200, texts=2, labels={0: 63, 1: 137})
    >>> first, second = demo["train"].texts
    >>> print(first[1], second[1], sep="\n")
    managers said car shares gained above eight percent on tuesday
    on tuesday managers confirmed automobile shares rose over eight percent

    About 64 % of the labels are 1, the accuracy of a constant answer. 4 % of the labels, drawn at
    random in both splits, are flipped on purpose: nobody can score above about 96 % except by
    chance, so two arms of a comparison have room to differ.

    A setting that learns it from random weights, in float32 as in mixed_float16: BERT with 2
    layers, 2 heads, width 64 (256 inside) and dropout 0.1; batches of 32, four epochs; AdamW at
    5e-4 with 10 % warmup, linear decay and gradients clipped to norm 1. It stays on the constant
    answer for about an epoch first, so shorter trainings and rates above 1e-3 may not get off it.
    """
    for name, count in (("num_train", num_train), ("num_validation", num_validation)):
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)):
            raise ValueError(f"{name} must be an int. Received: {name}={count!r}.")
        if not 1 <= count <= _MAX_PAIRS:
            raise ValueError(f"{name} must lie in 1 to {_MAX_PAIRS}. Received: {name}={count}.")
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**32:
        raise ValueError(f"seed must be an int from 0 to 2**32 - 1. Received: seed={seed!r}.")
    seen: set[tuple[str, str]] = set()
    # A stream of its own for each split, validation first: it stays the same when num_train grows.
    # RandomState, since NumPy promises never to change its streams.
    validation = _new_pairs(np.random.RandomState([seed, 1]), num_validation, num_train, seen)
    train = _new_pairs(np.random.RandomState([seed, 0]), num_train, 0, seen)
    return {"train": train, "validation": validation}


def demo_vocabulary() -> tuple[str, ...]:
    """Returns the demo's wordpieces in the order of their ids, each of its words a whole one.

    Use it for the tokenizer of a model that is trained on `demo_pairs` from scratch. Ids 0 to 4
    are `[PAD]`, `[UNK]`, `[CLS]`, `[SEP]` and `[MASK]`. A pair has at most 23 pieces, specials
    included.

    Example:

    >>> vocabulary = demo_vocabulary()
    >>> len(vocabulary), vocabulary[:3], "denied" in vocabulary
    (57, ('[PAD]', '[UNK]', '[CLS]'), True)
    """
    words = {word for table in _TABLES for group in table for word in group}
    return (*_SPECIAL_TOKENS, *sorted(words.union(_FUNCTION_WORDS)))


def _new_pairs(
    random: np.random.RandomState, count: int, first_id: int, seen: set[tuple[str, str]]
) -> TextExamples:
    """Draws `count` pairs that are not in `seen`, and adds them to it in both orders."""
    first: list[str] = []
    second: list[str] = []
    labels: list[int] = []
    while len(labels) < count:
        one, two, label = _pair(random)
        if (one, two) in seen:
            continue
        seen.update(((one, two), (two, one)))
        first.append(one)
        second.append(two)
        labels.append(label)
    return TextExamples((first, second), labels, np.arange(first_id, first_id + count))


def _pair(random: np.random.RandomState) -> tuple[str, str, int]:
    statement = _Statement(
        claim=int(random.random_sample() < _DENIED_SHARE),
        sector=random.randint(len(_SECTORS)),
        move=int(random.random_sample() < _FALL_SHARE),
        bound=int(random.random_sample() < _BELOW_SHARE),
        number=random.randint(len(_NUMBERS)),
        day=random.randint(len(_DAYS)) if random.random_sample() < _DAY_SHARE else None,
    )
    is_paraphrase = random.random_sample() < _PARAPHRASE_SHARE
    other = statement if is_paraphrase else _with_one_fact_changed(statement, random)
    is_flipped = random.random_sample() < _FLIPPED_SHARE
    return _sentence(statement, random), _sentence(other, random), int(is_paraphrase != is_flipped)


def _with_one_fact_changed(statement: _Statement, random: np.random.RandomState) -> _Statement:
    change = _CHANGES[random.choice(len(_CHANGES), p=_CHANGE_SHARES)]
    if change == "claim":
        return replace(statement, claim=1 - statement.claim)
    if change == "move":
        return replace(statement, move=1 - statement.move)
    if change == "bound":
        return replace(statement, bound=1 - statement.bound)
    shift = 1 + random.randint(len(_SECTORS) - 1)
    return replace(statement, sector=(statement.sector + shift) % len(_SECTORS))


def _sentence(statement: _Statement, random: np.random.RandomState) -> str:
    def word(group: tuple[str, ...]) -> str:
        return group[random.randint(len(group))]

    text = " ".join(
        (
            word(_SPEAKERS[0]),
            word(_CLAIMS[statement.claim]),
            word(_SECTORS[statement.sector]),
            word(_PAPERS[0]),
            word(_MOVES[statement.move]),
            word(_BOUNDS[statement.bound]),
            word(_NUMBERS[statement.number]),
            "percent",
        )
    )
    if statement.day is None:
        return text
    day = f"on {word(_DAYS[statement.day])}"
    return f"{day} {text}" if random.random_sample() < _DAY_FIRST_SHARE else f"{text} {day}"
