// Encoding. sample: which exponents may be classes. scan: what changed, and how. choose: the coder table of each segment. emit: the bits of
// each block. pack: the blocks one after the other, and between them what the host writes.

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
    u8* masks; // a bit for each element: whether it changed
    u32* changed; // of each block
    u64* digests; // of each block: what its digest changes by
    Table* tables; // of each segment
    Entry* lists; // of each thread block of `emit`: room for a whole block's changes
    u64 list; // changes that fit into its shared memory
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

KERNEL void BOUNDS(THREADS, 5) scan(Encode a) {
    SHARED u32 sizes[CLASSES * LENGTHS];
    SHARED u32 members[CLASSES];
    SHARED u32 changed;
    SHARED u64 sums[2];
    u32 t = threadIdx.x, lane = lane_id();
    for (u32 i = t; i < CLASSES * LENGTHS; i += THREADS) sizes[i] = 0;
    if (t < CLASSES) members[t] = 0;
    if (t < 2) sums[t] = 0;
    if (t == 0) changed = 0;
    __syncthreads();
    u64 block = blockIdx.x, segment = block / SEGMENT_BLOCKS;
    u32 n = block_elements(a.elements, block);
    u32 apart = segment_elements(a.elements, segment) < 0x80000 ? 1 : 4;
    u32 first = a.classes ? a.firsts[segment] : 0;
    u32 last = a.classes ? CLASSES - 1 : 0;
    const u8* base = a.base + block * BLOCK * SIZE;
    const u8* fresh = a.fresh + block * BLOCK * SIZE;
    u64 total[2] = {0, 0}, tallies[4] = {0, 0, 0, 0};
    u32 found = 0;
    for (u32 stripe = t / 32; stripe * STRIPE < n; stripe += WARPS) {
        u64 sum[2] = {0, 0};
        for (u32 group = 0; group < STRIPE / 256; group += AHEAD) {
            Eight was[AHEAD], is[AHEAD];
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                u32 at = stripe * STRIPE + (group + k) * 256 + lane * 8, count = at < n ? n - at : 0;
                was[k] = load_eight(base + (u64)at * SIZE, count);
                is[k] = load_eight(fresh + (u64)at * SIZE, count);
            }
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                u32 at = stripe * STRIPE + (group + k) * 256 + lane * 8, count = at < n ? n - at : 0;
                u32 mask = 0;
#pragma unroll
                for (int i = 0; i < 8; i++) mask |= (u32)(known(was[k], i) != known(is[k], i)) << i;
                a.masks[block * (BLOCK / 8) + at / 8] = (u8)mask;
                found += __popc(mask);
                if (a.classes && at / 64 % apart == 0) {
                    u64 nibbles = 0;
#pragma unroll
                    for (int i = 0; i < 8; i++)
                        if (i < (int)count) nibbles += 1ull << 4 * class_of(known(was[k], i), first, last);
#pragma unroll
                    for (int q = 0; q < 4; q++) tallies[q] += nibbles >> 4 * q & 0x000f000f000f000full;
                }
                while (mask) {
                    int i = __ffs(mask) - 1;
                    mask &= mask - 1;
                    u32 old = any(was[k], i), now = any(is[k], i);
                    u32 length = 32 - __clz(size_of_step(step_of(old, now)));
                    atomicAdd(&sizes[class_of(old, first, last) * LENGTHS + length], 1u);
                    digest_change(a.keys, at % STRIPE + i, old, now, sum[0], sum[1]);
                }
            }
        }
        u64 index = block * (BLOCK / STRIPE) + stripe;
        total[0] += sum[0] * key(KEY_M, index);
        total[1] += sum[1] * key(KEY_N, index);
    }
    found = (u32)sum_all(found);
#pragma unroll
    for (int i = 0; i < 2; i++) total[i] = sum_all(total[i]);
    if (lane == 0) {
        atomicAdd(&changed, found);
        atomicAdd(&sums[0], total[0]);
        atomicAdd(&sums[1], total[1]);
    }
    if (a.classes) {
        u32 own = 0;
#pragma unroll
        for (int q = 0; q < 4; q++) {
            u64 all = sum_all(tallies[q]);
            if ((int)(lane % 4) == q) own = all >> 16 * (lane / 4 % 4) & 0xffff;
        }
        if (lane < CLASSES) atomicAdd(&members[lane], own * apart);
    } else if (t == 0) {
        atomicAdd(&members[0], n);
    }
    __syncthreads();
    u32* statistics = a.statistics + segment * STATISTICS;
    if (changed) {
        for (u32 i = t; i < CLASSES * LENGTHS; i += THREADS)
            if (sizes[i]) atomicAdd(&statistics[SIZES + i], sizes[i]);
        if (t < CLASSES) atomicAdd(&statistics[MEMBERS + t], members[t]);
        if (t == 0) atomicAdd(&statistics[BLOCKS], 1u);
    }
    if (t == 0) a.changed[block] = changed;
    if (t < 2) a.digests[block * 2 + t] = sums[t];
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
    if (role < 3 || t == 3 * CLASSES) {
        u32 from = role == 1 || role == 3 ? 0 : k, to = role == 2 || role == 3 ? CLASSES - 1 : k;
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
    for (u32 c = 0; c < CLASSES; c++) {
        u32 used = statistics[MEMBERS + c];
        for (u32 i = 1; i < LENGTHS && !used; i++) used = statistics[SIZES + c * LENGTHS + i];
        if (used) highest = c, lowest = lowest < c ? lowest : c;
    }
    if (a.classes && lowest < highest) {
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

DEVICE u32 lane_below() { return (1u << lane_id()) - 1; }
DEVICE u32 after_last(u32 from, u32 votes) { return from + 32 - __clz(votes); }
DEVICE u32 runs(u32 count, u32 run) { return (count + (1u << run) - 1) >> run; }

// One lane's piece: `zeros` zeros, a one and the low `run` bits of `gap`, for those that have one. Returns the bit after all lanes' pieces.
template <bool WRITE>
DEVICE u32 put_pieces(u32* out, u32 at, bool has, u32 gap, u32 run) {
    u32 length = has ? (gap >> run) + 1 + run : 0, sum = sum_up_to(length);
    if (WRITE && has) put(out, at + sum - length + (gap >> run), 1 | (gap & ((1u << run) - 1)) << 1);
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
        u32 breaks = __ballot_sync(ALL, has && (marks || i == 0)), below = breaks & lane_below();
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
        u32 votes = __ballot_sync(ALL, large), below = votes & lane_below();
        at = put_pieces<WRITE>(out, at, large, i - (below ? after_last(from, below) : next), run);
        if (votes) next = after_last(from, votes);
    }
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
        u32 sum = sum_up_to(length), to = at + sum - length;
        if (WRITE && has) {
            if (quotient < ESCAPE) {
                put(out, to + quotient, 1);
                put(out, to + quotient + 1, value & ((1u << rice) - 1));
            } else {
                put(out, to + ESCAPE, value);
            }
        }
        at += __shfl_sync(ALL, sum, 31);
    }
    return at;
}

// Codes a piece where its parts begin, or (without WRITE) finds how many bits each takes. A whole warp.
template <bool WRITE>
DEVICE void put_piece(u32* out, Share& shared, const Entry* list, u32 members, u32 parameters, int shift) {
    Share piece = shared;
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
    } else if (lane_id() == 0) {
        shared.places = places, shared.large = large, shared.signs = piece.to - piece.from, shared.rice = rice;
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

// Lists the changes of a block by class: `s.starts` says where each begins. `list` gets positions.
DEVICE void list_changes(Emitting& s, const u32* masks, u32 n, bool flat, const Classes& classes, Entry* list) {
    const u32 own = BLOCK / 32 / THREADS;
    u32 t = threadIdx.x, k_count = flat ? 1 : CLASSES, words = (n + 31) / 32;
    for (u32 k = 0; k < k_count; k++) s.counts[k * THREADS + t] = 0;
    for (u32 w = t * own; w < (t + 1) * own && w < words; w++) {
        u32 mask = masks[w];
        if (flat) {
            s.counts[t] += (u16)__popc(mask);
            continue;
        }
        for (; mask; mask &= mask - 1) s.counts[class_at(classes, w * 32 + __ffs(mask) - 1) * THREADS + t]++;
    }
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
    for (u32 w = t * own; w < (t + 1) * own && w < words; w++) {
        for (u32 mask = masks[w]; mask; mask &= mask - 1) {
            u32 position = w * 32 + __ffs(mask) - 1, k = flat ? 0 : class_at(classes, position);
            list[s.starts[k] + s.counts[k * THREADS + t]++] = entry(position, 0);
        }
    }
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

// Turns the bits that the parts take into where they begin: those of a class one after the other, each through all its pieces.
DEVICE void lay_out(Emitting& s) {
    u32 at = 3;
    for (u32 from = 0, to; from < s.piece_count; from = to) {
        for (to = from; to < s.piece_count && s.pieces[to].k == s.pieces[from].k; to++) {}
        for (u32 i = from; i < to; i++) at += s.pieces[i].places, s.pieces[i].places = at - s.pieces[i].places;
        for (u32 i = from; i < to; i++) at += s.pieces[i].large, s.pieces[i].large = at - s.pieces[i].large;
        for (u32 i = from; i < to; i++) at += s.pieces[i].signs, s.pieces[i].signs = at - s.pieces[i].signs;
        for (u32 i = from; i < to; i++) at += s.pieces[i].rice, s.pieces[i].rice = at - s.pieces[i].rice;
    }
    s.bits = at;
}

KERNEL void emit(Encode a) {
    SHARED Emitting s;
    DYNAMIC_SHARED(shared);
    u32 t = threadIdx.x, warp = t / 32;
    Entry* near = (Entry*)shared;
    Classes classes = classes_at(shared + a.list * sizeof(Entry));
    for (u64 block = blockIdx.x; block < a.blocks; block += gridDim.x) {
        u32 found = a.changed[block], n = block_elements(a.elements, block);
        if (found == 0) continue;
        const Table& table = a.tables[block / SEGMENT_BLOCKS];
        const u8* base = a.base + block * BLOCK * SIZE;
        const u8* fresh = a.fresh + block * BLOCK * SIZE;
        bool flat = table.count == 1;
        if (!flat) sort_classes(classes, base, n, table.first, table.count - 1);
        if (t < CLASSES) s.members[t] = flat ? (t == 0 ? n : 0) : classes.members[t];
        Entry* list = found <= a.list ? near : a.lists + (u64)blockIdx.x * BLOCK;
        list_changes(s, (const u32*)(a.masks + block * (BLOCK / 8)), n, flat, classes, list);
        for (u32 i = t; i < found; i += THREADS) {
            u32 position = place_of(list[i]);
            u32 rank = flat ? position : rank_at(classes, class_at(classes, position), position);
            list[i] = entry(rank, (u32)step_of(load(base, position), load(fresh, position)));
        }
        if (t == 0) {
            double expected = 0.0;
            for (u32 k = 0; k < table.count; k++)
                // A single class counts whether it is inverted or not.
                if (flat || !inverted_of(table.classes[k]))
                    expected += (double)s.members[k] * LN_2 / (double)(1u << run_of(table.classes[k]));
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
            lay_out(s);
            u32 bytes = (s.bits + 7) / 8, words = (s.bits + 31) / 32;
            s.place = NOWHERE;
            // What is not shorter than the elements is not used.
            if (bytes < n * SIZE) {
                u64 place = atomicAdd(a.used, (u64)words);
                if (place + words <= a.capacity) s.place = place;
            }
            a.places[block] = s.place;
            a.bytes[block] = bytes;
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
