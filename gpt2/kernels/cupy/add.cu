// The sum of two arrays, where no LayerNorm follows that it could be fused with.
#include "common.cuh"

template <int W>
__device__ void add_packs(real* out, const real* first, const real* second, const real* bias, long long count,
                          int width) {
    const unsigned row_packs = width / W;
    for (long long i = thread_of_grid() * W; i < count; i += threads_of_grid() * W) {
        Floats<W> sum = load<W>(second + i);
        if (bias) sum += load<W>(bias + static_cast<unsigned>(i / W) % row_packs * W);
        sum += load<W>(first + i);
        store<W>(out + i, sum);
    }
}

// out = first + (second + bias), all (count,) except bias (width,), added to each row, or null. out may be an operand.
// Launch: any one-dimensional grid; threads loop over PACK elements each.
extern "C" __global__ void __launch_bounds__(256)
add(real* out, const real* first, const real* second, const real* bias, long long count, int width) {
    if (count % PACK == 0 && width % PACK == 0) add_packs<PACK>(out, first, second, bias, count, width);
    else add_packs<1>(out, first, second, bias, count, width);
}
