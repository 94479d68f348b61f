"""Gives a live optimizer another learning rate, counted from the step at which it takes over."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from precision_bert.loss_scaling import unwrapped, variable_value


@keras.saving.register_keras_serializable(package="precision_bert")
class StageSchedule(keras.optimizers.schedules.LearningRateSchedule):
    r"""A learning rate that counts its steps from the first step of a stage.

    With $r$ the `learning_rate` and $s_0$ the `start_step`, step $s$ of the optimizer runs at
    $r(s - s_0)$, or at $r$ if it is a constant. Steps are applied steps: a step that loss scaling
    skips is not counted, so a schedule is neither shortened nor shifted by it.

    Args:
        learning_rate: A float or a `LearningRateSchedule`.
        start_step: The optimizer's applied steps when the stage begins.

    Example:

    >>> schedule = StageSchedule(keras.optimizers.schedules.CosineDecay(1e-3, 100), start_step=50)
    >>> float(schedule(50)) == float(keras.optimizers.schedules.CosineDecay(1e-3, 100)(0))
    True
    """

    def __init__(self, learning_rate: Any, start_step: int) -> None:
        if isinstance(learning_rate, dict):
            learning_rate = keras.saving.deserialize_keras_object(learning_rate)
        self.learning_rate = learning_rate
        self.start_step = start_step

    def __call__(self, step: Any) -> Any:
        """Returns the learning rate at `step`, a scalar float32 tensor."""
        if not callable(self.learning_rate):
            return ops.convert_to_tensor(self.learning_rate, dtype="float32")
        return self.learning_rate(ops.subtract(step, self.start_step))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that rebuild this schedule."""
        rate = self.learning_rate
        if callable(rate):
            rate = keras.saving.serialize_keras_object(rate)
        return {"learning_rate": rate, "start_step": self.start_step}


def set_learning_rate(
    optimizer: keras.optimizers.Optimizer, learning_rate: Any, start_step: int | None = None
) -> bool:
    """Gives `optimizer` a new learning rate from its next step on.

    Args:
        optimizer: Any Keras optimizer, with a loss scale or without.
        learning_rate: A float, or a `LearningRateSchedule` that counts from `start_step`.
        start_step: In applied steps of the optimizer; `None` is now.

    Returns:
        Whether compiled train functions must be renewed: a schedule is part of the traced graph, a
        number is a variable that the graph reads.
    """
    inner = unwrapped(optimizer)
    if not callable(learning_rate):
        try:
            inner.learning_rate = float(learning_rate)
            return False
        except TypeError:
            # It has a schedule, which Keras lets no number replace: a constant schedule it is.
            pass
    if start_step is None:
        start_step = applied_steps(optimizer)
    inner.learning_rate = StageSchedule(learning_rate, start_step)
    return True


def applied_steps(optimizer: keras.optimizers.Optimizer) -> int:
    """Returns how many updates `optimizer` has applied: what a learning-rate schedule counts in.

    Args:
        optimizer: Any Keras optimizer, with a loss scale or without.
    """
    return int(variable_value(unwrapped(optimizer).iterations))
