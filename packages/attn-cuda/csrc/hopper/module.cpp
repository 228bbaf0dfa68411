// Python face of contract sm90-v1, in the manner of attention_module.cpp. `scale` is RN(scale), `factor` is RN(scale * log2 e).
#include "attention_values.h"
#include "hopper/backward.h"
#include "hopper/forward.h"
#include "hopper/joint.h"

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

// dout, out; lse, dlse, dq, dk, dv, dsinks.
attn_cuda_sm90_gradients gradients_of(const py::tuple& values) {
  Members from(values.ptr());
  attn_cuda_sm90_gradients gradients{};
  gradients.dout = tensor_of(from.next()).array;
  gradients.out = tensor_of(from.next()).array;
  for (const float** row : {&gradients.lse, &gradients.dlse}) *row = from.pointer<const float>();
  for (void** gradient : {&gradients.dq, &gradients.dk, &gradients.dv}) *gradient = from.pointer<void>();
  gradients.dsinks = from.pointer<float>();
  from.end();
  return gradients;
}

int64_t backward_workspace(int device, const py::tuple& values, float scale, const py::tuple& gradients) {
  const attn_cuda_attention problem = attention(values, scale);
  const attn_cuda_sm90_gradients to = gradients_of(gradients);
  int64_t bytes = 0;
  check(attn_cuda_sm90_backward_workspace(device, &problem, &to, &bytes), "attn_cuda_sm90_backward_workspace");
  return bytes;
}

void backward(int device, Address stream, const py::tuple& values, float scale, float factor, const py::tuple& gradients,
              Address workspace) {
  const attn_cuda_attention problem = attention(values, scale);
  const attn_cuda_sm90_gradients to = gradients_of(gradients);
  check(attn_cuda_sm90_backward(device, pointer<void>(stream), &problem, factor, &to, pointer<void>(workspace)), "attn_cuda_sm90_backward");
}

// mask, batch, text, first, image, slots, rows, kept.
void joint_places(int device, Address stream, const py::tuple& values) {
  Members from(values.ptr());
  attn_cuda_joint_places places{};
  places.mask = from.pointer<const uint8_t>();
  for (int64_t* size : {&places.batch, &places.text, &places.first, &places.image}) *size = from.integer();
  for (int32_t** integers : {&places.slots, &places.rows}) *integers = from.pointer<int32_t>();
  places.kept = from.pointer<uint8_t>();
  from.end();
  check(attn_cuda_find_joint_places(device, pointer<void>(stream), &places), "attn_cuda_find_joint_places");
}

// text, image, joined; first, slots, rows.
attn_cuda_joint_rows joint_rows(const py::tuple& values) {
  Members from(values.ptr());
  const Tensor text = tensor_of(from.next()), image = tensor_of(from.next()), joined = tensor_of(from.next());
  attn_cuda_joint_rows rows{};
  rows.text = text.array, rows.image = image.array, rows.joined = joined.array;
  rows.batch = joined.sizes[0], rows.heads = joined.sizes[1], rows.columns = joined.sizes[3];
  rows.text_rows = text.sizes[2], rows.image_rows = image.sizes[2];
  rows.first = from.integer();
  rows.slots = from.pointer<const int32_t>();
  rows.rows = from.pointer<const int32_t>();
  from.end();
  return rows;
}

void join_rows(int device, Address stream, const py::tuple& values) {
  const attn_cuda_joint_rows rows = joint_rows(values);
  check(attn_cuda_join_rows(device, pointer<void>(stream), &rows), "attn_cuda_join_rows");
}

void part_rows(int device, Address stream, const py::tuple& values) {
  const attn_cuda_joint_rows rows = joint_rows(values);
  check(attn_cuda_part_rows(device, pointer<void>(stream), &rows), "attn_cuda_part_rows");
}

}  // namespace

void define_sm90(py::module_& module) {
  module.def("sm90_forward_workspace", &forward_workspace);
  module.def("sm90_forward", &forward);
  module.def("sm90_backward_workspace", &backward_workspace);
  module.def("sm90_backward", &backward);
  module.def("joint_places", &joint_places);
  module.def("join_rows", &join_rows);
  module.def("part_rows", &part_rows);
}
