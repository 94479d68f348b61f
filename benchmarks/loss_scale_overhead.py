"""What the counting loss scale costs: our optimizer and monitor against Keras' own loss scale.

    .venv/bin/python benchmarks/loss_scale_overhead.py --rounds=10

trains a small BERT in mixed_float16 twice side by side, an epoch of the one, then an epoch of the
other, in turns, so that whatever else the machine does falls on both. It prints the seconds of an
epoch and the ratio ours / Keras', each the median over the rounds. A first round, which traces, is
not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time

import keras
import numpy as np

import precision_bert as pb

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def small_bert(optimizer: keras.optimizers.Optimizer, arguments: argparse.Namespace) -> keras.Model:
    """Returns a compiled BERT without its text side, the same each time."""
    keras.utils.set_random_seed(0)
    config = pb.BertConfig(
        [*SPECIAL, *(f"w{i}" for i in range(995))],
        num_layers=arguments.layers,
        num_heads=4,
        hidden_dim=arguments.hidden_dim,
        intermediate_dim=4 * arguments.hidden_dim,
        max_sequence_length=arguments.length,
    )
    with pb.precision_scope("mixed_float16"):
        model = pb.bert_classifier(config, 2, sequence_length=arguments.length)
    model.preprocessor = None
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def token_batches(arguments: argparse.Namespace) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns random token ids and labels for one epoch."""
    random = np.random.RandomState(0)
    shape = (arguments.steps * arguments.batch_size, arguments.length)
    features = {
        "token_ids": random.randint(len(SPECIAL), 1000, shape).astype("int32"),
        "segment_ids": np.zeros(shape, "int32"),
        "padding_mask": np.ones(shape, "int32"),
    }
    return features, random.randint(0, 2, shape[:1])


def main() -> None:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in {
        "rounds": 10,
        "steps": 20,
        "layers": 2,
        "hidden_dim": 128,
        "length": 64,
        "batch_size": 16,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    features, labels = token_batches(arguments)
    inner = keras.optimizers.AdamW
    runs = {
        "keras": (small_bert(keras.optimizers.LossScaleOptimizer(inner(1e-4)), arguments), []),
        "ours": (
            small_bert(pb.DynamicLossScaleOptimizer(inner(1e-4)), arguments),
            [pb.LossScaleMonitor()],
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(arguments.rounds + 1):
        # Who goes first changes too: the second may find the caches warm.
        for name in list(runs) if round_ % 2 else list(runs)[::-1]:
            model, callbacks = runs[name]
            begin = time.perf_counter()
            model.fit(
                features, labels, batch_size=arguments.batch_size, callbacks=callbacks, verbose=0
            )
            if round_:
                seconds[name].append(time.perf_counter() - begin)
    ratios = [ours / keras_ for ours, keras_ in zip(seconds["ours"], seconds["keras"], strict=True)]
    for name, values in seconds.items():
        print(f"{name:>6}: {statistics.median(values):.4f} s an epoch of {arguments.steps} steps")
    low, high = min(ratios), max(ratios)
    print(f" ratio: {statistics.median(ratios):.4f} (from {low:.4f} to {high:.4f})")


if __name__ == "__main__":
    main()
