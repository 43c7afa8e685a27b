"""--quantize int4 on what is in four bits already: its own codes, not rounded again; and what is said of it."""

import gguf
import numpy as np
import pytest
import torch
from test_formats import write_gguf

from checkpoint import Checkpoint, LazyTensor, save_checkpoint
from gpt_faster.formats.gguf_int4 import BLOCKS, as_int4
from gpt_faster.formats.lazy import index_select
from gpt_faster.formats.load import load_model, read_checkpoint
from gpt_faster.formats.quantize_on_load import note, quantize_tensor, quantized
from gpt_faster.quantization.calibration_text import (
    OPENINGS,
    REQUESTS,
    generate_text,
    text_openings,
)
from quantize import dequantize, describe, scheme_named

FP32 = torch.float32


def logits(model, n=12):
    model.setup_cache(0, n)
    tokens = torch.randint(0, 160, (2, n), generator=torch.Generator().manual_seed(1))
    return model(tokens, torch.arange(n), logits_to_keep=n)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_say_the_same(kind):
    """Any bytes that are finite numbers, whole rows and some of them, in another order too."""
    kind = gguf.GGMLQuantizationType[kind]
    n_block, n_byte = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(1).integers(0, 256, (6, 512 // n_block, n_byte), dtype=np.uint8)
    blocks[..., 1] &= 0x3B                                 # exponents of halves that are no infinity
    blocks[..., 3] &= 0x3B
    blocks = blocks.reshape(6, -1)
    expected = torch.from_numpy(gguf.dequantize(blocks, kind))
    t = LazyTensor("x.weight", (6, 512), FP32, lambda a, b: expected[a:b])
    leaves = as_int4(t, kind.name, lambda a, b: torch.from_numpy(blocks[a:b].copy()))
    assert [leaf.shape for leaf in leaves] == [(6, 256), (6, 16), (6, 16)]
    near = dict(rtol=1e-5, atol=1e-6 * float(expected.abs().max()))        # a zero and eight scales cancel
    torch.testing.assert_close(dequantize(*(leaf.whole() for leaf in leaves), FP32), expected, **near)
    order = torch.tensor([4, 1, 5])
    some = (index_select(leaf, order).read_rows(1, 3) for leaf in leaves)
    torch.testing.assert_close(dequantize(*some, FP32), expected[order[1:]], **near)
    assert as_int4(t, "Q5_0", None) == ()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_a_gguf_keeps_its_codes(families, kind, tmp_path):
    """The file's numbers exactly, in memory and by way of a .pth; with other groups they are rounded again."""
    _, model = families("llama2")
    source = read_checkpoint(write_gguf(model, "llama", tmp_path / "model.gguf", kind))
    expected = logits(load_model(source, FP32, "cpu"))
    new = quantized(source, "int4", 32, "none")
    assert describe(new) == "int4-g32, head none"
    torch.testing.assert_close(logits(load_model(new, FP32, "cpu")), expected, rtol=1e-4, atol=1e-4)
    save_checkpoint(new, tmp_path / "model.pth", None)
    back = read_checkpoint(tmp_path / "model.pth")
    for name, t in new.tensors.items():
        own = name.endswith((".scales", ".zeros")) or t.dtype == torch.uint8
        assert not own or torch.equal(back.tensors[name].whole(), t.whole())
    n = sum(name.endswith(".zeros") for name in new.tensors)
    assert note(source, "int4", 32) == f"note: {n} of {n} linears keep the int4 weights of the file"
    assert note(source, "int4", 64) == f"note: {kind} weights are quantized again, to int4-g64, which loses more accuracy"
    assert note(source, "int8", 32) == ""
    assert note(source, "int4", 32, solved=True) == f"note: {kind} weights are quantized again, to int4-g32, which loses more accuracy"
    eight = {next(n for n in source.tensors if n.endswith("attn.wo.weight")): scheme_named("int8")}
    assert note(source, "int4", 32, others=eight) == f"note: {n - 1} of {n} linears keep the int4 weights of the file"
    name = next(n for n, t in source.tensors.items() if n.endswith("attn.wo.weight"))
    wide = quantize_tensor(source.tensors[name], scheme_named("int4", 64))       # groups of 64: made of the numbers
    assert wide[1].shape[-1] == source.tensors[name].shape[-1] // 64 and wide[1].name.endswith(".scales")


def test_what_is_said_of_other_kinds(families, tmp_path):
    _, model = families("llama2")
    source = read_checkpoint(write_gguf(model, "llama", tmp_path / "model.gguf", "Q5_0"))
    assert note(source, "int4", 32) == "note: Q5_0 weights are quantized again, to int4-g32, which loses more accuracy"
    plain = read_checkpoint(families("llama2")[0])
    assert note(plain, "int4", 32) == ""


def test_a_hub_model_in_four_bits_gets_the_rest(families):
    """As AWQ and GPTQ are read: linears in int4, the head plain."""
    plain = read_checkpoint(families("llama3")[0])
    stored = quantized(plain, "int4", 32, "none")
    hub = Checkpoint(stored.path, stored.cfg, {n: LazyTensor(n, t.shape, t.dtype, (lambda a, b, x=t.whole(): x[a:b]))
                                                for n, t in stored.tensors.items()})
    new = quantized(hub, "int4", 32)
    assert describe(new) == "int4-g32, head int8"
    linears = [n for n in stored.tensors if n.endswith(".zeros")]
    for name in linears:
        assert torch.equal(new.tensors[name].whole(), hub.tensors[name].whole())
    assert note(hub, "int4", 32) == f"note: {len(linears)} of {len(linears)} linears keep the int4 weights of the file"
    for mode in ("int8", "int4"):
        with pytest.raises(ValueError, match="is already quantized .*: use the original model"):
            quantized(new if mode == "int4" else hub, mode)
    with pytest.raises(ValueError, match="is already quantized"):
        quantized(hub, "int4", 32, solver=lambda name: {})


# ---- Text that the model writes -----------------------------------------------------------------

class Words:
    bos_id, chat_template, eos_ids = 7, None, {3}

    def encode(self, text, bos=True):
        return [self.bos_id] * bos + [10 + len(text), 11]


class Chatty(Words):
    chat_template, names = "{{ messages[0].content }}", {}


def test_the_model_writes_what_it_is_calibrated_on(families):
    """From nothing and from openings, the same each time; after an end begins another text."""
    model = load_model(read_checkpoint(families("llama3")[0]), FP32, "cpu")
    rows = generate_text(model, Words(), {3, 4}, 8, 40)
    assert rows.shape == (8, 40) and rows.min() >= 0 and rows.max() < 160
    assert torch.equal(rows, generate_text(model, Words(), {3, 4}, 8, 40)) and model.max_batch_size == 0
    for i in range(8):
        begin = [7] if i == 0 else [7, 10 + len(OPENINGS[i - 1]), 11]
        assert rows[i, :len(begin)].tolist() == begin
    ended = torch.isin(rows[:, :-1], torch.tensor([3, 4])) & (torch.arange(39) >= 3)
    assert (rows[:, 1:][ended] == 7).all() and len({tuple(row) for row in rows.tolist()}) > 5
    assert text_openings(Chatty(), {3}, 10) == [[7], [10 + len("Hello!"), 11], *([7, 10 + len(o), 11] for o in OPENINGS[:6]),
                                           [7], [10 + len(REQUESTS[1]), 11]]


def test_without_a_token_that_begins_texts():
    class Plain(Words):
        bos_id = None

        def encode(self, text, bos=True):
            return [len(text)]
    assert text_openings(Plain(), {9, 5}, 2) == [[5], [len(OPENINGS[0])]]
    assert text_openings(Plain(), set(), 1) == [[len("The")]]
