// ARCH: sm_80 sm_90
// Rung 4, strip: a thread makes TM elements of one column of C. It reads an element of B
// once and uses it TM times.
// SPDX-License-Identifier: MIT

typedef long long int64;
constexpr int BM = 64, BN = 64, BK = 8;  // the tile of C that a block makes, and a step of K
constexpr int TM = 8;                    // the strip of C that a thread makes
constexpr int THREADS = BM / TM * BN;
static_assert(THREADS == BM * BK && THREADS == BK * BN, "each thread fetches one element of A and one of B");

// --8<-- [start:kernel]
extern "C" __global__ void __launch_bounds__(THREADS) sgemm(
    const float* A, const float* B, float* C, int64 M, int64 N, int64 K,
    int64 a_row, int64 a_col, int64 b_row, int64 b_col,
    int64 c_row, int64 c_col, float alpha, float beta)
{
    __shared__ float As[BM][BK];
    __shared__ float Bs[BK][BN];

    const int64 block_y = (int64)blockIdx.z * gridDim.y + blockIdx.y;
    const int64 row0 = block_y * BM, col0 = (int64)blockIdx.x * BN;
    const int tx = threadIdx.x % BN, ty = threadIdx.x / BN;  // of the strip
    const int ak = threadIdx.x % BK, am = threadIdx.x / BK;  // fetched of A
    const int bn = tx, bk = ty;                              // fetched of B

    float acc[TM] = {};
    for (int64 k0 = 0; k0 < K; k0 += BK) {
        const int64 row = row0 + am, ka = k0 + ak;
        const int64 col = col0 + bn, kb = k0 + bk;
        As[am][ak] = row < M && ka < K ? A[row * a_row + ka * a_col] : 0.0f;
        Bs[bk][bn] = kb < K && col < N ? B[kb * b_row + col * b_col] : 0.0f;
        __syncthreads();

        for (int k = 0; k < BK; ++k) {
            const float b = Bs[k][tx];
            for (int i = 0; i < TM; ++i)
                acc[i] += As[ty * TM + i][k] * b;
        }
        __syncthreads();
    }
    for (int i = 0; i < TM; ++i) {
        const int64 row = row0 + ty * TM + i, col = col0 + tx;
        if (row >= M || col >= N) continue;
        float* c = &C[row * c_row + col * c_col];
        *c = beta == 0.0f ? alpha * acc[i] : alpha * acc[i] + beta * *c;
    }
}
// --8<-- [end:kernel]
