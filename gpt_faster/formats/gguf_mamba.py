"""GGUF files of models with Mamba layers: their metadata in config.json's keys, and their tensors.

Which branch a layer has (Mamba, attention, dense, experts) is read from its tensors: converters
have written the metadata that says so in several ways. gguf_model.py reads all other keys.

    c.update(mamba_config("nemotron_h", c, metadata, tensors))
    tensors = renumbered(tensors, c["nemotron_places"])        # layers of one branch -> ours
"""

import re

from checkpoint import LazyTensor, layer_of
from gpt_faster.formats.names import mamba1_names, mamba_names

KINDS = {                                          # a tensor of each kind of layer
    "mamba": "ssm_in.weight", "attention": "attn_q.weight", "moe": "ffn_gate_inp.weight",
    "mlp": "ffn_up.weight"}


def gguf_mamba_names(ours: str = "attn") -> dict:
    """Names of Mamba-2's tensors -> their names in our module `ours` of a layer."""
    return {"ssm_" + gguf: mamba_names("mamba", ours)["mamba." + theirs] for gguf, theirs in {
        "in": "in_proj", "conv1d.weight": "conv1d.weight", "conv1d.bias": "conv1d.bias",
        "a": "A_log", "dt.bias": "dt_bias", "d": "D", "norm": "norm", "out": "out_proj"}.items()}


def gguf_mamba1_names() -> dict:
    """As gguf_mamba_names(), of Mamba 1."""
    theirs = mamba1_names("mamba")
    return {"ssm_" + gguf: theirs["mamba." + name] for gguf, name in {
        "in": "in_proj", "x": "x_proj", "dt.weight": "dt_proj.weight", "dt.bias": "dt_proj.bias",
        "conv1d.weight": "conv1d.weight", "conv1d.bias": "conv1d.bias", "a": "A_log", "d": "D",
        "out": "out_proj", "dt_norm": "dt_layernorm", "b_norm": "b_layernorm",
        "c_norm": "c_layernorm"}.items()}


MAMBA1_NAMES = gguf_mamba1_names()
MAMBA2_NAMES = gguf_mamba_names()
FALCON_H1_NAMES = gguf_mamba_names("attn.mamba") | dict.fromkeys(     # without .weight in files
    ("ffn_norm", "ffn_norm.weight"), "ffn_norm.weight")
NEMOTRON_H_NAMES = MAMBA2_NAMES | {
    "ffn_latent_down": "ffn.to_latent", "ffn_latent_up": "ffn.from_latent"}
ALONE = ("mamba", "mamba2")                        # without attention and feed-forward layers


def mamba_config(arch: str, c: dict, metadata: dict, tensors: dict) -> dict:
    """config.json keys of an architecture with Mamba layers."""
    is_mamba1 = arch in ("mamba", "jamba")
    keys = {"mamba_d_ssm": "inner_size", "mamba_d_conv": "conv_kernel",
            "mamba_d_state": "state_size"}
    keys |= ({"mamba_dt_rank": "time_step_rank"} if is_mamba1 else
             {"mamba_n_heads": "time_step_rank", "mamba_n_groups": "group_count"})
    sizes = {ours: metadata.get(f"{arch}.ssm.{key}") for ours, key in keys.items()}
    for ours, n in sizes.items():
        if not n:
            raise ValueError(f"'{arch}.ssm.{keys[ours]}' is {n!r}, expected a whole number above 0")
    facts = dict(sizes) if is_mamba1 else dict(sizes, mamba_d_head=_head_dim(sizes))
    facts |= dict(
        mamba_conv_bias=_has(tensors, "ssm_conv1d.bias"),
        mamba_rms_norm=_has(tensors, "ssm_norm.weight"), mamba_norm_before_gate=False,
        attention_bias=_has(tensors, "attn_q.bias"), mlp_bias=_has(tensors, "ffn_up.bias"),
        use_bias=False)
    for key in ("num_key_value_heads", "intermediate_size"):           # 0: a layer without any
        facts[key] = max(c[key]) if isinstance(c.get(key), list) and c[key] else c.get(key)
    if arch in ALONE:                              # a head for ModelConfig, which nothing uses
        norms = metadata.get(f"{arch}.ssm.dt_b_c_rms")
        kind = {"model_type": "falcon_mamba"} if norms else {}
        return dict(facts, num_attention_heads=1, num_key_value_heads=1, **kind)
    if arch == "falcon-h1":
        return facts
    if widths := [t.shape[0] for name, t in tensors.items() if name.endswith("ffn_up.weight")]:
        facts["intermediate_size"] = widths[0]     # of Nemotron 3, the key has the experts' width
    kinds = [layer_kinds(i, tensors) for i in range(c["num_hidden_layers"])]
    if arch == "jamba":
        return dict(facts, layer_types=[
            "linear_attention" if "mamba" in one else "full_attention" for one in kinds],
            num_experts=c.get("num_experts") or 1)
    if arch == "granitehybrid":
        uses_rope = metadata.get(f"{arch}.rope.scaling.finetuned") is not False        # its switch
        n_expert = c.get("num_experts") or 0
        if not n_expert:
            facts["shared_intermediate_size"] = facts["intermediate_size"]
        return dict(facts, layer_types=["mamba" if "mamba" in one else "attention"
                                        for one in kinds],
                    position_embedding_type="rope" if uses_rope else "nope",
                    attention_multiplier=c.get("attention_multiplier"), num_experts=n_expert)
    if unclear := [i for i, one in enumerate(kinds) if len(one) != 1]:
        raise ValueError(f"layer {unclear[0]} has {' and '.join(kinds[unclear[0]]) or 'nothing'}, "
                         "expected one of mamba, attention, moe, mlp")
    shared = c.get("shared_expert_intermediate_size", 1)
    return dict(facts, layers_block_type=[one for (one,) in kinds],
                moe_shared_expert_intermediate_size=shared,
                **{key: c.get(key) or 1 for key in ("n_group", "topk_group")})


def _head_dim(sizes: dict) -> int:
    width, n_head = sizes["mamba_d_ssm"], sizes["mamba_n_heads"]
    if width % n_head:
        raise ValueError(f"ssm.inner_size ({width}) is not a multiple of ssm.time_step_rank "
                         f"({n_head})")
    return width // n_head


def _has(tensors: dict, ending: str) -> bool:
    return any(name.endswith(ending) for name in tensors)


def layer_kinds(i: int, tensors: dict) -> list[str]:
    """Those of KINDS that layer i has."""
    return [kind for kind, name in KINDS.items() if f"blk.{i}.{name}" in tensors]


def renumbered(tensors: list[LazyTensor], places: list) -> list[LazyTensor]:
    """Nemotron-H: tensors of layers with one branch -> of our layers, without the MTP head's.

    places: (our layer, module) of each of their layers, as families.py respells it.
    """
    ours = []
    for t in tensors:
        i = layer_of(t.name)
        if i >= len(places):                       # the MTP head
            continue
        if i >= 0:
            layer, module = places[i]
            rest = t.name.split(".", 2)[2]
            if module == "mlp":
                rest = re.sub("^attn_norm", "ffn_norm", rest)
            t = t.renamed(f"blk.{layer}.{rest}")
        ours.append(t)
    return ours
