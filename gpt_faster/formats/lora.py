"""LoRA adapters as PEFT writes them, added to a model's weights as these are read.

The weights are a Hugging Face directory's, by their names there; everything after that (folding,
rounding, a rank's part) meets the sum.

    tensors = merged(tensors, resolve("org/adapter"))
"""

import math
import re
from pathlib import Path

from checkpoint import (
    LazyTensor,
    bare,
    brief,
    equal,
    lazy_tensors,
    look_up,
    read_json,
    read_safetensors,
    some,
)
from gpt_faster.formats.lazy import transpose
from gpt_faster.formats.schema import is_number
from gpt_faster.formats.torch_file import read_torch
from model import ModelConfig

PART = re.compile(r"(.+)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.weight)?")
VARIANTS = ("lora_bias", "use_qalora", "use_bdlora", "arrow_config", "layer_replication",
            "alora_invocation_tokens", "trainable_token_indices", "target_parameters")


def merged(tensors: list[LazyTensor], directory: Path,
           tied_head: LazyTensor | None = None) -> list[LazyTensor]:
    """The tensors with an adapter's changes: W + (alpha / r) B A, nothing read yet.

    tied_head: the output layer of a model whose `tensors` have it as the embedding only. What the
    adapter changes of one of both it changes of this one alone, as PEFT's running model does
    (merge_and_unload() adds a LoRA of either to both: peft#2777), unless 'ensure_weight_tying'.
    FileNotFoundError or ValueError say in one line what is missing, or what kind of adapter it is.
    """
    config = _config(directory)
    changes, replaced = {}, {}                     # by module; by parameter, whole
    for t in _weights(directory):
        name = t.name.removeprefix("base_model.model.")
        if part := PART.fullmatch(name):
            changes.setdefault(part[1], {})[part[2]] = t
        elif ".original_module." not in name:      # of modules_to_save: as the base has it
            replaced[bare(re.sub(r"\.(base_layer|modules_to_save)(?=\.)", "", name))] = t
    scales = {bare(name): _scale(config, name, parts) for name, parts in changes.items()}
    changes = {bare(name): parts for name, parts in changes.items()}
    if tied_head is not None:
        name = bare(tied_head.name)
        has_own = name in replaced or name.removesuffix(".weight") in changes
        if has_own or not config.get("ensure_weight_tying"):
            tensors = [*tensors, tied_head]
    try:
        new = []
        for t in tensors:
            module, _, kind = bare(t.name).rpartition(".")
            if bare(t.name) in replaced:
                t = _replaced(t, replaced.pop(bare(t.name)))
            if kind == "weight" and module in changes:
                t = _changed(t, changes.pop(module), scales[module], config)
            new.append(t)
        if left := [*changes, *replaced]:
            raise ValueError(f"{len(left)} modules that are not in the model's file: {some(left)} "
                             "(a Hugging Face directory is needed, of the model it was made for)")
    except ValueError as e:
        raise ValueError(f"{directory}: {e}") from None
    return new


def apart(tensors: list[LazyTensor], names: dict,
          cfg: ModelConfig) -> tuple[list[LazyTensor], LazyTensor | None]:
    """Tensors by the names of the file -> those without a tied head, and that head by its name.

    None where the head is a matrix of its own.
    """
    embed, head = (find(tensors, names, ours) for ours in ("embed.weight", "head.weight"))
    if not cfg.tied or embed is None:
        return tensors, None
    if head is not None:
        is_tied = equal(embed, head)
        return ([t for t in tensors if t is not head], head) if is_tied else (tensors, None)
    theirs = [name for name, ours in names.items() if ours == "head"]  # the family's own is last
    name = f"{theirs[-1]}.weight" if theirs else "head.weight"
    return tensors, embed.derived(embed.read_rows, name=name, packed=embed.packed)


def find(tensors: list[LazyTensor], names: dict, ours: str) -> LazyTensor | None:
    """The tensor of the file that is called `ours` here."""
    for t in tensors:
        entry = look_up(t.name, names)
        if entry and entry[0] == "" and entry[2].into == (ours,):
            return t
    return None


def _config(directory: Path) -> dict:
    path = directory / "adapter_config.json"
    if not path.exists():
        raise FileNotFoundError(f"{path}: missing, an adapter's directory has one")
    config = read_json(path)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{path}: 'peft_type' is {brief(kind)}, only LORA is supported")
    for key in VARIANTS:
        if config.get(key):
            raise ValueError(f"{path}: '{key}' is not supported")
    alphas = config.get("alpha_pattern") or {}
    try:
        for pattern in alphas:
            re.compile(pattern)
        values = [config.get("lora_alpha"), *alphas.values()]
    except (AttributeError, TypeError, re.error):
        raise ValueError(f"{path}: 'alpha_pattern' is {brief(alphas)}, expected patterns") from None
    if bad := [value for value in values if not is_number(value)]:
        raise ValueError(f"{path}: 'lora_alpha' is {brief(bad[0])}, expected a number")
    return config


def _weights(directory: Path) -> list[LazyTensor]:
    if (directory / "adapter_model.safetensors").exists():
        return read_safetensors(directory / "adapter_model.safetensors")
    if (directory / "adapter_model.bin").exists():
        return lazy_tensors(read_torch(directory / "adapter_model.bin"))
    raise FileNotFoundError(f"{directory}: neither adapter_model.safetensors nor adapter_model.bin")


def _scale(config: dict, name: str, parts: dict) -> float:
    """alpha / r, or alpha / sqrt(r); alpha may be a module's own, r is its matrices'."""
    inner = parts.get("A") or parts.get("embedding_A")
    rank = inner.shape[0] if inner else 1
    own = [alpha for pattern, alpha in (config.get("alpha_pattern") or {}).items()
           if re.match(rf"(.*\.)?({pattern})$", name)]
    alpha = own[0] if own else config["lora_alpha"]
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _changed(t: LazyTensor, parts: dict, scale: float, config: dict) -> LazyTensor:
    embedding = "embedding_A" in parts
    names = ("embedding_B", "embedding_A") if embedding else ("B", "A")
    if missing := [f"lora_{name}" for name in names if name not in parts]:
        raise ValueError(f"{t.name} has no {' and '.join(missing)}")
    left, right = (parts[name] for name in names)  # [out, r], [r, in]
    if len(left.shape) != 2 or len(right.shape) != 2 or left.shape[1] != right.shape[0]:
        raise ValueError(f"{t.name}: lora_A and lora_B are {list(right.shape)} and "
                         f"{list(left.shape)}")
    magnitude = parts.get("magnitude_vector")      # DoRA: of each output's weights
    if embedding or config.get("fan_in_fan_out"):
        left, right = transpose(right), transpose(left)
        if magnitude:
            raise ValueError(f"{t.name}: DoRA of an embedding or a Conv1D is not supported")
    if not t.dtype.is_floating_point:
        raise ValueError(f"{t.name} is quantized: an adapter is added to the original model")
    if t.shape != (left.shape[0], right.shape[1]):
        raise ValueError(f"{t.name} is {list(t.shape)}, the adapter's matrices give "
                         f"{[left.shape[0], right.shape[1]]}")

    def read_rows(a, b):
        rows = t.read_rows(a, b).double()
        rows += scale * left.read_rows(a, b).double() @ right.whole().double()
        if magnitude:
            length = rows.norm(dim=1, keepdim=True)
            rows *= magnitude.read_rows(a, b).double()[:, None] / length
        return rows.float()
    new = t.derived(read_rows, dtype=t.dtype)
    new.made_of = (t, left)
    return new


def _replaced(t: LazyTensor, by: LazyTensor) -> LazyTensor:
    """modules_to_save, and biases that were trained."""
    if t.shape != by.shape:
        raise ValueError(f"{t.name} is {list(t.shape)}, the adapter's {list(by.shape)}")
    return by.derived(by.read_rows, name=t.name)
