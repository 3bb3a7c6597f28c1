"""Tables that hold every pair of values: a full product of a kernel's parameters would take hours."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

EXHAUSTIVE = False
"""Set by `--hypothesis-profile=exhaustive`: whole products instead."""


def pairwise(
    factors: Mapping[str, Sequence], allowed: Callable[..., bool] = lambda **row: True
) -> list[dict]:
    """Rows that together hold every allowed pair of values of any two factors.

    Greedy: the next row is the one with the most pairs not seen yet, the first among equals, so that the
    table is the same in every process.

    Parameters
    ----------
    factors : mapping of str to sequence
        The values of each factor.
    allowed : callable
        Takes a row as keyword arguments; False leaves the row out.

    """
    columns = [list(values) for values in factors.values()]
    rows = [dict(zip(factors, values, strict=True)) for values in itertools.product(*columns)]
    indices = np.array(list(itertools.product(*(range(len(c)) for c in columns))))
    keep = [i for i, row in enumerate(rows) if allowed(**row)]
    rows, indices = [rows[i] for i in keep], indices[keep]
    if EXHAUSTIVE or len(columns) < 2:
        return rows
    pairs = list(itertools.combinations(range(len(columns)), 2))
    unseen = {pair: np.ones([len(columns[i]) for i in pair], bool) for pair in pairs}
    table = []
    while True:
        gains = sum(unseen[a, b][indices[:, a], indices[:, b]].astype(int) for a, b in pairs)
        best = int(np.argmax(gains)) if len(rows) else 0
        if not len(rows) or gains[best] == 0:
            return table
        table.append(rows[best])
        for a, b in pairs:
            unseen[a, b][indices[best, a], indices[best, b]] = False
