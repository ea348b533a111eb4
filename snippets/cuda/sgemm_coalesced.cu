// ARCH: sm_80 sm_90
// Rung 2, coalesced: the same, with the roles of x and y exchanged. The lanes of a warp now
// read neighboring elements of B and write neighboring elements of C.
// SPDX-License-Identifier: MIT

typedef long long int64;

// --8<-- [start:kernel]
extern "C" __global__ void sgemm(
    const float* A, const float* B, float* C, int64 M, int64 N, int64 K,
    int64 a_row, int64 a_col, int64 b_row, int64 b_col,
    int64 c_row, int64 c_col, float alpha, float beta)
{
    const int64 block_y = (int64)blockIdx.z * gridDim.y + blockIdx.y;
    const int64 row = block_y * blockDim.y + threadIdx.y;
    const int64 col = (int64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= M || col >= N) return;

    float acc = 0.0f;
    for (int64 k = 0; k < K; ++k)
        acc += A[row * a_row + k * a_col] * B[k * b_row + col * b_col];

    float* c = &C[row * c_row + col * c_col];
    *c = beta == 0.0f ? alpha * acc : alpha * acc + beta * *c;
}
// --8<-- [end:kernel]
