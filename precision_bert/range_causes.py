"""The known causes of a number that leaves its dtype's range, told apart by what was seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Cause = Literal[
    "none",
    "loss scale",
    "input",
    "input range",
    "labels",
    "label cast",
    "loss",
    "mask constant",
    "epsilon",
    "GELU gradient",
    "overflow",
    "weights",
    "optimizer state",
    "unknown",
]
CAUSES: tuple[Cause, ...] = get_args(Cause)

_KEEP = "switch_precision(model, policy, keep_float32=['{layer}'])"

REMEDIES: dict[Cause, str] = {
    "none": "Look at other batches: this one trains.",
    "loss scale": "Nothing to do while the scale can fall; it is halved at each skipped step. If "
    "it is at its floor already, give DynamicLossScaleOptimizer a lower min_scale.",
    "input": "Drop or mend the examples that hold NaN or infinity; no precision trains on them.",
    "input range": "Scale or clip the inputs into ±65504, or keep the layer that takes them in "
    f"float32: {_KEEP}.",
    "labels": "Drop or mend the labels or sample weights that are NaN or infinite; no precision "
    "trains on them.",
    "label cast": "Compute the loss in float32, and give class ids as integers, which no "
    "policy casts; or scale the targets.",
    "loss": "Keep the loss away from log(0) and x/0: compute it from logits "
    "(from_logits=True), in float32, or clip its argument.",
    "mask constant": "Mask with a number that the dtype holds, such as -3e4 for float16 (a "
    f"keras.layers.Softmax given mask= does), or keep the layer in float32: {_KEEP}.",
    "epsilon": "Give the layer an epsilon of at least 1e-3 in half (what is below 3e-8 is 0 in "
    f"float16), or keep it in float32: {_KEEP}.",
    "GELU gradient": "Keep the layer in float32: "
    f"{_KEEP}; or use the exact GELU (approximate=False), mixed_bfloat16 or float32.",
    "overflow": f"Keep the layer in float32: {_KEEP}; or train in mixed_bfloat16 or float32, whose "
    "range is float32's; or make the weights smaller.",
    "weights": "Go back to weights that are finite: load_state, or StallGuard(action='escalate').",
    "optimizer state": "Start the optimizer anew by compiling the model, or go back to a "
    "checkpoint: load_state, or staged_fit(checkpoint_dir=..., resume=True).",
    "unknown": f"Keep the layer in float32: {_KEEP}; or train in float32.",
}


@dataclass(frozen=True)
class RangeFinding:
    """The first tensor of a training step that is not finite, and why.

    Attributes:
        cause: One of `CAUSES`; `"none"` where all of the step is finite, `"loss scale"` where it is
            at scale 1 and not at the scale of now, which is healthy while the scale can fall.
        layer: Path of the layer that made it; `"(loss)"` and the like outside layers; empty if
            there is none.
        tensor: What is not finite: a part of the data, a variable's path or an operation's output.
        direction: `"forward"`, `"backward"` (a gradient), or empty where it is no step's tensor.
        dtype: The tensor's dtype.
        seen: What the verdict rests on, in words.
        loss: The batch's loss, not scaled; `None` where no step was run.
    """

    cause: Cause
    layer: str = ""
    tensor: str = ""
    direction: str = ""
    dtype: str = ""
    seen: str = ""
    loss: float | None = None

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return REMEDIES[self.cause].format(layer=self.layer)

    @property
    def is_healthy(self) -> bool:
        """Whether the step trains, now or once the loss scale has fallen."""
        return self.cause in ("none", "loss scale")

    def __str__(self) -> str:
        """Returns the verdict, what it rests on, and the remedy."""
        where = f" in layer {self.layer!r}" if self.layer else ""
        kind = " ".join(filter(None, (self.direction, self.dtype, "tensor")))
        what = f" ({kind} {self.tensor!r})" if self.tensor else ""
        loss = "" if self.loss is None else f" The batch's loss is {self.loss:.4g}."
        return f"Cause: {self.cause}{where}{what}. {self.seen}{loss} Remedy: {self.remedy}"


@dataclass(frozen=True)
class Origin:
    """An operation that made infinity or NaN of finite numbers.

    Attributes:
        layer: As in `RangeFinding`.
        name: The operation's name in the traced step.
        type: TensorFlow's type of it, such as `"Pow"`.
        dtype: Its output's dtype.
        is_gradient: Whether it is part of a gradient.
        source: Where its numbers come from if they were only moved or cast on the way: `"x"`, `"y"`
            or `"sample_weight"` and a path in it, a variable's path, `"(constant)"`; else empty.
        source_kind: `"data"`, `"variable"`, `"constant"` or empty.
        largest: The largest magnitude among its inputs.
        smallest: The smallest.
        makes_nan: Whether NaN is among what it made.
        only_negative: Whether what is not finite is minus infinity only.
        epsilon: The layer's `epsilon`, if it has one.
    """

    layer: str
    name: str
    type: str
    dtype: str
    is_gradient: bool
    source: str
    source_kind: str
    largest: float
    smallest: float
    makes_nan: bool
    only_negative: bool
    epsilon: float | None


# What divides, or has a pole at 0.
_POLES = "Rsqrt RsqrtGrad RealDiv Div Xdivy Reciprocal Inv Log Log1p SqrtGrad ReciprocalGrad Sqrt"
_LARGEST_HALF = 65504.0


def judge(origin: Origin, loss: float) -> RangeFinding:
    """Returns the finding for an operation that made what is not finite."""
    cause, seen = _cause(origin)
    is_source = origin.type in ("Placeholder", "ReadVariableOp", "ResourceGather")
    return RangeFinding(
        cause,
        layer=origin.layer,
        tensor=origin.source if is_source and origin.source else origin.name,
        direction="backward" if origin.is_gradient else "forward",
        dtype=origin.dtype,
        seen=seen,
        loss=loss,
    )


def _cause(one: Origin) -> tuple[Cause, str]:
    of_labels = one.source.startswith(("y", "sample_weight")) and one.source_kind == "data"
    up_to = f"up to {one.largest:.4g}"
    if one.type == "Placeholder" and one.source_kind == "data":
        return ("labels" if of_labels else "input"), f"{one.source} holds NaN or infinity."
    if one.type in ("ReadVariableOp", "ResourceGather"):
        return "weights", f"The variable {one.source} holds NaN or infinity."
    if one.source_kind == "constant" and one.dtype in ("float16", "bfloat16"):
        return "mask constant", f"A constant is infinite in {one.dtype}."
    if one.type == "Cast":
        return _cast_cause(one, of_labels, up_to)
    if one.layer == "(loss)":
        return "loss", f"The model's outputs are finite; {one.type} in the loss made {_made(one)}."
    if "Gelu" in one.name.split("/"):
        return "GELU gradient", (
            f"tanh-GELU of numbers {up_to}: in {one.dtype} x² is infinite from |x| = 256 on, and "
            "its gradient 0 · infinity."
        )
    if one.type in _POLES.split() and one.smallest < 1e-2:
        return "epsilon", f"{one.type} of {one.smallest:.4g} in {one.dtype}{_epsilon(one)}."
    if one.only_negative and not one.is_gradient and one.largest >= 1e4 and one.type == "Mul":
        return "mask constant", f"A mask of {-one.largest:.4g} is infinite in {one.dtype}."
    if not one.makes_nan:
        limit = "65504" if one.dtype == "float16" else "its dtype's range"
        return "overflow", f"{one.type} of numbers {up_to} is beyond {limit} in {one.dtype}."
    return "unknown", f"{one.type} made NaN of finite numbers {up_to} in {one.dtype}."


def _cast_cause(one: Origin, of_labels: bool, up_to: str) -> tuple[Cause, str]:
    seen = f"{one.source or 'Numbers'} {up_to} became infinite in {one.dtype}."
    if one.source_kind == "data":
        if of_labels:
            return "label cast", seen
        return "input range", seen
    if one.source_kind == "" and one.only_negative and one.largest > 10 * _LARGEST_HALF:
        return "mask constant", f"A mask of {-one.largest:.4g} is infinite in {one.dtype}."
    return "overflow", seen


def _made(one: Origin) -> str:
    return "NaN" if one.makes_nan else "infinity"


def _epsilon(one: Origin) -> str:
    if one.epsilon is None:
        return ""
    return f"; the layer's epsilon is {one.epsilon:.4g}"
