"""The callback that measures the stages of a staged training."""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import keras
from keras import ops

from precision_bert.audit import audit_train_function
from precision_bert.loss_scaling import count_steps, current_loss_scale
from precision_bert.memory import peak_memory, reset_peak_memory
from precision_bert.policies import PolicyName, higher_precision
from precision_bert.schedules import PrecisionSchedule
from precision_bert.staged_history import StageRecord


@dataclass
class _Running:
    """The sums of the stage that is running."""

    index: int
    first_epoch: int
    applied_at_start: int
    skipped_at_start: int | None
    epochs: int = 0
    seconds: float = 0.0
    first_step_seconds: float = 0.0
    validation_seconds: float = 0.0
    examples_after_first: float = 0.0
    peak_memory_bytes: int = 0
    memory_source: str = ""
    computes_in: dict[str, Any] | None = None


class StageRecorder(keras.callbacks.Callback):
    """Measures each stage's steps, time, throughput and memory, for `staged_fit`.

    It must stand behind the callback that enters the stages, so that the switch itself is not
    counted as training, and before the user's. It overrides no `on_train_batch_end`: that would
    make Keras wait for every step's logs before it starts the next.

    Args:
        schedule: The schedule that is trained.

    Attributes:
        stages: A `StageRecord` for each stage that has begun; complete after `close`.
    """

    def __init__(self, schedule: PrecisionSchedule) -> None:
        super().__init__()
        self._schedule = schedule
        self._running: _Running | None = None
        self._closed: list[StageRecord] = []
        self._escalated_to: PolicyName | None = None
        self._is_to_audit = False
        self._statistics: list[keras.Variable] = []

    def escalate(self, policy: PolicyName) -> None:
        """Records this stage and those after it as escalated, where they were planned lower."""
        self._escalated_to = policy
        self._is_to_audit = True  # once the step is traced in the new precision
        if self._running is not None:
            self._running.computes_in = None

    def _policy(self, index: int) -> PolicyName:
        planned = self._schedule.stages[index].policy
        return higher_precision(planned, self._escalated_to or planned)

    @property
    def stages(self) -> tuple[StageRecord, ...]:
        """The records of the stages that have ended."""
        return tuple(self._closed)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Opens a record where a stage begins."""
        index = self._schedule.index_at(epoch)
        if self._running is None or self._running.index != index:
            self.close()
            reset_peak_memory()
            self._running = _Running(index, epoch, *count_steps(self.model.optimizer))
            self._is_tracing = True
            self._statistics = list(filter(_is_finite, _statistics(self.model)))
        self._training = True
        self._steps_in_first_call = 0
        self._begin = time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the time when the stage's first call of the train function has returned."""
        if batch > 0 and self._is_tracing:
            self._is_tracing = False
            self._steps_in_first_call = batch
            self._stage.first_step_seconds += time.perf_counter() - self._begin
            self._begin += self._audit()  # no part of the training
        elif batch > 0 and self._is_to_audit:
            self._begin += self._audit()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Ends the epoch's training time where its validation begins."""
        if self._training:
            self._end_training()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epoch to the stage, and `epoch_seconds` to the logs."""
        if self._training:
            self._end_training()
        now = time.perf_counter()
        self._stage.epochs += 1
        self._stage.validation_seconds += now - self._training_end
        memory = peak_memory()
        self._stage.peak_memory_bytes = max(self._stage.peak_memory_bytes, memory.bytes)
        self._stage.memory_source = memory.source
        if logs is not None:
            logs["epoch_seconds"] = now - self._begin
        if epoch + 1 == self._schedule.boundaries[self._stage.index + 1]:
            self.close()  # now: the next stage's switch takes the loss scale off the optimizer

    def progress(self) -> dict[str, Any]:
        """Returns what has been measured so far, ready for JSON; see `go_on`."""
        running = None if self._running is None else asdict(self._running)
        return {"closed": [asdict(record) for record in self._closed], "running": running}

    def go_on(self, progress: dict[str, Any]) -> None:
        """Goes on with what another recorder's `progress` returned."""
        self._closed = [StageRecord(**record) for record in progress["closed"]]
        if progress["running"] is not None:
            self._running = _Running(**progress["running"])
            self._is_tracing = True  # another process traces anew

    def close(self) -> None:
        """Ends the record of the stage that is running, if one is."""
        running, self._running = self._running, None
        if running is None or running.epochs == 0:
            return
        applied, skipped = count_steps(self.model.optimizer)
        if skipped is not None and running.skipped_at_start is not None:
            skipped -= running.skipped_at_start
        applied -= running.applied_at_start
        policy = self._policy(running.index)
        planned = self._schedule.stages[running.index].policy
        if applied == 0 and skipped:
            warnings.warn(
                f"Stage {running.index} ({policy}) applied none of its steps: every gradient was "
                "infinite or NaN, so the weights are what they were. Its figures say nothing about "
                "the precision; look for what overflows float16.",
                RuntimeWarning,
                stacklevel=2,
            )
        broken = [v.path for v in self._statistics if not _is_finite(v)]
        if broken:
            warnings.warn(
                f"Stage {running.index} ({policy}) has left {', '.join(broken)} infinite or NaN. A "
                "skipped step leaves weights and optimizer state as they were, but not what the "
                "forward pass writes; keep those layers in float32 (keep_float32=[...]), or find "
                "the batch that did it.",
                RuntimeWarning,
                stacklevel=2,
            )
        rest = running.seconds - running.first_step_seconds
        self._closed.append(
            StageRecord(
                policy=policy,
                first_epoch=running.first_epoch,
                epochs=running.epochs,
                applied_steps=applied,
                skipped_steps=skipped,
                loss_scale=current_loss_scale(self.model.optimizer),
                seconds=running.seconds,
                first_step_seconds=running.first_step_seconds,
                examples_per_second=running.examples_after_first / rest
                if running.examples_after_first and rest > 0
                else None,
                validation_seconds=running.validation_seconds,
                peak_memory_bytes=running.peak_memory_bytes,
                memory_source=running.memory_source,
                computes_in=running.computes_in,
                escalated_from=None if planned == policy else planned,
            )
        )

    @property
    def _stage(self) -> _Running:
        if self._running is None:
            raise RuntimeError("StageRecorder was given a batch before an epoch began.")
        return self._running

    def _end_training(self) -> None:
        self._training = False
        # Reading the count waits for the device, so that queued steps are part of the time.
        examples = self._examples_this_epoch()
        self._training_end = time.perf_counter()
        seconds = self._training_end - self._begin
        stage = self._stage
        stage.seconds += seconds
        if self._is_tracing:  # the epoch had one call only
            self._is_tracing = False
            stage.first_step_seconds += seconds
            audit_seconds = self._audit()
            self._training_end += audit_seconds
            self._begin += audit_seconds
            return
        share = 1.0
        if self._steps_in_first_call:
            steps = sum(filter(None, count_steps(self.model.optimizer)))
            steps -= stage.applied_at_start + (stage.skipped_at_start or 0)
            share = 1 - self._steps_in_first_call / max(steps, self._steps_in_first_call)
        stage.examples_after_first += examples * share

    def _audit(self) -> float:
        """Records what the train function that was just traced computes in; returns the seconds."""
        begin = time.perf_counter()
        self._is_to_audit = False
        policy = self._policy(self._stage.index)
        audit = audit_train_function(self.model)
        if audit is not None:
            self._stage.computes_in = audit.summary()
            stray = audit.stray_half(policy) or audit.missing_half()
            if stray:
                warnings.warn(
                    f"Stage {self._stage.index} ({policy}) does not compute as its policy says: "
                    f"{'; '.join(stray)}.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return time.perf_counter() - begin

    def _examples_this_epoch(self) -> float:
        # Keras weights its loss tracker by batch size, so its count is the number of examples.
        for metric in self.model.metrics:
            if metric.name == "loss" and isinstance(metric, keras.metrics.Mean):
                return float(ops.convert_to_numpy(ops.convert_to_tensor(metric.count)))
        return 0.0


def _statistics(model: keras.Model) -> list[keras.Variable]:
    """Returns what the forward pass may write: BatchNormalization's statistics and the like."""
    return [v for v in model.non_trainable_variables if keras.backend.is_float_dtype(v.dtype)]


def _is_finite(variable: keras.Variable) -> bool:
    return bool(ops.convert_to_numpy(ops.all(ops.isfinite(ops.convert_to_tensor(variable)))))
