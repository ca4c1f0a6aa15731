// LayerNorm over the channels (Ba, Kiros, Hinton 2016), joined with the residual addition before it.
//
//     y = n * weight + bias,    n = (x - mean) * rstd,    rstd = 1 / sqrt(var + 1e-5)
#include "common.cuh"

constexpr float EPSILON = 1e-5f;
constexpr int SUMMANDS_AT_ONCE = 8;
constexpr int KEPT_PACKS = 3;  // of a row, in a lane: with one more the registers spill

// Fills this warp's row in shared memory with inputs + branch as stored (rounded), writes residual, returns the mean.
// Every lane reads again only what it wrote itself: no barrier is needed.
template <int W>
__device__ float read_row(real* row, real* residual, const real* inputs, const real* branch, int C) {
    float sum = 0.0f;
    for (int c = threadIdx.x % WARP * W; c < C; c += WARP * W) {
        Floats<W> x = load<W>(inputs + c);
        if (branch) {
            x += load<W>(branch + c);
            store<W>(residual + c, x);
        }
        store<W>(row + c, x);
        x = load<W>(row + c);
        for (int k = 0; k < W; k++) sum += x.v[k];
    }
    return warp_sum(sum) / C;
}

// 1 / sqrt(var + epsilon), from deviations instead of squares: nothing cancels.
template <int W>
__device__ float row_rstd(const real* row, float mean, int C) {
    float sum = 0.0f;
    for (int c = threadIdx.x % WARP * W; c < C; c += WARP * W) {
        Floats<W> x = load<W>(row + c);
        for (int k = 0; k < W; k++) sum += (x.v[k] - mean) * (x.v[k] - mean);
    }
    return rsqrtf(warp_sum(sum) / C + EPSILON);
}

template <int W>
__device__ void write_row(real* out, const real* row, float mean, float rstd, const real* weight, const real* bias,
                          int C) {
    for (int c = threadIdx.x % WARP * W; c < C; c += WARP * W) {
        Floats<W> x = load<W>(row + c), w = load<W>(weight + c), b = load<W>(bias + c);
        for (int k = 0; k < W; k++) x.v[k] = (x.v[k] - mean) * rstd * w.v[k] + b.v[k];
        store<W>(out + c, x);
    }
}

template <int W>
__device__ void normalize(real* residual, real* out, float* mean, float* rstd, const real* inputs, const real* branch,
                          const real* weight, const real* bias, int N, int C, real* shared) {
    const int warp = threadIdx.x / WARP, n = blockIdx.x * (blockDim.x / WARP) + warp;
    if (n >= N) return;  // whole warps
    const long long at = static_cast<long long>(n) * C;
    real* row = shared + warp * C;
    const float m = read_row<W>(row, residual + at, inputs + at, branch ? branch + at : nullptr, C);
    const float r = row_rstd<W>(row, m, C);
    write_row<W>(out + at, row, m, r, weight, bias, C);
    if (threadIdx.x % WARP == 0) {
        mean[n] = m;
        rstd[n] = r;
    }
}

// residual = inputs + branch, out = LayerNorm(residual); without branch (null, and residual too) LayerNorm(inputs).
// residual, out, inputs, branch (N, C); mean, rstd (N,) float32; weight, bias (C,).
// Launch: a warp for every row; dynamic shared memory of one row of `real` a warp.
// Source: own; llm.c's fused_residual_forward_kernel5 also keeps the row in shared memory.
extern "C" __global__ void __launch_bounds__(256)
residual_layernorm_forward(real* residual, real* out, float* mean, float* rstd, const real* inputs, const real* branch,
                           const real* weight, const real* bias, int N, int C) {
    DYNAMIC_SHARED(real, rows);
    if (C % PACK == 0) normalize<PACK>(residual, out, mean, rstd, inputs, branch, weight, bias, N, C, rows);
    else normalize<1>(residual, out, mean, rstd, inputs, branch, weight, bias, N, C, rows);
}

struct Row {
    real* dinputs;
    const real *doutputs, *inputs, *weight;
    float mean, rstd;
};

// Adds what the row has at c, ... c + W - 1 to this warp's sums (2, C) of dweight and dbias, and to the lane's of g, g n.
template <int W>
__device__ void add_to_sums(float* sums, Floats<2>& lane_sums, const Row& row, Floats<W> dy, Floats<W> n, int c,
                            int C) {
    Floats<W> w = load<W>(row.weight + c), dweight = load<W>(sums + c), dbias = load<W>(sums + C + c);
    for (int k = 0; k < W; k++) {
        n.v[k] = (n.v[k] - row.mean) * row.rstd;
        lane_sums.v[0] += dy.v[k] * w.v[k];
        lane_sums.v[1] += dy.v[k] * w.v[k] * n.v[k];
        dweight.v[k] += dy.v[k] * n.v[k];
    }
    dbias += dy;
    store<W>(sums + c, dweight);
    store<W>(sums + C + c, dbias);
}

// The same channels' gradients of the inputs. means: over the row, of g and of g n.
template <int W>
__device__ void add_to_dinputs(const Row& row, const Floats<2>& means, Floats<W> dy, Floats<W> x, int c) {
    Floats<W> w = load<W>(row.weight + c), dx = load<W>(row.dinputs + c);
    for (int k = 0; k < W; k++) {
        const float n = (x.v[k] - row.mean) * row.rstd;
        dx.v[k] += row.rstd * (dy.v[k] * w.v[k] - means.v[0] - n * means.v[1]);
    }
    store<W>(row.dinputs + c, dx);
}

inline __device__ Floats<2> row_means(const Floats<2>& lane_sums, int C) {
    return {{warp_sum(lane_sums.v[0]) / C, warp_sum(lane_sums.v[1]) / C}};
}

// The row is read twice: the second time it may still be in the first-level cache.
template <int W>
struct ReadTwice {
    static __device__ void backward(float* sums, const Row& row, int C) {
        Floats<2> lane_sums = {};
        for (int c = threadIdx.x % WARP * W; c < C; c += WARP * W)
            add_to_sums<W>(sums, lane_sums, row, load<W>(row.doutputs + c), load<W>(row.inputs + c), c, C);
        const Floats<2> means = row_means(lane_sums, C);
        for (int c = threadIdx.x % WARP * W; c < C; c += WARP * W)
            add_to_dinputs<W>(row, means, load<W>(row.doutputs + c), load<W>(row.inputs + c), c);
    }
};

// The compiler is to widen the pack anew: of what it widened before it would keep two registers for each of this one's.
inline __device__ void keep_as_stored(Pack<real, PACK>& pack) {
    unsigned* words = reinterpret_cast<unsigned*>(&pack);
    for (int i = 0; i < 4; i++) asm volatile("" : "+r"(words[i]));
}

// The row is read once, and kept in registers as it is stored: PACKS packs of doutputs and of inputs a lane.
template <int PACKS>
struct Kept {
    static __device__ void backward(float* sums, const Row& row, int C) {
        const int lane = threadIdx.x % WARP;
        Pack<real, PACK> dy[PACKS], x[PACKS];
        Floats<2> lane_sums = {};
#pragma unroll
        for (int i = 0; i < PACKS; i++)
            if (const int c = (i * WARP + lane) * PACK; c < C) {
                dy[i] = load_as_stored<PACK>(row.doutputs + c);
                x[i] = load_as_stored<PACK>(row.inputs + c);
            }
#pragma unroll
        for (int i = 0; i < PACKS; i++)
            if (const int c = (i * WARP + lane) * PACK; c < C)
                add_to_sums<PACK>(sums, lane_sums, row, widen(dy[i]), widen(x[i]), c, C);
        const Floats<2> means = row_means(lane_sums, C);
#pragma unroll
        for (int i = 0; i < PACKS; i++) {
            keep_as_stored(dy[i]);
            keep_as_stored(x[i]);
        }
#pragma unroll
        for (int i = 0; i < PACKS; i++)
            if (const int c = (i * WARP + lane) * PACK; c < C)
                add_to_dinputs<PACK>(row, means, widen(dy[i]), widen(x[i]), c);
    }
};

template <int W, class Reading>
__device__ void rows_backward(float* sums, real* dinputs, const real* doutputs, const real* inputs, const float* mean,
                              const float* rstd, const real* weight, int N, int C) {
    for (int c = threadIdx.x % WARP * W; c < C; c += WARP * W) {
        store<W>(sums + c, Floats<W>{});
        store<W>(sums + C + c, Floats<W>{});
    }
    const int warps = blockDim.x / WARP;
    for (int n = blockIdx.x * warps + threadIdx.x / WARP; n < N; n += gridDim.x * warps) {
        const long long at = static_cast<long long>(n) * C;
        const Row row = {dinputs + at, doutputs + at, inputs + at, weight, mean[n], rstd[n]};
        Reading::backward(sums, row, C);
    }
}

// partial_sums[block] = the sums of the block's warps.
inline __device__ void add_warps(float* partial_sums, const float* warp_sums, int C) {
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * C; i += blockDim.x) {
        float sum = 0.0f;
        for (int warp = 0; warp < blockDim.x / WARP; warp++) sum += warp_sums[warp * 2 * C + i];
        partial_sums[static_cast<long long>(blockIdx.x) * 2 * C + i] = sum;
    }
}

// First of two phases, with g = dy * weight:  dinputs += rstd (g - mean_c(g) - n mean_c(g n)),
// partial_sums[block] = the sums over the block's rows of (dy n, dy).
// dinputs, doutputs, inputs (N, C); partial_sums (blocks, 2, C) float32; mean, rstd (N,) float32; weight (C,).
// Launch: any one-dimensional grid, its size being part of the result's rounding; a warp takes a row at a time, with
// dynamic shared memory of 2*C float32 a warp.
// Source: own; llm.c's layernorm_backward_kernel10 does both phases in one, by the last block to arrive.
extern "C" __global__ void __launch_bounds__(256)
layernorm_backward(real* dinputs, float* partial_sums, const real* doutputs, const real* inputs, const float* mean,
                   const float* rstd, const real* weight, int N, int C) {
    DYNAMIC_SHARED(float, warp_sums);
    float* sums = warp_sums + threadIdx.x / WARP * 2 * C;
    if (C % PACK == 0)
        rows_backward<PACK, ReadTwice<PACK>>(sums, dinputs, doutputs, inputs, mean, rstd, weight, N, C);
    else
        rows_backward<1, ReadTwice<1>>(sums, dinputs, doutputs, inputs, mean, rstd, weight, N, C);
    add_warps(partial_sums, warp_sums, C);
}

// The same, for C % PACK == 0 and C <= KEPT_PACKS * WARP * PACK: a candidate that bench_step.py times beside it. As many
// blocks of it fit into a multiprocessor's registers as into Hopper's shared memory.
extern "C" __global__ void __launch_bounds__(256, 4)
layernorm_backward_kept(real* dinputs, float* partial_sums, const real* doutputs, const real* inputs,
                        const float* mean, const float* rstd, const real* weight, int N, int C) {
    DYNAMIC_SHARED(float, warp_sums);
    float* sums = warp_sums + threadIdx.x / WARP * 2 * C;
    rows_backward<PACK, Kept<KEPT_PACKS>>(sums, dinputs, doutputs, inputs, mean, rstd, weight, N, C);
    add_warps(partial_sums, warp_sums, C);
}

// Second phase: (dweight, dbias) = or += the sum of partial_sums (blocks, 2, C), rounded once.  dweight, dbias (C,).
// Launch: blocks of (WARP, SUMMANDS_AT_ONCE) threads, a block for every WARP of the 2*C columns.
extern "C" __global__ void __launch_bounds__(256)
layernorm_backward_parameters(real* dweight, real* dbias, const float* partial_sums, int blocks, int C,
                              int accumulate) {
    __shared__ float shared[SUMMANDS_AT_ONCE][WARP];
    const int i = blockIdx.x * WARP + threadIdx.x;
    float sum = 0.0f;
    for (int block = threadIdx.y; i < 2 * C && block < blocks; block += SUMMANDS_AT_ONCE)
        sum += partial_sums[static_cast<long long>(block) * 2 * C + i];
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || i >= 2 * C) return;
    real* to = i < C ? dweight + i : dbias + i - C;
    sum = accumulate ? widen(*to) : 0.0f;
    for (int y = 0; y < SUMMANDS_AT_ONCE; y++) sum += shared[y][threadIdx.x];
    narrow(to, sum);
}
