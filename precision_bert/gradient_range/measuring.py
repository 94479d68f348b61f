"""Measures how much of a model's gradients float16 can hold, before anything is lost."""

from __future__ import annotations

import math
import numbers
from collections import defaultdict
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from precision_bert.gradient_range.batches import batches_of
from precision_bert.gradient_range.float16_bins import Float16Bins, Tally
from precision_bert.gradient_range.gradient_step import (
    KINDS,
    GradientStep,
    Key,
    in_float32,
    left_as_it_was,
)
from precision_bert.gradient_range.record import GradientRange, LayerRange, scale_name
from precision_bert.islands import find_islands
from precision_bert.layer_policies import is_container, layer_paths, switchable_layers
from precision_bert.loss_scale import LossScaleRule
from precision_bert.loss_scaling import current_loss_scale, loss_scale_values
from precision_bert.switching import check_model


def gradient_range(
    model: keras.Model,
    data: Any,
    *,
    loss_scale: float | None = None,
    batches: int = 8,
    batch_size: int | None = None,
    max_lost_share: float = 0.01,
) -> GradientRange:
    """Counts what float16 would lose of a model's gradients, by layer.

    float16 holds magnitudes from 2**-24 to 65504, and those below 2**-14 with fewer bits. A loss
    scale moves the gradients into that range, all by the same factor. This tells at which scale
    least is lost, and which layers lose too much even then and had better stay in float32.

    The gradients are those of the model's loss for the next training step, regularization and
    sample weights included, taken in float32 whatever the model's policy is: with respect to
    trainable weights, and to the outputs of layers, which in half precision are rounded first.
    Nothing is trained, and the model is left as it was: weights, policies, optimizer, compiled
    functions, metrics, moving averages, seeds.

    Args:
        model: A built and compiled Keras model in any policy that `switch_precision` takes.
        data: What the model is trained with: arrays or tensors `x`, `(x, y)` or
            `(x, y, sample_weight)` (a list is an `x` of several inputs), a `tf.data.Dataset` or a
            `keras.utils.PyDataset`, with what the model itself takes: where its `fit` encodes text,
            encode it first. Reading from a shuffled data set moves its shuffling on.
        loss_scale: The scale to count at; rounded to float32. Default: the one that the optimizer
            has or has put aside, otherwise the one that `DynamicLossScaleOptimizer` begins with.
        batches: How many batches to read at most.
        batch_size: Examples a batch for arrays, 32 by default, as in `fit`. The mean of a loss is
            over the batch, so what reaches a layer's outputs depends on it.
        max_lost_share: What a layer may lose of its entries, at the best scale for the whole model,
            before it is proposed for `keep_float32`; 0 to 1.

    Returns:
        A `GradientRange`: print it for a table, `plot()` it, give its `keep_float32` to
        `switch_precision`.

    Raises:
        TypeError: If `model` is no Keras model, or an argument is of a wrong kind.
        ValueError: If the model is not compiled or not built, has nothing to train, or cannot
            compute in float32 as it is (the message names the layer); if there is no data, or a
            number is out of range.

    Example:

    >>> keras.utils.set_random_seed(0)
    >>> head = keras.layers.Dense(1, name="head")
    >>> model = keras.Sequential([keras.Input((4,)), head], name="net")
    >>> model.compile("sgd", "mse")
    >>> report = gradient_range(model, (np.ones((8, 4)), np.full((8, 1), 1e-6)), loss_scale=1)
    >>> report.total.entries, report.total.underflow, report.keep_float32
    (13, 0, ())

    Not seen are outputs within loops (cells of an RNN), `tf.function`s and rematerialized layers,
    and what a layer computes between its input and its output. A loss that a custom `train_step`
    adds by itself is not counted. Under `tf.distribute` the whole batch runs on one device.

    See Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2 and figure 3, for
    such a histogram and why the loss is scaled.
    """
    check_model(model)
    _check_numbers(batches, batch_size, max_lost_share)
    if not model.compiled:
        raise ValueError(
            f"Model {model.name!r} is not compiled, so it has no loss to take gradients of. Call "
            "model.compile(optimizer, loss) first."
        )
    if not model.built:
        raise ValueError(f"Model {model.name!r} is not built. Call it on one batch first.")
    if not model.trainable_weights:
        raise ValueError(f"Model {model.name!r} has no trainable weights, so no gradients.")
    scale, source = _present_scale(model.optimizer, loss_scale)
    bins = Float16Bins(scale)
    paths = layer_paths(model)
    islands = find_islands(switchable_layers(model))
    tallies: dict[Key, Tally] = defaultdict(lambda: Tally(bins))
    num_read = 0
    with left_as_it_was(model, paths), in_float32(model):
        step = GradientStep(model, paths, bins.edges)
        run = (
            step if model.run_eagerly else tf.function(step, reduce_retracing=True, autograph=False)
        )
        for batch in batches_of(data, batch_size, batches):
            for key, (counts, extremes) in run(batch).items():
                tallies[key].add(counts.numpy(), *extremes.numpy())
            num_read += 1
    if num_read == 0:
        raise ValueError(f"data must hold a batch. Received: empty {type(data).__name__}.")
    return _report(
        model,
        tallies,
        bins,
        {path: layer for layer, path in paths.items()},
        islands,
        batches=num_read,
        scale_source=source,
        max_lost_share=max_lost_share,
        notes=step.notes(),
    )


def _report(
    model: keras.Model,
    tallies: dict[Key, Tally],
    bins: Float16Bins,
    layers: dict[str, keras.Layer],
    islands: set[keras.Layer],
    *,
    batches: int,
    scale_source: str,
    max_lost_share: float,
    notes: list[str],
) -> GradientRange:
    by_layer = {}
    for path in layers:
        parts = {kind: tallies[path, kind] for kind in KINDS if (path, kind) in tallies}
        if parts:
            by_layer[path] = sum(parts.values(), Tally(bins)), parts
    followers = {path: both for path, (both, _) in by_layer.items() if layers[path] not in islands}
    total = sum(followers.values(), Tally(bins)).counted()
    best = total.best_scale
    records, kept = [], []
    for path, (both, parts) in by_layer.items():
        counts = both.counted()
        underflow, overflow = (0, 0) if best is None else both.lost_at(best)
        lost_share = counts.share(underflow + overflow)
        # A container cannot be kept without all that is in it.
        if path in followers and not is_container(layers[path]):
            kept += [path] if overflow or lost_share > max_lost_share else []
        records.append(
            LayerRange(
                path,
                type(layers[path]).__name__,
                layers[path] in islands,
                counts,
                weights=parts["weights"].counted() if "weights" in parts else None,
                outputs=parts["outputs"].counted() if "outputs" in parts else None,
                lost_share=lost_share,
            )
        )
    infinite = [record.path for record in records if record.both.non_finite]
    if infinite:
        notes = [f"not finite in float32 already: gradients of {', '.join(infinite)}", *notes]
    rule = LossScaleRule()
    if best is not None and not rule.min_scale <= best <= rule.max_scale:
        notes = [
            *notes,
            f"the best scale, {scale_name(best)}, is out of the bounds that "
            "DynamicLossScaleOptimizer has by default, "
            f"{scale_name(rule.min_scale)} to {scale_name(rule.max_scale)}",
        ]
    if type(model).train_step is not keras.Model.train_step:
        notes = [*notes, "the model has a train_step of its own: what that adds is not counted"]
    return GradientRange(
        model=model.name,
        batches=batches,
        loss_scale=bins.loss_scale,
        scale_source=scale_source,
        total=total,
        layers=tuple(records),
        max_lost_share=max_lost_share,
        keep_float32=tuple(kept),
        notes=tuple(notes),
    )


def _present_scale(optimizer: Any, given: float | None) -> tuple[float, str]:
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, numbers.Real):
            raise TypeError(f"loss_scale must be a float. Received: loss_scale={given!r}.")
        with np.errstate(over="ignore"):
            scale = float(np.float32(given))
        if not 0 < scale < math.inf:
            raise ValueError(
                "loss_scale must be finite and positive, in float32 too. Received: "
                f"loss_scale={given!r}."
            )
        return scale, "as given"
    if isinstance(optimizer, keras.optimizers.Optimizer):
        present = current_loss_scale(optimizer)
        if present is not None:
            return present, "the optimizer's"
        put_aside = loss_scale_values(optimizer).get("dynamic_scale")
        if put_aside is not None:
            return float(put_aside), "the one that the optimizer has put aside"
    return LossScaleRule().initial_scale, "the one that DynamicLossScaleOptimizer begins with"


def _check_numbers(batches: Any, batch_size: Any, max_lost_share: Any) -> None:
    for name, value in (("batches", batches), ("batch_size", batch_size)):
        if value is None and name == "batch_size":
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
            raise ValueError(f"{name} must be an int of at least 1. Received: {name}={value!r}.")
    if isinstance(max_lost_share, bool) or not isinstance(max_lost_share, numbers.Real):
        raise TypeError(
            f"max_lost_share must be a float. Received: max_lost_share={max_lost_share!r}."
        )
    if not 0 <= float(max_lost_share) <= 1:
        raise ValueError(
            "max_lost_share must be a share, from 0 to 1. Received: "
            f"max_lost_share={max_lost_share!r}."
        )
