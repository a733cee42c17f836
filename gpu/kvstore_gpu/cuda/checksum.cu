// XXH3-64 (seed 0, default secret) of each layer slice; one thread block a slice.
//
// Source: the XXH3 algorithm as published with xxHash 0.8 (BSD-2). Where we differ is the order of work. Inputs over 240
// bytes are a chain of 1 KiB blocks of 16 stripes of 8 lanes. Inside a block, every (stripe, lane) adds an independent
// term to its lane (modulo 2^64, so in any order); only the scramble after each block is a chain. So a tile of 16 blocks
// goes through three phases:
//
//   1. 128 threads, 16 bytes each a load, neighbours adjacent: terms of lanes (2p, 2p+1) of one stripe   -> partial
//   2. thread (block, lane): sum over the 16 stripes                                                     -> sums
//   3. 8 threads: acc = scramble(acc + sums[block]), block after block
//
// The stripes after the last whole block go the same way, without the scramble; the last 64 bytes are added at the end.
//
// Other thread blocks of the same multiprocessor fill the short serial phase.
#include "portable.cuh"

#define KV_XXH_THREADS 128u
#define KV_TILE_BLOCKS 16u
#define KV_TILE_STRIPES 256u
#define KV_XXH_BLOCK 1024ull

#define KV_P32_1 0x9E3779B1ull
#define KV_P32_2 0x85EBCA77ull
#define KV_P32_3 0xC2B2AE3Dull
#define KV_P64_1 0x9E3779B185EBCA87ull
#define KV_P64_2 0xC2B2AE3D27D4EB4Full
#define KV_P64_3 0x165667B19E3779F9ull
#define KV_P64_4 0x85EBCA77C2B2AE63ull
#define KV_P64_5 0x27D4EB2F165667C5ull
#define KV_MX1 0x165667919E3779F9ull
#define KV_MX2 0x9FB21C651E98DF25ull

// The published secret as 24 little-endian words.
KV_CONSTANT u64 kv_secret[24] = {
    0xBE4BA423396CFEB8ull, 0x1CAD21F72C81017Cull, 0xDB979083E96DD4DEull, 0x1F67B3B7A4A44072ull,
    0x78E5C0CC4EE679CBull, 0x2172FFCC7DD05A82ull, 0x8E2443F7744608B8ull, 0x4C263A81E69035E0ull,
    0xCB00C391BB52283Cull, 0xA32E531B8B65D088ull, 0x4EF90DA297486471ull, 0xD8ACDEA946EF1938ull,
    0x3F349CE33F76FAA8ull, 0x1D4F0BC7C7BBDCF9ull, 0x3159B4CD4BE0518Aull, 0x647378D9C97E9FC8ull,
    0xC3EBD33483ACC5EAull, 0xEB6313FAFFA081C5ull, 0x49DAF0B751DD0D17ull, 0x9E68D429265516D3ull,
    0xFCA1477D58BE162Bull, 0xCE31D07AD1B8F88Full, 0x280416958F3ACB45ull, 0x7E404BBBCAFBD7AFull,
};

KV_CONSTANT u64 kv_xxh_start[8] = {KV_P32_3, KV_P64_1, KV_P64_2, KV_P64_3, KV_P64_4, KV_P32_2, KV_P64_5, KV_P32_1};

KV_DEVICE u64 kv_secret_at(u32 byte) {
    const u32 word = byte / 8, shift = byte % 8 * 8;
    return shift ? kv_secret[word] >> shift | kv_secret[word + 1] << (64 - shift) : kv_secret[word];
}

KV_DEVICE u64 kv_rotate(u64 v, u32 n) { return v << n | v >> (64 - n); }
KV_DEVICE u64 kv_fold(u64 a, u64 b) { return a * b ^ __umul64hi(a, b); }
KV_DEVICE u64 kv_term(u64 keyed) { return (keyed & 0xFFFFFFFFull) * (keyed >> 32); }

KV_DEVICE u64 kv_swap8(u64 v) {
    u64 out = 0;
    for (u32 i = 0; i < 8; ++i) out = out << 8 | (v >> (8 * i) & 255);
    return out;
}

KV_DEVICE u64 kv_avalanche(u64 h) {
    h = (h ^ h >> 37) * KV_MX1;
    return h ^ h >> 32;
}

KV_DEVICE u64 kv_avalanche_old(u64 h) {
    h = (h ^ h >> 33) * KV_P64_2;
    h = (h ^ h >> 29) * KV_P64_3;
    return h ^ h >> 32;
}

KV_DEVICE u64 kv_mix16(const u8 *p, u32 secret) {
    return kv_fold(kv_bytes(p, 8) ^ kv_secret_at(secret), kv_bytes(p + 8, 8) ^ kv_secret_at(secret + 8));
}

KV_DEVICE u64 kv_xxh_to16(const u8 *p, u32 n) {
    if (n == 0) return kv_avalanche_old(kv_secret_at(56) ^ kv_secret_at(64));
    if (n <= 3) {
        const u64 mixed = (u64)p[0] << 16 | (u64)p[n >> 1] << 24 | p[n - 1] | (u64)n << 8;
        return kv_avalanche_old(mixed ^ ((kv_secret[0] ^ kv_secret[0] >> 32) & 0xFFFFFFFFull));
    }
    if (n <= 8) {
        u64 h = (kv_bytes(p + n - 4, 4) + (kv_bytes(p, 4) << 32)) ^ kv_secret_at(8) ^ kv_secret_at(16);
        h ^= kv_rotate(h, 49) ^ kv_rotate(h, 24);
        h *= KV_MX2;
        h = (h ^ ((h >> 35) + n)) * KV_MX2;
        return h ^ h >> 28;
    }
    const u64 low = kv_bytes(p, 8) ^ kv_secret_at(24) ^ kv_secret_at(32);
    const u64 high = kv_bytes(p + n - 8, 8) ^ kv_secret_at(40) ^ kv_secret_at(48);
    return kv_avalanche(n + kv_swap8(low) + high + kv_fold(low, high));
}

KV_DEVICE u64 kv_xxh_to128(const u8 *p, u32 n) {
    u64 h = n * KV_P64_1;
    for (u32 i = (n - 1) / 32 + 1; i-- > 0;)
        h += kv_mix16(p + 16 * i, 32 * i) + kv_mix16(p + n - 16 * (i + 1), 32 * i + 16);
    return kv_avalanche(h);
}

KV_DEVICE u64 kv_xxh_to240(const u8 *p, u32 n) {
    u64 h = n * KV_P64_1;
    for (u32 i = 0; i < 8; ++i) h += kv_mix16(p + 16 * i, 16 * i);
    h = kv_avalanche(h);
    for (u32 i = 8; i < n / 16; ++i) h += kv_mix16(p + 16 * i, 16 * (i - 8) + 3);
    return kv_avalanche(h + kv_mix16(p + n - 16, 136 - 17));
}

KV_DEVICE u64 kv_xxh_short(const u8 *p, u32 n) {
    return n <= 16 ? kv_xxh_to16(p, n) : n <= 128 ? kv_xxh_to128(p, n) : kv_xxh_to240(p, n);
}

// Phase 1: thread t always has the same stripe of a block and the same lane pair, so its two secret words stay in
// registers. All loads are under way before the first is used; what lies past the last stripe counts as nothing.
KV_DEVICE void kv_tile_terms(const u8 *tile, u32 stripes, u32 t, u64 (*partial)[2][KV_XXH_THREADS]) {
    const u32 stripe = t % 64 / 4, pair = t % 4;
    const u64 key0 = kv_secret[stripe + 2 * pair], key1 = kv_secret[stripe + 2 * pair + 1];
    const u8 *mine = tile + t / 64 * KV_XXH_BLOCK + t % 64 * 16;
    const u32 first = t / 64 * 16 + stripe;
    ulonglong2 d[KV_TILE_BLOCKS / 2];
    if (kv_aligned(tile, 16)) {
        KV_UNROLL
        for (u32 k = 0; k < KV_TILE_BLOCKS / 2; ++k)
            if (first + 32 * k < stripes) d[k] = kv_load16(mine + 2 * KV_XXH_BLOCK * k);
    } else {
        KV_UNROLL
        for (u32 k = 0; k < KV_TILE_BLOCKS / 2; ++k)
            if (first + 32 * k < stripes) d[k] = kv_load16_any(mine + 2 * KV_XXH_BLOCK * k);
    }
    KV_UNROLL
    for (u32 k = 0; k < KV_TILE_BLOCKS / 2; ++k) {
        const bool there = first + 32 * k < stripes;
        partial[k][0][t] = there ? kv_term(d[k].x ^ key0) + d[k].y : 0;
        partial[k][1][t] = there ? kv_term(d[k].y ^ key1) + d[k].x : 0;
    }
}

// Phase 2: starting points are turned so that the 16 threads of a half-warp meet no shared-memory bank twice.
KV_DEVICE u64 kv_tile_sum(u32 t, u64 (*partial)[2][KV_XXH_THREADS]) {
    const u32 block = t / 8, half = t % 2, pair = t % 8 / 2;
    const u32 turn = half + 2 * (block % 2);
    u64 sum = 0;
    KV_UNROLL
    for (u32 s = 0; s < 16; ++s) sum += partial[block / 2][half][block % 2 * 64 + (s + turn) % 16 * 4 + pair];
    return sum;
}

// Phase 3: only whole blocks are scrambled.
KV_DEVICE u64 kv_chain(u64 acc, u32 lane, u32 stripes, const u64 (*sums)[8]) {
    for (u32 b = 0; 16 * b < stripes; ++b) {
        acc += sums[b][lane];
        if (16 * (b + 1) <= stripes) acc = (acc ^ acc >> 47 ^ kv_secret[16 + lane]) * KV_P32_1;
    }
    return acc;
}

// The last 64 bytes once more, under their own secret.
KV_DEVICE u64 kv_last_term(const u8 *p, u64 n, u32 lane) {
    const u8 *stripe = p + n - 64;
    return kv_load8_any(stripe + 8 * (lane ^ 1)) +
           kv_term(kv_load8_any(stripe + 8 * lane) ^ kv_secret_at(192 - 64 - 7 + 8 * lane));
}

KV_DEVICE u64 kv_merge(const u64 *acc, u64 n) {
    u64 h = n * KV_P64_1;
    for (u32 i = 0; i < 4; ++i)
        h += kv_fold(acc[2 * i] ^ kv_secret_at(11 + 16 * i), acc[2 * i + 1] ^ kv_secret_at(19 + 16 * i));
    return kv_avalanche(h);
}

// out[item * num_slices + slice] = XXH3-64 of bytes [slice * slice_bytes, +slice_bytes) after base + offsets[item].
// Launch with 128 threads a block.
KV_KERNEL kv_checksum(const u8 *base, const u64 *offsets, u32 num_items, u32 num_slices, u64 slice_bytes, u64 *out) {
    KV_SHARED u64 partial[KV_TILE_BLOCKS / 2][2][KV_XXH_THREADS];
    KV_SHARED u64 sums[KV_TILE_BLOCKS][8];
    KV_SHARED u64 acc[8];
    const u64 all_stripes = slice_bytes > 240 ? (slice_bytes - 1) / 64 : 0;
    for (u64 i = blockIdx.x; i < (u64)num_items * num_slices; i += gridDim.x) {
        const u8 *p = base + offsets[i / num_slices] + i % num_slices * slice_bytes;
        KV_EACH_THREAD(t) {
            if (t < 8) acc[t] = kv_xxh_start[t];
        }
        for (u64 first = 0; first < all_stripes; first += KV_TILE_STRIPES) {
            const u64 left = all_stripes - first;
            const u32 stripes = left < KV_TILE_STRIPES ? (u32)left : KV_TILE_STRIPES;
            KV_EACH_THREAD(t) { kv_tile_terms(p + 64 * first, stripes, t, partial); }
            KV_SYNC();
            KV_EACH_THREAD(t) { sums[t / 8][t % 8] = kv_tile_sum(t, partial); }
            KV_SYNC();
            KV_EACH_THREAD(t) {
                if (t < 8) acc[t] = kv_chain(acc[t], t, stripes, sums);
            }
        }
        KV_EACH_THREAD(t) {
            if (t < 8 && slice_bytes > 240) acc[t] += kv_last_term(p, slice_bytes, t);
        }
        KV_SYNC();
        KV_EACH_THREAD(t) {
            if (t == 0) out[i] = slice_bytes > 240 ? kv_merge(acc, slice_bytes) : kv_xxh_short(p, (u32)slice_bytes);
        }
        KV_SYNC();
    }
}
