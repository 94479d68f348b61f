import keras
import numpy as np
import pytest

from precision_bert import DynamicLossScaleOptimizer
from precision_bert.learning_rate import StageSchedule, set_learning_rate


def rate(optimizer):
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_number_replaces_a_number_without_a_new_trace(wrapped):
    optimizer = keras.optimizers.SGD(0.1)
    outer = DynamicLossScaleOptimizer(optimizer) if wrapped else optimizer
    assert set_learning_rate(outer, 0.25) is False
    assert rate(outer) == rate(optimizer) == 0.25


def test_a_number_replaces_a_schedule():
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10))
    assert set_learning_rate(optimizer, 0.25) is True
    optimizer.iterations.assign(7)
    assert rate(optimizer) == 0.25
    assert set_learning_rate(optimizer, 0.5) is True
    assert rate(optimizer) == 0.5


@pytest.mark.parametrize("first", [0.1, keras.optimizers.schedules.CosineDecay(0.1, 10)])
def test_a_schedule_counts_from_the_step_at_which_it_takes_over(first):
    optimizer = keras.optimizers.SGD(first)
    optimizer.iterations.assign(30)
    assert (
        set_learning_rate(optimizer, keras.optimizers.schedules.PolynomialDecay(1.0, 10, 0.0))
        is True
    )
    rates = []
    for step in (30, 31, 35, 40, 41):
        optimizer.iterations.assign(step)
        rates.append(rate(optimizer))
    np.testing.assert_allclose(rates, [1.0, 0.9, 0.5, 0.0, 0.0], atol=1e-7)


@pytest.mark.parametrize("inner", [0.25, keras.optimizers.schedules.CosineDecay(0.1, 10)])
def test_a_stage_schedule_round_trips_through_its_config(inner):
    schedule = StageSchedule(inner, 12)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(schedule))
    assert again.start_step == 12
    assert float(again(17)) == float(schedule(17))
