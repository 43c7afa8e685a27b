"""GPTQ's Hessians: run calibration text through a model layer by layer, and solve each linear.

Owns which linears are solved together. The text goes through twice: through the model as it was,
and as it has become, whose inputs a layer is solved for (the embedding is as it was). A part of
what these are off by, the layer makes up for. One layer's weights and all windows' hidden states
and inputs of its linears are in memory at a time. The codes are a quantize.Scheme's, the
mathematics of solve.py and refine.py.

    solver = Solver(source, tokens, device, dtype, scheme_named("int4-g32"))
    solver("layers.0.attn.wq.weight")              # -> the scheme's leaves: weight, scales, zeros
"""

import statistics
import sys
import time

import torch
from torch import Tensor, nn

from checkpoint import Checkpoint, blank_model, disk_names, load_part
from gpt_faster.formats.load import put_table
from gpt_faster.layers.shared_kv import SharedAttention
from gpt_faster.quantization.refine import refined
from gpt_faster.quantization.solve import corrected, nearest, output_error, shrunk, solve
from model import ExpertLinear
from quantize import Scheme

# In this order, each with what those before it have become. One stage's linears have equal inputs.
STAGES = (("attn.wqkv", "attn.qkv", "attn.gate"), ("attn.wq",), ("attn.wqkv_a",),
          ("attn.wq_kv_a",), ("attn.wq_b",), ("attn.wbcx",), ("attn.wo",), ("ffn.gate_up",),
          ("ffn.gate", "ffn.up"), ("ffn.shared.gate_up",), ("ffn.down",), ("ffn.shared.down",),
          ("end.gate",), ("end.down",))
LAST = {"attn.wo": "attn", "ffn.down": "ffn"}      # linears that a part of a layer ends with
CORRECTION = 0.5                                   # share of the inputs' deviation to make up for
SHRINKAGE = 0.3                                    # share of the inputs' correlations to leave out
ROUNDED = ("attn.wk_b", "attn.wv_b")               # to nearest: a prompt has no inputs of theirs


def split_windows(ids: list[int], length: int, limit: int, pad: bool) -> Tensor:
    """ids -> [n, length], n at most limit; pad: the last, shorter one too, with zeros."""
    if pad and len(ids) % length:
        ids = ids + [0] * (-len(ids) % length)
    n = min(len(ids) // length, limit)
    if n < 2:
        raise ValueError(f"the calibration text has {len(ids)} tokens, less than two windows of "
                         f"{length}: give more text or a smaller --calibration_seq_length")
    return torch.tensor(ids[:n * length]).view(n, length)


class InputsRecorded(Exception):
    """Ends a layer's forward pass: the inputs in question are known."""


class Solver:
    """Solves the linears of a checkpoint, one layer after another.

    Called with the names of a layer's linears in any order, all of a layer before any of the next:
    a layer's inputs are what the quantized layers before it give, and nothing is kept of those.
    """

    @torch.inference_mode()
    def __init__(self, source: Checkpoint, tokens: Tensor, device, dtype: torch.dtype,
                 scheme: Scheme, percdamp: float = 0.01, blocksize: int = 128,
                 act_order: bool = True, others: dict[str, Scheme] | None = None):
        """tokens [n, T]; every ninth window, or the last one, is held out to judge by.

        others: parameters on disk with a scheme of their own, to whose nearest codes they go.
        """
        self.source = source
        self.device = device
        self.scheme, self.others = scheme, others or {}
        self.solve_options = percdamp, blocksize, act_order
        self.model = blank_model(source.cfg, dtype)
        put_table(self.model, source, dtype, device)
        for part in ("embed", "pos_embed", "per_layer."):
            load_part(self.model, part, source, device)
        tokens, self.pos = tokens.to(device), torch.arange(tokens.shape[1], device=device)
        self.model.setup_cache(0, tokens.shape[1])         # none, but RoPE for this length
        for name in ("freq", "amplitude"):
            setattr(self.model, name, getattr(self.model, name).to(device))
        self.x, self.own = [], []                  # of each window: hidden states [1, T, D], and
        for row in tokens:                         # what each layer is given of its tokens
            x, *shared = self.model.embed_inputs(row[None], self.pos, len(row))
            self.x.append(x)
            self.layer_inputs = self.model.layer_inputs(shared)
            self.own.append([inputs[3:] for inputs in self.layer_inputs])
        n = len(self.x)
        self.held_out = {i for i in range(n) if i % 9 == 8} or {n - 1}
        self.x_original = {i: x for i, x in enumerate(self.x) if i not in self.held_out}
        self.keys = {}                             # by (is original?, layer, window), what later
                                                   # layers take of it
        self.layer, self.solved, self.ratios = -1, {}, []
        self.begin = time.perf_counter()

    def summary(self) -> str:
        better = sum(ratio < 1 for ratio in self.ratios)
        return (f"{better} of {len(self.ratios)} linears have a smaller output error on held-out "
                f"text than rounding gives; median ratio {statistics.median(self.ratios):.2f}, "
                f"worst {max(self.ratios):.2f}")

    def __call__(self, name: str) -> dict[str, Tensor]:
        """-> the leaves that stand for this weight, [..., out, in] and [..., out, in/G]."""
        while name not in self.solved:
            assert not self.solved, f"{name} was asked for before {next(iter(self.solved))}"
            self._next_layer()
        return self.solved.pop(name)

    @torch.inference_mode()
    def _next_layer(self) -> None:
        self.layer += 1
        name, layer = f"layers.{self.layer}", self.model.layers[self.layer]
        load_part(self.model, f"{name}.", self.source, self.device)
        modules, ratios = dict(layer.named_modules()), []
        self.original_inputs = self._run_original(layer, modules)
        others = [n for n in modules if disk_names(f"{name}.{n}.weight")[0] in self.others]
        rounded = dict.fromkeys([n for n in ROUNDED if n in modules] + others)
        for n in rounded:                          # before wo, whose inputs they make
            self._round(f"{name}.{n}", modules[n])
        for stage in STAGES:
            stage = [n for n in stage if n in modules and n not in rounded]
            if not stage:
                continue
            module, part = modules[stage[0]], LAST.get(stage[0])
            inputs = {} if part and not isinstance(module, ExpertLinear) else None
            hessians = self._hessians(layer, module, inputs)
            ratios += [self._solve(f"{name}.{n}", modules[n], *hessians) for n in stage]
            if inputs:                             # nothing before it will change
                getattr(layer, part).forward = self._end(module, inputs)
        for i in range(len(self.x)):
            self.x[i] = self._run(layer, i)
        for part in LAST.values():
            vars(getattr(layer, part)).pop("forward", None)
        layer.to("meta")
        self.ratios += ratios
        self._report(statistics.median(ratios or [1.0]))

    def _report(self, ratio: float) -> None:
        done, n_layer = self.layer + 1, self.source.cfg.n_layer
        left = (time.perf_counter() - self.begin) / done * (n_layer - done)
        print(f"layer {done} of {n_layer}: output error on held-out text {ratio:.2f} of rounding's"
              f"{f', {left:.0f} s left' if left else ''}", file=sys.stderr, flush=True)

    def _run_original(self, layer, modules) -> dict:
        """Before anything is solved -> the inputs [T, in], by module and window to calibrate on.

        Of experts none: the rows that are routed to one are others than they will be.
        """
        inputs = {}

        def see(module, args):
            inputs.setdefault(module, {})[self.window] = args[0].flatten(0, -2)
        first = [next((modules[n] for n in stage if n in modules), None) for stage in STAGES]
        hooks = [module.register_forward_pre_hook(see) for module in first
                 if module is not None and not isinstance(module, ExpertLinear)]
        for i in self.x_original:
            self.x_original[i] = self._run(layer, i, original=True)
        for hook in hooks:
            hook.remove()
        return inputs

    def _run(self, layer, i: int, original: bool = False) -> Tensor:
        """The layer that is solved now, with what it takes of window i."""
        if isinstance(layer.attn, SharedAttention):
            key = original, layer.attn.source_layer, i
            layer.attn.source[1].recorded_kv = self.keys[key]
        given, self.window = self.layer_inputs[self.layer][:3], i
        x = (self.x_original if original else self.x)[i]
        x = layer(x, *given, None, *self.own[i][self.layer])
        self._keep_keys(layer, original)
        return x

    def _end(self, linear: nn.Module, inputs: dict[int, Tensor]):
        """A part's forward, once its last linear is solved: of that one, and once for a window."""
        outputs = {}

        def forward(*_):
            if self.window in inputs:
                outputs[self.window] = linear(inputs.pop(self.window))
            return outputs[self.window]
        return forward

    def _keep_keys(self, layer, original: bool = False) -> None:
        if "forward" not in vars(layer.attn):      # else its attention has not run again
            attend = getattr(layer.attn, "attend", None)
            self.keys[original, self.layer, self.window] = getattr(attend, "recorded_kv", None)

    def _hessians(self, layer, module, kept: dict | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of the module's inputs, from the text to calibrate on and the text held out.

        [in, in], or [E, in, in] with each expert's own inputs. Third, but of experts, solve.py's
        cross [in, in]. kept: gets the inputs, by window.
        """
        experts, n_in = isinstance(module, ExpertLinear), module.weight.shape[-1]
        shape = (module.weight.shape[0], n_in, n_in) if experts else (n_in, n_in)
        both, strip = torch.zeros(2, *shape, device=self.device), -(-n_in // 4)
        originals = self.original_inputs.pop(module, None)
        cross = None if originals is None else torch.zeros(n_in, n_in, device=self.device)

        def see(_, inputs):
            rows = inputs[0].flatten(0, -2)
            x = rows.float()
            if not experts:
                for a in range(0, n_in, strip):    # of what is symmetric little above the diagonal
                    both[held, a:, a:a + strip].addmm_(x[:, a:].T, x[:, a:a + strip])
            else:
                for e in inputs[1].unique().tolist():
                    mine = x[inputs[1] == e]
                    both[held, e].addmm_(mine.T, mine)
            if cross is not None and not held:     # in the model's dtype: five times faster
                off = (originals[i].float() - x).to(rows.dtype)
                cross.add_(off.T @ rows)
            if kept is not None:
                self._keep_keys(layer)
                kept[i] = inputs[0]
            raise InputsRecorded

        hook = module.register_forward_pre_hook(see)
        try:
            for i in range(len(self.x)):
                held = int(i in self.held_out)
                try:
                    self._run(layer, i)
                except InputsRecorded:
                    pass
        finally:
            hook.remove()
        for h in both.view(-1, n_in, n_in):
            h.tril_().add_(h.tril(-1).mT)
        return both[0], both[1], cross

    def _solve(self, name, module, hessian, held_out, cross) -> float:
        """-> how the output error on held-out text compares with rounding's."""
        tensors = [self.source.tensors[p] for p in disk_names(f"{name}.weight")]
        weight = torch.cat([t.whole().to(self.device).float() for t in tensors], dim=-2)
        if not weight.isfinite().all():
            raise ValueError(f"{name}.weight has weights that are infinite or no numbers")
        shape, square = (-1, *weight.shape[-2:]), (-1, *hessian.shape[-2:])    # experts or one
        hessian = shrunk(hessian, SHRINKAGE).view(square)
        # inputs that were all zero say nothing: all count alike, which is rounding to nearest
        unseen = ~hessian.flatten(1).any(1)
        hessian[unseen] = torch.eye(hessian.shape[-1], device=hessian.device)
        solved, error, rounding_error = [], 0.0, 0.0
        for w, target, h, held in zip(weight.view(shape), module.weight.view(shape), hessian,
                                      held_out.view(square)):
            aim = w if cross is None else corrected(w, h, cross, CORRECTION, self.solve_options[0])
            found = solve(aim, h, self.scheme, *self.solve_options)
            found = refined(aim, h, *found, self.scheme, *self.solve_options[:2])
            error += output_error(self._values(*found) - w, held)
            rounding_error += output_error(nearest(w, self.scheme) - w, held)
            target.copy_(self._values(*found))
            solved.append(found)
        whole = (torch.stack(t).view(*weight.shape[:-1], -1).cpu() for t in zip(*solved))
        rows = [t.shape[-2] for t in tensors]
        pieces = zip(*(t.split(rows, dim=-2) for t in whole))
        for part, piece in zip(disk_names(f"{name}.weight"), pieces):
            self.solved[part] = self.scheme.pack(*piece)
        return error / rounding_error if rounding_error else 1.0

    def _round(self, name: str, module) -> None:
        """Matrices whose inputs nobody sees [N, out, in], and what has a scheme of its own."""
        parts = disk_names(f"{name}.weight")
        pieces = []
        for part in parts:
            scheme = self.others.get(part, self.scheme)
            weight = self.source.tensors[part].whole().to(self.device).float()
            pieces.append(nearest(weight, scheme))
            leaves = scheme.quantize(weight.flatten(0, -2))
            self.solved[part] = {leaf: t.cpu() for leaf, t in leaves.items()}
        module.weight.copy_(torch.cat(pieces, dim=-2))

    def _values(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        groups = codes.unflatten(-1, (scales.shape[-1], -1))
        return self.scheme.values(groups, scales, zeros).flatten(-2)
