"""Tiny random models of every family, made by transformers and saved in the Hub's layout."""

import json

import stand_ins
import torch
import transformers as hf

SIZE = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=160, max_position_embeddings=128, rms_norm_eps=1e-5)
DELTA_MOE = dict(num_experts=4, num_experts_per_tok=3, moe_intermediate_size=32, shared_expert_intermediate_size=64)
DELTA = dict(SIZE, head_dim=24, layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
             linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=16, linear_value_head_dim=12,
             rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5))
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
SHORT, LONG = [1.0, 1.1, 1.2, 1.4, 1.5, 1.7], [1.0, 1.5, 2.5, 4.0, 6.0, 9.0]
PHI3 = dict(SIZE, pad_token_id=0)
LONGROPE = dict(rope_type="longrope", rope_theta=1e4, short_factor=SHORT, long_factor=LONG,
                partial_rotary_factor=0.75)
MOE = dict(num_experts_per_tok=2, moe_intermediate_size=32)
GEMMA = dict(SIZE, head_dim=24, sliding_window=8, query_pre_attn_scalar=20, rms_norm_eps=1e-6,
             layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
             rope_parameters=dict(full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                                  sliding_attention=dict(rope_type="default", rope_theta=1e4)))
GEMMA4 = dict(SIZE, head_dim=16, global_head_dim=32, sliding_window=8, final_logit_softcapping=5.0, rms_norm_eps=1e-6,
              layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"])
GEMMA4_K_IS_V = dict(attention_k_eq_v=True, num_global_key_value_heads=1)
VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, image_size=28, patch_size=14)
QWEN_VISION = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64)
MROPE = dict(rope_type="default", rope_theta=1e6, mrope_section=[4, 2, 2])                     # axes of an image
OMNI_AUDIO = dict(encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16, d_model=16, output_dim=64, downsample_hidden_size=8)
HYBRID = dict(SIZE, shared_intermediate_size=96, layer_types=["full_attention"] * 4, num_local_experts=0, embedding_multiplier=3.0,
              logits_scaling=1.5, residual_multiplier=0.6, attention_multiplier=0.1)
MAMBA = dict(mamba_n_heads=8, mamba_d_state=16, mamba_d_conv=4)
STARCODER = {**SIZE, "norm_epsilon": SIZE["rms_norm_eps"]}
del STARCODER["rms_norm_eps"]
LAYER_NORM = {k: v for k, v in SIZE.items() if k != "rms_norm_eps"}                             # whose eps is called otherwise
MHA = {k: v for k, v in LAYER_NORM.items() if k != "num_key_value_heads"}
IDS = dict(bos_token_id=1, eos_token_id=2)
PADDED = dict(IDS, pad_token_id=0)
NEMOTRON = dict({k: v for k, v in SIZE.items() if k not in ("num_hidden_layers", "rms_norm_eps")}, head_dim=24, ssm_state_size=16,
                mamba_num_heads=8, mamba_head_dim=16, n_groups=4, **PADDED)
ALONE = dict(hidden_size=64, num_hidden_layers=4, vocab_size=160, **PADDED)
ZAMBA = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, vocab_size=160, max_position_embeddings=128, mamba_d_state=16,
             n_mamba_heads=8, adapter_rank=8, rms_norm_eps=1e-5, **PADDED)
JAMBA = dict(mamba_d_state=8, num_experts_per_tok=2, **PADDED)
GRANITE = dict(embedding_multiplier=3.0, logits_scaling=1.5, residual_multiplier=0.6, attention_multiplier=0.1)
FALCON = dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=160, max_position_embeddings=128, **IDS)
GPT = dict(n_embd=64, n_layer=4, n_head=4, n_positions=128, vocab_size=160, **IDS)
QUARTER = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25)
LFM2 = dict({k: v for k, v in SIZE.items() if k != "rms_norm_eps"}, norm_eps=1e-5, layer_types=["conv", "conv", "full_attention", "conv"])
MLA = dict({k: v for k, v in SIZE.items() if k != "num_key_value_heads"}, num_key_value_heads=4, kv_lora_rank=96, q_lora_rank=64,
           qk_nope_head_dim=32, qk_rope_head_dim=8, v_head_dim=32)
HALF = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)


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
    "qwen3_next": lambda: hf.Qwen3NextConfig(**DELTA, **MOE, num_experts=8, shared_expert_intermediate_size=64, mlp_only_layers=[1]),
    "qwen3_5_text": lambda: hf.Qwen3_5TextConfig(**DELTA, tie_word_embeddings=True),
    "qwen3_5_moe_text": lambda: hf.Qwen3_5MoeTextConfig(
        **{k: v for k, v in DELTA.items() if k != "intermediate_size"}, **DELTA_MOE),
    "qwen3_5": lambda: hf.Qwen3_5Config(
        text_config=dict(DELTA, linear_num_value_heads=4, linear_value_head_dim=16, linear_conv_kernel_dim=3, rope_parameters=dict(
            DELTA["rope_parameters"], mrope_section=[2, 2, 2], mrope_interleaved=True)),
        vision_config=dict(QWEN_VISION, num_position_embeddings=16)),
    "qwen3_5_moe": lambda: hf.Qwen3_5MoeConfig(
        text_config=dict({k: v for k, v in DELTA.items() if k != "intermediate_size"}, **DELTA_MOE, rope_parameters=dict(DELTA["rope_parameters"], mrope_section=[2, 2, 2])),
        vision_config=dict(QWEN_VISION, num_position_embeddings=16)),
    "llama-dynamic": lambda: hf.LlamaConfig(
        **{**SIZE, "max_position_embeddings": 16}, rope_parameters=dict(rope_type="dynamic", factor=8.0, rope_theta=1e4)),
    "qwen2-yarn": lambda: hf.Qwen2Config(**SIZE, rope_parameters=YARN),
    "mixtral": lambda: hf.MixtralConfig(**SIZE, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(**SIZE, **MOE, num_experts=8, shared_expert_intermediate_size=128,
                                           mlp_only_layers=[1]),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**SIZE, **MOE, num_experts=8, head_dim=24, norm_topk_prob=True,
                                           decoder_sparse_step=2),
    "qwen2_moe-window": lambda: hf.Qwen2MoeConfig(**SIZE, **MOE, num_experts=4, shared_expert_intermediate_size=128,
                                                  use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "qwen3_moe-window": lambda: hf.Qwen3MoeConfig(**SIZE, **MOE, num_experts=4, head_dim=16, use_sliding_window=True,
                                                  sliding_window=8),
    "olmo_hybrid": lambda: hf.OlmoHybridConfig(
        **SIZE, **PADDED, linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        rope_parameters=dict(rope_type="default", rope_theta=None)),
    "olmo_hybrid-rope": lambda: hf.OlmoHybridConfig(**SIZE, **PADDED, linear_allow_neg_eigval=False, linear_conv_kernel_dim=3),
    "olmoe": lambda: hf.OlmoeConfig(**{**SIZE, "intermediate_size": 32}, num_experts=8, num_experts_per_tok=3),
    "granite": lambda: hf.GraniteConfig(**SIZE, embedding_multiplier=3.0, logits_scaling=1.5, residual_multiplier=0.6,
                                        attention_multiplier=0.1, tie_word_embeddings=True),
    "granitemoe": lambda: hf.GraniteMoeConfig(**{**SIZE, "intermediate_size": 32}, num_local_experts=6,
                                              num_experts_per_tok=2, embedding_multiplier=3.0, logits_scaling=1.5,
                                              residual_multiplier=0.6, attention_multiplier=0.1),
    "gpt_oss": lambda: hf.GptOssConfig(
        **{**SIZE, "intermediate_size": 64}, head_dim=24, sliding_window=8, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters=dict(YARN, beta_fast=32.0, beta_slow=1.0, truncate=False)),
    "phi3": lambda: hf.Phi3Config(**PHI3, sliding_window=8),
    "phi3-longrope": lambda: hf.Phi3Config(     # the prompt is longer than 16: the long factors
        **PHI3, rope_parameters=dict(LONGROPE, attention_factor=1.3), original_max_position_embeddings=16),
    "phi3-shortrope": lambda: hf.Phi3Config(
        **PHI3, rope_parameters=dict(LONGROPE), original_max_position_embeddings=64),
    "smollm3": lambda: hf.SmolLM3Config(**SIZE, pad_token_id=0, bos_token_id=1, eos_token_id=2, no_rope_layers=[1, 0, 1, 1]),
    "olmo2": lambda: hf.Olmo2Config(**SIZE),
    "olmo3": lambda: hf.Olmo3Config(**SIZE, sliding_window=8, rope_parameters=dict(
        full_attention=YARN, sliding_attention=dict(rope_type="default", rope_theta=1e4))),
    "gpt2": lambda: hf.GPT2Config(n_embd=64, n_layer=3, n_head=4, n_positions=128, vocab_size=160,
                                  bos_token_id=1, eos_token_id=2),
    "gpt2-unscaled": lambda: hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=128, vocab_size=160, n_inner=96,
                                           bos_token_id=1, eos_token_id=2, scale_attn_weights=False,
                                           activation_function="gelu", tie_word_embeddings=False),
    "gemma": lambda: hf.GemmaConfig(**{**SIZE, "num_key_value_heads": 1}, head_dim=24),
    "gemma2": lambda: hf.Gemma2Config(**SIZE, head_dim=24, sliding_window=8, query_pre_attn_scalar=20,
                                      attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3_text": lambda: hf.Gemma3TextConfig(**GEMMA),
    "gemma3": lambda: hf.Gemma3Config(
        text_config=GEMMA, vision_config=VISION, mm_tokens_per_image=4),
    "qwen2_vl": lambda: hf.Qwen2VLConfig(
        text_config=dict(SIZE, rope_parameters=MROPE), vision_config=dict(depth=1, embed_dim=16, num_heads=2, hidden_size=64)),
    "qwen2_5_vl": lambda: hf.Qwen2_5_VLConfig(
        text_config=dict(SIZE, rope_parameters=MROPE, use_sliding_window=True, sliding_window=8, max_window_layers=2),
        vision_config=QWEN_VISION),
    "qwen3_vl": lambda: hf.Qwen3VLConfig(
        text_config=dict(SIZE, head_dim=24, rope_parameters=dict(MROPE, mrope_section=[4, 4, 4])),
        vision_config=dict(QWEN_VISION, num_position_embeddings=16, deepstack_visual_indexes=[0])),
    "qwen3_vl_moe": lambda: hf.Qwen3VLMoeConfig(
        text_config=dict(SIZE, num_experts_per_tok=2, moe_intermediate_size=96, head_dim=16, num_experts=4,
                         rope_parameters=MROPE, tie_word_embeddings=False),
        vision_config=dict(QWEN_VISION, num_position_embeddings=16, deepstack_visual_indexes=[0]), tie_word_embeddings=False),
    "mistral3": lambda: hf.Mistral3Config(
        text_config=dict(SIZE, model_type="mistral", head_dim=24, sliding_window=None),
        vision_config=dict(VISION, model_type="pixtral", head_dim=16)),
    "qwen2_5_omni_thinker": lambda: hf.Qwen2_5OmniThinkerConfig(
        text_config=dict(SIZE, rope_parameters=MROPE, tie_word_embeddings=False), vision_config=dict(QWEN_VISION, fullatt_block_indexes=[0]),
        audio_config=OMNI_AUDIO, tie_word_embeddings=False),
    "qwen3_omni_moe_thinker": lambda: hf.Qwen3OmniMoeThinkerConfig(
        text_config=dict(SIZE, **MOE, num_experts=4, head_dim=24, rope_parameters=dict(MROPE, mrope_section=[4, 4, 4])),
        vision_config=dict(QWEN_VISION, num_position_embeddings=16, deepstack_visual_indexes=[0]), audio_config=OMNI_AUDIO),
    "mellum": lambda: hf.MellumConfig(
        **SIZE, **MOE, num_experts=4, head_dim=24, sliding_window=8, mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]),
    "glm4_moe": lambda: hf.Glm4MoeConfig(
        **SIZE, **MOE, head_dim=24, n_routed_experts=8, n_shared_experts=2, n_group=4, topk_group=2, first_k_dense_replace=1,
        routed_scaling_factor=1.5, use_qk_norm=True, attention_bias=True, num_mtp_layers=0,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
    "glm4v": lambda: hf.Glm4vConfig(
        text_config=dict(SIZE, rope_parameters=dict(HALF, mrope_section=[2, 1, 1])),
        vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64, image_size=28)),
    "glm4v_moe": lambda: hf.Glm4vMoeConfig(
        text_config=dict(SIZE, **MOE, head_dim=24, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, attention_bias=True,
                         rope_parameters=dict(HALF, mrope_section=[2, 2, 2])),
        vision_config=dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64, image_size=28)),
    "deepseek_v2": lambda: hf.DeepseekV2Config(**MLA, **{**MOE, "num_experts_per_tok": 3}, n_routed_experts=8, n_shared_experts=2, first_k_dense_replace=1, n_group=4,
                                               topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=1.5),
    "deepseek_v2-lite": lambda: hf.DeepseekV2Config(
        **{**MLA, "q_lora_rank": None}, **MOE, n_routed_experts=8, n_shared_experts=1, attention_bias=True,
        rope_parameters=dict(YARN, mscale=0.707, mscale_all_dim=0.9, beta_fast=32.0, beta_slow=1.0)),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**MLA, **MOE, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=4,
                                               topk_group=2, attention_bias=True,
                                               rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0)),
    "deepseek_v3-halves": lambda: hf.DeepseekV3Config(**{**MLA, "v_head_dim": 64, "q_lora_rank": None}, **MOE, n_routed_experts=4,
                                                      first_k_dense_replace=2, n_group=1, topk_group=1, rope_interleave=False),
    "kimi_k25": lambda: hf.Kimi_K25Config(
        text_config=dict(MLA, **MOE, model_type="deepseek_v3", n_routed_experts=8, first_k_dense_replace=1, n_group=1, topk_group=1),
        vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)),
    "glm4_moe_lite": lambda: hf.Glm4MoeLiteConfig(**MLA, **MOE, n_routed_experts=8, n_shared_experts=2),
    "minicpm3": lambda: hf.MiniCPM3Config(**MLA, pad_token_id=0, scale_emb=3, dim_model_base=32, original_max_position_embeddings=64,
                                          rope_parameters=dict(LONGROPE, short_factor=SHORT[:4], long_factor=LONG[:4], partial_rotary_factor=1.0)),
    "youtu": lambda: hf.YoutuConfig(**MLA),
    "mistral4": lambda: hf.Mistral3Config(
        text_config=dict(MLA, **MOE, model_type="mistral4", n_routed_experts=8, n_group=2, topk_group=1, rope_parameters=dict(
            YARN, original_max_position_embeddings=6, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
            llama_4_scaling_beta=0.4, partial_rotary_factor=8 / 40)),
        vision_config=dict(VISION, model_type="pixtral", head_dim=16)),
    "lfm2": lambda: hf.Lfm2Config(**LFM2, block_multiple_of=32, conv_bias=True),
    "lfm2-plain": lambda: hf.Lfm2Config(**LFM2, block_auto_adjust_ff_dim=False, conv_L_cache=4, tie_word_embeddings=False),
    "lfm2_moe": lambda: hf.Lfm2MoeConfig(**LFM2, **MOE, num_experts=8, num_dense_layers=1, routed_scaling_factor=1.5),
    "dots1": lambda: hf.Dots1Config(**SIZE, **MOE, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1,
                                    sliding_window=8, max_window_layers=2, norm_topk_prob=True, routed_scaling_factor=2.5),
    "solar_open": lambda: hf.SolarOpenConfig(
        **{k: v for k, v in SIZE.items() if k != "intermediate_size"}, **MOE, head_dim=24, n_routed_experts=8),
    "exaone_moe": lambda: hf.ExaoneMoeConfig(**SIZE, **MOE, num_experts=8, sliding_window=8, first_k_dense_replace=2),
    "hy_v3": lambda: hf.HYV3Config(**SIZE, **MOE, head_dim=24, num_experts=8),
    "minimax_m2": lambda: hf.MiniMaxM2Config(
        **{**SIZE, "intermediate_size": 32}, head_dim=24, num_local_experts=8, num_experts_per_tok=2,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
    "gemma4": lambda: hf.Gemma4Config(                     # as E2B: later layers take earlier ones' keys, per-layer embeddings
        text_config=dict(GEMMA4, num_hidden_layers=6, layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
                         num_key_value_heads=1, num_kv_shared_layers=3, use_double_wide_mlp=True, hidden_size_per_layer_input=32,
                         vocab_size_per_layer_input=160),
        vision_config=None, audio_config=None),
    "gemma4-31b": lambda: hf.Gemma4TextConfig(**GEMMA4, **GEMMA4_K_IS_V, hidden_size_per_layer_input=0),
    "gemma4-26b": lambda: hf.Gemma4TextConfig(**GEMMA4, **GEMMA4_K_IS_V, hidden_size_per_layer_input=0, enable_moe_block=True,
                                              num_experts=8, top_k_experts=2, moe_intermediate_size=32),
    "gemma4_unified": lambda: hf.Gemma4UnifiedTextConfig(**GEMMA4, **GEMMA4_K_IS_V),
    "vaultgemma": lambda: hf.VaultGemmaConfig(**SIZE, head_dim=24, sliding_window=8, query_pre_attn_scalar=20,
                                              attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "flex_olmo": lambda: hf.FlexOlmoConfig(**{**SIZE, "intermediate_size": 32}, num_experts=5, num_experts_per_tok=3,
                                           pad_token_id=0, eos_token_id=2),
    "granitemoehybrid": lambda: hf.GraniteMoeHybridConfig(**HYBRID, position_embedding_type="rope"),
    "granitemoehybrid-nope": lambda: hf.GraniteMoeHybridConfig(**HYBRID),
    "granite_swa": lambda: hf.GraniteSWAConfig(
        **SIZE, bos_token_id=1, eos_token_id=2, sliding_window=8, layer_rope_theta=[0, 1e4, 1e4, 5e5], embedding_multiplier=3.0,
        logits_scaling=1.5, residual_multiplier=0.6, attention_multiplier=0.1),
    "seed_oss": lambda: hf.SeedOssConfig(**SIZE, head_dim=24),
    "exaone4": lambda: hf.Exaone4Config(**SIZE, sliding_window=8),
    "exaone4-full": lambda: hf.Exaone4Config(**SIZE, sliding_window=None, layer_types=["full_attention"] * 4),
    "ministral": lambda: hf.MinistralConfig(**SIZE, head_dim=24, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2),
    "ministral3": lambda: hf.Ministral3Config(**SIZE, head_dim=24, rope_parameters=dict(
        YARN, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)),
    "cwm": lambda: hf.CwmConfig(**SIZE, head_dim=24, sliding_window=8, rope_parameters=LLAMA3, bos_token_id=1, eos_token_id=2),
    "internlm3": lambda: hf.AutoConfig.for_model("internlm3", **SIZE, attention_bias=True, mlp_bias=True, head_dim=24),
    "iquestcoder": lambda: hf.AutoConfig.for_model("iquestcoder", **SIZE, head_dim=24),
    "ernie4_5": lambda: hf.Ernie4_5Config(**SIZE, head_dim=24, use_bias=True),
    "glm": lambda: hf.GlmConfig(**SIZE, pad_token_id=0, head_dim=24, rope_parameters=dict(
        rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
    "glm4": lambda: hf.Glm4Config(**SIZE, pad_token_id=0, head_dim=24, rope_parameters=dict(
        rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
    "helium": lambda: hf.HeliumConfig(**SIZE, head_dim=16),
    "arcee": lambda: hf.ArceeConfig(**SIZE, bos_token_id=1, eos_token_id=2, mlp_bias=True),
    "starcoder2": lambda: hf.Starcoder2Config(**STARCODER, sliding_window=8, bos_token_id=1, eos_token_id=2),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**MHA, **IDS, rope_parameters=QUARTER),
    "gpt_neox-sequential": lambda: hf.GPTNeoXConfig(**MHA, **IDS, rope_parameters=dict(QUARTER, rope_theta=5e4, partial_rotary_factor=1.0),
                                                    use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True),
    "gptj": lambda: hf.GPTJConfig(**GPT, rotary_dim=8),
    "phi": lambda: hf.PhiConfig(**LAYER_NORM, **IDS, rope_parameters=HALF),
    "cohere": lambda: hf.CohereConfig(**LAYER_NORM, **PADDED, logit_scale=0.25),
    "cohere-plus": lambda: hf.CohereConfig(**LAYER_NORM, **PADDED, logit_scale=0.25, use_qk_norm=True),
    "cohere2": lambda: hf.Cohere2Config(**LAYER_NORM, **PADDED, logit_scale=0.25, sliding_window=8, attention_bias=True,
                                        layer_types=["sliding_attention", "full_attention"] * 2),
    "falcon": lambda: hf.FalconConfig(**FALCON),
    "falcon-new": lambda: hf.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=96),
    "falcon-one_norm": lambda: hf.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, bias=True),
    "falcon-alibi": lambda: hf.FalconConfig(**FALCON, alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "stablelm": lambda: hf.StableLmConfig(**LAYER_NORM, **IDS, rope_parameters=QUARTER, use_qkv_bias=True),
    "stablelm-parallel": lambda: hf.StableLmConfig(**LAYER_NORM, **IDS, rope_parameters=QUARTER, use_parallel_residual=True),
    "stablelm-norms": lambda: hf.StableLmConfig(**LAYER_NORM, **IDS, rope_parameters=QUARTER, use_parallel_residual=True, qk_layernorm=True),
    "nemotron": lambda: hf.NemotronConfig(**LAYER_NORM, **IDS, rope_parameters=HALF),
    "apertus": lambda: hf.ApertusConfig(**SIZE, **PADDED, rope_parameters=LLAMA3),
    "olmo": lambda: hf.OlmoConfig(**LAYER_NORM, **PADDED, clip_qkv=1.0),
    "hunyuan_v1_dense": lambda: hf.HunYuanDenseV1Config(**SIZE, head_dim=24, rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, alpha=1000.0, factor=1.0)),
    "hunyuan_v1_moe": lambda: hf.HunYuanMoEV1Config(**{**SIZE, "intermediate_size": 32}, head_dim=24, num_experts=4, moe_topk=2),
    "afmoe": lambda: hf.AfmoeConfig(**SIZE, **MOE, head_dim=24, num_experts=8, num_shared_experts=2, num_dense_layers=1, route_scale=1.7,
                                    global_attn_every_n_layers=2, sliding_window=8, mup_enabled=True),
    "ernie4_5_moe": lambda: hf.Ernie4_5_MoeConfig(**SIZE, moe_k=2, moe_intermediate_size=32, moe_num_experts=8, moe_num_shared_experts=2,
                                                  moe_layer_interval=2),
    "granitemoeshared": lambda: hf.GraniteMoeSharedConfig(**{**SIZE, "intermediate_size": 32}, **GRANITE, num_local_experts=6,
                                                          num_experts_per_tok=2, shared_intermediate_size=64),
    "granitemoe_swa": lambda: hf.GraniteMoeSWAConfig(**{**SIZE, "intermediate_size": 32}, **GRANITE, num_local_experts=6, num_experts_per_tok=2,
                                                     sliding_window=8, layer_rope_theta=[0, 1e4, 1e4, 5e5]),
    "granitemoehybrid-mamba": lambda: hf.GraniteMoeHybridConfig(
        **{**HYBRID, "intermediate_size": 32, "num_local_experts": 6, "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"]},
        **MAMBA, num_experts_per_tok=2, mamba_n_groups=1),
    "bamba": lambda: hf.BambaConfig(**SIZE, **MAMBA, mamba_n_groups=4, attn_layer_indices=[2], mamba_proj_bias=True),
    "falcon_h1": lambda: hf.FalconH1Config(
        **SIZE, **MAMBA, mamba_n_groups=4, mamba_d_ssm=96, lm_head_multiplier=0.9, embedding_multiplier=2.5, mlp_multipliers=[0.7, 1.6],
        key_multiplier=0.6, attention_out_multiplier=0.8, attention_in_multiplier=1.3, ssm_multipliers=[0.7, 1.2, 0.9, 1.4, 0.6],
        ssm_in_multiplier=1.2, ssm_out_multiplier=0.7),
    "falcon_h1-norm": lambda: hf.FalconH1Config(**SIZE, **MAMBA, mamba_n_groups=1, mamba_d_ssm=None, mamba_rms_norm=True,
                                                mamba_norm_before_gate=False, mamba_conv_bias=False),
    "nemotron_h": lambda: hf.NemotronHConfig(**NEMOTRON, layers_block_type=["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"]),
    "nemotron_h-experts": lambda: hf.NemotronHConfig(
        **NEMOTRON, **MOE, layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention", "moe", "mlp"], n_routed_experts=8,
        moe_shared_expert_intermediate_size=64, routed_scaling_factor=1.5, n_group=2, topk_group=1),
    "nemotron_h-latent": lambda: hf.NemotronHConfig(
        **NEMOTRON, **MOE, layers_block_type=["mlp", "linear_attention", "moe", "full_attention", "moe"], n_routed_experts=8,
        moe_shared_expert_intermediate_size=64, moe_latent_size=32),
    "mamba": lambda: hf.MambaConfig(**ALONE, state_size=8),
    "mamba-biased": lambda: hf.MambaConfig(**ALONE, state_size=8, use_bias=True, use_conv_bias=False, time_step_rank=5, conv_kernel=3,
                                           tie_word_embeddings=False),
    "falcon_mamba": lambda: hf.FalconMambaConfig(**ALONE, state_size=8, time_step_rank=12, mixer_rms_eps=1e-3),
    "mamba2": lambda: hf.Mamba2Config(**ALONE, state_size=16, num_heads=8, head_dim=16, n_groups=4),
    "mamba2-one_group": lambda: hf.Mamba2Config(**ALONE, state_size=16, num_heads=4, head_dim=32, n_groups=1, use_bias=True, use_conv_bias=False,
                                                time_step_limit=(0.1, 1.5), tie_word_embeddings=True),
    "jamba": lambda: hf.JambaConfig(**SIZE, **JAMBA, num_experts=4, attn_layer_period=3, attn_layer_offset=1),
    "jamba-dense": lambda: hf.JambaConfig(**SIZE, **JAMBA, num_experts=1, attn_layer_period=2, attn_layer_offset=0, mamba_proj_bias=True,
                                          mamba_dt_rank=6, mamba_conv_bias=False),
    "zamba2": lambda: hf.Zamba2Config(**ZAMBA, num_mem_blocks=2, use_shared_attention_adapter=True, use_mem_rope=True, mamba_ngroups=2,
                                      layers_block_type=["hybrid", "hybrid", "mamba", "hybrid"], num_hidden_layers=4),
    "zamba2-untied": lambda: hf.Zamba2Config(**ZAMBA, num_mem_blocks=1, tie_word_embeddings=False, num_hidden_layers=3,
                                             layers_block_type=["hybrid", "mamba", "hybrid"]),
    "zamba2-one_block": lambda: hf.Zamba2Config(**ZAMBA, num_mem_blocks=1, num_key_value_heads=2, add_bias_linear=True,
                                                layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], num_hidden_layers=4),
    "granitemoehybrid-experts": lambda: hf.GraniteMoeHybridConfig(**{**HYBRID, "intermediate_size": 32, "num_local_experts": 6},
                                                                  num_experts_per_tok=2, position_embedding_type="rope"),
    "muse_glimmer": lambda: hf.MuseGlimmerConfig(
        text_config=dict(SIZE, head_dim=24, sliding_window=8, output_multiplier=0.5, final_logit_softcapping=5.0),
        vision_config=dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)),
    "ministral3-long": lambda: hf.Ministral3Config(**SIZE, head_dim=24, rope_parameters=dict(
        YARN, original_max_position_embeddings=6, llama_4_scaling_beta=0.4)),
    "nanochat": lambda: hf.NanoChatConfig(**SIZE, **PADDED, final_logit_softcapping=5.0),
    "hyperclovax": lambda: hf.HyperCLOVAXConfig(**SIZE, embedding_multiplier=3.0, logits_scaling=0.6, residual_multiplier=0.6, attention_multiplier=0.1),
    "hyperclovax-plain": lambda: hf.HyperCLOVAXConfig(**SIZE, residual_multiplier=0.6, use_post_norm=False),
    "opt": lambda: hf.OPTConfig(hidden_size=64, ffn_dim=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=160, max_position_embeddings=128,
                                **PADDED),
    "jais2": lambda: hf.Jais2Config(**LAYER_NORM, **IDS),
    "bloom": lambda: hf.BloomConfig(hidden_size=64, n_layer=3, n_head=4, vocab_size=160, **IDS),
    "mpt": lambda: hf.MptConfig(d_model=96, n_heads=12, n_layers=3, max_seq_len=128, vocab_size=160, attn_config=dict(clip_qkv=1.0)),
    "gpt_neo": lambda: hf.GPTNeoConfig(hidden_size=64, num_layers=4, num_heads=4, window_size=8, attention_types=[[["global", "local"], 2]],
                                       vocab_size=160, max_position_embeddings=128, **IDS),
    "exaone": lambda: stand_ins.Exaone(**SIZE, rope_parameters=LLAMA3),
    "sarvam_moe": lambda: stand_ins.SarvamMoE(**SIZE, **MOE, head_dim=24, n_routed_experts=8, n_group=2, topk_group=1),
    "sarvam_mla": lambda: stand_ins.SarvamMLA(**{**MLA, "q_lora_rank": None}, **MOE, n_routed_experts=8, first_k_dense_replace=2, rope_parameters=dict(
        YARN, mscale=1.0, mscale_all_dim=1.0, beta_fast=32.0, beta_slow=1.0)),
    "cohere2_moe": lambda: hf.Cohere2MoeConfig(**LAYER_NORM, **PADDED, logit_scale=0.25, sliding_window=8, head_dim=24, num_experts=6,
                                               num_shared_experts=2, first_k_dense_replace=2, sliding_window_pattern=2),
    "cohere2_moe-sigmoid": lambda: hf.Cohere2MoeConfig(
        **SIZE, **PADDED, logit_scale=1.5, sliding_window=8, head_dim=24, num_experts=6, num_shared_experts=1, expert_selection_fn="sigmoid",
        shared_expert_combination_strategy="sum", first_k_dense_replace=1, prefix_dense_intermediate_size=128, prefix_dense_sliding_window_pattern=2,
        sliding_window_pattern=3, norm_topk_prob=False, attention_bias=True, tie_word_embeddings=False),
    "kolibri1": lambda: hf.Kolibri1Config(**{k: v for k, v in SIZE.items() if k != "intermediate_size"}, **MOE, head_dim=24, sliding_window=8,
                                          num_experts=8, shared_expert_intermediate_size=64, norm_topk_prob=True,
                                          layer_types=["sliding_attention", "full_attention"] * 2),
    "mimo_v2_flash": lambda: hf.MiMoV2FlashConfig(
        **{**SIZE, "num_key_value_heads": 1}, **MOE, head_dim=24, v_head_dim=16, n_routed_experts=8, sliding_window=8, n_group=2, topk_group=1,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"], attention_bias=True, rope_parameters=dict(
            full_attention=dict(rope_type="default", rope_theta=5e6, partial_rotary_factor=0.334),
            sliding_attention=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.334))),
    "laguna": lambda: hf.LagunaConfig(
        **SIZE, **MOE, head_dim=24, num_experts=8, shared_expert_intermediate_size=64, sliding_window=8, num_attention_heads_per_layer=[4, 8, 4, 4],
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"], moe_routed_scaling_factor=2.5,
        moe_router_logit_softcapping=2.0, rope_parameters=dict(
            full_attention=dict(YARN, partial_rotary_factor=0.5, beta_fast=32.0, beta_slow=1.0, attention_factor=1.0),
            sliding_attention=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=1.0))),
    "laguna-elements": lambda: hf.LagunaConfig(**SIZE, **MOE, head_dim=24, num_experts=8, gating="per-element", mlp_layer_types=["sparse"] * 4,
                                               shared_expert_intermediate_size=32, attention_bias=True),
    "gpt_bigcode": lambda: hf.GPTBigCodeConfig(**GPT),
    "gpt_bigcode-heads": lambda: hf.GPTBigCodeConfig(**GPT, multi_query=False, n_inner=96),
}


# Between them, these have every field of ModelConfig at a value that is not its default.
COVER = ("llama3", "mistral-window", "gemma2", "gemma3_text", "qwen2_moe", "gpt_oss", "olmo2", "phi3-longrope", "gpt2", "granite",
         "smollm3", "glm4_moe", "gemma4", "gemma4-26b", "phi", "mpt", "muse_glimmer", "hunyuan_v1_dense", "ministral3-long",
         "deepseek_v2", "qwen3_5_text", "lfm2", "kolibri1", "laguna", "olmo_hybrid", "bamba", "falcon_h1", "nemotron_h-latent",
         "falcon_mamba", "jamba", "zamba2")

MODELS = {                                                 # for docs/models.md: who is of this model_type
    "llama": "Llama 2, 3, 3.1 to 3.3, CodeLlama, TinyLlama, SmolLM, SmolLM2, Yi, R1-Distill-Llama",
    "deepseek_v2": "DeepSeek-V2, V2-Lite, V2.5, Coder-V2", "deepseek_v3": "DeepSeek-V3, V3.1, R1; Kimi K2, K2.5, their text part",
    "glm4_moe_lite": "GLM-4.7-Flash", "minicpm3": "MiniCPM3 4B", "youtu": "Youtu-LLM 2B", "mistral4": "Mistral Small 4",
    "lfm2": "LFM2 and LFM2.5 350M, 700M, 1.2B, 2.6B", "lfm2_moe": "LFM2-8B-A1B, LFM2-24B-A2B",
    "mistral": "Mistral 7B (v0.1 with its window, v0.2, v0.3), Nemo, Small",
    "mixtral": "Mixtral 8x7B, 8x22B",
    "qwen2": "Qwen2, Qwen2.5, QwQ, R1-Distill-Qwen", "qwen2_moe": "Qwen1.5-MoE, Qwen2-57B-A14B",
    "qwen3": "Qwen3", "qwen3_moe": "Qwen3-30B-A3B, 235B-A22B",
    "qwen3_next": "Qwen3-Next-80B-A3B", "qwen3_5_text": "Qwen3.5, 3.6, 3.8: 0.8B, 2B, 4B, 9B, 27B, the text part",
    "qwen3_5_moe_text": "Qwen3.5, 3.6, 3.8: 35B-A3B, 122B-A10B, 397B-A17B, the text part",
    "gemma4_text": "Gemma 4 E2B, E4B, 26B-A4B, 31B, the text part", "gemma4_unified_text": "Gemma 4 12B, its text part",
    "gemma": "Gemma", "gemma2": "Gemma 2", "gemma3_text": "Gemma 3, the text part of the multimodal ones too",
    "qwen2_vl_text": "Qwen2-VL, its text part", "qwen2_5_vl_text": "Qwen2.5-VL, its text part",
    "qwen3_vl_text": "Qwen3-VL, its text part", "qwen3_vl_moe_text": "Qwen3-VL-30B-A3B, 235B-A22B, their text part",
    "qwen2_5_omni_text": "Qwen2.5-Omni, its text part", "qwen3_omni_moe_text": "Qwen3-Omni-30B-A3B, its text part",
    "glm4_moe": "GLM-4.5, 4.6, 4.7, Air", "glm4v_text": "GLM-4.1V 9B, its text part", "glm4v_moe_text": "GLM-4.5V, 4.6V, their text part", "dots1": "dots.llm1", "solar_open": "Solar Open 100B", "exaone_moe": "K-EXAONE",
    "hy_v3": "Hunyuan 3", "minimax_m2": "MiniMax-M2", "mellum": "Mellum 2", "vaultgemma": "VaultGemma", "flex_olmo": "FlexOlmo", "granitemoehybrid": "Granite 4.0: micro, 1b, 350m; H: micro, tiny, small", "bamba": "Bamba 9B",
    "nemotron_h": "Nemotron-H, Nemotron Nano 9B v2, Nemotron 3 Nano, Super", "falcon_h1": "Falcon-H1 0.5B to 34B",
    "mamba": "Mamba 130M to 2.8B", "falcon_mamba": "Falcon Mamba 7B", "mamba2": "Mamba-2 130M to 2.7B, Mamba-Codestral 7B",
    "zamba2": "Zamba 2 1.2B, 2.7B, 7B", "jamba": "Jamba v0.1, 1.5 Mini, 1.5 Large, Reasoning 3B",
    "granite_swa": "Granite with windows and sinks", "seed_oss": "Seed-OSS 36B", "exaone4": "EXAONE 4.0", "ministral": "Ministral 8B (2410)",
    "ministral3": "Ministral 3, Devstral 2 and Small 2, Mistral Medium 3.5", "cwm": "CWM", "internlm3": "InternLM3", "iquestcoder": "IQuest-Coder", "ernie4_5": "ERNIE 4.5 0.3B",
    "glm": "GLM-4 9B (glm-4-9b-chat-hf)", "glm4": "GLM-4 9B, 32B (0414)", "helium": "Helium 1", "arcee": "AFM 4.5B", "starcoder2": "StarCoder2",
    "phi3": "Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini", "smollm3": "SmolLM3",
    "olmo2": "OLMo 2", "olmo3": "OLMo 3", "olmo_hybrid": "OLMo Hybrid 7B", "olmoe": "OLMoE", "granite": "Granite 3.x", "granitemoe": "Granite 3.x MoE",
    "gpt_oss": "gpt-oss 20b, 120b", "gpt2": "GPT-2",
    "gpt_neox": "Pythia, GPT-NeoX-20B, Dolly 2, RedPajama-INCITE", "gptj": "GPT-J 6B", "phi": "Phi-1, 1.5, 2",
    "cohere": "Command R, Aya 23, Aya Expanse, R+", "cohere2": "Command R7B, Command A", "falcon": "Falcon 7B, 40B, 180B, RW, Falcon 2 11B",
    "stablelm": "StableLM 3B, StableLM 2 1.6B, 12B", "nemotron": "Nemotron-4, Minitron", "apertus": "Apertus 8B, 70B",
    "olmo": "OLMo 1B, 7B", "hunyuan_v1_dense": "Hunyuan 0.5B, 1.8B, 4B, 7B", "hunyuan_v1_moe": "Hunyuan-A13B", "afmoe": "Trinity (AFMoE)",
    "ernie4_5_moe": "ERNIE 4.5 21B-A3B, 300B-A47B", "granitemoeshared": "Granite MoE with shared experts",
    "granitemoe_swa": "Granite MoE with windows and sinks", "muse_glimmer_text": "Muse Glimmer 30B, its text part",
    "exaone": "EXAONE 3.0, 3.5, Deep", "sarvam_moe": "Sarvam 30B", "sarvam_mla": "Sarvam 105B", "cohere2_moe": "Command A+",
    "kolibri1": "Kolibri 1", "mimo_v2_flash": "MiMo-V2-Flash", "laguna": "Laguna XS",
    "bloom": "BLOOM, BLOOMZ", "jais2": "Jais 2 8B, 70B", "nanochat": "nanochat (as transformers has it)",
    "hyperclovax": "HyperCLOVA X SEED Think", "opt": "OPT (not 350M)", "mpt": "MPT 7B, 30B", "gpt_neo": "GPT-Neo, TinyStories", "gpt_bigcode": "StarCoder, SantaCoder",
}


# The best known sizes, by downloads on stored pages of the Hub in 2026 or general knowledge; a type that is not here: little used.
RUN_MOST = {
    "llama": "Llama 3.1 8B, Llama 3.2 1B and 3B, Llama 3.3 70B, TinyLlama 1.1B", "mistral": "7B v0.3, Small 24B, Nemo 12B",
    "mixtral": "8x7B", "qwen2": "Qwen2.5 0.5B to 72B, Coder 7B and 32B", "qwen3": "0.6B, 4B, 8B, 32B", "qwen3_moe": "30B-A3B, Coder 30B-A3B, 235B-A22B",
    "qwen3_next": "Coder-Next 80B-A3B", "qwen3_5_text": "Qwen3.8-27B, Qwen3.6-27B, Qwen3.5 0.8B, 2B, 4B", "qwen3_5_moe_text": "Qwen3.6-35B-A3B",
    "qwen3_vl_text": "2B, 4B, 8B", "qwen3_vl_moe_text": "30B-A3B", "qwen2_5_vl_text": "3B, 7B", "gemma2": "2B, 9B", "gemma3_text": "270M, 1B, 4B, 12B, 27B",
    "gemma4_text": "26B-A4B, E4B, E2B, 31B", "gemma4_unified_text": "12B", "gpt_oss": "20b, 120b", "phi3": "Phi-4 14B, Phi-4-mini 3.8B",
    "smollm3": "3B", "ministral3": "Ministral 3 3B, 8B, 14B; Devstral Small 2 24B", "muse_glimmer_text": "30B", "glm4_moe": "GLM-4.5-Air 106B-A12B",
    "glm4_moe_lite": "GLM-4.7-Flash 30B-A3B", "minimax_m2": "230B-A10B", "deepseek_v2": "V2-Lite 16B-A2.4B", "deepseek_v3": "R1 and V3 671B-A37B, Kimi K2",
    "lfm2": "LFM2.5-1.2B, 350M", "lfm2_moe": "8B-A1B", "granitemoehybrid": "H-tiny 7B-A1B, H-micro 3B, micro 3B, 350m",
    "nemotron_h": "3 Nano 30B-A3B, Nano 9B v2, 3 Nano 4B, 3 Super 120B-A12B", "falcon_h1": "0.5B, 1.5B, 7B", "jamba": "Reasoning 3B",
    "falcon_mamba": "7B", "zamba2": "1.2B, 2.7B, 7B", "mamba": "130M, 2.8B", "mamba2": "Codestral 7B, 130M", "seed_oss": "36B", "exaone4": "1.2B, 32B", "cohere2": "R7B, Command A 111B",
    "ernie4_5_moe": "21B-A3B", "mistral4": "119B", "gpt2": "124M", "gpt_neox": "Pythia 70M to 12B", "gpt_neo": "TinyStories 1M to 33M", "starcoder2": "3B",
    "olmo2": "1B, 7B", "olmoe": "1B-7B", "granite": "3.3 2B, 8B", "mellum": "12B-A2.5B", "afmoe": "Trinity Mini 26B-A3B", "apertus": "8B",
    "hunyuan_v1_dense": "0.5B to 7B", "bloom": "560M", "opt": "125M", "phi": "Phi-2 2.7B",
}
RUN_HERE = {"llama": "SmolLM2-135M", "gemma3_text": "270M"}    # real weights; of all other types, random ones


def make(name: str, seed: int = 0):
    """A transformers model with weights as large as trained ones, so that no error can hide."""
    torch.manual_seed(seed)
    config = FAMILIES[name]()
    kind = hf.AutoModelForImageTextToText if hasattr(config, "vision_config") else hf.AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32).eval()
    for key, p in model.named_parameters():
        if "norm" in key or ".ln_" in key or key.endswith(("router.scale", "per_expert_scale")):
            p.data += 0.3 * torch.randn_like(p)            # around 1, or around 0 where it is 1 + w
        elif p.dim() == 1 and key.endswith("sinks"):
            p.data = torch.randn_like(p)
        elif key.endswith("A_log"):
            p.data = torch.randn_like(p) - 2               # a memory of some tokens to many
        elif key.endswith((".D", "bias")):
            p.data = 0.3 * torch.randn_like(p)
        elif "adapter" in key:                             # products, which are added to another
            p.data = 0.5 * torch.randn_like(p) * p.shape[-1] ** -0.5
        else:
            p.data = torch.randn_like(p) * (0.7 if "embed" in key or "wte" in key or "wpe" in key else p.shape[-1] ** -0.5)
    for key, buffer in model.named_buffers():              # routers': of the choice alone
        if key.endswith("bias") and buffer.is_floating_point():
            buffer.copy_(0.3 * torch.randn_like(buffer))
        elif key.endswith("layer_scalar"):
            buffer.copy_(0.5 + torch.rand_like(buffer))
    return model


# MtpModel's names for a layer's parts -> those of released checkpoints: behind the last layer, or mtp.*
QWEN_HEAD = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
HEADS = {"glm4_moe": {"post_norm": "shared_head.norm"},
         **dict.fromkeys(("mellum", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5"), QWEN_HEAD)}


def released_name(name, key, n_layer):
    """MtpModel's name of a parameter -> a released checkpoint's."""
    inner = key.removeprefix("layers.0.")
    in_layer = inner.startswith("mtp_block.")
    inner = inner.removeprefix("mtp_block.")
    stem = inner.removesuffix(".weight")
    inner = inner.replace(stem, HEADS[name].get(stem, stem))
    if name == "glm4_moe":
        return f"model.layers.{n_layer}.{inner}"
    return f"mtp.layers.0.{inner}" if in_layer else f"mtp.{inner}"


def experts_apart(name, t):
    """[E, …] of all experts -> each one's tensors, as released."""
    if "mlp.experts.gate_up_proj" in name:
        for i, one in enumerate(t):
            gate, up = one.chunk(2)
            yield name.replace("gate_up_proj", f"{i}.gate_proj.weight"), gate.contiguous()
            yield name.replace("gate_up_proj", f"{i}.up_proj.weight"), up.contiguous()
    elif "mlp.experts.down_proj" in name:
        yield from ((name.replace("down_proj", f"{i}.down_proj.weight"), one.contiguous()) for i, one in enumerate(t))
    else:
        yield name, t


def make_with_head(name, directory):
    """A checkpoint with a head that drafts -> transformers' model and its head, as it reads that."""
    from safetensors.torch import load_file, save_file
    from transformers.modeling_layers import MtpModel
    model = make(name)
    model.save_pretrained(directory)
    config = getattr(model.config, "text_config", model.config)
    config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]          # of Qwen's their config.json says nothing
    if name == "mellum":
        config.mtp_layer_types, config.mtp_mlp_layer_types = ["sliding_attention"], ["sparse"]
    if name == "glm4_moe":
        del config.mtp_layer_types
    if name in ("mellum", "glm4_moe"):
        model.save_pretrained(directory)
    disk, n_layer = load_file(directory / "model.safetensors"), config.num_hidden_layers
    torch.manual_seed(3)
    head = MtpModel(model, 1).eval()
    for norm in ("enorm", "hnorm", "post_norm"):           # not of a layer that has others too
        setattr(head.layers[0], norm, type(model.get_decoder().norm)(64, eps=config.rms_norm_eps))
    for key, p in head.state_dict().items():
        if key.startswith("layers."):
            p.copy_(torch.randn_like(p) * (0.3 if p.dim() == 1 else p.shape[-1]**-0.5) + ("norm" in key))
            disk |= dict(experts_apart(released_name(name, key, n_layer), p.clone()))
    if name == "glm4_moe":                                 # GLM-4.5 has these once more
        disk[f"model.layers.{n_layer}.embed_tokens.weight"] = torch.zeros(160, 64)
        disk[f"model.layers.{n_layer}.shared_head.head.weight"] = torch.zeros(160, 64)
    save_file(disk, directory / "model.safetensors", {"format": "pt"})
    if name.startswith("qwen"):                            # whose heads transformers does not read
        return model, head
    model = hf.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if name == "glm4_moe":                                 # it names the layers of the released ones
        model._keys_to_ignore_on_load_unexpected = [rf"layers\.{n_layer}\."]
    return model, MtpModel.from_pretrained(model).eval()


def old_spelling(directory) -> None:
    """Rewrite config.json as transformers 4 had it."""
    path = directory / "config.json"
    whole = json.loads(path.read_text())
    c = whole.get("text_config", whole)
    if per_layer := c.pop("per_layer_config", None):       # transformers 4, and the released ones
        c["global_head_dim"] = next(iter(per_layer.values()))["head_dim"]
        c["num_global_key_value_heads"] = next(iter(per_layer.values())).get("num_key_value_heads")
        path.write_text(json.dumps(whole))
        return
    rope = c.pop("rope_parameters", None)
    if rope is None or c["model_type"] in ("mellum", "laguna", "mimo_v2_flash"):
        return                                             # GPT-2 is spelled as ever, others are young
    if "full_attention" in rope and c["model_type"] == "olmo3":
        rope = rope["full_attention"]
    elif "full_attention" in rope:
        c["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        c["layer_types"] = c.pop("layer_types")            # its pattern is not a period here
    elif c["model_type"] in ("qwen2", "qwen2_moe"):
        c.pop("layer_types")
    c["rotary_emb_base" if c["model_type"] == "gpt_neox" else "rope_theta"] = rope.pop("rope_theta")
    if c["model_type"] == "gpt_neox":
        c["rotary_pct"] = rope.pop("partial_rotary_factor")
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):
        if c["model_type"].startswith(("phi3", "glm4v_text", "qwen3_5", "qwen3_next")) and key in rope:      # beside it, not in it
            c[key] = rope.pop(key)
    if c["model_type"] == "minimax_m2":
        c["rotary_dim"] = int(rope.pop("partial_rotary_factor") * c["head_dim"])
    rope["type"] = rope.pop("rope_type").replace("longrope", "su")
    c["rope_scaling"] = None if rope["type"] == "default" else rope
    whole["torch_dtype"] = whole.pop("dtype", "float32")
    if c.get("head_dim") == c["hidden_size"] // c["num_attention_heads"] and c["model_type"] != "helium":
        del c["head_dim"]
    if whole["model_type"] in ("qwen2_vl", "qwen2_5_vl"):  # had one level
        whole = {**whole.pop("text_config"), **whole}
        whole["rope_scaling"] = dict(type="mrope", mrope_section=[4, 2, 2])
    path.write_text(json.dumps(whole))


def flat(cfg):
    """A ModelConfig -> the FlatConfig whose with_parts() it is."""
    from dataclasses import fields

    from gpt_faster.formats.flat_config import FlatConfig, LayerEnd, Scores
    from gpt_faster.layers.attention import AttentionVariant
    from gpt_faster.layers.block import BlockVariant
    from gpt_faster.layers.embedding import embed_scale
    from gpt_faster.layers.feed_forward import FeedForwardVariant
    from gpt_faster.layers.moe import MoEVariant
    from gpt_faster.layers.rope import RopeVariant
    from model import ModelConfig
    attention, block = cfg.attention or AttentionVariant(), cfg.block or BlockVariant()
    ffn = cfg.ffn or FeedForwardVariant()
    per_layer = cfg.per_layer if hasattr(cfg.per_layer, "dim") else None       # not Zamba's
    end = LayerEnd(per_layer.dim, per_layer.vocab_size) if per_layer else LayerEnd() if block.end else None
    same = {f.name: getattr(cfg, f.name) for f in fields(ModelConfig)
            if f.name not in ("norm", "attention", "ffn", "block", "after_embed", "per_layer")}
    names = [part.name for part in cfg.after_embed]
    return FlatConfig(**same | dict(
        qk_norm="head" if cfg.qk_norm else attention.qk_norm, layer_norm=cfg.norm is not None, pre_norm=block.pre_norm,
        post_norm=block.post_norm, post_norm_eps=block.post_norm_eps, embed_norm="embed_norm" in names, parallel=block.parallel,
        v_norm=attention.v_norm, activation=ffn.activation, gated=ffn.gated, clip_qkv=attention.clip, attn_gate=attention.gate,
        embed_scale=embed_scale(cfg), residual_scale=block.residual_scale, attn_scale=attention.scale,
        scores=Scores(*(getattr(attention, f.name) for f in fields(Scores))), logit_cap=cfg.logit_cap and cfg.logit_cap.cap,
        learned_pos="pos_embed" in names, widths=block.widths, norm_placement=block.norm_placement, layer_end=end,
        rope=tuple(RopeVariant(**vars(rope)) for rope in cfg.rope), moe=cfg.moe and MoEVariant(**vars(cfg.moe))))


def logits(model, tokens):
    """transformers' logits [B, T, V]."""
    with torch.no_grad():
        return model(input_ids=tokens).logits.float()


def make_mxfp4_gpt_oss():
    """-> gpt-oss whose experts have random MXFP4 numbers, and its tensors as OpenAI stores them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    model, disk = make("gpt_oss"), {}
    for name, w in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            E, n_in, n_out = w.shape
            blocks = torch.randint(0, 256, (E, n_out, n_in // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 125, (E, n_out, n_in // 32), dtype=torch.uint8)
            disk |= {name + "_blocks": blocks, name + "_scales": scales}
            w.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        else:
            disk[name] = w
    return model, disk
