"""Builds a model anew in another precision, where a switch in place cannot be right."""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

from precision_bert.graph_dtypes import following_operations, set_dtype
from precision_bert.islands import find_islands, marks, restore_marks
from precision_bert.layer_policies import (
    check_keras_model,
    refresh_frozen_state,
    set_policy,
    switchable_layers,
)
from precision_bert.loss_scaling import scales_loss, variable_value
from precision_bert.policies import HALF, SWITCHABLE_POLICIES
from precision_bert.policy_scope import global_policy
from precision_bert.saving.compiling import OptimizerState, restore_training
from precision_bert.saving.model_facts import describe_model, layers_by_place
from precision_bert.switching import fit_loss_scale

# Whose classes Keras finds by itself.
_KNOWN = ("keras.", "keras_hub.", "precision_bert.")

REBUILDABLE_POLICIES = (*SWITCHABLE_POLICIES, "float16", "bfloat16")


def rebuild_precision(
    model: keras.Model, policy: str, *, custom_objects: dict[str, Any] | None = None
) -> keras.Model:
    """Builds a new model from the configuration of another, in another precision.

    Use it where `switch_precision` refuses: for variables in half precision (policies `"float16"`
    and `"bfloat16"`), for layers that recorded a dtype when they were made, for inputs in half. The
    new model has the weights of the old one, the random states, the float32 islands, and if it was
    compiled the optimizer with settings, state and step count, and the loss scale. The old model
    stays as it is; both are in memory until you let it go.

    Args:
        model: Any built Keras model whose layers can be made from their configurations.
        policy: `"float32"`, `"mixed_float16"`, `"mixed_bfloat16"`, or `"float16"` or `"bfloat16"`,
            whose variables are in half precision too: they round each update of a weight, so train
            in them only if you know why.
        custom_objects: Functions and classes that the configuration names, as in
            `keras.saving.load_model`. The classes of the model's own layers are known.

    Returns:
        The new model.

    Raises:
        TypeError: If `model` is no Keras model.
        ValueError: If the policy is unknown, the model is not built or has quantised layers, a
            layer cannot be made from its configuration, its variables are others in the new
            precision, or one of its values is out of the new dtype's range.

    Example:

    >>> layer = keras.layers.Dense(2, dtype="float16")
    >>> half = keras.Sequential([keras.Input((4,)), layer])
    >>> model = rebuild_precision(half, "float32")
    >>> layer.kernel.dtype, model.layers[0].kernel.dtype
    ('float16', 'float32')

    Digits that half-precision variables have lost do not come back.
    """
    check_keras_model(model)
    if policy not in REBUILDABLE_POLICIES:
        raise ValueError(
            f"policy must be one of {', '.join(map(repr, REBUILDABLE_POLICIES))}. Received: "
            f"policy={policy!r}."
        )
    if not model.built:
        raise ValueError(f"Model {model.name!r} is not built: call it on one batch first.")
    layers = switchable_layers(model)
    for layer, path in layers.items():
        if layer.quantization_mode is not None:
            raise ValueError(f"Layer {path!r} is quantised: its digits are gone. Build it anew.")

    known = _own_classes(layers) | (custom_objects or {})
    with model.distribute_strategy.scope():
        rebuilt = _from_config(model, _config_in(model, policy), policy, known)
        _carry_variables(model.variables, rebuilt.variables, policy)
        _carry_layers(model, rebuilt)
        if model.compiled:
            _compile_like(model, rebuilt, known)
    return rebuilt


def _own_classes(layers: Iterable[keras.Layer]) -> dict[str, type]:
    """Returns the classes that are not Keras' own by name, as Keras looks them up."""
    classes: dict[str, type] = {}
    for layer in layers:
        name = type(layer).__name__
        if type(layer).__module__.startswith(_KNOWN):
            continue
        if classes.setdefault(name, type(layer)) is not type(layer):
            raise ValueError(
                f"The model has layers of two classes named {name!r}, which its configuration "
                "cannot tell apart. Rename one of them."
            )
    return classes


def _carry_layers(model: keras.Model, rebuilt: keras.Model) -> None:
    """Carries over what layers have besides variables: marks, vocabularies, what is frozen."""
    old_layers = layers_by_place(model)
    for place, layer in layers_by_place(rebuilt).items():
        old = old_layers.get(place)
        if old is None:
            continue
        layer.trainable = old.trainable  # containers come first
        restore_marks(layer, marks(old))
        if hasattr(old, "save_assets"):  # a lookup's or a tokenizer's vocabulary
            with tempfile.TemporaryDirectory() as folder:
                old.save_assets(folder)
                layer.load_assets(folder)
        refresh_frozen_state(layer)


def _config_in(model: keras.Model, policy: str) -> dict[str, Any]:
    """Returns the configuration that `model` would have in `policy`."""
    # Configurations say what each layer's policy is at the moment. So the policies are set for the
    # time of asking: nothing is computed meanwhile.
    islands = find_islands(switchable_layers(model))
    inputs = [la for la in model._flatten_layers() if isinstance(la, keras.layers.InputLayer)]
    operations = following_operations(model) | {
        layer: layer.dtype for layer in inputs if layer.dtype in HALF
    }
    layers = [layer for layer in switchable_layers(model) if layer not in islands]
    policies = [layer._dtype_policy for layer in layers]
    compute_dtype = keras.DTypePolicy(policy).compute_dtype
    try:
        for layer in layers:
            set_policy(layer, policy, refresh=False)
        for operation in operations:
            is_input = isinstance(operation, keras.layers.InputLayer)
            set_dtype(operation, "float32" if is_input else compute_dtype)
        # How the model was compiled is asked for later, where an error can say so.
        vars(model)["get_compile_config"] = lambda: None
        return copy.deepcopy(keras.saving.serialize_keras_object(model))
    finally:
        vars(model).pop("get_compile_config", None)
        for layer, own in zip(layers, policies, strict=True):
            layer._dtype_policy = own
        for operation, dtype in operations.items():
            set_dtype(operation, dtype)


def _from_config(
    model: keras.Model, config: dict[str, Any], policy: str, custom_objects: dict[str, Any]
) -> keras.Model:
    config.pop("compile_config", None)
    try:
        # Layers that other layers make for themselves take the global policy.
        with global_policy(policy), _random_state_kept():
            return keras.saving.deserialize_keras_object(
                config, custom_objects=custom_objects, safe_mode=False
            )
    except Exception as error:  # whatever a layer's own from_config raises
        raise ValueError(
            f"Model {model.name!r} cannot be made from its configuration: {error} Give its layers "
            "a get_config with all arguments of their constructors, and name other classes and "
            "functions of it in custom_objects."
        ) from error


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    state = random.getstate()  # initializers draw their seeds from it
    try:
        yield
    finally:
        random.setstate(state)


def _carry_variables(old: list[keras.Variable], new: list[keras.Variable], policy: str) -> None:
    # Not by name: Keras numbers the names that it gives itself.
    shapes, expected = ([tuple(v.shape) for v in part] for part in (new, old))
    if shapes != expected:
        described = f"{len(new)} for {len(old)}"
        if len(new) > len(old):
            described += " (Keras does not share a layer between two nested models that it reads)"
        for one, other in zip(new, old, strict=False):
            if one.shape != other.shape:
                described = f"{one.path} {one.shape} for {other.path} {other.shape}"
                break
        raise ValueError(
            f"Built in {policy!r} the model has other variables: {described}. Its layers must make "
            "the same variables in each precision."
        )
    for variable, source in zip(new, old, strict=True):
        value = variable_value(source)
        if variable.dtype in HALF and np.isfinite(value).all():
            with np.errstate(over="ignore"):
                rounded = value.astype(variable.dtype)
            if not np.isfinite(rounded).all():
                raise ValueError(
                    f"Variable {source.path!r} holds {np.abs(value).max():.3g}, which "
                    f"{variable.dtype} cannot hold. Take a policy that keeps variables in float32."
                )
        variable.assign(value)


def _compile_like(model: keras.Model, rebuilt: keras.Model, custom_objects: dict[str, Any]) -> None:
    optimizer = model.optimizer
    state = OptimizerState(
        [variable_value(v) for v in optimizer.variables] if optimizer is not None else [],
        optimizer is not None and scales_loss(optimizer),
    )
    # Losses and metrics of the user's own, which Keras knows by name only.
    given = keras.tree.flatten(dict(model._compile_config.config)) if model._compile_config else []
    own: dict[str, Any] = {type(one).__name__: type(one) for one in given if not _is_plain(one)}
    own |= {one.__name__: one for one in given if inspect.isfunction(one)}
    try:
        with keras.saving.custom_object_scope(own | custom_objects):
            is_complete = restore_training(
                rebuilt,
                model.get_compile_config(),
                describe_model(model),
                state,
                origin=f"Model {model.name!r}",
                safe_mode=False,
            )
    except (NotImplementedError, TypeError) as error:  # as Keras says that it cannot serialize
        raise ValueError(
            f"What model {model.name!r} was compiled with cannot be made anew: {error} Give "
            "learning-rate schedules, losses and metrics a get_config, or name them in "
            "custom_objects."
        ) from error
    if not is_complete:
        raise ValueError(
            f"Model {model.name!r} has optimizers of its own, whose state cannot be carried over. "
            "Save their state and build the model by hand."
        )
    fit_loss_scale(rebuilt)


def _is_plain(one: Any) -> bool:
    return type(one).__module__.startswith((*_KNOWN, "builtins"))
