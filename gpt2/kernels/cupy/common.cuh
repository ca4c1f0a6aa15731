// Shared by the kernel files: the storage type, 16-byte accesses, sums over warps and blocks.
//
// Each file is compiled once for each storage type: `real` is __nv_bfloat16 under -DBFLOAT16 and float otherwise.
// Values are widened to float32 when read and rounded (to nearest, ties to even) when written; arithmetic is float32.
// Entry points are extern "C", and shared memory is declared in them alone, so that the same source runs on a CPU
// under tests/gpu/cuda_shim.
#pragma once

#ifdef BFLOAT16
#include <cuda_bf16.h>
typedef __nv_bfloat16 real;
#else
typedef float real;
#endif

#ifndef DYNAMIC_SHARED  // the CPU shim has its own
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) type name[]
#endif

constexpr int WARP = 32;
constexpr unsigned WHOLE_WARP = 0xffffffffu;
constexpr int PACK = 16 / sizeof(real);  // elements of one 16-byte access
constexpr float LOWEST = -3.402823466e38f;  // the lowest float32, as NVRTC has no INFINITY

inline __device__ float widen(float x) { return x; }
inline __device__ void narrow(float* to, float x) { *to = x; }

#ifdef BFLOAT16
inline __device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
inline __device__ void narrow(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }
// The hardware's approximations have errors of about 2^-21, far below bfloat16's precision.
inline __device__ float exponential(float x) { return __expf(x); }
inline __device__ float quotient(float a, float b) { return __fdividef(a, b); }
#else
inline __device__ float exponential(float x) { return expf(x); }
inline __device__ float quotient(float a, float b) { return a / b; }
#endif

// W adjacent elements as in memory, moved in accesses of at most 16 bytes.
template <class T, int W>
struct alignas(W * sizeof(T) < 16 ? W * sizeof(T) : 16) Pack {
    T v[W];
};

// The same elements in float32.
template <int W>
struct Floats {
    float v[W];

    __device__ void operator+=(const Floats& other) {
        for (int k = 0; k < W; k++) v[k] += other.v[k];
    }
};

template <int W, class T>
inline __device__ Floats<W> load(const T* from) {
    typedef Pack<T, W> P;
    const P pack = *static_cast<const P*>(__builtin_assume_aligned(from, alignof(P)));
    Floats<W> values;
    for (int k = 0; k < W; k++) values.v[k] = widen(pack.v[k]);
    return values;
}

template <int W, class T>
inline __device__ void store(T* to, const Floats<W>& values) {
    typedef Pack<T, W> P;
    P pack;
    for (int k = 0; k < W; k++) narrow(&pack.v[k], values.v[k]);
    *static_cast<P*>(__builtin_assume_aligned(to, alignof(P))) = pack;
}

inline __device__ bool is_aligned(const void* pointer) { return reinterpret_cast<size_t>(pointer) % 16 == 0; }

// A loop over a grid of any size: for (i = thread_of_grid(); i < count; i += threads_of_grid()).
inline __device__ long long thread_of_grid() { return blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; }
inline __device__ long long threads_of_grid() { return gridDim.x * static_cast<long long>(blockDim.x); }

// Returns the sum over the warp, in every lane.
template <class T>
inline __device__ T warp_sum(T x) {
    for (int distance = WARP / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(WHOLE_WARP, x, distance);
    return x;
}

// Returns the sum over a one-dimensional block, in every thread. shared: WARP elements; reuse needs a barrier.
template <class T>
inline __device__ T block_sum(T x, T* shared) {
    int lane = threadIdx.x % WARP;
    x = warp_sum(x);
    if (lane == 0) shared[threadIdx.x / WARP] = x;
    __syncthreads();
    return warp_sum(lane < blockDim.x / WARP ? shared[lane] : T(0));
}
