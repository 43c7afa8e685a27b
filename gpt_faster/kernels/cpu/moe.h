// Mixture of experts: top-k routing, sorting by expert, the weighted sum of the outputs.

#pragma once

#include <cmath>

#include "norms.h"

// logits [M, E] -> each token's A experts of highest score + bias, and their weights prob [M, A].
// Sorts the M A (token, expert) rows by expert: sorted_row [M, A] is a pair's row, sorted_token
// [M A] a row's token, and expert e's rows end before expert_ends[e].
struct Route {
  int32_t kind, M, E, A, n_group, topk_group, group_top, use_sigmoid, norm_topk_prob;
  float routed_scale;
  const float *logits, *bias, *expert_scale;   // bias and expert_scale [E], or null
  float* prob;
  int32_t *sorted_row, *sorted_token, *expert_ends;
};

// Indices of the n largest of x [size] -> top; sets these to -inf
static void pop_top(float* x, int size, int n, int* top) {
  for (int i = 0; i < n; i++) {
    top[i] = std::max_element(x, x + size) - x;
    x[top[i]] = -INFINITY;
  }
}

// Sets scores [E] to -inf outside the topk_group groups with the largest sums of group_top scores
static void mask_groups(const Route& op, float* scores, float* scratch) {
  int size = op.E / op.n_group;
  std::vector<int> top(std::max(op.group_top, op.n_group));
  float* group_score = scratch + size;
  for (int g = 0; g < op.n_group; g++) {
    copy_floats(scores + g * size, size, scratch);
    pop_top(scratch, size, op.group_top, top.data());
    group_score[g] = 0;
    for (int i = 0; i < op.group_top; i++) group_score[g] += scores[g * size + top[i]];
  }
  pop_top(group_score, op.n_group, op.topk_group, top.data());
  for (int g = 0; g < op.n_group; g++)
    if (group_score[g] != -INFINITY)           // not among the popped ones
      std::fill(scores + g * size, scores + (g + 1) * size, -INFINITY);
}

static void select_experts(const Route& op, int m) {
  float* score = reserve(thread_scratch, 4 * (size_t)round_up(op.E, LANES));
  float* biased = score + round_up(op.E, LANES);
  float* scratch = biased + round_up(op.E, LANES);
  int* expert = op.sorted_row + (long)m * op.A;                   // ids, until sort_by_expert()
  float* prob = op.prob + (long)m * op.A;
  float sum = 0;
  copy_floats(op.logits + (long)m * op.E, op.E, score);
  float max_logit = *std::max_element(score, score + op.E);
  for (int e = 0; e < op.E; e++) {
    score[e] = op.use_sigmoid ? 1 / (1 + std::exp(-score[e])) : std::exp(score[e] - max_logit);
    sum += score[e];
  }
  for (int e = 0; e < op.E; e++) {
    if (!op.use_sigmoid) score[e] /= sum;
    biased[e] = score[e] + (op.bias ? op.bias[e] : 0);
  }
  if (op.n_group > 1) mask_groups(op, biased, scratch);
  pop_top(biased, op.E, op.A, expert);
  sum = 0;
  for (int a = 0; a < op.A; a++) sum += score[expert[a]];
  for (int a = 0; a < op.A; a++) {
    prob[a] = score[expert[a]] * op.routed_scale / (op.norm_topk_prob ? sum : 1);
    if (op.expert_scale) prob[a] *= op.expert_scale[expert[a]];
  }
}

static void sort_by_expert(const Route& op) {  // a counting sort: stable
  int n = op.M * op.A;
  std::fill(op.expert_ends, op.expert_ends + op.E, 0);
  for (int i = 0; i < n; i++) op.expert_ends[op.sorted_row[i]]++;
  for (int e = 0, end = 0; e < op.E; e++) {    // counts -> begins; the next loop makes them ends
    end += op.expert_ends[e];
    op.expert_ends[e] = end - op.expert_ends[e];
  }
  for (int i = 0; i < n; i++) {
    op.sorted_row[i] = op.expert_ends[op.sorted_row[i]]++;
    op.sorted_token[op.sorted_row[i]] = i / op.A;
  }
}

static void route(const Route& op, Phase* phase) {
  run_tasks(phase[0], op.M, 1, [&](int m) { select_experts(op, m); });
  run_tasks(phase[1], 1, 1, [&](int) { sort_by_expert(op); });
}

// out [M, D] = residual + factor * post_norm(norm(sum of prob * y) + sigmoid(gate) *
// shared_norm(shared)), with y the experts' outputs, sorted by expert, and shared the shared
// expert's. Without residual: the post_norm alone
struct Combine {
  int32_t kind, M, D, A, out_type, residual_type;
  float factor;
  Norm norm, shared_norm, post_norm;
  const float *y, *prob;                       // [M A, D], [M, A]
  const int32_t* sorted_row;                   // [M, A], of y
  const float *shared, *gate;                  // [M, D], [M], or null
  const void* residual;                        // or null
  void* out;
};

static void combine(const Combine& op, Phase* phase) {
  run_tasks(phase[0], op.M, 1, [&](int m) {
    float* sum = reserve(thread_scratch, 2 * (size_t)round_up(op.D, LANES));
    float* other = sum + round_up(op.D, LANES);                   // the shared expert, the residual
    std::fill(sum, sum + op.D, 0.0f);
    for (int a = 0; a < op.A; a++) {
      const float* y = op.y + (long)op.sorted_row[(long)m * op.A + a] * op.D;
      float prob = op.prob[(long)m * op.A + a];
      for (int i = 0; i < op.D; i++) sum[i] += prob * y[i];
    }
    normalize(op.norm, op.D, sum);
    if (op.shared) {
      float gate = op.gate ? 1 / (1 + std::exp(-op.gate[m])) : 1;
      copy_floats(op.shared + (long)m * op.D, op.D, other);
      normalize(op.shared_norm, op.D, other);
      for (int i = 0; i < op.D; i++) sum[i] += gate * other[i];
    }
    normalize(op.post_norm, op.D, sum);
    if (op.residual) {
      read_floats(op.residual, op.residual_type, (long)m * op.D, op.D, other);
      for (int i = 0; i < op.D; i++) sum[i] = other[i] + op.factor * sum[i];
    }
    write_floats(sum, op.D, op.out, op.out_type, (long)m * op.D);
  });
}
