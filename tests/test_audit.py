"""What `audit_precision` promises: it counts what a traced step computes, and changes nothing."""

from __future__ import annotations

import contextlib
import json
from collections import Counter, defaultdict

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from models import MODELS, Subclassed, dense_model

from precision_bert import BertConfig, bert_classifier, pin_float32, precision_scope
from precision_bert.audit import audit_precision, audit_train_function
from precision_bert.audit.record import PrecisionAuditError
from precision_bert.switching import switch_precision

# Keras' UnitNormalization meets its epsilon in half precision, also in a model built that way.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*overflow encountered in cast:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:The model does not have any trainable weights:UserWarning"),
]

MULTIPLY = ("matmul", "convolution", "einsum", "recurrent")
BERT = BertConfig(
    ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(45))],
    *(2, 2, 8, 16),
    max_sequence_length=16,
)


# An independent count: over GraphDefs, and by the scopes that layers really had


def nodes(graph):
    """Every node of the graph and of the functions that it calls, with the names of the calls."""
    definition = graph.as_graph_def()
    library = {function.signature.name: function for function in definition.library.function}

    def walk(node_defs, calls):
        for node in node_defs:
            yield calls, node
            for value in node.attr.values():
                for function in [value.func.name, *(f.name for f in value.list.func)]:
                    if function in library:
                        inner = calls if node.op.endswith(("While", "If")) else [*calls, node.name]
                        yield from walk(library[function].node_def, inner)

    yield from walk(definition.node, [])


def is_multiply(node):
    return any(part in node.op for part in ("MatMul", "Conv", "Einsum"))


def dtype_of(node):
    return tf.dtypes.as_dtype(node.attr["T"].type).name


@contextlib.contextmanager
def scopes_of_layers(model):
    """Notes in which name scopes the layers' `call`s run, by asking in them."""
    scopes = {}

    def noting(layer):
        original = layer.call

        def call(*args, **kwargs):
            scopes.setdefault(tf.compat.v1.get_default_graph().get_name_scope(), layer)
            return original(*args, **kwargs)

        return call

    wrapped = list(dict.fromkeys(model._flatten_layers()))
    for layer in wrapped:
        layer.call = noting(layer)
    try:
        yield scopes
    finally:
        for layer in wrapped:
            del layer.call


def forward_name(name):
    """The name of what an operation is the gradient of, or its own."""
    for mark in ("gradient_tape/", "gradients/"):
        name = name.rpartition(mark)[2]
    return name


def expected_multiplies(model, step, specs):
    """By layer path: how many multiplies in each dtype, counted without the package."""
    with scopes_of_layers(model) as scopes:
        graph = tf.function(step).get_concrete_function(specs).graph
    counts = defaultdict(Counter)
    for _, node in nodes(graph):
        if is_multiply(node):
            name = forward_name(node.name)
            inside = [scope for scope in scopes if name.startswith(scope + "/")]
            counts[scopes[max(inside, key=len)].path][dtype_of(node)] += 1
    return {path: dict(count) for path, count in counts.items()}


def audited_multiplies(audit):
    return {r.path: r.dtypes(*MULTIPLY) for r in audit.layers if r.dtypes(*MULTIPLY)}


def built(name, policy):
    shape, build = MODELS[name]
    with precision_scope(policy):
        model = build()
        model(np.zeros((2, *shape), "float32"))
    return model, np.zeros((2, *shape), "float32")


def bert(policy="mixed_float16", **compile_arguments):
    model = bert_classifier(BERT, num_classes=2, sequence_length=12, dtype=policy)
    if compile_arguments:
        model.compile(**compile_arguments)
    x = {name: np.ones((4, 12), "int32") for name in ("token_ids", "segment_ids", "padding_mask")}
    return model, (x, np.zeros(4, "int32"))


def specs_of(batch):
    return tf.nest.map_structure(lambda a: tf.TensorSpec(a.shape, a.dtype), batch)


@pytest.mark.parametrize("name", MODELS)
def test_every_multiply_of_a_train_step_is_counted_for_the_layer_that_makes_it(name):
    model, x = built(name, "mixed_float16")
    model.compile("sgd", "mse")
    batch = (x, np.zeros(model(x).shape, "float32"))
    audit = audit_precision(model, data=batch)
    assert audited_multiplies(audit) == expected_multiplies(
        model, model.train_step, specs_of(batch)
    )


def test_an_audit_of_a_mixed_bert_names_the_layers_in_half_and_in_float32():
    model, batch = bert(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(True))
    audit = audit_precision(model, data=batch)
    expected = expected_multiplies(model, model.train_step, specs_of(batch))
    assert audited_multiplies(audit) == expected
    assert {path for path, dtypes in expected.items() if "float32" in dtypes} == {"logits"}
    assert len(expected) == 2 * 7 + 2  # by block 3 projections, scores, output, 2 dense; 2 heads

    records = {record.path: record for record in audit.layers}
    attention = "transformer_layer_0/self_attention_layer"
    softmax = [record for record in audit.layers if record.type == "Softmax"]
    assert [one.dtypes(is_gradient=False) for one in softmax] == [{"float16": 1}] * 2
    assert set(records[f"{attention}_norm"].dtypes()) == {"float32"}
    assert "logits" in audit.islands
    assert any("softmax in float16" in note and "keep_float32" in note for note in audit.notes)
    assert any(note.startswith("LayerNormalization computes in float32") for note in audit.notes)
    audit.require("mixed_float16")
    with pytest.raises(
        PrecisionAuditError, match=rf"{attention}/query \(EinsumDense\): .*1 \w+ in float16"
    ):
        audit.require("float32")


def test_what_the_audit_says_of_the_softmax_keeps_it_in_float32():
    model, batch = bert()
    switch_precision(model, "mixed_float16", keep_float32=[keras.layers.Softmax])
    audit = audit_precision(model, data=batch)
    softmax = [record for record in audit.layers if record.type == "Softmax"]
    assert [set(one.dtypes()) for one in softmax] == [{"float32"}] * 2
    assert not any("softmax in" in note for note in audit.notes)
    audit.require("mixed_float16")


def test_a_mixed_bert_that_is_switched_to_float32_computes_nothing_in_half():
    model, batch = bert(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(True))
    switch_precision(model, "float32")
    for audit in (audit_precision(model, data=batch), audit_precision(model, "predict")):
        audit.require("float32")
        assert audit.half_share == 0
        assert set(audit.dtypes()) == {"float32"}
        assert audit.dtypes("cast") == {}


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", ["dense", "conv2d", "lstm", "multi_head_attention", "subclassed"])
def test_a_model_computes_as_its_policy_demands_and_as_no_other(name, policy):
    model, x = built(name, policy)
    for audit in (audit_precision(model, "predict", data=x), audit_precision(model, data=x)):
        audit.require(policy)
        for other in {"float32", "mixed_float16", "mixed_bfloat16"} - {policy}:
            with pytest.raises(PrecisionAuditError, match=f"switch_precision.*{other}"):
                audit.require(other)


# What counts

MOVES = "Cast Identity IdentityN Reshape ReadVariableOp AssignVariableOp Const Placeholder NoOp"
CONTROL = "If StatelessIf While StatelessWhile PartitionedCall StatefulPartitionedCall"
LISTS = "TensorListReserve TensorListFromTensor TensorListStack TensorListGetItem TensorListSetItem"
OTHER_MOVES = """Transpose StridedSlice StridedSliceGrad Slice Pack Unpack ConcatV2 Split Tile
BroadcastTo ZerosLike Fill StopGradient ExpandDims Squeeze SelectV2 ReverseV2 GatherV2 Shape ShapeN
EmptyTensorList TensorListPushBack TensorListPopBack TensorListElementShape"""
NOT_COMPUTING = set(f"{MOVES} {CONTROL} {LISTS} {OTHER_MOVES}".split())


def all_operations(graph):
    for operation in graph.get_operations():
        yield operation
        for attribute in operation.op_def.attr:
            if attribute.type == "func":
                name = operation.get_attr(attribute.name).name
                yield from all_operations(graph._get_function(name).graph)


@pytest.mark.parametrize("name", ["bidirectional_and_stacked_cells", "conv2d", "dropout"])
def test_the_rows_and_the_other_operations_add_up_to_all_operations_of_the_function(name):
    model, x = built(name, "mixed_float16")
    model.compile("adam", "mse")
    batch = (x, np.zeros(model(x).shape, "float32"))
    audit = audit_precision(model, data=batch)

    graph = tf.function(model.train_step).get_concrete_function(specs_of(batch)).graph
    operations = list(all_operations(graph))
    computing = [
        operation
        for operation in operations
        if operation.type not in NOT_COMPUTING
        and any(t.dtype.is_floating for t in [*operation.inputs, *operation.outputs])
    ]
    assert sum(audit.dtypes().values()) == len(computing)
    counted = sum(one.count for record in audit.layers for one in record.operations)
    assert counted + audit.other_operations == len(operations)
    assert {"(loss)", "(optimizer)", "(outside layers)"} <= {r.path for r in audit.layers}


def test_layers_that_only_move_numbers_compute_nothing():
    with precision_scope("mixed_float16"):
        body = [layers.Reshape((2, 2)), layers.Permute((2, 1)), layers.Flatten(), layers.Identity()]
        body += [layers.RepeatVector(3), layers.Cropping1D(1), layers.ZeroPadding1D(1)]
        model = keras.Sequential([keras.Input((4,)), *body])
    audit = audit_precision(model, "predict")
    assert audit.dtypes() == {}
    assert audit.half_share is None
    assert "7 layers compute nothing" in str(audit)
    with pytest.raises(PrecisionAuditError, match="no operation is in float16 at all"):
        audit.require("mixed_float16")


@pytest.mark.parametrize(
    ("shape", "layer", "work", "gradients"),
    [
        ((6,), lambda: layers.Dense(5), 6 * 5, 1),
        ((7, 6), lambda: layers.Dense(5), 7 * 6 * 5, 1),
        # Of these TensorFlow traces the gradient of the input too, though nobody asks for it.
        ((7, 6), lambda: layers.EinsumDense("...x,xy->...y", 5), 7 * 6 * 5, 2),
        ((7, 6), lambda: layers.EinsumDense("abc,cde->abde", (7, 2, 5)), 7 * 6 * 2 * 5, 2),
        ((8, 6, 3), lambda: layers.Conv2D(4, (3, 2)), (6 * 5 * 4) * (3 * 2 * 3), 2),
        ((8, 6, 4), lambda: layers.Conv2D(6, 3, groups=2), (6 * 4 * 6) * (3 * 3 * 2), 2),
        (
            (8, 6, 3),
            lambda: layers.DepthwiseConv2D(3, depth_multiplier=2),
            (6 * 4 * 6) * (3 * 3),
            2,
        ),
        ((5, 6, 4, 2), lambda: layers.Conv3D(3, 2), (4 * 5 * 3 * 3) * (2 * 2 * 2 * 2), 2),
    ],
)
def test_multiply_work_is_the_number_of_multiply_adds_of_the_batch(shape, layer, work, gradients):
    model = keras.Sequential([keras.Input(shape), layer()])
    audit = audit_precision(model, data=np.zeros((3, *shape), "float32"))
    multiplies = [o for r in audit.layers for o in r.operations if o.kind in MULTIPLY]
    forward = sum(one.multiply_adds for one in multiplies if not one.is_gradient)
    assert forward == 3 * work
    backward = sum(one.multiply_adds for one in multiplies if one.is_gradient)
    assert backward == gradients * 3 * work


def test_the_half_share_is_by_work_where_shapes_tell_and_by_operations_elsewhere():
    with precision_scope("mixed_float16"):
        inputs = keras.Input((None, 4))
        head = layers.Dense(6, dtype="float32", name="head")
        model = keras.Model(inputs, head(layers.Dense(2, name="hidden")(inputs)))
    known = audit_precision(model, "predict", data=np.zeros((2, 5, 4), "float32"))
    assert known.half_share == 8 / (8 + 12) and known.is_share_by_work
    unknown = audit_precision(model, "predict")
    assert unknown.half_share == 1 / 2 and not unknown.is_share_by_work


# What policies do not tell


class HalfInside(layers.Layer):
    """A layer that casts by itself, whatever its policy."""

    def __init__(self, dtype_inside, **kwargs):
        super().__init__(**kwargs)
        self.dtype_inside = dtype_inside

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 3))

    def call(self, x):
        return ops.matmul(ops.cast(x, self.dtype_inside), ops.cast(self.kernel, self.dtype_inside))


def test_a_cast_that_a_layer_hides_is_found():
    model = keras.Sequential([keras.Input((4,)), HalfInside("float16", name="sly")])
    with pytest.raises(PrecisionAuditError, match=r"sly \(HalfInside\).*1 MatMul in float16"):
        audit_precision(model).require("float32")
    mixed = keras.Sequential([keras.Input((4,)), HalfInside("float32", name="deaf")])
    switch_precision(mixed, "mixed_float16")
    with pytest.raises(PrecisionAuditError, match=r"deaf \(HalfInside\): 1 MatMul in float32"):
        audit_precision(mixed, "predict").require("mixed_float16")


def test_a_cast_in_a_functional_graph_is_found_though_nothing_computes_in_half():
    inputs = keras.Input((4,))
    hidden = layers.Dense(3)(inputs)
    rounded = ops.cast(ops.cast(hidden, "float16"), "float32")
    model = keras.Model(inputs, layers.Dense(2)(rounded), name="net")
    audit = audit_precision(model, "predict")
    assert set(audit.dtypes()) == {"float32"}
    with pytest.raises(PrecisionAuditError, match=r"net \(Functional\): 1 Cast to float16"):
        audit.require("float32")


def test_a_layer_in_the_wrong_precision_is_named():
    class Ignoring(layers.Dense):
        def call(self, x, training=None):
            return ops.cast(ops.matmul(ops.cast(x, "float32"), self._kernel.value), x.dtype)

    inputs = keras.Input((4,))
    model = keras.Model(inputs, Ignoring(2, name="odd")(layers.Dense(3)(inputs)))
    switch_precision(model, "mixed_float16")
    with pytest.raises(PrecisionAuditError, match=r"odd \(Ignoring\): 1 MatMul in float32"):
        audit_precision(model, "predict").require("mixed_float16")

    model = dense_model()
    switch_precision(model, "mixed_float16")
    model.get_layer("head").dtype_policy = "mixed_bfloat16"
    with pytest.raises(PrecisionAuditError, match=r"head \(Dense\): .*1 MatMul in bfloat16"):
        audit_precision(model).require("mixed_float16")


def test_islands_may_compute_in_float32_and_in_nothing_else():
    model = dense_model()
    pin_float32(model.get_layer("head"))
    switch_precision(model, "mixed_float16")
    audit = audit_precision(model)
    assert audit.islands == ("head",)
    assert "float32 (island)" in str(audit)
    audit.require("mixed_float16")
    model.get_layer("head").dtype_policy = "mixed_float16"
    with pytest.raises(PrecisionAuditError, match=r"head .*a float32 island: 1 MatMul in float16"):
        audit_precision(model).require("mixed_float16")


def test_require_refuses_a_policy_that_does_not_exist():
    with pytest.raises(ValueError, match="mixed_float16"):
        audit_precision(dense_model()).require("float16")


# Names


class Sums(keras.Model):
    """Its own sums have the names that its layer's scopes have."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(3, name="add")

    def call(self, x):
        bias = tf.constant([1.0, 2.0, 3.0, 4.0])
        return self.inner(((x + bias) + bias) + bias)


def test_a_sum_is_not_taken_for_a_layer_of_the_same_name():
    model = Sums()
    model(np.zeros((2, 4), "float32"))
    audit = audit_precision(model, data=np.zeros((2, 4), "float32"))
    records = {record.type: record for record in audit.layers}
    assert records["Sums"].dtypes(is_gradient=False) == {"float32": 3}
    assert records["Dense"].dtypes(is_gradient=False) == {"float32": 2}  # MatMul and bias


def test_numbered_names_and_shared_layers_are_told_apart():
    inputs = keras.Input((4,))
    # The scopes of these are a, a_1, a_1_1, …: numbers of names and numbers of calls.
    kinds = {"a": None, "a_1": None, "a_1_2": None, "a_3": None, "a_2": None}
    dtypes = ["float32", "mixed_float16", "mixed_bfloat16", "float64", "mixed_float16"]
    for name, dtype in zip(kinds, dtypes, strict=True):
        kinds[name] = layers.Dense(4, name=name, dtype=dtype)
    out = inputs
    calls = ["a_1", "a", "a", "a_3", "a_1_2", "a", "a_1", "a_2", "a_3"]
    for name in calls:
        out = kinds[name](out)
    audit = audit_precision(keras.Model(inputs, out), "predict")
    seen = {r.path: r.dtypes("matmul") for r in audit.layers if r.dtypes("matmul")}
    assert seen == {name: {kinds[name].compute_dtype: calls.count(name)} for name in kinds}


def test_layers_of_one_name_in_two_containers_have_rows_of_their_own():
    def tower(name, dtype):
        inputs = keras.Input((4,))
        return keras.Model(inputs, layers.Dense(4, name="same", dtype=dtype)(inputs), name=name)

    inputs = keras.Input((4,))
    out = tower("left", "mixed_float16")(inputs)
    audit = audit_precision(keras.Model(inputs, tower("right", "float32")(out)), "predict")
    seen = [(r.path, r.dtypes("matmul")) for r in audit.layers if r.type == "Dense"]
    assert seen == [("same", {"float16": 1}), ("same#2", {"float32": 1})]


def test_what_names_do_not_tell_apart_belongs_to_the_container():
    class Twins(keras.Model):
        def __init__(self):
            super().__init__()
            self.pair = [layers.Dense(4, name="twin"), layers.Dense(4, name="twin")]

        def call(self, x):
            return self.pair[0](x) + self.pair[1](x)

    model = Twins()
    model(np.zeros((2, 4), "float32"))
    audit = audit_precision(model, "predict")
    assert {r.type: r.dtypes("matmul") for r in audit.layers} == {
        "Twins": {"float32": 2},
        "Dense": {},
    }


def test_a_layer_in_a_compiled_function_is_found_with_its_gradient():
    class Compiled(layers.Layer):
        def __init__(self):
            super().__init__(name="compiled")
            self.inner = layers.Dense(4, name="inner")

        def build(self, shape):
            self.inner.build(shape)

        @tf.function
        def call(self, x):
            return self.inner(x)

    model = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="first"), Compiled()])
    audit = audit_precision(model, data=np.zeros((2, 4), "float32"))
    record = next(r for r in audit.layers if r.path.endswith("inner"))
    assert record.dtypes("matmul", is_gradient=False) == {"float32": 1}
    assert record.dtypes("matmul", is_gradient=True) == {"float32": 2}


# Nothing is done


def state(model):
    values = [*model.variables, *(model.optimizer.variables if model.compiled else [])]
    return [ops.convert_to_numpy(value).tobytes() for value in values]


@pytest.mark.parametrize("what", ["train", "predict"])
@pytest.mark.parametrize("with_data", [True, False])
def test_an_audit_changes_no_weight_metric_optimizer_seed_policy_or_compiled_function(
    what, with_data, xy
):
    with precision_scope("mixed_float16"):
        body = [layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.5, seed=3)]
        body += [layers.Dense(1, activity_regularizer="l2", dtype="float32")]
        model = keras.Sequential([keras.Input((4,)), *body])
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(*xy, verbose=0)
    model.evaluate(*xy, verbose=0)
    model.predict(xy[0], verbose=0)
    model(xy[0], training=True)
    functions = (model.train_function, model.test_function, model.predict_function)
    before, losses = state(model), [float(loss) for loss in model.losses]
    tf.random.set_seed(1)
    draw = float(tf.random.uniform(()))
    tf.random.set_seed(1)

    audit_precision(model, what, data=xy if with_data else None)

    assert float(tf.random.uniform(())) == draw
    assert state(model) == before
    assert [float(loss) for loss in model.losses] == losses
    assert keras.config.dtype_policy().name == "float32"
    now = (model.train_function, model.test_function, model.predict_function)
    assert all(one is other for one, other in zip(now, functions, strict=True))


def test_a_training_after_an_audit_is_the_training_without_one(xy):
    histories = []
    for audits in (False, True):
        keras.utils.set_random_seed(5)
        model = dense_model("mixed_float16", optimizer="adam", loss="mse", metrics=["mae"])
        if audits:
            audit = audit_precision(model, data=xy)
            assert any("were not built yet" in note for note in audit.notes)
            assert not any(np.any(v) for v in map(np.asarray, model.optimizer.variables[2:3]))
        histories.append((model.fit(*xy, epochs=2, verbose=0).history, state(model)))
    assert histories[0] == histories[1]


# What is traced


class Halving(keras.Model):
    """A custom train step with a product in half precision that no layer knows of."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(1, name="inner")

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y = data
        half = tf.cast(x, "float16")
        tf.matmul(half, half, transpose_b=True)
        return super().train_step((x, y))


def test_a_custom_train_step_is_what_is_audited(xy):
    model = Halving()
    model.compile("sgd", "mse")
    audit = audit_precision(model, data=xy)
    assert audit.source == "train_step for a batch of 32"
    with pytest.raises(PrecisionAuditError, match=r"\(outside layers\): 1 Cast.*1 MatMul"):
        audit.require("float32")


@pytest.mark.parametrize(
    "arguments", [{}, {"steps_per_execution": 2}, {"jit_compile": True}], ids=str
)
def test_the_train_function_of_fit_is_read_after_its_first_step(arguments, xy):
    model = dense_model("mixed_float16", optimizer="sgd", loss="mse", **arguments)
    assert audit_train_function(model) is None
    model.fit(*xy, batch_size=8, verbose=0)
    audit = audit_train_function(model)
    assert audit.dtypes(*MULTIPLY) == audit_precision(model, data=xy).dtypes(*MULTIPLY)
    assert audited_multiplies(audit) == {"hidden": {"float16": 2}, "head": {"float16": 3}}
    assert audit_precision(model).source == audit.source
    switch_precision(model, "float32")
    assert audit_train_function(model) is None


def test_within_a_fit_each_stage_is_read_as_what_it_runs(xy):
    seen = []

    class Reader(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                switch_precision(self.model, "float32")

        def on_train_batch_end(self, batch, logs=None):
            seen.append(audit_train_function(self.model).dtypes("matmul"))

    model = dense_model("mixed_float16", optimizer="sgd", loss="mse")
    model.fit(*xy, batch_size=16, epochs=2, verbose=0, callbacks=[Reader()])
    assert seen == [{"float16": 5}] * 2 + [{"float32": 5}] * 2


def test_there_is_no_train_function_to_read_when_running_eagerly(xy):
    model = dense_model(optimizer="sgd", loss="mse", run_eagerly=True)
    model.fit(*xy, verbose=0)
    assert audit_train_function(model) is None


def test_a_distributed_model_is_audited_as_its_replicas_run(xy):
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = dense_model("mixed_float16", optimizer="sgd", loss="mse")
    audit = audit_precision(model, data=xy)
    assert audited_multiplies(audit) == {"hidden": {"float16": 2}, "head": {"float16": 3}}


def test_a_data_set_is_described_but_not_read(xy):
    def refuse():
        raise AssertionError("the data set was read")
        yield

    spec = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1)), tf.TensorSpec((None,)))
    dataset = tf.data.Dataset.from_generator(refuse, output_signature=spec)
    model = dense_model(optimizer="sgd", loss="mse")
    audit = audit_precision(model, data=dataset)
    assert audit.source == "train_step for a batch of 2"
    assert audit.dtypes("matmul") == {"float32": 5}


def test_a_model_of_several_inputs_is_audited_from_its_own_inputs():
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((3,), dtype="int32", name="b")}
    merged = layers.Concatenate()([inputs["a"], layers.Embedding(5, 2)(inputs["b"])[:, 0]])
    model = keras.Model(inputs, [layers.Dense(2)(merged), layers.Dense(3)(merged)])
    audit = audit_precision(model)
    assert audit.dtypes("matmul", is_gradient=False) == {"float32": 2}
    assert any("stand-in" in note for note in audit.notes)


def test_a_subclassed_model_is_audited_by_the_shape_that_it_was_built_with():
    model = Subclassed()
    model(np.zeros((5, 4), "float32"))
    audit = audit_precision(model, "predict")
    assert audit.dtypes("matmul") == {"float32": 2}
    assert audit.source == "predict_step for a batch of 5"
    assert any("taken to be float32" in note for note in audit.notes)


def test_a_model_that_is_not_built_is_audited_as_fit_would_build_it(xy):
    model = Subclassed()
    model.compile("sgd", "mse")
    audit = audit_precision(model, data=xy)
    assert audit.dtypes("matmul", is_gradient=False) == {"float32": 2}
    assert any("were not built yet" in note for note in audit.notes)


def test_what_cannot_be_audited_is_refused_with_what_to_do(xy):
    with pytest.raises(TypeError, match=r"keras.Model. Received: .*Dense"):
        audit_precision(layers.Dense(1))
    with pytest.raises(ValueError, match=r"'train' or 'predict'. Received: what='test'"):
        audit_precision(dense_model(), "test")
    with pytest.raises(ValueError, match="Call it on one batch first"):
        audit_precision(Subclassed(), data=xy[0])
    with pytest.raises(TypeError, match="Of a PyDataset or a generator, pass one batch"):
        audit_precision(dense_model(), data=iter([xy]))
    with pytest.raises(TypeError, match="a tuple of 4 parts"):
        audit_precision(dense_model(), data=(*xy, *xy))
    model = keras.Sequential([layers.Dense(1)])
    model.built = True
    with pytest.raises(ValueError, match=r"does not tell what its inputs are. Pass one batch"):
        audit_precision(model, "predict")


# The record


def test_an_audit_prints_as_a_table_and_goes_to_json():
    model = dense_model()
    pin_float32(model.get_layer("head"))
    switch_precision(model, "mixed_bfloat16")
    audit = audit_precision(model)
    head = next(line for line in str(audit).splitlines() if line.startswith("head"))
    assert head.split("  ")[-1].strip() != "" and "2 matmul float32" in head
    assert "1 matmul bfloat16" in str(audit)
    record = json.loads(json.dumps(audit.to_dict()))
    assert record["summary"]["multiplies"] == {"bfloat16": 2, "float32": 3}
    # The batch of 2: forward and weights' gradient of each, and the head's input gradient.
    half, full = 2 * (2 * 4 * 8), 3 * (2 * 8 * 1)
    assert record["summary"]["half_share"] == pytest.approx(half / (half + full))
    paths = [one["path"] for one in record["layers"]]
    assert paths.index("hidden") < paths.index("head")
