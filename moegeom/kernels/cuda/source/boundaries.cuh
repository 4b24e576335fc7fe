// Distance to the boundary of an affine cell: the least (z_i - z_j) / |w_i - w_j| over the chosen i
// and the others j (docs/theory.md A3), in float64, with the boundary that gives it.
//
// Float32 finds the few pairs that can be the nearest, float64 decides among them: a processor does
// float32 much faster and reads half the bytes of the table. The difference of two float32 numbers,
// the rounded inverse and the product are each within 2^-24, so a pair within 2^-20 of the least
// float32 quotient so far is looked at again, and no other can be nearer. Chosen experts are passed
// over whose smallest gap cannot give a boundary nearer than those of the last one.

#define NEVER 1e200
#define FLOAT_INF __int_as_float(0x7f800000)
// where float32 quotients neither overflow nor lose digits to the least normal number
#define LARGEST_LOGIT 1e30f
#define LEAST_MARGIN 1e-30
#define WIDER 1.000001f
#define SAFE 0.999999f

// Distances between the rows of a router: ``inverse`` and, of each row, the ``smallest`` as in
// moegeom.geometry.boundary.linear.RowDistances, both also rounded to float32 with inf for what is no boundary.
struct Rows {
    const double* inverse;
    const float* rounded;
    const float* smallest;
    bool fits_float32;
};

struct Boundary {
    double distance;
    int rank;  // of the expert that leaves; -1 where there is no boundary
    int into;
};

// The nearer boundary; of equal ones that of the later rank, then that into the lower expert.
__device__ Boundary nearer(Boundary boundary, double distance, int rank, int into) {
    bool is_first = rank > boundary.rank || (rank == boundary.rank && into < boundary.into);
    if (distance < boundary.distance || (distance == boundary.distance && is_first)) {
        boundary.distance = distance;
        boundary.rank = rank;
        boundary.into = into;
    }
    return boundary;
}

// Of the boundaries that the lanes of a token have found, the nearest.
__device__ Boundary nearest_of(Boundary boundary) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) {
        double distance = across(boundary.distance, step);
        int rank = across(boundary.rank, step);
        int into = across(boundary.into, step);
        boundary = nearer(boundary, distance, rank, into);
    }
    if (boundary.rank < 0) boundary.distance = INF;
    return boundary;
}

// The boundaries of one chosen expert against ``slots`` of this lane, in float64.
template <typename Logit>
__device__ Boundary boundaries_of_rank(Boundary boundary, const Logit* row, int rank, int out, u32 slots,
                              const double* inverse, Place place) {
    const double own = (double)row[out];
    while (slots) {
        const int other = place.member * PER + __ffs((int)slots) - 1;
        slots &= slots - 1u;
        const double gap = __dsub_rn(own, (double)row[other]);
        boundary = nearer(boundary, __dmul_rn(gap, inverse[out * EXPERTS + other]), rank, other);
    }
    return boundary;
}

// ``open`` are the slots of this lane that are not chosen.
template <typename Logit>
__device__ Boundary nearest_boundary_in_float64(const Logit* row, const u16* ranked, u32 open, Rows rows,
                                        Place place) {
    Boundary boundary = {NEVER, -1, EXPERTS};
#pragma unroll 1
    for (int rank = TOP_K - 1; rank >= 0; rank--)
        boundary = boundaries_of_rank(boundary, row, rank, ranked[rank], open, rows.inverse, place);
    return nearest_of(boundary);
}

// What a token knows so far: its least quotient in float32, and the nearest boundary of this lane.
struct Search {
    float least;
    Boundary boundary;
};

// Looks at the boundaries of one chosen expert; most lanes find none that is near enough for float64.
__device__ void search_rank(Search& search, const float* row, const float (&value)[PER], int rank,
                            int out, u32 open, Rows rows, Place place) {
    const float own = row[out];
    float quotient[PER];
    load_row(rows.rounded + out * EXPERTS, quotient, place);
    float least = search.least;
#pragma unroll
    for (int slot = 0; slot < PER; slot++) {
        quotient[slot] = open >> slot & 1u ? (own - value[slot]) * quotient[slot] : FLOAT_INF;
        least = fminf(least, quotient[slot]);
    }
    search.least = least_of(least);
    const float reach = search.least * WIDER;
    u32 near = 0u;
#pragma unroll
    for (int slot = 0; slot < PER; slot++) near |= (u32)(quotient[slot] <= reach) << slot;
    search.boundary = boundaries_of_rank(search.boundary, row, rank, out, near & open, rows.inverse, place);
}

// The ranks before the last, a bit each, whose smallest gap may give a boundary nearer than ``least``;
// those of all tokens of the warp, so that its lanes stay together.
__device__ u64 ranks_within(float least, const float* row, const u16* ranked, float following,
                            const float* smallest, Place place) {
    u64 ranks = 0ull;
#pragma unroll
    for (int turn = 0; turn * LANES < TOP_K - 1; turn++) {
        const int rank = turn * LANES + place.member;
        bool is_near = false;
        if (rank < TOP_K - 1) {
            const int out = ranked[rank];
            is_near = !((row[out] - following) * smallest[out] * SAFE > least);
        }
        u32 votes = __ballot_sync(WHOLE_WARP, is_near);
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) votes |= votes >> step;
        ranks |= (u64)(votes & LANES_OF_TOKEN) << (turn * LANES);
    }
    return ranks;
}

// ``row`` are the logits of the token, ``value`` those of this lane, ``following`` the largest one
// that is not chosen.
__device__ Boundary nearest_boundary(const float* row, const float (&value)[PER], const u16* ranked,
                             u32 open, float following, double margin, Rows rows, Place place) {
    float size = 0.0f;
#pragma unroll
    for (int slot = 0; slot < PER; slot++)
        if (place.member * PER + slot < EXPERTS) size = fmaxf(size, fabsf(value[slot]));
    bool is_extreme = !rows.fits_float32 || !(size < LARGEST_LOGIT) || !(margin > LEAST_MARGIN);
    if (__any_sync(WHOLE_WARP, is_extreme))
        return nearest_boundary_in_float64(row, ranked, open, rows, place);
    // the last chosen expert has the smallest gaps: it mostly has the nearest boundary
    Search search = {FLOAT_INF, {NEVER, -1, EXPERTS}};
    u64 ranks = 1ull << (TOP_K - 1);
    while (ranks) {
        const int rank = 63 - __clzll(ranks);
        ranks ^= 1ull << rank;
        search_rank(search, row, value, rank, ranked[rank], open, rows, place);
        if (rank == TOP_K - 1)
            ranks = ranks_within(search.least, row, ranked, following, rows.smallest, place);
    }
    __syncwarp();
    return nearest_of(search.boundary);
}
