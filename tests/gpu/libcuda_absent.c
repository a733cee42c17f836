/* libcuda of a machine without a device. kvikio's host I/O looks up all of these and asks where a pointer lies; "not
   initialised" makes it take the pointer for host memory. */
#define NOT_INITIALISED(name) int name(void) { return 3; }

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}

NOT_INITIALISED(cuPointerGetAttributes)
NOT_INITIALISED(cuPointerGetAttribute)
NOT_INITIALISED(cuMemHostAlloc)
NOT_INITIALISED(cuMemFreeHost)
NOT_INITIALISED(cuMemHostRegister_v2)
NOT_INITIALISED(cuMemHostUnregister)
NOT_INITIALISED(cuMemcpyHtoDAsync_v2)
NOT_INITIALISED(cuMemcpyDtoHAsync_v2)
NOT_INITIALISED(cuMemcpyAsync)
NOT_INITIALISED(cuCtxCreate_v4)
NOT_INITIALISED(cuCtxDestroy_v2)
NOT_INITIALISED(cuCtxPushCurrent_v2)
NOT_INITIALISED(cuCtxPopCurrent_v2)
NOT_INITIALISED(cuCtxGetCurrent)
NOT_INITIALISED(cuCtxGetDevice)
NOT_INITIALISED(cuMemGetAddressRange_v2)
NOT_INITIALISED(cuGetErrorName)
NOT_INITIALISED(cuGetErrorString)
NOT_INITIALISED(cuDeviceGet)
NOT_INITIALISED(cuDeviceGetCount)
NOT_INITIALISED(cuDeviceGetAttribute)
NOT_INITIALISED(cuDevicePrimaryCtxRetain)
NOT_INITIALISED(cuDevicePrimaryCtxRelease_v2)
NOT_INITIALISED(cuStreamSynchronize)
NOT_INITIALISED(cuStreamCreate)
NOT_INITIALISED(cuStreamDestroy_v2)
NOT_INITIALISED(cuEventSynchronize)
NOT_INITIALISED(cuEventCreate)
NOT_INITIALISED(cuEventDestroy_v2)
NOT_INITIALISED(cuEventRecord)
NOT_INITIALISED(cuEventQuery)
NOT_INITIALISED(cuLaunchHostFunc)
NOT_INITIALISED(cuMemcpyBatchAsync_v2)
