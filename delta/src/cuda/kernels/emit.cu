// Coding blocks. emit_flat: those in one class. emit: the others.

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
        place = atomicAdd(&a.summary->used, (u64)words);
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

// Codes a block by all warps.
DEVICE void emit_block(const Encode& a, Emitting& s, u8* shared, u64 block) {
    Classes classes = classes_at(shared + NEAR * sizeof(Entry));
    u32 t = threadIdx.x, warp = t / 32, found = a.changed[block], n = block_elements(a.elements, block);
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

// The blocks that are left, one after the other.
KERNEL void emit(Encode a) {
    SHARED Emitting s;
    DYNAMIC_SHARED(shared);
    for (u64 from = blockIdx.x; from < a.blocks; from += 32 * gridDim.x) {
        // Every warp asks the same.
        u64 own = from + lane_id() * gridDim.x;
        bool left = own < a.blocks && a.changed[own] && !is_simple(a, own);
        for (u32 votes = __ballot_sync(ALL, left); votes; votes &= votes - 1)
            emit_block(a, s, shared, from + (__ffs(votes) - 1) * gridDim.x);
    }
}
