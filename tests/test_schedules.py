import math

import keras
import numpy as np
import pytest

from precision_bert import PrecisionSchedule, Stage


def test_each_epoch_runs_in_the_stage_that_its_boundaries_say():
    schedule = PrecisionSchedule(
        [
            Stage("mixed_float16", 2),
            Stage("mixed_bfloat16", 0),
            Stage("float32", 1),
            Stage("mixed_float16", 3),
        ]
    )
    expected = ["mixed_float16"] * 2 + ["float32"] + ["mixed_float16"] * 3
    assert [schedule.stage_at(e).policy for e in range(6)] == expected
    assert [schedule.index_at(e) for e in range(6)] == [0, 0, 2, 3, 3, 3]
    assert schedule.boundaries == (0, 2, 2, 3, 6)
    assert schedule.epochs == 6


@pytest.mark.parametrize("epoch", [4, 100])
def test_an_epoch_past_the_end_is_refused(epoch):
    with pytest.raises(ValueError, match=f"below the schedule's 4 epochs. Received: epoch={epoch}"):
        PrecisionSchedule([Stage("float32", 4)]).stage_at(epoch)


def test_a_negative_epoch_is_refused():
    with pytest.raises(ValueError, match="epoch must be at least 0"):
        PrecisionSchedule([Stage("float32", 4)]).stage_at(-1)


@pytest.mark.parametrize("stages", [[], [Stage("float32", 0)], [Stage("float32", 0)] * 3])
def test_a_schedule_without_epochs_is_refused(stages):
    with pytest.raises(ValueError, match="at least one epoch to train"):
        PrecisionSchedule(stages)


@pytest.mark.parametrize("item", ["float32", ("float32", 1), None])
def test_a_schedule_takes_stages_only(item):
    with pytest.raises(TypeError, match="sequence of Stage objects"):
        PrecisionSchedule([Stage("float32", 1), item])


def test_a_policy_object_is_taken_by_its_name():
    assert Stage(keras.DTypePolicy("mixed_float16"), 1).policy == "mixed_float16"


@pytest.mark.parametrize(
    "rate", [0.0, 1e-5, 1, None, keras.optimizers.schedules.CosineDecay(0.1, 5)]
)
def test_a_stage_takes_a_learning_rate(rate):
    assert Stage("float32", 1, learning_rate=rate).learning_rate is rate


def test_numpy_numbers_are_taken():
    stage = Stage("float32", np.int64(3), learning_rate=np.float32(1e-3))
    assert stage.epochs == 3 and type(stage.epochs) is int


@pytest.mark.parametrize("rate", [-1e-5, math.inf, math.nan])
def test_a_learning_rate_out_of_range_is_refused(rate):
    with pytest.raises(ValueError, match="finite and not negative"):
        Stage("float32", 1, learning_rate=rate)


@pytest.mark.parametrize("rate", ["1e-5", True, [1e-5]])
def test_a_learning_rate_that_is_no_number_is_refused(rate):
    with pytest.raises(TypeError, match="must be a float, a LearningRateSchedule or None"):
        Stage("float32", 1, learning_rate=rate)


@pytest.mark.parametrize("epochs", [1.0, "3", True, None])
def test_a_length_that_is_no_int_is_refused(epochs):
    with pytest.raises(TypeError, match="epochs must be an int"):
        Stage("float32", epochs)


def test_a_negative_length_is_refused():
    with pytest.raises(ValueError, match=r"epochs must be at least 0. Received: epochs=-1"):
        Stage("float32", -1)
