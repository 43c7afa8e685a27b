/* cuBLAS with no GPU behind it. What gives something back is here; all else that torch links with
   is generated beside it by build.py, and does nothing, successfully. */

#include <string.h>

#define HANDLE ((void *)0x40)

int cublasCreate_v2(void **handle) { *handle = HANDLE; return 0; }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
int cublasLtCreate(void **handle) { *handle = HANDLE; return 0; }
int cublasLtMatmulDescCreate(void **desc) { *desc = HANDLE; return 0; }
int cublasLtMatmulPreferenceCreate(void **preference) { *preference = HANDLE; return 0; }
int cublasLtMatrixLayoutCreate(void **layout) { *layout = HANDLE; return 0; }

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *op, void *a, void *b, void *c, void *d,
                                   void *preference, int n, void *results, int *n_result) {
  memset(results, 0, 96);                      /* sizeof(cublasLtMatmulHeuristicResult_t) */
  *n_result = 1;
  return 0;
}
