"""Families of which the installed transformers has no class: one of the same architecture, by another name.

Their defaults are those of transformers 5.24's configuration classes, which build on the same models. Where transformers has
a class of the name, that is used.
"""

import transformers as hf


class ExaoneConfig(hf.LlamaConfig):
    model_type = "exaone"
    vocab_size: int = 102400
    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    default_theta = 500_000.0


class SarvamMoEConfig(hf.Glm4MoeConfig):
    model_type = "sarvam_moe"
    attribute_map = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers",
                     "num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts", "use_qkv_bias": "attention_bias"}
    default_theta = 8_000_000.0
    vocab_size: int = 262144
    intermediate_size: int = 8192
    num_hidden_layers: int = 19
    num_attention_heads: int = 64
    num_key_value_heads: int = 4
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    moe_intermediate_size: int = 1024
    num_experts_per_tok: int = 6
    routed_scaling_factor: float = 2.5
    use_qk_norm: bool = True
    num_mtp_layers: int = 0

    def __post_init__(self, **kwargs):
        kwargs.setdefault("partial_rotary_factor", 1.0)
        hf.PreTrainedConfig.__post_init__(self, **kwargs)


class SarvamMLAConfig(hf.DeepseekV3Config):
    model_type = "sarvam_mla"
    vocab_size: int = 262144
    hidden_size: int = 4096
    intermediate_size: int = 16384
    num_hidden_layers: int = 32
    num_attention_heads: int = 64
    num_key_value_heads: int | None = None
    n_routed_experts: int = 128
    q_lora_rank: int | None = None
    n_group: int | None = 1
    topk_group: int | None = 1
    first_k_dense_replace: int | None = 1


def stand_in(config: type, model: type) -> type:
    """The configuration class that AutoModelForCausalLM knows by this model_type; registered if it is not transformers' own."""
    if config.model_type in hf.CONFIG_MAPPING:
        return hf.CONFIG_MAPPING[config.model_type]
    hf.AutoConfig.register(config.model_type, config)
    name = config.__name__.replace("Config", "ForCausalLM")
    hf.AutoModelForCausalLM.register(config, type(name, (model,), {"config_class": config}))
    return config


Exaone = stand_in(ExaoneConfig, hf.LlamaForCausalLM)
SarvamMoE = stand_in(SarvamMoEConfig, hf.Glm4MoeForCausalLM)
SarvamMLA = stand_in(SarvamMLAConfig, hf.DeepseekV3ForCausalLM)
