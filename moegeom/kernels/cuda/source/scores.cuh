// Selection scores of curved rules in float64: score(logit) + bias. Where the kind of score is a
// constant, the others are compiled away.

#define IDENTITY 0
#define SOFTMAX 1
#define SIGMOID 2
#define SQRT_SOFTPLUS 3

// A score that looks at one logit alone.
__device__ double score_of(int kind, double z) {
    if (kind == SIGMOID) {
        double decay = exp(-fabs(z));
        return (z >= 0.0 ? 1.0 : decay) / (1.0 + decay);
    }
    if (kind == SQRT_SOFTPLUS) return sqrt(fmax(z, 0.0) + log1p(exp(-fabs(z))));
    return z;
}

template <typename Logit>
__device__ void softmax_of(const Logit (&logit)[PER], double (&score)[PER], Place place) {
    double largest = -INF, total = 0.0;
#pragma unroll
    for (int slot = 0; slot < PER; slot++)
        if (place.member * PER + slot < EXPERTS) largest = fmax(largest, (double)logit[slot]);
    largest = largest_of(largest);
#pragma unroll
    for (int slot = 0; slot < PER; slot++) {
        bool is_expert = place.member * PER + slot < EXPERTS;
        score[slot] = is_expert ? exp((double)logit[slot] - largest) : 0.0;
        total = __dadd_rn(total, score[slot]);
    }
    total = sum_of(total);
#pragma unroll
    for (int slot = 0; slot < PER; slot++) score[slot] /= total;
}

template <typename Logit>
__device__ void selection_scores_of(int kind, const Logit (&logit)[PER], const double* bias,
                                    double (&score)[PER], Place place) {
    if (kind == SOFTMAX) {
        softmax_of(logit, score, place);
    } else {
#pragma unroll
        for (int slot = 0; slot < PER; slot++) score[slot] = score_of(kind, (double)logit[slot]);
    }
#pragma unroll
    for (int slot = 0; slot < PER; slot++) {
        int expert = place.member * PER + slot;
        if (expert < EXPERTS) score[slot] = __dadd_rn(score[slot], bias[expert]);
    }
}
