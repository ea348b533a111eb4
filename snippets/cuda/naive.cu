// One thread, one output: C[m, n] = A[m, k] @ B[k, n] in fp32.
// ARCH: sm_80 sm_90
// Each matrix comes with its own strides, counted in elements, so that transposed and sliced views work as they are.

// --8<-- [start:kernel]
extern "C" __global__ void matmul_naive(
    const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c,
    long long m, long long n, long long k,
    long long a_row, long long a_col, long long b_row, long long b_col, long long c_row)
{
    long long row = (long long)blockIdx.y * blockDim.y + threadIdx.y;
    long long col = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= m || col >= n) return;  // before the first load, not round the store

    float sum = 0.0f;
    for (long long i = 0; i < k; ++i)
        sum += a[row * a_row + i * a_col] * b[i * b_row + col * b_col];
    c[row * c_row + col] = sum;
}
// --8<-- [end:kernel]

// The same kernel with x and y exchanged: neighbors in a warp now own neighboring rows. Right, and uncoalesced.
// --8<-- [start:swapped]
extern "C" __global__ void matmul_swapped(
    const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c,
    long long m, long long n, long long k,
    long long a_row, long long a_col, long long b_row, long long b_col, long long c_row)
{
    long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    long long col = (long long)blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= m || col >= n) return;

    float sum = 0.0f;
    for (long long i = 0; i < k; ++i)
        sum += a[row * a_row + i * a_col] * b[i * b_row + col * b_col];
    c[row * c_row + col] = sum;
}
// --8<-- [end:swapped]
