"""The callback that notices a training that has stalled or turned to NaN, and says why."""

from __future__ import annotations

import warnings
from typing import Any, Literal, get_args

import keras
import numpy as np

from precision_bert.batch_search import BatchSearch
from precision_bert.callbacks.escalation import Escalates, escalate
from precision_bert.callbacks.stall_alarm import StallAlarm, StallError
from precision_bert.finite_state import FiniteState
from precision_bert.layer_policies import compute_dtypes
from precision_bert.loss_scaling import (
    count_skipped_in_a_row,
    count_steps,
    current_loss_scale,
    scales_loss,
)
from precision_bert.policies import PolicyName, check_policy
from precision_bert.range_causes import RangeFinding
from precision_bert.schedules import check_count
from precision_bert.training_state import capture

Action = Literal["raise", "warn", "escalate"]


# Batches that must all fail at scale 1 for a stall: in one, each batch of late was skipped.
_TO_CONFIRM = 3


class StallGuard(keras.callbacks.Callback):
    """Notices a training that learns nothing, names the layer and the cause, and acts.

    Under a loss scale a step whose gradients are not finite is skipped, and a training can skip all
    of its steps while its loss looks healthy. This callback looks at the optimizer's counts now and
    then. Steps skipped in a row while the scale finds its place are no alarm: it searches a batch
    and is quiet if the gradients are finite at scale 1, or, without a batch, waits until the scale
    is at its floor. Weights or optimizer state that are not finite are an alarm in any precision.

    Use it in `fit` with `data=`, or in `staged_fit`, which hands it the training data.

    Args:
        action: `"raise"` a `StallError`; `"warn"`, once a cause; or `"escalate"`: warn, go back to
            the last good state if weights were damaged, and go on in `escalate_to`. Where that does
            not help (the data holds NaN) or there is nothing higher, a `StallError` is raised.
        data: A batch or the training data as `fit` takes it: `(x, y)` or `(x, y, sample_weight)`
            of arrays, a `tf.data.Dataset` or a `PyDataset`. It is read only after an alarm; reading
            a data set that shuffles moves its order on.
        check_every: Batches between two looks, besides those at the ends of epochs. A look reads
            some scalars and reduces all weights to one bit on the device.
        consecutive_skips: Steps skipped in a row that rouse suspicion.
        escalate_to: `"float32"` or `"mixed_bfloat16"`.
        max_batches: Batches to search at most.

    Raises:
        TypeError: If a number is no int.
        ValueError: If a value is out of range or the action unknown.

    Attributes:
        alarms: All `StallAlarm`s so far.

    It adds `stall_alarms`, the alarms of the epoch, to the logs, and for `"escalate"` also
    `precision_escalated`, how many of them were. To go back to a good state it keeps a copy of
    weights and optimizer state in the host's memory, taken as each epoch begins.

    Example:

    >>> hidden = keras.layers.Dense(3, keras.ops.gelu, name="hidden")  # the tanh GELU
    >>> head = keras.layers.Dense(1, kernel_initializer="zeros")
    >>> model = keras.Sequential([keras.Input((2,)), hidden, head], name="net")
    >>> model.compile("sgd", "mse")
    >>> _ = hidden.bias.assign([300.0, 0.0, 0.0])
    >>> from precision_bert.switching import switch_precision
    >>> _ = switch_precision(model, "mixed_float16")
    >>> data = np.ones((8, 2)), np.ones((8, 1))
    >>> guard = StallGuard(data=data, check_every=3)
    >>> model.fit(*data, batch_size=1, verbose=0, callbacks=[guard])
    Traceback (most recent call last):
    ...
    precision_bert.callbacks.stall_alarm.StallError: The training has stalled (epoch 1, step 6,
    mixed_float16, loss scale 512): 6 steps in a row were skipped: finite loss, non-finite
    gradients. Cause: GELU gradient in layer 'net/hidden' (backward float16 tensor ...). ...
    """

    def __init__(
        self,
        action: Action = "raise",
        *,
        data: Any = None,
        check_every: int = 10,
        consecutive_skips: int = 5,
        escalate_to: PolicyName = "float32",
        max_batches: int = 8,
    ) -> None:
        super().__init__()
        if action not in get_args(Action):
            raise ValueError(
                f"action must be one of {', '.join(map(repr, get_args(Action)))}. "
                f"Received: action={action!r}."
            )
        if check_policy(escalate_to, "escalate_to") == "mixed_float16":
            raise ValueError(
                "escalate_to must be higher than mixed_float16: 'mixed_bfloat16' or 'float32'. "
                "Received: escalate_to='mixed_float16'."
            )
        self.action = action
        self.check_every = check_count(check_every, "check_every", minimum=1)
        self.consecutive_skips = check_count(consecutive_skips, "consecutive_skips", minimum=1)
        self.escalate_to = escalate_to
        self.max_batches = check_count(max_batches, "max_batches", minimum=1)
        self.alarms: list[StallAlarm] = []
        self._search = BatchSearch(data)
        self._takes_data = data is None
        self._stages: tuple[Escalates, ...] = ()
        self._state: FiniteState | None = None
        self._good: dict[str, np.ndarray] | None = None
        self._told: set[tuple[str, str]] = set()
        self._patience, self._was_at_floor = self.consecutive_skips, False
        self._epoch = 0

    def join_stages(self, *parts: Escalates) -> None:
        """Has `escalate` called on the parts of a staged training when the precision changes."""
        self._stages = parts

    def see(self, x: Any, y: Any, sample_weight: Any, batch_size: int | None) -> None:
        """Takes what is to be trained on, unless the guard was made with `data`."""
        if self._takes_data:
            self._search = BatchSearch((x, y, sample_weight), batch_size)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Looks at the weights that the training begins with."""
        self._state, self._counted = None, count_steps(self.model.optimizer)
        self._in_a_row, self._looked_at, self._batch = 0, 0, -1
        if self.action == "escalate" and not self.model.optimizer.built:
            # As the first step would: without its state there is none to go back to.
            with self.model.distribute_strategy.scope():
                self.model.optimizer.build(self.model.trainable_variables)
        self._look(0)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Keeps the state to go back to."""
        self._epoch, self._alarms_before = epoch, len(self.alarms)
        self._looked_at, self._batch = 0, -1
        if self.action == "escalate" and self._state is not None and self._state.is_finite():
            self._good = capture(self.model)

    # Not on_train_batch_end: that would make Keras wait for every step's logs.
    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks at the steps before this one, now and then."""
        if batch - self._looked_at >= self.check_every:
            self._look(batch)
        self._batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks at the epoch's last steps, and adds its alarms to the logs."""
        self._look(None)
        if logs is not None:
            new = self.alarms[self._alarms_before :]
            logs["stall_alarms"] = len(new)
            if self.action == "escalate":
                logs["precision_escalated"] = sum(one.escalated_to is not None for one in new)

    def _look(self, step: int | None) -> None:
        if self._state is None or not self._state.fits(self.model):
            self._state = FiniteState(self.model)
        done = self._batch + 1 if step is None else step
        self._count(self.model.optimizer, done - self._looked_at)
        self._looked_at = done
        if not self._state.is_finite():
            self._alarm_damage(step)
            return
        self._told -= {("damage", "")}
        if self._in_a_row < self.consecutive_skips:
            self._patience, self._was_at_floor = self.consecutive_skips, False
            return
        rule = getattr(self.model.optimizer, "rule", None)
        scale = current_loss_scale(self.model.optimizer) or 1.0
        at_floor = scale <= (1.0 if rule is None else rule.min_scale)
        if self._in_a_row >= self._patience or (at_floor and not self._was_at_floor):
            # A scale that has far to fall is not searched at each look.
            self._patience, self._was_at_floor = 2 * self._in_a_row, at_floor
            self._suspect(step, at_floor)

    def _count(self, optimizer: keras.optimizers.Optimizer, batches: int) -> None:
        in_a_row = count_skipped_in_a_row(optimizer)
        if in_a_row is None:
            # An optimizer that does not count: the batches of looks between which none was applied.
            applied = count_steps(optimizer)
            in_a_row = self._in_a_row + batches if applied == self._counted else 0
            self._counted = applied
        self._in_a_row = in_a_row if scales_loss(optimizer) else 0

    def _suspect(self, step: int | None, at_floor: bool) -> None:
        """Tells a stall from a loss scale that is still falling to its place."""
        findings, note = self._search(self.model, self.max_batches if at_floor else _TO_CONFIRM)
        bad = [one for one in findings if not one.is_healthy]
        if not at_floor and (not findings or len(bad) < len(findings)):
            return
        by_weight = sorted(findings, key=lambda one: (one.is_healthy, one.cause == "none"))
        finding = by_weight[0] if by_weight else None
        sign = f"{self._in_a_row} steps in a row were skipped"
        if finding is not None and finding.loss is not None and finding.cause != "none":
            finite = np.isfinite(finding.loss)
            sign += ": finite loss, non-finite gradients" if finite else ": the loss is not finite"
        if at_floor:
            sign += ", with the loss scale at its floor"
        self._alarm(sign, step, finding, note, damaged=False)

    def _alarm_damage(self, step: int | None) -> None:
        if ("damage", "") in self._told:  # by a warning, and nothing has changed since
            return
        self._told.add(("damage", ""))
        assert self._state is not None
        broken = self._state.broken()
        moments = [one for one in broken if one.cause == "optimizer state"]
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        sign = f"{broken[0].tensor!r}{more} hold{'' if more else 's'} NaN or infinity"
        finding = broken[0]
        if moments and (scales_loss(self.model.optimizer) or moments[0] is finding):
            # Under a loss scale no step with such gradients is applied, so that they were the
            # optimizer's doing.
            finding = moments[0]
        else:
            searched, _ = self._search(self.model, self.max_batches, self._good)
            causes = [one for one in searched if not one.is_healthy and one.cause != "weights"]
            finding = next(iter(causes), finding)
        self._alarm(sign, step, finding, "", damaged=True)

    def _alarm(
        self, sign: str, step: int | None, finding: RangeFinding | None, note: str, *, damaged: bool
    ) -> None:
        key = (finding.cause, finding.layer) if finding else ("", "")
        if self.action == "warn" and key in self._told:
            return
        self._told.add(key)
        alarm = StallAlarm(
            sign, self._epoch, step, self._in_a_row, current_loss_scale(self.model.optimizer),
            _precision(self.model), finding, note,
        )  # fmt: skip
        if self.action == "escalate":
            good = self._good if damaged else {}  # skipped steps have changed nothing
            limit = self.max_batches
            alarm = escalate(self.model, alarm, self.escalate_to, good, self._search, limit)
            self._told.clear()
            for part in self._stages:
                part.escalate(self.escalate_to)
        self.alarms.append(alarm)
        if self.action == "raise":
            raise StallError(alarm)
        warnings.warn(str(alarm), RuntimeWarning, stacklevel=2)


def _precision(model: keras.Model) -> PolicyName:
    dtypes = set(compute_dtypes(model).values())
    if "float16" in dtypes:
        return "mixed_float16"
    return "mixed_bfloat16" if "bfloat16" in dtypes else "float32"
