import json
import math

import numpy as np
import pytest

from precision_bert import LossScaleRule
from precision_bert.loss_scale import LossScaleState


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


def independent_update(state, finite, rule):
    """All terms of the rule in plain Python and NumPy, written from the equations in the docs."""
    scale, streak, since_growth, bad, steps = state
    one = np.float32
    goes_by_bad_steps = rule.hysteresis > 1 or rule.tolerance > 0
    steps += 1
    if finite:
        if streak + 1 >= rule.dynamic_growth_steps:
            grown = one(scale) * one(rule.growth_factor)
            return min(float(grown), float(one(rule.max_scale))), 0, 0, 0, 0
        state = scale, streak + 1, since_growth, bad, steps
    else:
        since_growth, bad = since_growth + 1, bad + 1
        if since_growth >= rule.hysteresis and bad / steps >= rule.tolerance:
            backed_off = one(scale) * one(rule.backoff_factor)
            state = max(float(backed_off), float(one(rule.min_scale))), 0, since_growth, 0, 0
        else:
            state = scale, 0, since_growth, bad, steps
    return state if goes_by_bad_steps else (*state[:2], 0, 0, 0)


def random_rule(random):
    floor, ceiling = 2.0 ** random.randint(-20, 4), 2.0 ** random.randint(12, 30)
    return LossScaleRule(
        2.0 ** random.randint(4, 13),
        dynamic_growth_steps=int(random.randint(1, 8)),
        min_scale=floor,
        max_scale=ceiling,
        growth_factor=random.choice([2.0, 4.0, 1.5, random.uniform(1.01, 9.0)]),
        backoff_factor=random.choice([0.5, 0.25, random.uniform(0.01, 0.99)]),
        hysteresis=int(random.randint(1, 5)),
        tolerance=random.choice([0.0, 0.1, 0.25, 0.5, 1.0, random.uniform()]),
    )


@pytest.mark.parametrize("seed", range(100))
def test_the_rule_equals_an_independent_loop_over_100_random_sequences_with_all_parameters(seed):
    random = np.random.RandomState(seed)
    rule, sequences = random_rule(random), 100  # 100 x 100 in all, side by side in one tensor
    finite = random.rand(40, sequences) < random.rand(sequences)  # from nearly all to nearly none
    zeros = np.zeros(sequences, "int64")
    state = LossScaleState(np.full(sequences, rule.initial_scale, "float32"), *[zeros] * 4)
    expected = [(rule.initial_scale, 0, 0, 0, 0)] * sequences
    for step in finite:
        state = rule.update(state, step)
        expected = [independent_update(*pair, rule) for pair in zip(expected, step, strict=True)]
        for ours, theirs in zip(state, zip(*expected, strict=True), strict=True):
            np.testing.assert_array_equal(np.broadcast_to(ours, sequences), theirs)


def scales_of(rule, steps):
    """The scales after each step, 1 for a finite one and 0 for a bad one."""
    state, scales = rule.start(), []
    for finite in steps:
        state = rule.update(state, finite == 1)
        scales.append(float(state.scale))
    return scales


class TestHysteresis:
    def test_it_is_deepspeeds_over_random_steps(self):
        # DeepSpeed's DynamicLossScaler.update_scale, with its default consecutive_hysteresis=False.
        random = np.random.RandomState(0)
        for window, shift in [(3, 2), (5, 3), (2, 1)]:
            scale, last_overflow, left = 2.0**10, -1, shift
            steps, theirs = (random.rand(100) < 0.7).astype(int), []
            for iteration, finite in enumerate(steps):
                if not finite:
                    if left == 1:
                        scale = max(scale / 2, 1.0)
                    else:
                        left -= 1
                    last_overflow = iteration
                elif (iteration - last_overflow) % window == 0:
                    left, scale = shift, min(scale * 2, 2.0**24)
                theirs.append(scale)
            rule = LossScaleRule(2.0**10, dynamic_growth_steps=window, hysteresis=shift)
            assert scales_of(rule, steps) == theirs

    def test_the_bad_step_before_it_waits_and_the_one_on_it_backs_off(self):
        rule = LossScaleRule(8.0, hysteresis=3)
        assert scales_of(rule, [0, 0, 0, 0]) == [8, 8, 4, 2]
        assert scales_of(rule, [0, 1, 0, 1, 0]) == [8, 8, 8, 8, 4]  # they need not be in a row

    def test_growth_gives_the_patience_back(self):
        rule = LossScaleRule(8.0, dynamic_growth_steps=1, hysteresis=2)
        assert scales_of(rule, [0, 0, 1, 0, 0]) == [8, 4, 8, 8, 4]


class TestTolerance:
    def test_it_is_fairseqs_between_two_growths_over_random_steps(self):
        # fairseq's DynamicLossScaler.check_overflow; a growth period that is never full.
        random = np.random.RandomState(0)
        for tolerance in (0.0, 0.1, 0.25, 0.5, 1.0):
            scale, last_rescale, overflows = 2.0**20, -1, 0
            steps, theirs = (random.rand(60) < 0.7).astype(int), []
            for iteration, finite in enumerate(steps):
                if not finite:
                    overflows += 1
                    if overflows / (iteration - last_rescale) >= tolerance:
                        scale, last_rescale, overflows = max(scale / 2, 1.0), iteration, 0
                theirs.append(scale)
            rule = LossScaleRule(2.0**20, dynamic_growth_steps=1000, tolerance=tolerance)
            assert scales_of(rule, steps) == theirs

    @pytest.mark.parametrize(("good", "expected"), [(8, 4.0), (9, 4.0), (10, 8.0)])
    def test_a_share_just_above_on_and_below_it(self, good, expected):
        rule = LossScaleRule(8.0, tolerance=0.1)
        assert scales_of(rule, [1] * good + [0])[-1] == expected  # 1 of 9, 10, 11

    def test_both_must_agree_that_the_scale_backs_off(self):
        rule = LossScaleRule(8.0, hysteresis=2, tolerance=0.5)
        assert scales_of(rule, [0, 0]) == [8, 4]
        assert scales_of(rule, [0, 1, 1, 1, 0, 0]) == [8, 8, 8, 8, 8, 4]  # 2 of 5, 3 of 6


@pytest.mark.parametrize("steps", [[0] * 5, [1] * 5, [1, 0, 1, 1, 0]])
@pytest.mark.parametrize("scale", [1.0, 0.125, 3.0, 2.0**100])
def test_a_static_rule_never_moves(scale, steps):
    rule = LossScaleRule.static(scale)
    assert scales_of(rule, steps) == [np.float32(scale)] * 5
    assert scales_of(LossScaleRule.no_op(), steps) == [1.0] * 5


@pytest.mark.parametrize(
    "loss", [0.0, 1e-45, 0.3, 1.0, 1.5, -2.0, 65504.0, 2.0**103, 2.0**104, 2.0**127, 3.4e38]
)
def test_the_ceiling_is_the_largest_power_of_two_that_keeps_the_scaled_loss_finite(loss):
    ceiling = np.float32(LossScaleRule.ceiling_for(loss))
    with np.errstate(over="ignore"):
        assert np.isfinite(np.float32(loss) * ceiling) and np.log2(ceiling) % 1 == 0
        double = ceiling * np.float32(2)
        assert not (np.isfinite(double) and np.isfinite(np.float32(loss) * double))


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan, 1e39])
def test_no_ceiling_keeps_an_infinite_loss_finite(loss):
    with pytest.raises(ValueError, match="largest_loss must be finite in float32"):
        LossScaleRule.ceiling_for(loss)


def test_growth_ends_below_at_and_on_a_ceiling_that_is_no_power_of_the_factor():
    rule = LossScaleRule(16.0, dynamic_growth_steps=1, max_scale=100.0)
    assert scales_of(rule, [1, 1, 1, 1]) == [32, 64, 100, 100]


def test_the_largest_ceiling_is_never_passed_to_infinity():
    rule = LossScaleRule(2.0**126, dynamic_growth_steps=1, max_scale=2.0**127)
    assert scales_of(rule, [1, 1, 1]) == [2.0**127] * 3


def test_next_refuses_a_rule_that_goes_by_more():
    for rule in (LossScaleRule(hysteresis=2), LossScaleRule(tolerance=0.1)):
        with pytest.raises(ValueError, match=r"use update\(state, finite\)"):
            rule.next(8.0, 0, True)


BAD = {
    "growth_factor": [1.0, 0.5, 0.0, -2.0, math.inf, math.nan, 1.0 + 1e-12],
    "backoff_factor": [1.0, 1.5, 0.0, -0.5, math.inf, math.nan, 1.0 - 1e-12, 1e-60],
    "tolerance": [-0.01, 1.01, math.inf, math.nan],
    "hysteresis": [0, -1, 1.5, True, None],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_any_other_value_out_of_range_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"{name} must be .*Received: {name}="):
        LossScaleRule(**{name: value})


@pytest.mark.parametrize("value", [True, None, "2", [2.0]])
@pytest.mark.parametrize("name", ["max_scale", "growth_factor", "backoff_factor", "tolerance"])
def test_what_is_no_number_is_refused(name, value):
    with pytest.raises(TypeError, match=f"{name} must be a float"):
        LossScaleRule(**{name: value})


@pytest.mark.parametrize("scale", [2.0**-127, 2.0**128])
def test_a_scale_that_float32_does_not_hold_is_refused(scale):
    with pytest.raises(ValueError, match="finite and positive in float32"):
        LossScaleRule.static(scale)
    assert LossScaleRule.static(2.0**-126).min_scale == 2.0**-126
    assert LossScaleRule.static(2.0**127).max_scale == 2.0**127


def test_numpys_numbers_are_kept_as_plain_ones():
    rule = LossScaleRule(np.float32(8), np.int64(3), hysteresis=np.int32(2))
    assert json.dumps([rule.initial_scale, rule.dynamic_growth_steps]) == "[8.0, 3]"
