// ARCH: sm_80 sm_90
// fp32 matrix multiplication C = A @ B through shared-memory tiles. TILE comes from the
// compiler's command line (-DTILE=16); one block of TILE x TILE threads makes one
// TILE x TILE tile of C. Strides are in elements and 64 bits wide, so that row-major
// matrices, transposed views and slices all go through the same kernel.
// SPDX-License-Identifier: MIT

#ifndef TILE
#define TILE 32
#endif
static_assert(TILE == 8 || TILE == 16 || TILE == 32,
              "TILE must be 8, 16 or 32: a block has TILE x TILE threads, in whole warps");

typedef long long int64;

// --8<-- [start:naive]
extern "C" __global__ void matmul_naive(
    const float* A, const float* B, float* C, int64 M, int64 N, int64 K,
    int64 a_row, int64 a_col, int64 b_row, int64 b_col, int64 c_row, int64 c_col)
{
    const int64 block_row = (int64)blockIdx.z * gridDim.y + blockIdx.y;
    const int64 row = block_row * blockDim.y + threadIdx.y;
    const int64 col = (int64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= M || col >= N) return;

    float acc = 0.0f;
    for (int64 k = 0; k < K; ++k)
        acc += A[row * a_row + k * a_col] * B[k * b_row + col * b_col];
    C[row * c_row + col * c_col] = acc;
}
// --8<-- [end:naive]

// --8<-- [start:tiled]
extern "C" __global__ void __launch_bounds__(TILE * TILE) matmul_tiled(
    const float* A, const float* B, float* C, int64 M, int64 N, int64 K,
    int64 a_row, int64 a_col, int64 b_row, int64 b_col, int64 c_row, int64 c_col)
{
    if (blockDim.x != TILE || blockDim.y != TILE) __trap();  // one thread per tile element

    __shared__ float As[TILE][TILE];  // rows of this C tile, a slice of K
    __shared__ float Bs[TILE][TILE];  // the same slice of K, columns of this C tile

    const int tx = threadIdx.x, ty = threadIdx.y;  // place in the tile
    const int64 block_row = (int64)blockIdx.z * gridDim.y + blockIdx.y;
    const int64 row = block_row * TILE + ty;       // place in C
    const int64 col = (int64)blockIdx.x * TILE + tx;

    float acc = 0.0f;
    for (int64 k0 = 0; k0 < K; k0 += TILE) {
        const int64 ka = k0 + tx;  // the column of A that this thread fetches
        const int64 kb = k0 + ty;  // the row of B that this thread fetches
        As[ty][tx] = (row < M && ka < K) ? A[row * a_row + ka * a_col] : 0.0f;
        Bs[ty][tx] = (kb < K && col < N) ? B[kb * b_row + col * b_col] : 0.0f;
        __syncthreads();  // barrier 1: both tiles are complete before anyone reads

        for (int k = 0; k < TILE; ++k)
            acc += As[ty][k] * Bs[k][tx];
        __syncthreads();  // barrier 2: everyone has read before anyone overwrites
    }
    if (row < M && col < N)
        C[row * c_row + col * c_col] = acc;
}
// --8<-- [end:tiled]
