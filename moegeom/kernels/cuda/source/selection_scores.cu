// Selection scores of given logits.
//
// Set by the caller: LOGIT_TYPE, float or double.

extern "C" __global__ void selection_scores(i64 tokens, i64 kind, const LOGIT_TYPE* logits,
                                            const double* bias, double* scores) {
    const Place place = place_of_thread();
    const i64 token = token_of_thread(place);
    const i64 at = token < tokens ? token : tokens - 1;
    LOGIT_TYPE logit[PER];
    double score[PER];
#pragma unroll
    for (int slot = 0; slot < PER; slot++) {
        int expert = place.member * PER + slot;
        logit[slot] = expert < EXPERTS ? logits[at * EXPERTS + expert] : (LOGIT_TYPE)0;
    }
    selection_scores_of((int)kind, logit, bias, score, place);
    if (token >= tokens) return;
#pragma unroll
    for (int slot = 0; slot < PER; slot++) {
        int expert = place.member * PER + slot;
        if (expert < EXPERTS) scores[token * EXPERTS + expert] = score[slot];
    }
}
