/* An extension that calls HIP, as AITER's do. With OWNERS it can also tell which file each function was bound to.
 * That takes the functions' addresses, and then the linker binds them all at once: a lazily bound build goes without.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

int hipGetDevicePropertiesR0600(char *properties, int device);
int hipMalloc(void **address, size_t size);
int hipFuncSetAttribute(const void *function, int which, int value);

/* The struct that came back: "R0600" is the one a caller of this function reads, "LEGACY" the shorter one. */
const char *layout(void) {
  static char properties[4096];
  memset(properties, 0, sizeof properties);
  hipGetDevicePropertiesR0600(properties, 0);
  return properties;
}

/* Which copy of the runtime served the call. */
long mark(void) {
  void *address = NULL;
  hipMalloc(&address, 16);
  return (long)address;
}

int set_attribute(void) { return hipFuncSetAttribute(NULL, 0, 0); }

#ifdef OWNERS
const char *owner(const char *name) {
  void *address = !strcmp(name, "hipGetDevicePropertiesR0600") ? (void *)hipGetDevicePropertiesR0600
                  : !strcmp(name, "hipMalloc")                 ? (void *)hipMalloc
                                                               : (void *)hipFuncSetAttribute;
  Dl_info found;
  return dladdr(address, &found) && found.dli_fname ? found.dli_fname : "?";
}
#endif
