// Offset and size of every struct field, for kernels/cpu/native.py.
//
// native.py mirrors the structs and compares them with this table when it loads the library.

#pragma once

#include "bounds.h"
#include "draw.h"
#include "hidden_states.h"
#include "linear.h"
#include "moe.h"

struct Field {
  const char *struct_name, *name;
  int64_t offset, size;
};

#define FIELD(S, name) {#S, #name, offsetof(S, name), sizeof(S::name)}
#define WHOLE(S) {#S, "", 0, sizeof(S)}

static const Field FIELDS[] = {
    WHOLE(Norm), FIELD(Norm, kind), FIELD(Norm, eps), FIELD(Norm, weight), FIELD(Norm, bias),
    WHOLE(Cache), FIELD(Cache, type), FIELD(Cache, turn), FIELD(Cache, codes),
    FIELD(Cache, scales),
    WHOLE(Linear), FIELD(Linear, kind), FIELD(Linear, format), FIELD(Linear, M), FIELD(Linear, N),
    FIELD(Linear, K), FIELD(Linear, group_size), FIELD(Linear, activation), FIELD(Linear, gated),
    FIELD(Linear, x_type), FIELD(Linear, out_type), FIELD(Linear, residual_type),
    FIELD(Linear, x_bits), FIELD(Linear, n_expert), FIELD(Linear, x_stride),
    FIELD(Linear, x_expert_stride), FIELD(Linear, out_stride), FIELD(Linear, out_expert_stride),
    FIELD(Linear, multiplier_type), FIELD(Linear, multiplier_stride), FIELD(Linear, bias_type),
    FIELD(Linear, factor), FIELD(Linear, norm), FIELD(Linear, x), FIELD(Linear, weight),
    FIELD(Linear, scales), FIELD(Linear, residual), FIELD(Linear, multiplier), FIELD(Linear, bias),
    FIELD(Linear, out), FIELD(Linear, expert_ends), FIELD(Linear, gather_rows),
    WHOLE(Positions), FIELD(Positions, n_key), FIELD(Positions, mask_stride_b),
    FIELD(Positions, mask_stride_t), FIELD(Positions, rope_stride_b),
    FIELD(Positions, slot_stride_b), FIELD(Positions, cos), FIELD(Positions, sin),
    FIELD(Positions, mask), FIELD(Positions, slot), FIELD(Positions, rows),
    WHOLE(Attention), FIELD(Attention, kind), FIELD(Attention, B), FIELD(Attention, T),
    FIELD(Attention, N), FIELD(Attention, K), FIELD(Attention, H), FIELD(Attention, V),
    FIELD(Attention, S), FIELD(Attention, n_row), FIELD(Attention, wide_norm), FIELD(Attention, out_type), FIELD(Attention, has_keys),
    FIELD(Attention, rope_applied), FIELD(Attention, scale), FIELD(Attention, cap),
    FIELD(Attention, q_norm), FIELD(Attention, k_norm), FIELD(Attention, v_norm),
    FIELD(Attention, positions), FIELD(Attention, sinks), FIELD(Attention, gate),
    FIELD(Attention, qkv), FIELD(Attention, k_cache), FIELD(Attention, v_cache),
    FIELD(Attention, out),
    WHOLE(Delta), FIELD(Delta, kind), FIELD(Delta, B), FIELD(Delta, T), FIELD(Delta, Nk),
    FIELD(Delta, N), FIELD(Delta, Dk), FIELD(Delta, Dv), FIELD(Delta, n_tap), FIELD(Delta, n_state),
    FIELD(Delta, n_input), FIELD(Delta, n_row), FIELD(Delta, input_type), FIELD(Delta, out_type),
    FIELD(Delta, q_scale), FIELD(Delta, norm), FIELD(Delta, positions), FIELD(Delta, taps),
    FIELD(Delta, conv_bias),
    FIELD(Delta, decay_rate), FIELD(Delta, decay_bias), FIELD(Delta, x), FIELD(Delta, z),
    FIELD(Delta, rates), FIELD(Delta, states), FIELD(Delta, inputs), FIELD(Delta, out),
    WHOLE(Mamba), FIELD(Mamba, kind), FIELD(Mamba, B), FIELD(Mamba, T), FIELD(Mamba, Nk),
    FIELD(Mamba, N), FIELD(Mamba, Dk), FIELD(Mamba, Dv), FIELD(Mamba, n_tap), FIELD(Mamba, n_state),
    FIELD(Mamba, n_input), FIELD(Mamba, n_row), FIELD(Mamba, input_type), FIELD(Mamba, out_type),
    FIELD(Mamba, norm_first), FIELD(Mamba, min_step), FIELD(Mamba, max_step), FIELD(Mamba, norm),
    FIELD(Mamba, positions), FIELD(Mamba, taps), FIELD(Mamba, conv_bias), FIELD(Mamba, decay_rate),
    FIELD(Mamba, decay_bias), FIELD(Mamba, skip), FIELD(Mamba, x), FIELD(Mamba, z),
    FIELD(Mamba, steps), FIELD(Mamba, states), FIELD(Mamba, inputs), FIELD(Mamba, out),
    WHOLE(ShortConv), FIELD(ShortConv, kind), FIELD(ShortConv, B), FIELD(ShortConv, T),
    FIELD(ShortConv, width), FIELD(ShortConv, n_tap), FIELD(ShortConv, n_input),
    FIELD(ShortConv, n_row), FIELD(ShortConv, input_type), FIELD(ShortConv, out_type),
    FIELD(ShortConv, positions), FIELD(ShortConv, taps), FIELD(ShortConv, bias),
    FIELD(ShortConv, x), FIELD(ShortConv, inputs), FIELD(ShortConv, out),
    WHOLE(Latent), FIELD(Latent, kind), FIELD(Latent, B), FIELD(Latent, T), FIELD(Latent, N),
    FIELD(Latent, nope), FIELD(Latent, rope), FIELD(Latent, rank), FIELD(Latent, S),
    FIELD(Latent, n_row), FIELD(Latent, q_stride),
    FIELD(Latent, k_stride), FIELD(Latent, norm), FIELD(Latent, positions), FIELD(Latent, q),
    FIELD(Latent, k), FIELD(Latent, queries), FIELD(Latent, cache),
    WHOLE(Route), FIELD(Route, kind), FIELD(Route, M), FIELD(Route, E), FIELD(Route, A),
    FIELD(Route, n_group), FIELD(Route, topk_group), FIELD(Route, group_top),
    FIELD(Route, use_sigmoid), FIELD(Route, norm_topk_prob), FIELD(Route, routed_scale),
    FIELD(Route, logits), FIELD(Route, bias), FIELD(Route, expert_scale), FIELD(Route, prob),
    FIELD(Route, sorted_row), FIELD(Route, sorted_token), FIELD(Route, expert_ends),
    WHOLE(Combine), FIELD(Combine, kind), FIELD(Combine, M), FIELD(Combine, D), FIELD(Combine, A),
    FIELD(Combine, out_type), FIELD(Combine, residual_type), FIELD(Combine, factor),
    FIELD(Combine, norm), FIELD(Combine, shared_norm), FIELD(Combine, post_norm), FIELD(Combine, y),
    FIELD(Combine, prob), FIELD(Combine, sorted_row), FIELD(Combine, shared), FIELD(Combine, gate),
    FIELD(Combine, residual), FIELD(Combine, out),
    WHOLE(AddNorm), FIELD(AddNorm, kind), FIELD(AddNorm, M), FIELD(AddNorm, D),
    FIELD(AddNorm, x_type), FIELD(AddNorm, out_type), FIELD(AddNorm, residual_type),
    FIELD(AddNorm, factor), FIELD(AddNorm, norm), FIELD(AddNorm, scale), FIELD(AddNorm, x),
    FIELD(AddNorm, residual), FIELD(AddNorm, out),
    WHOLE(Embed), FIELD(Embed, kind), FIELD(Embed, format), FIELD(Embed, n), FIELD(Embed, K),
    FIELD(Embed, n_vocab), FIELD(Embed, out_type), FIELD(Embed, scales_type),
    FIELD(Embed, factor), FIELD(Embed, weight), FIELD(Embed, scales), FIELD(Embed, ids), FIELD(Embed, out),
    WHOLE(RopeTable), FIELD(RopeTable, kind), FIELD(RopeTable, n), FIELD(RopeTable, half),
    FIELD(RopeTable, pos), FIELD(RopeTable, freq), FIELD(RopeTable, amplitude),
    FIELD(RopeTable, cos), FIELD(RopeTable, sin),
    WHOLE(Mask), FIELD(Mask, kind), FIELD(Mask, B), FIELD(Mask, T), FIELD(Mask, n_key),
    FIELD(Mask, window), FIELD(Mask, pos), FIELD(Mask, mask),
    WHOLE(RingMask), FIELD(RingMask, kind), FIELD(RingMask, B), FIELD(RingMask, T),
    FIELD(RingMask, n_slot), FIELD(RingMask, n_key), FIELD(RingMask, window),
    FIELD(RingMask, pos_stride), FIELD(RingMask, n_row), FIELD(RingMask, pos),
    FIELD(RingMask, rows), FIELD(RingMask, stored), FIELD(RingMask, slot), FIELD(RingMask, mask),
    WHOLE(Draw), FIELD(Draw, kind), FIELD(Draw, B), FIELD(Draw, V), FIELD(Draw, logits),
    FIELD(Draw, temperature), FIELD(Draw, top_k), FIELD(Draw, top_p), FIELD(Draw, min_p),
    FIELD(Draw, seeds), FIELD(Draw, token), FIELD(Draw, not_finite),
    WHOLE(Record), FIELD(Record, kind), FIELD(Record, B), FIELD(Record, T), FIELD(Record, D),
    FIELD(Record, S), FIELD(Record, n_row), FIELD(Record, x_type), FIELD(Record, states_type),
    FIELD(Record, positions), FIELD(Record, x), FIELD(Record, states),
    {nullptr, nullptr, 0, 0}};

#undef FIELD
#undef WHOLE
