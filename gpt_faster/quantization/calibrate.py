"""GPTQ calibration: runs text through a model layer by layer, and solves each linear.

The text runs through the original model and through the quantized one. A layer's Hessians are those
of the quantized model's inputs, and its weights are corrected for a part of these inputs' deviation
from the original ones. In memory at a time: one layer's weights, and for all windows the hidden
states and the inputs of that layer's linears. A quantize.Scheme defines the codes; the math is in
solve.py and refine.py.

    solver = Solver(source, tokens, device, dtype, scheme_named("int4-g32"))
    solver("layers.0.attn.wq.weight")              # -> the scheme's tensors: weight, scales, zeros
"""

import statistics
import sys
import time

import torch
from torch import Tensor, nn

from checkpoint import Checkpoint, blank_model, disk_names, load_part
from gpt_faster.formats.load import place_per_layer_embedding
from gpt_faster.layers.mamba import AttentionWithMamba
from gpt_faster.layers.shared_kv import SharedAttention
from gpt_faster.layers.zamba import SharedTransformer
from gpt_faster.quantization.refine import refine
from gpt_faster.quantization.solve import (
    correct_weight,
    nearest_codes,
    output_error,
    round_to_nearest,
    shrink_correlations,
    solve,
)
from model import ExpertLinear
from quantize import Scheme

# Solved in this order, with earlier stages quantized. Linears of one stage have the same input.
STAGES = (("attn.wqkv", "attn.qkv", "attn.v", "attn.gate", "attn.mamba.qkv", "attn.mamba.gate"),
          ("attn.wq",), ("attn.wqkv_a",), ("attn.wq_kv_a",), ("attn.wq_b",), ("attn.wbcx",),
          ("attn.mamba.wo",), ("attn.wo",), ("ffn.gate_up",), ("ffn.gate", "ffn.up"),
          ("ffn.shared.gate_up", "ffn.shared.up"), ("ffn.down",), ("ffn.shared.down",),
          ("end.gate",), ("end.down",))
LAST = {"attn.wo": "attn", "ffn.down": "ffn"}      # last linear of a branch -> the branch
CORRECTION = 0.5                                   # fraction of the input deviation to correct for
SHRINKAGE = 0.3                                    # reduction of off-diagonal Hessian entries
ROUNDED = ("attn.wk_b", "attn.wv_b")               # rounded to nearest: prefill does not call them


def split_windows(ids: list[int], length: int, limit: int, pad: bool,
                  prefix: list[int] = ()) -> Tensor:
    """ids -> [n, length], at most `limit` windows; pad: keep the last one, padded with zeros.

    prefix: ids that are put before each window, within its length.
    """
    width = length - len(prefix)
    if pad and len(ids) % width:
        ids = ids + [0] * (-len(ids) % width)
    n = min(len(ids) // width, limit)
    if n < min(2, limit):                          # limit 1: the model writes the other windows
        raise ValueError(f"the calibration text has {len(ids)} tokens, less than two windows of "
                         f"{length}: give more text or a smaller --calibration_seq_length")
    return torch.tensor([[*prefix, *ids[i * width:(i + 1) * width]] for i in range(n)])


class InputsRecorded(Exception):
    """Stops a layer's forward pass once a linear's inputs are recorded."""


class Solver:
    """Solves the linears of a checkpoint, one layer after another.

    Call it with the names of all of a layer's linears, in any order, before those of the next
    layer: earlier layers are not kept in memory.
    """

    @torch.inference_mode()
    def __init__(self, source: Checkpoint, tokens: Tensor, device, dtype: torch.dtype,
                 scheme: Scheme, percdamp: float = 0.01, blocksize: int = 128,
                 act_order: bool = True, others: dict[str, Scheme] | None = None):
        """tokens [n, T]: every ninth window, or the last one, is held out for evaluation.

        others: names on disk of parameters with other schemes, which are rounded to nearest.
        """
        self.source = source
        self.device = device
        self.scheme, self.others = scheme, others or {}
        self.solve_options = percdamp, blocksize, act_order
        self.model = blank_model(source.cfg, dtype)
        if any(isinstance(mixer, SharedTransformer) for mixer in source.cfg.mixer):
            raise ValueError("GPTQ of a transformer block that several layers share is not "
                             "supported: use --mode int4")
        place_per_layer_embedding(self.model, source, dtype, device)
        for part in ("embed", "pos_embed", "per_layer."):
            load_part(self.model, part, source, device)
        tokens, self.pos = tokens.to(device), torch.arange(tokens.shape[1], device=device)
        self.model.setup_cache(0, tokens.shape[1])         # no cache, but RoPE for this length
        for name in ("freq", "amplitude"):
            setattr(self.model, name, getattr(self.model, name).to(device))
        self.x, self.per_layer_inputs = [], []     # of each window: hidden states [1, T, D], and
        for row in tokens:                         # the layers' per-layer embeddings (Gemma 4)
            x, *shared = self.model.embed_inputs(row[None], self.pos, len(row))
            self.x.append(x)
            self.layer_inputs = self.model.layer_inputs(shared)
            self.per_layer_inputs.append([inputs[3:] for inputs in self.layer_inputs])
        n = len(self.x)
        self.held_out = {i for i in range(n) if i % 9 == 8} or {n - 1}
        self.x_original = {i: x for i, x in enumerate(self.x) if i not in self.held_out}
        self.shared_kv = {}                        # (is original?, layer, window) -> k, v that
                                                   # later layers use
        self.layer, self.solved, self.ratios = -1, {}, []
        self.begin = time.perf_counter()

    def summary(self) -> str:
        better = sum(ratio < 1 for ratio in self.ratios)
        return (f"{better} of {len(self.ratios)} linears have a smaller output error on held-out "
                f"text than rounding to nearest; median ratio {statistics.median(self.ratios):.2f}"
                f", worst {max(self.ratios):.2f}")

    def __call__(self, name: str) -> dict[str, Tensor]:
        """A parameter's name on disk -> its quantized tensors, [..., out, in], [..., out, in/G]."""
        while name not in self.solved:
            assert not self.solved, f"{name} was requested before {next(iter(self.solved))}"
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
        for n in rounded:                          # before wo, whose inputs depend on them
            self._round(f"{name}.{n}", modules[n])
        for stage in STAGES:
            stage = [n for n in stage if n in modules and n not in rounded]
            if not stage:
                continue
            module, part = modules[stage[0]], LAST.get(stage[0])
            is_sum = isinstance(layer.attn, AttentionWithMamba) and part == "attn"
            inputs = {} if part and not isinstance(module, ExpertLinear) and not is_sum else None
            hessians = self._hessians(layer, module, inputs)
            ratios += [self._solve(f"{name}.{n}", modules[n], *hessians) for n in stage]
            if inputs:                             # the branch is final: reuse its last inputs
                getattr(layer, part).forward = self._replay(module, inputs)
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
        """Run the original layer -> inputs [T, in] by module and calibration window.

        Not of experts: the quantized model routes other tokens to them.
        """
        inputs = {}

        def record(module, args):
            inputs.setdefault(module, {})[self.window] = args[0].flatten(0, -2)
        first = [next((modules[n] for n in stage if n in modules), None) for stage in STAGES]
        hooks = [module.register_forward_pre_hook(record) for module in first
                 if module is not None and not isinstance(module, ExpertLinear)]
        for i in self.x_original:
            self.x_original[i] = self._run(layer, i, original=True)
        for hook in hooks:
            hook.remove()
        return inputs

    def _run(self, layer, i: int, original: bool = False) -> Tensor:
        """Run the current layer on window i."""
        if isinstance(layer.attn, SharedAttention):
            key = original, layer.attn.source_layer, i
            layer.attn.source[1].recorded_kv = self.shared_kv[key]
        rope_slot_mask, self.window = self.layer_inputs[self.layer][:3], i
        x = (self.x_original if original else self.x)[i]
        x = layer(x, *rope_slot_mask, None, *self.per_layer_inputs[i][self.layer])
        self._save_kv(layer, original)
        return x

    def _replay(self, linear: nn.Module, inputs: dict[int, Tensor]):
        """A forward for a solved branch: applies its last linear to the recorded inputs, once per
        window."""
        outputs = {}

        def forward(*_):
            if self.window in inputs:
                outputs[self.window] = linear(inputs.pop(self.window))
            return outputs[self.window]
        return forward

    def _save_kv(self, layer, original: bool = False) -> None:
        if "forward" not in vars(layer.attn):      # _replay() does not run the attention
            attend = getattr(layer.attn, "attend", None)
            kv = getattr(attend, "recorded_kv", None)
            self.shared_kv[original, self.layer, self.window] = kv

    def _hessians(self, layer, module, record: dict | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The Hessians of the module's inputs in the calibration text and in the held-out text,
        [in, in] or [E, in, in] for experts, and solve.py's cross [in, in], None for experts.

        record: filled with the inputs, by window.
        """
        experts, n_in = isinstance(module, ExpertLinear), module.weight.shape[-1]
        shape = (module.weight.shape[0], n_in, n_in) if experts else (n_in, n_in)
        both, strip = torch.zeros(2, *shape, device=self.device), -(-n_in // 4)
        originals = self.original_inputs.pop(module, None)
        cross = None if originals is None else torch.zeros(n_in, n_in, device=self.device)

        def accumulate(_, inputs):
            rows = inputs[0].flatten(0, -2)
            x = rows.float()
            if not experts:
                for a in range(0, n_in, strip):    # symmetric: mostly the lower triangle
                    both[is_held_out, a:, a:a + strip].addmm_(x[:, a:].T, x[:, a:a + strip])
            else:
                for e in inputs[1].unique().tolist():
                    x_e = x[inputs[1] == e]
                    both[is_held_out, e].addmm_(x_e.T, x_e)
            if cross is not None and not is_held_out:          # in the model's dtype: 5x faster
                deviation = (originals[i].float() - x).to(rows.dtype)
                cross.add_(deviation.T @ rows)
            if record is not None:
                self._save_kv(layer)
                record[i] = inputs[0]
            raise InputsRecorded

        hook = module.register_forward_pre_hook(accumulate)
        try:
            for i in range(len(self.x)):
                is_held_out = int(i in self.held_out)
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
        """Quantize one linear -> its output error on held-out text, relative to rounding's."""
        tensors = [self.source.tensors[p] for p in disk_names(f"{name}.weight")]
        weight = torch.cat([t.whole().to(self.device).float() for t in tensors], dim=-2)
        if not weight.isfinite().all():
            raise ValueError(f"{name}.weight has NaN or infinite weights")
        shape, square = (-1, *weight.shape[-2:]), (-1, *hessian.shape[-2:])    # [E or 1, …]
        hessian = shrink_correlations(hessian, SHRINKAGE).view(square)
        has_inputs = hessian.flatten(1).any(1).tolist()
        self._note_unseen(name, has_inputs)
        solutions, error, rounding_error = [], 0.0, 0.0
        percdamp, blocksize, _ = self.solve_options
        for w, module_weight, h, h_held_out, is_seen in zip(
                weight.view(shape), module.weight.view(shape), hessian, held_out.view(square),
                has_inputs):
            target = w
            if is_seen and cross is not None:
                target = correct_weight(w, h, cross, CORRECTION, percdamp)
            if is_seen:
                solution = solve(target, h, self.scheme, *self.solve_options)
                solution = refine(target, h, *solution, self.scheme, percdamp, blocksize)
            else:
                solution = nearest_codes(w, self.scheme)
            error += output_error(self._values(*solution) - w, h_held_out)
            rounding_error += output_error(round_to_nearest(w, self.scheme) - w, h_held_out)
            module_weight.copy_(self._values(*solution))
            solutions.append(solution)
        merged = (torch.stack(t).view(*weight.shape[:-1], -1).cpu() for t in zip(*solutions))
        rows = [t.shape[-2] for t in tensors]
        parts = zip(*(t.split(rows, dim=-2) for t in merged))
        for disk_name, part in zip(disk_names(f"{name}.weight"), parts):
            self.solved[disk_name] = self.scheme.pack(*part)
        return error / rounding_error if rounding_error else 1.0

    def _note_unseen(self, name: str, has_inputs: list[bool]) -> None:
        """Log the linears and experts that GPTQ knows nothing about."""
        n_unseen = has_inputs.count(False)
        if n_unseen:
            what = name if len(has_inputs) == 1 else (
                f"{n_unseen} of {len(has_inputs)} experts of {name}")
            print(f"note: {what}: no inputs but zeros in the calibration text, so the weights are "
                  "rounded to nearest", file=sys.stderr, flush=True)

    def _round(self, name: str, module) -> None:
        """Round a weight to nearest: ROUNDED, and those in self.others."""
        values = []
        for disk_name in disk_names(f"{name}.weight"):
            scheme = self.others.get(disk_name, self.scheme)
            weight = self.source.tensors[disk_name].whole().to(self.device).float()
            values.append(round_to_nearest(weight, scheme))
            tensors = scheme.quantize(weight.flatten(0, -2))
            self.solved[disk_name] = {key: t.cpu() for key, t in tensors.items()}
        module.weight.copy_(torch.cat(values, dim=-2))

    def _values(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        groups = codes.unflatten(-1, (scales.shape[-1], -1))
        return self.scheme.values(groups, scales, zeros).flatten(-2)
