// ARCH: sm_80 sm_90
// Rung 1, naive: one thread makes one element of C. threadIdx.x, which varies fastest in a
// warp, runs down the rows.
// SPDX-License-Identifier: MIT

typedef long long int64;

// --8<-- [start:kernel]
extern "C" __global__ void sgemm(
    const float* A, const float* B, float* C, int64 M, int64 N, int64 K,
    int64 a_row, int64 a_col, int64 b_row, int64 b_col,
    int64 c_row, int64 c_col, float alpha, float beta)
{
    const int64 block_y = (int64)blockIdx.z * gridDim.y + blockIdx.y;
    const int64 row = (int64)blockIdx.x * blockDim.x + threadIdx.x;
    const int64 col = block_y * blockDim.y + threadIdx.y;
    if (row >= M || col >= N) return;

    float acc = 0.0f;
    for (int64 k = 0; k < K; ++k)
        acc += A[row * a_row + k * a_col] * B[k * b_row + col * b_col];

    float* c = &C[row * c_row + col * c_col];
    *c = beta == 0.0f ? alpha * acc : alpha * acc + beta * *c;
}
// --8<-- [end:kernel]
