// Softmax cross-entropy that turns logits into their gradient in place: no array of probabilities.
//
//     loss_n = log sum_v exp(logit_nv) - logit_n,target,    dlogits = scale (softmax(logits) - onehot(target))
#include "common.cuh"

// The running sum of exp(x - max), while max still grows (Milakov and Gimelshein 2018).
struct Online {
    float max, sum;
};

inline __device__ Online join(Online a, Online b) {
    const float max = fmaxf(a.max, b.max);
    return {max, a.sum * exponential(a.max - max) + b.sum * exponential(b.max - max)};
}

inline __device__ Online warp_join(Online x) {
    for (int distance = WARP / 2; distance > 0; distance /= 2)
        x = join(x, {__shfl_xor_sync(WHOLE_WARP, x.max, distance), __shfl_xor_sync(WHOLE_WARP, x.sum, distance)});
    return x;
}

inline __device__ Online block_join(Online x, Online* shared) {
    const int lane = threadIdx.x % WARP;
    x = warp_join(x);
    if (lane == 0) shared[threadIdx.x / WARP] = x;
    __syncthreads();
    return warp_join(lane < blockDim.x / WARP ? shared[lane] : Online{LOWEST, 0.0f});
}

// Replaces pad columns by `value`, in the one pack of a row that has both pad and other columns.
template <int W>
__device__ void replace_pads(Floats<W>& x, int v, int V, float value) {
    if (v + W <= V) return;
#pragma unroll
    for (int k = 0; k < W; k++) x.v[k] = v + k < V ? x.v[k] : value;
}

// Reads this thread's part of the row. The maximum of a pack is taken first, so the sum is rescaled once per pack.
template <int W>
__device__ Online read_logits(const real* logits, int V) {
    Online online = {LOWEST, 0.0f};
    for (int v = threadIdx.x * W; v < V; v += blockDim.x * W) {
        Floats<W> x = load<W>(logits + v);
        replace_pads(x, v, V, LOWEST);
        Online pack = {x.v[0], 0.0f};
        for (int k = 1; k < W; k++) pack.max = fmaxf(pack.max, x.v[k]);
        for (int k = 0; k < W; k++) pack.sum += exponential(x.v[k] - pack.max);
        online = join(online, pack);
    }
    return online;
}

template <int W>
__device__ void write_gradient(real* logits, Online online, int target, int V, int Vp, float scale) {
    const float factor = scale / online.sum;
    for (int v = threadIdx.x * W; v < Vp; v += blockDim.x * W) {
        Floats<W> x = load<W>(logits + v);
        for (int k = 0; k < W; k++) x.v[k] = exponential(x.v[k] - online.max) * factor;
        if (v <= target && target < v + W)
#pragma unroll
            for (int k = 0; k < W; k++) x.v[k] -= v + k == target ? scale : 0.0f;
        replace_pads(x, v, V, 0.0f);
        store<W>(logits + v, x);
    }
}

template <int W>
__device__ void row_cross_entropy(float* losses, real* logits, const int* targets, int V, int Vp, float scale,
                                  int with_gradient, Online* shared) {
    const int n = blockIdx.x, target = targets[n];
    real* row = logits + static_cast<long long>(n) * Vp;
    const float target_logit = widen(row[target]);  // before the barrier in block_join: then the row is overwritten
    const Online online = block_join(read_logits<W>(row, V), shared);
    if (threadIdx.x == 0) losses[n] = logf(online.sum) + (online.max - target_logit);
    if (with_gradient) write_gradient<W>(row, online, target, V, Vp, scale);
}

// losses (N,) float32 of logits (N, Vp) against targets (N,) in [0, V); with_gradient: logits become dlogits * scale.
// The pad columns [V, Vp) are ignored and get gradient 0.
// Launch: a block of 1024 threads for every row. So few rows are in flight that the second reading hits the
// second-level cache (100 KB per row at V = 50257, two blocks on each of 132 multiprocessors: 27 MB of an H100's 50).
// Source: own; llm.c's fused_classifier_kernel5 also works in place.
extern "C" __global__ void __launch_bounds__(1024)
cross_entropy(float* losses, real* logits, const int* targets, int V, int Vp, float scale, int with_gradient) {
    __shared__ Online shared[WARP];
    if (Vp % PACK == 0) row_cross_entropy<PACK>(losses, logits, targets, V, Vp, scale, with_gradient, shared);
    else row_cross_entropy<1>(losses, logits, targets, V, Vp, scale, with_gradient, shared);
}

template <int W>
__device__ void part_statistics(float* maxima, float* sums, float* target_logits, const real* logits,
                                const int* targets, int V, int Vp, Online* shared) {
    const int n = blockIdx.x, target = targets[n];
    const real* row = logits + static_cast<long long>(n) * Vp;
    const Online online = block_join(read_logits<W>(row, V), shared);
    if (threadIdx.x > 0) return;
    maxima[n] = online.max;
    sums[n] = online.sum;
    target_logits[n] = 0 <= target && target < V ? widen(row[target]) : 0.0f;
}

// First reading of a vocabulary shard's logits (N, Vp), of which V >= 0 columns count. Writes, for each row, maxima =
// max_v logit, sums = sum_v exp(logit - max), and target_logits, 0 if another shard has the target. All (N,) float32.
// targets (N,) are columns of the shard.
// Launch: a block of 1024 threads for every row.
// Source: own; the order of exchanges is that of vocab_parallel_cross_entropy in Megatron-LM.
extern "C" __global__ void __launch_bounds__(1024)
row_statistics(float* maxima, float* sums, float* target_logits, const real* logits, const int* targets, int V,
               int Vp) {
    __shared__ Online shared[WARP];
    if (Vp % PACK == 0) part_statistics<PACK>(maxima, sums, target_logits, logits, targets, V, Vp, shared);
    else part_statistics<1>(maxima, sums, target_logits, logits, targets, V, Vp, shared);
}

// Turns sums (N,) of exp(logit - own_maxima) into sums of exp(logit - maxima).
// Launch: any one-dimensional grid; threads loop over numbers.
extern "C" __global__ void __launch_bounds__(256)
rescale_sums(float* sums, const float* own_maxima, const float* maxima, int N) {
    for (long long n = thread_of_grid(); n < N; n += threads_of_grid())
        sums[n] *= exponential(own_maxima[n] - maxima[n]);
}

// losses (N,) from maxima, sums and target_logits (N,) of all shards.
// Launch: as above.
extern "C" __global__ void __launch_bounds__(256)
losses_over_shards(float* losses, const float* maxima, const float* sums, const float* target_logits, int N) {
    for (long long n = thread_of_grid(); n < N; n += threads_of_grid())
        losses[n] = logf(sums[n]) + (maxima[n] - target_logits[n]);
}

// Second reading: turns logits into dlogits * scale, with maxima and sums (N,) of all shards.
// Launch: a block of 1024 threads for every row.
extern "C" __global__ void __launch_bounds__(1024)
gradient_of_shard(real* logits, const int* targets, const float* maxima, const float* sums, int V, int Vp,
                 float scale) {
    const int n = blockIdx.x;
    real* row = logits + static_cast<long long>(n) * Vp;
    const Online online = {maxima[n], sums[n]};
    if (Vp % PACK == 0) write_gradient<PACK>(row, online, targets[n], V, Vp, scale);
    else write_gradient<1>(row, online, targets[n], V, Vp, scale);
}
