"""Inputs in memory of any kind: each public function answers as for a plain copy, and changes none."""

import numpy as np
import pytest

import psa_cupy

from .executors import executors
from .strategies import normal


class Subclass(np.ndarray):
    pass


def reversed_in_memory(xp, x):
    return xp.ascontiguousarray(x[..., ::-1])[..., ::-1]


def every_other_element(xp, x):
    spread = xp.zeros((*x.shape, 2), x.dtype)
    spread[..., 0] = x
    return spread[..., 0]


def broadcast(xp, x):
    return xp.broadcast_to(x[..., :1], x.shape)


def read_only(xp, x):
    x.flags.writeable = False
    return x


def unaligned(xp, x):
    memory = xp.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    memory[...] = x
    assert not memory.flags.aligned
    return memory


ANYWHERE = {
    "Fortran order": lambda xp, x: xp.asfortranarray(x),
    "reversed": reversed_in_memory,
    "every other element": every_other_element,
    "broadcast": broadcast,
}
NUMPY_ONLY = {
    "read-only": read_only,
    "unaligned": unaligned,
    "a subclass": lambda xp, x: x.view(Subclass),
}

QKV, OUT, LSE = (1, 16, 2, 3), (1, 8, 2, 3), (1, 2, 6)  # two heads, key_dim 2
PACKED, HALF = (4, 2, 6, 2), (2, 6, 2)

CALLS = {
    "psa_forward": (lambda qkv: psa_cupy.psa_forward(qkv, 2), (QKV,)),
    "psa_backward": (lambda *a: psa_cupy.psa_backward(*a[:4], 2, d_v_branch=a[4]), (OUT, QKV, OUT, LSE, OUT)),
    "psa_forward_staged": (lambda qkv: psa_cupy.psa_forward_staged(qkv, 2), (QKV,)),
    "psa_backward_staged": (
        lambda *a: psa_cupy.psa_backward_staged(*a[:4], 2, d_v_branch=a[4]),
        (OUT, QKV, OUT, LSE, OUT),
    ),
    "pack_qkv": (lambda qkv: psa_cupy.pack_qkv(qkv, 2), (QKV,)),
    "pack_qkv_backward": (lambda d: psa_cupy.pack_qkv_backward(d, 2, 2, 3), (PACKED,)),
    "extract_v": (lambda qkv: psa_cupy.extract_v(qkv, 2), (QKV,)),
    "extract_v_backward": (lambda d: psa_cupy.extract_v_backward(d, 2), (OUT,)),
    "merge_attn": (lambda lo, hi: psa_cupy.merge_attn(lo, hi, 2, 2, 3), (HALF, HALF)),
    "merge_attn_backward": (lambda d: psa_cupy.merge_attn_backward(d, 2), (OUT,)),
    "flash_attention_forward": (psa_cupy.flash_attention_forward, (HALF, HALF, HALF)),
    "flash_attention_backward": (psa_cupy.flash_attention_backward, (HALF, HALF, HALF, HALF, HALF, LSE[1:])),
    "attention_map": (lambda qkv: psa_cupy.attention_map(qkv, 2, [0, 5]), (QKV,)),
}


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


@executors("reference", "cpu", "gpu")
@pytest.mark.parametrize("name", CALLS)
def test_any_memory_will_do(executor, name):
    function, shapes = CALLS[name]
    kinds = ANYWHERE if executor.name == "gpu" else ANYWHERE | NUMPY_ONLY
    for kind, lay in kinds.items():
        plain = [executor.xp.asarray(normal(shape, np.float32, seed)) for seed, shape in enumerate(shapes)]
        odd = [lay(executor.xp, x.copy()) for x in plain]
        plain = [executor.xp.array(x, order="C") for x in odd]  # broadcast has other values
        results = as_tuple(executor.run(function, *odd))
        expected = as_tuple(executor.run(function, *plain))
        for x, before in zip(odd, plain, strict=True):
            assert (executor.to_numpy(x) == executor.to_numpy(before)).all(), f"{kind}: an input was changed"
        for result, wanted in zip(results, expected, strict=True):
            assert type(result) is executor.xp.ndarray and result.flags.c_contiguous, kind
            result, wanted = executor.to_numpy(result), executor.to_numpy(wanted)
            if name == "attention_map":  # array arithmetic, whose sums may follow the layout
                np.testing.assert_allclose(result, wanted, rtol=1e-6, err_msg=kind)
            else:
                assert result.tobytes() == wanted.tobytes(), kind
