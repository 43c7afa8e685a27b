"""What an object says that makes a part of a block in place of model.py's: how ranks share it.

    @dataclass(frozen=True)
    class MyAttention(Part):                       # ModelConfig(…, attention=MyAttention(width=64))
        width: int
        split = {"gate": OUT, "wo": IN}
        def make(self, cfg, earlier=()): return …
"""

HEAD, OUT, IN = -3, -2, -1                         # experts and heads' matrices are [E, out, in]


class Part:
    """One whose tensors are a Llama's, or every rank's."""

    split = {}                                     # names inside a block's attn or ffn -> the axis
                                                   # that ranks share, beside those of a Llama
    norms_over_heads = ()                          # inside attn: of all heads as one vector, whose
                                                   # mean_square the ranks join

    def config_of(self, cfg, layer: int):
        """Of a block's object: what the parts of this layer read."""
        return cfg

    def shard(self, n: int) -> "Part":
        """The object of one of n ranks."""
        return self

    def sharded_widths(self) -> dict[str, int]:
        """What n ranks can only share evenly, by a name for messages."""
        return {}
