// Attention of one new token per sequence, over K and V where they lie in the pool.
//
//   token j of row r  ->  slot table[r][j / block_tokens], place j % block_tokens; 64-bit byte addresses throughout
//
// A context is cut every KV_SPLIT tokens, whatever its length and whoever else is in the batch, so that a row's bits
// depend on its own tokens only. A thread block takes one split of one row for all query heads that share a kv head (in
// turns of G heads; the second turn finds K and V in the cache). A thread always has the same 16 bytes of a token's row
// (its *part*), and every L-th token (its *lane*):
//
//   1. where its tokens lie; the row's new K and V go into the pool                    -> place
//   2. K, a tile of tokens at a time: products over a thread's part, then their sums   -> work, weights
//   3. softmax over the split: largest, exponentials, their sum                        -> weights, best, total
//   4. V: weighted sums over a thread's lane, then over lanes                          -> work, parts
//
// kv_join_* then weighs the splits of a row, first to last. All sums are in float32 and in one order. Tokens at and behind
// a row's length are never touched; rows of length 0 give zeros.
#include "portable.cuh"

#define KV_DECODE_THREADS 128u
#define KV_SPLIT 256u
#define KV_PIECES 16u  // threads per head in the softmax
#define KV_PARTS_MAX 64u
#define KV_LOWEST -3.4e38f
#define KV_LOG2_E 1.44269504088896341f

struct kv_float32 {
    static constexpr u32 BYTES = 4;
    KV_DEVICE float unpack(const ulonglong2 &v, u32 i) {
        return __uint_as_float((u32)((i < 2 ? v.x : v.y) >> (i % 2 * 32)));
    }
    KV_DEVICE void store(u8 *to, float value) { *(float *)to = value; }
};

struct kv_bfloat16 {
    static constexpr u32 BYTES = 2;
    KV_DEVICE float unpack(const ulonglong2 &v, u32 i) {
        const u32 pair = (u32)((i < 4 ? v.x : v.y) >> (i % 4 / 2 * 32));
        return __uint_as_float(i % 2 ? pair & 0xFFFF0000u : pair << 16);
    }
    KV_DEVICE void store(u8 *to, float value) {
        const u32 bits = __float_as_uint(value);
        const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
        *(unsigned short *)to = (unsigned short)(nan ? 0x7FC0u : (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
    }
};

struct kv_float16 {
    static constexpr u32 BYTES = 2;
    KV_DEVICE float unpack(const ulonglong2 &v, u32 i) {
        return kv_from_half((unsigned short)((i < 4 ? v.x : v.y) >> (i % 4 * 16)));
    }
    KV_DEVICE void store(u8 *to, float value) { *(unsigned short *)to = kv_to_half(value); }
};

// All strides in bytes but the table's, which is in entries.
struct kv_decode_job {
    u8 *pool;  // K of the first slot's first token and head
    u64 slot_stride, value_offset, token_stride, head_stride;
    const u32 *table;
    u64 table_stride;
    const u64 *lengths;  // tokens of each row's context, the new one included
    u32 block_tokens, num_rows, num_kv_heads, group, dim, num_splits;
    const u8 *query;
    u64 query_row, query_head;
    const u8 *key;  // the new tokens' K and V; 0: they are in the pool already
    u64 key_row, key_head;
    const u8 *value;
    u64 value_row, value_head;
    float scale;
    float *parts;  // [row][head][split][dim]: weighted sums of V
    float *stats;  // [row][head][split][2]: largest score, in powers of 2; sum of weights
};

template <typename T, u32 G>
struct kv_shape {
    static constexpr u32 N = 16 / T::BYTES;      // values of a part
    static constexpr u32 AHEAD = G < 8 ? 8 : 4;  // loads under way in a thread
    static constexpr u32 PRODUCTS = (KV_DECODE_THREADS * AHEAD + 4 * KV_PARTS_MAX / G) * G;
    static constexpr u32 SUMS = KV_DECODE_THREADS * N * G;
    static constexpr u32 WORK = PRODUCTS > SUMS ? PRODUCTS : SUMS;
};

struct kv_split {
    u32 row, kv_head, index, tokens;
    u32 first_head, heads;  // this turn's share of the group
};

// 16-byte aligned, so that a token's weights come in few loads.
template <u32 G>
struct alignas(G < 4 ? 4 * G : 16) kv_heads {
    float of[G];
};

// Step 1. Products before this and after it are kept apart by the caller's KV_SYNC.
KV_DEVICE void kv_find_tokens(const kv_decode_job &job, const kv_split &split, u64 *place) {
    const u32 *table = job.table + split.row * job.table_stride;
    const u64 head = split.kv_head * job.head_stride;
    KV_EACH_THREAD(t) {
        for (u32 i = t; i < split.tokens; i += KV_DECODE_THREADS) {
            const u32 token = split.index * KV_SPLIT + i;
            const u32 block = token / job.block_tokens;
            place[i] = table[block] * job.slot_stride + (token - block * job.block_tokens) * job.token_stride + head;
        }
    }
}

KV_DEVICE void kv_append(const kv_decode_job &job, const kv_split &split, u32 num_parts, u64 last) {
    const u8 *key = job.key + split.row * job.key_row + split.kv_head * job.key_head;
    const u8 *value = job.value + split.row * job.value_row + split.kv_head * job.value_head;
    KV_EACH_THREAD(t) {
        const u64 part = t % num_parts * 16;
        if (t < num_parts) kv_store16(job.pool + last + part, kv_load16(key + part));
        if (t / num_parts == 1) kv_store16(job.pool + last + job.value_offset + part, kv_load16(value + part));
    }
}

// Scaled so that weights are powers of 2. Heads beyond the group's get zeros.
template <typename T, u32 G>
KV_DEVICE void kv_load_query(const kv_decode_job &job, const kv_split &split, u32 part, float *query) {
    constexpr u32 N = kv_shape<T, G>::N;
    const u8 *mine = job.query + split.row * job.query_row + part * 16;
    KV_UNROLL
    for (u32 h = 0; h < G; ++h) {
        const u32 head = split.kv_head * job.group + split.first_head + (h < split.heads ? h : 0);
        const ulonglong2 v = kv_load16(mine + head * job.query_head);
        KV_UNROLL
        for (u32 i = 0; i < N; ++i) query[h * N + i] = h < split.heads ? T::unpack(v, i) * (job.scale * KV_LOG2_E) : 0;
    }
}

template <typename T, u32 G>
KV_DEVICE kv_heads<G> kv_products(const ulonglong2 &key, const float *query) {
    constexpr u32 N = kv_shape<T, G>::N;
    kv_heads<G> sums;
    KV_UNROLL
    for (u32 h = 0; h < G; ++h) sums.of[h] = 0;
    KV_UNROLL
    for (u32 i = 0; i < N; ++i) {
        const float k = T::unpack(key, i);
        KV_UNROLL
        for (u32 h = 0; h < G; ++h) sums.of[h] = KV_FMA(k, query[h * N + i], sums.of[h]);
    }
    return sums;
}

// Step 2, one tile: AHEAD tokens a thread. `work` is [part][token][head], a part's row 16 bytes longer than its content so
// that neighbours don't meet in a bank.
template <typename T, u32 G>
KV_DEVICE void kv_tile_products(const kv_decode_job &job, const kv_split &split, u32 t, u32 num_parts, u32 first,
                                const u64 *place, const float *query, float *work) {
    constexpr u32 AHEAD = kv_shape<T, G>::AHEAD;
    const u32 lanes = KV_DECODE_THREADS / num_parts, part = t % num_parts, lane = t / num_parts;
    float *row = work + part * (AHEAD * lanes * G + 4);
    ulonglong2 held[AHEAD];
    KV_UNROLL
    for (u32 u = 0; u < AHEAD; ++u) {
        const u32 token = first + u * lanes + lane;
        if (lane < lanes && token < split.tokens) held[u] = kv_load16(job.pool + place[token] + part * 16);
    }
    KV_UNROLL
    for (u32 u = 0; u < AHEAD; ++u) {
        const u32 token = u * lanes + lane;
        if (lane < lanes && first + token < split.tokens)
            *(kv_heads<G> *)(row + token * G) = kv_products<T, G>(held[u], query);
    }
}

template <typename T, u32 G>
KV_DEVICE void kv_scores(const kv_decode_job &job, const kv_split &split, u32 num_parts, const u64 *place, float *work,
                         float *weights) {
    constexpr u32 N = kv_shape<T, G>::N;
    const u32 tile = kv_shape<T, G>::AHEAD * (KV_DECODE_THREADS / num_parts);
    KV_OWN(float, query, KV_DECODE_THREADS, G * N);
    KV_EACH_THREAD(t) { kv_load_query<T, G>(job, split, t % num_parts, KV_MINE(query, t)); }
    for (u32 first = 0; first < split.tokens; first += tile) {
        KV_EACH_THREAD(t) {
            kv_tile_products<T, G>(job, split, t, num_parts, first, place, KV_MINE(query, t), work);
        }
        KV_SYNC();
        const u32 left = split.tokens - first;
        const u32 count = (left < tile ? left : tile) * G;
        KV_EACH_THREAD(t) {
            for (u32 i = t; i < count; i += KV_DECODE_THREADS) {
                float sum = 0;
                for (u32 part = 0; part < num_parts; ++part) sum += work[part * (tile * G + 4) + i];
                weights[first * G + i] = sum;
            }
        }
        KV_SYNC();
    }
}

// Step 3. Thread (piece, head) has every 16th token. `best` and `total` are [piece][head].
template <u32 G>
KV_DEVICE void kv_softmax(u32 tokens, float *weights, float *best, float *total) {
    KV_EACH_THREAD(t) {
        float most = KV_LOWEST;
        for (u32 token = t / G; t < KV_PIECES * G && token < tokens; token += KV_PIECES)
            most = fmaxf(most, weights[token * G + t % G]);
        if (t < KV_PIECES * G) best[t] = most;
    }
    KV_SYNC();
    KV_EACH_THREAD(t) {
        float most = KV_LOWEST, sum = 0;
        for (u32 piece = 0; piece < KV_PIECES; ++piece) most = fmaxf(most, best[piece * G + t % G]);
        for (u32 token = t / G; t < KV_PIECES * G && token < tokens; token += KV_PIECES) {
            const float weight = exp2f(weights[token * G + t % G] - most);
            weights[token * G + t % G] = weight;
            sum += weight;
        }
        if (t < KV_PIECES * G) total[t] = sum;
    }
    KV_SYNC();
}

template <typename T, u32 G>
KV_DEVICE void kv_weigh(const ulonglong2 &value, const float *weights, float *sums) {
    constexpr u32 N = kv_shape<T, G>::N;
    const kv_heads<G> weight = *(const kv_heads<G> *)weights;
    KV_UNROLL
    for (u32 i = 0; i < N; ++i) {
        const float v = T::unpack(value, i);
        KV_UNROLL
        for (u32 h = 0; h < G; ++h) sums[h * N + i] = KV_FMA(weight.of[h], v, sums[h * N + i]);
    }
}

// Step 4, a thread's share. `work` is [lane][head][dim].
template <typename T, u32 G>
KV_DEVICE void kv_weighted_sums(const kv_decode_job &job, u32 tokens, u32 t, u32 num_parts, const u64 *place,
                                const float *weights, float *work) {
    constexpr u32 N = kv_shape<T, G>::N, AHEAD = kv_shape<T, G>::AHEAD;
    const u32 lanes = KV_DECODE_THREADS / num_parts, part = t % num_parts, lane = t / num_parts;
    const u8 *values = job.pool + job.value_offset + part * 16;
    float sums[G * N];
    KV_UNROLL
    for (u32 i = 0; i < G * N; ++i) sums[i] = 0;
    u32 token = lane;
    for (; token + (AHEAD - 1) * lanes < tokens; token += AHEAD * lanes) {
        ulonglong2 held[AHEAD];
        KV_UNROLL
        for (u32 u = 0; u < AHEAD; ++u) held[u] = kv_load16(values + place[token + u * lanes]);
        KV_UNROLL
        for (u32 u = 0; u < AHEAD; ++u) kv_weigh<T, G>(held[u], weights + (token + u * lanes) * G, sums);
    }
    for (; token < tokens; token += lanes) kv_weigh<T, G>(kv_load16(values + place[token]), weights + token * G, sums);
    float *mine = work + lane * G * job.dim + part * N;
    KV_UNROLL
    for (u32 h = 0; h < G; ++h) {
        KV_UNROLL
        for (u32 i = 0; i < N; ++i) mine[h * job.dim + i] = sums[h * N + i];
    }
}

template <u32 G>
KV_DEVICE void kv_write_split(const kv_decode_job &job, const kv_split &split, u32 lanes, const float *work,
                              const float *best, const float *total) {
    const u64 first_head = (u64)split.row * job.num_kv_heads * job.group + split.kv_head * job.group + split.first_head;
    KV_EACH_THREAD(t) {
        for (u32 i = t; i < split.heads * job.dim; i += KV_DECODE_THREADS) {
            const u32 head = i / job.dim;
            float sum = 0;
            for (u32 lane = 0; lane < lanes; ++lane) sum += work[lane * G * job.dim + i];
            job.parts[((first_head + head) * job.num_splits + split.index) * job.dim + (i - head * job.dim)] = sum;
        }
        if (t < split.heads) {
            float most = KV_LOWEST, sum = 0;
            for (u32 piece = 0; piece < KV_PIECES; ++piece) most = fmaxf(most, best[piece * G + t]);
            for (u32 piece = 0; piece < KV_PIECES; ++piece) sum += total[piece * G + t];
            float *stats = job.stats + ((first_head + t) * job.num_splits + split.index) * 2;
            stats[0] = most;
            stats[1] = sum;
        }
    }
}

template <typename T, u32 G>
KV_DEVICE void kv_decode(const kv_decode_job &job) {
    KV_SHARED u64 place[KV_SPLIT];
    KV_SHARED kv_heads<G> weights[KV_SPLIT];
    KV_SHARED float best[KV_PIECES * G], total[KV_PIECES * G];
    KV_SHARED kv_heads<4> room[kv_shape<T, G>::WORK / 4];
    float *const work = room[0].of;
    const u32 num_parts = job.dim * T::BYTES / 16, lanes = KV_DECODE_THREADS / num_parts;
    const u64 items = (u64)job.num_rows * job.num_splits * job.num_kv_heads;
    for (u64 item = blockIdx.x; item < items; item += gridDim.x) {
        kv_split split;
        split.kv_head = (u32)(item % job.num_kv_heads);  // neighbours read one token's heads, which lie side by side
        split.index = (u32)(item / job.num_kv_heads % job.num_splits);
        split.row = (u32)(item / job.num_kv_heads / job.num_splits);
        const u64 length = job.lengths[split.row], first = (u64)split.index * KV_SPLIT;
        if (first >= length) continue;
        split.tokens = length - first < KV_SPLIT ? (u32)(length - first) : KV_SPLIT;
        kv_find_tokens(job, split, place);
        KV_SYNC();
        if (job.key && first + split.tokens == length) kv_append(job, split, num_parts, place[split.tokens - 1]);
        KV_SYNC();
        for (split.first_head = 0; split.first_head < job.group; split.first_head += G) {
            split.heads = job.group - split.first_head < G ? job.group - split.first_head : G;
            kv_scores<T, G>(job, split, num_parts, place, work, weights[0].of);
            kv_softmax<G>(split.tokens, weights[0].of, best, total);
            KV_EACH_THREAD(t) {
                if (t / num_parts < lanes)
                    kv_weighted_sums<T, G>(job, split.tokens, t, num_parts, place, weights[0].of, work);
            }
            KV_SYNC();
            kv_write_split<G>(job, split, lanes, work, best, total);
            KV_SYNC();
        }
    }
}

template <typename T>
KV_DEVICE void kv_join(const float *parts, const float *stats, const u64 *lengths, u8 *out, u32 num_rows, u32 num_heads,
                       u32 dim, u32 num_splits) {
    for (u64 item = blockIdx.x; item < (u64)num_rows * num_heads; item += gridDim.x) {
        const u64 pieces = (lengths[item / num_heads] + KV_SPLIT - 1) / KV_SPLIT;
        const u32 used = pieces < num_splits ? (u32)pieces : num_splits;  // whatever a caller got wrong: no read beyond
        const float *mine = parts + item * num_splits * dim, *of = stats + item * num_splits * 2;
        KV_EACH_THREAD(t) {
            float most = KV_LOWEST;
            for (u32 s = 0; s < used; ++s) most = fmaxf(most, of[2 * s]);
            for (u32 d = t; d < dim; d += KV_DECODE_THREADS) {
                float sum = 0, total = 0;
                for (u32 s = 0; s < used; ++s) {
                    const float share = exp2f(of[2 * s] - most);
                    sum = KV_FMA(share, mine[(u64)s * dim + d], sum);
                    total = KV_FMA(share, of[2 * s + 1], total);
                }
                T::store(out + (item * dim + d) * T::BYTES, used ? sum / total : 0);
            }
        }
    }
}

#define KV_DECODE_KERNEL(T, G)                                                                                        \
    KV_KERNEL_OF(KV_DECODE_THREADS)                                                                                   \
    kv_decode_##T##_##G(u8 *pool, u64 slot_stride, u64 value_offset, u64 token_stride, u64 head_stride,               \
                        const u32 *table, u64 table_stride, const u64 *lengths, u32 block_tokens, u32 num_rows,       \
                        u32 num_kv_heads, u32 group, u32 dim, u32 num_splits, const u8 *query, u64 query_row,         \
                        u64 query_head, const u8 *key, u64 key_row, u64 key_head, const u8 *value, u64 value_row,     \
                        u64 value_head, float scale, float *parts, float *stats) {                                    \
        kv_decode<kv_##T, G>({pool,      slot_stride,  value_offset, token_stride, head_stride, table,                \
                              table_stride, lengths,   block_tokens, num_rows,     num_kv_heads, group,               \
                              dim,       num_splits,   query,        query_row,    query_head,  key,                  \
                              key_row,   key_head,     value,        value_row,    value_head,  scale,                \
                              parts,     stats});                                                                     \
    }

#define KV_DECODE_KERNELS(T)                                                                                         \
    KV_DECODE_KERNEL(T, 1)                                                                                           \
    KV_DECODE_KERNEL(T, 2)                                                                                           \
    KV_DECODE_KERNEL(T, 4)                                                                                           \
    KV_DECODE_KERNEL(T, 8)                                                                                           \
    KV_KERNEL_OF(KV_DECODE_THREADS)                                                                                  \
    kv_join_##T(const float *parts, const float *stats, const u64 *lengths, u8 *out, u32 num_rows, u32 num_heads,    \
                u32 dim, u32 num_splits) {                                                                           \
        kv_join<kv_##T>(parts, stats, lengths, out, num_rows, num_heads, dim, num_splits);                           \
    }

KV_DECODE_KERNELS(float32)
KV_DECODE_KERNELS(bfloat16)
KV_DECODE_KERNELS(float16)
