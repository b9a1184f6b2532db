// Decoding. classify: members of the classes of each block. parse: the bits of each block, a lane a block, because they must be read in order.
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

// Reads bits in order. The payload lies on 16 bytes and has 64 bytes after its end.
struct Bits {
    const uint4* quads;
    uint4 now, then; // words that come next, four at a time
    u32 left; // of `now`
    u32 held; // bits of `window`
    u64 window;
    u32 at, end; // in bits of the block

    DEVICE_MEMBER void seek(const u8* payload, u64 offset, u32 to, u32 limit) {
        u64 bit = offset * 8 + to;
        quads = (const uint4*)payload + bit / 128;
        now = quads[0], then = quads[1], quads += 2;
        left = 4, held = 0, window = 0, at = to, end = limit;
        for (u32 words = bit % 128 / 32; words > 0; words--) word();
        refill();
        window >>= bit % 32, held -= bit % 32;
    }
    DEVICE_MEMBER u32 word() {
        u32 next = now.x;
        now.x = now.y, now.y = now.z, now.z = now.w;
        if (--left == 0) {
            now = then, left = 4;
            // Past the end of the block all reads end in an error; they go no further than the next quad.
            if (!over()) then = *quads++;
        }
        return next;
    }
    DEVICE_MEMBER bool over() const { return at > end; }
    // At least 33 bits from the current one on.
    DEVICE_MEMBER void refill() {
        if (held <= 32) window |= (u64)word() << held, held += 32;
    }
    DEVICE_MEMBER void skip(u32 count) { window >>= count, held -= count, at += count; }
    DEVICE_MEMBER u32 get(u32 count) {
        refill();
        u32 value = (u32)(window & ((1ull << count) - 1));
        skip(count);
        return value;
    }
    // Zeros before the next one, which is consumed too, or `limit`, if there are as many.
    DEVICE_MEMBER u32 unary(u32 limit) {
        for (u32 zeros = 0;;) {
            refill();
            u32 here = (u32)window ? __ffs((u32)window) - 1 : 32;
            if (zeros + here >= limit || over()) {
                skip(limit - zeros < 32 ? limit - zeros : 32);
                return limit;
            }
            zeros += here;
            if (here < 32) {
                skip(here + 1);
                return zeros;
            }
            skip(32);
        }
    }
    DEVICE_MEMBER u32 rice(u32 parameter) {
        u32 quotient = unary(ESCAPE);
        return quotient == ESCAPE ? get(ELEMENT_BITS) : quotient << parameter | get(parameter);
    }
    // The next mark of a run code over `count` items, of which those before `next` are done; `count` if there is none.
    DEVICE_MEMBER u32 mark(u32 next, u32 count, u32 run) {
        if (next >= count) return count;
        u32 limit = runs_of(count - next, run), skips = unary(limit);
        if (skips == limit) return count;
        u32 place = next + (skips << run) + get(run);
        return place < count && !over() ? place : ALL;
    }
    DEVICE_MEMBER static u32 runs_of(u32 count, u32 run) { return (count + (1u << run) - 1) >> run; }
};

// One class of a block, for the lanes that are `active`. The lanes of a warp read a code each and then meet: left alone, they would drift apart and run
// one after the other.
DEVICE void parse_class(const Decode& a, const Task& task, Bits& bits, u32 parameters, int shift, u32 members, Span& span, u32& total,
                        u32& failed, bool active) {
    Entry* entries = a.entries + task.entries;
    u32 run = shifted_run(parameters, shift), large_run = large_run_of(parameters), rice = rice_of(parameters);
    bool inverted = inverted_of(parameters), going = active;
    u32 first = total;
    for (u32 next = 0; __any_sync(ALL, going);) {
        if (!going) continue;
        u32 place = bits.mark(next, members, run);
        u32 more = place == ALL ? 0 : inverted ? place - next : place < members;
        if (place == ALL) failed = BEYOND;
        if (total + more > task.room) failed = EARLY;
        going = !failed && place < members;
        if (failed) continue;
        if (!inverted) next = place;
        for (; more > 0; more--) entries[total++] = entry(next++, 1);
        next = place + 1;
    }
    u32 count = total - first;
    Bits large = bits;
    going = active && !failed && large_run < EXPLICIT && count > 0;
    for (u32 next = 0; __any_sync(ALL, going);) {
        if (!going) continue;
        next = bits.mark(next, count, large_run);
        if (next == ALL) failed = BEYOND;
        going = !failed && ++next < count;
    }
    if (active && !failed) {
        span.first = first, span.count = count, span.signs = bits.at;
        if (bits.over() || count > bits.end - bits.at) {
            failed = EARLY;
        } else {
            bits.seek(a.payload, task.offset, bits.at + count, bits.end);
        }
    }
    entries += first;
    going = active && !failed && large_run != NONE_LARGE && count > 0;
    for (u32 next = 0; __any_sync(ALL, going);) {
        if (!going) continue;
        if (large_run != EXPLICIT) next = large.mark(next, count, large_run);
        going = next < count;
        if (!going) continue;
        u32 size = bits.rice(rice) + (large_run == EXPLICIT ? 1 : 2);
        if (bits.over()) failed = EARLY;
        set_upper(entries + next, size);
        going = !failed && ++next < count;
    }
    if (active && !failed && bits.over()) failed = EARLY;
}

// Blocks that a warp reads at once, in as many lanes. When one waits for memory, all do: so few, and many warps.
#define PARSED 4

KERNEL void parse(Decode a) {
    u64 index = (u64)blockIdx.x * PARSED + lane_id();
    bool own_task = lane_id() < PARSED && index < a.count;
    const Task& task = a.tasks[own_task ? index : 0];
    bool active = own_task && task.kind == CHANGES;
    const Table& table = a.tables[active ? task.table : 0];
    u32 classes = active ? table.count : 0;
    Bits bits;
    int shift = 0;
    u32 total = 0, failed = 0;
    if (active) {
        bits.seek(a.payload, task.offset, 0, (u32)task.bytes * 8);
        shift = (int)bits.get(3) - 3;
    }
    for (u32 k = 0; __any_sync(ALL, k < classes); k++) {
        bool own = k < classes && !failed;
        u32 members = !own ? 0 : classes == 1 ? block_elements(a.elements, task.block) : a.members[index * CLASSES + k];
        u32 parameters = own ? table.classes[k] : 0;
        parse_class(a, task, bits, parameters, shift, members, a.spans[(active ? index : 0) * CLASSES + k], total, failed, own);
    }
    if (!active) return;
    if (!failed && (bits.at + 7) / 8 != task.bytes) failed = bits.over() ? EARLY : FOLLOWS;
    if (!failed && bits.at % 8 && a.payload[task.offset + bits.at / 8] >> bits.at % 8) failed = PADDING;
    if (failed) atomicMax(&a.status[FAILED], (u64)failed);
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
