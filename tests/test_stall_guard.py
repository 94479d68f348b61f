"""What the guard against stalled trainings promises."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from test_range_search import MaskedSoftmax, Standardize, tanh_gelu

import precision_bert as pb
from precision_bert.callbacks import StallError, StallGuard
from precision_bert.training_state import capture, restore

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *[f"w{i}" for i in range(20)]]
FFN = "transformer_layer_0/feedforward_intermediate_dense"


def tiny_bert(policy="mixed_float16"):
    """A BERT of one layer whose pooled output meets some floating features."""
    config = pb.BertConfig(WORDS, 1, num_heads=2, hidden_dim=8, intermediate_dim=16, dropout=0.1)
    backbone, _ = config.build("float32")
    features = keras.Input((4,), name="features")
    norm = Standardize(1e-8, name="norm")(layers.Dense(8, name="dense")(features))
    masked = MaskedSoftmax(-1e9, name="masked")(layers.Identity(name="scores")(features))
    joined = layers.Concatenate()([backbone.output["pooled_output"], norm, masked])
    inputs = {**backbone.input, "features": features}
    model = keras.Model(inputs, layers.Dense(2, dtype="float32", name="logits")(joined))
    model.compile(keras.optimizers.Adam(1e-3), the_loss)
    pb.switch_precision(model, policy, keep_float32=["logits"])
    return model


FAULT_OF_THE_LOSS = tf.Variable("", trainable=False)


def the_loss(y, logits):
    """A squared error with two spots that turn bad: a log, and labels that are cast to half."""
    argument = tf.where(FAULT_OF_THE_LOSS == "log", tf.nn.relu(-tf.abs(logits)), 1.0)
    in_half = ops.mean(ops.cast(ops.cast(y, "float16"), "float32"))
    return ops.mean(ops.square(y - logits)) + 1e-3 * (in_half - ops.mean(ops.log(argument)))


def examples(n=12):
    random = np.random.RandomState(0)
    ids = random.randint(5, len(WORDS), (n, 6)).astype("int32")
    x = {"token_ids": ids, "segment_ids": ids * 0, "padding_mask": ids * 0 + 1}
    x["features"] = random.uniform(0.5, 1, (n, 4)).astype("float32")
    return {"x": x, "y": random.randn(n, 2).astype("float32"), "w": np.ones(n, "float32")}


@pytest.fixture(scope="module")
def bert():
    model = tiny_bert()
    data = examples()
    model.fit(data["x"], data["y"], sample_weight=data["w"], batch_size=2, verbose=0)
    return model, capture(model)


def assign(path, index, value, of="variables"):
    def fault(model, data):
        (variable,) = [v for v in getattr(model, of) if v.path.endswith(path)]
        values = variable.numpy()
        values[index] = value
        variable.assign(values)

    return fault


def in_data(part, value, key=None):
    def fault(model, data):
        array = data[part] if key is None else data[part][key]
        array[...] = value(array)

    return fault


def log_of_zero(model, data):
    FAULT_OF_THE_LOSS.assign("log")


def both(*faults):
    return lambda model, data: [fault(model, data) for fault in faults]


def poisoned_moment(model, data):
    variables = model.optimizer.inner_optimizer.variables
    (moment,) = [v for v in variables if v.path.endswith("/dense_bias_velocity")]
    moment.assign(moment + np.nan)


def equal_features(model, data):
    model.get_layer("dense").kernel.assign(np.ones((4, 8)))
    model.get_layer("dense").bias.assign(np.zeros(8))


def huge_kernel(model, data):
    model.get_layer("dense").kernel.assign(np.full((4, 8), 6e4))


# The fault, the cause that must be named, and the layer.
FAULTS = {
    "infinite input": (in_data("x", lambda a: a + np.inf, "features"), "input", "(outside layers)"),
    "NaN input": (in_data("x", lambda a: a + np.nan, "features"), "input", "(outside layers)"),
    "input beyond half's range": (
        in_data("x", lambda a: a * 1e6, "features"),
        "input range",
        "functional",
    ),
    "NaN sample weight": (in_data("w", lambda a: a + np.nan), "labels", "(outside layers)"),
    "NaN label": (in_data("y", lambda a: a + np.nan), "labels", "(outside layers)"),
    "label cast to half": (in_data("y", lambda a: a * 0 + 1e6), "label cast", "(loss)"),
    "infinite loss": (log_of_zero, "loss", "(loss)"),
    "saturated tanh GELU": (
        both(
            assign("feedforward_intermediate_dense/bias", 0, 300.0),
            assign("feedforward_intermediate_dense/bias", 1, -300.0),
        ),
        "GELU gradient",
        FFN,
    ),
    "huge bias": (
        assign("feedforward_output_dense/bias", 0, 1e6),
        "overflow",
        "transformer_layer_0/feedforward_output_dense",
    ),
    "huge kernel": (huge_kernel, "overflow", "dense"),
    "NaN weight": (
        assign("feedforward_output_dense/kernel", (0, 0), np.nan),
        "weights",
        "transformer_layer_0/feedforward_output_dense",
    ),
    "poisoned moment": (poisoned_moment, "optimizer state", "dense"),
    "zero variance": (equal_features, "epsilon", "norm"),
    "-1e9 mask": (in_data("x", lambda a: -a, "features"), "mask constant", "masked"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_verdict_names_the_layer_and_the_cause(name, bert):
    model, healthy = bert
    fault, cause, layer = FAULTS[name]
    data = examples()
    fault(model, data)
    given = (data["x"], data["y"], data["w"])
    try:
        with pytest.raises(StallError) as error:
            model.fit(
                data["x"], data["y"], sample_weight=data["w"], batch_size=2, epochs=2, verbose=0,
                callbacks=[StallGuard("raise", data=given, check_every=3)],
            )  # fmt: skip
    finally:
        restore(model, healthy)
        FAULT_OF_THE_LOSS.assign("")
    finding = error.value.alarm.finding
    assert finding.cause == cause, str(finding)
    assert finding.layer.rstrip("_0123456789") == layer.rstrip("_0123456789"), str(finding)
    assert cause in str(error.value) and finding.remedy in str(error.value)


# ---------------------------------------------------------------- a stalled BERT, escalated


def stalled_bert():
    """The BERT whose tanh GELU has a NaN gradient in half, with a finite loss."""
    config = pb.BertConfig(WORDS, 2, num_heads=2, hidden_dim=8, intermediate_dim=16)
    model = pb.bert_classifier(config, 2, sequence_length=8)
    pb.compile_classifier(model, num_steps=16, learning_rate=1e-3)
    assign(f"{FFN}/bias", 0, 300.0)(model, None)
    assign(f"{FFN}/bias", 1, -300.0)(model, None)
    return model


def encoded(n=8):
    ids = np.random.RandomState(0).randint(5, len(WORDS), (n, 6)).astype("int32")
    x = {"token_ids": ids, "segment_ids": ids * 0, "padding_mask": ids * 0 + 1}
    return x, np.array([0, 1] * (n // 2), "int32")


def test_a_stalled_bert_is_escalated_within_its_stage_and_ends_with_its_steps_applied():
    model = stalled_bert()
    guard = StallGuard("escalate", check_every=2)
    with pytest.warns(RuntimeWarning, match="finite loss, non-finite gradients"):
        record = pb.two_stage_fit(
            model, *encoded(), epochs=4, switch_epoch=3, batch_size=2, shuffle=False, verbose=0,
            callbacks=[guard],
        )  # fmt: skip
    (alarm,) = guard.alarms
    assert (alarm.finding.cause, alarm.finding.layer) == ("GELU gradient", FFN)
    assert (alarm.finding.direction, alarm.policy) == ("backward", "mixed_float16")
    assert np.isfinite(alarm.finding.loss)
    assert (alarm.epoch, alarm.step, alarm.escalated_to) == (1, 2, "float32")
    # 16 steps: six skipped before the guard looked a third time, and none after.
    assert record.history["applied_steps"] == [0, 2, 4, 4]
    assert record.history["skipped_steps"] == [4, 2, 0, 0]
    assert record.history["precision_escalated"] == [0, 1, 0, 0]
    assert [stage.policy for stage in record.stages] == ["float32", "float32"]
    assert [stage.escalated_from for stage in record.stages] == ["mixed_float16", None]
    assert record.stages[0].computes_in["half_share"] == 0.0
    assert "stage 0 was planned in mixed_float16, and escalated to float32" in str(record)
    assert set(pb.compute_dtypes(model).values()) == {"float32"}


# ---------------------------------------------------------------- small models from here


def gelu_net(stalled=True, optimizer=None):
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, tanh_gelu, name="ffn"), layers.Dense(1)], name="net"
    )
    model.compile(optimizer or keras.optimizers.SGD(1e-3), "mse")
    if stalled:
        model.get_layer("ffn").bias.assign([300.0, 0, 0, 0])
        model.layers[-1].kernel.assign(np.full((4, 1), 0.01))  # no other gradient is large
    return model


@pytest.fixture
def data():
    x = np.random.RandomState(0).randn(32, 4).astype("float32") * 0.1
    return x, x[:, :1]


def staged(model, data, *policies, guard, **arguments):
    stages = [pb.Stage(policy, 1) for policy in policies]
    return pb.staged_fit(
        model, stages, *data, batch_size=2, verbose=0, callbacks=[guard], **arguments
    )


def test_later_stages_do_not_fall_back_into_the_precision_that_stalled(data, capsys):
    model, guard = gelu_net(), StallGuard("escalate")
    with pytest.warns(RuntimeWarning, match="Going on in float32"):
        record = pb.staged_fit(
            model,
            [pb.Stage(policy, 1) for policy in ("mixed_float16", "mixed_bfloat16", "float32")],
            *data,
            batch_size=2,
            verbose=2,
            callbacks=[guard],
        )
    assert [stage.policy for stage in record.stages] == ["float32"] * 3
    assert [stage.escalated_from for stage in record.stages] == [
        "mixed_float16", "mixed_bfloat16", None,
    ]  # fmt: skip
    assert "planned in mixed_bfloat16" in capsys.readouterr().out
    assert keras.config.dtype_policy().name == "float32"


def test_later_stages_in_a_higher_precision_are_entered_as_planned(data):
    guard = StallGuard("escalate", escalate_to="mixed_bfloat16")
    with pytest.warns(RuntimeWarning, match="Going on in mixed_bfloat16"):
        record = staged(gelu_net(), data, "mixed_float16", "float32", guard=guard)
    assert [stage.policy for stage in record.stages] == ["mixed_bfloat16", "float32"]


def test_a_resumed_training_stays_in_the_precision_that_it_was_escalated_to(data, tmp_path):
    class InterruptionError(Exception):
        pass

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise InterruptionError

    stages = [pb.Stage("mixed_float16", 2)]
    arguments = dict(batch_size=2, verbose=0, checkpoint_dir=tmp_path)
    with pytest.warns(RuntimeWarning, match="Going on"), pytest.raises(InterruptionError):
        pb.staged_fit(
            gelu_net(), stages, *data, callbacks=[StallGuard("escalate"), Interrupt()], **arguments
        )
    model = gelu_net()
    record = pb.staged_fit(
        model, stages, *data, callbacks=[StallGuard("escalate")], resume=True, **arguments
    )
    assert record.stages[0].policy == "float32"
    assert record.stages[0].escalated_from == "mixed_float16"
    assert record.history["skipped_steps"] == [10, 0]


def test_escalating_goes_back_to_the_last_good_state_where_weights_were_damaged(data):
    model = gelu_net(stalled=False)
    pb.switch_precision(model, "mixed_bfloat16")

    class Damage(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if self.epoch == 1 and batch == 4:
                self.model.get_layer("ffn").bias.assign([np.nan] * 4)

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch
            self.steps = int(self.model.optimizer.iterations)

    guard, damage = StallGuard("escalate", data=data, check_every=5), Damage()
    with pytest.warns(RuntimeWarning, match=r"NaN or infinity.*Going on in float32"):
        model.fit(*data, batch_size=2, epochs=2, verbose=0, callbacks=[damage, guard])
    assert guard.alarms[0].finding.cause == "weights"
    assert all(np.isfinite(w).all() for w in model.get_weights())
    # The second epoch's first five steps are undone: eleven of its sixteen count.
    assert int(model.optimizer.iterations) == damage.steps + 11
    assert model.get_layer("ffn").compute_dtype == "float32"


def test_escalating_ends_in_an_error_where_the_higher_precision_does_not_mend_it(data):
    model = gelu_net(stalled=False)
    pb.switch_precision(model, "mixed_float16")
    x, y = data[0] * np.nan, data[1]
    before = model.get_weights()
    with pytest.raises(StallError, match="float32 does not mend it: Cause: input"):
        model.fit(x, y, batch_size=2, verbose=0, callbacks=[StallGuard("escalate", data=(x, y))])
    assert model.get_layer("ffn").compute_dtype == "float16"
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_escalating_from_the_highest_precision_is_an_error(data):
    model, y = gelu_net(stalled=False), data[1] * np.nan
    guard = StallGuard("escalate", data=(data[0], y))
    with pytest.raises(StallError, match="There is no going on in float32") as error:
        model.fit(data[0], y, batch_size=2, verbose=0, callbacks=[guard])
    # The weights are NaN by then; the good ones tell whose fault it is.
    assert error.value.alarm.finding.cause == "labels"


def test_a_warning_comes_once_a_cause_and_the_training_goes_on(data):
    model, guard = gelu_net(), StallGuard("warn", check_every=5, data=data)
    pb.switch_precision(model, "mixed_float16")
    with pytest.warns(RuntimeWarning) as caught:
        history = model.fit(*data, batch_size=2, epochs=5, verbose=0, callbacks=[guard]).history
    assert len([one for one in caught if "has stalled" in str(one.message)]) == 1
    assert len(guard.alarms) == 1
    assert history["stall_alarms"] == [1, 0, 0, 0, 0]


def test_without_data_the_alarm_waits_for_the_floor_and_asks_for_data(data):
    model, guard = gelu_net(), StallGuard(check_every=1)
    pb.switch_precision(model, "mixed_float16")
    with pytest.raises(StallError, match="No batch at hand to search: give StallGuard data=") as e:
        model.fit(*data, batch_size=2, epochs=2, verbose=0, callbacks=[guard])
    # From 2**15 it takes 15 halvings to the floor of 1.
    assert (e.value.alarm.skipped_in_a_row, e.value.alarm.loss_scale) == (15, 1.0)
    assert "with the loss scale at its floor" in str(e.value)


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return self.x[2 * i : 2 * i + 2], self.y[2 * i : 2 * i + 2]


@pytest.mark.parametrize(
    "make",
    [lambda x, y: tf.data.Dataset.from_tensor_slices((x, y)).batch(2), Batches],
    ids=["tf.data", "PyDataset"],
)
def test_data_sets_are_searched_too(make, data):
    model, guard = gelu_net(), StallGuard()
    dataset = make(*data)
    with pytest.raises(StallError, match="GELU gradient in layer 'net/ffn'"):
        pb.staged_fit(model, [pb.Stage("mixed_float16", 2)], dataset, verbose=0, callbacks=[guard])


@pytest.mark.parametrize("stalled", [True, False])
def test_keras_own_loss_scale_optimizer_is_watched_although_it_counts_nothing(stalled, data):
    with pb.precision_scope("mixed_float16"):
        model = gelu_net(stalled)
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    guard = StallGuard("warn", data=data, check_every=3)
    if not stalled:
        model.fit(*data, batch_size=2, epochs=2, verbose=0, callbacks=[guard])
        assert guard.alarms == []
        return
    with pytest.warns(RuntimeWarning, match="6 steps in a row were skipped"):
        model.fit(*data, batch_size=2, epochs=2, verbose=0, callbacks=[guard])
    assert guard.alarms[0].finding.cause == "GELU gradient"


def test_a_floor_that_is_too_high_is_named(data):
    x, y = data
    optimizer = pb.DynamicLossScaleOptimizer(
        keras.optimizers.SGD(0.0), initial_scale=2.0**24, min_scale=2.0**24
    )
    model = gelu_net(stalled=False, optimizer=optimizer)
    pb.switch_precision(model, "mixed_float16")
    y = y + 100
    with pytest.raises(StallError, match="lower min_scale") as error:
        model.fit(x, y, batch_size=2, verbose=0, callbacks=[StallGuard(data=(x, y))])
    assert error.value.alarm.finding.cause == "loss scale"


def test_weights_that_are_nan_before_the_first_step_are_noticed_then(data):
    model = gelu_net()
    model.get_layer("ffn").bias.assign([np.nan] * 4)
    with pytest.raises(StallError, match="'net/ffn/bias' holds NaN or infinity") as error:
        model.fit(*data, verbose=0, callbacks=[StallGuard()])
    assert error.value.alarm.step == 0
    assert int(model.optimizer.iterations) == 0


def test_an_infinite_mask_that_is_kept_as_an_untrained_weight_is_no_alarm(data):
    class Masks(layers.Layer):
        def build(self, shape):
            self.mask = self.add_weight(shape=(4,), initializer="zeros", trainable=False)

        def call(self, x):
            return ops.softmax(x + self.mask)

    masks = Masks()
    model = keras.Sequential([keras.Input((4,)), masks, layers.Dense(1)])
    masks.mask.assign([-np.inf, 0, 0, 0])
    model.compile("sgd", "mse")
    model.fit(*data, verbose=0, callbacks=[StallGuard()])


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_training_raises_no_alarm(seed, data):
    """Scales that begin far too high, that grow every few steps, with data and without."""
    random = np.random.RandomState(seed)
    keras.utils.set_random_seed(seed)
    body = [layers.Dense(int(random.randint(4, 12)), "relu") for _ in range(random.randint(1, 3))]
    extra = [
        [],
        [layers.BatchNormalization()],
        [layers.Dropout(0.3)],
        [layers.LayerNormalization()],
    ]
    model = keras.Sequential([keras.Input((4,)), *body, *extra[seed % 4], layers.Dense(1)])
    optimizer = pb.DynamicLossScaleOptimizer(
        [keras.optimizers.Adam(1e-3), keras.optimizers.SGD(1e-3)][seed % 2],
        initial_scale=2.0 ** [15, 24, 40, 60][seed % 4],
        max_scale=2.0**60,
        dynamic_growth_steps=int(random.randint(1, 6)),
    )
    model.compile(optimizer, "mse")
    pb.switch_precision(model, "mixed_float16")
    x, y = data[0], data[1] * 10.0 ** random.randint(0, 4)
    guard = StallGuard(data=(x, y) if seed % 3 else None, check_every=int(random.randint(1, 7)))
    model.fit(x, y, batch_size=2, epochs=6, verbose=0, callbacks=[guard])
    assert guard.alarms == []
    assert int(model.optimizer.skipped_steps) > 0, "the run was to have skipped steps"
    assert int(model.optimizer.iterations) > 0


def test_the_guard_leaves_a_healthy_training_as_it_is_bit_for_bit(data):
    def run(*callbacks):
        keras.utils.set_random_seed(0)
        model = gelu_net(stalled=False)
        pb.switch_precision(model, "mixed_float16")
        model.fit(*data, batch_size=2, epochs=2, verbose=0, callbacks=list(callbacks))
        return [v.numpy().tobytes() for v in (*model.variables, *model.optimizer.variables)]

    assert run() == run(StallGuard("escalate", data=data, check_every=1, consecutive_skips=1))


def test_data_that_cannot_be_searched_does_not_end_the_training(data):
    model, guard = gelu_net(stalled=True), StallGuard("warn", data=(data[0][:, :2], data[1]))
    pb.switch_precision(model, "mixed_float16")
    model.fit(*data, batch_size=4, verbose=0, callbacks=[guard])
    assert guard.alarms == []


@pytest.mark.parametrize("action", ["Raise", "", None])
def test_an_unknown_action_is_refused(action):
    with pytest.raises(ValueError, match="action must be one of 'raise', 'warn', 'escalate'"):
        StallGuard(action)


def test_escalating_to_half_is_refused():
    with pytest.raises(ValueError, match="escalate_to must be higher than mixed_float16"):
        StallGuard("escalate", escalate_to="mixed_float16")


@pytest.mark.parametrize("name", ["check_every", "consecutive_skips", "max_batches"])
def test_a_number_below_one_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        StallGuard(**{name: 0})
