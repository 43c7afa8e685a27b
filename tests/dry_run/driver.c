/* libcuda.so.1 with no GPU behind it: what torch looks up in the driver by name. Few are
   called, the others do nothing, successfully. */

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "hollow"; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)0x40; return 0; }

#define NOTHING(name) int cu##name() { return 0; }
NOTHING(CtxSetCurrent)
NOTHING(DeviceGet)
NOTHING(DeviceGetAttribute)
NOTHING(DevicePrimaryCtxGetState)
NOTHING(DevicePrimaryCtxRetain)
NOTHING(FuncGetAttribute)
NOTHING(FuncSetAttribute)
NOTHING(FuncSetCacheConfig)
NOTHING(LaunchCooperativeKernel)
NOTHING(LaunchKernel)
NOTHING(LinkAddData_v2)
NOTHING(LinkComplete)
NOTHING(LinkCreate_v2)
NOTHING(ModuleGetFunction)
NOTHING(ModuleLoad)
NOTHING(ModuleLoadData)
NOTHING(ModuleLoadDataEx)
NOTHING(ModuleUnload)
NOTHING(OccupancyMaxActiveBlocksPerMultiprocessor)
NOTHING(PointerGetAttribute)
NOTHING(TensorMapEncodeTiled)
