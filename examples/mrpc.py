"""Fine-tunes a BERT on MRPC (or another GLUE task) in two precision stages.

The first epochs run in --low_policy, the last ones, from --switch_epoch on, in --high_policy:

    python examples/mrpc.py --demo --output_dir=runs/demo
    python examples/mrpc.py --preset=bert_base_en_uncased --output_dir=runs/mrpc
    python examples/mrpc.py --preset=/models/my-bert --data_dir=data --output_dir=runs/mine

The folder --output_dir gets the flags, the metrics, the prediction for each example, and the model.
A run that was interrupted goes on with --resume.
"""

import csv
import json
import os
import pathlib
import shutil
import sys

from absl import app, flags, logging

# Nothing that imports TensorFlow stands above main(): --help has to answer at once, and a mistyped
# flag must not cost the seconds that the import takes.

_TASKS = ["mrpc", "rte", "sst2", "cola", "qnli", "stsb", "wnli"]
_POLICIES = ["float32", "mixed_float16", "mixed_bfloat16"]
_RUN_FILES = ("flags.json", "checkpoints", "metrics.json", "predictions.csv", "model.keras")

FLAGS = flags.FLAGS

flags.DEFINE_boolean(
    "demo", False, "Train a tiny BERT from scratch on the built-in demo pairs instead of --task."
)
flags.DEFINE_enum("task", "mrpc", _TASKS, "The GLUE task.")
flags.DEFINE_string(
    "preset",
    "bert_base_en_uncased",
    "A keras_nlp preset name, or a folder in Keras or Hugging Face layout. Not used by --demo.",
)
flags.DEFINE_enum("pooling", "cls", ["cls", "mean"], "How a sentence (pair) becomes one vector.")
flags.DEFINE_enum("low_policy", "mixed_float16", _POLICIES, "Precision of the first stage.")
flags.DEFINE_enum("high_policy", "float32", _POLICIES, "Precision of the second stage.")
flags.DEFINE_integer("epochs", 4, "Epochs of the whole training.", lower_bound=1)
flags.DEFINE_integer(
    "switch_epoch",
    3,
    "The epoch to switch before, counted from 0: that many epochs run in --low_policy.",
    lower_bound=0,
)
flags.DEFINE_integer("batch_size", 32, "Examples in a training step.", lower_bound=1)
flags.DEFINE_integer(
    "sequence_length", 128, "Longest input, in wordpieces; what is longer is cut.", lower_bound=3
)
flags.DEFINE_boolean(
    "bucket_by_length", True, "Batch examples of like length, so that less padding is computed."
)
flags.DEFINE_float(
    "learning_rate",
    None,
    "Peak learning rate: warmed up linearly, then decayed linearly to 0 over the whole training. "
    "Default 3e-5; with --demo 1e-3.",
    lower_bound=0.0,
)
flags.DEFINE_float(
    "high_learning_rate",
    None,
    "A constant learning rate for the second stage. Default: the decay goes on over the switch.",
    lower_bound=0.0,
)
flags.DEFINE_float("warmup", 0.1, "Share of the steps that warm up.", 0.0, 1.0)
flags.DEFINE_integer("seed", 0, "Of weights, dropout, shuffling and --hold_out.", lower_bound=0)
flags.DEFINE_string("data_dir", None, "The tfds data folder. Default: tfds' own.")
flags.DEFINE_string(
    "gold_test_file",
    None,
    "MRPC's msr_paraphrase_test.txt: score its test split too. (tfds has it without labels.)",
)
flags.DEFINE_float(
    "hold_out",
    None,
    "Hold this share of the training split out and score on it instead of the validation split: "
    "choose settings on it, so that the validation figures stay honest.",
    0.0,
    1.0,
)
flags.DEFINE_integer(
    "max_examples", None, "Train on this many examples at most, for a quick try.", lower_bound=1
)
flags.DEFINE_string("output_dir", None, "Folder for the run's files.", required=True)
flags.DEFINE_boolean("overwrite", False, "Replace the run that --output_dir holds.")
flags.DEFINE_boolean(
    "resume",
    False,
    "Go on with the run that --output_dir holds, after the last epoch that it saved. All other "
    "flags must be those that it was started with.",
)

flags.register_multi_flags_validator(
    ["epochs", "switch_epoch"],
    lambda values: values["switch_epoch"] <= values["epochs"],
    message="--switch_epoch must be at most --epochs",
)
flags.register_multi_flags_validator(
    ["overwrite", "resume"],
    lambda values: not (values["overwrite"] and values["resume"]),
    message="--overwrite and --resume exclude each other",
)
flags.register_validator(
    "learning_rate", lambda rate: rate is None or rate > 0, message="--learning_rate must exceed 0"
)
flags.register_validator(
    "warmup", lambda share: share < 1, message="--warmup is a share of the steps, below 1"
)
flags.register_validator(
    "hold_out",
    lambda share: share is None or 0 < share < 1,
    message="--hold_out is a share of the training split, above 0 and below 1",
)
flags.register_multi_flags_validator(
    ["hold_out", "gold_test_file", "demo"],
    lambda v: v["hold_out"] is None or (v["gold_test_file"] is None and not v["demo"]),
    message="--hold_out goes neither with --demo nor with --gold_test_file",
)
flags.register_multi_flags_validator(
    ["gold_test_file", "task", "demo"],
    lambda v: v["gold_test_file"] is None or (v["task"] == "mrpc" and not v["demo"]),
    message="--gold_test_file goes with --task=mrpc only",
)


def main(argv):
    """Checks, trains, scores, writes."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    output_dir = pathlib.Path(FLAGS.output_dir)
    check_output_dir(output_dir)

    print("Loading TensorFlow ...", flush=True)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import keras

    import precision_bert as pb

    if not FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # tfds tells of each file that it opens
    keras.utils.set_random_seed(FLAGS.seed)
    try:
        splits = load_splits(pb)
        model = build_model(pb)
    except (OSError, ValueError) as error:  # a missing file, an unknown preset: no traceback needed
        sys.exit(f"mrpc.py: {error}")
    batches = {
        name: pb.encode_batches(
            examples,
            model.preprocessor,
            batch_size=FLAGS.batch_size,
            bucket_by_length=FLAGS.bucket_by_length,
            shuffle=name == "train",
            seed=FLAGS.seed,
            first_epoch=pb.completed_epochs(output_dir / "checkpoints") if FLAGS.resume else 0,
        )
        for name, examples in splits.items()
    }
    scored = [name for name in splits if name != "train"]
    describe(model, splits)

    pb.compile_classifier(
        model,
        num_steps=len(batches["train"]) * FLAGS.epochs,
        learning_rate=FLAGS.learning_rate or (1e-3 if FLAGS.demo else 3e-5),
        warmup=FLAGS.warmup,
    )
    # From here on the folder holds this run, also if it is interrupted.
    if FLAGS.overwrite:
        remove_run(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    write_json(output_dir / "flags.json", own_flags())

    record = pb.two_stage_fit(
        model,
        batches["train"],
        validation_data=batches[scored[0]],
        epochs=FLAGS.epochs,
        switch_epoch=FLAGS.switch_epoch,
        low=FLAGS.low_policy,
        high=FLAGS.high_policy,
        high_learning_rate=FLAGS.high_learning_rate,
        checkpoint_dir=output_dir / "checkpoints",
        resume=FLAGS.resume,
        verbose=1 if sys.stdout.isatty() else 2,
    )

    # Scored in float32 whatever the last stage was, so that runs can be compared.
    pb.switch_precision(model, "float32")
    outputs = {name: model.predict(batches[name], verbose=0) for name in scored}
    scores = {name: score(pb, splits[name], outputs[name]) for name in scored}

    write_predictions(output_dir / "predictions.csv", splits, outputs)
    model.save(output_dir / "model.keras")
    versions = {"precision_bert": pb.__version__, "keras": keras.__version__}
    write_json(
        output_dir / "metrics.json", {"scores": scores, **record.to_dict(), "versions": versions}
    )
    shutil.rmtree(output_dir / "checkpoints")  # the run is whole: nothing is left to resume
    report(record, scores, output_dir)


def check_output_dir(folder):
    """Refuses a folder that holds another run, unless a flag says what to do with it."""
    present = [name for name in _RUN_FILES if (folder / name).exists()]
    if FLAGS.resume:
        check_same_flags(folder / "flags.json")
        if "metrics.json" in present:
            sys.exit(f"mrpc.py: the run in {folder} is complete; there is nothing to resume.")
    elif present and not FLAGS.overwrite:
        sys.exit(
            f"mrpc.py: --output_dir={folder} holds another run ({', '.join(present)}). Give "
            "another folder, --resume to go on with that run, or --overwrite to replace it."
        )


def check_same_flags(path):
    """Refuses to resume a run that is not there, or one that was started with other flags."""
    if not path.exists():
        sys.exit(f"mrpc.py: --resume finds no run in {path.parent}: there is no {path.name}.")
    saved, given = json.loads(path.read_text()), own_flags()
    for name in sorted(given.keys() - {"resume", "overwrite", "output_dir", "data_dir"}):
        if saved.get(name) != given[name]:
            sys.exit(
                f"mrpc.py: the run in {path.parent} was started with --{name}={saved.get(name)}. "
                f"Received --{name}={given[name]}. Resume it with the flags it was started with."
            )


def remove_run(folder):
    """Removes the files of a run, and nothing else that lies in the folder."""
    for name in _RUN_FILES:
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


def load_splits(pb):
    """Returns the examples by split: train, then the splits to score, in the order of scoring."""
    splits = load_demo_or_glue(pb)
    if FLAGS.max_examples is not None:
        splits["train"] = splits["train"][: FLAGS.max_examples]
    return splits


def load_demo_or_glue(pb):
    """Returns the whole splits; with --hold_out, a part of train in place of validation."""
    if FLAGS.demo:
        return pb.demo_pairs()
    names = ("train", "validation", *(["test"] if FLAGS.gold_test_file else []))
    splits = pb.load_glue(
        FLAGS.task, data_dir=FLAGS.data_dir, splits=names, gold_test_file=FLAGS.gold_test_file
    )
    if FLAGS.hold_out is None:
        return splits
    # The same examples whatever --seed is: seeds are to be compared on one held-out set.
    kept, held_out = splits["train"].split(FLAGS.hold_out, seed=0)
    return {"train": kept, "held_out": held_out}


def build_model(pb):
    """Returns an uncompiled classifier, built in float32; the stages set the precision."""
    if not FLAGS.demo:
        return pb.bert_classifier(
            FLAGS.preset,
            num_classes=pb.GLUE_TASKS[FLAGS.task].num_classes,
            pooling=FLAGS.pooling,
            sequence_length=FLAGS.sequence_length,
        )
    tiny = pb.BertConfig(
        pb.demo_vocabulary(), num_layers=2, num_heads=4, hidden_dim=128, intermediate_dim=256
    )
    return pb.bert_classifier(
        tiny, num_classes=2, pooling=FLAGS.pooling, sequence_length=FLAGS.sequence_length
    )


def describe(model, splits):
    """Prints what will be trained on what."""
    data = "the built-in demo pairs" if FLAGS.demo else f"glue/{FLAGS.task}"
    sizes = ", ".join(f"{len(examples)} {name}" for name, examples in splits.items())
    print(f"Training {model.count_params():,} parameters on {data} ({sizes} examples).")


def score(pb, examples, outputs):
    """Returns GLUE's scores, and those of always answering the most frequent class."""
    if examples.is_regression:
        return pb.glue_scores(pb.GLUE_TASKS[FLAGS.task].headline_metrics, examples.labels, outputs)
    names = ["accuracy", "f1"]
    if not FLAGS.demo:
        names = list(dict.fromkeys([*names, *pb.GLUE_TASKS[FLAGS.task].headline_metrics]))
    scores = pb.glue_scores(names, examples.labels, outputs)
    majority = max(examples.label_counts, key=examples.label_counts.get)
    constant = [[float(column == majority) for column in range(outputs.shape[1])]] * len(examples)
    baseline = pb.glue_scores(names, examples.labels, constant)
    return {**scores, "majority_baseline": baseline, "examples": len(examples)}


def write_predictions(path, splits, outputs):
    """Writes a row for each scored example: split, id, label, prediction, then its outputs."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        width = next(iter(outputs.values())).shape[1]
        writer.writerow(
            ["split", "id", "label", "prediction", *[f"output_{i}" for i in range(width)]]
        )
        for name, rows in outputs.items():
            for id_, label, row in zip(splits[name].ids, splits[name].labels, rows, strict=True):
                prediction = row[0] if width == 1 else row.argmax()
                writer.writerow([name, id_, label, prediction, *row])


def write_json(path, content):
    """Writes whole or not at all: an interruption never leaves half a file."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    partial.replace(path)


def own_flags():
    """Returns this script's flags by name."""
    return {flag.name: flag.value for flag in FLAGS.get_flags_for_module(sys.modules[__name__])}


def report(record, scores, output_dir):
    """Prints a row for each epoch, a row for each stage, and the scores."""
    columns = ["epoch", "policy", "loss", "val_loss", "val_accuracy", "val_f1", "val_rmse"]
    columns += ["loss_scale", "skipped_steps", "epoch_seconds"]
    columns = [c for c in columns if c in record.history or c in ("epoch", "policy")]
    rows = [columns]
    for position, epoch in enumerate(record.epoch):
        cells = [str(epoch + 1), record.policy_at(epoch)]
        # Five digits show a loss scale of 32768 whole.
        cells += [f"{record.history[column][position]:.5g}" for column in columns[2:]]
        rows.append(cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(f"\n{record}\n")
    for name, values in scores.items():
        for metric, value in values.items():
            if isinstance(value, float):
                baseline = values.get("majority_baseline", {}).get(metric)
                beside = "" if baseline is None else f"  (majority class: {baseline:.3f})"
                print(f"{name} {metric}: {value:.3f}{beside}")
    if FLAGS.demo:
        print("This was a demo on generated text: its figures say nothing about BERT or precision.")
    written = ", ".join(sorted(path.name for path in output_dir.iterdir()))
    print(f"\nWritten to {output_dir}: {written}. To load the float32 model:")
    print(
        "    import keras, precision_bert.bert\n"
        f"    model = keras.models.load_model({str(output_dir / 'model.keras')!r})\n"
        '    model.predict((["first sentence"], ["second sentence"]))'
    )


if __name__ == "__main__":
    app.run(main)
