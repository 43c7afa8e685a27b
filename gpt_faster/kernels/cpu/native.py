"""The operations of run.cpp: compiled for this CPU once, described by structs, run in a row.

Knows tensors and no modules. Weights have the layout that run.cpp describes, which depends on the
CPU; pack_weight() makes it of the layouts on disk (quantize.py).

    packed = pack_weight(weight, scales, zeros)
    y = product(x, *packed, shape)                               # [M, in] -> [M, out]
"""

import ctypes
import hashlib
import itertools
import os
import re
import secrets
import shutil
import subprocess
from ctypes import Structure, c_char_p, c_float, c_int32, c_int64, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt_faster.kernels import private
from gpt_faster.storage import disk

SOURCE = Path(__file__).with_name("run.cpp")       # includes what is beside it
OPTIONS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno",
           "-fno-trapping-math", "-fno-signed-zeros", "-ffp-contract=fast",
           "-fno-tree-reassoc")                    # else sums wait in memory for each other
MARK = b"whole"                                    # ends a library that was written to its end
TYPES = {torch.float32: 0, torch.bfloat16: 1}
FP32, BF16, INT8, INT4 = range(4)                  # formats of weights
(LINEAR, ATTENTION, ADD_NORM, EMBED, ANGLES, MASK, DELTA, LATENT, ROUTE, COMBINE,
 SHORT_CONV) = range(11)
MOST_TAPS = 8                                      # of a short convolution
OUT_OF_RANGE = 1                                   # what run() gives then
ACTIVATIONS = {"": 0, "silu": 1, "gelu_tanh": 2, "clamped_silu": 3, "gelu": 4, "relu2": 5}


# ---- The library --------------------------------------------------------------------------------

def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")


def options() -> tuple[str, ...]:
    """The compiler's: clang has no passes of GCC's."""
    is_clang = "clang" in Path(compiler()).name
    return tuple(option for option in OPTIONS if not (is_clang and "-tree-" in option))


def library_path() -> Path:
    """Where it is once it is built: by its code, not its comments, the compiler and the CPU."""
    files = [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]
    texts = [re.sub(r"//.*", "", file.read_text()) for file in files]
    code = re.sub(r"\s+", " ", "\n".join(texts))
    key = hashlib.sha256(repr((code, OPTIONS, compiler(), private.cpu_flags())).encode())
    return _home() / f"cpu_ops-{key.hexdigest()[:32]}.so"


@cache
def _home() -> Path:
    """The user's cache, or where it cannot be used, this process's own. OSError: nowhere."""
    return disk.writable_folder()


def is_whole(path: Path) -> bool:
    """Is it there, to its end, and may nobody else write it? To load what a crash of the machine
    cut short ends the process."""
    if not disk.is_trusted(path):
        return False
    try:
        with open(path, "rb") as file:
            file.seek(-len(MARK), os.SEEK_END)
            return file.read() == MARK
    except OSError:
        return False


_building = []                                     # the compiler's process, if one was started
_threads = []                                      # how many were ours before it was


def start_building() -> None:
    """Have it compiled beside whatever else is done; it ends well without this process too.

    Until it is, it has a core of its own, as far as there are several: threads wait for each other.
    """
    try:
        path = library_path()
    except OSError:                                # library() says so
        return
    if _building or is_whole(path) or not compiler():
        return
    partial = path.with_suffix(f".{secrets.token_hex(8)}.partial")     # containers have equal ids
    script = ('to=$0 at=$1; shift; "$@" -o "$at" && printf %s ' + MARK.decode() + ' >> "$at" '
              '&& chmod 700 "$at" && sync "$at" && mv "$at" "$to" || { rm -f "$at"; exit 1; }')
    command = ["nice", "sh", "-c", script, path, partial, compiler(), *options(), SOURCE]
    _threads.append(torch.get_num_threads())
    torch.set_num_threads(max(1, _threads[0] - 1))
    _building.append(subprocess.Popen(
        list(map(str, command)), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, start_new_session=True))


def is_building() -> bool:
    return bool(_building) and _building[0].poll() is None


def take_all_threads() -> None:
    """Whatever still builds."""
    while _threads:
        torch.set_num_threads(_threads.pop())


@cache
def library() -> ctypes.CDLL:
    """Loaded, after waiting for the compiler. OSError or RuntimeError say why it cannot be."""
    start_building()
    if _building:
        _, said = _building.pop().communicate()
        take_all_threads()
        if not is_whole(library_path()):
            raise RuntimeError((said.strip().splitlines() or ["the compiler failed"])[-1])
        disk.remove_unused(_home(), "cpu_ops-*")
        disk.remove_unused(_home(), "cpu_ops-*.partial", days=1)
    if not is_whole(library_path()):
        raise OSError(f"{library_path()} is not there")
    loaded = ctypes.CDLL(str(library_path()))
    loaded.run.argtypes = [ctypes.POINTER(c_void_p), c_int32, c_int32]
    loaded.run.restype = c_int32
    check_layout(loaded)
    return loaded


@cache
def is_available() -> bool:
    """Built and loaded, now if need be; a note says why not."""
    try:
        library()
        return True
    except (OSError, RuntimeError) as e:
        private.note(f"kernels/cpu/ cannot be used ({e}): this runs uncompiled")
        return False


# ---- What an operation is -----------------------------------------------------------------------

# Fields that are addresses: which numbers lie there. Of others it is fp32, or, where the struct has
# a field for it, its type is written there.
DTYPES = dict.fromkeys(("slot", "rows", "ids", "pos"), torch.int64)
DTYPES |= dict.fromkeys(("ends", "order", "place"), torch.int32)
DTYPES["mask"] = torch.bool
TYPE_FIELDS = {name: f"{name}_type" for name in ("x", "out", "residual", "times", "bias")}
TYPE_FIELDS |= dict.fromkeys(("k_cache", "v_cache", "cache"), "cache_type")
TYPE_FIELDS["inputs"] = "input_type"


class Struct(Structure):
    """What an operation reads: numbers, and addresses of tensors and other structs, which it keeps.

    TypeError where a tensor is not what the operation reads.
    """

    any_dtype = ()                                 # fields whose dtype the struct says otherwise

    def __init__(self, **values):
        super().__init__()
        self.kept = {}
        for name, value in values.items():
            self.set(name, value)

    def set(self, name: str, value) -> None:
        """value: a number, a struct, or a tensor, of which the field is the address, as `at` is."""
        if isinstance(value, Tensor):
            self.kept[name] = value.detach()       # whatever becomes of the tensor's own .data
            setattr(self, name, self._address(name, value))
        elif isinstance(value, Struct):
            self.kept[name] = value
            setattr(self, name, ctypes.addressof(value) if name == "at" else value)
        else:
            setattr(self, name, value)

    def _address(self, name: str, t: Tensor) -> int:
        type_field = TYPE_FIELDS.get(name)
        if hasattr(self, type_field or ""):
            if t.dtype not in TYPES:
                raise TypeError(f"{name} of an operation is float32 or bfloat16, not {t.dtype}")
            setattr(self, type_field, TYPES[t.dtype])
        elif name not in self.any_dtype and t.dtype != DTYPES.get(name, torch.float32):
            raise TypeError(f"{name} of an operation is {DTYPES.get(name, torch.float32)}, not "
                            f"{t.dtype}")
        if t.device.type != "cpu" or not t.is_contiguous():
            raise TypeError(f"{name} of an operation lies in one piece on the CPU")
        return t.data_ptr()


def fields(ints: str, *rest) -> list:
    """rest: names of addresses, or other fields."""
    both = [(name, c_int32) for name in ints.split()]
    for field in rest:
        both += [(name, c_void_p) for name in field.split()] if isinstance(field, str) else [field]
    return both


class Norm(Struct):
    _fields_ = fields("kind", ("eps", c_float), "weight bias")


class Linear(Struct):
    any_dtype = ("weight", "scales")
    _fields_ = fields(
        "kind format M N K group activation gated x_type out_type residual_type x_bits n_expert "
        "x_stride x_step out_stride out_step times_type times_stride bias_type",
        ("factor", c_float), ("norm", Norm), "x weight scales residual times bias out ends order")


class Positions(Struct):
    _fields_ = [(name, c_int64) for name in ("n_key", "mask_b", "mask_t", "angle_b", "slot_b")]
    _fields_ += fields("", "cos sin mask slot rows")


class Attention(Struct):
    _fields_ = fields(
        "kind B T N K H V S n_row cache_type wide_norm out_type has_keys is_turned",
        ("scale", c_float), ("cap", c_float), ("q_norm", Norm), ("k_norm", Norm), ("v_norm", Norm),
        "at sinks gate qkv k_cache v_cache out")


class Delta(Struct):
    _fields_ = fields(
        "kind B T Nk N Dk Dv n_tap n_state n_input n_row input_type out_type", ("q_scale", c_float),
        ("norm", Norm), "at taps decay_rate decay_bias x z rates states inputs out")


class ShortConv(Struct):
    _fields_ = fields("kind B T width n_tap n_input n_row input_type out_type",
                      "at taps bias x inputs out")


class Latent(Struct):
    _fields_ = fields("kind B T N nope rope rank S n_row cache_type q_stride k_stride",
                      ("norm", Norm), "at q k queries cache")


class Route(Struct):
    _fields_ = fields(
        "kind M E A n_group topk_group group_top by_sigmoid normalized", ("factor", c_float),
        "logits bias expert_scale prob place order ends")


class Combine(Struct):
    _fields_ = fields(
        "kind M D A out_type residual_type", ("factor", c_float), ("norm", Norm),
        ("shared_norm", Norm), ("post", Norm), "y prob place shared gate residual out")


class AddNorm(Struct):
    _fields_ = fields("kind M D x_type out_type residual_type", ("factor", c_float),
                      ("norm", Norm), "scale x residual out")


class Embed(Struct):
    any_dtype = ("weight", "scales")
    _fields_ = fields("kind format n K n_vocab out_type", ("factor", c_float),
                      "weight scales ids out")


class Angles(Struct):
    _fields_ = fields("kind n half", "pos freq amplitude cos sin")


class Mask(Struct):
    _fields_ = fields("kind B T n_key window", "pos mask")


STRUCTS = (Norm, Linear, Positions, Attention, Delta, ShortConv, Latent, Route, Combine, AddNorm,
           Embed, Angles, Mask)


class Field(Structure):
    """Of kernels/cpu/layout.h."""

    _fields_ = [("of", c_char_p), ("name", c_char_p), ("at", c_int64), ("size", c_int64)]


def check_layout(loaded: ctypes.CDLL) -> None:
    """RuntimeError where a struct here is not the library's."""
    loaded.fields.restype = ctypes.POINTER(Field)
    theirs = {}
    for field in itertools.takewhile(lambda field: field.of, loaded.fields()):
        theirs[field.of.decode(), field.name.decode()] = field.at, field.size
    ours = {(kind.__name__, ""): (0, ctypes.sizeof(kind)) for kind in STRUCTS}
    for kind in STRUCTS:
        for name, _ in kind._fields_:
            field = getattr(kind, name)
            ours[kind.__name__, name] = field.offset, field.size
    for of, name in sorted(ours.keys() | theirs.keys()):
        if ours.get((of, name)) != theirs.get((of, name)):
            raise RuntimeError(f"{of}.{name} lies elsewhere in C++ than in kernels/cpu/native.py")


def run(addresses: list[int], n_thread: int | None = None) -> None:
    """The structs at these addresses one after the other, on all of torch's threads or so many.

    IndexError, and nothing is done, where a token, a position or a row is none of the model's or
    its cache's, or a layer with a state would skip a position; MemoryError.
    """
    n = len(addresses)
    failed = library().run((c_void_p * n)(*addresses), n, n_thread or torch.get_num_threads())
    if failed == OUT_OF_RANGE:
        raise IndexError("a token beyond the vocabulary, a position or a row beyond the cache, or "
                         "a gap in the positions of a layer with a state")
    if failed:
        raise MemoryError("an operation found no memory for what lies between its steps")


# ---- Weights ------------------------------------------------------------------------------------

@cache
def block_rows() -> int:
    return library().rows_in_a_block()


def pack_weight(weight: Tensor, scales: Tensor | None = None, zeros: Tensor | None = None) -> tuple:
    """As on disk -> (format, weight, scales, group) as run.cpp reads them."""
    scales_too = scales is not None
    kind = {torch.float32: FP32, torch.bfloat16: BF16, torch.int8: INT8, torch.uint8: INT4}
    kind = kind[weight.dtype]
    n_out, n_in = weight.shape
    to = {FP32: 32, BF16: 32, INT8: 32, INT4: 16}[kind]
    short = -n_out % block_rows()
    if short or n_in % to:
        weight = F.pad(weight, (0, -n_in % to, 0, short))
    word = {FP32: torch.float32, BF16: torch.int32, INT8: torch.int16, INT4: torch.int32}[kind]
    words = in_blocks(weight.contiguous().view(word))
    group = 0
    if kind == INT8:
        scales = F.pad(scales.float(), (0, short))
    elif scales_too:
        group = 2 * n_in // scales.shape[1]
        both = torch.stack((scales.bfloat16(), zeros.bfloat16()), -1).view(torch.int32)[..., 0]
        both = F.pad(both, (0, 0, 0, short))
        scales = in_blocks(both)
    return kind, words, scales, group


def in_blocks(words: Tensor) -> Tensor:
    """[out, n], contiguous, of 2 or 4 bytes each -> [out/ROWS, n, ROWS]."""
    n_block, n = words.shape[0] // block_rows(), words.shape[1]
    blocks = words.new_empty(n_block, n, block_rows())
    library().lay_out(c_void_p(words.data_ptr()), c_long(n_block), c_long(n), words.itemsize,
                      c_void_p(blocks.data_ptr()))
    return blocks


def product(x: Tensor, kind: int, weight: Tensor, scales: Tensor | None, group: int,
            shape: tuple[int, int], bias: Tensor | None = None) -> Tensor:
    """x [M, in] fp32 or bf16 by pack_weight()'s -> [M, out] in x's dtype, rounding nothing of fp32.

    bias: fp32 or bf16.
    """
    x = x.contiguous()
    out = x.new_empty(x.shape[0], shape[0])
    op = linear(kind, weight, scales, group, shape, bias, x=x, out=out, M=x.shape[0],
                x_bits=x_bits(x.dtype))
    run([ctypes.addressof(op)])
    return out


_narrowest = [8]                                   # bits of x


def set_activation_bits(bits: int) -> int:
    """Of what many rows are rounded to, in models that are not fp32, before they meet int8 or int4:
    8, in groups of 32 with a scale of their own, where the CPU multiplies bytes; or 16. -> those
    before."""
    before, _narrowest[0] = _narrowest[0], bits
    return before


def activation_bits(kind: int) -> int:
    """kind: INT8, or INT4, whose products of bytes AVX2 has too."""
    return _narrowest[0] if library().has_bytes(kind) else 16


def has_bf16() -> bool:
    """Does the CPU multiply bf16? Else bf16 weights meet many rows as integers of 14 bits."""
    return bool(library().has_bf16())


def has_amx() -> bool:
    """Does the CPU have AMX? Then many rows meet bf16, int8 and int4 weights as bf16."""
    return bool(library().has_amx())


def x_bits(dtype: torch.dtype) -> int:
    """That numbers of x must have in a product."""
    return 32 if dtype == torch.float32 else _narrowest[0]


def linear(kind: int, weight: Tensor, scales: Tensor | None, group: int, shape: tuple[int, int],
           bias: Tensor | None = None, **more) -> Linear:
    """more: the struct's other fields."""
    return Linear(kind=LINEAR, format=kind, N=shape[0], K=shape[1], group=group, factor=1.0,
                  weight=weight, scales=scales, bias=bias, **more)
