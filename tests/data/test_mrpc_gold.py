from __future__ import annotations

import os
from pathlib import Path

import pytest

from precision_bert.data import load_glue, read_mrpc_gold

HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
ROWS = ("1\t11\t12\tIt rained.\tThere was rain.", "0\t13\t14\tHe came.\tShe left.")

RAW_FOLDER = os.environ.get("PRECISION_BERT_MRPC_DIR")
needs_mrpc = pytest.mark.skipif(
    not RAW_FOLDER,
    reason="PRECISION_BERT_MRPC_DIR names no folder with MRPC's three raw files",
)


def _write(folder: Path, *lines: str, encoding: str = "utf-8-sig", end: str = "\n") -> Path:
    path = folder / "gold.txt"
    path.write_bytes("".join(line + end for line in lines).encode(encoding))
    return path


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-8"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_reads_pairs_with_labels_in_file_order(tmp_path, encoding, end):
    gold = read_mrpc_gold(_write(tmp_path, HEADER, *ROWS, encoding=encoding, end=end))
    assert gold.texts[0].tolist() == ["It rained.", "He came."]
    assert gold.texts[1].tolist() == ["There was rain.", "She left."]
    assert gold.labels.tolist() == [1, 0] and gold.ids.tolist() == [0, 1]


def test_quotation_marks_are_text_also_where_unpaired(tmp_path):
    row = '1\t1\t2\t"Yes, he said.\tHe said ""yes" .'
    gold = read_mrpc_gold(str(_write(tmp_path, HEADER, row, ROWS[1])))
    assert gold.texts[0].tolist() == ['"Yes, he said.', "He came."]
    assert gold.texts[1].tolist() == ['He said ""yes" .', "She left."]


def test_columns_are_found_by_name_and_accents_survive(tmp_path):
    gold = read_mrpc_gold(
        _write(tmp_path, "#2 String\t#1 String\t#2 ID\t#1 ID\tQuality", "Zürich\tGenève\t2\t1\t0")
    )
    assert (gold.texts[0][0], gold.texts[1][0], gold.labels[0]) == ("Genève", "Zürich", 0)


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.txt.*msr_paraphrase_test\.txt"):
        read_mrpc_gold(tmp_path / "absent.txt")
    with pytest.raises(FileNotFoundError):
        read_mrpc_gold(tmp_path)  # a folder


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "line 1: the header must name .*Missing: Quality, #1 ID"),
        ((HEADER,), "holds a header but no pair"),
        ((HEADER.replace("Quality", "index"), *ROWS), "line 1: .*Missing: Quality. Received"),
        ((HEADER.replace("\t", ","), *ROWS), "separated by tabs. Missing: Quality"),
        ((HEADER, ROWS[0], ROWS[1].replace("0", "2", 1)), "line 3: Quality must be 0 or 1.*'2'"),
        ((HEADER, ROWS[0].replace("1", "-1", 1)), "line 2: Quality must be 0 or 1.*'-1'"),
        ((HEADER, ROWS[0].replace("1", "", 1)), "line 2: Quality must be 0 or 1.*''"),
        ((HEADER, ROWS[0], "1\t2\t3\tonly one"), "line 3: expected 5 fields.*Received: 4"),
        ((HEADER, ROWS[0] + "\tmore"), "line 2: expected 5 fields.*Received: 6"),
        ((HEADER, ROWS[0], "", ROWS[1]), "line 3: expected 5 fields.*Received: 0"),
        ((HEADER, "1\t2\t3\t \ttext"), "line 2: both sentences must hold text"),
    ],
)
def test_a_broken_file_is_reported_with_path_and_line(tmp_path, lines, message):
    path = _write(tmp_path, *lines)
    with pytest.raises(ValueError, match=message) as caught:
        read_mrpc_gold(path)
    assert str(path) in str(caught.value)


def test_another_encoding_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be UTF-8 text"):
        read_mrpc_gold(_write(tmp_path, HEADER, "1\t1\t2\tGenève\tB", encoding="latin-1"))


@needs_mrpc
def test_the_real_file_has_the_published_counts():
    gold = read_mrpc_gold(Path(RAW_FOLDER) / "msr_paraphrase_test.txt")
    assert gold.label_counts == {0: 578, 1: 1147}


@needs_mrpc
def test_the_real_sets_prepare_and_the_gold_sentences_are_those_of_tfds(tmp_path):
    import tensorflow_datasets as tfds

    manual = tmp_path / "downloads" / "manual"
    manual.mkdir(parents=True)
    for path in Path(RAW_FOLDER).glob("*.t*"):
        (manual / path.name).symlink_to(path)
    gold_file = manual / "msr_paraphrase_test.txt"
    mrpc = load_glue(
        "mrpc",
        data_dir=tmp_path,
        splits=("train", "validation", "test"),
        gold_test_file=gold_file,
    )
    assert list(mrpc) == ["train", "validation", "test"]
    assert mrpc["train"].label_counts == {0: 1194, 1: 2474}
    assert mrpc["validation"].label_counts == {0: 129, 1: 279}
    assert not set(mrpc["train"].ids) & set(mrpc["validation"].ids)

    rows = tfds.as_numpy(tfds.load("glue/mrpc", data_dir=str(tmp_path), split="test"))
    by_id = {int(row["idx"]): row for row in rows}
    gold = mrpc["test"]
    assert sorted(by_id) == gold.ids.tolist() and len(gold) == 1725
    assert {int(row["label"]) for row in by_id.values()} == {-1}
    for index, one, two in zip(gold.ids, *gold.texts, strict=True):
        row = by_id[int(index)]
        assert (row["sentence1"].decode(), row["sentence2"].decode()) == (one, two)
