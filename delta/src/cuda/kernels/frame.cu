// From the code of blocks to a payload. frame: the tokens between them, and where each of them goes. pack: puts them there.

// Bytes one after the other; without `out` they are only counted.
struct Cursor {
    u8* out;
    u64 at;
    u32 pending, held; // bits of a byte that is not full

    DEVICE_MEMBER void byte(u32 value) {
        if (out) out[at] = (u8)value;
        at++;
    }
    DEVICE_MEMBER void varint(u64 value) {
        for (; value >= 128; value >>= 7) byte((u32)value | 128);
        byte((u32)value);
    }
    DEVICE_MEMBER void bits(u32 value, u32 count) {
        for (u32 i = 0; i < count; i++) {
            pending |= (value >> i & 1) << held;
            if (++held == 8) byte(pending), pending = held = 0;
        }
    }
    // A signed number near zero: zigzag in unary.
    DEVICE_MEMBER void near(int value) {
        for (u32 left = (u32)(value << 1) ^ (u32)(value >> 31); left; left--) bits(0, 1);
        bits(1, 1);
    }
};

#define SAME 0u
#define CODED 2u
#define TABLE 3u

DEVICE void put_run(Cursor& to, u64 blocks) {
    if (blocks) to.varint(blocks << 3 | SAME);
}

// As table.rs writes it.
DEVICE void put_table(Cursor& to, const Table& table) {
    bool inverts = false;
    for (u32 k = 0; k < table.count; k++) inverts |= inverted_of(table.classes[k]) != 0;
    to.bits(table.count - 1, 4);
    if (table.count > 1) to.bits(table.first, 8);
    to.bits(inverts, 1);
    int run = 5, large_run = 3, rice = 0;
    for (u32 k = 0; k < table.count; k++) {
        u32 c = table.classes[k];
        if (inverts) to.bits(inverted_of(c), 1);
        to.near((int)run_of(c) - run - 1);
        to.near((int)large_run_of(c) - large_run);
        to.near((int)rice_of(c) - rice);
        run = run_of(c), large_run = large_run_of(c), rice = rice_of(c);
    }
    if (to.held) to.byte(to.pending), to.pending = to.held = 0;
}

// What `frame` knows of a segment.
struct Frame {
    u64 changed; // elements
    u64 bytes; // of all that it adds, without the run before it
    u64 same; // blocks like the base's at its end; before it, once that is known
    u64 start;
    bool hard; // whether a block may be better off without its base
};

// What comes before the code of a block: after `run` like the base's, and if it is the segment's first with changes after `same` before the segment.
DEVICE void put_tokens(Cursor& to, const Table& table, bool leads, u64 same, u32 run, u32 bytes) {
    if (leads) {
        Cursor length = {nullptr, 0, 0, 0};
        put_table(length, table);
        put_run(to, same);
        to.varint(length.at << 3 | TABLE);
        if (to.out) put_table(to, table);
        else to.at += length.at;
    }
    put_run(to, run);
    to.varint((u64)bytes << 3 | CODED);
}

// A segment, by a warp, a lane for each of its blocks. Tokens and targets are written if there is `out`, from `start` on.
DEVICE Frame put_segment(const Encode& a, u64 segment, u64 same, u8* out, u64 start) {
    u64 from = segment * SEGMENT_BLOCKS, block = from + lane_id();
    u32 count = a.blocks - from < SEGMENT_BLOCKS ? (u32)(a.blocks - from) : SEGMENT_BLOCKS;
    u32 changed = lane_id() < count ? a.changed[block] : 0, bytes = changed ? a.bytes[block] : 0;
    u32 votes = __ballot_sync(ALL, changed), before = votes & lanes_below();
    u32 run = lane_id() - (before ? after_last(0, before) : 0);
    bool leads = changed && !before;
    Cursor counted = {nullptr, 0, 0, 0};
    if (changed) put_tokens(counted, a.tables[segment], leads, same, run, bytes);
    u32 own = (u32)counted.at + bytes, sum = sum_up_to(own);
    if (out && lane_id() < count) {
        Cursor to = {out, start + sum - own, 0, 0};
        if (changed) put_tokens(to, a.tables[segment], leads, same, run, bytes);
        a.targets[block] = changed ? to.at : NOWHERE;
    }
    bool hard = changed && bytes > block_elements(a.elements, block) * SIZE / 2;
    Frame frame;
    frame.changed = sum_all(changed);
    frame.bytes = __shfl_sync(ALL, sum, 31);
    frame.same = count - (votes ? after_last(0, votes) : 0);
    frame.start = start;
    frame.hard = __any_sync(ALL, hard);
    return frame;
}

// Warps of the one thread block of `frame`, and segments that they look at before they go on.
#define FRAMERS 32u
#define FRAMES 256u

KERNEL void BOUNDS(32 * FRAMERS, 1) frame(Encode a) {
    SHARED Frame frames[FRAMES];
    SHARED u64 at, same, changed;
    SHARED bool hard;
    if (a.summary->used > a.capacity) return;
    u64 segments = (a.blocks + SEGMENT_BLOCKS - 1) / SEGMENT_BLOCKS;
    u32 t = threadIdx.x;
    if (t == 0) at = a.header, same = changed = 0, hard = false;
    for (u64 from = 0; from < segments; from += FRAMES) {
        u32 count = segments - from < FRAMES ? (u32)(segments - from) : FRAMES;
        for (u32 i = t / 32; i < count; i += FRAMERS) {
            Frame frame = put_segment(a, from + i, 0, nullptr, 0);
            if (lane_id() == 0) frames[i] = frame;
        }
        __syncthreads();
        for (u32 i = 0; t == 0 && i < count; i++) {
            Frame& frame = frames[i];
            u64 before = same, behind = frame.same;
            Cursor run = {nullptr, 0, 0, 0};
            if (frame.changed) put_run(run, before);
            same = frame.changed ? behind : before + behind;
            frame.same = before, frame.start = at;
            at += run.at + frame.bytes, changed += frame.changed, hard |= frame.hard;
        }
        __syncthreads();
        // There is no room for blocks that are not coded, and no token of theirs here.
        if (hard) break;
        for (u32 i = t / 32; i < count; i += FRAMERS)
            put_segment(a, from + i, frames[i].same, a.out, frames[i].start);
        __syncthreads();
    }
    if (t != 0) return;
    Cursor last = {hard ? nullptr : a.out, at, 0, 0};
    put_run(last, same);
    a.summary->end = last.at, a.summary->changed = changed, a.summary->hard = hard;
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
