// One product, C += A @ B, walked in six orders and in blocks. fp32, row-major.
// Built at run time by loop_order.py: cc -O3 -march=native -shared -fPIC loop_order.c
// SPDX-License-Identifier: MIT
#include <stdint.h>

#if defined(__GNUC__) && !defined(__clang__)
// GCC may swap or jam loops by itself at -O3; then the order you read is not
// the order that runs.
#pragma GCC optimize("no-loop-interchange", "no-loop-unroll-and-jam")
#endif

// --8<-- [start:orders]
#define FOR_I for (int64_t i = 0; i < M; i++)
#define FOR_J for (int64_t j = 0; j < N; j++)
#define FOR_K for (int64_t k = 0; k < K; k++)

// A is M x K, B is K x N, C is M x N, each row after row with no gap.
#define ORDER(name, OUTER, MIDDLE, INNER)                        \
    void gemm_##name(int64_t M, int64_t N, int64_t K,            \
                     const float *restrict A,                    \
                     const float *restrict B,                    \
                     float *restrict C)                          \
    {                                                            \
        OUTER MIDDLE INNER                                       \
            C[i * N + j] += A[i * K + k] * B[k * N + j];         \
    }

ORDER(ijk, FOR_I, FOR_J, FOR_K)  // inner: a dot product
ORDER(jik, FOR_J, FOR_I, FOR_K)
ORDER(ikj, FOR_I, FOR_K, FOR_J)  // inner: add a row of B to a row of C
ORDER(kij, FOR_K, FOR_I, FOR_J)
ORDER(jki, FOR_J, FOR_K, FOR_I)  // inner: down a column of A and of C
ORDER(kji, FOR_K, FOR_J, FOR_I)
// --8<-- [end:orders]

// --8<-- [start:blocked]
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// ikj inside a block of B that is BLOCK_K rows by BLOCK_N columns.
void gemm_blocked(int64_t M, int64_t N, int64_t K,
                  const float *restrict A, const float *restrict B,
                  float *restrict C, int64_t BLOCK_K, int64_t BLOCK_N)
{
    for (int64_t k0 = 0; k0 < K; k0 += BLOCK_K)
        for (int64_t j0 = 0; j0 < N; j0 += BLOCK_N) {
            int64_t k_end = smaller(k0 + BLOCK_K, K);  // ragged edge
            int64_t j_end = smaller(j0 + BLOCK_N, N);
            for (int64_t i = 0; i < M; i++)
                for (int64_t k = k0; k < k_end; k++)
                    for (int64_t j = j0; j < j_end; j++)
                        C[i * N + j] += A[i * K + k] * B[k * N + j];
        }
}
// --8<-- [end:blocked]
