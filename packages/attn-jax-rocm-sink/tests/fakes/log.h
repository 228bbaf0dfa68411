// What a recording fake was given, as text that Python takes: a line a call, "name=value" pieces.
#pragma once

#include <sstream>
#include <string>

namespace fakes {

inline std::string& log_text() {
  static std::string text;
  return text;
}

class Line {
 public:
  explicit Line(const char* name) { text_ << name; }
  ~Line() { log_text() += text_.str() + "\n"; }
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;

  template <typename T>
  Line& operator()(const char* name, T value) {
    text_ << ' ' << name << '=' << value;
    return *this;
  }

 private:
  std::ostringstream text_;
};

}  // namespace fakes
