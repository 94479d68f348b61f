"""From text to the features that BERT reads: the tokenizer and the preprocessor of a classifier.

Text runs on TensorFlow ops whichever backend Keras uses: keras-nlp's own do.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import keras_nlp
import numpy as np
import tensorflow as tf

FEATURES = ("token_ids", "segment_ids", "padding_mask")

# What BERT's own tokenizer removes (control, format, private-use and replacement characters, but
# not tab and newline) and what it reads as a space (any Unicode separator). A no-break space that
# stays in the text would join two words into one unknown word.
_REMOVED_CHARACTERS = r"[^\P{C}\t\n\r]|\x{FFFD}"
_SPACE_CHARACTERS = r"[\t\n\r\p{Z}]"


@keras.saving.register_keras_serializable("precision_bert")
class BertTextTokenizer(keras_nlp.models.BertTokenizer):
    """Splits text into the wordpieces that BERT was trained on.

    Use it with any BERT vocabulary. keras-nlp's `BertTokenizer`, from which it derives, differs
    from the tokenizer that produced the published weights: it keeps accents unless told otherwise,
    takes a word with a no-break space in it for one unknown word, and applies a compatibility case
    folding ("…" becomes "...", "ß" becomes "ss", "①" becomes "1"). This one gives the ids of the
    original.

    Args:
        vocabulary: Sequence of wordpieces in the order of their ids, or the path of a file with a
            wordpiece a line.
        uncased: Whether the vocabulary holds lower-case words only.
        strip_accents: Whether accents are removed. None, the default, follows `uncased`, as BERT
            did: uncased vocabularies have no accents, cased ones do.
        **kwargs: Of `keras_nlp.models.BertTokenizer`.

    Raises:
        ValueError: If `lowercase` is passed: lower-casing is this class' `uncased`.

    Example:

    >>> vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cafe", "##s", "…"]
    >>> tokenizer = BertTextTokenizer(vocabulary, uncased=True)
    >>> [int(i) for i in tokenizer("CAFÉS…")]
    [5, 6, 7]

    Words longer than 100 bytes are unknown (the original: 100 characters), and special tokens
    written out in a text, such as "[SEP]", are text.
    """

    # keras-nlp looks for "the tokenizer of a BertBackbone" among all registered classes and takes
    # whichever its hash order gives first. None keeps this one from being taken for the stock one.
    backbone_cls = None

    def __init__(
        self,
        vocabulary: Sequence[str] | str | None = None,
        uncased: bool = True,
        strip_accents: bool | None = None,
        **kwargs: Any,
    ) -> None:
        if "lowercase" in kwargs:
            raise ValueError(
                "BertTextTokenizer has no argument `lowercase`. Pass `uncased` instead. "
                f"Received: lowercase={kwargs['lowercase']!r}."
            )
        self.uncased = bool(uncased)
        super().__init__(
            vocabulary=vocabulary,
            lowercase=False,  # the base class' is a compatibility case folding
            strip_accents=self.uncased if strip_accents is None else bool(strip_accents),
            **kwargs,
        )

    def tokenize(self, inputs: Any) -> Any:
        """Returns the wordpieces' ids, ragged: text (batch,) to ids (batch, None) int32."""
        return super().tokenize(self._clean(inputs))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments; the vocabulary is saved as an asset beside them."""
        config = super().get_config()
        del config["lowercase"]
        config["uncased"] = self.uncased
        return config

    def _clean(self, text: Any) -> Any:
        with tf.device("cpu"):  # string ops have no GPU kernels
            text = tf.convert_to_tensor(text) if not tf.is_tensor(text) else text
            text = tf.strings.regex_replace(text, _REMOVED_CHARACTERS, "")
            text = tf.strings.regex_replace(text, _SPACE_CHARACTERS, " ")
            if self.uncased:
                # The Unicode lower-casing follows the process' locale: under a Turkish one "I"
                # would become a dotless i. So the ASCII letters go first, by themselves.
                text = tf.strings.lower(tf.strings.lower(text), encoding="utf-8")
        return text


@keras.saving.register_keras_serializable("precision_bert")
class BertTextPreprocessor(keras_nlp.models.BertTextClassifierPreprocessor):
    """Turns sentences or sentence pairs into BERT's features, and lets features pass.

    A `BertClassifier` holds one, so `fit`, `evaluate` and `predict` take raw text as well as
    batches that were encoded before (length-bucketed ones, for instance). keras-nlp's
    `BertTextClassifierPreprocessor`, from which it derives, takes the second sentence of
    `preprocessor((first, second))` for a label, and cannot read features.

    Args:
        tokenizer: A `BertTextTokenizer`.
        sequence_length: Length to which text is padded or cut, in wordpieces, `[CLS]` and `[SEP]`
            included. At least 3, at most the backbone's `max_sequence_length`.
        truncate: `"round_robin"` shortens the longer sentence of a pair first; `"waterfall"`
            shortens the second only, as long as the first fits.
        **kwargs: Of `keras.layers.Layer`.

    Call arguments:
        x: One of: text, a string or strings of shape `(batch,)`; a pair of these, as a tuple; a
            mapping of `token_ids`, `segment_ids` and `padding_mask`, each `(batch, seq_len)`
            int32 (the mask may be boolean), which is returned as it is; or a tuple
            `(x, y)` or `(x, y, sample_weight)`, an element of a dataset.
        y: Labels, numbers of shape `(batch,)`; returned as they are.
        sample_weight: Weights of shape `(batch,)`; returned as they are.

    Returns:
        The features, or `(features, y)` or `(features, y, sample_weight)`, whichever were given.

    Raises:
        ValueError: For more than two sentences, text in place of labels, and features that lack a
            key, have another one or are not integers.

    Example:

    >>> vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
    >>> preprocessor = BertTextPreprocessor(BertTextTokenizer(vocabulary), sequence_length=6)
    >>> features = preprocessor(("a", "b"))
    >>> [int(i) for i in features["token_ids"]]
    [2, 5, 3, 6, 3, 0]
    >>> [int(i) for i in features["segment_ids"]]
    [0, 0, 0, 1, 1, 0]

    A dataset of unlabelled pairs needs `((first, second),)` as its elements: `tf.data` and Keras
    read `(first, second)` as text and label. That is refused, not guessed.
    """

    backbone_cls = None  # see BertTextTokenizer
    tokenizer_cls = BertTextTokenizer

    def __init__(
        self,
        tokenizer: BertTextTokenizer,
        sequence_length: int = 128,
        truncate: str = "round_robin",
        **kwargs: Any,
    ) -> None:
        check_sequence_length(sequence_length)
        if truncate not in ("round_robin", "waterfall"):
            raise ValueError(
                f"truncate must be 'round_robin' or 'waterfall'. Received: truncate={truncate!r}."
            )
        super().__init__(
            tokenizer, sequence_length=int(sequence_length), truncate=truncate, **kwargs
        )

    def __call__(self, x: Any, y: Any = None, sample_weight: Any = None, **kwargs: Any) -> Any:
        """Encodes text or lets features pass; see the class."""
        element = type(x) is tuple and 1 <= len(x) <= 3 and not _all_text(x)
        if element and y is None and sample_weight is None:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(x)
        if _is_text(y):
            raise ValueError(
                "y holds text where labels were expected. If it is the second sentence of a pair, "
                "pass the pair as one argument, preprocessor((first, second)); in a dataset, let "
                "the elements be ((first, second), label), or ((first, second),) without label. "
                f"Received: y={y!r}."
            )
        if isinstance(x, Mapping):
            _check_features(x)
            return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
        segments = x if type(x) is tuple else (x,)
        if len(segments) > 2:
            raise ValueError(
                "BERT reads one sentence or a pair; its segment_ids are 0 and 1. Join the "
                f"sentences into two texts first. Received: {len(segments)} sentences."
            )
        if not segments or not _all_text(segments):
            raise ValueError(
                "x must be text, a tuple of two texts, or a mapping with the keys "
                f"{', '.join(FEATURES)}. Received: x={x!r}."
            )
        return super().__call__(x, y=y, sample_weight=sample_weight, **kwargs)


def check_sequence_length(sequence_length: object) -> None:
    """Raises unless `sequence_length` is an integer with room for a pair's special tokens."""
    if isinstance(sequence_length, bool) or not isinstance(sequence_length, numbers.Integral):
        raise TypeError(
            f"sequence_length must be an integer. Received: sequence_length={sequence_length!r}."
        )
    if sequence_length < 3:
        raise ValueError(
            "sequence_length must be at least 3, [CLS] and two [SEP] of a pair. "
            f"Received: sequence_length={sequence_length!r}."
        )


def _all_text(values: tuple[Any, ...]) -> bool:
    return bool(values) and all(_is_text(value) for value in values)


def _is_text(value: Any) -> bool:
    """Tells whether a Python, NumPy or TensorFlow value holds strings."""
    if isinstance(value, (str, bytes)):
        return True
    if isinstance(value, (list, tuple)):
        return bool(value) and _is_text(value[0])
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "O":
            return value.size > 0 and isinstance(value.flat[0], (str, bytes))
        return value.dtype.kind in "SU"
    return getattr(value, "dtype", None) == tf.string


def _check_features(features: Mapping[str, Any]) -> None:
    if set(features) != set(FEATURES):
        raise ValueError(
            f"Encoded features must have exactly the keys {', '.join(FEATURES)}. Received: "
            f"{', '.join(map(repr, features)) or 'no keys'}. Raw text is passed as a string or a "
            "tuple of two, not in a mapping."
        )
    for name in FEATURES:
        value = features[name]
        dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
        kind = keras.backend.standardize_dtype(dtype)
        if not ("int" in kind or (kind == "bool" and name == "padding_mask")):
            raise ValueError(
                f"{name} must be integers: as floating-point numbers they would be cast to half "
                "precision with the other inputs, where 2049 becomes 2048, another word. Convert "
                f"with .astype('int32') or tf.cast. Received: {name} of dtype {kind}."
            )
