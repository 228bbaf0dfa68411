// The table of contract sm90-v1 that records what it is given and computes with the model of the host kernels, on pointers to host memory.
#include <algorithm>
#include <cstring>
#include <limits>

#include "attn/cuda/sm90_interface.h"
#include "attn/host/sm90.h"
#include "attn_cuda.h"

namespace {

using namespace fakes;

const float* ex2 = nullptr;

int64_t bytes_of(const attn_cuda_attention& problem, int device) { return problem.batch * 5 + 2000 + device; }

// The host kernels leave rows that see nothing as they are; attn-cuda writes all.
void clear(void* array, int64_t halves) {
  if (array != nullptr) std::memset(array, 0, static_cast<size_t>(halves) * 2);
}

int forward_workspace(int device, const attn_cuda_attention* problem, int64_t* bytes) {
  *bytes = bytes_of(*problem, device);
  return failing_code;
}

int backward_workspace(int device, const attn_cuda_attention* problem, const attn_cuda_sm90_gradients*, int64_t* bytes) {
  *bytes = 2 * bytes_of(*problem, device);
  return failing_code;
}

int forward(int device, void* stream, const attn_cuda_attention* problem, float factor, const attn_cuda_sm90_results* results,
            void* workspace) {
  {
    Line line("sm90_forward");
    record(line, device, stream, *problem);
    line("factor", factor);
  }
  if (failing_code != 0) return failing_code;
  std::memset(workspace, 0xA5, static_cast<size_t>(bytes_of(*problem, device)));
  clear(results->out, problem->batch * problem->heads * problem->queries * problem->head_dim);
  std::fill_n(results->lse, problem->batch * problem->heads * problem->queries, -std::numeric_limits<float>::infinity());
  attn::host::Sm90Forward to{};
  const int64_t head = problem->queries * problem->head_dim;
  to.out = {results->out, {problem->heads * head, head, problem->head_dim, 1}};
  to.lse = results->lse;
  attn::host::sm90_forward(problem_of(*problem), {factor, ex2}, to, 1);
  return 0;
}

int backward(int device, void* stream, const attn_cuda_attention* problem, float factor, const attn_cuda_sm90_gradients* gradients,
             void* workspace) {
  {
    Line line("sm90_backward");
    record(line, device, stream, *problem);
    line("factor", factor)("dlse", gradients->dlse != nullptr)("dq", gradients->dq != nullptr)("dk", gradients->dk != nullptr);
    line("dv", gradients->dv != nullptr)("dsinks", gradients->dsinks != nullptr);
  }
  if (failing_code != 0) return failing_code;
  std::memset(workspace, 0xA5, static_cast<size_t>(2 * bytes_of(*problem, device)));
  clear(gradients->dq, problem->batch * problem->heads * problem->queries * problem->head_dim);
  for (void* gradient : {gradients->dk, gradients->dv})
    clear(gradient, problem->batch * problem->kv_heads * problem->keys * problem->head_dim);
  attn::host::Sm90Backward to{};
  to.dout = input_of(gradients->dout);
  to.out = input_of(gradients->out);
  to.lse = gradients->lse;
  to.dlse = gradients->dlse;
  to.dq = gradients->dq;
  to.dk = gradients->dk;
  to.dv = gradients->dv;
  to.dsinks = gradients->dsinks;
  attn::host::sm90_backward(problem_of(*problem), {factor, ex2}, to, 1);
  return 0;
}

}  // namespace

extern "C" void fake_sm90_set(const float* table) { ex2 = table; }

extern "C" const attn_cuda_sm90_interface* fake_sm90_table(int64_t version, int64_t results_bytes) {
  static attn_cuda_sm90_interface table;
  table = {version,           sizeof(attn_cuda_attention), results_bytes, sizeof(attn_cuda_sm90_gradients),
           forward_workspace, backward_workspace,          forward,       backward};
  return &table;
}
