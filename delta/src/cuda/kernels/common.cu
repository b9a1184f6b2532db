// What the kernels share: elements, digest keys, arguments, classes of a block. The format is described in docs/format/delta.md;
// names are those of the Rust modules that do the same on a processor.
//
// ELEMENT_BITS, MANTISSA_BITS and OPAQUE come from the compiler's command line: one element type a compilation.
// Every kernel keeps its warps whole at each warp function: no lane leaves early.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define SIZE (ELEMENT_BITS / 8)
#define MASK (0xffffffffu >> (32 - ELEMENT_BITS))
#define SIGN (1u << (ELEMENT_BITS - 1))
#define BLOCK 65536u
#define SEGMENT_BLOCKS 32u
#define CLASSES 16u
#define LENGTHS 33u
#define EXPLICIT 7u
#define NONE_LARGE 8u
#define RUN_MAX 16
#define ESCAPE 20u
#define THREADS 256u
#define WARPS (THREADS / 32)
#define ALL 0xffffffffu

// ---- elements

#if SIZE == 1
typedef u8 Bare;
#elif SIZE == 2
typedef u16 Bare;
#else
typedef u32 Bare;
#endif

DEVICE u32 load(const u8* bytes, u64 index) { return ((const Bare*)bytes)[index]; }

DEVICE void store(u8* bytes, u64 index, u32 value) { ((Bare*)bytes)[index] = (Bare)value; }

DEVICE u32 exponent(u32 bits) { return (bits & (MASK >> 1)) >> MANTISSA_BITS; }

DEVICE u32 ordered(u32 bits) {
#if OPAQUE
    return bits;
#else
    u32 negative = 0u - (bits >> (ELEMENT_BITS - 1));
    return bits ^ ((negative & MASK) | SIGN);
#endif
}

DEVICE u32 unordered(u32 rank) {
#if OPAQUE
    return rank;
#else
    u32 negative = (rank >> (ELEMENT_BITS - 1)) - 1;
    return rank ^ ((negative & MASK) | SIGN);
#endif
}

// Signed distance in ulps, modulo the number of patterns.
DEVICE int step_of(u32 base, u32 fresh) {
    return (int)((ordered(fresh) - ordered(base)) << (32 - ELEMENT_BITS)) >> (32 - ELEMENT_BITS);
}

DEVICE u32 stepped(u32 base, u32 step) { return unordered((ordered(base) + step) & MASK); }

DEVICE u32 size_of_step(int step) { return step < 0 ? 0u - (u32)step : (u32)step; }

DEVICE bool finite(u32 bits) {
#if OPAQUE
    return true;
#elif ELEMENT_BITS == 8 && MANTISSA_BITS == 3
    return (bits & (MASK >> 1)) != MASK >> 1; // no infinities
#else
    return exponent(bits) != exponent(MASK);
#endif
}

// Eight neighbours: what a lane reads at once. A warp reads 256.
struct Eight {
    u32 word[2 * SIZE];
};

DEVICE Eight load_eight(const u8* bytes, u32 count) {
    Eight v;
    if (count >= 8) {
#if SIZE == 1
        uint2 x = *(const uint2*)bytes;
        v.word[0] = x.x, v.word[1] = x.y;
#else
        for (int half = 0; half < SIZE / 2; half++) {
            uint4 x = ((const uint4*)bytes)[half];
            v.word[half * 4] = x.x, v.word[half * 4 + 1] = x.y, v.word[half * 4 + 2] = x.z, v.word[half * 4 + 3] = x.w;
        }
#endif
    } else {
#pragma unroll
        for (int i = 0; i < 2 * SIZE; i++) v.word[i] = 0;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < (int)count) v.word[i * SIZE / 4] |= load(bytes, i) << (i * ELEMENT_BITS % 32);
    }
    return v;
}

// Element `i`, which the compiler knows.
DEVICE u32 known(const Eight& v, int i) { return (v.word[i * SIZE / 4] >> (i * ELEMENT_BITS % 32)) & MASK; }

// Element `i`, whichever: its word is chosen from all, because an index would put them into memory.
DEVICE u32 any(const Eight& v, int i) {
    Eight left = v;
#pragma unroll
    for (int half = SIZE; half > 0; half /= 2)
#pragma unroll
        for (int k = 0; k < half; k++) left.word[k] = i * SIZE / 4 & half ? left.word[k + half] : left.word[k];
    return (left.word[0] >> (i * ELEMENT_BITS % 32)) & MASK;
}

// ---- digest

#define STRIPE (4096u / SIZE) // elements of 1024 words
#define KEY_M 0x64726966746c654dull
#define KEY_N 0x64726966746c654eull

// Output `index` of splitmix64, made odd.
DEVICE u64 key(u64 seed, u64 index) {
    u64 z = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return (z ^ (z >> 31)) | 1;
}

// What the change of the element at `inside` of a stripe adds to both sums, before the stripe's keys.
DEVICE void digest_change(const u64* keys, u32 inside, u32 old, u32 fresh, u64& first, u64& second) {
    u32 byte = inside * SIZE, p = byte / 4, shift = byte % 4 * 8;
    u32 was = old << shift, is = fresh << shift;
    first += ((u64)is - (u64)was) * keys[p];
    was = was << 16 | was >> 16, is = is << 16 | is >> 16;
    second += ((u64)is - (u64)was) * keys[1024 + p];
}

// ---- warps

DEVICE u32 lane_id() { return threadIdx.x % 32; }

// A bit for each lane below this one.
DEVICE u32 lanes_below() { return (1u << lane_id()) - 1; }

// Sum over this lane and those below.
DEVICE u32 sum_up_to(u32 value) {
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2) {
        u32 other = __shfl_up_sync(ALL, value, distance);
        if (lane_id() >= distance) value += other;
    }
    return value;
}

DEVICE u64 sum_all(u64 value) {
#pragma unroll
    for (u32 distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL, value, distance);
    return value;
}

// ---- tables

struct Table {
    u32 first, count;
    u32 classes[CLASSES]; // run | large run << 8 | rice << 16 | inverted << 24
};

DEVICE u32 run_of(u32 c) { return c & 255; }
DEVICE u32 large_run_of(u32 c) { return c >> 8 & 255; }
DEVICE u32 rice_of(u32 c) { return c >> 16 & 255; }
DEVICE u32 inverted_of(u32 c) { return c >> 24; }

DEVICE u32 shifted_run(u32 c, int shift) {
    int run = (int)run_of(c) + (inverted_of(c) ? 0 : shift);
    return run < 0 ? 0 : run > RUN_MAX ? RUN_MAX : run;
}

DEVICE u32 class_of(u32 bits, u32 first, u32 last) {
    u32 e = exponent(bits);
    u32 c = e > first ? e - first : 0;
    return c < last ? c : last;
}

// ---- classes of a block

#define ROW 128u // elements of a row: four words of each plane
#define ROWS (BLOCK / ROW)

struct Classes {
    u32* planes; // bit planes of the class numbers, one after the other, BLOCK / 32 words each
    u16* before; // members of each class before each row, ROWS for each class
    u32* members; // of each class
};

#define CLASSES_BYTES (4 * BLOCK / 8 + CLASSES * ROWS * 2 + CLASSES * 4)

DEVICE Classes classes_at(u8* shared) {
    Classes c;
    c.planes = (u32*)shared;
    c.before = (u16*)(shared + 4 * BLOCK / 8);
    c.members = (u32*)(shared + 4 * BLOCK / 8 + CLASSES * ROWS * 2);
    return c;
}

DEVICE u32 class_mask(u32 a, u32 b, u32 c, u32 d, u32 k) {
    return (k & 1 ? a : ~a) & (k & 2 ? b : ~b) & (k & 4 ? c : ~c) & (k & 8 ? d : ~d);
}

DEVICE u32 class_word(const Classes& at, u32 k, u32 word) {
    const u32* p = at.planes + word;
    return class_mask(p[0], p[BLOCK / 32], p[2 * BLOCK / 32], p[3 * BLOCK / 32], k);
}

// The bits at the bottom of eight nibbles, side by side.
DEVICE u32 gather_nibbles(u32 x) {
    x &= 0x11111111u;
    x = (x | x >> 3) & 0x03030303u;
    x = (x | x >> 6) & 0x000f000fu;
    return (x | x >> 12) & 0xffu;
}

// Sorts the `n` elements of a block into classes; all threads together.
DEVICE void sort_classes(const Classes& at, const u8* base, u32 n, u32 first, u32 last) {
    u32 t = threadIdx.x, rows = (n + ROW - 1) / ROW;
// All loads first: behind a store, the compiler could not move them.
#define TOGETHER (SIZE == 4 ? 2 : 4)
    for (u32 from = t; from < rows * (ROW / 8); from += TOGETHER * THREADS) {
        Eight v[TOGETHER];
#pragma unroll
        for (u32 j = 0; j < TOGETHER; j++) {
            u32 first_of = (from + j * THREADS) * 8;
            v[j] = load_eight(base + (u64)first_of * SIZE, first_of < n ? n - first_of : 0);
        }
#pragma unroll
        for (u32 j = 0; j < TOGETHER; j++) {
            u32 i = from + j * THREADS, count = i * 8 < n ? n - i * 8 : 0, numbers = 0;
#pragma unroll
            for (int k = 0; k < 8; k++)
                if (k < (int)count) numbers |= class_of(known(v[j], k), first, last) << (4 * k);
#pragma unroll
            for (u32 bit = 0; bit < 4; bit++)
                if (i < rows * (ROW / 8)) ((u8*)at.planes)[bit * (BLOCK / 8) + i] = (u8)gather_nibbles(numbers >> bit);
        }
    }
    __syncthreads();
    for (u32 row = t; row < rows; row += THREADS) {
        u32 counts[CLASSES] = {0};
#pragma unroll
        for (u32 w = 0; w < ROW / 32; w++) {
            const u32* p = at.planes + row * (ROW / 32) + w;
            u32 a = p[0], b = p[BLOCK / 32], c = p[2 * BLOCK / 32], d = p[3 * BLOCK / 32];
#pragma unroll
            for (u32 k = 0; k < CLASSES; k++) counts[k] += __popc(class_mask(a, b, c, d, k));
        }
#pragma unroll
        for (u32 k = 0; k < CLASSES; k++) at.before[k * ROWS + row] = (u16)counts[k];
    }
    __syncthreads();
    for (u32 k = t / 32; k < CLASSES; k += WARPS) {
        u32 all = 0;
        for (u32 from = 0; from < rows; from += 32) {
            u32 row = from + lane_id();
            u32 own = row < rows ? at.before[k * ROWS + row] : 0;
            u32 sum = sum_up_to(own);
            if (row < rows) at.before[k * ROWS + row] = (u16)(all + sum - own);
            all += __shfl_sync(ALL, sum, 31);
        }
        // What the last row lacks was counted for class 0, behind all that are there.
        if (lane_id() == 0) at.members[k] = k == 0 ? all - (rows * ROW - n) : all;
    }
    __syncthreads();
}

DEVICE u32 class_at(const Classes& at, u32 position) {
    const u32* p = at.planes + position / 32;
    u32 bit = position % 32, k = 0;
#pragma unroll
    for (u32 plane = 0; plane < 4; plane++) k |= (p[plane * (BLOCK / 32)] >> bit & 1) << plane;
    return k;
}

// How many members of class `k` stand before `position`.
DEVICE u32 rank_at(const Classes& at, u32 k, u32 position) {
    u32 row = position / ROW, word = position / 32, rank = at.before[k * ROWS + row];
    for (u32 w = row * (ROW / 32); w < word; w++) rank += __popc(class_word(at, k, w));
    return rank + __popc(class_word(at, k, word) & ((1u << position % 32) - 1));
}

// Where the member of class `k` with `rank` stands, which is below the class's number of members.
DEVICE u32 position_at(const Classes& at, u32 k, u32 rank, u32 rows) {
    u32 row = 0;
#pragma unroll
    for (u32 half = ROWS / 2; half > 0; half /= 2)
        if (row + half < rows && at.before[k * ROWS + row + half] <= rank) row += half;
    rank -= at.before[k * ROWS + row];
    u32 word = row * (ROW / 32), mask = class_word(at, k, word);
    for (u32 here = __popc(mask); rank >= here && word % (ROW / 32) != ROW / 32 - 1; here = __popc(mask)) {
        rank -= here;
        mask = class_word(at, k, ++word);
    }
    u32 bit = 0;
#pragma unroll
    for (u32 width = 16; width > 0; width /= 2) {
        u32 below = __popc(mask >> bit & ((1u << width) - 1));
        if (rank >= below) rank -= below, bit += width;
    }
    return word * 32 + bit;
}

// ---- lists of changes

// A place (rank or position) in the low 16 bits, and a step, its size or an element above.
#if SIZE == 4
typedef u64 Entry;
#define UPPER 32
#else
typedef u32 Entry;
#define UPPER 16
#endif

DEVICE Entry entry(u32 place, u32 upper) { return (Entry)upper << UPPER | place; }
DEVICE u32 place_of(Entry e) { return (u32)e & 0xffff; }
DEVICE u32 upper_of(Entry e) { return (u32)(e >> UPPER); }
#if SIZE == 4
DEVICE int signed_upper(Entry e) { return (int)(e >> UPPER); }
#else
DEVICE int signed_upper(Entry e) { return (int)e >> UPPER; }
#endif

DEVICE void set_upper(Entry* e, u32 upper) {
#if SIZE == 4
    ((u32*)e)[1] = upper;
#else
    ((u16*)e)[1] = (u16)upper;
#endif
}

DEVICE u32 block_elements(u64 elements, u64 block) {
    u64 left = elements - block * BLOCK;
    return left < BLOCK ? (u32)left : BLOCK;
}
