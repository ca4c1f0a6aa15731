// Causal self-attention by tiles that never leave the chip (Dao 2023, FlashAttention-2), backward:
//
//     dV = P^T dO;  dP = dO V^T;  dS = P (dP - delta), delta = rowsum(dO O);  dQ = scale dS K;  dK = scale dS^T Q
//
// Backward is two kernels, one over the queries for dQ and one over the keys for dK and dV. Both recompute P: seven
// products instead of five with atomic additions to dQ, but always in the same order of additions.
#include "attention.cuh"

// deltas[b, h, t] = sum over the head's D elements of dout * out, both (B, T, H, D); deltas (B, H, T) float32.
// Launch: blocks of 256 threads, a one-dimensional grid, a thread for every PACK elements: a row lies in one warp.
extern "C" __global__ void __launch_bounds__(256)
attention_deltas(float* deltas, const real* dout, const real* out, int rows, int T, int H, int D) {
    const long long i = thread_of_grid();
    const int packs = D / PACK, row = i / packs;
    float sum = 0.0f;
    if (row < rows) {
        const Floats<PACK> x = load<PACK>(dout + i * PACK), y = load<PACK>(out + i * PACK);
        for (int k = 0; k < PACK; k++) sum += x.v[k] * y.v[k];
    }
    for (int distance = packs / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(WHOLE_WARP, sum, distance);
    const int h = row % H, t = row / H % T, b = row / H / T;
    if (row < rows && i % packs == 0) deltas[(static_cast<long long>(b) * H + h) * T + t] = sum;
}

template <int D>
__device__ void backward_queries(real* dqkv, const real* dout, const real* qkv, const float* logsumexp,
                                 const float* deltas, int T, int H, real* queries) {
    constexpr int M = WARP_ROWS<D>;
    const int C = H * D, first = (gridDim.x - 1 - blockIdx.x) * ROWS<D>;
    const int row = first + threadIdx.x / WARP * M, stop = min(first + ROWS<D>, T);
    const long long sequence = static_cast<long long>(blockIdx.z) * T;
    const real *q = qkv + sequence * 3 * C + blockIdx.y * D, *dy = dout + sequence * C + blockIdx.y * D;
    real* buffers = queries + 2 * ROWS<D> * STRIDE<D>;
    copy_two<D, ROWS<D>>(queries, q, 3 * C, dy, C, first, T);
    copy_two<D, COLUMNS>(buffers, q + C, 3 * C, q + 2 * C, 3 * C, 0, T);
    float exponents[M / 8], row_deltas[M / 8], scales[M / 8];
    for (int r = 0; r < M / 8; r++) {
        const int t = row + row_of(r);
        const long long at = (static_cast<long long>(blockIdx.z) * H + blockIdx.y) * T + t;
        exponents[r] = t < T ? logsumexp[at] * LOG2_E : 0.0f;
        row_deltas[r] = t < T ? deltas[at] : 0.0f;
        scales[r] = rsqrtf(D);
    }
    Tile<M, D> dq = {};
    const real *my_queries = queries + (row - first) * STRIDE<D>, *my_dout = my_queries + ROWS<D> * STRIDE<D>;
    for (int key = 0; key < stop; key += COLUMNS) {
        real* keys = buffers + key / COLUMNS % 2 * 2 * COLUMNS * STRIDE<D>;
        real* next = buffers + (key / COLUMNS + 1) % 2 * 2 * COLUMNS * STRIDE<D>;
        wait_for_copies();
        __syncthreads();
        if (key + COLUMNS < stop) copy_two<D, COLUMNS>(next, q + C, 3 * C, q + 2 * C, 3 * C, key + COLUMNS, T);
        if (key >= row + M) continue;
        Tile<M, COLUMNS> s = {}, ds = {};
        multiply_transposed<D>(s, my_queries, keys);
        multiply_transposed<D>(ds, my_dout, keys + COLUMNS * STRIDE<D>);
        mask<KEYS_ARE_COLUMNS>(s, row - key);
        const float scale = rsqrtf(D) * LOG2_E;
#pragma unroll
        for (int r = 0; r < M / 8; r++)
#pragma unroll
            for (int n = 0; n < COLUMNS / 8; n++)
                for (int i = r % 2 * 2; i < r % 2 * 2 + 2; i++) {
                    const float p = exp2f(s.v[r / 2][n][i] * scale - exponents[r]);
                    ds.v[r / 2][n][i] = p * (ds.v[r / 2][n][i] - row_deltas[r]);
                }
        multiply(dq, ds, keys);
    }
    write_rows<D>(dqkv + sequence * 3 * C + blockIdx.y * D, 3 * C, dq, scales, row, T);
}

// The queries' part of dqkv (B, T, 3C), from dout (B, T, C), qkv, logsumexp and deltas (B, H, T).
// Launch: as in forward, but with dynamic shared memory of 2 ROWS<D> and 4 COLUMNS rows.
extern "C" __global__ void __launch_bounds__(128)
attention_backward_queries_64(real* dqkv, const real* dout, const real* qkv, const float* logsumexp,
                              const float* deltas, int T, int H) {
    DYNAMIC_SHARED(real, shared);
    backward_queries<64>(dqkv, dout, qkv, logsumexp, deltas, T, H, shared);
}

extern "C" __global__ void __launch_bounds__(128)
attention_backward_queries_128(real* dqkv, const real* dout, const real* qkv, const float* logsumexp,
                               const float* deltas, int T, int H) {
    DYNAMIC_SHARED(real, shared);
    backward_queries<128>(dqkv, dout, qkv, logsumexp, deltas, T, H, shared);
}

// Copies exponents and deltas of N queries to shared memory (2, N).
template <int N>
__device__ void copy_statistics(float* shared, const float* logsumexp, const float* deltas, int first, int T) {
    static_assert(2 * N <= THREADS, "a thread for each");
    const int i = threadIdx.x, t = first + i % N;
    if (i < 2 * N) shared[i] = t >= T ? 0.0f : i < N ? logsumexp[t] * LOG2_E : deltas[t];
}

// Queries beyond T are zeros, and so are their exponents and deltas: they add nothing.
template <int D>
__device__ void backward_keys(real* dqkv, const real* dout, const real* qkv, const float* logsumexp,
                              const float* deltas, int T, int H, real* keys, float* statistics) {
    constexpr int M = WARP_ROWS<D>, N = QUERIES<D>;
    const int C = H * D, first = blockIdx.x * ROWS<D>, row = first + threadIdx.x / WARP * M;
    const long long sequence = static_cast<long long>(blockIdx.z) * T;
    const real *q = qkv + sequence * 3 * C + blockIdx.y * D, *dy = dout + sequence * C + blockIdx.y * D;
    logsumexp += (static_cast<long long>(blockIdx.z) * H + blockIdx.y) * T;
    deltas += (static_cast<long long>(blockIdx.z) * H + blockIdx.y) * T;
    real* buffers = keys + 2 * ROWS<D> * STRIDE<D>;
    copy_two<D, ROWS<D>>(keys, q + C, 3 * C, q + 2 * C, 3 * C, first, T);
    copy_two<D, N>(buffers, q, 3 * C, dy, C, first, T);
    copy_statistics<N>(statistics, logsumexp, deltas, first, T);
    Tile<M, D> dk = {}, dv = {};
    const real *my_keys = keys + (row - first) * STRIDE<D>, *my_values = my_keys + ROWS<D> * STRIDE<D>;
    for (int query = first; query < T; query += N) {
        const int buffer = (query - first) / N % 2;
        const real* queries = buffers + buffer * 2 * N * STRIDE<D>;
        const float *exponents = statistics + buffer * 2 * N, *tile_deltas = exponents + N;
        wait_for_copies();
        __syncthreads();
        if (query + N < T) {
            copy_two<D, N>(buffers + (1 - buffer) * 2 * N * STRIDE<D>, q, 3 * C, dy, C, query + N, T);
            copy_statistics<N>(statistics + (1 - buffer) * 2 * N, logsumexp, deltas, query + N, T);
        }
        if (query + N <= row) continue;  // all of the warp's keys come later
        Tile<M, N> p = {}, ds = {};
        multiply_transposed<D>(p, my_keys, queries);
        multiply_transposed<D>(ds, my_values, queries + N * STRIDE<D>);
        mask<KEYS_ARE_ROWS>(p, query - row);
        const float scale = rsqrtf(D) * LOG2_E;
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
            for (int column = 0; column < 2; column++) {
                const float exponent = exponents[column_of(n, column)], delta = tile_deltas[column_of(n, column)];
                for (int r = 0; r < M / 8; r++) {
                    const int i = r % 2 * 2 + column;
                    p.v[r / 2][n][i] = exp2f(p.v[r / 2][n][i] * scale - exponent);
                    ds.v[r / 2][n][i] = p.v[r / 2][n][i] * (ds.v[r / 2][n][i] - delta);
                }
            }
        multiply(dv, p, queries + N * STRIDE<D>);
        multiply(dk, ds, queries);
    }
    float scales[M / 8], ones[M / 8];
    for (int r = 0; r < M / 8; r++) scales[r] = rsqrtf(D), ones[r] = 1.0f;
    real* dkeys = dqkv + sequence * 3 * C + C + blockIdx.y * D;
    write_rows<D>(dkeys, 3 * C, dk, scales, row, T);
    write_rows<D>(dkeys + C, 3 * C, dv, ones, row, T);
}

// The keys' and values' parts of dqkv. Launch: a grid (tiles of ROWS<D> keys, H, B); dynamic shared memory of 2 ROWS<D>
// and 4 QUERIES<D> rows.
extern "C" __global__ void __launch_bounds__(128)
attention_backward_keys_64(real* dqkv, const real* dout, const real* qkv, const float* logsumexp, const float* deltas,
                           int T, int H) {
    DYNAMIC_SHARED(real, shared);
    __shared__ float statistics[4 * QUERIES<64>];
    backward_keys<64>(dqkv, dout, qkv, logsumexp, deltas, T, H, shared, statistics);
}

extern "C" __global__ void __launch_bounds__(128)
attention_backward_keys_128(real* dqkv, const real* dout, const real* qkv, const float* logsumexp,
                            const float* deltas, int T, int H) {
    DYNAMIC_SHARED(real, shared);
    __shared__ float statistics[4 * QUERIES<128>];
    backward_keys<128>(dqkv, dout, qkv, logsumexp, deltas, T, H, shared, statistics);
}
