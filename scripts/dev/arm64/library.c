// The library that Python loads instead of the kernels: it starts the program for ARM that it contains,
// under qemu, and hands each call on. Both see the same memory (arena.c).

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "request.h"

__asm__(".section .rodata\nprogram: .incbin \"" PROGRAM "\"\nprogram_end: .byte 0\n.previous");
extern const char program[], program_end[];

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
static struct Request* request;      // in the arena
static int to_server, from_server;
static pid_t owner;                  // the process that started the server: a fork starts another

static void die(const char* why) {
  fprintf(stderr, "arm64: %s\n", why);
  abort();
}

static void start(void) {
  int* arena_file = dlsym(RTLD_DEFAULT, "arena_file");
  if (!arena_file) die("arena.c is not loaded");
  int file = memfd_create("program", 0), there[2], back[2];
  size_t size = program_end - program;
  if (file < 0 || write(file, program, size) != (ssize_t)size || pipe2(there, O_CLOEXEC) ||
      pipe2(back, O_CLOEXEC))
    die("cannot start the server");
  request = malloc(sizeof *request);
  char path[64], numbers[4][32];
  snprintf(path, sizeof path, "/proc/self/fd/%d", file);
  long values[] = {dup(*arena_file), dup(there[0]), dup(back[1]), (long)request};
  for (int i = 0; i < 4; i++) snprintf(numbers[i], sizeof numbers[i], "%ld", values[i]);
  pid_t child = vfork();
  if (child == 0) {
    unsetenv("LD_PRELOAD");
    execlp("qemu-aarch64", "qemu-aarch64", "-cpu", "max", path, numbers[0], numbers[1], numbers[2],
           numbers[3], NULL);
    _exit(127);
  }
  for (int i = 0; i < 3; i++) close(values[i]);
  close(file);
  close(there[0]);
  close(back[1]);
  to_server = there[1];
  from_server = back[0];
  owner = getpid();
}

static long call(long function, long a, long b, long c, long d, long e) {
  pthread_mutex_lock(&one_at_a_time);
  if (owner != getpid()) start();
  *request = (struct Request){function, {a, b, c, d, e}, 0};
  char byte = 0;
  if (write(to_server, &byte, 1) != 1 || read(from_server, &byte, 1) != 1) die("the server ended");
  long result = request->result;
  pthread_mutex_unlock(&one_at_a_time);
  return result;
}

int panel_width() { return call(ASK_WIDTH, 0, 0, 0, 0, 0); }
int has_int8_dot(int format) { return call(ASK_INT8_DOT, format, 0, 0, 0, 0); }
int has_bf16() { return call(ASK_BF16, 0, 0, 0, 0, 0); }
int has_amx() { return call(ASK_AMX, 0, 0, 0, 0, 0); }

// Fields and their names are the server's: it copies them.
void* fields() {
  size_t size = 1 << 20;
  void* copies = malloc(size);
  call(ASK_FIELDS, (long)copies, size, 0, 0, 0);
  return copies;
}

void pack_panels(const void* from, long n_panel, long n, int n_byte, void* to) {
  size_t size = n_panel * n * n_byte * panel_width();
  void* copy = NULL;
  if ((char*)from < ARENA || (char*)from >= ARENA + ARENA_SIZE)          // a mapped file
    from = copy = memcpy(malloc(size), from, size);
  call(PACK, (long)from, n_panel, n, n_byte, (long)to);
  free(copy);
}

int run(const void* ops, int n_op, int n_thread) {
  return call(RUN_OPS, (long)ops, n_op, n_thread, 0, 0);
}
