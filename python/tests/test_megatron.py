"""Megatron-core's parameters under the names of Hugging Face checkpoints."""

import contextlib
import sys

import driftless_rl
import pytest
import tiny
import torch
from driftless_rl.megatron import hf_tensors
from driftless_rl.transformers import hf_state_dict

# 61 rows are padded to 64, and each of two ranks has one group of two queries.
GROUPED = dict(vocab_size=61, num_attention_heads=4, num_key_value_heads=2)
PADDED = 64
MODELS = pytest.mark.parametrize("make", [tiny.dense, tiny.moe])


def heads(tensor, count):
    return list(tensor.chunk(count))


def padded(tensor):
    return torch.cat([tensor, torch.full((PADDED - tensor.shape[0], *tensor.shape[1:]), 7.0)])


def shares(parts, size):
    """Lists of rows, each divided evenly and put together again for each rank."""
    return [torch.cat([part.chunk(size)[rank] for part in parts]) for rank in range(size)]


def megatron(hf, config, size, fused):
    """What each of `size` tensor-parallel ranks of Megatron has of a model, and the same experts whole on each."""
    ranks = [{} for _ in range(size)]

    def put(name, parts):
        for rank, part in zip(ranks, parts, strict=True):
            rank[f"module.module.{name}"] = part

    put("embedding.word_embeddings.weight", padded(hf["model.embed_tokens.weight"]).chunk(size))
    if not config.tie_word_embeddings:
        put("output_layer.weight", padded(hf["lm_head.weight"]).chunk(size))
    put("decoder.final_layernorm.weight", [hf["model.norm.weight"]] * size)
    for number in range(config.num_hidden_layers):
        layer = {name.split(".", 3)[3]: tensor for name, tensor in hf.items() if name.startswith(f"model.layers.{number}.")}
        to = f"decoder.layers.{number}."
        queries = heads(layer["self_attn.q_proj.weight"], 4)
        keys, values = heads(layer["self_attn.k_proj.weight"], 2), heads(layer["self_attn.v_proj.weight"], 2)
        order = [queries[0], queries[1], keys[0], values[0], queries[2], queries[3], keys[1], values[1]]
        put(to + "self_attention.linear_qkv.weight", torch.cat(order).chunk(size))
        put(to + "self_attention.linear_qkv._extra_state", [None] * size)
        put(to + "self_attention.linear_proj.weight", layer["self_attn.o_proj.weight"].chunk(size, dim=1))
        put(to + "self_attention.q_layernorm.weight", [layer["self_attn.q_norm.weight"]] * size)
        put(to + "self_attention.k_layernorm.weight", [layer["self_attn.k_norm.weight"]] * size)
        before = "self_attention.linear_qkv.layer_norm_weight" if fused else "input_layernorm.weight"
        put(to + before, [layer["input_layernorm.weight"]] * size)
        behind = layer["post_attention_layernorm.weight"]
        if "mlp.gate.weight" not in layer:
            put(to + ("mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"), [behind] * size)
            put(to + "mlp.linear_fc1.weight", shares([layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]], size))
            put(to + "mlp.linear_fc2.weight", layer["mlp.down_proj.weight"].chunk(size, dim=1))
            continue
        put(to + "pre_mlp_layernorm.weight", [behind] * size)
        put(to + "mlp.router.weight", [layer["mlp.gate.weight"]] * size)
        for expert in range(config.num_experts):
            gate, up, down = (layer[f"mlp.experts.{expert}.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
            for linear, whole in (("linear_fc1", torch.cat([gate, up])), ("linear_fc2", down)):
                name = f"{linear}.weight{expert}" if fused else f"local_experts.{expert}.{linear}.weight"
                put(f"{to}mlp.experts.{name}", [whole] * size)
    return ranks


def equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) and found[name].is_contiguous() for name in expected)


@pytest.mark.parametrize("fused", [True, False], ids=["fused and grouped", "local and sequential"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@MODELS
def test_parameters_of_megatron_become_those_of_the_checkpoint(make, tied, fused):
    model = make(**GROUPED, tie_word_embeddings=tied)
    expected = hf_state_dict(model)
    (state,) = megatron(expected, model.config, 1, fused)
    if tied:
        # The last stage of a pipeline has a copy.
        state["output_layer.weight"] = state["module.module.embedding.word_embeddings.weight"]
    found = [pair for name, tensor in state.items() for pair in hf_tensors(name, tensor, model.config)]
    assert len(found) == len(expected)
    equal(dict(found), expected)


def test_only_queries_keys_and_values_are_copied():
    model = tiny.dense(**GROUPED)
    (state,) = megatron(hf_state_dict(model), model.config, 1, True)
    memory = {tensor.untyped_storage().data_ptr() for tensor in state.values() if tensor is not None}
    found = [pair for name, tensor in state.items() for pair in hf_tensors(name, tensor, model.config)]
    copied = {name.split(".")[-2] for name, tensor in found if tensor.untyped_storage().data_ptr() not in memory}
    assert copied == {"q_proj", "k_proj", "v_proj"}


@MODELS
def test_slices_of_two_ranks_cover_the_checkpoint_once(make):
    model = make(**GROUPED)
    expected = hf_state_dict(model)
    whole = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    for rank, state in enumerate(megatron(expected, model.config, 2, True)):
        for name, tensor in state.items():
            place = dict(tp_rank=rank, tp_size=2)
            if ".experts." in name:
                # Expert parallelism over the same ranks: each has half of them.
                number = int(name.rpartition("weight")[2])
                if number // 2 != rank:
                    continue
                name, place["first_expert"] = name.replace(f"weight{number}", f"weight{number - rank * 2}"), rank * 2
            if name.endswith(("linear_proj.weight", "mlp.linear_fc2.weight")):
                with pytest.raises(driftless_rl.TensorError, match="gather it along dimension 1") as raised:
                    hf_tensors(name, tensor, model.config, **place)
                assert raised.value.tensor == name
                if rank > 0:
                    continue
                tensor, place = megatron(expected, model.config, 1, True)[0][name], {}
            for hf_name, part in hf_tensors(name, tensor, model.config, **place):
                if not isinstance(part, driftless_rl.Slice):
                    part = driftless_rl.Slice(part, part.shape, 0)
                assert tuple(part.shape) == tuple(whole[hf_name].shape) and part.tensor.is_contiguous()
                goal = whole[hf_name].view(-1)[part.start : part.start + part.tensor.numel()]
                assert goal.isnan().all(), f"{hf_name} is given twice"
                goal.copy_(part.tensor.reshape(-1))
    equal(whole, expected)


def test_experts_of_two_tensor_parallel_ranks_are_slices():
    config = tiny.moe().config
    gate, up = torch.randn(24, 32), torch.randn(24, 32)
    parts = shares([gate, up], 2)
    name = "decoder.layers.0.mlp.experts.linear_fc1.weight1"
    found = hf_tensors(name, parts[1], config, etp_rank=1, etp_size=2, first_layer=5, first_expert=2)
    assert [(hf_name, part.start, part.shape) for hf_name, part in found] == [
        ("model.layers.5.mlp.experts.3.gate_proj.weight", 12 * 32, (24, 32)),
        ("model.layers.5.mlp.experts.3.up_proj.weight", 12 * 32, (24, 32)),
    ]
    assert torch.equal(found[0][1].tensor, gate[12:]) and torch.equal(found[1][1].tensor, up[12:])


@pytest.mark.parametrize(
    "name, shape, place, word",
    [
        ("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", (96, 32), {}, "name"),
        ("decoder.layers.0.self_attention.linear_qkv.weight", (130, 32), {}, "shape"),
        ("decoder.layers.0.self_attention.linear_qkv.weight", (32, 32), dict(tp_size=4), "query groups"),
        ("decoder.layers.0.mlp.experts.linear_fc2.weight3", (32, 24), dict(first_expert=4), "expert 7"),
        ("embedding.word_embeddings.weight", (30, 32), dict(tp_size=2), "at least 61"),
    ],
)
def test_parameter_that_does_not_fit_is_refused_by_name(name, shape, place, word):
    with pytest.raises(driftless_rl.TensorError, match=word) as raised:
        hf_tensors(name, torch.zeros(shape), tiny.moe(**GROUPED).config, **place)
    assert raised.value.tensor == name


@pytest.mark.parametrize("name", ["mlp.router.weight", "mlp.experts.linear_fc2.weight0"])
def test_experts_of_a_dense_model_are_refused(name):
    with pytest.raises(driftless_rl.TensorError):
        hf_tensors(f"decoder.layers.0.{name}", torch.zeros(4, 32), tiny.dense().config)


@pytest.fixture
def megatron_core(monkeypatch, tmp_path):
    """Megatron-core, as far as it runs without a GPU."""
    # A library of SGLang's that Megatron would use, and that fails without a GPU.
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.moe import moe_utils

    class Random:
        fork = staticmethod(contextlib.nullcontext)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", Random)
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@MODELS
@pytest.mark.filterwarnings("ignore")
def test_checkpoint_of_a_megatron_model_computes_what_the_model_computes(megatron_core, store, make):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    hf = make(num_attention_heads=4, num_key_value_heads=2, rope_theta=10000.0).config
    if hf.model_type == "qwen3_moe":
        hf.norm_topk_prob = True
        experts = dict(num_moe_experts=4, moe_ffn_hidden_size=24, moe_router_topk=2, moe_token_dispatcher_type="allgather")
    else:
        experts = {}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        ffn_hidden_size=48,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        qk_layernorm=True,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        **experts,
    )
    spec = get_gpt_layer_local_spec(num_experts=experts.get("num_moe_experts"), qk_layernorm=True, normalization="RMSNorm")
    torch.manual_seed(3)
    model = GPTModel(config, spec, 64, 32, position_embedding_type="rope", share_embeddings_and_output_weights=False).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    tensors = [pair for name, tensor in model.state_dict().items() for pair in hf_tensors(name, tensor, hf)]
    with store.publisher(files={"config.json": hf.to_json_string().encode()}) as publisher:
        publisher.publish(tensors)
    with driftless_rl.Follower(store.url, "run", store.root / "host") as follower:
        follower.advance()
    again, loaded = type(make()).from_pretrained(store.root / "host", output_loading_info=True)
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"]
    ids, mask = torch.arange(8).unsqueeze(0), torch.ones(8, 8, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids, ids, mask), again(ids).logits, atol=1e-5, rtol=1e-5)
