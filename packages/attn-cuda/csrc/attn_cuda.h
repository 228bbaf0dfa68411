// C interface of the attn-cuda kernels. Needs no torch and no Python; all pointers are device pointers unless said otherwise.
//
// Every function runs on `device` and enqueues on `stream` (a cudaStream_t), allocates nothing, does not synchronise, restores the current
// device and can be captured in a CUDA graph. Each returns 0 or a code for attn_cuda_message; nothing is written when arguments are
// refused.
#pragma once

#include <stdint.h>

#include "attn/cuda/interface.h"

#ifdef __cplusplus
extern "C" {
#endif

// Rows of `keys` scores over three outer axes. Row r is the r-th index of sizes[0] x sizes[1] x sizes[2], last axis fastest. 1 <= keys <
// 2^31.
typedef struct {
  int64_t sizes[3];
  int64_t keys;
} attn_cuda_shape;

// An input over a shape: strides of the outer axes in elements (any value); keys are contiguous.
typedef struct {
  const void* data;
  int32_t dtype;
  int64_t strides[3];
} attn_cuda_rows;

// Key padding: `kept` [batch, keys] (nonzero keeps), and what attn_cuda_compact_keys made of it: `positions` [batch, keys] holds the stored
// positions of the kept keys in order, `counts` [batch] their number. Row r belongs to batch item r / rows_per_batch.
typedef struct {
  const uint8_t* kept;
  const int32_t* positions;
  const int32_t* counts;
  int64_t rows_per_batch;
} attn_cuda_mask;

int attn_cuda_compact_keys(int device, void* stream, const uint8_t* kept, int64_t batch, int64_t keys, int32_t* positions, int32_t* counts);

// Softmax of contract ordered-v1, section 2. `probs` [rows, keys] is contiguous, float32 or the dtype of the scores; `row_max` and
// `row_sum` [rows], both or neither null. `mask` may be null.
int attn_cuda_softmax_forward(int device, void* stream, const attn_cuda_shape* shape, const attn_cuda_rows* scores,
                              const attn_cuda_mask* mask, void* probs, int32_t probs_dtype, float* row_max, float* row_sum);

// Its backward. `dprobs` is float32 or the dtype of the scores; `dscores` [rows, keys] is contiguous in the dtype of the scores.
int attn_cuda_softmax_backward(int device, void* stream, const attn_cuda_shape* shape, const attn_cuda_rows* scores,
                               const attn_cuda_rows* dprobs, const attn_cuda_mask* mask, const float* row_max, const float* row_sum,
                               void* dscores);

// The same of contract ordered-v2.
int attn_cuda_softmax_v2_forward(int device, void* stream, const attn_cuda_shape* shape, const attn_cuda_rows* scores,
                                 const attn_cuda_mask* mask, void* probs, int32_t probs_dtype, float* row_max, float* row_sum);
int attn_cuda_softmax_v2_backward(int device, void* stream, const attn_cuda_shape* shape, const attn_cuda_rows* scores,
                                  const attn_cuda_rows* dprobs, const attn_cuda_mask* mask, const float* row_max, const float* row_sum,
                                  void* dscores);

// Runs the arithmetic that flush-to-zero, approximate division or contraction would change, on a stream of its own, and waits for it.
// `failed` (host) gets one bit for each result that is not IEEE, in the order of attn_cuda_probe_names. Allowed while another stream
// captures.
int attn_cuda_probe(int device, uint32_t* failed);
const char* attn_cuda_probe_names(void);

// Compute capability as 10 * major + minor (host).
int attn_cuda_capability(int device, int* capability);

const char* attn_cuda_message(int code);

// The build: architectures ("80-real,...,120-virtual"), nvcc flags with those of the environment, compiler, and the sha256 over sources and
// these.
const char* attn_cuda_architectures(void);
const char* attn_cuda_flags(void);
const char* attn_cuda_compiler(void);
const char* attn_cuda_fingerprint(void);

// Tile of the joint softmax in this build; contract ordered-v1 has 256.
int attn_cuda_softmax_tile(void);

#ifdef __cplusplus
}
#endif
