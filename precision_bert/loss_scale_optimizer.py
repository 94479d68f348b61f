"""The optimizer that scales the loss in float16 stages."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import asdict
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from precision_bert.loss_scale import LossScaleRule, LossScaleState
from precision_bert.loss_scale_variables import (
    assign_by_name,
    assign_by_position,
    loss_scale_factors,
    own_variables,
)


@keras.saving.register_keras_serializable(package="precision_bert")
class DynamicLossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Scales the loss, skips steps whose gradients are not finite, and counts both.

    Use it like Keras' `LossScaleOptimizer`, which it extends; `staged_fit` and `switch_precision`
    put it on and take it off by themselves. With the default rule and within its bounds it computes
    what Keras' own computes, bit for bit. Under `tf.distribute` all replicas skip a step if the
    gradients of any are not finite; Keras' own looks at the first.

    Args:
        inner_optimizer: The optimizer that applies the unscaled gradients. Its own settings
            (clipping, weight decay, moving average, accumulation) act on unscaled gradients. Its
            `loss_scale_factor` is put aside until it is unwrapped.
        initial_scale: See `LossScaleRule`.
        dynamic_growth_steps: See `LossScaleRule`.
        min_scale: See `LossScaleRule`.
        max_scale: See `LossScaleRule`.
        name: The optimizer's name.
        rule: A whole `LossScaleRule` instead of the four values above: with other factors, with
            hysteresis or a tolerance, static.

    Raises:
        TypeError: If `inner_optimizer` is no optimizer, or already scales the loss: two scales
            multiply, and the outer one sees only what the inner one lets through.
        ValueError: If the rule's values are out of range, or given beside `rule`.

    Attributes:
        rule: The `LossScaleRule`.
        dynamic_scale: The current scale, a scalar float32 variable (once built).
        step_counter: Applied steps since the scale last moved, a scalar int variable (once built).
        skipped_steps: How many steps were skipped, a scalar int variable (once built).
        consecutive_skipped_steps: How many of them in a row, up to now (once built).

    Example:

    >>> optimizer = DynamicLossScaleOptimizer(keras.optimizers.Adam(1e-3))
    >>> optimizer.rule.initial_scale
    32768.0
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        name: str | None = None,
        *,
        rule: LossScaleRule | dict[str, Any] | None = None,
    ) -> None:
        if not isinstance(inner_optimizer, keras.optimizers.Optimizer):
            raise TypeError(
                "inner_optimizer must be a keras.optimizers.Optimizer. Received: "
                f"inner_optimizer={inner_optimizer!r} of type {type(inner_optimizer).__name__}."
            )
        if isinstance(inner_optimizer, keras.optimizers.LossScaleOptimizer):
            raise TypeError(
                "inner_optimizer already scales the loss; pass the optimizer inside it "
                f"(.inner_optimizer). Received: {type(inner_optimizer).__name__}."
            )
        given = LossScaleRule(initial_scale, dynamic_growth_steps, min_scale, max_scale)
        if isinstance(rule, dict):  # of get_config
            rule = LossScaleRule(**rule)
        if rule is not None and not isinstance(rule, LossScaleRule):
            raise TypeError(f"rule must be a LossScaleRule. Received: rule={rule!r}.")
        if rule is not None and given != LossScaleRule():
            raise ValueError(
                "Give either rule or initial_scale, dynamic_growth_steps, min_scale and "
                f"max_scale, which the rule holds. Received: rule={rule} and {given}."
            )
        rule = rule or given
        if inner_optimizer.loss_scale_factor is not None:
            loss_scale_factors[inner_optimizer] = inner_optimizer.loss_scale_factor
        super().__init__(inner_optimizer, rule.initial_scale, rule.dynamic_growth_steps, name=name)
        self.rule = rule
        self._has_scaled_a_loss = False
        self._graphs_that_scale: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def applied_steps(self) -> keras.Variable:
        """How many batches' gradients were applied, also before the loss was scaled."""
        return self.inner_optimizer._iterations  # `iterations` counts the updates

    def scale_loss(self, loss: Any) -> Any:
        """Returns `loss` times the current scale; a train step must take its gradients from it."""
        self._has_scaled_a_loss = True
        if (graph := _traced_graph()) is not None:
            self._graphs_that_scale.add(graph)
        return super().scale_loss(loss)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Applies the gradients, unscaled, or skips the step; see `keras.optimizers.Optimizer`.

        Warns where the step has not scaled its loss: its gradients are then divided by a scale that
        they do not carry. A traced step is judged by itself, so that one compiled later is judged
        anew; without tracing, any scaled loss before it counts.
        """
        graph = _traced_graph()
        scaled = self._has_scaled_a_loss if graph is None else graph in self._graphs_that_scale
        if not scaled and self.rule != LossScaleRule.no_op():
            warnings.warn(
                "Gradients are applied although optimizer.scale_loss was never called in this "
                f"train step, so they are too small by the loss scale ({self.initial_scale:.0f} at "
                "first). In a custom train_step, take the gradients of "
                "self.optimizer.scale_loss(loss).",
                RuntimeWarning,
                stacklevel=2,
            )
        super().apply(grads, trainable_variables)

    def check_finite(self, grads: Any) -> Any:
        """Tells whether all gradients are finite, on all replicas."""
        finite = super().check_finite(grads)
        replica = tf.distribute.get_replica_context()
        if replica is None or replica.num_replicas_in_sync == 1:
            return finite
        # Each replica has the gradients of its own part of the batch, before they are summed.
        bad = ops.cast(ops.logical_not(finite), "float32")
        return ops.equal(replica.all_reduce(tf.distribute.ReduceOp.SUM, bad), 0.0)

    def build(self, var_list: list[keras.Variable]) -> None:
        """Creates the scale, the counters, and the inner optimizer's state if it has none yet."""
        if self.built:
            return
        before = len(self._variables)
        self.step_counter = self._add_count("step_counter")
        self.dynamic_scale = self.add_variable(
            shape=(),
            dtype="float32",
            initializer=keras.initializers.Constant(self.initial_scale),
            name="dynamic_scale",
        )
        # Files know these by position: new ones come last.
        self.skipped_steps = self._add_count("skipped_steps")
        self.consecutive_skipped_steps = self._add_count("consecutive_skipped_steps")
        self._bad_since_growth = self._add_count("bad_since_growth")
        self._bad_since_move = self._add_count("bad_since_move")
        self._steps_since_move = self._add_count("steps_since_move")
        # Unlike Keras' build: an inner optimizer that has trained already keeps its state, also
        # one whose own build has no guard of its own.
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(var_list)
        keras.optimizers.Optimizer.build(self, var_list)
        own_variables[self.inner_optimizer] = self._variables[before:]

    def _add_count(self, name: str) -> keras.Variable:
        return self.add_variable(shape=(), dtype="int", initializer="zeros", name=name)

    # Keras gives no public hook for what happens after a finite or a non-finite step: these two
    # methods are the hooks that its `apply` calls, also under tf.distribute.
    def _stateful_handle_finite_grads(self, grads: Any, trainable_variables: Any) -> None:
        variables = trainable_variables or self._trainable_variables
        unscaled = [
            g if g is None or self._overwrite_variable_with_gradient(v) else g / self.dynamic_scale
            for g, v in zip(grads, variables, strict=True)
        ]
        self.inner_optimizer.apply(unscaled, trainable_variables=trainable_variables)
        self.consecutive_skipped_steps.assign(0)
        self._follow_rule(finite=True)

    def _stateful_handle_non_finite_grads(self) -> None:
        self.skipped_steps.assign_add(1)
        self.consecutive_skipped_steps.assign_add(1)
        self._follow_rule(finite=False)

    def _follow_rule(self, *, finite: bool) -> None:
        counts = self._bad_since_growth, self._bad_since_move, self._steps_since_move
        state = LossScaleState(self.dynamic_scale, self.step_counter, *counts)
        for variable, value in zip(state, self.rule.update(state, finite), strict=True):
            if value is not variable:  # what the rule does not go by
                variable.assign(value)

    def set_weights(self, weights: Any) -> None:
        """Sets all of `variables`, the inner optimizer's too, or none of them.

        Args:
            weights: The values of `variables`, or of an older layout's: with Keras' own loss scale,
                or with none, which leaves the scale as it is.

        Raises:
            ValueError: If the optimizer is not built, or if their number or a shape does not fit.
        """
        self._check_built()
        bounds = self.rule.min_scale, self.rule.max_scale
        assign_by_position(self._variables, self.inner_optimizer.variables, list(weights), bounds)

    def load_own_variables(self, store: Any) -> None:
        """Sets all variables from a store of Keras' or none; see `set_weights`.

        An optimizer that is not built yet is left as it is, with Keras' warning.
        """
        if self.built:
            self.set_weights([store[str(i)] for i in range(len(store.keys()))])
        else:
            super().load_own_variables(store)

    def assign_loss_scale(self, values: dict[str, Any]) -> None:
        """Sets the scale, its streak and the counts by the names of the variables, all or none.

        Args:
            values: At least `dynamic_scale` and `step_counter`; other counts begin at 0.

        Raises:
            ValueError: If the optimizer is not built, one is missing, or a value is no scalar.
        """
        self._check_built()
        assign_by_name(self._variables, values, (self.rule.min_scale, self.rule.max_scale))

    def _check_built(self) -> None:
        if not self.built:
            raise ValueError(
                f"The optimizer {self.name!r} is not built, so it has no variables to set. Call "
                "build(model.trainable_variables) first."
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that rebuild this optimizer (not its state)."""
        inner = super().get_config()["inner_optimizer"]
        if (factor := loss_scale_factors.get(self.inner_optimizer)) is not None:
            inner["config"]["loss_scale_factor"] = factor
        return {"name": self.name, "inner_optimizer": inner, "rule": asdict(self.rule)}


def _traced_graph() -> Any:
    """Returns the graph of the outermost function that is being traced; `None` if none is."""
    if not tf.inside_function():
        return None
    graph = tf.compat.v1.get_default_graph()
    while graph.outer_graph.building_function:
        graph = graph.outer_graph
    return graph
