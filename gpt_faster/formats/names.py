"""Tensor names of more families: tables like checkpoint.HF_NAMES, which also split fused tensors.

Knows no config.json. families.py, gguf_model.py and meta.py combine these tables with others:

    tensors = rename(lazy_tensors, {**HF_NAMES, **family.names}, cfg)
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

import checkpoint
from checkpoint import HF_NAMES, MIXTRAL_NAMES, QWEN_MOE_NAMES, LazyTensor
from gpt_faster.formats.lazy import index_select, transpose
from gpt_faster.layers.delta import PER_HEAD_TENSORS
from gpt_faster.layers.mamba import PER_GROUP_TENSORS
from gpt_faster.layers.mamba import PER_HEAD_TENSORS as MAMBA_TENSORS
from model import ModelConfig


@dataclass(frozen=True)
class Fused(checkpoint.Fused):
    """Further layouts of fused tensors: unequal q, k, v; interleaved; grouped; or transposed."""

    transposed: bool = False                       # [in, out], per expert
    interleaved: bool = False                      # rows alternate between parameters
    maybe_transposed: bool = False                 # detected from the experts' input width
    by_group: bool = False                         # q, k, v of each key/value head are adjacent
    # rows of each parameter in one group; groups repeat
    n_rows: Callable[[ModelConfig], tuple[int, ...]] | None = None
    equal: bool = False                            # three equal shares, not q, k, v

    def pieces(self, t, cfg):
        n = len(self.into)
        transposed = self.transposed
        if self.maybe_transposed:
            transposed = t.shape[-1] != (cfg.dim if n == 2 else cfg.moe.expert_dim)
        if transposed:
            t = transpose(t)
        if n == 1:
            return [t]
        if "conv" in self.into[0] and len(t.shape) == 3:       # [C, 1, n_tap]: rows of channels
            t = t.derived(t.read_rows, shape=(t.shape[0], t.shape[-1]))
        size = t.shape[0] if len(t.shape) == 1 else t.shape[-1 if t.name.endswith("bias") else -2]
        if self.interleaved:
            return [index_select(t, torch.arange(i, size, n)) for i in range(n)]
        if self.n_rows:
            sizes = self.n_rows(cfg)
            if size % sum(sizes):
                raise ValueError(f"{t.name} is {list(t.shape)}, but the config asks for a multiple "
                                 f"of {sum(sizes)} rows")
            groups = torch.arange(size).view(-1, sum(sizes))
            return [index_select(t, rows.flatten()) for rows in groups.split(sizes, dim=1)]
        q, kv = cfg.n_head * cfg.head_dim, cfg.n_kv_head * cfg.head_dim
        sizes = (q, kv, kv) if n == 3 and not self.equal else [size // n] * n
        if sum(sizes) != size:
            raise ValueError(f"{t.name} is {list(t.shape)}, but the config asks for {sum(sizes)} "
                             "rows")
        if self.by_group:
            groups = torch.arange(size).view(cfg.n_kv_head, -1, cfg.head_dim)
            share = cfg.n_head // cfg.n_kv_head
            return [index_select(t, heads.flatten())
                    for heads in groups.split((share, 1, 1), dim=1)]
        return [index_select(t, index) for index in torch.arange(size).split(list(sizes))]


MINIMAX_NAMES = MIXTRAL_NAMES | {"block_sparse_moe.e_score_correction_bias": "ffn.choice_bias"}
MOE_NAMES = QWEN_MOE_NAMES | {
    "mlp.experts.gate_up_proj": Fused(("ffn.gate.weight", "ffn.up.weight")),
    "mlp.shared_expert.gate_proj": "ffn.shared.gate", "mlp.shared_expert.up_proj": "ffn.shared.up",
    "mlp.shared_expert.down_proj": "ffn.shared.down",
    "mlp.shared_expert_gate": "ffn.shared_expert_gate",
}
QWEN3_VL_MOE_NAMES = MOE_NAMES | {
    "mlp.experts.gate_up_proj": Fused(("ffn.gate.weight", "ffn.up.weight"), maybe_transposed=True),
    "mlp.experts.down_proj": Fused(("ffn.down.weight",), maybe_transposed=True),
}
SIGMOID_NAMES = MOE_NAMES | {                      # DeepSeek's router, under several names
    "mlp.gate.e_score_correction_bias": "ffn.choice_bias",
    "mlp.e_score_correction_bias": "ffn.choice_bias", "mlp.expert_bias": "ffn.choice_bias",
    "mlp.router.gate": "ffn.router",
    "mlp.shared_experts.gate_proj": "ffn.shared.gate",
    "mlp.shared_mlp.gate_proj": "ffn.shared.gate",
    "mlp.shared_experts.up_proj": "ffn.shared.up", "mlp.shared_mlp.up_proj": "ffn.shared.up",
    "mlp.shared_experts.down_proj": "ffn.shared.down",
    "mlp.shared_mlp.down_proj": "ffn.shared.down",
}
LATENT_NAMES = {
    "self_attn.q_a_proj": "attn.wq_a", "self_attn.q_a_layernorm": "attn.q_a_norm",
    "self_attn.q_b_proj": "attn.wq_b", "self_attn.kv_a_proj_with_mqa": "attn.wkv_a",
    "self_attn.kv_a_layernorm": "attn.kv_a_norm", "self_attn.kv_b_proj": "attn.wkv_b",
}


def delta_shape(cfg: ModelConfig):
    """The GatedDelta of the DeltaNet layers, which all have the same sizes."""
    return next(mixer for mixer in cfg.mixer if mixer)


def _delta_qkv(cfg):
    return delta_shape(cfg).n_rows()


def _delta_qkvz(cfg):                              # rows per key head
    shape = delta_shape(cfg)
    n_value = shape.n_v_head // shape.n_k_head * shape.v_dim
    return shape.k_dim, shape.k_dim, n_value, n_value


def _delta_rates(cfg):
    shape = delta_shape(cfg)
    return (shape.n_v_head // shape.n_k_head,) * 2


def mamba_shape(cfg: ModelConfig):
    """The Mamba2 of the Mamba layers, which all have the same sizes."""
    mixer = next(mixer for mixer in cfg.mixer if mixer)
    return getattr(mixer, "mamba", mixer)


def _mamba_in(cfg):                                # gate, x, B, C and time step
    shape = mamba_shape(cfg)
    keys, _, values = shape.n_rows()
    return values, values, keys, keys, shape.n_head


def _mamba_conv(cfg):
    return _mamba_in(cfg)[1:4]


def mamba_names(theirs: str, ours: str = "attn") -> dict:
    """Mamba-2's tensors in a module `theirs` of a layer -> their names in `ours`."""
    def parts(*names):
        return tuple(f"{ours}.{name}" for name in names)

    return {
        f"{theirs}.in_proj": Fused(parts("gate", "v", "k", "q", "decay"), n_rows=_mamba_in),
        f"{theirs}.conv1d.weight": Fused(parts("conv_v", "conv_k", "conv_q"), n_rows=_mamba_conv),
        f"{theirs}.conv1d.bias": Fused(parts("conv_bias_v", "conv_bias_k", "conv_bias_q"),
                                       n_rows=_mamba_conv),
        f"{theirs}.A_log": f"{ours}.decay_rate", f"{theirs}.dt_bias": f"{ours}.decay_bias",
        f"{theirs}.D": f"{ours}.skip", f"{theirs}.norm": f"{ours}.norm",
        f"{theirs}.out_proj": f"{ours}.wo",
    }


def mamba1_names(theirs: str) -> dict:
    """Mamba 1's tensors in a module `theirs` of a layer -> our names."""
    return {
        f"{theirs}.in_proj": Fused(("attn.v", "attn.gate")), f"{theirs}.x_proj": "attn.select",
        f"{theirs}.dt_proj.weight": "attn.step.weight",
        f"{theirs}.dt_proj.bias": "attn.decay_bias", f"{theirs}.conv1d.weight": "attn.taps",
        f"{theirs}.conv1d.bias": "attn.taps_bias", f"{theirs}.A_log": "attn.decay_rate",
        f"{theirs}.D": "attn.skip", f"{theirs}.out_proj": "attn.wo",
        f"{theirs}.dt_layernorm": "attn.norm_low", f"{theirs}.b_layernorm": "attn.norm_k",
        f"{theirs}.c_layernorm": "attn.norm_q",
    }


def _head_and_gate(cfg):
    return cfg.head_dim, cfg.head_dim


DELTA_NAMES = {
    "self_attn.q_proj": Fused(("attn.wq", "attn.gate"), n_rows=_head_and_gate),
    "linear_attn.in_proj_qkv": Fused(("attn.q", "attn.k", "attn.v"), n_rows=_delta_qkv),
    "linear_attn.in_proj_z": "attn.gate",
    "linear_attn.in_proj_b": "attn.beta", "linear_attn.in_proj_a": "attn.decay",
    "linear_attn.in_proj_qkvz": Fused(("attn.q", "attn.k", "attn.v", "attn.gate"),
                                      n_rows=_delta_qkvz),
    "linear_attn.in_proj_ba": Fused(("attn.beta", "attn.decay"), n_rows=_delta_rates),
    "linear_attn.conv1d.weight": Fused(("attn.conv_q", "attn.conv_k", "attn.conv_v"),
                                       n_rows=_delta_qkv),
    "linear_attn.A_log": "attn.decay_rate", "linear_attn.dt_bias": "attn.decay_bias",
    "linear_attn.norm": "attn.norm", "linear_attn.out_proj": "attn.wo",
}
OLMO_HYBRID_NAMES = DELTA_NAMES | {
    "self_attn.q_proj": "attn.wq",
    "linear_attn.q_proj": "attn.q", "linear_attn.k_proj": "attn.k", "linear_attn.v_proj": "attn.v",
    "linear_attn.a_proj": "attn.decay", "linear_attn.b_proj": "attn.beta",
    "linear_attn.g_proj": "attn.gate", "linear_attn.o_proj": "attn.wo",
    "linear_attn.o_norm": "attn.norm", "linear_attn.q_conv1d.weight": "attn.conv_q",
    "linear_attn.k_conv1d.weight": "attn.conv_k", "linear_attn.v_conv1d.weight": "attn.conv_v",
    "attention_layer_norm": "attn_norm", "feedforward_layer_norm": "ffn_norm",
    "post_attention_layernorm": "post_attn_norm", "post_feedforward_layernorm": "post_ffn_norm",
}
GGUF_DELTA_NAMES = {
    "attn_q": DELTA_NAMES["self_attn.q_proj"],
    "attn_qkv": DELTA_NAMES["linear_attn.in_proj_qkv"],
    "ssm_in": DELTA_NAMES["linear_attn.in_proj_qkvz"],
    "ssm_ba": DELTA_NAMES["linear_attn.in_proj_ba"],
    "ssm_beta": "attn.beta", "ssm_alpha": "attn.decay",
    "ssm_conv1d.weight": DELTA_NAMES["linear_attn.conv1d.weight"],
    "ssm_a": "attn.decay_rate", "ssm_dt.bias": "attn.decay_bias",
    "ssm_norm": "attn.norm", "ssm_out": "attn.wo", "post_attention_norm": "ffn_norm",
}
EXAONE_NAMES = {                                   # EXAONE 3: a Llama
    "wte": "embed", "ln_f": "norm", "ln_1": "attn_norm", "ln_2": "ffn_norm",
    "attn.attention.q_proj": "attn.wq", "attn.attention.k_proj": "attn.wk",
    "attn.attention.v_proj": "attn.wv", "attn.attention.out_proj": "attn.wo",
    "mlp.c_fc_0": "ffn.gate", "mlp.c_fc_1": "ffn.up", "mlp.c_proj": "ffn.down",
}
SARVAM_NAMES = SIGMOID_NAMES | {
    "word_embeddings": "embed",
    "attention.query_key_value": Fused(("attn.wq", "attn.wk", "attn.wv")),
    "attention.dense": "attn.wo", "attention.query_layernorm": "attn.q_norm",
    "attention.key_layernorm": "attn.k_norm", "mlp.gate.expert_bias": "ffn.choice_bias",
}
KOLIBRI_NAMES = SIGMOID_NAMES | {
    "moe.router.expert_bias": "ffn.choice_bias",
    "post_attn_norm": "post_attn_norm", "post_ffn_norm": "post_ffn_norm",
    "post_self_attn_layernorm": "post_attn_norm", "post_mlp_layernorm": "post_ffn_norm",
}
LAGUNA_NAMES = SIGMOID_NAMES | {
    "self_attn.g_proj": "attn.gate", "mlp.experts.e_score_correction_bias": "ffn.choice_bias",
}
MIMO_NAMES = SIGMOID_NAMES | {
    "self_attn.sinks": "attn.attend.sinks", "self_attn.attention_sink_bias": "attn.attend.sinks",
}
HUNYUAN_NAMES = {
    "self_attn.query_layernorm": "attn.q_norm", "self_attn.key_layernorm": "attn.k_norm",
}
ERNIE_MOE_NAMES = SIGMOID_NAMES | {
    "mlp.moe_statics.e_score_correction_bias": "ffn.choice_bias",
    "mlp.gate.moe_statics.e_score_correction_bias": "ffn.choice_bias",
}
HUNYUAN_MOE_NAMES = SIGMOID_NAMES | HUNYUAN_NAMES | {"mlp.gate.wg": "ffn.router"}
AFMOE_NAMES = SIGMOID_NAMES | {
    "self_attn.gate_proj": "attn.gate", "post_attention_layernorm": "post_attn_norm",
    "pre_mlp_layernorm": "ffn_norm", "post_mlp_layernorm": "post_ffn_norm",
}
SANDWICH_NAMES = {
    "post_attention_layernorm": "post_attn_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffn_norm",
}
GPT2_NAMES = {
    "wte": "embed", "wpe": "pos_embed", "ln_f": "norm", "ln_1": "attn_norm", "ln_2": "ffn_norm",
    "attn.c_attn": Fused(("attn.wq", "attn.wk", "attn.wv"), transposed=True),
    "attn.c_proj": Fused(("attn.wo",), transposed=True),
    "mlp.c_fc": Fused(("ffn.up",), transposed=True),
    "mlp.c_proj": Fused(("ffn.down",), transposed=True),
}
GPT_BIGCODE_NAMES = GPT2_NAMES | {                 # its linears are not transposed
    "attn.c_attn": Fused(("attn.wq", "attn.wk", "attn.wv"), by_group=True),
    "attn.c_proj": "attn.wo", "mlp.c_fc": "ffn.up", "mlp.c_proj": "ffn.down",
}
GPT_NEO_NAMES = GPT_BIGCODE_NAMES | {
    "attn.attention.q_proj": "attn.wq", "attn.attention.k_proj": "attn.wk",
    "attn.attention.v_proj": "attn.wv", "attn.attention.out_proj": "attn.wo",
}
GPTJ_NAMES = {
    "wte": "embed", "ln_f": "norm", "ln_1": "attn_norm", "attn.q_proj": "attn.wq",
    "attn.k_proj": "attn.wk", "attn.v_proj": "attn.wv", "attn.out_proj": "attn.wo",
    "mlp.fc_in": "ffn.up", "mlp.fc_out": "ffn.down",
}
GPT_NEOX_NAMES = {
    "embed_in": "embed", "embed_out": "head", "final_layer_norm": "norm",
    "attention.query_key_value": Fused(("attn.wq", "attn.wk", "attn.wv"), by_group=True),
    "attention.dense": "attn.wo",
    "mlp.dense_h_to_4h": "ffn.up", "mlp.dense_4h_to_h": "ffn.down",
}
FALCON_NAMES = {                                   # and BLOOM's
    "word_embeddings": "embed", "word_embeddings_layernorm": "embed_norm", "ln_f": "norm",
    "ln_attn": "attn_norm", "ln_mlp": "ffn_norm",
    "self_attention.query_key_value": GPT_NEOX_NAMES["attention.query_key_value"],
    "self_attention.dense": "attn.wo",
    "mlp.dense_h_to_4h": "ffn.up", "mlp.dense_4h_to_h": "ffn.down",
}
MPT_NAMES = {
    "wte": "embed", "norm_f": "norm", "norm_1": "attn_norm", "norm_2": "ffn_norm",
    "attn.Wqkv": Fused(("attn.wq", "attn.wk", "attn.wv")), "attn.out_proj": "attn.wo",
    "ffn.up_proj": "ffn.up", "ffn.down_proj": "ffn.down",
}
PHI_NAMES = {
    "final_layernorm": "norm", "self_attn.dense": "attn.wo",
    "mlp.fc1": "ffn.up", "mlp.fc2": "ffn.down",
}
OPT_NAMES = {
    "embed_positions": "pos_embed", "final_layer_norm": "norm",
    "self_attn_layer_norm": "attn_norm", "layers.*.final_layer_norm": "ffn_norm",
    "self_attn.out_proj": "attn.wo", "fc1": "ffn.up", "fc2": "ffn.down",
}
APERTUS_NAMES = {
    "attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm",
    "mlp.act_fn.alpha_p": "ffn.activation.alpha_p", "mlp.act_fn.alpha_n": "ffn.activation.alpha_n",
}
GRANITE_MOE_NAMES = {
    "block_sparse_moe.router.layer": "ffn.router",
    "block_sparse_moe.input_linear": Fused(("ffn.gate", "ffn.up")),
    "block_sparse_moe.output_linear": "ffn.down",
    "block_sparse_moe.router": "ffn.router",       # as transformers 5 writes it
    "block_sparse_moe.experts.gate_up_proj": Fused(("ffn.gate.weight", "ffn.up.weight")),
    "block_sparse_moe.experts.down_proj": "ffn.down.weight",
    "shared_mlp.input_linear": Fused(("ffn.shared.gate", "ffn.shared.up")),
    "shared_mlp.output_linear": "ffn.shared.down",
}
BAMBA_NAMES = {
    **mamba_names("mamba"), "final_layernorm": "norm", "pre_ff_layernorm": "ffn_norm",
    "feed_forward.gate_proj": "ffn.gate", "feed_forward.up_proj": "ffn.up",
    "feed_forward.down_proj": "ffn.down",
}
FALCON_H1_NAMES = BAMBA_NAMES | mamba_names("mamba", "attn.mamba")
NEMOTRON_H_NAMES = SIGMOID_NAMES | mamba_names("mamba") | {
    "mlp.experts.*.up_proj": "ffn.up", "mlp.experts.*.down_proj": "ffn.down",
    "mlp.experts.up_proj": "ffn.up.weight", "mlp.fc1_latent_proj": "ffn.to_latent",
    "mlp.fc2_latent_proj": "ffn.from_latent",
}
ADAPTERS = [f"adapt_{of}.{part}" for of in ("q", "k", "v", "ffn") for part in ("low", "high")]
MAMBA_ALONE_NAMES = {                              # the state-spaces repositories: embedding
    "embeddings": "embed", "embedding": "embed", "norm_f": "norm", "layers.*.norm": "attn_norm"}
MAMBA1_NAMES = MAMBA_ALONE_NAMES | mamba1_names("mixer")
MAMBA2_NAMES = MAMBA_ALONE_NAMES | mamba_names("mixer")
ZAMBA2_NAMES = mamba_names("mamba") | mamba_names("mamba_decoder.mamba", "attn.mamba") | {
    "mamba_decoder.input_layernorm": "attn_norm", "final_layernorm": "norm",
    "linear": "attn.linear",
    "shared_transformer.input_layernorm": "attn.shared.norm",
    "shared_transformer.self_attn.q_proj": "attn.shared.wq",
    "shared_transformer.self_attn.k_proj": "attn.shared.wk",
    "shared_transformer.self_attn.v_proj": "attn.shared.wv",
    "shared_transformer.self_attn.o_proj": "attn.shared.wo",
    "shared_transformer.pre_ff_layernorm": "attn.shared.ffn_norm",
    "shared_transformer.feed_forward.gate_up_proj": Fused(("attn.shared.gate", "attn.shared.up")),
    "shared_transformer.feed_forward.down_proj": "attn.shared.down",
    **{name: f"attn.{name}" for name in ADAPTERS},
}
JAMBA_NAMES = mamba1_names("mamba") | {
    "final_layernorm": "norm", "pre_ff_layernorm": "ffn_norm",
    "feed_forward.gate_proj": "ffn.gate", "feed_forward.up_proj": "ffn.up",
    "feed_forward.down_proj": "ffn.down", "feed_forward.router": "ffn.router",
    "feed_forward.experts.*.gate_proj": "ffn.gate", "feed_forward.experts.*.up_proj": "ffn.up",
    "feed_forward.experts.*.down_proj": "ffn.down",
    "feed_forward.experts.gate_up_proj": Fused(("ffn.gate.weight", "ffn.up.weight")),
    "feed_forward.experts.down_proj": "ffn.down.weight",
}
LFM2_NAMES = {
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "embedding_norm": "norm",
    "self_attn.q_layernorm": "attn.q_norm", "self_attn.k_layernorm": "attn.k_norm",
    "self_attn.out_proj": "attn.wo", "conv.out_proj": "attn.wo",
    "conv.in_proj": Fused(("attn.wb", "attn.wc", "attn.wx"), equal=True),
    "conv.conv.weight": "attn.taps", "conv.conv.bias": "attn.taps_bias",
    "feed_forward.w1": "ffn.gate", "feed_forward.w3": "ffn.up", "feed_forward.w2": "ffn.down",
    "feed_forward.gate": "ffn.router", "feed_forward.expert_bias": "ffn.choice_bias",
    "feed_forward.experts.*.w1": "ffn.gate", "feed_forward.experts.*.w3": "ffn.up",
    "feed_forward.experts.*.w2": "ffn.down",
    "feed_forward.experts.gate_up_proj": Fused(("ffn.gate.weight", "ffn.up.weight")),
    "feed_forward.experts.down_proj": "ffn.down.weight",
}
GPT_OSS_NAMES = {
    "self_attn.sinks": "attn.attend.sinks", "mlp.router": "ffn.router",
    "mlp.experts.gate_up_proj.weight": Fused(("ffn.gate.weight", "ffn.up.weight"),
                                             interleaved=True),        # from MXFP4
    "mlp.experts.gate_up_proj": Fused(("ffn.gate.weight", "ffn.up.weight"), True, True),
    "mlp.experts.gate_up_proj_bias": Fused(("ffn.gate.bias", "ffn.up.bias"), interleaved=True),
    "mlp.experts.down_proj.weight": "ffn.down.weight",
    "mlp.experts.down_proj": Fused(("ffn.down.weight",), transposed=True),
    "mlp.experts.down_proj_bias": "ffn.down.bias",
}
GEMMA4_NAMES = SANDWICH_NAMES | {
    "layer_scalar": "end.scale", "per_layer_input_gate": "end.gate",
    "per_layer_projection": "end.down", "post_per_layer_input_norm": "end.norm",
    "embed_tokens_per_layer": "per_layer.embed", "per_layer_model_projection": "per_layer.project",
    "per_layer_projection_norm": "per_layer.norm",
}
GEMMA4_MOE_NAMES = GEMMA4_NAMES | {                # the dense layer is the shared expert
    "mlp.gate_proj": "ffn.shared.gate", "mlp.up_proj": "ffn.shared.up",
    "mlp.down_proj": "ffn.shared.down", "router.proj": "ffn.router",
    "router.scale": "ffn.router_norm.weight", "router.per_expert_scale": "ffn.expert_scale",
    "experts.gate_up_proj": Fused(("ffn.gate.weight", "ffn.up.weight")),
    "experts.down_proj": "ffn.down.weight", "pre_feedforward_layernorm": "ffn.shared_norm",
    "pre_feedforward_layernorm_2": "ffn.norm", "post_feedforward_layernorm_2": "ffn.post_norm",
    "post_feedforward_layernorm_1": "ffn.post_shared_norm",
}
OLD_NAMES = {                                      # in files of our first releases
    "attn.softmax.sinks": "attn.attend.sinks", "ffn.shared.degree": "ffn.shared_expert_gate"}
OUR_NAMES = OLD_NAMES | {name: name for name in (
    *HF_NAMES.values(), "pos_embed", "post_attn_norm", "post_ffn_norm", "attn.attend.sinks",
    "attn.attend.slopes", "attn.attend.gain", "attn.gate", "embed_norm", "attn.wq_a", "attn.wq_b",
    "attn.wkv_a", "attn.wk_b", "attn.wv_b", "attn.q_a_norm", "attn.kv_a_norm", "ffn.router",
    "ffn.choice_bias", "ffn.shared.gate", "ffn.shared.up", "ffn.shared.down",
    "ffn.shared_expert_gate", "ffn.activation.alpha_p", "ffn.activation.alpha_n",
    "per_layer.embed", "per_layer.project", "per_layer.norm", "end.gate", "end.down", "end.norm",
    "end.scale", "ffn.norm", "ffn.shared_norm", "ffn.router_norm", "ffn.post_norm",
    "ffn.post_shared_norm", "ffn.expert_scale",
    "attn.wb", "attn.wc", "attn.wx", "attn.taps", "attn.taps_bias",
    "ffn.to_latent", "ffn.from_latent",
    "attn.select", "attn.step", "attn.norm_low", "attn.norm_k", "attn.norm_q", "attn.linear",
    *(f"attn.shared.{name}" for name in ("norm", "wq", "wk", "wv", "wo", "ffn_norm", "gate", "up",
                                         "down")), *(f"attn.{name}" for name in ADAPTERS),
    *(f"attn.{name}" for name in PER_HEAD_TENSORS), "attn.norm",
    *(f"{attn}.{name}" for attn in ("attn", "attn.mamba")
      for name in (*MAMBA_TENSORS, *PER_GROUP_TENSORS, "wo")))}
NOT_WEIGHTS = re.compile(
    r"rotary_emb\.inv_freq$|rope\.freqs$|freqs_(cos|sin)$|^rope_(freqs|factors_(long|short))\."
    r"|(^|\.)(vision_tower|vision_model|visual|multi_modal_projector|connector|mtp|mm_projector)\."
    r"|(^|\.)(image_tower|video_tower|vision_encoder|image_newline|aligner|high_res_\w+|merger"
    r"|projector|language_projection|qformer|query_tokens|visual_embeddings_table|vqmodel"
    r"|generation_(aligner|embeddings|head)|(acoustic|semantic)_\w+)(\.|$)|^(model\.)?encoder\."
    r"|^(v|mm)\.|(^|\.)(embed_vision|embed_audio|audio_tower|vision_embedder)\."
    r"|(^|\.)vision_(adapter|projection)\.|\.(attn|attention)\.(masked_)?bias$"
    r"|\.act_fn\.(beta|eps)$")


def rename(tensors: list[LazyTensor], table: dict, cfg: ModelConfig) -> dict[str, LazyTensor]:
    """checkpoint.rename(), ignoring tensors that are not weights of the text model."""
    return checkpoint.rename([t for t in tensors if not NOT_WEIGHTS.search(t.name)], table, cfg)
