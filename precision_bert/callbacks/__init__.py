"""Keras callbacks, one a file."""

from precision_bert.callbacks.loss_scale_monitor import LossScaleMonitor
from precision_bert.callbacks.precision_switch import PrecisionSwitch

__all__ = ["LossScaleMonitor", "PrecisionSwitch"]
