"""The precision policies that a model can be switched between: names, dtypes, validation."""

from __future__ import annotations

from typing import Literal, get_args

# Keras' own names. All three keep their variables in float32, which is why a built model can move
# between them in place: only what is computed changes, never what is stored.
PolicyName = Literal["float32", "mixed_float16", "mixed_bfloat16"]

SWITCHABLE_POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)

_COMPUTE_DTYPES = {
    "float32": "float32",
    "mixed_float16": "float16",
    "mixed_bfloat16": "bfloat16",
}


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


def compute_dtype(policy: PolicyName) -> str:
    """Returns the dtype that layers with this policy compute in.

    Example:

    >>> compute_dtype("mixed_bfloat16")
    'bfloat16'
    """
    return _COMPUTE_DTYPES[check_policy(policy)]


def needs_loss_scaling(policy: PolicyName) -> bool:
    """Tells whether gradients computed under `policy` underflow without a loss scale.

    float16 has five exponent bits and loses gradients below 6e-8; bfloat16 has float32's eight.
    See Micikevicius et al., "Mixed Precision Training", ICLR 2018.

    Example:

    >>> [needs_loss_scaling(p) for p in ("float32", "mixed_float16", "mixed_bfloat16")]
    [False, True, False]
    """
    return compute_dtype(policy) == "float16"
