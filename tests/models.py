"""Models that several tests build: one for each kind of layer that the switch must be right for."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

from precision_bert import precision_scope


def dense_model(policy="float32", **compile_arguments):
    """Two Dense layers, compiled if compile arguments are given."""
    with precision_scope(policy):
        inputs = keras.Input((4,))
        hidden = layers.Dense(8, activation="relu", name="hidden")(inputs)
        model = keras.Model(inputs, layers.Dense(1, name="head")(hidden))
    if compile_arguments:
        model.compile(**compile_arguments)
    return model


class Subclassed(keras.Model):
    """A model that Keras knows only by its attributes."""

    def __init__(self):
        super().__init__()
        self.blocks = [layers.Dense(8, activation="gelu"), layers.LayerNormalization()]
        self.head = layers.Dense(1)

    def call(self, x, training=None):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _sequential(shape, *body):
    return lambda: keras.Sequential([keras.Input(shape), *[make() for make in body]])


def _with_attention(layer_class, **arguments):
    def build():
        inputs = keras.Input((6, 8))
        out = layer_class(**arguments)(inputs, inputs)
        return keras.Model(inputs, layers.Dense(2)(out))

    return build


def _with_dot_attention(layer_class, **arguments):
    def build():
        inputs = keras.Input((6, 8))
        out = layer_class(**arguments)([inputs, inputs])
        return keras.Model(inputs, layers.Dense(2)(out))

    return build


def _adapted_normalization():
    layer = layers.Normalization()
    layer.adapt(np.random.RandomState(1).randn(16, 4).astype("float32") * 3.7 + 1.1)
    return keras.Sequential([keras.Input((4,)), layer, layers.Dense(2)])


def _nested():
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(8), layers.ReLU()])
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(2)(inner(inputs)))


def _bidirectional():
    return keras.Sequential(
        [
            keras.Input((6, 4)),
            layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
            layers.TimeDistributed(layers.Dense(3)),
            layers.RNN([layers.GRUCell(4), layers.LSTMCell(3)]),
        ]
    )


# Every entry: the shape of one example, and how to build the model.
MODELS = {
    "dense": ((4,), _sequential((4,), lambda: layers.Dense(8, "relu"), lambda: layers.Dense(2))),
    "einsum_dense": (
        (6, 4),
        _sequential((6, 4), lambda: layers.EinsumDense("abc,cd->abd", (6, 5))),
    ),
    "conv1d": ((8, 4), _sequential((8, 4), lambda: layers.Conv1D(3, 3), lambda: layers.Dense(2))),
    "conv2d": (
        (8, 8, 2),
        _sequential(
            (8, 8, 2),
            lambda: layers.Conv2D(4, 3),
            lambda: layers.DepthwiseConv2D(3),
            lambda: layers.MaxPooling2D(),
            lambda: layers.Flatten(),
            lambda: layers.Dense(2),
        ),
    ),
    "conv2d_transpose": ((4, 4, 2), _sequential((4, 4, 2), lambda: layers.Conv2DTranspose(3, 3))),
    "separable_conv": ((8, 8, 2), _sequential((8, 8, 2), lambda: layers.SeparableConv2D(4, 3))),
    "simple_rnn": ((6, 4), _sequential((6, 4), lambda: layers.SimpleRNN(5))),
    "gru": ((6, 4), _sequential((6, 4), lambda: layers.GRU(5))),
    "lstm": ((6, 4), _sequential((6, 4), lambda: layers.LSTM(5))),
    "bidirectional_and_stacked_cells": ((6, 4), _bidirectional),
    "batch_normalization": (
        (4,),
        _sequential((4,), lambda: layers.Dense(8), lambda: layers.BatchNormalization()),
    ),
    "layer_normalization": ((4,), _sequential((4,), lambda: layers.LayerNormalization())),
    "rms_normalization": ((4,), _sequential((4,), lambda: layers.RMSNormalization())),
    "group_normalization": ((4,), _sequential((4,), lambda: layers.GroupNormalization(2))),
    "unit_normalization": ((4,), _sequential((4,), lambda: layers.UnitNormalization())),
    "spectral_normalization": (
        (4,),
        _sequential((4,), lambda: layers.SpectralNormalization(layers.Dense(3))),
    ),
    "adapted_normalization": ((4,), _adapted_normalization),
    "given_normalization": (
        (4,),
        _sequential((4,), lambda: layers.Normalization(mean=1.1, variance=2.3)),
    ),
    "dropout": (
        (4,),
        _sequential((4,), lambda: layers.Dense(8), lambda: layers.Dropout(0.5, seed=3)),
    ),
    "multi_head_attention": (
        (6, 8),
        _with_attention(layers.MultiHeadAttention, num_heads=2, key_dim=4, dropout=0.1),
    ),
    "grouped_query_attention": (
        (6, 8),
        _with_attention(
            layers.GroupQueryAttention, head_dim=4, num_query_heads=4, num_key_value_heads=2
        ),
    ),
    "attention": ((6, 8), _with_dot_attention(layers.Attention, use_scale=True)),
    "additive_attention": ((6, 8), _with_dot_attention(layers.AdditiveAttention)),
    "nested": ((4,), _nested),
    "subclassed": ((4,), Subclassed),
}
