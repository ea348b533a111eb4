// Branches inside a warp: 32 different paths, and one that is short enough to need no branch.
// ARCH: sm_80 sm_90

// --8<-- [start:paths]
// Path number P: x = (P + 1) - x, steps times. The marker keeps the compiler
// from joining the 32 loops into one.
#define PATH(P)                                           \
    case P:                                               \
        _Pragma("unroll 8")                               \
        for (int i = 0; i < steps; ++i) {                 \
            asm volatile("// path " #P);                  \
            x = fmaf(x, minus_one, P + 1.0f);             \
        }                                                 \
        break;

extern "C" __global__ void paths(
    const float* in, const int* path, float* out, int steps, float minus_one)
{
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    float x = in[at];
    switch (path[at]) {
        PATH(0) PATH(1) PATH(2) PATH(3) PATH(4) PATH(5) PATH(6) PATH(7)
        PATH(8) PATH(9) PATH(10) PATH(11) PATH(12) PATH(13) PATH(14) PATH(15)
        PATH(16) PATH(17) PATH(18) PATH(19) PATH(20) PATH(21) PATH(22) PATH(23)
        PATH(24) PATH(25) PATH(26) PATH(27) PATH(28) PATH(29) PATH(30) PATH(31)
    }
    out[at] = x;
}
// --8<-- [end:paths]

// --8<-- [start:choice]
extern "C" __global__ void choice(  // lanes choose anew in every step
    const float* in, const int* path, float* out, int steps, float minus_one)
{
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    float x = in[at];
    int odd = path[at] & 1;
    for (int i = 0; i < steps; ++i) {
        if ((i ^ odd) & 1) x = fmaf(x, minus_one, 3.0f);
        else x = fmaf(x, minus_one, 5.0f);
    }
    out[at] = x;
}
// --8<-- [end:choice]
