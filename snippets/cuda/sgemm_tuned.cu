// ARCH: sm_80 sm_90
// Rung 10, tuned: the async kernel with its numbers as parameters, a fragment loaded one k
// ahead, copies that follow whichever way an operand is contiguous, guards only at the edges,
// and the sums updated there and back.
// SPDX-License-Identifier: MIT

#ifndef BM  // all of these come from the compiler's command line: sgemm.py has the defaults
#define BM 128
#define BN 128
#define BK 8
#define WM 64
#define WN 64
#define TM 16
#define TN 8
#define STAGES 3
#define MIN_BLOCKS 2
#endif
#ifndef A_ALONG_K  // 1: neighbors in memory follow one another along K; 0: along M or N
#define A_ALONG_K 1
#endif
#ifndef B_ALONG_K
#define B_ALONG_K 0
#endif
#ifndef A_VEC  // elements a copy: 4 needs contiguous rows at multiples of 16 bytes
#define A_VEC 1
#endif
#ifndef B_VEC
#define B_VEC 4
#endif
#ifndef C_VEC
#define C_VEC 4
#endif
#ifndef GROUP  // rows of blocks that are walked together
#define GROUP 1
#endif
#ifndef SERPENTINE  // 1: sums are updated there and back; 0: each row from the left
#define SERPENTINE 1
#endif
#ifndef FETCH_AT  // the k of a step at which it asks for the tiles of a later one
#define FETCH_AT 1
#endif
#ifndef HINT  // ".L2::128B" asks for 128 bytes to come into L2 with each copy
#define HINT ""
#endif

typedef long long int64;
constexpr int PAD = 4;
constexpr int LM = WM / TM, LN = WN / TN, WARPS = BM / WM * (BN / WN), THREADS = 32 * WARPS;
constexpr int PASS = 8;  // lanes along K where a copy transposes: 8 x 4 lanes

static_assert(BM % WM == 0 && BN % WN == 0, "the block tile must divide into warp tiles");
static_assert(WM % TM == 0 && WN % TN == 0, "the warp tile must divide into thread tiles");
static_assert(LM * LN == 32, "WM / TM * (WN / TN) must be 32: a warp has 32 lanes");
static_assert(THREADS <= 1024, "BM / WM * (BN / WN) must be at most 32: a block has at most 32 warps");
static_assert(TM % 4 == 0 && TN % 4 == 0, "TM and TN must be multiples of 4: a thread reads in fours");
static_assert(BK % PASS == 0 && BK % WARPS == 0, "BK must be a multiple of 8 and of the warps");
static_assert(BM % (THREADS / PASS) == 0 && BN % (THREADS / PASS) == 0, "BM and BN must divide among the threads");
static_assert(BM % 128 == 0 && BN % 128 == 0, "BM and BN must be multiples of 128: a warp copies 32 vectors of 4");
static_assert(STAGES >= 2, "STAGES must be at least 2: one is read while another is written");
static_assert(FETCH_AT >= 0 && FETCH_AT < BK - 1, "FETCH_AT must come before the wait at k = BK - 1");
static_assert(STAGES * BK * (BM + BN + 2 * PAD) * 4 <= 48 * 1024, "the stages must fit into 48 KiB of shared memory");

template <int BYTES>
__device__ __forceinline__ void copy_async(float* shared, const float* global, int bytes)
{
    const unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    if (BYTES == 16)
        asm volatile("cp.async.cg.shared.global" HINT " [%0], [%1], 16, %2;" :: "r"(to), "l"(global), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global" HINT " [%0], [%1], 4, %2;" :: "r"(to), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void end_group()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wait_groups() { asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory"); }
__device__ __forceinline__ int clamp(int x, int most) { return x < 0 ? 0 : x < most ? x : most; }

// --8<-- [start:operand]
// How the threads of a block bring BK x SIDE elements of one operand into
// shared memory, where k is the row. x counts along M (of A) or N (of B).
template <int SIDE, bool ALONG_K, int VEC>
struct Operand {
    static constexpr int PITCH = SIDE + PAD;
    static constexpr int K_PASS = ALONG_K ? PASS : WARPS;
    static constexpr int X_PASS = ALONG_K ? THREADS / PASS : 32 * VEC;

    const float* from;       // of this thread's first element of the next tile
    int64 x_pass, k_pass, k_tile;  // steps in memory
    int k, x, x_left;  // its place in the tile; elements along x that exist

    __device__ __forceinline__ Operand(const float* base, int64 x_step,
                                       int64 k_step, int64 x0, int64 x_size)
    {
        k = ALONG_K ? threadIdx.x % PASS : threadIdx.x / 32;
        x = ALONG_K ? threadIdx.x / PASS : threadIdx.x % 32 * VEC;
        from = base + (x0 + x) * x_step + k * k_step;
        x_pass = X_PASS * x_step;
        k_pass = K_PASS * k_step;
        k_tile = BK * k_step;
        x_left = x_size - x0 < SIDE ? (int)(x_size - x0) : SIDE;
    }
    template <bool GUARD>
    __device__ __forceinline__ void fetch(float* tile, int k_left)
    {
        const float* row = from;
#pragma unroll
        for (int dk = 0; dk < BK; dk += K_PASS) {
            const float* p = row;
#pragma unroll
            for (int dx = 0; dx < SIDE; dx += X_PASS) {
                int bytes = 4 * VEC;
                if (GUARD)
                    bytes = k + dk < k_left ? 4 * clamp(x_left - x - dx, VEC)
                                            : 0;
                copy_async<4 * VEC>(tile + (k + dk) * PITCH + x + dx, p,
                                    bytes);
                p += x_pass;
            }
            row += k_pass;
        }
        from += k_tile;
    }
};
// --8<-- [end:operand]

// --8<-- [start:kernel]
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) sgemm(
    const float* A, const float* B, float* C, int64 M, int64 N, int64 K,
    int64 a_row, int64 a_col, int64 b_row, int64 b_col,
    int64 c_row, int64 c_col, float alpha, float beta)
{
    using OperandA = Operand<BM, A_ALONG_K, A_VEC>;
    using OperandB = Operand<BN, B_ALONG_K, B_VEC>;
    __shared__ __align__(16) float As[STAGES][BK][OperandA::PITCH];
    __shared__ __align__(16) float Bs[STAGES][BK][OperandB::PITCH];

    int64 block_y = (int64)blockIdx.z * gridDim.y + blockIdx.y;
    int64 block_x = blockIdx.x;
    if (GROUP > 1) {  // down GROUP rows of blocks before going on to the right
        const int64 id = block_y * gridDim.x + block_x;
        const int64 rows = (M + BM - 1) / BM;
        const int64 first = id / (GROUP * gridDim.x) * GROUP;
        const int64 high = rows - first < GROUP ? rows - first : GROUP;
        if (high <= 0) return;
        block_y = first + id % (GROUP * gridDim.x) % high;
        block_x = id % (GROUP * gridDim.x) / high;
    }
    const int64 row0 = block_y * BM, col0 = block_x * BN;
    if (row0 >= M) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int wy = warp / (BN / WN) * WM + lane / LN * 4;
    const int wx = warp % (BN / WN) * WN + lane % LN * 4;

    OperandA a_tiles(A, a_row, a_col, row0, M);
    OperandB b_tiles(B, b_col, b_row, col0, N);
    const bool inside = M - row0 >= BM && N - col0 >= BN;
    int64 k_left = K;  // of what has not been asked for
    auto fetch = [&](int stage) {
        if (inside && k_left >= BK) {
            a_tiles.fetch<false>(&As[stage][0][0], BK);
            b_tiles.fetch<false>(&Bs[stage][0][0], BK);
        } else if (k_left > 0) {
            const int left = k_left < BK ? (int)k_left : BK;
            a_tiles.fetch<true>(&As[stage][0][0], left);
            b_tiles.fetch<true>(&Bs[stage][0][0], left);
        }
        k_left -= BK;
        end_group();
    };
    float a[2][TM], b[2][TN], acc[TM][TN] = {};
    auto load = [&](int to, int stage, int k) {
#pragma unroll
        for (int i = 0; i < TM; i += 4)
            *(float4*)&a[to][i] = *(const float4*)&As[stage][k][wy + i * LM];
#pragma unroll
        for (int j = 0; j < TN; j += 4)
            *(float4*)&b[to][j] = *(const float4*)&Bs[stage][k][wx + j * LN];
    };

#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) fetch(stage);
    wait_groups<STAGES - 2>();
    __syncthreads();
    load(0, 0, 0);

    int reading = 0, writing = STAGES - 1;
    for (int64 left = K; left > 0; left -= BK) {
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            if (k == BK - 1) {  // this stage has been read: on to the next
                wait_groups<STAGES - 2>();
                __syncthreads();
                reading = reading + 1 == STAGES ? 0 : reading + 1;
            }
            load((k + 1) % 2, reading, (k + 1) % BK);
            if (k == FETCH_AT) {  // 0 follows the barrier: fragments go first
                fetch(writing);
                writing = writing + 1 == STAGES ? 0 : writing + 1;
            }
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int n = 0; n < TN; ++n) {
                    // There and back: at a turn a changes and b stays, so each
                    // multiply-add shares an operand with the one before it,
                    // which the unit still holds and need not read again.
                    const int j = SERPENTINE && i % 2 ? TN - 1 - n : n;
                    acc[i][j] += a[k % 2][i] * b[k % 2][j];
                }
        }
    }

#pragma unroll
    for (int i = 0; i < TM; ++i) {
        const int64 row = row0 + wy + i / 4 * (LM * 4) + i % 4;
        if (row >= M) continue;
#pragma unroll
        for (int j = 0; j < TN; j += 4) {
            const int64 col = col0 + wx + j * LN;
            float* c = &C[row * c_row + col * c_col];
            if (C_VEC == 4 && beta == 0.0f && col + 4 <= N) {
                *(float4*)c = {alpha * acc[i][j], alpha * acc[i][j + 1],
                               alpha * acc[i][j + 2], alpha * acc[i][j + 3]};
                continue;
            }
#pragma unroll
            for (int e = 0; e < 4; ++e, c += c_col)
                if (col + e < N)
                    *c = beta == 0.0f ? alpha * acc[i][j + e]
                                      : alpha * acc[i][j + e] + beta * *c;
        }
    }
}
// --8<-- [end:kernel]
