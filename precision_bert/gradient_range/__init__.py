"""What float16 can hold of a model's gradients, by layer."""

from precision_bert.gradient_range.measuring import gradient_range
from precision_bert.gradient_range.record import GradientCounts, GradientRange, LayerRange

__all__ = ["GradientCounts", "GradientRange", "LayerRange", "gradient_range"]
