"""What a traced function computes in, by layer."""

from precision_bert.audit.auditing import audit_precision, audit_step, audit_train_function
from precision_bert.audit.record import (
    LayerPrecision,
    OperationCount,
    PrecisionAudit,
    PrecisionAuditError,
)

__all__ = [
    "LayerPrecision",
    "OperationCount",
    "PrecisionAudit",
    "PrecisionAuditError",
    "audit_precision",
    "audit_step",
    "audit_train_function",
]
