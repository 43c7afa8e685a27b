"""What a file or directory is, by its content: which reader reads it, or whose it is.

A name decides only where the content does not (an ollama blob has no ending). Knows no tensors and
no configs; a message says what was found and the next step.

    kind_of(path)                                  # "gguf", "safetensors", "torch", or ""
    refuse_others(path)                            # ValueError: "…: a Git LFS pointer, not …"
"""

import re
import zipfile
from contextlib import suppress
from pathlib import Path

from checkpoint import beginning, failed_download, read_json, some

EXPORT = "read it with the program it was made for, or use the original model's .safetensors"
NOT_TEXT = "it does not generate text: use a language model"
ARCHIVE = "unpack it, and give the model's directory or file"
ERROR_PAGE = "probably a server's error message: download the file again"

# (offset, bytes, what it is and the next step)
SIGNATURES = (
    (0, b"\x89HDF\r\n\x1a\n", f"an HDF5 file (Keras, TensorFlow's tf_model.h5): {EXPORT}"),
    (4, b"TFL3", f"a TensorFlow Lite model: {EXPORT}"),
    (0, b"\x93NUMPY", f"a NumPy array: {EXPORT}"),
    (0, b"lmgg", "a GGML file, older than GGUF: use a GGUF of this model"),
    (0, b"fmgg", "a GGML file (ggmf), older than GGUF: use a GGUF of this model"),
    (0, b"tjgg", "a GGML file (ggjt), older than GGUF: use a GGUF of this model"),
    (0, b"algg", "a GGML LoRA adapter: use PEFT's directory, with --adapter"),
    (0, b"MZqFpD", "a llamafile, a program that has a GGUF inside: `unzip` extracts it"),
    (0, b"\x1f\x8b", f"a gzip archive: {ARCHIVE}"),
    (0, b"BZh", f"a bzip2 archive: {ARCHIVE}"),
    (0, b"\xfd7zXZ\0", f"an xz archive: {ARCHIVE}"),
    (0, b"\x28\xb5\x2f\xfd", f"a Zstandard archive: {ARCHIVE}"),
    (0, b"7z\xbc\xaf", f"a 7z archive: {ARCHIVE}"),
    (0, b"Rar!", f"a RAR archive: {ARCHIVE}"),
    (257, b"ustar", f"a tar archive: {ARCHIVE}"),
    (0, b"%PDF", "a PDF document, not a model"),
    (0, b"\x89PNG", "an image, not a model"),
    (0, b"\xff\xd8\xff", "an image, not a model"),
)
# Formats without a signature (protobuf and others), by the file's ending
ENDINGS = {
    ".onnx": "an ONNX model", ".pb": "a TensorFlow graph", ".mlmodel": "a Core ML model",
    ".mlpackage": "a Core ML model", ".mlmodelc": "a compiled Core ML model",
    ".msgpack": "Flax weights", ".tflite": "a TensorFlow Lite model", ".h5": "Keras weights",
    ".keras": "a Keras model", ".npz": "NumPy arrays (MLX, JAX)", ".engine": "a TensorRT engine",
    ".plan": "a TensorRT engine", ".ot": "rust-bert weights", ".nemo": "a NeMo archive",
    ".pte": "an ExecuTorch program", ".mar": "a TorchServe archive",
    ".task": "a MediaPipe model", ".litertlm": "a LiteRT model", ".rten": "an RTen model",
}
OLLAMA_MODEL = "application/vnd.ollama.image.model"
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pth", ".pt")
PARTIAL = (".part", ".partial", ".crdownload", ".incomplete", ".aria2", ".download", ".!qb")
# Directories without weights that we read: the first pattern that is there names the program
DIRECTORIES = (
    ("model_index.json", f"a diffusers pipeline: {NOT_TEXT}"),
    ("*.distcp", "a torch.distributed checkpoint: `python -m torch.distributed.checkpoint."
                 "format_utils dcp_to_torch DIRECTORY model.pth` converts it"),
    ("zero_to_fp32.py", "a DeepSpeed ZeRO checkpoint: `python zero_to_fp32.py . .` in it converts "
                        "it"),
    ("consolidated*.safetensors", "a model in Mistral's own format: use the model*.safetensors "
                                  "of its repository, which are in transformers'"),
    ("weights*.npz", f"an MLX model: {EXPORT}"),
    ("openvino_model.xml", f"an OpenVINO model: {EXPORT}"),
    ("saved_model.pb", f"a TensorFlow SavedModel: {EXPORT}"),
    ("tf_model*.h5", f"TensorFlow weights: {EXPORT}"),
    ("flax_model*.msgpack", f"Flax weights: {EXPORT}"),
    ("*.onnx", f"an ONNX model: {EXPORT}"), ("onnx/*.onnx", f"an ONNX model: {EXPORT}"),
    ("*.tflite", f"a TensorFlow Lite model: {EXPORT}"),
    ("*.mlpackage", f"a Core ML model: {EXPORT}"), ("*.mlmodel*", f"a Core ML model: {EXPORT}"),
    ("*.engine", f"a TensorRT engine: {EXPORT}"), ("*.h5", f"Keras weights: {EXPORT}"),
    ("*.keras", f"a Keras model: {EXPORT}"), ("*.nemo", f"a NeMo archive: {EXPORT}"),
    ("modules.json", f"a sentence-transformers model: {NOT_TEXT}"),
)
# Tensor names of quantizations that config.json does not always state
FOREIGN_TENSORS = (
    (r"\.q_(invperm|scale_max|groups)$", "an EXL2 model (ExLlamaV2)"),
    (r"\.(trellis|suh|svh)$", "an EXL3 model (ExLlamaV3)"),
    (r"\.(absmax|SCB)$|\.quant_state\.", "a bitsandbytes model"),
    (r"\.(W_q|meta_scale)$", "an HQQ model"),
    (r"\.biases$", "a quantized MLX model (Apple's mlx-lm)"),
)


def start_of(path: Path, n: int = 512) -> bytes:
    with open(path, "rb") as file:
        return file.read(n)


def kind_of(path: Path) -> str:
    """Which reader reads the file: "gguf", "safetensors", "torch"; "" if the content is none."""
    start = start_of(path)
    if start.startswith(b"GGUF"):
        return "gguf"
    if re.match(rb".{7}\0\{", start, re.DOTALL):   # the header's length, and JSON
        return "safetensors"
    is_pickle = re.match(rb"\x80[\x02-\x05]", start)
    if is_pickle or start.startswith(b"PK\3\4") and not other_archive(path):
        return "torch"
    return ""


def other_archive(path: Path) -> str:
    """What a zip archive that torch.save() did not write is; "" for a damaged one."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except Exception:                              # zipfile raises anything on damaged files
        return ""
    if any(name.endswith("data.pkl") for name in names):
        is_program = any("/code/" in name or name.endswith("constants.pkl") for name in names)
        return f"a TorchScript program: {EXPORT}" if is_program else ""
    if any(name.endswith(".weights.h5") for name in names):
        return f"a Keras model: {EXPORT}"
    if names and all(name.endswith(".npy") for name in names):
        return f"NumPy arrays (MLX, JAX): {EXPORT}"
    return f"a zip archive ({some(names) or 'empty'}): {ARCHIVE}"


def other_kind(path: Path) -> str:
    """What a file is that no reader reads, and the next step; "" if unknown or ours."""
    start = start_of(path)
    if what := failed_download(start):
        return what
    for at, signature, what in SIGNATURES:
        if start[at:].startswith(signature):
            return what
    if start.startswith(b"PK"):
        return other_archive(path)
    if path.suffix in PARTIAL:
        return "an unfinished download: finish it first"
    if re.search(r"\.gguf[-.]?(split|part)", path.name):
        return ("a piece of a file that was cut: join all pieces in order, `cat NAME-split-* > "
                "NAME`")
    if kind_of(path):
        return ""
    if path.suffix in ENDINGS:
        return f"{ENDINGS[path.suffix]}: {EXPORT}"
    if start and not start.strip(b"\0"):
        return "it begins with zeros, as an unfinished download does: download it again"
    if path.suffix == ".json" or start.lstrip().startswith(b"{"):
        return other_json(path)
    if start.isascii() and path.suffix not in WEIGHTS:
        return ""                                  # a text file of the user's: never a download
    if re.fullmatch(rb"[\x20-\x7e\r\n\t]{8,}", start) and b" " in start:
        return f"text, {beginning(start)}: {ERROR_PAGE}"
    return ""


def other_json(path: Path) -> str:
    """What a JSON file is: ollama's manifest, a file of a model's directory, an error message."""
    try:
        content = read_json(path)
    except ValueError:
        return ""
    layers = content.get("layers")
    for layer in layers if isinstance(layers, list) else ():
        if isinstance(layer, dict) and layer.get("mediaType") == OLLAMA_MODEL:
            blob = "blobs/" + str(layer.get("digest")).replace(":", "-")
            return f"ollama's manifest, not the model: give the file {blob} of ollama's folder"
    if "error" in content:
        return f"a JSON text, {beginning(start_of(path))}: {ERROR_PAGE}"
    return "a JSON file, not weights: give its directory"


def refuse_others(path: Path) -> None:
    """ValueError for a file that is another program's, or no model."""
    if path.is_file() and (what := other_kind(path)):
        raise ValueError(f"{path}: {what}")


def other_directory(directory: Path) -> str:
    """What a directory without weights that we read is, and the next step; "" if unknown."""
    if (directory / "adapter_config.json").exists():
        return adapter_instead_of_model(directory)
    for pattern, what in DIRECTORIES:
        if any(directory.glob(pattern)):
            return what
    if snapshots := sorted(directory.glob("snapshots/*/config.json")):
        return f"a folder of the hub's cache: give {snapshots[-1].parent}, or the name org/name"
    blobs = [p for p in sorted(directory.glob("sha256-*")) if start_of(p, 4) == b"GGUF"]
    if blobs:
        return f"ollama's blobs: give the model's file, one of {some([p.name for p in blobs])}"
    inner = sorted({p.parent.relative_to(directory) for pattern in ("*/config.json", "*/*.gguf")
                    for p in directory.glob(pattern)})
    if inner:
        return f"no model in it, but in {some([str(p) for p in inner])}: give that directory"
    links = [p for p in sorted(directory.iterdir()) if p.is_symlink() and not p.exists()]
    if links:
        return f"{links[0].name} links to a file that is not there: download the model again"
    names = [p.name for p in directory.iterdir()]
    if "config.json" in names and not any(name.endswith(WEIGHTS) for name in names):
        return "it has config.json, but no weights: download the model again"
    return ""


def adapter_instead_of_model(directory: Path) -> str:
    """The message for an adapter that was given as a model."""
    base = ""
    with suppress(ValueError, OSError):            # the base is a hint only
        base = read_json(directory / "adapter_config.json").get("base_model_name_or_path")
    base = base if isinstance(base, str) and base else "BASE_MODEL"
    return f"a LoRA adapter, not a model: --checkpoint_path {base} --adapter {directory}"


def foreign_quantization(names: list[str]) -> str:
    """Whose quantized tensors these are, by their names; "" if they are nobody's that we know."""
    for pattern, whose in FOREIGN_TENSORS:
        if any(re.search(pattern, name) for name in names):
            return whose
    return ""


def is_eagle3_config(config: dict) -> bool:
    """Is this the config.json of an EAGLE-3 drafter (eagle3.py)?"""
    classes = config.get("architectures")
    names = " ".join(map(str, classes)) if isinstance(classes, list) else ""
    return (config.get("speculators_model_type") == "eagle3" or "Eagle3" in names
            or "draft_vocab_size" in config and "dflash_config" not in config
            or isinstance(config.get("eagle_config"), dict))
