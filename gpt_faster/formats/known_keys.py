"""The keys of a model's files: which are acted on, refused, or without effect on text, and why.

One table for each file. A test walks the keys that transformers, PEFT and llama.cpp's gguf package
know and fails for one that is in no table. Keys of a file that are in no table are named in one
line. Reads no file; the readers act on the keys.

    config = of_model_type(config, "llama")        # without keys that a Llama does not have
    name_unknown(path, CONFIG.unknown(config))
    python -m gpt_faster.formats.known_keys        # how many keys of each file
"""

from checkpoint import NEUTRAL, SAMPLING
from gpt_faster.text.known_keys import TOKENIZER, TOKENIZER_CONFIG, Table

UNSUPPORTED_CONFIG_KEYS = (                        # config.py refuses them if they are set
    "use_bidirectional_attention", "scale_attn_by_inverse_layer_idx", "qk_layernorm",
    "apply_residual_connection_post_layernorm", "prefix_lm", "qk_ln", "add_cross_attention",
    "clip_qkv")

# ---- config.json --------------------------------------------------------------------------------

TRAINING = ("*dropout* *_pdrop emb_pdrop layerdrop *initializer* init_std init_device "
            "*aux_loss* router_z_loss_coef router_jitter_noise seq_aux gradient_checkpointing "
            "train_* loss_* linear_a_log_* linear_dt_*")
PYTHON = ("output_router_logits output_attentions output_hidden_states return_dict use_return_dict "
          "torchscript torch_dtype dtype is_local use_bfloat16")
PROVENANCE = ("_* architectures auto_map transformers_version unsloth_* model_name name_or_path "
              "tokenizer_class license base_model* quantization_library mergekit*")
MODALITIES = ("vision_* audio_* image_* video_* mm_* *_modal* boi_token* eoi_token* boa_token* "
              "eoa_token* boi_index eoi_index *projector_* projection_* out_hidden_size "
              "spatial_merge_size num_image_tokens "
              "mrope_section mrope_interleaved deepstack* speech_* text_config sub_configs")
HARDWARE = ("attn_implementation experts_implementation use_cache cache_implementation "
            "chunk_size_feed_forward pretraining_tp ep_size use_flash* *_tp_plan *_pp_plan "
            "low_memory use_kernels")
ROUNDING = ("attention_softmax_in_fp32 scale_attention_softmax_in_fp32 reorder_and_upcast_attn "
            "slow_but_exact enable_moe_fp32_combine residual_in_fp32")

# Keys that the classes of all model types read
COMMON = ("model_type vocab_size hidden_size intermediate_size num_hidden_layers "
          "num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps "
          "tie_word_embeddings max_position_embeddings original_max_position_embeddings rope_theta "
          "rope_parameters rope_scaling sliding_window layer_types "
          "num_experts num_local_experts num_experts_per_tok num_nextn_predict_layers "
          "num_mtp_layers mtp_layer_types eos_token_id quantization_config compression_config "
          "is_causal")

# Other keys that are acted on -> the model types whose class in transformers reads them. "-": all
# but these. For other model types the key has no effect.
OF_MODEL_TYPES = (
    ("", "apertus glm glm4 hunyuan_v1_dense olmo2 olmo3 qwen3_vl_text"),       # none
    ("_remove_final_layer_norm do_layer_norm_before enable_bias ffn_dim "
     "layer_norm_elementwise_affine word_embed_proj_dim",
     "opt"),
    ("activation ffn_hidden_size new_decoder_architecture num_kv_heads num_ln_in_parallel_attn "
     "parallel_attn",
     "falcon"),
    ("activation_function",
     "gptj gpt_neo gpt_bigcode opt gpt2 exaone"),
    ("add_cross_attention scale_attn_weights",
     "gpt_bigcode gpt2"),
    ("alibi",
     "falcon bloom mpt"),
    ("alibi_bias_max attn_config d_model max_seq_len n_heads n_layers no_bias prefix_lm qk_ln",
     "mpt"),
    ("apply_residual_connection_post_layernorm seq_length",
     "bloom"),
    ("attention_bias",
     "- mistral mixtral qwen2 qwen2_moe qwen2_vl_text qwen2_5_vl_text lfm2 lfm2_moe exaone_moe "
     "minimax_m2 phi3 glm4v_text exaone4 ministral ministral3 cwm gptj phi stablelm bloom mpt "
     "gpt_neo gpt_bigcode gpt2 qwen2_5_omni_text kolibri1 mamba mamba2 falcon_mamba jamba zamba2"),
    ("attention_k_eq_v enable_moe_block global_head_dim hidden_size_per_layer_input "
     "num_global_key_value_heads num_kv_shared_layers per_layer_config top_k_experts "
     "use_double_wide_mlp vocab_size_per_layer_input",
     "gemma4_text gemma4_unified_text"),
    ("attention_layers attention_types window_size",
     "gpt_neo"),
    ("num_heads",
     "gpt_neo mamba2"),
    ("attention_multiplier",
     "granite granitemoehybrid granitemoeshared granitemoe_swa granite_swa granitemoe "
     "muse_glimmer_text hyperclovax"),
    ("attention_in_multiplier attention_out_multiplier key_multiplier lm_head_multiplier "
     "mamba_d_ssm mamba_norm_before_gate mamba_rms_norm mlp_multipliers projectors_bias "
     "ssm_in_multiplier ssm_multipliers ssm_out_multiplier",
     "falcon_h1"),
    ("attention_out_bias",
     "seed_oss"),
    ("attention_value_scale hybrid_layer_pattern layernorm_epsilon sliding_window_size "
     "swa_rope_theta",
     "mimo_v2_flash"),
    ("attn_logit_softcapping query_pre_attn_scalar",
     "gemma2 gemma3_text vaultgemma"),
    ("bias",
     "internlm3 falcon"),
    ("block_auto_adjust_ff_dim block_ff_dim block_ffn_dim_multiplier block_multiple_of "
     "conv_L_cache conv_bias full_attn_idxs tie_embedding",
     "lfm2 lfm2_moe"),
    ("clip_qkv",
     "olmoe iquestcoder olmo mpt"),
    ("decoder_sparse_step mlp_only_layers",
     "qwen3_moe qwen2_moe qwen3_next qwen3_vl_moe_text qwen3_omni_moe_text"),
    ("dim_model_base scale_depth scale_emb",
     "minicpm3"),
    ("attn_layer_indices",
     "bamba"),
    ("embedding_multiplier",
     "granite granitemoehybrid granitemoeshared granitemoe_swa granite_swa granitemoe hyperclovax "
     "falcon_h1"),
    ("residual_multiplier",
     "granite granitemoehybrid granitemoeshared granitemoe_swa granite_swa granitemoe hyperclovax"),
    ("expert_selection_fn prefix_dense_intermediate_size prefix_dense_sliding_window_pattern "
     "shared_expert_combination_strategy",
     "cohere2_moe"),
    ("final_logit_softcapping",
     "gemma2 gemma3_text gemma4_text gemma4_unified_text vaultgemma muse_glimmer_text nanochat"),
    ("first_k_dense_replace mlp_layer_types",
     "mellum glm4_moe glm4v_moe_text deepseek_v2 deepseek_v3 glm4_moe_lite mistral4 lfm2_moe "
     "dots1 exaone_moe hy_v3 afmoe sarvam_mla sarvam_moe mimo_v2_flash laguna cohere2_moe"),
    ("full_attention_interval",
     "qwen3_5_text qwen3_5_moe_text qwen3_next"),
    ("gating moe_apply_router_weight_on_input moe_routed_scaling_factor "
     "moe_router_logit_softcapping num_attention_heads_per_layer",
     "laguna"),
    ("global_attn_every_n_layers mup_enabled route_scale",
     "afmoe"),
    ("hidden_activation",
     "gemma2 gemma3_text gemma4_text gemma4_unified_text vaultgemma muse_glimmer_text"),
    ("kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim",
     "deepseek_v2 deepseek_v3 glm4_moe_lite mistral4 youtu minicpm3 sarvam_mla"),
    ("layer_norm_eps",
     "gpt_neox phi cohere cohere2 stablelm jais2 cohere2_moe"),
    ("layer_norm_epsilon",
     "gptj falcon bloom mpt gpt_neo gpt_bigcode gpt2 exaone nemotron_h mamba mamba2 falcon_mamba"),
    ("layer_rope_theta",
     "granitemoe_swa granite_swa muse_glimmer_text"),
    ("linear_allow_neg_eigval",
     "olmo_hybrid"),
    ("linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads "
     "linear_value_head_dim",
     "qwen3_5_text qwen3_5_moe_text qwen3_next olmo_hybrid"),
    ("logit_scale",
     "cohere cohere2 mpt cohere2_moe"),
    ("logits_scaling",
     "granite granitemoehybrid granitemoeshared granitemoe_swa granite_swa granitemoe hyperclovax "
     "cohere2_moe"),
    ("mamba_conv_bias mamba_proj_bias",
     "granitemoehybrid bamba falcon_h1 nemotron_h jamba"),
    ("mamba_d_conv mamba_d_state mamba_expand",
     "granitemoehybrid bamba falcon_h1 nemotron_h jamba zamba2"),
    ("mamba_d_head mamba_n_groups mamba_n_heads",
     "granitemoehybrid bamba falcon_h1 nemotron_h"),
    ("time_step_limit",
     "granitemoehybrid bamba falcon_h1 nemotron_h mamba2"),
    ("hybrid_override_pattern mamba_head_dim mamba_hidden_act mamba_num_heads "
     "mlp_hidden_act moe_latent_size moe_shared_expert_intermediate_size ssm_state_size",
     "nemotron_h"),
    ("n_groups",
     "nemotron_h mamba2"),
    ("conv_kernel",
     "nemotron_h mamba mamba2 falcon_mamba"),
    ("use_conv_bias",
     "nemotron_h mamba mamba2 falcon_mamba zamba2"),
    ("expand",
     "mamba mamba2 falcon_mamba nemotron_h"),
    ("state_size time_step_rank",
     "mamba mamba2 falcon_mamba"),
    ("mixer_rms_eps",
     "falcon_mamba"),
    ("adapter_rank add_bias_linear hybrid_layer_ids mamba_headdim mamba_ngroups n_mamba_heads "
     "num_mem_blocks use_long_context use_mem_rope use_shared_attention_adapter",
     "zamba2"),
    ("attn_layer_offset attn_layer_period expert_layer_offset expert_layer_period mamba_dt_rank",
     "jamba"),
    ("layers_block_type",
     "granitemoehybrid nemotron_h zamba2"),
    ("max_window_layers",
     "qwen2 qwen3 qwen2_moe qwen2_vl_text qwen2_5_vl_text dots1 qwen2_5_omni_text"),
    ("mlp_bias",
     "llama deepseek_v2 minicpm3 hy_v3 smollm3 granite granite_swa ernie4_5 helium arcee seed_oss "
     "cwm internlm3 iquestcoder starcoder2 falcon nemotron ernie4_5_moe hyperclovax opt jais2 "
     "exaone bamba falcon_h1 nemotron_h"),
    ("moe_intermediate_size",
     "qwen3_moe qwen2_moe qwen3_5_moe_text qwen3_next qwen3_vl_moe_text mellum glm4_moe "
     "glm4v_moe_text deepseek_v2 deepseek_v3 glm4_moe_lite mistral4 lfm2_moe dots1 solar_open "
     "exaone_moe hy_v3 gemma4_text hunyuan_v1_moe afmoe ernie4_5_moe qwen3_omni_moe_text "
     "sarvam_mla sarvam_moe kolibri1 mimo_v2_flash laguna cohere2_moe nemotron_h"),
    ("moe_k moe_layer_end_index moe_layer_interval moe_layer_start_index moe_norm_min "
     "moe_num_experts moe_num_shared_experts",
     "ernie4_5_moe"),
    ("moe_topk num_shared_expert",
     "hunyuan_v1_moe"),
    ("multi_query",
     "falcon gpt_bigcode"),
    ("n_embd n_inner n_positions",
     "gptj gpt_bigcode gpt2"),
    ("n_embed",
     "falcon bloom"),
    ("n_group topk_group",
     "glm4_moe glm4v_moe_text deepseek_v2 deepseek_v3 glm4_moe_lite mistral4 dots1 solar_open "
     "exaone_moe sarvam_mla sarvam_moe mimo_v2_flash nemotron_h"),
    ("n_head n_layer",
     "gptj falcon bloom gpt_bigcode gpt2"),
    ("n_routed_experts",
     "glm4_moe glm4v_moe_text deepseek_v2 deepseek_v3 glm4_moe_lite mistral4 dots1 solar_open "
     "sarvam_mla sarvam_moe mimo_v2_flash nemotron_h"),
    ("n_shared_experts",
     "glm4_moe glm4v_moe_text deepseek_v2 deepseek_v3 glm4_moe_lite mistral4 dots1 solar_open "
     "exaone_moe hy_v3 afmoe ernie4_5_moe sarvam_mla sarvam_moe cohere2_moe nemotron_h"),
    ("no_rope_layer_interval no_rope_layers",
     "smollm3"),
    ("norm_eps",
     "lfm2 lfm2_moe nemotron"),
    ("norm_epsilon",
     "starcoder2"),
    ("norm_topk_prob",
     "qwen3_moe qwen2_moe qwen3_next mellum glm4_moe glm4v_moe_text deepseek_v2 deepseek_v3 "
     "glm4_moe_lite mistral4 lfm2_moe dots1 solar_open exaone_moe olmoe flex_olmo "
     "qwen3_omni_moe_text sarvam_mla sarvam_moe kolibri1 mimo_v2_flash cohere2_moe nemotron_h"),
    ("num_dense_layers",
     "lfm2_moe afmoe"),
    ("num_layers",
     "gpt_neo exaone"),
    ("num_shared_experts",
     "exaone_moe hy_v3 afmoe sarvam_moe cohere2_moe"),
    ("output_multiplier post_norm_eps qk_scale_factor",
     "muse_glimmer_text"),
    ("partial_rotary_factor",                      # in rope_parameters and rope_scaling too
     "qwen3_5_text qwen3_5_moe_text qwen3_next mellum glm4_moe glm4v_moe_text glm4_moe_lite "
     "mistral4 solar_open minimax_m2 gemma4_text gemma4_unified_text phi3 glm glm4 glm4v_text "
     "gpt_neox gptj phi stablelm nemotron mimo_v2_flash laguna"),
    ("position_embedding_type",
     "granitemoehybrid"),
    ("qk_layernorm",
     "phi cohere cohere2 stablelm cohere2_moe"),
    ("qkv_bias",
     "qwen2_moe internlm3"),
    ("rope_interleave",
     "deepseek_v3 glm4_moe_lite mistral4 youtu minicpm3 sarvam_mla"),
    ("rope_local_base_freq",
     "mellum gemma3_text"),
    ("rope_pct",
     "stablelm"),
    ("rotary_dim",
     "minimax_m2 gptj"),
    ("rotary_emb_base rotary_pct",
     "gpt_neox"),
    ("routed_scaling_factor",
     "glm4_moe glm4v_moe_text deepseek_v2 deepseek_v3 glm4_moe_lite mistral4 lfm2_moe dots1 "
     "solar_open exaone_moe hy_v3 sarvam_mla sarvam_moe mimo_v2_flash cohere2_moe nemotron_h"),
    ("router_scaling_factor",
     "hy_v3"),
    ("scale_attn_by_inverse_layer_idx",
     "gpt2"),
    ("shared_expert_intermediate_size",
     "qwen2_moe qwen3_5_moe_text qwen3_next gemma4_text gemma4_unified_text granitemoehybrid "
     "granitemoeshared granitemoe_swa hunyuan_v1_moe kolibri1 laguna"),
    ("shared_intermediate_size",
     "granitemoehybrid granitemoeshared granitemoe_swa"),
    ("sliding_window_pattern",
     "exaone_moe gemma3_text exaone4 cohere2 afmoe cohere2_moe"),
    ("swiglu_alpha swiglu_limit",
     "gpt_oss"),
    ("topk_method",
     "deepseek_v2"),
    ("use_bias",
     "ernie4_5 starcoder2 ernie4_5_moe nemotron_h mamba mamba2 falcon_mamba"),
    ("use_bidirectional_attention",
     "gemma gemma2 gemma3_text gemma4_text gemma4_unified_text"),
    ("use_expert_bias",
     "lfm2_moe"),
    ("use_parallel_residual",
     "gpt_neox falcon stablelm"),
    ("use_post_norm",
     "hyperclovax"),
    ("use_qk_norm",
     "glm4_moe cohere cohere2 sarvam_moe cohere2_moe"),
    ("use_qkv_bias",
     "stablelm sarvam_moe"),
    ("use_sliding_window",
     "qwen2 qwen3 qwen3_moe qwen2_moe qwen2_vl_text qwen2_5_vl_text smollm3 iquestcoder "
     "qwen2_5_omni_text"),
    ("v_head_dim",
     "deepseek_v2 deepseek_v3 glm4_moe_lite mistral4 youtu minicpm3 sarvam_mla mimo_v2_flash"),
)

CONFIG = Table(
    "config.json",
    acted_on=" ".join([COMMON, *(keys for keys, _ in OF_MODEL_TYPES), *SAMPLING, "do_sample"]),
    refused=dict.fromkeys(UNSUPPORTED_CONFIG_KEYS, ()),
    without_effect={
        "training only": TRAINING, "Python's interface": PYTHON, "provenance": PROVENANCE,
        "images, audio and video": MODALITIES, "hardware and speed": HARDWARE,
        "order of rounding": ROUNDING,
        "other tasks than text generation":
            "id2label label2id num_labels problem_type finetuning_task summary_* classifier_* "
            "task_specific_params use_summary* pruned_heads",
        "encoders and decoders":
            "is_encoder_decoder is_decoder decoder_start_token_id cross_attention_hidden_size "
            "tie_encoder_decoder",
        "token ids that the tokenizer's files state":
            "bos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id "
            "eod_token_id",
        "the only value that the model type's class has":
            "scoring_func moe_layer_freq attn_type norm_type embedding_fraction expansion_ratio "
            "learned_pos_emb n_ctx ffn_config softmax_scale",
        "read from the tensors": "mtp_mlp_layer_types head_bias lm_head_bias",
        "follows from other keys": "qk_head_dim attention_head_dim attention_hidden_size "
                                   "kv_channels num_query_groups",
        "state-space layers: speed, training, fp32 states":
            "*chunk_size time_step_min time_step_max time_step_floor "
            "time_step_scale time_step_init_scheme use_mambapy use_falcon_mambapy "
            "use_associative_scan use_mem_eff_path rescale_prenorm_residual use_mamba_kernels "
            "mamba_ssm_cache_dtype moe_shared_expert_overlap",
        "training's loss": "z_loss_coefficient",
        "how many logits a prompt's call returns": "num_logits_to_keep",
        "of another MTP head than ours reads": "mtp_layers_block_type mtp_hybrid_override_pattern",
    })

ROPE = Table(
    "config.json: rope_parameters, rope_scaling",
    acted_on="rope_type type rope_theta factor original_max_position_embeddings attention_factor "
             "beta_fast beta_slow short_factor long_factor low_freq_factor high_freq_factor mscale "
             "mscale_all_dim truncate partial_rotary_factor llama_4_scaling_beta alpha "
             "full_attention sliding_attention",
    without_effect={"images, audio and video": "mrope_section mrope_interleaved",
                    "checked by transformers only": "finetuned"})

QUANTIZATION = Table(
    "config.json: quantization_config",
    acted_on="quant_method quant_algo version format backend bits w_bit group_size q_group_size "
             "checkpoint_format is_marlin_format meta config_groups sparsity_config "
             "transform_config weight_block_size quantized_layers",
    refused={"load_in_8bit": (), "load_in_4bit": ()},
    without_effect={
        "read from the tensors":
            "desc_act sym zero_point ignore ignored_layers modules_to_not_convert "
            "modules_to_convert exclude_modules modules_in_block_to_quantize "
            "block_name_to_quantize lm_head dynamic module_name_preceding_first_block "
            "expert_dtype scale_fmt true_sequential act_group_aware static_groups",
        "how it was made":
            "tokenizer dataset damp_percent damp_auto_increment model_seqlen batch_size "
            "pad_token_id max_input_length cache_block_outputs quantization_status "
            "global_compression_ratio producer quantizer model_name_or_path model_file_base_name "
            "uri pack_dtype use_* exllama_config max_input_len",
        "activations are not quantized": "activation_scheme fmt activation_dtype input_*",
        "the KV cache is not quantized": "kv_cache_scheme kv_cache_quant_algo",
        "hardware and speed": "run_compressed dequantize llm_int8_* bnb_4bit_* do_fuse "
                              "fuse_max_seq_len",
    })

# ---- generation_config.json ---------------------------------------------------------------------

GENERATION = Table(
    "generation_config.json",
    acted_on=" ".join([*SAMPLING, "do_sample eos_token_id"]),
    refused={key: (neutral,) for key, neutral in NEUTRAL.items()},
    without_effect={
        "beam search only": "num_beam_groups diversity_penalty length_penalty early_stopping "
                            "constraints",
        "the request decides": "num_return_sequences prefill_chunk_size return_dict_in_generate "
                               "output_*",
        "hardware and speed": "use_cache cache_implementation cache_config max_cache_len "
                              "compile_config disable_compile low_memory "
                              "continuous_batching_config",
        "speculation: the text stays the same":
            "assistant_* is_assistant num_assistant_tokens* prompt_lookup_num_tokens "
            "max_matching_ngram_size target_lookbehind speculation_type use_mtp",
        "token ids that the tokenizer's files state": "bos_token_id pad_token_id",
        "encoders and decoders": "decoder_start_token_id",
        "does not change which tokens are drawn": "renormalize_logits",
        "NaN is an error here": "remove_invalid_values",
        "provenance": "_* transformers_version trust_remote_code",
    })

# ---- Files that are not read --------------------------------------------------------------------

OTHER_FILES = {
    "images, audio and video":
        "preprocessor_config.json processor_config.json video_preprocessor_config.json "
        "image_processor_config.json",
    "other tasks than text generation":
        "modules.json sentence_bert_config.json 1_Pooling/config.json",
    "provenance": "README.md LICENSE* .gitattributes trainer_state.json training_args.bin "
                  "all_results.json train_results.json eval_results.json",
}

# ---- adapter_config.json ------------------------------------------------------------------------

ADAPTER = Table(
    "adapter_config.json",
    acted_on="peft_type lora_alpha alpha_pattern use_rslora fan_in_fan_out ensure_weight_tying",
    refused={**dict.fromkeys(
        "lora_bias use_qalora use_bdlora arrow_config layer_replication alora_invocation_tokens "
        "trainable_token_indices target_parameters kasa_config monteclora_config".split(), ()),
        # others also change the model's own weights
        "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica")},
    without_effect={
        "read from the tensors":
            "r rank_pattern target_modules exclude_modules modules_to_save layers_to_transform "
            "layers_pattern bias use_dora qalora_group_size",
        "training only": "lora_dropout loftq_config eva_config corda_config lora_ga_config "
                         "velora_config",
        "hardware and speed": "megatron_config megatron_core runtime_config",
        "provenance": "task_type auto_mapping peft_version base_model_name_or_path revision "
                      "inference_mode unsloth_*",
    })

# ---- GGUF metadata ------------------------------------------------------------------------------

GGUF = Table(                                      # {arch}: the architecture's name
    "GGUF metadata",
    acted_on=" ".join([
        "general.architecture split.count tokenizer.chat_template tokenizer.chat_template.* "
        "general.sampling.temp general.sampling.top_k general.sampling.top_p "
        "general.sampling.min_p general.sampling.penalty_repeat xielu.alpha_p xielu.alpha_n",
        *("tokenizer.ggml." + key for key in (
            "model pre tokens token_type scores merges bos_token_id eos_token_id eot_token_id "
            "eom_token_id unknown_token_id padding_token_id add_bos_token add_eos_token "
            "add_space_prefix fim_pad_token_id fim_rep_token_id fim_sep_token_id").split()),
        *("{arch}." + key for key in (
            "context_length embedding_length block_count leading_dense_block_count "
            "feed_forward_length expert_feed_forward_length use_parallel_residual expert_count "
            "expert_used_count expert_shared_count expert_group_count expert_group_used_count "
            "expert_weights_scale expert_weights_norm expert_gating_func nextn_predict_layers "
            "logit_scale attn_logit_softcapping final_logit_softcapping residual_scale "
            "embedding_scale interleave_moe_layer_step full_attention_interval "
            "embedding_length_per_layer_input attention.head_count attention.head_count_kv "
            "attention.max_alibi_bias attention.clamp_kqv attention.key_length "
            "attention.value_length attention.layer_norm_epsilon "
            "attention.layer_norm_rms_epsilon attention.q_lora_rank attention.kv_lora_rank "
            "attention.sliding_window attention.scale attention.key_length_mla "
            "attention.value_length_mla attention.key_length_swa attention.shared_kv_layers "
            "attention.sliding_window_pattern attention.temperature_scale attention.causal "
            "attention.temperature_length "
            "attention.recurrent_layers rope.dimension_count rope.dimension_sections "
            "rope.freq_base rope.freq_base_swa rope.scale_linear rope.scaling.type "
            "rope.scaling.factor rope.scaling.attn_factor rope.scaling.original_context_length "
            "rope.scaling.yarn_log_multiplier rope.scaling.yarn_beta_fast rope.scaling.finetuned "
            "moe_latent_size "
            "rope.scaling.yarn_beta_slow ssm.conv_kernel ssm.inner_size ssm.state_size "
            "ssm.time_step_rank ssm.group_count ssm.dt_b_c_rms shortconv.l_cache").split())]),
    refused={**{"{arch}." + key: accepted for key, accepted in {
        "rope.scaling.yarn_ext_factor": (1.0,),
        "rope.scaling.yarn_attn_factor": (1.0,), "rope.scaling.alpha": (),
        "router_logit_softcapping": (0.0,), "swiglu_clamp_exp": (), "swiglu_clamp_shexp": (),
        "attention.output_scale": (0.0, 1.0),
        "expert_group_scale": (0.0, 1.0), "experts_per_group": (0,), "moe_every_n_layers": (0, 1),
        "expert_chunk_feed_forward_length": (0,),
        "rescale_every_n_layers": (0,), "activation_sparsity_scale": (), "swin_norm": (),
        "altup.active_idx": (), "altup.num_inputs": (), "decoder_block_count": (0,),
        "attention.indexer.head_count": (0,), "attention.relative_buckets_count": (0,),
    }.items()}, "adapter.type": (), "diffusion.shift_logits": ()},
    without_effect={
        "provenance":
            "GGUF.* general.type general.name general.author general.version general.organization "
            "general.finetune general.basename general.description general.quantized_by "
            "general.size_label general.license* general.url general.doi general.uuid "
            "general.repo_url general.source.* general.base_model.* general.dataset.* "
            "general.datasets general.tags general.languages general.quantization_version "
            "general.file_type quantize.* imatrix.*",
        "layout of the file": "general.alignment split.no split.tensors.count "
                              "{arch}.tensor_data_layout",
        "read from the tensors":
            "{arch}.vocab_size {arch}.expert_shared_feed_forward_length "
            "{arch}.rope.dimension_count_swa {arch}.attention.value_length_swa "
            "{arch}.embedding_length_out",
        "not read by llama.cpp for these architectures":
            "tokenizer.huggingface.json tokenizer.rwkv.world "
            "tokenizer.ggml.token_type_count tokenizer.ggml.precompiled_charsmap "
            "tokenizer.ggml.remove_extra_whitespaces tokenizer.chat_templates xielu.beta xielu.eps",
        "tokens that no prompt gets by itself":
            "tokenizer.ggml.seperator_token_id tokenizer.ggml.mask_token_id "
            "tokenizer.ggml.add_sep_token tokenizer.ggml.cls_token_id "
            "tokenizer.ggml.fim_pre_token_id tokenizer.ggml.fim_suf_token_id "
            "tokenizer.ggml.fim_mid_token_id tokenizer.ggml.prefix_token_id "
            "tokenizer.ggml.suffix_token_id tokenizer.ggml.middle_token_id",
        "architectures that are refused":
            "{arch}.features_length {arch}.decoder_start_token_id {arch}.time_mix_extra_dim "
            "{arch}.time_decay_extra_dim {arch}.token_shift_count {arch}.attention.group_norm_* "
            "{arch}.attention.*_lora_rank {arch}.attention.indexer.* "
            "{arch}.kda.head_dim {arch}.wkv.head_size {arch}.posnet.* {arch}.convnext.*",
        "adapters and image matrices": "adapter.* general.sampling.sequence",
        "images, audio and video": "clip.* {arch}.n_deepstack_layers",
        "embeddings and classification":
            "{arch}.pooling_type {arch}.classifier.output_labels {arch}.{dense}_feat_*",
        "left out with a line":
            "general.sampling.xtc_* general.sampling.penalty_last_n general.sampling.mirostat*",
    })

TABLES = (CONFIG, ROPE, QUANTIZATION, GENERATION, TOKENIZER_CONFIG, TOKENIZER, ADAPTER, GGUF)


# ---- Use ----------------------------------------------------------------------------------------

def of_model_type(config: dict, model_type: str) -> dict:
    """config.json without the keys that this model type's class in transformers does not read.

    A model type that is in no row keeps all keys. Those that are not supported stay, to be refused.
    """
    foreign = set()
    known_types = {kind for _, kinds in OF_MODEL_TYPES for kind in kinds.split()}
    if model_type not in known_types:
        return config
    for keys, kinds in OF_MODEL_TYPES:
        is_listed = model_type in kinds.split()
        if is_listed == kinds.startswith("-"):
            foreign.update(set(keys.split()) - set(UNSUPPORTED_CONFIG_KEYS))
    own = {key: value for key, value in config.items() if key not in foreign}
    if "partial_rotary_factor" in foreign:
        own |= {key: _rotating_all(own[key]) for key in ("rope_parameters", "rope_scaling")
                if key in own}
    return own


def _rotating_all(rope):
    """RoPE's parameters, or those of each kind of attention, without partial_rotary_factor."""
    if not isinstance(rope, dict):
        return rope
    return {key: _rotating_all(value) for key, value in rope.items()
            if key != "partial_rotary_factor" or value in (None, 1)}


def report() -> str:
    """A Markdown table: how many keys of each file are acted on, refused, or without effect."""
    lines = ["| file | acted on | refused | without effect |", "|---|---|---|---|"]
    for table in TABLES:
        counts = [len(table.acted_on.split()), len(table.refused),
                  sum(len(keys.split()) for keys in table.without_effect.values())]
        lines.append(f"| {table.file} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
