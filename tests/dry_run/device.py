"""What else a process needs to take the hollow runtime for a GPU: Triton's driver, and right fills.

Memory is the host's and kernels do nothing, so every number is garbage but for what fills, copies
and the host itself write. Import it before anything is compiled, in an environment of build.py's.

    device.install(); before = device.counts(); …; device.counts()["launches"] - before["launches"]
"""

import ctypes
import types
import warnings
from dataclasses import dataclass, field

import torch

COUNTED = ("launches", "graph_launches", "captures", "waits", "reads")
_graphs = []                                       # kept: the numbers go with the last graph
LAUNCHES = []                                      # of Triton's kernels, in order


@dataclass(frozen=True)
class Launch:
    """kernel: a triton.JITFunction of ours, or Inductor's CachingAutotuner, with its arguments."""

    name: str
    kernel: object = None
    arguments: tuple = ()
    options: dict = field(default_factory=dict)
    grid: tuple = ()


def counts() -> dict[str, int]:
    """So far: kernels launched, graphs launched, graphs captured, waits, copies to the host."""
    out = (ctypes.c_long * len(COUNTED))()
    ctypes.CDLL(None).hollow_counts(out)
    return dict(zip(COUNTED, out)) | {"launches": out[0] + len(LAUNCHES)}


def host(t: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same memory."""
    storage = t.untyped_storage()
    own = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    return torch.empty(0, dtype=t.dtype).set_(own, t.storage_offset(), t.shape, t.stride())


def install(compile_kernels: bool = False, keep_arguments: bool = False) -> None:
    """compile_kernels: have Triton make machine code of each kernel, which takes most of the time.
    keep_arguments: LAUNCHES has them too, for compile_launch()."""
    warnings.filterwarnings("ignore", message=".*overrid.*")
    _fill_for_real()
    _replace_triton_driver()
    if not compile_kernels:
        _launch_nothing(keep_arguments)
    _settle_cuda_graphs()


_library = torch.library.Library("aten", "IMPL")


def _fill_for_real() -> None:
    """Inductor folds constants on the device, and code reads what it has just made."""
    def fill(t, value):
        host(t).fill_(host(value) if isinstance(value, torch.Tensor) and value.is_cuda else value)
        return t

    def zero(t):
        host(t).zero_()
        return t
    for name, function in (("fill_.Scalar", fill), ("fill_.Tensor", fill), ("zero_", zero)):
        _library.impl(name, function, "CUDA")


def _replace_triton_driver() -> None:
    import torch._inductor.config
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    properties = torch.cuda.get_device_properties(0)
    target = GPUTarget("cuda", properties.major * 10 + properties.minor, 32)

    class Launcher:
        def __init__(self, source, metadata):
            pass

        def __call__(self, *args, **kwargs):
            LAUNCHES.append(Launch("?"))

    class Driver:
        launcher_cls = Launcher
        utils = types.SimpleNamespace(
            get_device_properties=lambda device: dict(
                max_shared_mem=properties.shared_memory_per_block_optin, max_num_regs=65536,
                multiprocessor_count=properties.multi_processor_count, warpSize=32,
                sm_clock_rate=1_700_000, mem_clock_rate=1_500_000, mem_bus_width=5120),
            load_binary=lambda name, kernel, shared, device: (1, 1, 32, 0, 1024),
            unload_module=lambda module: None)

        def get_current_target(self):
            return target

        def get_active_torch_device(self):
            return torch.device("cuda", 0)

        def get_current_device(self):
            return 0

        def set_current_device(self, device):
            pass

        def get_current_stream(self, device=None):
            return 0

        def get_device_interface(self):
            return torch.cuda

        def map_python_to_cpp_type(self, kind):
            return kind

        def get_benchmarker(self):
            raise RuntimeError("a hollow GPU has no time to measure")

        @staticmethod
        def is_active():
            return True
    driver.set_active(Driver())
    triton_helpers.set_driver_to_gpu = lambda: None
    torch._inductor.config.use_static_triton_launcher = False


def _launch_nothing(keep_arguments: bool) -> None:
    """Kernels are counted, and not even compiled."""
    import triton
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def launch_inductors(self, *args, **kwargs):
        kept = (self, args) if keep_arguments else ()
        LAUNCHES.append(Launch(self.inductor_meta.get("kernel_name", "?"), *kept))

    def launch_ours(self, *args, grid, warmup, **kwargs):
        kept = (self, args, kwargs, grid) if keep_arguments else ()        # tensors live as long
        LAUNCHES.append(Launch(self.__name__, *kept))
    CachingAutotuner.precompile = lambda self, *args, **kwargs: None
    CachingAutotuner.run = launch_inductors
    global _compile_ours
    _compile_ours = triton.JITFunction.run
    triton.JITFunction.run = launch_ours


def compile_launch(launch: Launch):
    """What Triton makes of a kernel of ours for these arguments."""
    return _compile_ours(launch.kernel, *launch.arguments, grid=launch.grid, warmup=True,
                         **launch.options)


def _settle_cuda_graphs() -> None:
    """The generator's two numbers for graphs are made at the first capture, by which a pool of
    Inductor's would seem to hold what it should not."""
    import torch._inductor.cudagraph_trees
    torch._inductor.cudagraph_trees.check_memory_pool = lambda *args: None
    x = torch.zeros(1, device="cuda")
    _graphs.append(torch.cuda.CUDAGraph())
    with torch.cuda.graph(_graphs[0]):
        x + 1
