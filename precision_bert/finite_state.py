"""Tells whether a model's weights and its optimizer's state are finite."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from precision_bert.layer_policies import layer_paths
from precision_bert.loss_scaling import unwrapped, variable_value
from precision_bert.range_causes import RangeFinding


class FiniteState:
    """Watches a model's float variables, and its optimizer's.

    Args:
        model: A built and compiled model whose optimizer is built.

    A variable that is not trained and not finite at the start (a mask that a layer holds as a
    weight) is left out.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="head")])
    >>> model.compile("adam", "mse")
    >>> model.optimizer.build(model.trainable_variables)
    >>> state = FiniteState(model)
    >>> state.is_finite()
    True
    >>> _ = model.optimizer.variables[2].assign([[0.0], [float("nan")]])
    >>> state.is_finite(), state.broken()[0].cause, state.broken()[0].layer.split("/")[-1]
    (False, 'optimizer state', 'head')
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._weights = [
            v
            for v in model.variables
            if keras.backend.is_float_dtype(v.dtype) and (v.trainable or _is_finite(v))
        ]
        self._optimizer = [
            v for v in unwrapped(model.optimizer).variables if keras.backend.is_float_dtype(v.dtype)
        ]
        self._all_finite = tf.function(self._reduced, autograph=False)

    def fits(self, model: keras.Model) -> bool:
        """Tells whether these are the variables of `model` and its optimizer still."""
        own = unwrapped(model.optimizer).variables
        ids = {id(v) for v in own if keras.backend.is_float_dtype(v.dtype)}
        return model is self._model and ids == {id(v) for v in self._optimizer}

    def is_finite(self) -> bool:
        """Tells whether all of it is finite; the device sends one bit."""
        return bool(self._all_finite())

    def broken(self) -> list[RangeFinding]:
        """Returns a finding for each variable that is not finite, weights first."""
        owners: dict[int, str] = {}
        for layer, path in layer_paths(self._model).items():  # parents before their parts
            owners |= {id(v): path for v in layer.variables}
        found = [
            RangeFinding(
                "weights",
                layer=owners.get(id(variable), ""),
                tensor=variable.path,
                dtype=variable.dtype,
                seen="The weight holds NaN or infinity.",
            )
            for variable in self._weights
            if not _is_finite(variable)
        ]
        for variable in self._optimizer:
            if _is_finite(variable):
                continue
            # A moment has the name of its weight within its own.
            of = [v for v in self._model.variables if v.path.replace("/", "_") in variable.path]
            layer = owners[id(max(of, key=lambda v: len(v.path)))] if of else ""
            seen = "What the optimizer keeps for a weight holds NaN or infinity."
            found.append(
                RangeFinding("optimizer state", layer, variable.path, "", variable.dtype, seen)
            )
        return found

    def _reduced(self) -> tf.Tensor:
        variables = [tf.convert_to_tensor(v) for v in (*self._weights, *self._optimizer)]
        return tf.reduce_all([tf.reduce_all(tf.math.is_finite(v)) for v in variables])


def _is_finite(variable: keras.Variable) -> bool:
    return bool(np.isfinite(variable_value(variable).astype("float32")).all())
