// Gather and scatter between an engine's own pool and block-first slots.
//
//   slot:    [layer][k|v][chunk][token][head][row]        contiguous, row = head_dim values
//   engine:  layer_bases[layer] + chunk_offsets[slot][chunk] + kv * kv_stride + token * token_stride + head * head_stride
//
// A *chunk* is the run of tokens that engine block and slot have in common; the host folds block numbers into
// chunk_offsets, so one kernel serves layer-first pools, per-layer pools, NHD and HND, K and V apart or packed, and engine
// blocks larger or smaller than ours. A *plane* (slot, layer, k|v, chunk) is one thread block's work; its threads move 16
// bytes each, neighbours next to each other. Rows that lie end to end are merged by the host into longer rows.
#include "portable.cuh"

struct kv_geometry {
    u32 chunk_tokens, num_heads, row_bytes;
    u64 token_stride, head_stride;
    u32 row_units;  // 16-byte units in a row, the last maybe short
};

struct kv_unit {
    u64 in_engine, in_slot;
    u32 bytes;
};

KV_DEVICE kv_unit kv_locate(const kv_geometry &g, u32 unit) {
    const u32 row = unit / g.row_units;
    const u32 start = (unit - row * g.row_units) * 16;
    const u32 token = row / g.num_heads;
    const u32 head = row - token * g.num_heads;
    kv_unit at;
    at.in_engine = token * g.token_stride + head * g.head_stride + start;
    at.in_slot = (u64)row * g.row_bytes + start;
    at.bytes = g.row_bytes - start < 16 ? g.row_bytes - start : 16;
    return at;
}

// The tail path: units that are short or that don't sit on 16 bytes at both ends.
KV_DEVICE void kv_move_unit(u8 *target, const u8 *source, u32 bytes) {
    if (bytes == 16 && kv_aligned(target, 16) && kv_aligned(source, 16)) {
        kv_store16(target, kv_load16(source));
        return;
    }
    for (u32 i = 0; i < bytes; ++i) target[i] = source[i];
}

template <bool INTO_SLOT>
KV_DEVICE void kv_move_plane(u8 *engine, u8 *slot, const kv_geometry &g) {
    const u32 units = g.chunk_tokens * g.num_heads * g.row_units;
    const bool even = kv_aligned(engine, 16) && kv_aligned(slot, 16) && g.row_bytes % 16 == 0 &&
                      g.token_stride % 16 == 0 && g.head_stride % 16 == 0;
    KV_EACH_THREAD(t) {
        u32 unit = t;
        // Four loads in flight before the first store.
        for (; even && unit + 3 * blockDim.x < units; unit += 4 * blockDim.x) {
            ulonglong2 held[4];
            u8 *targets[4];
            for (u32 i = 0; i < 4; ++i) {
                const kv_unit at = kv_locate(g, unit + i * blockDim.x);
                held[i] = kv_load16(INTO_SLOT ? engine + at.in_engine : slot + at.in_slot);
                targets[i] = INTO_SLOT ? slot + at.in_slot : engine + at.in_engine;
            }
            for (u32 i = 0; i < 4; ++i) kv_store16(targets[i], held[i]);
        }
        for (; unit < units; unit += blockDim.x) {
            const kv_unit at = kv_locate(g, unit);
            if (INTO_SLOT)
                kv_move_unit(slot + at.in_slot, engine + at.in_engine, at.bytes);
            else
                kv_move_unit(engine + at.in_engine, slot + at.in_slot, at.bytes);
        }
    }
}

template <bool INTO_SLOT>
KV_DEVICE void kv_move(const u64 *layer_bases, u8 *slots, const u64 *slot_offsets, const u64 *chunk_offsets,
                       u32 num_slots, u32 num_layers, u32 num_kv, u32 num_chunks, u32 chunk_tokens, u32 num_heads,
                       u32 row_bytes, u64 kv_stride, u64 token_stride, u64 head_stride) {
    const kv_geometry g = {chunk_tokens, num_heads, row_bytes, token_stride, head_stride, (row_bytes + 15) / 16};
    const u64 plane_bytes = (u64)chunk_tokens * num_heads * row_bytes;
    const u32 planes_per_slot = num_layers * num_kv * num_chunks;
    const u64 planes = (u64)num_slots * planes_per_slot;
    for (u64 plane = blockIdx.x; plane < planes; plane += gridDim.x) {
        const u32 slot = (u32)(plane / planes_per_slot);
        const u32 inner = (u32)(plane - (u64)slot * planes_per_slot);  // (layer, kv, chunk), as the slot lies
        const u32 chunk = inner % num_chunks;
        const u32 kv = inner / num_chunks % num_kv;
        const u32 layer = inner / (num_chunks * num_kv);
        u8 *engine = (u8 *)layer_bases[layer] + chunk_offsets[(u64)slot * num_chunks + chunk] + kv * kv_stride;
        kv_move_plane<INTO_SLOT>(engine, slots + slot_offsets[slot] + inner * plane_bytes, g);
    }
}

KV_KERNEL kv_gather(const u64 *layer_bases, u8 *slots, const u64 *slot_offsets, const u64 *chunk_offsets,
                    u32 num_slots, u32 num_layers, u32 num_kv, u32 num_chunks, u32 chunk_tokens, u32 num_heads,
                    u32 row_bytes, u64 kv_stride, u64 token_stride, u64 head_stride) {
    kv_move<true>(layer_bases, slots, slot_offsets, chunk_offsets, num_slots, num_layers, num_kv, num_chunks,
                  chunk_tokens, num_heads, row_bytes, kv_stride, token_stride, head_stride);
}

KV_KERNEL kv_scatter(const u64 *layer_bases, u8 *slots, const u64 *slot_offsets, const u64 *chunk_offsets,
                     u32 num_slots, u32 num_layers, u32 num_kv, u32 num_chunks, u32 chunk_tokens, u32 num_heads,
                     u32 row_bytes, u64 kv_stride, u64 token_stride, u64 head_stride) {
    kv_move<false>(layer_bases, slots, slot_offsets, chunk_offsets, num_slots, num_layers, num_kv, num_chunks,
                   chunk_tokens, num_heads, row_bytes, kv_stride, token_stride, head_stride);
}
