"""The layout's promises: which module may import which, and who may touch Keras' private parts."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import precision_bert

PACKAGE = Path(precision_bert.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# From the bottom up: a module imports from lower layers only.
LAYERS = [
    {
        "_version",
        "policies",
        "loss_scale",
        "loss_scale_variables",
        "memory",
        "range_causes",
        "scores",
        "sparse_f1",
    },
    {
        "policy_scope",
        "layer_policies",
        "graph_dtypes",
        "schedules",
        "loss_scale_optimizer",
        "staged_history",
    },
    {"islands", "compiled_functions", "frozen_precision", "loss_scaling"},
    {"audit"},
    {"switch_proof", "range_search", "finite_state"},
    {"switching", "learning_rate", "input_checks", "training_state"},
    {"batch_search"},
    {"saving", "callbacks", "fit_arguments", "gradient_range"},
    {"resuming", "rebuilding"},
    {"two_stage"},
]
LEAVES = {"bert", "bert_config", "bert_presets", "bert_text", "data", "fine_tuning", "sparse_f1"}
NEITHER_KERAS_NOR_TENSORFLOW = {
    "_version",
    "audit/record",
    "gradient_range/float16_bins",
    "gradient_range/record",
    "policies",
    "range_causes",
    "schedules",
    "staged_history",
}
# What a leaf may import besides other leaves.
FOR_LEAVES = {"policies", "islands"}

PRIVATE_ALLOWED = {
    "audit",
    "compiled_functions",
    "frozen_precision",
    "gradient_range",
    "graph_dtypes",
    "input_checks",
    "islands",
    "layer_policies",
    "loss_scale_optimizer",
    "loss_scaling",
    "rebuilding",
    "saving",
    "switching",
}


def room(path: Path) -> str:
    """The file's module, or the package that it belongs to."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports(path: Path) -> list[str]:
    """Every module that the file imports anywhere."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
    return found


def own(path: Path) -> set[str]:
    """The rooms of this package that the file imports."""
    return {name.split(".")[1] for name in imports(path) if name.startswith("precision_bert.")} - {
        room(path)
    }


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_point_one_way(path):
    here = room(path)
    if here == "__init__":
        return
    level = {name: index for index, names in enumerate(LAYERS) for name in names}
    if here in LEAVES:
        assert own(path) <= LEAVES | FOR_LEAVES, "a leaf imports mechanism that is not its business"
        return
    assert here in level, f"{here} has no place in the layers: give it one"
    for other in own(path):
        assert other not in LEAVES - {"sparse_f1"}, f"the mechanism {here} imports the leaf {other}"
        assert level[other] < level[here], f"{here} imports {other}, which is not below it"


@pytest.mark.parametrize("name", sorted(NEITHER_KERAS_NOR_TENSORFLOW))
def test_plain_modules_import_neither_keras_nor_tensorflow(name):
    roots = {module.split(".")[0] for module in imports(PACKAGE / f"{name}.py")}
    assert not roots & {"keras", "tensorflow", "keras_nlp", "keras_hub"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_is_imported_from_keras_private_modules(path):
    private = [
        m for m in imports(path) if m.startswith(("keras.src", "keras_hub.src", "keras_nlp.src"))
    ]
    assert private == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_private_attributes_of_others_are_touched_in_the_named_files_only(path):
    if room(path) in PRIVATE_ALLOWED:
        return
    touched = [
        f"line {node.lineno}: .{node.attr}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]
    assert touched == []


HEAVY = {"tensorflow_datasets", "matplotlib", "tensorflow_text", "keras_nlp", "jinja2", "ray"}


def loaded_by(module: str) -> set[str]:
    """The heavy libraries that a fresh interpreter has loaded after importing the module."""
    code = f"import sys, {module}\nprint(*({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_imports_no_heavy_library_that_keras_does_not():
    # (Keras itself imports matplotlib where it is installed.)
    assert loaded_by("precision_bert") == loaded_by("keras") <= {"matplotlib"}


def test_every_public_name_is_there_and_documented():
    for name in precision_bert.__all__:
        thing = getattr(precision_bert, name)
        if callable(thing):
            assert thing.__doc__ and thing.__module__.startswith("precision_bert"), name


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()
