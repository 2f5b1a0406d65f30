// The machine, compiled once and linked with every kernel's library. The sanitizers do not watch it itself: what it reads
// and writes for kernels goes through the functions memcpy and memset, whose ranges they check. -fno-builtin keeps them.
#include "machine.h"

#include "copies.h"
#include "products.h"

namespace shim {

const void* aligned(const void* address, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0) fail("%zu bytes at %p, which is not aligned", bytes, address);
  return address;
}

void poison_once(void* array, size_t bytes) {
  for (const Fixed& met : machine.now->poisoned) {
    if (met.array == array) return;
  }
  machine.now->poisoned.push_back({array, bytes, {}});
  memset(array, POISON, bytes);
}

}  // namespace shim
