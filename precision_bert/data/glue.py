"""Reads GLUE tasks through the stock tfds builder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from precision_bert.data.examples import TextExamples
from precision_bert.data.glue_raw_files import check_obtainable
from precision_bert.data.glue_tasks import GLUE_TASKS, GlueTask
from precision_bert.data.mrpc_gold import read_mrpc_gold

_SPLITS = ("train", "validation", "test")


def load_glue(
    task: str,
    *,
    data_dir: str | Path | None = None,
    splits: Sequence[str] = ("train", "validation"),
    gold_test_file: str | Path | None = None,
) -> dict[str, TextExamples]:
    """Reads a GLUE task, preparing it first where that has not been done.

    Use it for the real fine-tuning data. It reads through `tfds.builder("glue/<task>")`, so what
    was prepared by any other program is read as it is, and what is prepared here serves others.

    Args:
        task: A key of `GLUE_TASKS`: `"mrpc"`, `"rte"`, `"sst2"`, `"cola"`, `"qnli"`, `"stsb"` or
            `"wnli"`.
        data_dir: The tfds data folder, which must exist. None takes tfds' own default,
            `~/tensorflow_datasets` unless the environment variable `TFDS_DATA_DIR` says otherwise.
        splits: Which splits to read, of `"train"`, `"validation"` and `"test"`. `"test"` is no
            default, since GLUE keeps its test labels to itself.
        gold_test_file: Path of MRPC's `msr_paraphrase_test.txt`, which has the test labels; then,
            and only then, `"test"` can be among the splits. It is read by `read_mrpc_gold`.

    Returns:
        The splits in the order asked for, each with its examples in ascending order of tfds' `idx`,
        which are the `ids`. That is the order of the raw file and doesn't depend on how the
        prepared set is stored.

    Raises:
        ValueError: If the task or a split is unknown, labels of the test split are asked for where
            they are not public, or a label lies outside the task's classes.
        FileNotFoundError: If `data_dir` or `gold_test_file` doesn't exist, or the task has to be
            prepared and its raw files are neither on disk nor to be had over the network. That is
            found out within seconds, and the message says which files go where.

    Example:

    ```python
    mrpc = load_glue("mrpc", data_dir="data")
    mrpc["train"].majority_share  # 0.674...
    ```

    Without a network, put the raw files in `<data_dir>/downloads/manual/` under the names in
    `GLUE_TASKS[task].raw_files`; tfds checks their SHA-256 and refuses altered ones.
    """
    chosen = _checked_task(task)
    names = _checked_splits(splits)
    root = _checked_folder(data_dir)
    # Read before anything is prepared: a wrong path must not cost a download first.
    gold = _gold_test(chosen, names, gold_test_file)
    from_tfds = [name for name in names if name != "test"]
    builder = _prepared_builder(chosen, root) if from_tfds else None
    loaded = {name: _read_split(chosen, builder, name) for name in from_tfds}
    if gold is not None:
        loaded["test"] = gold
    return {name: loaded[name] for name in names}


def _checked_task(task: str) -> GlueTask:
    if not isinstance(task, str) or task not in GLUE_TASKS:
        raise ValueError(f"task must be one of {', '.join(GLUE_TASKS)}. Received: task={task!r}.")
    return GLUE_TASKS[task]


def _checked_splits(splits: Sequence[str]) -> tuple[str, ...]:
    if isinstance(splits, str):
        raise ValueError(
            f"splits must be a sequence of names, as in ({splits!r},). Received: splits={splits!r}."
        )
    names = tuple(splits)
    if not names or len(set(names)) != len(names) or not set(names) <= set(_SPLITS):
        raise ValueError(
            f"splits must hold at least one of {', '.join(_SPLITS)}, none twice. tfds' slices "
            "('train[:10%]') are not taken: slice the examples instead. "
            f"Received: splits={splits!r}."
        )
    return names


def _checked_folder(data_dir: str | Path | None) -> Path | None:
    if data_dir is None:
        return None
    root = Path(data_dir).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(
            "data_dir must be an existing folder, so that a mistyped path isn't taken for a new "
            f"place to download to. Received: data_dir={str(data_dir)!r}. To start one there, "
            f"create it: mkdir -p '{root}'. Raw files that you already have go in its folder "
            "downloads/manual/."
        )
    return root


def _gold_test(
    task: GlueTask, splits: tuple[str, ...], gold_test_file: str | Path | None
) -> TextExamples | None:
    if gold_test_file is not None and task.name != "mrpc":
        raise ValueError(
            "gold_test_file is for mrpc, the one task whose test labels are public. "
            f"Received: task={task.name!r}, gold_test_file={str(gold_test_file)!r}."
        )
    if gold_test_file is not None and "test" not in splits:
        raise ValueError(
            'gold_test_file is given, but "test" is not among the splits. Add it, or leave the '
            f"file out. Received: splits={splits!r}."
        )
    if gold_test_file is None and "test" in splits:
        way_out = (
            "Pass gold_test_file='.../msr_paraphrase_test.txt', which has MRPC's, or evaluate"
            if task.name == "mrpc"
            else "Evaluate"
        )
        raise ValueError(
            f"The labels of glue/{task.name}'s test split are -1 throughout in tfds: GLUE keeps "
            f"them to itself. {way_out} on the validation split, holding out part of train with "
            "TextExamples.split() for choosing settings. "
            f"Received: splits={splits!r}."
        )
    return None if gold_test_file is None else read_mrpc_gold(gold_test_file)


def _prepared_builder(task: GlueTask, root: Path | None) -> Any:
    # Here and not above: importing it takes a second, which those who bring their own text save.
    import tensorflow_datasets as tfds

    builder = tfds.builder(f"glue/{task.name}", data_dir=None if root is None else str(root))
    if not builder.is_prepared():
        check_obtainable(task, builder)
        builder.download_and_prepare()
    return builder


def _read_split(task: GlueTask, builder: Any, split: str) -> TextExamples:
    import tensorflow_datasets as tfds

    # In large batches: element by element, the largest task's 105,000 pairs take half a minute.
    dataset = builder.as_dataset(split=split, shuffle_files=False, batch_size=1024)
    batches = list(tfds.as_numpy(dataset))
    ids = np.concatenate([batch["idx"] for batch in batches])
    labels = np.concatenate([batch["label"] for batch in batches])
    if not task.is_regression:
        bad = np.flatnonzero((labels < 0) | (labels >= task.num_classes))
        if bad.size:
            raise ValueError(
                f"Labels of glue/{task.name} must lie in 0 to {task.num_classes - 1}. Received: "
                f"{int(labels[bad[0]])} in split {split!r}, idx {int(ids[bad[0]])}, and "
                f"{bad.size - 1} more such. Was the set prepared from altered files?"
            )
    order = np.argsort(ids, kind="stable")
    texts = tuple(
        np.array([text.decode("utf-8") for batch in batches for text in batch[field]], object)
        for field in task.text_fields
    )
    return TextExamples(tuple(text[order] for text in texts), labels[order], ids[order])
