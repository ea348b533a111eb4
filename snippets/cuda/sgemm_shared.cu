// ARCH: sm_80 sm_90
// Rung 3, shared: the block fetches 32 x 32 tiles of A and B into shared memory together.
// SPDX-License-Identifier: MIT

typedef long long int64;
constexpr int TILE = 32;

// --8<-- [start:kernel]
extern "C" __global__ void __launch_bounds__(TILE * TILE) sgemm(
    const float* A, const float* B, float* C, int64 M, int64 N, int64 K,
    int64 a_row, int64 a_col, int64 b_row, int64 b_col,
    int64 c_row, int64 c_col, float alpha, float beta)
{
    __shared__ float As[TILE][TILE];
    __shared__ float Bs[TILE][TILE];

    const int64 block_y = (int64)blockIdx.z * gridDim.y + blockIdx.y;
    const int tx = threadIdx.x % TILE, ty = threadIdx.x / TILE;
    const int64 row = block_y * TILE + ty;
    const int64 col = (int64)blockIdx.x * TILE + tx;

    float acc = 0.0f;
    for (int64 k0 = 0; k0 < K; k0 += TILE) {
        const int64 ka = k0 + tx, kb = k0 + ty;
        As[ty][tx] = row < M && ka < K ? A[row * a_row + ka * a_col] : 0.0f;
        Bs[ty][tx] = kb < K && col < N ? B[kb * b_row + col * b_col] : 0.0f;
        __syncthreads();

        for (int k = 0; k < TILE; ++k)
            acc += As[ty][k] * Bs[k][tx];
        __syncthreads();
    }
    if (row < M && col < N) {
        float* c = &C[row * c_row + col * c_col];
        *c = beta == 0.0f ? alpha * acc : alpha * acc + beta * *c;
    }
}
// --8<-- [end:kernel]
