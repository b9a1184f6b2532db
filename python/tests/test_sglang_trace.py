"""What the plugin learns of a model from its load_weights, without SGLang."""

import concurrent.futures
import threading

import pytest
import torch
from driftless_rl._trace import Untraceable, View, learn
from torch import nn

BF16 = torch.bfloat16


def parameter(*size: int, dtype: torch.dtype = BF16) -> nn.Parameter:
    return nn.Parameter(torch.full(size, 7.0, dtype=dtype), requires_grad=False)


class Model(nn.Module):
    """A model of one parameter, loaded by ``load``."""

    def __init__(self, weight: nn.Parameter, load) -> None:
        super().__init__()
        self.weight, self._load = weight, load

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self._load(self.weight.data, name, tensor)


def learned(model: nn.Module, **tensors: tuple[int, ...]):
    """The map; the weights are seen to be what they were."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        return learn(model, {name: (shape, BF16) for name, shape in tensors.items()})
    finally:
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_fused_and_sharded_tensors_are_learned_as_views():
    def rows(weight, name, tensor):
        weight.narrow(0, {"q": 0, "k": 4}[name], tensor.shape[0]).copy_(tensor)

    found = learned(Model(parameter(6, 4), rows), q=(4, 4), k=(2, 4))
    [copy] = found.copies["k"]
    assert (copy.source, copy.target) == (View(0, (2, 4), (4, 1)), View(16, (2, 4), (4, 1)))

    column = Model(parameter(4, 2), lambda weight, name, tensor: weight.copy_(tensor.narrow(1, 2, 2).contiguous()))
    [copy] = learned(column, w=(4, 4)).copies["w"]
    assert (copy.source, copy.target) == (View(2, (4, 2), (4, 1)), View(0, (4, 2), (2, 1)))

    transposed = Model(parameter(4, 3), lambda weight, name, tensor: weight.copy_(tensor.t()))
    [copy] = learned(transposed, w=(3, 4)).copies["w"]
    assert copy.source == View(0, (4, 3), (1, 4))


def test_padding_is_covered_by_its_constant():
    def load(weight, name, tensor):
        weight[:3].copy_(tensor)
        weight[3:].fill_(0)

    [copy] = learned(Model(parameter(4, 2), load), w=(3, 2)).copies["w"]
    assert copy.target == View(0, (3, 2), (2, 1))


def joining(make):
    """A loader that makes one tensor of two."""
    kept = []

    def load(weight, name, tensor):
        kept.append(tensor)
        if len(kept) == 2:
            weight.copy_(make(kept))

    return load


def test_joined_tensors_are_learned_as_several_copies():
    def load(weight, name, tensor):
        kept.append(tensor)
        if len(kept) == 2:
            both = torch.cat(kept, dim=-1)
            kept[0].add_(1)  # the joined tensor has a copy
            weight.copy_(both)

    kept = []
    found = learned(Model(parameter(4, 5), load), a=(4, 2), b=(4, 3))
    [[first], [second]] = found.copies["a"], found.copies["b"]
    assert (first.source, first.target) == (View(0, (4, 2), (2, 1)), View(0, (4, 2), (5, 1)))
    assert (second.source, second.target) == (View(0, (4, 3), (3, 1)), View(2, (4, 3), (5, 1)))
    assert found.tables == []


def test_bits_that_are_copied_as_they_are_need_no_table():
    def load(weight, name, tensor):
        weight.view(torch.int8).copy_(tensor.view(torch.int8))

    fp8 = torch.float8_e4m3fn
    weight = nn.Parameter(torch.zeros(4, 2, dtype=fp8), requires_grad=False)
    found = learn(Model(weight, load), {"w": ((4, 2), fp8)})
    assert found.copies["w"][0].target == View(0, (4, 2), (2, 1)) and found.tables == []
    with pytest.raises(Untraceable, match="seen as torch.float8_e4m3fn"):
        learn(Model(weight, load), {"w": ((4, 2), torch.float8_e5m2)})


def values(dtype: torch.dtype = BF16) -> torch.Tensor:
    """All values of 16 bits."""
    return torch.arange(1 << 16).to(torch.uint16).view(dtype)


THIRD = torch.tensor([0.3])


def in_place(weight, name, tensor):
    tensor += 1.0
    weight.copy_(tensor)


@pytest.mark.parametrize(
    ("load", "dtype", "made"),
    [
        (lambda weight, name, tensor: weight.copy_(tensor), torch.float32, lambda x: x.float()),
        (lambda weight, name, tensor: weight.copy_(tensor), torch.float16, lambda x: x.half()),
        (lambda weight, name, tensor: weight.copy_(tensor + 1), BF16, lambda x: x + 1),
        (in_place, BF16, lambda x: x + 1),
        (lambda weight, name, tensor: weight.copy_(tensor).add_(1.0), torch.float32, lambda x: x.float() + 1),
        (lambda weight, name, tensor: weight.copy_(-tensor.float().exp()), BF16, lambda x: (-x.float().exp()).to(BF16)),
        (lambda weight, name, tensor: weight.copy_(tensor * THIRD), BF16, lambda x: (x * THIRD).to(BF16)),
        (lambda weight, name, tensor: weight.copy_(tensor.float()[:4]), BF16, lambda x: x.float().to(BF16)),
    ],
)
def test_what_a_loader_makes_of_each_element_is_a_table(load, dtype, made):
    found = learned(Model(parameter(4, 2, dtype=dtype), load), w=(4, 2))
    [copy], [table] = found.copies["w"], found.tables
    assert copy.source == copy.target == View(0, (4, 2), (2, 1)) and copy.table == 0
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    assert torch.equal(table.view(bits), made(values()).view(bits))


def test_copies_that_are_made_alike_share_a_table():
    class Two(Model):
        def __init__(self) -> None:
            super().__init__(parameter(4, 2, dtype=torch.float32), None)
            self.norm, self.gate = parameter(4), parameter(4, 2, dtype=torch.float32)
            # What SGLang keeps of Gemma's norms.
            self.register_buffer("more", torch.ones(4, dtype=BF16))

        def load_weights(self, weights) -> None:
            for name, tensor in weights:
                getattr(self, name).data.copy_(tensor)
            self.more.copy_(self.norm.data).add_(1.0)

    found = learned(Two(), weight=(4, 2), gate=(4, 2), norm=(4,))
    assert [found.copies[name][0].table for name in ("weight", "gate", "norm")] == [0, 0, None]
    assert [copy.table for copy in found.copies["norm"]] == [None, 1]
    assert torch.equal(found.tables[1].view(torch.int16), (values() + 1).view(torch.int16))


@pytest.mark.parametrize(
    ("dtype", "live", "load"),
    [
        (torch.float32, BF16, lambda weight, tensor: weight.copy_(tensor)),
        (torch.float8_e4m3fn, BF16, lambda weight, tensor: weight.copy_(tensor)),
        (torch.float32, torch.float32, lambda weight, tensor: weight.copy_(tensor + 1)),
        (BF16, torch.float64, lambda weight, tensor: weight.copy_(tensor)),
    ],
)
def test_elements_of_other_sizes_have_no_table(dtype, live, load):
    model = Model(parameter(4, 2, dtype=live), lambda weight, name, tensor: load(weight, tensor))
    with pytest.raises(Untraceable, match=f"w: {dtype} in the checkpoint.*{live} in the model; only .* 16 bits"):
        learn(model, {"w": ((4, 2), dtype)})


def test_a_loader_with_threads_is_learned():
    def load(weight, name, tensor):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            pool.submit(weight.copy_, tensor).result()

    [copy] = learned(Model(parameter(4, 2), load), w=(4, 2)).copies["w"]
    assert copy.source == copy.target == View(0, (4, 2), (2, 1))
    # Another kind of thread is not seen, and can write nothing.
    def aside(weight, name, tensor):
        failed = []
        thread = threading.Thread(target=lambda: failed.append(pytest.raises(Exception, weight.copy_, tensor)))
        thread.start()
        thread.join()
        assert failed

    with pytest.raises(Untraceable, match="no tensor of the checkpoint"):
        learned(Model(parameter(4, 2), aside), w=(4, 2))


@pytest.mark.parametrize(
    ("load", "shape", "reason"),
    [
        (joining(torch.stack), (4,), "stack"),
        (joining(lambda kept: torch.cat(kept)[:4]), (3, 2), "a part of what was joined"),
        (joining(lambda kept: torch.cat(kept).add_(1)), (2, 2), "on what was joined"),
        (joining(lambda kept: torch.cat(kept) + 1), (2, 2), "of no tensor"),
        (joining(lambda kept: kept[0] + kept[1]), (4, 2), "add"),
        (joining(lambda kept: kept[0].add_(kept[1])), (4, 2), "on a temporary"),
        (lambda weight, name, tensor: weight.copy_(torch.add(tensor[:2], 1, out=tensor[2:])), (4, 2), "temporary"),
        (lambda weight, name, tensor: weight.copy_(tensor[:1].add_(1)), (4, 2), "add_.Tensor on a temporary"),
        (lambda weight, name, tensor: weight.copy_(tensor + torch.ones(2)), (4, 2), "device meta"),
        (lambda weight, name, tensor: weight.copy_(tensor.view(torch.float16)), (4, 2), "seen as torch.float16"),
        (lambda weight, name, tensor: weight.copy_(tensor * weight[0, 0]), (4, 2), "mul"),
        (lambda weight, name, tensor: weight.copy_(tensor * weight[0, 0].item()), (4, 2), "may be one of the weights"),
        (lambda weight, name, tensor: weight.copy_(tensor * (weight[0, 0] + 1)), (4, 2), "may be one of the weights"),
        (lambda weight, name, tensor: weight.fill_(tensor.sum().item()), (4, 2), "sum"),
        (lambda weight, name, tensor: name == "a" and weight[:2].copy_(tensor), (2, 2), "no tensor of the checkpoint"),
        (lambda weight, name, tensor: weight.copy_(tensor), (4, 2), "two tensors write"),
        (lambda weight, name, tensor: None, (4, 2), "no tensor of the checkpoint"),
        (lambda weight, name, tensor: weight.copy_(tensor), (1, 2), "overlaps itself"),
        (lambda weight, name, tensor: weight.add_(1), (4, 2), "of no tensor"),
    ],
)
def test_a_loader_that_does_more_than_copy_is_refused(load, shape, reason):
    with pytest.raises(Untraceable, match=reason):
        learned(Model(parameter(4, 2), load), a=shape, b=shape)


def test_a_tensor_on_another_device_is_refused():
    model = Model(parameter(4), lambda weight, name, tensor: weight.copy_(tensor))
    model.other = nn.Parameter(torch.empty(4, device="meta"), requires_grad=False)
    with pytest.raises(Untraceable, match="other on meta"):
        learn(model, {"w": ((4,), BF16)})


def test_a_repacked_weight_is_refused_unless_a_load_makes_it_anew():
    model = Model(parameter(4, 2), lambda weight, name, tensor: weight.copy_(tensor))
    model.packed = [model.weight.data.t().contiguous()]
    with pytest.raises(Untraceable, match=r"packed\[0\] may be made of weights"):
        learned(model, w=(4, 2))
    model.packed = [model.weight.data.t()]
    assert learned(model, w=(4, 2)).derive is None

    class Deriving(Model):
        def load_weights(self, weights) -> None:
            super().load_weights(weights)
            self.post_load_weights()

        def post_load_weights(self) -> None:
            self.packed = self.weight.data.t().contiguous()

    model = Deriving(parameter(4, 2), lambda weight, name, tensor: weight.copy_(tensor))
    model.post_load_weights()
    assert learned(model, w=(4, 2)).derive == model.post_load_weights
    # One that changes weights cannot be run twice.
    model.post_load_weights = lambda: model.weight.data.mul_(2)
    with pytest.raises(Untraceable, match="mul_"):
        learned(model, w=(4, 2))
