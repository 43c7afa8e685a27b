"""Run by test_edits_everywhere.py as two ranks: each edit counts there as alone, uncompiled and with the kernels."""

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import pytest  # noqa: E402
from test_what_is_read_runs import CFG, DTYPES, EDITS, alike, distance, make, run  # noqa: E402

import tp  # noqa: E402
from checkpoint import Checkpoint, LazyTensor, load_model  # noqa: E402
from gpt_faster.kernels import compile as compile_room  # noqa: E402

# Those that do not depend on how wide a rank's parts are.
WHOLE = ("attention_of_a_window_and_sinks rounded_keys_and_values mask_with_sinks rope_of_the_model method_of_a_class "
         "method_of_a_layer method_of_a_small_part method_of_the_last_norm another_last_norm another_attention "
         "another_feed_forward steering_hook steering_pre_hook hook_on_a_norm hook_on_all_modules new_weight_of_a_norm "
         "new_data_of_a_norm norm_edited_in_place another_known_norm numbers_of_parts another_known_attention").split()


def of_a_rank(dtype):
    """This rank's part of make()'s model."""
    whole = make(dtype)
    tensors = {}
    for name, t in whole.state_dict().items():
        for piece, part in zip(*pieces(name, t)):
            tensors[piece] = LazyTensor(piece, tuple(part.shape), part.dtype,
                                        lambda a, b, part=part: part[a:b])
    source = Checkpoint(Path("edited"), CFG, tensors)
    model = tp.parallelize(load_model(tp.shard(source), dtype, "cpu"), CFG.vocab_size)
    model.setup_cache(1, 64)
    return model.eval()


def pieces(name, t):
    """As on disk."""
    if ".wqkv." in name:
        split = [CFG.n_head * CFG.head_dim, *[CFG.n_kv_head * CFG.head_dim] * 2]
        return [name.replace("wqkv", piece) for piece in ("wq", "wk", "wv")], t.split(split)
    if ".gate_up." in name:
        return [name.replace("gate_up", piece) for piece in ("gate", "up")], t.chunk(2)
    return [name], [t]


def logits(make_it, name, when, dtype, compiled):
    change, *_ = EDITS[name]
    model, undo = make_it(dtype), pytest.MonkeyPatch()
    try:
        if when == "before":
            change(model, undo)
        if compiled:
            compile_room.compile_model(model)
        if when == "after":
            run(model)
            change(model, undo)
        return run(model)
    finally:
        undo.undo()


@torch.no_grad()
def main():
    tp.start()
    torch.set_num_threads(1)
    for dtype in DTYPES:
        for name in WHOLE:
            expected = logits(make, name, "before", dtype, False)
            for when in ("before", "after"):
                for compiled in (False, True):
                    found = logits(of_a_rank, name, when, dtype, compiled)
                    assert alike(found, expected, dtype), (name, when, compiled, dtype, distance(found, expected))
    model = of_a_rank(torch.float32)
    model.layers[1].ffn = make().layers[1].ffn
    try:
        run(model)
    except ValueError as e:
        assert "layers.1.ffn or its forward was replaced" in str(e)
    else:
        raise AssertionError("a part that nothing sums")
    if tp.rank() == 0:
        print("all right")
    tp.end()


if __name__ == "__main__":
    main()
