"""Different prompts in one batch, slots that are refilled, prompts in chunks, rings: nothing changes a row."""

import itertools
import json
import shutil
import signal
import subprocess

import pytest
import tiny
import torch
from conftest import SMOLLM2
from helpers import GREEDY, generated, make_batch
from test_errors import refused, run
from test_generate import command

import generate
from generate import Sequence, follow
from gpt_faster import loading
from gpt_faster.cli import batch
from gpt_faster.decoding import engines, scheduler
from gpt_faster.decoding.samplers import build_sampler
from gpt_faster.decoding.scheduler import Generation
from gpt_faster.kernels.cpu.layers import use_operations
from gpt_faster.text.english import english_text
from model import Ring, cache_bytes, n_slots
from sampling import SamplingParams
from tokenizer import NullTokenizer

LENGTHS = [20, 3, 11, 1, 7, 15, 2, 18]
NEW = [3, 8, 2, 5, 1, 18, 3, 16]                           # two of three rows run side by side at the end
# Greedily a tiny model says its last token again, whatever its cache holds. With this it has to look.
UNLIKE = SamplingParams(0, repetition_penalty=5.0)


def prompts(seed=5):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 160, (n,), generator=g).tolist() for n in LENGTHS]


def alone(model, ids, n_new, how=GREEDY):
    """By recomputation: no cache, no chunks, no other row."""
    return [t.item() for t in generated(model, [ids], n_new, how, use_cache=False)]


def serve(model, work, n_slots, steps=generate.Steps(), how=GREEDY, kind=None):
    """-> the new ids of each prompt, and the slots in which they were. kind of batch: else as on a CPU."""
    asked = [Generation(NullTokenizer(), ids, max_new=n) for ids, n in work]
    where = {}
    slots = make_batch(model, [how] * n_slots, steps=steps)
    slots = kind(model, slots.sampler, steps) if kind else slots
    for done, slot in batch.serve(slots, asked):
        assert done.finish_reason == "length" and done.start_s <= done.first_s <= done.last_s
        where[done] = slot
    return [each.ids for each in asked], [where[each] for each in asked]


# ---- The model: rings ----------------------------------------------------------------------------

def test_ring_has_window_plus_longest_call_minus_one_slots():
    assert [n_slots(8, 40, c) for c in (1, 4, 33, 40)] == [8, 11, 40, 40] and n_slots(None, 40, 1) == 40
    ring = Ring(1, 4, "cpu")                               # window 3, calls of 2, as in the picture
    for pos in ([0, 1], [2, 3], [4, 5]):
        slot, held = ring(torch.tensor(pos), 4, None)
    assert slot.tolist() == [0, 1] and held.tolist() == [[4, 5, 2, 3]]


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_chunks_in_rings_equal_whole(ours, name):
    """Calls as long as allowed, shared and per-row positions, over what an earlier request left."""
    model, g = ours(name), torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 160, (3, 40), generator=g)
    model.setup_cache(0, 40)
    expected = model(tokens, torch.arange(40), logits_to_keep=40)
    model.setup_cache(3, 40, 4)
    windows = {w for w in model.cfg.window if w}
    assert {ring.slot_positions.shape[1] for ring in model.rings.values()} == {w + 3 for w in windows if w + 3 < 40}
    allocated = sum(t.numel() * 4 for layer in model.layers for t in layer.attn.buffers())
    assert allocated == cache_bytes(model.cfg, 3, 40, 4, torch.float32)
    for shared in (True, False):
        at, logits = 0, []
        for n in (4, 4, 1, 3, 4, 2, 4, 4, 4, 1, 4, 4, 1):
            pos = torch.arange(at, at + n)
            logits.append(model(tokens[:, at:at + n], pos if shared else pos.expand(3, -1), n))
            at += n
        torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_slots_chunks_and_refills_equal_alone(ours, name):
    """Eight prompts through three slots: different lengths, starts and ends; in chunks and rings."""
    model, work = ours(name), list(zip(prompts(), NEW))
    model.setup_cache(0, 40)                               # RoPE of a kind that follows the length
    expected = [alone_at(model, ids, n) for ids, n in work]
    whole, padded = generate.Steps(), generate.Steps(pad=True)
    for longest, steps, kind in ((None, whole, scheduler.RowsBatch), (4, whole, scheduler.RowsBatch),      # a step of the rows in use
                                 (4, whole, generate.Batch), (8, padded, generate.Batch)):         # or of all, as on a GPU
        model.setup_cache(3, 40, longest)
        got, where = serve(model, work, 3, steps, UNLIKE, kind)
        assert got == expected and set(where) == {0, 1, 2}


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_slots_by_operations_equal_alone(ours, name, two_threads):
    """Steps of one, two and three of three rows, by operations in C++."""
    model, work = ours(name), list(zip(prompts(), NEW))
    model.setup_cache(0, 40)
    expected = [alone_at(model, ids, n) for ids, n in work]
    assert use_operations(model)
    model.setup_cache(3, 40, 8)
    assert serve(model, work, 3, how=UNLIKE)[0] == expected


@torch.inference_mode()
def test_a_step_runs_the_rows_in_use(ours, monkeypatch):
    """A row that has ended costs nothing, and its cache stays as it is."""
    model, work = ours("llama3"), prompts()[:3]
    expected = [alone(model, ids, 6) for ids in work]
    model.setup_cache(3, 40)
    sizes, forward = [], model.forward
    monkeypatch.setattr(model, "forward", lambda tokens, *a: (sizes.append(tokens.shape), forward(tokens, *a))[1])
    rows = make_batch(model, [GREEDY] * 3)
    got = [rows.prefill([0, 1, 2], work)]
    got += [rows.step() for _ in range(2)]
    rows.end(1)
    was = [t[1].clone() for layer in model.layers for t in layer.attn.cache.buffers()]
    got += [rows.step() for _ in range(2)]
    rows.end(0)
    got += [rows.step()]
    assert [t[0].item() for t in got][:5] == expected[0][:5] and [t[2].item() for t in got] == expected[2]
    assert sizes[-5:] == [(3, 1), (3, 1), (2, 1), (2, 1), (1, 1)]
    assert all(map(torch.equal, was, (t[1] for layer in model.layers for t in layer.attn.cache.buffers())))


def alone_at(model, ids, n_new):
    """As alone(), with RoPE for 40 positions whatever the prompt's length, and no token likely a second time."""
    tokens, penalty = list(ids), UNLIKE.repetition_penalty
    with torch.inference_mode():
        for _ in range(n_new):
            logits = model(torch.tensor([tokens]), torch.arange(len(tokens)))[0, -1]
            said = torch.tensor(sorted(set(tokens)))
            logits[said] = torch.where(logits[said] > 0, logits[said] / penalty, logits[said] * penalty)
            tokens.append(logits.argmax().item())
    return tokens[len(ids):]


# ---- The loop ------------------------------------------------------------------------------------

def test_rows_of_different_lengths_without_a_cache_too(ours):
    model, work = ours("qwen3"), prompts()[:3]
    expected = [alone(model, ids, 9) for ids in work]
    for more in (dict(), dict(use_cache=False)):
        got = torch.cat(list(generated(model, work, 9, GREEDY, **more)), dim=1).tolist()
        assert got == expected


def test_a_repetition_penalty_counts_each_rows_own_tokens(ours):
    """A slot's next prompt has not said what the last one did; what fills a row up was not said."""
    model, work, how = ours("llama3"), list(zip(prompts(), NEW)), SamplingParams(0, repetition_penalty=1.7)
    expected = [alone(model, ids, n, how) for ids, n in work]
    model.setup_cache(2, 40, 8)
    assert serve(model, work, 2, how=how)[0] == expected


def test_a_slot_that_is_read_late(ours, monkeypatch):
    """As on a GPU, where the next step is under way when a row turns out to have ended."""
    class Far(torch.Tensor):
        is_cuda = property(lambda self: True)

    class Event:
        record = synchronize = lambda self: None
    empty = torch.empty
    model, work = ours("gemma3_text"), list(zip(prompts(), NEW))
    expected = [alone(model, ids, n) for ids, n in work]
    model.setup_cache(3, 40, 4)
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    read_late, n_late = generate.read_late, []

    def far(tokens, not_finite=None):
        for ids, tag in read_late(((token.as_subclass(Far), tag) for token, tag in tokens), not_finite):
            n_late.append(sum(1 for task in (tag[0] if tag else {}).values() if task.finish_reason))
            yield ids, tag
    monkeypatch.setattr(scheduler, "read_late", far)
    monkeypatch.setattr(generate, "read_late", far)
    assert serve(model, work, 3)[0] == expected and sum(n_late) > 4
    rows = [Sequence(NullTokenizer(), ids, max_new=9) for ids in prompts()[:3]]
    model.setup_cache(3, 40, 4)
    follow(generated(model, prompts()[:3], 9, GREEDY), rows, None)
    assert [row.ids for row in rows] == [alone(model, ids, 9) for ids in prompts()[:3]]


def test_refilling_compiled(ours, two_threads):
    model, work = ours("gemma2"), list(zip(prompts(), NEW))
    expected = [alone(model, ids, n) for ids, n in work]
    model.setup_cache(3, 40, 4)
    steps = engines.build_steps(model, "compile")
    assert serve(model, work, 3, steps)[0] == expected


@pytest.fixture(scope="module")
def smollm2():
    return loading.load_model(str(SMOLLM2), "cpu", torch.float32)


def test_smollm2_prompts_of_1_to_100_tokens_with_different_ends(smollm2, two_threads):
    model, _, tokenizer = smollm2
    ids = tokenizer.encode(english_text()[:8000])
    sizes = [1, 100, 7, 25, 2, 48, 15]                     # chunks of 24: one token, whole ones, one more
    work = [(ids[100 * i:100 * i + n], 1 + 5 * i % 11) for i, n in enumerate(sizes)]
    model.setup_cache(1, 128)
    expected = [[t.item() for t in generated(model, [p], n, GREEDY)] for p, n in work]
    model.setup_cache(3, 128, 24)
    assert serve(model, work, 3)[0] == expected


def test_too_long_for_the_model_is_refused(ours):
    model = ours("llama2")
    model.setup_cache(2, 128)
    for lengths, n_new, words in (((120, 100), 60, "100 \\+ 60"), ((128, 1), 60, "128 \\+ 1"), ((1, 1), 128, "1 \\+ 128")):
        with pytest.raises(ValueError, match=f"^{words} tokens exceed 128 positions$"):
            next(generate.generate(make_batch(model, [GREEDY] * 2), [[1] * n for n in lengths], n_new))


def test_a_row_whose_cache_is_full_ends(ours):
    """Its neighbour goes on as alone, and it had what it has alone."""
    model, prompts = ours("llama2"), [[1 + i % 90 for i in range(120)], [5, 6]]
    model.setup_cache(2, 128)
    long, short = torch.cat(list(generate.generate(make_batch(model, [GREEDY] * 2), prompts, 60)), dim=1).tolist()
    for prompt, row, n in zip(prompts, (long, short), (8, 60)):
        model.setup_cache(1, 128)
        alone = torch.cat(list(generate.generate(make_batch(model, [GREEDY]), [prompt], n)), dim=1)[0].tolist()
        assert row[:n] == alone


# ---- Reading requests ----------------------------------------------------------------------------

@pytest.mark.parametrize("line, words", [
    ('{"prompt": "a"', "not valid JSON"), ('["a"]', "expected an object"), ('{"id": 1}', "expected an object"),
    ('{"prompt": "a", "messages": []}', "expected an object"), ('{"prompt": 5}', '"prompt" must be a string'),
    ('{"messages": []}', '"messages" must be a list'), ('{"messages": [{"role": "user"}]}', '"messages" must be a list'),
    ('{"messages": "hi"}', '"messages" must be a list'), ('{"prompt": "a", "id": [1]}', '"id" must be an integer'),
    ('{"prompt": "a", "id": true}', '"id" must be an integer'), ('{"prompt": "a", "max_new_tokens": 0}', "above 0"),
    ('{"prompt": "a", "max_new_tokens": true}', "above 0"), ('{"prompt": "a", "temperatur": 1}', "unknown key"),
    ('{"prompt": "a", "temperature": -1}', '"temperature": must be at least 0'), ('{"prompt": "a", "top_p": "b"}', '"top_p": expected'),
    ('{"prompt": "a", "top_k": 1.5}', '"top_k": expected an integer'), ('{"prompt": "a", "seed": true}', '"seed": expected'),
    ('{"prompt": "b\\ud800"}', "lone surrogate"),
    ('{"prompt": "b", "id": "x"}', "duplicate id 'x', also in line 1"), ("[" * 9999, "not valid JSON")])
def test_a_bad_line_is_named_and_the_others_stay(tmp_path, line, words):
    path = tmp_path / "p.jsonl"
    path.write_text(f'\ufeff{{"prompt": "a", "id": "x"}}\n\n{line}\n{{"prompt": "c", "max_new_tokens": 3}}\r\n')
    requests, complaints = batch.read_prompts(path)
    assert [(r.id, r.prompt, r.max_new_tokens, r.where) for r in requests] == [
        ("x", "a", None, f"{path}:1"), (2, "c", 3, f"{path}:4")]
    assert len(complaints) == 1 and complaints[0].startswith(f"{path}:3: ") and words in complaints[0]


def test_lines_of_text(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text('one\n\n{"two"}\r\nthree\x0bfour\u2028five')
    assert [(r.id, r.prompt) for r in batch.read_prompts(path)[0]] == [
        (0, "one"), (1, '{"two"}'), (2, "three\x0bfour\u2028five")]


# ---- The command line ----------------------------------------------------------------------------

ARGV = ["-m", SMOLLM2, "--device", "cpu", "--dtype", "float32", "--temperature", 0, "--max_new_tokens", 9]
SAID = {"Hello, my name is": " Alex, and I'm a professional coach.",
        "The capital of France is": " Paris.\n\nThe answer is: "}


@pytest.fixture
def small(families, tmp_path):
    """The argv of a tiny Qwen3 with a tokenizer of 160 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    directory = tmp_path / "small"
    shutil.copytree(families("qwen3")[0], directory)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(160)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    return ["-m", directory, "--device", "cpu", "--dtype", "float32", "--ignore_eos"]


def test_several_prompts_in_order_with_fewer_slots(capsys, small):
    argv = [*small, "--temperature", 0, "--repetition_penalty", 5, "--max_new_tokens", 9]
    texts = ["w1 w2 w3", "w40 w50", "w7", "w1 w2 w3", "w40 w50"]
    alone = {text: run(capsys, *argv, "--prompt", text)[1] for text in set(texts)}
    assert len(set(alone.values())) == 3
    prompts = [a for text in texts for a in ("--prompt", text)]
    for n in (1, 2, 9):
        status, out, err = run(capsys, *argv, *prompts, "--batch_size", n)
        assert status == 0 and out == "".join(f"--- {i} ---\n{alone[text]}" for i, text in enumerate(texts))
        assert "5 of 5 prompts, 45 new tokens" in err
    status, out, _ = run(capsys, *argv, *prompts, "--batch_size", 2, "--json", "--stop", alone["w7"].split()[3])
    found = {o["id"]: o for o in map(json.loads, out.splitlines())}
    assert sorted(found) == [0, 1, 2, 3, 4] and {o["slot"] for o in found.values()} == {0, 1}
    assert found[3]["text"] == found[0]["text"] and found[3]["prompt"] == "w1 w2 w3"
    assert found[2]["finish_reason"] == "stop" and found[2]["text"].split() == alone["w7"].split()[1:3]
    assert {"new_ids", "prompt_ids", "finish_reason", "ttft_s", "decode_tok_s"} <= set(found[0])


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [dict(id=f"r{i}", prompt=text, max_new_tokens=3 + i) for i, text in enumerate([*SAID] * 2)]
    lines.append(dict(messages=[dict(role="user", content="What is 2+2?")]))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_each_line_has_its_own_sampling(capsys, small, tmp_path):
    """In one batch, whatever runs beside it: greedy as alone, seeds repeat, a penalty is one row's."""
    path = tmp_path / "p.jsonl"
    lines = [dict(temperature=0), dict(temperature=0.9, top_k=0, top_p=0.8, seed=1), dict(top_k=3, seed=2),
             dict(temperature=0.9, top_k=0, top_p=0.8, seed=1), dict(temperature=0, repetition_penalty=1.8)]
    lines = [dict(prompt="w1 w2 w3", max_new_tokens=12 + i, **line) for i, line in enumerate(lines)]
    path.write_text("\n".join(map(json.dumps, lines)))
    said = {}
    for batch_size in (1, 3):
        status, out, err = run(capsys, *small, "--prompts_file", path, "--json", "--batch_size", batch_size)
        results = sorted(map(json.loads, out.splitlines()), key=lambda result: result["id"])
        assert status == 0 and [len(r["new_ids"]) for r in results] == [12, 13, 14, 15, 16]
        said[batch_size] = [r["new_ids"] for r in results]
    assert said[1] == said[3]
    greedy, seeded, other, again, penalized = said[3]
    assert again[:13] == seeded != other[:13] and greedy != penalized[:12]
    alone = run(capsys, *small, "--temperature", 0, "--max_new_tokens", 12, "--prompt", "w1 w2 w3", "--json")[1]
    assert json.loads(alone)["new_ids"] == greedy


def test_a_file_of_prompts_and_going_on_after_an_interruption(capsys, jsonl, tmp_path):
    output = tmp_path / "out.jsonl"
    argv = [*ARGV, "--prompts_file", jsonl, "--batch_size", 2]
    status, whole, _ = run(capsys, *argv, "--json")
    status, out, err = run(capsys, *argv, "--output", output)
    lines = output.read_text().splitlines()
    timeless = [{k: v for k, v in json.loads(line).items() if not k.endswith("_s")} for line in lines]
    assert status == 0 and out == "" and len(lines) == 5
    assert timeless == [{k: v for k, v in json.loads(line).items() if not k.endswith("_s")}
                        for line in whole.splitlines()]
    found = {o["id"]: o for o in timeless}
    assert [len(found[f"r{i}"]["new_ids"]) for i in range(4)] == [3, 4, 5, 6]
    assert found[4]["prompt"] is None and found[4]["messages"][0]["role"] == "user" and "answer" in found[4]["text"]
    for kept in (2, 5):
        output.write_text("".join(line + "\n" for line in lines[:kept]) + lines[0][:40])   # cut short
        status, out, err = run(capsys, *argv, "--output", output)
        assert status == 0 and f"{output} has {kept} results already: {5 - kept} prompts to go" in err
        again = [json.loads(line) for line in output.read_text().splitlines()]
        assert {o["id"]: o["new_ids"] for o in again} == {o["id"]: o["new_ids"] for o in timeless}
        assert len(again) == 5


def test_bad_rows_do_not_stop_the_others(capsys, jsonl):
    with open(jsonl, "a") as f:
        f.write('{"prompt": \n{"prompt": "", "id": "e"}\n{"prompt": "' + 'x y ' * 4500 + '"}\n{"id": "r0", "prompt": "x"}\n')
        f.write('{"id": "last", "prompt": "Hello", "max_new_tokens": 1}\n')
    status, out, err = run(capsys, *ARGV, "--prompts_file", jsonl, "--json")
    found = [json.loads(line)["id"] for line in out.splitlines()]
    assert status == 1 and found == ["r0", "r1", "r2", "r3", 4, "last"]
    for line, words in ((6, "not valid JSON"), (7, "the prompt is empty"), (8, "8192"), (9, "also in line 1")):
        complaint = next(c for c in err.splitlines() if f"{jsonl}:{line}: " in c)
        assert words in complaint and complaint.startswith("generate.py: error: "), complaint


def test_interrupted_rows_are_run_again(jsonl, tmp_path):
    output = tmp_path / "out.jsonl"
    jsonl.write_text("".join(json.dumps(dict(prompt=f"Hello {i}", max_new_tokens=4 if i < 3 else 2000)) + "\n"
                             for i in range(6)))
    argv = command(*ARGV, "--prompts_file", jsonl, "--batch_size", 2, "--output", output, "--json", "--ignore_eos")
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        first = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in err and "3 of 6 prompts" in err
    assert output.read_text() == "".join(first) + out and len(batch.read_finished(output)[0]) == 3


def test_chat_is_the_template_once(capsys):
    argv = [*ARGV, "--prompt", "What is 2+2?", "--chat"]
    status, out, _ = run(capsys, *argv)
    alone = json.loads(run(capsys, *argv, "--json")[1])
    assert status == 0 and out == alone["text"] + "\n" and "answer" in out and alone["prompt"] == "What is 2+2?"
    status, out, _ = run(capsys, *argv, "--prompt", "Hi", "--json", "--system_prompt", "You are terse.")
    told = json.loads(out.splitlines()[0])
    assert told["prompt_ids"] != alone["prompt_ids"] and told["messages"][0]["role"] == "user"
    _, _, tokenizer = loading.load_model(str(SMOLLM2))
    assert "You are terse." in tokenizer.decode(told["prompt_ids"])


def test_bad_input(capsys, tmp_path, jsonl):
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "other.jsonl").write_text('{"id": 1}\n')
    (tmp_path / "deep.jsonl").write_text("[" * 99999 + "\n")
    (tmp_path / "precious.json").write_text('{"a": 1}')
    base = ["-m", SMOLLM2, "--device", "cpu"]
    for argv, words in (
            (["--prompts_file", tmp_path / "none.txt"], "No such file"),
            (["--prompts_file", tmp_path / "empty.txt"], "no prompts in this file"),
            (["--prompts_file", tmp_path / "bad.txt"], "not UTF-8"),
            (["--prompts_file", jsonl, "--prompt", "x"], "mutually exclusive"),
            (["--prompts_file", jsonl, "--output", tmp_path / "no/where"], "No such file"),
            (["--prompts_file", jsonl, "--output", tmp_path], "Is a directory"),
            (["--prompts_file", jsonl, "--output", tmp_path / "other.jsonl"], "other.jsonl:1: not a result of an earlier run"),
            (["--prompts_file", jsonl, "--output", tmp_path / "deep.jsonl"], "deep.jsonl:1: not a result of an earlier run"),
            (["--prompts_file", jsonl, "--output", tmp_path / "precious.json"], "precious.json:1: not a result"),
            (["--prompts_file", jsonl, "--output", jsonl], "prompts.jsonl:1: not a result of an earlier run"),
            (["--prompt", "a", "--prompt", "b", "--num_samples", 2], "cannot be combined with --num_samples"),
            (["--prompt", "a", "--prompt", "b", "--engine", "recompute"], "--engine recompute"),
            (["--prompts_file", jsonl, "--interactive"], "--interactive cannot be combined with --prompts_file"),
            (["--system_prompt", "x"], "require --chat, --interactive"),
            (["--chat", "--prompt", ""], "the prompt is empty"),
            (["--chat", "--chat_template_kwargs", "[1]"], "expected a JSON object"),
            (["--prefill_chunk", "0"], "must be at least 1")):
        assert words in refused(capsys, *base, *argv), argv
    assert (tmp_path / "precious.json").read_text() == '{"a": 1}'
    jsonl.write_text('{"prompt": ""}\n')
    status, out, err = run(capsys, *base, "--prompts_file", jsonl)
    assert status == 1 and out == "" and "the prompt is empty" in err and "Memory" not in err


def test_chat_without_a_template(capsys):
    assert "no chat template" in refused(capsys, "--random", "stories15M", "--chat", "--prompt", "Hi", "--device", "cpu")


def test_memory_is_stated_and_refused(capsys):
    status, out, err = run(capsys, *ARGV, "--max_seq_length", 8192, "--batch_size", 3)
    assert status == 0 and "Memory: 538 MB for weights and 1132 MB for the KV cache (3 x 8192 positions)" in err
    argv = ["--random", "Llama-3.1-70B", "--prompt", 5, "--device", "cpu"]
    status, out, err = run(capsys, *argv)
    assert status == 2 and "not enough memory: 141" in err and "--quantize" in err and "Traceback" not in err
    status, out, err = run(capsys, *ARGV, "--max_seq_length", 8192, "--batch_size", 3000)
    assert status == 2 and "(3000 x 8192 positions), but only" in err and "--batch_size" in err


def test_a_long_prompt_in_chunks_says_the_same(capsys, small):
    argv = [*small, "--temperature", 0, "--repetition_penalty", 5, "--prompt", 100, "--json", "--max_new_tokens", 8]
    found = [json.loads(run(capsys, *argv, "--prefill_chunk", n)[1])["new_ids"] for n in (9, 64, 5000)]
    assert found[0] == found[1] == found[2] and len(set(found[0])) > 4


@pytest.mark.parametrize("kind", [generate.Batch, scheduler.RowsBatch])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_prompts_that_begin_together_in_rows_of_any_order(ours, kind, n):
    """Of one length and in all rows too: each has its own row's cache and parameters, not its neighbour's."""
    model = ours("llama3")
    params = [GREEDY, SamplingParams(temperature=1.0, seed=5), SamplingParams(temperature=0.7, top_k=9, seed=6)]
    texts = torch.randint(3, 150, (3, 8), generator=torch.Generator().manual_seed(2)).tolist()

    def tokens(order):
        """Row -> its tokens, where the prompts begin in this order."""
        model.setup_cache(3, 40)
        batch = kind(model, build_sampler(model, params))
        batch.prefill(order, [texts[row] for row in order])
        made = [batch.token.clone(), *(batch.step().clone() for _ in range(6))]
        return torch.cat(made, 1).tolist()

    alone = {}
    for row in range(3):
        alone[row] = tokens([row])[row]
    for order in itertools.permutations(range(3), n):
        made = tokens(list(order))
        assert all(made[row] == alone[row] for row in order), order
