"""The callback that saves a staged training after each epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from precision_bert.staged_history import plain
from precision_bert.training_state import CheckpointFolder, TrainingState, capture


class StateSaver(keras.callbacks.Callback):
    """Saves all that a staged training needs to go on after the epoch that has just ended.

    It must stand behind the user's callbacks, so that what they change at an epoch's end is saved.

    Args:
        folder: Where the checkpoints go.
        plan: Called for what the state fits to; see `training_state.describe`.
        progress: Called at each epoch's end for what is to be saved besides the variables.
        history: Logged values of the epochs before, by name; this callback appends to them.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        plan: Callable[[], dict[str, Any]],
        progress: Callable[[], dict[str, Any]],
        history: dict[str, list[Any]],
    ) -> None:
        super().__init__()
        self._folder = folder
        self._plan = plan
        self._progress = progress
        self._history = history
        self._epochs_done: int | None = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the checkpoint; when this returns, the epoch is safe."""
        for name, value in (logs or {}).items():
            self._history.setdefault(name, []).append(plain(value))
        self._epochs_done = epoch + 1
        self._save()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Writes the last checkpoint again: Keras and callbacks change weights as `fit` ends.

        An average of the weights takes their place, EarlyStopping restores the best ones.
        """
        if self._epochs_done is not None:
            self._save()

    def _save(self) -> None:
        progress = {**self._progress(), "history": self._history}
        self._folder.save(
            TrainingState(self._epochs_done or 0, capture(self.model), self._plan(), progress)
        )
