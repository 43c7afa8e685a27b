// The OpenMP functions that kernels/cpu/ needs, with std::thread, for sanitize.sh. GCC's libgomp is not
// compiled with ThreadSanitizer, which therefore misses its synchronization.

#include <thread>
#include <vector>

static thread_local int thread_num = 0, num_threads = 1;

extern "C" int omp_get_thread_num() { return thread_num; }
extern "C" int omp_get_num_threads() { return num_threads; }

extern "C" void GOMP_parallel(void (*work)(void*), void* data, unsigned n, unsigned) {
  if (n == 0) n = 2;
  auto run = [=](unsigned i) {
    thread_num = i, num_threads = n;
    work(data);
    thread_num = 0, num_threads = 1;
  };
  std::vector<std::thread> others;
  for (unsigned i = 1; i < n; i++) others.emplace_back(run, i);
  run(0);
  for (std::thread& other : others) other.join();
}
