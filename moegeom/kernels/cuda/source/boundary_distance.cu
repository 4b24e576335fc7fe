// The distance to the boundary, and the nearest boundary, of given logits and chosen experts.
//
// Set by the caller: LOGIT_TYPE, float or double.

__device__ Boundary boundary_of(const float* row, const u16* ranked, double margin, Rows rows, Place place) {
    const u32 open = slots_of_lane(place) & ~chosen_slots(ranked, place);
    float value[PER], following = -FLOAT_INF;
    load_row(row, value, place);
#pragma unroll
    for (int slot = 0; slot < PER; slot++)
        if (open >> slot & 1u) following = fmaxf(following, value[slot]);
    return nearest_boundary(row, value, ranked, open, largest_of(following), margin, rows, place);
}

// float32 would round these logits before their differences are taken
__device__ Boundary boundary_of(const double* row, const u16* ranked, double margin, Rows rows, Place place) {
    const u32 open = slots_of_lane(place) & ~chosen_slots(ranked, place);
    return nearest_boundary_in_float64(row, ranked, open, rows, place);
}

extern "C" __global__ void boundary_distance(i64 tokens, const LOGIT_TYPE* logits, const int* chosen,
                                             const double* margin, const double* inverse,
                                             const float* rounded, const float* smallest,
                                             i64 fits_float32, double* distance, int* pair) {
    __shared__ u16 ranked[WARPS][TOKENS_IN_WARP][TOP_K];
    const Place place = place_of_thread();
    const i64 warp = threadIdx.x >> 5;
    const i64 token = token_of_thread(place);
    const i64 at = token < tokens ? token : tokens - 1;
    u16* own = ranked[warp][place.token];
    for (int rank = place.member; rank < TOP_K; rank += LANES)
        own[rank] = (u16)chosen[at * TOP_K + rank];
    __syncwarp();
    const Rows rows = {inverse, rounded, smallest, fits_float32 != 0};
    const Boundary boundary = boundary_of(logits + at * EXPERTS, own, margin[at], rows, place);
    if (token >= tokens || place.member) return;
    distance[token] = boundary.distance;
    if (pair == 0) return;
    pair[2 * token] = boundary.rank < 0 ? -1 : own[boundary.rank];
    pair[2 * token + 1] = boundary.rank < 0 ? -1 : boundary.into;
}
