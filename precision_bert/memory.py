"""How much memory a stretch of training took at its peak, on the device or in the process."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tensorflow as tf

# What TensorFlow alone can tell stays in this file, so that another Keras backend could follow.

MemorySource = Literal["gpu", "process", "process since its start"]

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class PeakMemory:
    """The most memory in use at once since the meter was reset.

    Attributes:
        bytes: The peak, in bytes.
        source: `"gpu"`: what TensorFlow had allocated on all GPUs together. `"process"`: resident
            memory of the whole process. `"process since its start"`: the same where the system
            cannot reset its meter, so an earlier, larger peak hides a later, smaller one.
    """

    bytes: int
    source: MemorySource


def reset_peak_memory() -> None:
    """Starts a new measurement for `peak_memory`, as far as the system allows."""
    for device in _gpus():
        tf.config.experimental.reset_memory_stats(device)
    if _can_reset_process_peak():
        _CLEAR_REFS.write_text("5")


def peak_memory() -> PeakMemory:
    """Returns the peak since `reset_peak_memory`: of the GPUs if there are any, else the process's.

    Example:

    >>> reset_peak_memory()
    >>> peak_memory().bytes > 0
    True
    """
    gpus = _gpus()
    if gpus:
        peaks = [tf.config.experimental.get_memory_info(device)["peak"] for device in gpus]
        return PeakMemory(sum(peaks), "gpu")
    if _can_reset_process_peak():
        found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
        if found:
            return PeakMemory(int(found.group(1)) * 1024, "process")
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return PeakMemory(kilobytes * 1024, "process since its start")


def _gpus() -> list[str]:
    return [
        device.name.removeprefix("/device:") for device in tf.config.list_logical_devices("GPU")
    ]


def _can_reset_process_peak() -> bool:
    try:
        with _CLEAR_REFS.open("w"):
            return True
    except OSError:  # not Linux, or a container that hides it
        return False
