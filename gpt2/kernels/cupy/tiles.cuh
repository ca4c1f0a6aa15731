// A warp's products of tiles in shared memory: tensor cores in bfloat16, plain multiplications in float32.
//
// Attention needs two forms of products. Tiles in shared memory have rows of D elements, STRIDE<D> apart: one pack more
// than D, so that rows which a warp reads together are in different banks.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

template <int D>
constexpr int STRIDE = D + PACK;

constexpr int FRAGMENT_ROWS = 16;  // rows of tensor_multiply's left operand

// A warp's tile in float32, spread over the lanes like tensor_multiply's sums: v[m][n][i] is in the lane's row number
// 2 m + i/2 (see row_of), and in column column_of(n, i).
template <int ROWS, int COLUMNS>
struct Tile {
    float v[ROWS / FRAGMENT_ROWS][COLUMNS / 8][4];
};

inline __device__ int row_of(int number) { return threadIdx.x % WARP / 4 + number * 8; }
inline __device__ int column_of(int n, int i) { return n * 8 + threadIdx.x % 4 * 2 + i % 2; }

#ifdef BFLOAT16
inline __device__ unsigned two_bfloat16(float low, float high) {
    const Pack<real, 2> pack = {{__float2bfloat16_rn(low), __float2bfloat16_rn(high)}};
    return *reinterpret_cast<const unsigned*>(&pack);
}

// sums (M, N) += left (M, D) right (N, D)^T, both in shared memory.
template <int D, int M, int N>
inline __device__ void multiply_transposed(Tile<M, N>& sums, const real* left, const real* right) {
    const int lane = threadIdx.x % WARP;
    left += lane % 16 * STRIDE<D> + lane / 16 * 8;
    right += (lane / 16 * 8 + lane % 8) * STRIDE<D> + lane / 8 % 2 * 8;
#pragma unroll
    for (int d = 0; d < D; d += 16) {
        unsigned a[M / FRAGMENT_ROWS][4], b[4];
#pragma unroll
        for (int m = 0; m < M / FRAGMENT_ROWS; m++) load_matrices(a[m], left + m * FRAGMENT_ROWS * STRIDE<D> + d);
#pragma unroll
        for (int n = 0; n < N; n += 16) {
            load_matrices(b, right + n * STRIDE<D> + d);
#pragma unroll
            for (int m = 0; m < M / FRAGMENT_ROWS; m++) {
                tensor_multiply(sums.v[m][n / 8], a[m], b);
                tensor_multiply(sums.v[m][n / 8 + 1], a[m], b + 2);
            }
        }
    }
}

// sums (M, D) += left (M, N), rounded, times right (N, D) in shared memory.
template <int D, int M, int N>
inline __device__ void multiply(Tile<M, D>& sums, const Tile<M, N>& left, const real* right) {
    const int lane = threadIdx.x % WARP;
    right += lane % 16 * STRIDE<D> + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < N; n += 16) {
        unsigned a[M / FRAGMENT_ROWS][4], b[4];
#pragma unroll
        for (int m = 0; m < M / FRAGMENT_ROWS; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* pair = left.v[m][n / 8 + i / 2] + i % 2 * 2;
                a[m][i] = two_bfloat16(pair[0], pair[1]);
            }
#pragma unroll
        for (int d = 0; d < D; d += 16) {
            load_matrices_transposed(b, right + n * STRIDE<D> + d);
#pragma unroll
            for (int m = 0; m < M / FRAGMENT_ROWS; m++) {
                tensor_multiply(sums.v[m][d / 8], a[m], b);
                tensor_multiply(sums.v[m][d / 8 + 1], a[m], b + 2);
            }
        }
    }
}
#else
// The same with plain multiplications, for tiles with the rows of one fragment.
template <int D, int N>
inline __device__ void multiply_transposed(Tile<FRAGMENT_ROWS, N>& sums, const real* left, const real* right) {
    left += row_of(0) * STRIDE<D>;
    right += column_of(0, 0) * STRIDE<D>;
#pragma unroll 1
    for (int d = 0; d < D; d += PACK) {
        const Floats<PACK> a[2] = {load<PACK>(left + d), load<PACK>(left + 8 * STRIDE<D> + d)};
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int column = 0; column < 2; column++) {
                const Floats<PACK> b = load<PACK>(right + (n * 8 + column) * STRIDE<D> + d);
                for (int k = 0; k < PACK; k++) {
                    sums.v[0][n][column] += a[0].v[k] * b.v[k];
                    sums.v[0][n][2 + column] += a[1].v[k] * b.v[k];
                }
            }
    }
}

template <int D, int N>
inline __device__ void multiply(Tile<FRAGMENT_ROWS, D>& sums, const Tile<FRAGMENT_ROWS, N>& left, const real* right) {
    const int lane = threadIdx.x % WARP;
    right += column_of(0, 0);
#pragma unroll
    for (int n = 0; n < N; n++) {  // column n of `left` lies in lane n%8/2 of each four
        const float a0 = __shfl_sync(WHOLE_WARP, left.v[0][n / 8][n % 2], lane / 4 * 4 + n % 8 / 2);
        const float a1 = __shfl_sync(WHOLE_WARP, left.v[0][n / 8][2 + n % 2], lane / 4 * 4 + n % 8 / 2);
#pragma unroll
        for (int d = 0; d < D; d += 8) {
            const Floats<2> b = load<2>(right + n * STRIDE<D> + d);
            for (int column = 0; column < 2; column++) {
                sums.v[0][d / 8][column] += a0 * b.v[column];
                sums.v[0][d / 8][2 + column] += a1 * b.v[column];
            }
        }
    }
}
#endif
