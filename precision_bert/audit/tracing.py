"""Traces what a model does in a train or predict step, without doing it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

What = Literal["train", "predict"]

_UNKNOWN_BATCH = 2
"""The batch size to trace with where none is known.

Not None: then shapes get lost on the way, and the multiply work with them. Not 1: that broadcasts,
and the gradients of what broadcasts are others.
"""


@dataclass(frozen=True)
class Trace:
    """A traced function.

    Attributes:
        graph: Its `FuncGraph`.
        source: What was traced, in words.
        notes: What the reader must know about it.
    """

    graph: Any
    source: str
    notes: tuple[str, ...] = ()


def trace_step(
    model: keras.Model, what: What, data: Any = None, *, integer_inputs: bool = False
) -> Trace:
    """Traces a train or predict step of a model.

    Nothing is executed: no weight, metric, optimizer step or seed changes. What `fit` would build
    before its first step (optimizer slots, metrics) is built for a train step with data.

    Args:
        model: A built model; for a train step with data an unbuilt one will do.
        what: `"train"` or `"predict"`.
        data: As in `audit_precision`.
        integer_inputs: Whether inputs that the model tells only the shapes of are int32 rather than
            float32.

    Raises:
        TypeError: If the data is not such data.
        ValueError: If there is no data and the model does not tell what its inputs are.
    """
    is_real = what == "train" and data is not None and model.compiled
    if not model.built and not is_real:
        raise ValueError(
            f"Model {model.name!r} is not built, so its layers do not know what they compute yet. "
            "Call it on one batch first."
        )
    notes: tuple[str, ...] = ()
    if data is None:
        inputs, notes = _model_inputs(model, "int32" if integer_inputs else "float32")
        specs: tuple[Any, ...] = (inputs,)
    else:
        specs = data_specs(data)
    if is_real:
        notes += _build(model, specs)
        step, name = model.train_step, "train_step"
    elif what == "train":
        specs = specs[:1]
        step, name = _stand_in_step(model), "forward pass and gradients"
        notes += (
            "The loss is a stand-in, the mean of each output, and there is no optimizer: "
            f"{'' if model.compiled else 'compile the model and '}pass data=(x, y) for the real "
            "train step.",
        )
    else:
        specs = specs[:1]
        step, name = model.predict_step, "predict_step"
    return Trace(_trace(model, step, specs), f"{name} {_batch_size(specs)}", notes)


def traced_by_fit(model: keras.Model) -> Trace | None:
    """Returns the train step that `fit` has traced and will run again, or `None` if there is none.

    There is none before the first step, after a switch or a `compile`, and with `run_eagerly`.
    """
    # Keras keeps the traced function in the closure of its train function. Neither it nor the list
    # of what a tf.function has traced is public; where one is not there, there is nothing to read.
    train_function = getattr(model, "train_function", None)
    names = getattr(getattr(train_function, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(train_function, "__closure__", None) or (), strict=True))
    if "one_step_on_data" not in cells:
        return None
    one_step = getattr(cells["one_step_on_data"].cell_contents, "__wrapped__", None)
    if not isinstance(one_step, tf.types.experimental.PolymorphicFunction):
        return None
    traced = list(one_step._list_all_concrete_functions())
    return Trace(traced[-1].graph, "the train function that fit has traced") if traced else None


def data_specs(data: Any) -> tuple[Any, ...]:
    """Returns the specs of one batch as a train step is given it: `(x,)`, `(x, y)`, or weighted.

    Args:
        data: As in `audit_precision`. A data set is not read.

    Raises:
        TypeError: If a part of it has no shape and dtype.

    Example:

    >>> data_specs((np.zeros((8, 3)), np.zeros(8, "int32")))
    (TensorSpec(shape=(8, 3), dtype=tf.float32, name=None),
     TensorSpec(shape=(8,), dtype=tf.int32, name=None))
    """
    is_dataset = isinstance(data, tf.data.Dataset)
    structure = data.element_spec if is_dataset else data
    parts = structure if isinstance(structure, tuple) else (structure,)
    parts = tuple(part for part in parts if part is not None)
    if not 1 <= len(parts) <= 3:
        raise TypeError(
            "data must be x, (x, y) or (x, y, sample_weight). Received a tuple of "
            f"{len(parts)} parts."
        )
    return tf.nest.map_structure(_known_batch if is_dataset else _spec, parts)


def _spec(leaf: Any) -> tf.TypeSpec:
    if isinstance(leaf, tf.TypeSpec):
        return _known_batch(leaf)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise TypeError(
            "data must be one batch as fit takes it, x, (x, y) or (x, y, sample_weight), of arrays "
            f"or tensors, or a tf.data.Dataset. Received a {type(leaf).__name__}: {leaf!r}. Of a "
            "PyDataset or a generator, pass one batch."
        )
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    if isinstance(leaf, np.ndarray) and keras.backend.is_float_dtype(dtype):
        dtype = keras.config.floatx()  # as fit does with arrays
    return _known_batch(tf.TensorSpec(leaf.shape, dtype))


def _known_batch(spec: tf.TypeSpec) -> tf.TypeSpec:
    if isinstance(spec, tf.TensorSpec) and spec.shape.rank and spec.shape[0] is None:
        return tf.TensorSpec([_UNKNOWN_BATCH, *spec.shape[1:]], spec.dtype)
    return spec


def _model_inputs(model: keras.Model, dtype: str) -> tuple[Any, tuple[str, ...]]:
    inputs = getattr(model, "input", None)  # of a Functional model, structured as it was made
    if inputs is None:
        inputs = getattr(model, "inputs", None)  # of a Sequential one
        inputs = inputs[0] if inputs else None
    if inputs is not None:
        return tf.nest.map_structure(_spec, inputs), ()
    shapes = (model.get_build_config() or {}).get("input_shape")
    if shapes is None:
        raise ValueError(
            f"Model {model.name!r} does not tell what its inputs are. Pass one batch of them: "
            "data=x, data=(x, y), or a tf.data.Dataset."
        )
    specs = keras.tree.map_shape_structure(
        lambda shape: _known_batch(tf.TensorSpec(shape, dtype)), shapes
    )
    note = f"The inputs are taken to be {dtype}, of the shapes that the model was built with."
    return specs, (note,)


def _batch_size(specs: tuple[Any, ...]) -> str:
    shapes = [spec.shape for spec in tf.nest.flatten(specs) if getattr(spec, "shape", None)]
    return f"for a batch of {shapes[0][0]}" if shapes else "for a batch of unknown size"


def _build(model: keras.Model, specs: tuple[Any, ...]) -> tuple[str, ...]:
    parts = (model, model.optimizer, model._compile_metrics, model._compile_loss)
    if all(part is None or part.built for part in parts):
        return ()
    # What fit does before its first step. Left to the trace, variables would be made within it.
    with model.distribute_strategy.scope():
        model._symbolic_build(data_batch=specs)
    return (
        "Optimizer, metrics or layers were not built yet: they are now, as by the start of fit.",
    )


def _stand_in_step(model: keras.Model) -> Any:
    takes_training = "training" in inspect.signature(model.call).parameters

    def step(data: tuple[Any]) -> list[Any]:
        with tf.GradientTape() as tape:
            outputs = model(data[0], training=True) if takes_training else model(data[0])
            # In float32, as Keras' losses compute.
            means = [
                tf.reduce_mean(tf.cast(output, "float32"))
                for output in tf.nest.flatten(outputs)
                if output.dtype.is_floating
            ]
            loss = tf.add_n([*means, *(tf.cast(loss, "float32") for loss in model.losses)])
        return tape.gradient(loss, model.trainable_weights)

    return step


def _trace(model: keras.Model, step: Any, specs: tuple[Any, ...]) -> Any:
    # As in fit: not converted by AutoGraph, and run on each replica of a distribution strategy.
    @tf.autograph.experimental.do_not_convert
    def replicated(data: tuple[Any, ...]) -> Any:
        return model.distribute_strategy.run(step, args=(data,))

    with _state_kept(model):
        return tf.function(replicated).get_concrete_function(specs).graph


@contextlib.contextmanager
def _state_kept(model: keras.Model) -> Iterator[None]:
    # A call puts the losses that layers add in these lists, and some layers keep what they computed
    # last. Tensors of a trace left behind there could not be read.
    before = [
        (layer, [*layer._losses], {*layer._loss_ids}, dict(vars(layer)))
        for layer in model._flatten_layers()
    ]
    try:
        yield
    finally:
        for layer, losses, ids, attributes in before:
            layer._losses[:] = losses
            layer._loss_ids.clear()
            layer._loss_ids.update(ids)
            for name, value in list(vars(layer).items()):
                parts = value if isinstance(value, (list, tuple)) else [value]
                if not any(map(tf.is_symbolic_tensor, parts)):
                    continue
                if name in attributes:
                    vars(layer)[name] = attributes[name]
                else:
                    del vars(layer)[name]
