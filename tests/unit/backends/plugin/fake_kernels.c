/* As much of CUDA's driver as a cubin's launch needs; a launch is written down. */
#include <string.h>

#include "../cublaslt/fake_cuda.c"

struct fake_launch {
  unsigned grid[3], block[3], shared;
  void *stream, *context, *function;
  unsigned long long parameters[16];
};

static struct fake_launch last;
static const void *image;
static char name[64];
static int launches = 0, loads = 0, shared = 0, failure = 0;

struct fake_launch *fake_last(void) { return &last; }
int fake_launches(void) { return launches; }
int fake_loads(void) { return loads; }
int fake_shared(void) { return shared; }
const void *fake_image(void) { return image; }
const char *fake_name(void) { return name; }
void fake_fail(int error) { failure = error; }

int cuModuleLoadData(void **module, const void *code) {
  if (failure) return failure;
  image = code;
  *module = (void *)(0x2000l + loads++);
  return 0;
}
int cuModuleGetFunction(void **function, void *module, const char *which) {
  strncpy(name, which, sizeof name - 1);
  *function = (char *)module + 0x1000;
  return 0;
}
int cuFuncSetAttribute(void *function, int attribute, int value) {
  if (attribute == 8) shared = value;
  return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 4 ? 168 : 0;
  return 0;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty,
                   unsigned tz, unsigned bytes, void *stream, void **parameters, void **extra) {
  static const int sizes[] = {8, 8, 8, 4, 4, 4, 8, 4, 8, 8, 8}; /* of the plugin under test */
  if (failure) return failure;
  struct fake_launch made = {{x, y, z}, {tx, ty, tz}, bytes, stream, stack[depth], function, {0}};
  for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; ++i) {
    memcpy(&made.parameters[i], parameters[i], sizes[i]);
  }
  last = made;
  ++launches;
  return extra ? 1 : 0;
}
