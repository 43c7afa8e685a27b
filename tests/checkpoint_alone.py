"""Run by test_checkpoint_alone.py: checkpoint.py and tp.py with an import hook that fails on every room.

    python checkpoint_alone.py OUT.pt FOLDER < a path on each line           # logits [T, V] of each model
"""

import importlib.abc
import sys
from pathlib import Path

ROOMS = ("layers", "formats", "kernels", "cli", "gptq", "server", "bench")


class NoRooms(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ROOMS:
            raise ImportError(f"the core imports {name}")


def logits(source, shards=1):
    """Of shards' models one after another only the shapes are looked at: their sums need ranks."""
    model = checkpoint.load_model(source, torch.float32, "cpu")
    n = 24
    tokens = torch.randint(0, 160, (1, n), generator=torch.Generator().manual_seed(1))
    model.setup_cache(1, n)
    with torch.inference_mode():
        return model(tokens, torch.arange(n), logits_to_keep=n)[0]


if __name__ == "__main__":
    sys.meta_path.insert(0, NoRooms())
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import torch

    import checkpoint
    import tp
    out, folder, found = Path(sys.argv[1]), Path(sys.argv[2]), {}
    for i, line in enumerate(sys.stdin.read().splitlines()):
        source = checkpoint.open_checkpoint(line)
        found[line] = logits(source)
        written = folder / f"{i}.pth"
        checkpoint.save_checkpoint(source, written, None)
        found[f"{line} as .pth"] = logits(checkpoint.read_checkpoint(written))
        halves = [tp.shard(source, 2, rank) for rank in range(2)]
        for half in halves:
            checkpoint.check(half)
    torch.save(found, out)
