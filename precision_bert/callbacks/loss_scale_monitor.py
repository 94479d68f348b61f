"""The callback that puts the loss scale and the skipped steps into the logs."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from precision_bert.loss_scale_optimizer import DynamicLossScaleOptimizer
from precision_bert.loss_scaling import count_steps, current_loss_scale


class LossScaleMonitor(keras.callbacks.Callback):
    """Adds `loss_scale`, `applied_steps` and `skipped_steps` of each epoch to the logs.

    Use it in any `fit`; what it adds stands in the History, the CSV logger and TensorBoard. Put it
    before callbacks that read these values. `staged_fit` adds one by itself.

    `loss_scale` is the scale that the next step would use, 1 where the loss is not scaled.
    `skipped_steps` is left out for a loss-scale optimizer that does not count them (Keras' own
    does not; a switch replaces it with one that does).

    `loss`, and the losses of a model's single outputs, are averaged over the applied steps, so that
    one skipped batch does not make NaN of an epoch. An epoch without any has the loss of its last
    step. Under `steps_per_execution` a call of the train function counts as a whole. On several
    replicas the losses are Keras' own.

    Example:

    >>> import numpy as np
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x = np.zeros((8, 4))
    >>> history = model.fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=[LossScaleMonitor()])
    >>> history.history["loss_scale"], history.history["applied_steps"]
    ([1.0], [4])
    """

    def __init__(self) -> None:
        super().__init__()
        self._losses: _AppliedLosses | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forgets the model's trackers: a `compile` since makes new ones."""
        self._losses = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the counts at the epoch's start."""
        self._applied, self._skipped = count_steps(self.model.optimizer)
        if self._losses is not None:
            self._losses.begin()

    # Not on_train_batch_end: that would make Keras wait for every step's logs.
    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Takes the loss of the step before out of the average if it was skipped."""
        losses = self._losses
        if losses is None or losses.optimizer is not self.model.optimizer:
            losses = _AppliedLosses(self.model)
        elif losses.trackers != _loss_trackers(self.model):
            # Trackers of single outputs are made in the first step, which may be a skipped one.
            losses = _AppliedLosses(self.model)
            losses.begin(skipped=self._skipped or 0)
        losses.settle()
        self._losses = losses

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the epoch's values into `logs`."""
        if logs is None:
            return
        if self._losses is not None and self._losses.optimizer is self.model.optimizer:
            logs.update(self._losses.before_a_skipped_step())
        applied, skipped = count_steps(self.model.optimizer)
        logs["loss_scale"] = current_loss_scale(self.model.optimizer) or 1.0
        logs["applied_steps"] = applied - self._applied
        if skipped is not None and self._skipped is not None:
            logs["skipped_steps"] = skipped - self._skipped


class _AppliedLosses:
    """The averages of a model's losses as they were after the last applied step.

    What a skipped step added to Keras' trackers is taken back at the start of the next, by one
    function on the device that nobody waits for.
    """

    def __init__(self, model: keras.Model) -> None:
        self.optimizer = model.optimizer
        self.trackers = _loss_trackers(model)
        self._variables = [v for metric in self.trackers for v in (metric.total, metric.count)]
        self._settled = tf.function(self._settle, autograph=False)
        self.begin()

    def begin(self, skipped: int | None = None) -> None:
        """Keeps what the trackers have, now that they were reset; or nothing, and this count."""
        if self.trackers:
            self._kept, self._skipped = self._now()
            if skipped is not None:
                self._kept = [tf.zeros_like(value) for value in self._kept]
                self._skipped = tf.constant(skipped, "int64")

    def settle(self) -> None:
        """Takes back what the step before has added, if it was skipped; else keeps it."""
        if self.trackers and self.optimizer.built:  # else there was no step yet
            self._kept, self._skipped = self._settled(self._kept, self._skipped)

    def before_a_skipped_step(self) -> dict[str, float]:
        """Returns the averages before the last step, by name, if that one was skipped."""
        if not self.trackers or int(self._now()[1]) == int(self._skipped):
            return {}
        pairs = zip(self.trackers, self._kept[::2], self._kept[1::2], strict=True)
        return {one.name: float(total / count) for one, total, count in pairs if count > 0}

    def _now(self) -> tuple[list[Any], Any]:
        return (
            [tf.convert_to_tensor(variable) for variable in self._variables],
            tf.cast(self.optimizer.skipped_steps if self.optimizer.built else 0, "int64"),
        )

    def _settle(self, kept: list[Any], skipped: Any) -> tuple[list[Any], Any]:
        now, skipped_now = self._now()
        settled = [tf.where(skipped_now > skipped, *pair) for pair in zip(kept, now, strict=True)]
        for variable, value in zip(self._variables, settled, strict=True):
            variable.assign(value)
        return settled, skipped_now


def _loss_trackers(model: keras.Model) -> list[keras.metrics.Mean]:
    """Returns the metrics that average a model's losses, where skipped steps are counted."""
    single = model.distribute_strategy.num_replicas_in_sync == 1
    if not single or not isinstance(model.optimizer, DynamicLossScaleOptimizer):
        return []
    return [
        metric
        for metric in model.metrics
        if isinstance(metric, keras.metrics.Mean)
        and (metric.name == "loss" or metric.name.endswith("_loss"))
    ]
