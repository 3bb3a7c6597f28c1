"""For tests, yours too: accuracy bounds (`bounds` explains them) and a check of any gradient."""

from psa_cupy.testing.bounds import (
    ABSOLUTE_BOUNDS,
    absolute_ratio,
    attention_backward_ratios,
    attention_forward_ratios,
    psa_backward_ratios,
    psa_forward_ratios,
    unit_roundoff,
)
from psa_cupy.testing.gradients import GradientError, gradcheck

__all__ = [
    "ABSOLUTE_BOUNDS",
    "GradientError",
    "absolute_ratio",
    "attention_backward_ratios",
    "attention_forward_ratios",
    "gradcheck",
    "psa_backward_ratios",
    "psa_forward_ratios",
    "unit_roundoff",
]
