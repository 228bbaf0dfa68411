// C entry points over attn/nvfp4.h, compiled by the tests.
#include "attn/nvfp4.h"

#include <cstdint>

using namespace attn;

extern "C" {

void encode_e2m1(const float* in, uint8_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = nvfp4::encode_e2m1(in[i]);
}

void encode_e4m3(const float* in, uint8_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = nvfp4::encode_e4m3(in[i]);
}

void decode_e2m1(const uint8_t* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = nvfp4::decode_e2m1(in[i]);
}

void decode_e4m3(const uint8_t* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = nvfp4::decode_e4m3(in[i]);
}

// kind 0: no outer scale; 1: from the largest magnitude `outer[block]`; 2: the constant encoding scale `outer[block]`.
void quantize(const float* in, const float* outer, int kind, uint8_t* codes, uint8_t* scales, float* decoded, int64_t blocks) {
  for (int64_t block = 0; block < blocks; ++block) {
    const nvfp4::Outer above = kind == 0   ? nvfp4::constant_outer(1.0f)
                               : kind == 1 ? nvfp4::outer_of(outer[block])
                                           : nvfp4::constant_outer(outer[block]);
    uint8_t* packed = codes + block * nvfp4::kBlock / 2;
    scales[block] = nvfp4::quantize_block(in + block * nvfp4::kBlock, above, packed);
    for (int i = 0; i < nvfp4::kBlock; ++i) {
      const uint8_t code = i % 2 == 0 ? packed[i / 2] & 15 : packed[i / 2] >> 4;
      decoded[block * nvfp4::kBlock + i] = nvfp4::decode(code, scales[block], above);
    }
  }
}
}
