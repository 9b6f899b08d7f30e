/* As much of CUDA's driver as a pack without kernels needs: two devices and a stack of contexts. */
static void *stack[16] = {0};
static int depth = 0;

void *fake_current(void) { return stack[depth]; }
int fake_depth(void) { return depth; }

int cuInit(unsigned flags) { return flags ? 1 : 0; }
int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return ordinal < 2 ? 0 : 101;
}
int cuDeviceGetAttribute(int *value, int which, int device) {
  *value = which == 16 && device < 2 ? 132 : -1;
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = (void *)(0x1000l + device);
  return 0;
}
int cuCtxGetCurrent(void **context) {
  *context = stack[depth];
  return 0;
}
int cuCtxPushCurrent_v2(void *context) {
  stack[++depth] = context;
  return 0;
}
int cuCtxPopCurrent_v2(void **context) {
  *context = stack[depth--];
  return 0;
}
