"""Run by test_checkpoint_alone.py: checkpoint.py and tp.py with an import hook that fails on every room.

    python checkpoint_alone.py OUT.pt FOLDER < a path on each line           # logits [T, V] of each model
    torchrun --standalone --nproc_per_node=2 checkpoint_alone.py PATH        # the ranks' are those of one process
"""

import importlib.abc
import sys
from pathlib import Path

ROOMS = ("gpt_faster",)


class NoRooms(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ROOMS:
            raise ImportError(f"the core imports {name}")


def logits(model):
    n = 24
    tokens = torch.randint(0, 160, (1, n), generator=torch.Generator().manual_seed(1))
    model.setup_cache(1, n)
    with torch.inference_mode():
        return model(tokens, torch.arange(n), logits_to_keep=n)[0]


def load(source):
    return checkpoint.load_model(source, torch.float32, "cpu")


def of_each(out, folder):
    found = {}
    for i, line in enumerate(sys.stdin.read().splitlines()):
        source = checkpoint.open_checkpoint(line)
        found[line] = logits(load(source))
        written = Path(folder) / f"{i}.pth"
        checkpoint.save_checkpoint(source, written, None)
        found[f"{line} as .pth"] = logits(load(checkpoint.read_checkpoint(written)))
    torch.save(found, out)


def as_ranks(path):
    tp.start()
    source = checkpoint.open_checkpoint(path)
    model = tp.parallelize(load(tp.shard(source)), source.cfg.vocab_size)
    whole = logits(load(source))
    scale = whole.std().item()
    torch.testing.assert_close(logits(model), whole, rtol=1e-4, atol=1e-4 * scale)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(logits(model), whole, rtol=1e-4, atol=1e-4 * scale)
    token = torch.tensor([[tp.rank() + 5]])
    for broadcast in (tp.broadcast, torch.compile(tp.broadcast, fullgraph=True, backend="aot_eager")):
        assert broadcast(token).item() == 5
    print(f"{tp.world()} ranks agree")


if __name__ == "__main__":
    sys.meta_path.insert(0, NoRooms())
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import torch

    import checkpoint
    import tp
    (of_each if len(sys.argv) == 3 else as_ranks)(*sys.argv[1:])
