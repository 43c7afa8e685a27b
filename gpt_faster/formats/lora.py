"""LoRA adapters in PEFT's format, merged into the weights as they are read.

Works on the tensors of a Hugging Face directory under their original names. Folding, quantization
and sharding then apply to the merged weights.

    tensors = merge(tensors, resolve("org/adapter"))
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
    name_unknown,
    read_json,
    read_safetensors,
    reading,
    some,
    unwrapped,
)
from gpt_faster.formats.file_kinds import kind_of, refuse_others
from gpt_faster.formats.known_keys import ADAPTER
from gpt_faster.formats.lazy import transpose
from gpt_faster.formats.schema import is_number
from gpt_faster.formats.torch_file import read_torch, state_dict
from model import ModelConfig

LORA_PARAMETER = re.compile(                       # .default: an adapter's name in a running model
    r"(.+)\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.default)?(\.weight)?")


def merge(tensors: list[LazyTensor], directory: Path,
           tied_head: LazyTensor | None = None) -> list[LazyTensor]:
    """Merge an adapter: W + (alpha / r) B A, lazily.

    tied_head: the output layer of a model that ties it to the embedding in `tensors`. An adapter
    for one of the two changes only that one, as in PEFT's unmerged model (merge_and_unload() adds
    it to both: peft#2777), unless 'ensure_weight_tying' is set and the embedding is called
    embed_tokens: PEFT ignores the key for any other name.
    FileNotFoundError or ValueError: a missing file, an unsupported or mismatched adapter.
    """
    directory = _directory(directory)
    config = _config(directory)
    changes, replaced = {}, {}                     # by module; by parameter name
    for t in unwrapped(_weights(directory)):
        if part := LORA_PARAMETER.fullmatch(t.name):
            changes.setdefault(part[1], {})[part[2]] = t
        elif ".original_module." not in t.name:    # the base weights of modules_to_save
            name = re.sub(r"\.(base_layer|modules_to_save(\.default)?)(?=\.)", "", t.name)
            replaced[bare(name)] = t
    scales = {bare(name): _scale(config, name, parts) for name, parts in changes.items()}
    changes = {bare(name): parts for name, parts in changes.items()}
    if tied_head is not None:
        name = bare(tied_head.name)
        has_own = name in replaced or name.removesuffix(".weight") in changes
        adapts_embed = "embed_tokens" in changes or "embed_tokens.weight" in replaced
        if has_own or not (config.get("ensure_weight_tying") and adapts_embed):
            tensors = [*tensors, tied_head]
    try:
        new = []
        for t in tensors:
            module, _, kind = bare(t.name).rpartition(".")
            if bare(t.name) in replaced:
                t = _replace(t, replaced.pop(bare(t.name)))
            if kind == "weight" and module in changes:
                t = _add_lora(t, changes.pop(module), scales[module], config)
            new.append(t)
        if unused := [*changes, *replaced]:
            names = f"modules {some(unused)} are" if len(unused) > 1 else f"module {unused[0]} is"
            raise ValueError(f"adapter {names} not in the model: load the adapter with the base "
                             "model it was trained on, as a Hugging Face directory")
    except ValueError as e:
        raise ValueError(f"{directory}: {e}") from None
    return new


def split_tied_head(tensors: list[LazyTensor], names: dict,
          cfg: ModelConfig) -> tuple[list[LazyTensor], LazyTensor | None]:
    """Split off a tied output layer -> the other tensors, and the output layer under its name.

    The second is None if it is not tied. Tensor names are as in the file.
    """
    embed, head = (find_tensor(tensors, names, ours) for ours in ("embed.weight", "head.weight"))
    if not cfg.tied or embed is None:
        return tensors, None
    if head is not None:
        is_tied = equal(embed, head)
        return ([t for t in tensors if t is not head], head) if is_tied else (tensors, None)
    # the last match is the family-specific name
    theirs = [name for name, ours in names.items() if ours == "head"]
    name = f"{theirs[-1]}.weight" if theirs else "head.weight"
    return tensors, embed.derived(embed.read_rows, name=name, packed=embed.packed)


def find_tensor(tensors: list[LazyTensor], names: dict, ours: str) -> LazyTensor | None:
    """The file's tensor whose name maps to `ours`."""
    for t in tensors:
        entry = look_up(t.name, names)
        if entry and entry[0] == "" and entry[2].into == (ours,):
            return t
    return None


def _directory(path: Path) -> Path:
    """An adapter's directory, given that or one of its files. ValueError for another file."""
    if not path.is_file():
        return path
    refuse_others(path)
    if kind_of(path) == "gguf":
        raise ValueError(f"{path}: a GGUF, which is no adapter that is read: use PEFT's directory "
                         "of the adapter (adapter_config.json, adapter_model.safetensors)")
    if not path.name.startswith("adapter_"):
        raise ValueError(f"{path}: not an adapter's file: give PEFT's directory of the adapter")
    return path.parent


def _config(directory: Path) -> dict:
    path = directory / "adapter_config.json"
    if not path.exists() and (directory / "config.json").exists():
        raise ValueError(f"{directory}: a whole model, not an adapter: give it as "
                         "--checkpoint_path, without --adapter")
    if not path.exists():
        raise FileNotFoundError(f"{path}: missing (is this a LoRA adapter's directory?)")
    config = read_json(path)
    kind = config.get("peft_type")
    if kind is None and "lora_parameters" in config:
        raise ValueError(f"{path}: an MLX adapter (Apple's mlx-lm): `mlx_lm.fuse` makes a model of "
                         "it and its base")
    if kind != "LORA":
        raise ValueError(f"{path}: 'peft_type' is {brief(kind)}, only LORA is supported")
    with reading(path):
        ADAPTER.check(config)
    name_unknown(path, ADAPTER.unknown(config))
    alphas = config.get("alpha_pattern") or {}
    try:
        for pattern in alphas:
            re.compile(pattern)
        values = [config.get("lora_alpha"), *alphas.values()]
    except (AttributeError, TypeError, re.error):
        raise ValueError(f"{path}: 'alpha_pattern' is {brief(alphas)}, expected a map from module "
                         "patterns to numbers") from None
    if bad := [value for value in values if not is_number(value)]:
        raise ValueError(f"{path}: 'lora_alpha' is {brief(bad[0])}, expected a number")
    return config


def _weights(directory: Path) -> list[LazyTensor]:
    if (directory / "adapter_model.safetensors").exists():
        refuse_others(directory / "adapter_model.safetensors")
        return read_safetensors(directory / "adapter_model.safetensors")
    if (directory / "adapter_model.bin").exists():
        return lazy_tensors(state_dict(read_torch(directory / "adapter_model.bin")))
    found = some(sorted(p.name for p in directory.iterdir()))
    raise FileNotFoundError(f"{directory}: neither adapter_model.safetensors nor "
                            f"adapter_model.bin, found {found}")


def _scale(config: dict, name: str, parts: dict) -> float:
    """alpha / r, or alpha / sqrt(r) for rsLoRA. alpha may be set per module; r is lora_A's."""
    inner = parts.get("A") or parts.get("embedding_A")
    rank = inner.shape[0] if inner else 1
    alphas = [alpha for pattern, alpha in (config.get("alpha_pattern") or {}).items()
              if re.match(rf"(.*\.)?({pattern})$", name)]
    alpha = alphas[0] if alphas else config["lora_alpha"]
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _add_lora(t: LazyTensor, parts: dict, scale: float, config: dict) -> LazyTensor:
    embedding = "embedding_A" in parts
    names = ("embedding_B", "embedding_A") if embedding else ("B", "A")
    if missing := [f"lora_{name}" for name in names if name not in parts]:
        raise ValueError(f"{' and '.join(missing)} of {t.name} is missing")
    left, right = (parts[name] for name in names)  # [out, r], [r, in]
    if len(left.shape) != 2 or len(right.shape) != 2 or left.shape[1] != right.shape[0]:
        raise ValueError(f"{t.name}: shapes of lora_A {list(right.shape)} and lora_B "
                         f"{list(left.shape)} do not match")
    magnitude = parts.get("magnitude_vector")      # DoRA: norm of each row of the weight
    if embedding or config.get("fan_in_fan_out"):
        left, right = transpose(right), transpose(left)
        if magnitude:
            raise ValueError(f"{t.name}: DoRA is not supported for embeddings and Conv1D")
    if not t.dtype.is_floating_point:
        raise ValueError(f"{t.name} is quantized: apply the adapter to the original model")
    if t.shape != (left.shape[0], right.shape[1]):
        raise ValueError(f"{t.name} has shape {list(t.shape)}, but the adapter is for "
                         f"{[left.shape[0], right.shape[1]]}")

    def read_rows(a, b):
        rows = t.read_rows(a, b).double()          # of a float64 file: a view of the file's bytes
        rows = rows + scale * left.read_rows(a, b).double() @ right.whole().double()
        if magnitude:
            norm = rows.norm(dim=1, keepdim=True)
            rows = rows * (magnitude.read_rows(a, b).double()[:, None] / norm)
        return rows.float()
    new = t.derived(read_rows, dtype=t.dtype)
    new.made_of = (t, left)
    return new


def _replace(t: LazyTensor, by: LazyTensor) -> LazyTensor:
    """Replace a whole parameter: modules_to_save, or a trained bias."""
    if t.shape != by.shape:
        raise ValueError(f"{t.name} has shape {list(t.shape)}, but the adapter's has "
                         f"{list(by.shape)}")
    return by.derived(by.read_rows, name=t.name)
