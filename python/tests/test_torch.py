"""torch tensors, published and followed bit for bit."""

import warnings

import driftless_rl
import pytest
import torch
from gpu import OnGpu

DTYPES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
]


def content(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_a_dtype_arrive_bit_for_bit(store, dtype):
    torch.manual_seed(1)
    tensor = torch.randn(65, 7).to(dtype)
    with store.publisher() as publisher:
        publisher.publish({"weight": tensor})
    _, shape, found = store.follow()["weight"]
    assert shape == [65, 7] and found == content(tensor)


def test_state_dict_of_a_module_follows_its_optimiser(store):
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64, bias=False)).bfloat16()
    model[1].weight = model[0].weight
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    with store.publisher() as publisher:
        for step in range(3):
            published = publisher.publish(model.state_dict(), step=step)
            assert published.full_bytes == 64 * 32 * 2, "tied weights count once"
            model(torch.arange(64)).float().pow(2).mean().backward()
            optimiser.step()
            optimiser.zero_grad()
        published = publisher.publish(dict(model.named_parameters(remove_duplicate=False)), step=3)
        assert 0 < published.changed < published.elements
    assert store.follow()["0.weight"][2] == content(model[0].weight)


def test_views_are_read_from_where_they_begin(store):
    whole = torch.arange(64, dtype=torch.float32)
    with store.publisher() as publisher:
        publisher.publish({"view": whole[16:32].view(4, 4)})
    assert store.follow()["view"][2] == content(whole[16:32])


def test_writes_of_the_trainer_need_no_new_object(store):
    weight = torch.zeros(1000, dtype=torch.bfloat16)
    tensors = {"weight": weight}
    with store.publisher() as publisher:
        publisher.publish(tensors)
        weight[5:8] = 1.0
        assert publisher.publish(tensors).changed == 3
    assert store.follow()["weight"][2] == content(weight)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a stand-in for a tensor on a GPU has no memory there")
def test_tensors_of_a_gpu_that_cannot_be_used_are_copied_to_the_host_and_that_is_said_once(store):
    weight, other = torch.randn(300, 7).bfloat16(), torch.randn(5)
    on_gpu = OnGpu(weight)
    with store.publisher() as publisher:
        with pytest.warns(RuntimeWarning, match="copied to the host to be published: .*(libcuda|CUDA)"):
            published = publisher.publish({"gpu": on_gpu, "host": other})
        assert published.device_bytes == 0 and on_gpu.copies > 0
        weight[3] += 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert 0 < publisher.publish([("gpu", on_gpu), ("host", other)]).changed <= 7
    found = store.follow()
    assert found["gpu"][2] == content(weight) and found["host"][2] == content(other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a stand-in for a tensor on a GPU has no memory there")
def test_prepare_copies_nothing_to_the_host_and_says_which_gpu_cannot_be_used(store):
    weight = torch.randn(300, 7).bfloat16()
    on_gpu = OnGpu(weight)
    with store.publisher() as publisher:
        publisher.publish({"gpu": weight})
    with store.publisher(resume=True) as publisher:
        with pytest.warns(RuntimeWarning, match="copied to the host to be published: .*(libcuda|CUDA)"):
            publisher.prepare({"gpu": on_gpu})
        assert on_gpu.copies == 0
        weight[3] += 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert publisher.publish({"gpu": on_gpu}).version == 1
    assert store.follow()["gpu"][2] == content(weight)


def test_device_base_off_copies_to_the_host_without_a_word(store):
    weight = torch.randn(300, 7).bfloat16()
    with store.publisher(device_base="off") as publisher, warnings.catch_warnings():
        warnings.simplefilter("error")
        publisher.prepare({"gpu": OnGpu(weight)})
        publisher.publish({"gpu": OnGpu(weight)})
    assert store.follow()["gpu"][2] == content(weight)


def test_slices_of_a_gpu_are_published_by_ranks(store):
    weight = torch.randn(10, 3).bfloat16()
    with store.publisher(rank=0, ranks=1, device_base="off") as publisher:
        halves = [("w", driftless_rl.Slice(OnGpu(weight[:4]), (10, 3), 0)), ("w", driftless_rl.Slice(OnGpu(weight[4:]), (10, 3), 12))]
        publisher.publish(halves, attempt="job-0")
    assert store.follow()["w"][2] == content(weight)
