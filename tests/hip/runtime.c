/* A HIP runtime that does nothing but say which one it is.
 *
 * MARK tells two copies apart. Symbol versions (runtime.map) and SONAME are those of ROCm 7. Everything that TileLang's
 * stub looks up is here, and a few functions that it lacks. The two device-property functions write the name of their
 * struct where the struct would go.
 */
#include <stddef.h>
#include <string.h>

#ifndef MARK
#define MARK 0x7001
#endif

#define OK(signature) int signature { return 0; }

const char *hipGetErrorName(int error) { return error ? "hipErrorUnknown" : "hipSuccess"; }
const char *hipGetErrorString(int error) { return error ? "unknown" : "no error"; }

int hipGetDeviceCount(int *count) { *count = 1; return 0; }
int hipGetDevice(int *device) { *device = 0; return 0; }
int hipDeviceGetAttribute(int *value, int which, int device) { *value = 0; return 0; }
int hipDeviceGetName(char *name, int size, int device) { strncpy(name, "none", (size_t)size); return 0; }
int hipGetDeviceProperties(char *properties, int device) { strcpy(properties, "LEGACY"); return 0; }
int hipGetDevicePropertiesR0600(char *properties, int device) { strcpy(properties, "R0600"); return 0; }
int hipMalloc(void **address, size_t size) { *address = (void *)MARK; return 0; }
int hipHostMalloc(void **address, size_t size, unsigned flags) { *address = (void *)MARK; return 0; }
int hipEventElapsedTime(float *milliseconds, void *start, void *stop) { *milliseconds = 0; return 0; }
int hipModuleLoadData(void **module, const void *image) { *module = (void *)MARK; return 0; }
int hipModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)MARK; return 0; }
int hipModuleGetGlobal(void **address, size_t *size, void *module, const char *name) { *size = 0; return 0; }

OK(hipGetLastError(void))
OK(hipSetDevice(int device))
OK(hipFree(void *address))
OK(hipHostFree(void *address))
OK(hipMemcpy(void *to, const void *from, size_t size, int kind))
OK(hipMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream))
OK(hipMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t size, void *stream))
OK(hipStreamCreate(void **stream))
OK(hipStreamDestroy(void *stream))
OK(hipStreamSynchronize(void *stream))
OK(hipEventCreate(void **event))
OK(hipEventDestroy(void *event))
OK(hipEventRecord(void *event, void *stream))
OK(hipEventSynchronize(void *event))
OK(hipModuleUnload(void *module))
OK(hipModuleLaunchKernel(void *function))
OK(hipModuleLaunchCooperativeKernel(void *function))

/* Not in the stub: an extension that got in behind it is half bound to the stub and half to the runtime. */
OK(hipFuncSetAttribute(const void *function, int which, int value))
OK(hipLaunchKernel(const void *function))
