// Sum of the rows of a float32 matrix, one RN addition after another from +0: what is left of dsinks and dbias once the terms of every
// batch item are in one place. A handler of its own because XLA's additions flush subnormals on the CPU.
#include "attn/host/float_environment.h"
#include "attn/ordered.h"
#include "convert.h"

namespace attn::xla_host {

using Rows = ffi::Buffer<ffi::F32, 2>;

namespace {

ffi::Error ordered_sum(Rows rows, ffi::Result<ffi::AnyBuffer> sum) {
  try {
    const int64_t count = rows.dimensions()[0], columns = rows.dimensions()[1];
    require_shape("the sum", *sum, {columns});
    FloatResult result("the sum", *sum);
    {
      const host::DefaultFloatEnvironment environment;
      float* totals = result.data();
      const float* terms = static_cast<const float*>(rows.untyped_data());
      std::fill(totals, totals + columns, 0.0f);
      for (int64_t row = 0; row < count; ++row)
        for (int64_t column = 0; column < columns; ++column) totals[column] = add(totals[column], terms[row * columns + column]);
      result.store();
    }
    return ffi::Error::Success();
  } catch (const InvalidCall& error) {
    return ffi::Error::InvalidArgument(std::string("attn_jax_rocm_sink: ") + error.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("attn_jax_rocm_sink: ") + error.what());
  }
}

}  // namespace
}  // namespace attn::xla_host

XLA_FFI_DEFINE_HANDLER_SYMBOL(attn_jax_rocm_sink_ordered_sum, attn::xla_host::ordered_sum,
                              ::xla::ffi::Ffi::Bind().Arg<attn::xla_host::Rows>().Ret<::xla::ffi::AnyBuffer>());
