"""jinja2's sandbox with an end: whatever a template does, it is over in TIMEOUT or so.

Steps of loops and calls look at the clock; what a template makes is bounded by its size, and what
would make something large in one go is refused before. Knows no chat and no tokenizer.

    environment = LimitedEnvironment(extensions=[…])
    text = render(environment.from_string(template), messages=messages)
"""

import functools
import re
import threading
import time

from jinja2 import Template, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

TIMEOUT = 10
MAX_LENGTH = 1 << 22                          # of a text, entries of a list
MAX_ARGUMENT = 1 << 20                                   # a number that a filter or a method takes
MAX_BITS = 4096                                   # of a number


class _Bounded(NodeTransformer):
    """Loops count their steps, and what ~ puts together is check_size."""

    def visit_For(self, node):
        self.generic_visit(node)
        node.iter = self._through("steps", node.iter)
        return node

    def visit_Concat(self, node):
        self.generic_visit(node)
        return self._through("check_size", node)

    def _through(self, name, node):
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """SecurityError, a TemplateError, where a template takes too long or makes too much."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.clock = threading.local()             # a server renders in several threads
        self.globals.pop("lipsum", None)           # makes texts of any length
        self.filters = {name: self._limited(name, f) for name, f in self.filters.items()}
        self.filters.update(steps=self._steps, check_size=self.check_size)

    def _parse(self, source, name, filename):
        return _Bounded().visit(super()._parse(source, name, filename))

    def begin(self) -> None:
        self.clock.deadline = time.monotonic() + TIMEOUT

    def tick(self) -> None:
        if time.monotonic() > self.clock.deadline:
            raise SecurityError(f"it takes more than {TIMEOUT} seconds")

    def check_size(self, value):
        """A value, if it is not too large."""
        if isinstance(value, str | list | tuple | dict | bytes) and len(value) > MAX_LENGTH:
            raise SecurityError(f"it makes something of {len(value):,} characters or entries")
        if type(value) is int and value.bit_length() > MAX_BITS:
            raise SecurityError(f"it makes a number of {value.bit_length():,} bits")
        return value

    def _steps(self, values):
        for value in values:
            self.tick()
            yield value

    def call_binop(self, context, operator, left, right):
        if operator == "**" and not (_is_small(left, MAX_BITS) and _is_small(right, 64)):
            raise SecurityError("it takes a power that is too large")
        if operator == "*":
            _check_product(left, right)
            _check_product(right, left)
        if operator == "%" and isinstance(left, str):
            _check_arguments("format", left, ())
        return self.check_size(super().call_binop(context, operator, left, right))

    def call(self, context, function, *args, **kwargs):
        self.tick()
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str | bytes | list | tuple) or name in ("format", "format_map"):
            _check_arguments(name, owner, (*args, *kwargs.values()))
        return self.check_size(super().call(context, function, *args, **kwargs))

    def _limited(self, name, filter_):
        first = 1 if hasattr(filter_, "jinja_pass_arg") else 0         # a context before the value

        @functools.wraps(filter_)
        def limited(*args, **kwargs):
            self.tick()
            value, others = args[first], (*args[first + 1:], *kwargs.values())
            _check_arguments(name, value, others)
            return self.check_size(filter_(*args, **kwargs))
        return limited


def render(template: Template, **more) -> str:
    """The text of a LimitedEnvironment's template, of which no more is made than may be."""
    pieces, n = [], 0
    template.environment.begin()
    for piece in template.generate(**more):
        template.environment.tick()
        pieces.append(piece)
        n += len(piece)
        if n > MAX_LENGTH:
            raise SecurityError(f"it writes more than {MAX_LENGTH:,} characters")
    return "".join(pieces)


def _is_small(value, most) -> bool:
    return isinstance(value, int | float) and abs(value) <= most


def _check_product(value, times) -> None:
    if isinstance(value, str | list | tuple) and isinstance(times, int):
        if len(value) * times > MAX_LENGTH:
            raise SecurityError(f"it makes something of {len(value) * times:,} characters or "
                                "entries")


def _check_arguments(name: str, value, others: tuple) -> None:
    """Of a method or a filter, by what it would make of them."""
    if any(isinstance(x, int) and abs(x) > MAX_ARGUMENT for x in others):
        raise SecurityError(f"it asks {name} for something of that width")
    if name == "format" and isinstance(value, str) and re.search(r"\d{7}", value):
        raise SecurityError("it asks for numbers of that width")
    if name == "replace" and isinstance(value, str) and len(others) > 1:
        old, new = str(others[0]), str(others[1])
        if value.count(old) * len(new) > MAX_LENGTH:
            raise SecurityError("it makes a text too long by replacing")
    if name == "join":
        pieces = others[0] if isinstance(value, str) and others else value
        between = len(value) if isinstance(value, str) else len(str(others[0])) if others else 0
        if isinstance(pieces, list | tuple):
            n = sum(len(x) if isinstance(x, str) else 20 for x in pieces)
            if n + between * len(pieces) > MAX_LENGTH:
                raise SecurityError("it makes a text too long by joining")
