"""The rule by which a loss scale moves: a pure function of its state and of a step's finiteness."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from keras import ops

# The smallest and the largest power of two that float32 holds without losing digits.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127


class LossScaleState(NamedTuple):
    """What a `LossScaleRule` goes by.

    Attributes:
        scale: The scale that the next step uses.
        streak: Applied steps since the scale last moved or a step was bad.
        bad_since_growth: Bad steps since the streak was last full. Only hysteresis counts them.
        bad_since_move: Bad steps in the window of the tolerance: since the streak was last full or
            the scale backed off.
        steps_since_move: All steps in that window. Only a tolerance counts them.
    """

    scale: Any
    streak: Any = 0
    bad_since_growth: Any = 0
    bad_since_move: Any = 0
    steps_since_move: Any = 0


@dataclass(frozen=True)
class LossScaleRule:
    r"""How the loss scale follows the finiteness of the gradients.

    With the scale $s$, the streak $n$ of applied steps, $g$ bad steps since the last growth, and
    $b$ bad ones of $w$ steps in the window, all before the step:

    $$(s, n, g, b, w) \leftarrow \begin{cases}
      (\min(\gamma s,\ s_{max}),\ 0, 0, 0, 0)  & \text{finite and } n + 1 \ge N \\
      (s,\ n + 1,\ g,\ b,\ w + 1)              & \text{finite otherwise} \\
      (\max(\beta s,\ s_{min}),\ 0, g + 1, 0, 0)
        & \text{bad, } g + 1 \ge h \text{ and } (b + 1) / (w + 1) \ge \tau \\
      (s,\ 0,\ g + 1,\ b + 1,\ w + 1)          & \text{bad otherwise}
    \end{cases}$$

    A bad step, one with a gradient that is not finite, is skipped in either case. With the defaults
    and within the bounds this is the rule of Keras' `LossScaleOptimizer`. Without a floor many bad
    steps drive the scale to 0 and the next good step divides by it; without a ceiling tiny
    gradients drive it to infinity, and no step is applied ever again. `docs/loss-scaling.md` says
    which system each term comes from.

    Args:
        initial_scale: The first scale. Keras' default, $2^{15}$.
        dynamic_growth_steps: $N$: how many steps in a row must be applied before the scale grows.
            Keras' default, 2000.
        min_scale: $s_{min}$, the floor. 1: less would push gradients out of half's range.
        max_scale: $s_{max}$, the ceiling. $2^{24}$ as in NVIDIA's Apex; see `ceiling_for`.
        growth_factor: $\gamma$, more than 1. 2 as in Keras; powers of two alone change no digit.
        backoff_factor: $\beta$, between 0 and 1. 1/2 as in Keras.
        hysteresis: $h$: the bad step since the last growth from which on the scale backs off. 1 as
            in Keras; DeepSpeed and Megatron-LM take 2.
        tolerance: $\tau$: the share of bad steps in the window from which on the scale backs off.
            0 as in Keras; the term is fairseq's.

    Raises:
        TypeError: If a scale, a factor or the tolerance is no number.
        ValueError: If a value is out of its range, or the initial scale out of its bounds.

    See Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.
    """

    initial_scale: float = 2.0**15
    dynamic_growth_steps: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 1
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        for name in ("initial_scale", "min_scale", "max_scale"):
            if not _SMALLEST <= self._number(name) <= _LARGEST:
                raise ValueError(
                    f"{name} must be finite and positive in float32, from 2**-126 to 2**127. "
                    f"Received: {name}={getattr(self, name)}."
                )
        # As float32 has them: a factor that rounds to 1 would never move the scale.
        if not 1.0 < np.float32(self._number("growth_factor")) < math.inf:
            raise ValueError(
                "growth_factor must be finite and more than 1; 2 doubles the scale. "
                f"Received: growth_factor={self.growth_factor}."
            )
        if not 0.0 < np.float32(self._number("backoff_factor")) < 1.0:
            raise ValueError(
                "backoff_factor must be more than 0 and less than 1; 0.5 halves the scale. "
                f"Received: backoff_factor={self.backoff_factor}."
            )
        if not 0.0 <= self._number("tolerance") <= 1.0:
            raise ValueError(
                "tolerance must be a share of bad steps from 0 to 1. "
                f"Received: tolerance={self.tolerance}."
            )
        for name in ("dynamic_growth_steps", "hysteresis"):
            n = getattr(self, name)
            if isinstance(n, bool) or not isinstance(n, numbers.Integral) or n < 1:
                raise ValueError(f"{name} must be an int of at least 1. Received: {name}={n!r}.")
            object.__setattr__(self, name, int(n))
        if not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                "initial_scale must lie between min_scale and max_scale. Received: "
                f"min_scale={self.min_scale}, initial_scale={self.initial_scale}, "
                f"max_scale={self.max_scale}."
            )

    def _number(self, name: str) -> float:
        """Returns an attribute as the plain float that it is from then on, which JSON can hold."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be a float. Received: {name}={value!r}.")
        object.__setattr__(self, name, float(value))
        return float(value)

    @classmethod
    def static(cls, scale: float) -> LossScaleRule:
        """Returns the rule whose scale never moves, since its floor is its ceiling.

        Args:
            scale: The scale.
        """
        return cls(scale, min_scale=scale, max_scale=scale)

    @classmethod
    def no_op(cls) -> LossScaleRule:
        """Returns the rule that scales nothing; bad steps are still skipped and counted."""
        return cls.static(1.0)

    @staticmethod
    def ceiling_for(largest_loss: float) -> float:
        r"""Returns the largest power of two that keeps a scaled loss finite, as a `max_scale`.

        With $|L| = m \cdot 2^e$, $1/2 \le m < 1$, it is $2^{\min(128 - e,\ 127)}$: float32 holds
        what is below $2^{128}$. The default ceiling, $2^{24}$, does for losses below $2^{104}$.

        Args:
            largest_loss: The largest loss to be expected of a step, in float32.

        Raises:
            ValueError: If it is not finite in float32.

        Example:

        >>> LossScaleRule.ceiling_for(3e38) == 1.0
        True
        """
        with np.errstate(over="ignore"):
            loss = float(np.float32(largest_loss))
        if not math.isfinite(loss):
            raise ValueError(
                "largest_loss must be finite in float32: no scale makes a finite loss of it. "
                f"Received: largest_loss={largest_loss}."
            )
        return 2.0 ** min(128 - math.frexp(loss)[1], 127)

    @property
    def counts_bad_steps(self) -> bool:
        """Whether more than the scale and the streak decides: hysteresis or a tolerance."""
        return self.hysteresis > 1 or self.tolerance > 0.0

    def start(self) -> LossScaleState:
        """Returns the state before the first step."""
        return LossScaleState(self.initial_scale)

    def update(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """Returns the state after a step; what the rule does not go by stays as it is.

        Args:
            state: The state before it: numbers or tensors, of any one shape.
            finite: Whether every gradient of the step was finite; a bool or a tensor.

        Example:

        >>> rule = LossScaleRule(1024.0, hysteresis=2)
        >>> first = rule.update(rule.start(), False)
        >>> float(first.scale), float(rule.update(first, False).scale)
        (1024.0, 512.0)
        """
        scale = ops.convert_to_tensor(state.scale, dtype="float32")
        streak = ops.convert_to_tensor(state.streak)
        is_full = ops.greater_equal(streak + 1, self.dynamic_growth_steps)
        grown = ops.minimum(scale * self.growth_factor, self.max_scale)
        backed_off = ops.maximum(scale * self.backoff_factor, self.min_scale)
        counts = ops.logical_and(finite, ops.logical_not(is_full))
        next_streak = ops.where(counts, streak + 1, ops.zeros_like(streak))
        if not self.counts_bad_steps:
            next_scale = ops.where(finite, ops.where(is_full, grown, scale), backed_off)
            return LossScaleState(next_scale, next_streak, *state[2:])

        is_bad = ops.logical_not(finite)
        is_growth = ops.logical_and(finite, is_full)
        since_growth, since_move, steps = (ops.convert_to_tensor(v) for v in state[2:])
        since_growth = since_growth + ops.cast(is_bad, since_growth.dtype)
        since_move = since_move + ops.cast(is_bad, since_move.dtype)
        steps = steps + 1
        # In float64, where a share equals the tolerance that was written for it, 1/10 and 0.1.
        share = ops.cast(since_move, "float64") / ops.cast(steps, "float64")
        has_patience_left = ops.less(since_growth, self.hysteresis)
        backs_off = ops.logical_and(
            ops.logical_and(is_bad, ops.logical_not(has_patience_left)),
            ops.greater_equal(share, ops.convert_to_tensor(self.tolerance, dtype="float64")),
        )
        moves = ops.logical_or(is_growth, backs_off)
        return LossScaleState(
            ops.where(is_growth, grown, ops.where(backs_off, backed_off, scale)),
            next_streak,
            ops.where(is_growth, ops.zeros_like(since_growth), since_growth),
            ops.where(moves, ops.zeros_like(since_move), since_move),
            ops.where(moves, ops.zeros_like(steps), steps),
        )

    def next(self, scale: Any, streak: Any, finite: Any) -> tuple[Any, Any]:
        """Returns the scale and the streak after a step, for a rule that goes by these alone.

        Args:
            scale: See `LossScaleState`; a number or a tensor.
            streak: See `LossScaleState`; a number or a tensor.
            finite: Whether every gradient of the step was finite; a bool or a tensor.

        Raises:
            ValueError: If the rule has hysteresis or a tolerance, which need the whole state.

        Example:

        >>> rule = LossScaleRule(dynamic_growth_steps=2)
        >>> [float(v) for v in rule.next(1024.0, 1, True)]
        [2048.0, 0.0]
        """
        if self.counts_bad_steps:
            raise ValueError(
                "A rule with hysteresis or a tolerance goes by more than scale and streak: use "
                f"update(state, finite). Received: hysteresis={self.hysteresis}, "
                f"tolerance={self.tolerance}."
            )
        after = self.update(LossScaleState(scale, streak), finite)
        return after.scale, after.streak
