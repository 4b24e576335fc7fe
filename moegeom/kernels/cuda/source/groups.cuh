// Group-limited selection (docs/theory.md E2): experts of dropped groups get a fill.
//
// Set by the caller: NUM_GROUPS, which divides EXPERTS.

#define GROUP_SIZE (EXPERTS / NUM_GROUPS)

struct Mask {
    int num_kept;
    bool is_sum_of_two;  // or the largest score of the group
    double fill;
};

#if EXPERTS == LANES * PER && LANES % NUM_GROUPS == 0
// The experts of a group are those of neighbouring lanes, which find its score together.
#define LANES_OF_GROUP (LANES / NUM_GROUPS)

__device__ int group_of_lane(int, Place place) { return place.member / LANES_OF_GROUP; }

__device__ double group_score(const double*, const double (&score)[PER], int, Mask mask) {
    double first = -INF, second = -INF;
#pragma unroll
    for (int slot = 0; slot < PER; slot++) {
        second = fmax(second, fmin(first, score[slot]));
        first = fmax(first, score[slot]);
    }
#pragma unroll
    for (int step = LANES_OF_GROUP / 2; step > 0; step /= 2) {
        const double theirs = across(first, step);
        second = fmax(fmax(second, across(second, step)), fmin(first, theirs));
        first = fmax(first, theirs);
    }
    return mask.is_sum_of_two && GROUP_SIZE > 1 ? __dadd_rn(first, second) : first;
}
#else
// A lane looks at every LANES-th group.
#define LANES_OF_GROUP 1

__device__ int group_of_lane(int turn, Place place) { return turn * LANES + place.member; }

__device__ double group_score(const double* row, const double (&)[PER], int group, Mask mask) {
    if (group >= NUM_GROUPS) return -INF;
    double first = -INF, second = -INF;
    for (int expert = group * GROUP_SIZE; expert < (group + 1) * GROUP_SIZE; expert++) {
        double value = row[expert];
        if (value > first) {
            second = first;
            first = value;
        } else if (value > second) {
            second = value;
        }
    }
    return mask.is_sum_of_two && GROUP_SIZE > 1 ? __dadd_rn(first, second) : first;
}
#endif

// Masks ``score`` and ``row``, the scores of the whole token, which all lanes have written; returns
// the margin between the last kept and the first dropped group, inf when none is dropped.
__device__ double mask_groups(double* row, double (&score)[PER], Mask mask, Place place) {
    double own[(NUM_GROUPS + LANES - 1) / LANES];
#pragma unroll
    for (int turn = 0; turn * LANES < NUM_GROUPS; turn++)
        own[turn] = group_score(row, score, group_of_lane(turn, place), mask);
    u32 kept[(NUM_GROUPS + 31) / 32] = {};  // a bit a group, the same in every lane
    double last = INF, following = -INF;
#pragma unroll 1
    for (int round = 0; round < mask.num_kept + (mask.num_kept < NUM_GROUPS); round++) {
        double best = -INF;
        int group = NUM_GROUPS;
#pragma unroll
        for (int turn = 0; turn * LANES < NUM_GROUPS; turn++) {
            int candidate = group_of_lane(turn, place);
            bool is_free = candidate < NUM_GROUPS && !(kept[candidate / 32] >> (candidate % 32) & 1u);
            if (is_free && (group == NUM_GROUPS || own[turn] > best)) {
                best = own[turn];
                group = candidate;
            }
        }
#pragma unroll
        for (int step = LANES / 2; step >= LANES_OF_GROUP; step /= 2) {
            double theirs = across(best, step);
            int other = across(group, step);
            // of equal groups the lower number is kept
            bool is_better = theirs > best || (theirs == best && other < group);
            if (other < NUM_GROUPS && (group == NUM_GROUPS || is_better)) {
                best = theirs;
                group = other;
            }
        }
        if (round < mask.num_kept) {
            kept[group / 32] |= 1u << (group % 32);
            last = best;
        } else {
            following = best;
        }
    }
    __syncwarp();
#pragma unroll
    for (int slot = 0; slot < PER; slot++) {
        int expert = place.member * PER + slot;
        const int group = expert / GROUP_SIZE;
        if (expert >= EXPERTS || (kept[group / 32] >> (group % 32) & 1u)) continue;
        score[slot] = mask.fill;
        row[expert] = mask.fill;
    }
    __syncwarp();
    return __dsub_rn(last, following);
}
