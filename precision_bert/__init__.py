"""Precision stages for Keras: train in mixed_float16, finish in float32, and see what it did."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from precision_bert._version import __version__
from precision_bert.audit import (
    PrecisionAudit,
    PrecisionAuditError,
    audit_precision,
    audit_train_function,
)
from precision_bert.callbacks import (
    LossScaleMonitor,
    PrecisionSwitch,
    StallAlarm,
    StallError,
    StallGuard,
)
from precision_bert.data import (
    GLUE_TASKS,
    TextExamples,
    demo_pairs,
    demo_vocabulary,
    encode_batches,
    load_glue,
)
from precision_bert.fine_tuning import (
    WarmupLinearDecay,
    compile_classifier,
    fine_tuning_optimizer,
)
from precision_bert.gradient_range import GradientRange, gradient_range
from precision_bert.islands import pin_float32, unpin_float32
from precision_bert.layer_policies import compute_dtypes
from precision_bert.loss_scale import LossScaleRule
from precision_bert.loss_scale_optimizer import DynamicLossScaleOptimizer
from precision_bert.policy_scope import precision_scope
from precision_bert.range_causes import RangeFinding
from precision_bert.range_search import search_range
from precision_bert.rebuilding import rebuild_precision
from precision_bert.resuming import completed_epochs
from precision_bert.saving import load_model, load_state, save_model
from precision_bert.schedules import PrecisionSchedule, Stage
from precision_bert.scores import glue_scores
from precision_bert.staged_history import StagedHistory, StageRecord
from precision_bert.switching import SwitchReport, switch_precision
from precision_bert.two_stage import staged_fit, two_stage_fit

if TYPE_CHECKING:
    from precision_bert.bert import BertClassifier, bert_classifier
    from precision_bert.bert_config import BertConfig

__all__ = [
    "GLUE_TASKS",
    "BertClassifier",
    "BertConfig",
    "DynamicLossScaleOptimizer",
    "GradientRange",
    "LossScaleMonitor",
    "LossScaleRule",
    "PrecisionAudit",
    "PrecisionAuditError",
    "PrecisionSchedule",
    "PrecisionSwitch",
    "RangeFinding",
    "Stage",
    "StageRecord",
    "StagedHistory",
    "StallAlarm",
    "StallError",
    "StallGuard",
    "SwitchReport",
    "TextExamples",
    "WarmupLinearDecay",
    "__version__",
    "audit_precision",
    "audit_train_function",
    "bert_classifier",
    "compile_classifier",
    "completed_epochs",
    "compute_dtypes",
    "demo_pairs",
    "demo_vocabulary",
    "encode_batches",
    "fine_tuning_optimizer",
    "glue_scores",
    "gradient_range",
    "load_glue",
    "load_model",
    "load_state",
    "pin_float32",
    "precision_scope",
    "rebuild_precision",
    "save_model",
    "search_range",
    "staged_fit",
    "switch_precision",
    "two_stage_fit",
    "unpin_float32",
]

# Imported when first asked for: keras_nlp brings TensorFlow Text along, which nobody needs who
# switches a model of their own. To load a saved BertClassifier, `import precision_bert.bert` first:
# that registers its classes with Keras.
_LAZY = {
    "BertClassifier": "precision_bert.bert",
    "BertConfig": "precision_bert.bert_config",
    "bert_classifier": "precision_bert.bert",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
