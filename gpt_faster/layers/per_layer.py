"""Per-layer embeddings (Gemma 4): each layer has its own embedding of each token.

The table is as large as the rest of a small model, and a call reads one row per token. So on a CPU
it stays in the checkpoint's file (FileTable); with an NVIDIA GPU it is in pinned host memory, which
kernels read directly. Also has the part of a layer that adds the embedding and scales the output.

    inputs = per_layer(tokens, x)                  # [B, T], [B, T, D] -> [B, T, L, P]
    x = end(x, inputs[:, :, i])
"""

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from gpt_faster.layers.feed_forward import gated_activation
from gpt_faster.layers.norms import VectorNorm


@dataclass(frozen=True)
class PerLayer:
    """The sizes of the per-layer embedding table."""

    dim: int                                       # P, width of a layer's embedding of a token
    vocab_size: int                                # of the table
    kind: str = "per_layer_embedding"              # name in a .pth

    def make(self, cfg) -> nn.Module:
        return PerLayerEmbedding(cfg)


class LayerOutput(nn.Module):
    """(x + norm(down(act(gate(x)) * per_layer_input))) * scale"""

    def __init__(self, cfg, norm: nn.Module, dim: int):
        """dim 0: only the scale."""
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float32))
        self.dim, self.gate = dim, None
        if dim:
            self.gate = nn.Linear(cfg.dim, dim, bias=False)
            self.down = nn.Linear(dim, cfg.dim, bias=False)
            self.norm = norm
            self.activation = gated_activation(cfg)

    def forward(self, x, per_layer_input=None):
        if self.gate is not None:
            x = x + self.norm(self.down(self.activation(self.gate(x), per_layer_input)))
        return x * self.scale.type_as(x)


class PerLayerEmbedding(nn.Module):
    """(norm(project(x) / sqrt(D)) + embed(tokens) sqrt(P)) / sqrt(2) for each layer."""

    def __init__(self, cfg):
        super().__init__()
        dim, self.n_layer = cfg.per_layer.dim, cfg.n_layer
        self.token_scale, self.context_scale = dim**0.5, cfg.dim**-0.5
        blank = torch.empty(cfg.per_layer.vocab_size, cfg.n_layer * dim)
        self.embed = nn.Embedding.from_pretrained(blank)
        self.project = nn.Linear(cfg.dim, cfg.n_layer * dim, bias=False)
        self.norm = VectorNorm(dim, cfg.norm_eps)

    def forward(self, tokens, x):
        token = self.embed(tokens) * self.token_scale
        context = self.project(x) * self.context_scale                     # [B, T, L P]
        token, context = (t.unflatten(-1, (self.n_layer, -1)) for t in (token, context))
        return (self.norm(context) + token) * 2**-0.5                      # [B, T, L, P]


# ---- A table that stays on disk -----------------------------------------------------------------

TABLES = WeakValueDictionary()                     # id -> FileTable: operators cannot take objects


class FileTable(nn.Module):
    """An embedding whose table stays on disk: each call reads the rows of its tokens."""

    def __init__(self, read_rows: Callable[[int, int], Tensor], width: int, dtype: torch.dtype):
        """read_rows(a, b): rows [a, b) of the table [V, width]."""
        super().__init__()
        self.read_rows, self.width, self.dtype = read_rows, width, dtype
        self.table_id = id(self)
        TABLES[self.table_id] = self

    def forward(self, ids):
        return file_rows(ids, self.table_id, self.width, self.dtype)


@torch.library.custom_op("gpt_faster::file_rows", mutates_args=())
def file_rows(ids: Tensor, table: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows [..., width] of a FileTable for ids [...]. An operator, so that torch.compile does not
    trace the file access."""
    flat = ids.flatten().tolist()
    rows = {i: TABLES[table].read_rows(i, i + 1) for i in set(flat)}
    return torch.cat([rows[i] for i in flat]).to(dtype).view(*ids.shape, width)


@file_rows.register_fake
def _(ids, table, width, dtype):
    return ids.new_empty(*ids.shape, width, dtype=dtype)


# ---- A table in host memory, for a GPU ----------------------------------------------------------

class _PinnedArray:
    """Pinned host memory by CUDA's array interface: a GPU uses the same addresses."""

    def __init__(self, host: Tensor):
        self.host = host                           # views keep this object alive, and so the memory
        self.__cuda_array_interface__ = dict(
            shape=(host.nbytes,), typestr="|u1", data=(host.data_ptr(), False), version=3)


def gpu_view(host: Tensor, device) -> Tensor:
    """A pinned host tensor as a tensor on the GPU. Each read goes over the PCIe bus."""
    view = torch.as_tensor(_PinnedArray(host), device=device)
    return view.view(host.dtype).view(host.shape)
