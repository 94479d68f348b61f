"""What a `StallGuard` reports: the alarm, and the error that carries it."""

from __future__ import annotations

from dataclasses import dataclass

from precision_bert.policies import PolicyName
from precision_bert.range_causes import RangeFinding


class StallError(RuntimeError):
    """A training that stalled or turned to NaN.

    Attributes:
        alarm: The `StallAlarm`.
    """

    def __init__(self, alarm: StallAlarm, more: str = "") -> None:
        super().__init__(f"{alarm}{more}")
        self.alarm = alarm


@dataclass(frozen=True)
class StallAlarm:
    """What a `StallGuard` noticed.

    Attributes:
        sign: What was noticed, in words.
        epoch: In which epoch, counted from 0.
        step: After how many batches of it; `None` at its end.
        skipped_in_a_row: Steps skipped in a row up to then.
        loss_scale: The loss scale then; `None` where the loss was not scaled.
        policy: The precision then.
        finding: What left its range, and why; `None` where there was no batch to search with.
        note: Why there is no finding, if there is none.
        escalated_to: The precision that the training went on in, if it was escalated.
    """

    sign: str
    epoch: int
    step: int | None
    skipped_in_a_row: int
    loss_scale: float | None
    policy: PolicyName
    finding: RangeFinding | None
    note: str = ""
    escalated_to: PolicyName | None = None

    def __str__(self) -> str:
        """Returns the alarm in full sentences."""
        scale = "" if self.loss_scale is None else f", loss scale {self.loss_scale:g}"
        step = "its end" if self.step is None else f"step {self.step}"
        where = f"epoch {self.epoch + 1}, {step}, {self.policy}{scale}"
        text = f"The training has stalled ({where}): {self.sign}. {self.finding or self.note}"
        if self.escalated_to is not None:
            text += f" Going on in {self.escalated_to}."
        return text
