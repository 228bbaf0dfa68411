// The cuda engine: the kernels of attn-cuda through its tables of C functions (attn/cuda/interface.h, sm90_interface.h). Compiled without a
// CUDA toolkit.
#pragma once

#include "../engine.h"
#include "attn/cuda/sm90_interface.h"

namespace attn::engine {

// Takes the table for every later call of the process. Why it is refused, or empty.
std::string bind_cuda(const attn_cuda_interface* table);

class CudaEngine : public Engine {
 public:
  const char* name() const override { return "cuda"; }
  Kept kept() const override { return {false, false, true}; }

 protected:
  std::string refuse(const Config& config, Pass pass) const override;
  void size(const Config& config, Pass pass, Plan& plan) const override;
  void run_forward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const override;
  void run_backward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const override;
};

// The same with the table of contract sm90-v1, null where attn-cuda was built without its kernels.
std::string bind_cuda_sm90(const attn_cuda_sm90_interface* table);

// Why the kernels of that contract do not run on a device, or empty.
std::string probe_cuda_sm90(int64_t device);

// Contract sm90-v1.
class Sm90CudaEngine : public Engine {
 public:
  const char* name() const override { return "cuda_sm90"; }
  Kept kept() const override { return {true, true, false}; }

 protected:
  std::string refuse(const Config& config, Pass pass) const override;
  void size(const Config& config, Pass pass, Plan& plan) const override;
  void run_forward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const override;
  void run_backward(const Config& config, const Tensors& tensors, const Workspace& workspace, void* stream) const override;
};

// Throws for a code that is not 0, with the text of the table.
void check_cuda(int code, const char* function);
attn_cuda_array cuda_array(const void* data, DType dtype, const Strides& strides);
attn_cuda_attention cuda_problem(const Config& config, const Tensors& tensors);
// Tensors as a plan has them: attn-cuda sizes its workspace from which pointers are null and how they are aligned; XLA's buffers are
// aligned.
Tensors planned(const Config& config, Pass pass, const Kept& kept);

// Throws where `workspace_bytes(config, pass, tensors)` is more than the plan has: an array that is not aligned to 16 bytes would be copied
// there.
template <typename Bytes>
void require_aligned(const Config& config, Pass pass, const Tensors& tensors, const Kept& kept, Bytes workspace_bytes) {
  if (workspace_bytes(config, pass, tensors) > workspace_bytes(config, pass, planned(config, pass, kept)))
    throw InvalidCall("an array is not aligned to 16 bytes, and the workspace has no room to copy it");
}

// Whether a pass has nothing to write.
bool is_empty(const Config& config, Pass pass);
// Reasons against lengths and alignments.
void add_cuda_reasons(const Config& config, Reasons& reasons);

}  // namespace attn::engine
