"""A training that was interrupted goes on where it was, or says why it cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

from precision_bert import Stage, completed_epochs, precision_scope, staged_fit, two_stage_fit

POLICIES = ("mixed_float16", "float32", "mixed_float16", "float32")
SCHEDULE = keras.optimizers.schedules.PolynomialDecay(0.01, 12, 0.001)


def build(policy="float32"):
    keras.utils.set_random_seed(3)
    with precision_scope(policy):
        model = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(16, "gelu"),
                layers.BatchNormalization(),
                layers.Dropout(0.3),
                layers.Dense(1),
            ]
        )
    model.compile(keras.optimizers.Adam(0.01, loss_scale_factor=4.0), "mse")
    return model


def stages(epochs=2):
    return [
        Stage("mixed_float16", epochs),
        Stage("float32", epochs, learning_rate=SCHEDULE),
        Stage("mixed_float16", epochs),
        Stage("float32", epochs, learning_rate=0.002),
    ]


class StopAfter(keras.callbacks.Callback):
    """Interrupts within the epoch after `epochs` whole ones."""

    def __init__(self, epochs):
        super().__init__()
        self.epochs = epochs

    def on_train_batch_end(self, batch, logs=None):
        if self.current == self.epochs and batch == 1:
            raise KeyboardInterrupt

    def on_epoch_begin(self, epoch, logs=None):
        self.current = epoch


def train(model, xy, folder=None, **arguments):
    return staged_fit(
        model, stages(), *xy, batch_size=8, shuffle=False, verbose=0, validation_data=xy,
        checkpoint_dir=folder, **arguments,
    )  # fmt: skip


def state(model):
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return [np.array(v).tobytes() for v in [*model.variables, *inner.variables]]


def without_times(record):
    history = {name: v for name, v in record.history.items() if name != "epoch_seconds"}
    steps = [
        (s.policy, s.first_epoch, s.epochs, s.applied_steps, s.skipped_steps, s.loss_scale)
        for s in record.stages
    ]
    return history, record.epoch, steps


@pytest.fixture(scope="module")
def uninterrupted():
    x = np.random.RandomState(0).randn(32, 4).astype("float32") * 0.1
    xy = x, x[:, :1]
    model = build()
    record = train(model, xy)
    return xy, state(model), without_times(record), model.predict(x, verbose=0).tobytes()


@pytest.mark.parametrize("done", range(1, 8))
def test_it_goes_on_bit_for_bit_before_on_and_after_each_boundary(done, uninterrupted, tmp_path):
    xy, weights, record, predictions = uninterrupted
    with pytest.raises(KeyboardInterrupt):
        train(build(), xy, tmp_path, callbacks=[StopAfter(done)])
    assert completed_epochs(tmp_path) == done

    model = build()
    resumed = train(model, xy, tmp_path, resume=True)

    assert state(model) == weights
    assert without_times(resumed) == record
    assert model.predict(xy[0], verbose=0).tobytes() == predictions


def test_saving_changes_nothing_and_a_finished_training_is_not_trained_again(
    uninterrupted, tmp_path
):
    xy, weights, record, _ = uninterrupted
    first = build()
    assert without_times(train(first, xy, tmp_path)) == record
    assert state(first) == weights
    again = build()
    assert without_times(train(again, xy, tmp_path, resume=True)) == record
    assert state(again) == weights


def test_it_may_be_interrupted_again_and_again(uninterrupted, tmp_path):
    xy, weights, record, _ = uninterrupted
    for done in (1, 3, 4, 7):
        with pytest.raises(KeyboardInterrupt):
            train(build(), xy, tmp_path, callbacks=[StopAfter(done)], resume=True)
    model = build()
    assert without_times(train(model, xy, tmp_path, resume=True)) == record
    assert state(model) == weights


def test_a_model_built_in_half_resumes_too(xy, tmp_path):
    whole = build("mixed_float16")
    expected = without_times(train(whole, xy))
    with pytest.raises(KeyboardInterrupt):
        train(build("mixed_float16"), xy, tmp_path, callbacks=[StopAfter(3)])
    resumed = build("mixed_float16")
    assert without_times(train(resumed, xy, tmp_path, resume=True)) == expected
    assert state(resumed) == state(whole)


def test_with_nothing_saved_yet_the_training_begins(xy, tmp_path):
    record = two_stage_fit(
        build(),
        *xy,
        epochs=2,
        switch_epoch=1,
        batch_size=8,
        verbose=0,
        checkpoint_dir=tmp_path,
        resume=True,
    )
    assert record.epoch == [0, 1]


def test_a_training_that_was_stopped_for_good_stays_stopped(xy, tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 2

    record = train(build(), xy, tmp_path, callbacks=[Stop()])
    assert record.stopped_early and record.epoch == [0, 1, 2]
    again = train(build(), xy, tmp_path, resume=True)
    assert without_times(again) == without_times(record) and again.stopped_early


def test_only_the_last_two_checkpoints_are_kept(xy, tmp_path):
    train(build(), xy, tmp_path)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["epoch-000007.npz", "epoch-000008.npz"]


def test_what_happens_as_fit_ends_is_saved_too(xy, tmp_path):
    def ema_model():
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9), "mse")
        return model

    whole = ema_model()
    train(whole, xy, tmp_path / "ema")
    again = ema_model()
    train(again, xy, tmp_path / "ema", resume=True)
    assert state(again) == state(whole)

    def best():
        return keras.callbacks.EarlyStopping(
            "loss", mode="max", patience=1, restore_best_weights=True
        )

    whole, again = build(), build()
    record = train(whole, xy, tmp_path / "best", callbacks=[best()])
    assert record.stopped_early
    train(again, xy, tmp_path / "best", callbacks=[best()], resume=True)
    assert state(again) == state(whole)


def test_an_array_metric_is_saved(xy, tmp_path):
    model = build()
    model.compile("sgd", "mse", metrics=[keras.metrics.F1Score(threshold=0.5)])
    record = train(model, xy, tmp_path)
    again = build()
    again.compile("sgd", "mse", metrics=[keras.metrics.F1Score(threshold=0.5)])
    resumed = train(again, xy, tmp_path, resume=True)
    assert resumed.to_dict()["history"]["f1_score"] == record.to_dict()["history"]["f1_score"]


class TestRefusals:
    def test_a_model_without_the_dropout(self, xy, tmp_path):
        self.interrupted(xy, tmp_path)
        model = build()
        other = keras.Sequential([la for la in model.layers if not isinstance(la, layers.Dropout)])
        other.build((None, 4))
        other.compile(keras.optimizers.Adam(0.01), "mse")
        with pytest.raises(ValueError, match=r"its model variables differ"):
            train(other, xy, tmp_path, resume=True)

    def interrupted(self, xy, folder):
        with pytest.raises(KeyboardInterrupt):
            train(build(), xy, folder, callbacks=[StopAfter(3)])

    def test_a_folder_that_holds_a_training_unless_resume_is_said(self, xy, tmp_path):
        self.interrupted(xy, tmp_path)
        with pytest.raises(ValueError, match=r"holds the checkpoints of a training.*resume=True"):
            train(build(), xy, tmp_path)

    def test_another_schedule(self, xy, tmp_path):
        self.interrupted(xy, tmp_path)
        model = build()
        before = state(model)
        with pytest.raises(
            ValueError, match=r"its stages differ. Saved: mixed_float16 for 2 epochs"
        ):
            staged_fit(model, stages(3), *xy, checkpoint_dir=tmp_path, resume=True, verbose=0)
        assert state(model) == before

    def test_another_model(self, xy, tmp_path):
        self.interrupted(xy, tmp_path)
        other = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(1)])
        other.compile("adam", "mse")
        with pytest.raises(
            ValueError, match=r"its model variables differ. Saved: kernel \(4, 16\)"
        ):
            train(other, xy, tmp_path, resume=True)

    def test_another_optimizer(self, xy, tmp_path):
        self.interrupted(xy, tmp_path)
        model = build()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        with pytest.raises(ValueError, match=r"its optimizer differ. Saved: Adam with"):
            train(model, xy, tmp_path, resume=True)

    @pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
    def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
        self, damage, uninterrupted, tmp_path
    ):
        xy, weights, record, _ = uninterrupted
        self.interrupted(xy, tmp_path)
        path = tmp_path / "epoch-000003.npz"
        content = bytearray(path.read_bytes())
        if damage == "flipped":
            content[len(content) // 3] ^= 0x10
        path.write_bytes(content[: {"cut": len(content) // 2, "empty": 0}.get(damage)])
        model = build()
        with pytest.warns(RuntimeWarning, match=r"epoch-000003\.npz is damaged"):
            resumed = train(model, xy, tmp_path, resume=True)
        assert state(model) == weights
        assert without_times(resumed) == record

    def test_nothing_but_damaged_checkpoints(self, xy, tmp_path):
        self.interrupted(xy, tmp_path)
        for path in tmp_path.iterdir():
            path.write_bytes(b"")
        with (
            warnings.catch_warnings(action="ignore"),
            pytest.raises(ValueError, match=r"None of the checkpoints in .* can be read"),
        ):
            train(build(), xy, tmp_path, resume=True)

    def test_a_model_that_is_not_built(self, xy, tmp_path):
        self.interrupted(xy, tmp_path)
        model = keras.Sequential([layers.Dense(1)])
        model.compile("adam", "mse")
        with pytest.raises(ValueError, match=r"must be built before its training is resumed"):
            train(model, xy, tmp_path, resume=True)


KILLED = """
import sys
sys.path[:0] = [{tests!r}]
import numpy as np
from test_resuming import build, state, train, without_times
import keras

class Tell(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print("step", flush=True)

x = np.random.RandomState(0).randn(32, 4).astype("float32") * 0.1
model = build()
record = train(model, (x, x[:, :1]), sys.argv[1], resume=True, callbacks=[Tell()])
np.savez(sys.argv[1] + "/done.npz", *[np.frombuffer(b, "uint8") for b in state(model)])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="SIGKILL is POSIX")
def test_a_killed_process_loses_no_epoch_that_was_saved(uninterrupted, tmp_path):
    _, weights, _, _ = uninterrupted
    code = KILLED.format(tests=str(Path(__file__).parent))
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    for steps in (6, 9, None):  # kills in the second epoch, two epochs later, and then not
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )  # fmt: skip
        with process:
            for count, _ in enumerate(process.stdout, start=1):
                if count == steps:
                    process.send_signal(signal.SIGKILL)
                    break
        assert process.returncode == (0 if steps is None else -signal.SIGKILL)
    with np.load(tmp_path / "done.npz") as stored:
        assert [stored[name].tobytes() for name in stored.files] == weights
