// AdamW (Loshchilov and Hutter 2019) on a flat range, one launch: parameters and moments are float32, gradients `real`.
// The moments are unscaled, as in kernels/numpy/adamw.py:
//
//     m = beta1 m + g,    v = beta2 v + g^2,    p = decay p - step_size m / (sqrt(v) + eps)
//
// If the parameters are the master copy of bfloat16 ones, they are also written rounded to bfloat16. A separate kernel
// rounds parameters that other ranks have updated.
#include "common.cuh"

constexpr int QUAD = 4;  // elements at once: 16 bytes of each float32 array. Eight, 16 bytes in bfloat16, would spill.

struct Arrays {
    float *parameters, *m, *v;
    const real* gradients;
};

// Where to write rounded parameters, or null. state: splitmix64's for the draw of element 0, if stochastic.
struct Rounding {
    unsigned short* to;
    bool stochastic;
    unsigned long long state;
};

struct Constants {
    float beta1, beta2, step_size, eps, decay, gradient_scale;
};

// The ranges [start, stop) that weight decay applies to, in order and disjoint.
struct Ranges {
    const long long* bounds;  // (count, 2)
    int count;

    __device__ long long start(int range) const { return bounds[2 * range]; }
    __device__ long long stop(int range) const { return bounds[2 * range + 1]; }

    // The first range that ends after element i, or count.
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

// The weight-decay factors of W elements from i on, with one search, because most packs are within one range.
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

// The draw of element i, below 2^16: the upper bits of splitmix64's i-th number (Steele, Lea and Flood 2014).
inline __device__ unsigned random16(unsigned long long state, long long i) {
    unsigned long long z = state + i * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z >> 48;
}

// The number to add to a float32 so that its upper half is the rounded bfloat16. Half a unit, less one bit if the upper
// half is even, rounds to nearest, ties to even. Random bits round up with the probability that makes the mean exact.
// bfloat16 values, including infinities, do not change, because their lower half is 0.
inline __device__ unsigned short to_bfloat16(float x, const Rounding& rounding, long long i) {
    const unsigned bits = reinterpret_cast<const unsigned&>(x), upper = bits >> 16;
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // not a number
    return (bits + (rounding.stochastic ? random16(rounding.state, i) : 0x7fffu + (upper & 1u))) >> 16;
}

template <int W>
__device__ void store_rounded(const Rounding& rounding, const Floats<W>& values, long long i) {
    typedef Pack<unsigned short, W> P;
    P pack;
    for (int k = 0; k < W; k++) pack.v[k] = to_bfloat16(values.v[k], rounding, i + k);
    *static_cast<P*>(__builtin_assume_aligned(rounding.to + i, alignof(P))) = pack;
}

template <int W>
__device__ void update(const Arrays& a, const Constants& c, const Ranges& decaying, const Rounding& r, long long i) {
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
    if (r.to) store_rounded<W>(r, p, i);
}

// One step in place. parameters, m, v (count,) float32; gradients (count,); decaying (ranges, 2) int64;
// rounded (count,) bfloat16 or null, rounded to nearest, or by random numbers if stochastic.
// Launch: any one-dimensional grid; threads loop over QUAD elements each. A range that is not aligned is updated
// element by element.
extern "C" __global__ void __launch_bounds__(256)
adamw(float* parameters, float* m, float* v, const real* gradients, const long long* decaying, int ranges, float beta1,
      float beta2, float step_size, float eps, float decay, float gradient_scale, long long count,
      unsigned short* rounded, int stochastic, unsigned long long state) {
    const Arrays a = {parameters, m, v, gradients};
    const Constants c = {beta1, beta2, step_size, eps, decay, gradient_scale};
    const Rounding r = {rounded, stochastic != 0, state};
    const bool aligned =
        is_aligned(parameters) && is_aligned(m) && is_aligned(v) && is_aligned(gradients) && is_aligned(rounded);
    const long long packed = aligned ? count / QUAD * QUAD : 0;
    for (long long i = thread_of_grid() * QUAD; i < packed; i += threads_of_grid() * QUAD)
        update<QUAD>(a, c, {decaying, ranges}, r, i);
    for (long long i = packed + thread_of_grid(); i < count; i += threads_of_grid())
        update<1>(a, c, {decaying, ranges}, r, i);
}

// rounded (count,) bfloat16 = values (count,) float32, with the same bits as adamw writes.
// Launch: any one-dimensional grid; threads loop over QUAD elements each.
extern "C" __global__ void __launch_bounds__(256)
round_parameters(unsigned short* rounded, const float* values, long long count, int stochastic,
                 unsigned long long state) {
    const Rounding r = {rounded, stochastic != 0, state};
    const long long packed = is_aligned(rounded) && is_aligned(values) ? count / QUAD * QUAD : 0;
    for (long long i = thread_of_grid() * QUAD; i < packed; i += threads_of_grid() * QUAD)
        store_rounded<QUAD>(r, load<QUAD>(values + i), i);
    for (long long i = packed + thread_of_grid(); i < count; i += threads_of_grid())
        store_rounded<1>(r, load<1>(values + i), i);
}
