// ARCH: sm_80 sm_90
// Rung 6, vector: four elements an instruction. A is transposed on its way into shared
// memory, so that the TM elements that a thread wants lie side by side.
// A_VEC and B_VEC are 4 where rows are contiguous and start at multiples of 16 bytes, else 1.
// SPDX-License-Identifier: MIT

#ifndef A_VEC
#define A_VEC 4
#endif
#ifndef B_VEC
#define B_VEC 4
#endif

typedef long long int64;
constexpr int BM = 128, BN = 128, BK = 8;
constexpr int TM = 8, TN = 8;
constexpr int THREADS = BM / TM * (BN / TN);
static_assert(THREADS * 4 == BM * BK && THREADS * 4 == BK * BN, "each thread fetches four elements of A and of B");
static_assert(TM % 4 == 0 && TN % 4 == 0, "a thread reads its elements in fours");

// --8<-- [start:fetch]
// Four elements that are `step` apart, with zeros past the `left` that exist.
template <int VEC>
__device__ float4 fetch4(const float* p, int64 step, int64 left)
{
    float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
    if (VEC == 4 && left >= 4) return *(const float4*)p;
    if (left > 0) v.x = p[0];
    if (left > 1) v.y = p[step];
    if (left > 2) v.z = p[2 * step];
    if (left > 3) v.w = p[3 * step];
    return v;
}
// --8<-- [end:fetch]

// --8<-- [start:kernel]
extern "C" __global__ void __launch_bounds__(THREADS) sgemm(
    const float* A, const float* B, float* C, int64 M, int64 N, int64 K,
    int64 a_row, int64 a_col, int64 b_row, int64 b_col,
    int64 c_row, int64 c_col, float alpha, float beta)
{
    __shared__ __align__(16) float As[BK][BM];
    __shared__ __align__(16) float Bs[BK][BN];

    const int64 block_y = (int64)blockIdx.z * gridDim.y + blockIdx.y;
    const int64 row0 = block_y * BM, col0 = (int64)blockIdx.x * BN;
    const int tx = threadIdx.x % (BN / TN), ty = threadIdx.x / (BN / TN);
    const int ak = threadIdx.x % (BK / 4) * 4, am = threadIdx.x / (BK / 4);
    const int bn = threadIdx.x % (BN / 4) * 4, bk = threadIdx.x / (BN / 4);
    const int64 arow = row0 + am, bcol = col0 + bn;

    float acc[TM][TN] = {};
    for (int64 k0 = 0; k0 < K; k0 += BK) {
        const float4 va = fetch4<A_VEC>(
            &A[arow * a_row + (k0 + ak) * a_col], a_col,
            arow < M ? K - k0 - ak : 0);
        const float4 vb = fetch4<B_VEC>(
            &B[(k0 + bk) * b_row + bcol * b_col], b_col,
            k0 + bk < K ? N - bcol : 0);
        As[ak + 0][am] = va.x;
        As[ak + 1][am] = va.y;
        As[ak + 2][am] = va.z;
        As[ak + 3][am] = va.w;
        *(float4*)&Bs[bk][bn] = vb;
        __syncthreads();

#pragma unroll
        for (int k = 0; k < BK; ++k) {
            float a[TM], b[TN];
            for (int i = 0; i < TM; i += 4)
                *(float4*)&a[i] = *(float4*)&As[k][ty * TM + i];
            for (int j = 0; j < TN; j += 4)
                *(float4*)&b[j] = *(float4*)&Bs[k][tx * TN + j];
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
