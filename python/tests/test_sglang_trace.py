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


def held(weight, name, tensor, kept=[]):
    kept.append(tensor)
    if len(kept) == 2:
        weight.copy_(torch.cat(kept))
        kept.clear()


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
        (held, (2, 2), "cat"),
        (lambda weight, name, tensor: weight.fill_(tensor.sum().item()), (4, 2), "sum"),
        (lambda weight, name, tensor: weight.copy_(tensor * 2), (4, 2), "mul"),
        (lambda weight, name, tensor: weight.copy_(tensor.to(torch.float32)), (4, 2), "float32"),
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
