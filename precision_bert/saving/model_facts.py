"""What Keras' own file leaves out of a model: describing it, and giving it back to another one."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras

from precision_bert.graph_dtypes import following_operations, set_dtype
from precision_bert.islands import marks, restore_marks
from precision_bert.layer_policies import (
    author_map,
    is_container,
    policy_name,
    refresh_frozen_state,
    remember_author_map,
    set_policy,
    switchable_layers,
)
from precision_bert.loss_scaling import scales_loss, unwrapped, variable_value
from precision_bert.policies import HALF
from precision_bert.saving.parked_loss_scale import describe_parked, parked_loss_scale_factor


@dataclass(frozen=True)
class ModelFacts:
    """What Keras' own file leaves out, as JSON holds it.

    Attributes:
        policy: The model's own policy. Keras keeps none for Functional and Sequential models.
        layers: What `_describe` says of each layer, by its place in the model.
        casts: The dtypes of casts in Functional graphs, by the operation's name.
        optimizer: The one in use, serialized; `None` where there is none. (Keras keeps the one that
            `compile` was given, without the loss scale around it.)
        trained: Positions among the model's weights of the variables that the optimizer was built
            for; `None` if it has not trained yet.
        undecayed: Positions of those that `exclude_from_weight_decay` takes out.
        loss_scale_factor: What the inner optimizer gets back when its loss scale is taken off.
        parked: The loss scale that a stage in another precision has put aside.
    """

    policy: str
    layers: dict[str, dict[str, Any]]
    casts: dict[str, str]
    optimizer: dict[str, Any] | None = None
    trained: list[int] | None = None
    undecayed: list[int] | None = None
    loss_scale_factor: float | None = None
    parked: dict[str, Any] | None = None


def describe_model(model: keras.Model) -> ModelFacts:
    """Returns what `ModelFacts` says of a model."""
    layers = {place: _describe(layer) for place, layer in layers_by_place(model).items()}
    casts = {operation.name: dtype for operation, dtype in following_operations(model).items()}
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return ModelFacts(policy_name(model), layers, casts)
    inner = unwrapped(optimizer)
    positions = {id(variable): i for i, variable in enumerate(model.weights)}
    return ModelFacts(
        policy_name(model),
        layers,
        casts,
        optimizer=keras.saving.serialize_keras_object(optimizer),
        # Not what is trainable now: freezing a layer later takes nothing from the optimizer.
        trained=[positions[id(v)] for v in inner._trainable_variables] if inner.built else None,
        # Keras keeps this in no config, and has no other way of asking for it.
        undecayed=[i for i, v in enumerate(model.weights) if not inner._use_weight_decay(v)],
        loss_scale_factor=parked_loss_scale_factor(inner),
        parked=describe_parked(inner) if not scales_loss(optimizer) else None,
    )


def _policy_config(policy: keras.DTypePolicy) -> Any:
    if not isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return keras.dtype_policies.serialize(policy)
    # Not by its own get_config: that takes the names off the policies of a map without default.
    own = {path: keras.dtype_policies.serialize(policy) for path, policy in policy.items()}
    return [keras.dtype_policies.serialize(policy.default_policy), own]


def _policy_from(config: Any) -> keras.DTypePolicy:
    if not isinstance(config, list):
        return keras.dtype_policies.deserialize(config)
    default, own = config
    return keras.dtype_policies.DTypePolicyMap(
        _policy_from(default), {path: _policy_from(policy) for path, policy in own.items()}
    )


@contextlib.contextmanager
def policy_names_kept(model: keras.Model) -> Iterator[None]:
    """Keeps the names of the policies in a model's `DTypePolicyMap`s while Keras saves it."""
    # Keras takes them off the policies of a map without default, on the live model.
    before = [
        (policy, dict(vars(policy)))
        for layer in model._flatten_layers()
        if isinstance(layer._dtype_policy, keras.dtype_policies.DTypePolicyMap)
        for policy in layer._dtype_policy.values()
    ]
    try:
        yield
    finally:
        for policy, attributes in before:
            vars(policy).update(attributes)


def layers_by_place(model: keras.Model) -> dict[str, keras.Layer]:
    """Returns all layers by their place in the model, which is the same in a model read back."""
    # Neither by order nor by path: Keras makes some layers only when they are called, and gives
    # others another name or path in a model that it reads. So: the second Dense of the first block.
    places: dict[str, keras.Layer] = {}
    seen = set()

    def visit(layer: keras.Layer, place: str) -> None:
        if id(layer) in seen or place in places:
            return
        seen.add(id(layer))
        places[place] = layer
        counts: Counter[str] = Counter()
        for child in layer._flatten_layers(include_self=False, recursive=False):
            name = type(child).__name__
            counts[name] += 1
            visit(child, f"{place}/{name}:{counts[name]}")

    visit(model, "")
    return places


def _describe(layer: keras.Layer) -> dict[str, Any]:
    own_map = author_map(layer)
    return {
        "policy": _policy_config(layer._dtype_policy),
        "policy_name": policy_name(layer),
        "author_map": own_map and _policy_config(own_map),
        "trainable": layer.trainable,
        "marks": marks(layer),
        # Keras saves no random states; without them dropout goes on with other numbers.
        "seeds": [variable_value(generator.state).tolist() for generator in layer._seed_generators],
    }


def restore_layers(model: keras.Model, facts: ModelFacts) -> None:
    """Gives the layers of a model that Keras has read what `describe_model` said of them."""
    for place, layer in layers_by_place(model).items():
        about = facts.layers.get(place)
        if about is None:
            continue
        # Only what differs: Keras restores most, and a quantised policy is more than a name.
        if _policy_config(layer._dtype_policy) != about["policy"]:
            layer._dtype_policy = _policy_from(about["policy"])
            refresh_frozen_state(layer)
        if policy_name(layer) != about["policy_name"]:  # a map, by a path that is another now
            layer._dtype_policy[layer.path] = keras.DTypePolicy(about["policy_name"])
        if about["author_map"]:
            remember_author_map(layer, _policy_from(about["author_map"]))
        if layer.trainable != about["trainable"]:  # containers come before what they hold
            layer.trainable = about["trainable"]
        restore_marks(layer, tuple(about["marks"]))
        restore_seeds(layer, about)
    for operation in following_operations(model):
        if operation.name in facts.casts:
            set_dtype(operation, facts.casts[operation.name])


def restore_seeds(layer: keras.Layer, about: dict[str, Any]) -> None:
    """Gives the random generators of a layer their saved states."""
    assign([generator.state for generator in layer._seed_generators], about["seeds"])


def assign(variables: list[keras.Variable], values: list[Any]) -> None:
    """Gives variables their values, one by one."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def let_containers_agree(model: keras.Model) -> None:
    """Gives Functional and Sequential models the policy of their layers."""
    # Keras does not save it. Without it a mixed_float16 model, compiled, gets no loss scale.
    for part in model._flatten_layers():
        if isinstance(part, (keras.Sequential, keras.Function)):
            names = {policy_name(la) for la in switchable_layers(part) if not is_container(la)}
            half = {name for name in names if keras.DTypePolicy(name).compute_dtype in HALF}
            if len(half or names) == 1:
                set_policy(part, *(half or names))
