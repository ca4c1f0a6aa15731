// Shared by the attention kernels: tile sizes, copies of rows to shared memory and back, the mask.
//
// A block keeps ROWS<D> rows and iterates over tiles of the other side; the next tile is copied while this one is used.
// A warp has 16 of the rows, or 32 if its sums fit into registers: then each load from shared memory serves twice as
// many products. With 16 rows, loads at 128 bytes per cycle would take longer than the products.
#pragma once
#include "tiles.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP;
template <int D>
constexpr int WARP_ROWS = sizeof(real) == 2 && D == 64 ? 32 : 16;
template <int D>
constexpr int ROWS = WARPS * WARP_ROWS<D>;
constexpr int COLUMNS = sizeof(real) == 2 ? 64 : 32;  // keys of a tile
template <int D>
constexpr int QUERIES = WARP_ROWS<D> == 32 ? 32 : COLUMNS;  // of a tile: few, because dK and dV fill the registers
constexpr float LOG2_E = 1.4426950409f, LN_2 = 0.6931471806f;  // exponentials are powers of 2: one instruction

// Copies rows [first, first + COUNT) of a head to shared memory, with zeros for missing rows.
template <int D, int COUNT>
__device__ void copy_rows(real* shared, const real* rows, int row_stride, int first, int T) {
    constexpr int PACKS = D / PACK, ROWS_AT_ONCE = THREADS / PACKS;
    const int own = threadIdx.x / PACKS, d = threadIdx.x % PACKS * PACK;
    shared += own * STRIDE<D> + d;
    rows += static_cast<long long>(first + own) * row_stride + d;
#pragma unroll
    for (int row = 0; row < COUNT; row += ROWS_AT_ONCE)
        copy_async(shared + row * STRIDE<D>, rows + static_cast<long long>(row) * row_stride, first + own + row < T);
}

// Copies rows of two arrays to adjacent tiles: keys and values, or queries and dO.
template <int D, int COUNT>
__device__ void copy_two(real* shared, const real* one, int one_stride, const real* two, int two_stride, int first,
                         int T) {
    copy_rows<D, COUNT>(shared, one, one_stride, first, T);
    copy_rows<D, COUNT>(shared + COUNT * STRIDE<D>, two, two_stride, first, T);
}

// Writes the warp's tile to rows [first, ...) of a head, with a factor for each of the lane's rows.
template <int D>
__device__ void write_rows(real* rows, int row_stride, const Tile<WARP_ROWS<D>, D>& tile, const float* factors,
                           int first, int T) {
#pragma unroll
    for (int r = 0; r < WARP_ROWS<D> / 8; r++) {
        const int row = first + row_of(r);
        if (row >= T) continue;
        real* to = rows + static_cast<long long>(row) * row_stride;
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            const float* v = tile.v[r / 2][n] + r % 2 * 2;
            store<2>(to + column_of(n, 0), Floats<2>{{v[0] * factors[r], v[1] * factors[r]}});
        }
    }
}

constexpr int KEYS_ARE_COLUMNS = 1, KEYS_ARE_ROWS = -1;

// Sets scores of keys after their query to the lowest number. `ahead`: position of the tile's first query minus the
// position of its first key.
template <int WAY, int M, int N>
__device__ void mask(Tile<M, N>& s, int ahead) {
    if (ahead >= (WAY == KEYS_ARE_COLUMNS ? N : M) - 1) return;  // no key in the tile is masked
#pragma unroll
    for (int r = 0; r < M / 8; r++)
#pragma unroll
        for (int n = 0; n < N / 8; n++)
            for (int i = 0; i < 2; i++)
                if (WAY * (column_of(n, i) - row_of(r)) > ahead) s.v[r / 2][n][r % 2 * 2 + i] = LOWEST;
}
