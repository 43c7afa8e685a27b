"""Known shapes with random weights, for --random: no files, any size.

    source = random_checkpoint("Llama-2-7B")
"""

from pathlib import Path

from torch import Tensor, bfloat16

from formats.checkpoint import Checkpoint
from formats.config import config_from_hf
from formats.lazy import LazyTensor
from formats.parameters import tensor_shapes
from layers.rope import Rope
from model import ModelConfig


def _llama(dim, n_layer, n_head, n_kv_head, ffn_dim, vocab_size, context, **more):
    head_dim = more.pop("head_dim", dim // n_head)
    return ModelConfig(dim, n_layer, n_head, n_kv_head, head_dim, ffn_dim, vocab_size, context,
                       **more)


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


def _lfm2(dim, ffn_dim, n_head, attending, n_layer=16, **more):
    return config_from_hf(dict(
        model_type="lfm2", hidden_size=dim, block_ff_dim=ffn_dim, num_hidden_layers=n_layer,
        num_attention_heads=n_head, num_key_value_heads=8, vocab_size=65536,
        full_attn_idxs=list(attending), **more))[0]


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
                                 qk_norm="head", norm_eps=1e-6, rope=(Rope(1e6),)),
    "Qwen3-8B": lambda: _llama(4096, 36, 32, 8, 12288, 151936, 40960, head_dim=128, qk_norm="head",
                               norm_eps=1e-6, rope=(Rope(1e6),)),
    "gpt2": lambda: config_from_hf(dict(
        model_type="gpt2", n_embd=768, n_layer=12, n_head=12, vocab_size=50257))[0],
    "gpt2-xl": lambda: config_from_hf(dict(
        model_type="gpt2", n_embd=1600, n_layer=48, n_head=25, vocab_size=50257))[0],
    "Mixtral-8x7B": lambda: _mixtral(4096, 32, 32, 8, 14336),
    "Mixtral-8x160M": lambda: _mixtral(1024, 16, 16, 8, 3072),         # to set beside a dense model
    "Mixtral-8x160M-dense": lambda: _llama(1024, 16, 16, 8, 6144, 32000, 32768),   # as wide as two
    "Qwen3-30B-A3B": lambda: config_from_hf(dict(
        model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, intermediate_size=6144, moe_intermediate_size=768,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, vocab_size=151936,
        rope_theta=1e6, max_position_embeddings=40960))[0],
    "gpt-oss-20b": lambda: config_from_hf(dict(
        model_type="gpt_oss", hidden_size=2880, num_hidden_layers=24, num_attention_heads=64,
        intermediate_size=2880, num_local_experts=32, num_experts_per_tok=4, vocab_size=201088))[0],
    "GLM-4.7-Flash": lambda: _glm_flash(47),
    "GLM-4.7-Flash-4L": lambda: _glm_flash(4),     # cut to 4 layers: 2.6 billion parameters
    "LFM2-350M": lambda: _lfm2(1024, 6656, 16, (2, 5, 8, 10, 12, 14)),
    "LFM2-1.2B": lambda: _lfm2(2048, 12288, 32, (2, 5, 8, 10, 12, 14)),
    "LFM2-2.6B": lambda: _lfm2(2048, 10752, 32, (2, 6, 9, 12, 15, 18, 21, 24), n_layer=30,
                               block_auto_adjust_ff_dim=False),
    "gemma-2-2b": lambda: config_from_hf(dict(
        model_type="gemma2", hidden_size=2304, num_hidden_layers=26, intermediate_size=9216,
        vocab_size=256000))[0],
    "gemma-3-270m": lambda: config_from_hf(dict(
        model_type="gemma3_text", hidden_size=640, num_hidden_layers=18, intermediate_size=2048,
        num_attention_heads=4, num_key_value_heads=1, vocab_size=262144, sliding_window=512,
        max_position_embeddings=32768, hidden_activation="gelu_pytorch_tanh"))[0],
}


def random_checkpoint(name: str) -> Checkpoint:
    """A known shape with random weights and no files. ValueError lists the names."""
    shapes = {k.lower(): k for k in SHAPES}
    if name.lower() not in shapes:
        raise ValueError(f"--random {name}: no such shape (known: {', '.join(SHAPES)})")
    cfg = SHAPES[shapes[name.lower()]]()
    tensors = {n: LazyTensor(n, shape, bfloat16, None, fill=fill_norm if "norm" in n else fill)
               for n, shape in tensor_shapes(cfg).items()}
    return Checkpoint(Path(shapes[name.lower()]), cfg, tensors)


def fill(t: Tensor) -> None:
    """As large as trained weights are; biases are zero."""
    if t.dim() > 1:
        t.normal_(0, 0.02)
    else:
        t.zero_()


def fill_norm(t: Tensor) -> None:
    """Norms' weights; a bias of theirs would be 1 too, which no logits mind."""
    t.fill_(1.0)
