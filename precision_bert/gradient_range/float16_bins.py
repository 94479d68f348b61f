"""Counts magnitudes so that float16's losses are known at every loss scale, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from precision_bert.gradient_range.record import SMALLEST_NORMAL, GradientCounts

SCALES = 2.0 ** np.arange(-100, 101)
"""The loss scales that are compared. Beyond them float32 itself is at its end: its smallest normal
number, 2**-126, is still zero in float16 after 2**100."""

INFINITY = 0x7F800000
"""The bit pattern of float32's infinity: those of NaN lie above it, those of numbers below."""


class Float16Bins:
    """Bins of float32 magnitudes that float16 treats alike, at each scale that is asked about.

    Counts in these bins tell exactly how many numbers float16 loses at one loss scale and at each
    of `SCALES`, without a second look at the numbers.

    Args:
        loss_scale: The one scale, a positive float32 number; no power of two is needed.

    Attributes:
        edges: Ascending int32. Bin `i` holds the magnitudes whose bit patterns lie from
            `edges[i - 1]` to below `edges[i]`: bin 0 is exact zero, the last one what is not
            finite. (Magnitudes in float32 are in the order of their bit patterns.)
        magnitudes: The smallest number of each bin between those two, float64.
        by_scale: `outcomes` at each of `SCALES`.
        loss_scale: As given.

    Example:

    >>> bins = Float16Bins(1.0)
    >>> zero, subnormal, overflow = bins.outcomes(np.array([1.0]))
    >>> float(bins.magnitudes[overflow[:, 0]].min())  # what lies below is rounded to 65504
    65520.0
    """

    def __init__(self, loss_scale: float) -> None:
        self.loss_scale = loss_scale
        scales = np.append(SCALES, loss_scale)
        # Each holds of zero, and from some magnitude on no more. float16 is asked itself where.
        borders = [
            _first_without(test, scales)
            for test in (lambda h: h == 0, lambda h: h < SMALLEST_NORMAL, np.isfinite)
        ]
        powers_of_two = np.arange(1, 256) << 23  # the last is infinity
        self.edges = np.unique(np.concatenate([[1], powers_of_two, *borders])).astype(np.int32)
        self.magnitudes = _magnitudes(self.edges[:-1])
        self.by_scale = self.outcomes(SCALES)

    def outcomes(self, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tells what becomes of each of `magnitudes` in float16, at each scale.

        Args:
            scales: `(n,)`, of `SCALES` and `loss_scale`.

        Returns:
            Three bool arrays `(len(magnitudes), n)`: whether it is rounded to zero, is subnormal,
            overflows.
        """
        half = _in_float16(self.magnitudes[:, None], scales)
        return half == 0, (half > 0) & (half < SMALLEST_NORMAL), np.isinf(half)


def _magnitudes(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.int32).view(np.float32).astype(np.float64)


def _in_float16(magnitudes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    # The product of two float32 numbers is exact in float64, so it is rounded once.
    with np.errstate(over="ignore"):
        return (magnitudes * scales).astype(np.float16)


def _first_without(test: Callable[[np.ndarray], np.ndarray], scales: np.ndarray) -> np.ndarray:
    """Returns the first bit pattern, for each scale, for which `test` holds no more."""
    holds, fails = np.zeros(len(scales), np.int64), np.full(len(scales), INFINITY, np.int64)
    while (fails - holds > 1).any():
        middle = (holds + fails) // 2
        passed = test(_in_float16(_magnitudes(middle), scales))
        holds, fails = np.where(passed, middle, holds), np.where(passed, fails, middle)
    return fails


class Tally:
    """Adds up counts of gradient entries.

    Args:
        bins: What they are counted in.
    """

    def __init__(self, bins: Float16Bins) -> None:
        self.bins = bins
        self.counts = np.zeros(len(bins.edges) + 1, np.int64)
        self.smallest, self.largest = INFINITY, 0

    def add(self, counts: np.ndarray, smallest: int, largest: int) -> Tally:
        """Adds entries.

        Args:
            counts: How many are in each bin.
            smallest: The bit pattern of the smallest that is not zero; `INFINITY` without one.
            largest: The bit pattern of the largest that is finite; 0 without one.

        Returns:
            Itself.
        """
        self.counts += counts
        self.smallest = min(self.smallest, int(smallest))
        self.largest = max(self.largest, int(largest))
        return self

    def __add__(self, other: Tally) -> Tally:
        both = Tally(self.bins).add(self.counts, self.smallest, self.largest)
        return both.add(other.counts, other.smallest, other.largest)

    def lost_at(self, scale: float) -> tuple[int, int]:
        """Returns how many entries float16 rounds to zero at a scale, and how many overflow."""
        zero, _, overflow = self.bins.outcomes(np.array([scale]))
        finite = self.counts[1:-1]
        return int(finite @ zero[:, 0]), int(finite @ overflow[:, 0])

    def best_scale(self) -> float | None:
        """Returns `GradientCounts.best_scale`."""
        finite = self.counts[1:-1]
        if not finite.any():
            return None
        zero, subnormal, overflow = (finite @ outcome for outcome in self.bins.by_scale)
        return float(SCALES[np.lexsort((SCALES, subnormal, zero, overflow))[0]])

    def counted(self) -> GradientCounts:
        """Returns the counts at the bins' loss scale."""
        finite = self.counts[1:-1]
        zero, subnormal, overflow = (
            int(finite @ outcome[:, 0])
            for outcome in self.bins.outcomes(np.array([self.bins.loss_scale]))
        )
        exponents: dict[int, int] = {}
        for magnitude, count in zip(self.bins.magnitudes, finite, strict=True):
            if count:
                exponent = max(math.frexp(magnitude)[1] - 1, -127)
                exponents[exponent] = exponents.get(exponent, 0) + int(count)
        smallest, largest = _magnitudes(np.array([self.smallest, self.largest]))
        return GradientCounts(
            entries=int(self.counts.sum()),
            zeros=int(self.counts[0]),
            underflow=zero,
            subnormal=subnormal,
            normal=int(finite.sum()) - zero - subnormal - overflow,
            overflow=overflow,
            non_finite=int(self.counts[-1]),
            smallest=float(smallest) if finite.any() else None,
            largest=float(largest) if finite.any() else None,
            best_scale=self.best_scale(),
            exponents=exponents,
        )
