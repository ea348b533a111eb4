// Reading with a stride, from an offset: the same elements, in more and more sectors.
// ARCH: sm_80 sm_90

// --8<-- [start:gather]
extern "C" __global__ void gather(  // out[i * out_stride] = x[i * x_stride]
    const float* __restrict__ x, float* __restrict__ out, long long n,
    long long x_stride, long long out_stride)
{
    long long first = (long long)blockIdx.x * blockDim.x * 4 + threadIdx.x;
    float value[4];  // four loads under way at once
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        long long i = first + k * blockDim.x;
        value[k] = i < n ? x[i * x_stride] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        long long i = first + k * blockDim.x;
        if (i < n) out[i * out_stride] = value[k];
    }
}
// --8<-- [end:gather]
