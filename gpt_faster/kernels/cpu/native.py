"""The C++ kernels: builds them for this CPU, mirrors their structs, packs weights, runs operations.

Knows tensors and no modules. Packed weights have run.cpp's layout, which depends on the CPU;
pack_weight() converts from the layouts on disk (quantize.py).

    packed = pack_weight(weight, scales, zeros)
    y = product(x, *packed, shape)                               # [M, in] -> [M, out]
"""

import ctypes
import hashlib
import itertools
import os
import platform
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

from gpt_faster.kernels import torch_internals
from gpt_faster.kernels.cpu.huge_pages import WEIGHTS
from gpt_faster.storage import disk

SOURCE = Path(__file__).with_name("run.cpp")       # includes the headers next to it
OPTIONS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno",
           "-fno-trapping-math", "-fno-signed-zeros", "-ffp-contract=fast",
           "-fno-tree-reassoc")                    # reassociation spills the accumulators
END_MARK = b"whole"                                # appended to a completely written library
TYPES = {torch.float32: 0, torch.bfloat16: 1}      # enum Dtype of dtypes.h
FP32, BF16, INT8, INT4, FP8, FP4 = range(6)        # of weights and caches, the same enum
CACHE_TYPES = {**TYPES, torch.int8: INT8, torch.uint8: INT4, torch.float8_e4m3fn: FP8}
CACHE_GROUP = 32                                   # values with one scale: GROUP of simd.h
(LINEAR, ATTENTION, ADD_NORM, EMBED, ROPE_TABLE, MASK, DELTA, LATENT, ROUTE, COMBINE,
 SHORT_CONV, DRAW, RECORD, MAMBA, RING_MASK) = range(15)       # enum OpKind of run.cpp
MAX_TAPS = 8                                       # of DeltaNet and Mamba; also in recurrent.h
OUT_OF_RANGE = 1                                   # enum Result of run.cpp
ACTIVATIONS = {"": 0, "silu": 1, "gelu_tanh": 2, "clamped_silu": 3, "gelu": 4, "relu2": 5}


# ---- The library --------------------------------------------------------------------------------

def compiler() -> str | None:
    """$CXX, g++ or clang++. ARM's registers are half as wide as our vectors: GCC keeps such ones in
    memory, so there clang comes first."""
    names = ["g++", "clang++"]
    if platform.machine() in ("aarch64", "arm64"):
        names.reverse()
    return next(filter(None, map(shutil.which, (os.environ.get("CXX") or "", *names))), None)


def options() -> tuple[str, ...]:
    """OPTIONS as this compiler has them.

    clang rejects GCC's -f[no-]tree-*, and may be without OpenMP (threads.h has threads for that);
    for ARM some versions spell -march=native as -mcpu=native.
    """
    def accepts(*options):
        command = [compiler(), *options, "-fsyntax-only", "-x", "c++", os.devnull]
        return subprocess.run(command, capture_output=True).returncode == 0

    is_clang = "clang" in Path(compiler()).name
    known = [option for option in OPTIONS if not (is_clang and "-tree-" in option)]
    if not accepts("-march=native"):
        known[known.index("-march=native")] = "-mcpu=native"
    if not accepts("-fopenmp", "-include", "omp.h"):
        known.remove("-fopenmp")
    return tuple(known)


def library_path() -> Path:
    """The library's path, named by a hash of the code without comments, the options, the compiler
    and the CPU's features."""
    files = [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]
    texts = [re.sub(r"//.*", "", file.read_text()) for file in files]
    code = re.sub(r"\s+", " ", "\n".join(texts))
    key = hashlib.sha256(repr((code, OPTIONS, compiler(), torch_internals.cpu_flags())).encode())
    return _home() / f"cpu_ops-{key.hexdigest()[:32]}.so"


@cache
def _home() -> Path:
    """The user's cache directory, else one of this process. OSError: neither is writable."""
    return disk.writable_folder()


def is_complete(path: Path) -> bool:
    """Does the library exist, completely written, and writable by this user only?

    Loading a file truncated by a system crash would kill the process.
    """
    if not disk.is_trusted(path):
        return False
    try:
        with open(path, "rb") as file:
            file.seek(-len(END_MARK), os.SEEK_END)
            return file.read() == END_MARK
    except OSError:
        return False


_building = []                                     # the compiler's process, if one was started
_threads = []                                      # torch's thread count before it was started


def start_building() -> None:
    """Start the compiler in the background. It finishes even if this process ends first.

    While it runs, torch uses one thread less: the compiler would delay a thread, and the others
    would wait for it.
    """
    try:
        path = library_path()
    except OSError:                                # library() raises it again
        return
    if _building or is_complete(path) or not compiler():
        return
    partial = path.with_suffix(f".{secrets.token_hex(8)}.partial")     # pids may coincide
    script = ('to=$0 partial=$1; shift; "$@" -o "$partial" '
              '&& printf %s ' + END_MARK.decode() + ' >> "$partial" '
              '&& chmod 700 "$partial" && sync "$partial" && mv "$partial" "$to" '
              '|| { rm -f "$partial"; exit 1; }')
    command = ["nice", "sh", "-c", script, path, partial, compiler(), *options(), SOURCE]
    _threads.append(torch.get_num_threads())
    torch.set_num_threads(max(1, _threads[0] - 1))
    _building.append(subprocess.Popen(
        list(map(str, command)), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, start_new_session=True))


def is_building() -> bool:
    return bool(_building) and _building[0].poll() is None


def restore_thread_count() -> None:
    """Undo start_building()'s change of torch's thread count."""
    while _threads:
        torch.set_num_threads(_threads.pop())


@cache
def library() -> ctypes.CDLL:
    """The library, once the compiler is done. OSError, RuntimeError: not built or not loadable."""
    start_building()
    if _building:
        _, errors = _building.pop().communicate()
        restore_thread_count()
        if not is_complete(library_path()):
            raise RuntimeError((errors.strip().splitlines() or ["the compiler failed"])[-1])
        disk.remove_unused(_home(), "cpu_ops-*")
        disk.remove_unused(_home(), "cpu_ops-*.partial", days=1)
    if not is_complete(library_path()):
        raise OSError(f"{library_path()} does not exist")
    loaded = ctypes.CDLL(str(library_path()))
    loaded.run.argtypes = [ctypes.POINTER(c_void_p), c_int32, c_int32]
    loaded.run.restype = c_int32
    check_layout(loaded)
    return loaded


def is_loaded() -> bool:
    return library.cache_info().currsize > 0


@cache
def is_available() -> bool:
    """Can the library be loaded? Builds it if it does not exist; prints a note if that fails."""
    try:
        library()
        return True
    except (OSError, RuntimeError) as e:
        torch_internals.note_once(f"the CPU kernels are unavailable ({e}): this runs uncompiled")
        return False


# ---- Operations ---------------------------------------------------------------------------------

# Dtypes of the tensors that pointer fields point to; fp32 if not listed. Fields in TYPE_FIELDS
# accept fp32 and bf16 if the struct has the named field, which records the dtype.
DTYPES = dict.fromkeys(("slot", "rows", "ids", "pos", "seeds", "token", "stored"), torch.int64)
DTYPES |= dict.fromkeys(("expert_ends", "gather_rows", "sorted_row", "sorted_token"),
                        torch.int32)
DTYPES |= {"mask": torch.bool, "scales": torch.float16}        # scales: of a cache
TYPE_FIELDS = {name: f"{name}_type" for name in ("x", "out", "residual", "multiplier",
                                                     "bias")}
TYPE_FIELDS |= dict(inputs="input_type", states="states_type", scales="scales_type")


class Struct(Structure):
    """An operation's arguments: numbers, nested structs, and pointers to tensors and structs.

    Holds references to these, so they live as long as the struct. TypeError: a tensor has the wrong
    dtype, is not contiguous or not on the CPU.
    """

    any_dtype = ()                                 # pointer fields whose dtype is not checked

    def __init__(self, **values):
        super().__init__()
        self.references = {}
        for name, value in values.items():
            self.set(name, value)

    def set(self, name: str, value) -> None:
        """value: a number, a nested struct, or a tensor or Positions, stored as a pointer."""
        if isinstance(value, Tensor):
            self.references[name] = value.detach()             # survives an assignment to .data
            setattr(self, name, self._address(name, value))
        elif isinstance(value, Struct):
            self.references[name] = value
            setattr(self, name, ctypes.addressof(value) if name == "positions" else value)
        else:
            setattr(self, name, value)

    def _address(self, name: str, t: Tensor) -> int:
        type_field = TYPE_FIELDS.get(name)
        if hasattr(self, type_field or ""):
            if t.dtype not in TYPES:
                raise TypeError(f"{name} must be float32 or bfloat16, not {t.dtype}")
            setattr(self, type_field, TYPES[t.dtype])
        elif name not in self.any_dtype and t.dtype != DTYPES.get(name, torch.float32):
            raise TypeError(f"{name} must be {DTYPES.get(name, torch.float32)}, not {t.dtype}")
        if t.device.type != "cpu" or not t.is_contiguous():
            raise TypeError(f"{name} must be contiguous and on the CPU")
        return t.data_ptr()


def fields(ints: str, *rest) -> list:
    """ctypes fields: int32s, then `rest`, strings of pointers' names or (name, type) pairs."""
    all_fields = [(name, c_int32) for name in ints.split()]
    for field in rest:
        is_names = isinstance(field, str)
        all_fields += [(name, c_void_p) for name in field.split()] if is_names else [field]
    return all_fields


class Norm(Struct):
    _fields_ = fields("kind", ("eps", c_float), "weight bias")


class Cache(Struct):
    any_dtype = ("codes",)
    _fields_ = fields("type turn", "codes scales")


class Linear(Struct):
    any_dtype = ("weight", "scales")
    _fields_ = fields(
        "kind format M N K group_size activation gated x_type out_type residual_type x_bits "
        "n_expert x_stride x_expert_stride out_stride out_expert_stride multiplier_type "
        "multiplier_stride bias_type", ("factor", c_float), ("norm", Norm),
        "x weight scales residual multiplier bias out expert_ends gather_rows")


class Positions(Struct):
    _fields_ = [(name, c_int64) for name in
                ("n_key", "mask_stride_b", "mask_stride_t", "rope_stride_b", "slot_stride_b")]
    _fields_ += fields("", "cos sin mask slot rows")


class Attention(Struct):
    _fields_ = fields(
        "kind B T N K H V S n_row wide_norm out_type has_keys rope_applied",
        ("scale", c_float), ("cap", c_float), ("q_norm", Norm), ("k_norm", Norm), ("v_norm", Norm),
        ("k_cache", Cache), ("v_cache", Cache), "positions sinks gate qkv out")


class Delta(Struct):
    _fields_ = fields(
        "kind B T Nk N Dk Dv n_tap n_state n_input n_row input_type out_type", ("q_scale", c_float),
        ("norm", Norm),
        "positions taps conv_bias decay_rate decay_bias x z rates states inputs out")


class Mamba(Struct):
    _fields_ = fields(
        "kind B T Nk N Dk Dv n_tap n_state n_input n_row input_type out_type norm_first",
        ("min_step", c_float), ("max_step", c_float), ("norm", Norm),
        "positions taps conv_bias decay_rate decay_bias skip x z steps states inputs out")


class ShortConv(Struct):
    _fields_ = fields("kind B T width n_tap n_input n_row input_type out_type",
                      "positions taps bias x inputs out")


class Latent(Struct):
    _fields_ = fields("kind B T N nope rope rank S n_row q_stride k_stride",
                      ("norm", Norm), "positions", ("cache", Cache), "q k queries")


class Route(Struct):
    _fields_ = fields(
        "kind M E A n_group topk_group group_top use_sigmoid norm_topk_prob",
        ("routed_scale", c_float),
        "logits bias expert_scale prob sorted_row sorted_token expert_ends")


class Combine(Struct):
    _fields_ = fields(
        "kind M D A out_type residual_type", ("factor", c_float), ("norm", Norm),
        ("shared_norm", Norm), ("post_norm", Norm), "y prob sorted_row shared gate residual out")


class AddNorm(Struct):
    _fields_ = fields("kind M D x_type out_type residual_type", ("factor", c_float),
                      ("norm", Norm), "scale x residual out")


class Embed(Struct):
    any_dtype = ("weight",)
    _fields_ = fields("kind format n K n_vocab out_type scales_type", ("factor", c_float),
                      "weight scales ids out")


class RopeTable(Struct):
    _fields_ = fields("kind n half", "pos freq amplitude cos sin")


class Mask(Struct):
    _fields_ = fields("kind B T n_key window", "pos mask")


class RingMask(Struct):
    _fields_ = fields("kind B T n_slot n_key window pos_stride n_row",
                      "pos rows stored slot mask")


class Draw(Struct):
    _fields_ = fields("kind B V", "logits temperature top_k top_p min_p seeds token not_finite")


class Record(Struct):
    _fields_ = fields("kind B T D S n_row x_type states_type", "positions x states")


STRUCTS = (Norm, Cache, Linear, Positions, Attention, Delta, Mamba, ShortConv, Latent, Route,
           Combine, AddNorm, Embed, RopeTable, Mask, RingMask, Draw, Record)


class Field(Structure):
    """As in struct_layout.h."""

    _fields_ = [("struct_name", c_char_p), ("name", c_char_p), ("offset", c_int64),
                ("size", c_int64)]


def check_layout(loaded: ctypes.CDLL) -> None:
    """RuntimeError: a struct has another layout in the library than here."""
    loaded.fields.restype = ctypes.POINTER(Field)
    theirs = {}
    for field in itertools.takewhile(lambda field: field.struct_name, loaded.fields()):
        theirs[field.struct_name.decode(), field.name.decode()] = field.offset, field.size
    ours = {(struct.__name__, ""): (0, ctypes.sizeof(struct)) for struct in STRUCTS}
    for struct in STRUCTS:
        for name, _ in struct._fields_:
            field = getattr(struct, name)
            ours[struct.__name__, name] = field.offset, field.size
    for struct_name, name in sorted(ours.keys() | theirs.keys()):
        if ours.get((struct_name, name)) != theirs.get((struct_name, name)):
            where = f"{struct_name}.{name}" if name else struct_name
            raise RuntimeError(f"{where} has another layout in C++ than in kernels/cpu/native.py")


def cache_of(codes: Tensor, scales: Tensor | None = None, turn: int = 1) -> Cache:
    """Keys or values [..., H] in fp32 or bf16, or codes with scales, as in quantized_cache.py.

    TypeError: another dtype, or scales that do not match.
    """
    if codes.dtype not in CACHE_TYPES:
        raise TypeError(f"a cache must be of {', '.join(map(str, CACHE_TYPES))}, not {codes.dtype}")
    cache = Cache(type=CACHE_TYPES[codes.dtype], turn=turn, codes=codes, scales=scales)
    head_dim = codes.shape[-1] * (2 if cache.type == INT4 else 1)
    n_scale = -(-head_dim // CACHE_GROUP)
    expected = None if codes.dtype in TYPES else (*codes.shape[:-1], n_scale)
    if (scales if scales is None else tuple(scales.shape)) != expected:
        raise TypeError(f"a cache {list(codes.shape)} of {codes.dtype} must have scales {expected}")
    return cache


def pointers(addresses: list[int]) -> ctypes.Array:
    return (c_void_p * len(addresses))(*addresses)


def run(addresses: list[int] | ctypes.Array, n_thread: int | None = None) -> None:
    """Run the operations whose structs are at these addresses, or pointers(), in order. n_thread:
    torch's number of threads unless given.

    IndexError: a token id, a position or a cache row is out of range, or a layer with a recurrent
    state would skip a position; nothing has run. MemoryError: a scratch buffer cannot be allocated.
    """
    array = addresses if isinstance(addresses, ctypes.Array) else pointers(addresses)
    result = library().run(array, len(array), n_thread or torch.get_num_threads())
    if result == OUT_OF_RANGE:
        raise IndexError("a token id beyond the vocabulary, a position or a row beyond the cache, "
                         "or a gap in the positions of a layer with a recurrent state")
    if result:
        raise MemoryError("a CPU kernel could not allocate its scratch buffer")


# ---- Weights ------------------------------------------------------------------------------------

@cache
def panel_width() -> int:
    """Outputs of a packed weight panel: NR of simd.h."""
    return library().panel_width()


def n_lane() -> int:
    """32-bit lanes of a vector: LANES of simd.h."""
    return panel_width() // 2


def pack_weight(weight: Tensor, scales: Tensor | None = None, zeros: Tensor | None = None,
                fp4_group: int = 0) -> tuple:
    """A weight [out, in] as on disk -> (format, weight, scales, group_size) in run.cpp's layout.

    fp4_group: the group size of layers/fp4.py's weights; 0: they are not in fp4.
    """
    if fp4_group:
        return pack_fp4(weight, scales, fp4_group)
    formats = {torch.float32: FP32, torch.bfloat16: BF16, torch.int8: INT8, torch.uint8: INT4}
    weight_format = formats[weight.dtype]
    n_out, n_column = weight.shape                 # int4 has two inputs in a column
    multiple = {FP32: 32, BF16: 32, INT8: 32, INT4: 16}[weight_format]
    missing_out = -n_out % panel_width()
    if missing_out or n_column % multiple:
        weight = F.pad(weight, (0, -n_column % multiple, 0, missing_out))
    words = {FP32: torch.float32, BF16: torch.int32, INT8: torch.int16, INT4: torch.int32}
    packed = pack_panels(weight.contiguous().view(words[weight_format]))
    group_size = 0
    if weight_format == INT8:
        scales = F.pad(scales.float(), (0, missing_out))
    elif scales is not None:
        group_size = 2 * n_column // scales.shape[1]
        pairs = torch.stack((scales.bfloat16(), zeros.bfloat16()), -1).view(torch.int32)[..., 0]
        scales = pack_panels(F.pad(pairs, (0, 0, 0, missing_out)))
    return weight_format, packed, scales, group_size


def pack_fp4(weight: Tensor, scales: Tensor, group_size: int) -> tuple:
    """Blocks [out, in/G * (G/2 + 1)] -> bytes [out/NR, in/2 + in/G, NR]: codes, then scales."""
    blocks = weight.unflatten(1, (-1, group_size // 2 + 1))
    missing_out = -len(weight) % panel_width()
    missing_groups = -blocks.shape[1] % (32 // group_size)
    blocks = F.pad(blocks, (0, 0, 0, missing_groups, 0, missing_out))
    codes, scale_bytes = blocks[..., :-1], blocks[..., -1]
    if group_size < 32:                            # e4m3: the sign goes to the codes
        codes = codes ^ (scale_bytes >> 7)[..., None] * 0x88
        scale_bytes = scale_bytes & 127
    words = codes.flatten(1).contiguous().view(torch.int32)
    codes = pack_panels(words).view(torch.uint8).reshape(-1, 4 * words.shape[1], panel_width())
    scale_bytes = scale_bytes.unflatten(0, (-1, panel_width())).transpose(1, 2)
    row_scales = F.pad(scales.float(), (0, missing_out))
    return FP4, torch.cat((codes, scale_bytes), 1), row_scales, group_size


def pack_panels(words: Tensor) -> Tensor:
    """[out, n], contiguous, of 2 or 4 bytes each -> [out / NR, n, NR]."""
    n_panel, n = words.shape[0] // panel_width(), words.shape[1]
    panels = WEIGHTS.empty(words.nbytes).view(words.dtype).view(n_panel, n, panel_width())
    library().pack_panels(c_void_p(words.data_ptr()), c_long(n_panel), c_long(n), words.itemsize,
                          c_void_p(panels.data_ptr()))
    return panels


def product(x: Tensor, weight_format: int, weight: Tensor, scales: Tensor | None, group_size: int,
            shape: tuple[int, int], bias: Tensor | None = None) -> Tensor:
    """x [M, in] in fp32 or bf16, a weight from pack_weight() -> [M, out] in x's dtype.

    fp32 activations are not rounded to fewer bits. bias: fp32 or bf16.
    """
    x = x.contiguous()
    out = x.new_empty(x.shape[0], shape[0])
    op = linear(weight_format, weight, scales, group_size, shape, bias, x=x, out=out, M=x.shape[0],
                x_bits=x_bits(x.dtype))
    run([ctypes.addressof(op)])
    return out


_min_activation_bits = [8]


def set_activation_bits(bits: int) -> int:
    """Set the fewest bits, 8 or 16, to which activations may be quantized in large batches, with a
    scale per 32 inputs, for int8 and int4 weights; returns the previous value.

    8 takes effect on CPUs with integer dot products. fp32 models are not affected.
    """
    before, _min_activation_bits[0] = _min_activation_bits[0], bits
    return before


def activation_bits(weight_format: int) -> int:
    """The bits in use for large batches, for INT8 or INT4 weights (AVX2 suffices for INT4)."""
    return _min_activation_bits[0] if library().has_int8_dot(weight_format) else 16


def has_bf16() -> bool:
    """Does the CPU have bf16 dot products? Without, large batches with bf16 weights use int14."""
    return bool(library().has_bf16())


def has_amx() -> bool:
    """Does the CPU have AMX? Then large batches use bf16 for bf16, int8 and int4 weights."""
    return bool(library().has_amx())


def x_bits(dtype: torch.dtype) -> int:
    """The fewest bits to which a model of this dtype may round activations."""
    return 32 if dtype == torch.float32 else _min_activation_bits[0]


def linear(weight_format: int, weight: Tensor, scales: Tensor | None, group_size: int,
           shape: tuple[int, int], bias: Tensor | None = None, **fields) -> Linear:
    """fields: the struct's other fields."""
    return Linear(kind=LINEAR, format=weight_format, N=shape[0], K=shape[1], group_size=group_size,
                  factor=1.0, weight=weight, scales=scales, bias=bias, **fields)
