"""Keras callbacks, one a file."""

from precision_bert.callbacks.loss_scale_monitor import LossScaleMonitor
from precision_bert.callbacks.precision_switch import PrecisionSwitch
from precision_bert.callbacks.stall_alarm import StallAlarm, StallError
from precision_bert.callbacks.stall_guard import StallGuard

__all__ = ["LossScaleMonitor", "PrecisionSwitch", "StallAlarm", "StallError", "StallGuard"]
