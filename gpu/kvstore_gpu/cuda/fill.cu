// Poison: every byte of every named target becomes `value` (0xA5: NaN in float views), so that "never written" shows.
#include "portable.cuh"

#define KV_FILL_PIECE 16384u  // bytes one thread block fills at a time

KV_DEVICE void kv_fill_piece(u8 *start, u64 bytes, u8 value) {
    ulonglong2 v;
    v.x = v.y = 0x0101010101010101ull * value;
    const u64 misfit = (16 - ((u64)start & 15)) & 15;
    const u64 head = misfit < bytes ? misfit : bytes;
    const u64 whole = (bytes - head) / 16;
    KV_EACH_THREAD(t) {
        for (u64 i = t; i < head; i += blockDim.x) start[i] = value;
        for (u64 i = t; i < whole; i += blockDim.x) kv_store16(start + head + 16 * i, v);
        for (u64 i = head + 16 * whole + t; i < bytes; i += blockDim.x) start[i] = value;
    }
}

KV_KERNEL kv_fill(u8 *base, const u64 *offsets, u32 num_targets, u64 bytes, u32 value) {
    const u64 pieces = (bytes + KV_FILL_PIECE - 1) / KV_FILL_PIECE;
    for (u64 i = blockIdx.x; i < pieces * num_targets; i += gridDim.x) {
        const u64 start = i % pieces * KV_FILL_PIECE;
        const u64 left = bytes - start;
        kv_fill_piece(base + offsets[i / pieces] + start, left < KV_FILL_PIECE ? left : KV_FILL_PIECE, (u8)value);
    }
}
