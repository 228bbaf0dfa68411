// The questions about the hip engine in the library that every build has. Its handlers are in the library that HIP builds.
#include "../xla/handlers.h"
#include "planning.h"

namespace attn::engine {

const Planner& hip_planner() {
  static const HipPlanning<Planner> planner;
  return planner;
}

}  // namespace attn::engine

ATTN_DEFINE_QUESTIONS_(hip, attn::engine::hip_planner)
