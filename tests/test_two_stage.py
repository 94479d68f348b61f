"""What `two_stage_fit` and `staged_fit` promise on any Keras model and any data."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from models import MODELS, Subclassed, dense_model

import precision_bert as pb
from precision_bert import (
    DynamicLossScaleOptimizer,
    PrecisionSchedule,
    Stage,
    compute_dtypes,
    precision_scope,
    staged_fit,
    switch_precision,
    two_stage_fit,
)
from precision_bert.fit_arguments import check_data


def adam():
    return keras.optimizers.Adam(0.01)


def bits(model):
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return [np.array(v).tobytes() for v in [*model.weights, *optimizer.variables]]


def dropout_model(policy="float32"):
    with precision_scope(policy):
        return keras.Sequential(
            [keras.Input((4,)), layers.Dense(16, "gelu"), layers.Dropout(0.3), layers.Dense(1)]
        )


def seeded(build, policy="float32"):
    keras.utils.set_random_seed(3)
    model = build(policy)
    model.compile(adam(), "mse", metrics=["mae"])
    return model


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("built_in", ["float32", "mixed_float16"])
def test_two_stages_of_one_precision_equal_a_plain_fit_bit_for_bit(policy, built_in, xy):
    staged = seeded(dropout_model, built_in)
    record = two_stage_fit(
        staged, *xy, epochs=4, switch_epoch=2, low=policy, high=policy, batch_size=8, verbose=0
    )
    plain = seeded(dropout_model, policy)
    history = plain.fit(*xy, epochs=4, batch_size=8, verbose=0)

    assert bits(staged) == bits(plain)
    assert record.history["loss"] == history.history["loss"]
    assert record.history["mae"] == history.history["mae"]
    assert record.epoch == history.epoch == [0, 1, 2, 3]


def test_the_second_stage_goes_on_as_a_float32_model_with_the_same_state_would(xy):
    staged = seeded(dropout_model)
    two_stage_fit(staged, *xy, epochs=3, switch_epoch=3, batch_size=8, verbose=0, shuffle=False)
    reference = seeded(dropout_model)
    reference.optimizer.build(reference.trainable_variables)
    inner = staged.optimizer.inner_optimizer
    for ours, theirs in zip(
        [*reference.variables, *reference.optimizer.variables],  # dropout's seeds included
        [*staged.variables, *inner.variables],
        strict=True,
    ):
        ours.assign(theirs)
    assert (
        reference.predict(xy[0], verbose=0).tobytes() != staged.predict(xy[0], verbose=0).tobytes()
    )

    staged_fit(staged, [Stage("float32", 2)], *xy, batch_size=8, verbose=0, shuffle=False)
    reference.fit(*xy, epochs=2, batch_size=8, verbose=0, shuffle=False)

    assert staged.optimizer is inner
    assert int(inner.iterations) == 5 * 4
    assert bits(staged) == bits(reference)
    assert (
        reference.predict(xy[0], verbose=0).tobytes() == staged.predict(xy[0], verbose=0).tobytes()
    )


class TestRecord:
    def test_it_says_what_each_stage_did(self, xy):
        record = two_stage_fit(
            seeded(dropout_model), *xy, epochs=4, switch_epoch=3, batch_size=8, verbose=0,
            validation_data=xy,
        )  # fmt: skip
        low, high = record.stages
        assert (low.policy, low.first_epoch, low.epochs) == ("mixed_float16", 0, 3)
        assert (high.policy, high.first_epoch, high.epochs) == ("float32", 3, 1)
        assert low.applied_steps + low.skipped_steps == 12
        assert (high.applied_steps, high.skipped_steps, high.loss_scale) == (4, 0, None)
        assert low.loss_scale == record.history["loss_scale"][2]
        for stage in record.stages:
            assert stage.seconds >= stage.first_step_seconds > 0
            assert stage.examples_per_second > 0
            assert stage.validation_seconds > 0
            assert stage.peak_memory_bytes > 1 << 20
        assert record.stopped_early is False
        assert [record.policy_at(e) for e in range(4)] == ["mixed_float16"] * 3 + ["float32"]
        with pytest.raises(ValueError, match="epoch must be one that was run"):
            record.policy_at(4)

    def test_skipped_steps_are_counted_by_stage(self, xy):
        x, y = xy
        broken = y.copy()
        broken[0] = np.nan
        model = seeded(dropout_model)
        model.compile(DynamicLossScaleOptimizer(keras.optimizers.SGD(0.01), 1.0), "mse")
        stages = [
            Stage("mixed_float16", 2, data=(x, broken)),
            Stage("mixed_bfloat16", 1, data=(x, y)),
            Stage("mixed_float16", 1, data=(x, broken)),
        ]
        record = staged_fit(model, stages, batch_size=8, shuffle=False, verbose=0)
        assert [(s.applied_steps, s.skipped_steps) for s in record.stages] == [
            (6, 2),
            (4, 0),
            (3, 1),
        ]
        assert record.history["skipped_steps"] == [1, 1, 0, 1]

    def test_a_stage_that_applied_no_step_is_warned_of(self, xy):
        x, y = xy
        with pytest.warns(RuntimeWarning, match="applied none of its steps"):
            two_stage_fit(
                seeded(dropout_model),
                x,
                np.full_like(y, np.nan),
                epochs=1,
                switch_epoch=1,
                verbose=0,
            )

    def test_statistics_that_a_skipped_step_has_spoilt_are_warned_of(self, xy):
        x, y = xy
        with precision_scope("mixed_float16"):
            model = keras.Sequential(
                [keras.Input((4,)), layers.BatchNormalization(name="norm"), layers.Dense(1)]
            )
        model.compile("sgd", "mse")
        spoilt = np.where(np.arange(32)[:, None] == 20, np.inf, x)
        with pytest.warns(RuntimeWarning, match=r"Stage 0 .* has left \S*norm/moving_mean"):
            record = two_stage_fit(
                model, spoilt, y, epochs=1, switch_epoch=1, batch_size=8, verbose=0, shuffle=False
            )
        assert record.stages[0].skipped_steps >= 1
        assert all(np.isfinite(v).all() for v in model.trainable_variables)

    def test_an_array_metric_is_ready_for_json_too(self, xy):
        model = dense_model(
            optimizer="sgd", loss="mse", metrics=[keras.metrics.F1Score(threshold=0.5)]
        )
        record = two_stage_fit(model, *xy, epochs=2, switch_epoch=1, batch_size=8, verbose=0)
        again = json.loads(json.dumps(record.to_dict()))
        assert again["history"]["f1_score"] == [list(v) for v in record.history["f1_score"]]

    def test_it_is_ready_for_json(self, xy):
        record = two_stage_fit(seeded(dropout_model), *xy, epochs=2, switch_epoch=1, verbose=0)
        again = json.loads(json.dumps(record.to_dict()))
        assert again["stages"][1]["policy"] == "float32"
        assert again["history"]["loss"] == record.history["loss"]

    def test_it_prints_as_a_table_with_a_row_for_each_stage(self, xy):
        record = two_stage_fit(seeded(dropout_model), *xy, epochs=2, switch_epoch=1, verbose=0)
        lines = str(record).splitlines()
        assert [line.split()[1] for line in lines[:3]] == ["policy", "mixed_float16", "float32"]
        assert [line.split()[-5] for line in lines[1:3]] == ["100%", "0%"]
        assert lines[3:] == [
            "in half: share of the multiplying operations in half precision",
            f"peak memory of: {record.stages[0].memory_source}",
        ]

    @pytest.mark.parametrize("steps", [1, 3], ids=["one step a stage", "three steps a stage"])
    def test_it_says_what_each_stage_really_computed_in(self, steps, xy):
        x, y = (part[: 8 * steps] for part in xy)
        record = two_stage_fit(
            seeded(dropout_model), x, y, epochs=2, switch_epoch=1, batch_size=8, verbose=0
        )
        low, high = (stage.computes_in for stage in record.stages)
        # Two Dense layers: two products forward, two for the kernels, one for the hidden layer.
        assert low["multiplies"] == {"float16": 5} and low["half_share"] == 1.0
        assert high["multiplies"] == {"float32": 5} and high["half_share"] == 0.0
        assert set(high["others"]) == {"float32"} and high["casts_to_half"] == {}

    def test_where_no_traced_step_can_be_read_it_says_nothing(self, xy):
        model = seeded(dropout_model)
        model.compile("sgd", "mse", run_eagerly=True)
        record = two_stage_fit(model, *xy, epochs=2, switch_epoch=1, verbose=0)
        assert [stage.computes_in for stage in record.stages] == [None, None]

    def test_a_float32_stage_with_something_in_half_is_warned_of(self, xy):
        def half_loss(y, outputs):
            return keras.ops.cast(
                keras.ops.mean(keras.ops.cast(y - outputs, "float16") ** 2), y.dtype
            )

        model = seeded(dropout_model)
        model.compile("sgd", half_loss)
        with pytest.warns(RuntimeWarning, match=r"Stage 1 \(float32\).*\(loss\).*in float16"):
            two_stage_fit(model, *xy, epochs=2, switch_epoch=1, verbose=0)

    def test_one_step_a_stage_has_no_throughput(self, xy):
        record = two_stage_fit(
            seeded(dropout_model), *xy, epochs=2, switch_epoch=1, batch_size=32, verbose=0
        )
        assert [s.examples_per_second for s in record.stages] == [None, None]
        assert [s.seconds for s in record.stages] == [s.first_step_seconds for s in record.stages]


class TestData:
    """It takes what `model.fit` takes."""

    def train(self, x, y=None, model=None, **arguments):
        model = model or seeded(dropout_model)
        record = two_stage_fit(model, x, y, epochs=2, switch_epoch=1, verbose=0, **arguments)
        assert set(compute_dtypes(model).values()) == {"float32"}
        return record

    def test_arrays(self, xy):
        assert len(self.train(*xy, batch_size=8).history["loss"]) == 2

    def test_a_validation_split(self, xy):
        assert len(self.train(*xy, validation_split=0.25).history["val_loss"]) == 2

    def test_sample_and_class_weights(self, xy):
        weight = np.ones(32, "float32")
        assert self.train(*xy, sample_weight=weight).history["loss"][0] > 0
        labels = (xy[1] > 0).astype("int32")
        assert (
            self.train(xy[0], labels, class_weight={0: 1.0, 1: 2.0}, low="mixed_bfloat16").history[
                "loss"
            ][0]
            > 0
        )

    def test_a_tf_dataset(self, xy):
        data = tf.data.Dataset.from_tensor_slices(xy).batch(8)
        record = self.train(data, validation_data=data)
        assert sum(s.applied_steps + s.skipped_steps for s in record.stages) == 8

    def test_an_endless_tf_dataset_with_steps(self, xy):
        data = tf.data.Dataset.from_tensor_slices(xy).batch(8).repeat()
        record = self.train(data, steps_per_epoch=3)
        assert sum(s.applied_steps + s.skipped_steps for s in record.stages) == 6

    def test_a_pydataset(self, xy):
        class Batches(keras.utils.PyDataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return tuple(a[index * 8 : index * 8 + 8] for a in xy)

        record = self.train(Batches())
        assert sum(s.applied_steps + s.skipped_steps for s in record.stages) == 8

    def test_a_generator_loses_no_batch_to_the_checks(self, xy):
        def batches():
            for index in range(100):
                yield tuple(a[:8] + index for a in xy)

        staged, plain = seeded(dropout_model), seeded(dropout_model)
        both = {"low": "float32", "high": "float32"}
        self.train(batches(), model=staged, steps_per_epoch=3, **both)
        plain.fit(batches(), epochs=2, steps_per_epoch=3, shuffle=False, verbose=0)
        assert bits(staged) == bits(plain)

    def test_dicts_of_named_inputs(self, xy):
        a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
        model = keras.Model({"a": a, "b": b}, layers.Dense(1)(layers.Add()([a, b])))
        model.compile("sgd", "mse")
        assert self.train({"a": xy[0], "b": xy[0]}, xy[1], model=model).epoch == [0, 1]

    def test_several_outputs(self, xy):
        inputs = keras.Input((4,))
        model = keras.Model(inputs, {"p": layers.Dense(1)(inputs), "q": layers.Dense(1)(inputs)})
        model.compile("sgd", {"p": "mse", "q": "mse"})
        assert self.train(xy[0], {"p": xy[1], "q": xy[1]}, model=model).epoch == [0, 1]

    def test_each_stage_may_have_its_own(self, xy):
        x, y = xy
        model = seeded(dropout_model)
        stages = [Stage("mixed_float16", 1, data=(x[:8], y[:8])), Stage("float32", 2)]
        record = staged_fit(model, stages, x, y, batch_size=4, verbose=0)
        assert [s.applied_steps + s.skipped_steps for s in record.stages] == [2, 16]
        assert record.epoch == [0, 1, 2]
        assert [len(v) for v in record.history.values()] == [3] * len(record.history)


class TestModels:
    @pytest.mark.parametrize(
        "name", ["conv2d", "bidirectional_and_stacked_cells", "batch_normalization",
                 "multi_head_attention", "nested", "subclassed"],
    )  # fmt: skip
    def test_any_model_is_trained_in_both_precisions(self, name):
        shape, build = MODELS[name]
        model = build()
        x = np.random.RandomState(0).randn(8, *shape).astype("float32")
        y = np.zeros(model(x).shape, "float32")
        record = two_stage_fit(
            model, x, y, epochs=2, switch_epoch=1, optimizer="sgd", loss="mse", verbose=0
        )
        assert [s.policy for s in record.stages] == ["mixed_float16", "float32"]
        assert np.isfinite(record.history["loss"]).all()

    def test_an_unbuilt_model_is_built_by_the_first_batch(self, xy):
        model = Subclassed()
        two_stage_fit(
            model, *xy, epochs=2, switch_epoch=1, optimizer="adam", loss="mse", metrics=["mae"],
            verbose=0,
        )  # fmt: skip
        assert model.built
        assert {v.dtype for v in model.weights} == {"float32"}

    def test_float16_stages_train_under_a_loss_scale_and_float32_stages_without(self, xy):
        seen = []

        class Spy(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                seen.append(isinstance(self.model.optimizer, keras.optimizers.LossScaleOptimizer))

        stages = [
            Stage(p, 1) for p in ("mixed_float16", "float32", "mixed_float16", "mixed_bfloat16")
        ]
        staged_fit(seeded(dropout_model), stages, *xy, callbacks=[Spy()], verbose=0)
        assert seen == [True, False, True, False]

    def test_the_model_object_stays_the_same_and_in_the_last_precision(self, xy):
        model = seeded(dropout_model)
        layers_before = [id(la) for la in model._flatten_layers()]
        two_stage_fit(model, *xy, epochs=2, switch_epoch=1, verbose=0)
        assert [id(la) for la in model._flatten_layers()] == layers_before
        assert model.dtype_policy.name == "float32"


class TestLearningRate:
    def rates(self, xy, optimizer, **arguments):
        seen = []

        class Spy(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                inner = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
                # the rate that the step after this one will use
                seen.append(float(keras.ops.convert_to_numpy(inner.learning_rate)))

        model = dropout_model()
        model.compile(DynamicLossScaleOptimizer(optimizer, 1.0), "mse")
        two_stage_fit(
            model, *xy, epochs=3, switch_epoch=1, batch_size=16, verbose=0, callbacks=[Spy()],
            **arguments,
        )  # fmt: skip
        return seen

    def test_none_goes_on_with_the_compiled_one(self, xy):
        np.testing.assert_allclose(self.rates(xy, keras.optimizers.SGD(0.125)), [0.125] * 6)

    def test_each_stage_has_its_own(self, xy):
        rates = self.rates(
            xy, keras.optimizers.SGD(0.5), learning_rate=0.25, high_learning_rate=0.125
        )
        assert rates == [0.25, 0.25] + [0.125] * 4

    def test_a_schedule_goes_on_over_the_switch(self, xy):
        schedule = keras.optimizers.schedules.PolynomialDecay(0.5, 8, 0.0)
        rates = self.rates(xy, keras.optimizers.SGD(schedule))
        np.testing.assert_allclose(rates, [0.5 * (1 - s / 8) for s in range(1, 7)], rtol=1e-6)

    def test_a_number_follows_a_schedule(self, xy):
        schedule = keras.optimizers.schedules.PolynomialDecay(0.5, 8, 0.0)
        rates = self.rates(xy, keras.optimizers.SGD(schedule), high_learning_rate=0.0625)
        np.testing.assert_allclose(rates[1:], [0.375, *[0.0625] * 4], rtol=1e-6)

    def test_a_schedule_of_the_second_stage_counts_from_its_first_step(self, xy):
        schedule = keras.optimizers.schedules.PolynomialDecay(0.5, 8, 0.0)
        rates = self.rates(xy, keras.optimizers.SGD(0.25), high_learning_rate=schedule)
        np.testing.assert_allclose(rates[2:], [0.5 * (1 - s / 8) for s in range(1, 5)], rtol=1e-6)

    @pytest.mark.parametrize("restore", ["load_state", "load_model", "load_own_variables"])
    def test_restored_state_does_not_bring_its_old_learning_rate_into_a_stage_that_has_its_own(
        self, restore, xy, tmp_path
    ):
        old = dropout_model("mixed_float16")
        old.compile(keras.optimizers.Adam(0.5), "mse")
        old.fit(*xy, batch_size=16, verbose=0)
        steps = int(old.optimizer.inner_optimizer.iterations)
        pb.save_model(old, tmp_path / "old.keras")
        model = dropout_model()
        model.compile(keras.optimizers.Adam(0.25), "mse")
        if restore == "load_state":
            pb.load_state(model, tmp_path / "old.keras")
        elif restore == "load_model":
            model = pb.load_model(tmp_path / "old.keras", "float32")
        else:
            model.optimizer.build(model.trainable_variables)
            inner = old.optimizer.inner_optimizer
            model.optimizer.load_own_variables(
                {str(i): np.asarray(v) for i, v in enumerate(inner.variables)}
            )
        assert float(model.optimizer.learning_rate) == 0.5  # the restored one, until a stage says
        assert int(model.optimizer.iterations) == steps > 0
        record = two_stage_fit(
            model, *xy, epochs=2, switch_epoch=1, batch_size=16, verbose=0, high_learning_rate=0.125
        )
        assert float(model.optimizer.learning_rate) == 0.125
        steps += sum(stage.applied_steps for stage in record.stages)
        assert int(model.optimizer.iterations) == steps

    def test_with_no_first_stage_the_one_learning_rate_holds(self, xy):
        model = seeded(dropout_model)
        two_stage_fit(model, *xy, epochs=1, switch_epoch=0, learning_rate=0.0, verbose=0)
        assert float(model.optimizer.learning_rate) == 0.0


@pytest.mark.parametrize(
    ("switch_epoch", "policies"),
    [
        (0, ["float32"] * 3),
        (1, ["mixed_float16", "float32", "float32"]),
        (2, ["mixed_float16", "mixed_float16", "float32"]),
        (3, ["mixed_float16"] * 3),
    ],
)
def test_the_switch_epoch_counts_from_0_and_includes_both_ends(switch_epoch, policies, xy):
    record = two_stage_fit(
        seeded(dropout_model), *xy, epochs=3, switch_epoch=switch_epoch, verbose=0
    )
    assert [record.policy_at(e) for e in range(3)] == policies


def test_early_stopping_stops_all_of_it(xy):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    record = two_stage_fit(
        seeded(dropout_model), *xy, epochs=4, switch_epoch=2, callbacks=[Stop()], verbose=0
    )
    assert record.stopped_early and record.epoch == [0]
    assert [s.policy for s in record.stages] == ["mixed_float16"]
    stages = [Stage("mixed_float16", 2, data=xy), Stage("float32", 2)]
    record = staged_fit(seeded(dropout_model), stages, *xy, callbacks=[Stop()], verbose=0)
    assert record.stopped_early and record.epoch == [0]


def test_stopping_at_the_end_of_a_stage_with_its_own_data_stops_all_of_it(xy):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    stages = [Stage("mixed_float16", 2), Stage("float32", 2, data=xy)]
    record = staged_fit(
        seeded(dropout_model), stages, *xy, batch_size=8, callbacks=[Stop()], verbose=0
    )
    assert record.stopped_early and record.epoch == [0, 1]


def test_of_a_generator_that_serves_two_stages_one_batch_is_read_ahead_and_given_back(xy):
    read = []

    def batches():
        for index in range(9):
            read.append(index)
            yield xy[0][:8], xy[1][:8] + index

    generator = batches()
    runs = [(0, 1, (generator, None, None)), (1, 2, (*xy, None)), (2, 3, (generator, None, None))]
    checked = check_data(seeded(dropout_model), "mse", runs, is_split=False)
    assert read == [0]
    assert checked[0][2][0] is checked[2][2][0]
    first = next(checked[0][2][0])
    assert np.array_equal(first[1], xy[1][:8])


class TestGlobalPolicy:
    def test_it_is_the_stages_during_training_and_restored_after(self, xy):
        seen = []
        spy = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: seen.append(keras.config.dtype_policy().name)
        )
        two_stage_fit(
            seeded(dropout_model), *xy, epochs=2, switch_epoch=1, callbacks=[spy], verbose=0
        )
        assert seen == ["mixed_float16", "float32"]
        assert keras.config.dtype_policy().name == "float32"

    def test_it_is_restored_when_training_fails(self, xy):
        class Fail(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            two_stage_fit(
                seeded(dropout_model), *xy, epochs=2, switch_epoch=1, callbacks=[Fail()], verbose=0
            )
        assert keras.config.dtype_policy().name == "float32"


class TestRefusals:
    """Each before any training."""

    @pytest.fixture(autouse=True)
    def _untouched(self):
        self.model = seeded(dropout_model)
        before = bits(self.model)
        yield
        assert bits(self.model) == before
        assert set(compute_dtypes(self.model).values()) == {"float32"}

    @pytest.mark.parametrize("switch_epoch", [4, 100])
    def test_a_switch_past_the_end(self, switch_epoch, xy):
        with pytest.raises(ValueError, match=r"between 0 and epochs=3.*Received: switch_epoch="):
            two_stage_fit(self.model, *xy, epochs=3, switch_epoch=switch_epoch)

    def test_a_switch_before_the_start(self, xy):
        with pytest.raises(ValueError, match="switch_epoch must be at least 0"):
            two_stage_fit(self.model, *xy, epochs=3, switch_epoch=-1)

    @pytest.mark.parametrize("epochs", [0, -1])
    def test_no_epochs(self, epochs, xy):
        with pytest.raises(ValueError, match="epochs must be at least 1"):
            two_stage_fit(self.model, *xy, epochs=epochs, switch_epoch=0)

    @pytest.mark.parametrize("name", ["low", "high"])
    def test_an_unknown_policy_names_the_argument(self, name, xy):
        with pytest.raises(ValueError, match=f"{name} must be one of .*Received: {name}='float16'"):
            two_stage_fit(self.model, *xy, epochs=2, switch_epoch=1, **{name: "float16"})

    def test_an_unknown_fit_argument(self, xy):
        with pytest.raises(TypeError, match=r"Unknown argument batchsize.*batch_size"):
            two_stage_fit(self.model, *xy, epochs=2, switch_epoch=1, batchsize=8)

    def test_a_fit_argument_that_the_stages_set(self, xy):
        with pytest.raises(TypeError, match="initial_epoch is set by the stages"):
            two_stage_fit(self.model, *xy, epochs=2, switch_epoch=1, initial_epoch=1)

    @pytest.mark.parametrize("given", [{"optimizer": "sgd"}, {"loss": "mse"}, {"metrics": ["mae"]}])
    def test_an_optimizer_or_loss_for_a_compiled_model(self, given, xy):
        with pytest.raises(ValueError, match="compiled already"):
            two_stage_fit(self.model, *xy, epochs=2, switch_epoch=1, **given)

    @pytest.mark.parametrize("given", [{}, {"optimizer": "sgd"}, {"loss": "mse"}])
    def test_an_uncompiled_model_without_optimizer_and_loss(self, given, xy):
        with pytest.raises(ValueError, match="not compiled: give optimizer= and loss="):
            two_stage_fit(dense_model(), *xy, epochs=2, switch_epoch=1, **given)

    def test_a_refused_call_compiles_nothing(self, xy):
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1, dtype="float16")])
        with pytest.raises(ValueError, match="keeps its variable"):
            two_stage_fit(model, *xy, epochs=2, switch_epoch=1, optimizer="sgd", loss="mse")
        assert not model.compiled

    def test_backup_and_restore(self, xy, tmp_path):
        backup = keras.callbacks.BackupAndRestore(tmp_path)
        with pytest.raises(ValueError, match="Give checkpoint_dir= and resume=True"):
            two_stage_fit(self.model, *xy, epochs=2, switch_epoch=1, callbacks=[backup])

    def test_a_validation_split_of_a_data_set(self, xy):
        data = tf.data.Dataset.from_tensor_slices(xy).batch(8)
        with pytest.raises(ValueError, match="validation_split splits arrays only"):
            two_stage_fit(self.model, data, epochs=2, switch_epoch=1, validation_split=0.2)

    def test_what_is_no_model(self, xy):
        with pytest.raises(TypeError, match=r"must be a keras\.Model"):
            two_stage_fit(layers.Dense(1), *xy, epochs=2, switch_epoch=1)

    def test_no_data(self):
        with pytest.raises(ValueError, match="Stage 1 has no data"):
            staged_fit(self.model, [Stage("float32", 0), Stage("float32", 1)])

    def test_a_schedule_is_taken_as_it_is(self, xy):
        model = seeded(dropout_model)
        record = staged_fit(model, PrecisionSchedule([Stage("float32", 1)]), *xy, verbose=0)
        assert record.epoch == [0]


def test_a_line_says_what_each_switch_did_unless_told_to_be_quiet(xy, capsys):
    for verbose in (0, 2):
        two_stage_fit(seeded(dropout_model), *xy, epochs=2, switch_epoch=1, verbose=verbose)
        lines = [la for la in capsys.readouterr().out.splitlines() if la.startswith("Stage")]
        assert len(lines) == verbose
    assert lines[0].startswith("Stage 0 from epoch 1/2: mixed_float16: ")
    assert lines[1].startswith("Stage 1 from epoch 2/2: float32: ")


def test_switching_by_hand_first_does_not_confuse_it(xy):
    model = seeded(dropout_model)
    switch_precision(model, "mixed_float16")
    record = two_stage_fit(model, *xy, epochs=2, switch_epoch=1, verbose=0)
    assert [s.policy for s in record.stages] == ["mixed_float16", "float32"]
