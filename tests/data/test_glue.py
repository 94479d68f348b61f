from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from precision_bert.data import GLUE_TASKS, GlueTask, glue_raw_files, load_glue

tfds = pytest.importorskip("tensorflow_datasets")

HEADER = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
CLASSIFICATION = [task for task in GLUE_TASKS.values() if not task.is_regression]


def _prepare(folder, task, rows):
    """Writes `rows` as the prepared set glue/<task>: {split: [(texts, label, idx), ...]}."""
    builder = tfds.builder(f"glue/{task.name}", data_dir=str(folder))
    label_dtype = np.float32 if task.is_regression else np.int64
    splits = {
        name: tf.data.Dataset.from_tensor_slices(
            {
                **{
                    field: tf.constant([texts[position] for texts, _, _ in split])
                    for position, field in enumerate(task.text_fields)
                },
                "label": np.array([label for _, label, _ in split], label_dtype),
                "idx": np.array([idx for _, _, idx in split], np.int32),
            }
        )
        for name, split in rows.items()
    }
    tfds.dataset_builders.store_as_tfds_dataset(
        name="glue",
        config=tfds.core.BuilderConfig(name=task.name, version="2.0.0"),
        version="2.0.0",
        features=builder.info.features,
        split_datasets=splits,
        data_dir=str(folder),
        disable_shuffling=True,
    )


@pytest.fixture
def raw_mrpc(tmp_path, monkeypatch):
    """A data folder with six synthetic MRPC training pairs, two of them for validation."""
    manual = tmp_path / "downloads" / "manual"
    manual.mkdir(parents=True)
    train = [f'{i % 2}\t{i}\t{i + 100}\tfirst {i}\t"second {i}\n' for i in range(6)]
    test = ["1\t7\t107\tfirst 7\tsecond 7\n", "0\t8\t108\tfirst 8\tsecond 8\n"]
    (manual / "msr_paraphrase_train.txt").write_text(HEADER + "".join(train), "utf-8")
    (manual / "msr_paraphrase_test.txt").write_text(HEADER + "".join(test), "utf-8")
    (manual / "data_mrpc_dev_ids.tsv").write_text("1\t101\n4\t104\n", "utf-8")
    # tfds accepts only files with the hashes it has registered, so register these files'.
    builder_class = type(tfds.builder("glue/mrpc", data_dir=str(tmp_path)))
    registered = dict(builder_class.url_infos)
    for url, info in registered.items():
        path = manual / info.filename
        if path.exists():
            registered[url] = type(info)(
                size=tfds.core.units.Size(path.stat().st_size),
                checksum=hashlib.sha256(path.read_bytes()).hexdigest(),
                filename=info.filename,
            )
    monkeypatch.setattr(builder_class, "url_infos", registered)
    return tmp_path


@pytest.mark.parametrize("task", GLUE_TASKS.values(), ids=GLUE_TASKS)
def test_the_table_agrees_with_tfds(task, tmp_path):
    builder = tfds.builder(f"glue/{task.name}", data_dir=str(tmp_path))
    features = builder.info.features
    assert tuple(builder.builder_config.text_features) == task.text_fields
    if task.is_regression:
        assert features["label"].dtype == np.float32
    else:
        assert tuple(features["label"].names) == task.class_names
        assert features["label"].num_classes == task.num_classes
    registered = {info.filename: url for url, info in builder.url_infos.items()}
    assert set(task.raw_files) <= set(registered)
    if task.name != "mrpc":
        assert [registered[name] for name in task.raw_files] == [builder.builder_config.data_url]
    assert task.headline_metrics
    assert GLUE_TASKS[task.name] is task


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_fields": ()}, "one or two fields"),
        ({"text_fields": ("a", "b", "c")}, "one or two fields"),
        ({"num_classes": 0}, "at least 1"),
        ({"class_names": ("no",)}, "name every class"),
        ({"num_classes": 1}, "nothing for a regression"),
    ],
)
def test_a_task_that_contradicts_itself_is_refused(change, message):
    fields = {
        "name": "x",
        "text_fields": ("a",),
        "num_classes": 2,
        "headline_metrics": ("accuracy",),
        "raw_files": (),
        "class_names": ("no", "yes"),
    }
    assert not GlueTask(**fields).is_regression
    with pytest.raises(ValueError, match=message):
        GlueTask(**(fields | change))


def test_prepares_mrpc_from_raw_files_without_a_network(raw_mrpc):
    mrpc = load_glue("mrpc", data_dir=raw_mrpc)
    assert list(mrpc) == ["train", "validation"]
    assert mrpc["train"].ids.tolist() == [0, 2, 3, 5]  # rows of the file, less the listed ones
    assert mrpc["validation"].ids.tolist() == [1, 4]
    assert mrpc["train"].labels.tolist() == [0, 0, 1, 1]
    assert mrpc["train"].texts[0].tolist() == ["first 0", "first 2", "first 3", "first 5"]
    assert mrpc["validation"].texts[1].tolist() == ['"second 1', '"second 4']

    # What is prepared is read again without the raw files.
    for path in (raw_mrpc / "downloads" / "manual").iterdir():
        path.unlink()
    again = load_glue("mrpc", data_dir=str(raw_mrpc), splits=["validation", "train"])
    assert list(again) == ["validation", "train"]
    assert again["train"].ids.tolist() == [0, 2, 3, 5]


def test_prepares_mrpc_from_files_that_tfds_downloaded_before(raw_mrpc):
    builder = tfds.builder("glue/mrpc", data_dir=str(raw_mrpc))
    cache = raw_mrpc / "downloads" / "glue"
    cache.mkdir()
    for url, info in builder.url_infos.items():
        path = raw_mrpc / "downloads" / "manual" / info.filename
        if path.exists():
            cached = cache / tfds.core.download.resource.get_dl_fname(url, info.checksum)
            path.rename(cached)
            tfds.core.download.resource.write_info_file(
                url=url,
                path=type(builder.data_path)(cached),
                dataset_name="glue",
                original_fname=info.filename,
                url_info=info,
            )
    assert load_glue("mrpc", data_dir=raw_mrpc)["validation"].ids.tolist() == [1, 4]


@pytest.mark.parametrize("task", GLUE_TASKS.values(), ids=GLUE_TASKS)
def test_reads_every_task_that_any_program_prepared_in_the_order_of_ids(task, tmp_path):
    labels = [0.0, 5.0, 2.5] if task.is_regression else [0, 1, 1]
    rows = [
        ([f"{field} {i} é" for field in task.text_fields], label, i)
        for i, label in zip((2, 0, 1), labels, strict=True)
    ]
    _prepare(tmp_path, task, {"train": rows, "validation": rows[:1]})
    loaded = load_glue(task.name, data_dir=tmp_path)
    train = loaded["train"]
    assert train.ids.tolist() == [0, 1, 2]
    assert train.labels.tolist() == [labels[1], labels[2], labels[0]]
    assert train.is_regression == task.is_regression
    assert [text.tolist() for text in train.texts] == [
        [f"{field} {i} é" for i in range(3)] for field in task.text_fields
    ]
    assert len(loaded["validation"]) == 1


def test_a_label_outside_the_classes_is_refused(tmp_path):
    _prepare(tmp_path, GLUE_TASKS["rte"], {"train": [(["a", "b"], 1, 0), (["c", "d"], -1, 9)]})
    with pytest.raises(ValueError, match=r"glue/rte must lie in 0 to 1. Received: -1 .*idx 9"):
        load_glue("rte", data_dir=tmp_path, splits=("train",))


def test_the_test_split_of_mrpc_comes_from_the_gold_file(raw_mrpc):
    gold = raw_mrpc / "downloads" / "manual" / "msr_paraphrase_test.txt"
    mrpc = load_glue("mrpc", data_dir=raw_mrpc, splits=("test", "train"), gold_test_file=gold)
    assert list(mrpc) == ["test", "train"]
    assert mrpc["test"].labels.tolist() == [1, 0]
    assert mrpc["test"].texts[0].tolist() == ["first 7", "first 8"]


def test_the_gold_file_alone_needs_nothing_prepared(raw_mrpc, tmp_path_factory):
    gold = raw_mrpc / "downloads" / "manual" / "msr_paraphrase_test.txt"
    empty = tmp_path_factory.mktemp("empty")
    mrpc = load_glue("mrpc", data_dir=empty, splits=("test",), gold_test_file=gold)
    assert list(mrpc) == ["test"] and list(empty.iterdir()) == []


@pytest.mark.parametrize("task", GLUE_TASKS)
def test_hidden_test_labels_are_never_given(task, tmp_path):
    with pytest.raises(ValueError, match=f"glue/{task}'s test split are -1 throughout"):
        load_glue(task, data_dir=tmp_path, splits=("train", "test"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "MRPC"}, "task must be one of mrpc, rte, .*Received: task='MRPC'"),
        ({"task": "glue/mrpc"}, "task must be one of"),
        ({"task": None}, "task must be one of"),
        ({"splits": "train"}, r"sequence of names, as in \('train',\)"),
        ({"splits": ()}, "at least one of train, validation, test"),
        ({"splits": ("train", "train")}, "none twice"),
        ({"splits": ("train", "dev")}, "at least one of train, validation, test"),
        ({"splits": ("train[:10%]",)}, "slice the examples instead"),
        ({"gold_test_file": "gold.txt"}, '"test" is not among the splits'),
        (
            {"task": "rte", "splits": ("test",), "gold_test_file": "gold.txt"},
            "gold_test_file is for mrpc",
        ),
    ],
)
def test_unusable_arguments_are_refused_before_tfds_is_asked(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_glue(**({"task": "mrpc", "data_dir": tmp_path} | arguments))
    assert list(tmp_path.iterdir()) == []


def test_a_data_dir_that_does_not_exist_is_an_error_not_a_new_folder(tmp_path):
    absent = tmp_path / "absent"
    with pytest.raises(FileNotFoundError, match=r"existing folder.*mkdir -p .*downloads/manual"):
        load_glue("mrpc", data_dir=absent)
    assert not absent.exists()


def test_a_missing_gold_file_is_found_out_before_anything_is_prepared(raw_mrpc):
    with pytest.raises(FileNotFoundError, match=r"absent\.txt"):
        load_glue(
            "mrpc",
            data_dir=raw_mrpc,
            splits=("train", "test"),
            gold_test_file=raw_mrpc / "absent.txt",
        )
    assert not (raw_mrpc / "glue").exists()


@pytest.mark.parametrize("task", GLUE_TASKS.values(), ids=GLUE_TASKS)
def test_without_files_and_network_it_says_what_to_put_where(task, tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        load_glue(task.name, data_dir=tmp_path)
    message = str(caught.value)
    for name in task.raw_files:
        assert f"\n  {name}  from https://" in message
    assert str(tmp_path / "downloads" / "manual") in message
    assert f'tfds.load("glue/{task.name}", data_dir="{tmp_path}")' in message
    assert "dl.fbaipublicfiles.com" in message
    assert list(tmp_path.iterdir()) == []


def test_only_the_files_that_are_missing_are_asked_for(raw_mrpc):
    (raw_mrpc / "downloads" / "manual" / "data_mrpc_dev_ids.tsv").unlink()
    with pytest.raises(FileNotFoundError, match="1 of its 3 raw files") as caught:
        load_glue("mrpc", data_dir=raw_mrpc)
    message = str(caught.value)
    assert "firebasestorage.googleapis.com" in message
    assert "msr_paraphrase" not in message and "fbaipublicfiles" not in message


def test_the_printed_copy_command_holds_in_a_folder_with_spaces(tmp_path):
    folder = tmp_path / "it's here"
    folder.mkdir()
    with pytest.raises(FileNotFoundError) as caught:
        load_glue("rte", data_dir=folder)
    command = next(line for line in str(caught.value).splitlines() if "mkdir -p" in line)
    (tmp_path / "RTE.zip").write_text("x")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert (folder / "downloads" / "manual" / "RTE.zip").exists()


def _builder(folder):
    return tfds.builder("glue/mrpc", data_dir=str(folder))


def _answering(monkeypatch, asked):
    class Connection:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

    def connect(address, *args):
        asked.append(address)
        return Connection()

    monkeypatch.setattr(socket, "create_connection", connect)


def test_a_download_goes_ahead_where_the_hosts_answer(tmp_path, monkeypatch):
    asked = []
    _answering(monkeypatch, asked)
    glue_raw_files.check_obtainable(GLUE_TASKS["mrpc"], _builder(tmp_path))
    assert sorted(asked) == [
        ("dl.fbaipublicfiles.com", 443),
        ("firebasestorage.googleapis.com", 443),
    ]


@pytest.mark.parametrize("proxy", ["http://proxy.example:3128", "proxy.example:3128"])
def test_behind_a_proxy_the_proxy_is_asked(proxy, tmp_path, monkeypatch):
    asked = []
    _answering(monkeypatch, asked)
    monkeypatch.setenv("https_proxy", proxy)
    monkeypatch.setenv("no_proxy", "firebasestorage.googleapis.com")
    glue_raw_files.check_obtainable(GLUE_TASKS["mrpc"], _builder(tmp_path))
    assert sorted(asked) == [("firebasestorage.googleapis.com", 443), ("proxy.example", 3128)]


def test_a_resolver_that_never_answers_is_not_waited_for(tmp_path, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(glue_raw_files, "CONNECT_TIMEOUT_S", 0.01)

    def hang(*_):
        released.wait(60)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", hang)
    try:
        with pytest.raises(FileNotFoundError, match=r"within 0\.01 s"):
            glue_raw_files.check_obtainable(GLUE_TASKS["mrpc"], _builder(tmp_path))
        assert not released.is_set()
    finally:
        released.set()


def test_a_tfds_that_registers_other_files_is_named_as_the_cause():
    builder = SimpleNamespace(url_infos={"u": SimpleNamespace(filename="new.zip")}, name="glue")
    builder.data_dir_root = "anywhere"
    with pytest.raises(FileNotFoundError, match=r"registers no file RTE\.zip.*new\.zip"):
        glue_raw_files.check_obtainable(GLUE_TASKS["rte"], builder)


def test_the_data_package_stands_alone_and_imports_neither_tfds_nor_tensorflow_text():
    package = Path(glue_raw_files.__file__).parents[1]
    # Without the parent package's own imports: the data package is a leaf, which needs none.
    code = f"""
import sys, types
parent = types.ModuleType("precision_bert")
parent.__path__ = [{str(package)!r}]
sys.modules["precision_bert"] = parent
import precision_bert.data
print(sorted(
    name for name in sys.modules
    if name in ("tensorflow_datasets", "tensorflow_text")
    or name.startswith("precision_bert.") and not name.startswith("precision_bert.data")
))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert result.stdout.strip() == "[]"
