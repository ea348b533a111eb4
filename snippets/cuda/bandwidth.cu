// Streams through every level of memory, and walks that measure how long one access takes.
// ARCH: sm_80 sm_90
// All sizes are in float4 (16 bytes) unless said otherwise, all offsets 64-bit.

// --8<-- [start:copy]
template <int LOADS>
__device__ void copy(
    const float4* __restrict__ x, float4* __restrict__ out, long long n)
{
    long long tile = (long long)blockDim.x * LOADS;  // a block's, in one go
    long long first = blockIdx.x * tile;
#pragma unroll 1
    for (; first < n; first += gridDim.x * tile) {
        long long at = first + threadIdx.x;
        if (first + tile <= n) {
            float4 value[LOADS];  // every load starts before a store waits
#pragma unroll
            for (int i = 0; i < LOADS; ++i) value[i] = x[at + i * blockDim.x];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) out[at + i * blockDim.x] = value[i];
        } else {
            for (; at < n; at += blockDim.x) out[at] = x[at];
        }
    }
}
// --8<-- [end:copy]

__device__ float4 scaled(float4 a, float s, float4 b)  // a + s b
{
    return make_float4(fmaf(s, b.x, a.x), fmaf(s, b.y, a.y), fmaf(s, b.z, a.z), fmaf(s, b.w, a.w));
}

template <int LOADS>
__device__ void triad(const float4* __restrict__ x, const float4* __restrict__ y, float4* __restrict__ out, float scale, long long n)
{
    long long tile = (long long)blockDim.x * LOADS;
#pragma unroll 1
    for (long long first = blockIdx.x * tile; first < n; first += gridDim.x * tile) {
        long long at = first + threadIdx.x;
        if (first + tile <= n) {
            float4 a[LOADS], b[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) a[i] = x[at + i * blockDim.x], b[i] = y[at + i * blockDim.x];
#pragma unroll
            for (int i = 0; i < LOADS; ++i) out[at + i * blockDim.x] = scaled(a[i], scale, b[i]);
        } else {
            for (; at < n; at += blockDim.x) out[at] = scaled(x[at], scale, y[at]);
        }
    }
}

__device__ float block_sum(float4 sum)  // of all threads; thread 0 has it
{
    float total = (sum.x + sum.y) + (sum.z + sum.w);
    for (int step = 16; step; step /= 2) total += __shfl_down_sync(0xffffffffu, total, step);
    __shared__ float part[32];
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = total;
    __syncthreads();
    total = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0.0f;
    if (threadIdx.x < 32)
        for (int step = 16; step; step /= 2) total += __shfl_down_sync(0xffffffffu, total, step);
    return total;
}

// The compiler may neither drop these loads nor serve them from a register.
__device__ float4 load_l1(const float4* at)  // through L1
{
    float4 v;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at));
    return v;
}
__device__ float4 load_l2(const float4* at)  // past L1, from L2
{
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at));
    return v;
}
__device__ float4 load_shared(unsigned at)
{
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at));
    return v;
}
__device__ void add(float4& sum, float4 v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; }

// out[block] = the sum of the elements that the block reads; laps times over n elements, past L1.
template <int LOADS>
__device__ void read(const float4* x, float* out, long long n, int laps)
{
    long long span = (long long)gridDim.x * blockDim.x * LOADS;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int lap = 0; lap < laps; ++lap) {
        long long block = (blockIdx.x + lap * 7) % gridDim.x;  // not what it read before
        long long first = block * blockDim.x * LOADS + threadIdx.x;
#pragma unroll 1
        for (long long at = first; at < n; at += span) {
            float4 value[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; ++i)
                value[i] = at + i * blockDim.x < n ? load_l2(x + at + i * blockDim.x)
                                                   : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
            for (int i = 0; i < LOADS; ++i) add(sum, value[i]);
        }
    }
    float total = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = total;
}

#define STREAMS(LOADS)                                                                                              \
    extern "C" __global__ void copy_##LOADS(const float4* x, float4* out, long long n) { copy<LOADS>(x, out, n); } \
    extern "C" __global__ void triad_##LOADS(const float4* x, const float4* y, float4* out, float s, long long n)  \
    {                                                                                                              \
        triad<LOADS>(x, y, out, s, n);                                                                             \
    }                                                                                                              \
    extern "C" __global__ void read_##LOADS(const float4* x, float* out, long long n, int laps)                    \
    {                                                                                                              \
        read<LOADS>(x, out, n, laps);                                                                              \
    }
STREAMS(1)
STREAMS(4)

// Each block has a slice of x of its own, 4 float4 a thread, and goes over it laps times. In every lap a thread reads what
// its neighbor 32 places on read before: a load that stays the same would be moved out of the loop. Through L1 ...
extern "C" __global__ void read_l1(const float4* x, float* out, int laps)
{
    const float4* slice = x + (long long)blockIdx.x * 4 * blockDim.x;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int lap = 0; lap < laps; ++lap) {
        int mine = (threadIdx.x + 32 * lap) & (blockDim.x - 1);
        float4 value[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) value[i] = load_l1(slice + mine + i * blockDim.x);
#pragma unroll
        for (int i = 0; i < 4; ++i) add(sum, value[i]);
    }
    float total = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = total;
}

// ... or out of shared memory.
extern "C" __global__ void read_shared(const float4* x, float* out, int laps)
{
    extern __shared__ float4 slice[];
    for (int i = 0; i < 4; ++i)
        slice[i * blockDim.x + threadIdx.x] = x[((long long)blockIdx.x * 4 + i) * blockDim.x + threadIdx.x];
    __syncthreads();
    unsigned start = (unsigned)__cvta_generic_to_shared(slice);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (int lap = 0; lap < laps; ++lap) {
        int mine = (threadIdx.x + 32 * lap) & (blockDim.x - 1);
        float4 value[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) value[i] = load_shared(start + 16 * (mine + i * blockDim.x));
#pragma unroll
        for (int i = 0; i < 4; ++i) add(sum, value[i]);
    }
    float total = block_sum(sum);
    if (threadIdx.x == 0) out[blockIdx.x] = total;
}

// Eight chains of multiply-adds a thread, v = x - v, all operands in registers: minus holds -1 everywhere.
extern "C" __global__ void multiply_add(const float* x, const float* minus, float* out, int steps)
{
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    float plus = x[at], minus_one = minus[at], v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = i;
#pragma unroll 8
    for (int step = 0; step < steps; ++step)
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = fmaf(v[i], minus_one, plus);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += v[i];
    out[at] = sum;
}

__device__ long long nanoseconds()
{
    long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// --8<-- [start:chase]
// One thread follows pointers: no load can start before the last has arrived.
#define CHASE(NAME, LOAD)                                                     \
    extern "C" __global__ void chase_##NAME(                                  \
        long long start, int warm, int steps, long long* result)              \
    {                                                                         \
        long long at = start;                                                 \
        for (int i = 0; i < warm; ++i) asm volatile(LOAD : "+l"(at));         \
        long long ns = nanoseconds(), clocks = clock64();                     \
        _Pragma("unroll 16")                                                  \
        for (int i = 0; i < steps; ++i) asm volatile(LOAD : "+l"(at));        \
        result[1] = at;                                                       \
        result[0] = clock64() - clocks;                                       \
        result[2] = nanoseconds() - ns;                                       \
    }
CHASE(l1, "ld.global.u64 %0, [%0];")
CHASE(l2, "ld.global.cg.u64 %0, [%0];")
// --8<-- [end:chase]

// The same in shared memory: link names the next of n words, and addresses are 32 bits wide.
extern "C" __global__ void chase_shared(const int* link, int n, int steps, long long* result)
{
    __shared__ unsigned next[4096];
    unsigned base = (unsigned)__cvta_generic_to_shared(next);
    for (int i = threadIdx.x; i < n; i += blockDim.x) next[i] = base + 4 * link[i];
    __syncthreads();
    if (threadIdx.x) return;
    unsigned at = base;
    long long before = clock64();
#pragma unroll 16
    for (int i = 0; i < steps; ++i) asm volatile("ld.shared.u32 %0, [%0];" : "+r"(at));
    result[1] = (at - base) / 4;
    result[0] = clock64() - before;
}

// And in a register: a chain of multiply-adds, x = plus - x.
extern "C" __global__ void chase_register(float start, float plus, float minus_one, int steps, long long* result)
{
    float at = start;
    long long before = clock64();
#pragma unroll 64
    for (int i = 0; i < steps; ++i) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(at) : "f"(minus_one), "f"(plus));
    long long after = clock64();
    result[1] = (long long)at;
    result[0] = after - before;
}
