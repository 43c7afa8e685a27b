// Dynamic scheduling of an operation's tasks over threads, and scratch buffers. The threads are OpenMP's,
// or the standard library's where the compiler has no OpenMP, as Apple's.

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

#ifdef _OPENMP
#include <omp.h>

static int thread_index() { return omp_get_thread_num(); }

// Runs work() on n threads, of which the caller is the first
template <class F> static void on_threads(int n, F work) {
#pragma omp parallel num_threads(n) if (n > 1)
  work();
}
#else
#include <condition_variable>
#include <functional>
#include <mutex>

static thread_local int index_of_thread = 0;
static int thread_index() { return index_of_thread; }

// Threads that sleep between regions. A region waits for those that have begun it, not for all: tasks
// are claimed, so the caller may do all of them, as it must in a fork, which has no other threads.
class ThreadPool {
  std::mutex mutex;
  std::condition_variable begins, ends;
  const std::function<void()>* work = nullptr; // of the region; null between regions
  long region = 0;
  int n_thread = 0, n_busy = 0, n_started = 1; // of the region; of them working; the caller is one

  void serve(int index) {
    index_of_thread = index;
    long last = 0;
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      begins.wait(lock, [&] { return work && region != last && index < n_thread; });
      last = region;
      n_busy++;
      const std::function<void()>& current = *work;
      lock.unlock();
      current();
      lock.lock();
      if (--n_busy == 0) ends.notify_one();
    }
  }

 public:
  void run(int n, const std::function<void()>& region_work) {
    std::unique_lock<std::mutex> lock(mutex);
    for (; n_started < n; n_started++) std::thread(&ThreadPool::serve, this, n_started).detach();
    work = &region_work;
    n_thread = n;
    region++;
    lock.unlock();
    begins.notify_all();
    region_work();
    lock.lock();
    work = nullptr;
    ends.wait(lock, [&] { return n_busy == 0; });
  }
};

template <class F> static void on_threads(int n, F work) {
  static ThreadPool& pool = *new ThreadPool;   // never destroyed: its threads outlive main()
  if (n > 1) pool.run(n, work);
  else work();
}
#endif

static std::atomic<bool> has_failed;           // a task ran out of memory

constexpr int MAX_RANGES = 4;
static int n_range = 1;                        // of each phase of this region: its threads, at most 4

// A phase is a set of independent tasks in as many ranges. A thread claims those of its own range, in
// order, so that it reads weights in order too; then those that others have left. The phase ends when
// all tasks are done, not when all threads arrive: a descheduled thread delays the others only if it
// holds a task.
struct Phase {
  struct alignas(64) Counter { std::atomic<int> n; };             // one to a cache line
  Counter done, claimed[MAX_RANGES];

  void reset() {
    done.n = 0;
    for (int r = 0; r < n_range; r++) claimed[r].n = 0;
  }
};

#ifdef TASKS_DESCEND                           // for a test that the order of tasks is of no matter
constexpr bool tasks_descend = true;
#else
constexpr bool tasks_descend = false;
#endif

// task(i) for i in [0, n), claimed `step` at a time; returns when the whole phase is done. A thread's
// tasks ascend in a range, and may then descend to another one.
template <class F> static void run_tasks(Phase& phase, int n, int step, F task) {
  int n_done = 0;
  for (int k = 0; k < n_range; k++) {
    int range = (thread_index() + k) % n_range;
    int first = (long)n * range / n_range, end = (long)n * (range + 1) / n_range;
    for (int i; (i = first + phase.claimed[range].n.fetch_add(step)) < end;) {
      for (int last = std::min(i + step, end); i < last; i++, n_done++) {
        try {                                  // exceptions must not leave a thread
          task(tasks_descend ? n - 1 - i : i);
        } catch (const std::exception&) {
          has_failed = true;
        }
      }
    }
  }
  if (n_done) phase.done.n.fetch_add(n_done);
  for (int spins = 0; phase.done.n.load() < n; spins++) {
#ifdef __x86_64__
    _mm_pause();
#endif
    if (spins % 4096 == 4095) std::this_thread::yield();
  }
}

constexpr int MAX_PHASES = 3;                  // per operation
constexpr int MAX_OPS = 1024;                  // per parallel region
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
