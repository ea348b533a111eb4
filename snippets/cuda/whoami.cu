// Who am I? Each thread writes down its block, its warp, its lane, and the multiprocessor that runs it.
// ARCH: sm_80 sm_90

// --8<-- [start:whoami]
extern "C" __global__ void whoami(int4* record)  // [blocks, threads of a block]
{
    uint3 b = blockIdx, t = threadIdx;
    int block = (b.z * gridDim.y + b.y) * gridDim.x + b.x;
    int thread = (t.z * blockDim.y + t.y) * blockDim.x + t.x;
    int size = blockDim.x * blockDim.y * blockDim.z;

    int lane, sm;  // asked from the hardware, not computed
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    int first = __shfl_sync(__activemask(), thread, 0);  // lane 0's thread

    long long at = (long long)block * size + thread;
    record[at] = make_int4(block, first / 32, lane, sm);
}
// --8<-- [end:whoami]

// How many blocks share a multiprocessor? Each block counts itself in, stays a while, and counts itself out.
template <int VALUES>
__device__ void reside(int* live, int* peak, const float* in, float* out, long long clocks)
{
    float value[VALUES];  // held in registers while the block stays
#pragma unroll
    for (int i = 0; i < VALUES; ++i) value[i] = in[i * blockDim.x + threadIdx.x];

    int sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    if (threadIdx.x == 0) atomicMax(peak + sm, atomicAdd(live + sm, 1) + 1);
    long long start = clock64();
    while (clock64() - start < clocks) asm volatile("" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) atomicSub(live + sm, 1);

    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) sum = sum * 0.5f + value[i];
    out[(long long)blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

#define RESIDE(VALUES)                                                                              \
    extern "C" __global__ void __launch_bounds__(1024 / (VALUES > 32 ? 8 : 1)) reside_##VALUES(     \
        int* live, int* peak, const float* in, float* out, long long clocks)                        \
    {                                                                                               \
        reside<VALUES>(live, peak, in, out, clocks);                                                \
    }
RESIDE(1)
RESIDE(64)
RESIDE(160)
