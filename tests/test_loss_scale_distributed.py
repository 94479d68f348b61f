"""Loss scaling over two replicas: MirroredStrategy on two logical devices of the CPU.

Logical devices must be set before TensorFlow starts, so that this file runs itself once in a
process of its own, as a script. That prints what its cases have seen; the tests look at that.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

BAD_REPLICAS = {"neither": [], "first": [0], "second": [1], "both": [0, 1]}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What the cases below have seen, by their names."""
    file = tmp_path_factory.mktemp("seen") / "seen.json"
    done = subprocess.run([sys.executable, __file__, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(file.read_text())


@pytest.mark.parametrize("bad", BAD_REPLICAS)
def test_a_nan_on_any_replica_makes_all_skip_the_step_and_change_nothing(bad, seen):
    case = seen["nan"][bad]
    skips = bad != "neither"
    assert case["unchanged"] is skips  # weights, moments, step count, on both replicas
    assert case["counts"] == ([0, 1] if skips else [1, 0])
    assert case["scale moves by"] == ([0.5, 0.5] if skips else [1.0, 1.0])
    assert case["skipped in a row"] == [int(skips)] * 2
    assert case["replicas equal"] and case["finite"]


@pytest.mark.parametrize("bad", BAD_REPLICAS)
def test_the_step_after_it_trains(bad, seen):
    assert seen["nan"][bad]["after"] == {"counts": [1, 0], "moved": True, "finite": True}


def test_the_second_replica_is_what_keras_own_does_not_see(seen):
    assert seen["keras"] == {"first": True, "second": False, "both": True}


def test_clipping_decay_average_and_schedule_work_as_without_a_loss_scale(seen):
    # A scale that is a power of two scales float32 gradients exactly: equal but for roundings of
    # the norm over all gradients.
    assert seen["ulps apart"] <= 1


def test_hysteresis_and_tolerance_count_alike_on_all_replicas(seen):
    # 1 bad step is waited for, the second backs off: twice on each replica.
    assert seen["hysteresis"] == [[1024.0, 1024.0], [512.0, 512.0], [2, 2], [2, 2]]


@pytest.mark.parametrize("mode", ["unscaled", "scaled"])
def test_a_train_step_that_scales_no_loss_is_warned_of_and_one_that_does_is_not(mode, seen):
    assert seen[f"custom {mode}"] is (mode == "unscaled")


def test_a_switch_takes_scale_and_counts_along(seen):
    assert seen["switched"] == {"scale": 512.0, "counts": [3, 1], "weights finite": True}


def test_a_state_is_set_on_all_replicas(seen):
    assert seen["set_weights"] == [[64.0, 64.0], [5, 5]]


def cases():
    """Runs everything, in this process: yields names and what was seen."""
    import keras
    import numpy as np
    import tensorflow as tf
    from keras import layers
    from models import dense_model

    from precision_bert import DynamicLossScaleOptimizer, LossScaleRule, switch_precision
    from precision_bert.loss_scaling import count_steps, current_loss_scale, unwrapped

    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    x = np.random.RandomState(0).randn(48, 4).astype("float32")
    y = x[:, :1]
    half = 4  # of a batch of 8 goes to each replica

    def on_replicas(variable):
        return [v.numpy() for v in strategy.experimental_local_results(variable.value)]

    def compiled(optimizer, policy="float32"):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = dense_model(policy)
            model.compile(optimizer(), "mse")
        return model

    def step(model, index, bad=()):
        batch = slice(8 * index, 8 * index + 8)
        targets = y[batch].copy()
        for replica in bad:
            targets[half * replica + 1] = np.nan
        model.fit(x[batch], targets, batch_size=8, shuffle=False, verbose=0)

    def of_training(model):
        return [
            value
            for variable in model.weights + unwrapped(model.optimizer).variables
            for value in on_replicas(variable)
        ]

    def is_finite(model):
        return bool(all(np.isfinite(v).all() for v in of_training(model)))

    def is_same(before, model):
        after = of_training(model)
        return all(a.tobytes() == b.tobytes() for a, b in zip(before, after, strict=True))

    model = compiled(
        lambda: DynamicLossScaleOptimizer(keras.optimizers.Adam(0.01), 2.0**12), "mixed_float16"
    )
    optimizer = model.optimizer
    step(model, 0)
    seen = {}
    for name, bad in BAD_REPLICAS.items():
        before, counts = of_training(model), np.array(count_steps(optimizer))
        scale = current_loss_scale(optimizer)
        step(model, 1, bad)
        both = [*model.weights, *optimizer.variables]
        seen[name] = {
            "unchanged": is_same(before, model),
            "counts": (count_steps(optimizer) - counts).tolist(),
            "scale moves by": [float(v) / scale for v in on_replicas(optimizer.dynamic_scale)],
            "skipped in a row": [int(v) for v in on_replicas(optimizer.consecutive_skipped_steps)],
            "finite": is_finite(model),
            "replicas equal": all(len({v.tobytes() for v in on_replicas(w)}) == 1 for w in both),
        }
        before, counts = of_training(model), np.array(count_steps(optimizer))
        step(model, 2)
        seen[name]["after"] = {
            "counts": (count_steps(optimizer) - counts).tolist(),
            "moved": not is_same(before, model),
            "finite": is_finite(model),
        }
    yield "nan", seen

    seen = {}
    model = compiled(lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    weights = model.get_weights()
    for name in ("first", "second", "both"):
        step(model, 0, BAD_REPLICAS[name])
        seen[name] = is_finite(model)
        model.set_weights(weights)
    yield "keras", seen

    def settings():
        schedule = keras.optimizers.schedules.CosineDecay(0.1, 20)
        return keras.optimizers.AdamW(schedule, 0.1, global_clipnorm=0.1, use_ema=True)

    trained = []
    for wrap in (DynamicLossScaleOptimizer, lambda optimizer: optimizer):
        model = compiled(lambda wrap=wrap: wrap(settings()))
        for index in range(5):
            step(model, index)
        inner = unwrapped(model.optimizer)
        trained.append([v for w in model.weights + inner.variables for v in on_replicas(w)])
    one, other = (np.concatenate([v.ravel() for v in part]).astype("float32") for part in trained)
    yield "ulps apart", float((np.abs(one - other) / np.spacing(np.abs(other))).max())

    rule = LossScaleRule(1024.0, hysteresis=2, tolerance=0.5)
    model = compiled(lambda: DynamicLossScaleOptimizer(keras.optimizers.SGD(0.1), rule=rule))
    seen = []
    for index, bad in enumerate([(1,), (0,)]):
        step(model, index, bad)
        seen.append([float(v) for v in on_replicas(model.optimizer.dynamic_scale)])
    optimizer = model.optimizer
    for variable in (optimizer.skipped_steps, optimizer.consecutive_skipped_steps):
        seen.append([int(v) for v in on_replicas(variable)])
    yield "hysteresis", seen

    class Custom(keras.Sequential):
        def train_step(self, data):
            inputs, targets = data
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(keras.ops.square(self(inputs, training=True) - targets))
                scaled = self.optimizer.scale_loss(loss) if self.scales else loss
            gradients = tape.gradient(scaled, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    for mode in ("unscaled", "scaled"):
        with strategy.scope():
            model = Custom([keras.Input((4,)), layers.Dense(1)])
            model.scales = mode == "scaled"
            model.compile(DynamicLossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(model, 0)
        yield f"custom {mode}", any("scale_loss was never called" in str(w.message) for w in caught)

    model = compiled(lambda: keras.optimizers.Adam(0.01))
    switch_precision(model, "mixed_float16")
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
        model.optimizer.dynamic_scale.assign(1024.0)
    step(model, 0)
    step(model, 1, bad=(1,))
    switch_precision(model, "float32")
    step(model, 2)
    switch_precision(model, "mixed_float16")
    step(model, 3)
    yield (
        "switched",
        {
            "scale": current_loss_scale(model.optimizer),
            "counts": count_steps(model.optimizer),
            "weights finite": is_finite(model),
        },
    )

    optimizer = model.optimizer
    values = [on_replicas(v)[0] for v in optimizer.variables]
    values[3], values[4] = np.float32(64.0), np.int64(5)
    with strategy.scope():
        optimizer.set_weights(values)
    yield (
        "set_weights",
        [
            [float(v) for v in on_replicas(optimizer.dynamic_scale)],
            [int(v) for v in on_replicas(optimizer.skipped_steps)],
        ],
    )


def main(file):
    """Sets up two devices and writes what the cases have seen."""
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    device = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [device, device])
    Path(file).write_text(json.dumps(dict(cases())))


if __name__ == "__main__":
    main(sys.argv[1])
