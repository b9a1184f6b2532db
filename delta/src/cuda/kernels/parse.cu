// The bits of each block, a warp a block. A code says itself how long it is, and so must be read in order; but whoever starts in the wrong
// place soon falls into step. So every lane reads a part of its own, from where it begins on, and once more from where the lane before it came
// out, until all agree: two or three times.

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

// A block's bits.
struct Source {
    const u8* payload;
    u64 offset;
    u32 limit; // bits

    DEVICE_MEMBER Bits at(u32 bit) const {
        Bits bits;
        bits.seek(payload, offset, bit, limit);
        return bits;
    }
};

// Marks of a run code: how many items one code goes over, and what it says of the last of them.
struct RunCode {
    u32 run;

    // A code; or zeros as far as bit `to`, or over all `left` items: then `mark` is false.
    DEVICE_MEMBER u32 next(Bits& bits, u32 to, u32 left, bool& mark, u32& value) const {
        u32 limit = Bits::runs_of(left, run), room = to - bits.at;
        if (room < limit) limit = room;
        u32 zeros = bits.unary(limit);
        mark = zeros < limit;
        if (!mark) return zeros << run;
        value = (zeros << run) + bits.get(run);
        return value + 1;
    }
    DEVICE_MEMBER u32 expected(u32 items) const { return (items >> run) * (run + 2); }
};

// Numbers one after the other.
struct RiceCode {
    u32 parameter;

    DEVICE_MEMBER u32 next(Bits& bits, u32, u32, bool& mark, u32& value) const {
        value = bits.rice(parameter);
        mark = true;
        return 1;
    }
    DEVICE_MEMBER u32 expected(u32 items) const { return items * (parameter + 2); }
};

// More items than any code is asked for; few enough that what a warp adds up stays in 32 bits.
#define ENDLESS 0x100000u

// What a lane found between two bits, beginning with the code at `from`.
struct Part {
    u32 from, end, items, marks;
};

template <class Code>
DEVICE Part skim(const Source& source, const Code& code, u32 from, u32 to) {
    Part part = {from, from > to ? from : to, 0, 0};
    if (from >= to || from > source.limit) return part;
    Bits bits = source.at(from);
    while (bits.at < to && !bits.over()) {
        bool mark;
        u32 value;
        part.items += code.next(bits, to, ENDLESS, mark, value);
        part.marks += mark;
    }
    if (bits.at > to) part.end = bits.at;
    return part;
}

// Bits up to which one lane alone is faster than all of them that have to agree first.
#define SHORT 192u

// Where each lane begins, so that it goes on where the lane before it comes out.
template <class Code>
DEVICE Part settle(const Source& source, const Code& code, u32 at, u32 width) {
    u32 lane = lane_id(), to = at + (lane + 1) * width;
    Part part = skim(source, code, to - width, to);
    while (true) {
        u32 before = __shfl_up_sync(ALL, part.end, 1);
        bool moved = lane > 0 && before != part.from;
        if (!__any_sync(ALL, moved)) return part;
        if (moved) part = skim(source, code, before, to);
    }
}

// Reads the code over `count` items that begins at bit `at`, which becomes the one after it: `put` gets, for each mark, how many came before, the
// items before its code, and its value. Returns the number of marks, or ALL if the code does not end within the block or goes beyond the items.
template <class Code, class Put>
DEVICE u32 read_code(const Source& source, const Code& code, u32 count, u32& at, Put put) {
    u32 expected = code.expected(count), width = expected / 32 + 8, marks = 0;
    bool alone = expected < SHORT;
    width = width < 32 ? 32 : width > 1024 ? 1024 : width;
    for (u32 items = 0; items < count;) {
        Part part = {at, at, 0, 0};
        if (!alone) part = settle(source, code, at, width);
        u32 items_here = sum_up_to(part.items), marks_here = sum_up_to(part.marks);
        u32 next = items + items_here - part.items, number = marks + marks_here - part.marks;
        u32 to = alone ? source.limit + 1 : at + (lane_id() + 1) * width;
        bool broken = false, last = false;
        // Lanes behind the end of the code have read something else.
        bool mine = alone ? lane_id() == 0 : next < count;
        if (mine && part.from > source.limit) {
            broken = true;
        } else if (mine) {
            Bits bits = source.at(part.from);
            while (bits.at < to && next < count && !broken) {
                bool mark;
                u32 value, left = count - next, over = code.next(bits, to, left, mark, value);
                broken = bits.over() || (mark && over > left);
                if (mark && !broken) put(number++, next, value);
                next += over;
            }
            last = next >= count;
            part.end = bits.at;
        }
        if (__any_sync(ALL, broken)) return ALL;
        u32 ended = __ballot_sync(ALL, last), from = ended ? __ffs(ended) - 1 : 31;
        at = __shfl_sync(ALL, part.end, from);
        u32 here = __shfl_sync(ALL, number, from), all = __shfl_sync(ALL, marks_here, 31);
        marks = ended ? here : marks + all;
        items = ended ? count : items + __shfl_sync(ALL, items_here, 31);
        if (at > source.limit || (alone && !ended)) return ALL;
    }
    return marks;
}

// Marks of an inverted class, which are those that did not change: read by one lane, as there are few classes like that.
DEVICE u32 read_inverted(const Source& source, u32 run, u32 members, u32& at, Entry* entries, u32 room) {
    u32 count = 0;
    if (lane_id() == 0) {
        Bits bits = source.at(at);
        for (u32 next = 0; next < members;) {
            u32 place = bits.mark(next, members, run);
            if (place == ALL || count + (place - next) > room) {
                count = ALL;
                break;
            }
            for (; next < place; next++) entries[count++] = entry(next, 1);
            next = place + 1;
        }
        at = bits.at;
    }
    at = __shfl_sync(ALL, at, 0);
    return __shfl_sync(ALL, count, 0);
}

// One class of a block, from bit `at` on. Returns the number of an error, or 0. Behind the changes, `entries` has room for a list of the large ones.
DEVICE u32 parse_class(const Source& source, u32& at, u32 parameters, int shift, u32 members, Span& span, Entry* entries, u32 room) {
    u32 run = shifted_run(parameters, shift), large_run = large_run_of(parameters);
    u32 count = inverted_of(parameters) ? read_inverted(source, run, members, at, entries, room)
                                        : read_code(source, RunCode{run}, members, at, [=](u32 number, u32 before, u32 value) {
                                              if (number < room) entries[number] = entry(before + value, 1);
                                          });
    if (count == ALL) return BEYOND;
    if (count > room) return EARLY;
    Entry* list = entries + count;
    u32 large = large_run == EXPLICIT ? count : 0, left = room - count;
    if (large_run < EXPLICIT)
        large = read_code(source, RunCode{large_run}, count, at, [=](u32 number, u32 before, u32 value) {
            if (number < left) list[number] = entry(before + value, 0);
        });
    if (large == ALL) return BEYOND;
    if (at > source.limit || count > source.limit - at || (large_run < EXPLICIT && large > left)) return EARLY;
    if (lane_id() == 0) span.count = count, span.signs = at;
    at += count;
    // What one lane has written, another reads, or writes over.
    __syncwarp();
    large = read_code(source, RiceCode{rice_of(parameters)}, large, at, [=](u32 number, u32, u32 value) {
        if (large_run == EXPLICIT) set_upper(entries + number, value + 1);
        else set_upper(entries + place_of(list[number]), value + 2);
    });
    __syncwarp();
    return large == ALL ? EARLY : 0;
}

// Warps of a thread block of `parse`.
#define PARSERS 4

KERNEL void parse(Decode a) {
    u64 index = (u64)blockIdx.x * PARSERS + threadIdx.x / 32;
    if (index >= a.count || a.tasks[index].kind != CHANGES) return;
    const Task& task = a.tasks[index];
    const Table& table = a.tables[task.table];
    Source source = {a.payload, task.offset, (u32)task.bytes * 8};
    Bits bits = source.at(0);
    int shift = (int)bits.get(3) - 3;
    u32 at = 3, total = 0, failed = 0;
    for (u32 k = 0; k < table.count && !failed; k++) {
        u32 members = table.count == 1 ? block_elements(a.elements, task.block) : a.members[index * CLASSES + k];
        Span& span = a.spans[index * CLASSES + k];
        if (lane_id() == 0) span.first = total;
        failed = parse_class(source, at, table.classes[k], shift, members, span, a.entries + task.entries + total, (u32)task.room - total);
        __syncwarp();
        total += failed ? 0 : span.count;
    }
    if (!failed && (at + 7) / 8 != task.bytes) failed = FOLLOWS;
    if (!failed && at % 8 && a.payload[task.offset + at / 8] >> at % 8) failed = PADDING;
    if (failed && lane_id() == 0) atomicMax(&a.status[FAILED], (u64)failed);
}
