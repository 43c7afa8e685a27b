"""Per-layer embeddings (Gemma 4): each layer has a vector of its own for each token.

The table of all layers' vectors is as large as the rest of a small model, and a call reads a row
per token of it. So on a CPU it stays in the checkpoint's file: FileTable in place of the embedding.
Beside an NVIDIA GPU it is in the host's memory, from where kernels read rows themselves.
Owns the layer's end too, where such a vector comes in, and the number that scales a layer's output.

    own = per_layer(tokens, x)                     # [B, T], [B, T, D] -> [B, T, L, P]
    x = end(x, own[:, :, i])
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
    """A table of each layer's vectors, and the branch of a block in which they come in."""

    dim: int                                       # P, of a layer's vector for a token
    vocab_size: int                                # of their table
    kind: str = "per_layer_embedding"              # what a .pth calls it

    def make(self, cfg) -> nn.Module:
        return PerLayerEmbedding(cfg)


class End(nn.Module):
    """(x + norm(down(act(gate(x)) * own))) * scale"""

    def __init__(self, cfg, norm: nn.Module, dim: int):
        """dim 0: the scale alone."""
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float32))
        self.dim, self.gate = dim, None
        if dim:
            self.gate = nn.Linear(cfg.dim, dim, bias=False)
            self.down = nn.Linear(dim, cfg.dim, bias=False)
            self.norm = norm
            self.activation = gated_activation(cfg)

    def forward(self, x, own=None):
        if self.gate is not None:
            x = x + self.norm(self.down(self.activation(self.gate(x), own)))
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
        of_token = self.embed(tokens) * self.token_scale
        of_context = self.project(x) * self.context_scale                  # [B, T, L P]
        of_token, of_context = (t.unflatten(-1, (self.n_layer, -1)) for t in (of_token, of_context))
        return (self.norm(of_context) + of_token) * 2**-0.5                # [B, T, L, P]


# ---- A table that stays in its file -------------------------------------------------------------

TABLES = WeakValueDictionary()                     # id -> FileTable: an operator takes no objects


class FileTable(nn.Module):
    """An embedding of which nothing is in memory: each call reads the rows of its tokens."""

    def __init__(self, read_rows: Callable[[int, int], Tensor], width: int, dtype: torch.dtype):
        """read_rows(a, b): rows [a, b) of the table [V, width]."""
        super().__init__()
        self.read_rows, self.width, self.dtype = read_rows, width, dtype
        self.number = id(self)
        TABLES[self.number] = self

    def forward(self, ids):
        return file_rows(ids, self.number, self.width, self.dtype)


@torch.library.custom_op("gpt_faster::file_rows", mutates_args=())
def file_rows(ids: Tensor, table: int, width: int, dtype: torch.dtype) -> Tensor:
    """ids [...] -> their rows [..., width] of a FileTable. An operator, because it reads a file."""
    wanted = ids.flatten().tolist()
    rows = {i: TABLES[table].read_rows(i, i + 1) for i in set(wanted)}
    return torch.cat([rows[i] for i in wanted]).to(dtype).view(*ids.shape, width)


@file_rows.register_fake
def _(ids, table, width, dtype):
    return ids.new_empty(*ids.shape, width, dtype=dtype)


# ---- A table in the host's memory, for a GPU ----------------------------------------------------

class _Shared:
    """Pinned memory as CUDA's array interface says it: there a GPU has the same addresses."""

    def __init__(self, host: Tensor):
        self.host = host                           # whoever has a view of it keeps this object
        self.__cuda_array_interface__ = dict(
            shape=(host.nbytes,), typestr="|u1", data=(host.data_ptr(), False), version=3)


def gpu_view(host: Tensor, device) -> Tensor:
    """A pinned tensor of the host's, as a tensor of this GPU: each read goes over the bus."""
    view = torch.as_tensor(_Shared(host), device=device)
    return view.view(host.dtype).view(host.shape)
