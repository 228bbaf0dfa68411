// What the fake tables of attn-cuda share.
#pragma once

#include "attn/cuda/interface.h"
#include "attn/host/attention.h"
#include "log.h"

namespace fakes {

attn::host::Input input_of(const attn_cuda_array& array);
attn::host::AttentionProblem problem_of(const attn_cuda_attention& from);
void record(Line& line, int device, void* stream, const attn_cuda_attention& problem);

extern int failing_code;  // what every function of the tables returns

}  // namespace fakes
