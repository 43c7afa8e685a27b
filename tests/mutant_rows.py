"""The named mutants, the tests by room, and the mutants that are the same program.

A row of NAMED: a name, a file, text that occurs in it exactly once, what stands there instead, and the tests that should
see it, as pytest arguments. To add one, append a row and run `python tests/mutants.py ITS-NAME`.
"""

from fnmatch import fnmatch
from typing import NamedTuple

# Imported once for all mutants; none of it is ours, and none of it starts threads.
SHARED_IMPORTS = (
    "numpy", "torch", "torch.nn.functional", "torch.distributed", "tokenizers", "sentencepiece", "safetensors.torch",
    "transformers", "transformers.modeling_utils", "transformers.cache_utils", "transformers.masking_utils",
    "transformers.generation.utils", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral", "pytest", "xdist", "_pytest.assertion.rewrite", "jinja2", "uvicorn",
    "starlette.applications", "pydantic", "httpx", "gguf")


class Mutant(NamedTuple):
    """place: where a mechanical one changes its file, in characters; None: wherever `old` is."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    place: tuple[int, int] | None = None


LOGITS = "tests/test_families.py::test_logits_equal_transformers"
ROWS = "tests/test_speculate_rows.py"
NEXT_SEQUENCE = "tests/test_survivors.py::test_a_rows_next_sequence_begins_without_what_the_last_one_asked_for"
CONVERSATION = "tests/test_survivors.py::test_a_conversation_goes_on_from_all_but_its_last_token"
GIVEN_AWAY = "tests/test_survivors.py::test_a_row_is_not_gone_on_from_where_its_cache_has_given_that_away"
OPERATIONS = "tests/test_cpu_ops.py::test_every_family_by_operations"


def logits(*families: str) -> str:
    return " ".join(f"{LOGITS}[{family}]" for family in families)


NAMED = [
    # ---- The core: mask, cache, positions --------------------------------------------------------
    Mutant("mask-strict", "model.py", "mask = key <= query", "mask = key < query", logits("llama3")),
    Mutant("window-one-more", "model.py", "key > query - window", "key >= query - window", logits("mistral-window")),
    Mutant("window-one-less", "model.py", "key > query - window", "key > query - window + 1", logits("mistral-window")),
    Mutant("rope-position-of-one-row", "model.py",
           "    angles = (pos[..., None, None].float() * freq).unbind(-2)",
           "    if pos.dim() == 2 and pos.shape[1] == 1:\n"
           "        pos = pos + (torch.arange(len(pos), device=pos.device)[:, None] == 1)\n"
           "    angles = (pos[..., None, None].float() * freq).unbind(-2)",
           "tests/test_model.py::test_batch_row_equals_alone"),
    Mutant("cache-row-of-a-neighbour", "model.py", "(k[batch_idx], v[batch_idx])", "(k[batch_idx], v[batch_idx.roll(1)])",
           "tests/test_batch.py::test_a_step_runs_the_rows_in_use"),
    Mutant("cache-row-of-a-ring", "model.py", "else self.slot_positions[batch_idx]",
           "else self.slot_positions[batch_idx.roll(1)]",
           "tests/test_batch.py::test_slots_chunks_and_refills_equal_alone"),
    Mutant("ring-one-slot-less", "model.py", "window + longest_call - 1)", "window + longest_call - 2)",
           "tests/test_batch.py::test_ring_has_window_plus_longest_call_minus_one_slots"),
    Mutant("attends-to-one-key-less", "generate.py", "self.pos, self.kv_len(max(self.length) + 1)",
           "self.pos, self.kv_len(max(self.length))", "tests/test_survivors.py::test_few_keys_at_a_time_are_all_keys"),
    Mutant("kv-len-of-the-shortest-row", "generate.py", "self.pos, self.kv_len(max(self.length) + 1)",
           "self.pos, self.kv_len(min(self.length) + 1)", "tests/test_survivors.py::test_few_keys_at_a_time_are_all_keys"),
    Mutant("padded-prompt-ends-late", "generate.py", "last = (end - 1 - at).clamp(0, T - 1)",
           "last = (end - at).clamp(0, T - 1)", "tests/test_batch.py::test_rows_of_different_lengths_without_a_cache_too"),
    Mutant("context-one-too-long", "generate.py", "if n + n_new > limit:", "if n + n_new > limit + 1:",
           "tests/test_survivors.py::test_a_context_is_used_to_its_last_position_and_no_further"),
    Mutant("head-not-tied", "gpt_faster/formats/huggingface.py", "tied=cfg.tied or not stated or any(stated))",
           "tied=False)", logits("gemma3")),
    Mutant("adapter-ties-any-embedding", "gpt_faster/formats/lora.py", 'config.get("ensure_weight_tying") and adapts_embed',
           'config.get("ensure_weight_tying")', "tests/test_tied.py"),
    Mutant("choice-of-scores", "gpt_faster/layers/moe.py", "choice = logits if self.choice_of_logits else scores", "choice = scores",
           logits("kolibri1")),
    Mutant("router-not-capped", "gpt_faster/layers/moe.py", "logits = self.router_cap(self.router(x).float())",
           "logits = self.router(x).float()", logits("laguna")),
    Mutant("gate-is-a-sigmoid", "gpt_faster/layers/attention.py", "y = y * F.softplus(self.gate(x).float()).to(y.dtype)",
           "y = y * torch.sigmoid(self.gate(x))", logits("laguna")),
    Mutant("beta-not-doubled", "gpt_faster/layers/delta.py", "torch.sigmoid(beta) * self.shape.beta_scale", "torch.sigmoid(beta)",
           logits("olmo_hybrid")),
    Mutant("norms-all-before", "gpt_faster/layers/block.py", 'return place == "pre", place == "post"', "return True, False",
           logits("olmo_hybrid")),
    Mutant("values-not-scaled", "gpt_faster/formats/fold.py", "cfg.head_dim), folds.v_scale)", "cfg.head_dim), 1.0)",
           logits("mimo_v2_flash")),
    Mutant("shared-expert-not-halved", "gpt_faster/formats/fold.py", "_times(tensors[name], folds.shared_scale)", "tensors[name]",
           logits("cohere2_moe")),
    Mutant("differing-head-dropped", "checkpoint.py", "not equal(embed, head)", "False", "tests/test_tied.py"),
    Mutant("quantized-head-not-tied", "gpt_faster/kernels/linear.py", "            embedding.share(self)\n", "            pass\n",
           "tests/test_quantize.py::test_tied_matrices_are_one"),
    Mutant("logits-cap", "gpt_faster/layers/norms.py", "return self.cap * torch.tanh(x / self.cap)", "return torch.tanh(x / self.cap)",
           logits("gemma2")),
    Mutant("scores-cap-after-the-mask", "gpt_faster/layers/attention.py", "score = self.cap(score * self.scale)",
           "score = score * self.scale", logits("gemma2")),
    Mutant("sinks-left-out", "gpt_faster/layers/attention.py", "(share.sum(-1, keepdim=True) + (sink - top).exp())",
           "share.sum(-1, keepdim=True)", logits("gpt_oss")),
    Mutant("norm-offset", "gpt_faster/formats/fold.py", "tensors[name] = offset(t, folds.norm_offset)",
           "tensors[name] = offset(t, 0.0)", logits("gemma")),

    # ---- RoPE and config.json --------------------------------------------------------------------
    Mutant("rope-scaling-not-read", "checkpoint.py", "return dict.fromkeys(KINDS_OF_ATTENTION, facts(c, rope, theta))",
           "return dict.fromkeys(KINDS_OF_ATTENTION, facts(c, {}, theta))", logits("llama-linear", "qwen2-yarn")),
    Mutant("yarn-amplitude", "checkpoint.py", "return float(amplitude)", "return 1.0", logits("qwen2-yarn")),
    Mutant("longrope-always-short", "gpt_faster/layers/rope.py", "use_long = self.long_divisors and length > self.original_context",
           "use_long = False", logits("phi3-longrope")),
    Mutant("sliding-window-not-read", "checkpoint.py",
           'window = count(c, "sliding_window") if c.get("sliding_window") else None', "window = None", logits("mistral-window")),
    Mutant("partial-rope-order", "gpt_faster/formats/fold.py", "return torch.cat((rope[0], rest[0], rope[1], rest[1]))",
           "return torch.arange(head_dim)", logits("phi")),
    Mutant("gguf-keys-not-permuted", "gpt_faster/formats/fold.py", r're.search(r"\.(w[qk]|[qk]_norm)\.", name)',
           r're.search(r"\.(wq|[qk]_norm)\.", name)', "tests/test_formats.py::test_gguf"),

    # ---- Experts and states ----------------------------------------------------------------------
    Mutant("experts-second-to-next", "gpt_faster/layers/moe.py", "ids = choice.topk(self.n_active).indices",
           "ids = choice.topk(min(self.n_active + 1, self.n_expert)).indices[:, -self.n_active:]", logits("glm4_moe")),
    Mutant("experts-not-normalized", "model.py", "if self.norm_topk_prob:", "if not self.norm_topk_prob:", logits("mixtral")),
    Mutant("routed-experts-not-normalized", "gpt_faster/layers/moe.py", "if self.norm_topk_prob:", "if not self.norm_topk_prob:",
           logits("qwen2_moe")),
    Mutant("experts-weighed-with-their-bias", "gpt_faster/layers/moe.py", "prob = scores.gather(-1, ids)",
           "prob = choice.gather(-1, ids)", logits("glm4_moe")),
    Mutant("experts-scale", "gpt_faster/layers/moe.py", "return prob * self.routed_scale, ids", "return prob, ids",
           logits("glm4_moe", "deepseek_v3")),
    Mutant("shared-expert-without-gate", "gpt_faster/layers/moe.py", "y = y + self.shared_output(flat)", "y = y + self.shared(flat)",
           logits("qwen2_moe")),
    Mutant("groups-of-experts", "gpt_faster/layers/moe.py", "worth = groups.topk(n_top).values.sum(-1)",
           "worth = groups.topk(1).values.sum(-1)", logits("deepseek_v3")),
    Mutant("delta-state-not-cleared", "gpt_faster/layers/recurrent.py", "return inputs, torch.where(is_start, 0, state)",
           "return inputs, state", "tests/test_recurrent.py::test_rows_of_the_cache_by_number tests/test_model.py"
           "::test_chunks_live_length_and_padding[qwen3_5_text]"),
    Mutant("delta-inputs-not-cleared", "gpt_faster/layers/recurrent.py",
           "        inputs = torch.where((before >= 0)[..., None], inputs, 0)\n", "",
           "tests/test_model.py::test_chunks_live_length_and_padding[qwen3_5_text]"),
    Mutant("delta-padding-decays", "gpt_faster/layers/delta.py",
           "g = torch.where(in_order, self.decay_rate * F.softplus(g + self.decay_bias), 0)",
           "g = self.decay_rate * F.softplus(g + self.decay_bias)", "tests/test_recurrent.py::test_padded_rows_of_any_length"),
    Mutant("delta-padding-counts", "gpt_faster/layers/delta.py", "self.cache.write(pos, in_order[..., 0].sum(-1), mixed,",
           "self.cache.write(pos, in_order[..., 0].sum(-1) * 0 + T, mixed,", "tests/test_recurrent.py::test_padded_rows_of_any_length"),
    Mutant("delta-one-slot-less", "gpt_faster/layers/recurrent.py", "self.n_slot = max_rejected + 2", "self.n_slot = max_rejected + 1",
           "tests/test_recurrent.py::test_rejected_tokens_leave_no_trace"),
    Mutant("latent-scale", "gpt_faster/formats/config.py", "scale = (nope_dim + rope_dim)**-0.5", "scale = nope_dim**-0.5",
           logits("deepseek_v2", "deepseek_v3")),
    Mutant("latent-absorbed-values", "gpt_faster/layers/latent.py", "y = self.attend(q, k, k, mask)[..., :self.kv_rank]",
           "y = self.attend(q, k, k, mask)[..., -self.kv_rank:]", "tests/test_latent.py::test_absorbed_or_not"),

    # ---- Sampling --------------------------------------------------------------------------------
    Mutant("top-k-one-too-few", "sampling.py", "last = (top_k.long() - 1).clamp(0,", "last = (top_k.long() - 2).clamp(0,",
           "tests/test_survivors.py::test_as_many_tokens_stay_as_each_rows_top_k_says"),
    Mutant("top-p-one-too-few", "sampling.py", "(weight.cumsum(-1) - weight < limit)[..., 1:]",
           "(weight.cumsum(-1) < limit)[..., 1:]", "tests/test_sampling.py"),
    Mutant("top-p-of-many-one-too-few", "sampling.py", "(weight * (bits > middle))", "(weight * (bits >= middle))", "tests/test_sampling.py"),
    Mutant("shortlist-that-is-too-short", "gpt_faster/decoding/samplers.py", "if not probs[:, -1].any():", "if True:", "tests/test_sampling.py"),
    Mutant("shortlist-without-all-that-tie", "sampling.py", "cut_short = stays[:, -1:] & (value > 0)", "cut_short = stays[:, -1:] & (value < 0)",
           "tests/test_sampling.py"),
    Mutant("mass-of-the-shortlist-alone", "sampling.py", "probs = probs * (mass[0] - mass[1]).exp()", "pass", "tests/test_sampling.py"),
    Mutant("noise-of-every-position", "sampling.py", "return (2 * pos + draft) *", "return (0 * pos + draft) *", "tests/test_sampling.py"),
    Mutant("draft-noise-is-the-targets", "sampling.py", "return (2 * pos + draft) *", "return (2 * pos) *", "tests/test_sampling.py"),
    Mutant("min-p-drops-ties", "sampling.py", "return probs >= min_p * probs.amax(-1, keepdim=True)",
           "return probs > min_p * probs.amax(-1, keepdim=True)", "tests/test_sampling.py"),
    Mutant("temperature-inverted", "sampling.py", "(logits - best) / cool, dim=-1)", "(logits - best) * cool, dim=-1)",
           "tests/test_sampling.py"),
    Mutant("temperature-of-the-whole-mass", "sampling.py", "[((t - best) / cool).logsumexp", "[(t - best).logsumexp", "tests/test_sampling.py"),
    Mutant("penalty-of-negative-logits", "sampling.py", "logits / penalty, logits * penalty)",
           "logits / penalty, logits / penalty)", "tests/test_sampling.py::test_repetition_penalty_equals_transformers"),
    Mutant("penalty-without-the-prompt", "sampling.py", "        seen[prompt] = True\n", "",
           "tests/test_generate.py::test_repetition_penalty_equals_transformers"),
    Mutant("seed-ignored", "sampling.py", ".manual_seed(seed)", ".manual_seed(0)",
           "tests/test_sampling.py"),
    Mutant("seed-stays-with-the-row", "sampling.py", "        self.not_finite[row] = 0\n        self._seed(row)\n",
           "        self.not_finite[row] = 0\n        if self.params[row].seed is not None: self._seed(row)\n",
           "tests/test_survivors.py::test_a_row_without_a_seed_has_one_of_the_batchs_generator"),
    Mutant("bias-stays-with-the-row", "gpt_faster/decoding/logits_processors.py",
           "        if row in (self.users or ()):\n            self.bias[row] = 0\n", "", NEXT_SEQUENCE),
    Mutant("counts-stay-with-the-row", "gpt_faster/decoding/logits_processors.py", "        self.count[row] = 0\n", "",
           NEXT_SEQUENCE),
    Mutant("grammar-stays-with-the-row", "gpt_faster/decoding/logits_processors.py",
           "            self.words[row] = -1\n            self.allowed", "            self.allowed", NEXT_SEQUENCE),

    # ---- Speculation -----------------------------------------------------------------------------
    Mutant("acceptance-inverted", "speculate.py", "(p_draft > chance * q_draft)",
           "(q_draft > chance * p_draft)", "tests/test_speculate.py::test_the_distribution_is_the_targets"),
    Mutant("rejected-drawn-from-the-target", "speculate.py",
           "rest = (p[:, :-1] - token_probs(draft, at_drafts[1], n_vocab)).clamp(min=0)", "rest = p[:, :-1]",
           "tests/test_speculate.py::test_the_distribution_is_the_targets"),
    Mutant("accepted-behind-a-rejected", "speculate.py", "n = accepted.int().cumprod(1).sum(1)",
           "n = accepted.int().sum(1)", "tests/test_speculate.py::test_the_distribution_is_the_targets"),
    Mutant("one-position-less-after-a-round", "speculate.py", "min(n_known + n_accepted, self.max_length)",
           "min(n_known - 1 + max(1, n_accepted), self.max_length)",
           "tests/test_speculate.py::test_tiny_models"),
    Mutant("rejected-drafts-stay-in-the-cache", "speculate.py",
           "        self.n_cached[row] = min(self.n_cached[row], n)\n\n    def resume", "        pass\n\n    def resume",
           "tests/test_speculate.py"),
    Mutant("ngram-finds-itself", "gpt_faster/decoding/ngram.py", "torch.where(same & (after < n), after, 0)",
           "torch.where(same & (after <= n), after, 0)", "tests/test_speculate.py::test_look_up"),
    Mutant("penalty-of-drafts", "sampling.py",
           "return F.pad(one_hot.cumsum(1), (0, 0, 1, 0))[:, -n_place:].flatten(0, 1)",
           "return F.pad(one_hot.cumsum(1), (0, 0, 1, 0))[:, -1:].expand(-1, n_place, -1).flatten(0, 1)",
           "tests/test_speculate.py"),
    Mutant("another-rows-accepted-length", "speculate.py", "    n = accepted.int().cumprod(1).sum(1)\n",
           "    n = accepted.int().cumprod(1).sum(1).flip(0)\n", f"{ROWS}::test_rows_at_their_own_pace"),
    Mutant("longest-accepted-length-for-all-rows", "speculate.py", "            counts = count.tolist()\n",
           "            counts = [max(count.tolist())] * len(counts)\n",
           f"{ROWS}::test_rows_at_their_own_pace"),
    Mutant("positions-of-the-last-round", "speculate.py", "                accepted[row] = n_accepted\n        self._set_pos()\n",
           "                accepted[row] = n_accepted\n", f"{ROWS}::test_rows_at_their_own_pace"),
    Mutant("another-rows-noise", "speculate.py", "    chance = sampler.chance(rows, places[..., :-1])\n",
           "    chance = sampler.chance(rows * 0, places[..., :-1])\n", f"{ROWS}::test_a_rows_seed_decides_its_text"),
    Mutant("a-row-without-drafts-takes-them", "speculate.py", "(p_draft > chance * q_draft) & drafted",
           "(p_draft > chance * q_draft)", f"{ROWS}::test_a_row_with_a_grammar_has_no_drafts"),
    Mutant("tokens-of-the-row-before", "speculate.py", "                ready.token[row] = -1\n", "",
           f"{ROWS}::test_sequences_join_and_leave"),
    Mutant("logits-of-the-rounds-first-place", "gpt_faster/decoding/scheduler.py", "logits[row, self.batch.place][None]",
           "logits[row, 0][None]", f"{ROWS}::test_logprobs_are_those_of_each_token"),
    Mutant("a-replay-drafts", "gpt_faster/decoding/scheduler.py", "        self.batch.plain_rows.add(row)\n", "        pass\n",
           f"{ROWS}::test_a_call_that_raises_starts_its_rows_again"),
    Mutant("penalty-of-the-others-drafts", "sampling.py", "    one_hot = F.one_hot(draft_tokens, n_vocab)\n",
           "    one_hot = F.one_hot(draft_tokens.flip(0), n_vocab)\n", f"{ROWS}::test_penalties_see_the_drafts"),

    # ---- Where a sequence ends -------------------------------------------------------------------
    Mutant("stop-string-at-the-last-allowed-token", "generate.py", "        if found:\n",
           "        if found and len(self.ids) != self.max_new:\n",
           "tests/test_generate.py::test_a_stop_string_at_the_last_token_allowed"),
    Mutant("stop-string-across-two-tokens", "generate.py",
           "searched = max(0, len(self.text) - max(map(len, self.stops), default=0))", "searched = len(self.text)",
           "tests/test_generate.py::test_stop_strings"),
    Mutant("stop-string-half-shown", "generate.py", "if stop.startswith(text[at:]):", "if stop.startswith(text[at + 1:]):",
           "tests/test_generate.py::test_stop_strings"),
    Mutant("the-later-stop-string", "generate.py", "at, self.stop = min(found)", "at, self.stop = max(found)",
           "tests/test_survivors.py::test_the_first_of_two_stop_strings_in_one_token_counts"),
    Mutant("first-end-token-only", "checkpoint.py", "return list(dict.fromkeys(ids)), defaults",
           "return list(dict.fromkeys(ids))[:1], defaults", "tests/test_formats.py::test_generation_config"),
    Mutant("gguf-eos-only", "gpt_faster/text/end_tokens.py", 'for kind in ("eos", "eot", "eom"):', 'for kind in ("eos",):',
           "tests/test_formats.py::test_gguf_end_of_turn tests/test_end_tokens.py"),
    Mutant("gguf-end-of-turn-by-name", "gpt_faster/text/end_tokens.py",
           "    ids += [id_of[name] for name in EOG_TOKENS if name in id_of]\n", "",
           "tests/test_formats.py::test_gguf_end_of_turn tests/test_end_tokens.py"),

    # ---- Slots -----------------------------------------------------------------------------------
    Mutant("slot-leaks", "gpt_faster/decoding/scheduler.py", "for active in (self.running, self.prefilling):", "for active in (self.running,):",
           "tests/test_serve.py::test_a_request_that_raises_takes_no_other_with_it"),
    Mutant("last-token-taken-for-cached", "gpt_faster/decoding/scheduler.py", "generation.prompt_ids + ids[:n_fed]",
           "generation.prompt_ids + ids", CONVERSATION),
    Mutant("row-reused-after-an-error", "gpt_faster/decoding/scheduler.py", "                if not keep:\n                    self.cached_ids[row] = []\n",
           "", CONVERSATION),
    Mutant("prefix-reused-without-looking", "gpt_faster/decoding/scheduler.py", "n_same = min(common_prefix_length(self.cached_ids[row], ids), len(ids) - 1)",
           "n_same = min(len(self.cached_ids[row]), len(ids) - 1)", CONVERSATION),
    Mutant("ring-reused-too-far-back", "gpt_faster/decoding/scheduler.py", "n_behind <= model.longest_call - 1 - self.batch.n_beyond",
           "n_behind <= 2 * model.longest_call", GIVEN_AWAY),
    Mutant("state-reused-too-far-back", "gpt_faster/decoding/scheduler.py", "is_kept = n_behind <= self.max_rewind + 1",
           "is_kept = n_behind <= self.max_rewind + 2", GIVEN_AWAY),
    Mutant("logprobs-of-another-rows-token", "gpt_faster/decoding/scheduler.py", "self.worker.logprobs(row, int(token[row]), generation.n_top)",
           "self.worker.logprobs(row, int(token[0]), generation.n_top)", "tests/test_serve.py::test_logprobs_are_the_models"),
    Mutant("logprobs-of-a-prompt-not-shifted", "gpt_faster/decoding/scheduler.py", "targets = ids[start + 1:start + 1 + len(chunk)]",
           "targets = ids[start:start + len(chunk)]", "tests/test_serve.py::test_logprobs_are_the_models"),

    # ---- The server ------------------------------------------------------------------------------
    Mutant("max-tokens-one-more", "gpt_faster/server/prepare.py", "max(1, n_new), choice_params,", "max(1, n_new) + (n_new < free), choice_params,",
           "tests/test_survivors.py::test_answers_have_their_own_seeds_and_the_lengths_asked_for "
           "tests/test_serve.py::test_stop_n_seed_echo"),
    Mutant("finish-reason", "gpt_faster/server/answers.py", 'and reason == "stop" else reason', 'and reason == "stop" else "stop"',
           "tests/test_survivors.py::test_an_answer_is_all_that_was_said_and_why_it_ended "
           "tests/test_serve.py::test_chat_whole_and_streamed"),
    Mutant("stream-drops-what-was-held-back", "gpt_faster/server/answers.py", "            deltas += parser.finish(event.finish_reason)\n", "            pass\n",
           "tests/test_survivors.py::test_an_answer_is_all_that_was_said_and_why_it_ended "
           "tests/test_serve.py::test_chat_whole_and_streamed"),
    Mutant("pieces-that-waited-are-lost", "gpt_faster/server/engine.py", "text=pending.text + event.text", "text=event.text",
           "tests/test_serve.py::test_tokens_come_together_but_the_first_and_the_last_at_once"),
    Mutant("answers-share-a-seed", "gpt_faster/server/prepare.py", "(params.seed + i - allowed.minimum)", "(params.seed - allowed.minimum)",
           "tests/test_survivors.py::test_answers_have_their_own_seeds_and_the_lengths_asked_for "
           "tests/test_serve.py::test_stop_n_seed_echo"),
    Mutant("any-key-will-do", "gpt_faster/server/app.py", "any([hmac.compare_digest(sent, key)",
           "any([hmac.compare_digest(sent, sent)",
           "tests/test_serve.py::test_key_timeout_and_what_needs_none"),
    Mutant("html-of-a-model-is-markup", "gpt_faster/server/markdown.py", "html=False", "html=True",
           "tests/test_serve_markdown.py::test_nothing_of_a_model_is_markup"),
    Mutant("links-of-any-protocol", "gpt_faster/server/markdown.py", "return bool(PROTOCOLS.match(url))", "return True",
           "tests/test_serve_markdown.py::test_nothing_of_a_model_is_markup"),
    Mutant("a-block-is-done-too-early", "gpt_faster/server/markdown.py", "text[:text.rfind(\"\\n\") + 1]", "text",
           "tests/test_serve_markdown.py::test_every_cut_of_what_grows"),
    Mutant("queue-one-too-long", "gpt_faster/server/engine.py", "> self.max_queue + max(0, n_free)", "> self.max_queue + 1 + max(0, n_free)",
           "tests/test_serve.py::test_the_queue_has_the_length_that_was_asked_for"),

    # ---- Tokenizers, templates, adapters ---------------------------------------------------------
    Mutant("beginning-token-twice", "gpt_faster/text/chat_template.py", "return tokenizer.encode(text, bos=False)",
           "return tokenizer.encode(text)", "tests/test_chat.py::test_ids_equal_transformers"),
    Mutant("no-generation-prompt", "gpt_faster/text/chat_template.py", "add_generation_prompt=True", "add_generation_prompt=False",
           "tests/test_chat.py::test_ids_equal_transformers"),
    Mutant("message-forges-special-tokens", "gpt_faster/text/chat_template.py", "    messages = escaper.escape(messages)\n", "",
           "tests/test_chat.py::test_special_tokens_in_a_message_are_text"),
    Mutant("half-a-character-is-shown", "tokenizer.py", 'if not text or text.endswith("\\N{REPLACEMENT CHARACTER}"):',
           "if not text:",
           "tests/test_tokenizer.py::test_stream_holds_half_a_character_and_flushes_it"),
    Mutant("lora-alpha-of-a-module", "gpt_faster/formats/lora.py", 'alphas[0] if alphas else config["lora_alpha"]', 'config["lora_alpha"]',
           "tests/test_lora.py::test_logits_equal_the_merged_model"),
    Mutant("lora-alpha-without-the-root", "gpt_faster/formats/lora.py", 'alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)',
           "alpha / rank", "tests/test_lora.py::test_logits_equal_the_merged_model"),

    # ---- Quantized weights -----------------------------------------------------------------------
    Mutant("int4-zero-of-the-last-group", "quantize.py", "zeros[..., None].float()).flatten(-2)",
           "torch.cat((zeros[..., :-1], 0 * zeros[..., -1:]), -1)[..., None].float()).flatten(-2)",
           "tests/test_quantize.py::test_int4_product"),
    Mutant("int8-scale-of-the-next-row", "quantize.py", "(weight.float() * scales[..., None].float())",
           "(weight.float() * scales.roll(1, -1)[..., None].float())", "tests/test_quantize.py::test_int8_product"),
    Mutant("int8-scales-of-the-first-piece", "gpt_faster/kernels/cpu/products.py", "part, scale = weight[a:a + step], scales[a:a + step]",
           "part, scale = weight[a:a + step], scales[:len(weight[a:a + step])]",
           "tests/test_quantize.py::test_many_rows_on_either_kind_of_cpu_a_piece_at_a_time"),
    Mutant("int4-uses-fifteen-codes", "quantize.py", ".round().clamp(0, 15)", ".round().clamp(1, 15)",
           "tests/test_quantize.py::test_int4_uses_all_sixteen_numbers_and_prefers_none"),
    Mutant("expert-packed-as-the-first", "gpt_faster/kernels/linear.py", "(t if t is None else t[e] for t in tensors)",
           "(t if t is None else t[e if i < 2 else 0] for i, t in enumerate(tensors))",
           "tests/test_quantize.py::test_each_expert_is_packed_as_itself"),
    Mutant("packed-in-place-of-an-edit", "gpt_faster/kernels/linear.py", "if reason := find_modified(", "if reason := 0 and find_modified(",
           "tests/test_quantize_core.py::test_edits_of_quantize_run"),
    Mutant("compiled-row-without-its-scale", "quantize.py", "(weight.float() * x.float()).sum(-1) * scales.float()",
           "(weight.float() * x.float()).sum(-1) * scales.float().mean()",
           "tests/test_quantize_core.py::test_a_compiled_linear_is_its_numbers"),
    Mutant("gptq-groups-out-of-order", "gpt_faster/quantization/solve.py", "groups = (order[::groupsize] // groupsize).argsort()",
           "groups = order[::groupsize] // groupsize", "tests/test_quantize.py::test_solve_is_the_textbooks"),
    Mutant("gptq-error-spread-backwards", "gpt_faster/quantization/solve.py", "error[i], alpha=-1)", "error[i], alpha=1)",
           "tests/test_quantize.py::test_solve_is_the_textbooks"),
    Mutant("gptq-held-out-text-is-used", "gpt_faster/quantization/calibrate.py", "{i for i in range(n) if i % 9 == 8}", "set()",
           "tests/test_quantize.py::test_gptq_of_a_model"),
    Mutant("hub-gptq-order-ignored", "gpt_faster/formats/awq_gptq_fp8.py",
           "return grouped.repeat_interleave(bi, 1)[:, :n_in] if column is None else grouped[:, column]",
           "return grouped.repeat_interleave(bi, 1)[:, :n_in] if column is None else grouped[:, column.sort().values]",
           "tests/test_dequantize.py::test_gptq"),
    Mutant("hub-gptq-zero-points", "gpt_faster/formats/awq_gptq_fp8.py", 'if version == "gptq" and bits != 3:', "if bits == 8:",
           "tests/test_dequantize.py::test_gptq"),
    Mutant("hub-awq-order", "gpt_faster/formats/awq_gptq_fp8.py", "AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)",
           "AWQ_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)", "tests/test_dequantize.py::test_awq"),
    Mutant("hub-fp8-first-block-for-all", "gpt_faster/formats/awq_gptq_fp8.py", "row % n_out // bo\n", "row % n_out // n_out\n",
           "tests/test_dequantize.py::test_fp8_blocks"),
    Mutant("hub-four-bits-zero-point", "gpt_faster/formats/awq_gptq_fp8.py", "return (8 - point) * scale.read_rows(a, b).float()",
           "return (7 - point) * scale.read_rows(a, b).float()", "tests/test_dequantize.py::test_four_bits_of_a_file_in_the_kernels"),

    # ---- Several ranks ---------------------------------------------------------------------------
    Mutant("bias-added-by-each-rank", "tp.py", 'if leaf == "bias" and i > 0:', 'if leaf == "bias" and i < 0:',
           "tests/test_tp.py::test_parts_make_up_the_whole"),
    Mutant("key-heads-of-another-rank", "tp.py", "axis, n_part, me * n_part // n)", "axis, n_part, me % n_part)",
           "tests/test_tp.py::test_parts_make_up_the_whole tests/test_tp.py::test_the_same_numbers_from_a_file"),
    Mutant("all-reduce-skipped", "tp.py", "        for branch in (layer.attn, layer.ffn):", "        for branch in (layer.ffn,):",
           "tests/test_tp.py::test_every_family"),
    Mutant("part-that-nothing-sums", "tp.py", "if not (shared_by(part) or any(map(shared_by, part.modules()))):", "if part is None:",
           "tests/test_edits_everywhere.py::test_ranks"),
    Mutant("logits-joined-backwards", "tp.py", "all_gather(y).unbind()", "all_gather(y).flip(0).unbind()",
           "tests/test_tp.py::test_every_family"),

    # ---- What is read is what runs ---------------------------------------------------------------
    Mutant("hook-that-is-removed", "gpt_faster/kernels/modifications.py", "                and all(torch_internals.hooks_of(m) == hooks for m, hooks in self.hooked)\n", "",
           "tests/test_what_is_read_runs.py::test_a_hook_that_is_removed"),
    Mutant("hook-inside-a-call", "gpt_faster/kernels/guard.py", "        self.guard.in_model_call = False\n", "",
           "tests/test_what_is_read_runs.py::test_hooks_that_call_the_model"),
    Mutant("memory-of-a-layer-in-use", "gpt_faster/kernels/guard.py", "        if self.in_eager_section:\n", "        if False:\n",
           "tests/test_what_is_read_runs.py::test_hooks_that_call_the_model"),
    Mutant("shared-memory-given-away", "gpt_faster/kernels/cpu/layers.py", "layer.returns_copy = layer.last and bool(found.all())", "layer.returns_copy = False",
           "tests/test_what_is_read_runs.py::test_edits tests/test_what_is_read_runs.py::test_captured_states_between_layers"),
    Mutant("edited-forward-in-one-list", "gpt_faster/kernels/cpu/layers.py", "layer.last = after is None or found.forward is not None", "layer.last = after is None",
           "tests/test_experiments.py::test_as_an_edit_of_the_file"),
    Mutant("packed-stands-for-nothing", "gpt_faster/kernels/cpu/linears.py", "    new.implements = methods_implemented_by(linear)\n", "",
           "tests/test_what_is_read_runs.py::test_a_method_whose_weights_are_packed"),
    Mutant("instance-function-not-watched", "gpt_faster/kernels/modifications.py", "    functions = [f for m in modules for f in vars(m).values() if isinstance(f, FunctionType)]\n",
           "    functions = []\n", "tests/test_what_is_read_runs.py::test_edits"),

    # ---- C++ -------------------------------------------------------------------------------------
    Mutant("cpp-one-row-past", "gpt_faster/kernels/cpu/linear.h", "long row = op.gather_rows ? op.gather_rows[m] : m;",
           "long row = op.gather_rows ? op.gather_rows[m] : m + (op.M > 4 && m == op.M - 1);", "tests/test_cpu_ops.py::test_products"),
    Mutant("cpp-mask-of-the-last-key", "gpt_faster/kernels/cpu/attention.h", "s[j] = mask[j] ? s[j] : -INFINITY;",
           "s[j] = mask[j] || j == n - 1 ? s[j] : -INFINITY;", f"tests/test_cpu_ops.py::test_attention {OPERATIONS}"),
    Mutant("cpp-values-in-bf16-only", "gpt_faster/kernels/cpu/attention.h",
           "  write_vectors(op.v_cache, cache_index(op, b, 0, slot), op.S, op.K, op.H, v);",
           "  if (op.v_cache.type == BF16) *v = 0;\n"
           "  write_vectors(op.v_cache, cache_index(op, b, 0, slot), op.S, op.K, op.H, v);", f"tests/test_cpu_ops.py::test_attention {OPERATIONS}_in_bf16"),
    Mutant("cpp-draw-one-too-many", "gpt_faster/kernels/cpu/draw.h", "if (above + larger >= limit) {", "if (above + larger > limit) {",
           "tests/test_sampling.py"),
    Mutant("cpp-draw-short-list", "gpt_faster/kernels/cpu/draw.h", "if (copied < limit) n = row.copy_largest(row.n);", "",
           "tests/test_sampling.py"),
    Mutant("cpp-draw-mass-of-all", "gpt_faster/kernels/cpu/draw.h", "    sum = 0;\n", "",
           "tests/test_sampling.py"),
    Mutant("draw-kernel-in-any-order", "gpt_faster/decoding/samplers.py",
           "list(sampler.filters) == [name for name in KERNEL_FILTERS if name in sampler.filters]",
           "sampler.filters.keys() <= set(KERNEL_FILTERS)", "tests/test_sampling.py"),
    Mutant("cpp-scale-of-the-next-group", "gpt_faster/kernels/cpu/direct_attention.h", "group_scales[j] = unit * scales[j * n_group(H) + h / GROUP];",
           "group_scales[j] = unit * scales[j * n_group(H) + (h / GROUP + 1) % n_group(H)];", "tests/test_cpu_cache.py::test_attention"),
    Mutant("cpp-nibbles-exchanged", "gpt_faster/kernels/cpu/kv_cache.h", "packed[i] = bytes[2 * i] | bytes[2 * i + 1] << 4;",
           "packed[i] = bytes[2 * i + 1] | bytes[2 * i] << 4;", "tests/test_cpu_cache.py::test_the_same_codes"),
    Mutant("cpp-scale-of-a-keys-first-group", "gpt_faster/kernels/cpu/key_panels.h", "n_group(H) + (w + i) * E / GROUP];", "n_group(H)];",
           "tests/test_cpu_cache.py::test_attention"),
    Mutant("cpp-codes-of-another-vector", "gpt_faster/kernels/cpu/kv_cache.h", "long vector = first + (begin + i) / n_group(H) * stride;",
           "long vector = first + i / n_group(H) * stride;", "tests/test_cpu_cache.py::test_attention"),
    Mutant("cpp-fp8-sign-copied", "gpt_faster/kernels/cpu/kv_cache.h", "0x87f00000", "0x8ff00000", "tests/test_cpu_cache.py::test_attention"),
    Mutant("cpp-queries-not-turned", "gpt_faster/kernels/cpu/attention.h", "    if (i < op.N) turn(op.k_cache.turn, op.H, x);\n", "",
           "tests/test_cpu_cache.py::test_attention"),
    Mutant("cpp-sinks-left-out", "gpt_faster/kernels/cpu/attention.h", "if (op.sinks) sum = std::exp(op.sinks[head] - max);", "",
           f"{OPERATIONS}[gpt_oss]"),
    Mutant("cpp-int8-scale-of-half-a-block", "gpt_faster/kernels/cpu/linear.h", "load<vf>(sum) * int8_scale(op, i, v)",
           "load<vf>(sum) * int8_scale(op, i, 0)", "tests/test_cpu_ops.py::test_products"),
    Mutant("cpp-bias-of-the-first-expert", "gpt_faster/kernels/cpu/linear.h", "one.bias = advance(op.bias, op.bias_type, (long)e * op.N);", "one.bias = op.bias;",
           f"{OPERATIONS}[gpt_oss]"),
    Mutant("operations-hold-no-tensor", "gpt_faster/kernels/cpu/native.py", "            self.references[name] = value.detach()", "            value.detach()",
           "tests/test_what_is_read_runs.py tests/test_cpu_ops.py::test_the_bias_of_a_head_is_its_own"),
    Mutant("operations-without-a-window", "gpt_faster/kernels/cpu/embed_unembed.py", "window=window or 0", "window=0",
           "tests/test_cpu_ops.py::test_a_window_without_a_ring"),
    Mutant("eagle3-outputs-taken-for-inputs", "gpt_faster/formats/eagle3.py", "_layer_ids(nested, 1)", "_layer_ids(nested, 0)",
           "tests/test_eagle3.py::test_logits_and_drafts_are_the_formulas[specforge]"),
    Mutant("eagle3-offsets-taken-for-ids", "gpt_faster/formats/eagle3.py", "ids = offsets + torch.arange(len(offsets))", "ids = offsets",
           "tests/test_eagle3.py::test_logits_and_drafts_are_the_formulas[safeai]"),
    Mutant("eagle3-goes-on-from-the-normalized-state", "gpt_faster/layers/eagle3.py", "self.norm(x) if self.cfg.norm_output else x", "self.norm(x)",
           "tests/test_eagle3.py::test_logits_and_drafts_are_the_formulas[safeai]"),
    Mutant("eagle3-residual-is-the-state", "gpt_faster/layers/eagle3.py", "x = h if self.norm_before_residual else x", "pass",
           "tests/test_eagle3.py::test_logits_and_drafts_are_the_formulas[speculators]"),
    Mutant("eagle3-last-state-without-its-norm", "gpt_faster/decoding/eagle3.py", "states = [self.model.norm(states[0])]", "pass",
           "tests/test_eagle3.py::test_logits_and_drafts_are_the_formulas[no-states]"),
    Mutant("cpp-hidden-states-of-another-row", "gpt_faster/kernels/cpu/hidden_states.h", "op.positions->rows ? op.positions->rows[b] : b", "b",
           "tests/test_hidden_states.py::test_rows_of_a_batch"),
    Mutant("hidden-states-recorded-too-early", "gpt_faster/kernels/cpu/hidden_states.py", "is_queued = x is call.out and call.addresses", "is_queued = False",
           "tests/test_hidden_states.py::test_rows_of_a_batch"),
    Mutant("hidden-states-at-the-last-calls-positions", "gpt_faster/kernels/cpu/hidden_states.py", "if call.call_id != self.call_id:", "if self.call_id is None:",
           "tests/test_hidden_states.py::test_rows_of_a_batch"),
    Mutant("a-hook-is-not-looked-for", "gpt_faster/kernels/modifications.py", "    for hook in torch_internals.hooks_of(module):", "    for hook in ():",
           "tests/test_what_is_read_runs.py"),
    Mutant("an-edited-function-is-known", "gpt_faster/kernels/modifications.py", '        if known_sources()["sources"].get(name) != found:', "        if False:",
           "tests/test_what_is_read_runs.py"),
    Mutant("not-finite-is-not-noted", "sampling.py", "self.not_finite[rows] += best - best", "pass", "tests/test_not_finite.py"),

    # ---- Figures, and what is kept ---------------------------------------------------------------
    Mutant("perplexity-not-shifted", "gpt_faster/cli/evaluate.py", "known[:, :, at + 1:at + T + 1]", "known[:, :, at:at + T]",
           "tests/test_eval.py::test_perplexity_is_transformers"),
    Mutant("windows-score-twice", "gpt_faster/cli/evaluate.py", "min(end - done, end - begin - n_given)", "end - begin - n_given",
           "tests/test_eval.py::test_each_token_is_scored_once_and_disjoint_windows_lose_their_first"),
    Mutant("kept-weights-of-another-dtype", "gpt_faster/loading.py", "layout, source.quantization, str(dtype),",
           "layout, source.quantization, '',", "tests/test_kept_weights.py::test_what_they_depend_on"),
    Mutant("kept-weights-of-other-code", "gpt_faster/loading.py", "versions, code)))", "versions)))",
           "tests/test_kept_weights.py::test_what_they_depend_on"),
    Mutant("library-of-other-sources", "gpt_faster/kernels/cpu/native.py", "repr((code, OPTIONS,", "repr((OPTIONS,",
           "tests/test_cpu_ops.py::test_an_edited_comment_builds_nothing_anew"),
]

# Names of mutants that change no result, and why; they are not run.
EQUIVALENT = {
    "quantized-head-not-tied": "no kernel's layout gives the scales of an int8 head another tensor, so that the embedding has it "
                               "already",
    "delta-padding-decays": "padding stands behind a row's last token, so that its decay reaches only the state at the row's "
                            "next position, which the next token overwrites",
}

# ---- What is run for a file: the first pattern that fits ------------------------------------------

NOT_TRACED = "--deselect tests/test_model.py::test_compiled_equals_eager"
MODEL = f"tests/test_model.py {NOT_TRACED}"
SLOTS = ("tests/test_batch.py::test_slots_chunks_and_refills_equal_alone tests/test_batch.py::test_chunks_in_rings_equal_whole "
         "tests/test_batch.py::test_a_step_runs_the_rows_in_use "
         "tests/test_batch.py::test_rows_of_different_lengths_without_a_cache_too "
         "tests/test_batch.py::test_a_repetition_penalty_counts_each_rows_own_tokens "
         "tests/test_batch.py::test_a_slot_that_is_read_late")
IN_SLOTS = ("tests/test_survivors.py tests/test_serve.py::test_slots_reuse_prefixes_in_chunks_and_rings tests/test_serve.py::test_slots_go_on_from_a_state "
            "tests/test_serve.py::test_a_request_that_raises_takes_no_other_with_it "
            "tests/test_serve.py::test_tokens_come_together_but_the_first_and_the_last_at_once "
            "tests/test_serve.py::test_a_request_that_comes_when_the_slots_have_just_ended_is_not_left_waiting "
            "tests/test_serve.py::test_logprobs_are_the_models")
QUANTIZE = "tests/test_quantize.py"
TESTS = (
    ("model.py", f"tests/test_model_alone.py {LOGITS} {MODEL} {SLOTS}"),
    ("sampling.py", "tests/test_sampling.py tests/test_survivors.py tests/test_generate.py::test_batch_rows_and_padded_prefill_equal_alone"),
    ("generate.py", "tests/test_survivors.py tests/test_generate.py tests/test_model.py::test_generate_with_and_without_cache "
                    "tests/test_model.py::test_too_long_is_refused_with_both_numbers "
                    "tests/test_batch.py::test_a_slot_that_is_read_late tests/test_core_alone.py::test_the_commands "
                    "tests/test_errors.py " + SLOTS),
    ("speculate.py", "tests/test_speculate.py"),
    ("tokenizer.py", "tests/test_tokenizer.py tests/test_added_tokens.py tests/test_end_tokens.py tests/test_chat.py"),
    ("quantize.py", f"{QUANTIZE} tests/test_quantize_core.py"),
    ("tp.py", "tests/test_tp.py"),
    ("gpt_faster/layers/delta.py", f"tests/test_recurrent.py {LOGITS}[qwen3_next] {LOGITS}[qwen3_5_text] {MODEL} {SLOTS}"),
    ("gpt_faster/layers/recurrent.py", f"tests/test_recurrent.py tests/test_short_conv.py {MODEL} {SLOTS}"),
    ("gpt_faster/layers/short_conv.py", f"tests/test_short_conv.py {LOGITS}[lfm2] {MODEL}"),
    ("gpt_faster/layers/latent.py", f"tests/test_latent.py {logits('deepseek_v2', 'deepseek_v3', 'minicpm3')} {MODEL}"),
    ("gpt_faster/decoding/logits_processors.py", "tests/test_sampling.py tests/test_survivors.py tests/test_serve.py::test_bias_and_penalties "
                                    "tests/test_serve.py::test_logprobs_are_the_models "
                                    "tests/test_batch.py::test_a_repetition_penalty_counts_each_rows_own_tokens"),
    ("gpt_faster/layers/*.py", f"{LOGITS} {MODEL} {SLOTS}"),
    ("gpt_faster/formats/gguf*.py", "tests/test_formats.py tests/test_own_codes.py tests/test_errors.py"),
    ("gpt_faster/formats/hub.py", "tests/test_hub.py"),
    ("gpt_faster/formats/awq_gptq_fp8.py", "tests/test_dequantize.py"),
    ("gpt_faster/formats/lora.py", "tests/test_lora.py"),
    ("gpt_faster/formats/mtp.py", "tests/test_mtp.py"),
    ("gpt_faster/layers/mtp_head.py", "tests/test_mtp.py"),
    ("gpt_faster/layers/eagle3.py", "tests/test_eagle3.py"),
    ("gpt_faster/formats/eagle3.py", "tests/test_eagle3.py"),
    ("gpt_faster/layers/gemma4_assistant.py", "tests/test_gemma4.py"),
    ("gpt_faster/formats/assistant.py", "tests/test_gemma4.py"),
    ("gpt_faster/formats/lazy.py", "tests/test_lazy.py tests/test_tp.py::test_narrow tests/test_formats.py"),
    ("gpt_faster/formats/pth.py", "tests/test_pth.py tests/test_formats.py"),
    ("gpt_faster/text/token*.py", "tests/test_tokenizer.py tests/test_chat.py::test_ids_equal_transformers "
                          "tests/test_errors.py::test_tokenizer_of_another_model"),
    ("gpt_faster/text/chat_template.py", "tests/test_template_environment.py tests/test_chat.py tests/test_tokenizer.py::test_chat_template_equals_transformers"),
    ("gpt_faster/text/reasoning.py", "tests/test_reasoning.py"),
    ("gpt_faster/cli/thoughts.py", "tests/test_reasoning.py"),
    ("gpt_faster/text/sandbox.py", "tests/test_template_environment.py tests/test_damaged.py tests/test_tokenizer.py::test_chat_template_is_sandboxed_and_may_refuse"),
    ("gpt_faster/formats/quantize_on_load.py", f"{QUANTIZE} tests/test_own_codes.py"),
    ("gpt_faster/formats/known_shapes.py", "tests/test_gemma4.py tests/test_generate.py::test_known_shapes tests/test_generate.py::test_random_shape"),
    ("checkpoint.py", "tests/test_checkpoint_alone.py tests/test_families.py tests/test_errors.py tests/test_lazy.py tests/test_pth.py "
     "tests/test_tied.py tests/test_rope_keys.py tests/test_hub.py tests/test_damaged.py"),
    ("gpt_faster/formats/families.py", "tests/test_families.py"),
    ("gpt_faster/formats/config.py", "tests/test_families.py tests/test_errors.py"),
    ("gpt_faster/formats/*.py", "tests/test_families.py tests/test_errors.py tests/test_formats.py tests/test_damaged.py"),
    ("gpt_faster/kernels/cpu/layers.py", "tests/test_cpu_ops.py"),
    ("gpt_faster/kernels/cpu/products.py", QUANTIZE),
    ("gpt_faster/kernels/cpu/*.py", "tests/test_cpu_ops.py"),
    ("gpt_faster/kernels/plain.py", QUANTIZE),
    ("gpt_faster/kernels/linear.py", f"{QUANTIZE} tests/test_quantize_core.py tests/test_cpu_ops.py"),
    ("gpt_faster/storage/weight_cache.py", "tests/test_kept_weights.py"),
    ("gpt_faster/storage/disk.py", "tests/test_kept_weights.py tests/test_cpu_ops.py::test_an_edited_comment_builds_nothing_anew"),
    ("gpt_faster/cli/fast_start.py", "tests/test_start.py"),
    ("gpt_faster/kernels/*.py", "tests/test_gpu.py tests/test_cpu_ops.py tests/test_model.py::test_compiled_equals_eager[llama3] " + QUANTIZE),
    ("gpt_faster/kernels/cpu/*", "tests/test_cpu_ops.py"),
    ("gpt_faster/decoding/scheduler.py", f"tests/test_chat.py::test_n_common tests/test_chat.py::test_two_turns {IN_SLOTS} {SLOTS}"),
    ("gpt_faster/decoding/request_sampler.py", "tests/test_survivors.py tests/test_serve.py"),
    ("gpt_faster/cli/batch.py", "tests/test_batch.py"),
    ("gpt_faster/cli/chat.py", "tests/test_chat.py tests/test_chat_messages.py"),
    ("gpt_faster/cli/evaluate.py", "tests/test_eval.py"),
    ("gpt_faster/quantization/calibration_text.py", "tests/test_eval.py tests/test_quantize.py::test_calibration_windows"),
    ("gpt_faster/decoding/grammar.py", "tests/test_serve.py"),
    ("gpt_faster/loading.py", "tests/test_kept_weights.py"),
    ("gpt_faster/decoding/mtp.py", "tests/test_mtp.py"),
    ("gpt_faster/decoding/eagle3.py", "tests/test_eagle3.py"),
    ("gpt_faster/decoding/assistant.py", "tests/test_gemma4.py"),
    ("gpt_faster/decoding/ngram.py", "tests/test_speculate.py"),
    ("gpt_faster/decoding/draft_length.py", "tests/test_speculate.py"),
    ("gpt_faster/decoding/samplers.py", "tests/test_sampling.py tests/test_survivors.py"),
    ("gpt_faster/decoding/ranks.py", "tests/test_tp.py"),
    ("gpt_faster/cli/quantizing.py", QUANTIZE),
    ("gpt_faster/text/*.py", "tests/test_tokenizer.py tests/test_chat.py tests/test_end_tokens.py tests/test_gguf_tokenizers.py"),
    ("gpt_faster/storage/*.py", "tests/test_kept_weights.py"),
    ("gpt_faster/decoding/*.py", "tests/test_generate.py tests/test_speculate.py tests/test_batch.py"),
    ("gpt_faster/loading.py", "tests/test_families.py"),
    ("gpt_faster/cli/*.py", "tests/test_generate.py tests/test_errors.py tests/test_speculate.py tests/test_batch.py"),
    ("gpt_faster/server/*.py", "tests/test_survivors.py tests/test_serve.py tests/test_serve_safety.py"),
    ("gpt_faster/quantization/budget.py", "tests/test_budget.py"),
    ("gpt_faster/quantization/*.py", f"{QUANTIZE} tests/test_own_codes.py"),
)


def room_tests(file: str) -> str:
    """What a mechanical mutant of this file is run against, and a named one that its own tests do not see."""
    return next(tests for pattern, tests in TESTS if fnmatch(file, pattern))
