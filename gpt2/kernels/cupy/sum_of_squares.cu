// The sum of squares for gradient clipping, in two phases: the same order of additions for the same grid.
#include "common.cuh"

template <int W>
__device__ float add_squares(float sum, const real* flat, long long start, long long stop) {
    for (long long i = start + thread_of_grid() * W; i < stop; i += threads_of_grid() * W) {
        const Floats<W> x = load<W>(flat + i);
        for (int k = 0; k < W; k++) sum += x.v[k] * x.v[k];
    }
    return sum;
}

// partial_sums[block] = the sum of squares of the block's part of flat (count,).  partial_sums (blocks,) float32.
// Launch: any one-dimensional grid of whole warps; its size affects rounding.
extern "C" __global__ void __launch_bounds__(256)
sum_of_squares(float* partial_sums, const real* flat, long long count) {
    __shared__ float shared[WARP];
    const long long packed = is_aligned(flat) ? count / PACK * PACK : 0;
    float sum = add_squares<PACK>(0.0f, flat, 0, packed);
    sum = block_sum(add_squares<1>(sum, flat, packed, count), shared);
    if (threadIdx.x == 0) partial_sums[blockIdx.x] = sum;
}

// total[0] = the sum of partial_sums (blocks,), in float64.  total (1,) float64.
// Launch: one block of whole warps.
extern "C" __global__ void __launch_bounds__(256)
sum_of_partials(double* total, const float* partial_sums, int blocks) {
    __shared__ double shared[WARP];
    double sum = 0.0;
    for (int i = threadIdx.x; i < blocks; i += blockDim.x) sum += partial_sums[i];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) *total = sum;
}
