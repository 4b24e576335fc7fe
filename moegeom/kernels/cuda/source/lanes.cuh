// A token is worked on by LANES neighbouring lanes of a warp, a power of two. Each of them holds PER
// neighbouring experts, so that a row of logits is read in one piece. Numbers of experts that do
// not fill the lanes are padded; a padded expert is never chosen and never a wall.
//
// Set by the caller: EXPERTS, TOP_K, LANES, PER, WARPS (in a block).

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define TOKENS_IN_WARP (32 / LANES)
#define INF __longlong_as_double(0x7ff0000000000000LL)

// Where this thread stands: which of the tokens that its warp works on together, and its place among
// the lanes of that token. All lanes of a warp always take the same way, so that they may exchange
// values wherever they are.
struct Place {
    int token;
    int member;
};

__device__ Place place_of_thread() {
    int lane = threadIdx.x & 31;
    Place place;
    place.token = lane / LANES;
    place.member = lane % LANES;
    return place;
}

// The token of this thread, where a kernel gives TOKENS_IN_WARP of them to each of WARPS warps.
__device__ i64 token_of_thread(Place place) {
    return (blockIdx.x * (i64)WARPS + (threadIdx.x >> 5)) * TOKENS_IN_WARP + place.token;
}

#define WHOLE_WARP 0xffffffffu

// The value of the lane ``step`` away in the same token.
template <typename Value>
__device__ Value across(Value value, int step) {
    return __shfl_xor_sync(WHOLE_WARP, value, step);
}

// The largest value of the lanes of a token, which are numbers; every lane gets it.
template <typename Value>
__device__ Value largest_of(Value value) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) {
        Value other = across(value, step);
        value = value > other ? value : other;
    }
    return value;
}

__device__ float least_of(float value) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) value = fminf(value, across(value, step));
    return value;
}

// A sum over the lanes of a token in one fixed order, so that every lane gets the same bits.
__device__ double sum_of(double value) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) value = __dadd_rn(value, across(value, step));
    return value;
}

// Numbers ordered as unsigned integers, -0.0 as 0.0. No finite number or infinity gives 0.
__device__ u32 order_of(float x) {
    u32 bits = x == 0.0f ? 0u : __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ u64 order_of(double x) {
    u64 bits = x == 0.0 ? 0ull : (u64)__double_as_longlong(x);
    return bits >> 63 ? ~bits : bits | 0x8000000000000000ull;
}
