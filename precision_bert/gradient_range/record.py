"""What float16 can hold of a model's gradients, by layer: a record, a table and a plot."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

SMALLEST_NORMAL = 2.0**-14
"""The smallest magnitude that float16 holds with all its bits."""

LARGEST = 65504.0
"""The largest number that float16 holds."""


@dataclass(frozen=True)
class GradientCounts:
    """How many entries of gradients float16 can hold at the report's loss scale.

    Each entry `g`, in float32, is in one of six groups, by what `g` times the scale is when it is
    rounded to float16.

    Attributes:
        entries: All of them, over all batches.
        zeros: Those that are exactly zero in float32: float16 loses nothing there.
        underflow: Those that are rounded to zero: up to 2**-25.
        subnormal: Those that keep less than float16's 11 bits: below 2**-14.
        normal: Those that keep them.
        overflow: Those that become infinite: from 65520 on. One is enough to skip a step.
        non_finite: Those that are infinite or NaN in float32 already.
        smallest: The smallest magnitude that is not zero, without the scale; `None` without one.
        largest: The largest finite magnitude, without the scale; `None` without one.
        best_scale: The power of two that loses least: of those from 2**-100 to 2**100 at which
            fewest overflow, the one at which fewest are rounded to zero, then fewest are subnormal;
            the smallest of equals. `None` where all entries are zero or not finite.
        exponents: How many magnitudes lie from 2**e to below 2**(e + 1), by e, without the scale;
            float32's subnormal numbers are under -127.
    """

    entries: int
    zeros: int
    underflow: int
    subnormal: int
    normal: int
    overflow: int
    non_finite: int
    smallest: float | None
    largest: float | None
    best_scale: float | None
    exponents: dict[int, int]

    def share(self, count: int) -> float:
        """Returns `count` as a share of the finite entries that are not zero; 0 without any."""
        return count / max(self.entries - self.zeros - self.non_finite, 1)


@dataclass(frozen=True)
class LayerRange:
    """The gradients of one layer.

    Attributes:
        path: The layer's path.
        type: Its class.
        stays_float32: Whether it is a float32 island: float16's range is none of its business.
        both: Its weights' gradients and those that reach its outputs, together.
        weights: With respect to its trainable weights; `None` where it has none.
        outputs: With respect to its outputs; `None` where none reach them.
        lost_share: At the model's best scale, which share of its finite entries that are not zero
            is rounded to zero or overflows, 0 to 1.
    """

    path: str
    type: str
    stays_float32: bool
    both: GradientCounts
    weights: GradientCounts | None
    outputs: GradientCounts | None
    lost_share: float


@dataclass(frozen=True)
class GradientRange:
    """What float16 can hold of a model's gradients. Print it for a table.

    Attributes:
        model: The model's name.
        batches: How many batches were read.
        loss_scale: The scale that is counted at.
        scale_source: Where that comes from, in words.
        total: The gradients of all layers that are no float32 islands.
        layers: Those layers that have gradients, in Keras' order.
        max_lost_share: What a layer may lose before it is in `keep_float32`, 0 to 1.
        keep_float32: Paths of the layers that lose more, or overflow, at `total.best_scale`; to be
            given to `switch_precision`.
        notes: What the reader must know.
    """

    model: str
    batches: int
    loss_scale: float
    scale_source: str
    total: GradientCounts
    layers: tuple[LayerRange, ...]
    max_lost_share: float
    keep_float32: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain dicts, tuples, numbers and strings, ready for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """Returns a table with a row for each layer, and what is proposed."""
        header = ["layer", "type", "entries", "to zero", "subnormal", "overflow"]
        header += ["smallest", "largest", "best scale"]
        rows = [header]
        for layer in self.layers:
            island = " (island)" if layer.stays_float32 else ""
            rows.append([layer.path, layer.type + island, *_cells(layer.both)])
        rows.append(["all but islands", "", *_cells(self.total)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        batches = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        lines = [
            f"{self.model}: gradients of {batches} in float16 at a loss scale of "
            f"{scale_name(self.loss_scale)} ({self.scale_source})"
        ]
        for row in rows:
            left = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
            right = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
            lines.append("  ".join(left + right))
        lines.append("shares are of the entries that are not zero; magnitudes without the scale")
        if self.keep_float32:
            lines.append(
                f"at {scale_name(self.total.best_scale)} these lose more than "
                f"{self.max_lost_share:.3g} of theirs: keep_float32={list(self.keep_float32)}"
            )
        else:
            lines.append(
                f"at {scale_name(self.total.best_scale)} no layer loses more than "
                f"{self.max_lost_share:.3g} of its entries"
            )
        return "\n".join([*lines, *(f"- {note}" for note in self.notes)])

    def plot(self, ax: Any = None) -> Any:
        """Draws how large each layer's gradients are, and what float16 holds of them.

        A row a layer, a column a power of two; the darker, the larger the share of the layer's
        entries. Between the solid lines float16 keeps all its bits at the report's scale, from the
        dashed line on only some; the dotted lines are the solid ones at the best scale.

        Args:
            ax: The matplotlib `Axes` to draw on; a new figure's without it.

        Returns:
            The `Axes`.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        if ax is None:
            ax = _new_axes(len(self.layers))
        held = [exponent for layer in self.layers for exponent in layer.both.exponents]
        low, high = min(held, default=-25), max(held, default=15)
        image = np.full((len(self.layers), high - low + 1), np.nan)
        for row, layer in enumerate(self.layers):
            for exponent, count in layer.both.exponents.items():
                image[row, exponent - low] = layer.both.share(count)
        # An entry of 2**e lies at the left border of its column.
        ax.imshow(
            image,
            aspect="auto",
            cmap="Blues",
            vmin=0,
            interpolation="nearest",
            extent=(low, high + 1, len(self.layers) - 0.5, -0.5),
        )
        for border, style in ((2.0**-25, "--"), (SMALLEST_NORMAL, "-"), (LARGEST, "-")):
            ax.axvline(math.log2(border / self.loss_scale), color="black", linestyle=style)
            if self.total.best_scale is not None and style == "-":
                place = math.log2(border / self.total.best_scale)
                ax.axvline(place, color="black", linestyle=":")
        ax.set_yticks(range(len(self.layers)), [layer.path for layer in self.layers])
        ax.set_xlabel("magnitude of a gradient's entry, as a power of two")
        ax.set_title(f"{self.model}, loss scale {scale_name(self.loss_scale)}")
        return ax


def _new_axes(num_rows: int) -> Any:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "plot() draws with matplotlib, which is not installed: pip install matplotlib. The "
            "figures themselves are in the report: print it, or use to_dict()."
        ) from error
    _, ax = pyplot.subplots(figsize=(8, 1.5 + 0.2 * num_rows), layout="constrained")
    return ax


def _cells(counts: GradientCounts) -> list[str]:
    return [
        str(counts.entries),
        *(_percent(counts, part) for part in (counts.underflow, counts.subnormal, counts.overflow)),
        *(_or_dash(value) for value in (counts.smallest, counts.largest)),
        scale_name(counts.best_scale),
    ]


def _percent(counts: GradientCounts, part: int) -> str:
    # 0.00% must not hide the one entry that skips a step.
    share = counts.share(part)
    return "<0.01%" if part and share < 5e-5 else f"{share:.2%}"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def scale_name(scale: float | None) -> str:
    """Returns a loss scale as a power of two where it is one; a dash for `None`."""
    if scale is None:
        return "-"
    mantissa, exponent = math.frexp(scale)
    return f"2**{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"
