"""Precision stages for Keras: train in mixed_float16, finish in float32, and see what it did."""

from precision_bert._version import __version__
from precision_bert.callbacks import LossScaleMonitor, PrecisionSwitch
from precision_bert.loss_scale import LossScaleRule
from precision_bert.loss_scale_optimizer import DynamicLossScaleOptimizer
from precision_bert.schedules import PrecisionSchedule, Stage
from precision_bert.staged_history import StagedHistory, StageRecord
from precision_bert.switching import (
    SwitchReport,
    compute_dtypes,
    pin_float32,
    precision_scope,
    switch_precision,
)
from precision_bert.two_stage import staged_fit, two_stage_fit

__all__ = [
    "DynamicLossScaleOptimizer",
    "LossScaleMonitor",
    "LossScaleRule",
    "PrecisionSchedule",
    "PrecisionSwitch",
    "Stage",
    "StageRecord",
    "StagedHistory",
    "SwitchReport",
    "__version__",
    "compute_dtypes",
    "pin_float32",
    "precision_scope",
    "staged_fit",
    "switch_precision",
    "two_stage_fit",
]
