// A mixture of experts: its choice, and the sum of what they give.

#pragma once

#include <cmath>

#include "norms.h"

// logits [M, E] -> each token's A best experts by score + bias, and what they weigh: prob [M, A].
// All tokens' rows sorted by expert: place [M, A] says which row, order [M A] whose token's, and
// expert e's end before ends[e].
struct Route {
  int32_t kind, M, E, A, n_group, topk_group, group_top, by_sigmoid, normalized;
  float factor;
  const float *logits, *bias, *expert_scale;   // [E], or null
  float* prob;
  int32_t *place, *order, *ends;
};

// The places of the n best of x [n_x] -> best; they become -inf
static void take_best(float* x, int n_x, int n, int* best) {
  for (int i = 0; i < n; i++) {
    best[i] = std::max_element(x, x + n_x) - x;
    x[best[i]] = -INFINITY;
  }
}

// choice [E] -> -inf outside of the groups whose group_top best have the largest sums
static void keep_best_groups(const Route& op, float* choice, float* memory) {
  int size = op.E / op.n_group;
  std::vector<int> best(std::max(op.group_top, op.n_group));
  float* worth = memory + size;
  for (int g = 0; g < op.n_group; g++) {
    copy_floats(choice + g * size, size, memory);
    take_best(memory, size, op.group_top, best.data());
    worth[g] = 0;
    for (int i = 0; i < op.group_top; i++) worth[g] += choice[g * size + best[i]];
  }
  take_best(worth, op.n_group, op.topk_group, best.data());
  for (int g = 0; g < op.n_group; g++)
    if (worth[g] != -INFINITY)
      std::fill(choice + g * size, choice + (g + 1) * size, -INFINITY);
}

static void choose_experts(const Route& op, int m) {
  float* score = memory_of(own, 4 * (size_t)padded(op.E, LANES));
  float *choice = score + padded(op.E, LANES), *memory = choice + padded(op.E, LANES);
  int* expert = op.place + (long)m * op.A;     // until the rows are sorted
  float *prob = op.prob + (long)m * op.A, sum = 0;
  copy_floats(op.logits + (long)m * op.E, op.E, score);
  float top = *std::max_element(score, score + op.E);
  for (int e = 0; e < op.E; e++) {
    score[e] = op.by_sigmoid ? 1 / (1 + std::exp(-score[e])) : std::exp(score[e] - top);
    sum += score[e];
  }
  for (int e = 0; e < op.E; e++) {
    if (!op.by_sigmoid) score[e] /= sum;
    choice[e] = score[e] + (op.bias ? op.bias[e] : 0);
  }
  if (op.n_group > 1) keep_best_groups(op, choice, memory);
  take_best(choice, op.E, op.A, expert);
  sum = 0;
  for (int a = 0; a < op.A; a++) sum += score[expert[a]];
  for (int a = 0; a < op.A; a++) {
    prob[a] = score[expert[a]] * op.factor / (op.normalized ? sum : 1);
    if (op.expert_scale) prob[a] *= op.expert_scale[expert[a]];
  }
}

static void sort_by_expert(const Route& op) {
  int n = op.M * op.A;
  std::fill(op.ends, op.ends + op.E, 0);
  for (int i = 0; i < n; i++) op.ends[op.place[i]]++;
  for (int e = 0, end = 0; e < op.E; e++) {    // where its rows begin
    end += op.ends[e];
    op.ends[e] = end - op.ends[e];
  }
  for (int i = 0; i < n; i++) {
    op.place[i] = op.ends[op.place[i]]++;
    op.order[op.place[i]] = i / op.A;
  }
}

static void route(const Route& op, Phase* phase) {
  do_tasks(phase[0], op.M, 1, [&](int m) { choose_experts(op, m); });
  do_tasks(phase[1], 1, 1, [&](int) { sort_by_expert(op); });
}

// out [M, D] = residual + factor * post(norm(each token's experts' rows y, weighed) + shared_norm(
// shared, times the sigmoid of a gate [M]))
struct Combine {
  int32_t kind, M, D, A, out_type, residual_type;
  float factor;
  Norm norm, shared_norm, post;
  const float *y, *prob;
  const int32_t* place;
  const float *shared, *gate;                  // or null
  const void* residual;
  void* out;
};

static void combine(const Combine& op, Phase* phase) {
  do_tasks(phase[0], op.M, 1, [&](int m) {
    float *sum = memory_of(own, 2 * (size_t)padded(op.D, LANES)), *other = sum + padded(op.D, LANES);
    std::fill(sum, sum + op.D, 0.0f);
    for (int a = 0; a < op.A; a++) {
      const float* y = op.y + (long)op.place[(long)m * op.A + a] * op.D;
      float prob = op.prob[(long)m * op.A + a];
      for (int i = 0; i < op.D; i++) sum[i] += prob * y[i];
    }
    normalize(op.norm, op.D, sum);
    if (op.shared) {
      float share = op.gate ? 1 / (1 + std::exp(-op.gate[m])) : 1;
      copy_floats(op.shared + (long)m * op.D, op.D, other);
      normalize(op.shared_norm, op.D, other);
      for (int i = 0; i < op.D; i++) sum[i] += share * other[i];
    }
    normalize(op.post, op.D, sum);
    read_floats(op.residual, op.residual_type, (long)m * op.D, op.D, other);
    for (int i = 0; i < op.D; i++) sum[i] = other[i] + op.factor * sum[i];
    write_floats(sum, op.D, op.out, op.out_type, (long)m * op.D);
  });
}
