// The device, as a host compiler sees it: one thread block at a time, its threads a loop.
//
// The caller sets grid, block and block index with kv_host_block() and calls the kernel once per block. kv_host_offences()
// counts 16-byte accesses at addresses that a device would refuse. kv_host_backwards(1) runs the threads of each phase last
// to first: whoever needs a neighbour's result within a phase then gets another answer.
#pragma once

#define KV_KERNEL extern "C" void
#define KV_DEVICE static inline
#define KV_SHARED static
#define KV_CONSTANT static const
#define KV_SYNC() ((void)0)
#define KV_UNROLL
#define KV_EACH_THREAD(t) \
    for (unsigned kv_i = 0, t = kv_turn(0); kv_i < blockDim.x; t = kv_turn(++kv_i))
#define KV_TOUCH(p) (kv_note(p), (p))

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
