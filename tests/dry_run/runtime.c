/* A CUDA runtime with no GPU behind it, preloaded before torch's: libcudart's functions.

   Memory is the host's, copies are copies, a kernel does nothing, and nothing has to be waited for.
   So all of torch that decides what runs on a GPU runs here; only the numbers are garbage. What a
   dry run asks for is counted. HOLLOW_SM=75|80|90 says which GPU this claims to be. */

#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#undef cudaGetDeviceProperties

#define DO(name, arguments, ...) cudaError_t name arguments { __VA_ARGS__; return cudaSuccess; }

/* ---- What is counted -------------------------------------------------------------------------- */

static struct { long launches, graph_launches, captures, waits, reads; } count;

void hollow_counts(long out[5]) { memcpy(out, &count, sizeof count); }

/* ---- The device ------------------------------------------------------------------------------- */

static const struct gpu {
  int sm, n_sm, threads_per_sm, smem_per_sm, smem_per_block, l2, bus;
  const char *name;
} GPUS[] = {
  {75, 40, 1024, 64 << 10, 64 << 10, 4 << 20, 256, "Tesla T4"},
  {80, 108, 2048, 164 << 10, 163 << 10, 40 << 20, 5120, "NVIDIA A100-SXM4-80GB"},
  {90, 132, 2048, 228 << 10, 227 << 10, 50 << 20, 5120, "NVIDIA H100 80GB HBM3"},
};

static const struct gpu *gpu(void) {
  const char *text = getenv("HOLLOW_SM");
  int sm = text ? atoi(text) : 90;
  for (size_t i = 0; i < sizeof GPUS / sizeof *GPUS; i++)
    if (GPUS[i].sm == sm) return &GPUS[i];
  fprintf(stderr, "HOLLOW_SM=%s: expected 75, 80 or 90\n", text);
  exit(2);
}

static __thread int current;

DO(cudaGetDeviceCount, (int *n), const char *text = getenv("HOLLOW_N"); *n = text ? atoi(text) : 1)
DO(cudaGetDevice, (int *device), *device = current)
DO(cudaSetDevice, (int device), current = device)
DO(cudaInitDevice, (int device, unsigned flags, unsigned more))
DO(cudaDriverGetVersion, (int *version), *version = CUDART_VERSION)
DO(cudaRuntimeGetVersion, (int *version), *version = CUDART_VERSION)

DO(cudaGetDeviceProperties, (struct cudaDeviceProp *p, int device),
   const struct gpu *g = gpu();
   memset(p, 0, sizeof *p);
   strcpy(p->name, g->name);
   p->major = g->sm / 10;
   p->minor = g->sm % 10;
   p->totalGlobalMem = 80ull << 30;
   p->sharedMemPerBlock = 48 << 10;
   p->sharedMemPerBlockOptin = g->smem_per_block;
   p->sharedMemPerMultiprocessor = g->smem_per_sm;
   p->regsPerBlock = p->regsPerMultiprocessor = 1 << 16;
   p->warpSize = 32;
   p->maxThreadsPerBlock = 1024;
   p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
   p->maxThreadsDim[2] = 64;
   p->maxGridSize[0] = INT32_MAX;
   p->maxGridSize[1] = p->maxGridSize[2] = 65535;
   p->multiProcessorCount = g->n_sm;
   p->maxThreadsPerMultiProcessor = g->threads_per_sm;
   p->maxBlocksPerMultiProcessor = 32;
   p->l2CacheSize = g->l2;
   p->memoryBusWidth = g->bus;
   p->cooperativeLaunch = p->unifiedAddressing = p->canMapHostMemory = 1;
   p->concurrentKernels = p->streamPrioritiesSupported = p->memoryPoolsSupported = 1)

DO(cudaDeviceGetAttribute, (int *value, enum cudaDeviceAttr name, int device),
   struct cudaDeviceProp p;
   cudaGetDeviceProperties(&p, device);
   switch (name) {
     case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
     case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
     case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
     case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
     case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
     case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
     case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
     case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
     case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[1]; break;
     case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
     case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
     case cudaDevAttrWarpSize: *value = p.warpSize; break;
     default: *value = 0;
   })

DO(cudaDeviceGetStreamPriorityRange, (int *least, int *greatest), *least = 0; *greatest = -5)
DO(cudaDeviceGetPCIBusId, (char *text, int n, int device), snprintf(text, n, "0000:00:00.0"))
DO(cudaDeviceCanAccessPeer, (int *can, int a, int b), *can = 0)
DO(cudaDeviceEnablePeerAccess, (int a, unsigned flags))
DO(cudaDeviceSynchronize, (void), count.waits++)
DO(cudaGetLastError, (void))
DO(cudaPeekAtLastError, (void))

/* ---- Memory ----------------------------------------------------------------------------------- */

cudaError_t cudaMalloc(void **p, size_t n) {
  return posix_memalign(p, 512, n ? n : 512) ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t stream) { return cudaMalloc(p, n); }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags) { return cudaMalloc(p, n); }
DO(cudaFree, (void *p), free(p))
DO(cudaFreeAsync, (void *p, cudaStream_t stream), free(p))
DO(cudaFreeHost, (void *p), free(p))
DO(cudaHostRegister, (void *p, size_t n, unsigned flags))
DO(cudaHostUnregister, (void *p))
DO(cudaMemGetInfo, (size_t *free, size_t *all), *all = 80ull << 30; *free = 79ull << 30)
DO(cudaMemset, (void *to, int value, size_t n), memset(to, value, n))
DO(cudaMemsetAsync, (void *to, int value, size_t n, cudaStream_t stream), memset(to, value, n))
DO(cudaMemcpyAsync, (void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t s),
   count.reads += kind == cudaMemcpyDeviceToHost;
   memmove(to, from, n))
DO(cudaMemcpy, (void *to, const void *from, size_t n, enum cudaMemcpyKind kind),
   count.waits++;
   cudaMemcpyAsync(to, from, n, kind, 0))
DO(cudaMemcpyPeerAsync, (void *to, int a, const void *from, int b, size_t n, cudaStream_t stream),
   memmove(to, from, n))
DO(cudaPointerGetAttributes, (struct cudaPointerAttributes *a, const void *p),
   memset(a, 0, sizeof *a);
   a->type = cudaMemoryTypeDevice;
   a->devicePointer = (void *)p)
DO(cudaGetSymbolAddress, (void **p, const void *symbol), static char memory[1 << 20]; *p = memory)
DO(cudaMemcpyToSymbol, (const void *to, const void *from, size_t n, size_t at, enum cudaMemcpyKind k))

/* ---- Streams, events and graphs: handles that stand for nothing ------------------------------- */

static uintptr_t last_handle = 0x1000;
static int capturing;
static cudaStream_t captured;                  /* the stream: others go on allocating for themselves */

#define NEW(type) (type)(last_handle += 64)
#define STATUS capturing && s == captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone

DO(cudaStreamCreate, (cudaStream_t *s), *s = NEW(cudaStream_t))
DO(cudaStreamCreateWithFlags, (cudaStream_t *s, unsigned flags), *s = NEW(cudaStream_t))
DO(cudaStreamCreateWithPriority, (cudaStream_t *s, unsigned f, int p), *s = NEW(cudaStream_t))
DO(cudaStreamDestroy, (cudaStream_t s))
DO(cudaStreamQuery, (cudaStream_t s))
DO(cudaStreamSynchronize, (cudaStream_t s), count.waits++)
DO(cudaStreamWaitEvent, (cudaStream_t s, cudaEvent_t event, unsigned flags))
DO(cudaStreamGetPriority, (cudaStream_t s, int *priority), *priority = 0)
DO(cudaStreamIsCapturing, (cudaStream_t s, enum cudaStreamCaptureStatus *status), *status = STATUS)
DO(cudaStreamGetCaptureInfo, (cudaStream_t s, enum cudaStreamCaptureStatus *status,
                              unsigned long long *id, cudaGraph_t *graph,
                              const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                              size_t *n),
   *status = STATUS;
   if (id) *id = 1 + count.captures;
   if (graph) *graph = (cudaGraph_t)0x40;
   if (n) *n = 0)
DO(cudaStreamUpdateCaptureDependencies, (cudaStream_t s, cudaGraphNode_t *nodes,
                                         const cudaGraphEdgeData *edges, size_t n, unsigned flags))
DO(cudaStreamBeginCapture, (cudaStream_t s, enum cudaStreamCaptureMode mode),
   capturing = 1;
   captured = s)
DO(cudaStreamEndCapture, (cudaStream_t s, cudaGraph_t *graph),
   capturing = 0;
   count.captures++;
   *graph = NEW(cudaGraph_t))
DO(cudaThreadExchangeStreamCaptureMode, (enum cudaStreamCaptureMode *mode))

DO(cudaGraphInstantiate, (cudaGraphExec_t *x, cudaGraph_t g, unsigned long long flags),
   *x = NEW(cudaGraphExec_t))
DO(cudaGraphInstantiateWithFlags, (cudaGraphExec_t *x, cudaGraph_t g, unsigned long long flags),
   *x = NEW(cudaGraphExec_t))
DO(cudaGraphLaunch, (cudaGraphExec_t x, cudaStream_t s), count.graph_launches++)
DO(cudaGraphDestroy, (cudaGraph_t g))
DO(cudaGraphExecDestroy, (cudaGraphExec_t x))
DO(cudaGraphGetNodes, (cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n), *n = 1)

DO(cudaEventCreate, (cudaEvent_t *event), *event = NEW(cudaEvent_t))
DO(cudaEventCreateWithFlags, (cudaEvent_t *event, unsigned flags), *event = NEW(cudaEvent_t))
DO(cudaEventDestroy, (cudaEvent_t event))
DO(cudaEventQuery, (cudaEvent_t event))
DO(cudaEventRecord, (cudaEvent_t event, cudaStream_t s))
DO(cudaEventRecordWithFlags, (cudaEvent_t event, cudaStream_t s, unsigned flags))
DO(cudaEventSynchronize, (cudaEvent_t event), count.waits++)
DO(cudaEventElapsedTime, (float *ms, cudaEvent_t a, cudaEvent_t b), *ms = 1)

/* ---- Kernels ---------------------------------------------------------------------------------- */

DO(cudaLaunchKernel, (const void *f, dim3 grid, dim3 block, void **a, size_t n, cudaStream_t s),
   count.launches++)
DO(cudaLaunchKernelExC, (const cudaLaunchConfig_t *config, const void *f, void **a),
   count.launches++)
DO(cudaLaunchHostFunc, (cudaStream_t s, cudaHostFn_t f, void *data), f(data))
DO(cudaFuncGetAttributes, (struct cudaFuncAttributes *a, const void *f),
   memset(a, 0, sizeof *a);
   a->maxThreadsPerBlock = 1024;
   a->numRegs = 32;
   a->ptxVersion = a->binaryVersion = gpu()->sm)
DO(cudaFuncSetAttribute, (const void *f, enum cudaFuncAttribute name, int value))
DO(cudaOccupancyMaxActiveBlocksPerMultiprocessor, (int *n, const void *f, int block, size_t smem),
   *n = 4)
DO(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
   (int *n, const void *f, int block, size_t smem, unsigned flags), *n = 4)

/* What nvcc writes for <<<grid, block>>>. */
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t smem, struct CUstream_st *s) {
  return 0;
}
DO(__cudaPopCallConfiguration, (dim3 *grid, dim3 *block, size_t *smem, void *s),
   memset(grid, 0, sizeof *grid);
   memset(block, 0, sizeof *block);
   *smem = 0;
   *(void **)s = 0)
DO(__cudaLaunchKernel, (void *f, dim3 grid, dim3 block, void **a, size_t n, cudaStream_t s),
   count.launches++)
DO(__cudaGetKernel, (void **kernel, const void *f), *kernel = (void *)f)
