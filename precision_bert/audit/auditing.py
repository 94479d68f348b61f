"""The proof of what a live model computes in: `audit_precision` traces it and counts."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import keras

from precision_bert.audit.layer_scopes import LayerScopes, is_gradient
from precision_bert.audit.record import (
    MULTIPLIES,
    Kind,
    LayerPrecision,
    OperationCount,
    PrecisionAudit,
)
from precision_bert.audit.traced_graph import TracedOperation, traced_operations
from precision_bert.audit.tracing import Trace, What, trace_step, traced_by_fit
from precision_bert.islands import find_islands
from precision_bert.layer_policies import (
    check_keras_model,
    is_container,
    layer_paths,
    switchable_layers,
)
from precision_bert.policies import HALF

_SOFTMAX = ("Softmax", "LogSoftmax")


def audit_precision(
    model: keras.Model, what: What = "train", *, data: Any = None
) -> PrecisionAudit:
    """Reports in which dtype each layer of a model really computes.

    Policies say what layers should compute in. This traces a step of the model and counts the
    operations of the traced function, so that a cast hidden in a layer, a loss that leaves float32
    or a layer that ignores its policy shows. Nothing is executed: weights, metrics, optimizer and
    seeds stay as they are, and so do the model's own compiled functions.

    Args:
        model: A built Keras model, compiled or not; with `data` and compiled, not yet built ones
            are built as `fit` would.
        what: `"train"`: forward pass, loss, gradients and optimizer; `"predict"`: `predict_step`.
        data: One batch as `fit` takes it, `x`, `(x, y)` or `(x, y, sample_weight)`, of arrays or
            tensors (a list is an `x` of several inputs), or a `tf.data.Dataset`, which is not read.
            With it the `train_step` of a compiled model is traced, also a custom one. Without it
            the step that `fit` has traced is read, if it has; otherwise the forward pass is traced
            for the model's inputs and for `"train"` the gradients of a stand-in loss.

    Returns:
        A `PrecisionAudit`; print it for a table, or use its `require` as an assertion.

    Raises:
        TypeError: If `model` is no Keras model, or the data is of a wrong kind.
        ValueError: If `what` is unknown, the model is not built, or its inputs are unknown.

    Example:

    >>> hidden = keras.layers.Dense(8, name="hidden")
    >>> head = keras.layers.Dense(3, "softmax", name="head")
    >>> model = keras.Sequential([keras.Input((4,)), hidden, head], name="net")
    >>> from precision_bert.switching import switch_precision
    >>> _ = switch_precision(model, "mixed_float16")
    >>> audit = audit_precision(model, "predict")
    >>> print(audit)
    net, predict: predict_step for a batch of 2
    layer       type        policy   multiplies        other      casts to half
    net         Sequential  float16  -                 -          1 float16
    net/hidden  Dense       float16  1 matmul float16  1 float16  2 float16
    net/head    Dense       float16  1 matmul float16  2 float16  2 float16
    in half precision: 100.0% of the multiply-adds
    - softmax in float16 in net/head; to keep it in float32: switch_precision(model, policy,
      keep_float32=['net/head'])
    >>> audit.require("mixed_float16")
    >>> audit.require("float32")
    Traceback (most recent call last):
    ...
    precision_bert.audit.record.PrecisionAuditError: ...

    Operations are counted as they were traced. What XLA or TensorFlow's own rewriting makes of them
    is not seen, nor is what runs outside the graph (`tf.py_function`).
    """
    check_keras_model(model)
    if what not in ("train", "predict"):
        raise ValueError(f"what must be 'train' or 'predict'. Received: what={what!r}.")
    if what == "train" and data is None:
        audit = audit_train_function(model)
        if audit is not None:
            return audit
    return _audit(model, what, trace_step(model, what, data))


def audit_step(model: keras.Model, what: What, *, integer_inputs: bool = False) -> PrecisionAudit:
    """Audits a step that is always traced anew, without data; see `audit_precision`.

    Args:
        model: A built Keras model.
        what: As in `audit_precision`.
        integer_inputs: Whether inputs that the model tells only the shapes of are int32 rather than
            float32.

    Raises:
        ValueError: If the model is not built, or its inputs are unknown.
    """
    return _audit(model, what, trace_step(model, what, integer_inputs=integer_inputs))


def audit_train_function(model: keras.Model) -> PrecisionAudit | None:
    """Reports what the train function computes in that `fit` has traced and will run again.

    It costs no trace, only the reading of a graph. The batch size is often unknown there, so that
    shares are by the number of operations.

    Args:
        model: Any Keras model, within a running `fit` or after one.

    Returns:
        A `PrecisionAudit`, or `None` where there is no such function: before the first step, after
        a switch or a `compile`, with `run_eagerly`, and with a custom `make_train_function`.

    Example:

    >>> import numpy as np
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> audit_train_function(model) is None
    True
    >>> _ = model.fit(np.ones((2, 4)), np.ones((2, 1)), verbose=0)
    >>> audit_train_function(model).dtypes("matmul")
    {'float32': 2}
    """
    trace = traced_by_fit(model)
    return None if trace is None else _audit(model, "train", trace)


def _audit(model: keras.Model, what: What, trace: Trace) -> PrecisionAudit:
    operations = list(traced_operations(trace.graph))
    scopes = LayerScopes(model, {operation.names for operation in operations})
    by_row: dict[keras.Layer | str, list[TracedOperation]] = defaultdict(list)
    for operation in operations:
        if operation.kind is not None:
            by_row[scopes.find(operation.names)].append(operation)

    paths = layer_paths(model)
    layers = switchable_layers(model)
    islands = find_islands(layers)
    rows = {row: _count(found) for row, found in by_row.items()}
    for layer in layers:
        rows.setdefault(layer, ())
    records = tuple(
        LayerPrecision(row, "", "", False, counts)
        if isinstance(row, str)
        else LayerPrecision(
            paths[row], type(row).__name__, row.compute_dtype, row in islands, counts
        )
        for row, counts in rows.items()
    )
    counted = sum(len(found) for found in by_row.values())
    return PrecisionAudit(
        model.name,
        what,
        trace.source,
        records,
        len(operations) - counted,
        (*trace.notes, *_notes(rows, paths, islands)),
    )


def _count(operations: list[TracedOperation]) -> tuple[OperationCount, ...]:
    groups: dict[tuple[str, Kind, str, bool], list[TracedOperation]] = defaultdict(list)
    for one in operations:
        if one.kind is not None and one.dtype is not None:
            groups[one.type, one.kind, one.dtype, is_gradient(one.names)].append(one)
    return tuple(
        OperationCount(
            type=type_,
            kind=kind,
            dtype=dtype,
            is_gradient=gradient,
            count=len(found),
            multiply_adds=_total_work(found) if kind in MULTIPLIES else None,
            example="/".join(found[0].names),
        )
        for (type_, kind, dtype, gradient), found in groups.items()
    )


def _total_work(operations: list[TracedOperation]) -> int | None:
    work = [one.multiply_adds for one in operations]
    return None if None in work else sum(filter(None, work))


def _notes(
    rows: dict[keras.Layer | str, tuple[OperationCount, ...]],
    paths: dict[keras.Layer, str],
    islands: set[keras.Layer],
) -> list[str]:
    layers = {row: counts for row, counts in rows.items() if isinstance(row, keras.Layer)}
    notes = []
    softmax: dict[str, list[keras.Layer]] = defaultdict(list)
    above: dict[str, list[keras.Layer]] = defaultdict(list)
    for layer, counts in layers.items():
        for dtype in {one.dtype for one in counts if one.type in _SOFTMAX and one.dtype in HALF}:
            softmax[dtype].append(layer)
        dtypes = {one.dtype for one in counts if one.kind != "cast"}
        if layer.compute_dtype in HALF and "float32" in dtypes and not is_container(layer):
            above[type(layer).__name__].append(layer)
    for dtype, found in softmax.items():
        if all(isinstance(layer, keras.layers.Softmax) for layer in found):
            wanted = "keras.layers.Softmax"
        else:
            wanted = repr(paths[found[0]])
        notes.append(
            f"softmax in {dtype} in {_listed(found, paths)}; to keep it in float32: "
            f"switch_precision(model, policy, keep_float32=[{wanted}])"
        )
    for name, found in above.items():
        notes.append(
            f"{name} computes in float32 although its policy is half precision: "
            f"{_listed(found, paths)}"
        )
    computing = [paths[layer] for layer, counts in layers.items() if counts and layer in islands]
    if computing:
        notes.append(f"float32 islands: {', '.join(computing)}")
    return notes


def _listed(layers: list[keras.Layer], paths: dict[keras.Layer, str]) -> str:
    more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
    return paths[layers[0]] + more
