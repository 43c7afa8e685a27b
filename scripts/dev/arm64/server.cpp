// The kernels as a program for ARM: it maps the arena and answers requests until Python ends.
//   server ARENA_FILE READ_FROM WRITE_TO REQUEST

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include KERNELS // run.cpp
#include "request.h"

static void copy_fields(char* to, size_t size) {
  char* limit = to + size;
  Field* copies = (Field*)to;
  size_t n = 0;
  while (FIELDS[n].struct_name) n++;
  char* text = to + (n + 1) * sizeof(Field);
  auto copy = [&](const char* from) {
    size_t length = strlen(from) + 1;
    if (text + length > limit) abort();
    memcpy(text, from, length);
    text += length;
    return text - length;
  };
  for (size_t i = 0; i < n; i++) {
    copies[i] = FIELDS[i];
    copies[i].struct_name = copy(FIELDS[i].struct_name);
    copies[i].name = copy(FIELDS[i].name);
  }
  copies[n] = Field{};
}

static long answer(const Request& request) {
  const long* args = request.arguments;
  switch (request.function) {
    case ASK_WIDTH: return panel_width();
    case ASK_INT8_DOT: return has_int8_dot(args[0]);
    case ASK_BF16: return has_bf16();
    case ASK_AMX: return has_amx();
    case ASK_FIELDS: copy_fields((char*)args[0], args[1]); return 0;
    case PACK: pack_panels((void*)args[0], args[1], args[2], args[3], (void*)args[4]); return 0;
    default: return run((const int32_t* const*)args[0], args[1], args[2]);
  }
}

int main(int, char** argv) {
  int arena = atoi(argv[1]), in = atoi(argv[2]), out = atoi(argv[3]);
  Request& request = *(Request*)atol(argv[4]);
  int flags = MAP_SHARED | MAP_NORESERVE | MAP_FIXED;
  if (mmap(ARENA, ARENA_SIZE, PROT_READ | PROT_WRITE, flags, arena, 0) != ARENA) {
    perror("arm64: cannot map Python's memory");
    return 1;
  }
  for (char byte; read(in, &byte, 1) == 1;) {
    request.result = answer(request);
    if (write(out, &byte, 1) != 1) break;
  }
}
