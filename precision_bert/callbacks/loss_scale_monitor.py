"""The callback that puts the loss scale and the skipped steps into the logs."""

from __future__ import annotations

from typing import Any

import keras

from precision_bert.loss_scaling import count_steps, current_loss_scale


class LossScaleMonitor(keras.callbacks.Callback):
    """Adds `loss_scale`, `applied_steps` and `skipped_steps` of each epoch to the logs.

    Use it in any `fit`; what it adds stands in the History, the CSV logger and TensorBoard. Put it
    before callbacks that read these values. `staged_fit` adds one by itself.

    `loss_scale` is the scale that the next step would use, 1 where the loss is not scaled.
    `skipped_steps` is left out for a loss-scale optimizer that does not count them (Keras' own
    does not; a switch replaces it with one that does).

    Example:

    >>> import numpy as np
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x = np.zeros((8, 4))
    >>> history = model.fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=[LossScaleMonitor()])
    >>> history.history["loss_scale"], history.history["applied_steps"]
    ([1.0], [4])
    """

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the counts at the epoch's start."""
        self._applied, self._skipped = count_steps(self.model.optimizer)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the epoch's values into `logs`."""
        if logs is None:
            return
        applied, skipped = count_steps(self.model.optimizer)
        logs["loss_scale"] = current_loss_scale(self.model.optimizer) or 1.0
        logs["applied_steps"] = applied - self._applied
        if skipped is not None and self._skipped is not None:
            logs["skipped_steps"] = skipped - self._skipped
