"""The notebook runs from top to bottom."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebooks" / "two_stage.ipynb"


# nbclient runs the kernel on an event loop that outlives it by a moment.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_cell_runs_and_the_model_learns():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cell = "print(record.history['val_accuracy'][-1] > demo['validation'].majority_share + 0.05)"
    notebook.cells.append(nbformat.v4.new_code_cell(cell))
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    assert notebook.cells[-1].outputs[0]["text"].strip() == "True"
