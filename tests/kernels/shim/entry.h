// Makes a kernel callable from outside: SHIM_ENTRY(name) after its definition gives
//   launch_name(launch, arguments)   arguments: one pointer to each value, as for cuLaunchKernel; 0, or 1 with a
//   message signature_name()                 one letter an argument: p pointer, i int, u uint32, l int64, f float
#pragma once

#include <utility>

#include "seen.h"

namespace shim {

template <typename T>
constexpr char letter_of(T**) {
  return 'p';
}
constexpr char letter_of(int*) { return 'i'; }
constexpr char letter_of(unsigned*) { return 'u'; }
constexpr char letter_of(long long*) { return 'l'; }
constexpr char letter_of(float*) { return 'f'; }

template <typename... A>
const char* signature(void (*)(A...)) {
  static const char letters[] = {letter_of(static_cast<A*>(nullptr))..., '\0'};
  return letters;
}

template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<A*>(arguments[I])...);
}

template <typename... A>
void call(void (*kernel)(A...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<A...>());
}

}  // namespace shim

#define SHIM_EXPORT extern "C" __attribute__((visibility("default")))
#define SHIM_ENTRY(name)                                                                   \
  SHIM_EXPORT int launch_##name(shim::Launch* launch, void** arguments) {                  \
    return shim::run(*launch, [](void** values) { shim::call(name, values); }, arguments); \
  }                                                                                        \
  SHIM_EXPORT const char* signature_##name() { return shim::signature(name); }
