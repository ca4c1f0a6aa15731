// Token plus position embedding, and its gradients without atomics: always the same order of additions.
#include "common.cuh"

constexpr int ROWS_AT_ONCE = 8;  // rows of one token: a frequent token has thousands

template <int W>
__device__ void add_embeddings(real* out, const int* tokens, const real* wte, const real* wpe, int rows, int N, int T,
                               int C) {
    const unsigned row_packs = C / W, packs = N * row_packs;
    for (long long i = thread_of_grid(); i < packs; i += threads_of_grid()) {
        const int row = static_cast<unsigned>(i) / row_packs, c = static_cast<unsigned>(i) % row_packs * W;
        const int token = tokens[row];
        Floats<W> sum = {};
        if (0 <= token && token < rows) sum = load<W>(wte + static_cast<long long>(token) * C + c);
        if (wpe) sum += load<W>(wpe + static_cast<long long>(row % T) * C + c);
        store<W>(out + static_cast<long long>(row) * C + c, sum);
    }
}

// out[b, t] = wte[tokens[b, t]] + wpe[t].  out (N = B*T, C), tokens (N,), wte (rows, C), wpe (context >= T, C).
// Tokens outside [0, rows) belong to other shards and give 0. wpe is null if another tp rank adds it.
// Launch: any one-dimensional grid; threads loop over PACK channels each.
// Source: llm.c, encoder_forward.
extern "C" __global__ void __launch_bounds__(256)
embedding_forward(real* out, const int* tokens, const real* wte, const real* wpe, int rows, int N, int T, int C) {
    if (C % PACK == 0) add_embeddings<PACK>(out, tokens, wte, wpe, rows, N, T, C);
    else add_embeddings<1>(out, tokens, wte, wpe, rows, N, T, C);
}

// The sum over every ROWS_AT_ONCE-th row of the group of equal tokens that starts at `first`, from this thread's row.
template <int W>
__device__ Floats<W> group_sum(const real* dout, const int* order, const int* sorted_tokens, int first, int N, int C) {
    Floats<W> sum = {};
    const int token = sorted_tokens[first];
    for (int i = first + threadIdx.y; i < N && sorted_tokens[i] == token; i += ROWS_AT_ONCE)
        sum += load<W>(dout + static_cast<long long>(order[i]) * C);
    return sum;
}

template <int W>
__device__ void add_group(real* dwte, const real* dout, const int* order, const int* sorted_tokens, int N, int C,
                          float* shared) {
    const int first = blockIdx.x;
    if (first > 0 && sorted_tokens[first - 1] == sorted_tokens[first]) return;  // another block handles this token
    real* row = dwte + static_cast<long long>(sorted_tokens[first]) * C;
    for (int chunk = blockIdx.y * WARP * W; chunk < C; chunk += gridDim.y * WARP * W) {
        const int c = chunk + threadIdx.x * W;
        if (c < C) {
            Floats<W> part = group_sum<W>(dout + c, order, sorted_tokens, first, N, C);
            store<W>(shared + (threadIdx.y * WARP + threadIdx.x) * W, part);
        }
        __syncthreads();
        if (c < C && threadIdx.y == 0) {
            Floats<W> sum = load<W>(row + c);
            for (int y = 0; y < ROWS_AT_ONCE; y++) sum += load<W>(shared + (y * WARP + threadIdx.x) * W);
            store<W>(row + c, sum);
        }
        __syncthreads();  // the next chunk writes to shared
    }
}

// dwte[token] += sum of dout's rows of this token.  dwte (Vp, C), dout (N, C), order (N,): rows sorted by token,
// sorted_tokens (N,): their tokens.
// Launch: blocks of (WARP, ROWS_AT_ONCE) threads, a grid (N, chunks of WARP*PACK channels): a block for every sorted
// row. Only the first block of each token works, so the host need not know the number of tokens.
// Source: own; llm.c's wte_backward_kernel sorts into buckets as well.
extern "C" __global__ void __launch_bounds__(256)
embedding_backward_tokens(real* dwte, const real* dout, const int* order, const int* sorted_tokens, int N, int C) {
    __shared__ __align__(16) float shared[ROWS_AT_ONCE * WARP * PACK];
    if (C % PACK == 0) add_group<PACK>(dwte, dout, order, sorted_tokens, N, C, shared);
    else add_group<1>(dwte, dout, order, sorted_tokens, N, C, shared);
}

template <int W>
__device__ void sum_positions(real* dwpe, const real* dout, int B, int T, int context, int C, int accumulate) {
    const unsigned row_packs = C / W, packs = (accumulate ? T : context) * row_packs;
    for (long long i = thread_of_grid(); i < packs; i += threads_of_grid()) {
        const int t = static_cast<unsigned>(i) / row_packs;  // in 32 bits: a 64-bit division costs more than the rest
        Floats<W> sum = {};
        if (accumulate) sum = load<W>(dwpe + i * W);
        for (int b = 0; t < T && b < B; b++) sum += load<W>(dout + i * W + static_cast<long long>(b) * T * C);
        store<W>(dwpe + i * W, sum);
    }
}

// dwpe[t] = or += sum over b of dout[b, t]; without accumulation, zeros from T on.  dwpe (context, C), dout (B, T, C).
// Launch: any one-dimensional grid; threads loop over PACK channels each.
// Source: llm.c, wpe_backward_kernel.
extern "C" __global__ void __launch_bounds__(256)
embedding_backward_positions(real* dwpe, const real* dout, int B, int T, int context, int C, int accumulate) {
    if (C % PACK == 0) sum_positions<PACK>(dwpe, dout, B, T, context, C, accumulate);
    else sum_positions<1>(dwpe, dout, B, T, context, C, accumulate);
}
