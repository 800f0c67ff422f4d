#pragma once

#include <string>

// ATen/functorch/Interpreter.h includes this file, and torch does not install it. These are the names that its functions
// use, declared and not defined: none of those functions is called.
namespace nlohmann {
class json {
 public:
  json() = default;
  template <class T>
  explicit json(const T& value);
  template <class T>
  T get() const;
  std::string dump() const;
  static json parse(const std::string& serialized);
};
}  // namespace nlohmann
