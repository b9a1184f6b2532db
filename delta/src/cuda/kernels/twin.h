// Kernels on a processor, for tests: each thread of a thread block is a coroutine, and runs until it meets the others at a barrier or a warp
// function. Thread blocks run one after the other, so shared memory can be static; it is filled with rubbish before each.
// Where threads wait that never meet, the process ends with a message.

#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

#define DEVICE static inline
#define DEVICE_MEMBER inline
#define KERNEL extern "C" __attribute__((visibility("hidden")))
#define BOUNDS(threads, blocks)
#define SHARED static __attribute__((section("twin_shared")))
#define DYNAMIC_SHARED(name) unsigned char* name = twin_dynamic

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct Dim { unsigned x; };
static Dim threadIdx, blockIdx, blockDim, gridDim;
alignas(16) static unsigned char twin_dynamic[232448];

enum { TWIN_THREADS = 1024, TWIN_STACK = 64 * 1024 };
struct Warp { unsigned arrived, generation; unsigned long long slots[2][32]; };
static struct {
    ucontext_t start[TWIN_THREADS], main;
    jmp_buf at[TWIN_THREADS], scheduler;
    bool started[TWIN_THREADS], done[TWIN_THREADS];
    unsigned arrived, generation, running;
    unsigned long long moves;
    Warp warps[TWIN_THREADS / 32];
    void (*body)(void*);
    void* arguments;
} twin;
static char twin_stacks[TWIN_THREADS][TWIN_STACK];

static void twin_wait() {
    if (!_setjmp(twin.at[threadIdx.x])) _longjmp(twin.scheduler, 1);
}

static void __syncthreads() {
    unsigned generation = twin.generation;
    twin.moves++;
    if (++twin.arrived == twin.running) twin.arrived = 0, twin.generation++;
    while (twin.generation == generation) twin_wait();
    twin.moves++;
}

// All lanes of a warp hand in a value; returns what they handed in.
static const unsigned long long* twin_exchange(unsigned long long value) {
    Warp& warp = twin.warps[threadIdx.x / 32];
    unsigned generation = warp.generation;
    warp.slots[generation % 2][threadIdx.x % 32] = value;
    twin.moves++;
    if (++warp.arrived == 32) warp.arrived = 0, warp.generation++;
    while (warp.generation == generation) twin_wait();
    twin.moves++;
    return warp.slots[generation % 2];
}

static void __syncwarp() { twin_exchange(0); }
template <class T> static T __shfl_sync(unsigned, T value, unsigned lane) { return (T)twin_exchange(value)[lane % 32]; }
template <class T> static T __shfl_up_sync(unsigned, T value, unsigned distance) {
    unsigned lane = threadIdx.x % 32;
    return (T)twin_exchange(value)[lane >= distance ? lane - distance : lane];
}
template <class T> static T __shfl_xor_sync(unsigned, T value, unsigned bits) {
    return (T)twin_exchange(value)[(threadIdx.x % 32) ^ bits];
}
static unsigned __ballot_sync(unsigned, bool vote) {
    const unsigned long long* votes = twin_exchange(vote);
    unsigned all = 0;
    for (int lane = 0; lane < 32; lane++) all |= (unsigned)votes[lane] << lane;
    return all;
}
static bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
template <class T> static T atomicAdd(T* at, T value) { T old = *at; *at += value; return old; }
template <class T> static T atomicOr(T* at, T value) { T old = *at; *at |= value; return old; }
template <class T> static T atomicMax(T* at, T value) { T old = *at; if (value > old) *at = value; return old; }
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __ffs(unsigned x) { return __builtin_ffs((int)x); }
static int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
static long long __double_as_longlong(double x) { long long y; memcpy(&y, &x, 8); return y; }
static double __longlong_as_double(long long x) { double y; memcpy(&y, &x, 8); return y; }

static void twin_main() {
    // The first time round this only makes a place to come back to, on a stack of its own.
    unsigned thread = threadIdx.x;
    twin.body(twin.arguments);
    twin.done[thread] = true;
    _longjmp(twin.scheduler, 1);
}

extern "C" char __start_twin_shared[], __stop_twin_shared[];

static void run_block(unsigned threads) {
    memset(__start_twin_shared, 0xa5, __stop_twin_shared - __start_twin_shared);
    memset(twin_dynamic, 0xa5, sizeof twin_dynamic);
    twin.arrived = 0, twin.running = threads;
    memset(twin.warps, 0, sizeof twin.warps);
    for (unsigned t = 0; t < threads; t++) twin.started[t] = twin.done[t] = false;
    for (volatile unsigned left = threads; left;) {
        unsigned long long moves = twin.moves;
        volatile unsigned ended = 0;
        for (volatile unsigned t = 0; t < threads; t = t + 1) {
            if (twin.done[t]) continue;
            threadIdx.x = t;
            if (!_setjmp(twin.scheduler)) {
                if (twin.started[t]) _longjmp(twin.at[t], 1);
                twin.started[t] = true;
                getcontext(&twin.start[t]);
                twin.start[t].uc_stack.ss_sp = twin_stacks[t];
                twin.start[t].uc_stack.ss_size = TWIN_STACK;
                twin.start[t].uc_link = nullptr;
                makecontext(&twin.start[t], twin_main, 0);
                setcontext(&twin.start[t]);
            }
            if (twin.done[t]) {
                ended = ended + 1, left = left - 1, twin.running--;
                // A thread that has left no longer keeps the others waiting.
                if (twin.running && twin.arrived == twin.running) twin.arrived = 0, twin.generation++;
            }
        }
        if (left && !ended && twin.moves == moves) {
            fprintf(stderr, "twin: %u threads of block %u wait for others that never come\n", left, blockIdx.x);
            abort();
        }
    }
}

template <class T> static void launch(void (*kernel)(T), void* arguments, unsigned grid, unsigned threads) {
    static void (*body)(T);
    body = kernel;
    twin.body = [](void* arguments) { body(*(T*)arguments); };
    twin.arguments = arguments;
    gridDim.x = grid, blockDim.x = threads;
    for (unsigned block = 0; block < grid; block++) {
        blockIdx.x = block;
        run_block(threads);
    }
}
