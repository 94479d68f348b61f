"""The contract: a switched model is the model that would have been built in the target policy."""

from __future__ import annotations

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from backbone_cases import BACKBONES
from keras import ops, tree
from layer_cases import LAYERS, Case, Skipped, exported_layers

from precision_bert import precision_scope, switch_precision
from precision_bert.policies import SWITCHABLE_POLICIES

# Where a model that was born in a policy is switched, one after the other. The first walk goes
# along each ordered pair of the policies; a model born in half precision is not one that was
# switched there, so those two have walks of their own.
WALKS = {
    "float32": [
        "mixed_float16",
        "mixed_bfloat16",
        "float32",
        "mixed_bfloat16",
        "mixed_float16",
        "float32",
    ],
    "mixed_float16": ["mixed_bfloat16", "float32"],
    "mixed_bfloat16": ["float32"],
}

# How TensorFlow and Keras say that they cannot compute something in a dtype.
UNSUPPORTED = (TypeError, ValueError, tf.errors.InvalidArgumentError, tf.errors.NotFoundError)

CASES = {"layer": LAYERS, "backbone": BACKBONES}

OUTCOMES = ("equal", "handled", "refused", "skipped")

# What became of each case, by kind and name: one of OUTCOMES.
outcomes = {}


def bits(tensor):
    """The dtype and the bits of a tensor; which of the many NaNs a NaN is does not matter."""
    array = ops.convert_to_numpy(tensor)
    if ops.dtype(tensor) == "string":
        return "string", array.tolist()
    if is_float(tensor):
        array = np.where(np.isnan(array), np.full_like(array, np.nan), array)
    return ops.dtype(tensor), array.tobytes()


def parts(gradient):
    # Slices are not added up: in which order threads do that is not the model's doing.
    sliced = isinstance(gradient, tf.IndexedSlices)
    return (gradient.indices, gradient.values) if sliced else (gradient,)


def is_float(tensor):
    return keras.backend.is_float_dtype(ops.dtype(tensor))


def state_of(model):
    return {variable.path: bits(variable) for variable in model.variables}


def restore(model, values):
    for variable, value in zip(model.variables, values, strict=True):
        variable.assign(value)
    keras.utils.set_random_seed(11)  # for what draws from no generator of its own


def weighted_sum(outputs):
    """A sum of all outputs in which no two count the same, so that each has its own gradient."""
    random = np.random.RandomState(3)
    total = tf.zeros(())
    for output in tree.flatten(outputs):
        if is_float(output):
            weights = random.uniform(0.5, 1.5, output.shape).astype("float32")
            total += tf.reduce_sum(tf.cast(output, "float32") * weights)
    return total


def observe(model, inputs, values):
    """Everything that `model` with the variables `values` computes from `inputs`."""
    seen = {}
    tensors = tree.map_structure(tf.convert_to_tensor, inputs)
    watched = [x for x in tree.flatten(tensors) if is_float(x)]
    watched += [variable.value for variable in model.trainable_variables]
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            layer.reset_state()  # Keras does not count it among the variables
    try:
        restore(model, values)
        seen["inference"] = [bits(x) for x in tree.flatten(model(tensors, training=False))]
        restore(model, values)
        with tf.GradientTape() as tape:
            tape.watch(watched)
            outputs = model(tensors, training=True)
            total = weighted_sum(outputs)
        seen["training"] = [bits(output) for output in tree.flatten(outputs)]
        seen["state"] = state_of(model)
        seen["gradients"] = [
            None if gradient is None else [bits(x) for x in parts(gradient)]
            for gradient in tape.gradient(total, watched)
        ]
    except UNSUPPORTED as error:
        seen["error"] = type(error), str(error)
    return seen


def built(case, policy):
    # With the names counted anew, the variables of all models of a case have the same paths.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    with precision_scope(policy):
        return case.build()


def policies_of(model):
    return [(layer.path, layer.dtype_policy.name) for layer in model._flatten_layers()]


def everything_of(model):
    return policies_of(model), state_of(model), model.optimizer, state_of(model.optimizer)


def names_in(model):
    parts = model._flatten_layers()
    operations = [operation for part in parts for operation in getattr(part, "operations", ())]
    return {part.path for part in parts} | {operation.name for operation in operations}


def is_refused(case, model, target):
    """Switches a model; a refusal gives the expected reason, a name, and changes nothing."""
    before = everything_of(model)
    try:
        switch_precision(model, target)
    except ValueError as error:
        assert case.refused and case.refused in str(error)
        assert any(repr(name) in str(error) for name in names_in(model))
        assert everything_of(model) == before
        return True
    assert state_of(model) == before[1]
    return False


def check_that_switch_equals_rebuild(case):
    """Walks models of a case from policy to policy; returns what became of the case."""
    models = {policy: built(case, policy) for policy in SWITCHABLE_POLICIES}
    values = [ops.convert_to_numpy(v) for v in models["float32"].variables]
    paths = [v.path for v in models["float32"].variables]
    rebuilt = {}
    for policy, model in models.items():
        assert [v.path for v in model.variables] == paths
        rebuilt[policy] = observe(model, case.inputs, values)
    failing = {policy for policy, seen in rebuilt.items() if "error" in seen}
    assert failing == set(case.fails_in), [seen.get("error") for seen in rebuilt.values()]

    refused = False
    for born, model in models.items():
        model.optimizer = keras.optimizers.SGD(momentum=0.9)
        model.optimizer.build(model.trainable_variables)
        now = born
        for target in WALKS[born]:
            before = now
            if is_refused(case, model, target):
                refused = True
            else:
                now = target
            seen = observe(model, case.inputs, values)
            different = [what for what in seen if seen[what] != rebuilt[now].get(what)]
            assert not different, f"born in {born}, {before} -> {target}: {different}"
    assert refused == (case.refused is not None)
    return "refused" if refused else "handled" if case.handled else "equal"


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, cases in CASES.items() for name in cases]
)
# Keras' epsilons overflow in float16, in a model built there as well.
@pytest.mark.filterwarnings("ignore:.*overflow encountered in cast:RuntimeWarning")
# keras-nlp's Swin and T5 pass masks to layers that have no use for them.
@pytest.mark.filterwarnings("ignore:.*was passed an input with a mask:UserWarning")
def test_a_switched_model_is_the_model_built_in_the_target_policy(kind, name):
    case = CASES[kind][name]
    if isinstance(case, Skipped):
        outcomes[kind, name] = "skipped"
        pytest.skip(case.reason)
    outcomes[kind, name] = check_that_switch_equals_rebuild(case)


def test_every_layer_class_of_keras_has_a_case_or_a_reason():
    assert {name.partition(":")[0] for name in LAYERS} == set(exported_layers())


def test_at_least_25_backbones_are_tried():
    assert sum(isinstance(case, Case) for case in BACKBONES.values()) >= 25


def test_the_tally_counts_every_case_that_ran(request, record_property):
    ran = {
        (item.callspec.params["kind"], item.callspec.params["name"])
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    assert set(outcomes) == ran, "cases that failed"
    for kind in CASES:
        tally = Counter(outcome for (of, _), outcome in outcomes.items() if of == kind)
        counts = [f"{tally[what]} {what}" for what in OUTCOMES]
        record_property("tally", f"{kind}s: {', '.join(counts)}")
