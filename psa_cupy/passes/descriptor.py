"""What a pass says of itself: its name, its shapes, its kernel variants, and each variant's plan.

A *pass* is one step of the block with its backward (pack, attention, ...). A *variant* is one way to run
a direction of it: "plain" (no tensor cores, any GPU), "portable" (mma.sync, sm_80 and later) or "hopper"
(wgmma and TMA). Tests force one by name; users never choose.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from psa_cupy.geometry import PSAGeometry
from psa_cupy.launching.plan import MOST_PLANS, Device, Plan


@dataclass(frozen=True)
class PSAProblem:
    """One call, as far as planning depends on it. Equal problems have equal plans on one device."""

    geometry: PSAGeometry
    dtype: np.dtype
    scale: float = 1.0
    aligned: bool = True
    """Whether the base address of every operand is a multiple of 16 bytes."""
    accumulate: bool = False
    """Backward: whether the caller gave the target, which is then added to."""
    branch: bool = False
    """Backward: whether a second gradient of V is added (psa_backward's d_v_branch)."""


@dataclass(frozen=True)
class Variant:
    """One way to run one direction of a pass."""

    name: str
    supports: Callable[[PSAProblem, Device], bool]
    plan: Callable[[PSAProblem, Device], Plan]


@dataclass(frozen=True, eq=False)
class Pass:
    """One step of the block.

    Attributes
    ----------
    name : str
        The name the original design gives it ("psa_pack_qkv").
    function, backward : callable
        The public functions.
    infer_shape : callable
        From the shapes of the inputs (None where the batch is not yet known) and the pass's own
        parameters to the shapes of the results.
    variants : mapping of str to tuple of Variant
        For "forward" and "backward", in order of preference.

    """

    name: str
    function: Callable
    backward: Callable
    infer_shape: Callable
    variants: Mapping[str, tuple[Variant, ...]]

    def choose(self, direction: str, problem: PSAProblem, device: Device) -> Variant:
        """The first variant of a direction that supports the problem on the device."""
        return next(v for v in self.variants[direction] if v.supports(problem, device))

    @functools.lru_cache(maxsize=MOST_PLANS)  # noqa: B019 - passes live as long as the module
    def plan(self, direction: str, problem: PSAProblem, device: Device, variant: str | None = None) -> Plan:
        """The plan of the named variant, by default the chosen one: made once per problem and device."""
        if variant is None:
            return self.choose(direction, problem, device).plan(problem, device)
        return self.variant(direction, variant).plan(problem, device)

    def variant(self, direction: str, name: str) -> Variant:
        """A variant by name.

        Raises
        ------
        ValueError
            If the direction has none of that name.

        """
        for variant in self.variants[direction]:
            if variant.name == name:
                return variant
        names = ", ".join(v.name for v in self.variants[direction])
        raise ValueError(f"{self.name}: no {direction} variant {name!r}, expected one of {names}")


def always(problem: PSAProblem, device: Device) -> bool:
    """For variants that run any problem anywhere."""
    return True
