"""Captures a step as a CUDA graph and decides when it can be replayed.

A replay reads only the tensors' current contents. Other shapes, scalars, modules or KV caches get
another graph.

    step = CudaGraph(torch.compile(decode_one_token)); token = step(model, token, pos, 256, sampler)
"""

from collections.abc import Callable

import torch
from torch import Tensor


class CudaGraph:
    """step(*args) -> a tensor or several. Calls the step directly if no argument is on a GPU.

    Tensor arguments are copied to the graph's inputs; other tensors that the step reads or writes
    must keep their addresses. The first call with new shapes runs the step three times, so it must
    be idempotent for one position.
    """

    def __init__(self, step: Callable):
        self.step = step
        self.graphs, self.caches, self.pool = {}, (), None

    def __call__(self, *args):
        if not any(isinstance(a, Tensor) and a.is_cuda for a in args):
            return self.step(*args)
        caches = [layer.attn.cache for a in args for layer in getattr(a, "layers", ())[:1]]
        if len(caches) != len(self.caches) or any(a is not b for a, b in zip(caches, self.caches)):
            self.graphs, self.caches = {}, caches  # the graphs write to the old caches
        key = tuple(a.shape if isinstance(a, Tensor) else a for a in args)
        if key not in self.graphs:
            self.graphs[key] = self._capture(args)
        graph, inputs, out = self.graphs[key]
        for fixed, t in zip(inputs, (a for a in args if isinstance(a, Tensor))):
            fixed.copy_(t)
        graph.replay()
        if isinstance(out, Tensor):
            return out.clone()                     # the next replay overwrites it
        return tuple(t if t is None else t.clone() for t in out)

    def forget(self) -> None:
        """Drop all graphs: tensors that they read have moved."""
        self.graphs = {}

    def _capture(self, args) -> tuple:
        """-> the graph, its input tensors, its output."""
        args = [a.clone(memory_format=torch.contiguous_format) if isinstance(a, Tensor) else a
                for a in args]
        side = torch.cuda.Stream()                 # warm up outside of the capture
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):                     # compile; lazy initialization
                self.step(*args)
        torch.cuda.current_stream().wait_stream(side)
        self.pool = self.pool or torch.cuda.graph_pool_handle()            # outputs are copied
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out = self.step(*args)
        return graph, [a for a in args if isinstance(a, Tensor)], out
