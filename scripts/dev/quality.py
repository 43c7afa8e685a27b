"""Compare quantization schemes: size, memory, perplexity and speed.

Creates files with quantize.py, measures them with eval.py and generate.py, and their speed in one
run of benchmark.py; writes benchmarks/quality.json, from which scripts/dev/map.py makes the
README's table. Existing files in checkpoints/quality are reused. Takes an hour on 2 cores:

    python scripts/dev/quality.py
"""

import json
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from gpt_faster.bench.machine import describe_machine, run_command  # noqa: E402
from gpt_faster.cli.common import guarded  # noqa: E402
from gpt_faster.cli.parser import Parser  # noqa: E402

MODELS = {                                         # file, group sizes that fit its shapes
    "Gemma 3 270M": ("gemma-3-270m/gemma-3-270m-q4_k_m.gguf", [32, 128]),
    "SmolLM2-135M": ("SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf", [64])}
COMMAND = "python scripts/dev/quality.py"


def run_script(*args) -> str:
    """Run a script -> its stdout; exit with its status if it fails."""
    print("$ python", *args, file=sys.stderr)
    process = subprocess.run([sys.executable, *map(str, args)], cwd=ROOT, stdout=subprocess.PIPE,
                             text=True)
    if process.returncode:
        sys.exit(process.returncode)               # the script has logged why
    return process.stdout


def make_files(gguf: Path, directory: Path, groups: list[int]) -> dict[str, Path]:
    """Create missing files -> scheme -> file."""
    paths = {"bfloat16": directory / "model.pth", "int8": directory / "model_int8.pth"}
    for mode in ("int4", "int4-gptq"):
        for group in groups:
            paths[f"{mode}-g{group}"] = directory / f"model_{mode}.g{group}.pth"
    for scheme, path in paths.items():
        if (ROOT / path).exists():
            continue
        if scheme == "bfloat16":
            run_script("scripts/convert_hf_checkpoint.py", "--checkpoint_dir", gguf,
                       "--output", path)
            continue
        mode = scheme
        options = []
        if scheme != "int8":
            mode, group = scheme.rsplit("-g", 1)
            options = ["--groupsize", group]
        run_script("quantize.py", "-m", gguf, "--mode", mode, *options, "--output", path)
    return paths


def measure(model: str, scheme: str, path: Path) -> dict:
    """Size, memory and perplexity of a file: a row without speed."""
    quality = json.loads(run_script("eval.py", "-m", path, "--compile", "--json",
                                    "--perplexity", "pydoc"))
    memory = json.loads(run_script("generate.py", "-m", path, "--json", "--prompt", "5",
                                   "--max_new_tokens", "16", "--ignore_eos"))
    return dict(model=model, weights=scheme, path=str(path),
                file_bytes=(ROOT / path).stat().st_size, model_bytes=memory["model_bytes"],
                peak_memory_bytes=memory["peak_memory_bytes"],
                **{key: quality[key] for key in ("perplexity", "tokens", "window", "stride")})


def run(argv: list[str] | None = None) -> int:
    Parser(description=__doc__.splitlines()[0]).parse_args(argv)
    rows = []
    for model, (name, groups) in MODELS.items():
        gguf = Path("checkpoints", name)
        directory = Path("checkpoints/quality") / gguf.parent.name
        for scheme, path in make_files(gguf, directory, groups).items():
            rows.append(measure(model, scheme, path))
    paths = [arg for row in rows for arg in ("-m", row["path"])]
    speed = json.loads(run_script("benchmark.py", *paths, "--engines", "compile", "-r", 7,
                                  "-o", "json"))
    for row, figures in zip(rows, speed["rows"], strict=True):
        for key in ("tok_s", "tok_s_min", "tok_s_max", "bandwidth_fraction"):
            row[key] = figures[key]
    machine = describe_machine(torch.device(speed["device"]))
    result = dict(command=COMMAND, commit=run_command("git", "describe", "--always", "--dirty"),
                  machine=speed["machine"], device=speed["device"], threads=speed["threads"],
                  capability=machine["capability"], versions=machine["versions"],
                  bandwidth_gb_s=speed["bandwidth_gb_s"], rows=rows)
    output = ROOT / "benchmarks/quality.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(run))
