"""lm-eval's own client of completions servers gives, through serve.py, the scores that eval.py gives."""

import json

import pytest
import transformers
from conftest import SMOLLM2
from test_eval import local_only, run, tasks  # noqa: F401
from test_serve import Process

pytestmark = pytest.mark.slow


def test_local_completions_scores_as_eval_py(capsys, tmp_path, tasks, local_only):  # noqa: F811
    import lm_eval
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    names = ["local_choice", "local_rolling", "local_text"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2.parent, gguf_file=SMOLLM2.name)
    tokenizer.save_pretrained(tmp_path)
    server = Process()
    try:
        client = LocalCompletionsAPI(base_url=f"http://127.0.0.1:{server.port}/v1/completions", model=SMOLLM2.name, tokenizer=str(tmp_path),
                                     tokenizer_backend="huggingface", batch_size=2, max_length=256)
        served = lm_eval.simple_evaluate(client, tasks=names, task_manager=local_only(include_path=str(tasks)))
    finally:
        server.stop()
    capsys.readouterr()
    status, out, _ = run(capsys, "-m", SMOLLM2, "--device", "cpu", "--dtype", "float32", "--include_path", tasks, "--max_seq_length", 256,
                         "--tasks", *names, "--json")
    assert status == 0
    for name in names:
        ours, theirs = ({k: v for k, v in r["results"][name].items() if isinstance(v, float)} for r in (json.loads(out), served))
        assert theirs == pytest.approx(ours, rel=1e-4) and len(theirs) >= 2, name
