"""Keras' global dtype policy for the time of a `with` block."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import keras

from precision_bert.policies import PolicyName, check_policy

# The policy objects that these scopes made global. A layer that is given no dtype has the global
# object of its time, which tells it from one that was given a dtype, also when the scope has ended.
# By identity: Keras' policies are equal by name.
_handed_out: weakref.WeakValueDictionary[int, keras.DTypePolicy] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def precision_scope(policy: PolicyName) -> Iterator[None]:
    """Sets Keras' global dtype policy for a `with` block, and restores it whatever happens.

    Use it to build a model in a policy without leaving that policy behind for the next notebook
    cell.

    Args:
        policy: The policy within the block.

    Raises:
        ValueError: If the policy is unknown.

    Example:

    >>> with precision_scope("mixed_float16"):
    ...     layer = keras.layers.Dense(2)
    >>> layer.compute_dtype, keras.config.dtype_policy().name
    ('float16', 'float32')
    """
    with global_policy(check_policy(policy)):
        yield


@contextlib.contextmanager
def global_policy(policy: str) -> Iterator[None]:
    """Sets Keras' global dtype policy, any that Keras knows, for a `with` block."""
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        for one in (previous, keras.config.dtype_policy()):
            _handed_out[id(one)] = one
        yield
    finally:
        keras.config.set_dtype_policy(previous)


def is_default(policy: keras.DTypePolicy) -> bool:
    """Tells whether a policy object is the global one, or was it in one of these scopes."""
    return policy is keras.config.dtype_policy() or _handed_out.get(id(policy)) is policy
