"""What `examples/mrpc.py` promises on the command line, run as users run it."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import precision_bert as pb

SCRIPT = Path(__file__).parents[1] / "examples" / "mrpc.py"


def run(*arguments, interpreter=()):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    return subprocess.run(
        [sys.executable, *interpreter, str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "demo"
    done = run(
        "--demo", "--epochs=2", "--switch_epoch=1", "--max_examples=512", f"--output_dir={folder}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_help_and_mistyped_flags_are_answered_without_importing_tensorflow():
    for arguments in (["--help"], ["--no_such_flag"], ["--output_dir=x", "--epochs=0"]):
        done = run(*arguments, interpreter=["-X", "importtime"])
        assert done.returncode != 0 or arguments == ["--help"]
        assert "absl" in done.stderr
        assert "tensorflow" not in done.stderr and "keras" not in done.stderr


def test_the_flags_offer_what_the_library_offers():
    text = run("--help").stdout
    assert f"--task: <{'|'.join(pb.GLUE_TASKS)}>" in text.replace("\n    ", " ")
    assert f"<{'|'.join(pb.policies.SWITCHABLE_POLICIES)}>" in text


def test_the_demo_prints_each_epochs_stage_and_what_it_did(demo):
    _, out = demo
    header = next(line for line in out.splitlines() if line.split()[:2] == ["epoch", "policy"])
    for column in (
        "loss",
        "val_accuracy",
        "val_f1",
        "loss_scale",
        "skipped_steps",
        "epoch_seconds",
    ):
        assert column in header
    rows = out[out.index(header) :].splitlines()[1:3]
    assert [row.split()[:2] for row in rows] == [["1", "mixed_float16"], ["2", "float32"]]
    assert "majority class: 0.657" in out
    assert "say nothing about BERT" in out


def test_the_run_folder_holds_flags_and_metrics(demo):
    folder, _ = demo
    assert json.loads((folder / "flags.json").read_text())["switch_epoch"] == 1
    metrics = json.loads((folder / "metrics.json").read_text())
    assert [s["policy"] for s in metrics["stages"]] == ["mixed_float16", "float32"]
    assert metrics["stages"][1]["applied_steps"] == 16
    assert metrics["versions"]["precision_bert"] == pb.__version__
    assert len(metrics["history"]["val_f1"]) == 2


def test_the_predictions_give_the_reported_scores(demo):
    folder, _ = demo
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    examples = pb.demo_pairs()["validation"]
    assert [int(r["id"]) for r in rows] == examples.ids.tolist()
    assert [int(r["label"]) for r in rows] == examples.labels.tolist()
    labels, predictions = (np.array([int(r[k]) for r in rows]) for k in ("label", "prediction"))
    scores = json.loads((folder / "metrics.json").read_text())["scores"]["validation"]
    assert scores["accuracy"] == (labels == predictions).mean()
    hits = ((labels == 1) & (predictions == 1)).sum()
    assert scores["f1"] == pytest.approx(2 * hits / (labels.sum() + predictions.sum()))
    assert scores["majority_baseline"]["accuracy"] == labels.mean()


def test_the_saved_model_is_float32_and_predicts_from_text_what_was_reported(demo):
    import precision_bert.bert

    folder, _ = demo
    model = keras.models.load_model(folder / "model.keras")
    assert type(model) is precision_bert.bert.BertClassifier
    assert set(pb.compute_dtypes(model).values()) == {"float32"}
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    reported = [[float(r["output_0"]), float(r["output_1"])] for r in rows]
    outputs = model.predict(tuple(pb.demo_pairs()["validation"].texts), verbose=0)
    np.testing.assert_allclose(outputs, reported, atol=1e-5)  # padded otherwise: not to the bit


def test_a_folder_that_holds_another_run_is_refused_and_left_alone(demo):
    folder, _ = demo
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    done = run("--demo", f"--output_dir={folder}")
    assert done.returncode != 0
    assert "holds another run (flags.json, metrics.json" in done.stderr
    assert "--resume" in done.stderr and "--overwrite" in done.stderr
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_finished_run_has_nothing_to_resume(demo):
    folder, _ = demo
    flags = ["--demo", "--epochs=2", "--switch_epoch=1", "--max_examples=512"]
    done = run(*flags, "--resume", f"--output_dir={folder}")
    assert done.returncode != 0
    assert "is complete; there is nothing to resume" in done.stderr


def test_a_finished_run_resumed_with_other_flags_is_refused(demo):
    folder, _ = demo
    done = run("--demo", "--epochs=3", "--resume", f"--output_dir={folder}")
    assert done.returncode != 0
    assert "was started with --epochs=2. Received --epochs=3" in done.stderr


def test_an_interrupted_run_goes_on_and_ends_with_the_same_predictions(demo, tmp_path):
    folder, _ = demo
    flags = ["--demo", "--epochs=2", "--switch_epoch=1", "--max_examples=512"]
    command = [sys.executable, "-u", str(SCRIPT), *flags, f"--output_dir={tmp_path}"]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        for line in process.stdout:
            if line.startswith("Epoch 2/2"):
                process.kill()
                break
    assert not (tmp_path / "metrics.json").exists()
    done = run(*flags, "--resume", f"--output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "Resuming after epoch 1/2." in done.stdout
    resumed, whole = (path / "predictions.csv" for path in (tmp_path, folder))
    assert resumed.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs=2", "--switch_epoch=3"], "--switch_epoch must be at most --epochs"),
        (["--switch_epoch=-1"], "flag --switch_epoch=-1"),
        (["--low_policy=float16"], "value should be one of <float32|mixed_float16|"),
        (["--task=mnli"], "value should be one of <mrpc|"),
        (["--batch_size=0"], "flag --batch_size=0"),
        (["--learning_rate=-1"], "flag --learning_rate=-1"),
        (["--learning_rate=0"], "--learning_rate must exceed 0"),
        (["--warmup=1"], "below 1"),
        (["--hold_out=1.0"], "above 0 and below 1"),
        (["--hold_out=0.1", "--demo"], "neither with --demo"),
        (["--gold_test_file=x", "--task=rte"], "goes with --task=mrpc only"),
        (["--overwrite", "--resume"], "exclude each other"),
        (["--resume", "--demo"], "--resume finds no run in"),
        (["surplus"], "unexpected arguments: ['surplus']"),
    ],
)
def test_a_bad_flag_is_named_at_once(arguments, message, tmp_path):
    done = run(*arguments, f"--output_dir={tmp_path / 'run'}")
    assert done.returncode != 0
    assert message in " ".join((done.stdout + done.stderr).split())
    assert not (tmp_path / "run").exists()


def test_output_dir_is_required():
    done = run("--demo")
    assert done.returncode != 0
    assert "--output_dir must have a value" in " ".join((done.stdout + done.stderr).split())


def test_a_data_folder_without_the_files_is_refused_before_any_download(tmp_path):
    (tmp_path / "data").mkdir()
    done = run(f"--data_dir={tmp_path / 'data'}", f"--output_dir={tmp_path / 'run'}")
    assert done.returncode != 0
    assert "msr_paraphrase_train.txt" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
