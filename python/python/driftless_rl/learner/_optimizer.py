"""AdamW over f32 masters. The model computes with weights rounded to the dtype that is published; gradients of these are
applied to the masters unchanged, and the rounding is redone after every step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from ._options import Options
from ._ranks import Ranks

EPS = 1e-8


@dataclass
class State:
    """This rank's part of a parameter: f32 tensors of its shape, of which the first extent may be shorter.

    Attributes:
        name: of the parameter in the model.
        shape: of the whole parameter.
        rounded: the dtype that is published.
        weight: what the model computes with, of its own dtype.
        master, mean, square: weight and moments.
        grad: the sum for the next step.
    """

    name: str
    shape: tuple[int, ...]
    rounded: torch.dtype
    parameter: torch.nn.Parameter
    weight: torch.Tensor
    master: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor
    grad: torch.Tensor


class AdamW:
    """The optimiser of a model, whose weights become the first masters. ``rounded`` has the published dtypes by name.

    Attributes:
        states: one for each parameter.
        steps: steps done.
    """

    @torch.no_grad()
    def __init__(self, model: torch.nn.Module, rounded: dict[str, torch.dtype], ranks: Ranks) -> None:
        self.steps = 0
        self._ranks = ranks
        self.states = []
        for name, parameter in model.named_parameters():
            weight = local(parameter)
            zeros = [torch.zeros_like(weight, dtype=torch.float32) for _ in range(3)]
            master = weight.to(torch.float32, copy=True)
            state = State(name, tuple(parameter.shape), rounded[name], parameter, weight, master, *zeros)
            self.states.append(state)

    def clear(self) -> None:
        """Drops the gradients that have been added."""
        for state in self.states:
            state.grad.zero_()
            state.parameter.grad = None

    @torch.no_grad()
    def add(self) -> None:
        """Takes the gradients of one backward pass, which the parameters have, over to the sum."""
        for state in self.states:
            if state.parameter.grad is not None:
                # FSDP2 gives the mean over ranks, each of which has a part of the sum.
                state.grad.add_(local(state.parameter.grad), alpha=self._ranks.size)
                state.parameter.grad = None

    @torch.no_grad()
    def grad_norm(self) -> float:
        """L2 norm of the gradients over all parameters and ranks."""
        squares = [state.grad.square().sum(dtype=torch.float64) for state in self.states]
        return math.sqrt(self._ranks.sum(torch.stack(squares).sum().reshape(1).cpu()).item())

    @torch.no_grad()
    def step(self, options: Options, lr: float, norm: float) -> None:
        """Applies the gradients, whose norm is ``norm``, clipped."""
        self.steps += 1
        scale = min(1.0, options.clip_grad / (norm + 1e-6)) if options.clip_grad > 0 else 1.0
        correct_mean = 1.0 - options.adam_beta1**self.steps
        correct_square = 1.0 - options.adam_beta2**self.steps
        for state in self.states:
            grad = state.grad.mul_(scale)
            # Matrices decay, norms and biases never do. The biases of a layer's experts are one matrix.
            if len(state.shape) > 1 and not state.name.endswith("bias") and options.weight_decay > 0:
                state.master.mul_(1.0 - lr * options.weight_decay)
            state.mean.mul_(options.adam_beta1).add_(grad, alpha=1.0 - options.adam_beta1)
            state.square.mul_(options.adam_beta2).addcmul_(grad, grad, value=1.0 - options.adam_beta2)
            root = (state.square / correct_square).sqrt_().add_(EPS)
            state.master.addcdiv_(state.mean, root, value=-lr / correct_mean)
        self.write_weights()

    @torch.no_grad()
    def write_weights(self) -> None:
        """Rounds the masters into the model."""
        for state in self.states:
            state.weight.copy_(state.master.to(state.rounded))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, in place."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
