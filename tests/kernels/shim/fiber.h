// Fibers: functions with stacks of their own on one thread of the host, switched by hand. Knows nothing of CUDA.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>

#if !defined(__x86_64__) || !defined(__linux__)
#error "the kernel tests switch stacks by hand, for Linux on x86-64 only"
#endif
#ifdef SHIM_SANITIZED
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

extern "C" void shim_switch(void** save_stack_pointer, void* stack_pointer);

// What a call must preserve is pushed on the old stack and popped from the new one (System V ABI).
asm(R"(
.text
.p2align 4
.type shim_switch, @function
shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size shim_switch, . - shim_switch
)");

namespace shim {

#ifdef SHIM_SANITIZED
constexpr size_t STACK_BYTES = 256 << 10;  // red zones around every local
#else
constexpr size_t STACK_BYTES = 64 << 10;
#endif
constexpr size_t GUARD_BYTES = 4096;

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;  // STACK_BYTES, above a page that faults
  void* fake_stack = nullptr;
  bool ended = true;  // by its own return: the sanitizer knows nothing more of its stack

  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() {
    if (stack != nullptr) munmap(stack - GUARD_BYTES, GUARD_BYTES + STACK_BYTES);
  }

  // The next switch to it calls `entry`, which must never return.
  void prepare(void (*entry)()) {
    if (stack == nullptr) {
      const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
      void* got = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
      if (got == MAP_FAILED || mprotect(got, GUARD_BYTES, PROT_NONE) != 0) abort();
      stack = static_cast<char*>(got) + GUARD_BYTES;
      ended = false;  // others may have had these addresses
    }
#ifdef SHIM_SANITIZED
    if (!ended) __asan_unpoison_memory_region(stack, STACK_BYTES);  // an earlier use was abandoned
    fake_stack = nullptr;
#endif
    ended = false;
    // Six registers, the address to "return" to, and one word that aligns the stack as a call would.
    void** top = reinterpret_cast<void**>(stack + STACK_BYTES) - 2;
    top[0] = reinterpret_cast<void*>(entry);
    top[1] = nullptr;
    stack_pointer = top - 6;
  }
};

// The host's own stack, and which part of it the sanitizer should return to.
struct Home {
  void* stack_pointer = nullptr;
  void* fake_stack = nullptr;
  const void* bottom = nullptr;
  size_t bytes = 0;
};

inline void enter(Home& home, Fiber& fiber) {
#ifdef SHIM_SANITIZED
  __sanitizer_start_switch_fiber(&home.fake_stack, fiber.stack, STACK_BYTES);
#endif
  shim_switch(&home.stack_pointer, fiber.stack_pointer);
#ifdef SHIM_SANITIZED
  __sanitizer_finish_switch_fiber(home.fake_stack, nullptr, nullptr);
#endif
}

inline void started(Home& home, Fiber& fiber) {
#ifdef SHIM_SANITIZED
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &home.bottom, &home.bytes);
#else
  (void)home, (void)fiber;
#endif
}

inline void leave(Home& home, Fiber& fiber, bool for_good) {
#ifdef SHIM_SANITIZED
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber.fake_stack, home.bottom, home.bytes);
#else
  (void)for_good;
#endif
  shim_switch(&fiber.stack_pointer, home.stack_pointer);
  started(home, fiber);
}

}  // namespace shim
