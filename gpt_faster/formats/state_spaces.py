"""config.json of the state-spaces repositories (mamba-130m … 2.8b, mamba2-130m … 2.7b).

It has keys of its own and no model_type. Translates it to transformers' keys for config.py.

    c = as_transformers(json.loads(text))          # any other config.json is returned as it is
"""

from checkpoint import count

SSM_KEYS = {                                       # key of ssm_cfg: transformers' key
    "d_state": "state_size", "d_conv": "conv_kernel", "expand": "expand", "headdim": "head_dim",
    "ngroups": "n_groups", "dt_rank": "time_step_rank", "bias": "use_bias",
    "conv_bias": "use_conv_bias"}
WITHOUT_EFFECT = ("layer", "chunk_size", "use_fast_path", "dt_min", "dt_max", "dt_init",
                  "dt_init_floor", "dt_scale", "A_init_range")


def as_transformers(c: dict) -> dict:
    """ValueError names a key that asks for something else than Mamba layers alone."""
    ssm = c.get("ssm_cfg")
    if not isinstance(ssm, dict) or "model_type" in c:
        return c
    for key, plain in {"attn_layer_idx": [], "d_intermediate": 0, "rms_norm": True}.items():
        if c.get(key) not in (None, plain):
            raise ValueError(f"'{key}' is {c[key]!r}, expected {plain!r}: only Mamba layers are "
                             "supported in this layout")
    kind = ssm.get("layer", "Mamba1")
    unknown = [key for key in ssm if key not in SSM_KEYS and key not in WITHOUT_EFFECT]
    if kind not in ("Mamba1", "Mamba2") or unknown:
        raise ValueError(f"'ssm_cfg' with {unknown or kind!r} is not supported")
    multiple = count(c, "pad_vocab_size_multiple", 8)
    own = {"hidden_size": count(c, "d_model"), "num_hidden_layers": count(c, "n_layer"),
           "vocab_size": -(-count(c, "vocab_size") // multiple) * multiple,
           "tie_word_embeddings": c.get("tie_embeddings", True)}
    stated = {theirs: ssm[key] for key, theirs in SSM_KEYS.items() if key in ssm}
    if kind == "Mamba1":
        return {"model_type": "mamba", **own, **stated}
    defaults = {"state_size": 128, "head_dim": 64, "n_groups": 1, "expand": 2}
    c = {"model_type": "mamba2", **defaults, **own, **stated}
    return {**c, "num_heads": int(c["expand"] * c["hidden_size"]) // count(c, "head_dim")}
