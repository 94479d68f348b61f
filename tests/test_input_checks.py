"""Bad training data is refused before the first step, with what to do about it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from precision_bert import two_stage_fit


def id_model(dtype="int32", name="token_ids"):
    ids = keras.Input((5,), dtype=dtype, name=name)
    hidden = layers.Flatten()(layers.Embedding(40000, 2)(ids))
    model = keras.Model({name: ids}, layers.Dense(3)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    return model


IDS = np.full((8, 5), 2049, "int32")
LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 1], "int32")


def as_arrays(x, y):
    return x, y


def as_dataset(x, y):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(4), None


def as_pydataset(x, y):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return -(-len(y) // 4)

        def __getitem__(self, index):
            part = slice(index * 4, index * 4 + 4)
            return {name: value[part] for name, value in x.items()}, y[part]

    return Batches(), None


def as_generator(x, y):
    def batches():
        for start in range(0, len(y), 4):
            part = slice(start, start + 4)
            yield {name: value[part] for name, value in x.items()}, y[part]

    return batches(), None


FORMS = [as_arrays, as_dataset, as_pydataset, as_generator]


def fit(model, data, **arguments):
    return two_stage_fit(model, *data, epochs=2, switch_epoch=1, verbose=0, **arguments)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_floating_token_ids_are_refused_with_the_reason(form, dtype):
    with pytest.raises(
        ValueError, match=r"'token_ids' is looked up.*2049 becomes 2048.*Cast it to int32"
    ):
        fit(id_model(), form({"token_ids": IDS.astype(dtype)}, LABELS))


@pytest.mark.parametrize("form", FORMS)
def test_they_are_refused_too_where_a_float_input_goes_into_an_embedding(form):
    model = id_model(dtype="float32", name="words")
    with pytest.raises(ValueError, match="'words' is looked up in an embedding"):
        fit(model, form({"words": IDS.astype("float32")}, LABELS))


def test_they_are_refused_for_a_subclassed_model_by_the_fields_name():
    class Lookup(keras.Model):
        def __init__(self):
            super().__init__()
            self.embed, self.head = layers.Embedding(10, 2), layers.Dense(1)

        def call(self, x):
            return self.head(self.embed(x["input_ids"])[:, 0])

    with pytest.raises(ValueError, match="'input_ids' is looked up"):
        fit(
            Lookup(), ({"input_ids": np.ones((4, 5))}, np.ones((4, 1))), optimizer="sgd", loss="mse"
        )


@pytest.mark.parametrize("form", [as_arrays, as_dataset, as_pydataset])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_whole_numbers_are_taken(form, dtype):
    assert fit(id_model(), form({"token_ids": IDS.astype(dtype)}, LABELS)).epoch == [0, 1]


RULE = "from 0 to 2, because the model has 3 outputs"


@pytest.mark.parametrize("form", [as_arrays, as_pydataset, as_generator])
@pytest.mark.parametrize("bad", [-1, 3])
def test_a_label_without_an_output_is_refused(form, bad):
    labels = LABELS.copy()
    labels[2] = bad
    with pytest.raises(ValueError, match=f"{RULE}.*Received 1 others, among them {bad}"):
        fit(id_model(), form({"token_ids": IDS}, labels))


@pytest.mark.parametrize("position", [0, 7])
@pytest.mark.parametrize("bad", [-1, 3])
def test_a_dataset_is_stopped_at_the_batch_that_holds_one(position, bad):
    labels = LABELS.copy()
    labels[position] = bad
    steps = []

    class Spy(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append(batch)

    with pytest.raises(tf.errors.InvalidArgumentError, match=RULE):
        fit(id_model(), as_dataset({"token_ids": IDS}, labels), callbacks=[Spy()])
    assert len(steps) <= position // 4


@pytest.mark.parametrize("shuffled_by", ["dataset", "numpy", "arrays"])
def test_the_checks_do_not_move_on_any_shuffling(shuffled_by):
    ids = IDS + np.arange(8)[:, None].astype("int32")

    class Augmented(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            chosen = np.random.randint(0, 8, 4)
            return {"token_ids": ids[chosen]}, LABELS[chosen]

    def data():
        if shuffled_by == "numpy":
            return Augmented(), None
        if shuffled_by == "arrays":
            return {"token_ids": ids}, LABELS
        whole = tf.data.Dataset.from_tensor_slices(({"token_ids": ids}, LABELS))
        return whole.shuffle(8, seed=5, reshuffle_each_iteration=True).batch(4), None

    def trained(train):
        keras.utils.set_random_seed(0)
        model = id_model()
        train(model, *data())
        return [np.array(w).tobytes() for w in model.weights]

    same = {"epochs": 3, "verbose": 0, "batch_size": None if shuffled_by != "arrays" else 4}
    shuffle = shuffled_by != "dataset"
    plain = trained(lambda m, x, y: m.fit(x, y, shuffle=shuffle, **same))
    staged = trained(lambda m, x, y: two_stage_fit(m, x, y, switch_epoch=1, low="float32", **same))
    assert plain == staged


@pytest.mark.parametrize("form", FORMS)
def test_a_label_that_the_loss_ignores_is_taken(form):
    labels = LABELS.copy()
    labels[2] = -100
    model = id_model()
    model.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-100)
    )
    assert fit(model, form({"token_ids": IDS}, labels), steps_per_epoch=1).epoch == [0, 1]
    labels[3] = -1
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=RULE):
        fit(model, form({"token_ids": IDS}, labels))


@pytest.mark.parametrize("form", [as_arrays, as_dataset])
def test_targets_by_the_outputs_name_are_checked_like_others(form):
    ids = keras.Input((5,), dtype="int32", name="token_ids")
    hidden = layers.Flatten()(layers.Embedding(40000, 2)(ids))
    model = keras.Model({"token_ids": ids}, {"logits": layers.Dense(3, name="logits")(hidden)})
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert fit(model, form({"token_ids": IDS}, {"logits": LABELS})).epoch == [0, 1]
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=RULE):
        fit(model, form({"token_ids": IDS}, {"logits": LABELS + 1}))


def test_narrow_integer_labels_of_many_classes_are_taken():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(256)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    labels = np.array([0, 255] * 4, "uint8")
    data = as_dataset({"x": np.zeros((8, 4), "float32")}, labels)[0].map(lambda x, y: (x["x"], y))
    assert fit(model, (data,)).epoch == [0, 1]


def test_in_arrays_the_last_label_is_checked_too():
    labels = np.append(LABELS, 7)
    with pytest.raises(ValueError, match="1 others, among them 7"):
        fit(id_model(), ({"token_ids": IDS[[0] * 9]}, labels), batch_size=2)


def test_a_label_that_is_no_whole_number_is_refused():
    with pytest.raises(ValueError, match=r"among them 0\.5"):
        fit(id_model(), ({"token_ids": IDS}, LABELS + 0.5))


def test_both_ends_of_the_labels_are_taken():
    assert fit(id_model(), ({"token_ids": IDS}, LABELS)).epoch == [0, 1]


@pytest.mark.parametrize("form", FORMS)
def test_empty_data_is_refused(form):
    with pytest.raises(ValueError, match="training data is empty"):
        fit(id_model(), form({"token_ids": IDS[:0]}, LABELS[:0]))


def test_the_data_of_a_later_stage_is_checked_before_the_first_trains():
    from precision_bert import Stage, staged_fit

    model = id_model()
    before = [np.array(w).tobytes() for w in model.weights]
    good, bad = ({"token_ids": IDS}, LABELS), ({"token_ids": IDS}, LABELS + 1)
    with pytest.raises(ValueError, match="from 0 to 2"):
        staged_fit(model, [Stage("mixed_float16", 1, data=good), Stage("float32", 1, data=bad)])
    assert [np.array(w).tobytes() for w in model.weights] == before


def test_a_generator_trains_on_every_batch_in_order():
    taken = []

    def train(wrap):
        keras.utils.set_random_seed(0)
        model = id_model()
        batches = as_generator({"token_ids": IDS + np.arange(8)[:, None].astype("int32")}, LABELS)[
            0
        ]
        wrap(model, batches)
        taken.append([np.array(w).tobytes() for w in model.weights])

    train(lambda m, b: m.fit(b, steps_per_epoch=2, verbose=0, shuffle=False))
    train(lambda m, b: two_stage_fit(m, b, epochs=1, switch_epoch=0, steps_per_epoch=2, verbose=0))
    assert taken[0] == taken[1]
