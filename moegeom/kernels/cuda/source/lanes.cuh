// A token is worked on by LANES neighbouring lanes of a warp, a power of two. Each of them holds PER
// neighbouring experts, so that a row of logits is read in one piece. Numbers of experts that do
// not fill the lanes are padded; a padded expert is never chosen and never a boundary.
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
// one bit for each lane of the first token of a warp
#define LANES_OF_TOKEN (LANES == 32 ? WHOLE_WARP : (1u << (LANES & 31)) - 1u)

// The slots of this lane that hold experts, a bit each.
__device__ u32 slots_of_lane(Place place) {
    const int experts = EXPERTS - place.member * PER;
    if (experts >= PER) return WHOLE_WARP >> (32 - PER);
    return experts > 0 ? (1u << experts) - 1u : 0u;
}

struct __align__(16) Four {
    float value[4];
};

// The numbers of this lane's experts in a row of EXPERTS of them; 0 where there is no expert. Rows
// that allow it are read 16 bytes at a time: they begin at multiples of that.
__device__ void load_row(const float* row, float (&value)[PER], Place place) {
#if EXPERTS % PER == 0 && PER % 4 == 0
    const Four* pieces = reinterpret_cast<const Four*>(row + place.member * PER);
    const bool is_inside = place.member * PER < EXPERTS;
#pragma unroll
    for (int piece = 0; piece < PER / 4; piece++) {
        Four four = {{0.0f, 0.0f, 0.0f, 0.0f}};
        if (is_inside) four = pieces[piece];
#pragma unroll
        for (int at = 0; at < 4; at++) value[piece * 4 + at] = four.value[at];
    }
#else
#pragma unroll
    for (int slot = 0; slot < PER; slot++) {
        const int expert = place.member * PER + slot;
        value[slot] = expert < EXPERTS ? row[expert] : 0.0f;
    }
#endif
}

__device__ void load_row(const double* row, double (&value)[PER], Place place) {
#pragma unroll
    for (int slot = 0; slot < PER; slot++) {
        const int expert = place.member * PER + slot;
        value[slot] = expert < EXPERTS ? row[expert] : 0.0;
    }
}

// Writes them to a row.
template <typename Number>
__device__ void store_row(Number* row, const Number (&value)[PER], Place place) {
#pragma unroll
    for (int slot = 0; slot < PER; slot++) {
        const int expert = place.member * PER + slot;
        if (expert < EXPERTS) row[expert] = value[slot];
    }
}

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
    const u32 bits = __float_as_uint(x + 0.0f);  // of both zeros the positive one
    return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}

__device__ u64 order_of(double x) {
    const u64 bits = (u64)__double_as_longlong(x + 0.0);
    return bits ^ ((u64)((i64)bits >> 63) | 0x8000000000000000ull);
}
