// Causal self-attention by tiles that never leave the chip (Dao 2023, FlashAttention-2), forward and backward.
//
//     S = scale Q K^T, masked above the diagonal;  P = softmax(S);  O = P V
//     dV = P^T dO;  dP = dO V^T;  dS = P (dP - delta), delta = rowsum(dO O);  dQ = scale dS K;  dK = scale dS^T Q
//
// Backward is two kernels, one over the queries for dQ and one over the keys for dK and dV, which both make P again: two
// products in seven more than one kernel with atomic additions to dQ, and always the same order of additions.
// A block has WARPS tiles of 16 rows, which stay, and goes along tiles of COLUMNS of the other side; the next tile is
// copied while this one is worked on.
#include "tiles.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP, ROWS = WARPS * TILE_ROWS;
constexpr int COLUMNS = sizeof(real) == 2 ? 64 : 32;
constexpr float LOG2_E = 1.4426950409f, LN_2 = 0.6931471806f;  // exponentials are powers of 2: one instruction

// Rows [first, first + COUNT) of a head to shared memory; zeros for rows that are not there.
template <int D, int COUNT>
__device__ void copy_rows(real* shared, const real* rows, int row_stride, int first, int T) {
    constexpr int PACKS = D / PACK;
    for (int i = threadIdx.x; i < COUNT * PACKS; i += THREADS) {
        const int row = i / PACKS, d = i % PACKS * PACK;
        const bool there = first + row < T;
        const long long at = static_cast<long long>(there ? first + row : 0) * row_stride + d;
        copy_async(shared + row * STRIDE<D> + d, rows + at, there);
    }
}

// Rows of two arrays, one tile after the other: keys and values, or queries and dO.
template <int D, int COUNT>
__device__ void copy_two(real* shared, const real* one, int one_stride, const real* two, int two_stride, int first,
                         int T) {
    copy_rows<D, COUNT>(shared, one, one_stride, first, T);
    copy_rows<D, COUNT>(shared + COUNT * STRIDE<D>, two, two_stride, first, T);
}

// The warp's tile, times factors of its two rows, to rows [first, ...) of a head.
template <int D>
__device__ void write_rows(real* rows, int row_stride, const Tile<D>& tile, const float* factors, int first, int T) {
    for (int half = 0; half < 2; half++) {
        const int row = first + row_of(2 * half);
        if (row >= T) continue;
        real* to = rows + static_cast<long long>(row) * row_stride;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            const float* v = tile.v[n] + 2 * half;
            store<2>(to + column_of(n, 0), Floats<2>{{v[0] * factors[half], v[1] * factors[half]}});
        }
    }
}

// The largest, or the sum, of what the four lanes of a row have.
inline __device__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(WHOLE_WARP, x, 2));
}
inline __device__ float row_sum(float x) {
    x += __shfl_xor_sync(WHOLE_WARP, x, 1);
    return x + __shfl_xor_sync(WHOLE_WARP, x, 2);
}

// One tile of S (as exponents of 2) into the running softmax: s becomes 2^(s - max), `out` and `sum` are scaled for it.
template <int D>
__device__ void online_softmax(Tile<COLUMNS>& s, Tile<D>& out, float* max, float* sum) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float largest = max[half];
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
            largest = fmaxf(largest, fmaxf(s.v[n][2 * half], s.v[n][2 * half + 1]));
        largest = row_max(largest);
        const float factor = exp2f(max[half] - largest);
        max[half] = largest;
        sum[half] *= factor;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
            for (int i = 2 * half; i < 2 * half + 2; i++) {
                s.v[n][i] = exp2f(s.v[n][i] - largest);
                sum[half] += s.v[n][i];
            }
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            out.v[n][2 * half] *= factor;
            out.v[n][2 * half + 1] *= factor;
        }
    }
}

template <int D>
__device__ void forward(real* out, float* logsumexp, const real* qkv, int T, int H, real* queries) {
    const int C = H * D, first = (gridDim.x - 1 - blockIdx.x) * ROWS;  // the longest rows first
    const int row = first + threadIdx.x / WARP * TILE_ROWS, stop = min(first + ROWS, T);
    const real* q = qkv + static_cast<long long>(blockIdx.z) * T * 3 * C + blockIdx.y * D;
    real* buffers = queries + ROWS * STRIDE<D>;
    copy_rows<D, ROWS>(queries, q, 3 * C, first, T);
    copy_two<D, COLUMNS>(buffers, q + C, 3 * C, q + 2 * C, 3 * C, 0, T);
    Tile<D> sums = {};
    float max[2] = {LOWEST, LOWEST}, sum[2] = {};
    for (int key = 0; key < stop; key += COLUMNS) {
        real* keys = buffers + key / COLUMNS % 2 * 2 * COLUMNS * STRIDE<D>;
        real* next = buffers + (key / COLUMNS + 1) % 2 * 2 * COLUMNS * STRIDE<D>;
        wait_for_copies();
        __syncthreads();  // the tile is there, and no one reads the one before any more
        if (key + COLUMNS < stop) copy_two<D, COLUMNS>(next, q + C, 3 * C, q + 2 * C, 3 * C, key + COLUMNS, T);
        Tile<COLUMNS> s = {};
        multiply_transposed<D>(s, queries + (row - first) * STRIDE<D>, keys);
        const float scale = rsqrtf(D) * LOG2_E;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
            for (int i = 0; i < 4; i++)
                s.v[n][i] = key + column_of(n, i) <= row + row_of(i) ? s.v[n][i] * scale : LOWEST;
        online_softmax(s, sums, max, sum);
        multiply(sums, s, keys + COLUMNS * STRIDE<D>);
    }
    for (int half = 0; half < 2; half++) {
        const float total = row_sum(sum[half]);
        const int t = row + row_of(2 * half);
        if (threadIdx.x % 4 == 0 && t < T)
            logsumexp[(static_cast<long long>(blockIdx.z) * H + blockIdx.y) * T + t] = max[half] * LN_2 + logf(total);
        sum[half] = 1.0f / total;
    }
    write_rows(out + static_cast<long long>(blockIdx.z) * T * C + blockIdx.y * D, C, sums, sum, row, T);
}

// out (B, T, C = H*D); logsumexp (B, H, T) float32, kept for backward; qkv (B, T, 3C).
// Launch: blocks of 128 threads, a grid (tiles of 64 queries, H, B); dynamic shared memory of 64 and 4 COLUMNS rows of
// STRIDE<D> elements.
extern "C" __global__ void __launch_bounds__(128)
attention_forward_64(real* out, float* logsumexp, const real* qkv, int T, int H) {
    DYNAMIC_SHARED(real, shared);
    forward<64>(out, logsumexp, qkv, T, H, shared);
}

extern "C" __global__ void __launch_bounds__(128)
attention_forward_128(real* out, float* logsumexp, const real* qkv, int T, int H) {
    DYNAMIC_SHARED(real, shared);
    forward<128>(out, logsumexp, qkv, T, H, shared);
}

// deltas[b, h, t] = sum over the head's D elements of dout * out, both (B, T, H, D); deltas (B, H, T) float32.
// Launch: blocks of 256 threads, a one-dimensional grid, a warp for every one of the B*T*H rows.
extern "C" __global__ void __launch_bounds__(256)
attention_deltas(float* deltas, const real* dout, const real* out, int rows, int T, int H, int D) {
    const int row = (blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    if (row >= rows) return;  // whole warps
    float sum = 0.0f;
    for (int d = threadIdx.x % WARP * 2; d < D; d += WARP * 2) {
        const long long at = static_cast<long long>(row) * D + d;
        const Floats<2> x = load<2>(dout + at), y = load<2>(out + at);
        sum += x.v[0] * y.v[0] + x.v[1] * y.v[1];
    }
    sum = warp_sum(sum);
    const int h = row % H, t = row / H % T, b = row / H / T;
    if (threadIdx.x % WARP == 0) deltas[(static_cast<long long>(b) * H + h) * T + t] = sum;
}

template <int D>
__device__ void backward_queries(real* dqkv, const real* dout, const real* qkv, const float* logsumexp,
                                 const float* deltas, int T, int H, real* queries) {
    const int C = H * D, first = (gridDim.x - 1 - blockIdx.x) * ROWS;
    const int row = first + threadIdx.x / WARP * TILE_ROWS, stop = min(first + ROWS, T);
    const long long sequence = static_cast<long long>(blockIdx.z) * T;
    const real *q = qkv + sequence * 3 * C + blockIdx.y * D, *dy = dout + sequence * C + blockIdx.y * D;
    real* buffers = queries + 2 * ROWS * STRIDE<D>;
    copy_two<D, ROWS>(queries, q, 3 * C, dy, C, first, T);
    copy_two<D, COLUMNS>(buffers, q + C, 3 * C, q + 2 * C, 3 * C, 0, T);
    float exponent[2], delta[2];
    for (int half = 0; half < 2; half++) {
        const int t = row + row_of(2 * half);
        const long long at = (static_cast<long long>(blockIdx.z) * H + blockIdx.y) * T + t;
        exponent[half] = t < T ? logsumexp[at] * LOG2_E : 0.0f;
        delta[half] = t < T ? deltas[at] : 0.0f;
    }
    Tile<D> dq = {};
    const real *my_queries = queries + (row - first) * STRIDE<D>, *my_dout = my_queries + ROWS * STRIDE<D>;
    for (int key = 0; key < stop; key += COLUMNS) {
        real* keys = buffers + key / COLUMNS % 2 * 2 * COLUMNS * STRIDE<D>;
        real* next = buffers + (key / COLUMNS + 1) % 2 * 2 * COLUMNS * STRIDE<D>;
        wait_for_copies();
        __syncthreads();
        if (key + COLUMNS < stop) copy_two<D, COLUMNS>(next, q + C, 3 * C, q + 2 * C, 3 * C, key + COLUMNS, T);
        Tile<COLUMNS> s = {}, ds = {};
        multiply_transposed<D>(s, my_queries, keys);
        multiply_transposed<D>(ds, my_dout, keys + COLUMNS * STRIDE<D>);
        const float scale = rsqrtf(D) * LOG2_E;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
            for (int i = 0; i < 4; i++) {
                const bool visible = key + column_of(n, i) <= row + row_of(i);
                const float p = visible ? exp2f(s.v[n][i] * scale - exponent[i / 2]) : 0.0f;
                ds.v[n][i] = p * (ds.v[n][i] - delta[i / 2]);
            }
        multiply(dq, ds, keys);
    }
    const float scales[2] = {rsqrtf(D), rsqrtf(D)};
    write_rows(dqkv + sequence * 3 * C + blockIdx.y * D, 3 * C, dq, scales, row, T);
}

// The queries' part of dqkv (B, T, 3C), from dout (B, T, C), qkv, logsumexp and deltas (B, H, T).
// Launch: as forward's, with dynamic shared memory of 128 and 4 COLUMNS rows.
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

// What backward needs to know of a tile of queries, to shared memory (2, COLUMNS): exponents and deltas.
inline __device__ void copy_statistics(float* shared, const float* logsumexp, const float* deltas, int first, int T) {
    for (int i = threadIdx.x; i < 2 * COLUMNS; i += THREADS) {
        const int t = first + i % COLUMNS;
        shared[i] = t >= T ? 0.0f : i < COLUMNS ? logsumexp[t] * LOG2_E : deltas[t];
    }
}

// Queries beyond T are zeros with zero statistics: they add nothing.
template <int D>
__device__ void backward_keys(real* dqkv, const real* dout, const real* qkv, const float* logsumexp,
                              const float* deltas, int T, int H, real* keys, float* statistics) {
    const int C = H * D, first = blockIdx.x * ROWS, row = first + threadIdx.x / WARP * TILE_ROWS;
    const long long sequence = static_cast<long long>(blockIdx.z) * T;
    const real *q = qkv + sequence * 3 * C + blockIdx.y * D, *dy = dout + sequence * C + blockIdx.y * D;
    logsumexp += (static_cast<long long>(blockIdx.z) * H + blockIdx.y) * T;
    deltas += (static_cast<long long>(blockIdx.z) * H + blockIdx.y) * T;
    real* buffers = keys + 2 * ROWS * STRIDE<D>;
    copy_two<D, ROWS>(keys, q + C, 3 * C, q + 2 * C, 3 * C, first, T);
    copy_two<D, COLUMNS>(buffers, q, 3 * C, dy, C, first, T);
    copy_statistics(statistics, logsumexp, deltas, first, T);
    Tile<D> dk = {}, dv = {};
    const real *my_keys = keys + (row - first) * STRIDE<D>, *my_values = my_keys + ROWS * STRIDE<D>;
    for (int query = first; query < T; query += COLUMNS) {
        const int buffer = (query - first) / COLUMNS % 2;
        const real* queries = buffers + buffer * 2 * COLUMNS * STRIDE<D>;
        const float *exponents = statistics + buffer * 2 * COLUMNS, *tile_deltas = exponents + COLUMNS;
        wait_for_copies();
        __syncthreads();
        if (query + COLUMNS < T) {
            copy_two<D, COLUMNS>(buffers + (1 - buffer) * 2 * COLUMNS * STRIDE<D>, q, 3 * C, dy, C, query + COLUMNS, T);
            copy_statistics(statistics + (1 - buffer) * 2 * COLUMNS, logsumexp, deltas, query + COLUMNS, T);
        }
        Tile<COLUMNS> p = {}, ds = {};
        multiply_transposed<D>(p, my_keys, queries);
        multiply_transposed<D>(ds, my_values, queries + COLUMNS * STRIDE<D>);
        const float scale = rsqrtf(D) * LOG2_E;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
            for (int i = 0; i < 4; i++) {
                const int column = column_of(n, i);
                const bool visible = row + row_of(i) <= query + column;
                p.v[n][i] = visible ? exp2f(p.v[n][i] * scale - exponents[column]) : 0.0f;
                ds.v[n][i] = p.v[n][i] * (ds.v[n][i] - tile_deltas[column]);
            }
        multiply(dv, p, queries + COLUMNS * STRIDE<D>);
        multiply(dk, ds, queries);
    }
    const float scales[2] = {rsqrtf(D), rsqrtf(D)}, ones[2] = {1.0f, 1.0f};
    real* dkeys = dqkv + sequence * 3 * C + C + blockIdx.y * D;
    write_rows(dkeys, 3 * C, dk, scales, row, T);
    write_rows(dkeys + C, 3 * C, dv, ones, row, T);
}

// The keys' and values' parts of dqkv. Launch: a grid (tiles of 64 keys, H, B); dynamic shared memory as for the queries.
extern "C" __global__ void __launch_bounds__(128)
attention_backward_keys_64(real* dqkv, const real* dout, const real* qkv, const float* logsumexp, const float* deltas,
                           int T, int H) {
    DYNAMIC_SHARED(real, shared);
    __shared__ float statistics[4 * COLUMNS];
    backward_keys<64>(dqkv, dout, qkv, logsumexp, deltas, T, H, shared, statistics);
}

extern "C" __global__ void __launch_bounds__(128)
attention_backward_keys_128(real* dqkv, const real* dout, const real* qkv, const float* logsumexp,
                            const float* deltas, int T, int H) {
    DYNAMIC_SHARED(real, shared);
    __shared__ float statistics[4 * COLUMNS];
    backward_keys<128>(dqkv, dout, qkv, logsumexp, deltas, T, H, shared, statistics);
}
