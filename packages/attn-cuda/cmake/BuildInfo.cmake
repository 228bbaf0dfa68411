# Writes attn_build_info.h: flags with those of the environment, compiler, architectures, and the sha256 over them and every source.
include("${CMAKE_CURRENT_LIST_DIR}/FlagCheck.cmake")
set(flags "${FLAGS}")
foreach(variable NVCC_PREPEND_FLAGS NVCC_APPEND_FLAGS)
  if(NOT "$ENV{${variable}}" STREQUAL "")
    attn_cuda_refuse_flags("${variable}" "$ENV{${variable}}")
    string(APPEND flags " $ENV{${variable}}")
  endif()
endforeach()
string(REGEX REPLACE "[ ]+" " " flags "${flags}")
string(STRIP "${flags}" flags)

string(REPLACE "," ";" files "${FILES}")
set(text "${flags}\n${COMPILER}\n${ARCHITECTURES}\n")
foreach(path IN LISTS files)
  get_filename_component(name "${path}" NAME)
  file(SHA256 "${path}" digest)
  string(APPEND text "${name} ${digest}\n")
endforeach()
string(SHA256 fingerprint "${text}")

string(REPLACE "\\" "\\\\" flags "${flags}")
string(REPLACE "\"" "\\\"" flags "${flags}")
file(
  CONFIGURE
  OUTPUT "${OUTPUT}"
  CONTENT
    "#pragma once\n#define ATTN_CUDA_FLAGS \"@flags@\"\n#define ATTN_CUDA_COMPILER \"@COMPILER@\"\n#define ATTN_CUDA_ARCHITECTURES \"@ARCHITECTURES@\"\n#define ATTN_CUDA_FINGERPRINT \"@fingerprint@\"\n"
  @ONLY)
