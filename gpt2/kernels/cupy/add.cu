// The sum of two arrays, where no LayerNorm follows with which it could be one kernel.
#include "common.cuh"

template <int W>
__device__ void add_packs(real* out, const real* first, const real* second, long long count) {
    for (long long i = thread_of_grid() * W; i < count; i += threads_of_grid() * W) {
        Floats<W> sum = load<W>(first + i);
        sum += load<W>(second + i);
        store<W>(out + i, sum);
    }
}

// out = first + second, all (count,); out may be one of them.
// Launch: any one-dimensional grid, a thread for every PACK elements or loop.
extern "C" __global__ void __launch_bounds__(256)
add(real* out, const real* first, const real* second, long long count) {
    if (count % PACK == 0) add_packs<PACK>(out, first, second, count);
    else add_packs<1>(out, first, second, count);
}
