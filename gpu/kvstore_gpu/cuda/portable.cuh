// One source, two compilers.
//
// NVRTC compiles these kernels for a device; a host C++ compiler compiles the very same text with host_shim.h, where a
// thread block is a loop. What makes that possible: a kernel is a sequence of *phases*. Inside a phase
// (KV_EACH_THREAD) threads don't talk to each other; between phases stands KV_SYNC(), and whatever crosses a phase lives
// in shared memory, or, where a thread keeps it for itself, in KV_OWN arrays. No shuffles, no atomics, no early return out
// of a phase.
#pragma once

#ifdef __CUDACC__

#define KV_KERNEL extern "C" __global__ void
// For kernels that want more registers a thread than blocks of any size may have.
#define KV_KERNEL_OF(threads) extern "C" __global__ void __launch_bounds__(threads)
#define KV_DEVICE static __device__ __forceinline__
#define KV_SHARED __shared__
#define KV_CONSTANT static __device__ __constant__
#define KV_SYNC() __syncthreads()
#define KV_EACH_THREAD(t) for (unsigned t = threadIdx.x, kv_once = 1; kv_once; kv_once = 0)
#define KV_UNROLL _Pragma("unroll")
// n values of each thread (registers, where every index is known), kept from phase to phase.
#define KV_OWN(type, name, threads, n) type name[n]
#define KV_MINE(name, t) name
#define KV_TOUCH(p) (p)
#define KV_FMA(a, b, c) __fmaf_rn(a, b, c)

static __device__ __forceinline__ float kv_from_half(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

static __device__ __forceinline__ unsigned short kv_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#else
#include "host_shim.h"
#endif

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

KV_DEVICE bool kv_aligned(const void *p, u32 n) { return ((u64)p & (n - 1)) == 0; }

// 16 bytes in one access; the caller has made sure of the alignment (the host shim counts offences).
KV_DEVICE ulonglong2 kv_load16(const u8 *p) { return *(const ulonglong2 *)KV_TOUCH(p); }
KV_DEVICE void kv_store16(u8 *p, ulonglong2 v) { *(ulonglong2 *)KV_TOUCH(p) = v; }

KV_DEVICE u64 kv_bytes(const u8 *p, u32 n) {
    u64 v = 0;
    for (u32 i = 0; i < n; ++i) v |= (u64)p[i] << (8 * i);
    return v;
}

// From any address.
KV_DEVICE u64 kv_load8_any(const u8 *p) { return kv_aligned(p, 8) ? *(const u64 *)p : kv_bytes(p, 8); }

KV_DEVICE ulonglong2 kv_load16_any(const u8 *p) {
    ulonglong2 v;
    v.x = kv_load8_any(p);
    v.y = kv_load8_any(p + 8);
    return v;
}
