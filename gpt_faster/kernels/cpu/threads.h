// Dynamic scheduling of an operation's tasks over the OpenMP threads, and scratch buffers.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

static std::atomic<bool> has_failed;           // a task ran out of memory

// A phase is a set of independent tasks that threads claim from a shared counter. It ends when all
// tasks are done, not when all threads arrive: a descheduled thread delays the others only if it
// holds a task.
struct Phase {
  std::atomic<int> next, done;
};

// task(i) for i in [0, n), claimed `step` at a time; returns when the whole phase is done
template <class F> static void run_tasks(Phase& phase, int n, int step, F task) {
  for (int begin; (begin = phase.next.fetch_add(step)) < n;) {
    int end = std::min(begin + step, n);
    for (int i = begin; i < end; i++) {
      try {                                    // exceptions must not leave an OpenMP region
        task(i);
      } catch (const std::exception&) {
        has_failed = true;
      }
    }
    phase.done.fetch_add(end - begin);
  }
  for (int spins = 0; phase.done.load() < n; spins++) {
#ifdef __x86_64__
    _mm_pause();
#endif
    if (spins % 4096 == 4095) std::this_thread::yield();
  }
}

constexpr int MAX_PHASES = 3;                  // per operation
constexpr int MAX_OPS = 4096;                  // per parallel region
static Phase phases[MAX_OPS][MAX_PHASES];

static std::vector<float> shared_scratch;      // used by all threads of one operation
static thread_local std::vector<float> thread_scratch;
static thread_local std::vector<float> thread_activations;        // of a one-row linear

// The buffer, grown to n floats if it is smaller, aligned to a cache line
static float* reserve(std::vector<float>& buffer, size_t n) {
  if (buffer.size() < n + 16) buffer.resize(n + 16);
  return (float*)(((uintptr_t)buffer.data() + 63) & ~(uintptr_t)63);
}

static inline int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
