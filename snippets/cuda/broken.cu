// Ten matmul kernels, each broken in one way. Seven compile; three do not, and hide behind a macro of their own.
// ARCH: sm_80 sm_90
// Row-major: a is [m, k], b is [k, n], c is [m, n], all fp32. Launched in blocks of 8 x 8 threads, or of 64 in a row.

// --8<-- [start:missing_semicolon]
#ifdef MISSING_SEMICOLON
extern "C" __global__ void missing_semicolon(
    const float* a, const float* b, float* c, long long m, long long n, long long k)
{
    long long row = (long long)blockIdx.y * blockDim.y + threadIdx.y
    long long col = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= m || col >= n) return;
    float sum = 0.0f;
    for (long long i = 0; i < k; ++i) sum += a[row * k + i] * b[i * n + col];
    c[row * n + col] = sum;
}
#endif
// --8<-- [end:missing_semicolon]

// --8<-- [start:untyped_shared]
#ifdef UNTYPED_SHARED
extern "C" __global__ void untyped_shared(
    const float* a, const float* b, float* c, long long m, long long n, long long k)
{
    __shared__ tile[8][8];
    long long row = (long long)blockIdx.y * blockDim.y + threadIdx.y;
    long long col = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= m || col >= n) return;
    tile[threadIdx.y][threadIdx.x] = 0.0f;
    for (long long i = 0; i < k; ++i) tile[threadIdx.y][threadIdx.x] += a[row * k + i] * b[i * n + col];
    c[row * n + col] = tile[threadIdx.y][threadIdx.x];
}
#endif
// --8<-- [end:untyped_shared]

// --8<-- [start:empty_subscript]
#ifdef EMPTY_SUBSCRIPT
extern "C" __global__ void empty_subscript(
    const float* a, const float* b, float* c, long long m, long long n, long long k)
{
    long long row = (long long)blockIdx.y * blockDim.y + threadIdx.y;
    long long col = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= m || col >= n) return;
    float sum = 0.0f;
    for (long long i = 0; i < k; ++i) sum += a[row * k + i] * b[i * n + col];
    c[] = sum;
}
#endif
// --8<-- [end:empty_subscript]

// --8<-- [start:int_accumulator]
extern "C" __global__ void int_accumulator(
    const float* a, const float* b, float* c, long long m, long long n, long long k)
{
    long long row = (long long)blockIdx.y * blockDim.y + threadIdx.y;
    long long col = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= m || col >= n) return;
    int sum = 0;  // every += rounds the running sum toward zero
    for (long long i = 0; i < k; ++i) sum += a[row * k + i] * b[i * n + col];
    c[row * n + col] = sum;
}
// --8<-- [end:int_accumulator]

// --8<-- [start:wrong_row]
extern "C" __global__ void wrong_row(  // one long row: gid counts the outputs
    const float* a, const float* b, float* c, long long m, long long n, long long k)
{
    long long gid = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (gid >= m * n) return;
    float sum = 0.0f;
    for (long long i = 0; i < k; ++i)
        sum += a[gid * n + i] * b[i * n + gid % n];  // row: gid / n; a's width: k
    c[gid] = sum;
}
// --8<-- [end:wrong_row]

// --8<-- [start:wrong_column]
extern "C" __global__ void wrong_column(
    const float* a, const float* b, float* c, long long m, long long n, long long k)
{
    long long gid = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (gid >= m * n) return;
    float sum = 0.0f;
    for (long long i = 0; i < k; ++i)
        sum += a[gid / n * k + i] * b[i * n + gid];  // the column is gid % n
    c[gid] = sum;
}
// --8<-- [end:wrong_column]

// --8<-- [start:late_guard]
extern "C" __global__ void late_guard(
    const float* a, const float* b, float* c, long long m, long long n, long long k)
{
    long long row = (long long)blockIdx.y * blockDim.y + threadIdx.y;
    long long col = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0.0f;
    for (long long i = 0; i < k; ++i) sum += a[row * k + i] * b[i * n + col];
    if (row < m && col < n) c[row * n + col] = sum;  // too late: the loads are done
}
// --8<-- [end:late_guard]

// --8<-- [start:wrong_width]
extern "C" __global__ void wrong_width(
    const float* a, const float* b, float* c, long long m, long long n, long long k)
{
    long long row = (long long)blockIdx.y * blockDim.y + threadIdx.y;
    long long col = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= m || col >= n) return;
    float sum = 0.0f;
    for (long long i = 0; i < k; ++i) sum += a[row * k + i] * b[i * n + col];
    c[row * k + col] = sum;  // a row of c is n long
}
// --8<-- [end:wrong_width]

// --8<-- [start:no_thread_index]
extern "C" __global__ void no_thread_index(
    const float* a, const float* b, float* c, long long m, long long n, long long k)
{
    long long row = (long long)blockIdx.y * blockDim.y;  // + threadIdx.y
    long long col = (long long)blockIdx.x * blockDim.x;  // + threadIdx.x
    if (row >= m || col >= n) return;
    float sum = 0.0f;
    for (long long i = 0; i < k; ++i) sum += a[row * k + i] * b[i * n + col];
    c[row * n + col] = sum;
}
// --8<-- [end:no_thread_index]

// --8<-- [start:int32_offsets]
extern "C" __global__ void int32_offsets(  // a_row: elements from one row of a to the next
    const float* a, const float* b, float* c, int m, int n, int k, int a_row)
{
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    int col = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= m || col >= n) return;
    int start = row * a_row;  // wraps at 2^31
    float sum = 0.0f;
    for (int i = 0; i < k; ++i) sum += a[start + i] * b[i * n + col];
    c[row * n + col] = sum;
}
// --8<-- [end:int32_offsets]
