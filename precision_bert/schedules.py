"""Which precision each epoch of a training runs in: `Stage` and `PrecisionSchedule`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from precision_bert.policies import PolicyName, check_policy


def check_count(value: object, argument: str, *, minimum: int) -> int:
    """Returns `value` if it is a whole number of at least `minimum`, or says what was expected.

    Raises:
        TypeError: If `value` is not an int (a bool is not a count).
        ValueError: If it is smaller than `minimum`.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{argument} must be an int. Received: {argument}={value!r}.")
    if value < minimum:
        raise ValueError(f"{argument} must be at least {minimum}. Received: {argument}={value}.")
    return int(value)


@dataclass(frozen=True)
class Stage:
    """A run of epochs trained under one precision policy.

    Args:
        policy: The policy that the stage's steps compute in: `"float32"`, `"mixed_float16"` or
            `"mixed_bfloat16"`.
        epochs: How many epochs the stage lasts. A stage of 0 epochs never starts, so nothing is
            switched for it; that makes a sweep over the switch epoch include both of its ends.
        learning_rate: A float, or a `keras.optimizers.schedules.LearningRateSchedule` counted in
            applied steps from the first step of this stage. `None` goes on with what the
            optimizer has, so that a schedule over the whole run keeps running over the switch.
        data: The stage's own training data, as `fit` takes it: a data set, or a tuple `(x, y)` or
            `(x, y, sample_weight)` of arrays. `None` uses the data given for the whole training.

    Raises:
        ValueError: If the policy is unknown, or the length or the learning rate is negative.

    Example:

    >>> Stage("mixed_float16", epochs=3, learning_rate=3e-5)
    Stage(policy='mixed_float16', epochs=3, learning_rate=3e-05)
    """

    policy: PolicyName
    epochs: int
    learning_rate: Any = None
    data: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", check_policy(self.policy))
        object.__setattr__(self, "epochs", check_count(self.epochs, "epochs", minimum=0))
        rate = self.learning_rate
        if rate is None or callable(rate):
            return
        if isinstance(rate, bool) or not isinstance(rate, numbers.Real):
            raise TypeError(
                "learning_rate must be a float, a LearningRateSchedule or None. "
                f"Received: learning_rate={rate!r}."
            )
        if not (math.isfinite(rate) and float(rate) >= 0):
            raise ValueError(
                f"learning_rate must be finite and not negative. Received: learning_rate={rate!r}."
            )


@dataclass(frozen=True)
class PrecisionSchedule:
    r"""The stages of one training, in order.

    With stages of $n_0, n_1, \dots$ epochs and boundaries $b_k = n_0 + \dots + n_{k-1}$, epoch
    $e$ (counted from 0) runs in the policy

    $$p(e) = p_k \quad\text{for}\quad b_k \le e < b_{k+1}.$$

    Args:
        stages: At least one `Stage`, together at least one epoch long.

    Raises:
        ValueError: If there is nothing to train.

    Example:

    >>> schedule = PrecisionSchedule([Stage("mixed_float16", 3), Stage("float32", 1)])
    >>> [schedule.stage_at(epoch).policy for epoch in range(schedule.epochs)]
    ['mixed_float16', 'mixed_float16', 'mixed_float16', 'float32']
    """

    stages: tuple[Stage, ...]

    def __init__(self, stages: Sequence[Stage]) -> None:
        stages = tuple(stages)
        for stage in stages:
            if not isinstance(stage, Stage):
                raise TypeError(
                    "stages must be a sequence of Stage objects, for example "
                    '[Stage("mixed_float16", 3), Stage("float32", 1)]. '
                    f"Received an item of type {type(stage).__name__}: {stage!r}."
                )
        if sum(stage.epochs for stage in stages) < 1:
            raise ValueError(
                f"stages must hold at least one epoch to train. Received: stages={list(stages)!r}."
            )
        object.__setattr__(self, "stages", stages)

    @property
    def epochs(self) -> int:
        """The length of the whole training, in epochs."""
        return sum(stage.epochs for stage in self.stages)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The epoch that each stage starts before, counted from 0, then the end of the last."""
        ends = [0]
        for stage in self.stages:
            ends.append(ends[-1] + stage.epochs)
        return tuple(ends)

    def index_at(self, epoch: int) -> int:
        """Returns the index of the stage that `epoch` (counted from 0) belongs to.

        Raises:
            ValueError: If `epoch` lies outside the schedule.
        """
        check_count(epoch, "epoch", minimum=0)
        boundaries = self.boundaries
        for index, end in enumerate(boundaries[1:]):
            if epoch < end:
                return index
        raise ValueError(
            f"epoch must be below the schedule's {self.epochs} epochs. Received: epoch={epoch}."
        )

    def stage_at(self, epoch: int) -> Stage:
        """Returns the stage that `epoch` (counted from 0) belongs to."""
        return self.stages[self.index_at(epoch)]
