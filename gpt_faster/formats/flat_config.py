"""FlatConfig: ModelConfig without parts. config.json is parsed into it; old .pth files store it.

    cfg = FlatConfig(**facts, layer_norm=True, gated=False).with_parts()       # a ModelConfig
"""

from dataclasses import dataclass, fields

from gpt_faster.layers.attention import AttentionVariant
from gpt_faster.layers.block import BlockVariant
from gpt_faster.layers.embedding import EmbedNorm, EmbedScale, LearnedPositions
from gpt_faster.layers.feed_forward import FeedForwardVariant
from gpt_faster.layers.moe import moe_from_fields
from gpt_faster.layers.norms import LogitCap, NormVariant
from gpt_faster.layers.per_layer import PerLayer
from gpt_faster.layers.rope import rope_from_fields
from model import ModelConfig


@dataclass(frozen=True)
class Scores:
    """AttentionVariant's fields of these names."""

    cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    gains: bool = False
    growth: float = 0.0
    growth_from: int = 1
    softplus_gate: bool = False


@dataclass(frozen=True)
class LayerEnd:
    """BlockVariant.end and PerLayer's fields. dim 0: no per-layer embeddings."""

    dim: int = 0
    vocab_size: int = 0


@dataclass(frozen=True)
class FlatConfig(ModelConfig):
    """ModelConfig with the fields of its parts inline. Each is documented at its part."""

    qk_norm: str | None = None                     # "head", or as AttentionVariant.qk_norm
    layer_norm: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    post_norm_eps: float | None = None
    embed_norm: bool = False
    parallel: bool = False
    v_norm: bool = False
    activation: str = "silu"                       # of dense layers and experts
    gated: bool = True
    clip_qkv: float | None = None
    attn_gate: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    attn_scale: float | None = None
    scores: Scores = Scores()
    logit_cap: float | None = None
    learned_pos: bool = False
    widths: tuple = (None,)
    norm_placement: tuple = (None,)
    branches: tuple = (None,)
    layer_end: LayerEnd | None = None

    def with_parts(self) -> ModelConfig:
        """Build a part for each feature that a plain Llama lacks; others are None."""
        attention = AttentionVariant(
            scale=self.attn_scale, qk_norm=None if self.qk_norm == "head" else self.qk_norm,
            v_norm=self.v_norm, clip=self.clip_qkv, gate=self.attn_gate, **vars(self.scores))
        block = BlockVariant(
            self.pre_norm, self.post_norm, self.post_norm_eps, self.residual_scale, self.parallel,
            end=self.layer_end is not None, widths=self.widths,
            norm_placement=self.norm_placement, branches=self.branches)
        ffn = FeedForwardVariant(self.activation, self.gated)
        after_embed = []
        if self.embed_scale != 1:
            after_embed.append(EmbedScale(self.embed_scale))
        if self.learned_pos:
            after_embed.append(LearnedPositions())
        if self.embed_norm:
            after_embed.append(EmbedNorm())
        per_layer = None
        if self.layer_end and self.layer_end.dim:
            per_layer = PerLayer(self.layer_end.dim, self.layer_end.vocab_size)
        facts = {field.name: getattr(self, field.name) for field in fields(ModelConfig)}
        return ModelConfig(**facts | dict(
            qk_norm=self.qk_norm == "head",
            rope=tuple(rope_from_fields(vars(rope)) for rope in self.rope),
            moe=self.moe and moe_from_fields(vars(self.moe) | dict(activation=self.activation,
                                                                   gated=self.gated)),
            norm=NormVariant() if self.layer_norm else None,
            attention=unless_plain(attention), ffn=unless_plain(ffn), block=unless_plain(block),
            after_embed=tuple(after_embed), per_layer=per_layer,
            logit_cap=LogitCap(self.logit_cap) if self.logit_cap else None))


def unless_plain(part):
    """None for a part whose fields are all defaults: the model then uses Llama's."""
    return None if part == type(part)() else part
