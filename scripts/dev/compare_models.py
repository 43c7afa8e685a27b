"""Compare generate.py with transformers, PEFT and llama.cpp on every model in a folder.

    python scripts/dev/compare_models.py FOLDER [--prompt TEXT] [-- --compile …]

For each model: the prompt's token ids, greedy tokens, and the rendered chat template, in float32.
The reference of a directory is transformers, and PEFT for an adapter, which is tried on every base
model of the folder with its shapes; that of a GGUF is llama-server (scripts/install_peers.sh).
Arguments after -- go to generate.py. Prints one line per comparison. Status 1: one differs.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).resolve().parents[2]
LLAMA_SERVER = ROOT / ".venv-peers/bin/llama-server"
PROMPT, N_NEW = "Hello world the", 12
CHAT = [dict(role="user", content="Hi  there"), dict(role="assistant", content=" yes"),
        dict(role="user", content="7")]
TOOLS = [dict(type="function", function=dict(
    name="look_up", description="Größe", parameters=dict(
        type="object", properties=dict(what=dict(type="string")), required=["what"])))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("generate_args", nargs="*")
    args = parser.parse_args()
    entries = sorted(args.folder.iterdir())
    models = [path for path in entries if (path / "config.json").exists()]
    adapters = [path for path in entries if (path / "adapter_config.json").exists()]
    n_different = 0
    for model in models:
        n_different += compare(model, None, args)
    for adapter in adapters:
        for model in models:
            if fits(model, adapter):
                n_different += compare(model, adapter, args)
    for path in entries:
        if path.suffix == ".gguf":
            n_different += compare(path, None, args)
    return n_different > 0


def compare(model: Path, adapter: Path | None, args) -> bool:
    """Print what is the same; True if something differs."""
    name = model.name + (f" + {adapter.name}" if adapter else "")
    ours, message = generate(model, adapter, args)
    try:
        if model.suffix == ".gguf":
            theirs = of_llama_cpp(model, args.prompt)
        else:
            theirs = of_transformers(model, adapter, args.prompt, ours)
    except Exception as e:
        lines = str(e).splitlines() or [type(e).__name__]
        print(f"{name}: no reference ({lines[0][:100]}); here: {message or ours.get('text')!r}")
        return False
    if ours is None:
        print(f"{name}: refused: {message}")
        return False
    ours["chat"], ours["tools"] = rendered(model)
    if not has_template(model):                    # llama-server then takes a template of its own
        theirs["chat"] = theirs["tools"] = None
    different = [f"{key}: {ours[key]!r}, not {value!r}" for key, value in theirs.items()
                 if value is not None and not is_same(ours[key], value)]
    same = ", ".join(key for key, value in theirs.items() if value is not None)
    result = "; ".join(different) or f"same {same}"
    print(f"{name}: {result}" + (f" ({message})" if message else ""))
    return bool(different)


def is_same(ours, theirs) -> bool:
    """Generated ids may end with an end token that only one of the two shows."""
    if isinstance(ours, list) and len(ours) != len(theirs):
        n = min(len(ours), len(theirs))
        return abs(len(ours) - len(theirs)) == 1 and ours[:n] == theirs[:n]
    return ours == theirs


def generate(model: Path, adapter: Path | None, args) -> tuple[dict | None, str]:
    """-> ids by generate.py, and its notes; or None and its error."""
    command = [sys.executable, ROOT / "generate.py", "--checkpoint_path", model,
               "--dtype", "float32", "--device", "cpu", "--temperature", "0", "--json",
               "--max_new_tokens", str(N_NEW), "--prompt", args.prompt, *args.generate_args]
    command += ["--adapter", adapter] if adapter else []
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    errors = done.stderr.strip().splitlines()
    if done.returncode:
        return None, errors[-1] if done.returncode == 2 else f"status {done.returncode}: {errors}"
    answer = json.loads(done.stdout.splitlines()[0])
    notes = [line.removeprefix("note: ") for line in errors if line.startswith("note: ")]
    ours = dict(prompt=answer["prompt_ids"], new=answer["new_ids"], text=answer["text"])
    return ours, "; ".join(notes)


def tokenizer_of(model: Path):
    sys.path.insert(0, str(ROOT))
    from gpt_faster.formats.load import read_checkpoint
    from gpt_faster.text.tokenizer_files import load
    return load(read_checkpoint(model).tokenizer)


def has_template(model: Path) -> bool:
    return tokenizer_of(model).chat_template is not None


def rendered(model: Path) -> tuple[str | None, str | None]:
    """The chat template's text, without and with tools; None: it fails or there is none."""
    tokenizer, texts = tokenizer_of(model), []
    from gpt_faster.text.chat_template import TemplateError, render
    for tools in (None, TOOLS):
        text = None
        if tokenizer.chat_template:
            with suppress(TemplateError):
                text = render(tokenizer, CHAT, tools=tools)
        texts.append(text)
    return tuple(texts)


def of_transformers(model: Path, adapter: Path | None, prompt: str, ours: dict | None) -> dict:
    """ours: its prompt ids are continued where transformers cannot read the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging
    logging.set_verbosity_error()
    tokenizer = None
    with suppress(ValueError):
        tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter:
        from peft import PeftModel
        network = PeftModel.from_pretrained(network, adapter)
    ids = torch.tensor([tokenizer(prompt).input_ids if tokenizer else ours["prompt"]])
    new = network.generate(input_ids=ids, max_new_tokens=N_NEW, do_sample=False)[0, ids.shape[1]:]
    chats = [None, None]
    if tokenizer and tokenizer.chat_template:
        for i, tools in enumerate((None, TOOLS)):
            with suppress(Exception):              # as many templates refuse tools
                chats[i] = tokenizer.apply_chat_template(
                    CHAT, tools=tools, tokenize=False, add_generation_prompt=True)
    return dict(prompt=ids[0].tolist() if tokenizer else None, new=new.tolist(), chat=chats[0],
                tools=chats[1])


def fits(model: Path, adapter: Path) -> bool:
    """Is every tensor of the adapter for a module of the model with its width?"""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    try:
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)
    except Exception:
        return False
    return True


def of_llama_cpp(path: Path, prompt: str) -> dict:
    """By a llama-server of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [LLAMA_SERVER, "--model", path, "--host", "127.0.0.1", "--port", port, "--threads", 2,
               "--ctx-size", 256, "--fit", "off", "--cache-type-k", "f32", "--cache-type-v", "f32",
               "--jinja", "--no-warmup"]
    server = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, text=True)

    def ask(where: str, **body):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/{where}", json.dumps(body).encode(),
            {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request, timeout=60))

    try:
        for _ in range(600):
            with suppress(OSError):
                if urllib.request.urlopen(f"http://127.0.0.1:{port}/health").status == 200:
                    break
            if server.poll() is not None:
                errors = [line for line in server.stderr if "error" in line.lower()]
                raise ValueError((errors or ["llama-server ended"])[0].strip())
            time.sleep(0.1)
        ids = ask("tokenize", content=prompt, add_special=True, parse_special=True)["tokens"]
        done = ask("completion", prompt=ids, n_predict=N_NEW, temperature=0, return_tokens=True)
        chats = [None, None]
        for i, tools in enumerate((None, TOOLS)):
            with suppress(OSError):                # as many templates refuse tools
                more = {"tools": tools} if tools else {}
                chats[i] = ask("apply-template", messages=CHAT, **more)["prompt"]
        return dict(prompt=ids, new=done["tokens"], chat=chats[0], tools=chats[1])
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
