"""One small model, or more, around every layer class that `keras.layers` exports."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers


@dataclass(frozen=True)
class Case:
    """A model, what it is called on, and what the switch is expected to do with it.

    Attributes:
        build: Makes the model, in whatever policy is the global one.
        inputs: What the model is called on: an array, or a structure of arrays.
        handled: What the switch has to do beyond setting policies, for the result to be equal.
        refused: What a refusal says, of a model that the switch must refuse at least once.
        fails_in: The policies in which TensorFlow or Keras cannot compute it, on a CPU, however it
            came to its policy.
    """

    build: Callable[[], keras.Model]
    inputs: Any
    handled: str | None = None
    refused: str | None = None
    fails_in: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """A class that is not tested, and why."""

    reason: str


def exported_layers() -> dict[str, type[keras.Layer]]:
    """The layer classes of `keras.layers`, each under the first of its names."""
    classes = {}
    for name in dir(layers):
        member = getattr(layers, name)
        if inspect.isclass(member) and issubclass(member, keras.Layer):
            classes.setdefault(member, name)
    return {name: member for member, name in classes.items()}


def numbers(*shape):
    return np.random.RandomState(2).randn(*shape).astype("float32")


def images(*shape):
    return np.random.RandomState(2).uniform(0, 255, shape).astype("float32")


def positive(*shape):
    return np.random.RandomState(2).uniform(0.1, 1, shape).astype("float32")


def ids(*shape, below=6):
    return np.random.RandomState(2).randint(0, below, shape).astype("int32")


SEQUENCE = numbers(3, 4, 4)
IMAGE = numbers(2, 5, 5, 4)
VOLUME = numbers(2, 4, 4, 4, 2)
PHOTO = images(2, 12, 12, 3)
WORDS = np.array([["precision"], ["switch"], ["unknown"]], dtype=object)


def input_like(path, array):
    # Keras wants the Inputs of a dict to be called like its keys.
    name = path[-1] if path and isinstance(path[-1], str) else None
    dtype = "string" if array.dtype == object else str(array.dtype)
    return keras.Input(array.shape[1:], dtype=dtype, name=name)


def functional(call, inputs):
    """A Functional model of one call, whose Inputs are like `inputs`."""
    flat = [input_like(path, array) for path, array in keras.tree.flatten_with_path(inputs)]
    symbolic = keras.tree.pack_sequence_as(inputs, flat)
    return keras.Model(symbolic, call(symbolic))


def case(make, inputs, call=None, **expected):
    """`make()` makes the layer; `call(layer, inputs)` calls it where calling it is not enough."""

    def build():
        layer = make()
        return functional(lambda x: call(layer, x) if call else layer(x), inputs)

    return Case(build, inputs, **expected)


class Calling(keras.Model):
    """A model that calls a layer which returns its very inputs, and so fits no Functional graph."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, inputs, training=None):
        return self.layer(inputs, training=training)


def deferred(make, inputs, handled=None):
    """A Sequential that is built by the first data, as people write them."""

    def build():
        model = keras.Sequential([make(), layers.Identity()])
        model(inputs)
        return model

    return Case(build, inputs, handled)


def adapted(layer, data):
    layer.adapt(data)
    return layer


def two_arguments(layer, inputs):
    return layer(inputs[0], inputs[1])


def unpacked(layer, inputs):
    return layer(*inputs)


def with_mask(layer, inputs):
    return layer(inputs[0], mask=inputs[1])


MASK = np.array([[True] * 4, [True, True, False, False], [False, True, True, True]])
PAIR = [numbers(3, 6), numbers(3, 6)[::-1].copy()]
QUERY_VALUE = [numbers(2, 5, 8), numbers(2, 6, 8)]

NO_FLOAT16, NO_BFLOAT16 = ("mixed_float16",), ("mixed_bfloat16",)
NO_HALF = NO_FLOAT16 + NO_BFLOAT16

# A key is the name of a class, or that name, a colon and what is special about the case.
LAYERS = {
    # Core.
    "Activation": case(lambda: layers.Activation("gelu"), SEQUENCE),
    "Activation: softmax": case(lambda: layers.Activation("softmax"), SEQUENCE),
    "Dense": case(lambda: layers.Dense(5, "relu"), SEQUENCE),
    "Dense: lora": case(lambda: layers.Dense(5, lora_rank=2), SEQUENCE),
    "Dense: deferred": deferred(
        lambda: layers.Dense(5), SEQUENCE, "the input dtype that Sequential took from the layer"
    ),
    "EinsumDense": case(
        lambda: layers.EinsumDense("abc,cd->abd", (None, 5), bias_axes="d"), SEQUENCE
    ),
    "Embedding": case(lambda: layers.Embedding(6, 4), ids(3, 5)),
    "Embedding: mask_zero": case(
        lambda: layers.Embedding(6, 4, mask_zero=True),
        ids(3, 5),
        lambda layer, x: layers.LSTM(3)(layer(x)),
    ),
    "Identity": case(layers.Identity, SEQUENCE),
    "InputLayer": Case(
        lambda: keras.Sequential([layers.InputLayer((4,)), layers.Dense(3)]), numbers(3, 4)
    ),
    "InputLayer: float16": Case(
        lambda: keras.Sequential([layers.InputLayer((4,), dtype="float16"), layers.Dense(3)]),
        numbers(3, 4),
    ),
    "Lambda": case(lambda: layers.Lambda(lambda x: keras.ops.tanh(x) * 0.1), SEQUENCE),
    "Masking": case(
        layers.Masking,
        SEQUENCE * MASK[:, :, None],
        lambda layer, x: layers.GRU(3)(layer(x)),
    ),
    "ReversibleEmbedding": case(
        lambda: layers.ReversibleEmbedding(6, 4),
        ids(3, 5),
        lambda layer, x: layer(layer(x), reverse=True),
    ),
    "ReversibleEmbedding: untied": case(
        lambda: layers.ReversibleEmbedding(6, 4, tie_weights=False, logit_soft_cap=5.0),
        ids(3, 5),
        lambda layer, x: layer(layer(x), reverse=True),
    ),
    "ReversibleEmbedding: reverse_dtype": case(
        lambda: layers.ReversibleEmbedding(6, 4, reverse_dtype="float32"),
        ids(3, 5),
        lambda layer, x: layer(layer(x), reverse=True),
    ),
    # Activations.
    "ELU": case(layers.ELU, SEQUENCE),
    "LeakyReLU": case(layers.LeakyReLU, SEQUENCE),
    "PReLU": case(lambda: layers.PReLU("uniform"), SEQUENCE),
    "ReLU": case(lambda: layers.ReLU(1.0, 0.1, 0.2), SEQUENCE),
    "Softmax": case(layers.Softmax, SEQUENCE),
    "Softmax: mask": case(layers.Softmax, [SEQUENCE, SEQUENCE > 0], with_mask),
    # Attention.
    "AdditiveAttention": case(layers.AdditiveAttention, QUERY_VALUE),
    "AdditiveAttention: dropout": case(lambda: layers.AdditiveAttention(dropout=0.5), QUERY_VALUE),
    "Attention": case(lambda: layers.Attention(use_scale=True, dropout=0.5), QUERY_VALUE),
    "Attention: concat": case(lambda: layers.Attention(score_mode="concat"), QUERY_VALUE),
    "GroupQueryAttention": case(
        lambda: layers.GroupQueryAttention(4, 4, 2, dropout=0.5, seed=3), QUERY_VALUE, unpacked
    ),
    "MultiHeadAttention": case(
        lambda: layers.MultiHeadAttention(2, 4, dropout=0.5, seed=3), QUERY_VALUE, unpacked
    ),
    "MultiHeadAttention: causal and scores": case(
        lambda: layers.MultiHeadAttention(2, 4, use_gate=True),
        QUERY_VALUE,
        lambda layer, x: layer(*x, use_causal_mask=True, return_attention_scores=True),
    ),
    # Convolution.
    "Conv1D": case(lambda: layers.Conv1D(3, 3, padding="causal"), SEQUENCE),
    "Conv1DTranspose": case(lambda: layers.Conv1DTranspose(3, 3, 2), SEQUENCE),
    "Conv2D": case(lambda: layers.Conv2D(4, 3, activation="relu"), IMAGE),
    "Conv2D: lora": case(lambda: _with_lora(layers.Conv2D(4, 3), IMAGE.shape), IMAGE),
    "Conv2DTranspose": case(lambda: layers.Conv2DTranspose(3, 3, 2), IMAGE),
    "Conv3D": case(lambda: layers.Conv3D(3, 2), VOLUME),
    "Conv3DTranspose": case(lambda: layers.Conv3DTranspose(3, 2), VOLUME),
    "DepthwiseConv1D": case(lambda: layers.DepthwiseConv1D(3), SEQUENCE),
    "DepthwiseConv2D": case(lambda: layers.DepthwiseConv2D(3), IMAGE),
    "SeparableConv1D": case(lambda: layers.SeparableConv1D(3, 3), SEQUENCE),
    "SeparableConv2D": case(lambda: layers.SeparableConv2D(3, 3), IMAGE),
    # Merging.
    "Add": case(layers.Add, PAIR),
    "Average": case(layers.Average, PAIR),
    "Concatenate": case(layers.Concatenate, PAIR),
    "Dot": case(lambda: layers.Dot(1, normalize=True), PAIR),
    "Maximum": case(layers.Maximum, PAIR),
    "Minimum": case(layers.Minimum, PAIR),
    "Multiply": case(layers.Multiply, PAIR),
    "Subtract": case(layers.Subtract, PAIR),
    # Normalization.
    "BatchNormalization": case(layers.BatchNormalization, IMAGE),
    "BatchNormalization: renorm": case(
        lambda: layers.BatchNormalization(renorm=True, momentum=0.5), IMAGE
    ),
    "GroupNormalization": case(lambda: layers.GroupNormalization(2), IMAGE),
    "LayerNormalization": case(layers.LayerNormalization, SEQUENCE),
    "RMSNormalization": case(layers.RMSNormalization, SEQUENCE),
    "SpectralNormalization": case(lambda: layers.SpectralNormalization(layers.Dense(3)), SEQUENCE),
    "SpectralNormalization: convolution": case(
        lambda: layers.SpectralNormalization(layers.Conv2D(3, 3), 2), IMAGE
    ),
    "UnitNormalization": case(layers.UnitNormalization, SEQUENCE),
    # Pooling.
    "AdaptiveAveragePooling1D": case(lambda: layers.AdaptiveAveragePooling1D(3), SEQUENCE),
    "AdaptiveAveragePooling2D": case(lambda: layers.AdaptiveAveragePooling2D(3), IMAGE),
    "AdaptiveAveragePooling3D": case(
        lambda: layers.AdaptiveAveragePooling3D(3), VOLUME, fails_in=NO_FLOAT16
    ),
    "AdaptiveMaxPooling1D": case(lambda: layers.AdaptiveMaxPooling1D(3), SEQUENCE),
    "AdaptiveMaxPooling2D": case(lambda: layers.AdaptiveMaxPooling2D(3), IMAGE),
    "AdaptiveMaxPooling3D": case(
        lambda: layers.AdaptiveMaxPooling3D(3), VOLUME, fails_in=NO_FLOAT16
    ),
    "AveragePooling1D": case(lambda: layers.AveragePooling1D(2), SEQUENCE),
    "AveragePooling2D": case(lambda: layers.AveragePooling2D(2, padding="same"), IMAGE),
    "AveragePooling3D": case(lambda: layers.AveragePooling3D(2), VOLUME, fails_in=NO_FLOAT16),
    "GlobalAveragePooling1D": case(layers.GlobalAveragePooling1D, SEQUENCE),
    "GlobalAveragePooling1D: mask": case(
        layers.GlobalAveragePooling1D, [SEQUENCE, MASK], with_mask
    ),
    "GlobalAveragePooling2D": case(layers.GlobalAveragePooling2D, IMAGE),
    "GlobalAveragePooling3D": case(layers.GlobalAveragePooling3D, VOLUME),
    "GlobalMaxPool1D": case(layers.GlobalMaxPooling1D, SEQUENCE),
    "GlobalMaxPool2D": case(layers.GlobalMaxPooling2D, IMAGE),
    "GlobalMaxPool3D": case(layers.GlobalMaxPooling3D, VOLUME),
    "MaxPool1D": case(layers.MaxPooling1D, SEQUENCE),
    "MaxPool2D": case(layers.MaxPooling2D, IMAGE),
    "MaxPool3D": case(layers.MaxPooling3D, VOLUME, fails_in=NO_FLOAT16),
    # Regularization.
    "ActivityRegularization": case(lambda: layers.ActivityRegularization(0.1, 0.1), SEQUENCE),
    "AlphaDropout": case(lambda: layers.AlphaDropout(0.5), SEQUENCE),
    "Dropout": case(lambda: layers.Dropout(0.5), SEQUENCE),
    "GaussianDropout": case(lambda: layers.GaussianDropout(0.5), SEQUENCE),
    "GaussianNoise": case(lambda: layers.GaussianNoise(0.5), SEQUENCE),
    "SpatialDropout1D": case(lambda: layers.SpatialDropout1D(0.5), SEQUENCE),
    "SpatialDropout2D": case(lambda: layers.SpatialDropout2D(0.5), IMAGE),
    "SpatialDropout3D": case(lambda: layers.SpatialDropout3D(0.5), VOLUME),
    # Reshaping.
    "Cropping1D": case(layers.Cropping1D, SEQUENCE),
    "Cropping2D": case(lambda: layers.Cropping2D(1), IMAGE),
    "Cropping3D": case(layers.Cropping3D, VOLUME),
    "Flatten": case(layers.Flatten, IMAGE),
    "Permute": case(lambda: layers.Permute((2, 1)), SEQUENCE),
    "RepeatVector": case(lambda: layers.RepeatVector(3), numbers(3, 4)),
    "Reshape": case(lambda: layers.Reshape((4, -1)), SEQUENCE),
    "UpSampling1D": case(layers.UpSampling1D, SEQUENCE),
    "UpSampling2D": case(lambda: layers.UpSampling2D(interpolation="bilinear"), IMAGE),
    "UpSampling3D": case(layers.UpSampling3D, VOLUME),
    "ZeroPadding1D": case(layers.ZeroPadding1D, SEQUENCE),
    "ZeroPadding2D": case(layers.ZeroPadding2D, IMAGE),
    "ZeroPadding3D": case(layers.ZeroPadding3D, VOLUME),
    # Recurrent.
    "Bidirectional": case(lambda: layers.Bidirectional(layers.LSTM(3)), SEQUENCE),
    "Bidirectional: sum of sequences": case(
        lambda: layers.Bidirectional(layers.GRU(3, return_sequences=True), merge_mode="sum"),
        [SEQUENCE, MASK],
        with_mask,
    ),
    "ConvLSTM1D": case(lambda: layers.ConvLSTM1D(2, 2, dropout=0.2), numbers(2, 3, 5, 2)),
    "ConvLSTM2D": case(
        lambda: layers.ConvLSTM2D(2, 2, return_sequences=True), numbers(2, 3, 4, 4, 2)
    ),
    "ConvLSTM3D": case(lambda: layers.ConvLSTM3D(2, 2), numbers(2, 2, 3, 3, 3, 2)),
    "GRU": case(lambda: layers.GRU(3, dropout=0.2, recurrent_dropout=0.2, seed=3), SEQUENCE),
    "GRU: unrolled, with states": case(
        lambda: layers.GRU(3, unroll=True, return_state=True, reset_after=False), SEQUENCE
    ),
    "GRUCell": case(lambda: layers.GRUCell(3), [numbers(3, 4), numbers(3, 3)], two_arguments),
    "LSTM": case(
        lambda: layers.LSTM(3, return_sequences=True, return_state=True),
        [SEQUENCE, MASK],
        with_mask,
    ),
    "LSTM: initial state": case(
        lambda: layers.LSTM(3),
        [SEQUENCE, numbers(3, 3), numbers(3, 3)],
        lambda layer, x: layer(x[0], initial_state=x[1:]),
    ),
    "LSTM: stateful": Case(
        lambda: keras.Sequential(
            [keras.Input(batch_shape=SEQUENCE.shape), layers.LSTM(3, stateful=True)]
        ),
        SEQUENCE,
    ),
    "LSTMCell": case(
        lambda: layers.LSTMCell(3),
        [numbers(3, 4), [numbers(3, 3), numbers(3, 3)]],
        two_arguments,
    ),
    "RNN": case(
        lambda: layers.RNN([layers.GRUCell(4), layers.LSTMCell(3)], return_sequences=True),
        SEQUENCE,
    ),
    "SimpleRNN": case(lambda: layers.SimpleRNN(3, go_backwards=True), SEQUENCE),
    "SimpleRNNCell": case(
        lambda: layers.SimpleRNNCell(3), [numbers(3, 4), numbers(3, 3)], two_arguments
    ),
    "StackedRNNCells": case(
        lambda: layers.StackedRNNCells([layers.GRUCell(3), layers.SimpleRNNCell(2)]),
        [numbers(3, 4), [numbers(3, 3), numbers(3, 2)]],
        two_arguments,
    ),
    "TimeDistributed": case(lambda: layers.TimeDistributed(layers.Conv1D(3, 2)), IMAGE),
    "TimeDistributed: of a Bidirectional": case(
        lambda: layers.TimeDistributed(layers.Bidirectional(layers.SimpleRNN(2))),
        numbers(2, 2, 3, 4),
    ),
    # Preprocessing of numbers, categories and text.
    "CategoryEncoding": case(lambda: layers.CategoryEncoding(6), ids(3, 5)),
    "CategoryEncoding: count weights": case(
        lambda: layers.CategoryEncoding(6, "count"),
        [ids(3, 5), ids(3, 5)],
        lambda layer, x: layer(x[0], count_weights=x[1]),
        fails_in=NO_HALF,
    ),
    "Discretization": case(lambda: layers.Discretization([-1.0, 0.1, 1.0]), numbers(4, 3)),
    "Discretization: adapted, one_hot": case(
        lambda: adapted(layers.Discretization(num_bins=4, output_mode="one_hot"), numbers(32, 1)),
        numbers(4, 1),
    ),
    "HashedCrossing": case(lambda: layers.HashedCrossing(5), [ids(4, 1), ids(4, 1, below=3)]),
    "HashedCrossing: one_hot": case(
        lambda: layers.HashedCrossing(5, "one_hot"), [ids(4, 1), ids(4, 1, below=3)]
    ),
    "Hashing": case(lambda: layers.Hashing(5), WORDS),
    "Hashing: one_hot": case(lambda: layers.Hashing(5, output_mode="one_hot"), WORDS),
    "IntegerLookup": case(lambda: layers.IntegerLookup(vocabulary=[1, 2, 4]), ids(3, 5)),
    "IntegerLookup: tf_idf": case(
        lambda: layers.IntegerLookup(
            vocabulary=[1, 2, 4], idf_weights=[0.1, 0.3, 0.7], output_mode="tf_idf"
        ),
        ids(3, 5),
    ),
    "Normalization": case(
        lambda: adapted(layers.Normalization(), numbers(16, 4) * 3.7 + 1.1),
        numbers(3, 4),
        handled="mean and variance that were cast when it was adapted",
    ),
    "Normalization: given": case(
        lambda: layers.Normalization(mean=1.1, variance=2.3),
        numbers(3, 4),
        handled="mean and variance that were cast when it was built",
    ),
    "Normalization: inverted": case(
        lambda: adapted(layers.Normalization(invert=True), numbers(16, 4) * 3.7 + 1.1),
        numbers(3, 4),
        handled="mean and variance that were cast when it was adapted",
    ),
    "Rescaling": case(lambda: layers.Rescaling(1 / 127.5, -1.0), PHOTO),
    "Rescaling: uint8": case(
        lambda: layers.Rescaling([0.1, 0.2, 0.3], -1.0), PHOTO.astype("uint8")
    ),
    "StringLookup": case(lambda: layers.StringLookup(vocabulary=["precision", "switch"]), WORDS),
    "StringLookup: multi_hot": case(
        lambda: layers.StringLookup(vocabulary=["precision", "switch"], output_mode="multi_hot"),
        WORDS,
    ),
    "TextVectorization": case(
        lambda: layers.TextVectorization(
            vocabulary=["precision", "switch"], output_sequence_length=2
        ),
        WORDS,
    ),
    "TextVectorization: tf_idf": case(
        lambda: layers.TextVectorization(
            vocabulary=["precision", "switch"],
            idf_weights=[0.3, 0.7],
            output_mode="tf_idf",
        ),
        WORDS,
    ),
    # Preprocessing of audio.
    "MelSpectrogram": case(
        lambda: layers.MelSpectrogram(32, 8, num_mel_bins=4, sampling_rate=800), numbers(2, 64)
    ),
    "STFTSpectrogram": case(
        lambda: layers.STFTSpectrogram(frame_length=16), numbers(2, 64, 1), fails_in=NO_BFLOAT16
    ),
    # Preprocessing of images.
    "CenterCrop": case(lambda: layers.CenterCrop(6, 6), PHOTO),
    "CenterCrop: enlarging": case(lambda: layers.CenterCrop(16, 16), PHOTO),
    "MaxNumBoundingBoxes": case(
        lambda: layers.MaxNumBoundingBoxes(3, bounding_box_format="xyxy"),
        {
            "images": PHOTO,
            "bounding_boxes": {"boxes": positive(2, 2, 4) * 10, "labels": positive(2, 2) * 5},
        },
    ),
    "Pipeline": case(
        lambda: layers.Pipeline([layers.Rescaling(0.1), layers.CenterCrop(6, 6)]), PHOTO
    ),
    "Resizing": case(lambda: layers.Resizing(7, 7), PHOTO),
    "Resizing: antialias, crop": case(
        lambda: layers.Resizing(7, 5, "bicubic", crop_to_aspect_ratio=True, antialias=True),
        PHOTO,
        fails_in=NO_HALF,
    ),
    # Augmentation of images.
    "AugMix": case(layers.AugMix, PHOTO),
    "AutoContrast": case(layers.AutoContrast, PHOTO),
    "ContrastLimitedAdaptiveHistogramEqualization": case(
        lambda: layers.ContrastLimitedAdaptiveHistogramEqualization(tile_grid_size=(2, 2)), PHOTO
    ),
    "CutMix": case(
        layers.CutMix, {"images": PHOTO, "labels": positive(2, 3)}, fails_in=NO_BFLOAT16
    ),
    "Equalization": Case(lambda: Calling(layers.Equalization()), PHOTO),
    "MixUp": case(layers.MixUp, {"images": PHOTO, "labels": positive(2, 3)}, fails_in=NO_HALF),
    "RandAugment": case(layers.RandAugment, PHOTO, fails_in=NO_BFLOAT16),
    "RandomBrightness": case(lambda: layers.RandomBrightness(0.5), PHOTO),
    "RandomColorDegeneration": case(lambda: layers.RandomColorDegeneration(0.5), PHOTO),
    "RandomColorJitter": case(
        lambda: layers.RandomColorJitter((0, 255), 0.5, 0.5, 0.5, 0.5), PHOTO
    ),
    "RandomContrast": case(lambda: layers.RandomContrast(0.5), PHOTO),
    "RandomCrop": case(lambda: layers.RandomCrop(6, 6), PHOTO),
    "RandomElasticTransform": case(layers.RandomElasticTransform, PHOTO),
    "RandomErasing": case(layers.RandomErasing, PHOTO),
    "RandomFlip": case(layers.RandomFlip, PHOTO),
    "RandomGaussianBlur": case(layers.RandomGaussianBlur, PHOTO),
    "RandomGrayscale": case(layers.RandomGrayscale, PHOTO),
    "RandomHue": case(lambda: layers.RandomHue(0.5), PHOTO),
    "RandomInvert": case(layers.RandomInvert, PHOTO),
    "RandomPerspective": case(layers.RandomPerspective, PHOTO, fails_in=NO_BFLOAT16),
    "RandomPosterization": case(lambda: layers.RandomPosterization(4), PHOTO),
    "RandomRotation": case(lambda: layers.RandomRotation(0.2), PHOTO, fails_in=NO_BFLOAT16),
    "RandomSaturation": case(lambda: layers.RandomSaturation(0.5), PHOTO),
    "RandomSharpness": case(lambda: layers.RandomSharpness(0.5), PHOTO),
    "RandomShear": case(lambda: layers.RandomShear(0.2, 0.2), PHOTO, fails_in=NO_BFLOAT16),
    "RandomTranslation": case(
        lambda: layers.RandomTranslation(0.2, 0.2), PHOTO, fails_in=NO_BFLOAT16
    ),
    "RandomZoom": case(lambda: layers.RandomZoom(0.2), PHOTO, fails_in=NO_BFLOAT16),
    "Solarization": case(lambda: layers.Solarization(0.5, 0.5), PHOTO),
    # Not tested.
    "FlaxLayer": Skipped("it needs Flax, which this library does not run on"),
    "JaxLayer": Skipped("it needs JAX, which this library does not run on"),
    "Layer": Skipped("an abstract base: it computes nothing"),
    "TFSMLayer": Skipped("it runs a SavedModel, whose dtypes were frozen when it was exported"),
    "TorchModuleWrapper": Skipped("it needs PyTorch, which this library does not run on"),
    "Wrapper": Skipped("an abstract base: it calls nothing"),
}


def _with_lora(layer, shape):
    layer.build(shape)
    layer.enable_lora(2)
    return layer
