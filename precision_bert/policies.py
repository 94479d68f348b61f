"""The precision policies that a model can be switched between: names, dtypes, validation."""

from __future__ import annotations

from typing import Literal, get_args

# Keras' own names. All three keep their variables in float32, which is why a built model can move
# between them in place: only what is computed changes, never what is stored.
PolicyName = Literal["float32", "mixed_float16", "mixed_bfloat16"]

HALF = ("float16", "bfloat16")
"""The dtypes that a layer in half precision computes in."""

SWITCHABLE_POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def check_policy(policy: object, argument: str = "policy") -> PolicyName:
    """Returns the name of `policy` if a model can be switched to it, or says why not.

    Args:
        policy: A policy name, or a `keras.DTypePolicy` (anything with a `name`).
        argument: The argument's name, for the error message.

    Returns:
        One of `SWITCHABLE_POLICIES`.

    Raises:
        ValueError: For any other policy.

    Example:

    >>> check_policy("mixed_float16")
    'mixed_float16'
    """
    name = policy if isinstance(policy, str) else getattr(policy, "name", policy)
    if name in SWITCHABLE_POLICIES:
        return name
    hint = ""
    if name in ("float16", "bfloat16", "half", "fp16", "bf16"):
        mixed = "mixed_bfloat16" if name in ("bfloat16", "bf16") else "mixed_float16"
        hint = (
            f" A model with half-precision variables cannot be switched in place; you probably "
            f"want {mixed!r}, which computes in half precision and keeps its variables in float32."
        )
    raise ValueError(
        f"{argument} must be one of {', '.join(map(repr, SWITCHABLE_POLICIES))}. "
        f"Received: {argument}={policy!r}.{hint}"
    )


_BY_PRECISION: tuple[PolicyName, ...] = ("mixed_float16", "mixed_bfloat16", "float32")


def higher_precision(one: PolicyName, other: PolicyName) -> PolicyName:
    """Returns the policy of two that loses less of a number's range.

    Example:

    >>> higher_precision("mixed_bfloat16", "mixed_float16")
    'mixed_bfloat16'
    """
    return max(one, other, key=_BY_PRECISION.index)
