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
from jinja2.utils import generate_lorem_ipsum
from jinja2.visitor import NodeTransformer

TIMEOUT = 10                                       # seconds
MAX_LENGTH = 1 << 23                               # characters of a text, entries of a list
MAX_ARGUMENT = 1 << 20                             # size in an argument of a filter or method
MAX_BITS = 4096                                    # bits of an integer
# Filters and methods with an argument that sets the size of the result.
SIZED = {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "to_bytes",
         "tojson", "zfill"}


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
        self.globals["lipsum"] = _limited_lipsum
        self.filters = {name: self._limited(name, f) for name, f in self.filters.items()}
        self.filters.update(steps=self._steps, check_size=self.check_size)

    def _parse(self, source, name, filename):
        return _Bounded().visit(super()._parse(source, name, filename))

    def add_filter(self, name: str, filter_) -> None:
        self.filters[name] = self._limited(name, filter_)

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
            values = right if isinstance(right, tuple) else (right,)
            _check_width(left, values, r"%[^%a-zA-Z]*\d{7}", r"\*")
        return self.check_size(super().call_binop(context, operator, left, right))

    def call(self, context, function, *args, **kwargs):
        self.tick()
        method = getattr(function, "__wrapped__", function)    # jinja2 wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str | bytes | int | list | tuple):
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


def _limited_lipsum(n=5, html=True, min=20, max=100):
    if not (_is_small(n, 100) and _is_small(max, 1000)):
        raise SecurityError("it calls lipsum for too long a text")
    return generate_lorem_ipsum(n, html, min, max)


def _check_width(text: str, values: tuple, large: str, variable: str) -> None:
    """Refuse a format's width above a million: in the text, or in a value that is a width."""
    is_width = re.search(variable, text) is not None
    if re.search(large, text) or is_width and not all(
            isinstance(x, str) or _is_small(x, MAX_ARGUMENT) for x in values):
        raise SecurityError("it formats with too large a width")


def _check_arguments(name: str, value, others: tuple) -> None:
    """Refuse a call of a method or filter whose result would be too large."""
    if name in SIZED and any(isinstance(x, int) and abs(x) > MAX_ARGUMENT for x in others):
        raise SecurityError(f"it calls {name} with a number above {MAX_ARGUMENT:,}")
    if name in ("format", "format_map") and isinstance(value, str):
        _check_width(value, others, r"\{[^{}]*\d{7}", r"\{[^{}]*\{")
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
