"""jinja2's sandbox with limits on time and memory: no template runs much longer than TIMEOUT.

Loop steps and calls check the clock, results are limited in size, and operations that would build
a huge value at once are refused beforehand. Knows no chat and no tokenizer.

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

TIMEOUT = 10                                       # seconds
MAX_LENGTH = 1 << 22                               # characters of a text, entries of a list
MAX_ARGUMENT = 1 << 20                             # integer argument of a filter or method
MAX_BITS = 4096                                    # bits of an integer


class _Bounded(NodeTransformer):
    """Checks the clock at each loop step, and the size of each ~ concatenation."""

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
    """Raises SecurityError (a jinja2 TemplateError) when a template exceeds a limit."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.clock = threading.local()             # a server renders in several threads
        self.globals.pop("lipsum", None)           # generates text of any length
        self.filters = {name: self._limited(name, f) for name, f in self.filters.items()}
        self.filters.update(steps=self._steps, check_size=self.check_size)

    def _parse(self, source, name, filename):
        return _Bounded().visit(super()._parse(source, name, filename))

    def begin(self) -> None:
        self.clock.deadline = time.monotonic() + TIMEOUT

    def tick(self) -> None:
        if time.monotonic() > self.clock.deadline:
            raise SecurityError(f"it runs for more than {TIMEOUT} seconds")

    def check_size(self, value):
        """Return the value. SecurityError: it is too large."""
        if isinstance(value, str | list | tuple | dict | bytes) and len(value) > MAX_LENGTH:
            raise SecurityError(f"it builds a value of {len(value):,} characters or entries")
        if type(value) is int and value.bit_length() > MAX_BITS:
            raise SecurityError(f"it computes an integer of {value.bit_length():,} bits")
        return value

    def _steps(self, values):
        for value in values:
            self.tick()
            yield value

    def call_binop(self, context, operator, left, right):
        if operator == "**" and not (_is_small(left, MAX_BITS) and _is_small(right, 64)):
            raise SecurityError("it computes a power that is too large")
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
        first = 1 if hasattr(filter_, "jinja_pass_arg") else 0         # after a context

        @functools.wraps(filter_)
        def limited(*args, **kwargs):
            self.tick()
            value, others = args[first], (*args[first + 1:], *kwargs.values())
            _check_arguments(name, value, others)
            return self.check_size(filter_(*args, **kwargs))
        return limited


def render(template: Template, **more) -> str:
    """Render a LimitedEnvironment's template; the output is limited too."""
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
            raise SecurityError(f"it builds a value of {len(value) * times:,} characters or "
                                "entries")


def _check_arguments(name: str, value, others: tuple) -> None:
    """Refuse a call of a method or filter whose result would be too large."""
    if any(isinstance(x, int) and abs(x) > MAX_ARGUMENT for x in others):
        raise SecurityError(f"it calls {name} with a number above {MAX_ARGUMENT:,}")
    if name == "format" and isinstance(value, str) and re.search(r"\d{7}", value):
        raise SecurityError("it formats numbers with too large a width")
    if name == "replace" and isinstance(value, str) and len(others) > 1:
        old, new = str(others[0]), str(others[1])
        if value.count(old) * len(new) > MAX_LENGTH:
            raise SecurityError("its result of replace is too long")
    if name == "join":
        pieces = others[0] if isinstance(value, str) and others else value
        between = len(value) if isinstance(value, str) else len(str(others[0])) if others else 0
        if isinstance(pieces, list | tuple):
            n = sum(len(x) if isinstance(x, str) else 20 for x in pieces)
            if n + between * len(pieces) > MAX_LENGTH:
                raise SecurityError("its result of join is too long")
