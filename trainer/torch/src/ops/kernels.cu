// What lies between matrix products, in bf16, forward and backward: one kernel each. Sums and everything between a load and a store
// are f32. Formulas are those of `plain.rs`, which rounds between operations where a kernel does not.
//
// HIDDEN and HEAD_DIM come from the compiler's command line: one model a compilation. Both are multiples of 8. No kernel adds with
// atomics: the same input gives the same bits.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef __CUDACC__
#define DEVICE static __device__ __forceinline__
#define KERNEL extern "C" __global__
#define BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define SHARED __shared__
// Two numbers rounded to bf16, to the nearest, ties to even.
DEVICE u32 pack(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#endif

#define ALL 0xffffffffu
#define THREADS 256u
// Rows that a block, or a warp, takes at once: their loads are under way together.
#define ROWS 4

// ---- elements

DEVICE float low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE float rounded(float x) { return low(pack(x, 0.0f)); }

DEVICE void load8(const u16* from, float* x) {
    uint4 v = *(const uint4*)from;
    x[0] = low(v.x), x[1] = high(v.x), x[2] = low(v.y), x[3] = high(v.y);
    x[4] = low(v.z), x[5] = high(v.z), x[6] = low(v.w), x[7] = high(v.w);
}

DEVICE void store8(u16* to, const float* x) {
    uint4 v;
    v.x = pack(x[0], x[1]), v.y = pack(x[2], x[3]), v.z = pack(x[4], x[5]), v.w = pack(x[6], x[7]);
    *(uint4*)to = v;
}

// ---- sums

DEVICE float shuffled(float x, u32 bits) { return __uint_as_float(__shfl_xor_sync(ALL, __float_as_uint(x), bits)); }

DEVICE float sum_of_warp(float x) {
    for (u32 bits = 16; bits; bits /= 2) x += shuffled(x, bits);
    return x;
}

// Sums N values over the block, for every thread. `shared` has room for N values of each of 32 warps, and nobody still reads it.
template <int N> DEVICE void sum_over_block(float* values, float* shared) {
    u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int i = 0; i < N; i++) values[i] = sum_of_warp(values[i]);
    if (threadIdx.x % 32 == 0)
        for (int i = 0; i < N; i++) shared[warp * N + i] = values[i];
    __syncthreads();
    for (int i = 0; i < N; i++) {
        float sum = 0;
        for (u32 w = 0; w < warps; w++) sum += shared[w * N + i];
        values[i] = sum;
    }
}

// ---- RMSNorm: each thread has eight columns

#define NORM_THREADS ((HIDDEN / 8 + 31) / 32 * 32)

struct Norm {
    u64 x, weight, y;
    u32 rows;
    float eps;
};

KERNEL BOUNDS(NORM_THREADS, 1) void norm_forward(Norm a) {
    SHARED float shared[2][32 * ROWS];
    u32 column = threadIdx.x * 8, turn = 0;
    bool mine = column < HIDDEN;
    float weight[8];
    if (mine) load8((const u16*)a.weight + column, weight);
    for (u32 first = blockIdx.x * ROWS; first < a.rows; first += gridDim.x * ROWS, turn ^= 1) {
        float x[ROWS][8] = {}, sums[ROWS] = {};
        for (u32 r = 0; r < ROWS; r++)
            if (mine && first + r < a.rows) load8((const u16*)a.x + (u64)(first + r) * HIDDEN + column, x[r]);
        for (u32 r = 0; r < ROWS; r++)
            for (int i = 0; i < 8; i++) sums[r] += x[r][i] * x[r][i];
        sum_over_block<ROWS>(sums, shared[turn]);
        for (u32 r = 0; r < ROWS; r++) {
            if (!mine || first + r >= a.rows) continue;
            float scale = rsqrtf(sums[r] / HIDDEN + a.eps);
            for (int i = 0; i < 8; i++) x[r][i] *= scale * weight[i];
            store8((u16*)a.y + (u64)(first + r) * HIDDEN + column, x[r]);
        }
    }
}

// `partial` gets a row of gradients of the weight from each block.
struct NormBack {
    u64 gradient, x, weight, rest, out, partial;
    u32 rows;
    float eps;
};

KERNEL BOUNDS(NORM_THREADS, 1) void norm_backward(NormBack a) {
    SHARED float shared[2][32 * 2 * ROWS];
    u32 column = threadIdx.x * 8, turn = 0;
    bool mine = column < HIDDEN;
    float weight[8], sum[8] = {};
    if (mine) load8((const u16*)a.weight + column, weight);
    for (u32 first = blockIdx.x * ROWS; first < a.rows; first += gridDim.x * ROWS, turn ^= 1) {
        float x[ROWS][8] = {}, gradient[ROWS][8] = {}, sums[2 * ROWS] = {};
        for (u32 r = 0; r < ROWS; r++) {
            if (!mine || first + r >= a.rows) continue;
            u64 at = (u64)(first + r) * HIDDEN + column;
            load8((const u16*)a.x + at, x[r]);
            load8((const u16*)a.gradient + at, gradient[r]);
        }
        for (u32 r = 0; r < ROWS; r++)
            for (int i = 0; mine && i < 8; i++) {
                sums[2 * r] += x[r][i] * x[r][i];
                sums[2 * r + 1] += gradient[r][i] * weight[i] * x[r][i];
            }
        sum_over_block<2 * ROWS>(sums, shared[turn]);
        for (u32 r = 0; r < ROWS; r++) {
            if (!mine || first + r >= a.rows) continue;
            u64 at = (u64)(first + r) * HIDDEN + column;
            float scale = rsqrtf(sums[2 * r] / HIDDEN + a.eps), out[8] = {};
            float along = sums[2 * r + 1] * scale * scale * scale / HIDDEN;
            if (a.rest) load8((const u16*)a.rest + at, out);
            for (int i = 0; i < 8; i++) {
                sum[i] += gradient[r][i] * x[r][i] * scale;
                out[i] += gradient[r][i] * weight[i] * scale - x[r][i] * along;
            }
            store8((u16*)a.out + at, out);
        }
    }
    for (int i = 0; mine && i < 8; i++) ((float*)a.partial)[(u64)blockIdx.x * HIDDEN + column + i] = sum[i];
}

// ---- queries and keys: normalised by head, where the model has weights for that, and rotated; a warp has four heads, a lane
// neighbours in both halves of each

#define HALF (HEAD_DIM / 2)
#define PAIRS (HALF / 2)
#define CHUNKS ((PAIRS + 31) / 32)
#define WARPS (THREADS / 32)

// A lane's part of a head: two of the first half, two of the second, for each chunk.
struct Part {
    float a[CHUNKS][2], b[CHUNKS][2];
};

DEVICE u32 pair_of(u32 chunk) { return chunk * 32 + threadIdx.x % 32; }

DEVICE Part load_part(const u16* head) {
    Part x = {};
    for (u32 c = 0; c < CHUNKS; c++) {
        if (pair_of(c) >= PAIRS) continue;
        u32 a = ((const u32*)head)[pair_of(c)], b = ((const u32*)(head + HALF))[pair_of(c)];
        x.a[c][0] = low(a), x.a[c][1] = high(a), x.b[c][0] = low(b), x.b[c][1] = high(b);
    }
    return x;
}

DEVICE void store_part(u16* head, const Part& x) {
    for (u32 c = 0; c < CHUNKS; c++) {
        if (pair_of(c) >= PAIRS) continue;
        ((u32*)head)[pair_of(c)] = pack(x.a[c][0], x.a[c][1]);
        ((u32*)(head + HALF))[pair_of(c)] = pack(x.b[c][0], x.b[c][1]);
    }
}

// By the angles of a row; backward with `sign` -1.
DEVICE Part turned(const Part& x, const float* cos, const float* sin, float sign) {
    Part y = {};
    for (u32 c = 0; c < CHUNKS; c++)
        for (u32 i = 0; i < 2; i++) {
            if (pair_of(c) >= PAIRS) continue;
            float cosine = cos[2 * pair_of(c) + i], sine = sign * sin[2 * pair_of(c) + i];
            y.a[c][i] = x.a[c][i] * cosine - x.b[c][i] * sine;
            y.b[c][i] = x.b[c][i] * cosine + x.a[c][i] * sine;
        }
    return y;
}

DEVICE float dot(const Part& x, const Part& y) {
    float sum = 0;
    for (u32 c = 0; c < CHUNKS; c++)
        for (u32 i = 0; i < 2; i++) sum += x.a[c][i] * y.a[c][i] + x.b[c][i] * y.b[c][i];
    return sum;
}

struct Turn {
    u64 qkv, query_norm, key_norm, cos, sin, query, key;
    u32 rows, heads, kv_heads;
    float eps;
};

KERNEL BOUNDS(THREADS, 1) void turn_forward(Turn a) {
    u32 each = a.heads + a.kv_heads, items = a.rows * each, warps = gridDim.x * WARPS;
    Part query_norm = {}, key_norm = {};
    if (a.query_norm) query_norm = load_part((const u16*)a.query_norm), key_norm = load_part((const u16*)a.key_norm);
    for (u32 first = (blockIdx.x * WARPS + threadIdx.x / 32) * ROWS; first < items; first += warps * ROWS) {
        Part x[ROWS];
        for (u32 r = 0; r < ROWS; r++) {
            u32 item = min(first + r, items - 1);
            x[r] = load_part((const u16*)a.qkv + ((u64)(item / each) * (each + a.kv_heads) + item % each) * HEAD_DIM);
        }
        for (u32 r = 0; r < ROWS; r++) {
            u32 item = min(first + r, items - 1), row = item / each, head = item % each;
            bool key = head >= a.heads;
            if (a.query_norm) {
                float scale = rsqrtf(sum_of_warp(dot(x[r], x[r])) / HEAD_DIM + a.eps);
                Part weight = key ? key_norm : query_norm;
                for (u32 c = 0; c < CHUNKS; c++)
                    for (u32 i = 0; i < 2; i++) {
                        x[r].a[c][i] = rounded(x[r].a[c][i] * scale * weight.a[c][i]);
                        x[r].b[c][i] = rounded(x[r].b[c][i] * scale * weight.b[c][i]);
                    }
            }
            Part y = turned(x[r], (const float*)a.cos + (u64)row * HALF, (const float*)a.sin + (u64)row * HALF, 1);
            u16* to = key ? (u16*)a.key + ((u64)row * a.kv_heads + head - a.heads) * HEAD_DIM
                          : (u16*)a.query + ((u64)row * a.heads + head) * HEAD_DIM;
            if (first + r < items) store_part(to, y);
        }
    }
}

// `partial` gets gradients of both weights, `[2, HEAD_DIM]`, from each block.
struct TurnBack {
    u64 query_gradient, key_gradient, value_gradient, qkv, query_norm, key_norm, cos, sin, out, partial;
    u32 rows, heads, kv_heads;
    float eps;
};

KERNEL BOUNDS(THREADS, 1) void turn_backward(TurnBack a) {
    SHARED float shared[WARPS][2][HEAD_DIM];
    u32 each = a.heads + 2 * a.kv_heads, items = a.rows * each, warps = gridDim.x * WARPS;
    // Registers have no index: which of two is meant is a choice between values.
    Part query_norm = {}, key_norm = {}, query_sum = {}, key_sum = {};
    if (a.query_norm) query_norm = load_part((const u16*)a.query_norm), key_norm = load_part((const u16*)a.key_norm);
    for (u32 first = (blockIdx.x * WARPS + threadIdx.x / 32) * ROWS; first < items; first += warps * ROWS) {
        Part x[ROWS], gradient[ROWS];
        for (u32 r = 0; r < ROWS; r++) {
            u32 item = min(first + r, items - 1), row = item / each, head = item % each;
            u64 from = head < a.heads ? a.query_gradient : head < a.heads + a.kv_heads ? a.key_gradient : a.value_gradient;
            u32 among = head < a.heads ? a.heads : a.kv_heads;
            u32 place = head < a.heads ? head : (head - a.heads) % a.kv_heads;
            gradient[r] = load_part((const u16*)from + ((u64)row * among + place) * HEAD_DIM);
            x[r] = load_part((const u16*)a.qkv + ((u64)row * each + head) * HEAD_DIM);
        }
        for (u32 r = 0; r < ROWS; r++) {
            u32 item = min(first + r, items - 1), row = item / each, head = item % each;
            bool key = head >= a.heads, value = head >= a.heads + a.kv_heads, there = first + r < items;
            Part out = gradient[r];
            if (!value) out = turned(out, (const float*)a.cos + (u64)row * HALF, (const float*)a.sin + (u64)row * HALF, -1);
            if (!value && a.query_norm) {
                Part weight = key ? key_norm : query_norm, scaled = out;
                float scale = rsqrtf(sum_of_warp(dot(x[r], x[r])) / HEAD_DIM + a.eps);
                for (u32 c = 0; c < CHUNKS; c++)
                    for (u32 i = 0; i < 2; i++) {
                        float first_half = there ? out.a[c][i] * x[r].a[c][i] * scale : 0;
                        float second_half = there ? out.b[c][i] * x[r].b[c][i] * scale : 0;
                        query_sum.a[c][i] += key ? 0 : first_half, query_sum.b[c][i] += key ? 0 : second_half;
                        key_sum.a[c][i] += key ? first_half : 0, key_sum.b[c][i] += key ? second_half : 0;
                        scaled.a[c][i] *= weight.a[c][i];
                        scaled.b[c][i] *= weight.b[c][i];
                    }
                float along = sum_of_warp(dot(scaled, x[r])) * scale * scale * scale / HEAD_DIM;
                for (u32 c = 0; c < CHUNKS; c++)
                    for (u32 i = 0; i < 2; i++) {
                        out.a[c][i] = scaled.a[c][i] * scale - x[r].a[c][i] * along;
                        out.b[c][i] = scaled.b[c][i] * scale - x[r].b[c][i] * along;
                    }
            }
            if (there) store_part((u16*)a.out + ((u64)row * each + head) * HEAD_DIM, out);
        }
    }
    if (!a.query_norm) return;
    float(*own)[HEAD_DIM] = shared[threadIdx.x / 32];
    for (u32 c = 0; c < CHUNKS; c++)
        for (u32 i = 0; i < 2; i++) {
            u32 place = 2 * pair_of(c) + i;
            if (place >= HALF) continue;
            own[0][place] = query_sum.a[c][i], own[0][HALF + place] = query_sum.b[c][i];
            own[1][place] = key_sum.a[c][i], own[1][HALF + place] = key_sum.b[c][i];
        }
    __syncthreads();
    for (u32 place = threadIdx.x; place < 2 * HEAD_DIM; place += THREADS) {
        float sum = 0;
        for (u32 w = 0; w < WARPS; w++) sum += (&shared[w][0][0])[place];
        ((float*)a.partial)[(u64)blockIdx.x * 2 * HEAD_DIM + place] = sum;
    }
}

// ---- SwiGLU: a thread has eight columns of a row, of `width`

struct Gate {
    u64 gate_up, out;
    u32 rows, width;
};

KERNEL BOUNDS(THREADS, 1) void gate_forward(Gate a) {
    u64 items = (u64)a.rows * (a.width / 8);
    for (u64 item = (u64)blockIdx.x * THREADS + threadIdx.x; item < items; item += (u64)gridDim.x * THREADS) {
        u64 row = item / (a.width / 8), column = item % (a.width / 8) * 8;
        float gate[8], up[8];
        load8((const u16*)a.gate_up + row * 2 * a.width + column, gate);
        load8((const u16*)a.gate_up + row * 2 * a.width + a.width + column, up);
        for (int i = 0; i < 8; i++) up[i] *= gate[i] / (1 + __expf(-gate[i]));
        store8((u16*)a.out + row * a.width + column, up);
    }
}

// Gives the product again, too, which was not kept.
struct GateBack {
    u64 gradient, gate_up, out, product;
    u32 rows, width;
};

KERNEL BOUNDS(THREADS, 1) void gate_backward(GateBack a) {
    u64 items = (u64)a.rows * (a.width / 8);
    for (u64 item = (u64)blockIdx.x * THREADS + threadIdx.x; item < items; item += (u64)gridDim.x * THREADS) {
        u64 row = item / (a.width / 8), column = item % (a.width / 8) * 8, at = row * 2 * a.width + column;
        float gradient[8], gate[8], up[8], product[8];
        load8((const u16*)a.gradient + row * a.width + column, gradient);
        load8((const u16*)a.gate_up + at, gate);
        load8((const u16*)a.gate_up + at + a.width, up);
        for (int i = 0; i < 8; i++) {
            float share = 1 / (1 + __expf(-gate[i])), silu = gate[i] * share;
            product[i] = silu * up[i];
            gate[i] = gradient[i] * up[i] * share * (1 + gate[i] * (1 - share));
            up[i] = gradient[i] * silu;
        }
        store8((u16*)a.out + at, gate);
        store8((u16*)a.out + at + a.width, up);
        store8((u16*)a.product + row * a.width + column, product);
    }
}

// ---- log-probs of labels: a block has a row of `width` logits

#define SCORE_THREADS 512u

// Of some logits z: the largest, sum of e^(z - largest), sum of (z - largest) e^(z - largest).
struct Mass {
    float largest, sum, moment;
};

DEVICE Mass joined(Mass x, Mass y) {
    if (y.sum == 0) return x;
    if (x.sum == 0) return y;
    if (x.largest < y.largest) {
        Mass z = x;
        x = y, y = z;
    }
    float shift = y.largest - x.largest, scale = expf(shift);
    x.sum += scale * y.sum;
    x.moment += scale * (y.moment + shift * y.sum);
    return x;
}

struct Scores {
    u64 logits, labels, log_probs, entropy, log_sum;
    u32 width;
    float temperature;
};

KERNEL BOUNDS(SCORE_THREADS, 1) void scores_forward(Scores a) {
    SHARED Mass shared[SCORE_THREADS / 32];
    const u16* logits = (const u16*)a.logits + (u64)blockIdx.x * a.width;
    Mass all = {0, 0, 0};
    for (u32 column = threadIdx.x * 8; column < a.width; column += SCORE_THREADS * 8) {
        float z[8];
        load8(logits + column, z);
        Mass some = {z[0] / a.temperature, 0, 0};
        for (int i = 0; i < 8; i++) some.largest = fmaxf(some.largest, z[i] /= a.temperature);
        for (int i = 0; i < 8; i++) {
            float below = z[i] - some.largest, mass = expf(below);
            some.sum += mass, some.moment += below * mass;
        }
        all = joined(all, some);
    }
    for (u32 bits = 16; bits; bits /= 2) {
        Mass other = {shuffled(all.largest, bits), shuffled(all.sum, bits), shuffled(all.moment, bits)};
        // Both lanes join in one order, and so get the same bits.
        all = threadIdx.x & bits ? joined(other, all) : joined(all, other);
    }
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = all;
    __syncthreads();
    if (threadIdx.x) return;
    for (u32 w = 1; w < SCORE_THREADS / 32; w++) all = joined(all, shared[w]);
    float log_sum = logf(all.sum), label = low(logits[((const long long*)a.labels)[blockIdx.x]]) / a.temperature;
    ((float*)a.log_probs)[blockIdx.x] = label - all.largest - log_sum;
    ((float*)a.entropy)[blockIdx.x] = log_sum - all.moment / all.sum;
    ((float*)a.log_sum)[blockIdx.x] = all.largest + log_sum;
}

// Writes gradients over the logits. `entropy_gradient` may be absent.
struct ScoresBack {
    u64 logits, labels, entropy, log_sum, gradient, entropy_gradient;
    u32 width;
    float temperature;
};

KERNEL BOUNDS(SCORE_THREADS, 1) void scores_backward(ScoresBack a) {
    u32 row = blockIdx.x;
    u16* logits = (u16*)a.logits + (u64)row * a.width;
    u32 label = (u32)((const long long*)a.labels)[row];
    float log_sum = ((const float*)a.log_sum)[row], entropy = ((const float*)a.entropy)[row];
    float gradient = ((const float*)a.gradient)[row];
    float spread = a.entropy_gradient ? ((const float*)a.entropy_gradient)[row] : 0;
    for (u32 column = threadIdx.x * 8; column < a.width; column += SCORE_THREADS * 8) {
        float z[8];
        load8(logits + column, z);
        for (int i = 0; i < 8; i++) {
            float log_prob = z[i] / a.temperature - log_sum, prob = expf(log_prob);
            float own = column + i == label ? 1 - prob : -prob;
            z[i] = (gradient * own - spread * prob * (log_prob + entropy)) / a.temperature;
        }
        store8(logits + column, z);
    }
}
