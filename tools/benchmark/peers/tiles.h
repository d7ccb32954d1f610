// Compiled before each source of llama.cpp. gcc 12 believes that _tile_loadconfig reads eight bytes, and drops the others
// of a configuration: whoever uses the tiles of Intel's AMX then ends with SIGILL.
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define _tile_loadconfig(config) ({ __asm__ volatile("" ::: "memory"); _tile_loadconfig(config); })
#endif
