"""What the loss-scale optimizer promises, and what putting it on and taking it off keeps."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest
from models import dense_model

from precision_bert import DynamicLossScaleOptimizer
from precision_bert.loss_scaling import (
    count_steps,
    current_loss_scale,
    unwrap_optimizer,
    wrap_optimizer,
)

INNER = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam_clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 20)),
}


def values(variables):
    return [np.array(v) for v in variables]


@pytest.mark.parametrize("name", INNER)
def test_training_equals_keras_own_loss_scale_optimizer_bit_for_bit(name, xy):
    x, y = xy
    trained = []
    for wrap in (keras.optimizers.LossScaleOptimizer, DynamicLossScaleOptimizer):
        keras.utils.set_random_seed(0)
        model = dense_model("mixed_float16")
        model.compile(wrap(INNER[name](), initial_scale=2.0**18, dynamic_growth_steps=3), "mse")
        model.fit(x, y, epochs=3, batch_size=4, verbose=0)
        trained.append(model)
    theirs, ours = trained
    assert current_loss_scale(ours.optimizer) == float(theirs.optimizer.dynamic_scale)
    assert int(ours.optimizer.step_counter) == int(theirs.optimizer.step_counter)
    for one, other in zip(values(theirs.weights), values(ours.weights), strict=True):
        assert one.tobytes() == other.tobytes()
    for one, other in zip(
        values(theirs.optimizer.inner_optimizer.variables),
        values(ours.optimizer.inner_optimizer.variables),
        strict=True,
    ):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_step_with_a_bad_gradient_leaves_weights_and_moments_as_they_were(bad, xy):
    x, y = xy
    model = dense_model("mixed_float16")
    model.compile(DynamicLossScaleOptimizer(keras.optimizers.Adam(0.01), 1024.0), "mse")
    model.train_on_batch(x, y)
    before = values(model.weights) + values(model.optimizer.inner_optimizer.variables)
    broken = y.copy()
    broken[3] = bad
    model.train_on_batch(x, broken)
    after = values(model.weights) + values(model.optimizer.inner_optimizer.variables)
    assert [a.tobytes() for a in before] == [a.tobytes() for a in after]
    assert count_steps(model.optimizer) == (1, 1)
    assert current_loss_scale(model.optimizer) == 512.0


def test_142_bad_steps_leave_a_model_that_a_good_step_still_trains(xy):
    x, y = xy
    model = dense_model("mixed_float16")
    model.compile(DynamicLossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse")
    broken = np.full_like(y, np.nan)
    for _ in range(142):
        model.train_on_batch(x, broken)
    assert current_loss_scale(model.optimizer) == 1.0
    before = values(model.weights)
    model.train_on_batch(x, y)
    after = values(model.weights)
    assert all(np.isfinite(a).all() for a in after)
    assert any((a != b).any() for a, b in zip(before, after, strict=True))
    assert count_steps(model.optimizer) == (1, 142)


def test_it_round_trips_through_its_config():
    optimizer = DynamicLossScaleOptimizer(
        keras.optimizers.Adam(0.3, clipnorm=2.0), 64.0, 7, min_scale=2.0, max_scale=128.0, name="ls"
    )
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(optimizer))
    assert type(again) is DynamicLossScaleOptimizer
    assert again.get_config() == optimizer.get_config()
    assert again.rule == optimizer.rule
    assert keras.optimizers.get(keras.optimizers.serialize(optimizer)).rule == optimizer.rule


def test_a_wrapper_in_a_wrapper_is_refused():
    inner = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(TypeError, match="already scales the loss"):
        DynamicLossScaleOptimizer(inner)


@pytest.mark.parametrize("inner", ["adam", None, object()])
def test_an_inner_optimizer_that_is_none_is_refused(inner):
    with pytest.raises(TypeError, match=r"must be a keras\.optimizers\.Optimizer"):
        DynamicLossScaleOptimizer(inner)


class TestWrapping:
    def test_it_gives_back_the_same_inner_object(self):
        inner = keras.optimizers.Adam()
        assert unwrap_optimizer(wrap_optimizer(inner)) is inner

    def test_wrapping_twice_wraps_once(self):
        wrapped = wrap_optimizer(keras.optimizers.Adam())
        assert wrap_optimizer(wrapped) is wrapped

    def test_unwrapping_a_plain_optimizer_changes_nothing(self):
        inner = keras.optimizers.Adam()
        assert unwrap_optimizer(inner) is inner

    def test_the_users_loss_scale_factor_comes_back(self):
        inner = keras.optimizers.Adam(loss_scale_factor=8.0)
        for _ in range(2):
            wrapped = wrap_optimizer(inner)
            assert inner.loss_scale_factor is None
            assert unwrap_optimizer(wrapped).loss_scale_factor == 8.0

    def test_keras_own_is_replaced_with_its_scale_streak_and_settings(self):
        inner = keras.optimizers.SGD(0.1)
        theirs = keras.optimizers.LossScaleOptimizer(inner, 2.0**10, dynamic_growth_steps=9)
        theirs.build([keras.Variable([1.0])])
        theirs.dynamic_scale.assign(2.0**30)
        theirs.step_counter.assign(5)
        ours = wrap_optimizer(theirs)
        assert type(ours) is DynamicLossScaleOptimizer
        assert ours.inner_optimizer is inner
        assert (float(ours.dynamic_scale), int(ours.step_counter)) == (2.0**30, 5)
        assert (ours.initial_scale, ours.dynamic_growth_steps) == (2.0**10, 9)
        assert ours.rule.max_scale == 2.0**30  # a scale beyond the default ceiling stays

    def test_a_users_own_subclass_stays(self):
        class Own(keras.optimizers.LossScaleOptimizer):
            pass

        own = Own(keras.optimizers.SGD(), initial_scale=16.0)
        assert wrap_optimizer(own) is own
        again = wrap_optimizer(unwrap_optimizer(own))
        assert type(again) is Own and again.initial_scale == 16.0
        assert count_steps(again) == (0, None)

    def test_settings_come_back_before_anything_was_trained(self):
        ours = DynamicLossScaleOptimizer(keras.optimizers.SGD(), 64.0, 3, 2.0, 128.0)
        again = wrap_optimizer(unwrap_optimizer(ours))
        assert again.rule == ours.rule

    def test_it_keeps_no_optimizer_alive(self):
        inner = keras.optimizers.SGD(loss_scale_factor=2.0)
        inner.build([keras.Variable([1.0])])
        wrapped = wrap_optimizer(inner)
        assert unwrap_optimizer(wrapped) is inner
        alive = weakref.ref(inner)
        del inner, wrapped
        gc.collect()
        assert alive() is None

    def test_an_optimizer_whose_build_has_no_guard_keeps_its_state(self):
        class Unguarded(keras.optimizers.SGD):
            def build(self, variables):
                keras.optimizers.Optimizer.build(self, variables)
                self.momentums = [
                    self.add_variable_from_reference(v, name="momentum") for v in variables
                ]

        inner = Unguarded(0.1, momentum=0.9)
        inner.build([keras.Variable([1.0])])
        count = len(inner.variables)
        wrap_optimizer(inner)
        assert len(inner.variables) == count


def test_a_switch_within_an_accumulation_window_loses_no_gradient(xy):
    from precision_bert import switch_precision

    x, y = xy

    def train(policies):
        model = dense_model()
        model.set_weights([np.full(w.shape, 0.25, "float32") for w in model.weights])
        model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
        for policy, start in zip(policies, (0, 16), strict=True):
            switch_precision(model, policy)
            model.train_on_batch(x[start : start + 16], y[start : start + 16])
        return model

    half_first = train(["mixed_bfloat16", "float32"])
    float32 = train(["float32", "float32"])
    start = np.full((4, 8), 0.25, "float32")
    moved, reference = (np.array(m.weights[0]) - start for m in (half_first, float32))
    assert np.abs(reference).max() > 0
    # Had the first half of the window been lost, the move would be off by a large part of itself.
    np.testing.assert_allclose(moved, reference, rtol=0.05, atol=1e-4)


def test_counts_and_scale_of_an_optimizer_that_has_not_trained():
    for optimizer in (keras.optimizers.SGD(), DynamicLossScaleOptimizer(keras.optimizers.SGD())):
        assert count_steps(optimizer) == (0, 0)
    assert current_loss_scale(keras.optimizers.SGD()) is None
    assert current_loss_scale(DynamicLossScaleOptimizer(keras.optimizers.SGD(), 64.0)) == 64.0
