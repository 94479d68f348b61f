"""The callback that enters the stages of a staged training."""

from __future__ import annotations

from typing import Any

import keras

from precision_bert.compiled_functions import renew_functions
from precision_bert.learning_rate import applied_steps, set_learning_rate
from precision_bert.policies import PolicyName, higher_precision
from precision_bert.schedules import PrecisionSchedule
from precision_bert.switching import switch_precision


class StageEntrance(keras.callbacks.Callback):
    """Enters each stage at its first epoch: policy, learning rate, Keras' global policy.

    `staged_fit` uses it and restores the global policy afterwards.

    Args:
        schedule: The schedule that is trained.
        verbose: Whether each entrance prints a line.

    Attributes:
        start_steps: By the index of each stage that was entered, the optimizer's applied steps at
            its start.
        escalated_to: The precision that a stalled stage was escalated to; no later stage falls
            below it.
    """

    def __init__(self, schedule: PrecisionSchedule, *, verbose: bool) -> None:
        super().__init__()
        self._schedule = schedule
        self._verbose = verbose
        self.start_steps: dict[int, int] = {}
        self.escalated_to: PolicyName | None = None

    def escalate(self, policy: PolicyName) -> None:
        """Lets no later stage fall below a precision: the one below it has stalled."""
        self.escalated_to = policy
        keras.config.set_dtype_policy(policy)

    def enter(self, model: keras.Model, epoch: int) -> None:
        """Puts `model` into the stage that `epoch` belongs to, if it is not in it yet.

        Called before `fit` too, so that nothing is traced in a precision that is not used.
        """
        index = self._schedule.index_at(epoch)
        if index in self.start_steps:
            return
        self.start_steps[index] = applied_steps(model.optimizer)
        self._apply(model, index)
        if self._verbose:
            print(f"Stage {index} from epoch {epoch + 1}/{self._schedule.epochs}: {self._report}")
            wanted = self._schedule.stages[index].policy
            if self._report.policy != wanted:
                print(f"(planned in {wanted}: a stage before has stalled in it, or above)")

    def enter_again(self, model: keras.Model, start_steps: dict[int, int]) -> None:
        """Puts `model` where a training was that had entered these stages, in their order."""
        for index in sorted(start_steps):
            self.start_steps[index] = start_steps[index]
            self._apply(model, index)

    def _apply(self, model: keras.Model, index: int) -> None:
        stage = self._schedule.stages[index]
        policy = higher_precision(stage.policy, self.escalated_to or stage.policy)
        # The switch first: it tells layers without a dtype of their own by the global policy.
        self._report = switch_precision(model, policy)
        keras.config.set_dtype_policy(policy)
        if stage.learning_rate is not None and set_learning_rate(
            model.optimizer, stage.learning_rate, self.start_steps[index]
        ):
            renew_functions(model)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Enters the epoch's stage inside a running `fit`."""
        self.enter(self.model, epoch)
