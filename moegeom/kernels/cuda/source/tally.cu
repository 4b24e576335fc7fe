// What is added up of tokens whose choice is known: statistics of their scores, what they have in
// common with the next token, expected flips. The definitions are those of moegeom.kernels.reductions;
// everything that is added is an integer, so that no order changes a sum.
//
// Set by the caller, beside the headers' own: SCORE, SUBTRACTS (0 or 1), FILL_KIND (0: nothing is
// masked, 1: by -inf, 2: by 0), BLOCK_TOKENS, TILE, FARTHEST_SIGMAS.

#define FIXED_POINT 68719476736.0      // 2^36
#define SUM_UNIT 4294967296.0          // 2^32
#define LARGEST_SUM 128.0
#define LARGE_UNIT 1048576.0           // 2^20, also the largest log-sum-exp that is added up
#define LSE_UNIT 262144.0              // 2^18
#define TOP1 (2 + EXPERTS)

// Sums by label: those of the first token's label in shared memory, the others where they belong.
struct Sums {
    u64* shared;
    u64* global;  // [labels, size]; null when nobody asks
    int size;
};

__device__ void add(Sums sums, int at, i64 more, int label, int own_label) {
    if (sums.global == 0 || more == 0) return;
    if (label == own_label)
        atomicAdd(sums.shared + at, (u64)more);
    else
        atomicAdd(sums.global + (i64)label * sums.size + at, (u64)more);
}

__device__ i64 whole(double value) { return (i64)rint(value); }

__device__ i64 in_sum_units(double value) {
    return whole(fmin(fmax(value, -LARGEST_SUM), LARGEST_SUM) * SUM_UNIT);
}

// Logarithm of the score, so that its softmax is the score over its sum.
__device__ double log_score(double z) {
    if (SCORE == SIGMOID) return fmin(z, 0.0) - log1p(exp(-fabs(z)));
    if (SCORE != SQRT_SOFTPLUS) return z;
    const double softplus = fmax(z, 0.0) + log1p(exp(-fabs(z)));
    return (z < -30.0 ? z : log(fmax(softplus, 1e-300))) / 2.0;
}

// The largest of this token's numbers, and the sum of the powers of e of the others' distance to it.
__device__ double largest_number(const double (&value)[PER], Place place) {
    double largest = -INF;
#pragma unroll
    for (int slot = 0; slot < PER; slot++)
        if (place.member * PER + slot < EXPERTS) largest = fmax(largest, value[slot]);
    return largest_of(largest);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
tally(i64 tokens, double noise_factor, double root_hidden, const float* logits,
      const float* subtracted, const int* chosen, const double* last_score, const double* distance,
      const double* norm, const i64* token, const i64* document, const int* position,
      const int* population, const int* block,
      u64* routing_entropy, u64* score_sums, u64* log_sum_exp, u64* neighbours, u64* top1,
      u64* bf16_flip, u64* mask_fill, u64* brackets) {
    __shared__ float rows[WARPS][TOKENS_IN_WARP][EXPERTS];
    __shared__ u64 shared[EXPERTS + TOP1 + 17];
    const Place place = place_of_thread();
    const int warp = threadIdx.x >> 5;
    const i64 first = blockIdx.x * (i64)BLOCK_TOKENS;
    const int own_label = population[first] * NUM_BLOCKS + block[first];
    u64* at_end = shared;
    const Sums by_score = {at_end, score_sums, EXPERTS};
    const Sums by_first = {at_end += EXPERTS, top1, TOP1};
    const Sums by_entropy = {at_end += TOP1, routing_entropy, 4};
    const Sums by_lse = {at_end += 4, log_sum_exp, 5};
    const Sums by_neighbour = {at_end += 5, neighbours, 3};
    const Sums by_flip = {at_end += 3, bf16_flip, 2};
    const Sums by_fill = {at_end += 2, mask_fill, 2};
    const Sums by_bracket = {at_end += 2, brackets, NUM_BINS};  // its first bin alone
    for (int at = threadIdx.x; at < EXPERTS + TOP1 + 17; at += blockDim.x) shared[at] = 0;
    __syncthreads();

    for (int begin = warp * TOKENS_IN_WARP; begin < BLOCK_TOKENS; begin += WARPS * TOKENS_IN_WARP) {
        const i64 at = first + begin + place.token;
        const bool is_there = at < tokens;
        const int label = is_there ? population[at] * NUM_BLOCKS + block[at] : own_label;
        float logit[PER], behind[PER];
        double z[PER], u[PER];
#pragma unroll
        for (int slot = 0; slot < PER; slot++) logit[slot] = behind[slot] = 0.0f;
        if (is_there) load_row(logits + at * EXPERTS, logit, place);
#if SUBTRACTS
        load_row(subtracted, behind, place);
#endif
#pragma unroll
        for (int slot = 0; slot < PER; slot++) {
            z[slot] = (double)(logit[slot] - behind[slot]);
            u[slot] = log_score(z[slot]);
        }
        const double top = largest_number(u, place);
        double total = 0.0, moment = 0.0, power[PER];
#pragma unroll
        for (int slot = 0; slot < PER; slot++) {
            power[slot] = place.member * PER + slot < EXPERTS ? exp(u[slot] - top) : 0.0;
            total += power[slot];
            if (power[slot] > 0.0) moment += (u[slot] - top) * power[slot];
        }
        total = sum_of(total);
        moment = sum_of(moment);
        double lse = top + log(total);
        if (SCORE == SIGMOID || SCORE == SQRT_SOFTPLUS) {
            const double largest = largest_number(z, place);
            double powers = 0.0;
#pragma unroll
            for (int slot = 0; slot < PER; slot++)
                if (place.member * PER + slot < EXPERTS) powers += exp(z[slot] - largest);
            lse = largest + log(sum_of(powers));
        }
        float probability[PER];
#pragma unroll
        for (int slot = 0; slot < PER; slot++) {
            const int expert = place.member * PER + slot;
            probability[slot] = (float)(power[slot] / total);
            if (is_there && expert < EXPERTS)
                add(by_score, expert, whole((double)probability[slot] * FIXED_POINT), label, own_label);
        }
        __syncwarp();
        store_row(rows[warp][place.token], probability, place);
        __syncwarp();
        if (!is_there || place.member != 0) continue;

        const int* mine = chosen + at * TOP_K;
        const float* row = rows[warp][place.token];
        double mass = 0.0, inside = 0.0;
        for (int rank = 0; rank < TOP_K; rank++) mass += (double)row[mine[rank]];
        for (int rank = 0; rank < TOP_K; rank++) {
            // all of them underflow to 0 where a bias chooses experts without score
            const double share = (double)row[mine[rank]] / (mass > 0.0 ? mass : 1.0);
            if (share > 0.0) inside -= share * log(share);
        }
        add(by_entropy, 0, 1, label, own_label);
        add(by_entropy, 1, in_sum_units(fmax(log(total) - moment / total, 0.0)), label, own_label);
        add(by_entropy, 2, in_sum_units(inside), label, own_label);
        add(by_entropy, 3, in_sum_units(mass), label, own_label);

        const bool is_beyond = !(fabs(lse) <= LARGE_UNIT);
        const double value = is_beyond ? 0.0 : lse, square = value * value;
        const double large = floor(square / LARGE_UNIT);
        add(by_lse, 0, 1, label, own_label);
        add(by_lse, 1, whole(large), label, own_label);
        add(by_lse, 2, whole((square - large * LARGE_UNIT) * LSE_UNIT), label, own_label);
        add(by_lse, 3, whole(value * LSE_UNIT), label, own_label);
        add(by_lse, 4, is_beyond, label, own_label);

        bool leads = false;
        if ((neighbours || top1) && at + 1 < tokens)
            leads = document[at] >= 0 && document[at + 1] == document[at] &&
                    position[at + 1] == position[at] + 1 && token[at + 1] / TILE == token[at] / TILE;
        if (leads) {
            const int* next = mine + TOP_K;
            int in_common = 0;
            for (int rank = 0; rank < TOP_K; rank++)
                for (int other = 0; other < TOP_K; other++) in_common += mine[rank] == next[other];
            add(by_neighbour, 0, 1, label, own_label);
            add(by_neighbour, 1, in_common, label, own_label);
            add(by_neighbour, 2, in_common == TOP_K, label, own_label);
            add(by_first, 0, 1, label, own_label);
            add(by_first, 1, mine[0] == next[0], label, own_label);
        }
        add(by_first, 2 + mine[0], 1, label, own_label);

        add(by_bracket, 0, 1, label, own_label);
        add(by_fill, 0, 1, label, own_label);
        if (mask_fill && FILL_KIND && (FILL_KIND == 1 ? last_score[at] < 0.0 : last_score[at] <= 0.0))
            add(by_fill, 1, in_sum_units(1.0), label, own_label);
        if (bf16_flip) {
            const double away = distance[at], noise = noise_factor * norm[at] / root_hidden;
            const double sigmas = away == 0.0 ? 0.0 : away / noise;
            const double chance = sigmas < FARTHEST_SIGMAS ? 0.5 * erfc(sigmas * 0.70710678118654752440) : 0.0;
            add(by_flip, 0, 1, label, own_label);
            add(by_flip, 1, whole(chance * FIXED_POINT), label, own_label);
        }
    }
    __syncthreads();
    const Sums all[8] = {by_score, by_first, by_entropy, by_lse, by_neighbour, by_flip, by_fill, by_bracket};
    for (int which = 0; which < 8; which++) {
        const Sums sums = all[which];
        const int size = which == 7 ? 1 : sums.size;
        if (sums.global == 0) continue;
        for (int at = threadIdx.x; at < size; at += blockDim.x)
            if (sums.shared[at])
                atomicAdd(sums.global + (i64)own_label * sums.size + at, sums.shared[at]);
    }
}
