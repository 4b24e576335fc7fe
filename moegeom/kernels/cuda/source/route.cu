// From logits to counts in one pass: selection, margins, distance and boundary, histograms, counts.
//
// Set by the caller, beside the headers' own: TERMS (1, or 3 products that add up to the logits),
// HAS_BIAS, CURVED and GROUPED (0 or 1), SCORE, NUM_KEPT, TOP2_SUM, FILL, BLOCK_TOKENS, RUN_TOKENS,
// LARGEST_EXPONENT, LARGEST_SIZE, and the places in ``number`` of what the host knows about the router and its
// inputs: the fields of moegeom.kernels.cuda.route.RouteNumbers in capitals.

#if CURVED
typedef double Score;
#else
typedef float Score;
#endif

#define FLOAT_LOWEST __int_as_float(0xff800000)

// The logits of this lane: one row, or the sum of three, and a bias.
__device__ void load_logits(const float* row, const float* bias, float (&logit)[PER], Place place) {
    load_row(row, logit, place);
#if TERMS == 3
    float second[PER], third[PER];
    load_row(row + EXPERTS, second, place);
    load_row(row + 2 * EXPERTS, third, place);
#pragma unroll
    for (int slot = 0; slot < PER; slot++) logit[slot] = (third[slot] + second[slot]) + logit[slot];
#endif
#if HAS_BIAS
    float added[PER];
    load_row(bias, added, place);
#pragma unroll
    for (int slot = 0; slot < PER; slot++) logit[slot] = logit[slot] + added[slot];
#endif
}

// What a warp remembers of each of its 32 tokens between its two stages.
struct Token {
    double margin;
    double group_margin;
    double distance;
    Score first;    // score of the best expert
    Score last;     // and of the last chosen one
    float largest;  // logit
    short out;      // boundary: the expert that leaves, -1 without a boundary
    short into;
    bool is_finite;
};

// Margin below which two correct float32 engines may choose differently; see
// moegeom.geometry.rounding.
__device__ double float_bound(double norm, const double* number, const Token& token) {
    double size = __dadd_rn(__dmul_rn(number[LONGEST_ROW], norm), number[LARGEST_BIAS]);
    double error = INF;  // partial sums may leave float32
    if (size < LARGEST_SIZE) error = __dadd_rn(__dmul_rn(number[TWO_GAMMA], size), number[UNDERFLOW]);
    if (size == 0.0) error = 0.0;
#if CURVED
    double score = size;  // of raw logits, whatever their sign
    if (SCORE != IDENTITY) score = SCORE == SOFTMAX ? 1.0 : score_of(SCORE, (double)token.largest);
    double own = number[UNIT] * (score + 1.0 + number[LARGEST_SELECTION_BIAS]);
    return __dadd_rn(__dmul_rn(2.0 * number[SLOPE], error), own);
#else
    double last = (double)token.last;
    double following = __dsub_rn(last, token.margin);
    double resolution = 0.0;
    if (following == -INF) {
        resolution = 0.0;  // every expert is chosen
    } else if (SCORE == SOFTMAX) {
        double spread = __dsub_rn((double)token.first, following);
        resolution = spread > LARGEST_EXPONENT ? INF : number[UNIT] * (1.0 + spread);
    } else if (SCORE == SIGMOID) {
        resolution = following < -LARGEST_EXPONENT ? INF : number[UNIT] * (1.0 + exp(fmin(last, 700.0)));
    } else if (SCORE == SQRT_SOFTPLUS) {
        resolution = following < -LARGEST_EXPONENT ? INF : 2.0 * number[UNIT] * fmax(last, 1.0);
    }
    return __dadd_rn(2.0 * error, resolution);
#endif
}

// A distance in units of ``unit``; an input without length is as far from a boundary as it likes.
__device__ double in_units(double distance, double unit) {
    if (unit > 0.0) return distance / unit;
    return distance == 0.0 ? 0.0 : INF;
}

// First stage, LANES lanes a token: scores, chosen experts, margins and the nearest boundary.
__device__ void route_token(const float* logits, const float* logit_bias,
                            const double* selection_bias, Rows distances, bool is_there,
                            bool wants_boundary, Score* row, u16* ranked, float* out_logits,
                            Token& found, Place place) {
    float logit[PER];
    bool is_finite = is_there;
    if (is_there) {
        load_logits(logits, logit_bias, logit, place);
#pragma unroll
        for (int slot = 0; slot < PER; slot++) is_finite &= fabsf(logit[slot]) <= 3.402823466e38f;
        if (out_logits) store_row(out_logits, logit, place);
    }
    // a lane of another token may be at fault, so the answer is looked up by token
    const u32 finite = __ballot_sync(WHOLE_WARP, is_finite);
    const u32 own = LANES_OF_TOKEN << (place.token * LANES);
    is_finite = (finite & own) == own;
    if (!is_finite) {  // also behind the last token: something that goes the way of any other
#pragma unroll
        for (int slot = 0; slot < PER; slot++) logit[slot] = -(float)(place.member * PER + slot);
    }
#if CURVED
    Score score[PER];
    selection_scores_of(SCORE, logit, selection_bias, score, place);
#else
    Score (&score)[PER] = logit;
#endif
    __syncwarp();
    store_row(row, score, place);
    __syncwarp();
    double group_margin = INF;
#if GROUPED
    const Mask mask = {NUM_KEPT, TOP2_SUM, FILL};
    group_margin = mask_groups(row, score, mask, place);
#endif
    int winner[WINNERS];
    u32 chosen;
    select_experts(row, score, place, winner, ranked, chosen);
    const double margin = margin_of(row, winner);
    Boundary boundary = {INF, -1, -1};
#if !CURVED
    if (wants_boundary && WINNERS > TOP_K)
        boundary = nearest_boundary(row, logit, ranked, slots_of_lane(place) & ~chosen,
                            row[winner[WINNERS - 1]], margin, distances, place);
#endif
    float largest = FLOAT_LOWEST;
#pragma unroll
    for (int slot = 0; slot < PER; slot++)
        if (place.member * PER + slot < EXPERTS) largest = fmaxf(largest, logit[slot]);
    largest = largest_of(largest);
    if (place.member == 0) {
        found.margin = margin;
        found.group_margin = group_margin;
        found.distance = boundary.distance;
        found.first = row[winner[0]];
        found.last = row[winner[TOP_K - 1]];
        found.largest = largest;
        found.out = boundary.rank < 0 ? -1 : ranked[boundary.rank];
        found.into = boundary.rank < 0 ? -1 : boundary.into;
        found.is_finite = is_finite;
    }
}

__device__ bool is_row(i64 token, i64 tokens) { return token >= 0 && token < tokens; }

// Label of a token; without ``label``, that of a token without document and domain.
__device__ int label_of(const u16* label, i64 token, i64 start, const double* number) {
    if (label) return label[token];
    const i64 run = (start + token) / RUN_TOKENS;
    return (int)number[UNLABELLED] * NUM_BLOCKS + (int)((run + run / NUM_BLOCKS) % NUM_BLOCKS);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
route(i64 tokens, i64 start, i64 lead, const float* logits, const double* norm, const u16* label,
      const float* logit_bias, const double* selection_bias, const double* inverse,
      const float* rounded, const float* smallest, const double* number,
      u8* is_lost, float* out_logits, int* chosen, double* margins, double* group_margins,
      double* distances, int* pairs, u16* out_labels, double* lasts, u8* near_ties,
      u64* token_counts, u64* expert_counts, u64* expert_pairs, u64* margin_bins,
      u64* effective_margin_bins, u64* distance_bins, u64* relative_bins, u64* sigma_bins,
      u64* ambiguous) {
    __shared__ Score rows[WARPS][TOKENS_IN_WARP][EXPERTS];
    __shared__ u16 ranked[WARPS][32][WINNERS];
    __shared__ u16 labels[WARPS][32];
    __shared__ Token found[WARPS][32];
    __shared__ u32 shared[5 * NUM_BINS + EXPERTS + 4];
    const Place place = place_of_thread();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const i64 first = (i64)blockIdx.x * BLOCK_TOKENS - lead;
    const int block_label = label_of(label, first, start, number);
    const Rows between = {inverse, rounded, smallest, number[FITS_FLOAT32] != 0.0};
    const Tally by_margin = {shared, margin_bins, NUM_BINS};
    const Tally by_effective_margin = {shared + NUM_BINS, effective_margin_bins, NUM_BINS};
    const Tally by_distance = {shared + 2 * NUM_BINS, distance_bins, NUM_BINS};
    const Tally by_relative = {shared + 3 * NUM_BINS, relative_bins, NUM_BINS};
    const Tally by_sigmas = {shared + 4 * NUM_BINS, sigma_bins, NUM_BINS};
    const Tally by_expert = {shared + 5 * NUM_BINS, expert_counts, EXPERTS};
    const Tally by_token = {shared + 5 * NUM_BINS + EXPERTS, token_counts, 2};
    const Tally by_bound = {shared + 5 * NUM_BINS + EXPERTS + 2, ambiguous, 2};
    const Tally all[8] = {by_margin, by_effective_margin, by_distance, by_relative,
                          by_sigmas, by_expert,    by_token,    by_bound};
#pragma unroll
    for (int at = 0; at < 8; at++)
        if (all[at].global) clear_tally(all[at]);
    __syncthreads();

    for (int begin = warp * 32; begin < BLOCK_TOKENS; begin += WARPS * 32) {
        const i64 base = first + begin;
        if (base >= tokens) break;
#pragma unroll 1
        for (int turn = 0; turn < LANES; turn++) {
            const int at = turn * TOKENS_IN_WARP + place.token;
            const i64 token = base + at;
            route_token(logits + token * (TERMS * EXPERTS), logit_bias, selection_bias, between,
                        is_row(token, tokens), inverse != 0, rows[warp][place.token],
                        ranked[warp][at], out_logits ? out_logits + token * EXPERTS : 0,
                        found[warp][at], place);
        }
        __syncwarp();

        // Second stage, a lane a token: what is known of it goes out and is counted.
        const i64 token = base + lane;
        const Token& own = found[warp][lane];
        int counted = NOT_COUNTED;
        if (is_row(token, tokens)) {
            counted = label_of(label, token, start, number);
            if (is_lost) is_lost[token] = !own.is_finite;
            if (margins) margins[token] = own.margin;
            if (group_margins) group_margins[token] = own.group_margin;
            if (distances) distances[token] = own.distance;
            if (lasts) lasts[token] = (double)own.last;
            if (pairs) {
                pairs[2 * token] = own.out;
                pairs[2 * token + 1] = own.into;
            }
            if (!own.is_finite) counted = NOT_COUNTED;
        }
        if (counted != NOT_COUNTED) {
            const double length = norm ? norm[token] : 0.0;
            const double typical = number[TYPICAL_NORM], factor = number[OUTLIER_FACTOR];
            if (norm && typical > 0.0 && (length > factor * typical || length * factor < typical))
                counted = (int)number[OUTLIERS] * NUM_BLOCKS + counted % NUM_BLOCKS;
            const double effective_margin =
                GROUPED ? fmin(own.margin, own.group_margin / 2.0) : own.margin;
            count(by_token, 0, counted, block_label);
            if (effective_margin == 0.0) count(by_token, 1, counted, block_label);
            count(by_margin, bin_of(own.margin), counted, block_label);
            count(by_effective_margin, bin_of(effective_margin), counted, block_label);
            count(by_distance, bin_of(own.distance), counted, block_label);
            if (relative_bins) {
                double relative = in_units(own.distance, length);
                count(by_relative, bin_of(relative), counted, block_label);
            }
            if (sigma_bins) {
                double scale = number[NOISE_FACTOR] * length / number[ROOT_HIDDEN];
                count(by_sigmas, bin_of(in_units(own.distance, scale)), counted, block_label);
            }
            if (ambiguous) {
                count(by_bound, 0, counted, block_label);
                if (effective_margin <= float_bound(length, number, own))
                    count(by_bound, 1, counted, block_label);
            }
            if (near_ties)
                near_ties[token] = effective_margin <= (norm ? float_bound(length, number, own) : 0.0);
        }
        labels[warp][lane] = (u16)counted;
        if (out_labels && is_row(token, tokens)) out_labels[token] = (u16)counted;
        __syncwarp();
        // and a lane a slot, so that the chosen experts of the 32 tokens go out in one piece
        for (int slot = lane; slot < 32 * TOP_K; slot += 32) {
            const int at = slot / TOP_K;
            const int expert = ranked[warp][at][slot % TOP_K];
            if (chosen && is_row(base + at, tokens)) chosen[base * TOP_K + slot] = expert;
            if (labels[warp][at] == NOT_COUNTED) continue;
            count(by_expert, expert, labels[warp][at], block_label);
            if (!expert_pairs) continue;
            u64* table = expert_pairs + (i64)(labels[warp][at] % NUM_BLOCKS) * EXPERTS * EXPERTS;
            for (int rank = 0; rank < TOP_K; rank++) {
                const int other = ranked[warp][at][rank];
                if (expert <= other) atomicAdd(table + expert * EXPERTS + other, 1ull);
            }
        }
        __syncwarp();
    }
    __syncthreads();
#pragma unroll
    for (int at = 0; at < 8; at++) add_tally(all[at], block_label);
}
