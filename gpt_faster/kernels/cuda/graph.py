"""A step as a CUDA graph: launched whole, from a few microseconds of Python.

It owns when a graph may be replayed. A replay looks at nothing but what its tensors hold: other
shapes, numbers, modules or KV caches have a graph of their own.

    step = CudaGraph(torch.compile(decode_one_token)); token = step(model, token, pos, 256, sampler)
"""

from collections.abc import Callable

import torch
from torch import Tensor


class CudaGraph:
    """step(*args) -> a tensor or several; elsewhere than on a GPU it is simply called.

    Tensors among the args are copied to where the graph reads them; whatever else the step reads
    and writes must stay where it is. The first call of a kind runs the step three times: calling
    it twice for the same position must not differ from calling it once.
    """

    def __init__(self, step: Callable):
        self.step = step
        self.graphs, self.caches, self.pool = {}, (), None

    def __call__(self, *args):
        if not any(isinstance(a, Tensor) and a.is_cuda for a in args):
            return self.step(*args)
        caches = [layer.attn.cache for a in args for layer in getattr(a, "layers", ())[:1]]
        if len(caches) != len(self.caches) or any(a is not b for a, b in zip(caches, self.caches)):
            self.graphs, self.caches = {}, caches  # they wrote the old ones
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
        """What a graph reads lies elsewhere now."""
        self.graphs = {}

    def _capture(self, args) -> tuple:
        """-> the graph, the tensors it reads, and what it writes its result to."""
        args = [a.clone(memory_format=torch.contiguous_format) if isinstance(a, Tensor) else a
                for a in args]
        side = torch.cuda.Stream()                 # capture wants warmed-up libraries
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):                     # to compile, and what that has put off
                self.step(*args)
        torch.cuda.current_stream().wait_stream(side)
        self.pool = self.pool or torch.cuda.graph_pool_handle()            # results are copied
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            out = self.step(*args)
        return graph, [a for a in args if isinstance(a, Tensor)], out
