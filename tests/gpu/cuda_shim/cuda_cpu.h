// The CUDA words that the kernels use, on one CPU thread: a fiber for every CUDA thread, one block after another.
//
// A fiber runs until it has to wait, at a barrier or a shuffle; then any fiber that can run is taken, at random from a
// seed: of any warp for even seeds, of the same warp while it has one for odd seeds, which drives warps far apart. So a
// missing barrier shows as a wrong number with some seed or other. So do reads of shared memory that no one wrote: it
// starts as NaNs in every block. The launch ends with an error where no fiber can run (a barrier that not all
// threads reach), at a 16-byte access that is not aligned, and at a write just past the dynamic shared memory.
// tensor_cpu.h has tensor cores and asynchronous copies. Not here: atomics, textures, shuffles by a part of a warp.
#pragma once
#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

#define CPU_SHIM
#define __global__
#define __device__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __shared__ __attribute__((section("cuda_shared"))) static
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(cpu::block->dynamic_shared)
#define __builtin_assume_aligned(pointer, bytes) cpu::assert_aligned(pointer, bytes)
#define threadIdx (cpu::block->current->index)
#define blockIdx (cpu::block->index)
#define blockDim (cpu::block->size)
#define gridDim (cpu::block->grid)
#define CUDA_TEXT(x) #x
#define CUDA_LINE(line) CUDA_TEXT(line)
#define __syncthreads() cpu::barrier(__FILE__ ":" CUDA_LINE(__LINE__))

extern "C" __attribute__((weak, visibility("hidden"))) char __start_cuda_shared[], __stop_cuda_shared[];

namespace cpu {
enum Outcome { finished, deadlock, misaligned, overrun };
constexpr int WARP = 32;
constexpr size_t STACK = 64 << 10, MARGIN = 256;

struct Dim {
    unsigned x, y, z;
};

struct Copy {
    void* to;
    const void* from;  // null: zeros
};

// Made once, as making one takes system calls; its next block begins with a jump back to where it began.
struct Fiber {
    jmp_buf begin, resume;
    std::vector<Copy> copies;  // asynchronous ones that have not been carried out
    std::vector<char> stack = std::vector<char>(STACK);
    ucontext_t start;
    Dim index;
    unsigned number;
    bool exists = false, started;
};

struct Warp {
    std::vector<Fiber*> ready, waiting;
    alignas(16) char values[2][WARP][32];  // of this exchange and the one before: a slow lane may not have read that yet
    unsigned exchanges;
};

struct Block {
    Dim grid, size, index;
    void (*kernel)(void**);
    void** arguments;
    char* dynamic_shared;
    size_t dynamic_bytes;
    uint64_t random;
    bool stay;  // with one warp for as long as it can run
    const char* left_out;  // "/file:line" of a barrier that is none, or null
    unsigned threads;
    std::vector<Warp> warps;
    std::vector<Fiber*> at_barrier;
    Fiber* current;
    unsigned alive;
    jmp_buf scheduler;
};

// CUDA's threadIdx and its like are global by definition, so what they stand for has to be as well.
inline Block* block;

inline Fiber& fiber(size_t number) {
    static std::deque<Fiber> fibers;
    while (fibers.size() <= number) fibers.emplace_back();
    return fibers[number];
}

inline size_t random_below(uint64_t& state, size_t limit) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % limit;
}

inline Warp& warp_of(const Fiber* fiber) { return block->warps[fiber->number / WARP]; }

// The warp to run next, null if none can.
inline Warp* choose_warp() {
    auto& warps = block->warps;
    if (block->stay && block->current && !warp_of(block->current).ready.empty()) return &warp_of(block->current);
    const size_t first = random_below(block->random, warps.size());
    for (size_t i = 0; i < warps.size(); i++) {
        Warp& warp = warps[(first + i) % warps.size()];
        if (!warp.ready.empty()) return &warp;
    }
    return nullptr;
}

[[noreturn]] inline void run_next() {
    Warp* warp = choose_warp();
    if (!warp) _longjmp(block->scheduler, block->alive ? deadlock + 1 : finished + 1);
    std::swap(warp->ready[random_below(block->random, warp->ready.size())], warp->ready.back());
    Fiber* next = block->current = warp->ready.back();
    warp->ready.pop_back();
    if (next->started) _longjmp(next->resume, 1);
    next->started = true;
    if (next->exists) _longjmp(next->begin, 1);
    next->exists = true;
    setcontext(&next->start);
    __builtin_unreachable();
}

inline void release(std::vector<Fiber*>& waiting) {
    for (Fiber* fiber : waiting) warp_of(fiber).ready.push_back(fiber);
    waiting.clear();
}

// The fiber waits until `expected` of them do. noinline: no caller's value may live in a register over the jumps.
__attribute__((noinline)) inline void wait(std::vector<Fiber*>& waiting, unsigned expected) {
    waiting.push_back(block->current);
    if (waiting.size() == expected) release(waiting);
    if (_setjmp(block->current->resume) == 0) run_next();
}

inline void barrier(const char* place) {
    const bool is_left_out = block->left_out && std::strcmp(std::strrchr(place, '/'), block->left_out) == 0;
    if (!is_left_out) wait(block->at_barrier, block->alive);
}

inline void fiber_main() {
    _setjmp(block->current->begin);
    block->kernel(block->arguments);
    block->alive--;
    if (block->alive && block->at_barrier.size() == block->alive) release(block->at_barrier);
    run_next();
}

// What each lane of the warp gave to an exchange.
template <class T>
struct Lanes {
    const char (*values)[32];

    T operator[](int lane) const {
        T value;
        std::memcpy(&value, values[lane], sizeof(T));
        return value;
    }
};

template <class T>
Lanes<T> exchange(const T& value) {
    static_assert(sizeof(T) <= 32);
    Warp& warp = warp_of(block->current);
    char(*values)[32] = warp.values[warp.exchanges % 2];
    std::memcpy(values[block->current->number % WARP], &value, sizeof(T));
    if (warp.waiting.size() == WARP - 1) warp.exchanges++;
    wait(warp.waiting, WARP);
    return {values};
}

template <class T>
T shuffle(unsigned mask, T value, unsigned from) {
    if (mask != 0xffffffffu) _longjmp(block->scheduler, deadlock + 1);
    return exchange(value)[from % WARP];
}

inline void* assert_aligned(const void* pointer, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(pointer) % bytes) _longjmp(block->scheduler, misaligned + 1);
    return const_cast<void*>(pointer);  // as CUDA's
}

inline void make_context(Fiber& f) {
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = f.stack.data();
    f.start.uc_stack.ss_size = STACK;
    makecontext(&f.start, fiber_main, 0);
}

inline void prepare(Block& b) {
    b.at_barrier.clear();
    b.current = nullptr;
    b.alive = b.threads;
    for (unsigned i = 0; i < b.threads; i++) {
        Fiber& f = fiber(i);
        f.index = {i % b.size.x, i / b.size.x % b.size.y, i / (b.size.x * b.size.y)};
        f.number = i;
        f.started = false;
        f.copies.clear();
        if (!f.exists) make_context(f);
        b.warps[i / WARP].ready.push_back(&f);
    }
}

// noinline: what setjmp and the jumps back share is a frame of its own.
__attribute__((noinline)) inline Outcome run_fibers(Block& b) {
    const int outcome = _setjmp(b.scheduler);
    if (outcome == 0) run_next();
    return static_cast<Outcome>(outcome - 1);
}

inline Outcome run_block(Block& b) {
    prepare(b);
    std::memset(b.dynamic_shared, 0xff, b.dynamic_bytes + MARGIN);
    if (__start_cuda_shared) std::memset(__start_cuda_shared, 0xff, __stop_cuda_shared - __start_cuda_shared);
    if (const Outcome outcome = run_fibers(b)) return outcome;
    for (size_t i = 0; i < MARGIN; i++)
        if (b.dynamic_shared[b.dynamic_bytes + i] != '\xff') return overrun;
    return finished;
}

inline std::vector<Dim> shuffled_blocks(Block& b) {
    std::vector<Dim> order;
    for (unsigned i = 0; i < b.grid.x * b.grid.y * b.grid.z; i++)
        order.push_back({i % b.grid.x, i / b.grid.x % b.grid.y, i / (b.grid.x * b.grid.y)});
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random_below(b.random, i)]);
    return order;
}

// sizes: grid x, y, z, block x, y, z. The blocks come in an order of the seed's as well.
inline Outcome launch(const unsigned* sizes, size_t shared_bytes, uint64_t seed, const char* left_out, void** arguments,
                      void (*kernel)(void**)) {
    Block b = {};
    b.grid = {sizes[0], sizes[1], sizes[2]};
    b.size = {sizes[3], sizes[4], sizes[5]};
    b.kernel = kernel;
    b.arguments = arguments;
    b.random = seed * 0x9e3779b97f4a7c15u + 1;
    b.stay = seed % 2;
    b.left_out = left_out;
    b.threads = b.size.x * b.size.y * b.size.z;
    b.warps.resize(b.threads / WARP);
    std::vector<char> shared(shared_bytes + MARGIN + 16);
    b.dynamic_shared = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(shared.data()) + 15) / 16 * 16);
    b.dynamic_bytes = shared_bytes;
    block = &b;
    for (const Dim& index : shuffled_blocks(b)) {
        b.index = index;
        if (const Outcome outcome = run_block(b)) return outcome;
    }
    return finished;
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
}

template <class... A>
void call(void (*kernel)(A...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<A...>{});
}
}  // namespace cpu

template <class T>
T __shfl_sync(unsigned mask, T value, int lane) {
    return cpu::shuffle(mask, value, lane);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
    return cpu::shuffle(mask, value, cpu::block->current->number % cpu::WARP ^ distance);
}

using std::max, std::min;

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }

#include "tensor_cpu.h"
