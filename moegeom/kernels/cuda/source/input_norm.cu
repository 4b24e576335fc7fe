// Euclidean norm of each router input: a warp takes a token, float32 sums of VECTOR partial sums a
// lane, again in float64 where they leave the range of float32.
//
// Set by the caller: INPUT, 0 for float32, 1 for bfloat16, 2 for float16.

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#if INPUT == 0
typedef float Input;
__device__ float number(float x) { return x; }
#else
typedef u16 Input;
__device__ float number(u16 bits) {
#if INPUT == 1
    return __uint_as_float((u32)bits << 16);
#else
    u32 exponent = bits >> 10 & 31u, mantissa = bits & 1023u;
    u32 sign = (u32)(bits >> 15) << 31;
    if (exponent == 0u) {  // subnormal: mantissa times 2^-24
        float small = (float)mantissa * 5.9604644775390625e-08f;
        return sign ? -small : small;
    }
    if (exponent == 31u) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
    return __uint_as_float(sign | (exponent + 112u) << 23 | mantissa << 13);
#endif
}
#endif

#define VECTOR (16 / (int)sizeof(Input))

struct __align__(16) Piece {
    Input value[VECTOR];
};

__device__ double warp_sum(double value) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

extern "C" __global__ void input_norm(i64 tokens, i64 width, const Input* values, double* norm) {
    i64 token = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (token >= tokens) return;
    int lane = threadIdx.x & 31;
    const Input* row = values + token * width;
    float part[VECTOR];
#pragma unroll
    for (int at = 0; at < VECTOR; at++) part[at] = 0.0f;
    i64 whole = width % VECTOR == 0 ? width / VECTOR : 0;
    const Piece* pieces = reinterpret_cast<const Piece*>(row);
#pragma unroll 4
    for (i64 at = lane; at < whole; at += 32) {
        Piece piece = pieces[at];
#pragma unroll
        for (int n = 0; n < VECTOR; n++) {
            float x = number(piece.value[n]);
            part[n] = fmaf(x, x, part[n]);
        }
    }
    for (i64 at = whole * VECTOR + lane; at < width; at += 32) {
        float x = number(row[at]);
        part[0] = fmaf(x, x, part[0]);
    }
    double square = 0.0;
#pragma unroll
    for (int n = 0; n < VECTOR; n++) square += (double)part[n];
    square = warp_sum(square);
    // overflown, without its small squares, or not finite
    if (!(square >= 7.888609052210118e-31 && square < 3.4e38)) {
        square = 0.0;
        for (i64 at = lane; at < width; at += 32) {
            double x = (double)number(row[at]);
            square += x * x;
        }
        square = warp_sum(square);
    }
    if (lane == 0) norm[token] = sqrt(square);
}
