"""A BERT classifier as a plain keras-nlp model, with its float32 islands marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import keras
import keras_nlp

from precision_bert.bert_config import BertConfig, check_positive_integer, check_rate
from precision_bert.bert_presets import load_bert
from precision_bert.bert_text import BertTextPreprocessor, check_sequence_length
from precision_bert.islands import pin_float32
from precision_bert.policies import check_policy

Pooling = Literal["cls", "mean"]


@keras.saving.register_keras_serializable("precision_bert")
class MaskedMean(keras.layers.Layer):
    """Averages the hidden states of the tokens that are not padding.

    Always computes in float32: float16 has eleven significant bits, too few to sum 512 numbers.

    Call arguments:
        sequence: Hidden states `(batch, seq_len, hidden_dim)`.
        padding_mask: `(batch, seq_len)`, 0 for padding.

    Returns:
        Their mean, `(batch, hidden_dim)` float32; zeros where all is padding.

    Example:

    >>> states = keras.ops.array([[[1.0], [3.0], [100.0]]])
    >>> MaskedMean()(states, keras.ops.array([[1, 1, 0]])).numpy().tolist()
    [[2.0]]
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "dtype": "float32"})

    def call(self, sequence: Any, padding_mask: Any) -> Any:
        """See the class."""
        mask = keras.ops.expand_dims(keras.ops.cast(padding_mask, "float32"), -1)
        count = keras.ops.maximum(keras.ops.sum(mask, axis=1), 1.0)
        return keras.ops.sum(sequence * mask, axis=1) / count

    def compute_output_shape(self, sequence_shape: Any, padding_mask_shape: Any) -> Any:
        """Drops the sequence axis."""
        return (sequence_shape[0], sequence_shape[2])


@keras.saving.register_keras_serializable("precision_bert")
class BertClassifier(keras_nlp.models.TextClassifier):
    """A BERT with a classification or regression head.

    Use `bert_classifier` to make one from pretrained weights. It is a keras-nlp task: `backbone`
    and `preprocessor` are at hand, and `fit`, `evaluate` and `predict` take raw text, pairs of
    texts or encoded features. Its head (pooling, dropout, logits) computes in float32 whatever the
    rest does, and is marked with `pin_float32` so that a switch leaves it alone: in float16, logits
    near each other tie, and thresholds move.

    Args:
        backbone: A `keras_nlp.models.BertBackbone`.
        num_classes: Number of classes; 1 makes a regression.
        preprocessor: A `BertTextPreprocessor`, or None to take encoded features only.
        pooling: `"cls"` reads the `[CLS]` token through BERT's tanh layer, as BERT did; `"mean"`
            averages the last hidden states, for weights whose tanh layer was never trained, and
            makes that layer (`backbone.pooled_dense`) untrainable, since it is not read.
        dropout: Rate before the logits, in [0, 1). Default 0.1, BERT's.
        **kwargs: `name`, or `compile=True` for keras-nlp's default compilation. Left out, the model
            is not compiled: `compile_classifier` compiles it with a recipe that works.

    Call arguments:
        inputs: A mapping of `token_ids`, `segment_ids` and `padding_mask`, each
            `(batch, seq_len)` int32.

    Returns:
        Logits `(batch, num_classes)` float32, whatever the policy; for a regression the value
        itself, `(batch, 1)`.

    Raises:
        TypeError: If `backbone` is no BERT, or a number has the wrong type.
        ValueError: If a value is out of its range, or the preprocessor does not fit the backbone.

    Example:

    >>> vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]
    >>> config = BertConfig(vocabulary, 1, num_heads=2, hidden_dim=8, intermediate_dim=16)
    >>> backbone, tokenizer = config.build("float32")
    >>> model = BertClassifier(backbone, 2, BertTextPreprocessor(tokenizer, sequence_length=8))
    >>> model.predict(["good", "bad", "good bad"], verbose=0).shape
    (3, 2)

    Arrays and lists given to `fit` are batched in their order: keras-nlp does not shuffle them, and
    warns unless `shuffle=False` says that this is meant. Shuffle with a `tf.data.Dataset`.
    """

    # None keeps `keras_nlp.models.TextClassifier.from_preset` from choosing this class by chance;
    # see BertTextTokenizer.
    backbone_cls = None
    preprocessor_cls = BertTextPreprocessor

    def __init__(
        self,
        backbone: keras_nlp.models.BertBackbone,
        num_classes: int,
        preprocessor: BertTextPreprocessor | None = None,
        pooling: Pooling = "cls",
        dropout: float = 0.1,
        **kwargs: Any,
    ) -> None:
        _check_head(num_classes, pooling, dropout)
        _check_fits(backbone, preprocessor)
        self.backbone = backbone
        self.preprocessor = preprocessor
        self.output_dropout = keras.layers.Dropout(
            dropout, dtype="float32", name="classifier_dropout"
        )
        self.output_dense = keras.layers.Dense(
            num_classes,
            kernel_initializer=keras.initializers.TruncatedNormal(stddev=0.02),
            dtype="float32",
            name="logits",
        )
        pin_float32(self.output_dropout, self.output_dense)

        inputs = backbone.input
        features = backbone(inputs)
        if pooling == "mean":
            # Nothing reads it: no gradient, of which Keras would warn, and no optimizer state.
            backbone.pooled_dense.trainable = False
            self.pooler = MaskedMean(name="mean_pooling")
            pin_float32(self.pooler)
            pooled = self.pooler(features["sequence_output"], inputs["padding_mask"])
        else:
            pooled = features["pooled_output"]
        outputs = self.output_dense(self.output_dropout(pooled))
        kwargs.setdefault("compile", False)
        self.num_classes = int(num_classes)
        super().__init__(inputs=inputs, outputs=outputs, **kwargs)
        self.pooling = pooling
        self.dropout = dropout

    def compile(
        self, optimizer: Any = "auto", loss: Any = "auto", *, metrics: Any = "auto", **kwargs: Any
    ) -> None:
        """Configures training; see `keras.Model.compile`, and `compile_classifier` for a recipe.

        `"auto"` chooses as keras-nlp does, except that a regression gets the mean squared error: a
        cross-entropy over its single output is 0 for every input.
        """
        if self.num_classes == 1:
            loss = keras.losses.MeanSquaredError() if loss == "auto" else loss
            metrics = [keras.metrics.RootMeanSquaredError()] if metrics == "auto" else metrics
        super().compile(optimizer=optimizer, loss=loss, metrics=metrics, **kwargs)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a model that is read from a file as it was compiled when it was saved.

        Keras does this for classes that do not override `compile`. keras-nlp's do, and come back
        with a warning and without their optimizer's state.
        """
        self.compile(**keras.saving.deserialize_keras_object(config))
        self.optimizer.build(self.trainable_variables)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, backbone and preprocessor serialized."""
        config = super().get_config()
        config.update(num_classes=self.num_classes, pooling=self.pooling, dropout=self.dropout)
        return config

    @classmethod
    def from_preset(cls, preset: Any, load_weights: bool = True, **kwargs: Any) -> BertClassifier:
        """Same as `bert_classifier`, by the name that keras-nlp gives it."""
        return bert_classifier(preset, load_weights=load_weights, **kwargs)


def bert_classifier(
    preset_or_config: str | Path | BertConfig,
    num_classes: int,
    *,
    pooling: Pooling = "cls",
    sequence_length: int = 128,
    dropout: float = 0.1,
    dtype: str | None = None,
    load_weights: bool = True,
) -> BertClassifier:
    """Makes a BERT classifier, or a regression, from pretrained weights or from a configuration.

    Use it for any model to fine-tune. What can be checked is checked before anything is downloaded.

    Args:
        preset_or_config: One of: a preset of keras-nlp, such as `"bert_base_en_uncased"`; a folder
            written by `save_to_preset`; a folder in Hugging Face layout (`config.json`,
            `vocab.txt`, `tokenizer_config.json`, `model.safetensors`); a hub handle
            (`"hf://user/model"`, `"kaggle://..."`); or a `BertConfig`, initialised at random.
        num_classes: Number of classes; 1 makes a regression.
        pooling: `"cls"` or `"mean"`; see `BertClassifier`. For sentence-transformers, whose tanh
            layer was never trained, `"cls"` warns.
        sequence_length: Length to which raw text is padded or cut, in wordpieces. Default 128, long
            enough for nearly all of GLUE. At least 3, at most the backbone's.
        dropout: Rate before the logits, in [0, 1). Default 0.1, BERT's. (Within the encoder it is
            the preset's or the configuration's own.)
        dtype: Policy that the backbone is built in, such as `"mixed_float16"`. None, the default,
            is Keras' global policy.
        load_weights: Whether the weights are read. False gives the preset's architecture and
            vocabulary, initialised at random.

    Returns:
        A `BertClassifier`, not compiled.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of its range, the preset unknown or no BERT.
        FileNotFoundError: If the folder, or a file that it must hold, is not there.
        ConnectionError: If a preset is not on this machine and its hub cannot be reached.

    Example:

    >>> vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]
    >>> config = BertConfig(vocabulary, 1, num_heads=2, hidden_dim=8, intermediate_dim=16)
    >>> model = bert_classifier(config, num_classes=2, dtype="mixed_float16")
    >>> model.backbone.dtype_policy.name, model.get_layer("logits").dtype_policy.name
    ('mixed_float16', 'float32')
    """
    _check_head(num_classes, pooling, dropout)
    check_sequence_length(sequence_length)
    policy = (
        check_policy(keras.config.dtype_policy(), "Keras' global dtype policy")
        if dtype is None
        else check_policy(dtype, "dtype")
    )
    if isinstance(preset_or_config, BertConfig):
        if sequence_length > preset_or_config.max_sequence_length:
            raise ValueError(
                "sequence_length must not exceed the configuration's max_sequence_length. "
                f"Received: sequence_length={sequence_length}, "
                f"max_sequence_length={preset_or_config.max_sequence_length}."
            )
        backbone, tokenizer = preset_or_config.build(policy)
    else:
        backbone, tokenizer = load_bert(
            preset_or_config,
            dtype=policy,
            sequence_length=sequence_length,
            load_weights=load_weights,
            warn_untrained_pooler=pooling == "cls" and load_weights,
        )
    return BertClassifier(
        backbone,
        num_classes,
        BertTextPreprocessor(tokenizer, sequence_length=sequence_length),
        pooling=pooling,
        dropout=dropout,
    )


def _check_head(num_classes: object, pooling: object, dropout: object) -> None:
    check_positive_integer("num_classes", num_classes)
    if pooling not in get_args(Pooling):
        raise ValueError(
            f"pooling must be {' or '.join(map(repr, get_args(Pooling)))}. "
            f"Received: pooling={pooling!r}."
        )
    check_rate("dropout", dropout)


def _check_fits(backbone: object, preprocessor: object) -> None:
    if not isinstance(backbone, keras_nlp.models.BertBackbone):
        raise TypeError(
            f"backbone must be a keras_nlp.models.BertBackbone. Received: {backbone!r}."
        )
    if preprocessor is None:
        return
    if not isinstance(preprocessor, BertTextPreprocessor):
        raise TypeError(
            "preprocessor must be a precision_bert BertTextPreprocessor or None (keras-nlp's own "
            "takes the second sentence of an unlabelled pair for a label). "
            f"Received: {preprocessor!r}."
        )
    if preprocessor.sequence_length > backbone.max_sequence_length:
        raise ValueError(
            "The preprocessor's sequence_length must not exceed the backbone's "
            "max_sequence_length, the number of its position embeddings. "
            f"Received: sequence_length={preprocessor.sequence_length}, "
            f"max_sequence_length={backbone.max_sequence_length}."
        )
    wordpieces = preprocessor.tokenizer.vocabulary  # None while a saved model is being read
    if wordpieces is not None and len(wordpieces) > backbone.vocabulary_size:
        raise ValueError(
            "The tokenizer's vocabulary must not be larger than the backbone's. Received: "
            f"{len(wordpieces)} wordpieces for {backbone.vocabulary_size} embeddings."
        )
