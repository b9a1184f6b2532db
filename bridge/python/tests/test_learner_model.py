"""Log-probs of the learner: packed, padded and alone."""

import numpy as np
import pytest
import torch
from driftless.learner._batch import Sample, pack
from driftless.learner._layout import Layout
from driftless.learner._model import Model
from driftless.learner._options import Options
from driftless.learner._ranks import Refused
from learner_loop import CPU, write_model


class Record:
    """A record of a log, as far as batches look at it."""

    def __init__(self, tokens, prompt_len: int) -> None:
        self.tokens = np.asarray(tokens, np.int32)
        self.prompt_len = prompt_len
        self.response = self.tokens[prompt_len:]
        self.log_probs = np.zeros(len(self.response), np.float32)


def samples():
    random = np.random.default_rng(2)
    lengths = [(4, 1), (9, 4), (2, 1), (6, 2)]
    return [Sample(Record(random.integers(0, 64, n), p), np.ones(n - p, bool), 0, 1.0) for n, p in lengths]


def alone(model: Model, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Log-probs at temperature 0.7 of each sample by itself, in f64."""
    module, found = model.module, []
    for sample in samples():
        tokens = torch.from_numpy(sample.record.tokens).long().unsqueeze(0)
        logits = module(input_ids=tokens, use_cache=False).logits[0].to(dtype) / 0.7
        start = sample.record.prompt_len
        found += [torch.log_softmax(logits[t - 1], -1)[tokens[0, t]] for t in range(start, len(sample))]
    return torch.stack(found)


@pytest.mark.parametrize("kind, padded", [("dense", False), ("tied", False), ("moe", False), ("mamba", True)])
@torch.no_grad()
def test_log_probs_of_a_batch_are_those_of_each_sample_alone(tmp_path, kind, padded):
    directory = write_model(tmp_path / "hf", kind, torch.float32)
    model = Model(str(directory), Options(temperature=0.7, log_probs_chunk_size=3), torch.float32, CPU, None)
    # A state-space model carries its state over from one sequence of a row to the next.
    assert model.padded == padded
    for rows in {padded, True}:
        batch = pack(samples(), [1.0] * 4, [0, 1, 2, 3], padded=rows, device=CPU.device)
        found, entropy = model.log_probs(batch)
        assert (found.double() - alone(model)).abs().max() < 1e-5
        assert entropy.shape == found.shape and (entropy > 0).all()


def test_gradients_are_the_same_with_and_without_activations(tmp_path):
    directory = write_model(tmp_path / "hf", "dense", torch.float32)
    found = []
    for recompute in (False, True):
        model = Model(str(directory), Options(recompute=recompute), torch.float32, CPU, None)
        batch = pack(samples(), [1.0] * 4, [0, 1, 2, 3], padded=False, device=CPU.device)
        model.log_probs(batch)[0].sum().backward()
        found.append({name: parameter.grad for name, parameter in model.module.named_parameters()})
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


def test_checkpoint_with_tensors_that_the_model_lacks_is_refused(tmp_path):
    model = Model(str(write_model(tmp_path / "hf", "dense", torch.float32)), Options(), torch.float32, CPU, None)
    layout = Layout(str(tmp_path / "hf"))
    layout.check(model.module)
    layout.tensors["mtp.weight"] = (torch.float32, (3, 3))
    with pytest.raises(Refused, match=r"`mtp.weight`: expected shape \[3, 3\].*found none.*Qwen3ForCausalLM"):
        layout.check(model.module)
