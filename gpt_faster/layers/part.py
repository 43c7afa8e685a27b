"""Base class of config objects that make a part of a block: how tensor parallelism shards it.

    @dataclass(frozen=True)
    class MyAttention(Part):                       # ModelConfig(…, attention=MyAttention(width=64))
        width: int
        split = {"gate": OUT, "wo": IN}
        def make(self, cfg, earlier=()): return …
"""

HEAD, OUT, IN = -3, -2, -1                         # axes of [E, out, in] (experts, heads)


class Part:
    """Defaults: tensors that are not a Llama's are replicated on all ranks."""

    split = {}                                     # names in a block's attn or ffn -> sharded axis,
                                                   # in addition to a Llama's
    norms_over_heads = ()                          # names in attn of norms over all heads, whose
                                                   # mean_square the ranks all-reduce

    def config_of(self, cfg, layer: int):
        """The config for the parts of this layer (of a ModelConfig.block object)."""
        return cfg

    def shard(self, n: int) -> "Part":
        """The object for one of n ranks."""
        return self

    def sharded_widths(self) -> dict[str, int]:
        """Sizes that the number of ranks must divide, by their name in error messages."""
        return {}
