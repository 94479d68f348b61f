"""The table of GLUE tasks: fields, classes, metrics and raw files of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GlueTask:
    """What distinguishes one GLUE task from another, as plain data.

    Use `GLUE_TASKS["mrpc"]` and its like. Adding a task is adding a row to that table.

    Args:
        name: The task's name in tfds, `glue/<name>`.
        text_fields: Names of the one or two features that hold text, first sentence first.
        num_classes: Number of classes, so the width of the classifier's output; 1 means a
            regression, whose labels are float32.
        headline_metrics: What GLUE's leaderboard reports for the task, first metric first.
        raw_files: The files that tfds prepares the task from, by the names under which it looks for
            them in its folder of manual downloads.
        class_names: Of the labels 0, 1, ...; empty for a regression.
        note: A trap worth knowing, or "".

    Raises:
        ValueError: If the fields contradict each other.

    Example:

    >>> GLUE_TASKS["rte"].class_names
    ('entailment', 'not_entailment')
    """

    name: str
    text_fields: tuple[str, ...]
    num_classes: int
    headline_metrics: tuple[str, ...]
    raw_files: tuple[str, ...]
    class_names: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        if len(self.text_fields) not in (1, 2):
            raise ValueError(
                f"text_fields must name one or two fields. Received: {self.text_fields!r}."
            )
        if self.num_classes < 1:
            raise ValueError(
                "num_classes must be at least 1, which means a regression. "
                f"Received: num_classes={self.num_classes!r}."
            )
        if len(self.class_names) != (0 if self.is_regression else self.num_classes):
            raise ValueError(
                "class_names must name every class, and nothing for a regression. Received: "
                f"num_classes={self.num_classes}, class_names={self.class_names!r}."
            )

    @property
    def is_regression(self) -> bool:
        """Whether the labels are float32 targets, not classes."""
        return self.num_classes == 1


_PAIR = ("sentence1", "sentence2")

GLUE_TASKS: dict[str, GlueTask] = {
    task.name: task
    for task in (
        GlueTask(
            name="mrpc",
            text_fields=_PAIR,
            num_classes=2,
            headline_metrics=("f1", "accuracy"),
            raw_files=(
                "msr_paraphrase_train.txt",
                "msr_paraphrase_test.txt",
                "data_mrpc_dev_ids.tsv",
            ),
            class_names=("not_equivalent", "equivalent"),
            note="The test labels are public, but not in tfds: see load_glue's gold_test_file.",
        ),
        GlueTask(
            name="rte",
            text_fields=_PAIR,
            num_classes=2,
            headline_metrics=("accuracy",),
            raw_files=("RTE.zip",),
            class_names=("entailment", "not_entailment"),
            note="Class 0 is the positive one: entailment.",
        ),
        GlueTask(
            name="sst2",
            text_fields=("sentence",),
            num_classes=2,
            headline_metrics=("accuracy",),
            raw_files=("SST-2.zip",),
            class_names=("negative", "positive"),
        ),
        GlueTask(
            name="cola",
            text_fields=("sentence",),
            num_classes=2,
            headline_metrics=("matthews_correlation",),
            raw_files=("CoLA.zip",),
            class_names=("unacceptable", "acceptable"),
        ),
        GlueTask(
            name="qnli",
            text_fields=("question", "sentence"),
            num_classes=2,
            headline_metrics=("accuracy",),
            raw_files=("QNLIv2.zip",),
            class_names=("entailment", "not_entailment"),
            note="Class 0 is the positive one: the sentence answers the question.",
        ),
        GlueTask(
            name="stsb",
            text_fields=_PAIR,
            num_classes=1,
            headline_metrics=("pearson_correlation", "spearman_correlation"),
            raw_files=("STS-B.zip",),
            note="Labels are similarities from 0 to 5.",
        ),
        GlueTask(
            name="wnli",
            text_fields=_PAIR,
            num_classes=2,
            headline_metrics=("accuracy",),
            raw_files=("WNLI.zip",),
            class_names=("not_entailment", "entailment"),
            note=(
                "Validation pairs reuse training sentences with the opposite label, so a model "
                "that learns the training split scores below the majority class."
            ),
        ),
    )
}
