import math

import numpy as np
import pytest

from precision_bert.scores import glue_scores


def logits(predictions):
    return [[1.0, 0.0] if p == 0 else [0.0, 1.0] for p in predictions]


def test_classification_scores_equal_those_counted_by_hand():
    labels = [1, 1, 1, 0, 0, 0, 0, 1]
    predictions = [1, 1, 0, 0, 0, 1, 0, 1]
    # true positives 3, false positives 1, false negatives 1, true negatives 3
    scores = glue_scores(["accuracy", "f1", "matthews_correlation"], labels, logits(predictions))
    assert scores["accuracy"] == 6 / 8
    assert scores["f1"] == pytest.approx(2 * 3 / (2 * 3 + 1 + 1))
    assert scores["matthews_correlation"] == pytest.approx(
        (3 * 3 - 1 * 1) / math.sqrt(4 * 4 * 4 * 4)
    )


def test_correlations_equal_their_formulas():
    labels = np.array([0.0, 1.0, 2.5, 5.0])
    outputs = np.array([[0.1], [0.9], [0.8], [4.0]])
    a, b = labels - labels.mean(), outputs[:, 0] - outputs.mean()
    scores = glue_scores(["pearson_correlation", "spearman_correlation"], labels, outputs)
    assert scores["pearson_correlation"] == pytest.approx((a @ b) / math.sqrt((a @ a) * (b @ b)))
    # ranks 1 2 3 4 against 1 3 2 4: 1 - 6 * (0 + 1 + 1 + 0) / (4 * 15)
    assert scores["spearman_correlation"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("labels", "predictions", "expected"),
    [
        ([0, 0], [0, 0], {"accuracy": 1.0, "f1": 0.0, "matthews_correlation": 0.0}),
        ([1, 1], [0, 0], {"accuracy": 0.0, "f1": 0.0, "matthews_correlation": 0.0}),
        ([1, 0], [1, 1], {"accuracy": 0.5, "f1": 2 / 3, "matthews_correlation": 0.0}),
    ],
)
def test_a_constant_prediction_has_scores_not_nan(labels, predictions, expected):
    assert glue_scores(list(expected), labels, logits(predictions)) == pytest.approx(expected)


def test_a_constant_regression_correlates_with_nothing():
    assert glue_scores(["spearman_correlation"], [1.0, 2.0], [[3.0], [3.0]]) == {
        "spearman_correlation": 0.0
    }


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"must be among accuracy, .*Received: \['f2'\]"):
        glue_scores(["f2"], [0], [[0.0, 1.0]])
    with pytest.raises(ValueError, match=r"labels of shape \(2,\), outputs of shape \(1, 2\)"):
        glue_scores(["f1"], [0, 1], [[0.0, 1.0]])
    with pytest.raises(ValueError, match="n of at least 1"):
        glue_scores(["f1"], [], np.zeros((0, 2)))
    for value in (np.nan, np.inf):
        with pytest.raises(ValueError, match="1 values that are not: the training has diverged"):
            glue_scores(["f1"], [0], [[0.0, value]])
