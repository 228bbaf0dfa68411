# The ck engine as its own library over AITER's libraries: libattn_jax_rocm_sink_ck.so, or missing-ck.txt with the reason why not.
#
# HIP is found as for the hip engine. ATTN_CK_AITER names a checkout of AITER with Composable Kernel under 3rdparty, and ATTN_CK_LIBRARIES
# the folder of its libmha_fwd.so and libmha_bwd.so, which AITER's op_tests/cpp/mha/compile.py builds without torch.
set(ATTN_CK_AITER "" CACHE PATH "checkout of AITER; empty: no ck engine")
set(ATTN_CK_LIBRARIES "" CACHE PATH "folder of libmha_fwd.so and libmha_bwd.so; empty: ATTN_CK_AITER")

# Variable reason in the caller's scope: why there is no ck engine, or empty.
macro(_attn_find_aiter)
  if(NOT reason)
    set(headers "${ATTN_CK_AITER}/csrc/include")
    set(ck "${ATTN_CK_AITER}/3rdparty/composable_kernel")
    set(libraries "${ATTN_CK_LIBRARIES}")
    if(NOT libraries)
      set(libraries "${ATTN_CK_AITER}")
    endif()
    if(NOT ATTN_CK_AITER)
      set(reason "no AITER was named (ATTN_CK_AITER) when the package was built")
    elseif(NOT EXISTS "${headers}/mha_fwd.h" OR NOT EXISTS "${headers}/mha_bwd.h")
      set(reason "${ATTN_CK_AITER} has no csrc/include/mha_fwd.h and mha_bwd.h")
    elseif(NOT EXISTS "${ck}/include/ck_tile/core.hpp")
      set(reason "${ATTN_CK_AITER} has no Composable Kernel under 3rdparty")
    elseif(NOT EXISTS "${libraries}/libmha_fwd.so" OR NOT EXISTS "${libraries}/libmha_bwd.so")
      set(reason "libmha_fwd.so and libmha_bwd.so are not in ${libraries}")
    else()
      file(STRINGS "${headers}/mha_bwd.h" allocates REGEX "workspace_alloc")
      if(NOT allocates)
        set(reason "this AITER takes no workspace from its caller (mha_bwd_args has no workspace_alloc); a newer one is needed")
      endif()
    endif()
  endif()
endmacro()

# attn_add_ck_engine(<folder of jaxlib> <version of jaxlib>)
function(attn_add_ck_engine jaxlib_dir jaxlib_version)
  _attn_find_hip()
  _attn_find_aiter()
  if(reason)
    message(STATUS "attn-jax-rocm-sink: ${reason}; installing without the ck engine")
    file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/missing-ck.txt" "${reason}\n")
    install(FILES "${CMAKE_CURRENT_BINARY_DIR}/missing-ck.txt" DESTINATION attn_jax_rocm_sink)
    return()
  endif()
  set(csrc "${CMAKE_CURRENT_SOURCE_DIR}/csrc")
  file(GLOB sources CONFIGURE_DEPENDS "${csrc}/*.h" "${csrc}/ck/*" "${csrc}/xla/*")
  set(text "${ATTN_HIP_ARCHITECTURES} ${ATTN_HIP_FLAGS}")
  foreach(source IN LISTS sources)
    file(SHA256 "${source}" digest)
    string(APPEND text " ${digest}")
  endforeach()
  foreach(library mha_fwd mha_bwd)
    file(SHA256 "${libraries}/lib${library}.so" digest)
    string(APPEND text " ${digest}")
  endforeach()
  string(SHA256 fingerprint "${text}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${sources})

  # AITER's headers hold launches, so even the host code is HIP.
  set(hip "${compiler}" -x hip "--rocm-path=${rocm}" -isystem "${rocm}/include" -I "${ATTN_INCLUDE_DIR}" -O3 -fPIC -fvisibility=hidden ${ATTN_HIP_FLAGS})
  set(aiter -std=c++20 -D__HIP_PLATFORM_AMD__ -DUSE_ROCM=1 -DENABLE_CK=1 --offload-host-only -isystem "${headers}" -isystem "${ck}/include"
      -isystem "${ck}/library/include" -isystem "${ck}/example/ck_tile/01_fmha")
  set(architectures ${ATTN_HIP_ARCHITECTURES})
  list(TRANSFORM architectures PREPEND "--offload-arch=")
  set(objects "${CMAKE_CURRENT_BINARY_DIR}/ck_engine.o" "${CMAKE_CURRENT_BINARY_DIR}/ck_kernels.o")
  add_custom_command(
    OUTPUT ${objects}
    COMMAND ${hip} ${aiter} -c "${csrc}/ck/engine.cc" -o "${CMAKE_CURRENT_BINARY_DIR}/ck_engine.o"
    COMMAND ${hip} -std=c++17 ${architectures} -c "${csrc}/ck/kernels.hip" -o "${CMAKE_CURRENT_BINARY_DIR}/ck_kernels.o"
    DEPENDS ${sources}
    COMMENT "The ck engine for ${ATTN_HIP_ARCHITECTURES}"
    VERBATIM)
  add_library(attn_jax_rocm_sink_ck SHARED "${csrc}/xla/build.cc" "${csrc}/ck/handlers.cc" ${objects})
  target_link_libraries(attn_jax_rocm_sink_ck PRIVATE "${libraries}/libmha_fwd.so" "${libraries}/libmha_bwd.so" "${runtime}")
  target_include_directories(attn_jax_rocm_sink_ck PRIVATE "${ATTN_INCLUDE_DIR}")
  target_include_directories(attn_jax_rocm_sink_ck SYSTEM PRIVATE "${jaxlib_dir}/include")
  target_compile_definitions(attn_jax_rocm_sink_ck PRIVATE ATTN_BUILD_JAXLIB="${jaxlib_version}" ATTN_CK_FINGERPRINT="${fingerprint}")
  target_compile_options(attn_jax_rocm_sink_ck PRIVATE -Wall -Wextra)
  set_target_properties(attn_jax_rocm_sink_ck PROPERTIES CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF INSTALL_RPATH "$ORIGIN;${libraries}")
  target_link_options(attn_jax_rocm_sink_ck PRIVATE "LINKER:--version-script=${csrc}/exports.map" LINKER:--no-undefined)
  install(TARGETS attn_jax_rocm_sink_ck LIBRARY DESTINATION attn_jax_rocm_sink)
endfunction()
