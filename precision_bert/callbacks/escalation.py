"""Takes a stalled training on in a higher precision, where that helps."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import keras
import numpy as np

from precision_bert.batch_search import BatchSearch
from precision_bert.callbacks.stall_alarm import StallAlarm, StallError
from precision_bert.policies import PolicyName, higher_precision
from precision_bert.switching import switch_precision
from precision_bert.training_state import restore


class Escalates(Protocol):
    """A part of a staged training that must know of an escalation."""

    def escalate(self, policy: PolicyName) -> None:
        """Takes note of the precision that the training goes on in."""


def escalate(
    model: keras.Model,
    alarm: StallAlarm,
    policy: PolicyName,
    good: dict[str, np.ndarray] | None,
    search: BatchSearch,
    limit: int,
) -> StallAlarm:
    """Switches a stalled model to a higher precision, at a good state, and looks whether it helps.

    Args:
        model: The model.
        alarm: Why.
        policy: The higher precision.
        good: What `training_state.capture` returned of the state to go back to; empty if the
            present one is good, `None` if there is none.
        search: The data to look with.
        limit: Batches to search at most.

    Returns:
        The alarm, with what it was escalated to.

    Raises:
        StallError: If there is nothing higher, no good state, or it does not help; the model is
            then in the precision that it was in.
    """
    if higher_precision(alarm.policy, policy) == alarm.policy:
        raise StallError(alarm, f" There is no going on in {policy}: it was in {alarm.policy}.")
    if good is None:
        raise StallError(alarm, " There is no good state to go back to.")
    if good:
        # Not the loss scale's: how many steps it skipped stays true.
        state = {name: v for name, v in good.items() if not name.startswith("loss_scale/")}
        restore(model, state)
    switch_precision(model, policy)
    findings, _ = search(model, limit)
    bad = next((one for one in findings if not one.is_healthy), None)
    if bad is not None:
        switch_precision(model, alarm.policy)
        raise StallError(alarm, f" {policy} does not mend it: {bad}")
    model.reset_metrics()  # of the steps that were undone, or not done
    return replace(alarm, escalated_to=policy)
