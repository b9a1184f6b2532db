// Encoding. sample: which exponents may be classes. scan: what changed, and how. choose: the coder table of each segment. Then, in emit.cu, the
// bits of each block, and in frame.cu all of them in a payload.

// What the host writes between the blocks, where it must: so many bytes of its text.
struct Piece {
    u64 target, from, bytes;
};

// What the host is told first.
struct Summary {
    u64 used; // words that the code of all blocks takes, or would
    u64 end; // length of the payload
    u64 changed; // elements
    u64 hard; // whether the payload is for the host to put together
    u64 not_finite; // whether an element that changed is NaN or infinite now
};

struct Encode {
    const u8* base;
    const u8* fresh;
    u64 elements, blocks;
    u64 classes; // whether a segment may have more than one
    const u64* keys; // A and B of the digest
    u32* firsts; // of each segment: exponent of the first class
    u32* statistics; // of each segment: STATISTICS numbers
    u32* changed; // of each block
    u32* listed; // of each block: its changes, if all of them are in `lists`; otherwise 0
    u64* digests; // of each block: what its digest changes by
    Table* tables; // of each segment
    Entry* lists; // of each block: position and step of each change, in order; room for NEAR
    Entry* spare; // of each thread block of `emit`: room for a whole block's changes
    u32* coded; // words of all blocks, in any order
    u64 capacity; // words there
    Summary* summary;
    u64* places; // of each block: its first word
    u32* bytes; // of each block: length of its code
    u64* targets; // of each block: where `pack` puts it; NOWHERE where it is not coded
    u64 header; // length of the payload's
    const Piece* pieces; // what the host writes
    u64 piece_count;
    const u8* text;
    u8* out;
    u64 first; // words of the whole tensor before `fresh`, for `digest`
};

#define NOWHERE (~0ull)
#define MEMBERS 0u
#define BLOCKS 16u
#define SIZES 20u
#define STATISTICS (SIZES + CLASSES * LENGTHS)

DEVICE u64 segment_elements(u64 elements, u64 segment) {
    u64 left = elements - segment * SEGMENT_BLOCKS * BLOCK;
    return left < SEGMENT_BLOCKS * BLOCK ? left : SEGMENT_BLOCKS * BLOCK;
}

KERNEL void sample(Encode a) {
    SHARED u32 counts[256];
    SHARED u32 best, highest;
    u64 segment = blockIdx.x, n = segment_elements(a.elements, segment), step = n / 1024 | 1;
    const u8* base = a.base + segment * SEGMENT_BLOCKS * BLOCK * SIZE;
    u32 t = threadIdx.x;
    counts[t] = 0;
    if (t == 0) best = 0, highest = 0;
    __syncthreads();
    for (u64 i = t * step; i < n; i += THREADS * step) atomicAdd(&counts[exponent(load(base, i)) & 255], 1u);
    __syncthreads();
    if (counts[t]) atomicMax(&highest, t);
    __syncthreads();
    u32 top = highest + 1, most = exponent(MASK);
    if (top > most) top = most;
    if (t <= (top > CLASSES - 1 ? top - (CLASSES - 1) : 0)) {
        u32 covered = 0;
        for (u32 e = t + 1; e < t + CLASSES && e < 256; e++) covered += counts[e];
        // Of those that cover as much, the highest.
        atomicMax(&best, covered << 8 | t);
    }
    __syncthreads();
    if (t == 0) a.firsts[segment] = best & 255;
}

// Loads that a lane has in flight before it looks at the first; more would leave fewer warps on a processor.
#define AHEAD 2
// Elements of a block that one warp goes through.
#define PART (BLOCK / WARPS)
// Changes that a warp may have found and not yet looked into: fewer than 32, and those of the 256 elements that it reads at once.
#define WAITING 288u
// Most changes of a block that are listed: 6.2 %, half of it for large elements.
#define NEAR (SIZE == 4 ? 2048u : 4096u)
#define NEAR_PART (NEAR / WARPS)

struct Waiting {
    Bare was[WAITING], is[WAITING];
    u16 places[WAITING];
};

struct Scanning {
    u64 sums[2];
    u64 stripes[2 * BLOCK / STRIPE]; // keys
    Entry list[NEAR]; // so many for each warp
    Waiting waiting[WARPS];
    u32 found[WARPS];
    u32 sizes[CLASSES * LENGTHS];
    u32 members[CLASSES];
};

// Sum over the lanes below of numbers up to 15, of which most are 0 or 1. `all` becomes that of all lanes.
DEVICE u32 few_below(u32 value, u32& all) {
    u32 below = 0;
    all = 0;
    for (u32 bit = 0; __any_sync(ALL, value >> bit); bit++) {
        u32 votes = __ballot_sync(ALL, value >> bit & 1);
        below += __popc(votes & lanes_below()) << bit;
        all += __popc(votes) << bit;
    }
    return below;
}

DEVICE u32 changed_of(const Eight& was, const Eight& is) {
    u32 mask = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) mask |= (u32)(known(was, i) != known(is, i)) << i;
    return mask;
}

// What change `number` of a warp says of its class, and what it does to the digest.
DEVICE void look(const Encode& a, Scanning& s, u32 number, u32 first, u32 last, u64* sums) {
    const Waiting& waiting = s.waiting[threadIdx.x / 32];
    u32 slot = number % WAITING, place = waiting.places[slot], old = waiting.was[slot], now = waiting.is[slot];
    if (!finite(now)) a.summary->not_finite = 1;
    int step = step_of(old, now);
    if (number < NEAR_PART) s.list[threadIdx.x / 32 * NEAR_PART + number] = entry(place, (u32)step);
    atomicAdd(&s.sizes[class_of(old, first, last) * LENGTHS + 32 - __clz(size_of_step(step))], 1u);
    u64 one = 0, two = 0;
    digest_change(a.keys, place % STRIPE, old, now, one, two);
    sums[0] += one * s.stripes[place / STRIPE * 2];
    sums[1] += two * s.stripes[place / STRIPE * 2 + 1];
}

// A warp's part of a block. Returns how many changes it found.
template <bool MANY>
DEVICE u32 scan_part(const Encode& a, Scanning& s, u64 block, u32 n, u64* sums) {
    u64 segment = block / SEGMENT_BLOCKS, tallies[4] = {0, 0, 0, 0};
    u32 lane = lane_id(), warp = threadIdx.x / 32, found = 0, seen = 0;
    u32 apart = segment_elements(a.elements, segment) < 0x80000 ? 1 : 4;
    u32 first = MANY ? a.firsts[segment] : 0, last = MANY ? CLASSES - 1 : 0;
    const u8* base = a.base + block * BLOCK * SIZE;
    const u8* fresh = a.fresh + block * BLOCK * SIZE;
    Waiting& waiting = s.waiting[warp];
    for (u32 from = warp * PART; from < (warp + 1) * PART && from < n; from += AHEAD * 256) {
        Eight was[AHEAD], is[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            u32 at = from + k * 256 + lane * 8, count = at < n ? n - at : 0;
            was[k] = load_eight(base + (u64)at * SIZE, count);
            is[k] = load_eight(fresh + (u64)at * SIZE, count);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            u32 at = from + k * 256 + lane * 8, count = at < n ? n - at : 0;
            if (MANY && at / 64 % apart == 0) {
                u64 nibbles = 0;
#pragma unroll
                for (int i = 0; i < 8; i++)
                    if (i < (int)count) nibbles += 1ull << 4 * class_of(known(was[k], i), first, last);
#pragma unroll
                for (int q = 0; q < 4; q++) tallies[q] += nibbles >> 4 * q & 0x000f000f000f000full;
            }
            u32 mask = changed_of(was[k], is[k]), all, number = found + few_below(__popc(mask), all);
            for (; mask; mask &= mask - 1, number++) {
                int i = __ffs(mask) - 1;
                u32 slot = number % WAITING;
                waiting.was[slot] = (Bare)any(was[k], i);
                waiting.is[slot] = (Bare)any(is[k], i);
                waiting.places[slot] = (u16)(at + i);
            }
            found += all;
            if (found - seen < 32) continue;
            // Many at once: one alone would cost as much as 32.
            __syncwarp();
            for (; found - seen >= 32; seen += 32) look(a, s, seen + lane, first, last, sums);
            __syncwarp();
        }
    }
    __syncwarp();
    if (seen + lane < found) look(a, s, seen + lane, first, last, sums);
    if (MANY) {
        u32 own = 0;
#pragma unroll
        for (int q = 0; q < 4; q++) {
            u64 all = sum_all(tallies[q]);
            if ((int)(lane % 4) == q) own = all >> 16 * (lane / 4 % 4) & 0xffff;
        }
        if (lane < CLASSES) atomicAdd(&s.members[lane], own * apart);
    }
    return found;
}

KERNEL void BOUNDS(THREADS, 5) scan(Encode a) {
    SHARED Scanning s;
    u64 block = blockIdx.x, segment = block / SEGMENT_BLOCKS, sums[2] = {0, 0};
    u32 t = threadIdx.x, lane = lane_id(), warp = t / 32, n = block_elements(a.elements, block);
    for (u32 i = t; i < CLASSES * LENGTHS; i += THREADS) s.sizes[i] = 0;
    if (t < CLASSES) s.members[t] = t == 0 && !a.classes ? n : 0;
    if (t < 2) s.sums[t] = 0;
    if (t < 2 * BLOCK / STRIPE) s.stripes[t] = key(t % 2 ? KEY_N : KEY_M, block * (BLOCK / STRIPE) + t / 2);
    __syncthreads();
    u32 found = a.classes ? scan_part<true>(a, s, block, n, sums) : scan_part<false>(a, s, block, n, sums);
#pragma unroll
    for (int i = 0; i < 2; i++) sums[i] = sum_all(sums[i]);
    if (lane == 0) {
        s.found[warp] = found;
        atomicAdd(&s.sums[0], sums[0]);
        atomicAdd(&s.sums[1], sums[1]);
    }
    __syncthreads();
    u32 before = 0, changed = 0, most = 0;
    for (u32 w = 0; w < WARPS; w++) {
        if (w == warp) before = changed;
        changed += s.found[w];
        most = most > s.found[w] ? most : s.found[w];
    }
    bool listed = most <= NEAR_PART;
    if (listed)
        for (u32 i = lane; i < found; i += 32) a.lists[block * NEAR + before + i] = s.list[warp * NEAR_PART + i];
    u32* statistics = a.statistics + segment * STATISTICS;
    if (changed) {
        for (u32 i = t; i < CLASSES * LENGTHS; i += THREADS)
            if (s.sizes[i]) atomicAdd(&statistics[SIZES + i], s.sizes[i]);
        if (t < CLASSES) atomicAdd(&statistics[MEMBERS + t], s.members[t]);
        if (t == 0) atomicAdd(&statistics[BLOCKS], 1u);
    }
    if (t == 0) a.changed[block] = changed, a.listed[block] = listed ? changed : 0;
    if (t < 2) a.digests[block * 2 + t] = s.sums[t];
}

// What the blocks of `fresh` digest to as they are, whatever the base says.
KERNEL void digest(Encode a) {
    SHARED u64 all[2];
    u64 block = blockIdx.x, sums[2] = {0, 0};
    u32 t = threadIdx.x, n = block_elements(a.elements, block);
    const u8* fresh = a.fresh + block * BLOCK * SIZE;
    if (t < 2) all[t] = 0;
    __syncthreads();
    for (u32 from = t * 8; from < n; from += THREADS * 8) {
        // Eight neighbours are whole words; what the last ones lack is zero.
        Eight eight = load_eight(fresh + (u64)from * SIZE, n - from);
        u64 at = a.first + (block * BLOCK + from) / 4 * SIZE, stripe = at / 1024, first = 0, second = 0;
        u32 p = at % 1024;
#pragma unroll
        for (u32 i = 0; i < 2 * SIZE; i++) {
            // Those of a slice may lie in two stripes.
            if (p + i == 1024) {
                sums[0] += first * key(KEY_M, stripe);
                sums[1] += second * key(KEY_N, stripe);
                first = second = 0, stripe++, p -= 1024;
            }
            u32 word = eight.word[i];
            first += word * a.keys[p + i];
            second += (word << 16 | word >> 16) * a.keys[1024 + p + i];
        }
        sums[0] += first * key(KEY_M, stripe);
        sums[1] += second * key(KEY_N, stripe);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u64 sum = sum_all(sums[i]);
        if (lane_id() == 0) atomicAdd(&all[i], sum);
    }
    __syncthreads();
    if (t < 2) a.digests[block * 2 + t] = all[t];
}

// ---- choosing tables: the arithmetic of choose.rs, which must come out the same to the last bit (no fused multiply-add)

#define LN_2 0.6931471805599453
#define SQRT_2 1.4142135623730951

struct Choice {
    u32 parameters;
    double cost;
};

struct Tally {
    u32 members, changed;
    u32 sizes[LENGTHS];
};

// Exponent of the power of two at or below `x`, which is positive and normal.
DEVICE int floor_log2(double x) { return (int)(__double_as_longlong(x) >> 52 & 0x7ff) - 1023; }

DEVICE void best_run(double density, int max, u32& run, double& bits) {
    if (density <= 0.0) {
        run = max, bits = 0.0;
        return;
    }
    int near = floor_log2(LN_2 / density);
    near = near < 0 ? 0 : near > max ? max : near;
    int from = near > 0 ? near - 1 : 0, to = near + 1 < max ? near + 1 : max;
    for (int k = from; k <= to; k++) {
        double full = 1.0 - density;
        for (int i = 0; i < k; i++) full *= full;
        double open = 1.0 - full;
        double cost = (double)k + 1.0 / (open > 2.2250738585072014e-308 ? open : 2.2250738585072014e-308);
        if (k == from || cost < bits) run = k, bits = cost;
    }
}

DEVICE void best_rice(const Tally& tally, u32 least, u32& rice, double& bits) {
    u32 longest = 0;
    for (u32 length = 1; length < LENGTHS; length++)
        if (tally.sizes[length]) longest = length;
    u64 best = 0;
    for (u32 k = 0; k < (longest ? longest : 1); k++) {
        u64 cost = 0; // exact in whole numbers, as it is in the f64 of the other side
        for (u32 length = least; length <= longest; length++) {
            u64 middle = (3ull << (length - 1)) / 2 - least;
            u32 quotient = (u32)(middle >> k);
            cost += (u64)tally.sizes[length] * (quotient < ESCAPE ? quotient + 1 + k : ESCAPE + ELEMENT_BITS);
        }
        if (k == 0 || cost < best) rice = k, best = cost;
    }
    bits = (double)best;
}

DEVICE Choice best_class(const Tally& tally, u32 blocks, u32 apart) {
    double changed = (double)tally.changed, members = (double)tally.members;
    members = (members > changed ? members : changed) + (double)(apart - 1) / 2.0;
    double density = changed / (members > 1.0 ? members : 1.0);
    if (density > 1.0) density = 1.0;
    bool inverted = density > 0.5;
    double marked = inverted ? members - changed : changed;
    u32 run, large_run, rice, explicit_rice, large = 0;
    double per_mark, explicit_bits, implied, per_large, steps;
    best_run(inverted ? 1.0 - density : density, RUN_MAX, run, per_mark);
    for (u32 length = 2; length < LENGTHS; length++) large += tally.sizes[length];
    best_rice(tally, 1, explicit_rice, explicit_bits);
    best_rice(tally, 2, rice, implied);
    best_run((double)large / (double)(tally.changed ? tally.changed : 1), EXPLICIT - 1, large_run, per_large);
    implied = implied + (double)large * per_large;
    if (large == 0) {
        large_run = NONE_LARGE, rice = 0, steps = 0.0;
    } else if (explicit_bits < implied) {
        large_run = EXPLICIT, rice = explicit_rice, steps = explicit_bits;
    } else {
        steps = implied;
    }
    if (tally.members == 0 && tally.changed == 0) blocks = 0;
    double fixed = 8.0 + 1.5 * (double)blocks;
    Choice c;
    c.parameters = run | large_run << 8 | rice << 16 | (u32)inverted << 24;
    c.cost = marked * per_mark + steps + changed + fixed;
    return c;
}

// One warp pair a segment: a thread for each class alone, with those below, with those above; and one for all.
KERNEL void choose(Encode a) {
    SHARED Choice single[CLASSES], low[CLASSES], high[CLASSES], flat;
    u64 segment = blockIdx.x;
    const u32* statistics = a.statistics + segment * STATISTICS;
    u32 t = threadIdx.x, k = t % CLASSES, role = t / CLASSES;
    u32 apart = segment_elements(a.elements, segment) < 0x80000 ? 1 : 4;
    if (a.classes ? role < 3 || t == 3 * CLASSES : t == 3 * CLASSES) {
        u32 from = role == 1 || role == 3 ? 0 : k, to = !a.classes ? 0 : role == 2 || role == 3 ? CLASSES - 1 : k;
        Tally tally;
        tally.members = tally.changed = 0;
        for (u32 i = 0; i < LENGTHS; i++) tally.sizes[i] = 0;
        for (u32 c = from; c <= to; c++) {
            tally.members += statistics[MEMBERS + c];
            for (u32 i = 1; i < LENGTHS; i++) {
                u32 count = statistics[SIZES + c * LENGTHS + i];
                tally.sizes[i] += count;
                tally.changed += count;
            }
        }
        Choice choice = best_class(tally, statistics[BLOCKS], apart);
        *(role == 0 ? &single[k] : role == 1 ? &low[k] : role == 2 ? &high[k] : &flat) = choice;
    }
    __syncthreads();
    if (t != 0) return;
    Table table;
    table.first = 0, table.count = 1;
    for (u32 c = 0; c < CLASSES; c++) table.classes[c] = 0;
    table.classes[0] = flat.parameters;
    u32 lowest = CLASSES, highest = 0;
    for (u32 c = 0; a.classes && c < CLASSES; c++) {
        u32 used = statistics[MEMBERS + c];
        for (u32 i = 1; i < LENGTHS && !used; i++) used = statistics[SIZES + c * LENGTHS + i];
        if (used) highest = c, lowest = lowest < c ? lowest : c;
    }
    if (lowest < highest) {
        double best = 0.0;
        u32 best_from = CLASSES, best_to = 0;
        for (u32 from = lowest; from <= highest; from++) {
            double cost = low[from].cost;
            for (u32 to = from + 1; to <= highest; to++) {
                double sum = cost + high[to].cost + 8.0;
                if (best_from == CLASSES || sum < best) best = sum, best_from = from, best_to = to;
                cost += single[to].cost;
            }
        }
        if (best < flat.cost) {
            table.first = a.firsts[segment] + best_from;
            table.count = best_to - best_from + 1;
            for (u32 c = best_from; c <= best_to; c++)
                table.classes[c - best_from] =
                    (c == best_from ? low[c] : c == best_to ? high[c] : single[c]).parameters;
        }
    }
    a.tables[segment] = table;
}
