// Instructions of sm_80 and later that CUDA C++ does not offer. tests/gpu/cuda_shim has replacements.
//
// Fragments are numbered as in the PTX manual, mma.m16n8k16: lane l has rows l/4 and l/4 + 8 of the left operand (16,
// 16), column l/4 of the right one (16, 8), and rows l/4 and l/4 + 8, columns 2(l%4), +1 of the sums (16, 8).
#pragma once

#ifndef CPU_SHIM
inline __device__ unsigned shared_address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// sums (16, 8) += left (16, 16) right (16, 8): bfloat16 products, float32 sums.
inline __device__ void tensor_multiply(float* sums, const unsigned* left, const unsigned* right) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

// Loads four matrices (8, 8) of two-byte elements: lane l passes the address of row l%8 of matrix l/8, 16 bytes in
// shared memory, and receives the elements 2(l%4), +1 of row l/4 of each matrix.
inline __device__ void load_matrices(unsigned* fragments, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The same for the transposed matrices: each lane receives the rows 2(l%4), +1 of column l/4.
inline __device__ void load_matrices_transposed(unsigned* fragments, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]), "=r"(fragments[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Starts to copy 16 bytes from global to shared memory; unless `wanted`, fills them with zeros.
inline __device__ void copy_async(void* shared, const void* global, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(shared)), "l"(global), "r"(wanted ? 16 : 0)
                 : "memory");
}

// Waits for the copies that this thread has started. To wait also for the copies of other threads, add a barrier.
inline __device__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif
