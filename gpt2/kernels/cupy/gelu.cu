// GELU in GPT-2's tanh form (Hendrycks and Gimpel 2016), fused with the bias of the preceding linear layer.
//
//     y = x/2 (1 + tanh(u)) = x / h,    h = 1 + exp(-2u),    u = s (x + 0.044715 x^3),    s = sqrt(2/pi)
//     dy/dx = (1 + (x - y) 2 du/dx) / h,    du/dx = s (1 + 3*0.044715 x^2)
//
// x is kept for backward, not the slope, because cuBLASLt's GELU epilogues do the same.
#include "common.cuh"

constexpr float SCALE = 0.7978845608f;
constexpr float CUBIC = 0.044715f;

// For x below about -10, h is infinite and the quotients are 0, as they should be.
inline __device__ float gelu_h(float x) { return 1.0f + exponential(-2.0f * SCALE * x * (1.0f + CUBIC * x * x)); }

inline __device__ float gelu_slope(float x) {
    const float h = gelu_h(x), y = quotient(x, h);
    return quotient(1.0f + (x - y) * 2.0f * SCALE * (1.0f + 3.0f * CUBIC * x * x), h);
}

template <int W>
__device__ void add_bias_gelu(real* out, real* saved, const real* bias, long long count, int width) {
    const unsigned row_packs = width / W;
    for (long long i = thread_of_grid() * W; i < count; i += threads_of_grid() * W) {
        Floats<W> x = load<W>(saved + i);
        x += load<W>(bias + static_cast<unsigned>(i / W) % row_packs * W);  // in 32 bits: 64 would cost more than GELU
        store<W>(saved + i, x);
        x = load<W>(saved + i);  // the rounded value, at which backward takes the slope
        for (int k = 0; k < W; k++) x.v[k] = quotient(x.v[k], gelu_h(x.v[k]));
        store<W>(out + i, x);
    }
}

// saved += bias, out = gelu(saved).  out, saved (N, width), bias (width,); count = N * width.
// Launch: any one-dimensional grid; threads loop over PACK elements each.
extern "C" __global__ void __launch_bounds__(256)
bias_gelu_forward(real* out, real* saved, const real* bias, long long count, int width) {
    if (width % PACK == 0) add_bias_gelu<PACK>(out, saved, bias, count, width);
    else add_bias_gelu<1>(out, saved, bias, count, width);
}

template <int W>
__device__ void times_slope(real* dinputs, const real* saved, long long count) {
    for (long long i = thread_of_grid() * W; i < count; i += threads_of_grid() * W) {
        Floats<W> d = load<W>(dinputs + i), x = load<W>(saved + i);
        for (int k = 0; k < W; k++) d.v[k] *= gelu_slope(x.v[k]);
        store<W>(dinputs + i, d);
    }
}

// dinputs *= gelu'(saved): turns the gradient of GELU's output into that of its input.  dinputs, saved (count,).
// Launch: any one-dimensional grid; threads loop over PACK elements each.
extern "C" __global__ void __launch_bounds__(256) gelu_backward(real* dinputs, const real* saved, long long count) {
    if (count % PACK == 0) times_slope<PACK>(dinputs, saved, count);
    else times_slope<1>(dinputs, saved, count);
}
