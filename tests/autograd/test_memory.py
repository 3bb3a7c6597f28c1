"""What a tape keeps, for how long, and how much at a time."""

import gc
import tracemalloc
import weakref

import numpy as np
import pytest

from psa_cupy import autograd
from psa_cupy.autograd import Tape, Variable, add, multiply, record

SIZE = 1 << 17
BYTES = 8 * SIZE
"""Of each array in the chains below."""

LITTLE = 100_000
"""Bytes that a few Python objects may take."""

pytestmark = pytest.mark.usefixtures("no_gc")


class Meter:
    """Bytes allocated for arrays: NumPy's by tracemalloc, CuPy's by its memory pool."""

    def __init__(self, xp):
        self._pool = None if xp is np else xp.get_default_memory_pool()
        self._most = 0

    def now(self) -> int:
        return tracemalloc.get_traced_memory()[0] if self._pool is None else self._pool.used_bytes()

    def start(self) -> None:
        """Forget the most so far."""
        tracemalloc.reset_peak()
        self._most = 0

    def look(self) -> None:
        """CuPy's pool keeps no peak: this is called from every backward of the chain."""
        self._most = max(self._most, self.now())

    def most(self) -> int:
        return tracemalloc.get_traced_memory()[1] if self._pool is None else self._most


@pytest.fixture
def meter(xp):
    tracemalloc.start()
    yield Meter(xp)
    tracemalloc.stop()


def scaled(x, meter=None):
    """Twice x; saves an array of its own."""

    def backward(saved, d_outputs, targets):
        (d_y,), (d_x,) = d_outputs, targets
        gradient = d_y * 2
        if meter is not None:
            meter.look()
        if d_x is None:
            return (gradient,)
        d_x += gradient
        return (d_x,)

    return record("scaled", (x,), (x.data * 2,), (x.data.copy(),), backward)[0]


def chain(x, length, meter=None):
    for _ in range(length):
        x = scaled(x, meter)
    return x


def test_recording_keeps_what_is_saved_and_no_more(xp, meter):
    """Each function of the chain saves one array; outputs that nobody holds are not kept."""
    x = Variable(xp.ones(SIZE))
    before = meter.now()
    with Tape() as tape:
        y = chain(x, 10)
    assert meter.now() - before <= 11 * BYTES + LITTLE  # ten saved, and y
    del tape, y
    assert meter.now() - before <= LITTLE


def test_add_keeps_nothing(xp, meter):
    x = Variable(xp.ones(SIZE))
    before = meter.now()
    with Tape() as tape:
        y = x
        for _ in range(10):
            y = add(y, y)
    assert meter.now() - before <= BYTES + LITTLE  # y alone
    del tape


@pytest.mark.parametrize("length", [10, 40])
def test_the_peak_of_backward_does_not_grow_with_depth(xp, meter, length):
    """Two gradients of the chain (coming in, going out), the leaf's, and one array within a function."""
    x = Variable(xp.ones(SIZE))
    with Tape() as tape:
        y = chain(x, length, meter)
    seed = xp.ones(SIZE)
    meter.start()
    before = meter.now()
    tape.backward(y, seed)
    assert meter.most() - before <= 3 * BYTES + LITTLE
    assert (
        meter.now() - before <= BYTES - length * BYTES + LITTLE
    )  # x.grad has come, the saved arrays have gone


def test_a_wide_graph_holds_one_gradient_for_each_variable(xp, meter):
    width = 6
    x = Variable(xp.ones(SIZE))
    with Tape() as tape:
        y = chain(x, 1, meter)
        for branch in [chain(x, 3, meter) for _ in range(width)]:
            y = add(y, branch)
    meter.start()
    before = meter.now()
    tape.backward(y, xp.ones(SIZE))
    # The branches' ends and the first term, x's, the seed; d_y and gradient in a function at work.
    assert meter.most() - before <= (width + 1 + 1 + 1 + 2) * BYTES + LITTLE


def test_retain_graph_keeps_the_saved_arrays(xp, meter):
    x = Variable(xp.ones(SIZE))
    with Tape() as tape:
        y = chain(x, 10)
    before = meter.now()
    tape.backward(y, xp.ones(SIZE), retain_graph=True)
    assert BYTES <= meter.now() - before <= BYTES + LITTLE


def test_saved_arrays_are_freed_node_by_node(xp):
    """When a node's backward runs, the arrays of the nodes after it are gone, its own are not."""
    saved_arrays, alive = [], []

    def watched(x):
        kept = x.data.copy()
        saved_arrays.append(weakref.ref(kept))

        def backward(saved, d_outputs, targets):
            alive.append([reference() is not None for reference in saved_arrays])
            return (d_outputs[0] * 1,)

        return record("watched", (x,), (x.data * 1,), (kept,), backward)[0]

    with Tape() as tape:
        y = watched(watched(watched(Variable(xp.ones(3)))))
    tape.backward(y, xp.ones(3))
    assert alive == [[True, True, True], [True, True, False], [True, False, False]]
    assert [reference() for reference in saved_arrays] == [None] * 3


def test_psa_frees_its_out_and_lse(xp):
    with Tape() as tape:
        y = autograd.psa(Variable(xp.ones((1, 16, 2, 3))), 2)
    out = weakref.ref(y.data)
    tape.backward(y, xp.ones((1, 8, 2, 3)))
    del y
    assert out() is None


@pytest.mark.parametrize("reused", [True, False], ids=["one tape, reset", "a tape each"])
def test_memory_is_flat_over_ten_steps(xp, meter, reused):
    weight = Variable(xp.full((2, 16, 4, 8), 0.5, np.float32))
    after, tape = [], Tape()
    for step in range(12):
        tape = tape if reused else Tape()
        with tape:
            y = autograd.psa(multiply(weight, weight), 2)
            loss = autograd.sum(multiply(y, y))
        tape.backward(loss)
        weight.data -= 0.01 * weight.grad
        tape.reset()
        del y, loss
        # No cycles, once what the first steps import and compile has left its own; and Python's free lists,
        # which tracemalloc counts, are emptied.
        assert gc.collect() == 0 or step < 2
        after.append(meter.now())
    assert max(after[2:]) - min(after[2:]) <= (2_000 if xp is np else 0), after


def test_a_tape_dropped_without_backward_is_freed(xp, meter):
    before = meter.now()
    for _ in range(3):
        with Tape() as tape:
            chain(tape.variable(xp.ones(SIZE)), 5)
        del tape
    assert meter.now() - before <= LITTLE
