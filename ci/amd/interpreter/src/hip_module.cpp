// Modules and launches of the stand-in HIP runtime: fat binaries that clang registers, and code objects that a program loads.
#include <cstdio>
#include <map>

#include "fat_binary.h"
#include "memory.h"
#include "runtime.h"

namespace amd {
namespace {

// One code object for each GPU that was asked for, loaded on its first launch.
struct Module {
  const void* image = nullptr;
  std::string bytes;  // owned, for modules that a program loads
  std::map<std::string, std::unique_ptr<Program>> programs;

  Program& program(const std::string& target) {
    auto& found = programs[target];
    if (!found) {
      const CodeObject object = code_object_for(image, target);
      found = load(object.data, object.bytes);
      if (found->target != target) throw std::runtime_error("a code object for " + found->target + " on " + target);
    }
    return *found;
  }
};

struct Function {
  Module* module;
  std::string name;
};

std::map<const void*, Function>& functions() {
  static std::map<const void*, Function> known;
  return known;
}

const Kernel& kernel_of(Program& program, const std::string& name) {
  const auto found = program.kernels.find(name);
  if (found == program.kernels.end() || found->second.entry == 0) throw std::runtime_error("no kernel " + name + " in the code object");
  return found->second;
}

struct Configuration {
  dim3 blocks, threads;
  size_t dynamic_lds;
  hipStream_t stream;
};

thread_local std::vector<Configuration> configurations;

}  // namespace

Runtime& runtime() {
  static Runtime state;
  return state;
}

hipError_t guarded(hipError_t code, const std::function<void()>& action) {
  const std::lock_guard lock(runtime().mutex);
  try {
    action();
    return hipSuccess;
  } catch (const std::exception& fault) {
    runtime().message = fault.what();
    runtime().error = code;
    std::fprintf(stderr, "AMD interpreter: %s\n", fault.what());
    return code;
  }
}

void launch_kernel(const Program& program, const Kernel& kernel, dim3 blocks, dim3 threads, size_t dynamic_lds, void** arguments) {
  std::vector<uint8_t> packed(kernel.kernarg_bytes, 0xA5);
  size_t place = 0;
  for (const Argument& argument : kernel.arguments) {
    if (argument.kind.rfind("hidden_", 0) == 0) continue;
    memcpy(packed.data() + argument.offset, arguments[place++], argument.size);
  }
  launch_packed(program, kernel, blocks, threads, dynamic_lds, packed.data(), packed.size());
}

void launch_packed(const Program& program, const Kernel& kernel, dim3 blocks, dim3 threads, size_t dynamic_lds, const void* packed,
                   size_t bytes) {
  Launch launch;
  const uint32_t grid[] = {blocks.x, blocks.y, blocks.z}, block[] = {threads.x, threads.y, threads.z};
  memcpy(launch.blocks, grid, sizeof grid);
  memcpy(launch.threads, block, sizeof block);
  launch.dynamic_lds = dynamic_lds;
  launch.kernarg.assign(static_cast<const uint8_t*>(packed), static_cast<const uint8_t*>(packed) + bytes);
  run(program, kernel, launch);
}

}  // namespace amd

using amd::guarded;
using amd::runtime;

extern "C" {

void** __hipRegisterFatBinary(const void* wrapper) {
  // struct __CudaFatBinaryWrapper of clang's CGCUDANV: magic, version, binary.
  const void* image;
  memcpy(&image, static_cast<const char*>(wrapper) + 8, sizeof image);
  auto* module = new amd::Module;
  module->image = image;
  return reinterpret_cast<void**>(module);
}

void __hipUnregisterFatBinary(void** module) {
  auto* gone = reinterpret_cast<amd::Module*>(module);
  for (auto known = amd::functions().begin(); known != amd::functions().end();)
    known = known->second.module == gone ? amd::functions().erase(known) : ++known;
  delete gone;
}

void __hipRegisterFunction(void** module, const void* host, char*, const char* name, unsigned, void*, void*, dim3*, dim3*, int*) {
  amd::functions()[host] = {reinterpret_cast<amd::Module*>(module), name};
}

void __hipRegisterVar(void**, void*, char*, char*, int, size_t, int, int) {}

hipError_t __hipPushCallConfiguration(dim3 blocks, dim3 threads, size_t dynamic_lds, hipStream_t stream) {
  amd::configurations.push_back({blocks, threads, dynamic_lds, stream});
  return hipSuccess;
}

hipError_t __hipPopCallConfiguration(dim3* blocks, dim3* threads, size_t* dynamic_lds, hipStream_t* stream) {
  const amd::Configuration last = amd::configurations.back();
  amd::configurations.pop_back();
  *blocks = last.blocks, *threads = last.threads, *dynamic_lds = last.dynamic_lds, *stream = last.stream;
  return hipSuccess;
}

hipError_t hipLaunchKernel(const void* host, dim3 blocks, dim3 threads, void** arguments, size_t dynamic_lds, hipStream_t) {
  return guarded(hipErrorLaunchFailure, [&] {
    const auto found = amd::functions().find(host);
    if (found == amd::functions().end()) throw std::runtime_error("a launch of a function that no module registered");
    amd::Program& program = found->second.module->program(runtime().target);
    amd::launch_kernel(program, amd::kernel_of(program, found->second.name), blocks, threads, dynamic_lds, arguments);
  });
}

hipError_t hipModuleLoadData(hipModule_t* module, const void* image) {
  return guarded(hipErrorInvalidImage, [&] {
    auto loaded = std::make_unique<amd::Module>();
    const amd::CodeObject object = amd::code_object_for(image, runtime().target);
    loaded->bytes.assign(static_cast<const char*>(object.data), object.bytes);
    loaded->image = loaded->bytes.data();
    loaded->program(runtime().target);
    *module = reinterpret_cast<hipModule_t>(loaded.release());
  });
}

hipError_t hipModuleUnload(hipModule_t module) {
  delete reinterpret_cast<amd::Module*>(module);
  return hipSuccess;
}

hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t module, const char* name) {
  return guarded(hipErrorNotFound, [&] {
    auto* from = reinterpret_cast<amd::Module*>(module);
    amd::kernel_of(from->program(runtime().target), name);
    *function = reinterpret_cast<hipFunction_t>(new amd::Function{from, name});
  });
}

hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z, unsigned threads_x,
                                 unsigned threads_y, unsigned threads_z, unsigned dynamic_lds, hipStream_t, void** arguments,
                                 void** extra) {
  return guarded(hipErrorLaunchFailure, [&] {
    const auto* known = reinterpret_cast<const amd::Function*>(function);
    amd::Program& program = known->module->program(runtime().target);
    const amd::Kernel& kernel = amd::kernel_of(program, known->name);
    const dim3 blocks(blocks_x, blocks_y, blocks_z), threads(threads_x, threads_y, threads_z);
    if (arguments != nullptr) return amd::launch_kernel(program, kernel, blocks, threads, dynamic_lds, arguments);
    if (extra == nullptr || extra[0] != HIP_LAUNCH_PARAM_BUFFER_POINTER || extra[2] != HIP_LAUNCH_PARAM_BUFFER_SIZE)
      throw std::runtime_error("a launch without arguments");
    amd::launch_packed(program, kernel, blocks, threads, dynamic_lds, extra[1], *static_cast<size_t*>(extra[3]));
  });
}

// The module whose function a test looks at.
const amd::Program* amd_program(hipModule_t module) { return &reinterpret_cast<amd::Module*>(module)->program(runtime().target); }

}  // extern "C"
