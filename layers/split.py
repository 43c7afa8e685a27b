"""Which axis of a weight [out, in] the ranks of tensor parallelism share, as layers say in `split`.

    split = {"gate": OUT, "wo": IN}                # names inside a block's attn or ffn -> axis
"""

HEAD, OUT, IN = -3, -2, -1                         # experts and heads' matrices are [E, out, in]
