"""Calibration text for GPTQ: a file, lm-eval tasks, or text that the model itself generates.

    tokens = generate_text(model, tokenizer, eos_ids, n_row=32, length=512)
"""

import time
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from generate import log
from gpt_faster.text.chat_template import render
from gpt_faster.text.english import english_text
from model import Transformer

# Without a prompt a model mostly generates one kind of text. Most rows begin with one of these.
OPENINGS = (
    "The city lies on the bank of a river and has about twenty thousand inhabitants. ",
    "Die Stadt liegt am Ufer eines Flusses und hat etwa zwanzigtausend Einwohner. Im Sommer ",
    'def read_lines(path):\n    """Return the lines of a file."""\n',
    "La ville se trouve au bord d'une rivière et compte environ vingt mille habitants. En été, ",
    "La ciudad está a la orilla de un río y tiene unos veinte mil habitantes. En verano ",
    "#include <stdio.h>\n\nint main(int argc, char **argv) {\n",
    "Город расположен на берегу реки, в нём живёт около двадцати тысяч человек. Летом ",
    "这座城市位于河边，约有两万居民。夏天，",
    "<!DOCTYPE html>\n<html>\n<head>\n",
    "A cidade fica à beira de um rio e tem cerca de vinte mil habitantes. No verão ",
    "La città si trova sulla riva di un fiume e conta circa ventimila abitanti. In estate ",
    "Question: What is the square root of 144?\nAnswer:",
    "その町は川のほとりにあり、人口は約二万人です。夏には",
    "De stad ligt aan de oever van een rivier en telt ongeveer twintigduizend inwoners. ",
    "SELECT name, COUNT(*) FROM orders ",
    "Miasto leży nad brzegiem rzeki i liczy około dwudziestu tysięcy mieszkańców. Latem ")
REQUESTS = ("Hello!", "Write a short story.", "Explain how a bicycle works.", "Was ist Musik?",
            "Écris un poème.", "Write a Python function that sorts a list.", "¿Qué es el agua?")


def calibration_text(file: str | None, tasks: list[str], include_path: str | None = None) -> str:
    """The text of a file, of lm-eval tasks, or else of Python's documentation."""
    if file:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{file}: not UTF-8 text") from None
        if not text.strip():
            raise ValueError(f"{file}: no text to calibrate on")
        return text
    return "\n\n".join(task_texts(tasks, include_path)) if tasks else english_text()


def task_texts(names: list[str], include_path: str | None):
    """Questions with their correct answers, from the training split if there is one."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ImportError("--calibration_tasks needs: pip install lm-eval") from None
    manager = TaskManager(include_path=include_path)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise ValueError(f"lm-eval has no task {', '.join(unknown)}")
    try:
        tasks = manager.load(names)["tasks"].values()
    except Exception as e:                         # the datasets library raises many types
        raise OSError(f"cannot load the data of {', '.join(names)}: "
                      f"{(str(e).splitlines() or [type(e).__name__])[0][:160]}") from None
    for task in tasks:
        for doc in task.training_docs() if task.has_training_docs() else task.eval_docs:
            target = task.doc_to_target(doc)
            if isinstance(target, int):
                target = task.doc_to_choice(doc)[target]
            target = target[0] if isinstance(target, list) else target
            question = task.doc_to_text(doc)
            yield f"{question}{task.config.target_delimiter if question else ''}{target}"


def text_openings(tokenizer, eos_ids: set[int], n_row: int) -> list[list[int]]:
    """Prompts for n_row texts. Of every eight, one is empty, one is a chat request if the model has
    a chat template, the others are OPENINGS."""
    start = [tokenizer.bos_id] if tokenizer.bos_id is not None else sorted(eos_ids)[:1]
    opening, request = cycle(OPENINGS), cycle(REQUESTS)
    rows = []
    for i in range(n_row):
        if i % 8 == 0:
            ids = start
        elif i % 8 == 1 and tokenizer.chat_template:
            message = dict(role="user", content=next(request))
            ids = tokenizer.encode(render(tokenizer, [message]), bos=False)
        else:
            ids = tokenizer.encode(next(opening))
        rows.append(ids or tokenizer.encode("The"))
    return rows


@torch.inference_mode()
def generate_text(model: Transformer, tokenizer, eos_ids: set[int], n_row: int,
                  length: int) -> Tensor:
    """Sample text from the model at temperature 1, with a fixed seed -> ids [n_row, length].

    After an end-of-sequence token a new text begins, as in training. Removes the model's cache.
    """
    device = model.freq.device
    rows = torch.zeros(n_row, length, dtype=torch.int64)
    is_prompt = torch.zeros(n_row, length, dtype=torch.bool)
    for i, ids in enumerate(text_openings(tokenizer, eos_ids, n_row)):
        ids = ids[:length]
        rows[i, :len(ids)] = torch.tensor(ids)
        is_prompt[i, :len(ids)] = True
    rows, is_prompt = rows.to(device), is_prompt.to(device)
    eos = torch.tensor(sorted(eos_ids), device=device)
    bos = rows[0, 0]                               # first token of a text
    random = torch.Generator(device).manual_seed(0)
    model.setup_cache(n_row, length)
    begin = last = time.perf_counter()
    for t in range(length - 1):
        kv_len = min(length, -(-(t + 1) // 64) * 64)
        logits = model(rows[:, t:t + 1], torch.arange(t, t + 1, device=device), 1, kv_len)[:, 0]
        # inverse transform sampling: 10x faster than one random number per vocabulary entry
        cdf = logits.softmax(-1).cumsum(-1)
        point = torch.rand(n_row, 1, device=device, generator=random) * cdf[:, -1:]
        token = torch.searchsorted(cdf, point)[:, 0].clamp(max=cdf.shape[-1] - 1)
        token = torch.where(torch.isin(rows[:, t], eos), bos, token)
        rows[:, t + 1] = torch.where(is_prompt[:, t + 1], rows[:, t + 1], token)
        if time.perf_counter() > last + 10:
            last = time.perf_counter()
            left = (last - begin) / (t + 1) * (length - 2 - t)
            log(f"generating calibration text: {t + 2} of {length} tokens in {n_row} rows, "
                f"{left:.0f} s left")
    model.setup_cache(0, length)
    return rows.cpu()
