// The TOP_K + 1 largest scores of a token, in descending order, ties to the lowest expert.
//
// First by keys of 32 bits: the upper bits of the score's order, and below them the complement of
// the expert's number, so that an integer maximum finds the winner and its number. Where two keys
// that follow one another agree in all bits of the score, the order is not proved, and the token is
// done again by the scores themselves. With 64 experts 26 bits are left: fewer than one in a
// thousand random tokens is done twice.

#define WINNERS (TOP_K < EXPERTS ? TOP_K + 1 : TOP_K)
// one more, to see whether the last winner is really ahead
#define ROUNDS (TOP_K + 1 < EXPERTS ? TOP_K + 2 : EXPERTS)

#if EXPERTS <= 32
#define EXPERT_BITS 31u
#elif EXPERTS <= 64
#define EXPERT_BITS 63u
#elif EXPERTS <= 128
#define EXPERT_BITS 127u
#elif EXPERTS <= 256
#define EXPERT_BITS 255u
#elif EXPERTS <= 512
#define EXPERT_BITS 511u
#else
#define EXPERT_BITS 1023u
#endif

__device__ u32 key_of(float score, int expert) {
    return (order_of(score) & ~EXPERT_BITS) | (EXPERT_BITS - (u32)expert);
}

// Keys of float64 scores are those of the nearest float32: rounding keeps the order of what it does
// not make equal.
__device__ u32 key_of(double score, int expert) { return key_of((float)score, expert); }

__device__ void exchange(u32& first, u32& second) {
    u32 larger = first > second ? first : second;
    second = first > second ? second : first;
    first = larger;
}

// Batcher's odd-even merge sort, descending; PER is a power of two. Templates, because keys stay in
// registers only where every place is known to the compiler.
template <int FIRST, int SIZE, int STEP>
__device__ void merge_keys(u32 (&key)[PER]) {
    if constexpr (2 * STEP < SIZE) {
        merge_keys<FIRST, SIZE, 2 * STEP>(key);
        merge_keys<FIRST + STEP, SIZE, 2 * STEP>(key);
#pragma unroll
        for (int at = FIRST + STEP; at + STEP < FIRST + SIZE; at += 2 * STEP)
            exchange(key[at], key[at + STEP]);
    } else {
        exchange(key[FIRST], key[FIRST + STEP]);
    }
}

template <int FIRST, int SIZE>
__device__ void sort_keys(u32 (&key)[PER]) {
    if constexpr (SIZE > 1) {
        sort_keys<FIRST, SIZE / 2>(key);
        sort_keys<FIRST + SIZE / 2, SIZE / 2>(key);
        merge_keys<FIRST, SIZE, 1>(key);
    }
}

// The slots of this lane whose experts are chosen, a bit each.
__device__ u32 chosen_slots(const u16* ranked, Place place) {
    u32 chosen = 0u;
#pragma unroll
    for (int rank = 0; rank < TOP_K; rank++)
        if (ranked[rank] / PER == place.member) chosen |= 1u << (ranked[rank] % PER);
    return chosen;
}

// False where the order is not proved.
template <typename Score>
__device__ bool select_by_keys(const Score (&score)[PER], Place place, int (&winner)[WINNERS],
                               u32& chosen) {
    u32 key[PER];
#pragma unroll
    for (int slot = 0; slot < PER; slot++) {
        int expert = place.member * PER + slot;
        key[slot] = expert < EXPERTS ? key_of(score[slot], expert) : 0u;
    }
    sort_keys<0, PER>(key);
    bool is_proved = true;
    u32 before = 0u;
    chosen = 0u;
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        const u32 best = largest_of(key[0]);
        const int expert = (int)(EXPERT_BITS - (best & EXPERT_BITS));
        if (key[0] == best) {
            if (round < TOP_K) chosen |= 1u << (expert % PER);
#pragma unroll
            for (int slot = 0; slot + 1 < PER; slot++) key[slot] = key[slot + 1];
            key[PER - 1] = 0u;
        }
        if (round > 0) is_proved &= (best | EXPERT_BITS) != (before | EXPERT_BITS);
        if (round < WINNERS) winner[round] = expert;
        before = best;
    }
    return is_proved;
}

template <typename Score>
__device__ void select_by_scores(const Score* row, Place place, u16* ranked) {
    u32 taken = 0u;
#pragma unroll 1
    for (int round = 0; round < WINNERS; round++) {
        u64 best = 0ull;
        int expert = EXPERTS;
#pragma unroll 1
        for (int slot = 0; slot < PER; slot++) {
            int own = place.member * PER + slot;
            if (own >= EXPERTS || (taken >> slot & 1u)) continue;
            u64 order = (u64)order_of(row[own]);
            if (order > best) {
                best = order;
                expert = own;
            }
        }
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) {
            u64 order = across(best, step);
            int other = across(expert, step);
            if (order > best || (order == best && other < expert)) {
                best = order;
                expert = other;
            }
        }
        if (expert / PER == place.member) taken |= 1u << (expert % PER);
        if (place.member == 0) ranked[round] = (u16)expert;
    }
}

// ``row`` are the scores of the whole token, which all its lanes have written. Winners are also
// written to ``ranked``, where they can be looked up by a rank that is not known in advance, and
// those of this lane's slots that are chosen are marked in ``chosen``.
template <typename Score>
__device__ void select_experts(const Score* row, const Score (&score)[PER], Place place,
                               int (&winner)[WINNERS], u16* ranked, u32& chosen) {
    if (__all_sync(WHOLE_WARP, select_by_keys(score, place, winner, chosen))) {
#pragma unroll
        for (int rank = 0; rank < WINNERS; rank++)
            if (place.member == rank % LANES) ranked[rank] = (u16)winner[rank];
        __syncwarp();
        return;
    }
    select_by_scores(row, place, ranked);
    __syncwarp();
#pragma unroll
    for (int rank = 0; rank < WINNERS; rank++) winner[rank] = ranked[rank];
    chosen = chosen_slots(ranked, place);
}

// k-th minus (k+1)-th score; infinite where there is no such expert, or it is masked by -inf.
template <typename Score>
__device__ double margin_of(const Score* row, const int (&winner)[WINNERS]) {
    if (WINNERS == TOP_K) return INF;
    double following = (double)row[winner[WINNERS - 1]];
    return following == -INF ? INF : __dsub_rn((double)row[winner[TOP_K - 1]], following);
}
