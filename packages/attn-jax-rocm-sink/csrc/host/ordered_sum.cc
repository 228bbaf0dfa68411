// Sum of the rows of a float32 matrix, one RN addition after another from +0: what is left of dsinks and dbias once the terms of every
// batch item are in one place. A handler of its own because XLA's additions flush subnormals on the CPU.
#include "../xla/handlers.h"
#include "attn/host/float_environment.h"
#include "attn/ordered.h"

namespace attn::engine {

using Rows = ffi::Buffer<ffi::F32, 2>;

ffi::Error ordered_sum(Rows rows, ffi::Result<ffi::AnyBuffer> sum) {
  return guarded([&] {
    const int64_t count = rows.dimensions()[0], columns = rows.dimensions()[1];
    require_count("the sum", *sum, columns);
    FloatResult result("the sum", *sum);
    const host::DefaultFloatEnvironment environment;
    const float* terms = static_cast<const float*>(rows.untyped_data());
    float* totals = result.data();
    std::fill(totals, totals + columns, 0.0f);
    for (int64_t row = 0; row < count; ++row)
      for (int64_t column = 0; column < columns; ++column) totals[column] = add(totals[column], terms[row * columns + column]);
    result.store();
  });
}

}  // namespace attn::engine

XLA_FFI_DEFINE_HANDLER_SYMBOL(attn_jax_rocm_sink_ordered_sum, attn::engine::ordered_sum,
                              ::xla::ffi::Ffi::Bind().Arg<attn::engine::Rows>().Ret<::xla::ffi::AnyBuffer>());
