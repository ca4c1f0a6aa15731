// Causal self-attention by tiles that never leave the chip (Dao 2023, FlashAttention-2), forward:
//
//     S = scale Q K^T, masked above the diagonal;  P = softmax(S);  O = P V
#include "attention.cuh"

// The maximum or the sum over the four lanes of a row.
inline __device__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, 2));
}
inline __device__ float row_sum(float x) {
    x += __shfl_xor_sync(WHOLE_WARP, x, 1);
    return x + __shfl_xor_sync(WHOLE_WARP, x, 2);
}

// Adds a tile of Q K^T to the running softmax: s becomes e^(scale (s - max)); `out` and `sum` are rescaled.
template <int M, int N, int D>
__device__ void online_softmax(Tile<M, N>& s, Tile<M, D>& out, float* max, float* sum) {
    const float scale = rsqrtf(D) * LOG2_E;
#pragma unroll
    for (int r = 0; r < M / 8; r++) {
        const int m = r / 2, half = r % 2 * 2;
        float largest = max[r];
#pragma unroll
        for (int n = 0; n < N / 8; n++) largest = fmaxf(largest, fmaxf(s.v[m][n][half], s.v[m][n][half + 1]));
        largest = row_max(largest);
        const float factor = exp2f((max[r] - largest) * scale), exponent = largest * scale;
        max[r] = largest;
        sum[r] *= factor;
#pragma unroll
        for (int n = 0; n < N / 8; n++)
            for (int i = half; i < half + 2; i++) {
                s.v[m][n][i] = exp2f(s.v[m][n][i] * scale - exponent);
                sum[r] += s.v[m][n][i];
            }
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            out.v[m][n][half] *= factor;
            out.v[m][n][half + 1] *= factor;
        }
    }
}

template <int D>
__device__ void forward(real* out, float* logsumexp, const real* qkv, int T, int H, real* queries) {
    constexpr int M = WARP_ROWS<D>;
    const int C = H * D, first = ((T - 1) / ROWS<D> - blockIdx.x) * ROWS<D>;  // the longest rows first
    const int row = first + threadIdx.x / WARP * M, stop = min(first + ROWS<D>, T);
    const real* q = qkv + static_cast<long long>(blockIdx.z) * T * 3 * C + blockIdx.y * D;
    real* buffers = queries + ROWS<D> * STRIDE<D>;
    copy_rows<D, ROWS<D>>(queries, q, 3 * C, first, T);
    copy_two<D, COLUMNS>(buffers, q + C, 3 * C, q + 2 * C, 3 * C, 0, T);
    Tile<M, D> sums = {};
    float max[M / 8], sum[M / 8] = {};
    for (float& largest : max) largest = LOWEST;
    for (int key = 0; key < stop; key += COLUMNS) {
        real* keys = buffers + key / COLUMNS % 2 * 2 * COLUMNS * STRIDE<D>;
        real* next = buffers + (key / COLUMNS + 1) % 2 * 2 * COLUMNS * STRIDE<D>;
        wait_for_copies();
        __syncthreads();  // the tile has arrived, and no thread reads the previous one
        if (key + COLUMNS < stop) copy_two<D, COLUMNS>(next, q + C, 3 * C, q + 2 * C, 3 * C, key + COLUMNS, T);
        if (key >= row + M) continue;  // no query of the warp attends to this key
        Tile<M, COLUMNS> s = {};
        multiply_transposed<D>(s, queries + (row - first) * STRIDE<D>, keys);
        mask<KEYS_ARE_COLUMNS>(s, row - key);
        online_softmax(s, sums, max, sum);
        multiply(sums, s, keys + COLUMNS * STRIDE<D>);
    }
#pragma unroll
    for (int r = 0; r < M / 8; r++) {
        const float total = row_sum(sum[r]);
        const int t = row + row_of(r);
        if (threadIdx.x % 4 == 0 && t < T)
            logsumexp[(static_cast<long long>(blockIdx.z) * H + blockIdx.y) * T + t] =
                max[r] * (rsqrtf(D) * LOG2_E) * LN_2 + logf(total);
        sum[r] = 1.0f / total;
    }
    write_rows<D>(out + static_cast<long long>(blockIdx.z) * T * C + blockIdx.y * D, C, sums, sum, row, T);
}

// out (B, T, C = H*D); logsumexp (B, H, T) float32, kept for backward; qkv (B, T, 3C).
// Launch: blocks of 128 threads, a grid (tiles of ROWS<D> queries, all or the last ones, H, B); dynamic shared memory
// of ROWS<D> and 4 COLUMNS rows of STRIDE<D> elements.
// Limits registers to fit three blocks of heads of 64 on a multiprocessor: 5% faster on an H100 than two.
extern "C" __global__ void __launch_bounds__(128, 3)
attention_forward_64(real* out, float* logsumexp, const real* qkv, int T, int H) {
    DYNAMIC_SHARED(real, shared);
    forward<64>(out, logsumexp, qkv, T, H, shared);
}

extern "C" __global__ void __launch_bounds__(128)
attention_forward_128(real* out, float* logsumexp, const real* qkv, int T, int H) {
    DYNAMIC_SHARED(real, shared);
    forward<128>(out, logsumexp, qkv, T, H, shared);
}
