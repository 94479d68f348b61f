import numpy as np
import pytest

from precision_bert.memory import PeakMemory, peak_memory, reset_peak_memory


def test_the_peak_covers_what_was_held_since_the_reset():
    reset_peak_memory()
    before = peak_memory()
    if before.source != "process":
        pytest.skip(f"this system's meter is {before.source!r} and cannot be reset")
    block = np.ones(64 << 17)  # 64 MiB, touched
    held = peak_memory()
    del block
    assert held.bytes - before.bytes >= 60 << 20
    # The kernel sums its counters lazily: within a few pages per thread.
    assert peak_memory().bytes >= held.bytes - (4 << 20)
    reset_peak_memory()
    assert peak_memory().bytes <= held.bytes - (60 << 20)


def test_where_the_meter_cannot_be_reset_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("precision_bert.memory._CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    reset_peak_memory()
    found = peak_memory()
    assert isinstance(found, PeakMemory)
    assert found.source == "process since its start" and found.bytes > 0
