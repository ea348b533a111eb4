// ARCH: sm_80 sm_90
// bf16 matrix multiplication through the WMMA API: 4 warps, tiles of 64 x 64.
// Strides are in elements and 64 bits wide: any view of any size goes through.
// SPDX-License-Identifier: MIT
#include <cuda_bf16.h>
#include <mma.h>

using namespace nvcuda;
typedef long long int64;

#define BM 64
#define BN 64
#define BK 32
#define PAD 8  // spreads rows over the banks, and keeps 16 bytes together

extern "C" __global__ void __launch_bounds__(128) matmul_wmma(
    const __nv_bfloat16* A, const __nv_bfloat16* B, __nv_bfloat16* C,
    int M, int N, int K,
    int64 a_row, int64 a_col, int64 b_row, int64 b_col,
    int64 c_row, int64 c_col)
{
    __shared__ __align__(32) __nv_bfloat16 As[BM][BK + PAD];
    __shared__ __align__(32) __nv_bfloat16 Bs[BK][BN + PAD];
    __shared__ __align__(32) float Cs[BM][BN + PAD];

    const int64 n_tiles = (N + BN - 1) / BN;
    const int64 row0 = blockIdx.x / n_tiles * BM;
    const int64 col0 = blockIdx.x % n_tiles * BN;
    const int warp_row = threadIdx.x / 64 * 32;
    const int warp_col = threadIdx.x / 32 % 2 * 32;
    const __nv_bfloat16 zero = __float2bfloat16(0.0f);

    wmma::fragment<wmma::accumulator, 16, 16, 16, float> acc[2][2];
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j) wmma::fill_fragment(acc[i][j], 0.0f);

    for (int64 k0 = 0; k0 < K; k0 += BK) {
        for (int e = threadIdx.x; e < BM * BK; e += 128) {
            const int64 r = row0 + e / BK, k = k0 + e % BK;
            As[e / BK][e % BK] =
                r < M && k < K ? A[r * a_row + k * a_col] : zero;
        }
        for (int e = threadIdx.x; e < BK * BN; e += 128) {
            const int64 k = k0 + e / BN, c = col0 + e % BN;
            Bs[e / BN][e % BN] =
                k < K && c < N ? B[k * b_row + c * b_col] : zero;
        }
        __syncthreads();
// --8<-- [start:multiply]
        for (int k = 0; k < BK; k += 16) {
            wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16,
                           wmma::row_major> a[2];
            wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16,
                           wmma::row_major> b[2];
            for (int i = 0; i < 2; ++i) {
                wmma::load_matrix_sync(
                    a[i], &As[warp_row + i * 16][k], BK + PAD);
                wmma::load_matrix_sync(
                    b[i], &Bs[k][warp_col + i * 16], BN + PAD);
            }
            for (int i = 0; i < 2; ++i)
                for (int j = 0; j < 2; ++j)
                    wmma::mma_sync(acc[i][j], a[i], b[j], acc[i][j]);
        }
// --8<-- [end:multiply]
        __syncthreads();
    }

    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j)
            wmma::store_matrix_sync(&Cs[warp_row + i * 16][warp_col + j * 16],
                                    acc[i][j], BN + PAD, wmma::mem_row_major);
    __syncthreads();
    for (int e = threadIdx.x; e < BM * BN; e += 128) {
        const int64 r = row0 + e / BN, c = col0 + e % BN;
        if (r < M && c < N)
            C[r * c_row + c * c_col] = __float2bfloat16(Cs[e / BN][e % BN]);
    }
}
