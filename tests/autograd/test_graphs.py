"""Graphs drawn by Hypothesis: any wiring of the functions gives the gradient that another method gives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings, strategies as st

from psa_cupy import autograd
from psa_cupy.autograd import (
    Tape,
    Variable,
    add,
    extract_v,
    flash_attention,
    merge_attn,
    multiply,
    pack_qkv,
    psa,
)

from .conftest import share_memory


@dataclass(frozen=True)
class Program:
    """Instructions (operation, operand, operand): operands are earlier values, counted from the leaves."""

    leaves: int
    instructions: tuple[tuple[str, int, int], ...]
    seed: int

    def values(self) -> list[np.ndarray]:
        return list(np.random.default_rng(self.seed).uniform(-1, 1, (self.leaves, 2, 3)))

    def directions(self) -> list[np.ndarray]:
        return list(np.random.default_rng(self.seed + 1).standard_normal((self.leaves, 2, 3)))


@st.composite
def programs(draw) -> Program:
    leaves = draw(st.integers(1, 3))
    instructions = []
    for count in range(leaves, leaves + draw(st.integers(1, 12))):
        operand = st.integers(0, count - 1)
        operation = draw(st.sampled_from(["add", "multiply", "by number"]))
        instructions.append((operation, draw(operand), draw(operand)))
    return Program(leaves, tuple(instructions), draw(st.integers(0, 2**16)))


def on_variables(program: Program, leaves):
    values = list(leaves)
    for operation, i, j in program.instructions:
        match operation:
            case "add":
                values.append(add(values[i], values[j]))
            case "multiply":
                values.append(multiply(values[i], values[j]))
            case "by number":
                values.append(multiply(values[i], -0.75))
    return values


def forward_mode(program: Program):
    """The derivative along the directions, by carrying it forward beside each value: no graph, no sums."""
    values = list(zip(program.values(), program.directions(), strict=True))
    for operation, i, j in program.instructions:
        (x, d_x), (y, d_y) = values[i], values[j]
        match operation:
            case "add":
                values.append((x + y, d_x + d_y))
            case "multiply":
                values.append((x * y, d_x * y + x * d_y))
            case "by number":
                values.append((-0.75 * x, -0.75 * d_x))
    return values[-1]


@settings(max_examples=100)
@given(programs())
def test_reverse_agrees_with_forward(program):
    with Tape(check=True) as tape:
        leaves = [tape.variable(value) for value in program.values()]
        y = on_variables(program, leaves)[-1]
    weights = np.random.default_rng(program.seed + 2).standard_normal((2, 3))
    tape.backward(y, weights)
    gradients = [np.zeros((2, 3)) if leaf.grad is None else leaf.grad for leaf in leaves]
    reverse = sum((g * d).sum() for g, d in zip(gradients, program.directions(), strict=True))
    value, derivative = forward_mode(program)
    size = sum(abs(g * d).sum() for g, d in zip(gradients, program.directions(), strict=True))
    assert (y.data == value).all()
    assert abs(reverse - (weights * derivative).sum()) <= 1e-13 * max(
        size, abs(weights * derivative).sum(), 1
    )
    arrays = [a for leaf in leaves if leaf.grad is not None for a in (leaf.grad, leaf.data)]
    assert not any(share_memory(a, b) for n, a in enumerate(arrays) for b in arrays[:n])


@settings(max_examples=50)
@given(programs(), st.data())
def test_several_outputs_add_up(program, data):
    """What y and z give one after the other is what y + z gives."""
    with Tape() as tape:
        leaves = [tape.variable(value) for value in program.values()]
        values = on_variables(program, leaves)[program.leaves :]
        y, z = data.draw(st.sampled_from(values)), data.draw(st.sampled_from(values))
        both = add(y, z)
    ones = np.ones((2, 3))
    tape.backward(y, ones, retain_graph=True)
    tape.backward(z, ones, retain_graph=True)
    apart = [leaf.grad for leaf in leaves]
    tape.zero()
    tape.backward(both, ones)
    for leaf, gradient in zip(leaves, apart, strict=True):
        assert (leaf.grad is None) == (gradient is None)
        if gradient is not None:
            np.testing.assert_allclose(leaf.grad, gradient, rtol=1e-12, atol=1e-12)


HEADS, HEIGHT, WIDTH = 2, 2, 3
QKV = (1, 16, HEIGHT, WIDTH)


@st.composite
def blocks(draw):
    """A function of one qkv made of attention blocks: what each result feeds is drawn."""
    steps = []
    wide, narrow = 1, 0  # values of qkv's shape, and of out's
    for _ in range(draw(st.integers(1, 4))):
        operation = draw(st.sampled_from(["psa", "staged", "extract_v"]))
        steps.append((operation, draw(st.integers(0, wide - 1)), 0))
        narrow += 1
        operation = draw(st.sampled_from(["add", "multiply", "scale wide", "multiply wide"]))
        count = wide if "wide" in operation else narrow
        operands = (draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1)))
        steps.append((operation, *operands))
        wide, narrow = (wide + 1, narrow) if "wide" in operation else (wide, narrow + 1)
    return tuple(steps)


def run_blocks(steps, qkv: Variable) -> Variable:
    wide, narrow = [qkv], []
    for operation, i, j in steps:
        match operation:
            case "psa":
                narrow.append(psa(wide[i], HEADS))
            case "staged":
                q, k, v_lo, v_hi = pack_qkv(wide[i], HEADS)
                halves = flash_attention(q, k, v_lo), flash_attention(q, k, v_hi)
                narrow.append(merge_attn(*halves, HEADS, HEIGHT, WIDTH))
            case "extract_v":
                narrow.append(extract_v(wide[i], HEADS))
            case "add":
                narrow.append(add(narrow[i], narrow[j]))
            case "multiply":
                narrow.append(multiply(narrow[i], narrow[j]))
            case "scale wide":
                wide.append(multiply(wide[i], 0.5))
            case "multiply wide":
                wide.append(multiply(wide[i], wide[j]))
    total = autograd.sum(narrow[0])
    for value in narrow[1:]:
        total = add(total, autograd.sum(value))
    return total


@settings(max_examples=30)
@given(blocks(), st.integers(0, 2**16))
def test_attention_in_any_wiring(steps, seed):
    qkv = np.random.default_rng(seed).standard_normal(QKV)
    assert autograd.gradcheck(lambda x: run_blocks(steps, x), [qkv], seed=seed) <= 1e-6
