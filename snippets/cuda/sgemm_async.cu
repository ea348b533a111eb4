// ARCH: sm_80 sm_90
// Rung 9, async: copies go from global to shared memory without passing through registers,
// STAGES - 1 steps ahead of the arithmetic. One barrier a step is enough.
// B_VEC is 4 where B's rows are contiguous and start at multiples of 16 bytes, else 1.
// SPDX-License-Identifier: MIT

#ifndef B_VEC
#define B_VEC 4
#endif
#ifndef STAGES
#define STAGES 3
#endif

typedef long long int64;
constexpr int BM = 128, BN = 128, BK = 8;
constexpr int WM = 32, WN = 64;
constexpr int TM = 8, TN = 8;
constexpr int LM = WM / TM, LN = WN / TN;
constexpr int PAD = 4;
constexpr int THREADS = BM / TM * (BN / TN);
static_assert(LM * LN == 32, "a warp has 32 lanes");
static_assert(STAGES >= 2, "one stage is read while another is written");
static_assert(BK % (THREADS / 32) == 0 && BN % (32 * B_VEC) == 0, "B's tile must divide among the warps");
static_assert(BM % (THREADS / BK) == 0, "A's tile must divide among the threads");

// --8<-- [start:copy]
// Starts a copy of BYTES (4 or 16) and returns at once. Of these, `bytes` are
// read and the rest is filled with zeros.
template <int BYTES>
__device__ void copy_async(float* shared, const float* global, int bytes)
{
    const unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :: "r"(to), "l"(global), "n"(BYTES), "r"(bytes) : "memory");
}
__device__ void end_group()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING>  // waits until at most PENDING groups are under way
__device__ void wait_groups()
{
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}
__device__ int clamp(int64 x, int most)
{
    return x < 0 ? 0 : x < most ? (int)x : most;
}
// --8<-- [end:copy]

// --8<-- [start:kernel]
extern "C" __global__ void __launch_bounds__(THREADS) sgemm(
    const float* A, const float* B, float* C, int64 M, int64 N, int64 K,
    int64 a_row, int64 a_col, int64 b_row, int64 b_col,
    int64 c_row, int64 c_col, float alpha, float beta)
{
    __shared__ __align__(16) float As[STAGES][BK][BM + PAD];
    __shared__ __align__(16) float Bs[STAGES][BK][BN];

    const int64 block_y = (int64)blockIdx.z * gridDim.y + blockIdx.y;
    const int64 row0 = block_y * BM, col0 = (int64)blockIdx.x * BN;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int wy = warp / (BN / WN) * WM + lane / LN * 4;
    const int wx = warp % (BN / WN) * WN + lane % LN * 4;
    const int ak = threadIdx.x % BK, am = threadIdx.x / BK;
    const int bn = lane * B_VEC, bk = warp;
    const int64 steps = (K + BK - 1) / BK;

    auto fetch = [&](int64 step) {
        const int stage = (int)(step % STAGES);
        const int64 ka = step * BK + ak;
        for (int i = 0; i < BM; i += THREADS / BK) {
            const int64 row = row0 + am + i;
            copy_async<4>(&As[stage][ak][am + i], &A[row * a_row + ka * a_col],
                          row < M && ka < K ? 4 : 0);
        }
        for (int i = 0; i < BK; i += THREADS / 32)
            for (int j = 0; j < BN; j += 32 * B_VEC) {
                const int64 kb = step * BK + bk + i, col = col0 + bn + j;
                copy_async<4 * B_VEC>(
                    &Bs[stage][bk + i][bn + j], &B[kb * b_row + col * b_col],
                    kb < K ? 4 * clamp(N - col, B_VEC) : 0);
            }
    };
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < steps) fetch(step);
        end_group();  // an empty group counts too
    }

    float acc[TM][TN] = {};
    for (int64 step = 0; step < steps; ++step) {
        wait_groups<STAGES - 2>();  // my copies of this step have arrived,
        __syncthreads();            // everyone's have; the oldest stage is free
        if (step + STAGES - 1 < steps) fetch(step + STAGES - 1);
        end_group();

        const int stage = (int)(step % STAGES);
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            float a[TM], b[TN];
            for (int i = 0; i < TM; i += 4)
                *(float4*)&a[i] = *(float4*)&As[stage][k][wy + i * LM];
            for (int j = 0; j < TN; j += 4)
                *(float4*)&b[j] = *(float4*)&Bs[stage][k][wx + j * LN];
            for (int i = 0; i < TM; ++i)
                for (int j = 0; j < TN; ++j)
                    acc[i][j] += a[i] * b[j];
        }
    }
    for (int i = 0; i < TM; ++i)
        for (int j = 0; j < TN; ++j) {
            const int64 row = row0 + wy + i / 4 * (LM * 4) + i % 4;
            const int64 col = col0 + wx + j / 4 * (LN * 4) + j % 4;
            if (row >= M || col >= N) continue;
            float* c = &C[row * c_row + col * c_col];
            *c = beta == 0.0f ? alpha * acc[i][j]
                              : alpha * acc[i][j] + beta * *c;
        }
}
// --8<-- [end:kernel]
