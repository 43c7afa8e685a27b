"""Runs in a folder that holds the core's eight files and nothing else of ours: python core_alone.py FOLDER < tasks.

A task is a line of JSON: path, scheme (null, "int8", "int4-g32"), engine ("kv_cache", "torch_compile"), prompts (lists of
ids, one for each row), n_new, draft (a path or null). It answers with the tokens of each row, as a line of JSON.
"""

import importlib.abc
import json
import sys

ROOMS = ("gpt_faster",)


class NoRooms(importlib.abc.MetaPathFinder):
    """Whoever imports a room fails here, wherever Python might find one."""

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ROOMS:
            raise ImportError(f"the core imports {name}")


def tokens(generate, speculate, path, scheme, engine, prompts, n_new, draft):
    import torch

    from sampling import Sampler, SamplingParams
    torch._dynamo.reset()
    model, _, _ = generate.load_model(path, "cpu", torch.float32, scheme)
    compiles = engine == "torch_compile"
    model.setup_cache(len(prompts), 128, 64, max_rejected=3)
    sampler = Sampler([SamplingParams(temperature=0)] * len(prompts), model.cfg.vocab_size)
    steps = generate.compile_steps(model) if compiles else generate.Steps()
    batch = generate.Batch(model, sampler, steps)
    if draft:
        batch = speculate.build_speculative(model, sampler, steps, generate.load_model(draft, "cpu", torch.float32)[0], 3, compiles)
    rows = torch.cat([token.clone() for token in generate.generate(batch, prompts, n_new)], dim=1)
    return [[i for i in row if i >= 0] for row in rows.tolist()]


if __name__ == "__main__":
    sys.meta_path.insert(0, NoRooms())
    sys.path[0] = sys.argv[1]                              # not the tests
    import generate
    import speculate
    for line in sys.stdin:
        print(json.dumps(tokens(generate, speculate, **json.loads(line))), flush=True)
