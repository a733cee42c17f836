// The device, as a host compiler sees it: one thread block at a time, its threads a loop.
//
// The caller sets grid, block and block index with kv_host_block() and calls the kernel once per block. kv_host_offences()
// counts 16-byte accesses at addresses that a device would refuse. kv_host_backwards(1) runs the threads of each phase last
// to first: whoever needs a neighbour's result within a phase then gets another answer.
#pragma once

#include <math.h>
#include <string.h>

#define KV_KERNEL extern "C" void
#define KV_KERNEL_OF(threads) extern "C" void
#define KV_DEVICE static inline
#define KV_SHARED static
#define KV_CONSTANT static const
#define KV_SYNC() ((void)0)
#define KV_UNROLL
#define KV_EACH_THREAD(t) \
    for (unsigned kv_i = 0, t = kv_turn(0); kv_i < blockDim.x; t = kv_turn(++kv_i))
#define KV_TOUCH(p) (kv_note(p), (p))
#define KV_OWN(type, name, threads, n) static type name[threads][n]
#define KV_MINE(name, t) name[t]
#define KV_FMA(a, b, c) ((a) * (b) + (c))

struct kv_dim {
    unsigned x;
};
static kv_dim gridDim, blockDim, blockIdx;
static unsigned long long kv_offences;

// May alias anything, as a vector access does on a device.
struct __attribute__((may_alias, aligned(16))) ulonglong2 {
    unsigned long long x, y;
};

static unsigned kv_backwards;

static inline unsigned kv_turn(unsigned i) { return kv_backwards ? blockDim.x - 1 - i : i; }

static inline void kv_note(const void *p) { kv_offences += ((unsigned long long)p & 15) != 0; }

static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}

static inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float kv_from_half(unsigned short bits) {
    const unsigned sign = (bits & 0x8000u) << 16, rest = bits & 0x7FFFu;
    if (rest >= 0x7C00u) return __uint_as_float(sign | 0x7F800000u | (rest & 0x3FFu) << 13);
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(rest << 13) * 0x1p112f));
}

// To nearest, ties to even: below the smallest normal half by adding what lines the last bit up, else by hand.
static inline unsigned short kv_to_half(float value) {
    const unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, rest = bits & 0x7FFFFFFFu;
    if (rest > 0x7F800000u) return (unsigned short)(sign | 0x7E00u);
    if (rest >= 0x477FF000u) return (unsigned short)(sign | 0x7C00u);
    if (rest < 0x38800000u) return (unsigned short)(sign | (__float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3F000000u));
    return (unsigned short)(sign | (rest - 0x38000000u + 0xFFFu + (rest >> 13 & 1)) >> 13);
}

extern "C" void kv_host_block(unsigned grid, unsigned block, unsigned index) {
    gridDim.x = grid;
    blockDim.x = block;
    blockIdx.x = index;
}

extern "C" void kv_host_backwards(unsigned on) { kv_backwards = on; }

extern "C" unsigned long long kv_host_offences(void) {
    unsigned long long seen = kv_offences;
    kv_offences = 0;
    return seen;
}
