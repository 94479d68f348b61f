"""The rule by which a dynamic loss scale moves: (scale, streak, finite) -> (scale, streak)."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

from keras import ops


@dataclass(frozen=True)
class LossScaleRule:
    r"""How the loss scale follows the finiteness of the gradients.

    After a step at scale $s$ with a streak of $n$ applied steps since the scale last moved:

    $$(s, n) \leftarrow \begin{cases}
      (\max(s / 2,\ s_{min}),\ 0) & \text{gradients not finite: the step is skipped} \\
      (\min(2 s,\ s_{max}),\ 0)   & \text{finite and } n + 1 \ge \text{growth steps} \\
      (s,\ n + 1)                 & \text{finite otherwise}
    \end{cases}$$

    Within its bounds this is the rule of Keras' `LossScaleOptimizer`. The bounds are added: without
    a floor a long run of bad steps drives the scale to 0 and the next good step divides by it;
    without a ceiling tiny gradients drive it to infinity, and no step is applied ever again.

    Args:
        initial_scale: The first scale. Keras' default, $2^{15}$.
        dynamic_growth_steps: How many steps in a row must be applied before the scale doubles.
            Keras' default, 2000.
        min_scale: The floor. 1: scaling down would only push gradients out of half's range.
        max_scale: The ceiling. $2^{24}$, the one that NVIDIA's Apex uses.

    Raises:
        ValueError: If a value is not finite and positive, or if the initial scale is out of bounds.

    See Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2.
    """

    initial_scale: float = 2.0**15
    dynamic_growth_steps: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    def __post_init__(self) -> None:
        for name in ("initial_scale", "min_scale", "max_scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(f"{name} must be a float. Received: {name}={value!r}.")
            if not (math.isfinite(value) and float(value) > 0):
                raise ValueError(f"{name} must be finite and positive. Received: {name}={value}.")
        steps = self.dynamic_growth_steps
        if isinstance(steps, bool) or not isinstance(steps, numbers.Integral) or steps < 1:
            raise ValueError(
                "dynamic_growth_steps must be an int of at least 1. "
                f"Received: dynamic_growth_steps={steps!r}."
            )
        if not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                "initial_scale must lie between min_scale and max_scale. Received: "
                f"min_scale={self.min_scale}, initial_scale={self.initial_scale}, "
                f"max_scale={self.max_scale}."
            )

    def next(self, scale: Any, streak: Any, finite: Any) -> tuple[Any, Any]:
        """Returns the scale and the streak after a step.

        Args:
            scale: The scale the step used; a float or a scalar tensor.
            streak: Applied steps since the scale last moved; an int or a scalar tensor.
            finite: Whether every gradient of the step was finite; a bool or a scalar tensor.

        Returns:
            The tuple `(scale, streak)` of scalar tensors for the next step.

        Example:

        >>> rule = LossScaleRule(dynamic_growth_steps=2)
        >>> [float(v) for v in rule.next(1024.0, 1, True)]
        [2048.0, 0.0]
        """
        scale = ops.convert_to_tensor(scale, dtype="float32")
        streak = ops.convert_to_tensor(streak)
        grows = ops.greater_equal(streak + 1, self.dynamic_growth_steps)
        grown = ops.where(grows, ops.minimum(scale * 2.0, self.max_scale), scale)
        backed_off = ops.maximum(scale * 0.5, self.min_scale)
        next_scale = ops.where(finite, grown, backed_off)
        counts = ops.logical_and(finite, ops.logical_not(grows))
        next_streak = ops.where(counts, streak + 1, ops.zeros_like(streak))
        return next_scale, next_streak
