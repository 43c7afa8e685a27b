// malloc() for a Python whose memory another process may read and write at the same addresses: all
// blocks lie in one shared mapping. Loaded by LD_PRELOAD. library.c finds the mapping's file by name.

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "request.h"

// A block's size is a power of two or 5, 6 or 7 quarters of one. Its class is in the word before it.
enum { N_CLASS = 256, HEADER = 64, LARGE = 1 << 20 };
struct Header {
  uint32_t class;
  uint32_t offset; // from the block's start
};

int arena_file = -1;
static char* end;                    // of what was taken so far
static char* free_blocks[N_CLASS];   // of each class, linked by their first words
static atomic_flag busy = ATOMIC_FLAG_INIT;

static void lock(void) {
  while (atomic_flag_test_and_set(&busy)) usleep(0);
}
static void unlock(void) { atomic_flag_clear(&busy); }

static size_t size_of(int class) { return (size_t)(4 + class % 4) << (class / 4); }

static int class_of(size_t size) {
  int class = 4 * 5; // 128 bytes
  while (size_of(class) < size) class++;
  return class;
}

static int new_file(void) {
  int file = memfd_create("arena", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, ARENA_SIZE)) abort();
  return file;
}

static void map(int file) {
  int flags = MAP_SHARED | MAP_NORESERVE | MAP_FIXED;
  if (mmap(ARENA, ARENA_SIZE, PROT_READ | PROT_WRITE, flags, file, 0) != ARENA) abort();
  arena_file = file;
}

// A fork gets a copy, made before: it and its parent would write to the same memory.
static int copy;

static void before_fork(void) {
  lock();
  copy = new_file();
  for (off_t at = 0, n = end - ARENA; at < n;) {
    ssize_t done = pwrite(copy, ARENA + at, n - at, at);
    if (done <= 0) abort();
    at += done;
  }
}

static void in_parent(void) {
  close(copy);
  unlock();
}

static void in_child(void) {
  close(arena_file);
  map(copy);
  unlock();
}

static void* allocate(size_t size, size_t alignment) {
  static _Thread_local int is_starting;
  size_t extra = alignment > HEADER ? alignment : 0;
  if (size > ARENA_SIZE / 4) {
    errno = ENOMEM;
    return NULL;
  }
  int class = class_of(size + extra + HEADER);
  lock();
  if (!end) {
    map(new_file());
    end = ARENA;
    is_starting = 1;
  }
  char* block = free_blocks[class];
  if (block) {
    memcpy(&free_blocks[class], block, sizeof block);
  } else {
    block = end;
    end += (size_of(class) + 63) / 64 * 64;
    if (end > ARENA + ARENA_SIZE) abort();
  }
  unlock();
  if (is_starting) {
    is_starting = 0;
    pthread_atfork(before_fork, in_parent, in_child);
  }
  uintptr_t at = (uintptr_t)block + HEADER;
  if (extra) at = (at + alignment - 1) / alignment * alignment;
  struct Header* header = (struct Header*)at - 1;
  header->class = class;
  header->offset = at - (uintptr_t)block;
  return (void*)at;
}

void* malloc(size_t size) { return allocate(size, 0); }

void free(void* p) {
  if (!p) return;
  struct Header header = ((struct Header*)p)[-1];
  char* block = (char*)p - header.offset;
  size_t size = size_of(header.class);
  if (size >= LARGE) {                 // give the memory back
    uintptr_t from = ((uintptr_t)block + 4095) & ~4095ul, to = ((uintptr_t)block + size) & ~4095ul;
    madvise((void*)from, to - from, MADV_REMOVE);
  }
  lock();
  memcpy(block, &free_blocks[header.class], sizeof block);
  free_blocks[header.class] = block;
  unlock();
}

size_t malloc_usable_size(void* p) {
  if (!p) return 0;
  struct Header header = ((struct Header*)p)[-1];
  return size_of(header.class) - header.offset;
}

void* calloc(size_t n, size_t size) {
  size_t total;
  if (__builtin_mul_overflow(n, size, &total)) return NULL;
  void* p = malloc(total);
  if (p) memset(p, 0, total);
  return p;
}

void* realloc(void* p, size_t size) {
  if (!p) return malloc(size);
  size_t usable = malloc_usable_size(p);
  if (size && size <= usable && size > usable / 4) return p;
  void* moved = malloc(size);
  if (!moved) return NULL;
  memcpy(moved, p, size < usable ? size : usable);
  free(p);
  return moved;
}

void* aligned_alloc(size_t alignment, size_t size) { return allocate(size, alignment); }
void* memalign(size_t alignment, size_t size) { return allocate(size, alignment); }
void* valloc(size_t size) { return allocate(size, 4096); }

int posix_memalign(void** p, size_t alignment, size_t size) {
  void* block = allocate(size, alignment);
  if (!block) return ENOMEM;
  *p = block;
  return 0;
}
