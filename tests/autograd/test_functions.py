"""The functions on Variables against the functional API, wherever it computes, and against differences."""

import ml_dtypes
import numpy as np
import pytest

import psa_cupy
from psa_cupy import autograd, testing
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

from ..executors import executors
from ..strategies import DTYPES, Problem

PROBLEM = Problem(1, 2, 5, 10, 3, 11, np.dtype(np.float32))
"""Small, with a key_dim and a number of tokens that no tile size divides."""


def gradients(executor, function, *arrays, d_y):
    """The result of a function of Variables, and the gradients of its inputs for d_y."""
    with executor.context(), Tape() as tape:
        leaves = [tape.variable(array) for array in arrays]
        y = function(*leaves)
    with executor.context():
        tape.backward(y, d_y)
    executor.check_guards()
    return y.data, [leaf.grad for leaf in leaves]


def staged(qkv, heads, height, width):
    """psa, of the single passes: q and k meet two consumers each."""
    q, k, v_lo, v_hi = pack_qkv(qkv, heads)
    return merge_attn(flash_attention(q, k, v_lo), flash_attention(q, k, v_hi), heads, height, width)


def equal(executor, a, b) -> bool:
    return executor.to_numpy(a).tobytes() == executor.to_numpy(b).tobytes()


# ---- each function is its pass


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@executors("reference", "gpu")
def test_psa_is_psa_backward_in_every_dtype(executor, dtype):
    check_psa(executor, Problem(2, 2, 36, 72, 5, 13, dtype))


def test_psa_is_psa_backward(executor):
    check_psa(executor, PROBLEM)


def check_psa(executor, problem):
    heads = problem.num_heads
    qkv, d_out = executor.array(problem.qkv()), executor.array(problem.d_out())
    y, (d_qkv,) = gradients(executor, lambda x: psa(x, heads), qkv, d_y=d_out)
    out, lse = executor.run(psa_cupy.psa_forward, qkv, heads)
    assert equal(executor, y, out)
    assert equal(executor, d_qkv, executor.run(psa_cupy.psa_backward, d_out, qkv, out, lse, heads))


@executors("reference", "gpu")
def test_psa_passes_key_dim_and_scale_on(executor):
    problem = Problem(1, 1, 5, 24, 3, 11, np.dtype(np.float32))
    qkv, d_out = executor.array(problem.qkv()), executor.array(problem.d_out())
    settings = dict(key_dim=5, scale=-0.25)
    y, (d_qkv,) = gradients(executor, lambda x: psa(x, 1, **settings), qkv, d_y=d_out)
    out, lse = executor.run(psa_cupy.psa_forward, qkv, 1, **settings)
    assert equal(executor, y, out)
    assert equal(executor, d_qkv, executor.run(psa_cupy.psa_backward, d_out, qkv, out, lse, 1, **settings))


@executors("reference", "cpu", "gpu")
def test_psa_adds_straight_into_the_buffer(executor):
    """Two psa of one qkv: the second backward is given the first one's result as its target."""
    qkv, d_out = executor.array(PROBLEM.qkv()), executor.array(PROBLEM.d_out())
    _, (d_qkv,) = gradients(executor, lambda x: add(psa(x, 2), psa(x, 2, scale=0.5)), qkv, d_y=d_out)
    first, second = (executor.run(psa_cupy.psa_forward, qkv, 2, scale=scale) for scale in (0.5, None))
    target = executor.run(psa_cupy.psa_backward, d_out, qkv, *first, 2, scale=0.5)
    executor.run(psa_cupy.psa_backward, d_out, qkv, *second, 2, d_qkv=target)
    assert equal(executor, d_qkv, target)


@executors("reference", "cpu", "gpu")
def test_flash_attention_is_its_pass(executor):
    q, k, v = map(executor.array, PROBLEM.attention_inputs())
    o, lse = executor.run(psa_cupy.flash_attention_forward, q, k, v, scale=0.3)
    d_o = executor.array(PROBLEM.attention_inputs()[2])
    y, found = gradients(executor, lambda *x: flash_attention(*x, scale=0.3), q, k, v, d_y=d_o)
    assert equal(executor, y, o)
    expected = executor.run(psa_cupy.flash_attention_backward, d_o, q, k, v, o, lse, scale=0.3)
    assert all(equal(executor, a, b) for a, b in zip(found, expected, strict=True))


@executors("reference", "gpu")
def test_flash_attention_of_one_variable_thrice(executor):
    """d_q is the buffer that x already has, d_k and d_v are new arrays that are added to it."""
    x = executor.array(PROBLEM.attention_inputs()[0])
    o, lse = executor.run(psa_cupy.flash_attention_forward, x, x, x)
    _, (d_x,) = gradients(executor, lambda x: add(flash_attention(x, x, x), multiply(x, 2)), x, d_y=x)
    _, d_k, d_v = executor.run(psa_cupy.flash_attention_backward, x, x, x, x, o, lse, d_q=(target := 2 * x))
    target += d_k
    target += d_v
    assert equal(executor, d_x, target)


def test_layout_functions_are_their_passes(executor):
    heads, g = 2, PROBLEM.geometry
    qkv, d_v = executor.array(PROBLEM.qkv()), executor.array(PROBLEM.d_out())
    y, (d_qkv,) = gradients(executor, lambda x: extract_v(x, heads), qkv, d_y=d_v)
    assert equal(executor, y, executor.run(psa_cupy.extract_v, qkv, heads))
    assert equal(executor, d_qkv, executor.run(psa_cupy.extract_v_backward, d_v, heads))

    halves = [executor.array(a) for a in np.split(PROBLEM.attention_inputs()[2], 2, axis=2)]
    merge = lambda *x: merge_attn(*x, heads, g.height, g.width)  # noqa: E731
    y, found = gradients(executor, merge, *halves, d_y=d_v)
    assert equal(executor, y, executor.run(psa_cupy.merge_attn, *halves, heads, g.height, g.width))
    expected = executor.run(psa_cupy.merge_attn_backward, d_v, heads)
    assert all(equal(executor, a, b) for a, b in zip(found, expected, strict=True))


def test_pack_qkv_is_its_pass(executor):
    """Of four sections, two get gradients; the others' are zero."""
    heads, g = 2, PROBLEM.geometry
    qkv = executor.array(PROBLEM.qkv())
    d_section = executor.array(PROBLEM.attention_inputs()[0])

    def second_and_fourth(x):
        _, k, _, v_hi = pack_qkv(x, heads)
        return add(k, v_hi)

    y, (d_qkv,) = gradients(executor, second_and_fourth, qkv, d_y=d_section)
    _, k, _, v_hi = executor.run(psa_cupy.pack_qkv, qkv, heads)
    assert equal(executor, y, k + v_hi)
    d_packed = np.zeros(g.packed_shape, np.float32)
    d_packed[[1, 3]] = executor.to_numpy(d_section)
    d_packed = executor.array(d_packed)
    expected = executor.run(psa_cupy.pack_qkv_backward, d_packed, heads, g.height, g.width)
    assert (executor.to_numpy(d_qkv) == executor.to_numpy(expected)).all()


# ---- the staged chain and the positional encoding's branch


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@executors("reference", "gpu")
def test_the_staged_chain_with_a_branch_in_every_dtype(executor, dtype):
    check_staged(executor, Problem(2, 2, 36, 72, 10, 13, dtype))


def test_the_staged_chain_with_a_branch(executor):
    check_staged(executor, PROBLEM)


def check_staged(executor, problem):
    """Attention by pack, flash_attention twice and merge; plus extract_v into a branch; in one backward."""
    heads, g = problem.num_heads, problem.geometry
    qkv, d_out, d_v_branch = map(executor.array, (problem.qkv(), problem.d_out(), problem.d_v_branch()))
    with executor.context(), Tape() as tape:
        x = tape.variable(qkv)
        attended = multiply(staged(x, heads, g.height, g.width), d_out)
        encoded = multiply(extract_v(x, heads), d_v_branch)
        loss = add(autograd.sum(attended), autograd.sum(encoded))
    with executor.context():
        tape.backward(loss)
    executor.check_guards()
    ratios = testing.psa_backward_ratios(d_out, qkv, x.grad, heads, d_v_branch=d_v_branch)
    assert max(ratios.values()) <= 1, ratios
    without_branch = testing.psa_backward_ratios(d_out, qkv, x.grad, heads)
    assert without_branch["d_v"] > 1, "a lost branch would not be seen"


# ---- arithmetic


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@executors("reference", "gpu")
def test_arithmetic_keeps_the_dtype(executor, dtype):
    a, b = (executor.array(np.array([[1.5, -2.0, 4.0]], dtype) * f) for f in (1, 2))
    for function in (add, multiply, lambda x, y: add(multiply(x, 3), multiply(y, np.float64(0.5)))):
        with Tape() as tape:
            x, y = tape.variable(a), tape.variable(b)
            z = function(x, y)
            total = autograd.sum(z)
        assert z.dtype == total.dtype == dtype and total.shape == ()
        tape.backward(total)
        assert x.grad.dtype == y.grad.dtype == dtype


def test_values_and_gradients_of_arithmetic():
    x = Variable(np.array([1.0, 2.0]))
    y = Variable(np.array([5.0, 7.0]))
    with Tape() as tape:
        z = autograd.sum(add(multiply(x, y), multiply(x, 0.5)))
    assert z.data == 1 * 5 + 2 * 7 + 0.5 * 3
    tape.backward(z)
    assert x.grad.tolist() == [5.5, 7.5] and y.grad.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("number", [1e-8, 65536.0, 2049, 0.1, 1e39, np.float32(0.1), 2**70])
@executors("reference", "gpu")
def test_a_product_with_a_number_is_rounded_once(executor, dtype, number):
    """The number itself may be out of the dtype's range, or between two of its numbers."""
    values = np.array([60000, 0.001, 3, -7, 1e-10]).astype(dtype)
    expected = values.astype(np.float64) * float(number)
    with np.errstate(over="ignore"):
        expected = expected.astype(dtype)
    for data, result in ((values, expected), (values[2], expected[2])):  # 0-d too
        with Tape() as tape:
            x = tape.variable(executor.array(np.asarray(data)))
            y = multiply(x, number)
        tape.backward(y, executor.array(np.asarray(data)))
        assert equal(executor, y.data, np.asarray(result)) and equal(executor, x.grad, np.asarray(result))


@executors("reference", "gpu")
def test_a_product_with_a_number_is_rounded_before_it_is_added(executor):
    """Every addition to a buffer rounds: 2048 + 0.75 is 2048 in float16, and so once more."""
    with Tape() as tape:
        x = tape.variable(executor.array(np.ones(1, np.float16)))
        y = add(multiply(x, 0.75), add(multiply(x, 0.75), multiply(x, 2048)))
    tape.backward(y)
    assert executor.to_numpy(x.grad).tolist() == [2048]
    with Tape() as tape:
        y = multiply(x, 1e-8)
    tape.backward(y, executor.array(np.full(1, 60000, np.float16)))
    assert executor.to_numpy(x.grad).tolist() == [2048]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: add(x, x),
        lambda x: multiply(x, x),
        lambda x: multiply(multiply(x, 1e300), 1e300),
        lambda x: multiply(x, float("nan")),
        lambda x: multiply(x, 0),
        lambda x: add(autograd.sum(x), autograd.sum(multiply(x, -1))),
    ],
)
def test_arithmetic_with_nan_and_overflow_is_silent(function, dtype):
    """As the passes are."""
    for value in (np.inf, -np.inf, np.nan, ml_dtypes.finfo(dtype).max, ml_dtypes.finfo(dtype).tiny):
        for shape in ((), (3,)):
            with Tape() as tape:
                x = tape.variable(np.full(shape, value, dtype))
                y = function(x)
            for _ in range(2):  # into a new buffer, and into that
                tape.backward(y, np.full(y.shape, value, dtype), retain_graph=True)


def test_sum_adds_in_float64():
    """2048 + 1 is 2048 in float16, and in bfloat16 256 + 1 is 256."""
    assert autograd.sum(np.ones(5000, np.float16)).data == 5000
    assert autograd.sum(np.ones(1024, ml_dtypes.bfloat16)).data == 1024


def test_scalars_stay_arrays():
    """NumPy's arithmetic on 0-d arrays answers with scalars, which nothing can be added to in place."""
    with Tape() as tape:
        x = tape.variable(np.array(3.0))
        y = multiply(multiply(add(x, x), x), 0.5)
    assert type(y.data) is np.ndarray and y.shape == ()
    tape.backward(y)
    assert type(x.grad) is np.ndarray and x.grad == 6


def test_gradients_of_arrays_in_any_order_are_in_c_order():
    """A buffer becomes a kernel's target, which must be C-contiguous."""
    data = np.ones((3, 11, 10, 1), np.float32).transpose(3, 2, 0, 1)
    with Tape() as tape:
        x = tape.variable(np.concatenate([data] * 4, axis=1).transpose(0, 1, 3, 2))
        y = add(autograd.sum(psa(x, 2)), autograd.sum(multiply(x, x)))
    tape.backward(y)
    assert x.grad.flags.c_contiguous


@pytest.mark.parametrize("function", [add, multiply])
@pytest.mark.parametrize(
    "a, b, error, message",
    [
        (np.ones(2), np.ones(3), ValueError, "b has shape (3,), expected (2,)"),
        (np.ones(2), np.ones(1), ValueError, "b has shape (1,), expected (2,)"),
        (np.ones(2), np.ones(2, np.float32), TypeError, "b has dtype float32, expected float64"),
        (np.ones(2), "1", TypeError, "b is a str, expected a NumPy or CuPy array"),
        ([1.0], np.ones(1), TypeError, "a is a list, expected a NumPy or CuPy array"),
        (
            np.arange(2),
            np.ones(2),
            TypeError,
            "a has dtype int64, expected one of float16, bfloat16, float32, float64",
        ),
    ],
)
def test_wrong_operands(function, a, b, error, message):
    with pytest.raises(error) as caught:
        function(a, b)
    assert str(caught.value) == f"{function.__name__}: {message}"


@pytest.mark.gpu
def test_numpy_and_cupy_do_not_mix():
    import cupy as cp

    with pytest.raises(TypeError, match="add: arrays must be all NumPy or all CuPy, got a mix"):
        add(np.ones(2), cp.ones(2))
    with Tape() as tape:
        y = multiply(tape.variable(cp.ones(2)), 2)
    with pytest.raises(TypeError, match=r"Tape\.backward: arrays must be all NumPy or all CuPy, got a mix"):
        tape.backward(y, np.ones(2))


@pytest.mark.gpu
def test_another_device():
    import cupy as cp

    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one device only")
    with cp.cuda.Device(1):
        x = Variable(cp.ones((1, 16, 2, 3), cp.float32))
    with Tape() as tape:
        y = autograd.sum(add(psa(x, 2), multiply(extract_v(x, 2), 2)))
    tape.backward(y)
    assert x.grad.device.id == y.data.device.id == 1


def test_errors_are_those_of_the_functional_api():
    for call, message in {
        lambda: pack_qkv(np.ones((16, 2, 3)), 2): "pack_qkv: qkv has shape (16, 2, 3), expected 4 dimensions",
        lambda: pack_qkv([1.0], 2): "pack_qkv: qkv is a list, expected a NumPy or CuPy array",
        lambda: psa(Variable(np.ones((1, 130, 2, 3))), 4): "psa_forward: qkv has 130 channels, which 4 heads",
        lambda: multiply([1.0], 2): "multiply: a is a list, expected a NumPy or CuPy array",
        lambda: autograd.sum(np.arange(3)): "sum: a has dtype int64, expected one of",
    }.items():
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        assert str(caught.value).startswith(message)


# ---- gradcheck


def shape_of(name):
    return {"qkv": (1, 16, 2, 3), "out": (1, 8, 2, 3), "section": (2, 6, 2)}[name]


FUNCTIONS = {
    "psa": (lambda x: psa(x, 2), ["qkv"]),
    "psa, key_dim and scale given": (lambda x: psa(x, 2, key_dim=1, scale=-1.5), ["qkv"]),
    "pack_qkv": (lambda x: pack_qkv(x, 2), ["qkv"]),
    "flash_attention": (flash_attention, ["section"] * 3),
    "merge_attn": (lambda a, b: merge_attn(a, b, 2, 2, 3), ["section"] * 2),
    "extract_v": (lambda x: extract_v(x, 2), ["qkv"]),
    "add": (add, ["out"] * 2),
    "multiply": (multiply, ["out"] * 2),
    "multiply by a number": (lambda x: multiply(x, -2.5), ["out"]),
    "sum": (autograd.sum, ["out"]),
    "one variable twice": (lambda x: multiply(x, x), ["out"]),
    "the staged chain": (lambda x: staged(x, 2, 2, 3), ["qkv"]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@executors("reference", "gpu")
def test_gradcheck_passes(executor, name):
    check_gradients(executor, name)


@pytest.mark.parametrize("name", FUNCTIONS)
@executors("reference", "gpu")
def test_gradcheck_passes_where_gradients_are_held_already(executor, name):
    """Outputs are pulled back one after the other: the function's own backward finds buffers to add to."""
    function, shapes = FUNCTIONS[name]

    def after_others(*xs):
        ys = function(*xs)
        return *(multiply(x, 0.5) for x in xs), *(ys if isinstance(ys, tuple) else (ys,))

    random = np.random.default_rng(1)
    inputs = [executor.array(random.standard_normal(shape_of(s))) for s in shapes]
    with executor.context():
        assert autograd.gradcheck(after_others, inputs) <= 1e-6


@pytest.mark.parametrize("name", ["psa", "the staged chain"])
@executors("cpu")
def test_gradcheck_passes_through_kernels(executor, name):
    check_gradients(executor, name)


def check_gradients(executor, name):
    function, shapes = FUNCTIONS[name]
    random = np.random.default_rng(0)
    inputs = [executor.array(random.standard_normal(shape_of(s))) for s in shapes]
    with executor.context():
        assert autograd.gradcheck(function, inputs) <= 1e-6
