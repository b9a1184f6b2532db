// Compares and exchanges elements of live weights. A block has up to CHANGES changes of one part; which one, it finds by the parts' first
// blocks. There is no shared memory and no barrier: each thread stands alone, so that a test can run the same source on the host.
//
// `patch.ptx` is what `bridge/ptx.py` makes of it: for compute_75, marked as PTX 7.0 so that older drivers take it.

#ifdef __CUDACC_RTC__
#define DEVICE static __device__ __forceinline__
#define SLOW static __device__ __noinline__
#define KERNEL extern "C" __global__ __launch_bounds__(THREADS) void
#define BLOCK blockIdx.x
#define BLOCKS gridDim.x
#define THREAD threadIdx.x
#endif

#define CHANGES 2048
#define THREADS 256
#define EACH (CHANGES / THREADS)
// Of a part's blocks, task 0 has the first, and each one of so many behind it.
#define ONE_IN 16

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// `Part` of `part.rs`.
struct Part {
    u64 live, positions, fresh, old, changes, first_block, first_compared, width, table, from, to, dims;
    u64 dim[4][3];
};

// Of all results, in words: values that are others, the first part with one, and parts of the checksum.
enum { OTHERS, PART, SUMS, SUMS_END = SUMS + 64 };

// No place: the view has not the element.
#define MISSING (~0ull)

// A value of a tensor whose elements go through a table.
struct Value {
    u16 bits;
};

// Where an element of the tensor lies in the storage.
SLOW u64 place(const Part* part, u64 position) {
    if (position < part->from) return MISSING;
    u64 rest = position - part->from, at = part->to;
    for (u64 d = 0; d < part->dims; ++d) {
        const u64* dim = part->dim[d];
        u64 index = rest / dim[0];
        if (index >= dim[1]) return MISSING;
        rest -= index * dim[0];
        at += index * dim[2];
    }
    return rest == 0 ? at : MISSING;
}

// A value as the storage has it: itself, or what the table has in its place.
template <typename T>
DEVICE T made(const T*, T value) { return value; }
template <typename T>
DEVICE T made(const T* table, Value value) { return table[value.bits]; }

// Writes `to` where `from` is, or only looks; returns how many values are others. All of a thread's loads are under
// way before its first store.
template <int N, typename T, typename V>
DEVICE u32 exchange(const Part* part, u64 first, const V* from, const V* to, bool write) {
    const u32* positions = (const u32*)part->positions;
    T* live = (T*)part->live;
    const T* table = (const T*)part->table;
    const u64 changes = part->changes, start = part->from, base = part->to;
    // One unbroken run in both: of a tensor, or of some rows of it.
    const bool is_run = part->dims == 0 || (part->dims == 1 && part->dim[0][0] == 1 && part->dim[0][2] == 1);
    const u64 run = part->dims == 0 ? 1 : part->dim[0][1];
    u64 at[N];
    T found[N], expected[N], wanted[N];
    u32 others = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const u64 index = first + j * THREADS + THREAD;
        const bool in = index < changes;
        const u64 position = in ? positions[index] : 0;
        expected[j] = in ? made(table, from[index]) : T();
        wanted[j] = in && write ? made(table, to[index]) : T();
        if (!in) at[j] = MISSING;
        else if (is_run) at[j] = position - start < run ? position - start + base : MISSING;
        else at[j] = place(part, position);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) found[j] = at[j] == MISSING ? expected[j] : live[at[j]];
#pragma unroll
    for (int j = 0; j < N; ++j) {
        if (found[j] != expected[j]) ++others;
        else if (write && at[j] != MISSING) live[at[j]] = wanted[j];
    }
    return others;
}

// The same through the part's table, in two turns: with more registers, fewer blocks of any kind would run at a time.
SLOW u32 exchange_made(const Part* part, u64 first, const Value* from, const Value* to, bool write) {
    u32 others = 0;
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn, first += CHANGES / 2)
        others += part->width == 2 ? exchange<EACH / 2, u16>(part, first, from, to, write)
                                   : exchange<EACH / 2, u32>(part, first, from, to, write);
    return others;
}

// task 0: sees whether old values are there; 1: writes the new ones there; 2: writes the old ones where the new
// ones are.
KERNEL patch(const Part* parts, u32 count, u32 task, u64* results) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if ((task == 0 ? parts[middle].first_compared : parts[middle].first_block) <= BLOCK) low = middle;
        else high = middle;
    }
    const Part* part = parts + low;
    u64 block = task == 0 ? (BLOCK - part->first_compared) * ONE_IN : BLOCK - part->first_block;
    u64 first = block * CHANGES;
    u64 from = task == 2 ? part->fresh : part->old, to = task == 2 ? part->old : part->fresh;
    bool write = task != 0;
    u32 others;
    if (part->table) {
        others = exchange_made(part, first, (const Value*)from, (const Value*)to, write);
    } else switch (part->width) {
        case 1: others = exchange<EACH, u8>(part, first, (const u8*)from, (const u8*)to, write); break;
        case 2: others = exchange<EACH, u16>(part, first, (const u16*)from, (const u16*)to, write); break;
        case 4: others = exchange<EACH, u32>(part, first, (const u32*)from, (const u32*)to, write); break;
        default: others = exchange<EACH, u64>(part, first, (const u64*)from, (const u64*)to, write);
    }
    if (others) {
        atomicAdd(results + OTHERS, (u64)others);
        atomicMin(results + PART, (u64)low);
    }
}

// Adds up the checksum of `count` words, the first of which is the file's word `start`: `checksum` of
// transport/src/prepared/mod.rs.
KERNEL checksum(const u64* words, u64 start, u64 count, u64* results) {
    u64 sum = 0;
    for (u64 n = (u64)BLOCK * THREADS + THREAD; n < count; n += (u64)BLOCKS * THREADS) {
        u64 z = words[n] + (start + n) * 0x9e3779b97f4a7c15ull;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        sum += z ^ z >> 31;
    }
    atomicAdd(results + SUMS + BLOCK % (SUMS_END - SUMS), sum);
}
