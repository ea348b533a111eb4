// ARCH: sm_80 sm_90
// Rung 5, square: a thread makes TM x TN elements of C, from a column of TM elements of A
// and a row of TN elements of B that it holds in registers.
// SPDX-License-Identifier: MIT

typedef long long int64;
constexpr int BM = 128, BN = 128, BK = 8;
constexpr int TM = 8, TN = 8;
constexpr int THREADS = BM / TM * (BN / TN);
static_assert(THREADS % BK == 0 && BM % (THREADS / BK) == 0, "A's tile must divide among the threads");
static_assert(THREADS % BN == 0 && BK % (THREADS / BN) == 0, "B's tile must divide among the threads");

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
    const int tx = threadIdx.x % (BN / TN), ty = threadIdx.x / (BN / TN);
    const int ak = threadIdx.x % BK, am = threadIdx.x / BK;
    const int bn = threadIdx.x % BN, bk = threadIdx.x / BN;

    float acc[TM][TN] = {};
    for (int64 k0 = 0; k0 < K; k0 += BK) {
        for (int i = 0; i < BM; i += THREADS / BK) {
            const int64 row = row0 + am + i, ka = k0 + ak;
            As[am + i][ak] =
                row < M && ka < K ? A[row * a_row + ka * a_col] : 0.0f;
        }
        for (int i = 0; i < BK; i += THREADS / BN) {
            const int64 col = col0 + bn, kb = k0 + bk + i;
            Bs[bk + i][bn] =
                kb < K && col < N ? B[kb * b_row + col * b_col] : 0.0f;
        }
        __syncthreads();

        for (int k = 0; k < BK; ++k) {
            float a[TM], b[TN];
            for (int i = 0; i < TM; ++i) a[i] = As[ty * TM + i][k];
            for (int j = 0; j < TN; ++j) b[j] = Bs[k][tx * TN + j];
            for (int i = 0; i < TM; ++i)
                for (int j = 0; j < TN; ++j)
                    acc[i][j] += a[i] * b[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < TM; ++i)
        for (int j = 0; j < TN; ++j) {
            const int64 row = row0 + ty * TM + i, col = col0 + tx * TN + j;
            if (row >= M || col >= N) continue;
            float* c = &C[row * c_row + col * c_col];
            *c = beta == 0.0f ? alpha * acc[i][j]
                              : alpha * acc[i][j] + beta * *c;
        }
}
// --8<-- [end:kernel]
