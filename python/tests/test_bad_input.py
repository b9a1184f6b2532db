"""What no version is made of, each with its exception; the version before stays."""

import pickle
import threading

import driftless_rl
import numpy as np
import pytest
import torch
from gpu import OnGpu
from torch._subclasses import FakeTensorMode


def freed() -> torch.Tensor:
    tensor = torch.zeros(8)
    tensor.untyped_storage().resize_(0)
    return tensor


class Wrapper(torch.Tensor):
    """A tensor that stands for others, as those of torchao do."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (4,), dtype=torch.float32, device="cpu")

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was asked for")


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(3)


def lazy(shape, read=None) -> driftless_rl.LazyTensor:
    return driftless_rl.LazyTensor(shape, np.dtype(np.float32), read or (lambda: np.zeros(shape, np.float32)))


class OnAnotherDevice:
    """As much of a tensor as is looked at before its device is refused."""

    device = torch.device("xpu", 0)

    def untyped_storage(self):
        raise AssertionError("memory of a device was asked for")


UNREADABLE = {
    "transposed": (lambda: torch.zeros(3, 4).T, "contiguous"),
    "strided": (lambda: np.zeros((4, 4))[:, ::2], "contiguous"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "contiguous"),
    "meta": (lambda: torch.zeros(3, device="meta"), "`meta`"),
    "another device": (OnAnotherDevice, "tensor.cpu()"),
    "transposed on a gpu": (lambda: OnGpu(torch.zeros(3, 4).T), "contiguous"),
    "freed on a gpu": (lambda: OnGpu(freed()), "0 bytes"),
    "of another dtype on a gpu": (lambda: OnGpu(torch.zeros(3, dtype=torch.complex128)), "complex128"),
    "freed": (freed, "0 bytes"),
    "fake": (fake, "FakeTensor"),
    "fake on a gpu": (lambda: OnGpu(fake()), "memory of its own"),
    "wrapper": (Wrapper, "Wrapper"),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged), "jagged"),
    "conjugate": (lambda: torch.zeros(3, dtype=torch.complex64).conj(), "resolve_conj"),
    "complex128": (lambda: torch.zeros(3, dtype=torch.complex128), "complex128"),
    "objects": (lambda: np.array([None, "a"]), "object"),
    "masked": (lambda: np.ma.masked_equal(np.arange(3.0), 1), "array.filled"),
    "lazy beyond 64 bits": (lambda: lazy((2**62, 8)), "fewer than 2^64 bytes"),
    "lazy of bytes beyond 64 bits": (lambda: lazy((2**62,)), "fewer than 2^64 bytes"),
    "lazy of a negative extent": (lambda: lazy((-1,)), "extents from 0 on"),
    "big-endian": (lambda: np.zeros(3, ">f4"), "big-endian"),
    "list": (lambda: [1.0, 2.0], "list"),
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("given", UNREADABLE)
def test_tensor_that_cannot_be_read_is_refused_by_name(store, given):
    make, word = UNREADABLE[given]
    with store.publisher() as publisher:
        with pytest.raises(driftless_rl.TensorError) as raised:
            publisher.publish({"good": np.zeros(3, np.float32), "model.bad.weight": make()})
        assert raised.value.tensor == "model.bad.weight" and word in str(raised.value)
        assert isinstance(raised.value, ValueError) and not raised.value.retryable
        assert publisher.version is None
    assert store.manifests() == []


def two() -> dict[str, np.ndarray]:
    return {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}


OTHER = {
    "lost": lambda tensors: tensors.pop("b"),
    "renamed": lambda tensors: tensors.update(c=tensors.pop("b")),
    "reshaped": lambda tensors: tensors.update(a=np.zeros((3, 2), np.float32)),
    "of another dtype": lambda tensors: tensors.update(b=np.zeros(4, np.float16)),
}


@pytest.mark.parametrize("change", OTHER)
@pytest.mark.filterwarnings("ignore:tensors on a GPU")
def test_other_tensors_than_before_are_refused_unless_allowed(store, change):
    tensors = two()
    with store.publisher() as publisher:
        publisher.publish(tensors)
        OTHER[change](tensors)
        on_gpu = {name: OnGpu(torch.from_numpy(array)) for name, array in tensors.items()}
        for given in (tensors, on_gpu):
            with pytest.raises(driftless_rl.LayoutChangedError) as raised:
                publisher.publish(given)
            assert raised.value.kind == "LayoutChanged" and raised.value.code == 1
        assert publisher.version == 0
    assert set(store.follow()) == {"a", "b"}
    with store.publisher(resume=True, allow_layout_change=True) as publisher:
        assert "layout" in publisher.publish(tensors).full_because


@pytest.mark.filterwarnings("ignore:tensors on a GPU")
def test_elements_that_are_not_finite_are_refused_unless_allowed(store):
    tensors = two()
    tensors["b"][2] = np.nan
    with store.publisher() as publisher:
        with pytest.raises(driftless_rl.NotFiniteError) as raised:
            publisher.publish(tensors)
        assert raised.value.tensor == "b" and "index 2" in str(raised.value)
        with pytest.raises(driftless_rl.NotFiniteError):
            publisher.publish({name: OnGpu(torch.from_numpy(array)) for name, array in tensors.items()})
        assert publisher.version is None
    with store.publisher(resume=True, allow_non_finite=True) as publisher:
        publisher.publish(tensors)


@pytest.mark.parametrize("name", [1, b"a", None], ids=repr)
def test_name_that_is_no_text_is_refused(store, name):
    with store.publisher() as publisher, pytest.raises(TypeError):
        publisher.publish({name: np.zeros(2)})
    assert store.manifests() == []


def test_name_that_no_checkpoint_can_have_is_refused_before_anything_is_there(store):
    with store.publisher() as publisher:
        with pytest.raises(driftless_rl.UsageError, match="__metadata__"):
            publisher.publish(two() | {"__metadata__": np.zeros(2)})
        assert store.manifests() == [] and publisher.publish(two()).version == 0
    assert set(store.follow()) == {"a", "b"}


def test_name_that_stands_twice_is_refused(store):
    with store.publisher() as publisher, pytest.raises(driftless_rl.TensorError, match="twice"):
        publisher.publish([("a", np.zeros(2)), ("a", np.ones(2))])


def test_runs_that_are_taken_or_missing_are_told_apart(store, tmp_path):
    with pytest.raises(driftless_rl.RunError) as raised:
        store.publisher(resume=True)
    assert raised.value.kind == "NoSuchRun"
    with store.publisher():
        with pytest.raises(driftless_rl.RunError) as raised:
            store.publisher(baseline_dir=tmp_path / "other")
        assert raised.value.kind == "RunExists"
        assert "`resume=True`" in str(raised.value) and "resume_from_checkpoint=True" in str(raised.value)
        with pytest.raises(driftless_rl.BusyError) as raised:
            store.publisher(resume=True)
        assert raised.value.kind == "Locked"


def test_resume_auto_begins_a_run_and_goes_on_with_it(store, tmp_path):
    for version in range(2):
        with store.publisher(resume="auto") as publisher:
            assert publisher.publish({"a": np.full(3, version, np.float32)}).version == version
    parts = [{"rank": rank, "ranks": 2, "baseline_dir": tmp_path / f"{rank}"} for rank in range(2)]
    with store.publisher(resume="auto", **parts[0]) as first, store.publisher(resume="auto", **parts[1]) as second:
        assert first.run_id == second.run_id and first.version == 1


def test_second_publisher_loses_the_race(store, tmp_path):
    with store.publisher() as first, store.publisher(resume=True, baseline_dir=tmp_path / "other") as second:
        first.publish(two())
        with pytest.raises(driftless_rl.RunError) as raised:
            second.publish(two())
        assert raised.value.kind == "LostRace"


@pytest.mark.parametrize(
    "settings",
    [{"profile": "small"}, {"resume": "always"}, {"notify": ["follower:1"]}, {"threads": 0}, {"device_base": "disk"}, {"rank": 0}, {"rank": 2, "ranks": 2}, {"join_deadline": -1.0}, {"hf_checkpoint": "/no/such/dir"}],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_cannot_be_are_refused(store, settings):
    with pytest.raises(driftless_rl.UsageError):
        store.publisher(**settings)
    assert not (store.root / "store").exists() or store.manifests() == []


def test_slice_of_more_than_can_be_is_refused(store):
    part = driftless_rl.Slice(np.zeros(2), shape=[2**62, 8], start=0)
    with store.publisher(rank=0, ranks=2) as publisher:
        with pytest.raises(driftless_rl.TensorError, match="fewer than 2\\^64 bytes"):
            publisher.publish({"a": part}, attempt="job-0")


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), SystemExit(7)], ids=repr)
def test_what_ends_the_program_passes_through_a_lazy_tensor(store, raised):
    def read():
        raise raised

    with store.publisher() as publisher:
        with pytest.raises(type(raised)) as caught:
            publisher.publish({"a": lazy((3,), read)})
        assert caught.value is raised
        assert publisher.publish({"a": lazy((3,))}).version == 0


def test_exception_of_a_lazy_tensor_is_told_by_name(store):
    with store.publisher() as publisher:
        with pytest.raises(driftless_rl.TensorError, match="ZeroDivisionError") as raised:
            publisher.publish({"a": lazy((3,), lambda: 1 / 0)})
        assert raised.value.tensor == "a" and raised.value.kind == "HostCopy"


@pytest.mark.parametrize("make", [lambda array: array, lambda array: array[3:].reshape(-1, 1)], ids=["whole", "view"])
def test_array_keeps_its_memory_while_it_is_published(store, make):
    array, reading, over = np.zeros(100_003, np.float32), threading.Event(), threading.Event()

    def read():
        reading.set()
        assert over.wait(60)
        return np.zeros(3, np.float32)

    with store.publisher() as publisher:
        future = publisher.publish_async({"a": make(array), "b": lazy((3,), read)})
        assert reading.wait(60)
        try:
            with pytest.raises(ValueError, match="resize"):
                array.resize(10, refcheck=False)
        finally:
            over.set()
        assert future.result(timeout=60).version == 0
        del future
    array.resize(10, refcheck=False)
    assert store.follow()["b"][1] == [3]


def test_tensor_keeps_its_memory_while_it_is_published(store):
    tensor, reading, over = torch.arange(1 << 20), threading.Event(), threading.Event()

    def read():
        reading.set()
        assert over.wait(60)
        return np.zeros(3, np.float32)

    with store.publisher() as publisher:
        future = publisher.publish_async({"a": lazy((3,), read), "b": tensor})
        assert reading.wait(60)
        tensor.data = torch.zeros(3, dtype=tensor.dtype)
        over.set()
        assert future.result(timeout=60).version == 0
    assert store.follow()["b"][2] == torch.arange(1 << 20).numpy().tobytes()


def test_slice_without_ranks_is_refused(store):
    with store.publisher() as publisher, pytest.raises(driftless_rl.TensorError, match="ranks="):
        publisher.publish({"a": driftless_rl.Slice(np.zeros(2), shape=[4], start=0)})


def test_damaged_version_has_code_3(store, tmp_path):
    with store.publisher() as publisher:
        publisher.publish(two())
    (manifest,) = store.manifests()
    manifest.write_bytes(b"{")
    with pytest.raises(driftless_rl.RefusedError) as raised:
        store.publisher(resume=True, baseline_dir=tmp_path / "other")
    assert raised.value.code == 3


def test_closed_publisher_says_so(store):
    publisher = store.publisher()
    publisher.close()
    for call in (publisher.publish, publisher.publish_async):
        with pytest.raises(driftless_rl.ClosedError):
            call(two())
    publisher.close()


def test_exceptions_travel_between_processes():
    error = driftless_rl.NotFiniteError("text", kind="NotFinite", code=1, retryable=False, tensor="a")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == "text" and again.tensor == "a"
