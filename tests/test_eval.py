"""Perplexity is transformers', and lm-eval gets the answers that its own HFLM gives."""

import builtins
import functools
import json
import math
import shutil

import pytest
import torch
import transformers
from conftest import SMOLLM2

import generate
from gpt_faster import devices, loading
from gpt_faster.bench.engines import share_weights
from gpt_faster.cli import evaluate as evaluation
from gpt_faster.decoding import engines, scheduler
from gpt_faster.quantization.calibration_text import calibration_text

TEXT = ("The harbour was quiet before dawn. A single boat, painted blue and white, turned slowly on its rope while "
        "the gulls argued over the roofs. Maria counted the crates again, wrote the number down, and wondered why "
        "the captain had paid for twice as many. “Nobody asks about the tide,” he had said, “until it is gone.” ")


def run(capsys, *argv):
    """-> exit status, stdout, stderr of eval.py in this process."""
    try:
        status = evaluation.guarded(evaluation.run, [str(a) for a in argv])
    except SystemExit as e:
        status = e.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture(scope="module")
def peer():
    """transformers' SmolLM2 of the same weights, in fp32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        SMOLLM2.parent, gguf_file=SMOLLM2.name, dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True)).eval()


@torch.no_grad()
def sliding(model, ids, window, stride):
    """Perplexity as in transformers' documentation, each window weighted by the tokens it scores."""
    ids, total, count, done = torch.tensor([ids]), 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + window, ids.shape[1])
        piece = ids[:, begin:end]
        labels = piece.clone()
        labels[:, :done - end] = -100
        n = int((labels[:, 1:] != -100).sum())
        total += float(model(piece, labels=labels).loss) * n if n else 0.0
        count, done = count + n, end
        if end == ids.shape[1]:
            return math.exp(total / count), count


# ---- Perplexity ----------------------------------------------------------------------------------

@pytest.mark.parametrize("has_bf16, dtype", [(True, "bfloat16"), (False, "float32")])
def test_scoring_is_in_what_the_cpu_multiplies(capsys, monkeypatch, has_bf16, dtype):
    monkeypatch.setattr(devices, "has_bf16", lambda: has_bf16)
    argv = ["-m", SMOLLM2, "--device", "cpu", "--perplexity", "pydoc", "--limit", 9, "--json"]
    assert json.loads(run(capsys, *argv)[1])["dtype"] == dtype
    assert json.loads(run(capsys, *argv, "--dtype", "bfloat16")[1])["dtype"] == "bfloat16"


@pytest.mark.parametrize("family", ["llama3", "gemma2", "gpt2", "qwen2_moe", "phi3-longrope", "qwen3_5_text"])
@pytest.mark.parametrize("window, stride", [(40, 20), (33, 7), (16, 16), (89, 89), (128, 64)])
def test_perplexity_is_transformers(families, ours, family, window, stride):
    """The last window is short in each case, down to one token, which then has nothing before it."""
    ids = torch.randint(0, 160, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    result = evaluation.perplexity(ours(family), evaluation.windows(ids, window, stride), 3)
    perplexity, count = sliding(families(family)[1], ids, window, stride)
    assert result["tokens"] == count
    assert result["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert result["nats_per_token"] == pytest.approx(math.log(perplexity), abs=1e-5)


def test_pieces_change_nothing(ours, monkeypatch):
    """However many rows and positions go into one call, compiled shapes too, and in which order."""
    model, g = ours("gemma3_text"), torch.Generator().manual_seed(2)
    lengths = [(50, 20), (3, 1), (50, 49), (64, 5), (1, 0), (31, 30), (17, 16)]
    rows = [(torch.randint(0, 160, (n,), generator=g).tolist(), k) for n, k in lengths]
    alone = [evaluation.score(model, [row])[0] for row in rows]
    assert [len(scores) for scores in alone] == [k for _, k in lengths]
    for batch_size, chunk, compiled in ((1, 16, False), (4, 16, True), (3, 32, True), (8, 256, False), (8, 256, True)):
        monkeypatch.setattr(evaluation, "CHUNK", chunk)
        for scores, expected in zip(evaluation.score(model, rows, batch_size, compiled), alone):
            assert [best for _, best in scores] == [best for _, best in expected]
            torch.testing.assert_close(*(torch.tensor([p for p, _ in s]) for s in (scores, expected)), rtol=1e-6, atol=1e-5)


def test_few_logits_at_a_time(ours, monkeypatch):
    model, widths = ours("llama2"), []
    monkeypatch.setattr(evaluation, "MAX_LOGITS", 160 * 40)
    model.head.register_forward_hook(lambda m, args, out: widths.append(out.numel()))
    evaluation.score(model, [(list(range(100)), 99), (list(range(60)), 59)], 2)
    assert max(widths) <= 160 * 40 and sum(widths) >= 160 * (99 + 59)


def test_answers_that_share_a_question_are_computed_once(ours):
    model, calls = ours("llama3"), []
    question = torch.randint(0, 160, (20,)).tolist()
    rows = [(question + [i], n) for i, n in ((3, 1), (99, 4), (3, 1), (7, 0))] + [(question[:-1] + [5], 1)]
    alone = [evaluation.score(model, [row])[0] for row in rows]
    model.register_forward_hook(lambda m, args, out: calls.append(args[0].shape))
    together = evaluation.score(model, rows, 8)
    assert calls == [(2, 20)]
    for a, b in zip(alone, together):
        assert [best for _, best in a] == [best for _, best in b]
        assert [p for p, _ in a] == pytest.approx([p for p, _ in b], abs=1e-5)


def test_each_token_is_scored_once_and_disjoint_windows_lose_their_first():
    ids = list(range(50))
    for window, stride in ((10, 3), (10, 9), (7, 1), (50, 25), (64, 64)):
        scored = [i for row, n in evaluation.windows(ids, window, stride) for i in row[len(row) - n:]]
        assert scored == ids[1:], (window, stride)
    assert evaluation.windows(ids, 20, 20) == [(ids[:20], 19), (ids[20:40], 19), (ids[40:], 9)]


def test_smollm2_perplexity(capsys, peer, tmp_path, exhaustive):
    """The command on a real model; its text is the same for both tokenizers."""
    n = 600 if exhaustive else 330
    (tmp_path / "text").write_text(TEXT * 8, encoding="utf-8")
    argv = ["-m", SMOLLM2, "--perplexity", tmp_path / "text", "--dtype", "float32", "--device", "cpu", "--limit", n, "--stride"]
    status, out, _ = run(capsys, *argv, 170, "--max_seq_length", 256, "--json")
    result, ids = json.loads(out), loading.open_model(SMOLLM2)[1].encode(TEXT * 8)[:n]
    perplexity, count = sliding(peer, ids, 256, 170)
    assert status == 0 and result["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    known = dict(tokens=count, window=256, stride=170, model=SMOLLM2.name, dtype="float32", device="cpu",
                 quantization="none")
    assert known.items() <= result.items() and result["model_bytes"] > 5e8 and result["seconds"] > 0
    status, out, _ = run(capsys, *argv, 30, "--max_seq_length", 30, "--limit", 60)
    assert status == 0 and out.startswith("perplexity ") and "over 58 tokens (" in out
    assert out.endswith("; window 30, stride 30)\n")


# ---- lm-eval -------------------------------------------------------------------------------------

def task(name, directory, rows, **config):
    (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = dict(data_files=dict(test=str(directory / f"{name}.jsonl")), cache_dir=str(directory / "cache"))
    (directory / f"{name}.yaml").write_text(json.dumps(dict(
        task=name, dataset_path="json", dataset_kwargs=data, test_split="test", **config)))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A directory of three tasks, one of each kind. No digits: transformers splits a GGUF's otherwise."""
    directory = tmp_path_factory.mktemp("tasks")
    rows = [dict(q=q, a=a, right=right) for q, a, right in (
        ("The capital of France is", ["Paris", "Rome", "a small village near the coast"], 0),
        ("Water freezes when it gets", ["cold", "warm", "loud"], 0),
        ("A cat is", ["an animal", "a number between two others"], 0),
        ("Is the sun hot? Answer:", ["no", "yes"], 1), ("Is ice hot? Answer:", ["no", "yes"], 0))]
    mean = dict(aggregation="mean", higher_is_better=True)
    task("local_choice", directory, rows, output_type="multiple_choice", doc_to_text="{{q}}", doc_to_choice="{{a}}",
         doc_to_target="{{right}}", metric_list=[dict(metric="acc", **mean), dict(metric="acc_norm", **mean)])
    metrics = [dict(metric=m) for m in ("word_perplexity", "byte_perplexity", "bits_per_byte")]
    task("local_rolling", directory, [dict(text=TEXT[:n]) for n in (40, 200, 330)], output_type="loglikelihood_rolling",
         doc_to_text="", doc_to_target="{{text}}", metric_list=metrics)
    rows = [dict(q=q, a=a) for q, a in (("The capital of France is", " Paris"), ("Roses are red, violets are", " blue"),
                                        ("The capital of Spain is", " Madrid"), ("Monday, Tuesday,", " Wednesday"))]
    task("local_text", directory, rows, output_type="generate_until", doc_to_text="{{q}}", doc_to_target="{{a}}",
         metric_list=[dict(metric="exact_match", **mean)],
         generation_kwargs=dict(until=[".", ",", "\n"], max_gen_toks=8, do_sample=False))
    return directory


@pytest.fixture
def local_only(monkeypatch):
    """lm-eval's own 14,000 tasks take seconds to list."""
    import lm_eval.tasks
    alone = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", alone)
    return alone


@pytest.fixture(scope="module")
def adapters(peer):
    """batch size -> ours and, under None, lm-eval's own; 64 positions. None of them computes yet."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.huggingface import HFLM
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2.parent, gguf_file=SMOLLM2.name)
    model, source, own = loading.load_model(SMOLLM2, "cpu", torch.float32)
    kind = type("Ours", (evaluation.LMEvalModel, TemplateLM), {})
    ours = {n: kind(model, source, own, generate.Steps(), False, n, 64) for n in (1, 4)}
    steps = engines.build_steps(compiled := share_weights(model), "compile", compile_prefill=True)
    ours["compiled"] = kind(compiled, source, own, steps, True, 2, 64)
    return {None: HFLM(pretrained=peer, tokenizer=tokenizer, batch_size=2, max_length=64), **ours}


def ask(adapters, kind, arguments, which=(None, 1, 4)):
    """-> the answers of lm-eval's own, of ours one by one, and of ours in batches."""
    from lm_eval.api.instance import Instance
    requests = [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]
    return [getattr(adapters[n], kind)(requests, disable_tqdm=True) for n in which]


def test_loglikelihood_is_hflm(adapters):
    likely = ("The capital of France is", " Paris")
    expected, one, four = ask(adapters, "loglikelihood", [
        likely, ("The capital of France is", " Rome"), ("The capital of France is ", "Rome"), ("", "Once upon a time"),
        (TEXT, " He was"), (TEXT[:80], TEXT[80:200]), ("Once upon a", " time, there was"), ("<|im_start|>user\nHi", "!"), likely])
    for ours in (one, four):
        assert [best for _, best in ours] == [best for _, best in expected] and any(best for _, best in ours)
        assert [p for p, _ in ours] == pytest.approx([p for p, _ in expected], abs=1e-3)


def test_rolling_is_hflm(adapters):
    """More tokens than positions, fewer, and exactly as many."""
    expected, one, four = ask(adapters, "loglikelihood_rolling", [(TEXT * 2,), (TEXT[:90],), ("a" + " b" * 63,)])
    assert one == pytest.approx(expected, rel=1e-5) and four == pytest.approx(expected, rel=1e-5)


def test_generated_text_is_hflm(adapters):
    """Stop strings, the end of the sequence, prompts of one length and of others, one to cut."""
    chat = "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"
    expected, one, four = ask(adapters, "generate_until", [
        ("The capital of France is", dict(until=[".", "\n"], max_gen_toks=12)),
        ("The capital of Spain is", dict(until=[".", "\n"], max_gen_toks=12)),
        ("Roses are red,", dict(until="violets", max_gen_toks=12)),
        (TEXT, dict(until=[], max_gen_toks=9, do_sample=False, temperature=0.0)),
        (chat, dict(until=["<|im_end|>"], max_gen_toks=14))])
    assert one == expected and four == expected
    assert expected[0] and "." not in expected[0] and "<|" not in expected[4]


def test_tasks_are_hflm(capsys, adapters, tasks, local_only):
    import lm_eval
    names = ["local_choice", "local_rolling", "local_text"]
    expected = lm_eval.simple_evaluate(adapters[None], tasks=names, task_manager=local_only(include_path=str(tasks)))
    capsys.readouterr()
    argv = ["-m", SMOLLM2, "--device", "cpu", "--dtype", "float32", "--include_path", tasks, "--max_seq_length", 64]
    status, out, _ = run(capsys, *argv, "--tasks", *names, "--json")
    result = json.loads(out)
    assert status == 0 and {"seconds", "model_bytes", "quantization", "versions"} <= set(result)
    for name in names:
        ours, theirs = ({k: v for k, v in r["results"][name].items() if isinstance(v, float)} for r in (result, expected))
        assert ours == pytest.approx(theirs, rel=1e-4) and len(ours) >= 2, name
    status, out, _ = run(capsys, *argv, "--tasks", "local_[ct]*", "--limit", 2, "--num_fewshot", 0)
    assert status == 0 and out.count("local_") == 2 and "exact_match" in out and "acc_norm" in out


def test_compiled_is_eager(adapters):
    """The real compiler; three rows in batches of two, so that one is filled up."""
    pairs = [("The capital of France is", " Paris"), ("Is ice hot? Answer:", " yes"), ("Is ice hot? Answer:", " no it is")]
    eager, compiled = ask(adapters, "loglikelihood", pairs, (4, "compiled"))
    assert [best for _, best in compiled] == [best for _, best in eager]
    assert [p for p, _ in compiled] == pytest.approx([p for p, _ in eager], abs=1e-3)
    texts = [(q, dict(until=["."], max_gen_toks=6)) for q in ("The capital of France is", "The capital of Spain is")]
    eager, compiled = ask(adapters, "generate_until", texts, (4, "compiled"))
    assert compiled == eager


def test_chat_template(adapters):
    ours, theirs = adapters[1], adapters[None]
    history = [dict(role="system", content="Be brief."), dict(role="user", content="Hi")]
    assert ours.apply_chat_template(history) == theirs.apply_chat_template(history)
    begun = [*history, dict(role="assistant", content="Hello")]
    text = ours.apply_chat_template(begun, add_generation_prompt=False)
    assert text == theirs.apply_chat_template(begun, add_generation_prompt=False) and text.endswith("Hello")
    own = ours.tokenizer
    own.chat_template, whole = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}ok", own.chat_template
    assert ours.apply_chat_template(history) == "ok"           # without the system's message, as HFLM does
    own.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(ValueError, match="never"):
        ours.apply_chat_template(history)
    own.chat_template = whole


def test_arguments_of_generation(adapters, capsys):
    how, stops, eos_ids = adapters[1].sampling(dict(do_sample=True, temperature=0.5, top_p=0.9, until=["", "x", "<|im_end|>"],
                                                    max_gen_toks=3, num_beams=4))
    assert (how.temperature, how.top_p, how.top_k) == (0.5, 0.9, 0) and stops == ["x"] and 2 in eos_ids
    assert "ignored task arguments: num_beams" in capsys.readouterr().err
    assert adapters[1].sampling(dict(do_sample=False, temperature=0.5, until=[]))[0].temperature == 0


def test_beginning_of_sequence_once(families, tmp_path):
    """A model with BOS gets one, unless a chat template wrote it already or lm-eval wants none."""
    from tokenizers import Tokenizer, models, processors
    shutil.copytree(families("llama2")[0], tmp_path / "llama")
    fast = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<s>": 2}, unk_token="b"))
    fast.add_special_tokens(["<s>"])
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    fast.save(str(tmp_path / "llama/tokenizer.json"))
    model, source, own = loading.load_model(tmp_path / "llama", "cpu", torch.float32)
    adapter = evaluation.LMEvalModel(model, source, own, generate.Steps(), False, 1, 8)
    assert adapter.prefix_token_id == 2
    assert adapter.tok_encode("a") == adapter.tok_encode("<s>a") == [2, 0]
    assert adapter.tok_encode("a", add_special_tokens=False) == [0]


# ---- Bad input -----------------------------------------------------------------------------------

@pytest.mark.parametrize("argv, message", [
    ([], "one of the arguments --perplexity --tasks is required"),
    (["--perplexity", "pydoc", "--tasks", "x"], "not allowed with argument"),
    (["--perplexity", "/nowhere/text"], "No such file or directory: '/nowhere/text'"),
    (["--perplexity", "/"], "Is a directory"),
    (["--perplexity", "{empty}"], "perplexity needs at least 2 tokens, this text has 0"),
    (["--perplexity", "{binary}"], "not UTF-8 text: invalid start byte at byte 3"),
    (["--perplexity", "pydoc", "--limit", "1"], "perplexity needs at least 2 tokens, this text has 1"),
    (["--perplexity", "pydoc", "--limit", "0"], "must be at least 1, got 0"),
    (["--perplexity", "pydoc", "--stride", "0"], "must be at least 1, got 0"),
    (["--perplexity", "pydoc", "--stride", "2000"], "--stride 2000 exceeds the window of 1024 tokens"),
    (["--perplexity", "pydoc", "--max_seq_length", "9000"], "--max_seq_length 9000 exceeds the model's context of 8192"),
    (["--perplexity", "pydoc", "--max_seq_length", "1"], "must be at least 2, got 1"),
    (["--perplexity", "pydoc", "--batch_size", "0"], "must be at least 1, got 0"),
    (["--perplexity", "pydoc", "--device", "abacus"], "device 'abacus' not found"),
    (["--perplexity", "pydoc", "-m", "/nowhere/model.pth"], "no such file or directory"),
    (["--tasks", "local_chioce", "nonsense"], "no such task: local_chioce, nonsense (did you mean local_choice?)"),
    (["--tasks", "local_choice", "--include_path", "/nowhere"], "--include_path /nowhere: no such directory"),
    (["--tasks", "local_text", "--max_seq_length", "8"], "lm-eval: 8 new tokens leave no room for a prompt in a context of 8"),
    (["--tasks", "local_far"], "lm-eval: Couldn't reach 'no/where' on the Hub"),
], ids=str)
def test_bad_input(capsys, argv, message, tasks, local_only, tmp_path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"abc\xff")
    task("local_far", tmp_path, [], output_type="multiple_choice", doc_to_text="", doc_to_target="", doc_to_choice=[])
    far = tmp_path / "local_far.yaml"
    far.write_text(json.dumps({**json.loads(far.read_text()), "dataset_path": "no/where", "dataset_kwargs": {}}))
    (tmp_path / "local_choice.yaml").write_text((tasks / "local_choice.yaml").read_text())
    (tmp_path / "local_text.yaml").write_text((tasks / "local_text.yaml").read_text())
    argv = [a.format(empty=tmp_path / "empty", binary=tmp_path / "binary") for a in argv]
    more = [] if "-m" in argv else ["-m", SMOLLM2]
    more += ["--include_path", tmp_path] if "--tasks" in argv and "--include_path" not in argv else []
    status, out, err = run(capsys, *more, *argv)
    assert status == 2 and out == "" and "Traceback" not in err
    assert "error: " in err.splitlines()[-1] and message in err.splitlines()[-1]


def test_tasks_as_calibration_text(tasks, local_only):
    """quantize.py --calibration_tasks: questions with their right answers; whole texts."""
    text = calibration_text(None, ["local_choice", "local_rolling"], str(tasks))
    assert text.startswith("The capital of France is Paris\n\nWater freezes when it gets cold\n\n")
    assert text.endswith("Is ice hot? Answer: no\n\n" + "\n\n".join(TEXT[:n] for n in (40, 200, 330)))
    with pytest.raises(ValueError, match="no task nope"):
        calibration_text(None, ["nope", "local_text"], str(tasks))


def test_no_lm_eval(capsys, monkeypatch):
    original = builtins.__import__

    def without(name, *args):
        if name.startswith("lm_eval"):
            raise ModuleNotFoundError(f"No module named '{name}'")
        return original(name, *args)
    monkeypatch.setattr(builtins, "__import__", without)
    status, out, err = run(capsys, "-m", SMOLLM2, "--tasks", "hellaswag")
    assert status == 2 and out == "" and "--tasks needs lm-eval: pip install lm-eval" in err


def test_ctrl_c(capsys, monkeypatch, adapters):
    def interrupt(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(evaluation, "score", interrupt)
    status, out, _ = run(capsys, "-m", SMOLLM2, "--perplexity", "pydoc", "--limit", 9)
    assert status == 130 and out == ""
    monkeypatch.setattr(scheduler, "read_late", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ask(adapters, "generate_until", [("Hi", dict(max_gen_toks=3))], (1,))
