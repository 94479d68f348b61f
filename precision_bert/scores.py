"""GLUE's headline scores, from the labels and what the model put out for each example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats


def glue_scores(metrics: Sequence[str], labels: Any, outputs: Any) -> dict[str, float]:
    """Scores predictions as GLUE does.

    Args:
        metrics: Any of `"accuracy"`, `"f1"`, `"matthews_correlation"` (classification),
            `"pearson_correlation"` and `"spearman_correlation"` (regression).
        labels: `(n,)`, classes counted from 0 or float targets.
        outputs: What `model.predict` returned: logits `(n, num_classes)`, or `(n, 1)` for a
            regression. They should be float32: in half precision, near logits tie.

    Returns:
        The score for each name. F1 is that of class 1. Where a score is 0/0 (a constant prediction
        correlates with nothing; no positive at all) it is 0.

    Raises:
        ValueError: If a name is unknown, nothing is to be scored, shapes do not fit, or an output
            is not finite.

    Example:

    >>> glue_scores(["accuracy", "f1"], [1, 1, 0, 0], [[0, 1], [2, 1], [0, 1], [3, 0]])
    {'accuracy': 0.5, 'f1': 0.5}
    """
    unknown = [name for name in metrics if name not in _SCORES]
    if unknown:
        raise ValueError(f"metrics must be among {', '.join(_SCORES)}. Received: {unknown}.")
    labels, outputs = np.asarray(labels), np.asarray(outputs, dtype="float64")
    if labels.ndim != 1 or outputs.ndim != 2 or len(labels) != len(outputs) or not len(labels):
        raise ValueError(
            "labels must have the shape (n,) and outputs (n, num_classes), with n of at least 1. "
            f"Received: labels of shape {labels.shape}, outputs of shape {outputs.shape}."
        )
    if not np.isfinite(outputs).all():
        raise ValueError(
            f"outputs must be finite, or a score would be made of NaN. Received "
            f"{int((~np.isfinite(outputs)).sum())} values that are not: the training has diverged."
        )
    predictions = outputs[:, 0] if outputs.shape[1] == 1 else outputs.argmax(axis=1)
    return {name: float(_SCORES[name](labels, predictions)) for name in metrics}


def _accuracy(labels: np.ndarray, predictions: np.ndarray) -> float:
    return float(np.mean(labels == predictions))


def _f1(labels: np.ndarray, predictions: np.ndarray) -> float:
    hits = np.sum((labels == 1) & (predictions == 1))
    total = np.sum(labels == 1) + np.sum(predictions == 1)
    return float(2 * hits / total) if total else 0.0


def _pearson(labels: np.ndarray, predictions: np.ndarray) -> float:
    if np.ptp(labels) == 0 or np.ptp(predictions) == 0:
        return 0.0
    return float(stats.pearsonr(labels, predictions).statistic)


def _spearman(labels: np.ndarray, predictions: np.ndarray) -> float:
    return _pearson(stats.rankdata(labels), stats.rankdata(predictions))


_SCORES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "matthews_correlation": _pearson,  # of two binary variables, Pearson's is Matthews'
    "pearson_correlation": _pearson,
    "spearman_correlation": _spearman,
}
