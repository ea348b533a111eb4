// ARCH: sm_80 sm_90
// The tiled product for an A whose columns lie in one piece (a transposed view): the lanes
// of a warp fetch along a column of A and write down a column of As. PAD words are added to
// each row of As: with none, those writes meet in the same banks.
// SPDX-License-Identifier: MIT

#ifndef TILE
#define TILE 32
#endif
#ifndef PAD
#define PAD 1
#endif

typedef long long int64;

// --8<-- [start:turned]
extern "C" __global__ void __launch_bounds__(TILE * TILE) matmul_turned(
    const float* A, const float* B, float* C, int64 M, int64 N, int64 K,
    int64 a_row, int64 a_col, int64 b_row, int64 b_col, int64 c_row, int64 c_col)
{
    __shared__ float As[TILE][TILE + PAD];
    __shared__ float Bs[TILE][TILE];

    const int tx = threadIdx.x, ty = threadIdx.y;
    const int64 top = ((int64)blockIdx.z * gridDim.y + blockIdx.y) * TILE;
    const int64 row = top + ty, col = (int64)blockIdx.x * TILE + tx;

    float acc = 0.0f;
    for (int64 k0 = 0; k0 < K; k0 += TILE) {
        const int64 ra = top + tx;  // lanes run along the rows of A ...
        const int64 ka = k0 + ty, kb = k0 + ty;
        As[tx][ty] = (ra < M && ka < K) ? A[ra * a_row + ka * a_col] : 0.0f;
        Bs[ty][tx] = (kb < K && col < N) ? B[kb * b_row + col * b_col] : 0.0f;
        __syncthreads();

        for (int k = 0; k < TILE; ++k)
            acc += As[ty][k] * Bs[k][tx];  // ... and what is read here is as before
        __syncthreads();
    }
    if (row < M && col < N)
        C[row * c_row + col * c_col] = acc;
}
// --8<-- [end:turned]
