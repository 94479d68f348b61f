"""The record of what a model computes in: by layer, kind of operation and dtype."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from precision_bert.policies import HALF, PolicyName, check_policy

Kind = Literal["matmul", "convolution", "einsum", "recurrent", "other", "cast"]

MULTIPLIES: tuple[Kind, ...] = ("matmul", "convolution", "einsum", "recurrent")
"""The kinds that are multiply work: what half precision is meant to make faster."""


class PrecisionAuditError(AssertionError):
    """A model computes in another precision than was required.

    An `AssertionError`, because what is wrong is the model and no argument: a `ValueError` from
    `require` is a policy name that does not exist.
    """


@dataclass(frozen=True)
class OperationCount:
    """Operations of one type in one dtype.

    Attributes:
        type: TensorFlow's type of them, such as `"MatMul"`.
        kind: `"matmul"`, `"convolution"`, `"einsum"` and `"recurrent"` (a cuDNN RNN) are multiply
            work; `"other"` computes something else; a `"cast"` rounds numbers to half precision.
        dtype: What they compute in; of a cast, what it rounds to.
        is_gradient: Whether they are part of the gradients.
        count: How many there are.
        multiply_adds: How many pairs of numbers they multiply and add; `None` where the traced
            shapes do not tell, and for what is no multiply work.
        example: The name of the first of them in the traced function.
    """

    type: str
    kind: Kind
    dtype: str
    is_gradient: bool
    count: int
    multiply_adds: int | None
    example: str


@dataclass(frozen=True)
class LayerPrecision:
    """What one layer computes in.

    Attributes:
        path: The layer's path, or a name in brackets for what belongs to no layer.
        type: Its class; empty outside layers.
        policy_dtype: What its policy computes in; empty outside layers.
        is_island: Whether it is a float32 island.
        operations: What it computes; empty if that is nothing in a float dtype.
    """

    path: str
    type: str
    policy_dtype: str
    is_island: bool
    operations: tuple[OperationCount, ...]

    def dtypes(self, *kinds: Kind, is_gradient: bool | None = None) -> dict[str, int]:
        """Returns how many operations the layer has in each dtype.

        Args:
            *kinds: The kinds to count; all that compute (so no casts) if none is given.
            is_gradient: Whether to count gradients or what is none; `None` counts both.
        """
        counts: Counter[str] = Counter()
        for one in self.operations:
            if one.kind in (kinds or (*MULTIPLIES, "other")) and is_gradient in (
                None,
                one.is_gradient,
            ):
                counts[one.dtype] += one.count
        return dict(sorted(counts.items()))


@dataclass(frozen=True)
class PrecisionAudit:
    """What a traced step of a model computes in; see `audit_precision`.

    Every operation of the traced function that computes in a float dtype, or rounds to half
    precision, is in one of the rows of `layers`; the others are in `other_operations`.

    Attributes:
        model: The model's name.
        what: `"train"` or `"predict"`.
        source: What was traced.
        layers: A row for each layer, in the order of their first operation, and for what belongs
            to none; those that compute nothing come last.
        other_operations: How many operations only move, store or convert numbers (except to half
            precision), or have nothing to do with float numbers.
        notes: What is notable, in sentences.
    """

    model: str
    what: str
    source: str
    layers: tuple[LayerPrecision, ...]
    other_operations: int
    notes: tuple[str, ...]

    @property
    def islands(self) -> tuple[str, ...]:
        """Paths of the float32 islands."""
        return tuple(layer.path for layer in self.layers if layer.is_island)

    @property
    def half_share(self) -> float | None:
        """The share of the multiply work in half precision, 0 to 1; `None` where there is none.

        By multiply-adds if those of all multiplies are known (`is_share_by_work`), else by the
        number of operations. The body of a loop counts once.
        """
        by_work = self.is_share_by_work
        total = half = 0
        for one in self._multiplies():
            size = (one.multiply_adds or 0) if by_work else one.count
            total += size
            half += size if one.dtype in HALF else 0
        return half / total if total else None

    @property
    def is_share_by_work(self) -> bool:
        """Whether `half_share` is by multiply-adds rather than by the number of operations."""
        return all(one.multiply_adds is not None for one in self._multiplies())

    def dtypes(self, *kinds: Kind, is_gradient: bool | None = None) -> dict[str, int]:
        """Returns how many operations there are in each dtype; see `LayerPrecision.dtypes`."""
        counts: Counter[str] = Counter()
        for layer in self.layers:
            counts.update(layer.dtypes(*kinds, is_gradient=is_gradient))
        return dict(sorted(counts.items()))

    def summary(self) -> dict[str, Any]:
        """Returns the audit in a few figures, ready for JSON."""
        return {
            "source": self.source,
            "multiplies": self.dtypes(*MULTIPLIES),
            "others": self.dtypes("other"),
            "casts_to_half": self.dtypes("cast"),
            "half_share": self.half_share,
            "is_share_by_work": self.is_share_by_work,
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns the audit as plain lists, dicts, numbers and strings, ready for JSON."""
        return {**dataclasses.asdict(self), "summary": self.summary()}

    def stray_half(self, policy: PolicyName) -> tuple[str, ...]:
        """Describes the operations in a half precision that is neither the policy's nor their own.

        They were written into a layer's `call`, into a function, or into the graph. Islands are
        left out: what they compute in is their author's decision.

        Args:
            policy: The policy that the model should have.

        Raises:
            ValueError: If the policy is unknown.
        """
        dtype = check_policy(policy).removeprefix("mixed_")
        return tuple(
            f"layer {layer.path!r} has {_described(one)}"
            for layer in self.layers
            if not layer.is_island
            for one in layer.operations
            if one.dtype in HALF and one.dtype not in (dtype, layer.policy_dtype)
        )

    def missing_half(self) -> tuple[str, ...]:
        """Describes the half dtypes that layers should compute in and nothing computes in.

        The step that was traced is then of another precision than the layers are now.
        """
        wanted = {layer.policy_dtype for layer in self.layers if layer.operations} & {*HALF}
        return tuple(f"nothing computes in {dtype}" for dtype in wanted - self.dtypes().keys())

    def require(self, policy: PolicyName) -> None:
        """Raises an error unless the model computes as it should under a policy.

        `"float32"`: no operation is in half precision anywhere, and nothing is rounded to it.
        `"mixed_float16"`: something is in float16, nothing in bfloat16, and every layer that is no
        island multiplies in float16 only, gradients included, and islands compute nothing in it;
        `"mixed_bfloat16"` likewise.

        Args:
            policy: The policy.

        Raises:
            PrecisionAuditError: Naming each layer and operation that does not.
            ValueError: If the policy is unknown.
        """
        policy = check_policy(policy)
        dtype = policy.removeprefix("mixed_")
        found = []
        for layer in self.layers:
            wrong = [one for one in layer.operations if _offends(layer, one, dtype)]
            if wrong:
                name = f"{layer.path} ({layer.type})" if layer.type else layer.path
                island = ", a float32 island" if layer.is_island else ""
                found.append(f"  {name}{island}: {', '.join(map(_described, wrong))}")
        if not found and dtype in HALF and dtype not in self.dtypes():
            found = [f"  no operation is in {dtype} at all"]
        if not found:
            return
        mend = (
            "Layers that are to stay in float32 are named in its keep_float32=[...]."
            if dtype in HALF
            else "What is in half precision even then was written into a layer's call or a "
            "Functional graph, and must be changed there."
        )
        raise PrecisionAuditError(
            f"{self.model!r} does not compute as {policy!r} demands ({self.what}; {self.source}):\n"
            + "\n".join(found)
            + f"\nswitch_precision(model, {policy!r}) sets the policy of every layer. {mend}"
        )

    def __str__(self) -> str:
        """Returns a table with a row for each layer that computes something."""
        header = ["layer", "type", "policy", "multiplies", "other", "casts to half"]
        if self.what == "train":
            header += ["gradient multiplies", "gradient other"]
        rows = [header]
        for layer in self.layers:
            if not layer.operations:
                continue
            island = " (island)" if layer.is_island else ""
            row = [layer.path, layer.type, layer.policy_dtype + island]
            row += [_cell(layer, MULTIPLIES, False), _cell(layer, ("other",), False)]
            row.append(_cell(layer, ("cast",), None))
            if self.what == "train":
                row += [_cell(layer, MULTIPLIES, True), _cell(layer, ("other",), True)]
            rows.append(row)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{self.model}, {self.what}: {self.source}"]
        lines += [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        silent = sum(not layer.operations for layer in self.layers)
        if silent:
            lines.append(f"{silent} layers compute nothing in a float dtype")
        if self.half_share is not None:
            unit = "multiply-adds" if self.is_share_by_work else "multiplying operations"
            lines.append(f"in half precision: {self.half_share:.1%} of the {unit}")
        return "\n".join([*lines, *(f"- {note}" for note in self.notes)])

    def _multiplies(self) -> Iterable[OperationCount]:
        return [o for layer in self.layers for o in layer.operations if o.kind in MULTIPLIES]


def _offends(layer: LayerPrecision, one: OperationCount, dtype: str) -> bool:
    if one.dtype in HALF:
        return one.dtype != dtype or (layer.is_island and one.kind != "cast")
    # Outside layers it is the optimizer, a metric or a custom train step that multiplies.
    is_free = dtype not in HALF or layer.is_island or not layer.type
    return one.kind in MULTIPLIES and not is_free


def _described(one: OperationCount) -> str:
    rounds = " to" if one.kind == "cast" else " in"
    gradient = " of a gradient" if one.is_gradient else ""
    return f"{one.count} {one.type}{gradient}{rounds} {one.dtype} (first: {one.example})"


def _cell(layer: LayerPrecision, kinds: tuple[Kind, ...], is_gradient: bool | None) -> str:
    parts = []
    for kind in kinds:
        name = f" {kind}" if kind in MULTIPLIES else ""
        counts = layer.dtypes(kind, is_gradient=is_gradient)
        parts += [f"{count}{name} {dtype}" for dtype, count in counts.items()]
    return ", ".join(parts) or "-"
