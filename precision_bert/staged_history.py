"""What a staged training returns: Keras' history over all stages, and a record of each stage."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from precision_bert.policies import PolicyName


@dataclass(frozen=True)
class StageRecord:
    """What one stage did and what it took.

    Attributes:
        policy: The precision policy that the stage trained in; where a `StallGuard` escalated it,
            the one that it ended in.
        first_epoch: Its first epoch, counted from 0 over the whole training.
        epochs: How many epochs it ran; fewer than planned where training was stopped early.
        applied_steps: Training steps (batches) whose gradients reached the optimizer.
        skipped_steps: Steps that loss scaling skipped because their gradients were not finite;
            `None` where the loss-scale optimizer does not count them.
        loss_scale: The loss scale at the end of the stage; `None` where the loss was not scaled.
        seconds: Seconds spent training, the first step included, validation not.
        first_step_seconds: Seconds of the first call of the train function, which traces it (and
            compiles it, under XLA).
        examples_per_second: Examples trained on per second after that first call; `None` where
            nothing came after it, or where a custom train step does not update the loss tracker.
        validation_seconds: Seconds from the end of an epoch's training to the end of its
            callbacks' work: validation, and whatever callbacks do.
        peak_memory_bytes: The most memory in use at once during the stage, in bytes.
        memory_source: Whose memory that is; see `PeakMemory`.
        computes_in: What the stage's traced train step really computed in, as
            `PrecisionAudit.summary()` says it; `None` where no traced step could be read
            (`run_eagerly`, a custom `make_train_function`).
        escalated_from: The policy that the stage was planned in, where it or a stage before it
            stalled and was escalated; otherwise `None`.
    """

    policy: PolicyName
    first_epoch: int
    epochs: int
    applied_steps: int
    skipped_steps: int | None
    loss_scale: float | None
    seconds: float
    first_step_seconds: float
    examples_per_second: float | None
    validation_seconds: float
    peak_memory_bytes: int
    memory_source: str
    computes_in: dict[str, Any] | None = None
    escalated_from: PolicyName | None = None


@dataclass(frozen=True)
class StagedHistory:
    """The record of a staged training.

    Attributes:
        history: What Keras' `History.history` holds, over all stages: by name of a logged value,
            its value for each epoch.
        epoch: The epochs that were run, counted from 0.
        stages: A `StageRecord` for each stage that was started.
        stopped_early: Whether a callback stopped the training before its last epoch.
    """

    history: dict[str, list[Any]]
    epoch: list[int]
    stages: tuple[StageRecord, ...]
    stopped_early: bool = field(default=False)

    def policy_at(self, epoch: int) -> PolicyName:
        """Returns the policy that `epoch` (counted from 0) was trained in.

        Raises:
            ValueError: If that epoch was not run.
        """
        for stage in self.stages:
            if stage.first_epoch <= epoch < stage.first_epoch + stage.epochs:
                return stage.policy
        raise ValueError(f"epoch must be one that was run, {self.epoch}. Received: epoch={epoch}.")

    def to_dict(self) -> dict[str, Any]:
        """Returns the record as plain lists, dicts, numbers and strings, ready for JSON."""
        history = {name: [plain(v) for v in values] for name, values in self.history.items()}
        return {**dataclasses.asdict(self), "history": history}

    def __str__(self) -> str:
        """Returns a table with a row for each stage."""
        header = ["stage", "policy", "epochs", "applied", "skipped", "loss scale"]
        header += ["in half", "seconds", "first step", "examples/s", "peak MiB"]
        rows = [header]
        for index, stage in enumerate(self.stages):
            rows.append(
                [
                    str(index),
                    stage.policy,
                    f"{stage.first_epoch}-{stage.first_epoch + stage.epochs - 1}",
                    str(stage.applied_steps),
                    _or_dash(stage.skipped_steps, "d"),
                    _or_dash(stage.loss_scale, ".0f"),
                    _or_dash((stage.computes_in or {}).get("half_share"), ".0%"),
                    f"{stage.seconds:.1f}",
                    f"{stage.first_step_seconds:.1f}",
                    _or_dash(stage.examples_per_second, ".1f"),
                    f"{stage.peak_memory_bytes / 2**20:.0f}",
                ]
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = [
            "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
        ]
        sources = sorted({stage.memory_source for stage in self.stages})
        lines += [
            f"stage {i} was planned in {stage.escalated_from}, and escalated to {stage.policy}"
            for i, stage in enumerate(self.stages)
            if stage.escalated_from is not None
        ]
        lines.append("in half: share of the multiplying operations in half precision")
        lines.append(f"peak memory of: {', '.join(sources)}")
        return "\n".join(lines)


def plain(value: Any) -> Any:
    """Returns a logged value as a Python number, or as a list of them where it is an array."""
    return np.asarray(value).tolist()


def _or_dash(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
