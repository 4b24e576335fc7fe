// Selection scores with dropped groups filled, and the group margin.

extern "C" __global__ void group_mask(i64 tokens, i64 num_kept, i64 is_sum_of_two, double fill,
                                      const double* scores, double* masked, double* margin) {
    __shared__ double rows[WARPS][TOKENS_IN_WARP][EXPERTS];
    const Place place = place_of_thread();
    const i64 warp = threadIdx.x >> 5;
    const i64 token = token_of_thread(place);
    const i64 at = token < tokens ? token : tokens - 1;
    double* row = rows[warp][place.token];
    double score[PER];
    load_row(scores + at * EXPERTS, score, place);
    store_row(row, score, place);
    __syncwarp();
    const Mask mask = {(int)num_kept, is_sum_of_two != 0, fill};
    const double found = mask_groups(row, score, mask, place);
    if (token >= tokens) return;
    store_row(masked + token * EXPERTS, score, place);
    if (place.member == 0) margin[token] = found;
}
