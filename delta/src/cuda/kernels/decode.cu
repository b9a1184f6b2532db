// Decoding. classify: members of the classes of each block. parse (in parse.cu): the bits of each block.
// resolve: where each change stands, what it makes of its element, and what that does to the digest. apply: writes, once all is known to be right.

struct Task {
    u64 block; // number in the tensor
    u64 offset; // of its bytes in the payload
    u64 bytes;
    u64 entries; // where its changes go
    u64 room; // for so many
    u64 table;
    u64 kind;
};

#define CHANGES 0
#define WHOLE 1

// The changes of one class of one block.
struct Span {
    u32 first, count, signs; // number of the first, how many, bit where their signs begin
};

struct Decode {
    u8* base;
    u64 elements;
    const u8* payload;
    const Task* tasks;
    u64 count; // of tasks
    const Table* tables;
    u64 classes; // whether a table has more than one
    u32* members; // of each task and class
    Span* spans; // of each task and class
    Entry* entries;
    const u64* keys;
    u64* digests; // of each task
    u64* status; // sum of the changes of the check, changed elements, error
    u64 check, expected; // of the base, of the result
};

#define SUM 0
#define CHANGED 1
#define FAILED 2
#define BEYOND 1u
#define EARLY 2u
#define PADDING 3u
#define FOLLOWS 4u

KERNEL void classify(Decode a) {
    SHARED u32 members[CLASSES];
    const Task& task = a.tasks[blockIdx.x];
    if (task.kind != CHANGES) return;
    const Table& table = a.tables[task.table];
    u32 t = threadIdx.x, lane = lane_id(), n = block_elements(a.elements, task.block);
    if (t < CLASSES) members[t] = 0;
    __syncthreads();
    if (table.count > 1) {
        const u8* base = a.base + task.block * BLOCK * SIZE;
        u64 tallies[4] = {0, 0, 0, 0};
#pragma unroll 4
        for (u32 at = t * 8; at < n; at += THREADS * 8) {
            u32 count = n - at;
            Eight v = load_eight(base + (u64)at * SIZE, count);
            u64 nibbles = 0;
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (i < (int)count) nibbles += 1ull << 4 * class_of(known(v, i), table.first, table.count - 1);
#pragma unroll
            for (int q = 0; q < 4; q++) tallies[q] += nibbles >> 4 * q & 0x000f000f000f000full;
        }
        __syncwarp();
        u32 own = 0;
#pragma unroll
        for (int q = 0; q < 4; q++) {
            u64 all = sum_all(tallies[q]);
            if ((int)(lane % 4) == q) own = all >> 16 * (lane / 4 % 4) & 0xffff;
        }
        if (lane < CLASSES) atomicAdd(&members[lane], own);
    } else if (t == 0) {
        members[0] = n;
    }
    __syncthreads();
    if (t < CLASSES) a.members[(u64)blockIdx.x * CLASSES + t] = members[t];
}

KERNEL void resolve(Decode a) {
    SHARED u64 sums[2];
    SHARED u64 stripes[2 * BLOCK / STRIPE];
    SHARED u32 changed;
    DYNAMIC_SHARED(shared);
    if (*(volatile u64*)&a.status[FAILED]) return;
    u32 t = threadIdx.x;
    const Task& task = a.tasks[blockIdx.x];
    u32 n = block_elements(a.elements, task.block), found = 0;
    u64 total[2] = {0, 0};
    const u8* base = a.base + task.block * BLOCK * SIZE;
    const u8* bytes = a.payload + task.offset;
    if (t < 2) sums[t] = 0;
    if (t == 0) changed = 0;
    if (t < 2 * BLOCK / STRIPE)
        stripes[t] = key(t % 2 ? KEY_N : KEY_M, task.block * (BLOCK / STRIPE) + t / 2);
    __syncthreads();
    if (task.kind == CHANGES) {
        const Table& table = a.tables[task.table];
        Classes classes = classes_at(shared);
        bool flat = table.count == 1;
        if (!flat) sort_classes(classes, base, n, table.first, table.count - 1);
        for (u32 k = 0; k < table.count; k++) {
            Span span = a.spans[(u64)blockIdx.x * CLASSES + k];
            Entry* entries = a.entries + task.entries + span.first;
            for (u32 i = t; i < span.count; i += THREADS) {
                Entry e = entries[i];
                u32 at = flat ? place_of(e) : position_at(classes, k, place_of(e), (n + ROW - 1) / ROW);
                u32 sign = span.signs + i, size = upper_of(e), old = load(base, at);
                u32 now = stepped(old, bytes[sign / 8] >> sign % 8 & 1 ? 0u - size : size);
                u64 sum[2] = {0, 0};
                digest_change(a.keys, at % STRIPE, old, now, sum[0], sum[1]);
                total[0] += sum[0] * stripes[at / STRIPE * 2];
                total[1] += sum[1] * stripes[at / STRIPE * 2 + 1];
                entries[i] = entry(at, now);
                found++;
            }
        }
    } else {
        for (u32 at = t; at < n; at += THREADS) {
            u32 old = load(base, at), now = 0;
            for (u32 i = 0; i < SIZE; i++) now |= (u32)bytes[at * SIZE + i] << 8 * i;
            if (old == now) continue;
            u64 sum[2] = {0, 0};
            digest_change(a.keys, at % STRIPE, old, now, sum[0], sum[1]);
            total[0] += sum[0] * stripes[at / STRIPE * 2];
            total[1] += sum[1] * stripes[at / STRIPE * 2 + 1];
            found++;
        }
    }
    __syncwarp();
    found = (u32)sum_all(found);
#pragma unroll
    for (int i = 0; i < 2; i++) total[i] = sum_all(total[i]);
    if (lane_id() == 0) {
        atomicAdd(&changed, found);
        atomicAdd(&sums[0], total[0]);
        atomicAdd(&sums[1], total[1]);
    }
    __syncthreads();
    if (t < 2) a.digests[(u64)blockIdx.x * 2 + t] = sums[t];
    if (t == 0) {
        atomicAdd(&a.status[SUM], sums[0] + sums[1]);
        atomicAdd(&a.status[CHANGED], (u64)changed);
    }
}

KERNEL void apply(Decode a) {
    const volatile u64* status = a.status;
    if (status[FAILED] || a.check + status[SUM] != a.expected) return;
    const Task& task = a.tasks[blockIdx.x];
    u8* base = a.base + task.block * BLOCK * SIZE;
    if (task.kind == CHANGES) {
        const Table& table = a.tables[task.table];
        Span last = a.spans[(u64)blockIdx.x * CLASSES + table.count - 1];
        const Entry* entries = a.entries + task.entries;
        for (u32 i = threadIdx.x; i < last.first + last.count; i += THREADS)
            store(base, place_of(entries[i]), upper_of(entries[i]) & MASK);
    } else {
        u32 bytes = block_elements(a.elements, task.block) * SIZE;
        for (u32 i = threadIdx.x; i < bytes; i += THREADS) base[i] = a.payload[task.offset + i];
    }
}
