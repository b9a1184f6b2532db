// The kernels on a processor, for tests. Floats cross warps as words.

#include "twin.h"

#include <cmath>

static unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
static float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static float rsqrtf(float x) { return 1 / sqrtf(x); }
#define __expf expf
static unsigned min(unsigned x, unsigned y) { return x < y ? x : y; }

static unsigned rounded_bits(float x) {
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static unsigned pack(float low, float high) { return rounded_bits(high) << 16 | rounded_bits(low); }

#include "kernels.cu"

extern "C" int twin_launch(const char* name, unsigned grid, unsigned threads, void* arguments) {
#define RUN(kernel) if (!strcmp(name, #kernel)) return launch(kernel, arguments, grid, threads), 0
    RUN(norm_forward);
    RUN(norm_backward);
    RUN(turn_forward);
    RUN(turn_backward);
    RUN(gate_forward);
    RUN(gate_backward);
    RUN(scores_forward);
    RUN(scores_backward);
    return 1;
}
