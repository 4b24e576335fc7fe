// Distance to the boundary of an affine cell: the least (z_i - z_j) / |w_i - w_j| over the chosen i
// and the others j (THEORY.md A3), in float64, with the wall that gives it.
//
// Float32 finds the few pairs that can be the nearest, float64 decides among them: a processor does
// float32 much faster and reads half the bytes of the table. The difference of two float32 numbers,
// the rounded inverse and the product are each within 2^-24, so a pair within 2^-20 of the least
// float32 quotient is looked at again, and no other can be nearer. Chosen experts are passed over
// whose smallest gap cannot give a nearer wall.

#define NEVER 1e200
#define FLOAT_INF __int_as_float(0x7f800000)
// where float32 quotients neither overflow nor lose digits to the least normal number
#define LARGEST_LOGIT 1e30f
#define LEAST_MARGIN 1e-30
#define WIDER 1.000001f
#define SAFE 0.999999f

// Distances between the rows of a router: ``inverse`` and, of each row, the ``smallest`` as in
// moegeom.geometry.boundary.RowDistances, both also rounded to float32 with inf for what is no wall.
struct Rows {
    const double* inverse;
    const float* rounded;
    const float* smallest;
    bool fits_float32;
};

struct Wall {
    double distance;
    int rank;  // of the expert that leaves; -1 where there is no wall
    int into;
};

// The nearer wall; of equal ones that of the later rank, then that into the lower expert.
__device__ Wall nearer(Wall wall, double distance, int rank, int into) {
    bool is_first = rank > wall.rank || (rank == wall.rank && into < wall.into);
    if (distance < wall.distance || (distance == wall.distance && is_first)) {
        wall.distance = distance;
        wall.rank = rank;
        wall.into = into;
    }
    return wall;
}

// Of the walls that the lanes of a token have found, the nearest.
__device__ Wall nearest_of(Wall wall) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) {
        double distance = across(wall.distance, step);
        int rank = across(wall.rank, step);
        int into = across(wall.into, step);
        wall = nearer(wall, distance, rank, into);
    }
    if (wall.rank < 0) wall.distance = INF;
    return wall;
}

// The walls of one chosen expert against the experts of this lane, in float64.
template <typename Logit>
__device__ Wall walls_of_rank(Wall wall, const Logit* row, int rank, int out, u32 closed,
                              const double* inverse, Place place) {
    double own = (double)row[out];
#pragma unroll 1
    for (int slot = 0; slot < PER; slot++) {
        int other = place.member * PER + slot;
        if (other >= EXPERTS || (closed >> slot & 1u)) continue;
        double gap = __dsub_rn(own, (double)row[other]);
        wall = nearer(wall, __dmul_rn(gap, inverse[out * EXPERTS + other]), rank, other);
    }
    return wall;
}

__device__ u32 chosen_slots(const u16* ranked, Place place) {
    u32 closed = 0u;
#pragma unroll
    for (int rank = 0; rank < TOP_K; rank++)
        if (ranked[rank] / PER == place.member) closed |= 1u << (ranked[rank] % PER);
    return closed;
}

template <typename Logit>
__device__ Wall nearest_wall_in_float64(const Logit* row, const u16* ranked, Rows rows,
                                        Place place) {
    Wall wall = {NEVER, -1, EXPERTS};
    const u32 closed = chosen_slots(ranked, place);
#pragma unroll 1
    for (int rank = TOP_K - 1; rank >= 0; rank--)
        wall = walls_of_rank(wall, row, rank, ranked[rank], closed, rows.inverse, place);
    return nearest_of(wall);
}

// ``row`` are the logits of the token, ``value`` those of this lane, ``following`` the largest one
// that is not chosen.
__device__ Wall nearest_wall(const float* row, const float (&value)[PER], const u16* ranked,
                             float following, double margin, Rows rows, Place place) {
    float size = 0.0f;
#pragma unroll
    for (int slot = 0; slot < PER; slot++)
        if (place.member * PER + slot < EXPERTS) size = fmaxf(size, fabsf(value[slot]));
    bool is_extreme = !rows.fits_float32 || !(size < LARGEST_LOGIT) || !(margin > LEAST_MARGIN);
    if (__any_sync(WHOLE_WARP, is_extreme))
        return nearest_wall_in_float64(row, ranked, rows, place);
    const u32 closed = chosen_slots(ranked, place);
    float best = FLOAT_INF;
    float least[TOP_K];  // this lane's least quotient of each chosen expert
#pragma unroll
    for (int rank = TOP_K - 1; rank >= 0; rank--) {
        least[rank] = FLOAT_INF;
        int out = ranked[rank];
        float own = row[out];
        bool is_farther = (own - following) * rows.smallest[out] * SAFE > best;
        if (__all_sync(WHOLE_WARP, is_farther)) continue;
        const float* inverse = rows.rounded + out * EXPERTS + place.member * PER;
#pragma unroll
        for (int slot = 0; slot < PER; slot++) {
            bool is_open = place.member * PER + slot < EXPERTS && !(closed >> slot & 1u);
            if (is_open) least[rank] = fminf(least[rank], (own - value[slot]) * inverse[slot]);
        }
        best = least_of(fminf(best, least[rank]));
    }
    const float reach = best * WIDER;
    u64 candidates = 0ull;  // ranks, mostly one of them and in one lane
#pragma unroll
    for (int rank = 0; rank < TOP_K; rank++)
        if (least[rank] <= reach) candidates |= 1ull << rank;
    Wall wall = {NEVER, -1, EXPERTS};
    while (candidates) {
        const int rank = 63 - __clzll(candidates);
        candidates ^= 1ull << rank;
        wall = walls_of_rank(wall, row, rank, ranked[rank], closed, rows.inverse, place);
    }
    __syncwarp();
    return nearest_of(wall);
}
