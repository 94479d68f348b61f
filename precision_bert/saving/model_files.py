"""Saves a model whole, and reads it back in the precision that it had or in another one."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from precision_bert._version import __version__
from precision_bert.layer_policies import check_keras_model
from precision_bert.loss_scaling import loss_scale_values, set_loss_scale_values, unwrapped
from precision_bert.policies import SWITCHABLE_POLICIES, PolicyName, check_policy
from precision_bert.policy_scope import precision_scope
from precision_bert.saving.compiling import OptimizerState, restore_training, uncompile
from precision_bert.saving.model_facts import (
    ModelFacts,
    assign,
    describe_model,
    layers_by_place,
    let_containers_agree,
    policy_names_kept,
    restore_layers,
    restore_seeds,
)
from precision_bert.switching import switch_precision

FORMAT = 1
_MEMBER = "precision_bert.json"

# What a loss-scale optimizer has besides its inner optimizer's variables, in the order in which
# Keras writes them: Keras' own has the first four, ours all, earlier versions of it the first five.
_LOSS_SCALE_NAMES = (
    "iteration",
    "learning_rate",
    "step_counter",
    "dynamic_scale",
    "skipped_steps",
    "consecutive_skipped_steps",
    "bad_since_growth",
    "bad_since_move",
    "steps_since_move",
)


def save_model(model: keras.Model, path: str | os.PathLike[str], overwrite: bool = True) -> None:
    """Saves a model so that `load_model` gives back what it was, in any precision.

    The file is Keras' own `.keras` archive with one more member, so `keras.saving.load_model` reads
    it as well, as far as Keras goes. It is written beside and renamed: until all of it is on the
    disk, an older file of that name stays.

    Args:
        model: Any Keras model that Keras can save, compiled or not.
        path: Ends in `.keras`; its folder must exist.
        overwrite: Whether a file of that name is replaced. Default `True`, as in Keras.

    Raises:
        TypeError: If `model` is no Keras model.
        ValueError: If `path` does not end in `.keras`.
        FileExistsError: If the file exists and `overwrite` is `False`.
        FileNotFoundError: If its folder does not exist.

    Example:

    >>> import tempfile
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> model.compile("adam", "mse")
    >>> _ = switch_precision(model, "mixed_float16")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(model, f"{folder}/model.keras")
    ...     again = load_model(f"{folder}/model.keras", "float32")
    >>> again.dtype_policy.name, type(again.optimizer).__name__
    ('float32', 'Adam')
    """
    check_keras_model(model)
    file = Path(os.path.realpath(_check_name(path, ".keras")))  # a link stays a link
    if not overwrite and file.exists():
        raise FileExistsError(f"{file} exists. Give overwrite=True to replace it, or another path.")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"The folder of path={os.fspath(path)!r} does not exist; make it.")
    versions = {"format": FORMAT, "precision_bert": __version__, "keras": keras.__version__}
    facts = json.dumps(versions | asdict(describe_model(model)))
    partial = file.with_name(f"{file.stem}.partial.keras")
    try:
        with policy_names_kept(model):
            keras.saving.save_model(model, partial)
        with zipfile.ZipFile(partial, "a") as archive:
            archive.writestr(_MEMBER, facts)
        with partial.open("rb+") as written:
            os.fsync(written.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def load_model(
    path: str | os.PathLike[str],
    policy: PolicyName | None = None,
    *,
    custom_objects: dict[str, Any] | None = None,
    safe_mode: bool = True,
) -> keras.Model:
    """Reads a model from a file, in the precision that it was saved in or in another one.

    What `save_model` wrote comes back as it was: the policies of model and layers, the float32
    islands, what is trainable, whether and how it was compiled, the optimizer with settings and
    state, and the loss scale. Its next training step is, bit for bit, the one that the saved model
    would have taken. What `model.save` wrote is read too, with what it holds: a keras-nlp task then
    has the optimizer that it was trained with, and a mixed_float16 model its loss scale.

    Args:
        path: A `.keras` file.
        policy: The precision to switch the model to, as `switch_precision` does. Default `None`:
            as it was saved, whatever the global policy is now.
        custom_objects: Classes and functions by name, as in `keras.saving.load_model`.
        safe_mode: `False` allows lambdas, as in `keras.saving.load_model`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If `path` does not end in `.keras`, the policy is unknown, or the file is
            damaged, no model, or written by a later version.
        TypeError: If a class is unknown: import its module first, or name it in `custom_objects`.
    """
    if policy is not None:
        policy = check_policy(policy)
    file = _check_exists(_check_name(path, ".keras"))
    config, facts = _read(file)
    # Layers that other layers make for themselves take the global policy: then that of the time.
    built_in = facts.policy if facts is not None else _own_policy(config)
    with (
        keras.saving.custom_object_scope(custom_objects or {}),
        precision_scope(built_in) if built_in in SWITCHABLE_POLICIES else contextlib.nullcontext(),
    ):
        with warnings.catch_warnings():
            # keras-nlp's tasks compile themselves, with an optimizer that the saved state does not
            # fit. They get the one that it fits below.
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            model = keras.saving.load_model(file, compile=False, safe_mode=safe_mode)
        if facts is not None:
            restore_layers(model, facts)
        else:
            let_containers_agree(model)
        if config.get("compile_config"):
            is_complete = restore_training(
                model,
                config["compile_config"],
                facts,
                _optimizer_state(file),
                origin=str(file),
                safe_mode=safe_mode,
            )
            if not is_complete and model.built:
                model.load_weights(file)
        elif model.compiled:
            uncompile(model)
    if policy is not None:
        switch_precision(model, policy)
    return model


def load_state(model: keras.Model, path: str | os.PathLike[str]) -> None:
    """Loads weights, optimizer state and loss scale into a live model of any precision.

    Use it instead of `model.load_weights` where the file may come from another precision: Keras
    then loads the weights, warns, and starts the optimizer anew. The model keeps its precision. A
    loss scale that it has no use for is put aside until it is switched to float16.

    Args:
        model: Built and compiled, with the same layers and the same kind of optimizer as the saved
            one had.
        path: A `.keras` file, or a `.weights.h5` as `model.save_weights` and Keras'
            `BackupAndRestore` write it.

    Raises:
        TypeError: If `model` is no Keras model.
        ValueError: If it is not built or not compiled, or if the file does not fit to it or is
            damaged. The model's optimizer is then as it was.
        FileNotFoundError: If there is no such file.
    """
    check_keras_model(model)
    file = _check_exists(_check_name(path, ".keras", ".weights.h5"))
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not model.built:
        raise ValueError("load_state needs a model that is built and compiled.")
    facts = _read(file)[1] if file.suffix == ".keras" else None
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    inner = unwrapped(optimizer)
    values = _optimizer_state(file).values
    own = len(values) - len(inner.variables)
    shapes = [np.shape(value) for value in values[max(own, 0) :]]
    if own not in (0, 4, 5, len(_LOSS_SCALE_NAMES)) or shapes != [
        tuple(v.shape) for v in inner.variables
    ]:
        raise ValueError(
            f"{file} does not fit to the model's optimizer, {type(inner).__name__} with "
            f"{len(inner.variables)} variables. Received: an optimizer with {len(values)} "
            "variables. Compile the model as the saved one was, or take model.load_weights for "
            "the weights alone."
        )
    # Keras goes by the number of variables, and would skip an optimizer with another.
    model.optimizer = None
    try:
        model.load_weights(file)
    finally:
        model.optimizer = optimizer
    assign(inner.variables, values[own:])
    if facts is not None:
        for place, layer in layers_by_place(model).items():
            if place in facts.layers:
                restore_seeds(layer, facts.layers[place])
    scale = dict(zip(_LOSS_SCALE_NAMES, values[:own], strict=False))
    if facts is not None and facts.parked is not None:
        scale = facts.parked["values"]
    if scale:
        set_loss_scale_values(optimizer, loss_scale_values(optimizer) | scale)


def _check_name(path: str | os.PathLike[str], *endings: str) -> Path:
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path).endswith(endings):
        raise ValueError(f"path must end in {' or '.join(endings)}. Received: path={path!r}.")
    return Path(path)


def _check_exists(file: Path) -> Path:
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {file}.")
    return file


def _read(file: Path) -> tuple[dict[str, Any], ModelFacts | None]:
    """Returns Keras' configuration of the model, and our facts if `save_model` wrote the file."""
    damages = (OSError, ValueError, KeyError, EOFError, RuntimeError, zlib.error)
    try:
        with zipfile.ZipFile(file) as archive:
            # Members carry checksums, which are verified only where a member is read to its end.
            if (damaged := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"{damaged!r} in it has changed")
            config: dict[str, Any] = json.loads(archive.read("config.json"))
            if _MEMBER not in archive.namelist():
                return config, None
            facts = json.loads(archive.read(_MEMBER))
    except (*damages, zipfile.BadZipFile) as damage:
        raise ValueError(f"{file} is damaged, or no model of Keras: {damage}") from damage
    written_by, _ = facts.pop("precision_bert"), facts.pop("keras")
    if (format_ := facts.pop("format")) != FORMAT:
        raise ValueError(
            f"{file} was written by precision_bert {written_by} in format {format_}. This version, "
            f"{__version__}, reads format {FORMAT}; read it with that one."
        )
    return config, ModelFacts(**facts)


def _own_policy(config: dict[str, Any]) -> str | None:
    """Returns the policy that a model which Keras saved was built in, if its configuration tells.

    It names that of the model itself for some classes only. Of the others it is the one half
    precision policy that their layers have, if all that have one have the same.
    """
    dtype = (config.get("config") or {}).get("dtype")
    if dtype is not None:
        return keras.dtype_policies.get(dtype).name
    half = {name for name in _policies_in(config) if name.startswith("mixed_")}
    return half.pop() if len(half) == 1 else None


def _policies_in(config: Any) -> Iterator[str]:
    if isinstance(config, dict):
        if config.get("class_name") == "DTypePolicy":
            yield config["config"]["name"]
        config = list(config.values())
    if isinstance(config, list):
        for part in config:
            yield from _policies_in(part)


def _optimizer_state(file: Path) -> OptimizerState:
    """Returns the optimizer's state; a list of no values if there is none."""
    with contextlib.ExitStack() as stack:
        opened: Any = file
        if file.suffix == ".keras":
            opened = stack.enter_context(zipfile.ZipFile(file))
            opened = stack.enter_context(opened.open("model.weights.h5"))
        try:
            weights = stack.enter_context(h5py.File(opened))
            saved = weights.get("optimizer/vars", {})
            # Keras notes the dtypes that h5py does not know.
            values = [
                np.array(saved[str(i)], dtype=saved[str(i)].attrs.get("dtype"))
                for i in range(len(saved))
            ]
            return OptimizerState(values, "optimizer/inner_optimizer" in weights)
        except (OSError, RuntimeError, KeyError) as damage:
            raise ValueError(f"{file} is damaged, or no weights of Keras: {damage}") from damage
