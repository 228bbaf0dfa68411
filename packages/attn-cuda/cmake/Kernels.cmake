# The kernels behind a C header (no Python, no torch), and the Python module over them.
enable_language(CUDA)
string(TOUPPER "${CMAKE_BUILD_TYPE}" configuration)
set(cuda_flags "${CMAKE_CUDA_FLAGS} ${CMAKE_CUDA_FLAGS_${configuration}}")
attn_cuda_refuse_flags("CMAKE_CUDA_FLAGS" "${cuda_flags}")
attn_cuda_refuse_flags("NVCC_APPEND_FLAGS" "$ENV{NVCC_APPEND_FLAGS}")
attn_cuda_refuse_flags("NVCC_PREPEND_FLAGS" "$ENV{NVCC_PREPEND_FLAGS}")

find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
find_package(pybind11 CONFIG REQUIRED)
execute_process(COMMAND "${Python_EXECUTABLE}" -c "import attn_spec; print(attn_spec.include_dir())"
                OUTPUT_VARIABLE attn_include OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)

set(kernels
    csrc/softmax_forward.cu
    csrc/softmax_backward.cu
    csrc/softmax_v2_forward.cu
    csrc/softmax_v2_backward.cu
    csrc/compact_keys.cu
    csrc/probe.cu
    csrc/products.cu
    csrc/attention_forward.cu
    csrc/attention_decode.cu
    csrc/attention_query_sums.cu
    csrc/attention_key_sums.cu
    csrc/attention_bias.cu
    csrc/attention_plan.cu
    csrc/attention_backward.cu)
# Contract sm90-v1 needs instructions of sm_90a; a build without that architecture has no such kernels.
set(hopper_kernels "")
set(sm90 OFF)
if(CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)90a(-real)?(;|$)")
  set(sm90 ON)
  set(hopper_kernels
      csrc/hopper/tensor_copy.cu
      csrc/hopper/hole.cu
      csrc/hopper/joint.cu
      csrc/hopper/forward.cu
      csrc/hopper/forward_whole.cu
      csrc/hopper/forward_segments.cu
      csrc/hopper/backward.cu
      csrc/hopper/backward_rows.cu
      csrc/hopper/backward_keys.cu
      csrc/hopper/backward_queries.cu)
endif()
set(options --fmad=false -DATTN_CUDA_SOFTMAX_TILE=${ATTN_CUDA_SOFTMAX_TILE})
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
  list(APPEND options --compress-mode=size)
endif()

# Runs in every build, since the environment's nvcc flags may differ from those at configuration.
file(GLOB attn_headers CONFIGURE_DEPENDS "${attn_include}/attn/*.h" "${attn_include}/attn/cuda/*.h")
file(GLOB own_files CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/csrc/*.cuh" "${CMAKE_CURRENT_SOURCE_DIR}/csrc/*.h" "${CMAKE_CURRENT_SOURCE_DIR}/csrc/*.cpp"
     "${CMAKE_CURRENT_SOURCE_DIR}/csrc/hopper/*.cuh" "${CMAKE_CURRENT_SOURCE_DIR}/csrc/hopper/*.h" "${CMAKE_CURRENT_SOURCE_DIR}/csrc/hopper/*.cpp")
set(all_kernels ${kernels} ${hopper_kernels})
list(TRANSFORM all_kernels PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/" OUTPUT_VARIABLE kernel_paths)
string(REPLACE ";" "," fingerprint_files "${kernel_paths};${own_files};${attn_headers}")
string(REPLACE ";" "," architectures "${CMAKE_CUDA_ARCHITECTURES}")
string(REPLACE ";" " " option_text "${options}")
add_custom_target(
  attn_cuda_build_info
  COMMAND
    "${CMAKE_COMMAND}" "-DFILES=${fingerprint_files}" "-DFLAGS=${cuda_flags} ${option_text}" "-DARCHITECTURES=${architectures}"
    "-DCOMPILER=${CMAKE_CUDA_COMPILER_ID} ${CMAKE_CUDA_COMPILER_VERSION}" "-DOUTPUT=${CMAKE_CURRENT_BINARY_DIR}/attn_build_info.h" -P
    "${CMAKE_CURRENT_SOURCE_DIR}/cmake/BuildInfo.cmake"
  BYPRODUCTS "${CMAKE_CURRENT_BINARY_DIR}/attn_build_info.h"
  VERBATIM)

add_library(attn_cuda_kernels STATIC ${kernels})
# The C interface of the softmax alone, for the tile sweep; built only by name.
set(softmax_kernels ${kernels})
list(FILTER softmax_kernels INCLUDE REGEX "softmax_|compact_keys|probe")
add_library(attn_cuda_softmax SHARED EXCLUDE_FROM_ALL ${softmax_kernels})
set(libraries attn_cuda_kernels attn_cuda_softmax)
if(sm90)
  add_library(attn_cuda_hopper STATIC ${hopper_kernels})
  set_target_properties(attn_cuda_hopper PROPERTIES CUDA_ARCHITECTURES 90a-real)
  target_link_libraries(attn_cuda_hopper PUBLIC attn_cuda_kernels)
  list(APPEND libraries attn_cuda_hopper)
endif()
foreach(library IN LISTS libraries)
  add_dependencies(${library} attn_cuda_build_info)
  target_compile_features(${library} PUBLIC cxx_std_17 cuda_std_17)
  target_compile_options(${library} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${options}>")
  target_include_directories(${library} PUBLIC csrc PRIVATE "${attn_include}" "${CMAKE_CURRENT_BINARY_DIR}")
  set_target_properties(${library} PROPERTIES POSITION_INDEPENDENT_CODE ON CUDA_RUNTIME_LIBRARY Static)
endforeach()

pybind11_add_module(_cuda MODULE csrc/module.cpp csrc/attention_module.cpp csrc/kinds_module.cpp csrc/interface.cpp)
target_link_libraries(_cuda PRIVATE attn_cuda_kernels)
target_include_directories(_cuda PRIVATE "${attn_include}")
if(sm90)
  target_sources(_cuda PRIVATE csrc/hopper/module.cpp)
  target_compile_definitions(_cuda PRIVATE ATTN_CUDA_SM90)
  target_link_libraries(_cuda PRIVATE attn_cuda_hopper)
endif()
set_target_properties(_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static)
install(TARGETS _cuda DESTINATION attn_cuda)
