"""Files and directories that are no model, or not where they should be: each named, with the next step, status 2.

Each is made on the spot and given to generate.py, quantize.py, convert_hf_checkpoint.py and serve.py.
"""

import io
import json
import re
import runpy
import shutil
import struct
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file
from test_formats import write_gguf

import checkpoint as core
import tokenizer
from gpt_faster import loading
from gpt_faster.cli import quantizing, session
from gpt_faster.formats.gguf_file import INTEGERS, can_dequantize, read_gguf_header
from gpt_faster.formats.load import load_model, open_checkpoint, read_checkpoint
from gpt_faster.loading import weight_files
from gpt_faster.server import main as serving


@pytest.fixture(scope="module")
def llama(families):
    """A directory in the Hub's layout."""
    return families("llama2")[0]


@pytest.fixture(scope="module")
def model_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(tiny.make("llama2"), "llama", path)
    return path


def logits(source):
    model = load_model(source, torch.float32, "cpu")
    model.setup_cache(1, 8)
    return model(torch.tensor([[1, 2, 3]]), torch.arange(3), 3)


def same(path, expected):
    torch.testing.assert_close(logits(read_checkpoint(path)), logits(read_checkpoint(expected)))


# ---- The commands -------------------------------------------------------------------------------

def convert(argv):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["convert_hf_checkpoint.py", *argv])
        runpy.run_path(str(ROOT / "scripts/convert_hf_checkpoint.py"), run_name="__main__")


def quantize(argv):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["quantize.py", *argv])
        sys.exit(quantizing.main())


COMMANDS = {"generate": lambda path: session.main(["-m", str(path), "--prompt", "4", "--device", "cpu"]),
            "quantize": lambda path: quantize(["--checkpoint_path", str(path), "--device", "cpu"]),
            "convert": lambda path: convert(["--checkpoint_dir", str(path)]),
            "serve": lambda path: serving.main(["-m", str(path), "--port", "0", "--device", "cpu"])}


def refused(capsys, path, command="generate", run=None):
    """-> the one line that says why."""
    try:
        status = (run or COMMANDS[command])(path)
    except SystemExit as e:
        status = e.code
    out, err = capsys.readouterr()
    lines = err.strip().splitlines()
    assert status == 2 and out == "" and len(lines) == 1 and "Traceback" not in err, (status, out, err)
    assert "unforeseen" not in err and "bug" not in err and "corrupt" not in err and "damaged" not in err
    return lines[0].split("error: ", 1)[1]


# ---- Files that are something else --------------------------------------------------------------

def zip_of(*names):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return data.getvalue()


def tar_of(name):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    return data.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
PAGE = b"<!DOCTYPE html>\n<html class=\"\"><head></head></html>"
MANIFEST = json.dumps(dict(schemaVersion=2, layers=[dict(mediaType="application/vnd.ollama.image.model", digest="sha256:12ab")])).encode()
FILES = {                                          # name of the file, its content, what the line says
    "pointer": ("model.gguf", POINTER, "a Git LFS pointer, not the file itself: `git lfs pull`"),
    "page": ("model.gguf", PAGE, "a web page, not the file: download it again"),
    "page without doctype": ("model", b"\n<html>", "a web page, not the file"),
    "xml": ("model.pth", b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "a web page, not the file"),
    "a server's text": ("model.gguf", b"Invalid username or password.", "text, begins with b'Invalid username or pass': probably a server's error"),
    "a server's json": ("model.pth", b'{"error": "Repository not found"}', "a JSON text, begins with b'{\"error\": \"Repository "),
    "config.json": ("config.json", b'{"model_type": "llama"}', "a JSON file, not weights: give its directory"),
    "empty": ("model.gguf", b"", "not a readable GGUF file: too short: it is empty"),
    "empty, no name": ("model", b"", "it is empty: expected a directory"),
    "zeros": ("model.gguf", bytes(4096), "it begins with zeros, as an unfinished download does"),
    "partial": ("model.gguf.part", b"GGUF" + bytes(99), "an unfinished download: finish it first"),
    "piece": ("model.gguf-split-a", b"GGUF" + bytes(99), "a piece of a file that was cut: join all pieces in order"),
    "onnx": ("model.onnx", b"\x08\x08\x12\x07pytorch", "an ONNX model: read it with the program it was made for, or use the original"),
    "tensorflow": ("graph.pb", b"\x0a\x12\x0a\x05", "a TensorFlow graph: "),
    "keras": ("tf_model.h5", b"\x89HDF\r\n\x1a\n" + bytes(99), "an HDF5 file (Keras, TensorFlow's tf_model.h5): "),
    "keras, new": ("model.keras", zip_of("config.json", "model.weights.h5"), "a Keras model: "),
    "tflite": ("m.bin", b"\x1c\0\0\0TFL3" + bytes(99), "a TensorFlow Lite model: "),
    "coreml": ("m.mlmodel", b"\x08\x05\x12\x10", "a Core ML model: "),
    "flax": ("flax_model.msgpack", b"\x82\xa5model", "Flax weights: "),
    "tensorrt": ("m.engine", b"ftrt", "a TensorRT engine: "),
    "npz": ("weights.npz", zip_of("a.npy", "b.npy"), "NumPy arrays (MLX, JAX): "),
    "npy": ("w.bin", b"\x93NUMPY\1\0", "a NumPy array: "),
    "zip": ("model.zip", zip_of("model/config.json"), "a zip archive (model/config.json): unpack it"),
    "tar": ("model.tar", tar_of("config.json"), "a tar archive: unpack it"),
    "gzip": ("model.tar.gz", b"\x1f\x8b\x08\0" + bytes(99), "a gzip archive: unpack it"),
    "torchscript": ("model.pt", zip_of("m/data.pkl", "m/code/x.py", "m/constants.pkl"), "a TorchScript program: "),
    "ggml": ("ggml-model-q4_0.bin", b"tjgg\3\0\0\0" + bytes(99), "a GGML file (ggjt), older than GGUF: use a GGUF"),
    "llamafile": ("m.llamafile", b"MZqFpD='\n" + bytes(99), "a llamafile, a program that has a GGUF inside: `unzip`"),
    "ollama's manifest": ("latest", MANIFEST, "ollama's manifest, not the model: give the file blobs/sha256-12ab"),
    "pdf": ("model.pdf", b"%PDF-1.7", "a PDF document, not a model"),
    "unknown": ("weights.dat", b"\1\2\3\4 weights", "it begins with b'\\x01\\x02\\x03\\x04 weights': expected a directory, .safetensors"),
    "text of one's own": ("notes.txt", b"a text", "it begins with b'a text': expected a directory"),
    "pickle": ("model.pkl", b"\x80\x02cposix\nsystem\n.", "refused, it contains more than weights (posix.system"),
    "garbage": ("model.pth", b"\3\1\2garbage", "not a readable PyTorch file (truncated?): it begins with b'\\x03\\x01\\x02garbage'"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_something_else(capsys, tmp_path, kind):
    name, content, expected = FILES[kind]
    (tmp_path / name).write_bytes(content)
    line = refused(capsys, tmp_path / name)
    assert line.startswith(f"{tmp_path / name}: ") and expected in line


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["pointer", "onnx", "unknown", "zip"])
def test_every_command_says_so(capsys, tmp_path, kind, command):
    name, content, expected = FILES[kind]
    (tmp_path / name).write_bytes(content)
    assert expected in refused(capsys, tmp_path / name, command)


@pytest.mark.parametrize("kind, expected", [
    ("pointer", "a Git LFS pointer"), ("page", "a web page"), ("zeros", "it begins with zeros"), ("tflite", "a TensorFlow Lite model")])
@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin", "model-00002-of-00002.safetensors"])
def test_weights_of_a_directory_that_are_something_else(capsys, llama, tmp_path, kind, expected, weights):
    for name in ("config.json", "generation_config.json"):
        shutil.copy(llama / name, tmp_path)
    if "of" in weights:
        shutil.copy(llama / "model.safetensors", tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / weights).write_bytes(FILES[kind][1])
    line = refused(capsys, tmp_path)
    assert line.startswith(f"{tmp_path / weights}: ") and expected in line


def test_config_and_tokenizer_that_are_something_else(capsys, llama, tmp_path):
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    for name in ("tokenizer.model", "tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes(POINTER)
        line = refused(capsys, tmp_path)
        assert f"{name}: " in line and "a Git LFS pointer" in line
    (tmp_path / "config.json").write_bytes(PAGE)
    assert "config.json: a web page" in refused(capsys, tmp_path)


# ---- Directories that are something else --------------------------------------------------------

DIRECTORIES = {
    "mlx": (["weights.npz", "config.json"], "an MLX model"), "onnx": (["onnx/model.onnx", "config.json"], "an ONNX model: "),
    "flax": (["flax_model.msgpack", "config.json"], "Flax weights: "), "tensorflow": (["tf_model.h5", "config.json"], "TensorFlow weights: "),
    "saved model": (["saved_model.pb"], "a TensorFlow SavedModel: "), "tflite": (["m.tflite"], "a TensorFlow Lite model: "),
    "coreml": (["m.mlpackage/Manifest.json"], "a Core ML model: "), "openvino": (["openvino_model.xml", "config.json"], "an OpenVINO model: "),
    "diffusers": (["model_index.json", "unet/config.json"], "a diffusers pipeline: it does not generate text"),
    "sentence-transformers": (["modules.json", "config.json"], "a sentence-transformers model: it does not generate text"),
    "torch distributed": (["__0_0.distcp", ".metadata"], "a torch.distributed checkpoint: `python -m torch.distributed.checkpoint.format_utils"),
    "deepspeed": (["zero_to_fp32.py", "latest"], "a DeepSpeed ZeRO checkpoint: `python zero_to_fp32.py . .`"),
    "mistral": (["consolidated.safetensors", "params.json", "tekken.json"], "a model in Mistral's own format: use the model*.safetensors"),
    "config alone": (["config.json"], "it has config.json, but no weights"),
    "hub's cache": (["snapshots/12ab/config.json", "refs/main"], "a folder of the hub's cache: give "),
    "ollama": (["sha256-12ab"], "ollama's blobs: give the model's file, one of sha256-12ab"),
    "one below": (["checkpoint-500/config.json"], "no model in it, but in checkpoint-500: give that directory"),
}


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_a_directory_that_is_something_else(capsys, tmp_path, kind):
    names, expected = DIRECTORIES[kind]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"GGUF" if "sha256" in name else b"{}")
    line = refused(capsys, tmp_path)
    assert line.startswith(f"{tmp_path}: ") and expected in line


@pytest.mark.parametrize("command", COMMANDS)
def test_an_adapter_given_as_a_model(capsys, tmp_path, command):
    (tmp_path / "adapter_config.json").write_text(json.dumps(dict(peft_type="LORA", base_model_name_or_path="org/base")))
    save_file({"base_model.model.x": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        assert f"a LoRA adapter, not a model: --checkpoint_path org/base --adapter {tmp_path}" in refused(capsys, path, command)


def test_what_is_no_adapter(capsys, llama, model_gguf, tmp_path):
    def run(path):
        return session.main(["-m", str(llama), "--adapter", str(path), "--prompt", "4", "--device", "cpu"])

    assert "a whole model, not an adapter: give it as --checkpoint_path" in refused(capsys, llama, run=run)
    assert "a GGUF, which is no adapter that is read: use PEFT's" in refused(capsys, model_gguf, run=run)
    assert "adapter_config.json: missing" in refused(capsys, tmp_path, run=run)
    (tmp_path / "adapter_config.json").write_text(json.dumps(dict(fine_tune_type="lora", lora_parameters={})))
    assert "an MLX adapter (Apple's mlx-lm): `mlx_lm.fuse`" in refused(capsys, tmp_path, run=run)
    (tmp_path / "adapter_config.json").write_text(json.dumps(dict(peft_type="LORA", lora_alpha=1)))
    assert "neither adapter_model.safetensors nor adapter_model.bin, found adapter_config.json" in refused(capsys, tmp_path, run=run)
    (tmp_path / "adapter_model.safetensors").write_bytes(POINTER)
    assert "adapter_model.safetensors: a Git LFS pointer" in refused(capsys, tmp_path, run=run)


QUANTIZED = {                                      # quantization_config, names of tensors -> the line
    "mlx": (dict(quantization=dict(group_size=64, bits=4)), "q.scales q.biases", "a quantized MLX model (Apple's mlx-lm): use the original"),
    "mlx, both": (dict(quantization=dict(bits=4), quantization_config=dict(bits=4)), "q.scales", "a quantized MLX model"),
    "mlx, unsaid": ({}, "q.scales q.biases", "a quantized MLX model"),
    "bitsandbytes": (dict(quantization_config=dict(quant_method="bitsandbytes")), "q.absmax", "quant_method 'bitsandbytes' is not supported"),
    "bitsandbytes, unsaid": ({}, "q.weight.absmax", "a bitsandbytes model: use the original"),
    "exl2": (dict(quantization_config=dict(quant_method="exl2")), "q.q_invperm", "quant_method 'exl2' is not supported"),
    "exl2, unsaid": ({}, "q.q_weight q.q_invperm", "an EXL2 model (ExLlamaV2): use the original"),
    "exl3, unsaid": ({}, "q.trellis q.suh", "an EXL3 model (ExLlamaV3): use the original"),
    "hqq": (dict(quantization_config=dict(quant_method="hqq")), "q.W_q", "quant_method 'hqq' is not supported"),
    "peft": ({}, "q.base_layer.weight q.lora_A.default.weight", "weights and a LoRA adapter in one: PEFT's merge_and_unload()"),
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_by_others(capsys, llama, tmp_path, kind):
    stated, names, expected = QUANTIZED[kind]
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **stated}))
    prefix = "model.layers.0.self_attn."
    save_file({prefix + name: torch.ones(1) for name in names.split()}, tmp_path / "model.safetensors")
    assert expected in refused(capsys, tmp_path)


# ---- GGUF ---------------------------------------------------------------------------------------

def rewritten(source, target, metadata=(), kinds=None, only=None, bare=False):
    """A copy of a GGUF with more metadata (integers and strings), other types, some of its tensors only. bare: without its own metadata."""
    data = source.read_bytes()
    _, infos, start = read_gguf_header(memoryview(data))
    version, n_tensors, n_keys = struct.unpack_from("<IQQ", data, 4)
    first = data.index(struct.pack("<Q", len(infos[0][0])) + infos[0][0].encode()) if infos else start
    keys, n_keys = (b"", 0) if bare else (data[24:first], n_keys)
    for key, value in dict(metadata).items():
        keys += struct.pack("<Q", len(key)) + key.encode()
        keys += struct.pack("<IQ", 8, len(value)) + value.encode() if isinstance(value, str) else struct.pack("<II", 4, value)
    infos = infos if only is None else infos[only]
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), n_keys + len(metadata)) + keys
    for name, shape, kind, offset in infos:
        head += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *shape[::-1]) + struct.pack("<IQ", (kinds or {}).get(name, kind), offset)
    target.write_bytes(head + b"\0" * (-len(head) % 32) + data[start:])
    return target


def split(source, directory, stem="m"):
    """As llama.cpp's gguf-split names and numbers two parts."""
    n = len(read_gguf_header(memoryview(source.read_bytes()))[1])
    return [rewritten(source, directory / f"{stem}-{i + 1:05d}-of-00002.gguf", {"split.no": i, "split.count": 2, "split.tensors.count": n},
                      only=some, bare=i > 0) for i, some in enumerate((slice(5), slice(5, None)))]


REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}
UNKNOWN = sorted({*range(60), 97, 137, 200} - {kind.value for kind in gguf.GGMLQuantizationType} - set(REMOVED))
NOT_DEQUANTIZED = [kind for kind in gguf.GGMLQuantizationType if not can_dequantize(kind) and kind.name not in INTEGERS]


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType[name] for name in INTEGERS])
def test_integers_for_weights(capsys, model_gguf, tmp_path, kind):
    """A drafter's ids are integers, weights are not."""
    path = rewritten(model_gguf, tmp_path / "m.gguf", kinds={"blk.0.attn_q.weight": kind.value})
    assert "layers.0.attn.wq.weight has dtype torch.int" in refused(capsys, path)


@pytest.mark.parametrize("kind", [*REMOVED, *UNKNOWN, *(kind.value for kind in NOT_DEQUANTIZED)])
def test_types_that_cannot_be_read(capsys, model_gguf, tmp_path, kind):
    path = rewritten(model_gguf, tmp_path / "m.gguf", kinds={"blk.0.attn_q.weight": kind})
    line = refused(capsys, path)
    assert f"blk.0.attn_q.weight has quantization type {REMOVED.get(kind, '')}" in line
    assert f"({kind}), which llama.cpp has removed: use the model in" in line if kind in REMOVED else "gguf 0." in line and "use the model in" in line
    if kind in UNKNOWN:
        assert f"type {kind}, which" in line and "does not know" in line


@pytest.mark.parametrize("kind", [kind for kind in gguf.GGMLQuantizationType if can_dequantize(kind)])
def test_types_that_can_be_read_are(kind):
    """What is asked at opening is what the library does when a tensor is read."""
    n_block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    assert gguf.dequantize(np.zeros((3, 2 * n_bytes), np.uint8), kind).shape == (3, 2 * n_block)


def test_an_old_gguf_package(capsys, monkeypatch, model_gguf):
    monkeypatch.delattr(gguf, "dequantize")
    assert refused(capsys, model_gguf).endswith("is too old: pip install -U gguf")


def test_other_files_of_llama_cpp(capsys, model_gguf, tmp_path):
    for i, (kind, expected) in enumerate((("adapter", "a GGUF LoRA adapter, not a model"), ("mmproj", "a vision or audio encoder (mmproj)"),
                                          ("imatrix", "an importance matrix of llama.cpp"))):
        path = rewritten(model_gguf, tmp_path / f"{i}.gguf", {"general.type": kind})
        assert f"{path}: {expected}" in refused(capsys, path)
    data = bytearray(model_gguf.read_bytes())
    data[4:8] = data[4:8][::-1]
    (tmp_path / "big.gguf").write_bytes(data)
    assert "big.gguf: a big-endian GGUF: `gguf-convert-endian " in refused(capsys, tmp_path / "big.gguf")


def test_any_part_of_a_split_model(model_gguf, tmp_path):
    directory = tmp_path / "of-00001-of-00009"             # its number stays
    directory.mkdir()
    parts = split(model_gguf, directory)
    for path in (*parts, directory):
        same(path, model_gguf)
    assert read_checkpoint(parts[1]).path == parts[0] and weight_files(parts[0]) == parts


@pytest.mark.parametrize("beside", ["mmproj", "adapter", "imatrix"])
def test_a_directory_with_other_files_of_llama_cpp(model_gguf, tmp_path, beside):
    first = split(model_gguf, tmp_path)[0]
    rewritten(model_gguf, tmp_path / "a.gguf", {"general.type": beside})
    assert read_checkpoint(tmp_path).path == first


@pytest.mark.parametrize("command", COMMANDS)
def test_parts_that_are_missing_renamed_or_of_another(capsys, model_gguf, tmp_path, command):
    first, second = split(model_gguf, tmp_path)
    second.rename(tmp_path / "aside")
    for path in (first, tmp_path):
        assert f"{second}: part 2 of 2 is missing: download it" in refused(capsys, path, command)
    (tmp_path / "aside").rename(second)
    first.rename(tmp_path / "aside")
    for path in (second, tmp_path):
        assert f"{first}: part 1 of 2 is missing" in refused(capsys, path, command)
    for name in ("model.gguf", "m-00002-of-00003.gguf", "m-00003-of-00002.gguf"):
        (tmp_path / "aside").rename(tmp_path / name)
        assert name != "model.gguf" or "number 00001 of 00002, but renamed" in refused(capsys, tmp_path, command)
        assert "number 00001 of 00002, but renamed: the parts are found by their names, so call it m-00001-of-00002.gguf" in refused(
            capsys, tmp_path / name, command)
        (tmp_path / name).rename(tmp_path / "aside")
    (tmp_path / "aside").rename(first)
    shutil.copy(first, second)
    assert f"{first}: {second.name}: split.no is 0 and split.count 2, not 1 and 2 as its name says" in refused(capsys, first, command)
    rewritten(first, second, {"split.no": 1}, only=slice(2))
    assert "split.tensors.count is 39, but the 2 parts have 7: are they of one model?" in refused(capsys, first, command)


def test_several_models_in_a_directory(capsys, model_gguf, tmp_path):
    split(model_gguf, tmp_path)
    shutil.copy(model_gguf, tmp_path / "other.gguf")
    assert "2 models: m-00001-of-00002.gguf, other.gguf: give one of these files" in refused(capsys, tmp_path)


# ---- Recognized by their content ----------------------------------------------------------------

def test_names_do_not_decide(llama, model_gguf, tmp_path):
    blob = shutil.copy(model_gguf, tmp_path / ("sha256-" + "0f" * 32))     # ollama's
    same(blob, model_gguf)
    assert weight_files(Path(blob)) == [Path(blob)]
    same(shutil.copy(model_gguf, tmp_path / "model.bin"), model_gguf)
    core.save_checkpoint(read_checkpoint(llama), tmp_path / "model.pth", None)
    same((tmp_path / "model.pth").rename(tmp_path / "checkpoint"), llama)
    shutil.copy(llama / "config.json", tmp_path)
    same(shutil.copy(llama / "model.safetensors", tmp_path / "pytorch_model.bin"), llama)
    same(tmp_path, llama)
    same(shutil.copy(llama / "model.safetensors", tmp_path / "weights"), llama)


def test_weights_under_another_name(capsys, llama, tmp_path):
    """One file of weights is the model's, whatever its name; of several one must be given."""
    shutil.copy(llama / "config.json", tmp_path)
    shutil.copy(llama / "model.safetensors", tmp_path / "gptq_model-4bit-128g.safetensors")
    same(tmp_path, llama)
    shutil.copy(llama / "model.safetensors", tmp_path / "model.fp16.safetensors")
    assert "found config.json, gptq_model-4bit-128g.safetensors, model.fp16.safetensors" in refused(capsys, tmp_path)
    same(tmp_path / "model.fp16.safetensors", llama)


# ---- Shards -------------------------------------------------------------------------------------

@pytest.fixture
def shards(families, tmp_path):
    families("llama2")[1].save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


@pytest.mark.parametrize("reader", [read_checkpoint, core.read_checkpoint])
def test_shards_without_their_index(capsys, llama, shards, reader):
    (shards / "model.safetensors.index.json").unlink()
    names = sorted(shards.glob("*.safetensors"))
    for path in (shards, names[1]):
        source = reader(path)
        torch.testing.assert_close(logits(source), logits(read_checkpoint(llama)))
        assert weight_files(source.path) == names
    names[1].unlink()
    names[-1].unlink()
    with pytest.raises(FileNotFoundError, match=rf"{names[1].name}: {names[0].name}'s sibling is missing \(2 shards are missing\)"):
        reader(shards)


@pytest.mark.parametrize("command", COMMANDS)
def test_shards_that_are_missing(capsys, shards, command):
    names = sorted(shards.glob("*.safetensors"))
    names[1].unlink()
    assert f"{names[1]}: listed in model.safetensors.index.json but missing: download it again" in refused(capsys, shards, command)


def test_shards_that_the_index_does_not_list(capsys, llama, shards):
    shutil.copy(llama / "model.safetensors", shards / "model-00001-of-00001.safetensors")     # of an earlier save
    same(shards, llama)
    index = shards / "model.safetensors.index.json"
    index.unlink()
    assert "several sets of shards and no index: give a shard of the set to read: model-00001-of-00001.safetensors, " in refused(capsys, shards)
    same(shards / "model-00001-of-00001.safetensors", llama)


# ---- Names that training programs give ----------------------------------------------------------

WRAPPED = {"torch.compile": lambda n: "_orig_mod." + n, "DDP": lambda n: "module." + n, "both": lambda n: "module._orig_mod." + n,
           "both, other": lambda n: "_orig_mod.module." + n, "PEFT": lambda n: "base_model.model." + n,
           "FSDP": lambda n: "_fsdp_wrapped_module." + n.replace("self_attn.", "_fsdp_wrapped_module.self_attn."),
           "a compiled layer": lambda n: n.replace("self_attn", "_orig_mod.self_attn").replace("mlp", "_orig_mod.mlp"),
           "activation checkpointing": lambda n: n.replace("mlp.", "_checkpoint_wrapped_module.mlp."),
           "DDP of PEFT, compiled": lambda n: "module._orig_mod.base_model.model." + n}


@pytest.mark.parametrize("wrapper", WRAPPED)
@pytest.mark.parametrize("reader", [read_checkpoint, core.read_checkpoint])
def test_names_of_wrapped_modules(llama, tmp_path, wrapper, reader):
    shutil.copy(llama / "config.json", tmp_path)
    weights = load_file(llama / "model.safetensors")
    save_file({WRAPPED[wrapper](name): t for name, t in weights.items()}, tmp_path / "model.safetensors")
    torch.testing.assert_close(logits(reader(tmp_path)), logits(read_checkpoint(llama)))


@pytest.mark.parametrize("key", [None, "state_dict", "model_state_dict", "model", "module"])
def test_a_checkpoint_of_training(llama, tmp_path, key):
    shutil.copy(llama / "config.json", tmp_path)
    weights = {"module." + name: t for name, t in load_file(llama / "model.safetensors").items()}
    torch.save({key: weights, "epoch": 3, "optimizer": {"state": {}}} if key else weights, tmp_path / "pytorch_model.bin")
    same(tmp_path, llama)


@pytest.mark.parametrize("wrapper", ["torch.compile", "DDP", "FSDP", "a compiled layer", "default"])
def test_adapters_of_wrapped_modules(families, tmp_path, wrapper):
    import peft
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    peft.get_peft_model(tiny.make("llama2"), config).save_pretrained(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "wrapped")
    weights = load_file(tmp_path / "plain/adapter_model.safetensors")
    wrap = WRAPPED.get(wrapper, lambda n: n.replace("_A.weight", "_A.default.weight").replace("_B.weight", "_B.default.weight").replace(
        "lm_head.weight", "lm_head.modules_to_save.default.weight"))
    save_file({wrap(name): t for name, t in weights.items()}, tmp_path / "wrapped/adapter_model.safetensors")
    directory = families("llama2")[0]
    expected = logits(read_checkpoint(directory, tmp_path / "plain"))
    assert not torch.equal(expected, logits(read_checkpoint(directory)))
    torch.testing.assert_close(logits(read_checkpoint(directory, tmp_path / "wrapped")), expected)
    torch.testing.assert_close(logits(read_checkpoint(directory, tmp_path / "wrapped/adapter_model.safetensors")), expected)


# ---- Python -------------------------------------------------------------------------------------

@pytest.mark.parametrize("module", [core, sys.modules["gpt_faster.formats.load"]])
def test_arguments_that_are_wrong_are_not_the_files_fault(llama, module):
    torch.testing.assert_close(logits(module.read_checkpoint(str(llama))), logits(module.open_checkpoint(llama)))
    for wrong in (None, 5, b"path", ["a"]):
        with pytest.raises(TypeError, match="the path is .*, expected a str or a Path"):
            module.read_checkpoint(wrong)
    with pytest.raises(TypeError, match="the path is 5"):
        module.open_checkpoint(5)
    with pytest.raises(FileNotFoundError, match="nowhere/model: no such file or directory"):
        module.read_checkpoint("nowhere/model")
    source = module.read_checkpoint(llama)
    with pytest.raises(TypeError, match="source is .*, expected a Checkpoint"):
        module.load_model(llama, torch.float32, "cpu")
    for wrong in ("bfloat16", None, 32):
        with pytest.raises(TypeError, match="dtype is .*, expected a torch.dtype"):
            module.load_model(source, wrong, "cpu")
    with pytest.raises(ValueError, match=r"dtype is torch.int8, expected torch.bfloat16, float16 or float32"):
        module.load_model(source, torch.int8, "cpu")
    for wrong in ("gpu", "cuda:99", 1.5):
        with pytest.raises(ValueError, match="device .* cannot be used"):
            module.load_model(source, torch.float32, wrong)


def test_other_arguments(llama, tmp_path):
    source = read_checkpoint(llama)
    core.save_checkpoint(source, str(tmp_path / "model.pth"), None)
    same(tmp_path / "model.pth", llama)
    with pytest.raises(TypeError, match="source is '.*', expected a Checkpoint"):
        core.save_checkpoint(str(llama), tmp_path / "model.pth", None)
    with pytest.raises(TypeError, match="dtype is 'float16', expected a torch.dtype"):
        core.save_checkpoint(source, tmp_path / "model.pth", None, "float16")
    with pytest.raises(ValueError, match="engine is 'fast', expected one of compile, torch_compile, kv_cache"):
        loading.load_model(llama, engine="fast")
    with pytest.raises(ValueError, match="no scheme int9: expected int4, int8"):
        loading.load_model(copy_with_tokenizer(llama, tmp_path / "model"), scheme="int9")
    for load in (loading.load_for, tokenizer.load_for):
        with pytest.raises(TypeError, match="the path is None"):
            load(replace(source, tokenizer=None))


def copy_with_tokenizer(directory, target):
    from tokenizers import Tokenizer, models
    shutil.copytree(directory, target)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(target / "tokenizer.json"))
    return target


def test_what_a_library_has_not_implemented_is_not_damage():
    with pytest.raises(ValueError, match="^file: not supported by a library: no such type$"), core.reading("file"):
        raise NotImplementedError("no such type")


@pytest.mark.parametrize("name", ["https://huggingface.co/org/model", "hf.co/org/model", "https://huggingface.co/org/model/tree/main"])
def test_a_link_in_place_of_a_name(name):
    with pytest.raises(FileNotFoundError, match="a link; give the hub name org/model, or download the file"):
        open_checkpoint(name)


# ---- Memory -------------------------------------------------------------------------------------

def mapped_mb():
    return int(re.search(r"RssFile:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["one file", "shards", "GGUF", "core", "pth", "pth, core", "bin"])
def test_a_file_that_was_read_is_let_go(tmp_path, kind):
    """40 MB of weights: at the end of loading at most one tensor's pages are the process's, while the file is open."""
    import transformers
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**tiny.SIZE, "vocab_size": 20_000, "hidden_size": 256}))
    if kind == "GGUF":
        write_gguf(model, "llama", tmp_path / "model.gguf")
    else:
        model.save_pretrained(tmp_path, max_shard_size="21MB" if kind == "shards" else "1GB")
    path = tmp_path
    if kind.startswith("pth"):
        path = tmp_path / "of_ours.pth"
        core.save_checkpoint(read_checkpoint(tmp_path), path, None)
    if kind == "bin":
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    before = mapped_mb()
    source = (core if "core" in kind else sys.modules["gpt_faster.formats.load"]).read_checkpoint(path)
    loaded = load_model(source, torch.float32, "cpu")
    assert mapped_mb() - before < 12
    state = model.state_dict()                             # what was dropped is read again
    for _ in range(2):
        assert torch.equal(source.tensors["embed.weight"].whole().float(), state["model.embed_tokens.weight"])
        assert torch.equal(source.tensors["head.weight"].whole().float(), state["lm_head.weight"])
    assert torch.equal(loaded.embed.weight, state["model.embed_tokens.weight"])


@pytest.mark.parametrize("pad", [0, 1, 3, 6])
def test_safetensors_at_any_address(tmp_path, pad):
    """Tensors of all dtypes, shapes and sizes, none aligned; their rows are the library's."""
    tensors = {"e": torch.zeros(0, 3), "s": torch.tensor(2.5), "v": torch.arange(7.0), "m": torch.randn(5, 3).bfloat16(),
               "x": torch.randn(3, 4, 5).half(), "y": torch.randn(2, 3, 4, 5), "i": torch.arange(9), "b": torch.tensor([True, False]),
               "f": torch.randn(4, 4).to(torch.float8_e4m3fn), "u": torch.arange(6, dtype=torch.uint8).view(2, 3)}
    save_file(tensors, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    n = int.from_bytes(data[:8], "little")
    (tmp_path / "x.safetensors").write_bytes((n + pad).to_bytes(8, "little") + data[8:8 + n] + b" " * pad + data[8 + n:])
    for t in core.read_safetensors(tmp_path / "x.safetensors"):
        expected = tensors[t.name]
        assert t.shape == expected.shape and t.dtype == expected.dtype and torch.equal(t.whole(), expected)
        rows = core.as_rows(expected)
        for a in range(t.n_row):
            assert torch.equal(t.read_rows(a, t.n_row), rows[a:])


# ---- The core alone -----------------------------------------------------------------------------

@pytest.mark.parametrize("kind, expected", [
    ("pointer", "a Git LFS pointer"), ("page", "a web page"), ("empty", "it is empty"), ("zeros", r"it begins with b'\\x00"), ("garbage", r"it begins with b'\\x03")])
@pytest.mark.parametrize("name", ["model.safetensors", "model.pth", "model.gguf", "blob"])
def test_the_core_names_what_it_found(llama, tmp_path, kind, expected, name):
    shutil.copy(llama / "config.json", tmp_path)
    (tmp_path / name).write_bytes(FILES[kind][1])
    with pytest.raises(ValueError, match=rf"{name}: .*{expected}"):
        core.read_checkpoint(tmp_path / name)
