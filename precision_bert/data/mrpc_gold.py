"""The gold labels of MRPC's test split, which GLUE's copy does not carry."""

from __future__ import annotations

import csv
from pathlib import Path

from precision_bert.data.examples import TextExamples

_COLUMNS = ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")


def read_mrpc_gold(path: str | Path) -> TextExamples:
    r"""Reads MRPC's test split with its labels from `msr_paraphrase_test.txt`.

    Use it to evaluate on the split that papers from before GLUE report: in tfds' `glue/mrpc` every
    test label is -1. The file is one of the three that tfds downloads or takes from its folder of
    manual downloads; `load_glue("mrpc", gold_test_file=...)` calls this.

    Args:
        path: A file of tab-separated UTF-8 text, with or without byte order mark, whose first line
            names the columns `Quality`, `#1 ID`, `#2 ID`, `#1 String`, `#2 String`.

    Returns:
        The pairs in the order of the file: 1725 in the published one, 1147 of them paraphrases
        (label 1). Their ids count the rows from 0, as tfds' `idx` does.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not UTF-8, lacks a column, holds no pair, or a row has another number
            of fields than the header, no text, or a `Quality` that is neither 0 nor 1. The message
            gives the path and the line, counted from 1.

    Example:

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "gold.txt")
    >>> with open(path, "w", encoding="utf-8") as file:
    ...     _ = file.write("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n")
    ...     _ = file.write("1\t7\t8\tIt rained.\tThere was rain.\n")
    >>> read_mrpc_gold(path)
    TextExamples(n=1, texts=2, labels={1: 1})

    Quotation marks in the file are text and often unpaired. A reader that takes them for CSV
    quoting joins rows and loses pairs; this one does not.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"No file {str(path)!r}. Expected MRPC's msr_paraphrase_test.txt, which tfds keeps in "
            "<data_dir>/downloads/manual/ if it was put there by hand."
        )
    first, second, labels = [], [], []
    # utf-8-sig: the published file begins with a byte order mark, which would become part of the
    # first column's name. newline="" leaves line ends to the csv module, as its manual asks.
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        try:
            header = next(rows, [])
            missing = [column for column in _COLUMNS if column not in header]
            if missing:
                raise ValueError(
                    f"{path}, line 1: the header must name the columns {', '.join(_COLUMNS)}, "
                    f"separated by tabs. Missing: {', '.join(missing)}. Received: {header!r}."
                )
            quality, one, two = (
                header.index(column) for column in ("Quality", "#1 String", "#2 String")
            )
            for row in rows:
                where = f"{path}, line {rows.line_num}"
                if len(row) != len(header):
                    raise ValueError(
                        f"{where}: expected {len(header)} fields separated by tabs, as in the "
                        f"header. Received: {len(row)}. Is the file complete and unchanged?"
                    )
                if row[quality] not in ("0", "1"):
                    raise ValueError(
                        f"{where}: Quality must be 0 or 1. Received: {row[quality]!r}. GLUE's own "
                        "test file has no such column; take msr_paraphrase_test.txt."
                    )
                if not (row[one].strip() and row[two].strip()):
                    raise ValueError(f"{where}: both sentences must hold text. Received: {row!r}.")
                labels.append(int(row[quality]))
                first.append(row[one])
                second.append(row[two])
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} must be UTF-8 text. Received: {error}.") from error
    if not labels:
        raise ValueError(f"{path} holds a header but no pair. Is the file complete?")
    return TextExamples((first, second), labels)
