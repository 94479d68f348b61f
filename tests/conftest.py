"""Fixtures for all tests: seeded, on the CPU, and a test that leaks global state fails."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _seeded_and_leaving_no_global_policy():
    keras.utils.set_random_seed(0)
    before = keras.config.dtype_policy().name
    yield
    after = keras.config.dtype_policy().name
    keras.config.set_dtype_policy("float32")
    assert after == before, f"the test left the global dtype policy {after!r} behind"


@pytest.fixture
def xy():
    """A small regression set: x (32, 4) float32, y (32, 1) float32, learnable by one Dense."""
    x = np.random.RandomState(0).randn(32, 4).astype("float32") * 0.1
    return x, x[:, :1]


def pytest_terminal_summary(terminalreporter):
    """Prints the tallies that tests have recorded, also those of other processes."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "tally" and report.when == "call":
                terminalreporter.write_line(value)
