// The kernels on a processor, for tests: one thread after the other, from the last to the first.

typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE static inline
#define SLOW static
#define KERNEL static void
static u32 BLOCK, BLOCKS, THREAD;

static void atomicAdd(u64* at, u64 value) { *at += value; }
static void atomicMin(u64* at, u64 value) { if (value < *at) *at = value; }

#include "patch.cu"

template <typename Kernel>
static void run(u32 blocks, Kernel kernel) {
    BLOCKS = blocks;
    for (BLOCK = blocks; BLOCK-- > 0;)
        for (THREAD = THREADS; THREAD-- > 0;) kernel();
}

extern "C" void twin_patch(u32 blocks, u64 parts, u32 count, u32 task, u64 results) {
    run(blocks, [=] { patch((const Part*)parts, count, task, (u64*)results); });
}

extern "C" void twin_checksum(u32 blocks, u64 words, u64 start, u64 count, u64 results) {
    run(blocks, [=] { checksum((const u64*)words, start, count, (u64*)results); });
}
