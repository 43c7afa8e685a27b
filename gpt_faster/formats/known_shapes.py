"""Known model shapes with random weights, for --random: benchmarks without downloads.

    source = random_checkpoint("Llama-2-7B")
"""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from torch import Tensor, bfloat16

from checkpoint import Checkpoint, LazyTensor, tensor_shapes
from gpt_faster.formats.config import config_from_hf
from gpt_faster.formats.mtp import mtp_head_config
from gpt_faster.layers.dflash import DFlash, DFlashConfig
from gpt_faster.layers.eagle3 import Eagle3, Eagle3Config, FirstLayerReadsBoth
from gpt_faster.layers.mtp_head import MTPHead
from model import ModelConfig, Rope, Transformer


def _llama(dim, n_layer, n_head, n_kv_head, ffn_dim, vocab_size, context, **more):
    head_dim = more.pop("head_dim", dim // n_head)
    return ModelConfig(dim, n_layer, n_head, n_kv_head, head_dim, ffn_dim, vocab_size, context,
                       **more)


def _gemma4(dim, ffn_dim, n_layer, n_head, n_kv_head, window, n_global_kv_head=None, every=6,
            **more):
    """Sizes below 12B have per-layer embeddings; the others share K and V projections."""
    kinds = ["full_attention" if (i + 1) % every == 0 else "sliding_attention"
             for i in range(n_layer)]
    return config_from_hf(dict(
        model_type="gemma4_text", hidden_size=dim, intermediate_size=ffn_dim, layer_types=kinds,
        num_hidden_layers=n_layer, num_attention_heads=n_head, num_key_value_heads=n_kv_head,
        sliding_window=window, attention_k_eq_v=n_global_kv_head is not None,
        num_global_key_value_heads=n_global_kv_head, final_logit_softcapping=30.0,
        hidden_size_per_layer_input=0 if n_global_kv_head else 256,
        max_position_embeddings=262144 if n_global_kv_head else 131072, **more))[0]


def _mixtral(dim, n_layer, n_head, n_kv_head, expert_dim):
    return config_from_hf(dict(
        model_type="mixtral", hidden_size=dim, num_hidden_layers=n_layer, vocab_size=32000,
        num_attention_heads=n_head, num_key_value_heads=n_kv_head, intermediate_size=expert_dim,
        max_position_embeddings=32768))[0]


def _glm_flash(n_layer):
    return config_from_hf(dict(
        model_type="glm4_moe_lite", hidden_size=2048, num_hidden_layers=n_layer, vocab_size=154880,
        num_attention_heads=20, num_key_value_heads=20, intermediate_size=10240,
        rope_theta=1e6))[0]


def _lfm2(dim, ffn_dim, n_head, attn_layers, n_layer=16, **more):
    return config_from_hf(dict(
        model_type="lfm2", hidden_size=dim, block_ff_dim=ffn_dim, num_hidden_layers=n_layer,
        num_attention_heads=n_head, num_key_value_heads=8, vocab_size=65536,
        full_attn_idxs=list(attn_layers), **more))[0]


def _qwen35(dim, n_layer, ffn_dim, n_head, n_kv_head, n_value_head, tied=False, **more):
    """Its gated DeltaNet layers have 16 key heads; their heads are 128 wide."""
    return config_from_hf(dict(
        model_type="qwen3_5_moe_text" if more else "qwen3_5_text", hidden_size=dim,
        num_hidden_layers=n_layer, intermediate_size=ffn_dim, num_attention_heads=n_head,
        num_key_value_heads=n_kv_head, linear_num_value_heads=n_value_head, rope_theta=1e7,
        tie_word_embeddings=tied, vocab_size=248320, max_position_embeddings=262144, **more))[0]


def _granite_h_tiny(n_layer):
    """Every tenth layer has attention, from the sixth on."""
    return config_from_hf(dict(
        model_type="granitemoehybrid", hidden_size=1536, num_hidden_layers=n_layer,
        layer_types=["attention" if i % 10 == 5 else "mamba" for i in range(n_layer)],
        num_attention_heads=12, num_key_value_heads=4, num_local_experts=64, num_experts_per_tok=6,
        intermediate_size=512, shared_intermediate_size=1024, mamba_n_heads=48, mamba_d_head=64,
        mamba_d_state=128, mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2, vocab_size=100352,
        embedding_multiplier=12.0, logits_scaling=6.0, residual_multiplier=0.22,
        attention_multiplier=0.0078125, position_embedding_type="nope", tie_word_embeddings=True,
        max_position_embeddings=131072))[0]


def _falcon_h1(dim, n_layer, ffn_dim, n_head, n_mamba_head, vocab_size):
    return config_from_hf(dict(
        model_type="falcon_h1", hidden_size=dim, num_hidden_layers=n_layer, rope_theta=1e11,
        intermediate_size=ffn_dim, num_attention_heads=n_head, num_key_value_heads=2, head_dim=128,
        mamba_n_heads=n_mamba_head, mamba_d_head=64, mamba_d_ssm=64 * n_mamba_head,
        mamba_d_state=256, mamba_n_groups=1, mamba_d_conv=4, vocab_size=vocab_size,
        max_position_embeddings=131072))[0]


def _nemotron_nano_9b(n_layer):
    """n_layer: of layers with one branch each, Mamba (M), attention (*) or feed-forward (-)."""
    pattern = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
    return config_from_hf(dict(
        model_type="nemotron_h", hidden_size=4480, hybrid_override_pattern=pattern[:n_layer],
        num_hidden_layers=n_layer, num_attention_heads=40, num_key_value_heads=8, head_dim=128,
        intermediate_size=15680, mamba_num_heads=128, mamba_head_dim=80, ssm_state_size=128,
        n_groups=8, vocab_size=131072, max_position_embeddings=131072))[0]


_LLAMA3 = dict(rope=(Rope(5e5, "llama3", 8.0),))
SHAPES = {
    "stories15M": lambda: _llama(288, 6, 6, 6, 768, 32000, 256, tied=True),
    "stories42M": lambda: _llama(512, 8, 8, 8, 1376, 32000, 1024, tied=True),
    "stories110M": lambda: _llama(768, 12, 12, 12, 2048, 32000, 1024, tied=True),
    "SmolLM2-135M": lambda: _llama(576, 30, 9, 3, 1536, 49152, 8192, tied=True, rope=(Rope(1e5),)),
    "TinyLlama-1.1B": lambda: _llama(2048, 22, 32, 4, 5632, 32000, 2048),
    "Llama-1.1B": lambda: _llama(2048, 22, 32, 4, 5632, 49152, 4096),
    "Llama-3.2-1B": lambda: _llama(2048, 16, 32, 8, 8192, 128256, 131072, tied=True,
                                   rope=(Rope(5e5, "llama3", 32.0),)),
    "Llama-3.2-3B": lambda: _llama(3072, 28, 24, 8, 8192, 128256, 131072, tied=True,
                                   rope=(Rope(5e5, "llama3", 32.0),)),
    "Llama-2-7B": lambda: _llama(4096, 32, 32, 32, 11008, 32000, 4096),
    "Llama-2-13B": lambda: _llama(5120, 40, 40, 40, 13824, 32000, 4096),
    "Llama-2-70B": lambda: _llama(8192, 80, 64, 8, 28672, 32000, 4096),
    "Llama-3.1-8B": lambda: _llama(4096, 32, 32, 8, 14336, 128256, 131072, **_LLAMA3),
    "Llama-3.1-70B": lambda: _llama(8192, 80, 64, 8, 28672, 128256, 131072, **_LLAMA3),
    "Llama-3.1-405B": lambda: _llama(16384, 126, 128, 8, 53248, 128256, 131072, **_LLAMA3),
    "Mistral-7B": lambda: _llama(4096, 32, 32, 8, 14336, 32768, 32768, rope=(Rope(1e6),)),
    "Qwen2.5-7B": lambda: _llama(3584, 28, 28, 4, 18944, 152064, 32768, qkv_bias=True,
                                 norm_eps=1e-6, rope=(Rope(1e6),)),
    "Qwen3-0.6B": lambda: _llama(1024, 28, 16, 8, 3072, 151936, 40960, head_dim=128, tied=True,
                                 qk_norm=True, norm_eps=1e-6, rope=(Rope(1e6),)),
    "Qwen3-8B": lambda: _llama(4096, 36, 32, 8, 12288, 151936, 40960, head_dim=128, qk_norm=True,
                               norm_eps=1e-6, rope=(Rope(1e6),)),
    "gpt2": lambda: config_from_hf(dict(
        model_type="gpt2", n_embd=768, n_layer=12, n_head=12, vocab_size=50257))[0],
    "gpt2-xl": lambda: config_from_hf(dict(
        model_type="gpt2", n_embd=1600, n_layer=48, n_head=25, vocab_size=50257))[0],
    "Mixtral-8x7B": lambda: _mixtral(4096, 32, 32, 8, 14336),
    "Mixtral-8x160M": lambda: _mixtral(1024, 16, 16, 8, 3072),         # and a dense model:
    "Mixtral-8x160M-dense": lambda: _llama(1024, 16, 16, 8, 6144, 32000, 32768),   # 2 experts
    "Qwen3-30B-A3B": lambda: config_from_hf(dict(
        model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, intermediate_size=6144, moe_intermediate_size=768,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, vocab_size=151936,
        rope_theta=1e6, max_position_embeddings=40960))[0],
    "Qwen3.5-0.8B": lambda: _qwen35(1024, 24, 3584, 8, 2, 16, tied=True),
    "Qwen3.5-2B": lambda: _qwen35(2048, 24, 6144, 8, 2, 16, tied=True),
    "Qwen3.5-4B": lambda: _qwen35(2560, 32, 9216, 16, 4, 32, tied=True),
    "Qwen3.5-9B": lambda: _qwen35(4096, 32, 12288, 16, 4, 32),
    "Qwen3.5-27B": lambda: _qwen35(5120, 64, 17408, 24, 4, 48),
    "Qwen3.5-35B-A3B": lambda: _qwen35(
        2048, 40, 512, 16, 2, 32, num_experts=256, num_experts_per_tok=8,
        moe_intermediate_size=512, shared_expert_intermediate_size=512),
    "gpt-oss-20b": lambda: config_from_hf(dict(
        model_type="gpt_oss", hidden_size=2880, num_hidden_layers=24, num_attention_heads=64,
        intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4, vocab_size=201088))[0],
    "GLM-4.7-Flash": lambda: _glm_flash(47),
    "GLM-4.7-Flash-4L": lambda: _glm_flash(4),     # 4 layers only: 2.6B parameters
    "LFM2-350M": lambda: _lfm2(1024, 6656, 16, (2, 5, 8, 10, 12, 14)),
    "LFM2-1.2B": lambda: _lfm2(2048, 12288, 32, (2, 5, 8, 10, 12, 14)),
    "LFM2-2.6B": lambda: _lfm2(2048, 10752, 32, (2, 6, 9, 12, 15, 18, 21, 24), n_layer=30,
                               block_auto_adjust_ff_dim=False),
    "Granite-4-H-tiny": lambda: _granite_h_tiny(40),
    "Granite-4-H-tiny-10L": lambda: _granite_h_tiny(10),               # 1.8B parameters
    "Falcon-H1-1.5B": lambda: _falcon_h1(2048, 24, 4096, 8, 48, 65537),
    "Nemotron-Nano-9B": lambda: _nemotron_nano_9b(56),
    "Nemotron-Nano-9B-16L": lambda: _nemotron_nano_9b(16),             # one attention, 3.4B
    "gemma-2-2b": lambda: config_from_hf(dict(
        model_type="gemma2", hidden_size=2304, num_hidden_layers=26, intermediate_size=9216,
        vocab_size=256000))[0],
    "gemma-3-270m": lambda: config_from_hf(dict(
        model_type="gemma3_text", hidden_size=640, num_hidden_layers=18, intermediate_size=2048,
        num_attention_heads=4, num_key_value_heads=1, vocab_size=262144, sliding_window=512,
        max_position_embeddings=32768, hidden_activation="gelu_pytorch_tanh"))[0],
    "gemma-4-E2B": lambda: _gemma4(1536, 6144, 35, 8, 1, 512, every=5, num_kv_shared_layers=20,
                                   use_double_wide_mlp=True),
    "gemma-4-E4B": lambda: _gemma4(2560, 10240, 42, 8, 2, 512, num_kv_shared_layers=18),
    "gemma-4-12B": lambda: _gemma4(3840, 15360, 48, 16, 8, 1024, 1),
    "gemma-4-26B-A4B": lambda: _gemma4(2816, 2112, 30, 16, 8, 1024, 2, enable_moe_block=True,
                                       num_experts=128, top_k_experts=8,
                                       moe_intermediate_size=704),
    "gemma-4-31B": lambda: _gemma4(5376, 21504, 60, 32, 16, 1024, 4),
}


def random_checkpoint(name: str) -> Checkpoint:
    """A known shape with random weights. ValueError lists the known names."""
    shapes = {k.lower(): k for k in SHAPES}
    if name.lower() not in shapes:
        raise ValueError(f"--random {name}: no such shape (known: {', '.join(SHAPES)})")
    return with_random_weights(Path(shapes[name.lower()]), SHAPES[shapes[name.lower()]]())


def random_mtp_head(source: Checkpoint) -> Checkpoint:
    """A random MTP head for a model, to measure its cost."""
    cfg = source.cfg
    return with_random_weights(source.path, mtp_head_config(cfg, any(cfg.sparse)), MTPHead)


def random_eagle3(source: Checkpoint) -> Checkpoint:
    """A random EAGLE-3 drafter for a model, to measure its cost: a Llama's layer of the model's
    sizes and 32,000 draft tokens, the ids from 0 on, as SpecForge's for Llama-3.1-8B."""
    its = source.cfg
    cfg = Eagle3Config(
        **{field.name: getattr(its, field.name) for field in fields(ModelConfig)},
        target_dim=its.dim, target_layers=(min(2, its.n_layer - 1), its.n_layer // 2,
                                           max(0, its.n_layer - 3)),
        draft_vocab=min(32_000, its.vocab_size))
    cfg = replace(cfg, n_layer=1, window=(None,), sparse=(False,), moe=None, mixer=(None,),
                  block=FirstLayerReadsBoth(), attention=None, norm=None, ffn=None, per_layer=None,
                  after_embed=(), logit_cap=None, rope=its.rope[:1], qk_norm=False, tied=False,
                  qkv_bias=False, o_bias=False, mlp_bias=False, head_bias=False)
    return with_random_weights(source.path, cfg, Eagle3)


def random_dflash(source: Checkpoint) -> Checkpoint:
    """A random DFlash drafter for a model, to measure its cost: five of its layers, dense and with
    full attention, and blocks of 16, as z-lab's for Qwen3-8B."""
    its, n_layer = source.cfg, 5
    cfg = DFlashConfig(
        **{field.name: getattr(its, field.name) for field in fields(ModelConfig)},
        taps=tuple(2 + round(i * (its.n_layer - 4) / (n_layer - 1)) for i in range(n_layer)),
        target_dim=its.dim, mask_id=its.vocab_size - 1)
    cfg = replace(cfg, n_layer=n_layer, window=(None,), sparse=(False,), moe=None, mixer=(None,),
                  block=None, per_layer=None, after_embed=(), logit_cap=None, rope=its.rope[:1],
                  tied=False, head_bias=False)
    return with_random_weights(source.path, cfg, DFlash)


def with_random_weights(path: Path, cfg: ModelConfig, kind: type = Transformer) -> Checkpoint:
    tensors = {n: LazyTensor(n, shape, bfloat16, None, fill=filler(n))
               for n, shape in tensor_shapes(cfg, kind).items()}
    return Checkpoint(path, cfg, tensors, kind=kind)


def filler(name: str) -> Callable[[Tensor], None]:
    if name.endswith("decay_rate"):
        return fill_decay
    is_factor = name.endswith("scale")             # layer output scale, expert scale
    return fill_norm if is_factor or "norm" in name else fill


def fill(t: Tensor) -> None:
    """Weights with a standard deviation of 0.02, as trained ones; biases are zero."""
    if t.dim() > 1:
        t.normal_(0, 0.02)
    else:
        t.zero_()


def fill_norm(t: Tensor) -> None:
    """1 for norm weights, and for norm biases too, which is harmless."""
    t.fill_(1.0)


def fill_decay(t: Tensor) -> None:
    """The decay rate of DeltaNet or Mamba: the state decays by half in ten tokens or so."""
    t.fill_(-0.1)
