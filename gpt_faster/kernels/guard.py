"""What stands in place of a compiled model's methods, for as long as the model is as it was read.

A call of the model looks whether anything of it was exchanged since (kernels/as_read.py). Then its
operations are made anew, of what they know; the rest runs as it is read. A part that is called
alone, by whoever, runs as it is read too.

    guard = Guard(model, compile)                  # compile(model) -> is it compiled? anew
    model.embed_inputs = Enter(guard, model)       # a Stead
    guard.begin(derived)
"""

import copy
from contextlib import contextmanager
from types import MethodType

from torch import Tensor, nn

from gpt_faster.kernels import private
from gpt_faster.kernels.as_read import Watch


class Stead:
    """In place of a module's method, which is `plain`. A copy of the module has its own again."""

    def __init__(self, guard: "Guard", module: nn.Module, name: str):
        self.guard, self.module, self.name = guard, module, name

    @property
    def plain(self):
        return getattr(type(self.module), self.name).__get__(self.module)

    def __deepcopy__(self, memo):
        module = copy.deepcopy(self.module, memo)
        return getattr(type(module), self.name).__get__(module)


class Outside(Stead):
    """Around the call of a module that runs as it is read, with its hooks: whatever they call of
    the model runs as it is read too."""

    def __init__(self, guard: "Guard", module: nn.Module):
        super().__init__(guard, module, private.AROUND)
        self.around = vars(module).get(private.AROUND)     # torch.compile's, of a user

    def __call__(self, *args, **kwargs):
        call = self.around or private.plain_call(self.module)
        self.guard.inside, was_inside = False, self.guard.inside
        try:
            return call(*args, **kwargs)
        finally:
            self.guard.inside = was_inside


class Guard(Stead):
    """In place of a model's forward."""

    def __init__(self, model: nn.Module, compile):
        super().__init__(self, model, "forward")
        self.compile = compile
        self.inside = False                        # the model's own call: its parts need not look
        self.n_call = 0                            # of the model
        self.is_within = False                     # a layer that has done a half of its operations
        self.alone = False                         # nobody else runs between two steps of a text
        self.watch = None

    def begin(self, derived: list[Tensor]) -> None:
        """All else of the model is in its place. derived: see Watch."""
        self.module.forward = self
        self.watch = Watch(self.module, derived)

    @contextmanager
    def within_a_layer(self):
        """What is called then, by a hook say, runs as it is read: the memory is in use."""
        self.inside, self.is_within = False, True
        yield
        self.inside, self.is_within = True, False

    def __call__(self, tokens, *args, **kwargs):
        if self.is_within:
            return self.plain(tokens, *args, **kwargs)
        is_step = self.alone and tokens.shape[-1] == 1
        is_same = self.watch.has_no_new_hook() if is_step else self.watch.is_same()
        guard = self if is_same else self._renewed()
        if guard is None:
            return self.plain(tokens, *args, **kwargs)
        guard.n_call += 1
        guard.inside = True
        try:
            return guard.plain(tokens, *args, **kwargs)
        finally:
            guard.inside = guard.is_within = False

    def _renewed(self) -> "Guard | None":
        """The one of the model's new operations, if it has any."""
        self.compile(self.module)
        guard = guard_of(self.module)
        if guard is not None:
            guard.alone = self.alone
        return guard


def guard_of(model: nn.Module) -> Guard | None:
    return own if isinstance(own := vars(model).get("forward"), Guard) else None


def undo(model: nn.Module) -> None:
    """Have the model's modules their own methods again, but for those that somebody else put there.
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Stead) or is_own_method(module, name, value):
                delattr(module, name)
            if isinstance(value, Outside) and value.around is not None:
                setattr(module, name, value.around)


def is_own_method(module: nn.Module, name: str, value) -> bool:
    """As a copy of a compiled module has it."""
    return (isinstance(value, MethodType) and value.__self__ is module
            and value.__func__ is getattr(type(module), name, None))
