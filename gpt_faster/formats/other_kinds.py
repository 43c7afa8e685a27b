"""Architectures that are not supported, by model_type: what each has that the model lacks.

Every model_type of transformers is a row of families.py, or is refused with a reason from here: see
tests/test_kinds.py, which names new ones. Data only.
"""

OTHER_KINDS = {
    "Mamba 1 layers that read a shared transformer block":
        "zamba",
    "another kind of recurrent layers than Mamba":
        "rwkv plamo2 recurrent_gemma xlstm",
    "linear attention other than gated DeltaNet and Mamba":
        "qwen4_exp qwen4_exp_text kimi_linear minimax bailing_hybrid glm5_next_text",
    "sparse latent attention (an indexer) or another variant of it":
        "deepseek_v32 deepseek_v4 glm_moe_dsa axk2 hy_v4 dots3_note dots3_note_text "
        "mistral_large4_text unlimited_ocr_text deepseek_ocr2_text",
    "two attentions in each layer, around a mixture of experts":
        "longcat_flash",
    "norms after its experts only":
        "axk1",
    "another kind of convolution layers":
        "lfm3 inkling_text inkling2_text zaya",
    "an encoder and a decoder":
        "t5 t5gemma t5gemma2 t5gemma2_decoder mt5 umt5 bart mbart pegasus bigbird_pegasus "
        "marian m2m_100 led whisper blenderbot blenderbot-small mvp plbart prophetnet trocr "
        "blip blip_text_model pix2struct pix2struct_text_model florence2 udop pp_formulanet "
        "pp_formulanet_text vision-encoder-decoder rag t5_gemma_module t5gemma2_text donut-swin "
        "mgp-str nougat canary cohere_asr longt5 moonshine moonshine_streaming nllb-moe "
        "pegasus_x pop2piano seamless_m4t seamless_m4t_v2 speech_to_text speecht5 "
        "switch_transformers dia encoder-decoder fsmt speech-encoder-decoder",
    "an encoder only: it does not generate":
        "bert bert-generation roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xlm xlnet "
        "deberta-v2 modernbert modernbert-decoder electra big_bird camembert data2vec-text "
        "ernie megatron-bert reformer rembert roc_bert roformer xmod albert bros convbert "
        "deberta distilbert esm esmc eurobert flaubert fnet funnel gte ibert jina_embeddings_v3 "
        "layoutlm layoutlmv2 layoutlmv3 lilt longformer luke lxmert markuplm mobilebert mpnet "
        "mra neomme nomic_bert nystromformer openai_privacy_filter perceiver splinter "
        "squeezebert tapas ultrabert yoso canine ultravbert dpr layoutxlm visual_bert "
        "bridgetower vilt tvp",
    "several residual streams (AltUp) and sparse activations":
        "gemma3n gemma3n_text",
    "a drafter's layers: use it with Gemma 4, as --draft_checkpoint_path":
        "gemma4_assistant gemma4_unified_assistant",
    "diffusion decoding":
        "diffusion_gemma diffusion_gemma_text",
    "chunked attention, and experts with scaled inputs":
        "llama4 llama4_text",
    "cross-attention from text to images":
        "mllama mllama_text_model idefics git evolla kosmos_2_text_model kosmos_2_5_text_model "
        "EvollaModel",
    "bidirectional attention over image and prompt":
        "paligemma",
    "audio or image tokens":
        "moshi musicgen musicgen_melody chameleon pi0 glm_image glm_image_text",
    "another kind of experts or router":
        "phimoe jetmoe dbrx flint beam aria_text minimax_m3_vl_text ernie4_5_vl_moe_text "
        "step3p5 muse_spark_text ",
    "another kind of norms, positions or projections":
        "xglm biogpt openai-gpt ctrl gpt_neox_japanese cpmant codegen persimmon bitnet "
        "cosmos3_edge_text cohere_compass_text molmo2_text",
    "differential attention or a learned mask":
        "diffllama doge",
    "looped layers":
        "hrm_text",
    "bytes instead of tokens":
        "blt",
    "LoRA adapters for images and audio":
        "phi4_multimodal",
    "a text model embedded in an unsupported multimodal checkpoint":
        "glm_ocr_text granite4_vision_text granite_docling_text hunyuan_vl_text "
        "paddleocr_vl_text emu3_text_model ",
    "an encoder of text, for a model of images or sound":
        "aimv2_text_model align_text_model altclip_text_model bridgetower_text_model "
        "chinese_clip_text_model clap_text_model clipseg_text_model flava_text_model "
        "groupvit_text_model metaclip_2_text_model owlv2_text_model owlvit_text_model "
        "sam3_lite_text_text_model siglip2_text_model siglip_text_model videoprism_text_model "
        "xclip_text_model tipsv2_text_model clip_text_model",
    "images or video instead of text":
        "bit chmv2 conditional_detr convnext convnextv2 cvt d_fine dab-detr data2vec-vision "
        "deformable_detr deimv2 deit depth_anything depth_pro detr dinat dinov2 "
        "dinov2_with_registers dinov3_convnext dinov3_vit dpt edgetam edgetam_video "
        "efficientloftr efficientnet eomt eomt_dinov3 focalnet glpn hgnet_v2 hiera ijepa levit "
        "lightglue lw_detr lw_detr_vit mask2former maskformer maskformer-swin mlcd mobilenet_v1 "
        "mobilenet_v2 mobilevit mobilevitv2 oneformer pixio poolformer pp_doclayout_v2 "
        "pp_doclayout_v3 pp_doclayout_v4 pp_lcnet pp_lcnet_v3 pp_lcnet_v4 pp_ocrv5_mobile_det "
        "pp_ocrv5_server_det pp_ocrv6_medium_det pp_ocrv6_small_det prompt_depth_anything pvt "
        "pvt_v2 regnet resnet rf_detr rf_detr_dinov2 rt_detr rt_detr_resnet rt_detr_v2 sam sam2 "
        "sam2_video sam3_tracker sam3_video sam_hq sapiens2 segformer superglue superpoint "
        "swiftformer swin swin2sr swinv2 table-transformer textnet timesformer timm_backbone "
        "timm_wrapper tipsv2_dpt upernet uvdoc_backbone videomae videomt vit vit_mae vit_msn "
        "vitdet vitmatte vitpose_backbone vivit vjepa2 yolos zoedepth align altclip beit "
        "imagegpt chinese_clip clip omdet-turbo clipseg metaclip_2 owlv2 owlvit siglip siglip2 "
        "tipsv2 videoprism aimv2 flava flava_multimodal_model groupvit pixtral "
        "pp_ocrv5_mobile_rec pp_ocrv5_server_rec pp_ocrv6_small_rec pp_ocrv6_tiny_rec radio "
        "sam3 sam3_lite_text sam3_tracker_video sam3_vit_model seggpt slanet slanext uvdoc "
        "vitpose xclip",
    "speech or sound instead of text":
        "csm_depth_decoder_model moshi_depth nemotron3_5_transcribe_word_timestamp "
        "qwen2_5_omni_talker qwen3_omni_moe_talker_code_predictor dac encodec mimi neucodec "
        "univnet xcodec xcodec2 audio-spectrogram-transformer bark nemotron3_diarization clap "
        "clvp csm data2vec-audio fastspeech2_conformer gradium_phonon_tts granite_speech5_ctc "
        "higgs_audio_v2 hubert lasr_ctc parakeet_ctc pocket_tts sew sew-d unispeech "
        "unispeech-sat vits wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm nemotron3_5_asr "
        "nemotron_asr_streaming parakeet_rnnt parakeet_tdt voxtral_realtime "
        "qwen3_omni_moe_talker_text voxtral_realtime_text kyutai_speech_to_text vibevoice",
    "numbers or actions instead of text":
        "autoformer informer patchtsmixer patchtst timesfm timesfm2_5 esmfold2 jev",
    "embeddings as its output: it does not generate":
        "colmodernvbert colpali colqwen2 embedding_gemma2 embedding_gemma2_text",
    "a drafter's layers, of a kind that is not supported":
        "muse_glimmer_assistant",
}
ENDINGS_OF_PARTS = (                               # of model_types
    "vision audio encoder decoder vision_model image_model det_model audio_model qformer perceiver "
    "perciever vqgan vqmodel codebook adapter head tokenizer patcher transformer hifigan dit "
    "bigvgan token2wav diffusion").split()


def missing_feature(kind: str) -> str | None:
    """What a model_type has that is not supported. None: it is not known."""
    for what, kinds in OTHER_KINDS.items():
        if kind in kinds.split():
            return what
    if kind.endswith(tuple(f"_{ending}" for ending in ENDINGS_OF_PARTS)):
        return "only a part of a model (for images or sound)"
    return None


DFLASH_INSTEAD = ("a DFlash drafter, not a model: use it with the model that it drafts for, as "
                  "--draft_checkpoint_path")


def is_dflash(config: dict) -> bool:
    """Is this the config.json of a DFlash drafter, or of a relative (DSpark, DFlash 2)?"""
    names = config.get("architectures"), config.get("speculators_model_type")
    stated = " ".join(map(str, names)).lower()
    return "dflash_config" in config or "dflash" in stated or "dspark" in stated
