/* Copy and hash in one pass, and many file calls in one, outside of the interpreter lock.
 *
 * XXH3-64 (default secret, seed 0) of inputs longer than 240 bytes, after the specification of the xxHash project
 * (doc/xxhash_spec.md, "XXH3 algorithm description (for large inputs)"). It is fused with the copy: each stripe of 64 bytes is loaded
 * once, stored to the target and accumulated from the same registers, so what was hashed is what was stored, even when
 * somebody overwrites the source meanwhile. The hash hides behind the memory traffic. Stores go around the cache where the target is
 * aligned: blocks are larger than caches, and a plain store would first read the line that it overwrites.
 *
 * native.py compares this with the xxhash package before it is used, and does without where it can't be built.
 */
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { STRIPE = 64, STRIPES_PER_BLOCK = 16, SECRET_BYTES = 192 };

static const uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

static const uint64_t P32_1 = 0x9E3779B1U, P32_2 = 0x85EBCA77U, P32_3 = 0xC2B2AE3DU;
static const uint64_t P64_1 = 0x9E3779B185EBCA87U, P64_2 = 0xC2B2AE3D27D4EB4FU, P64_3 = 0x165667B19E3779F9U,
                      P64_4 = 0x85EBCA77C2B2AE63U, P64_5 = 0x27D4EB2F165667C5U;

static uint64_t load64(const uint8_t *at) {
  uint64_t value;
  memcpy(&value, at, 8);
  return value;
}

static uint64_t fold(uint64_t a, uint64_t b) {
  unsigned __int128 product = (unsigned __int128)a * b;
  return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static void start(uint64_t acc[8]) {
  const uint64_t first[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
  memcpy(acc, first, sizeof first);
}

static uint64_t finish(const uint64_t acc[8], uint64_t length) {
  uint64_t hash = length * P64_1;
  for (int i = 0; i < 4; i++)
    hash += fold(acc[2 * i] ^ load64(SECRET + 11 + 16 * i), acc[2 * i + 1] ^ load64(SECRET + 11 + 16 * i + 8));
  hash ^= hash >> 37;
  hash *= 0x165667919E3779F9U;
  return hash ^ (hash >> 32);
}

/* ---- any processor ------------------------------------------------------------------------------------------------ */

static void plain_stripes(uint64_t acc[8], const uint8_t *in, const uint8_t *secret, size_t count) {
  for (size_t n = 0; n < count; n++, in += STRIPE, secret += 8)
    for (int i = 0; i < 8; i++) {
      uint64_t data = load64(in + 8 * i), keyed = data ^ load64(secret + 8 * i);
      acc[i ^ 1] += data;
      acc[i] += (keyed & 0xFFFFFFFFU) * (keyed >> 32);
    }
}

static void plain_scramble(uint64_t acc[8]) {
  for (int i = 0; i < 8; i++)
    acc[i] = ((acc[i] ^ (acc[i] >> 47)) ^ load64(SECRET + SECRET_BYTES - STRIPE + 8 * i)) * P32_1;
}

static uint64_t plain_hash(const uint8_t *in, size_t length) {
  uint64_t acc[8];
  size_t blocks = (length - 1) / (STRIPE * STRIPES_PER_BLOCK), done = blocks * STRIPE * STRIPES_PER_BLOCK;
  start(acc);
  for (size_t b = 0; b < blocks; b++) {
    plain_stripes(acc, in + b * STRIPE * STRIPES_PER_BLOCK, SECRET, STRIPES_PER_BLOCK);
    plain_scramble(acc);
  }
  plain_stripes(acc, in + done, SECRET, (length - 1 - done) / STRIPE);
  plain_stripes(acc, in + length - STRIPE, SECRET + SECRET_BYTES - STRIPE - 7, 1);
  return finish(acc, length);
}

/* ---- AVX2 --------------------------------------------------------------------------------------------------------- */

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2"), always_inline)) static inline

enum store { NO_STORE, STORE, STREAM };

AVX2 void stripe(__m256i acc[2], const uint8_t *in, const uint8_t *secret, uint8_t *out, enum store how) {
  for (int i = 0; i < 2; i++) {
    __m256i data = _mm256_loadu_si256((const __m256i *)(in + 32 * i));
    if (how == STREAM)
      _mm256_stream_si256((__m256i *)(out + 32 * i), data);
    else if (how == STORE)
      _mm256_storeu_si256((__m256i *)(out + 32 * i), data);
    __m256i keyed = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)(secret + 32 * i)));
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    acc[i] = _mm256_add_epi64(acc[i], _mm256_add_epi64(product, _mm256_shuffle_epi32(data, 0x4E)));
  }
}

AVX2 void scramble(__m256i acc[2]) {
  const __m256i prime = _mm256_set1_epi64x((long long)P32_1);
  for (int i = 0; i < 2; i++) {
    __m256i mixed = _mm256_xor_si256(acc[i], _mm256_srli_epi64(acc[i], 47));
    mixed = _mm256_xor_si256(mixed, _mm256_loadu_si256((const __m256i *)(SECRET + SECRET_BYTES - STRIPE + 32 * i)));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    acc[i] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
  }
}

AVX2 uint64_t pass(const uint8_t *in, size_t length, uint8_t *out, enum store how) {
  uint64_t lanes[8];
  __m256i acc[2];
  size_t blocks = (length - 1) / (STRIPE * STRIPES_PER_BLOCK), at = 0;
  start(lanes);
  memcpy(acc, lanes, sizeof lanes);
  for (size_t b = 0; b < blocks; b++) {
    for (int n = 0; n < STRIPES_PER_BLOCK; n++, at += STRIPE) stripe(acc, in + at, SECRET + 8 * n, out + at, how);
    scramble(acc);
  }
  for (const uint8_t *secret = SECRET; at + STRIPE < length; at += STRIPE, secret += 8)
    stripe(acc, in + at, secret, out + at, how);
  stripe(acc, in + length - STRIPE, SECRET + SECRET_BYTES - STRIPE - 7, out + length - STRIPE, how);
  memcpy(lanes, acc, sizeof lanes);
  return finish(lanes, length);
}

__attribute__((target("avx2"))) static uint64_t avx2_hash(const uint8_t *in, size_t length) {
  return pass(in, length, (uint8_t *)in, NO_STORE);
}

/* Whole stripes only, so that every byte is loaded once. */
__attribute__((target("avx2"))) static uint64_t avx2_copy(uint8_t *out, const uint8_t *in, size_t length) {
  return (uintptr_t)out % 32 ? pass(in, length, out, STORE) : pass(in, length, out, STREAM);
}

static int has_avx2(void) { return __builtin_cpu_supports("avx2"); }
static void fence(void) { _mm_sfence(); }
#else
static int has_avx2(void) { return 0; }
static uint64_t avx2_hash(const uint8_t *in, size_t length) { return plain_hash(in, length); }
static uint64_t avx2_copy(uint8_t *out, const uint8_t *in, size_t length) {
  memcpy(out, in, length);
  return plain_hash(out, length);
}
static void fence(void) {}
#endif

/* ---- entry points ------------------------------------------------------------------------------------------------- */

static uint64_t hash_one(const uint8_t *in, size_t length) {
  return has_avx2() ? avx2_hash(in, length) : plain_hash(in, length);
}

struct job {
  uint64_t target, source, num_bytes, slice_bytes;
};

/* XXH3-64 of each slice of each job's target (source is ignored). Slices are longer than 240 bytes. */
void kvstore_hash(const struct job *jobs, size_t count, uint64_t *sums) {
  for (const struct job *job = jobs; job < jobs + count; job++)
    for (uint64_t at = 0; at < job->num_bytes; at += job->slice_bytes)
      *sums++ = hash_one((const uint8_t *)(uintptr_t)(job->target + at), job->slice_bytes);
}

/* Copy source to target and hash what arrives there, slice by slice. Slices are longer than 240 bytes. */
void kvstore_copy(const struct job *jobs, size_t count, uint64_t *sums) {
  for (const struct job *job = jobs; job < jobs + count; job++)
    for (uint64_t at = 0; at < job->num_bytes; at += job->slice_bytes) {
      uint8_t *out = (uint8_t *)(uintptr_t)(job->target + at);
      const uint8_t *in = (const uint8_t *)(uintptr_t)(job->source + at);
      if (has_avx2() && job->slice_bytes % STRIPE == 0) {
        *sums++ = avx2_copy(out, in, job->slice_bytes);
      } else {
        memcpy(out, in, job->slice_bytes);
        *sums++ = hash_one(out, job->slice_bytes);
      }
    }
  fence();
}

/* ---- files -------------------------------------------------------------------------------------------------------- */

struct place {
  uint64_t fd, address, num_bytes, offset;
};

/* One pread each; results are bytes, or minus errno. */
void kvstore_read(const struct place *places, size_t count, int64_t *results) {
  for (size_t i = 0; i < count; i++) {
    const struct place *p = &places[i];
    do
      results[i] = pread((int)p->fd, (void *)(uintptr_t)p->address, p->num_bytes, (off_t)p->offset);
    while (results[i] < 0 && errno == EINTR);
    if (results[i] < 0)
      results[i] = -errno;
  }
}

/* One pwrite each; results are bytes, or minus errno. */
void kvstore_write(const struct place *places, size_t count, int64_t *results) {
  for (size_t i = 0; i < count; i++) {
    const struct place *p = &places[i];
    do
      results[i] = pwrite((int)p->fd, (const void *)(uintptr_t)p->address, p->num_bytes, (off_t)p->offset);
    while (results[i] < 0 && errno == EINTR);
    if (results[i] < 0)
      results[i] = -errno;
  }
}
