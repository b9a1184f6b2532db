// Lays pieces of device memory one after the other: a block takes piece after piece, in the widest words that both ends allow.
// A piece is {source, target, bytes}, three 64-bit words.
typedef unsigned long long u64;

template <typename Word>
__device__ u64 words(u64 source, u64 target, u64 bytes) {
    const Word *from = (const Word *)source;
    Word *to = (Word *)target;
    const u64 count = bytes / sizeof(Word);
#pragma unroll 4
    for (u64 n = threadIdx.x; n < count; n += blockDim.x) to[n] = from[n];
    return count * sizeof(Word);
}

extern "C" __global__ void gather(const u64 *pieces, unsigned int count) {
    for (unsigned int piece = blockIdx.x; piece < count; piece += gridDim.x) {
        const u64 source = pieces[3ull * piece], target = pieces[3ull * piece + 1], bytes = pieces[3ull * piece + 2];
        const u64 alignment = source | target;
        u64 done = 0;
        if ((alignment & 15) == 0) done = words<uint4>(source, target, bytes);
        else if ((alignment & 7) == 0) done = words<uint2>(source, target, bytes);
        else if ((alignment & 3) == 0) done = words<unsigned int>(source, target, bytes);
        else if ((alignment & 1) == 0) done = words<unsigned short>(source, target, bytes);
        words<unsigned char>(source + done, target + done, bytes - done);
    }
}
