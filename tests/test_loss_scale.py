import math

import numpy as np
import pytest

from precision_bert import LossScaleRule


def independent_rule(scale, streak, finite, growth_steps, floor, ceiling):
    """The rule in plain Python, written from its equations."""
    if not finite:
        return max(scale / 2, floor), 0
    if streak + 1 >= growth_steps:
        return min(scale * 2, ceiling), 0
    return scale, streak + 1


@pytest.mark.parametrize("seed", range(20))
def test_the_rule_follows_its_equations_over_random_steps(seed):
    random = np.random.RandomState(seed)
    floor, ceiling = 2.0 ** random.randint(-3, 3), 2.0 ** random.randint(18, 26)
    growth = int(random.randint(1, 6))
    rule = LossScaleRule(2.0**10, growth, floor, ceiling)
    ours = theirs = (2.0**10, 0)
    for finite in random.rand(100) < random.rand():
        ours = tuple(float(v) for v in rule.next(ours[0], int(ours[1]), bool(finite)))
        theirs = independent_rule(*theirs, bool(finite), growth, floor, ceiling)
        assert ours == theirs


@pytest.mark.parametrize(
    ("scale", "streak", "finite", "expected"),
    [
        (8.0, 0, False, (4.0, 0)),
        (2.0, 1, False, (1.0, 0)),
        (1.0, 0, False, (1.0, 0)),  # at the floor
        (8.0, 0, True, (8.0, 1)),
        (8.0, 1, True, (16.0, 0)),  # the second applied step in a row
        (8.0, 9, True, (16.0, 0)),  # a streak carried past a shorter growth period
        (16.0, 1, True, (32.0, 0)),
        (32.0, 1, True, (32.0, 0)),  # at the ceiling
    ],
)
def test_the_rule_just_before_on_and_after_each_boundary(scale, streak, finite, expected):
    rule = LossScaleRule(8.0, dynamic_growth_steps=2, min_scale=1.0, max_scale=32.0)
    assert tuple(float(v) for v in rule.next(scale, streak, finite)) == expected


def test_200_bad_steps_leave_a_scale_that_can_be_divided_by():
    rule, state = LossScaleRule(), (2.0**15, 0)
    for _ in range(200):
        state = rule.next(*state, False)
    assert float(state[0]) == 1.0


def test_200_growths_leave_a_finite_scale():
    rule, state = LossScaleRule(dynamic_growth_steps=1), (2.0**15, 0)
    for _ in range(200):
        state = rule.next(*state, True)
    assert float(state[0]) == 2.0**24


@pytest.mark.parametrize("name", ["initial_scale", "min_scale", "max_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_out_of_range_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be finite and positive"):
        LossScaleRule(**{name: value})


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_a_growth_period_out_of_range_is_refused(value):
    with pytest.raises(ValueError, match="dynamic_growth_steps must be an int of at least 1"):
        LossScaleRule(dynamic_growth_steps=value)


@pytest.mark.parametrize("bounds", [{"min_scale": 2.0**16}, {"max_scale": 2.0**14}])
def test_an_initial_scale_out_of_its_bounds_is_refused(bounds):
    with pytest.raises(ValueError, match="between min_scale and max_scale"):
        LossScaleRule(**bounds)
