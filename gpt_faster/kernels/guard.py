"""Checks at each call that a compiled model is unmodified, and runs modified parts eagerly.

GuardedForward replaces the model's forward. If the model has changed since it was compiled
(kernels/modifications.py), it is compiled again: unmodified parts run by native operations, the
others in eager PyTorch. A part that is called outside of the model's forward also runs eagerly.

    guard = GuardedForward(model, compile)         # compile(model) compiles it again
    model.embed_inputs = EmbedInputs(guard, model) # a MethodOverride
    guard.install(packed_tensors)
"""

import copy
from contextlib import contextmanager
from types import MethodType

from torch import Tensor, nn

from gpt_faster.kernels import torch_internals
from gpt_faster.kernels.cpu.replay import Replay, key_of
from gpt_faster.kernels.modifications import ModelSnapshot


class MethodOverride:
    """Replaces a module's method, which is `original`. A copy of the module has its own method."""

    def __init__(self, guard: "GuardedForward", module: nn.Module, name: str):
        self.guard, self.module, self.name = guard, module, name

    @property
    def original(self):
        return getattr(type(self.module), self.name).__get__(self.module)

    def __deepcopy__(self, memo):
        module = copy.deepcopy(self.module, memo)
        return getattr(type(module), self.name).__get__(module)


class EagerCall(MethodOverride):
    """Replaces the call of a module that runs eagerly, with its hooks. Parts of the model that the
    module or its hooks call run eagerly too.
    """

    def __init__(self, guard: "GuardedForward", module: nn.Module):
        super().__init__(guard, module, torch_internals.CALL_OVERRIDE)
        # Set if the user called module.compile().
        self.user_call = vars(module).get(torch_internals.CALL_OVERRIDE)

    def __call__(self, *args, **kwargs):
        call = self.user_call or torch_internals.default_call(self.module)
        was_in_model_call = self.guard.in_model_call
        self.guard.in_model_call = False
        try:
            return call(*args, **kwargs)
        finally:
            self.guard.in_model_call = was_in_model_call


class GuardedForward(MethodOverride):
    """Replaces a model's forward."""

    def __init__(self, model: nn.Module, compile):
        super().__init__(self, model, "forward")
        self.compile = compile
        self.in_model_call = False                 # checked already: the parts need not check again
        self.n_call = 0                            # calls of the model so far
        self.in_eager_section = False              # in the middle of a layer's operations
        self.is_exclusive = False                  # no other code runs between two decode steps
        self.snapshot = None
        self.replay = Replay(model)

    def install(self, packed_tensors: list[Tensor]) -> None:
        """Call after all other overrides are set. packed_tensors: see ModelSnapshot."""
        self.module.forward = self
        self.snapshot = ModelSnapshot(self.module, packed_tensors)

    @contextmanager
    def eager_section(self):
        """Calls of the model within it, by a hook for example, run eagerly: buffers are in use."""
        self.in_model_call, self.in_eager_section = False, True
        yield
        self.in_model_call, self.in_eager_section = True, False

    def __call__(self, tokens, *args, **kwargs):
        if self.in_eager_section:
            return self.original(tokens, *args, **kwargs)
        is_step = self.is_exclusive and tokens.shape[-1] == 1
        is_unchanged = self.snapshot.has_same_hooks() if is_step else self.snapshot.is_unchanged()
        may_replay = is_step and is_unchanged and self.replay.is_allowed
        key = key_of(tokens, *args, **kwargs) if may_replay else None
        if key is not None and self.replay.is_for(key):
            return self.replay.run(tokens, *args, **kwargs)
        guard = self if is_unchanged else self._recompiled()
        if guard is None:
            return self.original(tokens, *args, **kwargs)
        guard.n_call += 1
        guard.in_model_call = True
        guard.replay.begin(key)
        try:
            logits = guard.original(tokens, *args, **kwargs)
        finally:
            guard.in_model_call = guard.in_eager_section = False
        guard.replay.end()
        return logits

    def likeliest(self, tokens: Tensor, pos: Tensor, kv_len: int, not_finite: Tensor
                  ) -> Tensor | None:
        """Of a decode step: the call of the model, Sampler.note() and the likeliest tokens [B, 1];
        None: only a call can do it, which has not begun."""
        model, replay = self.module, self.replay
        is_all = type(model.cap) is nn.Identity and not torch_internals.changes_call(model)
        if not (is_all and self.is_exclusive and not self.in_eager_section and replay.is_allowed
                and self.snapshot.has_same_hooks()):
            return None
        key = key_of(tokens, pos, 1, kv_len)
        if key is None or not replay.is_for(key):
            return None
        return replay.likeliest(tokens, pos, not_finite)

    def _recompiled(self) -> "GuardedForward | None":
        """Compile the model again -> its new guard; None: all of it runs eagerly."""
        self.compile(self.module)
        guard = guard_of(self.module)
        if guard is not None:
            guard.is_exclusive = self.is_exclusive
        return guard


def guard_of(model: nn.Module) -> GuardedForward | None:
    forward = vars(model).get("forward")
    return forward if isinstance(forward, GuardedForward) else None


def remove_overrides(model: nn.Module) -> None:
    """Restore the methods that we replaced; keep those that the user replaced."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, MethodOverride) or is_copied_method(module, name, value):
                delattr(module, name)
            if isinstance(value, EagerCall) and value.user_call is not None:
                setattr(module, name, value.user_call)


def is_copied_method(module: nn.Module, name: str, value) -> bool:
    """Is it the class's method, as MethodOverride.__deepcopy__ sets it?"""
    return (isinstance(value, MethodType) and value.__self__ is module
            and value.__func__ is getattr(type(module), name, None))
