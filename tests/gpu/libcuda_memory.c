/* A libcuda whose device memory is host memory: enough to check how calls are made, not what a device does. */
#include <stdlib.h>
#include <string.h>

typedef unsigned long long u64;
typedef struct { unsigned order; int source_hint[2], target_hint[2]; unsigned flags; } attributes;
typedef struct { char reserved[64]; } ipc_handle;

static int batches, singles, registered, refuse_register;

int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuCtxGetCurrent(void **c) { *c = (void *)0x1234; return 0; }
int cuCtxSetCurrent(void *c) { return c == (void *)0x1234 ? 0 : 201; }
int cuGetErrorString(int code, const char **s) { *s = code == 2 ? "out of memory" : "some error"; return 0; }
int cuMemAlloc_v2(u64 *p, size_t n) { void *m; if (n > (1ull << 40)) return 2; posix_memalign(&m, 4096, n); *p = (u64)m; return 0; }
int cuMemFree_v2(u64 p) { free((void *)p); return 0; }
int cuMemHostRegister_v2(void *p, size_t n, unsigned flags) { (void)p; (void)n; if (refuse_register || flags != 1) return 800; registered++; return 0; }
int cuMemHostUnregister(void *p) { (void)p; registered--; return 0; }
int cuIpcGetMemHandle(ipc_handle *h, u64 p) { memset(h, 7, sizeof *h); memcpy(h, &p, 8); return 0; }
int cuIpcOpenMemHandle_v2(u64 *p, ipc_handle h, unsigned flags) { if (flags != 1 || h.reserved[63] != 7) return 1; memcpy(p, &h, 8); return 0; }
int cuIpcCloseMemHandle(u64 p) { return p ? 0 : 1; }
int cuMemcpyAsync(u64 d, u64 s, size_t n, void *stream) { (void)stream; memcpy((void *)d, (void *)s, n); singles++; return 0; }

int cuMemcpyBatchAsync_v2(u64 *d, u64 *s, size_t *n, size_t count, attributes *a, size_t *first, size_t num, void *stream) {
    if (num != 1 || first[0] != 0 || a->order != 1 || !stream) return 1;
    for (size_t i = count; i-- > 0;) memcpy((void *)d[i], (void *)s[i], n[i]);
    batches++;
    return 0;
}

int test_batches(void) { return batches; }
int test_singles(void) { return singles; }
int test_registered(void) { return registered; }
void test_refuse(int on) { refuse_register = on; }
