"""The sound checkpoints that tests/fuzz.py damages: every format, every family, made small.

Made once, into .cache/fuzz, by the code that the tests make theirs with. A base is a directory with
base.json: which format it is, which files may be damaged, and the command line that runs it.
"""

import base64
import contextlib
import fcntl
import hashlib
import io
import json
import random
import shutil
from pathlib import Path
from unittest.mock import patch

import gguf
import test_dequantize
import test_formats
import test_gemma4
import tiny
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from checkpoint import save_checkpoint
from gpt_faster.formats.load import read_checkpoint
from gpt_faster.formats.quantize_on_load import quantized
from gpt_faster.text import byte_level, gguf_tokenizer

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".cache/fuzz"
N_VOCAB = 160
CHAT = ("{% for m in messages %}{{ '<s>' + m['role'] + m['content'] | trim }}{% if loop.last and add_generation_prompt %}"
        "{{ bos_token }}{% endif %}{% endfor %}")
GENERATION = dict(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1, eos_token_id=[2, 7])
GGUFS = ["llama2", "llama3", "llama-biased", "qwen2_moe", "qwen3", "gemma2", "gemma3_text", "phi3-longrope", "gpt_oss", "gpt2", "glm4_moe",
         "falcon-new", "mpt", "apertus", "bloom", "exaone4", "qwen2-yarn", "granite", "mixtral"]
GGUF_VARIANTS = {"gemma3_text": dict(layer_types=["sliding_attention"] * 5 + ["full_attention"], num_hidden_layers=6, query_pre_attn_scalar=24),
                 "gemma2": dict(query_pre_attn_scalar=24), "qwen2_moe": dict(mlp_only_layers=[], decoder_sparse_step=1),
                 "falcon-new": dict(ffn_hidden_size=256, bias=False),
                 "deepseek_v3": dict(attention_bias=False, rope_parameters=dict(tiny.YARN, mscale=0.9, mscale_all_dim=0.9)),
                 "qwen3_5_text": dict(layer_types=["linear_attention"] * 3 + ["full_attention"])}
KINDS = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


# ---- Tokenizers ---------------------------------------------------------------------------------

def letters() -> list[str]:
    return [*list(byte_level.bytes_to_unicode().values())[:119], "Ġ"]


def byte_bpe() -> tuple[list[str], list[tuple[str, str]]]:
    """A vocabulary of GPT-2's kind, and its merges."""
    pairs = [("a", "b"), ("b", "a"), ("ab", "a"), ("Ġ", "a"), ("Ġ", "b"), ("t", "h"), ("th", "e")]
    tokens = ["<s>", "</s>", "<|im_end|>", *letters(), *map("".join, pairs)]
    return tokens + [f"<extra_{i}>" for i in range(N_VOCAB - len(tokens))], pairs


def tokenizer_json(kind: str) -> Tokenizer:
    tokens, merges = byte_bpe()
    vocab = {t: i for i, t in enumerate(tokens)}
    if kind == "bpe":
        fast = byte_level.byte_level(vocab, merges, (byte_level.LLAMA3,), tokens[:3])
        fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    elif kind == "pieces":
        fast = gguf_tokenizer.sentencepiece_bpe(vocab, merges, tokens[:3], [], "<s>")
    elif kind == "unigram":
        fast = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁", -1.0), ("▁a", -1.5), *((t, -2.0 - i) for i, t in enumerate("abcdeht"))], 0, False))
        fast.pre_tokenizer = pre_tokenizers.Metaspace()
        fast.decoder = decoders.Metaspace()
        fast.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("x", "a")])
    else:
        fast = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "b": 2, "ab": 3, "##a": 4, "##b": 5}, unk_token="[UNK]"))
        fast.normalizer = normalizers.BertNormalizer()
        fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        fast.decoder = decoders.WordPiece()
    return fast


def pieces() -> tuple[list[str], list[float], list[int]]:
    """SentencePiece's tokens, scores and types."""
    tokens = ["<unk>", "<s>", "</s>", "▁", "▁a", "ab", "ba", "th", *"abcdefghmrsu"]
    types = [2, 3, 3, *[1] * (len(tokens) - 3)]
    return tokens, [-float(i) for i in range(len(tokens))], types


def put_tokenizer(directory: Path, kind: str = "bpe") -> None:
    tokenizer_json(kind).save(str(directory / "tokenizer.json"))
    config = dict(bos_token="<s>", eos_token={"content": "</s>", "special": True}, add_bos_token=True, chat_template=CHAT)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps(GENERATION))


class WithTokenizer(gguf.GGUFWriter):
    """Writes one of three tokenizers into every file."""

    kind = "gpt2"

    def write_header_to_file(self, *args):
        tokens, merges = byte_bpe()
        if self.kind == "llama":
            tokens, scores, types = pieces()
            self.add_token_scores(scores)
            self.add_token_types(types)
        else:
            self.add_token_types([3] * 3 + [1] * 127 + [4] * (len(tokens) - 130))
            self.add_token_merges([" ".join(pair) for pair in merges])
            self.add_tokenizer_pre("llama-bpe")
        self.add_tokenizer_model(self.kind)
        self.add_token_list(tokens)
        self.add_bos_token_id(1)
        self.add_add_bos_token(True)
        self.add_chat_template(CHAT)
        super().write_header_to_file(*args)


# ---- Bases --------------------------------------------------------------------------------------

def describe(directory: Path, kind: str, damaged: list[str], model: str = "", more: tuple = ()) -> None:
    (directory / "base.json").write_text(json.dumps(dict(format=kind, damaged=damaged, model=model, more=more)))


def family(name: str, directory: Path) -> None:
    tiny.make(name).save_pretrained(directory)
    put_tokenizer(directory)
    describe(directory, "config.json", ["config.json"])


def copy_of(name: str, directory: Path) -> None:
    shutil.copytree(HOME_OF[name], directory, dirs_exist_ok=True)


def safetensors(name: str, directory: Path) -> None:
    copy_of(name, directory)
    describe(directory, "safetensors", ["model.safetensors"])


def sharded(directory: Path) -> None:
    tiny.make("llama3").save_pretrained(directory, max_shard_size="200KB")
    put_tokenizer(directory)
    shards = sorted(p.name for p in directory.glob("*.safetensors"))
    describe(directory, "sharded index", ["model.safetensors.index.json"] * 3 + shards[:1])


def tokenizer(kind: str, directory: Path) -> None:
    copy_of("family-qwen3", directory)
    put_tokenizer(directory, kind)
    describe(directory, "tokenizer.json", ["tokenizer.json"])


def tokenizer_model(kind: str, directory: Path) -> None:
    copy_of("family-qwen3", directory)
    (directory / "tokenizer.json").unlink()
    data = b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(100))
    if kind == "sentencepiece":
        data = gguf_tokenizer.sentencepiece_model(*pieces(), True, 0)
    (directory / "tokenizer.model").write_bytes(data)
    describe(directory, "tokenizer.model", ["tokenizer.model"])


def template(kind: str, directory: Path) -> None:
    copy_of("family-qwen3", directory)
    (directory / "chat_template.jinja").write_text(CHAT)
    damaged = {"jinja": ["chat_template.jinja"], "config": ["tokenizer_config.json"]}[kind]
    if kind == "config":
        (directory / "chat_template.jinja").unlink()
    describe(directory, "chat template", damaged, more=("--chat",))


def generation(directory: Path) -> None:
    copy_of("family-qwen3", directory)
    describe(directory, "generation_config", ["generation_config.json"])


def gguf_of(name: str, directory: Path, kind: str = "F32", tokens: str = "gpt2") -> None:
    directory.mkdir()
    if name.startswith("gemma4"):
        model, write = tiny.make(name), lambda m, path: test_gemma4.write_gguf(m, path)
    else:
        model = test_formats.variant(name, **GGUF_VARIANTS.get(name, {}))
        write = lambda m, path: test_formats.write_gguf(m, test_formats.ARCHITECTURES[name], path, kind)
    with patch.object(WithTokenizer, "kind", tokens), patch.object(gguf, "GGUFWriter", WithTokenizer):
        write(model, directory / "model.gguf")
    describe(directory, "GGUF", ["model.gguf"], "model.gguf", ("--chat",))


def pth(mode: str | None, name: str, directory: Path) -> None:
    directory.mkdir()
    source = read_checkpoint(HOME_OF[f"family-{name}"])
    state = dict(backend="json", data=tokenizer_json("bpe").to_str(), bos_id=0, add_bos=True, chat_template=CHAT, control={},
                 names={}, eos_ids=[2])
    save_checkpoint(quantized(source, mode) if mode else source, directory / "model.pth", state)
    describe(directory, ".pth of ours", ["model.pth"], "model.pth")


def torch_file(kind: str, directory: Path) -> None:
    """.bin with config.json: a zip archive, or as before torch 1.6; Meta's .pth; llama2.c's .pt."""
    directory.mkdir()
    state = load_file(HOME_OF["family-llama2"] / "model.safetensors")
    if kind in ("zip", "old"):
        copy_of("family-llama2", directory)
        (directory / "model.safetensors").unlink()
        torch.save(state, directory / "pytorch_model.bin", _use_new_zipfile_serialization=kind == "zip")
        describe(directory, "torch, " + kind, ["pytorch_model.bin"])
        return
    put_tokenizer(directory)
    model = tiny.make("llama2")
    state = {name: t.float() for name, t in test_formats.meta_state(model, model.config).items()}
    if kind == "llama2c":
        args = dict(dim=64, n_layers=4, n_heads=4, n_kv_heads=4, vocab_size=160, multiple_of=32, norm_eps=1e-5, max_seq_len=128)
        torch.save(dict(model=state, model_args=args), directory / "stories.pt")
        describe(directory, "Meta, llama2.c", ["stories.pt"], "stories.pt")
    else:
        torch.save(state, directory / "consolidated.00.pth")
        (directory / "params.json").write_text(json.dumps({**test_formats.PARAMS, "n_kv_heads": 4}))
        describe(directory, "Meta, llama2.c", ["params.json", "params.json", "consolidated.00.pth"])


def lora(directory: Path) -> None:
    import peft
    copy_of("family-llama-biased", directory)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], alpha_pattern={"layers.1.self_attn.q_proj": 40},
                             modules_to_save=["lm_head"])
    peft.get_peft_model(tiny.make("llama-biased"), config).save_pretrained(directory / "adapter")
    describe(directory, "LoRA adapter", ["adapter/adapter_config.json"] * 2 + ["adapter/adapter_model.safetensors"],
             more=("--adapter", "{}/adapter"))


def hub_quantized(method: str, name: str, directory: Path) -> None:
    directory.mkdir()
    test_dequantize.whole_model(lambda n: (HOME_OF[f"family-{n}"], tiny.make(n)), name, method, directory)
    shutil.rmtree(directory / "plain")
    put_tokenizer(directory)
    describe(directory, "quantized by others", ["config.json", "config.json", "model.safetensors"])


def mxfp4(directory: Path) -> None:
    directory.mkdir()
    test_dequantize.test_a_whole_gpt_oss(lambda n: (HOME_OF[f"family-{n}"], None), directory)
    put_tokenizer(directory)
    describe(directory, "quantized by others", ["config.json", "config.json", "model.safetensors"])


def bitsandbytes(directory: Path) -> None:
    copy_of("family-llama2", directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = dict(quant_method="bitsandbytes", load_in_4bit=True)
    (directory / "config.json").write_text(json.dumps(config))
    describe(directory, "quantized by others", ["config.json"])


def head(name: str, directory: Path) -> None:
    directory.mkdir()
    tiny.make_with_head(name, directory)
    put_tokenizer(directory)
    describe(directory, "a head that drafts", ["config.json", "config.json", "model.safetensors"], more=("--speculate", "mtp"))


def assistant(directory: Path) -> None:
    copy_of("family-gemma4", directory)
    tiny.FAMILIES["drafter"] = lambda: transformers.Gemma4AssistantConfig(
        text_config=test_gemma4.ASSISTANT, backbone_hidden_size=64, use_ordered_embeddings=True, num_centroids=20, centroid_intermediate_top_k=4)
    kind = transformers.models.gemma4.configuration_gemma4.Gemma4TextConfig
    with patch.object(kind, "kv_sharing_modes", property(lambda c: ["reuse"] * c.num_hidden_layers)):
        tiny.make("drafter").save_pretrained(directory / "drafter")
    del tiny.FAMILIES["drafter"]
    describe(directory, "a drafter", ["drafter/config.json", "drafter/config.json", "drafter/model.safetensors"],
             more=("--draft_checkpoint_path", "{}/drafter"))


def recipes() -> dict:
    """name -> what makes it in an empty place; families first, which others are made of."""
    made = {f"family-{name}": (family, name) for name in tiny.FAMILIES}
    made |= {f"safetensors-{name}": (safetensors, f"family-{name}") for name in ("llama3", "mixtral", "gpt_oss")}
    made["sharded"] = (sharded,)
    made |= {f"tokenizer-{kind}": (tokenizer, kind) for kind in ("bpe", "pieces", "unigram", "wordpiece")}
    made |= {f"model-{kind}": (tokenizer_model, kind) for kind in ("sentencepiece", "tiktoken")}
    made |= {f"template-{kind}": (template, kind) for kind in ("jinja", "config")}
    made["generation"] = (generation,)
    kinds = random.Random(0)
    made |= {f"gguf-{name}": (lambda name, d, k=kinds.choice(["gpt2", "llama"]): gguf_of(name, d, tokens=k), name)
             for name in [*GGUFS, "deepseek_v3", "lfm2-plain", "qwen3_5_text", "gemma4", "gemma4-26b"]}
    made |= {f"gguf-{kind}": (lambda kind, d: gguf_of("llama2", d, kind, "llama"), kind) for kind in KINDS}
    made["gguf-pieces"] = (lambda d: gguf_of("qwen3", d, tokens="gemma4"),)
    made |= {f"pth-{mode}-{name}": (pth, mode, name) for mode in (None, "int8", "int4")
             for name in ("llama3", "mixtral", "gemma3_text", "qwen3_5_text")}
    made |= {f"torch-{kind}": (torch_file, kind) for kind in ("zip", "old", "meta", "llama2c")}
    made["lora"] = (lora,)
    made |= {f"hub-{method}-{name}": (hub_quantized, method, name) for method in test_dequantize.WHOLE for name in ("qwen3", "mixtral")}
    made["hub-mxfp4"], made["hub-bitsandbytes"] = (mxfp4,), (bitsandbytes,)
    made |= {f"head-{name}": (head, name) for name in tiny.HEADS}
    made["assistant"] = (assistant,)
    return made


HOME_OF = {}                                               # name -> directory


def make(only=None) -> dict[str, Path]:
    """name -> directory of each base, made where it is not there yet; only: what its name must satisfy."""
    text = "".join(Path(m.__file__).read_text() for m in (tiny, test_formats, test_gemma4)) + Path(__file__).read_text()
    text += transformers.__version__ + getattr(gguf, "__version__", "")
    home = HOME / hashlib.sha256(text.encode()).hexdigest()[:12]
    everything = recipes()
    needed = {"family-qwen3", "family-llama2", "family-llama3", "family-gemma4", "family-llama-biased", "family-mixtral", "family-gpt_oss",
              "family-gemma3_text", "family-qwen3_5_text"}
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "w") as lock:                 # tests run side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, (build, *arguments) in everything.items():
            HOME_OF[name] = home / name
            if (home / name / "base.json").exists() or (only and not only(name) and name not in needed):
                continue
            shutil.rmtree(home / name, ignore_errors=True)
            torch.manual_seed(0)
            with contextlib.redirect_stdout(None), contextlib.redirect_stderr(io.StringIO()):
                build(*arguments, home / name)
    return {name: directory for name, directory in HOME_OF.items() if (directory / "base.json").exists()}


if __name__ == "__main__":
    made = make()
    print(len(made), "bases")
