// Encoding. sample: which exponents may be classes. scan: what changed, and how. choose: the coder table of each segment. emit_flat, emit: the
// bits of each block, in one class or in several. pack: the blocks one after the other, and between them what the host writes.

// What the host writes between the blocks: so many bytes of its text.
struct Piece {
    u64 target, from, bytes;
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
    u64* used; // words that they take, or would
    u64* places; // of each block: its first word
    u32* bytes; // of each block: length of its code
    const u64* targets; // of each block: where `pack` puts it; NOWHERE where it is not coded
    const Piece* pieces; // what the host writes
    u64 piece_count;
    const u8* text;
    u8* out;
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
// Most changes of a block that are listed: 4.7 %, half of it for large elements.
#define NEAR (SIZE == 4 ? 1536u : 3072u)
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

// ---- coding blocks

// Sets the bits of `value` from bit `at` on; they were zero.
DEVICE void put(u32* out, u32 at, u32 value) {
    u32 word = at / 32, shift = at % 32;
    if (value << shift) atomicOr(out + word, value << shift);
    if (shift && value >> (32 - shift)) atomicOr(out + word + 1, value >> (32 - shift));
}

DEVICE u32 after_last(u32 from, u32 votes) { return from + 32 - __clz(votes); }
DEVICE u32 runs(u32 count, u32 run) { return (count + (1u << run) - 1) >> run; }

// One lane's piece: `zeros` zeros, a one and the low `run` bits of `gap`, for those that have one. Returns the bit after all lanes' pieces;
// without WRITE, what it was given and the length of the lane's own.
template <bool WRITE>
DEVICE u32 put_pieces(u32* out, u32 at, bool has, u32 gap, u32 run) {
    u32 length = has ? (gap >> run) + 1 + run : 0;
    if (!WRITE) return at + length;
    u32 sum = sum_up_to(length);
    if (has) put(out, at + sum - length + (gap >> run), 1 | (gap & ((1u << run) - 1)) << 1);
    return at + __shfl_sync(ALL, sum, 31);
}

// A warp's part of a class: the changes `from` to `to` of its `count`. `from` is a multiple of 32.
struct Share {
    u32 k, from, to, count;
    u32 places, large, signs, rice; // bits that each part takes; then, where it begins
};

// The run code of places that are marked, or (inverted, which is one piece always) of those that are not.
template <bool WRITE>
DEVICE u32 put_places(u32* out, u32 at, const Entry* list, const Share& piece, u32 members, u32 run) {
    for (u32 from = piece.from; from < piece.to; from += 32) {
        u32 i = from + lane_id();
        bool has = i < piece.to;
        u32 place = has ? place_of(list[i]) : 0, next = has && i ? place_of(list[i - 1]) + 1 : 0;
        at = put_pieces<WRITE>(out, at, has, place - next, run);
    }
    if (!WRITE) at = (u32)sum_all(at);
    if (piece.to < piece.count) return at;
    return at + runs(members - (piece.count ? place_of(list[piece.count - 1]) + 1 : 0), run);
}

template <bool WRITE>
DEVICE u32 put_inverted(u32* out, u32 at, const Entry* list, u32 count, u32 members, u32 run) {
    u32 start = 0; // first of the changes in a row that end before this one
    for (u32 from = 0; from <= count; from += 32) {
        u32 i = from + lane_id();
        bool has = i <= count;
        u32 place = !has ? 0 : i < count ? place_of(list[i]) : members, next = has && i ? place_of(list[i - 1]) + 1 : 0;
        u32 marks = has ? place - next : 0; // unchanged ones before this change, or at the end
        u32 breaks = __ballot_sync(ALL, has && (marks || i == 0)), below = breaks & lanes_below();
        u32 row = i - (below ? after_last(from, below) - 1 : start); // changes in a row before them
        u32 first = (row >> run) + 1 + run;
        u32 length = marks ? first + (marks - 1) * (1 + run) : has && i == count ? runs(row, run) : 0;
        u32 sum = sum_up_to(length);
        if (WRITE && marks) {
            u32 to = at + sum - length;
            put(out, to + (row >> run), 1 | (row & ((1u << run) - 1)) << 1);
            for (u32 mark = 1; mark < marks; mark++) put(out, to + first + (mark - 1) * (1 + run), 1);
        }
        at += __shfl_sync(ALL, sum, 31);
        if (breaks) start = after_last(from, breaks) - 1;
    }
    return at;
}

DEVICE bool is_large(const Entry* list, u32 i, u32 to, u32 least) {
    return i < to && size_of_step(signed_upper(list[i])) >= least;
}

// The run code of large steps.
template <bool WRITE>
DEVICE u32 put_large(u32* out, u32 at, const Entry* list, const Share& piece, u32 run) {
    u32 next = 0;
    for (u32 from = piece.from; from > 0 && next == 0; from -= 32) {
        u32 votes = __ballot_sync(ALL, is_large(list, from - 32 + lane_id(), piece.from, 2));
        if (votes) next = after_last(from - 32, votes);
    }
    for (u32 from = piece.from; from < piece.to; from += 32) {
        u32 i = from + lane_id();
        bool large = is_large(list, i, piece.to, 2);
        u32 votes = __ballot_sync(ALL, large), below = votes & lanes_below();
        at = put_pieces<WRITE>(out, at, large, i - (below ? after_last(from, below) : next), run);
        if (votes) next = after_last(from, votes);
    }
    if (!WRITE) at = (u32)sum_all(at);
    return piece.to < piece.count ? at : at + runs(piece.count - next, run);
}

// The sizes of large steps.
template <bool WRITE>
DEVICE u32 put_rice(u32* out, u32 at, const Entry* list, const Share& piece, u32 rice, u32 least) {
    for (u32 from = piece.from; from < piece.to; from += 32) {
        u32 i = from + lane_id(), size = i < piece.to ? size_of_step(signed_upper(list[i])) : 0;
        bool has = size >= least;
        u32 value = has ? size - least : 0, quotient = value >> rice;
        u32 length = !has ? 0 : quotient < ESCAPE ? quotient + 1 + rice : ESCAPE + ELEMENT_BITS;
        if (!WRITE) {
            at += length;
            continue;
        }
        u32 sum = sum_up_to(length), to = at + sum - length;
        if (has) {
            if (quotient < ESCAPE) {
                put(out, to + quotient, 1);
                put(out, to + quotient + 1, value & ((1u << rice) - 1));
            } else {
                put(out, to + ESCAPE, value);
            }
        }
        at += __shfl_sync(ALL, sum, 31);
    }
    return WRITE ? at : (u32)sum_all(at);
}

// Codes a piece where its parts begin, or (without WRITE) finds how many bits each takes. A whole warp.
template <bool WRITE>
DEVICE void put_piece(u32* out, Share& own, const Entry* list, u32 members, u32 parameters, int shift) {
    Share piece = own;
    u32 run = shifted_run(parameters, shift), large_run = large_run_of(parameters);
    u32 least = large_run == EXPLICIT ? 1 : 2;
    u32 places = WRITE ? piece.places : 0, large = WRITE ? piece.large : 0, rice = WRITE ? piece.rice : 0;
    places = inverted_of(parameters) ? put_inverted<WRITE>(out, places, list, piece.count, members, run)
                                     : put_places<WRITE>(out, places, list, piece, members, run);
    if (large_run < EXPLICIT) large = put_large<WRITE>(out, large, list, piece, large_run);
    rice = put_rice<WRITE>(out, rice, list, piece, rice_of(parameters), least);
    if (WRITE) {
        for (u32 from = piece.from; from < piece.to; from += 32) {
            u32 i = from + lane_id();
            u32 negative = __ballot_sync(ALL, i < piece.to && signed_upper(list[i]) < 0);
            if (lane_id() == 0) put(out, piece.signs + from - piece.from, negative);
        }
    } else {
        // All lanes say the same.
        own.places = places, own.large = large, own.signs = piece.to - piece.from, own.rice = rice;
    }
}

DEVICE int best_shift(double expected, u32 found) {
    double ratio = (expected > 1.0 ? expected : 1.0) / (double)(found ? found : 1);
    int whole = floor_log2(ratio);
    // Rounds the logarithm: half a power of two is a factor of the root of two.
    double rest = __longlong_as_double((__double_as_longlong(ratio) & 0xfffffffffffffll) | 0x3ff0000000000000ll);
    whole += rest >= SQRT_2;
    return whole < -3 ? -3 : whole > 4 ? 4 : whole;
}

#define PIECES (WARPS + CLASSES)

struct Emitting {
    u32 starts[CLASSES + 1];
    u32 members[CLASSES];
    Share pieces[PIECES];
    u32 piece_count, bits;
    int shift;
    u64 place;
    u16 counts[CLASSES * THREADS];
};

// Changes of a block that are listed in order.
struct Listed {
    const Entry* list;
    u32 found;

    // Hands each change of thread `t` to `take`: those of threads one after the other are the block's.
    template <class Take>
    DEVICE_MEMBER void each(u32 t, Take take) const {
        u32 own = (found + THREADS - 1) / THREADS;
        for (u32 i = t * own; i < (t + 1) * own && i < found; i++) take(place_of(list[i]), signed_upper(list[i]));
    }
};

// Those of a block with too many, which are looked for once more: a bit for each element that changed.
struct Marked {
    const u8 *base, *fresh;
    const u32* masks;
    u32 words;

    template <class Take>
    DEVICE_MEMBER void each(u32 t, Take take) const {
        const u32 own = BLOCK / 32 / THREADS;
        for (u32 w = t * own; w < (t + 1) * own && w < words; w++) {
            for (u32 mask = masks[w]; mask; mask &= mask - 1) {
                u32 position = w * 32 + __ffs(mask) - 1;
                take(position, step_of(load(base, position), load(fresh, position)));
            }
        }
    }
};

// Marks what changed in a block of `n` elements; all threads together.
DEVICE Marked mark(const u8* base, const u8* fresh, u32 n, u32* masks) {
    u32 words = (n + 31) / 32;
    for (u32 at = threadIdx.x * 8; at < words * 32; at += THREADS * 8) {
        u32 count = at < n ? n - at : 0;
        Eight was = load_eight(base + (u64)at * SIZE, count), is = load_eight(fresh + (u64)at * SIZE, count);
        ((u8*)masks)[at / 8] = (u8)changed_of(was, is);
    }
    __syncthreads();
    return Marked{base, fresh, masks, words};
}

// Lists the changes of a block by class, each with its rank there and its step: `s.starts` says where each class begins.
template <class Changes>
DEVICE void list_changes(Emitting& s, const Changes& changes, bool flat, const Classes& classes, Entry* list) {
    u32 t = threadIdx.x, k_count = flat ? 1 : CLASSES;
    for (u32 k = 0; k < k_count; k++) s.counts[k * THREADS + t] = 0;
    changes.each(t, [&](u32 position, int) { s.counts[(flat ? 0 : class_at(classes, position)) * THREADS + t]++; });
    __syncthreads();
    for (u32 k = t / 32; k < k_count; k += WARPS) {
        u32 all = 0;
        for (u32 from = 0; from < THREADS; from += 32) {
            u32 here = s.counts[k * THREADS + from + lane_id()], sum = sum_up_to(here);
            // A thread has 256 elements, and all before it at most 65,280.
            s.counts[k * THREADS + from + lane_id()] = (u16)(all + sum - here);
            all += __shfl_sync(ALL, sum, 31);
        }
        if (lane_id() == 0) s.starts[k + 1] = all;
    }
    __syncthreads();
    if (t == 0) {
        s.starts[0] = 0;
        for (u32 k = 0; k < CLASSES; k++) s.starts[k + 1] = k < k_count ? s.starts[k] + s.starts[k + 1] : s.starts[k];
    }
    __syncthreads();
    changes.each(t, [&](u32 position, int step) {
        u32 k = flat ? 0 : class_at(classes, position), rank = flat ? position : rank_at(classes, k, position);
        list[s.starts[k] + s.counts[k * THREADS + t]++] = entry(rank, (u32)step);
    });
    __syncthreads();
}

// Cuts the classes into pieces: as many as there are warps, and one more for each class at most.
DEVICE void cut(Emitting& s, const Table& table, u32 found) {
    u32 size = (found + WARPS * 32 - 1) / (WARPS * 32) * 32;
    s.piece_count = 0;
    for (u32 k = 0; k < table.count; k++) {
        u32 count = s.starts[k + 1] - s.starts[k], from = 0;
        do {
            Share& piece = s.pieces[s.piece_count++];
            piece.k = k, piece.from = from, piece.count = count;
            piece.to = inverted_of(table.classes[k]) || from + size > count ? count : from + size;
            from = piece.to;
        } while (from < count);
    }
}

// Turns the bits that the parts take into where they begin: those of a class one after the other, each through all its pieces. Returns how many
// bits the block takes.
DEVICE u32 lay_out(Share* pieces, u32 count) {
    u32 at = 3;
    for (u32 from = 0, to; from < count; from = to) {
        for (to = from; to < count && pieces[to].k == pieces[from].k; to++) {}
        for (u32 i = from; i < to; i++) at += pieces[i].places, pieces[i].places = at - pieces[i].places;
        for (u32 i = from; i < to; i++) at += pieces[i].large, pieces[i].large = at - pieces[i].large;
        for (u32 i = from; i < to; i++) at += pieces[i].signs, pieces[i].signs = at - pieces[i].signs;
        for (u32 i = from; i < to; i++) at += pieces[i].rice, pieces[i].rice = at - pieces[i].rice;
    }
    return at;
}

// Changes to expect in a class of so many members.
DEVICE double expected_of(u32 members, u32 parameters) {
    return (double)members * LN_2 / (double)(1u << run_of(parameters));
}

// Room for the code of a block: its first word, or NOWHERE. One thread.
DEVICE u64 claim(const Encode& a, u64 block, u32 n, u32 bits) {
    u32 bytes = (bits + 7) / 8, words = (bits + 31) / 32;
    u64 place = NOWHERE;
    // What is not shorter than the elements is not used.
    if (bytes < n * SIZE) {
        place = atomicAdd(a.used, (u64)words);
        if (place + words > a.capacity) place = NOWHERE;
    }
    a.places[block] = place;
    a.bytes[block] = bytes;
    return place;
}

// Whether a block is for `emit_flat`.
DEVICE bool is_simple(const Encode& a, u64 block) {
    return a.listed[block] && a.tables[block / SEGMENT_BLOCKS].count == 1;
}

// Words of a block's code that are put together in shared memory.
#define NEAR_CODE 512u

// Codes a block in one class, a whole warp, into words that are zero.
DEVICE void put_flat(u32* out, Share& piece, const Entry* list, u32 n, u32 parameters, int shift) {
    if (lane_id() == 0) put(out, 0, (u32)(shift + 3));
    put_piece<true>(out, piece, list, n, parameters, shift);
    __syncwarp();
}

// A warp for each block.
KERNEL void emit_flat(Encode a) {
    SHARED u32 codes[WARPS * NEAR_CODE];
    u32 lane = lane_id(), warp = threadIdx.x / 32;
    u64 block = (u64)blockIdx.x * WARPS + warp;
    if (block >= a.blocks || !is_simple(a, block)) return;
    u32 found = a.listed[block], n = block_elements(a.elements, block);
    u32 parameters = a.tables[block / SEGMENT_BLOCKS].classes[0];
    const Entry* list = a.lists + block * NEAR;
    int shift = best_shift(expected_of(n, parameters), found);
    Share piece;
    piece.k = 0, piece.from = 0, piece.to = piece.count = found;
    put_piece<false>(nullptr, piece, list, n, parameters, shift);
    u32 bits = lay_out(&piece, 1), words = (bits + 31) / 32;
    u64 place = lane == 0 ? claim(a, block, n, bits) : 0;
    place = __shfl_sync(ALL, place, 0);
    if (place == NOWHERE) return;
    u32* out = a.coded + place;
    if (words <= NEAR_CODE) {
        u32* code = codes + warp * NEAR_CODE;
        for (u32 i = lane; i < words; i += 32) code[i] = 0;
        __syncwarp();
        put_flat(code, piece, list, n, parameters, shift);
        for (u32 i = lane; i < words; i += 32) out[i] = code[i];
    } else {
        for (u32 i = lane; i < words; i += 32) out[i] = 0;
        __syncwarp();
        put_flat(out, piece, list, n, parameters, shift);
    }
}

// The blocks that are left, one after the other, each by all warps.
KERNEL void emit(Encode a) {
    SHARED Emitting s;
    DYNAMIC_SHARED(shared);
    u32 t = threadIdx.x, warp = t / 32;
    Classes classes = classes_at(shared + NEAR * sizeof(Entry));
    for (u64 block = blockIdx.x; block < a.blocks; block += gridDim.x) {
        u32 found = a.changed[block], n = block_elements(a.elements, block);
        if (found == 0 || is_simple(a, block)) continue;
        const Table& table = a.tables[block / SEGMENT_BLOCKS];
        const u8* base = a.base + block * BLOCK * SIZE;
        bool flat = table.count == 1, listed = a.listed[block];
        if (!flat) sort_classes(classes, base, n, table.first, table.count - 1);
        if (t < CLASSES) s.members[t] = flat ? (t == 0 ? n : 0) : classes.members[t];
        // Shared memory is for the list, or for the marks that it is made of.
        Entry* list = listed ? (Entry*)shared : a.spare + (u64)blockIdx.x * BLOCK;
        if (listed) list_changes(s, Listed{a.lists + block * NEAR, found}, flat, classes, list);
        else list_changes(s, mark(base, a.fresh + block * BLOCK * SIZE, n, (u32*)shared), flat, classes, list);
        if (t == 0) {
            double expected = 0.0;
            for (u32 k = 0; k < table.count; k++)
                // A single class counts whether it is inverted or not.
                if (flat || !inverted_of(table.classes[k])) expected += expected_of(s.members[k], table.classes[k]);
            s.shift = best_shift(expected, found);
            cut(s, table, found);
        }
        __syncthreads();
        for (u32 i = warp; i < s.piece_count; i += WARPS) {
            Share& piece = s.pieces[i];
            put_piece<false>(nullptr, piece, list + s.starts[piece.k], s.members[piece.k], table.classes[piece.k], s.shift);
        }
        __syncthreads();
        if (t == 0) {
            s.bits = lay_out(s.pieces, s.piece_count);
            s.place = claim(a, block, n, s.bits);
        }
        __syncthreads();
        if (s.place != NOWHERE) {
            u32* out = a.coded + s.place;
            for (u32 i = t; i < (s.bits + 31) / 32; i += THREADS) out[i] = 0;
            __syncthreads();
            if (t == 0) put(out, 0, (u32)(s.shift + 3));
            for (u32 i = warp; i < s.piece_count; i += WARPS) {
                Share& piece = s.pieces[i];
                put_piece<true>(out, piece, list + s.starts[piece.k], s.members[piece.k], table.classes[piece.k], s.shift);
            }
        }
        __syncthreads();
    }
}

KERNEL void pack(Encode a) {
    u32 t = threadIdx.x;
    for (u64 i = (u64)blockIdx.x * THREADS + t; i < a.piece_count; i += (u64)gridDim.x * THREADS) {
        Piece piece = a.pieces[i];
        for (u64 byte = 0; byte < piece.bytes; byte++) a.out[piece.target + byte] = a.text[piece.from + byte];
    }
    u64 block = blockIdx.x;
    if (a.targets[block] == NOWHERE) return;
    const u8* from = (const u8*)(a.coded + a.places[block]);
    u8* to = a.out + a.targets[block];
    for (u32 i = t; i < a.bytes[block]; i += THREADS) to[i] = from[i];
}
