// What library.c asks of server.cpp, in memory that both map at the same address.

#pragma once

#define ARENA ((char*)0x100000000000) // where arena.c puts everything that is allocated
#define ARENA_SIZE (64L << 30)        // of addresses; memory is taken as it is used

enum Function { ASK_WIDTH, ASK_INT8_DOT, ASK_BF16, ASK_AMX, ASK_FIELDS, PACK, RUN_OPS };

struct Request {
  long function, arguments[5], result;
};
