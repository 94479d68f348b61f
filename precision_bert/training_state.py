"""What a staged training saves after each epoch, and how it is read back whole or not at all."""

from __future__ import annotations

import json
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from precision_bert.loss_scaling import (
    loss_scale_values,
    set_loss_scale_values,
    unwrapped,
    variable_value,
)

FORMAT = 1
_NAME = re.compile(r"epoch-(\d{6})\.npz")


@dataclass(frozen=True)
class TrainingState:
    """A training between two epochs.

    Attributes:
        epoch: How many epochs are done, so the next one's number counted from 0.
        arrays: The variables of model, optimizer and loss scale, by kind and position.
        plan: What the state fits to: the stages, and names and shapes of the variables.
        progress: History, stage records and whatever else JSON holds.
    """

    epoch: int
    arrays: dict[str, np.ndarray]
    plan: dict[str, Any]
    progress: dict[str, Any]


def capture(model: keras.Model) -> dict[str, np.ndarray]:
    """Returns the values of everything that training changes in `model`.

    That is: weights and statistics, the seeds of dropout, the inner optimizer's state, and the
    loss scale with its streak and counts, also while a float32 stage has put it aside.
    """
    arrays = {f"model/{i}": variable_value(v) for i, v in enumerate(model.variables)}
    inner = unwrapped(model.optimizer)
    arrays |= {f"optimizer/{i}": variable_value(v) for i, v in enumerate(inner.variables)}
    return arrays | {
        f"loss_scale/{name}": np.asarray(value)
        for name, value in loss_scale_values(model.optimizer).items()
    }


def restore(model: keras.Model, arrays: dict[str, np.ndarray]) -> None:
    """Gives `model` the values that `capture` returned; shapes must have been checked before."""
    inner = unwrapped(model.optimizer)
    for kind, variables in (("model", model.variables), ("optimizer", inner.variables)):
        for i, variable in enumerate(variables):
            variable.assign(arrays[f"{kind}/{i}"])
    prefix = "loss_scale/"
    set_loss_scale_values(
        model.optimizer,
        {n.removeprefix(prefix): v for n, v in arrays.items() if n.startswith(prefix)},
    )


def describe(model: keras.Model, stages: Sequence[str]) -> dict[str, Any]:
    """Returns what a saved state must fit to, ready for JSON.

    Args:
        model: A built model whose optimizer is built.
        stages: A line for each stage of the schedule.
    """
    inner = unwrapped(model.optimizer)
    return {
        "stages": list(stages),
        "model variables": [f"{v.name} {tuple(v.shape)}" for v in model.variables],
        "optimizer": f"{type(inner).__name__} with {len(inner.variables)} variables",
    }


class CheckpointFolder:
    """The checkpoints of one training: the last `keep` epochs, each file whole.

    Args:
        folder: Made if it does not exist.
        keep: How many checkpoints stay. Two, so that a damaged one leaves another.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2) -> None:
        self.folder = Path(folder)
        self.keep = keep

    def files(self) -> list[Path]:
        """The checkpoint files, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))

    def save(self, state: TrainingState) -> Path:
        """Writes a checkpoint; it has its name only once all of it is on the disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"epoch-{state.epoch:06d}.npz"
        partial = path.with_suffix(".partial")
        about = {
            "format": FORMAT,
            "epoch": state.epoch,
            "plan": state.plan,
            "progress": state.progress,
        }
        with partial.open("wb") as file:
            named: dict[str, Any] = {"about": np.array(json.dumps(about)), **state.arrays}
            np.savez(file, **named)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        for old in self.files()[: -self.keep]:
            old.unlink()
        return path

    def latest(self) -> TrainingState | None:
        """Reads the newest checkpoint that is whole; a damaged one is named in a warning.

        Raises:
            ValueError: If there are checkpoints and none of them can be read.
        """
        files = self.files()
        for path in reversed(files):
            try:
                return _read(path)
            except _DAMAGES as damage:
                warnings.warn(
                    f"{path} is damaged ({damage}); the checkpoint before it is used.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        if files:
            raise ValueError(
                f"None of the checkpoints in {self.folder} can be read; start anew in another "
                f"folder. Received: {', '.join(path.name for path in files)}."
            )
        return None


# zip files carry a checksum for each member, which reading verifies.
_DAMAGES = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)


def _read(path: Path) -> TrainingState:
    # Opened here, because NumPy leaves a file open that turns out to be none of its own.
    with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
        about = json.loads(str(stored["about"]))
        if about["format"] != FORMAT:
            raise ValueError(f"format {about['format']}, this version reads {FORMAT}")
        arrays = {name: stored[name] for name in stored.files if name != "about"}
    return TrainingState(about["epoch"], arrays, about["plan"], about["progress"])


def check_plan(saved: dict[str, Any], present: dict[str, Any], folder: Path) -> None:
    """Refuses a state that belongs to another model, optimizer or schedule.

    Raises:
        ValueError: Naming the first thing that differs.
    """
    for what, now in present.items():
        then = saved.get(what)
        if then == now:
            continue
        if isinstance(now, list) and isinstance(then, list):
            pairs = [(a, b) for a, b in zip(then, now, strict=False) if a != b]
            then, now = pairs[0] if pairs else (f"{len(then)} of them", f"{len(now)} of them")
        raise ValueError(
            f"The checkpoint in {folder} belongs to another training: its {what} differ. Saved: "
            f"{then}. Received: {now}. Give the settings that it was started with, or another "
            "folder."
        )
