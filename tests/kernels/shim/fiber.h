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

namespace shim {

#ifdef SHIM_SANITIZED
constexpr size_t STACK_BYTES = 256 << 10;  // red zones around every local
#else
constexpr size_t STACK_BYTES = 64 << 10;
#endif
constexpr size_t GUARD_BYTES = 4096;

// Go on at `to`, where another switch was left, and leave `*from` to come back to. Jumps instead of a call and a return: a
// processor foretells where a return leads from the calls before it, and threads return from the same call in turn.
inline void switch_stacks(void** from, void* to) {
  asm volatile(
      "leaq -128(%%rsp), %%rsp\n"  // a leaf function's locals may be below
      "pushq %%rbp\n"
      "leaq 1f(%%rip), %%rax\n"
      "pushq %%rax\n"
      "movq %%rsp, (%0)\n"
      "movq %1, %%rsp\n"
      "popq %%rax\n"
      "jmp *%%rax\n"
      "1:\n"
      "popq %%rbp\n"
      "leaq 128(%%rsp), %%rsp\n"
      : "+D"(from), "+S"(to)
      :
      : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "cc", "memory", "xmm0",
        "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13",
        "xmm14", "xmm15");
}

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
    // The address to go on at, and one word that aligns the stack as a call would.
    void** top = reinterpret_cast<void**>(stack + STACK_BYTES) - 2;
    top[0] = reinterpret_cast<void*>(entry);
    top[1] = nullptr;
    stack_pointer = top;
  }
};

// The host's own stack, and which part of it the sanitizer should return to.
struct Home {
  void* stack_pointer = nullptr;
  void* fake_stack = nullptr;
  const void* bottom = nullptr;
  size_t bytes = 0;
  bool left = false;  // just now, so that its bounds can be asked for
};

inline void enter(Home& home, Fiber& fiber) {
#ifdef SHIM_SANITIZED
  home.left = true;
  __sanitizer_start_switch_fiber(&home.fake_stack, fiber.stack, STACK_BYTES);
#endif
  switch_stacks(&home.stack_pointer, fiber.stack_pointer);
#ifdef SHIM_SANITIZED
  __sanitizer_finish_switch_fiber(home.fake_stack, nullptr, nullptr);
#endif
}

inline void started(Home& home, Fiber& fiber) {
#ifdef SHIM_SANITIZED
  __sanitizer_finish_switch_fiber(fiber.fake_stack, home.left ? &home.bottom : nullptr,
                                  home.left ? &home.bytes : nullptr);
  home.left = false;
#else
  (void)home, (void)fiber;
#endif
}

// From a fiber to another stack; back by way of a switch to the fiber.
inline void depart(Home& home, Fiber& fiber, void* to, const void* bottom, size_t bytes, bool for_good) {
#ifdef SHIM_SANITIZED
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber.fake_stack, bottom, bytes);
#else
  (void)bottom, (void)bytes, (void)for_good;
#endif
  switch_stacks(&fiber.stack_pointer, to);
  started(home, fiber);
}

inline void leave(Home& home, Fiber& fiber, bool for_good) {
  depart(home, fiber, home.stack_pointer, home.bottom, home.bytes, for_good);
}

inline void pass(Home& home, Fiber& fiber, Fiber& other, bool for_good) {
  depart(home, fiber, other.stack_pointer, other.stack, STACK_BYTES, for_good);
}

}  // namespace shim
