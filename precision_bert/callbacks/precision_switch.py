"""The callback that switches a model's precision inside one plain `fit`."""

from __future__ import annotations

from typing import Any

import keras

from precision_bert.policies import PolicyName, check_policy
from precision_bert.schedules import check_count
from precision_bert.switching import SwitchReport, switch_precision


class PrecisionSwitch(keras.callbacks.Callback):
    """Switches the model to another precision policy before a given epoch of a plain `fit`.

    Use it where you keep your own `fit` call; `two_stage_fit` does the same and also measures the
    stages. Several switches in one `fit` are several of these callbacks.

    Args:
        policy: The policy from that epoch on.
        at_epoch: The epoch to switch before, counted from 0. With `at_epoch=3`, the epochs that
            `fit` prints as 1, 2 and 3 run as before and the one that it prints as 4 is the first in
            the new precision. A `fit` that starts later (`initial_epoch`) switches at its start.

    Raises:
        ValueError: At construction if the policy is unknown or `at_epoch` negative; when training
            begins, if `fit` has too few epochs for the switch ever to happen.

    Attributes:
        report: The `SwitchReport` of the switch, `None` before it.

    Example:

    >>> import numpy as np
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> switch = PrecisionSwitch("mixed_float16", at_epoch=1)
    >>> x = np.zeros((8, 4))
    >>> _ = model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[switch])
    >>> print(switch.report)
    mixed_float16: 2 layers changed, 0 had it, 0 stay in float32; loss scaling added

    The model stays in the last policy when `fit` ends. Keras' global policy is not touched.
    """

    def __init__(self, policy: PolicyName, *, at_epoch: int) -> None:
        super().__init__()
        self.policy = check_policy(policy)
        self.at_epoch = check_count(at_epoch, "at_epoch", minimum=0)
        self.report: SwitchReport | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuses a switch that could never happen."""
        self.report = None
        epochs = self.params.get("epochs")
        if epochs is not None and self.at_epoch >= epochs:
            raise ValueError(
                f"PrecisionSwitch(at_epoch={self.at_epoch}) would never happen: fit runs "
                f"{epochs} epochs, counted from 0, so at_epoch must be at most {epochs - 1}."
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Switches, once, when its epoch has come."""
        if self.report is None and epoch >= self.at_epoch:
            self.report = switch_precision(self.model, self.policy)
