"""The optimizer that scales the loss in float16 stages."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import keras

from precision_bert.loss_scale import LossScaleRule

# The variables of loss-scale optimizers, by the inner optimizer they last belonged to: a `compile`
# with that inner optimizer throws the wrapper away, and its scale with it. Variables hold no
# reference to the optimizer, so an entry lives as long as the inner optimizer does.
own_variables: weakref.WeakKeyDictionary[keras.optimizers.Optimizer, list[keras.Variable]] = (
    weakref.WeakKeyDictionary()
)


@keras.saving.register_keras_serializable(package="precision_bert")
class DynamicLossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Scales the loss, skips steps whose gradients are not finite, and counts both.

    Use it like Keras' `LossScaleOptimizer`, which it extends; `staged_fit` and `switch_precision`
    put it on and take it off by themselves. While the scale stays within its bounds it computes
    what Keras' own computes, bit for bit. It adds the bounds of `LossScaleRule`, and counts.

    Args:
        inner_optimizer: The optimizer that applies the unscaled gradients. Its own settings
            (clipping, weight decay, moving average, accumulation) act on unscaled gradients.
        initial_scale: See `LossScaleRule`.
        dynamic_growth_steps: See `LossScaleRule`.
        min_scale: See `LossScaleRule`.
        max_scale: See `LossScaleRule`.
        name: The optimizer's name.

    Raises:
        TypeError: If `inner_optimizer` is no optimizer, or already scales the loss: two scales in a
            row multiply, and the outer one sees only what the inner one lets through.
        ValueError: If the rule's values are out of range.

    Attributes:
        dynamic_scale: The current scale, a scalar float32 variable (once built).
        step_counter: Applied steps since the scale last moved, a scalar int variable (once built).
        skipped_steps: How many steps were skipped, a scalar int variable (once built).

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
        rule = LossScaleRule(initial_scale, dynamic_growth_steps, min_scale, max_scale)
        super().__init__(inner_optimizer, initial_scale, dynamic_growth_steps, name=name)
        self.rule = rule
        self._has_scaled_a_loss = False

    def scale_loss(self, loss: Any) -> Any:
        """Returns `loss` times the current scale; a train step must take its gradients from it."""
        self._has_scaled_a_loss = True
        return super().scale_loss(loss)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Applies the gradients, unscaled, or skips the step; see `keras.optimizers.Optimizer`.

        Warns where no loss was ever scaled: the gradients are then divided by a scale that they do
        not carry, and next to nothing is learnt.
        """
        if not self._has_scaled_a_loss:
            warnings.warn(
                "Gradients are applied although optimizer.scale_loss was never called, so they are "
                f"too small by the loss scale ({self.initial_scale:.0f} at first). In a custom "
                "train_step, take the gradients of self.optimizer.scale_loss(loss).",
                RuntimeWarning,
                stacklevel=2,
            )
        super().apply(grads, trainable_variables)

    def build(self, var_list: list[keras.Variable]) -> None:
        """Creates the scale, the counters, and the inner optimizer's state if it has none yet."""
        if self.built:
            return
        self.step_counter = self.add_variable(
            shape=(), dtype="int", initializer="zeros", name="step_counter"
        )
        self.dynamic_scale = self.add_variable(
            shape=(),
            dtype="float32",
            initializer=keras.initializers.Constant(self.initial_scale),
            name="dynamic_scale",
        )
        self.skipped_steps = self.add_variable(
            shape=(), dtype="int", initializer="zeros", name="skipped_steps"
        )
        # Unlike Keras' build: an inner optimizer that has trained already keeps its state, also
        # one whose own build has no guard of its own.
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(var_list)
        keras.optimizers.Optimizer.build(self, var_list)
        own_variables[self.inner_optimizer] = [
            self.step_counter,
            self.dynamic_scale,
            self.skipped_steps,
        ]

    # Keras gives no public hook for what happens after a finite or a non-finite step: these two
    # methods are the hooks that its `apply` calls, also under tf.distribute.
    def _stateful_handle_finite_grads(self, grads: Any, trainable_variables: Any) -> None:
        variables = trainable_variables or self._trainable_variables
        unscaled = [
            g if g is None or self._overwrite_variable_with_gradient(v) else g / self.dynamic_scale
            for g, v in zip(grads, variables, strict=True)
        ]
        self.inner_optimizer.apply(unscaled, trainable_variables=trainable_variables)
        self._follow_rule(finite=True)

    def _stateful_handle_non_finite_grads(self) -> None:
        self.skipped_steps.assign_add(1)
        self._follow_rule(finite=False)

    def _follow_rule(self, *, finite: bool) -> None:
        scale, streak = self.rule.next(self.dynamic_scale, self.step_counter, finite)
        self.dynamic_scale.assign(scale)
        self.step_counter.assign(streak)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that rebuild this optimizer (not its state)."""
        config = super().get_config()
        config.update(min_scale=self.rule.min_scale, max_scale=self.rule.max_scale)
        return config
