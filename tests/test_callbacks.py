"""What the callbacks promise inside a plain `fit`."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from models import dense_model

from precision_bert import LossScaleMonitor, PrecisionSwitch, compute_dtypes


class Spy(keras.callbacks.Callback):
    """Notes what dtype the model's last hidden layer computes in, at each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(compute_dtypes(self.model)["hidden"])


@pytest.mark.parametrize("at_epoch", [0, 1, 2])
def test_the_switch_happens_before_exactly_its_epoch(at_epoch, xy):
    model = dense_model(optimizer="sgd", loss="mse")
    spy = Spy()
    switch = PrecisionSwitch("mixed_float16", at_epoch=at_epoch)
    model.fit(*xy, epochs=3, batch_size=16, verbose=0, callbacks=[switch, spy])
    assert spy.seen == ["float32"] * (2 * at_epoch) + ["float16"] * (6 - 2 * at_epoch)


def test_training_on_equals_training_on_after_a_switch_between_two_fits(xy):
    def trained(run):
        keras.utils.set_random_seed(0)
        model = dense_model(optimizer=keras.optimizers.Adam(0.01), loss="mse")
        run(model)
        return [np.array(w).tobytes() for w in model.weights]

    def one_fit(model):
        switch = PrecisionSwitch("mixed_bfloat16", at_epoch=1)
        model.fit(*xy, epochs=2, batch_size=8, verbose=0, shuffle=False, callbacks=[switch])

    def two_fits(model):
        from precision_bert import switch_precision

        model.fit(*xy, epochs=1, batch_size=8, verbose=0, shuffle=False)
        switch_precision(model, "mixed_bfloat16")
        model.fit(*xy, epochs=1, batch_size=8, verbose=0, shuffle=False)

    assert trained(one_fit) == trained(two_fits)


def test_validation_after_the_switch_runs_in_the_new_precision(xy):
    x, y = xy
    model = dense_model(optimizer=keras.optimizers.SGD(0.0), loss="mse")
    switch = PrecisionSwitch("mixed_bfloat16", at_epoch=1)
    history = model.fit(x, y, epochs=2, verbose=0, validation_data=(x, y), callbacks=[switch])
    reference = dense_model("mixed_bfloat16", optimizer="sgd", loss="mse")
    reference.set_weights(model.get_weights())
    assert history.history["val_loss"][1] == reference.evaluate(x, y, verbose=0)
    assert history.history["val_loss"][0] != history.history["val_loss"][1]


def test_a_switch_compiles_nothing_which_would_end_the_fit(xy, monkeypatch):
    model = dense_model(optimizer="sgd", loss="mse", metrics=["mae"])
    metrics = [id(metric) for metric in model.metrics]

    def fail(*_, **__):
        raise AssertionError("the switch compiled the model")

    monkeypatch.setattr(model, "compile", fail)
    switch = PrecisionSwitch("mixed_float16", at_epoch=1)
    history = model.fit(*xy, epochs=3, verbose=0, callbacks=[switch])
    assert len(history.history["mae"]) == 3
    assert [id(metric) for metric in model.metrics] == metrics


def test_several_switches_in_one_fit(xy):
    model = dense_model(optimizer="sgd", loss="mse")
    spy = Spy()
    switches = [
        PrecisionSwitch(policy, at_epoch=epoch)
        for epoch, policy in enumerate(["mixed_float16", "float32", "mixed_bfloat16"])
    ]
    model.fit(*xy, epochs=3, batch_size=32, verbose=0, callbacks=[*switches, spy])
    assert spy.seen == ["float16", "float32", "bfloat16"]


def test_a_fit_that_starts_later_switches_at_its_start(xy):
    model = dense_model(optimizer="sgd", loss="mse")
    spy = Spy()
    switch = PrecisionSwitch("mixed_float16", at_epoch=1)
    model.fit(*xy, initial_epoch=2, epochs=3, batch_size=32, verbose=0, callbacks=[switch, spy])
    assert spy.seen == ["float16"]


def test_a_callback_can_be_used_for_a_second_fit(xy):
    model = dense_model(optimizer="sgd", loss="mse")
    switch = PrecisionSwitch("mixed_float16", at_epoch=1)
    for _ in range(2):
        model.fit(*xy, epochs=2, verbose=0, callbacks=[switch])
    assert switch.report.changed == ()


@pytest.mark.parametrize("at_epoch", [3, 4])
def test_a_switch_that_would_never_happen_is_refused_before_training(at_epoch, xy):
    model = dense_model(optimizer="sgd", loss="mse")
    before = [np.array(w) for w in model.weights]
    with pytest.raises(ValueError, match=r"would never happen: fit runs 3 epochs.*at most 2"):
        model.fit(
            *xy, epochs=3, verbose=0, callbacks=[PrecisionSwitch("float32", at_epoch=at_epoch)]
        )
    assert all((a == np.array(b)).all() for a, b in zip(before, model.weights, strict=True))


@pytest.mark.parametrize("at_epoch", [1.0, "1", None, True])
def test_an_epoch_that_is_no_int_is_refused(at_epoch):
    with pytest.raises(TypeError, match="at_epoch must be an int"):
        PrecisionSwitch("float32", at_epoch=at_epoch)


def test_a_negative_epoch_is_refused():
    with pytest.raises(ValueError, match="at_epoch must be at least 0"):
        PrecisionSwitch("float32", at_epoch=-1)


def test_an_unknown_policy_is_refused_at_construction():
    with pytest.raises(ValueError, match="policy must be one of"):
        PrecisionSwitch("half", at_epoch=1)


def test_the_monitor_may_stand_before_or_after_a_switch(xy):
    for monitor_first in (True, False):
        model = dense_model("mixed_float16", optimizer="sgd", loss="mse")
        both = [LossScaleMonitor(), PrecisionSwitch("float32", at_epoch=1)]
        broken = np.full_like(xy[1], np.nan)
        model.fit(*xy, verbose=0, callbacks=[PrecisionSwitch("mixed_float16", at_epoch=0)])
        history = model.fit(
            xy[0], broken, epochs=2, batch_size=8, verbose=0,
            callbacks=both if monitor_first else both[::-1],
        ).history  # fmt: skip
        assert history["skipped_steps"] == [4, 0]


def test_the_monitor_logs_each_epochs_scale_and_steps(xy):
    x, y = xy
    broken = y.copy()
    broken[0] = np.nan
    model = dense_model("mixed_float16", optimizer="sgd", loss="mse")
    switches = [
        PrecisionSwitch("mixed_float16", at_epoch=0),
        PrecisionSwitch("float32", at_epoch=2),
    ]
    model.fit(x, y * 0, batch_size=8, verbose=0, callbacks=[switches[0]])
    scale = float(model.optimizer.dynamic_scale)
    history = model.fit(
        x, broken, epochs=3, batch_size=8, shuffle=False, verbose=0,
        callbacks=[*switches, LossScaleMonitor()],
    ).history  # fmt: skip
    assert history["applied_steps"] == [3, 3, 4]
    assert history["skipped_steps"] == [1, 1, 0]
    assert history["loss_scale"] == [scale / 2, scale / 4, 1.0]


def overflowing(batch_size=8, **compile_arguments):
    """A model, and data whose second batch of four overflows half: its loss is NaN or infinite."""
    model = dense_model("mixed_float16", **compile_arguments)
    pb_switch = PrecisionSwitch("mixed_float16", at_epoch=0)
    x = np.random.RandomState(0).randn(32, 4).astype("float32") * 0.1
    bad = x.copy()
    bad[8:16] = 1e6
    return model, pb_switch, bad, x[:, :1]


def expected_loss(model, x, y, batches):
    """The mean over these batches of a model that does not move."""
    errors = [np.square(model.predict(x[b], verbose=0) - y[b]).mean() for b in batches]
    return np.mean(errors)


BATCHES = [slice(i, i + 8) for i in range(0, 32, 8)]


def test_one_skipped_batch_does_not_make_nan_of_an_epochs_loss():
    model, switch, x, y = overflowing(optimizer=keras.optimizers.SGD(0.0), loss="mse")
    plain = model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[switch]).history
    assert not np.isfinite(plain["loss"][0])
    history = model.fit(
        x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[LossScaleMonitor()]
    ).history
    assert history["skipped_steps"] == [1, 1] and history["applied_steps"] == [3, 3]
    expected = expected_loss(model, x, y, [BATCHES[0], *BATCHES[2:]])
    np.testing.assert_allclose(history["loss"], [expected] * 2, rtol=1e-3)


@pytest.mark.parametrize("is_last", [True, False])
def test_a_skipped_batch_at_an_end_of_the_epoch_is_left_out_as_well(is_last):
    model, switch, x, y = overflowing(optimizer=keras.optimizers.SGD(0.0), loss="mse")
    order = [0, 2, 3, 1] if is_last else [1, 0, 2, 3]
    x = np.concatenate([x[BATCHES[i]] for i in order])
    y = np.concatenate([y[BATCHES[i]] for i in order])
    history = model.fit(
        x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, validation_data=(x[:8], y[:8]),
        callbacks=[switch, LossScaleMonitor()],
    ).history  # fmt: skip
    expected = expected_loss(model, x, y, BATCHES[:3] if is_last else BATCHES[1:])
    np.testing.assert_allclose(history["loss"], [expected] * 2, rtol=1e-3)


def test_the_loss_of_a_training_without_skipped_steps_is_keras_own(xy):
    def history(*callbacks):
        model = dense_model("mixed_float16", optimizer="sgd", loss="mse")
        switch = PrecisionSwitch("mixed_float16", at_epoch=0)
        keras.utils.set_random_seed(0)
        return model.fit(
            *xy, batch_size=8, epochs=2, verbose=0, validation_data=xy,
            callbacks=[switch, *callbacks],
        ).history  # fmt: skip

    keras.utils.set_random_seed(1)
    plain = history()
    keras.utils.set_random_seed(1)
    watched = history(LossScaleMonitor())
    assert {name: watched[name] for name in plain} == plain


def test_the_losses_of_single_outputs_are_averaged_over_applied_steps_too():
    inputs = keras.Input((4,))
    outputs = {name: keras.layers.Dense(1, name=name)(inputs) for name in ("a", "b")}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"a": "mse", "b": "mse"})
    _, switch, x, y = overflowing()
    history = model.fit(
        x, {"a": y, "b": y}, batch_size=8, shuffle=False, verbose=0,
        callbacks=[switch, LossScaleMonitor()],
    ).history  # fmt: skip
    assert history["skipped_steps"] == [1]
    for name in ("loss", "a_loss", "b_loss"):
        assert np.isfinite(history[name]).all(), name


def test_an_epoch_without_an_applied_step_has_its_last_loss():
    model, switch, x, y = overflowing(optimizer="sgd", loss="mse")
    history = model.fit(
        x[8:16], y[8:16], batch_size=4, shuffle=False, verbose=0,
        callbacks=[switch, LossScaleMonitor()],
    ).history  # fmt: skip
    assert history["applied_steps"] == [0] and not np.isfinite(history["loss"][0])


def test_the_scale_and_the_steps_are_in_tensorboard(xy, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = dense_model("mixed_float16", optimizer="sgd", loss="mse")
    callbacks = [
        PrecisionSwitch("mixed_float16", at_epoch=0),
        LossScaleMonitor(),
        keras.callbacks.TensorBoard(str(tmp_path), write_graph=False),
    ]
    history = model.fit(*xy, batch_size=8, epochs=2, verbose=0, callbacks=callbacks).history
    events = EventAccumulator(str(tmp_path / "train"), size_guidance={"tensors": 0})
    events.Reload()
    for name in ("loss_scale", "applied_steps", "skipped_steps"):
        logged = [float(np.frombuffer(e.tensor_proto.tensor_content or
                  np.float32(e.tensor_proto.float_val[0]).tobytes(), "float32")[0])
                  for e in events.Tensors(f"epoch_{name}")]  # fmt: skip
        assert logged == history[name]


def test_the_scale_and_the_steps_are_in_a_csv_log(xy, tmp_path):
    model = dense_model("mixed_float16", optimizer="sgd", loss="mse")
    switch = PrecisionSwitch("mixed_float16", at_epoch=0)
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    model.fit(*xy, batch_size=8, epochs=2, verbose=0, callbacks=[switch, LossScaleMonitor(), log])
    header, first, _ = (tmp_path / "log.csv").read_text().splitlines()
    row = dict(zip(header.split(","), first.split(","), strict=True))
    assert (row["applied_steps"], row["skipped_steps"]) == ("4", "0")
    assert float(row["loss_scale"]) == 2.0**15
