"""What `gradient_range` promises: exact counts, and a model that is as it was."""

from __future__ import annotations

import json
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from models import MODELS, Subclassed, dense_model
from test_bert import encoded, tiny

from precision_bert import DynamicLossScaleOptimizer, precision_scope, switch_precision
from precision_bert.gradient_range import gradient_range
from precision_bert.layer_policies import layer_paths

# Keras' UnitNormalization meets its epsilon in half precision, also in a model built that way.
pytestmark = pytest.mark.filterwarnings("ignore:.*overflow encountered in cast:RuntimeWarning")

UP, DOWN = np.float32(np.inf), np.float32(0)


class Shift(layers.Layer):
    """Adds a weight: what reaches its output is also, for a batch of one, the weight's gradient."""

    def build(self, shape):
        self.shift = self.add_weight(shape=shape[1:], initializer="zeros", name="shift")

    def call(self, x):
        return x + self.shift


def given_gradients(y_true, y_pred):
    """A loss whose gradient, with respect to the outputs, is `y_true`."""
    return ops.sum(y_true * y_pred)


def shifts(*between, **arguments):
    """A Shift `low`, some layers, and a Shift `high`, whose outputs get the labels as gradients."""
    inputs = keras.Input((None,) if not arguments.get("width") else (arguments.pop("width"),))
    hidden = Shift(name="low")(inputs)
    for layer in between:
        hidden = layer(hidden)
    model = keras.Model(inputs, Shift(name="high")(hidden), name="net")
    model.compile(arguments.pop("optimizer", "sgd"), given_gradients, **arguments)
    return model


def one_shift(gradients, optimizer="sgd", **arguments):
    inputs = keras.Input((gradients.shape[1],))
    model = keras.Model(inputs, Shift(name="shift")(inputs), name="net")
    model.compile(optimizer, given_gradients, **arguments)
    return model, (np.zeros_like(gradients), gradients)


def groups(gradients, scale):
    """How many entries are in each group, as float16 itself rounds them."""
    magnitudes = np.abs(np.asarray(gradients, "float64")).ravel()
    finite = magnitudes[np.isfinite(magnitudes)]
    nonzero = finite[finite > 0]
    with np.errstate(over="ignore"):
        half = (nonzero * scale).astype("float16")
    exponents = np.floor(np.log2(nonzero)).astype(int)
    return {
        "entries": magnitudes.size,
        "zeros": int((finite == 0).sum()),
        "underflow": int((half == 0).sum()),
        "subnormal": int(((half > 0) & (half < 2.0**-14)).sum()),
        "normal": int(((half >= 2.0**-14) & np.isfinite(half)).sum()),
        "overflow": int(np.isinf(half).sum()),
        "non_finite": magnitudes.size - finite.size,
        "smallest": nonzero.min() if nonzero.size else None,
        "largest": nonzero.max() if nonzero.size else None,
        "exponents": {e: int((exponents == e).sum()) for e in sorted(set(exponents.tolist()))},
    }


def best_scale(gradients):
    """The scale that loses least, by trying each power of two."""

    def lost(scale):
        at = groups(gradients, scale)
        return at["overflow"], at["underflow"], at["subnormal"], scale

    return min((2.0**e for e in range(-100, 101)), key=lost)


def check(counts, gradients, scale):
    expected = groups(gradients, scale)
    assert {name: getattr(counts, name) for name in expected} == expected


def check_weights(report, model, gradients, scale):
    """Compares weights' gradients, layer by layer, with the given ones, in the weights' order."""
    by_weight = zip(model.trainable_weights, gradients, strict=True)
    known = {id(weight): np.ravel(tf.convert_to_tensor(g)) for weight, g in by_weight}
    expected = {}
    for layer, path in layer_paths(model).items():
        # A weight that two layers hold is the first one's.
        own = [known.pop(id(v)) for v in layer._trainable_variables if id(v) in known]
        if own:
            expected[path] = np.concatenate(own)
    found = {layer.path: layer.weights for layer in report.layers if layer.weights is not None}
    assert found.keys() == expected.keys()
    for path, values in expected.items():
        check(found[path], values, scale)
    return len(found)


def over_all_magnitudes(size, seed=0):
    """float32 numbers of both signs, as many in each decade from 1e-12 to 1e6, some zero."""
    random = np.random.RandomState(seed)
    numbers = 10 ** random.uniform(-12, 6, size) * random.choice([-1, 1], size)
    numbers[::17] = 0
    return numbers.astype("float32")


BOUNDARIES = np.float32(
    [
        2.0**-25,
        np.nextafter(np.float32(2.0**-25), UP),
        np.nextafter(np.float32(2.0**-25), DOWN),
        2.0**-24,
        2.0**-14,
        2.0**-14 - 2.0**-25,  # halfway between the largest subnormal number and 2**-14
        np.nextafter(np.float32(2.0**-14 - 2.0**-25), DOWN),
        65504,
        65519.99,
        65520,
        np.nextafter(np.float32(65520), DOWN),
        np.nextafter(np.float32(65520), UP),
    ]
)


# Counting


@pytest.mark.parametrize("scale", [1.0, 2.0**15, 2.0**-3, 1000.0, 3e-7, 1.1e9, 2.0**110, 1e-37])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_the_counts_are_exactly_those_of_casting_each_entry_to_float16(scale, run_eagerly):
    scale = float(np.float32(scale))
    with np.errstate(over="ignore"):
        borders = BOUNDARIES / np.float32(scale)
    # Below lies what processors count as zero.
    borders = borders[np.isfinite(borders) & (borders > 2.0**-125)]
    gradients = np.concatenate([over_all_magnitudes(20_000), BOUNDARIES, borders, -borders])[None]
    model, data = one_shift(gradients, run_eagerly=run_eagerly)
    report = gradient_range(model, data, loss_scale=scale)
    (layer,) = report.layers
    check(layer.outputs, gradients, scale)
    check(layer.weights, gradients, scale)  # a batch of one
    check(layer.both, np.concatenate([gradients, gradients]), scale)
    assert report.total == layer.both
    assert layer.both.best_scale == best_scale(gradients)
    assert (report.loss_scale, report.scale_source, report.batches) == (scale, "as given", 1)


@pytest.mark.parametrize("scale", [1.0, 2.0**12])
@pytest.mark.parametrize(
    ("magnitude", "group"),
    [
        (0.0, "zeros"),
        (2.0**-25, "underflow"),
        (np.nextafter(np.float32(2.0**-25), UP), "subnormal"),
        (2.0**-24, "subnormal"),
        (np.nextafter(np.float32(2.0**-14 - 2.0**-25), DOWN), "subnormal"),
        (2.0**-14 - 2.0**-25, "normal"),
        (2.0**-14, "normal"),
        (65504.0, "normal"),
        (np.nextafter(np.float32(65520), DOWN), "normal"),
        (65520.0, "overflow"),
        (np.inf, "non_finite"),
        (np.nan, "non_finite"),
    ],
)
def test_each_boundary_is_where_float16_rounds(scale, magnitude, group):
    gradients = np.float32([[magnitude / scale, -magnitude / scale]])
    model, data = one_shift(gradients)
    outputs = gradient_range(model, data, loss_scale=scale).layers[0].outputs
    names = ("zeros", "underflow", "subnormal", "normal", "overflow", "non_finite")
    assert {name: getattr(outputs, name) for name in names} == dict.fromkeys(names, 0) | {group: 2}


def test_batches_are_added_and_the_last_one_may_be_smaller():
    gradients = over_all_magnitudes(70 * 5).reshape(70, 5)
    model, data = one_shift(gradients)
    report = gradient_range(model, data, loss_scale=64.0)
    assert report.batches == 3
    check(report.layers[0].outputs, gradients, 64.0)
    sums = [tf.reduce_sum(gradients[start : start + 32], 0) for start in (0, 32, 64)]
    check(report.layers[0].weights, np.stack(sums), 64.0)


def test_rows_that_were_not_looked_up_are_exact_zeros_and_repeated_ones_are_added():
    inputs = keras.Input((4,), dtype="int32")
    model = keras.Model(inputs, layers.Embedding(50, 3, name="embedding")(inputs))
    model.compile("sgd", given_gradients)
    ids = np.int32([[1, 2, 1, 7], [2, 2, 0, 49]])
    gradients = np.random.RandomState(0).randn(2, 4, 3).astype("float32") * 1e-6
    report = gradient_range(model, (ids, gradients), loss_scale=1.0)
    dense = np.zeros((50, 3), "float32")
    np.add.at(dense, ids.ravel(), gradients.reshape(-1, 3))
    check(report.layers[0].weights, dense, 1.0)
    check(report.layers[0].outputs, gradients, 1.0)


def test_a_layer_that_is_called_twice_has_both_outputs_counted():
    inputs = keras.Input((3,))
    shared, twice = Shift(name="shared"), layers.Rescaling(2.0)
    model = keras.Model(inputs, shared(twice(shared(inputs))))
    model.compile("sgd", given_gradients)
    gradients = np.float32([[1, 2, 3]])
    report = gradient_range(model, (np.zeros((1, 3)), gradients), loss_scale=1.0)
    by_path = {layer.type: layer for layer in report.layers}
    check(by_path["Shift"].outputs, [gradients, 2 * gradients], 1.0)
    check(by_path["Shift"].weights, 3 * gradients, 1.0)
    check(by_path["Rescaling"].outputs, gradients, 1.0)


def test_an_output_that_two_layers_hand_on_is_the_innermost_layers_only():
    inputs = keras.Input((3,))
    inner = keras.Sequential([keras.Input((3,)), Shift(name="shift"), layers.Dropout(0.0)])
    model = keras.Model(inputs, layers.Identity()(inner(inputs)))
    model.compile("sgd", given_gradients)
    report = gradient_range(model, (np.zeros((2, 3)), np.ones((2, 3))), loss_scale=1.0)
    assert [(layer.type, layer.outputs.entries) for layer in report.layers] == [("Shift", 6)]


@pytest.mark.parametrize(
    "name", [name for name in MODELS if name not in ("unit_normalization", "given_normalization")]
)
def test_weights_gradients_are_those_of_a_float32_model_whatever_the_policy(name):
    shape, build = MODELS[name]
    x = np.random.RandomState(2).randn(4, *shape).astype("float32")

    def made(policy):
        keras.utils.set_random_seed(7)
        with precision_scope(policy):
            model = build()
            y = np.ones_like(model(x), "float32")
        model.compile("sgd", "mse", run_eagerly=True)  # in a graph sums may be in another order
        return model, y

    model, y = made("mixed_float16")
    report = gradient_range(model, (x, y), loss_scale=2.0**15)

    plain, _ = made("float32")
    plain.set_weights(model.get_weights())
    with tf.GradientTape() as tape:
        loss = plain.compute_loss(x, y, plain(x, training=True))
    gradients = tape.gradient(loss, plain.trainable_weights)
    assert check_weights(report, model, gradients, 2.0**15) > 0


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_a_berts_counts_are_exactly_those_of_its_gradients_in_float32(policy):
    reference, model = tiny(dropout=0.0), tiny(dropout=0.0, dtype=policy)
    model.set_weights(reference.get_weights())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for one in (reference, model):
        for layer in one._flatten_layers():
            if isinstance(layer, layers.Dropout):
                layer.rate = 0.0
        one.compile("sgd", loss, run_eagerly=True)  # in a graph sums are in another order
    x, y = encoded(model), np.int32([1, 0, 1, 0])
    report = gradient_range(model, (x, y))
    with tf.GradientTape() as tape:
        value = loss(y, reference(x, training=True))
    gradients = tape.gradient(value, reference.trainable_weights)
    compared = check_weights(report, model, gradients, 2.0**15)
    assert compared > 20
    assert [layer.type for layer in report.layers if layer.stays_float32] == ["Dense"]  # logits


def test_the_gradients_are_those_of_the_next_training_step():
    # Weights of zero and a learning rate of 1: after a step a weight is minus its gradient.
    dropped = layers.Dropout(0.5, seed=3)
    model = shifts(dropped, optimizer=keras.optimizers.SGD(1.0), width=400)
    gradients = over_all_magnitudes(400, seed=1)[None]
    batch = np.zeros((1, 400), "float32"), gradients, np.float32([0.25])
    report = gradient_range(model, batch, loss_scale=8.0)
    model.train_on_batch(*batch)
    low, high = (np.asarray(model.get_layer(name).shift) for name in ("low", "high"))
    assert 0.3 < (low == 0).mean() < 0.7  # what dropout has dropped
    by_name = {layer.path: layer for layer in report.layers}
    check(by_name["low"].weights, low, 8.0)
    check(by_name["high"].weights, high, 8.0)
    check(by_name["high"].outputs, gradients * np.float32(0.25), 8.0)


def test_regularization_and_losses_of_layers_are_part_of_the_loss():
    class Charged(Shift):
        def build(self, shape):
            self.shift = self.add_weight(
                shape=shape[1:], initializer="ones", regularizer=keras.regularizers.L2(4.0)
            )

        def call(self, x):
            self.add_loss(ops.sum(16.0 * self.shift))
            return super().call(x)

    model = keras.Sequential([keras.Input((2,)), Charged()])
    model.compile("sgd", given_gradients)
    report = gradient_range(model, (np.zeros((1, 2)), np.float32([[1, 2]])), loss_scale=1.0)
    check(report.layers[0].weights, [1 + 8 + 16, 2 + 8 + 16], 1.0)
    check(report.layers[0].outputs, [1, 2], 1.0)


# The best scale, and what to keep in float32


@pytest.mark.parametrize("seed", range(4))
def test_the_best_scale_is_the_one_that_trying_each_power_of_two_finds(seed):
    random = np.random.RandomState(seed)
    exponents = random.uniform(*sorted(random.randint(-60, 40, 2)), 500)
    gradients = (2.0**exponents).astype("float32")[None]
    model, data = one_shift(gradients)
    assert gradient_range(model, data).total.best_scale == best_scale(gradients)


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        ([2.0**-14], 1.0),  # the smallest at which nothing is lost
        ([2.0**-14, 65504.0], 1.0),
        # An overflow weighs more than a subnormal number, or than one that is rounded to zero.
        ([2.0**-14] * 9 + [2.0**-13] + [65520.0], 0.5),
        ([2.0**-24] * 9 + [2.0**-23] + [65520.0], 0.5),
        ([2.0**-14, 65520.0], 2.0**-10),  # the smallest at which only the one is subnormal
        ([2.0**-26], 2.0**12),
        ([1e6], 2.0**-33),  # 1e6 is 2**19.9
        ([0.0], None),
        ([np.nan, np.inf], None),
    ],
)
def test_the_best_scale_lets_nothing_overflow_then_loses_least_then_is_the_smallest(
    gradients, expected
):
    model, data = one_shift(np.float32([gradients]))
    report = gradient_range(model, data)
    assert report.total.best_scale == report.layers[0].both.best_scale == expected
    assert str(report)


def test_layers_that_lose_too_much_at_the_best_scale_are_proposed_and_then_count_no_more():
    model = shifts(layers.Rescaling(2.0**-60, name="tiny"), width=100)
    gradients = np.random.RandomState(0).uniform(1, 1000, (4, 100)).astype("float32")
    data = np.zeros((4, 100), "float32"), gradients
    report = gradient_range(model, data)
    assert report.keep_float32 == ("low",)
    lost = {layer.path: layer.lost_share for layer in report.layers}
    assert lost == {"low": 1.0, "tiny": 0.0, "high": 0.0}
    switch_precision(model, "mixed_float16", keep_float32=report.keep_float32)
    again = gradient_range(model, data)
    assert [layer.path for layer in again.layers if layer.stays_float32] == ["low"]
    assert again.keep_float32 == ()
    rest = [layer.both.entries for layer in again.layers if not layer.stays_float32]
    assert again.total.entries == sum(rest) < sum(layer.both.entries for layer in again.layers)


def test_the_share_that_may_be_lost_is_stated_and_exact():
    gradients = np.full((1, 100), 65504.0, "float32")
    gradients[0, :3] = 2.0**-40
    model, data = one_shift(gradients)
    assert gradient_range(model, data).keep_float32 == ("shift",)
    assert gradient_range(model, data).layers[0].lost_share == 0.03
    assert gradient_range(model, data, max_lost_share=0.03).keep_float32 == ()
    assert gradient_range(model, data, max_lost_share=0.0299).keep_float32 == ("shift",)


def test_a_model_is_never_proposed_as_a_whole():
    class Bare(keras.Model):
        def __init__(self):
            super().__init__(name="bare")
            self.inner = Shift(name="inner")

        def build(self, shape):
            self.scale = self.add_weight(shape=shape[1:], initializer="ones", name="scale")

        def call(self, x):
            return self.inner(x) * self.scale

    model = Bare()
    model(np.zeros((1, 2), "float32"))
    model.compile("sgd", given_gradients)
    data = np.full((1, 2), 2.0**-50, "float32"), np.float32([[1.0, 1.0]])
    report = gradient_range(model, data)
    assert {layer.path: layer.lost_share for layer in report.layers}["bare"] == 0.5
    assert report.keep_float32 == ()


# The loss scale


def test_the_scale_is_the_optimizers_or_put_aside_or_the_first_one_or_as_given(xy):
    model = dense_model(optimizer=keras.optimizers.SGD(), loss="mse")
    told = gradient_range(model, xy)
    assert told.loss_scale == 2.0**15 and "begins with" in told.scale_source
    half = dense_model(
        "mixed_float16", optimizer=DynamicLossScaleOptimizer(keras.optimizers.SGD()), loss="mse"
    )
    told = gradient_range(half, xy)
    assert (told.loss_scale, told.scale_source) == (2.0**15, "the optimizer's")
    half.fit(*xy, verbose=0)
    half.optimizer.dynamic_scale.assign(4096.0)
    assert gradient_range(half, xy).loss_scale == 4096.0
    switch_precision(half, "float32")
    told = gradient_range(half, xy)
    assert told.loss_scale == 4096.0 and "put aside" in told.scale_source
    assert gradient_range(half, xy, loss_scale=3).loss_scale == 3.0


# Nothing of the model changes


def everything(model):
    """All that a model holds: values of variables, and which objects its layers refer to.

    Also returns those objects: an id is an object's own only as long as that lives.
    """
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    variables = [*model.variables, *model.metrics_variables]
    variables += [v for one in (optimizer, inner) if one is not None for v in one.variables]
    compile_loss = model._compile_loss
    held = [list(vars(part).values()) for part in (*layer_paths(model), compile_loss)]
    return held, {
        "values": [(id(v), np.asarray(v).tobytes()) for v in variables],
        "attributes": {
            path: {name: id(value) for name, value in vars(layer).items()}
            for layer, path in layer_paths(model).items()
        },
        "policies": {path: la.dtype_policy.name for la, path in layer_paths(model).items()},
        "losses": [(list(map(id, la._losses)), set(la._loss_ids)) for la in layer_paths(model)],
        "loss": {name: id(value) for name, value in vars(compile_loss).items()},
        "loss trackers": list(map(id, compile_loss.metrics)),
        "built": (
            optimizer.built,
            compile_loss.built,
            getattr(model._compile_metrics, "built", None),
        ),
    }


def eventful(policy):
    """Layers with moving averages, seeds, weights that are set in a step, losses, and metrics."""
    keras.utils.set_random_seed(5)
    with precision_scope(policy):
        normalization = layers.Normalization()
        normalization.adapt(np.random.RandomState(1).randn(16, 4).astype("float32"))
        inputs = keras.Input((4,))
        hidden = layers.SpectralNormalization(layers.Dense(8))(normalization(inputs))
        hidden = layers.BatchNormalization()(layers.Dropout(0.5)(hidden))
        hidden = layers.GaussianNoise(0.1)(
            ops.cast(hidden, keras.config.dtype_policy().compute_dtype)
        )
        first = layers.Dense(2, kernel_regularizer="l2", name="a")(hidden)
        model = keras.Model(inputs, {"a": first, "b": layers.Dense(1, name="b")(hidden)})
    model.compile("adam", {"a": "mse", "b": "mae"}, metrics={"a": "mse"})
    random = np.random.RandomState(3)
    data = random.randn(40, 4), {"a": random.randn(40, 2), "b": random.randn(40, 1)}
    return model, data


@pytest.mark.parametrize(
    ("policy", "trained"),
    [
        ("float32", True),
        ("mixed_float16", True),
        ("mixed_float16", False),
        ("mixed_bfloat16", True),
    ],
)
def test_the_model_is_as_it_was_and_trains_on_as_if_nothing_had_been_measured(policy, trained):
    model, (x, y) = eventful(policy)
    if trained:
        model.fit(x, y, verbose=0)
    _held, before = everything(model)
    report = gradient_range(model, (x, y))
    assert everything(model)[1] == before
    assert report.batches == 2 and report.total.entries > 0

    other, _ = eventful(policy)
    if trained:
        other.fit(x, y, verbose=0)
    histories = [one.fit(x, y, shuffle=False, verbose=0).history for one in (model, other)]
    assert histories[0] == histories[1]
    for one, two in zip(model.variables, other.variables, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()


def test_the_model_is_as_it_was_after_an_error_in_the_midst():
    class Failing(layers.Layer):
        fails = False

        def call(self, x):
            if self.fails:
                raise ArithmeticError("in the midst")
            return x

    with precision_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((4,)), layers.Dense(3), Failing(), layers.Dense(1)])
    model.compile("adam", "mse")
    model.layers[1].fails = True
    _held, before = everything(model)
    with pytest.raises(ArithmeticError, match="in the midst"):
        gradient_range(model, (np.ones((2, 4)), np.ones((2, 1))))
    assert everything(model)[1] == before


# Data


class Numbered(keras.utils.PyDataset):
    """Batches of an array, noting which were asked for."""

    def __init__(self, x, y, size):
        super().__init__()
        self.x, self.y, self.size, self.asked = x, y, size, []

    def __len__(self):
        return -(-len(self.x) // self.size)

    def __getitem__(self, index):
        self.asked.append(index)
        part = slice(index * self.size, (index + 1) * self.size)
        return self.x[part], self.y[part]


def test_arrays_data_sets_and_py_datasets_tell_the_same(xy):
    model = dense_model(optimizer="sgd", loss="mse")
    x, y = xy
    arrays = gradient_range(model, (x.astype("float64"), y), batch_size=10)
    assert arrays.batches == 4
    assert gradient_range(model, tf.data.Dataset.from_tensor_slices(xy).batch(10)) == arrays
    assert gradient_range(model, Numbered(x, y, 10)) == arrays
    assert gradient_range(model, (tf.constant(x), tf.constant(y)), batch_size=10) == arrays


def test_of_data_no_more_batches_are_read_than_asked_for(xy):
    model = dense_model(optimizer="sgd", loss="mse")
    read = []

    def batches():
        for index in range(20):
            read.append(index)
            yield xy

    spec = tuple(tf.TensorSpec((32, *part.shape[1:])) for part in xy)
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    assert gradient_range(model, data).batches == 8
    assert read == list(range(8))
    numbered = Numbered(*xy, 4)
    assert gradient_range(model, numbered, batches=3).batches == 3
    assert numbered.asked == [0, 1, 2]
    assert gradient_range(model, xy, batches=2, batch_size=5).batches == 2


def test_a_model_that_takes_no_labels_is_measured_by_its_own_losses():
    class Own(layers.Layer):
        def call(self, x):
            self.add_loss(ops.sum(x))
            return x

    model = keras.Sequential([keras.Input((3,)), Shift(), Own()])
    model.compile("sgd")
    report = gradient_range(model, np.zeros((2, 3), "float32"), loss_scale=1.0)
    check(report.layers[0].weights, [2, 2, 2], 1.0)


# What the report says


def test_the_table_has_a_row_for_each_layer_and_says_what_to_keep():
    model = shifts(layers.Rescaling(2.0**-60, name="tiny"), width=50)
    gradients = np.full((2, 50), 65504.0, "float32")
    gradients[0, 0] = 2.0**-8
    report = gradient_range(model, (np.zeros((2, 50)), gradients), loss_scale=0.25)
    lines = str(report).splitlines()
    assert lines[0].startswith("net: gradients of 1 batch in float16 at a loss scale of 2**-2")
    assert " ".join(lines[1].split()) == (
        "layer type entries to zero subnormal overflow smallest largest best scale"
    )
    assert [line.split()[0] for line in lines[2:6]] == ["low", "tiny", "high", "all"]
    assert lines[2].split()[:4] == ["low", "Shift", "150", "100.00%"]
    assert lines[-2].endswith("keep_float32=['low']")
    assert "out of the bounds" in lines[-1] and lines[-1].endswith("2**0 to 2**24")


def test_one_entry_that_overflows_among_many_is_not_shown_as_none():
    gradients = np.ones((1, 30_000), "float32")
    gradients[0, 7] = 1e6
    model, data = one_shift(gradients)
    report = gradient_range(model, data, loss_scale=1.0)
    assert report.total.overflow == 2
    assert "<0.01%" in str(report)


def test_the_report_goes_to_json_and_back(xy):
    report = gradient_range(dense_model(optimizer="sgd", loss="mse"), xy)
    read = json.loads(json.dumps(report.to_dict()))
    assert read["layers"][0]["path"] == report.layers[0].path
    assert read["total"]["entries"] == report.total.entries
    assert sum(read["total"]["exponents"].values()) == sum(report.total.exponents.values())


def test_gradients_that_are_not_finite_in_float32_are_named():
    gradients = np.float32([[np.inf, 1.0, np.nan]])
    model, data = one_shift(gradients)
    report = gradient_range(model, data)
    assert report.total.non_finite == 4
    assert any("not finite" in note and "shift" in note for note in report.notes)


def test_what_is_not_counted_is_named():
    inputs = keras.Input((6, 4))
    model = keras.Model(inputs, layers.RNN(layers.GRUCell(3, name="cell"))(inputs))
    model.compile("sgd", "mse")
    report = gradient_range(model, (np.ones((2, 6, 4)), np.ones((2, 3))))
    assert any("loop" in note and "cell" in note for note in report.notes)

    class Unused(Subclassed):
        def __init__(self):
            super().__init__()
            self.unused = Shift(name="unused")
            self.unused.build((None, 2))

    unused = Unused()
    unused(np.ones((1, 4), "float32"))
    unused.compile("sgd", "mse")
    report = gradient_range(unused, (np.ones((2, 4)), np.ones((2, 1))))
    assert any("no gradient reaches" in note and "shift" in note for note in report.notes)

    class Custom(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    custom = Custom([keras.Input((4,)), layers.Dense(1)])
    custom.compile("sgd", "mse")
    report = gradient_range(custom, (np.ones((2, 4)), np.ones((2, 1))))
    assert any("train_step" in note for note in report.notes)


def test_a_best_scale_out_of_the_optimizers_bounds_is_said():
    model, data = one_shift(np.float32([[2.0**-60]]))
    assert any("bounds" in note for note in gradient_range(model, data).notes)
    model, data = one_shift(np.float32([[2.0**-38]]))
    report = gradient_range(model, data)
    assert report.total.best_scale == 2.0**24 and report.notes == ()


def test_the_plot_has_a_row_for_each_layer_and_float16s_borders():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    model = shifts(layers.Rescaling(0.5, name="half"), width=3)
    report = gradient_range(model, (np.zeros((1, 3)), np.float32([[1, 2, 5]])), loss_scale=4.0)
    ax = report.plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["low", "half", "high"]
    (image,) = ax.get_images()
    assert image.get_extent() == [-1, 3, 2.5, -0.5]  # from 2**-1 to below 2**3
    np.testing.assert_allclose(np.nansum(image.get_array(), axis=1), 1.0)
    solid = [line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == "-"]
    np.testing.assert_allclose(solid, [-16, np.log2(65504) - 2])
    _, own = pyplot.subplots()
    assert report.plot(own) is own
    pyplot.close("all")


def test_without_matplotlib_all_but_the_plot_works_and_the_plot_says_what_is_missing():
    code = """if True:
        import sys
        sys.modules["matplotlib"] = sys.modules["matplotlib.pyplot"] = None  # not installed
        import keras, numpy as np
        from precision_bert.gradient_range import gradient_range
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        report = gradient_range(model, (np.ones((2, 2)), np.ones((2, 1))))
        print(report)
        try:
            report.plot()
        except ImportError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "gradients" in done.stdout and "pip install matplotlib" in done.stdout


# What is refused


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batches": 0}, ValueError, "batches must be an int of at least 1"),
        ({"batches": 1.5}, ValueError, "batches must be an int"),
        ({"batches": True}, ValueError, "batches must be an int"),
        ({"batch_size": 0}, ValueError, "batch_size must be an int"),
        ({"loss_scale": 0}, ValueError, "loss_scale must be finite and positive"),
        ({"loss_scale": -1.0}, ValueError, "loss_scale must be finite and positive"),
        ({"loss_scale": np.nan}, ValueError, "loss_scale must be finite and positive"),
        ({"loss_scale": np.inf}, ValueError, "loss_scale must be finite and positive"),
        ({"loss_scale": 1e39}, ValueError, "in float32 too"),
        ({"loss_scale": 1e-50}, ValueError, "in float32 too"),
        ({"loss_scale": "dynamic"}, TypeError, "loss_scale must be a float"),
        ({"loss_scale": True}, TypeError, "loss_scale must be a float"),
        ({"max_lost_share": -0.1}, ValueError, "max_lost_share must be a share"),
        ({"max_lost_share": 1.1}, ValueError, "max_lost_share must be a share"),
        ({"max_lost_share": np.nan}, ValueError, "max_lost_share must be a share"),
        ({"max_lost_share": "1%"}, TypeError, "max_lost_share must be a float"),
    ],
)
def test_arguments_out_of_range_are_refused(xy, arguments, error, message):
    model = dense_model(optimizer="sgd", loss="mse")
    with pytest.raises(error, match=message):
        gradient_range(model, xy, **arguments)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (iter([]), TypeError, "Of a generator, pass one batch"),
        (([1.0, 2.0], [1.0, 2.0]), TypeError, "must be arrays or tensors"),
        ((np.ones((2, 4)), np.float32(1.0)), TypeError, "must be arrays or tensors"),
        ((np.ones((2, 4)),) * 4, TypeError, "a tuple of 4 parts"),
        ((), TypeError, "a tuple of 0 parts"),
        ((np.ones((2, 4)), np.ones((3, 1))), ValueError, r"as many examples. Received: \[2, 3\]"),
        ((np.ones((0, 4)), np.ones((0, 1))), ValueError, "must hold a batch"),
        (tf.data.Dataset.from_tensors(np.ones((2, 4))).take(0), ValueError, "must hold a batch"),
    ],
)
def test_data_that_is_none_is_refused(data, error, message):
    model = dense_model(optimizer="sgd", loss="mse")
    _held, before = everything(model)
    with pytest.raises(error, match=message):
        gradient_range(model, data)
    assert everything(model)[1] == before


def test_a_batch_size_for_data_that_is_batched_already_is_refused(xy):
    model = dense_model(optimizer="sgd", loss="mse")
    for data in (tf.data.Dataset.from_tensors(xy), Numbered(*xy, 4)):
        with pytest.raises(ValueError, match="has batches of its own"):
            gradient_range(model, data, batch_size=4)


def test_models_that_cannot_be_measured_are_refused(xy):
    with pytest.raises(TypeError, match=r"must be a keras\.Model"):
        gradient_range(layers.Dense(1), xy)
    with pytest.raises(ValueError, match="is not compiled"):
        gradient_range(dense_model(), xy)
    unbuilt = Subclassed()
    unbuilt.compile("sgd", "mse")
    with pytest.raises(ValueError, match="is not built"):
        gradient_range(unbuilt, xy)
    frozen = dense_model(optimizer="sgd", loss="mse")
    frozen.trainable = False
    with pytest.raises(ValueError, match="no trainable weights"):
        gradient_range(frozen, xy)
    with pytest.raises(ValueError, match="rebuild_precision"):
        half = keras.Sequential([keras.Input((4,)), layers.Dense(1, dtype="float16")])
        half.compile("sgd", "mse")
        gradient_range(half, xy)
    lossless = dense_model(optimizer="sgd")
    with pytest.raises(ValueError, match="No loss to compute"):
        gradient_range(lossless, xy)


def test_a_model_in_which_half_precision_is_frozen_is_refused_by_the_layers_name(xy):
    class Stored(layers.Layer):
        def build(self, shape):
            self.factor = ops.cast(0.1, self.compute_dtype)

        def call(self, x):
            return x * self.factor

    with precision_scope("mixed_float16"):
        body = [layers.Dense(3), Stored(name="stored"), layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *body])
    model.compile("sgd", "mse")
    _held, before = everything(model)
    with pytest.raises(ValueError, match="stored' keeps 'factor' in float16"):
        gradient_range(model, xy)
    assert everything(model)[1] == before
