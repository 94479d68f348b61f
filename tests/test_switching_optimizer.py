"""What becomes of the optimizer over a switch: the same object, its state, and its loss scale."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from models import dense_model

from precision_bert import DynamicLossScaleOptimizer, compute_dtypes, switch_precision
from precision_bert.loss_scaling import unwrap_optimizer, unwrapped, wrap_optimizer


def bits(tensor):
    return ops.convert_to_numpy(tensor).tobytes()


class TestLossScaling:
    @pytest.mark.parametrize(
        ("policy", "scaled"),
        [("mixed_float16", True), ("mixed_bfloat16", False), ("float32", False)],
    )
    def test_it_is_there_exactly_where_gradients_are_computed_in_float16(self, policy, scaled):
        model = dense_model(optimizer="adam", loss="mse")
        switch_precision(model, policy)
        assert isinstance(model.optimizer, DynamicLossScaleOptimizer) is scaled

    def test_it_is_decided_from_the_layers_not_from_the_container(self):
        inputs = keras.Input((4,))
        model = keras.Model(inputs, layers.Dense(1, dtype="mixed_float16")(inputs))
        model.compile("sgd", "mse")  # the container is float32: Keras adds no loss scale
        assert not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        report = switch_precision(model, "mixed_float16")
        assert report.loss_scaling == "added"

    def test_a_model_with_a_policy_map_gets_it(self):
        policies = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_float16")
        inputs = keras.Input((4,))
        model = keras.Model(inputs, layers.Dense(1, dtype=policies, name="d")(inputs))
        model.compile("sgd", "mse")
        assert not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        switch_precision(model, "mixed_float16")
        assert isinstance(model.optimizer, DynamicLossScaleOptimizer)

    def test_a_policy_map_of_the_user_is_not_written_to(self):
        policies = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_float16")
        policies["d"] = keras.DTypePolicy("float32")
        inputs = keras.Input((4,))
        hidden = layers.Dense(1, dtype=policies, name="h")(inputs)
        model = keras.Model(inputs, layers.Dense(1, dtype=policies, name="d")(hidden))
        before = policies.get_config()
        switch_precision(model, "mixed_bfloat16")
        assert policies.get_config() == before
        assert compute_dtypes(model) == {"h": "bfloat16", "d": "float32"}

    def test_frozen_layers_in_float16_need_none(self):
        model = dense_model(optimizer="adam", loss="mse")
        model.trainable = False
        assert switch_precision(model, "mixed_float16").loss_scaling == "none"

    def test_a_model_with_weights_of_its_own_gets_it(self):
        class Own(keras.Model):
            def build(self, shape):
                self.w = self.add_weight(shape=(4, 1), name="w")

            def call(self, x):
                return keras.ops.matmul(x, self.w)

        model = Own()
        model.build((None, 4))
        model.compile("sgd", "mse")
        assert switch_precision(model, "mixed_float16").loss_scaling == "added"

    def test_a_frozen_float16_layer_between_float32_ones_needs_it(self):
        inputs = keras.Input((4,))
        hidden = layers.Dense(4, dtype="float32")(inputs)
        frozen = layers.Dense(4, dtype="mixed_float16", trainable=False)
        model = keras.Model(inputs, layers.Dense(1, dtype="float32")(frozen(hidden)))
        model.compile("sgd", "mse")
        assert switch_precision(model, "mixed_float16").loss_scaling == "added"

    def test_a_schedule_without_a_config_is_no_obstacle(self, xy):
        class Custom(keras.optimizers.schedules.LearningRateSchedule):
            def __call__(self, step):
                return 0.01

        model = dense_model(optimizer=keras.optimizers.SGD(Custom()), loss="mse")
        for policy in ("mixed_float16", "float32", "mixed_float16"):
            switch_precision(model, policy)
            assert np.isfinite(model.fit(*xy, verbose=0).history["loss"]).all()

    @pytest.mark.parametrize("policy", ["mixed_float16", "float32"])
    def test_a_saved_model_comes_back_with_optimizer_and_loss_scale(self, policy, xy, tmp_path):
        model = dense_model(optimizer="adam", loss="mse")
        switch_precision(model, "mixed_float16")
        model.fit(*xy, batch_size=8, verbose=0)
        switch_precision(model, policy)
        model.save(tmp_path / "model.keras")
        again = keras.models.load_model(tmp_path / "model.keras")
        assert type(again.optimizer) is type(model.optimizer)
        for one, other in zip(again.optimizer.variables, model.optimizer.variables, strict=True):
            assert bits(one) == bits(other)

    def test_a_train_step_that_never_scales_its_loss_is_warned_of(self, xy):
        class Unscaled(keras.Sequential):
            def train_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    outputs = keras.ops.cast(self(x, training=True), "float32")
                    loss = keras.ops.mean(keras.ops.square(outputs - y))
                gradients = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply_gradients(
                    zip(gradients, self.trainable_variables, strict=True)
                )
                return {"loss": loss}

        model = Unscaled([keras.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        switch_precision(model, "mixed_float16")
        with pytest.warns(RuntimeWarning, match="scale_loss was never called"):
            model.fit(*xy, verbose=0)

    def test_an_uncompiled_model_needs_none_yet(self):
        assert switch_precision(dense_model(), "mixed_float16").loss_scaling == "none"

    def test_the_inner_optimizer_goes_on_as_the_same_object_with_its_state(self, xy):
        x, y = xy
        model = dense_model(optimizer=keras.optimizers.Adam(0.01), loss="mse")
        model.fit(x, y, epochs=2, batch_size=8, verbose=0)
        inner = model.optimizer
        state = [bits(v) for v in inner.variables]
        for policy in ("mixed_float16", "mixed_bfloat16", "mixed_float16", "float32"):
            switch_precision(model, policy)
            wrapped = model.optimizer
            assert getattr(wrapped, "inner_optimizer", wrapped) is inner
            assert [bits(v) for v in inner.variables] == state
        assert model.optimizer is inner
        assert int(inner.iterations) == 8

    def test_scale_and_streak_are_carried_over_a_float32_stage(self, xy):
        x, y = xy
        model = dense_model(optimizer="sgd", loss="mse")
        switch_precision(model, "mixed_float16")
        model.fit(x, y, batch_size=8, verbose=0)
        model.optimizer.dynamic_scale.assign(4096.0)
        model.optimizer.step_counter.assign(4)
        for policy in ("float32", "mixed_float16", "mixed_bfloat16", "mixed_float16"):
            switch_precision(model, policy)
        assert float(model.optimizer.dynamic_scale) == 4096.0
        assert int(model.optimizer.step_counter) == 4


SETTINGS = {
    "moments": lambda: keras.optimizers.Adam(0.01),
    "accumulators": lambda: keras.optimizers.SGD(0.01, 0.9, gradient_accumulation_steps=3),
    "moving average": lambda: keras.optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2
    ),
    "weight decay": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipnorm": lambda: keras.optimizers.SGD(0.01, clipnorm=0.01),
    "global clipnorm": lambda: keras.optimizers.SGD(0.01, global_clipnorm=0.01),
    "clipvalue": lambda: keras.optimizers.SGD(0.01, clipvalue=0.01),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.01, 2, 0.5)
    ),
}


class TestTheInnerOptimizersOwn:
    @pytest.mark.parametrize("name", SETTINGS)
    def test_settings_and_state_act_under_a_loss_scale_that_comes_and_goes_as_without(
        self, name, xy
    ):
        # A scale that is a power of two scales float32 gradients exactly, so all must be equal.
        def trained(optimizers):
            keras.utils.set_random_seed(3)
            model = dense_model(optimizer=SETTINGS[name](), loss="mse")
            model.optimizer.exclude_from_weight_decay(var_names=["bias"])
            for step in range(7):
                model.optimizer = optimizers[step % 2](model.optimizer)
                model.make_train_function(force=True)
                batch = slice(4 * step, 4 * step + 4)
                model.train_on_batch(xy[0][batch], xy[1][batch])
            return model.variables + unwrapped(model.optimizer).variables, unwrapped(
                model.optimizer
            ).get_config()

        ours, config = trained([wrap_optimizer, unwrap_optimizer])
        theirs, plain_config = trained([lambda optimizer: optimizer] * 2)
        for one, other in zip(ours, theirs, strict=True):
            # (The global norm is a sum, whose order may differ by a rounding.)
            np.testing.assert_array_max_ulp(
                ops.convert_to_numpy(one), ops.convert_to_numpy(other), maxulp=1
            )
        assert {**config, "name": ""} == {**plain_config, "name": ""}

    def test_a_loss_scale_factor_of_the_user_is_there_again_in_float32(self):
        model = dense_model(optimizer=keras.optimizers.SGD(0.1, loss_scale_factor=8.0), loss="mse")
        inner = model.optimizer
        switch_precision(model, "mixed_float16")
        assert inner.loss_scale_factor is None  # the loss would be scaled twice
        switch_precision(model, "float32")
        assert inner.loss_scale_factor == 8.0


class TestRecompiling:
    def test_with_the_models_own_optimizer_keeps_the_scale(self, xy):
        model = dense_model(optimizer="sgd", loss="mse")
        switch_precision(model, "mixed_float16")
        model.fit(*xy, batch_size=8, verbose=0)
        model.optimizer.dynamic_scale.assign(4096.0)
        model.compile(model.optimizer, "mae")
        switch_precision(model, "float32")
        switch_precision(model, "mixed_float16")
        assert float(model.optimizer.dynamic_scale) == 4096.0

    def test_with_its_inner_optimizer_keeps_scale_streak_and_counts_from_the_next_switch_on(
        self, xy
    ):
        model = dense_model(optimizer="sgd", loss="mse")
        switch_precision(model, "mixed_float16")
        model.fit(*xy, batch_size=8, verbose=0)
        model.optimizer.dynamic_scale.assign(4096.0)
        model.optimizer.skipped_steps.assign(3)
        model.compile(model.optimizer.inner_optimizer, "mae")  # Keras puts a new scale on
        switch_precision(model, "mixed_float16")
        assert float(model.optimizer.dynamic_scale) == 4096.0
        assert int(model.optimizer.step_counter) == 4
        assert int(model.optimizer.skipped_steps) == 3
