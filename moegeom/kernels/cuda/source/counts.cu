// Counts and sums of given values by label. A thread takes RUN neighbouring tokens, which mostly have
// one label, and adds what it has gathered where the label changes: integers, so that no order matters.
//
// Set by the caller, beside the headers' own: PROBABILITY, the type of what add_scores adds up.

#define LABEL(token) ((i64)population[token] * NUM_BLOCKS + block[token])
#define RUN 16

extern "C" __global__ void count_labels(i64 tokens, const i64* weights, const int* population,
                                        const int* block, u64* counts) {
    const i64 first = (blockIdx.x * (i64)blockDim.x + threadIdx.x) * RUN;
    u64 sum = 0;
    for (i64 token = first; token < first + RUN && token < tokens; token++) {
        sum += (u64)weights[token];
        if (token + 1 < first + RUN && token + 1 < tokens && LABEL(token + 1) == LABEL(token)) continue;
        if (sum) atomicAdd(counts + LABEL(token), sum);
        sum = 0;
    }
}

// A thread an expert, so that rows are read in one piece; a block of threads takes ROWS tokens.
#define ROWS 128

extern "C" __global__ void add_scores(i64 tokens, i64 experts, const PROBABILITY* probability,
                                      const int* population, const int* block, u64* sums) {
    const i64 first = blockIdx.x * (i64)ROWS, last = first + ROWS < tokens ? first + ROWS : tokens;
    for (i64 expert = threadIdx.x; expert < experts; expert += blockDim.x) {
        u64 sum = 0;
        for (i64 token = first; token < last; token++) {
            sum += (u64)rint((double)probability[token * experts + expert] * 68719476736.0);  // 2^36
            if (token + 1 < last && LABEL(token + 1) == LABEL(token)) continue;
            if (sum) atomicAdd(sums + LABEL(token) * experts + expert, sum);
            sum = 0;
        }
    }
}

extern "C" __global__ void count_bins(i64 tokens, const double* values, const int* population,
                                      const int* block, u64* counts) {
    const i64 token = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    if (token < tokens) atomicAdd(counts + LABEL(token) * NUM_BINS + bin_of(values[token]), 1ull);
}

extern "C" __global__ void count_experts(i64 tokens, i64 slots, i64 experts, const int* chosen,
                                         const int* population, const int* block, u64* counts) {
    const i64 token = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    if (token >= tokens) return;
    for (i64 slot = 0; slot < slots; slot++) {
        const int expert = chosen[token * slots + slot];
        if (expert >= 0) atomicAdd(counts + LABEL(token) * experts + expert, 1ull);
    }
}

extern "C" __global__ void count_pairs(i64 tokens, i64 slots, i64 experts, const int* chosen,
                                       const int* block, u64* counts) {
    const i64 token = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    if (token >= tokens) return;
    u64* table = counts + (i64)block[token] * experts * experts;
    for (i64 slot = 0; slot < slots; slot++)
        for (i64 other = slot; other < slots; other++) {
            const int first = chosen[token * slots + slot], second = chosen[token * slots + other];
            if (first < 0 || second < 0) continue;
            const int low = first < second ? first : second, high = first < second ? second : first;
            atomicAdd(table + (i64)low * experts + high, 1ull);
        }
}
