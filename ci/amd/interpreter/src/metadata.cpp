// Reads the kernel arguments from a code object's metadata note, a MessagePack document (https://msgpack.org, AMDGPUUsage "Code Object
// Metadata").
#include "program.h"

namespace amd {
namespace {

class Reader {
 public:
  Reader(const uint8_t* data, size_t bytes) : at_(data), end_(data + bytes) {}

  bool is_map() const { return (*at_ & 0xF0) == 0x80 || *at_ == 0xDE || *at_ == 0xDF; }

  uint64_t map_size() { return container(0x80, 0xDE); }
  uint64_t array_size() { return container(0x90, 0xDC); }

  std::string text() {
    const uint8_t first = byte();
    const uint64_t size = (first & 0xE0) == 0xA0 ? first & 0x1F : number(first == 0xD9 ? 1 : first == 0xDA ? 2 : 4);
    need(size);
    std::string found(reinterpret_cast<const char*>(at_), size);
    at_ += size;
    return found;
  }

  uint64_t integer() {
    const uint8_t first = byte();
    if (first < 0x80) return first;
    if (first >= 0xCC && first <= 0xCF) return number(1 << (first - 0xCC));
    throw std::runtime_error("metadata: an integer was expected");
  }

  void skip() {
    const uint8_t first = *at_;
    if (is_map()) {
      for (uint64_t i = 2 * map_size(); i > 0; --i) skip();
    } else if ((first & 0xF0) == 0x90 || first == 0xDC || first == 0xDD) {
      for (uint64_t i = array_size(); i > 0; --i) skip();
    } else if ((first & 0xE0) == 0xA0 || (first >= 0xD9 && first <= 0xDB)) {
      text();
    } else if (first >= 0xCC && first <= 0xD3) {
      byte();
      number(1 << ((first - 0xCC) & 3));
    } else if (first < 0x80 || first >= 0xE0 || (first >= 0xC0 && first <= 0xC3)) {
      byte();
    } else {
      throw std::runtime_error("metadata: an unknown MessagePack type");
    }
  }

 private:
  uint64_t container(uint8_t fixed, uint8_t sized) {
    const uint8_t first = byte();
    if ((first & 0xF0) == fixed) return first & 0x0F;
    if (first != sized && first != sized + 1) throw std::runtime_error("metadata: a map or array was expected");
    return number(first == sized ? 2 : 4);
  }

  uint64_t number(int bytes) {
    uint64_t value = 0;
    for (; bytes > 0; --bytes) value = value << 8 | byte();
    return value;
  }

  uint8_t byte() {
    need(1);
    return *at_++;
  }

  void need(uint64_t bytes) const {
    if (bytes > static_cast<uint64_t>(end_ - at_)) throw std::runtime_error("metadata: cut short");
  }

  const uint8_t *at_, *end_;
};

Argument read_argument(Reader& reader) {
  Argument argument;
  for (uint64_t fields = reader.map_size(); fields > 0; --fields) {
    const std::string field = reader.text();
    if (field == ".offset") {
      argument.offset = reader.integer();
    } else if (field == ".size") {
      argument.size = reader.integer();
    } else if (field == ".value_kind") {
      argument.kind = reader.text();
    } else {
      reader.skip();
    }
  }
  return argument;
}

}  // namespace

std::map<std::string, std::vector<Argument>> read_metadata(const uint8_t* data, size_t bytes) {
  std::map<std::string, std::vector<Argument>> found;
  Reader reader(data, bytes);
  for (uint64_t keys = reader.map_size(); keys > 0; --keys) {
    if (reader.text() != "amdhsa.kernels") {
      reader.skip();
      continue;
    }
    for (uint64_t kernels = reader.array_size(); kernels > 0; --kernels) {
      std::string name;
      std::vector<Argument> arguments;
      for (uint64_t fields = reader.map_size(); fields > 0; --fields) {
        const std::string field = reader.text();
        if (field == ".name") {
          name = reader.text();
        } else if (field == ".args") {
          for (uint64_t count = reader.array_size(); count > 0; --count) arguments.push_back(read_argument(reader));
        } else {
          reader.skip();
        }
      }
      found[name] = arguments;
    }
  }
  return found;
}

}  // namespace amd
