// ARCH: sm_90a
// bf16 matrix multiplication on Hopper: TMA brings tiles into swizzled shared
// memory, wgmma multiplies them there, fp32 accumulators stay in registers.
// C [M, N] is row-major. A_T=0: A is row-major [M, K]; A_T=1: its transpose is.
// B_T=0: B is row-major [K, N]; B_T=1: its transpose is. Sizes are arbitrary:
// TMA reads zeros outside a matrix, the stores leave out what is outside C.
// One source, several rungs: the constants below are set from the command line.
// SPDX-License-Identifier: MIT

#ifndef BM
#define BM 128          // rows of the tile of C that one block makes
#endif
#ifndef BN
#define BN 256          // its columns
#endif
#ifndef WARPGROUPS
#define WARPGROUPS 2    // groups of 128 threads that multiply
#endif
#ifndef STAGES
#define STAGES 4        // tiles of A and B in flight
#endif
#ifndef PINGPONG
#define PINGPONG 0      // 1: each warpgroup makes tiles of its own, in turn
#endif
#ifndef CLUSTER
#define CLUSTER 1       // blocks that share loads: 1, 2, or 4 as 2 x 2
#endif
#ifndef SHARE_A
#define SHARE_A 0       // 2 blocks share: 0 their tile of B, 1 their tile of A
#endif
#ifndef GROUP
#define GROUP 1         // rows of tiles that are visited together
#endif
#ifndef TMA_STORE
#define TMA_STORE 0     // 1: C leaves through shared memory and TMA
#endif
#ifndef LATE_STORE
#define LATE_STORE 0    // 1: C is written while the next tile is multiplied
#endif
#ifndef PANELS
#define PANELS 2        // with TMA_STORE: panels of 64 x 64 of C per warpgroup
#endif
#ifndef A_T
#define A_T 0
#endif
#ifndef B_T
#define B_T 0
#endif
#ifndef PRODUCER_REGS
#define PRODUCER_REGS 40
#endif
#ifndef CONSUMER_REGS
#define CONSUMER_REGS 232
#endif

#define BK 64                        // 64 bf16 are 128 bytes, one swizzled row
#define TEAM (PINGPONG ? 1 : WARPGROUPS)  // warpgroups that make a tile together
#define MI (BM / 64 / TEAM)          // slices of 64 rows that a warpgroup holds
static_assert(BN == 128 || BN == 192 || BN == 256,
              "BN must be 128, 192 or 256");
static_assert(BM == 64 * MI * TEAM && MI >= 1,
              "BM must be a multiple of 64 for each warpgroup of a tile");
static_assert(MI * BN <= (LATE_STORE ? 256 : 384),
              "accumulators: MI * BN / 2 registers, at most 192, 128 if kept");
static_assert(CLUSTER == 1 || CLUSTER == 2 || CLUSTER == 4,
              "CLUSTER must be 1, 2 or 4");
static_assert(!PINGPONG || WARPGROUPS == 2, "two warpgroups take turns");
static_assert(!LATE_STORE || TMA_STORE, "what is written late is staged");
static_assert(STAGES >= 2, "a queue has at least 2 stages");
static_assert(!TMA_STORE || MI * BN / 64 % PANELS == 0,
              "PANELS must divide the panels of a warpgroup's part of C");
static_assert((PRODUCER_REGS + WARPGROUPS * CONSUMER_REGS) * 128 <= 65536,
              "the registers of all warpgroups must fit the 65536 of an SM");

typedef unsigned int uint32;
typedef unsigned short uint16;
typedef unsigned long long uint64;
typedef long long int64;

struct alignas(64) TensorMap { uint64 opaque[16]; };  // a CUtensorMap

constexpr int A_BYTES = BM * BK * 2, B_BYTES = BN * BK * 2;
constexpr int PANEL = 64 * 128;      // 64 rows of 128 bytes

// --8<-- [start:barriers]
__device__ __forceinline__ uint32 shared_address(const void* p)
{
    return (uint32)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void barrier_init(uint32 barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 :: "r"(barrier), "r"(arrivals) : "memory");
}

// One arrival, and this many bytes of TMA traffic to come in this phase.
__device__ __forceinline__ void barrier_expect(uint32 barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(barrier), "r"(bytes) : "memory");
}

// Arrive at the barrier that lies at this address in block `rank`.
__device__ __forceinline__ void barrier_arrive(uint32 barrier, int rank)
{
#if CLUSTER == 1
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
                 :: "r"(barrier) : "memory");
#else
    asm volatile("{\n.reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}"
                 :: "r"(barrier), "r"(rank) : "memory");
#endif
}

// Wait until the phase of this parity is over.
__device__ __forceinline__ void barrier_wait(uint32 barrier, uint32 parity)
{
    uint32 done;
    do {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (!done);
}

__device__ __forceinline__ void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release;\n"
                 "barrier.cluster.wait.acquire;" ::: "memory");
}
// --8<-- [end:barriers]

// --8<-- [start:tma]
// A box of the matrix behind `map` to shared memory; x counts along its rows.
__device__ __forceinline__ void load_box(uint32 to, const TensorMap* map,
                                         int x, int y, uint32 barrier)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile"
        ".mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        :: "r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y) : "memory");
}

// The same box to the same place in those blocks of the cluster whose bit is set.
__device__ __forceinline__ void load_box_to_all(
    uint32 to, const TensorMap* map, int x, int y, uint32 barrier, int blocks)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile"
        ".mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4}], [%2], %5;"
        :: "r"(to), "l"(map), "r"(barrier), "r"(x), "r"(y), "h"((uint16)blocks)
        : "memory");
}

__device__ __forceinline__ void store_box(const TensorMap* map, uint32 from,
                                          int x, int y)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
        " [%0, {%2, %3}], [%1];"
        :: "l"(map), "r"(from), "r"(x), "r"(y) : "memory");
}
// --8<-- [end:tma]

// --8<-- [start:descriptor]
// Where wgmma finds an operand: rows of 128 bytes, swizzled in groups of 8.
// 1024 bytes from one group of 8 rows to the next; 8192 from one panel of 64
// to the next (read only where the operand's rows run along M or N).
__device__ __forceinline__ uint64 descriptor(uint32 address)
{
    return (uint64)((address & 0x3FFFF) >> 4) | (uint64)(PANEL >> 4) << 16
         | (uint64)(1024 >> 4) << 32 | (uint64)1 << 62;
}

// 16 steps of K further on: along a row, or 16 rows down.
constexpr int A_STEP = A_T ? 16 * 128 : 16 * 2;
constexpr int B_STEP = B_T ? 16 * 2 : 16 * 128;
// --8<-- [end:descriptor]

#define OUT4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUT16(d, i) OUT4(d, i), OUT4(d, i + 4), OUT4(d, i + 8), OUT4(d, i + 12)
#define OUT32(d, i) OUT16(d, i), OUT16(d, i + 16)

// --8<-- [start:wgmma]
// d [64, BN] = A [64, 16] @ B [16, BN] (+ d if keep), by 128 threads together,
// asynchronously. TA, TB: 1 where the operand's rows run along M or N, not K.
#if BN == 128
template <int TA, int TB>
__device__ __forceinline__ void multiply(float (&d)[64], uint64 a,
                                         uint64 b, int keep)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13,"
        "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25,"
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37,"
        "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49,"
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61,"
        "%62, %63}, "
        "%64, %65, p, 1, 1, %67, %68;\n}\n"
        : OUT32(d, 0),
          OUT32(d, 32)
        : "l"(a), "l"(b), "r"(keep), "n"(TA), "n"(TB));
}
#elif BN == 192
template <int TA, int TB>
__device__ __forceinline__ void multiply(float (&d)[96], uint64 a,
                                         uint64 b, int keep)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13,"
        "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25,"
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37,"
        "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49,"
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61,"
        "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73,"
        "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85,"
        "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "
        "%96, %97, p, 1, 1, %99, %100;\n}\n"
        : OUT32(d, 0),
          OUT32(d, 32),
          OUT32(d, 64)
        : "l"(a), "l"(b), "r"(keep), "n"(TA), "n"(TB));
}
#else
template <int TA, int TB>
__device__ __forceinline__ void multiply(float (&d)[128], uint64 a,
                                         uint64 b, int keep)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13,"
        "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25,"
        "%26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37,"
        "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49,"
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61,"
        "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73,"
        "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85,"
        "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97,"
        "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107,"
        "%108, %109, %110, %111, %112, %113, %114, %115, %116, %117,"
        "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
        "%128, %129, p, 1, 1, %131, %132;\n}\n"
        : OUT32(d, 0),
          OUT32(d, 32),
          OUT32(d, 64),
          OUT32(d, 96)
        : "l"(a), "l"(b), "r"(keep), "n"(TA), "n"(TB));
}
#endif

__device__ __forceinline__ void wgmma_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;"
                 :: "n"(PENDING) : "memory");
}

// After a wait: keeps the compiler from reading accumulators any earlier.
__device__ __forceinline__ void settle(float (&acc)[MI][BN / 2])
{
#pragma unroll
    for (int mi = 0; mi < MI; ++mi)
#pragma unroll
        for (int i = 0; i < BN / 2; ++i)
            asm volatile("" : "+f"(acc[mi][i]) :: "memory");
}

// One stage: BK = 64 is four steps of 16. first: accumulators start afresh.
__device__ __forceinline__ void multiply_stage(float (&acc)[MI][BN / 2],
                                               uint32 a, uint32 b, bool first)
{
    const uint64 from_a = descriptor(a), from_b = descriptor(b);
    wgmma_begin();
#pragma unroll
    for (int kk = 0; kk < BK / 16; ++kk)
#pragma unroll
        for (int mi = 0; mi < MI; ++mi)
            multiply<A_T, 1 - B_T>(
                acc[mi], from_a + ((mi * PANEL + kk * A_STEP) >> 4),
                from_b + (kk * B_STEP >> 4), !first || kk > 0);
    wgmma_commit();
}
// --8<-- [end:wgmma]

// --8<-- [start:direct]
__device__ __forceinline__ uint32 pack(float low, float high)
{
    uint32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Two neighbors of C, each only if it is inside.
__device__ __forceinline__ void store_pair(
    uint16* C, int row, int col, int M, int N, int64 ldc, bool aligned,
    float v0, float v1)
{
    if (row >= M || col >= N) return;
    uint16* to = C + row * ldc + col;
    const uint32 both = pack(v0, v1);
    if (aligned && col + 1 < N) {
        *(uint32*)to = both;
    } else {
        to[0] = (uint16)both;
        if (col + 1 < N) to[1] = (uint16)(both >> 16);
    }
}

// From the accumulators of one warpgroup: each thread holds pairs of columns of
// rows lane / 4 and lane / 4 + 8 of its warp's 16 rows.
__device__ __forceinline__ void store_direct(
    float (&acc)[MI][BN / 2], uint16* C, int row, int col, int M, int N,
    int64 ldc)
{
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const bool aligned = ldc % 2 == 0 && (uint64)C % 4 == 0;
#pragma unroll
    for (int mi = 0; mi < MI; ++mi)
#pragma unroll
        for (int j = 0; j < BN / 8; ++j) {
            const int r = row + mi * 64 + warp * 16 + lane / 4;
            const int c = col + j * 8 + lane % 4 * 2;
            const float* v = &acc[mi][4 * j];
            store_pair(C, r, c, M, N, ldc, aligned, v[0], v[1]);
            store_pair(C, r + 8, c, M, N, ldc, aligned, v[2], v[3]);
        }
}
// --8<-- [end:direct]

// --8<-- [start:load]
// `rows` rows from `first` on of a tile of A or B, with 64 of K from `k` on:
// where K is contiguous, one box; else panels of 64 of K by 64 of M or N.
template <bool ALONG_K, bool SHARED>
__device__ __forceinline__ void load_tile(
    uint32 to, const TensorMap* map, int first, int rows, int k, uint32 barrier,
    int blocks = 1)
{
    constexpr int HEIGHT = ALONG_K ? 1 << 30 : 64;  // rows in a box
    for (int r = 0; r < rows; r += HEIGHT) {
        const int x = ALONG_K ? k : first + r, y = ALONG_K ? first + r : k;
        if (SHARED) load_box_to_all(to + r * 128, map, x, y, barrier, blocks);
        else load_box(to + r * 128, map, x, y, barrier);
    }
}
// --8<-- [end:load]

#if WARPGROUPS == 1
// --8<-- [start:single]
// One warpgroup, one tile in shared memory: load, wait, multiply, wait, repeat.
extern "C" __global__ void __launch_bounds__(128) matmul_wgmma(
    const __grid_constant__ TensorMap map_a,
    const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_c,
    uint16* C, int M, int N, int K, int64 ldc)
{
    extern __shared__ unsigned char raw[];
    const uint32 a = (shared_address(raw) + 1023) & ~1023u;  // as swizzles need
    const uint32 b = a + A_BYTES, full = b + B_BYTES;
    const int row = blockIdx.x / ((N + BN - 1) / BN) * BM;
    const int col = blockIdx.x % ((N + BN - 1) / BN) * BN;
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    float acc[MI][BN / 2];
    uint32 phase = 0;
    for (int k = 0; k < K; k += BK) {
        if (threadIdx.x == 0) {
            barrier_expect(full, A_BYTES + B_BYTES);
            load_tile<!A_T, false>(a, &map_a, row, BM, k, full);
            load_tile<B_T, false>(b, &map_b, col, BN, k, full);
        }
        barrier_wait(full, phase);
        phase ^= 1;
        multiply_stage(acc, a, b, k == 0);
        wgmma_wait<0>();
        __syncthreads();  // everyone has read before TMA overwrites
    }
    settle(acc);
    store_direct(acc, C, row, col, M, N, ldc);
}
// --8<-- [end:single]
#else

// --8<-- [start:order]
// Tile number t: down GROUP rows of tiles, then one column on.
__device__ __forceinline__ void tile_at(int t, int m_tiles, int n_tiles,
                                        int& m, int& n)
{
    const int per_group = GROUP * n_tiles, first = t / per_group * GROUP;
    const int rows = min(GROUP, m_tiles - first), within = t % per_group;
    m = first + within % rows;
    n = within / rows;
}
// --8<-- [end:order]

// --8<-- [start:staged]
// Sums, rounded to bf16, two in a register.
__device__ __forceinline__ void round_sums(float (&acc)[MI][BN / 2],
                                           uint32 (&sums)[MI][BN / 4])
{
#pragma unroll
    for (int mi = 0; mi < MI; ++mi)
#pragma unroll
        for (int i = 0; i < BN / 4; ++i)
            sums[mi][i] = pack(acc[mi][2 * i], acc[mi][2 * i + 1]);
}

// C through shared memory: each warpgroup fills panels of 64 x 64 by stmatrix,
// swizzled as the tensor map says, and one thread has TMA write them out.
__device__ __forceinline__ void store_staged(
    uint32 (&sums)[MI][BN / 4], uint32 panels, const TensorMap* map,
    int row, int col)
{
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int bar = threadIdx.x / 128;  // named barrier of this warpgroup: 1, 2
    const bool leader = threadIdx.x % 128 == 0;
    const int r = warp * 16 + lane % 16;  // this lane gives its address
#pragma unroll
    for (int p = 0; p < MI * BN / 64; ++p) {
        const int mi = p / (BN / 64), c64 = p % (BN / 64);
        const uint32 panel = panels + p % PANELS * PANEL;
        if (leader)  // the panel's last store has left shared memory
            asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(PANELS - 1)
                         : "memory");
        asm volatile("bar.sync %0, 128;" :: "r"(bar) : "memory");
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // 16 columns each
            const uint32* v = &sums[mi][c64 * 16 + j * 4];
            const int chunk = j * 2 + lane / 16;
            asm volatile(
                "stmatrix.sync.aligned.m8n8.x4.shared.b16 "
                "[%0], {%1, %2, %3, %4};"
                :: "r"(panel + r * 128 + ((chunk ^ (r % 8)) * 16)),
                   "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync %0, 128;" :: "r"(bar) : "memory");
        if (leader) {
            store_box(map, panel, col + c64 * 64, row + mi * 64);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }
}
// --8<-- [end:staged]

#if CLUSTER == 1
#define CLUSTER_DIMS
#else
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#endif

// --8<-- [start:specialized]
extern "C" __global__ void CLUSTER_DIMS
__launch_bounds__(128 + 128 * WARPGROUPS, 1) matmul_specialized(
    const __grid_constant__ TensorMap map_a,
    const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_c,
    uint16* C, int M, int N, int K, int64 ldc)
{
    // The cluster's tiles: CM down, which share B, and CN across, which share A.
    constexpr int CM = CLUSTER == 4 ? 2 : SHARE_A ? 1 : CLUSTER;
    constexpr int CN = CLUSTER / CM;
    extern __shared__ unsigned char raw[];
    const uint32 a = (shared_address(raw) + 1023) & ~1023u;
    const uint32 b = a + STAGES * A_BYTES, c = b + STAGES * B_BYTES;
    const uint32 full = c + (TMA_STORE ? WARPGROUPS * PANELS * PANEL : 0);
    const uint32 empty = full + 8 * STAGES, turn = empty + 8 * STAGES;
    if (threadIdx.x == 0) {
        if (PINGPONG)
            for (int g = 0; g < WARPGROUPS; ++g)
                barrier_init(turn + 8 * g, 4);  // the other's warps
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 4 * TEAM * (CM + CN - 1));  // warps
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    int rank = 0;
#if CLUSTER > 1  // nobody arrives or loads before all blocks have barriers
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    cluster_sync();
#endif
    const int rm = rank % CM, rn = rank / CM;

    const int m_tiles = (M + BM * CM - 1) / (BM * CM);
    const int n_tiles = (N + BN * CN - 1) / (BN * CN);
    const int first_tile = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
    int stage = 0, m, n;
    uint32 phase = 0;

// --8<-- [end:specialized]
// --8<-- [start:producer]
    if (threadIdx.x < 128) {  // the producer: one thread of this warpgroup
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;"
                     :: "n"(PRODUCER_REGS));
        if (threadIdx.x == 0)
            for (int t = first_tile; t < m_tiles * n_tiles; t += step) {
                tile_at(t, m_tiles, n_tiles, m, n);
                const int row = (m * CM + rm) * BM;
                const int col = (n * CN + rn) * BN;
                // What is shared is loaded in parts, one by each block.
                const int part_a = rn * (BM / CN), part_b = rm * (BN / CM);
                const int to_a = (CN > 1 ? 1 + (1 << CM) : 1) << rm;
                const int to_b = (1 << CM) - 1 << rn * CM;
                for (int k = 0; k < K; k += BK) {
                    const uint32 at = full + 8 * stage;
                    barrier_wait(empty + 8 * stage, phase ^ 1);
                    barrier_expect(at, A_BYTES + B_BYTES);
                    load_tile<!A_T, (CN > 1)>(
                        a + stage * A_BYTES + part_a * 128, &map_a,
                        row + part_a, BM / CN, k, at, to_a);
                    load_tile<B_T, (CM > 1)>(
                        b + stage * B_BYTES + part_b * 128, &map_b,
                        col + part_b, BN / CM, k, at, to_b);
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                }
            }
// --8<-- [end:producer]
// --8<-- [start:consumers]
    } else {  // the consumers
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;"
                     :: "n"(CONSUMER_REGS));
        const int group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
        const uint32 my_a = a + (PINGPONG ? 0 : group * MI * PANEL);
        const uint32 my_c = c + group * PANELS * PANEL;
        // Whose loads come to this block: those hear when a stage is empty.
        const bool heard = lane < CLUSTER && (lane % CM == rm || lane / CM == rn);
        float acc[MI][BN / 2];
        uint32 sums[MI][BN / 4];  // of the tile before
        int late_row = -1, late_col = 0;
        for (int t = first_tile, i = 0; t < m_tiles * n_tiles; t += step, ++i) {
            if (PINGPONG && i % WARPGROUPS != group) {  // the other's: skip its stages
                stage += (K + BK - 1) / BK;
                phase ^= stage / STAGES & 1;
                stage %= STAGES;
                continue;
            }
            tile_at(t, m_tiles, n_tiles, m, n);
            const int row = (m * CM + rm) * BM + (PINGPONG ? 0 : group * MI * 64);
            const int col = (n * CN + rn) * BN;
            // The queue's parities tell a phase from the next only: whoever is
            // ahead by a tile would take the other's data for its own.
            if (PINGPONG) barrier_wait(turn + 8 * group, i / 2 + (group == 0) & 1);
            barrier_wait(full + 8 * stage, phase);
            multiply_stage(acc, my_a + stage * A_BYTES, b + stage * B_BYTES, true);
            if (LATE_STORE && late_row >= 0)  // while the Tensor Cores are busy
                store_staged(sums, my_c, &map_c, late_row, late_col);
            int last = stage;
            if (++stage == STAGES) stage = 0, phase ^= 1;
            for (int k = BK; k < K; k += BK) {
                barrier_wait(full + 8 * stage, phase);
                multiply_stage(acc, my_a + stage * A_BYTES,
                               b + stage * B_BYTES, false);
                wgmma_wait<1>();  // the stage before is done: hand it back
                if (heard) barrier_arrive(empty + 8 * last, lane);
                last = stage;
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            if (PINGPONG && lane == 0) barrier_arrive(turn + 8 * (1 - group), rank);
            wgmma_wait<0>();
            if (heard) barrier_arrive(empty + 8 * last, lane);
            settle(acc);
            if (TMA_STORE) {
                round_sums(acc, sums);
                late_row = row, late_col = col;
                if (!LATE_STORE) store_staged(sums, my_c, &map_c, row, col);
            } else {
                store_direct(acc, C, row, col, M, N, ldc);
            }
        }
        if (LATE_STORE && late_row >= 0)
            store_staged(sums, my_c, &map_c, late_row, late_col);
        if (TMA_STORE && threadIdx.x % 128 == 0)  // before the memory goes
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
// --8<-- [end:consumers]
#if CLUSTER > 1  // the other blocks may still write here
    cluster_sync();
#endif
}
#endif
