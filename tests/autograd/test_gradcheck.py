"""gradcheck finds backwards that are wrong, and says where."""

import numpy as np
import pytest

from psa_cupy import autograd
from psa_cupy.autograd import Variable, gradcheck, record
from psa_cupy.testing import GradientError

X = np.random.default_rng(0).standard_normal((3, 3))
OTHER = Variable(X)


def squared(x, backward=lambda x, d_y: d_y @ x.T + x.T @ d_y):
    """The matrix product x @ x, differentiated by the backward given."""

    def run(saved, d_outputs, targets):
        (x,), (d_y,), (d_x,) = saved, d_outputs, targets
        if d_x is None:
            return (backward(x, d_y),)
        d_x += backward(x, d_y)
        return (d_x,)

    return record("squared", (x,), (x.data @ x.data,), (x.data,), run)[0]


def test_a_right_backward_passes():
    assert gradcheck(squared, [X]) <= 1e-6


@pytest.mark.parametrize(
    "backward",
    [
        pytest.param(lambda x, d_y: 1.001 * (d_y @ x.T + x.T @ d_y), id="a factor"),
        pytest.param(lambda x, d_y: -(d_y @ x.T + x.T @ d_y), id="a sign"),
        pytest.param(lambda x, d_y: d_y @ x.T - x.T @ d_y, id="the sign of a term"),
        pytest.param(lambda x, d_y: d_y @ x + x.T @ d_y, id="a transposed index"),
        pytest.param(lambda x, d_y: (d_y @ x.T + x.T @ d_y).T.copy(), id="the result transposed"),
        pytest.param(lambda x, d_y: d_y @ x.T, id="a term left out"),
        pytest.param(lambda x, d_y: np.zeros_like(x), id="nothing"),
        pytest.param(lambda x, d_y: np.full_like(x, np.nan), id="not a number"),
    ],
)
def test_a_wrong_backward_fails(backward):
    with pytest.raises(GradientError):
        gradcheck(lambda x: squared(x, backward), [X])


def test_the_dump_names_the_input_and_the_worst_element():
    def wrong_at_one_element(x, d_y):
        gradient = d_y @ x.T + x.T @ d_y
        gradient[2, 1] += 5
        return gradient

    def function(a, b):
        return autograd.add(a, squared(b, wrong_at_one_element))

    with pytest.raises(GradientError) as caught:
        gradcheck(function, [X, X + 1])
    dump = str(caught.value)
    assert dump.startswith("gradcheck: gradient 1 has relative error")
    assert "array 0: shape (3, 3)" in dump and "output 0: shape (3, 3)" in dump
    assert "along a random direction: backward" in dump
    assert "worst of 9 elements tried: [2, 1]: backward" in dump and "off by 5" in dump


def test_an_input_that_backward_forgot_fails():
    """No gradient means zero, and that is checked."""

    def function(a, b):
        c = record(
            "a + b", (a,), (a.data + b.data,), (), lambda saved, d_outputs, targets: (d_outputs[0].copy(),)
        )
        return c[0]

    with pytest.raises(GradientError, match="gradient 1"):
        gradcheck(function, [X, X])


def test_a_function_that_is_not_recorded_fails():
    with pytest.raises(GradientError):
        gradcheck(lambda x: Variable(x.data**2, requires_grad=False), [X])


def test_constants_are_not_checked():
    constant = Variable(X, requires_grad=False)
    assert gradcheck(autograd.multiply, [X, constant]) <= 1e-6
    wrong = lambda x: squared(x, lambda x, d_y: d_y)  # noqa: E731
    assert gradcheck(lambda a, b: autograd.add(a, wrong(b)), [X, constant]) <= 1e-6


def test_several_outputs_are_checked_together():
    def function(x):
        return autograd.multiply(x, 2), squared(x), autograd.sum(x)

    assert gradcheck(function, [X]) <= 1e-6
    with pytest.raises(GradientError):
        gradcheck(lambda x: (autograd.multiply(x, 2), squared(x, lambda x, d_y: d_y @ x.T)), [X])


def test_inputs_of_any_dtype_are_checked_in_float64_and_left_alone():
    x = X.astype(np.float32)
    before = x.copy()
    seen = []

    def function(x):
        seen.append(x.dtype)
        return squared(x)

    assert gradcheck(function, [Variable(x)]) <= 1e-6
    assert set(seen) == {np.dtype(np.float64)}
    assert (x == before).all()


def test_0d_arrays_are_checked():
    x, y = np.array(3.0), np.array(0.5)
    assert gradcheck(autograd.multiply, [x, Variable(y)]) <= 1e-6
    assert gradcheck(lambda x: autograd.multiply(x, x), [np.float32(3)]) <= 1e-6

    def square(x, factor):
        backward = lambda saved, d, targets: (factor * saved[0] * d[0],)  # noqa: E731
        return record("square", (x,), (x.data**2,), (x.data,), backward)[0]

    assert gradcheck(lambda x: square(x, 2), [x]) <= 1e-6
    with pytest.raises(GradientError):
        gradcheck(lambda x: square(x, 2.001), [x])


def test_it_works_while_a_tape_records_and_does_not_record_on_it():
    with autograd.Tape() as tape:
        x = tape.variable(X)
        y = autograd.multiply(x, 2)
        assert gradcheck(squared, [x]) <= 1e-6
        with pytest.raises(GradientError):
            gradcheck(lambda x: squared(x, lambda x, d_y: d_y), [X])
        z = autograd.add(y, x)
    assert repr(tape) == "Tape(2 nodes, 0 of them freed)"
    tape.backward(z, np.ones((3, 3)))
    assert (x.grad == 3).all()


@pytest.mark.parametrize("held", [False, True])
def test_gradients_of_other_variables_are_left_as_they_were(held):
    weight, x = Variable(X + 1), Variable(X)
    if held:
        with autograd.Tape() as tape:
            y = autograd.multiply(weight, x)
        tape.backward(y, np.ones((3, 3)))
    before = [(leaf, leaf.grad, None if leaf.grad is None else leaf.grad.copy()) for leaf in (weight, x)]
    gradcheck(lambda x: autograd.multiply(squared(x), weight), [x])
    with pytest.raises(ZeroDivisionError):
        gradcheck(lambda x: squared(autograd.multiply(x, weight), lambda x, d_y: 1 / 0), [x])
    for leaf, gradient, values in before:
        assert leaf.grad is gradient and np.array_equal(gradient, values)


@pytest.mark.parametrize(
    ("function", "inputs", "error", "message"),
    [
        (squared, [], ValueError, "arrays is empty"),
        (squared, [Variable(X, requires_grad=False)], ValueError, "no input requires a gradient"),
        (lambda x: x.data, [X], TypeError, "function gave a ndarray, expected a Variable"),
        (lambda x: None, [X], TypeError, "function gave a NoneType, expected a Variable"),
        (lambda x: (squared(x), 1.0), [X], TypeError, "function gave a float, expected a Variable"),
        (squared, [[1.0]], TypeError, "array 0 is a list, expected a NumPy or CuPy array"),
        (squared, Variable(X), TypeError, "inputs is a Variable, expected a sequence of Variables or arrays"),
        (squared, None, TypeError, "inputs is a NoneType, expected a sequence"),
        (squared, X[0, 0], TypeError, "inputs is a float64, expected a sequence"),
        (lambda x: x, [X], ValueError, "function gave an input or another Variable that it did not compute"),
        (lambda x: (squared(x), x), [X], ValueError, "function gave an input or another Variable"),
        (lambda x: OTHER, [X], ValueError, "function gave an input or another Variable"),
        (lambda x: (), [X], ValueError, "the function gave no element, expected at least one"),
        (lambda x: [], [X], ValueError, "the function gave no element, expected at least one"),
        (squared, [X[:0, :0]], ValueError, "arrays is empty, expected at least one array with an element"),
        (
            autograd.multiply,
            [X[:0], Variable(X[:0], requires_grad=False)],
            ValueError,
            "arrays is empty, expected at least one array with an element",
        ),
    ],
)
def test_what_would_check_nothing_is_refused(function, inputs, error, message):
    with pytest.raises(error, match=f"^gradcheck: {message}"):
        gradcheck(function, inputs)
