// gpt2/kernels/cupy/ptx.cuh on a CPU: a warp's lanes exchange what they have, and each makes its own part.
//
// An asynchronous copy is carried out at once or when it is waited for, at random: so both a wait that is missing and
// a buffer that is still read show as wrong numbers.
#pragma once
#include "cuda_bf16.h"

namespace cpu {
struct Operands {
    unsigned left[4], right[2];
};

struct Row {
    unsigned pairs[4];
};

inline float half_of(unsigned pair, int which) {
    return __bfloat162float({static_cast<uint16_t>(pair >> 16 * which)});
}

// Element (row, k) of the left operand (16, 16), and (k, column) of the right one (16, 8): who has it, and where.
inline float left_element(const Lanes<Operands>& lanes, int row, int k) {
    return half_of(lanes[row % 8 * 4 + k % 8 / 2].left[k / 8 * 2 + row / 8], k % 2);
}

inline float right_element(const Lanes<Operands>& lanes, int k, int column) {
    return half_of(lanes[column * 4 + k % 8 / 2].right[k / 8], k % 2);
}

inline Row row_at(const void* row) {
    Row result;
    std::memcpy(&result, assert_aligned(row, 16), sizeof(result));
    return result;
}

inline void carry_out(const Copy& copy) {
    if (copy.from) std::memcpy(copy.to, copy.from, 16);
    else std::memset(copy.to, 0, 16);
}
}  // namespace cpu

inline void tensor_multiply(float* sums, const unsigned* left, const unsigned* right) {
    const auto lanes = cpu::exchange(cpu::Operands{{left[0], left[1], left[2], left[3]}, {right[0], right[1]}});
    const int lane = cpu::block->current->number % cpu::WARP;
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++)
            sums[i] += cpu::left_element(lanes, lane / 4 + i / 2 * 8, k) *
                       cpu::right_element(lanes, k, lane % 4 * 2 + i % 2);
}

inline void load_matrices(unsigned* fragments, const void* row) {
    const auto lanes = cpu::exchange(cpu::row_at(row));
    const int lane = cpu::block->current->number % cpu::WARP;
    for (int matrix = 0; matrix < 4; matrix++) fragments[matrix] = lanes[matrix * 8 + lane / 4].pairs[lane % 4];
}

inline void load_matrices_transposed(unsigned* fragments, const void* row) {
    const auto lanes = cpu::exchange(cpu::row_at(row));
    const int lane = cpu::block->current->number % cpu::WARP, column = lane / 4;
    for (int matrix = 0; matrix < 4; matrix++) {
        const auto element = [&](int row) {
            return lanes[matrix * 8 + row].pairs[column / 2] >> 16 * (column % 2) & 0xffffu;
        };
        fragments[matrix] = element(lane % 4 * 2) | element(lane % 4 * 2 + 1) << 16;
    }
}

inline void copy_async(void* shared, const void* global, bool wanted) {
    const cpu::Copy copy = {cpu::assert_aligned(shared, 16), wanted ? cpu::assert_aligned(global, 16) : nullptr};
    if (cpu::random_below(cpu::block->random, 2)) cpu::carry_out(copy);
    else cpu::block->current->copies.push_back(copy);
}

inline void wait_for_copies() {
    for (const cpu::Copy& copy : cpu::block->current->copies) cpu::carry_out(copy);
    cpu::block->current->copies.clear();
}
