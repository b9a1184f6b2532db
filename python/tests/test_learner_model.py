"""Log-probs of the learner: packed, padded and alone."""

import numpy as np
import pytest
import torch
from driftless_rl.learner import _attention
from driftless_rl.learner._batch import Sample, pack
from driftless_rl.learner._layout import Layout
from driftless_rl.learner._model import Model
from driftless_rl.learner._optimizer import AdamW
from driftless_rl.learner._ranks import Ranks, Refused
from learner_loop import CPU, DEADLINE, MODELS, SMALL, options, write_model
from safetensors.torch import load_file, save_file
from transformers import Gemma2Config, Gemma2ForCausalLM, Llama4ForCausalLM, Llama4TextConfig, MistralConfig, MistralForCausalLM


@pytest.mark.parametrize("capability, there", [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_kernel_is_taken_on_gpus_that_have_it(monkeypatch, capability, there):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert _attention.takes(torch.device("cuda", 1), torch.bfloat16) == there
    assert not _attention.takes(torch.device("cuda", 1), torch.float32)
    assert not _attention.takes(torch.device("cpu"), torch.bfloat16)


CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


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


@pytest.mark.parametrize("kind, padded", [("dense", False), ("tied", False), ("moe", False), ("mamba", True), ("chunked", True)])
@torch.no_grad()
def test_log_probs_of_a_batch_are_those_of_each_sample_alone(tmp_path, kind, padded):
    write(tmp_path / "hf", kind)
    model = Model(str(tmp_path / "hf"), options(temperature=0.7, log_probs_chunk_size=3), torch.float32, CPU, None)
    # A state-space model carries its state over from one sequence of a row to the next; chunks end where rows have them.
    assert model.padded == padded
    for rows in {padded, True}:
        batch = pack(samples(), [1.0] * 4, [0, 1, 2, 3], padded=rows, device=CPU.device)
        found, entropy = model.log_probs(batch)
        assert (found.double() - alone(model)).abs().max() < 1e-5
        assert entropy.shape == found.shape and (entropy > 0).all()


def loops(query, key, value, starts, longest, scale, window):
    """What the kernel computes, a sample and a query at a time."""
    assert longest == starts.diff().max()
    key, value = (rows.repeat_interleave(query.shape[1] // rows.shape[1], 1) for rows in (key, value))
    found = torch.empty_like(query)
    for first, end in zip(starts.tolist(), starts.tolist()[1:]):
        for row in range(first, end):
            seen = slice(max(first, row - window) if window >= 0 else first, row + 1)
            scores = torch.einsum("hw,nhw->hn", query[row], key[seen]) * scale
            found[row] = torch.einsum("hn,nhw->hw", scores.softmax(-1), value[seen])
    return found


WINDOW = dict(sliding_window=3)
CHUNK = dict(attention_chunk_size=4, intermediate_size_mlp=48, num_local_experts=2)
OTHERS = {
    "window": lambda: MistralForCausalLM(MistralConfig(**SMALL, **WINDOW)),
    "chunked": lambda: Llama4ForCausalLM(Llama4TextConfig(**SMALL, **CHUNK)),
    "caps": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, **WINDOW, query_pre_attn_scalar=16)),
}


def write(directory, kind):
    if kind in OTHERS:
        torch.manual_seed(4)
        OTHERS[kind]().save_pretrained(directory)
    else:
        write_model(directory, kind, torch.float32)


KERNELS = {"dense": True, "moe": True, "window": True, "caps": False, "chunked": False, "mamba": False}


@pytest.mark.parametrize("kind, bounded", KERNELS.items())
@torch.no_grad()
def test_models_that_the_kernel_can_compute_are_computed_with_it(tmp_path, monkeypatch, kind, bounded):
    write(tmp_path / "hf", kind)
    called = []
    monkeypatch.setattr(_attention, "takes", lambda device, dtype: True)
    monkeypatch.setattr(_attention, "flash", lambda *rows: called.append(rows[3]) or loops(*rows))
    chosen_options = options(temperature=0.7)
    chosen, given = (Model(str(tmp_path / "hf"), chosen_options, torch.float32, CPU, name) for name in (None, "sdpa" if kind != "mamba" else None))
    assert chosen._bounded == bounded
    called.clear()
    batch = pack(samples(), [1.0] * 4, [0, 1, 2, 3], padded=chosen.padded, device=CPU.device)
    expected, found = given.log_probs(batch)[0], chosen.log_probs(batch)[0]
    assert (found - expected).abs().max() < 1e-5
    layers = SMALL["num_hidden_layers"]
    assert [starts.tolist() for starts in called] == ([[0, 3, 11, 12, 17]] * layers if bounded else [])


@CUDA
@pytest.mark.parametrize("kind", ["dense", "moe", "window"])
def test_kernel_agrees_with_attention_that_is_masked(tmp_path, kind):
    (OTHERS[kind]() if kind in OTHERS else MODELS[kind]()).to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    ranks = Ranks(0, 1, torch.device("cuda"), DEADLINE)
    found = []
    for name in (None, "sdpa"):
        model = Model(str(tmp_path / "hf"), options(recompute_granularity="full"), torch.bfloat16, ranks, name)
        assert model._bounded == (name is None)
        batch = pack(samples(), [1.0] * 4, [0, 1, 2, 3], padded=False, device=ranks.device)
        log_probs, _ = model.log_probs(batch)
        log_probs.sum().backward()
        weights = model.module.model.layers[0].self_attn.q_proj.weight
        found.append((log_probs.detach(), weights.grad.float()))
    (left, left_grad), (right, right_grad) = found
    assert (left - right).abs().max() < 2e-2
    assert (left_grad - right_grad).norm() < 2e-2 * right_grad.norm()


def test_gradients_are_the_same_with_and_without_activations(tmp_path):
    directory = write_model(tmp_path / "hf", "dense", torch.float32)
    found = []
    for granularity in ("none", "full"):
        model = Model(str(directory), options(recompute_granularity=granularity), torch.float32, CPU, None)
        batch = pack(samples(), [1.0] * 4, [0, 1, 2, 3], padded=False, device=CPU.device)
        model.log_probs(batch)[0].sum().backward()
        found.append({name: parameter.grad for name, parameter in model.module.named_parameters()})
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


def test_matrices_decay_and_norms_and_biases_do_not():
    model = torch.nn.ParameterDict({"up_proj": torch.ones(2, 3), "up_proj_bias": torch.ones(2, 3), "norm": torch.ones(3)})
    optimizer = AdamW(model, {name: torch.float32 for name, _ in model.named_parameters()}, CPU)
    optimizer.step(options(weight_decay=0.5), 0.5, 0.0)
    assert {name: value.flatten()[0].item() for name, value in model.items()} == {"up_proj": 0.75, "up_proj_bias": 1, "norm": 1}


def test_experts_that_have_two_dtypes_are_refused_by_name(tmp_path):
    directory = write_model(tmp_path / "hf", "moe", torch.bfloat16)
    tensors = load_file(directory / "model.safetensors")
    layout = Layout(str(directory))
    module = Model(str(directory), options(), torch.float32, CPU, None).module
    assert set(layout.dtypes(module).values()) == {torch.bfloat16}
    odd = "model.layers.1.mlp.experts.2.up_proj.weight"
    save_file(tensors | {odd: tensors[odd].float()}, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Refused, match=r"expected one dtype in parameter `model.layers.1.mlp.experts.*up_proj.weight"):
        Layout(str(directory)).dtypes(module)
    every = {name: tensor.float() if ".experts." in name else tensor for name, tensor in tensors.items()}
    save_file(every, directory / "model.safetensors", metadata={"format": "pt"})
    found = Layout(str(directory)).dtypes(module)
    assert {dtype for name, dtype in found.items() if ".experts." in name} == {torch.float32}
    assert {dtype for name, dtype in found.items() if ".experts." not in name} == {torch.bfloat16}


def test_checkpoint_without_a_parameter_is_refused_by_name(tmp_path):
    directory = write_model(tmp_path / "hf", "dense", torch.float32)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    load = lambda: Model(str(directory), options(), torch.float32, CPU, None)
    changes = {
        r"found none for `lm_head.weight`; save": {"lm_head.weight": None},
        r"found none for `model.layers.1.mlp.up_proj.weight` \(and 1 more\)": {
            "model.layers.1.mlp.up_proj.weight": None,
            "model.norm.weight": None,
        },
        r"`model.norm.weight`: expected shape \[32\].*found \[31\]": {"model.norm.weight": torch.ones(31)},
    }
    for words, change in changes.items():
        left = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
        save_file(left, file, metadata={"format": "pt"})
        with pytest.raises(Refused, match=words):
            load()
    save_file(tensors, file, metadata={"format": "pt"})
    load()


def test_checkpoint_with_tensors_that_the_model_lacks_is_refused(tmp_path):
    model = Model(str(write_model(tmp_path / "hf", "dense", torch.float32)), options(), torch.float32, CPU, None)
    layout = Layout(str(tmp_path / "hf"))
    layout.check(model.module)
    layout.tensors["mtp.weight"] = (torch.float32, (3, 3))
    with pytest.raises(Refused, match=r"`mtp.weight`: expected shape \[3, 3\].*found none.*Qwen3ForCausalLM"):
        layout.check(model.module)
