"""Deltas of single tensors."""

import driftless_rl
import ml_dtypes
import numpy as np
import pytest
import torch


@pytest.mark.parametrize("profile", ["wire", "fast"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32, np.int64], ids=lambda dtype: dtype.__name__)
def test_payload_turns_the_base_into_the_new_tensor(dtype, profile):
    rng = np.random.default_rng(5)
    base = rng.normal(size=(300, 301)).astype(dtype)
    new = base.copy()
    changed = rng.choice(base.size, 250, replace=False)
    new.reshape(-1).view(np.uint8)[changed * base.itemsize] ^= 1
    codec = driftless_rl.Codec(profile)
    payload = codec.encode(base, new)
    assert len(payload) < base.nbytes // 20
    assert codec.apply(base, payload) == 250
    assert base.tobytes() == new.tobytes()


def test_torch_tensors_are_patched_in_place():
    torch.manual_seed(5)
    base = torch.randn(1000, dtype=torch.bfloat16)
    new = base.clone()
    new[7] = 2.0
    assert driftless_rl.Codec().apply(base, driftless_rl.Codec().encode(base, new)) == 1
    assert torch.equal(base, new)


def test_other_base_or_damaged_payload_writes_nothing():
    base, codec = np.arange(1000, dtype=np.float32), driftless_rl.Codec()
    new = base.copy()
    new[1] = -1
    payload = codec.encode(base, new)
    other = base + 1
    for tensor, bad in [(other, payload), (base, payload[:-3]), (base, b""), (base.astype(np.float64), payload)]:
        before = tensor.copy()
        with pytest.raises(driftless_rl.RefusedError) as raised:
            codec.apply(tensor, bad)
        assert raised.value.code == 3 and np.array_equal(tensor, before)


def test_tensors_that_do_not_fit_are_refused():
    codec, base = driftless_rl.Codec(), np.zeros(4, np.float32)
    with pytest.raises(driftless_rl.TensorError, match="dtype"):
        codec.encode(base, np.zeros(4, np.float16))
    with pytest.raises(driftless_rl.RefusedError):
        codec.encode(base, np.zeros(5, np.float32))
    base.flags.writeable = False
    with pytest.raises(driftless_rl.TensorError, match="read-only"):
        codec.apply(base, codec.encode(base, base))
    with pytest.raises(driftless_rl.UsageError):
        driftless_rl.Codec("small")
