#pragma once

namespace attn::engine {

// Hash of the sources, flags and compiler of this library; each library defines its own.
const char* fingerprint();

}  // namespace attn::engine
