"""Launches on a GPU: streams, graphs, threads, memory, repeatability."""

import threading

import ml_dtypes
import numpy as np
import pytest

import psa_cupy
from psa_cupy import testing
from psa_cupy.geometry import PSAGeometry
from psa_cupy.passes.descriptor import PSAProblem
from psa_cupy.passes.psa import PSA, backward_with, forward_with

pytestmark = pytest.mark.gpu

BF16 = np.dtype(ml_dtypes.bfloat16)
HEADS = 2
REPEAT_TOKENS = (33, 257, 400, 1600)


@pytest.fixture
def cp():
    return pytest.importorskip("cupy")


def inputs(cp, height, width, dtype=BF16, batch=2, heads=HEADS, key_dim=32, seed=0):
    """Qkv and d_out on the current device."""
    geometry = PSAGeometry(batch, heads, key_dim, 2 * key_dim, height, width)
    rng = np.random.default_rng(seed)
    qkv, d_out = (
        cp.asarray(rng.standard_normal(shape, dtype=np.float32).astype(dtype))
        for shape in (geometry.qkv_shape, geometry.out_shape)
    )
    return qkv, d_out


def bits(cp, *arrays):
    return [cp.asnumpy(a).tobytes() for a in arrays]


def variants(cp, direction, qkv, heads=HEADS, key_dim=32):
    """The names of the variants that support this call here."""
    from psa_cupy.launching import gpu

    geometry = PSAGeometry.from_qkv("test", qkv.shape, heads, key_dim)
    problem = PSAProblem(geometry, qkv.dtype, key_dim**-0.5)
    device = gpu.device(cp.cuda.runtime.getDevice())
    return [v.name for v in PSA.variants[direction] if v.supports(problem, device)]


@pytest.mark.parametrize("tokens", REPEAT_TOKENS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_forward_repeats_to_the_bit(cp, tokens, dtype):
    qkv, _ = inputs(cp, 1, tokens, np.dtype(dtype))
    for variant in variants(cp, "forward", qkv):
        first = bits(cp, *forward_with(variant, qkv, HEADS))
        for _ in range(100):
            assert bits(cp, *forward_with(variant, qkv, HEADS)) == first, variant


@pytest.mark.parametrize("tokens", REPEAT_TOKENS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_backward_repeats_to_the_bit(cp, tokens, dtype):
    qkv, d_out = inputs(cp, 1, tokens, np.dtype(dtype))
    out, lse = psa_cupy.psa_forward(qkv, HEADS)
    for variant in variants(cp, "backward", qkv):
        first = backward_with(variant, d_out, qkv, out, lse, HEADS).view(cp.uint8)
        differing = cp.zeros((), cp.int64)
        for _ in range(250):
            again = backward_with(variant, d_out, qkv, out, lse, HEADS).view(cp.uint8)
            differing += (again != first).sum()
        assert int(differing) == 0, variant


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sizes_may_come_in_any_order(cp, dtype):
    """Plans that differ in shared memory alone share a kernel, and the driver keeps one allowance for it."""
    for width in (300, 196, 300, 44, 108, 300, 196):
        qkv, d_out = inputs(cp, 1, width, np.dtype(dtype))
        out, lse = psa_cupy.psa_forward(qkv, HEADS)
        for variant in variants(cp, "forward", qkv):
            assert (
                max(testing.psa_forward_ratios(qkv, *forward_with(variant, qkv, HEADS), HEADS).values()) <= 1
            )
        for variant in variants(cp, "backward", qkv):
            d_qkv = backward_with(variant, d_out, qkv, out, lse, HEADS)
            assert max(testing.psa_backward_ratios(d_out, qkv, d_qkv, HEADS).values()) <= 1


def test_two_streams_give_the_same_bits(cp):
    qkv, d_out = inputs(cp, 20, 20)
    out, lse = psa_cupy.psa_forward(qkv, HEADS)
    expected = bits(cp, out, lse, psa_cupy.psa_backward(d_out, qkv, out, lse, HEADS))
    cp.cuda.Device().synchronize()
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    results = []
    for stream in streams:
        with stream:
            o, s = psa_cupy.psa_forward(qkv, HEADS)
            results.append((o, s, psa_cupy.psa_backward(d_out, qkv, o, s, HEADS)))
    cp.cuda.Device().synchronize()
    for result in results:
        assert bits(cp, *result) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("side", [20, 19, 40])
def test_a_captured_graph_computes_new_inputs(cp, side, dtype):
    """Launches go to the current stream (else nothing is captured), and replaying adds no gradient twice."""
    qkv, d_out = inputs(cp, side, side, np.dtype(dtype))
    other_qkv, other_d_out = inputs(cp, side, side, np.dtype(dtype), seed=1)
    out, lse = psa_cupy.psa_forward(other_qkv, HEADS)
    expected = bits(cp, out, lse, psa_cupy.psa_backward(other_d_out, other_qkv, out, lse, HEADS))
    psa_cupy.psa_backward(d_out, qkv, *psa_cupy.psa_forward(qkv, HEADS), HEADS)

    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        results = psa_cupy.psa_forward(qkv, HEADS)
        d_qkv = psa_cupy.psa_backward(d_out, qkv, *results, HEADS)
        graph = stream.end_capture()
        cp.copyto(qkv, other_qkv)
        cp.copyto(d_out, other_d_out)
        for _ in range(3):
            graph.launch(stream)
        # What was freed during the capture must not be what the graph still writes to.
        fill = [cp.full(s, 7, cp.float32) for s in (100, 1600, 3200, 12800, 51200)]
        graph.launch(stream)
        stream.synchronize()
        assert all(bool((f == 7).all()) for f in fill)
    assert bits(cp, *results, d_qkv) == expected


def test_a_cold_call_inside_a_capture_raises(cp):
    qkv, _ = inputs(cp, 3, 11, batch=1)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match="call once before the capture"):
                psa_cupy.psa_forward(qkv, HEADS)
        finally:
            stream.end_capture()
    cp.cuda.Device().synchronize()
    assert bool(cp.isfinite(psa_cupy.psa_forward(qkv, HEADS).lse).all())


def test_threads(cp):
    """Several threads with one plan: each has its own argument buffers."""
    pairs = [inputs(cp, 20, 20, seed=seed) for seed in range(4)]
    expected = []
    for qkv, d_out in pairs:
        out, lse = psa_cupy.psa_forward(qkv, HEADS)
        expected.append(bits(cp, out, lse, psa_cupy.psa_backward(d_out, qkv, out, lse, HEADS)))
    wrong = []

    def work(index):
        qkv, d_out = pairs[index]
        with cp.cuda.Stream(non_blocking=True) as stream:
            for _ in range(50):
                out, lse = psa_cupy.psa_forward(qkv, HEADS)
                d_qkv = psa_cupy.psa_backward(d_out, qkv, out, lse, HEADS)
                stream.synchronize()
                if bits(cp, out, lse, d_qkv) != expected[index]:
                    wrong.append(index)

    cp.cuda.Device().synchronize()
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(pairs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def allocated_by(cp, function):
    """The results, and the bytes that the pool took from the device for the call: results and scratch."""
    function()  # compile
    pool = cp.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    results = function()
    cp.cuda.Device().synchronize()
    return results, pool.total_bytes() - before


def test_forward_of_a_very_large_image_needs_no_scratch_to_speak_of(cp):
    qkv, _ = inputs(cp, 188, 188, batch=1, heads=4)
    (out, lse), allocated = allocated_by(cp, lambda: psa_cupy.psa_forward(qkv, 4))
    assert allocated <= out.nbytes + lse.nbytes + (2 << 20)


def test_backward_needs_scratch_of_order_bh_n(cp):
    qkv, d_out = inputs(cp, 80, 80, batch=4, heads=4)
    out, lse = psa_cupy.psa_forward(qkv, 4)
    d_qkv, allocated = allocated_by(cp, lambda: psa_cupy.psa_backward(d_out, qkv, out, lse, 4))
    assert allocated <= d_qkv.nbytes + 4 * lse.nbytes + (2 << 20)


def test_a_view_of_d_out_gives_the_bits_of_its_copy(cp):
    qkv, d_out = inputs(cp, 20, 20)
    out, lse = psa_cupy.psa_forward(qkv, HEADS)
    for view in (
        cp.broadcast_to(d_out[:1, :, :, :1], d_out.shape),
        cp.ascontiguousarray(d_out.transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2),
    ):
        expected = psa_cupy.psa_backward(cp.ascontiguousarray(view), qkv, out, lse, HEADS)
        assert bits(cp, psa_cupy.psa_backward(view, qkv, out, lse, HEADS)) == bits(cp, expected)


def test_prepared_calls_check_what_can_change(cp):
    """After a good call, the same shapes with bad arrays still raise, and unaligned ones are still right."""
    qkv, _ = inputs(cp, 20, 20)
    out, lse = psa_cupy.psa_forward(qkv, HEADS)
    expected = bits(cp, out, lse)
    with pytest.raises(ValueError, match="out overlaps qkv"):
        psa_cupy.psa_forward(qkv, HEADS, out=qkv.reshape(-1)[: out.size].reshape(out.shape))
    with pytest.raises(TypeError, match="lse has dtype float16"):
        psa_cupy.psa_forward(qkv, HEADS, lse=lse.astype(cp.float16))
    with pytest.raises(TypeError, match="num_heads is a float"):
        psa_cupy.psa_forward(qkv, 2.0)
    with pytest.raises(TypeError, match="mix"):
        psa_cupy.psa_forward(qkv, HEADS, out=cp.asnumpy(out))
    psa_cupy.psa_backward(out, qkv, out, lse, HEADS)
    with pytest.raises(TypeError, match="d_out is None"):
        psa_cupy.psa_backward(None, qkv, out, lse, HEADS)
    with pytest.raises(TypeError, match="mix"):
        psa_cupy.psa_backward(cp.asnumpy(out), qkv, out, lse, HEADS)
    shifted = cp.empty(qkv.size + 1, qkv.dtype)[1:].reshape(qkv.shape)
    shifted[...] = qkv
    unaligned = psa_cupy.psa_forward(shifted, HEADS)
    assert float(abs(unaligned.out.astype("f4") - out.astype("f4")).max()) < 0.05
    again = psa_cupy.psa_forward(qkv, HEADS, out=cp.empty_like(out), lse=cp.empty_like(lse))
    assert bits(cp, *again) == expected
