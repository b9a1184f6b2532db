"""numpy arrays, published and followed bit for bit."""

import threading

import ml_dtypes
import numpy as np
import pytest

SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
    "complex64": "C64",
}


def arrived(array: np.ndarray) -> tuple[str, list[int], bytes]:
    return SAFETENSORS[array.dtype.name], list(array.shape), array.tobytes()


def of_every_dtype() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    normal = rng.normal(size=(7, 33))
    return {
        f"{name}.weight": normal.astype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)
        for name in SAFETENSORS
        # A power of two has no sign.
        if name != "float8_e8m0fnu"
    } | {"float8_e8m0fnu.weight": np.abs(normal).astype(ml_dtypes.float8_e8m0fnu)}


def test_arrays_of_every_dtype_arrive_bit_for_bit(store):
    tensors = of_every_dtype()
    with store.publisher() as publisher:
        published = publisher.publish(tensors, step=7)
    assert published.version == 0 and published.anchor and "first" in published.full_because
    assert store.follow() == {name: arrived(array) for name, array in tensors.items()}


def test_scalars_empty_and_read_only_arrays_arrive(store):
    fixed = np.arange(6, dtype=np.float32).reshape(2, 3)
    fixed.flags.writeable = False
    tensors = {"scalar": np.float32(2.5).reshape(()), "empty": np.zeros((0, 4), np.float16), "fixed": fixed}
    with store.publisher() as publisher:
        publisher.publish(tensors)
    assert store.follow() == {name: arrived(array) for name, array in tensors.items()}


def test_changes_are_published_as_deltas_of_exactly_what_changed(store):
    rng = np.random.default_rng(2)
    weight = rng.normal(size=(512, 512)).astype(ml_dtypes.bfloat16)
    with store.publisher() as publisher:
        publisher.publish({"weight": weight})
        for step in range(1, 4):
            changed = rng.choice(weight.size, 100, replace=False)
            weight.reshape(-1).view(np.uint16)[changed] ^= 1
            # Pairs from a generator do as well as a dict.
            published = publisher.publish((pair for pair in [("weight", weight)]), step=step)
            assert (published.version, published.changed, published.full_because) == (step, 100, None)
            assert published.elements == weight.size and published.density == 100 / weight.size
            assert published.publication_bytes < published.full_bytes // 50
        assert publisher.version == 3
    assert store.follow() == {"weight": arrived(weight)}


def test_publisher_opened_again_goes_on_with_the_run(store):
    weight = np.arange(100, dtype=np.float32)
    with store.publisher() as publisher:
        publisher.publish({"weight": weight})
        run_id = publisher.run_id
    weight[3] = -1
    with store.publisher(resume=True) as publisher:
        assert (publisher.version, publisher.run_id) == (0, run_id)
        assert publisher.publish({"weight": weight}).changed == 1
        published = publisher.publish({"weight": weight}, mode="full")
        assert "asked" in published.full_because
    assert store.follow() == {"weight": arrived(weight)}


def test_files_of_a_checkpoint_travel_and_those_given_win(store, tmp_path):
    start = tmp_path / "start"
    start.mkdir()
    (start / "config.json").write_bytes(b"{}")
    (start / "tokenizer.json").write_bytes(b"[1]")
    (start / "model.safetensors").write_bytes(b"left alone")
    with store.publisher(hf_checkpoint=start) as publisher:
        publisher.publish({"weight": np.zeros(1, np.float32)})
    assert store.follow()["weight"] == ("F32", [1], bytes(4))
    assert (tmp_path / "host/tokenizer.json").read_bytes() == b"[1]"


def test_checkpoint_published_by_reference_is_the_base_of_deltas(store, tmp_path):
    weight = np.arange(1000, dtype=np.float16)
    with store.publisher(model="first") as publisher:
        publisher.publish({"weight": weight})
    start = tmp_path / "start"
    from conftest import run_command

    follow = ["follow", "--store", store.url, "--run", "run", "--model", "first", "--once", "--checkpoint-dir", str(start)]
    run_command(*follow)
    with store.publisher(resume=True, baseline_dir=tmp_path / "other") as publisher:
        assert publisher.publish_reference(start).publication_bytes < 10_000
        weight[1] = -7
        assert publisher.publish({"weight": weight}).changed == 1


def test_asynchronous_publication_is_waited_for(store):
    weight = np.arange(1 << 20, dtype=np.float32)
    with store.publisher() as publisher:
        future = publisher.publish_async({"weight": weight}, step=3)
        assert future.result(timeout=120).version == 0 and future.done()
        weight[0] = 9
        assert publisher.publish_async({"weight": weight}).result(timeout=120).changed == 1
    assert store.follow() == {"weight": arrived(weight)}


def test_pairs_are_taken_before_an_asynchronous_call_returns(store):
    weight, taken = np.arange(9, dtype=np.float32), []

    def pairs():
        taken.append(threading.get_ident())
        yield "weight", weight

    with store.publisher() as publisher:
        future = publisher.publish_async(pairs())
        assert taken == [threading.get_ident()]
        assert future.result(timeout=120).version == 0
    assert store.follow() == {"weight": arrived(weight)}


@pytest.mark.parametrize("profile", ["wire", "fast"])
def test_both_profiles_arrive(store, profile):
    weight = np.arange(10_000, dtype=np.float32)
    with store.publisher(profile=profile, anchor_every=2) as publisher:
        for step in range(3):
            weight[step] += 1
            published = publisher.publish({"weight": weight})
            assert published.anchor == (step % 2 == 0)
    assert store.follow() == {"weight": arrived(weight)}
