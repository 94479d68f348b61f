"""The F1 score of a two-class classifier, from integer labels and logits."""

from __future__ import annotations

from typing import Any

import keras


@keras.saving.register_keras_serializable("precision_bert")
class SparseF1(keras.metrics.Metric):
    """Computes the F1 score of class 1, the positive one, over all samples seen.

    Use it where classes are unbalanced, as GLUE does for MRPC and QQP. The score is

        F1 = 2 TP / (2 TP + FP + FN)

    from the counts of true positives, false positives and false negatives since the last reset (not
    a mean over batches), and 0 where no sample is positive, neither labelled nor predicted. A
    sample is predicted positive if its second logit is the larger; of equal ones, the first wins,
    as in `SparseCategoricalAccuracy`.

    Args:
        name: Default `"f1"`.
        dtype: Dtype of the counts. Default float32 whatever the policy: exact up to 16.7 million
            samples, where float16 would stop counting at 2048.

    Call arguments (`update_state`):
        y_true: Labels 0 or 1, `(batch,)` or `(batch, 1)` int.
        y_pred: Logits or probabilities, `(batch, 2)`.
        sample_weight: Weights, `(batch,)`, or None.

    Raises:
        ValueError: If `y_pred` does not have two columns.

    Example:

    >>> metric = SparseF1()
    >>> metric.update_state([1, 1, 0, 0], [[0, 1], [1, 0], [0, 1], [1, 0]])
    >>> round(float(metric.result()), 3)
    0.5
    """

    def __init__(self, name: str = "f1", dtype: str | None = "float32") -> None:
        super().__init__(name=name, dtype=dtype)
        self.true_positives = self._count("true_positives")
        self.false_positives = self._count("false_positives")
        self.false_negatives = self._count("false_negatives")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds a batch to the counts."""
        y_pred = keras.ops.convert_to_tensor(y_pred)
        if len(y_pred.shape) != 2 or y_pred.shape[1] != 2:
            raise ValueError(
                "SparseF1 is defined for two classes: y_pred must have the shape (batch, 2). "
                f"Received: y_pred of shape {tuple(y_pred.shape)}."
            )
        positive = keras.ops.reshape(keras.ops.equal(y_true, 1), (-1,))
        predicted = keras.ops.equal(keras.ops.argmax(y_pred, axis=-1), 1)
        if sample_weight is None:
            weight = keras.ops.ones_like(predicted, dtype=self.dtype)
        else:
            weight = keras.ops.reshape(keras.ops.cast(sample_weight, self.dtype), (-1,))
        for count, hit in (
            (self.true_positives, keras.ops.logical_and(positive, predicted)),
            (self.false_positives, keras.ops.logical_and(~positive, predicted)),
            (self.false_negatives, keras.ops.logical_and(positive, ~predicted)),
        ):
            count.assign_add(keras.ops.sum(keras.ops.cast(hit, self.dtype) * weight))

    def result(self) -> Any:
        """Returns the score so far, a scalar in [0, 1]."""
        doubled = 2.0 * self.true_positives
        return keras.ops.divide_no_nan(
            doubled, doubled + self.false_positives + self.false_negatives
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {"name": self.name, "dtype": self.dtype}

    def _count(self, name: str) -> keras.Variable:
        return self.add_variable((), initializer="zeros", name=name)
