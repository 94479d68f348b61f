"""The configuration of a BERT that is initialised at random."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path

import keras_nlp

from precision_bert.bert_text import BertTextTokenizer

SPECIAL_WORDPIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class BertConfig:
    """A BERT to initialise at random.

    Use it where no pretrained weights are needed: in tests, demos and sizing. Everything is checked
    at construction.

    Args:
        vocabulary: Wordpieces in the order of their ids, or the path of a `vocab.txt` with a
            wordpiece a line, which is read at once. Holds `[PAD]`, `[UNK]`, `[CLS]`, `[SEP]` and
            `[MASK]`.
        num_layers: Number of transformer layers.
        num_heads: Attention heads a layer.
        hidden_dim: Units of the hidden states; a multiple of `num_heads`.
        intermediate_dim: Units of the feed-forward layers; BERT uses four times `hidden_dim`.
        dropout: Rate within the encoder, in [0, 1). Default 0.1, BERT's.
        max_sequence_length: Number of position embeddings: the longest input, in wordpieces.
        num_segments: Number of segment embeddings; 2 reads pairs.
        lowercase: Whether the vocabulary is uncased; text is then lower-cased and stripped of
            accents, as BERT's was.

    Raises:
        TypeError: If a number has the wrong type.
        ValueError: If a value is out of its range or the vocabulary lacks a special wordpiece, has
            one twice, or has an empty one.
        OSError: If the vocabulary's file cannot be read.

    Example:

    >>> vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]
    >>> BertConfig(vocabulary, num_layers=2, num_heads=2, hidden_dim=32, intermediate_dim=64)
    BertConfig(num_layers=2, num_heads=2, hidden_dim=32, intermediate_dim=64, dropout=0.1,
    max_sequence_length=128, num_segments=2, lowercase=True)
    """

    vocabulary: tuple[str, ...] | list[str] | str | Path = field(repr=False)
    num_layers: int
    num_heads: int
    hidden_dim: int
    intermediate_dim: int
    dropout: float = 0.1
    max_sequence_length: int = 128
    num_segments: int = 2
    lowercase: bool = True

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.type == "int"):
            check_positive_integer(name, getattr(self, name))
        if self.hidden_dim % self.num_heads:
            raise ValueError(
                "hidden_dim must be a multiple of num_heads, since the heads share it equally. "
                f"Received: hidden_dim={self.hidden_dim}, num_heads={self.num_heads}."
            )
        if self.max_sequence_length < 3:
            raise ValueError(
                "max_sequence_length must be at least 3, [CLS] and two [SEP] of a pair. "
                f"Received: max_sequence_length={self.max_sequence_length}."
            )
        check_rate("dropout", self.dropout)
        if not isinstance(self.lowercase, bool):
            raise TypeError(
                f"lowercase must be True or False. Received: lowercase={self.lowercase!r}."
            )
        object.__setattr__(self, "vocabulary", _checked_wordpieces(self.vocabulary))

    def build(self, dtype: str) -> tuple[keras_nlp.models.BertBackbone, BertTextTokenizer]:
        """Returns a new backbone, initialised at random, and its tokenizer.

        Args:
            dtype: Name of the backbone's dtype policy.
        """
        backbone = keras_nlp.models.BertBackbone(
            vocabulary_size=len(self.vocabulary),  # type: ignore[arg-type]
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            hidden_dim=self.hidden_dim,
            intermediate_dim=self.intermediate_dim,
            dropout=self.dropout,
            max_sequence_length=self.max_sequence_length,
            num_segments=self.num_segments,
            dtype=dtype,
        )
        return backbone, BertTextTokenizer(
            self.vocabulary,  # type: ignore[arg-type]
            uncased=self.lowercase,
        )


def check_positive_integer(name: str, value: object) -> None:
    """Raises unless `value` is an integer of at least 1; True is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer. Received: {name}={value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1. Received: {name}={value!r}.")


def check_rate(name: str, value: object) -> None:
    """Raises unless `value` is a dropout rate in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number. Received: {name}={value!r}.")
    if not 0 <= float(value) < 1:
        raise ValueError(f"{name} must lie in [0, 1). Received: {name}={value!r}.")


def read_wordpieces(path: str | PathLike[str]) -> tuple[str, ...]:
    """Returns the wordpieces in a `vocab.txt`, in the order of their ids."""
    # Not splitlines(): a vocabulary may hold characters that Python counts as line ends.
    return tuple(Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n"))


def _checked_wordpieces(vocabulary: object) -> tuple[str, ...]:
    if isinstance(vocabulary, (str, PathLike)):
        wordpieces, source = read_wordpieces(vocabulary), f"the file {vocabulary}"
    elif isinstance(vocabulary, (tuple, list)):
        wordpieces, source = tuple(vocabulary), f"{len(vocabulary)} wordpieces"
    else:
        raise TypeError(
            "vocabulary must be a tuple or list of wordpieces, or the path of a file with a "
            f"wordpiece a line. Received: vocabulary={vocabulary!r}."
        )
    for index, piece in enumerate(wordpieces):
        if not isinstance(piece, str):
            raise TypeError(f"vocabulary must hold strings. Received: {piece!r} at index {index}.")
        if not piece or piece != piece.strip():
            # A saved vocabulary is read back with the spaces cut off.
            raise ValueError(
                "vocabulary must hold no empty wordpiece and none that begins or ends with a "
                f"space. Received: {piece!r} at index {index} of {source}."
            )
    missing = [piece for piece in SPECIAL_WORDPIECES if piece not in wordpieces]
    if missing:
        raise ValueError(
            f"vocabulary must hold {', '.join(SPECIAL_WORDPIECES)}. Received: {source} without "
            f"{', '.join(missing)}."
        )
    if len(set(wordpieces)) != len(wordpieces):
        twice = next(piece for piece in wordpieces if wordpieces.count(piece) > 1)
        raise ValueError(
            "vocabulary must hold each wordpiece once, since its index is its id. Received: "
            f"{source} with {twice!r} more than once."
        )
    return wordpieces
