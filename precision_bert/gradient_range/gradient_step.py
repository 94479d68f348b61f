"""Takes the gradients of a training step in float32, and leaves the model as it was."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from precision_bert.gradient_range.float16_bins import INFINITY
from precision_bert.graph_dtypes import following_operations, set_dtype
from precision_bert.layer_policies import refresh_frozen_state, switchable_layers
from precision_bert.policies import HALF
from precision_bert.switch_proof import check_switched, prepare_proof

Key = tuple[str, str]
"""A layer's path, and "weights" or "outputs"."""

KINDS = ("weights", "outputs")
"""What gradients are taken with respect to."""


class GradientStep:
    """Takes the gradients of one batch and counts them, in a graph or eagerly.

    Counted where they are computed: a BERT's gradients need not all be in memory at once.

    Args:
        model: A built model whose loss can be computed, within `left_as_it_was`.
        paths: Its layers with their paths.
        edges: The edges of `Float16Bins`.
    """

    def __init__(
        self, model: keras.Model, paths: dict[keras.Layer, str], edges: np.ndarray
    ) -> None:
        self._model = model
        self._edges = edges
        # A shared weight is its first layer's, one that no layer holds is the model's.
        self._owners = {id(weight): paths[model] for weight in model.trainable_weights} | {
            id(weight): paths[layer]
            for layer in reversed(paths)
            for weight in layer._trainable_variables
        }
        self._arguments = _if_taken(model.call, training=True)
        self._loss_arguments = _if_taken(model.compute_loss, training=True)
        self._graph: Any = None
        self._outputs: dict[int, tuple[str, Any]] = {}
        self._unseen: dict[str, None] = {}
        self._unreached: dict[str, None] = {}
        for layer, path in paths.items():
            # Around `call` and not by the class's `__call__`: wrappers run a layer's `call`
            # directly. In the instance's dictionary, so that Keras tracks nothing.
            vars(layer)["call"] = self._watched(layer.call, path)

    def __call__(self, batch: Any) -> dict[Key, tuple[Any, Any]]:
        """Returns a batch's counts, and its smallest and largest entry, for `Tally.add`."""
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._outputs = {}
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        weights = self._model.trainable_weights
        values = [tf.convert_to_tensor(weight) for weight in weights]
        # What is assigned within the scope (moving averages, seeds, metrics) stays there.
        with (
            keras.StatelessScope(zip(weights, values, strict=True), collect_losses=True) as scope,
            tf.GradientTape(watch_accessed_variables=False) as tape,
        ):
            tape.watch(values)
            y_pred = self._model(x, **self._arguments)
            loss = self._model.compute_loss(x, y, y_pred, sample_weight, **self._loss_arguments)
            # A layer that sets its weight before it uses it (SpectralNormalization) is trained by
            # the gradient of what it has set.
            values = [scope.get_current_value(weight) for weight in weights]
        outputs = list(self._outputs.values())
        self._outputs = {}
        tensors = values + [tensor for _, tensor in outputs]
        gradients = tape.gradient(loss, tensors)
        keys = [(self._owners[id(weight)], "weights") for weight in weights]
        keys += [(path, "outputs") for path, _ in outputs]
        found = defaultdict(list)
        for key, tensor, gradient in zip(keys, tensors, gradients, strict=True):
            if gradient is not None:
                found[key].append(_count(gradient, tensor, self._edges))
        reached = gradients[: len(weights)]
        for weight, gradient in zip(weights, reached, strict=True):
            if gradient is None:
                self._unreached[weight.path] = None
        return {key: _added(parts) for key, parts in found.items()}

    def _watched(self, call: Callable[..., Any], path: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            outputs = call(*args, **kwargs)
            for one in keras.tree.flatten(outputs):
                if not isinstance(one, tf.Tensor) or not one.dtype.is_floating:
                    continue
                if getattr(one, "graph", None) is self._graph:
                    # The same tensor may be a container's output too, and an idle Dropout's: it is
                    # the innermost layer's, which comes first. Held, so that its id stays its own.
                    self._outputs.setdefault(id(one), (path, one))
                else:
                    self._unseen[path] = None
            return outputs

        return watched

    def notes(self) -> list[str]:
        """Returns what the counts leave out."""
        notes = []
        if self._unseen:
            notes.append(
                "not counted, for they lie within a loop or a tf.function: outputs of "
                f"{', '.join(self._unseen)}"
            )
        if self._unreached:
            notes.append(f"no gradient reaches {', '.join(self._unreached)}")
        return notes


def _if_taken(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    taken = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in taken}


def _count(gradient: Any, source: Any, edges: np.ndarray) -> tuple[Any, Any]:
    """Counts a gradient's entries in the bins, and finds its extremes as bit patterns."""
    absent = tf.constant(0, "int64")
    if isinstance(gradient, tf.IndexedSlices):
        # Rows that were looked up twice are added, as in the step; the others are exact zeros.
        rows, index = tf.unique(gradient.indices)
        gradient = tf.math.unsorted_segment_sum(gradient.values, index, tf.size(rows))
        absent = tf.size(source, out_type=tf.int64) - tf.size(gradient, out_type=tf.int64)
    bits = tf.bitcast(tf.cast(tf.reshape(gradient, [-1]), "float32"), "int32")
    bits = tf.bitwise.bitwise_and(bits, 0x7FFFFFFF)  # without the sign
    num_bins = len(edges) + 1
    found = tf.searchsorted(edges, bits, side="right")
    counts = tf.cast(tf.math.bincount(found, minlength=num_bins, maxlength=num_bins), "int64")
    counts += absent * tf.one_hot(0, num_bins, dtype="int64")
    finite = bits < INFINITY
    smallest = tf.reduce_min(tf.where(finite & (bits > 0), bits, INFINITY))
    largest = tf.reduce_max(tf.where(finite, bits, 0))
    return counts, tf.stack([smallest, largest])


def _added(parts: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    counts, extremes = (tf.stack(one) for one in zip(*parts, strict=True))
    smallest, largest = tf.unstack(extremes, axis=1)
    return tf.reduce_sum(counts, 0), tf.stack([tf.reduce_min(smallest), tf.reduce_max(largest)])


@contextlib.contextmanager
def left_as_it_was(model: keras.Model, layers: dict[keras.Layer, str]) -> Iterator[None]:
    """Puts back every attribute of a model's layers, and what a call collects in their lists."""
    held = [one for layer in layers for one in (layer._losses, layer._loss_ids)]
    parts: list[Any] = [*layers]
    if model._compile_loss is not None:  # it is built when it is first called
        parts.append(model._compile_loss)
        held.append(model._compile_loss.metrics)
    before = [(part, dict(vars(part))) for part in parts]
    collected = [(one, one.copy()) for one in held]
    try:
        yield
    finally:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)
        for one, content in collected:
            one.clear()
            (one.update if isinstance(one, set) else one.extend)(content)


@contextlib.contextmanager
def in_float32(model: keras.Model) -> Iterator[None]:
    """Lets all layers compute in float32, islands and followers; within `left_as_it_was`."""
    # Not by a switch: that gives the model another optimizer, and renews its compiled functions.
    layers = switchable_layers(model)
    proof = prepare_proof(model, layers)
    recorded = following_operations(model)
    try:
        for layer in layers:
            if layer.compute_dtype in HALF:
                layer._dtype_policy = keras.DTypePolicy("float32")
                refresh_frozen_state(layer)
        for operation in recorded:
            set_dtype(operation, "float32")
        check_switched(model, layers, (), "float32", proof)
        yield
    finally:
        for operation, dtype in recorded.items():
            set_dtype(operation, dtype)
