"""What mutants survived all other tests (tests/mutants.py), room by room: one small test for each."""

import pytest
import torch
from helpers import GREEDY, make_batch

from generate import Steps, generate

# ---- The core -----------------------------------------------------------------------------------

def test_few_keys_at_a_time_are_all_keys(ours):
    """A step attends to as many positions as the longest row has, its new token counted: 8, 16 and 32 of them here."""
    model, generator = ours("llama3"), torch.Generator().manual_seed(4)
    prompts = [torch.randint(0, 160, (n,), generator=generator).tolist() for n in (13, 2, 6)]
    model.setup_cache(0, 40)
    expected = []
    for ids in map(list, prompts):
        for _ in range(6):
            ids.append(model(torch.tensor([ids]), torch.arange(len(ids)))[0, -1].argmax().item())
        expected.append(ids[-6:])
    model.setup_cache(3, 40)
    batch = make_batch(model, [GREEDY] * 3, steps=Steps(min_kv_len=8))
    assert torch.cat(list(generate(batch, prompts, 6)), dim=1).tolist() == expected


def test_a_context_is_used_to_its_last_position_and_no_further(ours):
    model = ours("llama3")
    model.setup_cache(1, 12)
    assert len(list(generate(make_batch(model, [GREEDY]), [[1, 2, 3]], 9))) == 9
    with pytest.raises(ValueError, match="3 . 10 tokens exceed 12"):
        next(generate(make_batch(model, [GREEDY]), [[1, 2, 3]], 10))
