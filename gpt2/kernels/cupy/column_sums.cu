// Column sums of a matrix, for bias gradients: in two phases without atomics, always in the same order.
#include "common.cuh"

constexpr int ROWS_AT_ONCE = 8;

template <int W>
__device__ void sum_rows(float* partial_sums, const real* rows, int N, int width, float* shared) {
    const int c = (blockIdx.x * WARP + threadIdx.x) * W;
    Floats<W> sum = {};
    for (int n = blockIdx.y * ROWS_AT_ONCE + threadIdx.y; c < width && n < N; n += gridDim.y * ROWS_AT_ONCE)
        sum += load<W>(rows + static_cast<long long>(n) * width + c);
    store<W>(shared + (threadIdx.y * WARP + threadIdx.x) * W, sum);
    __syncthreads();
    if (threadIdx.y > 0 || c >= width) return;
    for (int y = 1; y < ROWS_AT_ONCE; y++) sum += load<W>(shared + (y * WARP + threadIdx.x) * W);
    store<W>(partial_sums + static_cast<long long>(blockIdx.y) * width + c, sum);
}

// First phase: partial_sums[block row] = the sums over the block row's part of rows (N, width).
// partial_sums (block rows, width) float32.
// Launch: blocks of (WARP, ROWS_AT_ONCE) threads, a grid (chunks, block rows). The number of block rows affects
// rounding. A chunk is WARP packs, or WARP columns if the width is not a multiple of PACK.
extern "C" __global__ void __launch_bounds__(256)
column_sums(float* partial_sums, const real* rows, int N, int width) {
    __shared__ __align__(16) float shared[ROWS_AT_ONCE * WARP * PACK];
    if (width % PACK == 0) sum_rows<PACK>(partial_sums, rows, N, width, shared);
    else sum_rows<1>(partial_sums, rows, N, width, shared);
}

// Second phase: sums = or += the sums of partial_sums (blocks, width) over the blocks, rounded once.  sums (width,).
// Launch: blocks of (WARP, ROWS_AT_ONCE) threads, a block for every WARP columns.
extern "C" __global__ void __launch_bounds__(256)
sum_of_column_sums(real* sums, const float* partial_sums, int blocks, int width, int accumulate) {
    __shared__ float shared[ROWS_AT_ONCE][WARP];
    const int c = blockIdx.x * WARP + threadIdx.x;
    float sum = 0.0f;
    for (int block = threadIdx.y; c < width && block < blocks; block += ROWS_AT_ONCE)
        sum += partial_sums[static_cast<long long>(block) * width + c];
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || c >= width) return;
    sum = accumulate ? widen(sums[c]) : 0.0f;
    for (int y = 0; y < ROWS_AT_ONCE; y++) sum += shared[y][threadIdx.x];
    narrow(sums + c, sum);
}
