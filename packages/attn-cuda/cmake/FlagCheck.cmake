# Flags that make even the _rn intrinsics flush subnormals, divide approximately or contract: no contract can be kept with them.
function(attn_cuda_refuse_flags origin flags)
  if(flags MATCHES "use_fast_math|ftz[= ]+(true|1)|prec-div[= ]+(false|0)")
    message(FATAL_ERROR "attn-cuda: ${origin} contains '${CMAKE_MATCH_0}' (${flags}). Flush-to-zero and fast math change the bits that the contract "
                        "fixes; remove the flag and build again.")
  endif()
endfunction()
