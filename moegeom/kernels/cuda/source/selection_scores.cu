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
    load_row(logits + at * EXPERTS, logit, place);
    selection_scores_of((int)kind, logit, bias, score, place);
    if (token < tokens) store_row(scores + token * EXPERTS, score, place);
}
