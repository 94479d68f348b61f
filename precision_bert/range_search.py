"""Finds the first tensor of a training step that is not finite: its layer, and why."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from precision_bert.audit.layer_scopes import LayerScopes, is_gradient
from precision_bert.audit.tracing import trace_step
from precision_bert.layer_policies import check_keras_model, layer_paths
from precision_bert.loss_scaling import current_loss_scale
from precision_bert.range_causes import Origin, RangeFinding, judge

# Operations that move or convert numbers: what comes out of them is what went in.
_MOVES = {
    *("Cast", "Identity", "IdentityN", "Reshape", "ExpandDims", "Squeeze", "Transpose", "Slice"),
    *("StridedSlice", "GatherV2", "BroadcastTo", "Tile", "StopGradient"),
}
_READS = ("ReadVariableOp", "ResourceGather")
_CONCISE_HEALTH = 3  # TensorFlow's number for the mode of its numeric summaries


@dataclass
class _Traced:
    """What the trace of the probed step told."""

    graph: Any
    tensors: list[Any]
    loss: Any
    gradients: list[Any]
    data: dict[str, str]  # by the names of the tensors that the data came in
    scopes: LayerScopes


class RangeSearch:
    """Searches training steps of a model for the first tensor that is not finite.

    The forward pass, the loss and the gradients are traced as `fit` traces them, under the model's
    present policies, and each tensor is watched; so the culprit is an operation, not a layer's
    output only. Infinity that goes nowhere (a masked score before a softmax, a cube in a saturated
    tanh) is no finding: the search goes back from a loss or a gradient that is not finite.

    Nothing of the model changes: weights, metrics, optimizer, seeds, policies and compiled
    functions are what they were. To watch each tensor takes a trace of its own, seconds for a large
    model; batches of the same shapes share it. After a switch a new search is needed.

    Args:
        model: A compiled and built Keras model. A custom `train_step` is not run: its `call` and
            its `compute_loss` are.

    Raises:
        TypeError: If it is no Keras model.
        ValueError: If it is not compiled.

    See `search_range` for one batch.
    """

    def __init__(self, model: keras.Model) -> None:
        check_keras_model(model)
        if not model.compiled:
            raise ValueError(
                f"Model {model.name!r} is not compiled, so it has no loss to take gradients of. "
                "Compile it first."
            )
        self._model = model
        self._paths = layer_paths(model)
        self._traced: dict[Any, _Traced] = {}  # by the graph of a batch's shapes
        self._probe = tf.function(self._probed_step, autograph=False)
        self._look = tf.function(self._values_in_step, autograph=False)

    def __call__(self, batch: Any) -> RangeFinding:
        """Returns the finding for a batch, as `fit` takes it: `x`, `(x, y)` or weighted."""
        data = _as_tensors(batch)
        if not self._model.optimizer.built:
            # What fit does before its first step. Left to the probe, variables would be made in it.
            trace_step(self._model, "train", data)
        finding = self._search(data, 1.0)
        scale = current_loss_scale(self._model.optimizer)
        if finding.cause == "none" and scale is not None and scale != 1.0:
            scaled = self._search(data, scale)
            if scaled.cause != "none":
                seen = f"All is finite at loss scale 1, and not at the present one, {scale:.0f}."
                return replace(scaled, cause="loss scale", seen=seen)
        return finding

    def _search(self, data: tuple[Any, ...], scale: float) -> RangeFinding:
        arguments = (data, tf.constant(scale))
        summaries, loss = (part.numpy() for part in self._probe(*arguments))
        traced = self._traced[self._probe.get_concrete_function(*arguments).graph]
        # A summary is: an id, the number of elements, of -infinity, of infinity, of NaN.
        order = {tensor.name: i for i, tensor in enumerate(traced.tensors)}
        bad = {name for name, i in order.items() if summaries[i, 2:].any()}
        # The loss first: where it is not finite, nor is any gradient, whatever the layers do.
        ends = [traced.loss] if traced.loss.name in bad else traced.gradients
        origins = _origins([end for end in ends if end.name in bad], bad)
        if not origins:
            return RangeFinding("none", seen="Loss and gradients are finite.", loss=float(loss))
        first = min(origins, key=lambda tensor: order[tensor.name])
        inputs = [tensor for tensor in first.op.inputs if tensor.dtype.is_floating]
        watched = tuple(tensor.name for tensor in (first, *inputs))
        made, *given = [value.numpy() for value in self._look(*arguments, watched)]
        return judge(self._origin(traced, first, made, given), float(loss))

    def _step(self, data: tuple[Any, ...], scale: Any) -> tuple[Any, list[Any]]:
        """Computes the unscaled loss and the scaled gradients, as Keras' train step does."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        model = self._model
        takes_training = "training" in inspect.signature(model.call).parameters
        # What layers assign (seeds, statistics) and what they add to the losses goes to the scope.
        with keras.StatelessScope(collect_losses=True), tf.GradientTape() as tape:
            outputs = model(x, training=True) if takes_training else model(x)
            loss = model.compute_loss(
                x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=True
            )
            scaled = tf.cast(loss, "float32") * scale
        found = tape.gradient(scaled, [v.value for v in model.trainable_variables])
        gradients = [g.values if isinstance(g, tf.IndexedSlices) else g for g in found]
        return tf.convert_to_tensor(loss), [g for g in gradients if g is not None]

    def _probed_step(self, data: tuple[Any, ...], scale: Any) -> tuple[Any, Any]:
        loss, gradients = self._step(data, scale)
        graph = loss.graph
        operations = graph.get_operations()
        tensors = [t for one in operations for t in one.outputs if t.dtype.is_floating]
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        parts = {"x": x, "y": y, "sample_weight": sample_weight}
        names = {
            leaf.name: "".join([str(path[0]), *(f"[{key!r}]" for key in path[1:])])
            for path, leaf in keras.tree.flatten_with_path(parts)
            if leaf is not None
        }
        scopes = LayerScopes(self._model, {(one.name,) for one in operations})
        self._traced[graph] = _Traced(graph, tensors, loss, gradients, names, scopes)
        # One operation a tensor: with more, tracing and optimizing them takes minutes.
        summaries = [
            tf.raw_ops.DebugNumericSummaryV2(
                input=tensor, output_dtype=tf.float32, tensor_debug_mode=_CONCISE_HEALTH
            )
            for tensor in tensors
        ]
        return tf.stack(summaries), tf.cast(loss, "float32")

    def _values_in_step(self, data: tuple[Any, ...], scale: Any, names: tuple[str, ...]) -> Any:
        loss, _ = self._step(data, scale)
        # Traced alike, the operations have the names that they had in the probed step.
        return [tf.cast(loss.graph.get_tensor_by_name(name), "float32") for name in names]

    def _origin(self, traced: _Traced, first: Any, made: Any, given: list[Any]) -> Origin:
        layer = traced.scopes.find((first.op.name,))
        source, source_kind = self._source(traced, first.op)
        # What divides has its pole where the divisor, its last input, is 0.
        divisors = given[-1:] if first.op.type in ("RealDiv", "Div", "Xdivy") else given
        is_nan = np.isnan(made).any()
        return Origin(
            layer=layer if isinstance(layer, str) else self._paths[layer],
            name=first.op.name,
            type=first.op.type,
            dtype=first.dtype.name,
            is_gradient=is_gradient((first.op.name,)),
            source=source,
            source_kind=source_kind,
            largest=float(max((np.abs(one).max(initial=0.0) for one in given), default=0.0)),
            smallest=float(min((np.abs(o).min(initial=np.inf) for o in divisors), default=np.inf)),
            makes_nan=bool(is_nan),
            only_negative=not is_nan and not (made == np.inf).any(),
            epsilon=getattr(layer, "epsilon", None),
        )

    def _source(self, traced: _Traced, operation: Any) -> tuple[str, str]:
        """Returns where the numbers come from that an operation reads, moves or converts."""
        while operation.type in _MOVES:
            operation = operation.inputs[0].op
        if operation.type in _READS:
            handles = {str(internal.name): external for external, internal in traced.graph.captures}
            handle = handles.get(operation.inputs[0].name)
            for variable in self._model.variables:
                if handle is not None and getattr(variable.value, "handle", None) is handle:
                    return variable.path, "variable"
            return "a variable", "variable"
        name = operation.outputs[0].name if operation.outputs else ""
        if name in traced.data:
            return traced.data[name], "data"
        # Besides the data, what comes in from outside the step are arrays that layers hold.
        return ("", "constant") if operation.type in ("Const", "Placeholder") else ("", "")


def search_range(model: keras.Model, batch: Any) -> RangeFinding:
    """Finds the first tensor of a model's training step on a batch that is not finite, and why.

    Use it where a training stalls or turns to NaN. See `RangeSearch` for what is looked at.

    Args:
        model: A compiled Keras model.
        batch: One batch as `fit` takes it: `x`, `(x, y)` or `(x, y, sample_weight)`, arrays or
            tensors.

    Returns:
        A `RangeFinding`; print it.

    Raises:
        TypeError: If it is no Keras model, or no such batch.
        ValueError: If it is not compiled, or not built where that takes more than a batch.

    Example:

    >>> hidden = keras.layers.Dense(3, keras.ops.gelu, name="hidden")  # tanh
    >>> head = keras.layers.Dense(1, kernel_initializer="zeros")
    >>> model = keras.Sequential([keras.Input((2,)), hidden, head], name="net")
    >>> model.compile("sgd", "mse")
    >>> from precision_bert.switching import switch_precision
    >>> _ = switch_precision(model, "mixed_float16")
    >>> batch = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    >>> search_range(model, batch).is_healthy
    True
    >>> _ = hidden.bias.assign([300.0, 0.0, 0.0])
    >>> finding = search_range(model, batch)
    >>> finding.cause, finding.layer, finding.direction
    ('GELU gradient', 'net/hidden', 'backward')
    """
    return RangeSearch(model)(batch)


def _origins(ends: list[Any], bad: set[str]) -> list[Any]:
    """Returns the tensors behind `ends` that are not finite although all they are made of is."""
    found, seen, left = [], set(), list(ends)
    while left:
        tensor = left.pop()
        if tensor.name in seen:
            continue
        seen.add(tensor.name)
        behind = [one for one in tensor.op.inputs if one.name in bad]
        left += behind
        if not behind:
            found.append(tensor)
    return found


def _as_tensors(batch: Any) -> tuple[Any, ...]:
    def as_tensor(leaf: Any) -> Any:
        array = leaf if tf.is_tensor(leaf) else np.asarray(leaf)
        if isinstance(array, np.ndarray) and array.dtype == np.float64:
            array = array.astype(keras.config.floatx())  # as fit does with arrays
        return tf.convert_to_tensor(array)

    data = batch if isinstance(batch, tuple) else (batch,)
    return tuple(keras.tree.map_structure(as_tensor, part) for part in data if part is not None)
