"""Tiny random models of every family, made by transformers and saved in the Hub's layout."""

import json

import torch
import transformers as hf

SIZE = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=160, max_position_embeddings=128, rms_norm_eps=1e-5)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=32)
GEMMA = dict(SIZE, head_dim=24, sliding_window=8, query_pre_attn_scalar=20, rms_norm_eps=1e-6,
             layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
             rope_parameters=dict(full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                                  sliding_attention=dict(rope_type="default", rope_theta=1e4)))

FAMILIES = {
    "llama2": lambda: hf.LlamaConfig(**{**SIZE, "num_key_value_heads": 4}),
    "llama3": lambda: hf.LlamaConfig(**SIZE, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "llama-linear": lambda: hf.LlamaConfig(
        **SIZE, rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4)),
    "llama-biased": lambda: hf.LlamaConfig(**SIZE, attention_bias=True, mlp_bias=True, head_dim=32),
    "mistral-window": lambda: hf.MistralConfig(**SIZE, sliding_window=8),
    "mistral-nemo": lambda: hf.MistralConfig(**SIZE, sliding_window=None, head_dim=24),
    "qwen2": lambda: hf.Qwen2Config(**SIZE, tie_word_embeddings=True),
    "qwen2-window": lambda: hf.Qwen2Config(**SIZE, use_sliding_window=True, sliding_window=8,
                                           max_window_layers=2),
    "qwen3": lambda: hf.Qwen3Config(**SIZE, head_dim=24),
    "gemma3_text": lambda: hf.Gemma3TextConfig(**GEMMA),
    "gemma3": lambda: hf.Gemma3Config(
        text_config=GEMMA, vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                              num_attention_heads=1, image_size=28, patch_size=14),
        mm_tokens_per_image=4),
}


def make(name: str, seed: int = 0):
    """A transformers model with weights as large as trained ones, so that no error can hide."""
    torch.manual_seed(seed)
    config = FAMILIES[name]()
    kind = hf.AutoModelForImageTextToText if name == "gemma3" else hf.AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32).eval()
    for key, p in model.named_parameters():
        if "norm" in key:
            p.data += 0.3 * torch.randn_like(p)            # around 1, or around 0 where it is 1 + w
        elif key.endswith("bias"):
            p.data = 0.3 * torch.randn_like(p)
        else:
            p.data = torch.randn_like(p) * (0.7 if "embed" in key else p.shape[-1] ** -0.5)
    return model


def old_spelling(directory) -> None:
    """Rewrite config.json as transformers 4 had it."""
    path = directory / "config.json"
    whole = json.loads(path.read_text())
    c = whole.get("text_config", whole)
    rope = c.pop("rope_parameters")
    if "full_attention" in rope:
        c["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        c["layer_types"] = c.pop("layer_types")            # its pattern is not a period here
    elif c["model_type"] == "qwen2":
        c.pop("layer_types")
    c["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    c["rope_scaling"] = None if rope["type"] == "default" else rope
    whole["torch_dtype"] = whole.pop("dtype", "float32")
    if c.get("head_dim") == c["hidden_size"] // c["num_attention_heads"]:
        del c["head_dim"]
    path.write_text(json.dumps(whole))


def logits(model, tokens):
    """transformers' logits [B, T, V]."""
    with torch.no_grad():
        return model(input_ids=tokens).logits.float()
