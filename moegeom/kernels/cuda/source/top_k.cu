// The chosen experts and the margin of given selection scores.
//
// Set by the caller: SCORE_TYPE, float or double.

extern "C" __global__ void top_k(i64 tokens, const SCORE_TYPE* scores, int* chosen, double* margin) {
    __shared__ u16 ranked[WARPS][TOKENS_IN_WARP][WINNERS];
    const Place place = place_of_thread();
    const i64 warp = threadIdx.x >> 5;
    const i64 token = token_of_thread(place);
    // lanes behind the last token do its work again, so that a warp stays together
    const SCORE_TYPE* row = scores + (token < tokens ? token : tokens - 1) * EXPERTS;
    SCORE_TYPE score[PER];
    load_row(row, score, place);
    int winner[WINNERS];
    u32 slots;
    select_experts(row, score, place, winner, ranked[warp][place.token], slots);
    if (token >= tokens) return;
    for (int rank = place.member; rank < TOP_K; rank += LANES)
        chosen[token * TOP_K + rank] = ranked[warp][place.token][rank];
    if (place.member == 0) margin[token] = margin_of(row, winner);
}
