// Python face of contract sm90-v1, in the manner of attention_module.cpp. `scale` is RN(scale), `factor` is RN(scale * log2 e).
#include "attention_values.h"
#include "hopper/forward.h"

namespace {

int64_t forward_workspace(int device, const py::tuple& values, float scale) {
  const attn_cuda_attention problem = attention(values, scale);
  int64_t bytes = 0;
  check(attn_cuda_sm90_forward_workspace(device, &problem, &bytes), "attn_cuda_sm90_forward_workspace");
  return bytes;
}

void forward(int device, Address stream, const py::tuple& values, float scale, float factor, Address out, Address lse, Address workspace) {
  const attn_cuda_attention problem = attention(values, scale);
  const attn_cuda_sm90_results results{pointer<void>(out), pointer<float>(lse)};
  check(attn_cuda_sm90_forward(device, pointer<void>(stream), &problem, factor, &results, pointer<void>(workspace)),
        "attn_cuda_sm90_forward");
}

}  // namespace

void define_sm90(py::module_& module) {
  module.def("sm90_forward_workspace", &forward_workspace);
  module.def("sm90_forward", &forward);
}
