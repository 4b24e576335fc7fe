// Counts of given values, a thread a token: what the fused kernel counts, by itself.

#define LABEL(token) ((i64)population[token] * NUM_BLOCKS + block[token])

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
