// LayerNorm over the channels (Ba, Kiros, Hinton 2016), fused with the residual addition before it.
//
//     y = n * weight + bias,    n = (x - mean) * rstd,    rstd = 1 / sqrt(var + 1e-5)
#include "common.cuh"

constexpr float EPSILON = 1e-5f;
constexpr int SUMMANDS_AT_ONCE = 8;

// A row is inputs, or inputs + (branch + branch_bias) if there is a branch. residual and branch (C,) or null.
struct Summands {
    real* residual;
    const real *inputs, *branch, *branch_bias;
};

// Fills this warp's row in shared memory with the row as stored (rounded), writes residual, returns the mean.
// Every lane only reads what it wrote itself, so no barrier is needed.
template <int W>
__device__ float read_row(real* row, const Summands& from, int C) {
    float sum = 0.0f;
    for (int c = threadIdx.x % WARP * W; c < C; c += WARP * W) {
        Floats<W> x = load<W>(from.inputs + c);
        if (from.branch) {
            Floats<W> branch = load<W>(from.branch + c);
            branch += load<W>(from.branch_bias + c);
            x += branch;
            store<W>(from.residual + c, x);
        }
        store<W>(row + c, x);
        x = load<W>(row + c);
        for (int k = 0; k < W; k++) sum += x.v[k];
    }
    return warp_sum(sum) / C;
}

// 1 / sqrt(var + epsilon). var comes from deviations instead of plain squares, to avoid cancellation.
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
__device__ void normalize(Summands from, real* out, float* mean, float* rstd, const real* weight, const real* bias, int N,
                          int C, real* shared) {
    const int warp = threadIdx.x / WARP, n = blockIdx.x * (blockDim.x / WARP) + warp;
    if (n >= N) return;  // true for all lanes of a warp, or for none
    const long long at = static_cast<long long>(n) * C;
    real* row = shared + warp * C;
    from.inputs += at;
    if (from.branch) {
        from.branch += at;
        from.residual += at;
    }
    const float m = read_row<W>(row, from, C);
    const float r = row_rstd<W>(row, m, C);
    write_row<W>(out + at, row, m, r, weight, bias, C);
    if (threadIdx.x % WARP == 0) {
        mean[n] = m;
        rstd[n] = r;
    }
}

// residual = inputs + (branch + branch_bias), out = LayerNorm(residual). If branch, branch_bias and residual are null,
// out = LayerNorm(inputs).
// residual, out, inputs, branch (N, C); mean, rstd (N,) float32; branch_bias, weight, bias (C,).
// Launch: a warp for every row; dynamic shared memory of one row of `real` a warp.
// Source: own; llm.c's fused_residual_forward_kernel5 also keeps the row in shared memory.
extern "C" __global__ void __launch_bounds__(256)
residual_layernorm_forward(real* residual, real* out, float* mean, float* rstd, const real* inputs, const real* branch,
                           const real* branch_bias, const real* weight, const real* bias, int N, int C) {
    DYNAMIC_SHARED(real, rows);
    const Summands from = {residual, inputs, branch, branch_bias};
    if (C % PACK == 0) normalize<PACK>(from, out, mean, rstd, weight, bias, N, C, rows);
    else normalize<1>(from, out, mean, rstd, weight, bias, N, C, rows);
}

struct Row {
    real* dinputs;
    const real *doutputs, *inputs, *weight;
    float mean, rstd;
};

constexpr int PARAMETERS = 2, WITH_COLUMN_SUMS = 3;  // kinds of sums: dweight, dbias; or also dinputs' column sums

// Adds the row's terms at c, ... c + W - 1 to this warp's sums of dweight and dbias, and to the lane's of g and g n.
template <int W>
__device__ void add_to_sums(float* sums, Floats<2>& lane_sums, const Row& row, int c, int C) {
    Floats<W> dy = load<W>(row.doutputs + c), n = load<W>(row.inputs + c), w = load<W>(row.weight + c);
    Floats<W> dweight = load<W>(sums + c), dbias = load<W>(sums + C + c);
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

// Computes dinputs of the same channels, and their sum over rows. means: of g and of g n over the row. The second
// reading often hits the first-level cache.
template <int W>
__device__ void add_to_dinputs(float* column_sums, const Row& row, const Floats<2>& means, int c) {
    Floats<W> dy = load<W>(row.doutputs + c), x = load<W>(row.inputs + c), w = load<W>(row.weight + c);
    Floats<W> dx = load<W>(row.dinputs + c);
    for (int k = 0; k < W; k++) {
        const float n = (x.v[k] - row.mean) * row.rstd;
        dx.v[k] += row.rstd * (dy.v[k] * w.v[k] - means.v[0] - n * means.v[1]);
    }
    store<W>(row.dinputs + c, dx);
    if (!column_sums) return;
    dx += load<W>(column_sums + c);
    store<W>(column_sums + c, dx);
}

template <int W>
__device__ void row_backward(float* sums, int kinds, const Row& row, int C) {
    Floats<2> lane_sums = {};
    for (int c = threadIdx.x % WARP * W; c < C; c += WARP * W) add_to_sums<W>(sums, lane_sums, row, c, C);
    const Floats<2> means = {{warp_sum(lane_sums.v[0]) / C, warp_sum(lane_sums.v[1]) / C}};
    float* column_sums = kinds == WITH_COLUMN_SUMS ? sums + PARAMETERS * C : nullptr;
    for (int c = threadIdx.x % WARP * W; c < C; c += WARP * W) add_to_dinputs<W>(column_sums, row, means, c);
}

template <int W>
__device__ void rows_backward(float* sums, real* dinputs, const real* doutputs, const real* inputs, const float* mean,
                              const float* rstd, const real* weight, int N, int C, int kinds) {
    for (int c = threadIdx.x % WARP * W; c < C; c += WARP * W)
        for (int kind = 0; kind < kinds; kind++) store<W>(sums + kind * C + c, Floats<W>{});
    const int warps = blockDim.x / WARP;
    for (int n = blockIdx.x * warps + threadIdx.x / WARP; n < N; n += gridDim.x * warps) {
        const long long at = static_cast<long long>(n) * C;
        const Row row = {dinputs + at, doutputs + at, inputs + at, weight, mean[n], rstd[n]};
        row_backward<W>(sums, kinds, row, C);
    }
}

// First of two phases, with g = dy * weight:  dinputs += rstd (g - mean_c(g) - n mean_c(g n)),
// partial_sums[block] = the sums over the block's rows of dy n, of dy and, with three kinds, of the new dinputs.
// dinputs, doutputs, inputs (N, C); partial_sums (blocks, kinds, C) float32; mean, rstd (N,) float32; weight (C,).
// Launch: any one-dimensional grid; grid and block size affect rounding. A warp processes one row at a time, with
// dynamic shared memory of kinds*C float32 per warp.
// Source: own; llm.c's layernorm_backward_kernel10 does both phases in one kernel, in the last block to finish.
extern "C" __global__ void __launch_bounds__(256, 4)
layernorm_backward(real* dinputs, float* partial_sums, const real* doutputs, const real* inputs, const float* mean,
                   const float* rstd, const real* weight, int N, int C, int kinds) {
    DYNAMIC_SHARED(float, warp_sums);
    const int count = kinds * C;
    float* sums = warp_sums + threadIdx.x / WARP * count;
    if (C % PACK == 0) rows_backward<PACK>(sums, dinputs, doutputs, inputs, mean, rstd, weight, N, C, kinds);
    else rows_backward<1>(sums, dinputs, doutputs, inputs, mean, rstd, weight, N, C, kinds);
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        float sum = 0.0f;
        for (int warp = 0; warp < blockDim.x / WARP; warp++) sum += warp_sums[warp * count + i];
        partial_sums[static_cast<long long>(blockIdx.x) * count + i] = sum;
    }
}

// Second phase: (dweight, dbias) = or +=, column_sums = the sum of partial_sums (blocks, kinds, C), rounded once.
// dweight, dbias, column_sums (C,); the last may be null, and then there are two kinds.
// Launch: blocks of (WARP, SUMMANDS_AT_ONCE) threads, a block for every WARP of the kinds*C columns.
extern "C" __global__ void __launch_bounds__(256)
layernorm_backward_parameters(real* dweight, real* dbias, real* column_sums, const float* partial_sums, int blocks,
                              int C, int accumulate) {
    __shared__ float shared[SUMMANDS_AT_ONCE][WARP];
    const int i = blockIdx.x * WARP + threadIdx.x, count = (column_sums ? WITH_COLUMN_SUMS : PARAMETERS) * C;
    float sum = 0.0f;
    for (int block = threadIdx.y; i < count && block < blocks; block += SUMMANDS_AT_ONCE)
        sum += partial_sums[static_cast<long long>(block) * count + i];
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || i >= count) return;
    real* to = i < C ? dweight + i : i < 2 * C ? dbias + (i - C) : column_sums + (i - 2 * C);
    sum = accumulate && i < 2 * C ? widen(*to) : 0.0f;
    for (int y = 0; y < SUMMANDS_AT_ONCE; y++) sum += shared[y][threadIdx.x];
    narrow(to, sum);
}
