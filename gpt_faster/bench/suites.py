"""Run a suite of benchmarks, one after another, into benchmarks/MACHINE.json.

Each is a benchmark.py command line in a separate process.

    run_suite("cpu", list(SUITES["cpu"]), torch.device("cpu"), charts=None)
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from generate import log
from gpt_faster.bench import plots
from gpt_faster.bench.machine import ROOT, describe_machine
from gpt_faster.bench.profiling import file_name
from gpt_faster.bench.tables import table

# The tables of gpt-fast's README and nanoGPT's inference benchmark that fit such a machine, and
# comparisons with peers.
SUITES = {
    "cpu": {
        "SmolLM2-135M": "--engines recompute,kv_cache,sorted,sort_free,torch_compile,compile,int8,"
                        "int4 "
                        "--peers llama.cpp,ik_llama.cpp,ik_llama.cpp-repacked,transformers,"
                        "generate.py -r 3",
        "Short prompts": "-p 5,9,17,33,65 -n 0 --engines compile,int8,int4 --peers "
                         "llama.cpp,ik_llama.cpp,ik_llama.cpp-repacked,openvino -r 7",
        "Long prompts": "-p 512 -n 0 --engines compile,int8,int4 --peers "
                        "llama.cpp,ik_llama.cpp,ik_llama.cpp-repacked,openvino -r 7",
        "Very long prompts": "-p 2048 -n 0 --engines compile,int8,int4 --peers "
                             "llama.cpp,ik_llama.cpp,ik_llama.cpp-repacked,openvino -r 3",
        "Decoding": "-d 128 -n 64 --engines compile,int8,int4 "
                    "--peers llama.cpp,ik_llama.cpp,ik_llama.cpp-repacked,openvino -r 7",
        "Long contexts": "-d 4096 -n 64 --engines compile,int8,int4 "
                         "--peers llama.cpp,ik_llama.cpp,ik_llama.cpp-repacked,openvino -r 3",
        "Many prompts": "--requests 32 -n 64 -d 100 -b 16,32 --engines compile --peers "
                        "llama.cpp,ik_llama.cpp,openvino,vllm -r 7",
        "Batches": "--engines compile -n 64 -b 1,4,16,64 -r 3",
        "Caches": "--engines compile -n 100 --max_seq_length 256,8192 -r 3",
        "Copied text": "--text benchmarks/edit.txt --engines compile,ngram --peers llama.cpp -r 3",
        "A new story": "--text benchmarks/story.txt --temperature 0.8 --engines compile,ngram -r 3",
        "Llama-1.1B": "--random Llama-1.1B -d 128 -n 64 --engines compile,int8,int4 "
                      "--peers llama.cpp,ik_llama.cpp,ik_llama.cpp-repacked -r 5",
        "Llama-1.1B, prompts": "--random Llama-1.1B -p 9,65,512 -n 0 --engines compile,int8,int4 "
                               "--peers llama.cpp,ik_llama.cpp,ik_llama.cpp-repacked -r 5",
        "Mixture of experts": "--random Mixtral-8x160M,Mixtral-8x160M-dense --engines compile "
                              "-n 64 -r 3",
        "Mamba-2": "--random Granite-4-H-tiny-10L,Falcon-H1-1.5B,Nemotron-Nano-9B-16L -p 512 "
                   "-d 128 -n 64 --engines compile,int8,int4 --peers llama.cpp -r 5",
        "Several processes": "-m checkpoints/gemma-3-270m/gemma-3-270m-q4_k_m.gguf --engines "
                             "compile -n 64 --ranks 1,2 -r 3",
        "gpt2-xl": "--init_from gpt2-xl --max_new_tokens 20 -b 1 -r 1",
    },
    "gpu": {
        "Llama-2-7B": "--random Llama-2-7B --engines torch_compile,compile,cuda_graph,int8,int4",
        "Llama-3.1-8B": "--random Llama-3.1-8B --engines torch_compile,compile,cuda_graph,int8,"
                         "int4 "
                        "--peers transformers-compile",
        "Llama-3.2-1B": "--random Llama-3.2-1B --engines torch_compile,compile,cuda_graph,int8,"
                         "int4 "
                        "--peers transformers-compile",
        "Mixtral-8x7B": "--random Mixtral-8x7B --engines compile,int8 -r 3",
        "Llama-2-70B": "--random Llama-2-70B --engines int8,int4 -r 3",
        "Llama-3.1-70B": "--random Llama-3.1-70B --engines int8,int4 -r 3",
        "gpt2-xl": "--init_from gpt2-xl --max_new_tokens 100",
    },
}


def run_suite(suite: str, titles: list[str], device: torch.device, charts: Path | None) -> int:
    """Run each entry in its own process, so that memory is freed -> exit status.

    The file is updated after each entry; entries already measured at this commit are skipped.
    """
    machine = describe_machine(device)
    kind = machine["capability"] or ""             # of the CPU
    name = file_name(f"{machine['machine']} {machine['threads']} threads {kind}".rstrip())
    path = ROOT / f"benchmarks/{name}.json"
    path.parent.mkdir(exist_ok=True)
    tables = json.loads(path.read_text())["tables"] if path.exists() else {}
    status = 0
    for title, command in SUITES[suite].items():
        if title not in titles:
            continue
        if tables.get(title, {}).get("commit") == machine["commit"]:
            log(f"{title}: already measured at {machine['commit']}")
            continue
        log(f"== {title}: benchmark.py {command}")
        process = subprocess.run(
            [sys.executable, str(ROOT / "benchmark.py"), *shlex.split(command),
             "--device", str(device), "-o", "json"], stdout=subprocess.PIPE, text=True)
        if process.returncode == 130:              # Ctrl-C
            return 130
        status = max(status, process.returncode)
        if not process.stdout:
            log(f"{title}: no result, exit status {process.returncode}")
            continue
        tables[title] = json.loads(process.stdout)
        tables[title]["command"] = f"python benchmark.py {command}"
        tables = {t: tables[t] for t in SUITES[suite] if t in tables}      # keep the suite's order
        write_json(path, dict(machine, tables=tables))
        print(f"### {title}\n\n{table(tables[title])}\n", flush=True)
        if charts:
            plots.plot(tables[title], charts / file_name(title))
    return status


def write_json(path: Path, value: dict) -> None:
    """Replace the file atomically."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(partial, path)
