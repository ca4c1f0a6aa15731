// AdamW (Loshchilov and Hutter 2019) on a flat range, in one launch: float32 parameters and moments, gradients as stored.
// The moments are the unscaled ones of numpy_kernels/adamw.py:
//
//     m = beta1 m + g,    v = beta2 v + g^2,    p = decay p - step_size m / (sqrt(v) + eps)
#include "common.cuh"

constexpr int QUAD = 4;  // elements at once: 16 bytes of each float32 array. Eight, 16 bytes in bfloat16, spill.

struct Arrays {
    float *parameters, *m, *v;
    const real* gradients;
};

struct Constants {
    float beta1, beta2, step_size, eps, decay, gradient_scale;
};

// The ranges [start, stop) that weight decay is for, in order and apart.
struct Ranges {
    const long long* bounds;  // (count, 2)
    int count;

    __device__ long long start(int range) const { return bounds[2 * range]; }
    __device__ long long stop(int range) const { return bounds[2 * range + 1]; }

    // The first range that ends after element i; count if there is none.
    __device__ int after(long long i) const {
        int low = 0, high = count;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (stop(middle) > i) high = middle;
            else low = middle + 1;
        }
        return low;
    }
};

// The factors of weight decay of W elements from i on: one search, as most packs lie in one range.
template <int W>
__device__ Floats<W> decay_factors(const Ranges& decaying, long long i, float decay) {
    Floats<W> factors;
    int range = decaying.after(i);
    for (int k = 0; k < W; k++) {
        while (range < decaying.count && decaying.stop(range) <= i + k) range++;
        factors.v[k] = range < decaying.count && decaying.start(range) <= i + k ? decay : 1.0f;
    }
    return factors;
}

template <int W>
__device__ void update(const Arrays& a, const Constants& c, const Ranges& decaying, long long i) {
    Floats<W> p = load<W>(a.parameters + i), m = load<W>(a.m + i), v = load<W>(a.v + i), g = load<W>(a.gradients + i);
    const Floats<W> factors = decay_factors<W>(decaying, i, c.decay);
    for (int k = 0; k < W; k++) {
        g.v[k] *= c.gradient_scale;
        m.v[k] = c.beta1 * m.v[k] + g.v[k];
        v.v[k] = c.beta2 * v.v[k] + g.v[k] * g.v[k];
        p.v[k] = factors.v[k] * p.v[k] - c.step_size * m.v[k] / (sqrtf(v.v[k]) + c.eps);
    }
    store<W>(a.m + i, m);
    store<W>(a.v + i, v);
    store<W>(a.parameters + i, p);
}

// One step in place. parameters, m, v (count,) float32; gradients (count,); decaying (ranges, 2) int64.
// Launch: any one-dimensional grid, a thread for every QUAD elements or loop. A range that starts at an odd place is
// taken element by element.
extern "C" __global__ void __launch_bounds__(256)
adamw(float* parameters, float* m, float* v, const real* gradients, const long long* decaying, int ranges, float beta1,
      float beta2, float step_size, float eps, float decay, float gradient_scale, long long count) {
    const Arrays a = {parameters, m, v, gradients};
    const Constants c = {beta1, beta2, step_size, eps, decay, gradient_scale};
    const bool aligned = is_aligned(parameters) && is_aligned(m) && is_aligned(v) && is_aligned(gradients);
    const long long packed = aligned ? count / QUAD * QUAD : 0;
    for (long long i = thread_of_grid() * QUAD; i < packed; i += threads_of_grid() * QUAD)
        update<QUAD>(a, c, {decaying, ranges}, i);
    for (long long i = packed + thread_of_grid(); i < count; i += threads_of_grid())
        update<1>(a, c, {decaying, ranges}, i);
}
