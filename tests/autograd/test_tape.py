"""The rules of the tape, on functions simple enough to differentiate by hand."""

import itertools
import sys
import threading
import weakref

import numpy as np
import pytest

from psa_cupy import autograd
from psa_cupy.autograd import Tape, Variable, add, multiply, no_grad, record

from .conftest import share_memory, to_numpy


def recorded(xp, function, *values, **keywords):
    """A tape, the leaves made of the values, and what the function makes of them."""
    with Tape(**keywords) as tape:
        leaves = [tape.variable(xp.asarray(v)) for v in values]
        y = function(*leaves)
    return tape, leaves, y


def times(x, number):
    """A multiple of x, whose backward takes and gives arrays without any help."""

    def backward(saved, d_outputs, targets):
        (d_y,), (d_x,) = d_outputs, targets
        if d_x is None:
            return (d_y * number,)
        d_x += d_y * number
        return (d_x,)

    return record("times", (x,), (x.data * number,), (), backward)[0]


# ---- a gradient is summed once per path


def test_a_variable_used_by_two_functions(xp):
    tape, (x,), y = recorded(xp, lambda x: add(times(x, 3), times(x, 5)), np.ones(3))
    tape.backward(y, xp.asarray([1.0, 2.0, 3.0]))
    assert to_numpy(x.grad).tolist() == [8.0, 16.0, 24.0]


@pytest.mark.parametrize("function, expected", [(add, [2.0, 2.0]), (multiply, [6.0, 8.0])])
def test_the_same_variable_twice_in_one_call(xp, function, expected):
    tape, (x,), y = recorded(xp, lambda x: function(x, x), np.array([3.0, 4.0]))
    tape.backward(y, xp.ones(2))
    assert to_numpy(x.grad).tolist() == expected


def test_the_same_variable_twice_after_it_has_a_gradient(xp):
    """The buffer is given out once: the first use adds into it, the second is added to it."""
    tape, (x,), y = recorded(xp, lambda x: add(multiply(x, x), times(x, 10)), np.array([3.0]))
    tape.backward(y, xp.ones(1))
    assert to_numpy(x.grad).tolist() == [16.0]


def test_a_diamond(xp):
    def diamond(x):
        middle = times(x, 2)
        return add(times(middle, 3), multiply(middle, middle))

    tape, (x,), y = recorded(xp, diamond, np.array([5.0]))
    tape.backward(y)
    assert to_numpy(x.grad).tolist() == [2 * (3 + 2 * 10)]


def test_paths_multiply_and_nodes_run_once(xp):
    runs = []

    def twice(x):
        def backward(saved, d_outputs, targets):
            runs.append(1)
            return (2 * d_outputs[0],)

        return record("twice", (x,), (2 * x.data,), (), backward)[0]

    def ladder(x):
        for _ in range(20):
            x = twice(x)
            x = add(x, x)
        return x

    tape, (x,), y = recorded(xp, ladder, np.array([1.0]))
    tape.backward(y)
    assert to_numpy(x.grad).tolist() == [4.0**20]
    assert len(runs) == 20


def test_each_addition_rounds_to_the_variables_dtype(xp):
    """Numbers above 2048 are even in float16: 2048 + 1 + 1 stays 2048, as PyTorch's does."""
    ones = lambda x: add(times(x, 1), add(times(x, 1), times(x, 2048)))  # noqa: E731 - backward comes in reverse
    tape, (x,), y = recorded(xp, ones, np.ones(1, np.float16))
    tape.backward(y)
    assert to_numpy(x.grad).tolist() == [2048.0]
    assert x.grad.dtype == np.float16


def test_what_y_does_not_depend_on_gets_nothing(xp):
    with Tape() as tape:
        x, z = tape.variable(xp.ones(2)), tape.variable(xp.ones(2))
        y = times(x, 2)
        times(y, 3), times(z, 5)
    tape.backward(y, xp.ones(2))
    assert to_numpy(x.grad).tolist() == [2.0, 2.0]
    assert z.grad is None


def test_several_outputs_add_up_until_zero(xp):
    with Tape() as tape:
        x = tape.variable(xp.ones(1))
        y, z = times(x, 2), times(x, 3)
    tape.backward(y)
    tape.backward(z)
    assert to_numpy(x.grad).tolist() == [5.0]
    tape.zero()
    assert x.grad is None


def test_zero_knows_leaves_that_the_tape_did_not_make(xp):
    x = Variable(xp.ones(1))
    with Tape() as tape:
        y = times(x, 2)
    tape.backward(y)
    tape.zero()
    assert x.grad is None


def test_only_leaves_keep_a_gradient(xp):
    with Tape() as tape:
        x = tape.variable(xp.ones(1))
        middle = times(x, 2)
        y = times(middle, 3)
    tape.backward(y)
    assert middle.grad is None and y.grad is None
    assert to_numpy(x.grad).tolist() == [6.0]


def test_an_output_that_nothing_reached_is_none(xp):
    seen = []

    def halves(x):
        def backward(saved, d_outputs, targets):
            seen.append([d is None for d in d_outputs])
            return (xp.concatenate([xp.zeros_like(d_outputs[1]), d_outputs[1]]),)

        return record("halves", (x,), tuple(xp.split(x.data, 2)), (), backward)

    tape, (x,), (_, high) = recorded(xp, halves, np.arange(4.0))
    tape.backward(high, xp.ones(2))
    assert seen == [[True, False]]
    assert to_numpy(x.grad).tolist() == [0.0, 0.0, 1.0, 1.0]


# ---- depth


def depth_of_stack():
    frame, depth = sys._getframe(), 0
    while frame := frame.f_back:
        depth += 1
    return depth


@pytest.mark.parametrize("dropped_first", ["tape", "y"])
def test_a_chain_of_5000_nodes(xp, no_gc, dropped_first):
    def chain(x):
        for _ in range(5000):
            x = times(x, 1)
        return x

    tape, _, y = recorded(xp, lambda x: times(x, 1), np.ones(2))
    tape.backward(y, xp.ones(2))  # CuPy compiles now, which recurses

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(depth_of_stack() + 60)
    try:
        tape, (x,), y = recorded(xp, chain, np.ones(2))
        tape.backward(y, xp.asarray([2.0, 3.0]), retain_graph=True)
        assert to_numpy(x.grad).tolist() == [2.0, 3.0]
        gone = weakref.ref(tape), weakref.ref(y.data), weakref.ref(x.data)
        if dropped_first == "tape":
            del tape
        del y
        tape = x = None
    finally:
        sys.setrecursionlimit(limit)
    assert [reference() for reference in gone] == [None] * 3


# ---- a second backward


def test_a_second_backward_raises_and_adds_nothing(xp):
    tape, (x,), y = recorded(xp, lambda x: times(x, 2), np.ones(1))
    tape.backward(y)
    with pytest.raises(
        RuntimeError, match=r"^Tape.backward: times has freed what it saved; expected retain_graph"
    ):
        tape.backward(y)
    assert to_numpy(x.grad).tolist() == [2.0]


def test_a_freed_trunk_raises_before_anything_is_added(xp):
    with Tape() as tape:
        x, w = tape.variable(xp.ones(1)), tape.variable(xp.ones(1))
        trunk = times(x, 2)
        y, z = times(trunk, 3), multiply(trunk, w)
    tape.backward(y)
    with pytest.raises(RuntimeError, match="times has freed what it saved"):
        tape.backward(z)
    assert w.grad is None
    assert to_numpy(x.grad).tolist() == [6.0]


def test_retain_graph_allows_another(xp):
    tape, (x,), y = recorded(xp, lambda x: multiply(x, x), np.array([3.0]))
    tape.backward(y, retain_graph=True)
    tape.backward(y)
    assert to_numpy(x.grad).tolist() == [12.0]
    with pytest.raises(RuntimeError, match="multiply has freed"):
        tape.backward(y)


# ---- differentiating twice


def test_backward_while_another_tape_records_raises(xp):
    with Tape():
        tape, (x,), y = recorded(xp, lambda x: multiply(x, x), np.ones(1))
        with pytest.raises(RuntimeError, match="multiply cannot be differentiated twice"):
            tape.backward(y)
        assert x.grad is None
        with no_grad():
            tape.backward(y)
    assert to_numpy(x.grad).tolist() == [2.0]


def test_a_seed_that_is_a_variable_raises(xp):
    tape, _, y = recorded(xp, lambda x: multiply(x, x), np.ones(1))
    with pytest.raises(TypeError, match="d_y is a Variable, expected an array: multiply cannot be"):
        tape.backward(y, Variable(xp.ones(1)))


def test_backward_inside_the_recording_is_not_recorded(xp):
    def doubled(x):
        def backward(saved, d_outputs, targets):
            return (multiply(Variable(d_outputs[0]), 2).data,)

        return record("doubled", (x,), (x.data * 2,), (), backward)[0]

    with Tape() as tape:
        x = tape.variable(xp.ones(1))
        y = doubled(x)
        before = repr(tape)
        tape.backward(y, retain_graph=True)
        assert repr(tape) == before


# ---- the caller's arrays


def test_the_seed_is_neither_changed_nor_aliased(xp):
    def function(a, b):
        both = add(a, b)
        return add(both, both)

    tape, leaves, y = recorded(xp, function, np.ones(3), np.ones(3))
    seed = xp.asarray([1.0, 2.0, 3.0])
    tape.backward(y, seed)
    assert to_numpy(seed).tolist() == [1.0, 2.0, 3.0]
    assert not any(share_memory(seed, leaf.grad) for leaf in leaves)
    seed[...] = np.nan
    assert to_numpy(leaves[0].grad).tolist() == [2.0, 4.0, 6.0]


def test_the_seed_is_not_aliased_by_a_backward_that_hands_it_on(xp):
    def doubled(x):
        def backward(saved, d_outputs, targets):
            (d_y,) = d_outputs
            d_y *= 2
            return (d_y,)

        return record("doubled", (x,), (x.data * 2,), (), backward)[0]

    tape, (x,), y = recorded(xp, doubled, np.ones(3))
    seed = xp.ones(3)
    tape.backward(y, seed)
    assert to_numpy(seed).tolist() == [1.0] * 3
    assert to_numpy(x.grad).tolist() == [2.0] * 3


def test_a_seed_of_any_strides(xp):
    tape, (x,), y = recorded(xp, lambda x: times(x, 1), np.zeros((2, 3)))
    seed = xp.arange(6.0).reshape(3, 2).T
    tape.backward(y, seed)
    assert to_numpy(x.grad).tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    assert x.grad.flags.c_contiguous  # it may become a kernel's target


def test_no_two_gradients_share_memory(xp):
    with Tape() as tape:
        a, b, c, d = (tape.variable(xp.full((2, 8, 2, 3), float(i))) for i in range(1, 5))
        total = add(add(a, b), add(multiply(c, 2), d))
        sections = autograd.pack_qkv(total, 2)
        again = autograd.pack_qkv(multiply(a, b), 2)
        out = autograd.merge_attn(sections[2], add(again[3], again[3]), 2, 2, 3)
        y = autograd.sum(add(out, autograd.extract_v(d, 2)))
    tape.backward(y)
    arrays = [x.grad for x in (a, b, c, d)] + [x.data for x in (a, b, c, d)]
    for one, other in itertools.combinations(arrays, 2):
        assert not share_memory(one, other)
        one_before = to_numpy(one).copy()
        other += 1
        assert (to_numpy(one) == one_before).all()


# ---- what cannot be differentiated


@pytest.mark.parametrize(
    "data, message",
    [
        ([1.0], "Variable: data is a list, expected a NumPy or CuPy array"),
        (np.arange(3), "Variable: data has dtype int64, expected one of float16, bfloat16, float32, float64"),
    ],
)
def test_what_is_no_variable(data, message):
    with pytest.raises(TypeError) as caught:
        Variable(data)
    assert str(caught.value) == message


@pytest.mark.parametrize("wrong", ["no", 1, None])
def test_requires_grad_is_true_or_false(wrong):
    kind = type(wrong).__name__
    for make in (Variable, Tape().variable):
        with pytest.raises(TypeError, match=f"^Variable: requires_grad is a {kind}, expected True or False$"):
            make(np.ones(1), requires_grad=wrong)
    assert Variable(np.ones(1), requires_grad=np.False_).requires_grad is False


@pytest.mark.parametrize(
    "error, d_y, message",
    [
        (TypeError, [1.0, 1.0], "Tape.backward: d_y is a list, expected a NumPy or CuPy array"),
        (TypeError, np.ones(2, np.float32), "Tape.backward: d_y has dtype float32, expected float64"),
        (ValueError, np.ones(3), r"Tape.backward: d_y has shape \(3,\), expected \(2,\)"),
        (ValueError, None, r"Tape.backward: y has shape \(2,\) and no d_y, expected d_y unless y has one"),
    ],
)
def test_a_wrong_seed(xp, error, d_y, message):
    tape, (x,), y = recorded(xp, lambda x: times(x, 2), np.ones(2))
    with pytest.raises(error, match=message):
        tape.backward(y, xp.asarray(d_y) if isinstance(d_y, np.ndarray) else d_y)
    assert x.grad is None
    tape.backward(y, xp.ones(2))
    assert to_numpy(x.grad).tolist() == [2.0, 2.0]


def test_backward_of_what_the_tape_did_not_record(xp):
    tape, (x,), y = recorded(xp, lambda x: times(x, 2), np.ones(1))
    with pytest.raises(TypeError, match="y is a ndarray, expected a Variable"):
        tape.backward(y.data)
    for stranger in (x, Variable(xp.ones(1)), recorded(xp, lambda x: times(x, 2), np.ones(1))[2]):
        with pytest.raises(RuntimeError, match=r"y is Variable\(.*\), expected what this tape recorded"):
            tape.backward(stranger)
    tape.reset()
    with pytest.raises(RuntimeError, match="since its last reset"):
        tape.backward(y)


def test_a_variable_of_another_tape_or_from_before_a_reset(xp):
    tape, _, y = recorded(xp, lambda x: times(x, 2), np.ones(1))
    with Tape(), pytest.raises(RuntimeError, match=r"times: an input is Variable\(.*\) on another tape"):
        times(y, 2)
    tape.reset()
    with tape, pytest.raises(RuntimeError, match=r"or before reset\(\)"):
        times(y, 2)


@pytest.mark.parametrize(
    "error, answer, message",
    [
        (
            TypeError,
            lambda d: d,
            "times: its backward gave a .*ndarray.*, expected a tuple of 1, one gradient",
        ),
        (TypeError, lambda d: (d, d), "times: its backward gave 2 gradients, expected a tuple of 1"),
        (TypeError, lambda d: (None,), "times: its backward's gradient 0 is None, expected a NumPy or CuPy"),
        (TypeError, lambda d: (Variable(d),), "times: its backward's gradient 0 is a Variable, expected a"),
        (ValueError, lambda d: (d[:1],), r"its backward's gradient 0 has shape \(1,\), expected \(2,\)"),
        (ValueError, lambda d: (d[::-1],), "times: its backward's gradient 0 is not C-contiguous, expected"),
        (TypeError, lambda d: (d.astype("f4"),), "gradient 0 has dtype float32, expected float64"),
        (TypeError, lambda d: (2.0,), "times: its backward's gradient 0 is a float, expected a NumPy or"),
        (ValueError, lambda d: (d.sum(),), r"its backward's gradient 0 has shape \(\), expected \(2,\)"),
    ],
)
def test_a_backward_that_answers_wrongly(xp, error, answer, message):
    def function(x):
        return record(
            "times", (x,), (x.data * 2,), (), lambda saved, d_outputs, targets: answer(d_outputs[0])
        )[0]

    tape, _, y = recorded(xp, function, np.ones(2))
    with pytest.raises(error, match=message):
        tape.backward(y, xp.ones(2))


def test_a_backward_that_ignores_its_target(xp):
    def function(x):
        forgetful = lambda saved, d_outputs, targets: (2 * d_outputs[0],)  # noqa: E731
        one, two = (record("times", (x,), (2 * x.data,), (), forgetful)[0] for _ in range(2))
        return add(one, two)

    tape, _, y = recorded(xp, function, np.ones(2))
    with pytest.raises(
        RuntimeError, match="times: its backward's gradient 0 is another array than the target to add to"
    ):
        tape.backward(y, xp.ones(2))


def read_only(d):
    answer = d.copy()
    answer.flags.writeable = False
    return answer


@pytest.mark.parametrize(
    "error, answer, message",
    [
        (ValueError, read_only, "is read-only, expected a writable array"),
        (ValueError, lambda d: np.broadcast_to(1.0, (1,)), "is read-only, expected"),
        (TypeError, np.ma.masked_array, "is a MaskedArray, expected a NumPy or CuPy array"),
        (ValueError, lambda d: np.zeros(9, np.uint8)[1:].view(float), "is not aligned, expected"),
    ],
)
def test_an_answer_that_nothing_could_be_added_to(error, answer, message):
    answers = lambda saved, d_outputs, targets: (answer(d_outputs[0]),)  # noqa: E731
    function = lambda x: record("times", (x,), (x.data * 2,), (), answers)[0]  # noqa: E731
    tape, (x,), y = recorded(np, function, np.ones(1))
    with pytest.raises(error, match=f"^times: its backward's gradient 0 {message}"):
        tape.backward(y)
    assert x.grad is None


def overlapping(d):
    both = d.repeat(2)
    return both[:3], both[1:4]


@pytest.mark.parametrize(
    "answers, shared",
    [
        pytest.param(lambda saved, d: (d, d), "gradient 1", id="the incoming gradient"),
        pytest.param(lambda saved, d: (one := 2 * d, one), "gradient 1", id="a new array"),
        pytest.param(lambda saved, d: (one := 2 * d, one.reshape(1, 3)[0]), "gradient 1", id="a view"),
        pytest.param(lambda saved, d: overlapping(d), "gradient 1", id="a part"),
        pytest.param(lambda saved, d: (saved[0], 2 * d), "saved array 0", id="a saved array"),
        pytest.param(lambda saved, d: (saved[0][:], 2 * d), "saved array 0", id="a view of a saved array"),
    ],
)
@pytest.mark.parametrize("same", [False, True], ids=["two inputs", "one input twice"])
def test_answers_that_share_memory(xp, answers, shared, same):
    """What is added to one later would change the other, or what another function saved."""

    def function(a, b):
        backward = lambda saved, d_outputs, targets: answers(saved, d_outputs[0])  # noqa: E731
        return record("both", (a, a if same else b), (a.data + b.data,), (xp.ones(3),), backward)[0]

    tape, leaves, y = recorded(xp, function, np.ones(3), np.ones(3))
    with pytest.raises(
        RuntimeError, match=f"^both: its backward's gradient 0 shares memory with {shared}, expected a new"
    ):
        tape.backward(y, xp.ones(3))
    assert all(leaf.grad is None for leaf in leaves)


def test_an_answer_that_shares_memory_with_a_target(xp):
    def function(a, b):
        def backward(saved, d_outputs, targets):
            if targets[0] is None:
                return 1 * d_outputs[0], 2 * d_outputs[0]
            targets[0][...] += d_outputs[0]
            return targets[0], targets[0]

        return record("both", (a, b), (a.data + b.data,), (), backward)[0]

    with Tape() as tape:
        a, b = tape.variable(xp.ones(3)), tape.variable(xp.ones(3))
        y, z = times(a, 1), function(a, b)
    tape.backward(y, xp.ones(3))
    with pytest.raises(RuntimeError, match="both: its backward's gradient 0 shares memory with gradient 1"):
        tape.backward(z, xp.ones(3))
    assert b.grad is None


def test_answers_may_be_parts_of_one_array_or_the_incoming_gradient(xp):
    """Neither is shared: the incoming gradient is no longer needed. What a constant gets is dropped."""

    def function(a, b, c):
        def backward(saved, d_outputs, targets):
            (d,) = d_outputs
            parts = xp.zeros((2, 3))
            parts[...] = d
            return (*parts, d) if c.requires_grad else (parts[0], d, d)

        return record("three", (a, b, c), (a.data + b.data + c.data,), (), backward)[0]

    for last in (True, False):
        with Tape() as tape:
            a, b, c = (tape.variable(xp.ones(3), flag) for flag in (True, True, last))
            y, z = function(a, b, c), add(times(a, 10), times(b, 20))
        tape.backward(y, xp.ones(3))
        tape.backward(z, xp.ones(3))
        assert to_numpy(a.grad).tolist() == [11.0] * 3 and to_numpy(b.grad).tolist() == [21.0] * 3
        assert c.grad is None or to_numpy(c.grad).tolist() == [1.0] * 3


def test_an_error_leaves_nothing_half_summed_behind(xp):
    broken = [True]

    def breakable(x):
        def backward(saved, d_outputs, targets):
            if broken[0]:
                raise KeyError("broken")
            return (d_outputs[0] * 2,)

        return record("breakable", (x,), (x.data * 2,), (), backward)[0]

    tape, (x,), y = recorded(xp, lambda x: add(times(x, 3), breakable(x)), np.ones(1))
    with pytest.raises(KeyError):
        tape.backward(y, retain_graph=True)  # the output of times has its gradient already
    tape.zero()
    broken[0] = False
    tape.backward(y)
    assert to_numpy(x.grad).tolist() == [5.0]


# ---- 0-d arrays, where NumPy's arithmetic answers with scalars


def test_outputs_saved_arrays_and_answers_may_be_scalars(xp):
    """`record`'s own example, on a 0-d array."""

    def square(x):
        def backward(saved, d_outputs, targets):
            (x, half), (d_y,), (d_x,) = saved, d_outputs, targets
            if d_x is None:
                return (4 * half * d_y,)
            d_x += 2 * x * d_y
            return (d_x,)

        return record("square", (x,), (x.data**2,), (x.data, x.data / 2), backward)[0]

    for check in (False, True):
        tape, (x,), y = recorded(xp, lambda x: add(square(x), square(x)), np.array(3.0), check=check)
        assert isinstance(y.data, xp.ndarray) and y.shape == ()
        tape.backward(y, y.data / 18)
        assert isinstance(x.grad, xp.ndarray) and x.grad.shape == () and x.grad == 12


def test_a_scalar_is_not_the_target(xp):
    """`d_x + ...` of a 0-d target is a new scalar: the buffer would be lost."""

    def function(x):
        backward = lambda saved, d, targets: (d[0] * 1 if targets[0] is None else targets[0] + d[0],)  # noqa: E731
        return record("times", (x,), (x.data * 1,), (), backward)[0]

    tape, _, y = recorded(xp, lambda x: add(function(x), function(x)), np.array(3.0))
    with pytest.raises(
        RuntimeError, match="times: its backward's gradient 0 is another array than the target"
    ):
        tape.backward(y)


# ---- NaN and overflow


@pytest.mark.filterwarnings("error")
def test_accumulating_is_silent(xp):
    """The tape's own addition, for a Variable that stands twice in a call."""

    def function(x):
        backward = lambda saved, d, targets: (d[0] * 1, d[0] * 1)  # noqa: E731
        return record("sum", (x, x), (x.data * 1,), (), backward)[0]

    tape, (x,), y = recorded(xp, function, np.ones(3, np.float16))
    tape.backward(y, xp.asarray([60000, np.inf, np.nan], dtype=np.float16))
    np.testing.assert_array_equal(to_numpy(x.grad), np.array([np.inf, np.inf, np.nan], np.float16))


# ---- check=True


def test_check_catches_a_changed_array(xp):
    tape, (x,), y = recorded(xp, lambda x: multiply(x, times(x, 2)), np.ones((2, 3)), check=True)
    x.data[1, 2] = 7
    with pytest.raises(
        RuntimeError, match=r"^multiply: saved array 0 \(shape \(2, 3\)\) was changed between"
    ):
        tape.backward(y, xp.ones((2, 3)))
    assert x.grad is None


@pytest.mark.parametrize("wrong", ["no", 1, None])
def test_check_is_true_or_false(wrong):
    with pytest.raises(TypeError, match=f"^Tape: check is a {type(wrong).__name__}, expected True or False$"):
        Tape(check=wrong)


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 2)])
def test_check_accepts_unchanged_arrays(xp, shape):
    tape, (x,), y = recorded(xp, lambda x: multiply(x, x), np.ones(shape), check=True)
    tape.backward(y, xp.ones(shape))
    assert (to_numpy(x.grad) == 2).all() and x.grad.shape == shape


def test_check_sees_arrays_that_are_not_contiguous(xp):
    data = xp.ones((4, 6))[:, ::2]
    with Tape(check=True) as tape:
        x = tape.variable(data)
        y = multiply(x, x)
    data[3, 2] = 5
    with pytest.raises(RuntimeError, match="was changed"):
        tape.backward(y, xp.ones((4, 3)))


def test_without_check_arrays_are_kept_by_reference(xp):
    tape, (x,), y = recorded(xp, lambda x: multiply(x, x), np.ones(1))
    x.data[0] = 5
    tape.backward(y)
    assert to_numpy(x.grad).tolist() == [10.0]


# ---- what is recorded


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"inputs": Variable(np.ones(2))}, "inputs is a Variable, expected a tuple or list"),
        ({"outputs": np.ones(2)}, "outputs is a ndarray, expected a tuple or list"),
        ({"saved": np.ones(2)}, "saved is a ndarray, expected a tuple or list"),
        ({"saved": None}, "saved is a NoneType, expected a tuple or list"),
        ({"outputs": (np.ones(2), [1.0])}, "output 1 is a list, expected a NumPy or CuPy array"),
        ({"outputs": (Variable(np.ones(2)),)}, "output 0 is a Variable, expected a NumPy or CuPy array"),
        ({"saved": (np.ones(2), 1.5)}, "saved array 1 is a float, expected a NumPy or CuPy array"),
        ({"saved": (None,)}, "saved array 0 is a NoneType, expected a NumPy or CuPy array"),
        ({"backward": None}, "backward is a NoneType, expected a function"),
    ],
)
def test_what_cannot_be_recorded(wrong, message, recording):
    right = {"inputs": (Variable(np.ones(2)),), "outputs": [np.ones(2)], "saved": [], "backward": print}
    with Tape() if recording else no_grad(), pytest.raises(TypeError) as caught:
        record("mine", **right | wrong)
    assert str(caught.value) == f"mine: {message}"


def test_no_grad_records_nothing(xp):
    with Tape() as tape:
        x = tape.variable(xp.ones(1))
        with no_grad():
            y = times(x, 2)
        z = times(x, 3)
    assert not y.requires_grad and z.requires_grad
    assert repr(tape) == "Tape(1 nodes, 0 of them freed)"
    assert repr(y).endswith("constant, no grad)")


def test_outside_a_tape_nothing_is_recorded(xp):
    assert not times(Variable(xp.ones(1)), 2).requires_grad


def test_constants_get_no_gradient(xp):
    with Tape() as tape:
        x, c = tape.variable(xp.ones(1)), tape.variable(xp.full(1, 3.0), requires_grad=False)
        y = multiply(add(multiply(x, c), xp.ones(1)), c)
    tape.backward(y)
    assert to_numpy(x.grad).tolist() == [9.0]
    assert c.grad is None


def test_a_tape_may_record_in_several_blocks(xp):
    tape = Tape()
    with tape:
        x = tape.variable(xp.ones(1))
        y = times(x, 2)
    with tape:
        z = times(y, 3)
    tape.backward(z)
    assert to_numpy(x.grad).tolist() == [6.0]


def test_leaving_a_tape_that_was_not_entered_raises():
    used = Tape()
    with used:
        pass
    for tape in (Tape(), used):
        with pytest.raises(RuntimeError, match=r"^Tape.__exit__: the tape is not recording, expected"):
            tape.__exit__(None, None, None)


def test_leaving_tapes_out_of_order_raises(xp):
    a, b = Tape(), Tape()
    a.__enter__(), b.__enter__()
    with pytest.raises(RuntimeError, match=r"^Tape.__exit__: another tape or no_grad\(\) is in force"):
        a.__exit__(None, None, None)
    times(Variable(xp.ones(1)), 2)
    b.__exit__(None, None, None)  # the right order goes on
    a.__exit__(None, None, None)
    assert not times(Variable(xp.ones(1)), 2).requires_grad
    assert repr(a).startswith("Tape(0 nodes") and repr(b).startswith("Tape(1 nodes")


def test_leaving_a_tape_inside_no_grad_raises():
    tape = Tape()
    tape.__enter__()
    with no_grad(), pytest.raises(RuntimeError, match="expected the last entered to be left first"):
        tape.__exit__(None, None, None)
    tape.__exit__(None, None, None)


def test_one_tape_entered_twice(xp):
    tape = Tape()
    with tape:
        with tape:
            times(Variable(xp.ones(1)), 2)
        assert times(Variable(xp.ones(1)), 2).requires_grad
    assert not times(Variable(xp.ones(1)), 2).requires_grad


def test_the_inner_of_two_tapes_records(xp):
    with Tape() as outer:
        with Tape() as inner:
            times(Variable(xp.ones(1)), 2)
        times(Variable(xp.ones(1)), 2), times(Variable(xp.ones(1)), 2)
    assert repr(inner).startswith("Tape(1 nodes") and repr(outer).startswith("Tape(2 nodes")


def test_threads_record_on_tapes_of_their_own(xp):
    results, meet = {}, threading.Barrier(4)

    def work(number):
        with Tape() as tape:
            x = tape.variable(xp.ones(1))
            meet.wait()
            y = times(x, number)
            meet.wait()
        tape.backward(y)
        results[number] = to_numpy(x.grad).tolist()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [float(n)] for n in range(4)}


def test_reset_forgets_gradients_too(xp):
    """A step that resets before it reads gradients must not add to the step before."""
    tape, (x,), y = recorded(xp, lambda x: times(x, 2), np.ones(1))
    tape.backward(y)
    tape.reset()
    assert x.grad is None
    with tape:
        y = times(x, 3)
    tape.backward(y)
    assert to_numpy(x.grad).tolist() == [3.0]


# ---- looking


def test_reprs(xp):
    with Tape() as tape:
        x = tape.variable(xp.ones((2, 3), np.float32))
        y = times(x, 2)
    assert repr(x) == "Variable(shape=(2, 3), dtype=float32, leaf, no grad)"
    assert repr(y) == "Variable(shape=(2, 3), dtype=float32, from times, no grad)"
    assert repr(tape) == "Tape(1 nodes, 0 of them freed)"
    tape.backward(y, xp.ones((2, 3), np.float32))
    assert repr(x) == "Variable(shape=(2, 3), dtype=float32, leaf, grad held)"
    assert repr(tape) == "Tape(1 nodes, 1 of them freed)"
    assert repr(Variable(xp.ones(()), requires_grad=False)).endswith("constant, no grad)")


def test_the_table_of_a_tape(xp):
    tape, _, y = recorded(xp, lambda x: times(multiply(x, xp.ones((2, 3))), 2), np.ones((2, 3)))
    html = tape._repr_html_()
    assert html.startswith("<table><thead><tr><th></th><th>function</th>")
    cells = ("0", "multiply", "(2, 3) float64, constant", "(2, 3) float64", "96 bytes")
    assert "".join(f"<td>{cell}</td>" for cell in cells) in html
    tape.backward(y, xp.ones((2, 3)))
    assert html.count("<tr>") == tape._repr_html_().count("<tr>") == 3
    assert tape._repr_html_().count("<td>freed</td>") == 2


def test_names_are_escaped_in_the_table():
    with Tape() as tape:
        record("<b>", (Variable(np.ones(1)),), (np.ones(1),), (), lambda *_: None)
    assert "&lt;b&gt;" in tape._repr_html_()


@pytest.mark.gpu
def test_looking_does_not_wait_for_the_device():
    import cupy as cp

    spin = cp.RawKernel(
        'extern "C" __global__ void spin(long long clocks) '
        "{ const long long start = clock64(); while (clock64() - start < clocks) {} }",
        "spin",
    )
    stream = cp.cuda.get_current_stream()
    for clocks in (1, 2_000_000_000):  # compile everything; then about a second
        tape, (x,), y = recorded(cp, lambda x: multiply(x, x), np.ones(3))
        d_y = cp.ones(3)
        stream.synchronize()
        spin((1,), (1,), (np.int64(clocks),))
        repr(x), repr(y), repr(tape), tape._repr_html_()
        tape.backward(y, d_y)
        repr(x)
        was_done = stream.done
        stream.synchronize()
    assert not was_done
