"""placeholder until merge"""
import quantize
from kernels import inductor as compiled


def compile_model(model):
    functions = compiled.Functions(f"{model.cfg}")
    quantize.for_compiler(model)
    for layer in model.layers:
        layer.forward = compiled.Compiled(layer.forward, functions, cache="attn.cache")
    model.enter = for_one(model.enter, functions, "rings", "layers.")
    model.leave = for_one(model.leave, functions, "", ("layers.", "rings."))


def for_one(method, *more):
    fast = compiled.Compiled(method, *more)
    return lambda x, *rest: (fast if x.shape[1] == 1 else method)(x, *rest)


def prepare_for_cuda(model):
    pass
