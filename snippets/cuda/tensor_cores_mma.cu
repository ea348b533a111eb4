// ARCH: sm_80 sm_90
// bf16 matrix multiplication with mma.sync, ldmatrix and a queue of cp.async
// copies: a block makes a 128 x 128 tile of C, its 8 warps 64 x 32 each.
// VECTOR=1: 16-byte copies; A_T, B_T: this operand's transpose is row-major.
// VECTOR=0: element by element, with any strides (then A_T = B_T = 0).
// SPDX-License-Identifier: MIT

#ifndef VECTOR
#define VECTOR 1
#endif
#ifndef A_T
#define A_T 0
#endif
#ifndef B_T
#define B_T 0
#endif
#ifndef STAGES
#define STAGES 3
#endif
static_assert(VECTOR || (!A_T && !B_T),
              "without vectors the strides say it all");
static_assert(STAGES >= 2, "a queue has at least 2 stages");

#define BM 128
#define BN 128
#define BK 64

typedef unsigned int uint32;
typedef unsigned short uint16;
typedef unsigned long long uint64;
typedef long long int64;

constexpr int A_BYTES = BM * BK * 2, B_BYTES = BK * BN * 2;

// --8<-- [start:swizzle]
// Byte offset of a chunk of 8 elements in a tile with rows of `columns`. The
// exclusive or spreads a chunk of 8 neighboring rows over 8 groups of banks.
__device__ __forceinline__ int chunk_at(int row, int chunk, int columns)
{
    return row * columns * 2 + (chunk ^ (row & 7)) * 16;
}
// --8<-- [end:swizzle]

// --8<-- [start:copy]
// Starts the copy of a ROWS x COLUMNS tile from (row0, col0) on of a matrix of
// rows x cols; what lies outside becomes zero.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void copy_tile(
    uint32 to, const uint16* from, int row0, int col0, int rows, int cols,
    int64 row_stride, int64 col_stride)
{
#pragma unroll 2
    for (int i = 0; i < ROWS * COLUMNS / 8 / 256; ++i) {
        const int e = i * 256 + threadIdx.x;
        const int r = e / (COLUMNS / 8), chunk = e % (COLUMNS / 8);
        const int row = row0 + r, col = col0 + chunk * 8;
        const uint32 there = to + chunk_at(r, chunk, COLUMNS);
        const int inside = row < rows ? max(0, min(8, cols - col)) : 0;
#if VECTOR
        const uint16* here = inside ? from + row * row_stride + col : from;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(there), "l"(here), "r"(inside * 2) : "memory");
#else
        uint32 w[4] = {0, 0, 0, 0};
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (j < inside)
                w[j / 2] |= (uint32)from[row * row_stride
                                         + (col + j) * col_stride]
                            << 16 * (j % 2);
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                     :: "r"(there), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                     : "memory");
#endif
    }
}
// --8<-- [end:copy]

// --8<-- [start:fragments]
// Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
template <bool TRANSPOSED>
__device__ __forceinline__ void ldmatrix(uint32 (&r)[4], uint32 address)
{
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 "
                     "{%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 "
                     "{%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address) : "memory");
}

// d [16, 8] += a [16, 16] @ b [16, 8] by one warp.
__device__ __forceinline__ void mma(float (&d)[4], const uint32 (&a)[4],
                                    uint32 b0, uint32 b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),
                   "r"(b0), "r"(b1));
}
// --8<-- [end:fragments]

__device__ __forceinline__ uint16 to_bf16(float x)
{
    uint16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// --8<-- [start:mma]
extern "C" __global__ void __launch_bounds__(256, 2) matmul_mma(
    const uint16* A, const uint16* B, uint16* C, int M, int N, int K,
    int64 a_row, int64 a_col, int64 b_row, int64 b_col,
    int64 c_row, int64 c_col)
{
    extern __shared__ __align__(128) unsigned char raw[];
    const uint32 a_tiles = (uint32)__cvta_generic_to_shared(raw);
    const uint32 b_tiles = a_tiles + STAGES * A_BYTES;
    const int n_tiles = (N + BN - 1) / BN;
    const int row0 = blockIdx.x / n_tiles * BM;
    const int col0 = blockIdx.x % n_tiles * BN;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp / 4 * 64, warp_col = warp % 4 * 32;
    const int octet = lane / 8, line = lane % 8;  // a matrix, a row of it
    const int steps = (K + BK - 1) / BK;

    auto fetch = [&](int step) {  // a stage of the queue; past the end, nothing
        if (step < steps) {
            const int slot = step % STAGES;
            const uint32 a = a_tiles + slot * A_BYTES;
            const uint32 b = b_tiles + slot * B_BYTES;
            const int k = step * BK;
            if (A_T) copy_tile<BK, BM>(a, A, k, row0, K, M, a_col, a_row);
            else copy_tile<BM, BK>(a, A, row0, k, M, K, a_row, a_col);
            if (B_T) copy_tile<BN, BK>(b, B, col0, k, N, K, b_col, b_row);
            else copy_tile<BK, BN>(b, B, k, col0, K, N, b_row, b_col);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };

// --8<-- [end:mma]
// --8<-- [start:loop]
    float acc[4][4][4] = {};
    for (int s = 0; s < STAGES - 1; ++s) fetch(s);
    for (int step = 0; step < steps; ++step) {
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
        __syncthreads();  // this stage is here, the one before is read
        fetch(step + STAGES - 1);
        const int slot = step % STAGES;
        const uint32 a = a_tiles + slot * A_BYTES, b = b_tiles + slot * B_BYTES;
#pragma unroll
        for (int kk = 0; kk < BK / 16; ++kk) {
            uint32 fa[4][4], fb[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // rows 0-7, 8-15 of k 0-7, of k 8-15
                const int m8 = (warp_row + i * 16) / 8 + octet % 2;
                const int k8 = kk * 2 + octet / 2;
                ldmatrix<A_T>(fa[i],
                              a + (A_T ? chunk_at(k8 * 8 + line, m8, BM)
                                       : chunk_at(m8 * 8 + line, k8, BK)));
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {  // k 0-7, 8-15 of columns 0-7, 8-15
                const int n8 = (warp_col + j * 16) / 8 + octet / 2;
                const int k8 = kk * 2 + octet % 2;
                ldmatrix<!B_T>(fb[j],
                               b + (B_T ? chunk_at(n8 * 8 + line, k8, BK)
                                        : chunk_at(k8 * 8 + line, n8, BN)));
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    mma(acc[i][j], fa[i], fb[j / 2][j % 2 * 2],
                        fb[j / 2][j % 2 * 2 + 1]);
        }
    }
// --8<-- [end:loop]

#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {  // 2 columns of a row, of row + 8
                const int r = row0 + warp_row + i * 16 + lane / 4 + e / 2 * 8;
                const int c = col0 + warp_col + j * 8 + lane % 4 * 2 + e % 2;
                if (r < M && c < N)
                    C[r * c_row + c * c_col] = to_bf16(acc[i][j][e]);
            }
}
