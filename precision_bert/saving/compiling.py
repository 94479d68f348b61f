"""Compiles a model as another one was compiled, its optimizer's settings and state included."""

from __future__ import annotations

import copy
import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from precision_bert.loss_scaling import (
    has_older_layout,
    scales_loss,
    unwrapped,
)
from precision_bert.saving.model_facts import ModelFacts, assign
from precision_bert.saving.parked_loss_scale import park_loss_scale_factor, restore_parked
from precision_bert.switching import set_optimizer


@dataclass(frozen=True)
class OptimizerState:
    """The values of an optimizer's variables.

    Attributes:
        values: In Keras' order.
        is_scaled: Whether those of a loss scale come first.
    """

    values: list[np.ndarray]
    is_scaled: bool


def restore_training(
    model: keras.Model,
    compile_config: dict[str, Any],
    facts: ModelFacts | None,
    state: OptimizerState,
    *,
    origin: str,
    safe_mode: bool,
) -> bool:
    """Compiles a model as another one was, with the optimizer's settings and state.

    Args:
        model: The model, with the other one's layers and weights.
        compile_config: What the other one's `get_compile_config` said.
        facts: What is known of the other one besides; `None` if nothing is.
        state: Its optimizer's variables.
        origin: What it came from, for warnings.
        safe_mode: `False` allows lambdas, as in `keras.saving.load_model`.

    Returns:
        Whether the optimizer is all there. It is not where the model's class has optimizers of its
        own, which were made and must be given their state.
    """

    def revive(config: Any) -> Any:
        # A copy, because some optimizers' from_config takes it apart.
        return keras.saving.deserialize_keras_object(copy.deepcopy(config), safe_mode=safe_mode)

    optimizer = revive(facts.optimizer if facts else compile_config.get("optimizer"))
    factor = optimizer and unwrapped(optimizer).loss_scale_factor
    if type(model).compile_from_config is not keras.Model.compile_from_config:
        model.compile_from_config(copy.deepcopy(compile_config))
    else:
        # Keras leaves out models that override compile, which all tasks of keras-nlp do.
        arguments = revive({**compile_config, "optimizer": None}) | {"optimizer": optimizer}
        try:
            inspect.signature(model.compile).bind(**arguments)
        except TypeError as mismatch:
            warnings.warn(
                f"The model is not compiled, because the compile method of its class "
                f"{type(model).__name__} takes arguments that Keras does not save ({mismatch}). "
                "Compile it, or give the class get_compile_config and compile_from_config.",
                stacklevel=3,
            )
            return True
        model.compile(**arguments)
    if optimizer is None:
        return False

    inner = unwrapped(optimizer)
    values, scaled = state.values, state.is_scaled
    if facts is not None:
        if facts.undecayed:
            inner.exclude_from_weight_decay(var_list=[model.weights[i] for i in facts.undecayed])
        if facts.loss_scale_factor is not None:
            park_loss_scale_factor(inner, facts.loss_scale_factor)
        if facts.parked is not None:
            restore_parked(inner, revive(facts.parked["optimizer"]), facts.parked["values"])
        trained = facts.trained and [model.weights[i] for i in facts.trained]
    else:
        if scaled and not scales_loss(optimizer):
            # compile put it around what it was given, and Keras saved its state but not its class.
            optimizer = keras.optimizers.LossScaleOptimizer(inner, name="loss_scale_optimizer")
        has_trained = len(values) != len(optimizer.variables)
        trained = model.trainable_variables if has_trained else None
    set_optimizer(model, optimizer)
    if not scales_loss(optimizer):
        inner.loss_scale_factor = factor  # a loss scale that compile put around it has taken it
    if trained:
        optimizer.build(trained)
    if len(values) == len(optimizer.variables):
        assign(optimizer.variables, values)
    elif has_older_layout(optimizer, values):
        optimizer.set_weights(values)
    else:
        warnings.warn(
            f"{origin} holds {len(values)} variables of the optimizer {optimizer.name!r}, which "
            f"has {len(optimizer.variables)} for what is trainable in the model: it starts anew. "
            "Save with save_model what was frozen since it was compiled.",
            stacklevel=3,
        )
    return True


def uncompile(model: keras.Model) -> None:
    """Makes a model one that was not compiled."""
    # keras-nlp's tasks compile themselves when they are made. What compile sets, as it was before.
    model.compiled = False
    for name in ("optimizer", "loss", "_compile_loss", "_compile_metrics", "_loss_tracker"):
        setattr(model, name, None)
