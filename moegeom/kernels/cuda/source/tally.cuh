// Counters by label (population and block) and bin. The tokens of a block of threads mostly share a
// label, so those of the first token's label are counted in shared memory and added up at the end;
// the others go straight to the counters. All of them are integers: no order changes a sum.
//
// Set by the caller: NUM_BINS, FIRST_CODE (see moegeom.geometry.histogram), NUM_BLOCKS, NOT_COUNTED.

// Bin of a value >= 0; see moegeom.geometry.histogram.
__device__ int bin_of(double value) {
    int code = (int)((u64)__double_as_longlong(value + 0.0) >> 48) - FIRST_CODE + 1;
    return code < 0 ? 0 : (code > NUM_BINS - 1 ? NUM_BINS - 1 : code);
}

struct Tally {
    u32* shared;     // counters of one label
    u64* global;     // [labels, size]; null when nobody asks
    int size;
};

__device__ void clear_tally(Tally tally) {
    for (int at = threadIdx.x; at < tally.size; at += blockDim.x) tally.shared[at] = 0u;
}

__device__ void count(Tally tally, int at, int label, int own_label) {
    if (tally.global == 0) return;
    if (label == own_label)
        atomicAdd(tally.shared + at, 1u);
    else
        atomicAdd(tally.global + (i64)label * tally.size + at, 1ull);
}

__device__ void add_tally(Tally tally, int own_label) {
    if (tally.global == 0 || own_label == NOT_COUNTED) return;
    for (int at = threadIdx.x; at < tally.size; at += blockDim.x)
        if (tally.shared[at])
            atomicAdd(tally.global + (i64)own_label * tally.size + at, (u64)tally.shared[at]);
}
