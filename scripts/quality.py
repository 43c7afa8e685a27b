"""What quantization costs and gives: size, memory, perplexity and speed, side by side.

Makes each file with quantize.py, measures it with eval.py and generate.py, and all of them in one
run of benchmark.py; writes benchmarks/quality.json, from which scripts/map.py makes the README's
table. Files that are in checkpoints/quality already are kept. On 2 cores an hour:

    python scripts/quality.py
"""

import json
import platform
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from cli.common import Parser, guarded  # noqa: E402

MODELS = {                                         # groups that divide its widths, and the schemes
    "Gemma 3 270M": ("gemma-3-270m/gemma-3-270m-q4_k_m.gguf", [32, 128]),
    "SmolLM2-135M": ("SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf", [64])}
COMMAND = "python scripts/quality.py"


def call(*args) -> str:
    print("$ python", *args, file=sys.stderr)
    done = subprocess.run([sys.executable, *map(str, args)], cwd=ROOT, stdout=subprocess.PIPE,
                          text=True)
    if done.returncode:
        sys.exit(done.returncode)                  # it has said why
    return done.stdout


def files(gguf: Path, directory: Path, groups: list[int]) -> dict[str, Path]:
    """Scheme -> file, made where it is missing."""
    made = {"bfloat16": directory / "model.pth", "int8": directory / "model_int8.pth"}
    for mode in ("int4", "int4-gptq"):
        made |= {f"{mode}-g{g}": directory / f"model_{mode}.g{g}.pth" for g in groups}
    for scheme, path in made.items():
        if path.exists():
            continue
        if scheme == "bfloat16":
            call("scripts/convert_hf_checkpoint.py", "--checkpoint_dir", gguf, "--output", path)
        elif scheme == "int8":
            call("quantize.py", "-m", gguf, "--mode", "int8", "--output", path)
        else:
            mode, group = scheme.rsplit("-g", 1)
            call("quantize.py", "-m", gguf, "--mode", mode, "--groupsize", group, "--output", path)
    return made


def run(argv: list[str] | None = None) -> int:
    Parser(description=__doc__.splitlines()[0]).parse_args(argv)
    rows = []
    for model, (gguf, groups) in MODELS.items():
        gguf = Path("checkpoints", gguf)
        directory = Path("checkpoints/quality") / gguf.parent.name
        for scheme, path in files(gguf, directory, groups).items():
            quality = json.loads(call("eval.py", "-m", path, "--compile", "--json",
                                      "--perplexity", "pydoc"))
            used = json.loads(call("generate.py", "-m", path, "--json", "--prompt", "5",
                                   "--max_new_tokens", "16", "--ignore_eos"))
            rows.append(dict(
                model=model, weights=scheme, path=str(path), file_bytes=path.stat().st_size,
                model_bytes=used["model_bytes"], peak_memory_bytes=used["peak_memory_bytes"],
                **{k: quality[k] for k in ("perplexity", "tokens", "window", "stride")}))
    paths = [arg for row in rows for arg in ("-m", row["path"])]
    speed = json.loads(call("benchmark.py", *paths, "--engines", "compile", "-r", 7, "-o", "json"))
    for row, found in zip(rows, speed["rows"], strict=True):
        row |= {k: found[k] for k in ("tok_s", "tok_s_min", "tok_s_max", "bandwidth_fraction")}
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE).stdout.strip()
    result = dict(command=COMMAND, commit=commit, machine=speed["machine"], device=speed["device"],
                  threads=speed["threads"], capability=torch.backends.cpu.get_cpu_capability(),
                  versions=dict(torch=torch.__version__, python=platform.python_version()),
                  bandwidth_gb_s=speed["bandwidth_gb_s"], rows=rows)
    output = ROOT / "benchmarks/quality.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(run))
