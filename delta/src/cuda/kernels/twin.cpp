// The codec's kernels on a processor, for tests.

#include "twin.h"

#include "common.cu"
#include "encode.cu"
#include "emit.cu"
#include "frame.cu"
#include "decode.cu"
#include "parse.cu"

extern "C" int twin_launch(const char* name, unsigned grid, unsigned threads, void* arguments) {
#define RUN(kernel) if (!strcmp(name, #kernel)) return launch(kernel, arguments, grid, threads), 0
    RUN(sample);
    RUN(scan);
    RUN(digest);
    RUN(choose);
    RUN(emit_flat);
    RUN(emit);
    RUN(frame);
    RUN(pack);
    RUN(classify);
    RUN(parse);
    RUN(resolve);
    RUN(apply);
    return 1;
}
