"""Ties a staged training to its checkpoints: begins it anew or where it was, and saves it."""

from __future__ import annotations

import json
import os
from typing import Any

import keras

from precision_bert.callbacks.stage_entrance import StageEntrance
from precision_bert.callbacks.stage_recorder import StageRecorder
from precision_bert.callbacks.state_saver import StateSaver
from precision_bert.schedules import PrecisionSchedule, Stage
from precision_bert.training_state import (
    CheckpointFolder,
    TrainingState,
    check_plan,
    describe,
    restore,
)


def completed_epochs(checkpoint_dir: str | os.PathLike[str]) -> int:
    """Returns how many epochs a training in `checkpoint_dir` has saved: where it would go on.

    Use it to begin data that has an order of its own at that epoch, as with
    `encode_batches(..., first_epoch=completed_epochs(folder))`.

    Args:
        checkpoint_dir: What was given to `staged_fit`; it need not exist.

    Example:

    >>> completed_epochs("no/such/folder")
    0
    """
    state = CheckpointFolder(checkpoint_dir).latest()
    return 0 if state is None else state.epoch


def check_checkpoint_dir(checkpoint_dir: str | os.PathLike[str], *, resume: bool) -> None:
    """Refuses a folder that holds a training, unless it is to be resumed.

    Raises:
        ValueError: With what to do.
    """
    if not resume and CheckpointFolder(checkpoint_dir).files():
        raise ValueError(
            f"checkpoint_dir={os.fspath(checkpoint_dir)} holds the checkpoints of a training. "
            "Give resume=True to go on with it, or another folder."
        )


class TrainingCheckpoints:
    """The checkpoints of one call of `staged_fit`.

    Args:
        model: The model, compiled.
        schedule: Its schedule.
        entrance: The callback that enters the stages.
        recorder: The callback that measures them.
        checkpoint_dir: The folder.

    Attributes:
        epochs_done: How many epochs were done before; 0 for a new training.
        stopped: Whether a callback had stopped the training for good.
    """

    def __init__(
        self,
        model: keras.Model,
        schedule: PrecisionSchedule,
        entrance: StageEntrance,
        recorder: StageRecorder,
        checkpoint_dir: str | os.PathLike[str],
    ) -> None:
        self._model = model
        self._stages = [_line(stage) for stage in schedule.stages]
        self._entrance = entrance
        self._recorder = recorder
        self._folder = CheckpointFolder(checkpoint_dir)
        self.epochs_done = 0
        self.stopped = False

    def begin(self) -> dict[str, list[Any]]:
        """Restores the newest checkpoint, if there is one.

        Returns:
            The history of the epochs that were done, by the name of a logged value.

        Raises:
            ValueError: If the checkpoints belong to another training.
        """
        state = self._folder.latest()
        return {} if state is None else self._restore(state)

    def saver(self, history: dict[str, list[Any]]) -> StateSaver:
        """Returns the callback that saves each epoch, for a training with this history so far."""
        copied = {name: list(values) for name, values in history.items()}
        return StateSaver(self._folder, self._plan, self._progress, copied)

    def _restore(self, state: TrainingState) -> dict[str, list[Any]]:
        model, progress = self._model, state.progress
        if not model.built:
            raise ValueError(
                "A model must be built before its training is resumed: call it on one batch, or "
                "give it an input shape."
            )
        # Before anything is touched; what the optimizer holds can only be compared once it is as
        # the stages made it.
        check_plan(state.plan, {"stages": self._stages}, self._folder.folder)
        if progress.get("escalated_to") is not None:  # not in files of earlier versions
            self._entrance.escalate(progress["escalated_to"])
            self._recorder.escalate(progress["escalated_to"])
        self._entrance.enter_again(
            model, {int(index): step for index, step in progress["start_steps"].items()}
        )
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
        check_plan(state.plan, self._plan(), self._folder.folder)
        restore(model, state.arrays)
        self._recorder.set_model(model)
        self._recorder.go_on(progress["records"])
        self.epochs_done = state.epoch
        self.stopped = progress["stopped"]
        return progress["history"]

    def _plan(self) -> dict[str, Any]:
        return describe(self._model, self._stages)

    def _progress(self) -> dict[str, Any]:
        return {
            "start_steps": self._entrance.start_steps,
            "records": self._recorder.progress(),
            "escalated_to": self._entrance.escalated_to,
            "stopped": bool(self._model.stop_training),
        }


def _line(stage: Stage) -> str:
    rate = stage.learning_rate
    if callable(rate):
        rate = json.dumps(keras.saving.serialize_keras_object(rate), sort_keys=True)
    return f"{stage.policy} for {stage.epochs} epochs, learning rate {rate}"
