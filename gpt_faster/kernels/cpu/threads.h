// Threads share an operation's tasks; the memory that they share, and that each has of its own.

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

static std::atomic<bool> has_failed;           // a task, for want of memory

// A phase of an operation is a number of tasks, which threads take as they come. It is over when
// all are done: a thread that the system let wait holds nobody up, unless it has a task.
struct Phase {
  std::atomic<int> next, done;
};

template <class F> static void do_tasks(Phase& phase, int n, int step, F task) {
  for (int from; (from = phase.next.fetch_add(step)) < n;) {
    int to = std::min(from + step, n);
    for (int i = from; i < to; i++) {
      try {                                    // no exception may leave a thread
        task(i);
      } catch (const std::exception&) {
        has_failed = true;
      }
    }
    phase.done.fetch_add(to - from);
  }
  for (int spins = 0; phase.done.load() < n; spins++) {
#ifdef __x86_64__
    _mm_pause();
#endif
    if (spins % 4096 == 4095) std::this_thread::yield();
  }
}

constexpr int PHASES = 3;                      // of an operation at most
constexpr int MOST_OPS = 4096;                 // at a time
static Phase phases[MOST_OPS][PHASES];
static std::vector<float> shared;              // between threads, within an operation
static thread_local std::vector<float> own, own_row;

static float* memory_of(std::vector<float>& v, size_t n) {
  if (v.size() < n + 16) v.resize(n + 16);
  return (float*)(((uintptr_t)v.data() + 63) & ~(uintptr_t)63);
}

static inline int padded(int n, int to) { return (n + to - 1) / to * to; }
