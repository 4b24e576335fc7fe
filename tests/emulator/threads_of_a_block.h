// Runs CUDA C++ sources on the processor, one thread after the other: what a kernel computes, not how
// fast. The threads of a block are fibers that give way to each other wherever they exchange
// values; a block whose threads wait for one that has left, or wait in different places, aborts.
#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

struct Index { unsigned x = 0, y = 0, z = 0; };

namespace host {

struct Fiber {
    ucontext_t begin;
    jmp_buf here;
    char* stack = nullptr;
    bool has_begun = false, has_ended = false;
};

constexpr unsigned MOST_THREADS = 1024, STACK_BYTES = 1 << 16;
static Fiber fibers[MOST_THREADS];
static jmp_buf scheduler;
static unsigned current, num_threads;
static unsigned running;
static unsigned long events;  // arrivals at barriers, and ends of threads

struct Body { virtual void call() = 0; };
static Body* body;

static void fail(const char* what) {
    std::fprintf(stderr, "emulated block: %s\n", what);
    std::abort();
}

static void give_way() {
    if (_setjmp(fibers[current].here) == 0) _longjmp(scheduler, 1);
}

static void enter() {
    body->call();
    fibers[current].has_ended = true;
    _longjmp(scheduler, 1);
}

// A barrier for the threads of a mask of one warp, or of the whole block.
struct Barrier { unsigned arrived = 0, generation = 0; unsigned mask = 0; };
static Barrier of_warp[MOST_THREADS / 32];
static Barrier of_block;
static uint64_t slots[MOST_THREADS];

static void wait(Barrier& barrier, unsigned expected) {
    const unsigned generation = barrier.generation;
    events++;
    if (++barrier.arrived == expected) {
        barrier.arrived = 0;
        barrier.generation++;
        return;
    }
    while (barrier.generation == generation) give_way();
}

static unsigned warp() { return current / 32; }

static void wait_for_warp(unsigned mask) {
    if (!(mask >> (current % 32) & 1u)) fail("a thread is not in its own mask");
    Barrier& barrier = of_warp[warp()];
    if (barrier.arrived && barrier.mask != mask) fail("threads of a warp wait with different masks");
    barrier.mask = mask;
    wait(barrier, __builtin_popcount(mask));
}

template <typename Value> static Value exchange(unsigned mask, Value value, unsigned from) {
    static_assert(sizeof(Value) <= 8, "values of at most eight bytes");
    slots[current] = 0;
    std::memcpy(&slots[current], &value, sizeof(Value));
    wait_for_warp(mask);
    Value found;
    std::memcpy(&found, &slots[warp() * 32 + from], sizeof(Value));
    wait_for_warp(mask);
    return found;
}

}  // namespace host

static Index threadIdx, blockIdx, blockDim, gridDim;

namespace host {

// Lets a thread go on until it waits or ends.
static void step(unsigned thread) {
    Fiber& fiber = fibers[thread];
    if (fiber.has_ended) return;
    current = thread;
    threadIdx.x = thread;
    if (_setjmp(scheduler) == 0) {
        if (fiber.has_begun) _longjmp(fiber.here, 1);
        fiber.has_begun = true;
        getcontext(&fiber.begin);
        fiber.begin.uc_stack.ss_sp = fiber.stack;
        fiber.begin.uc_stack.ss_size = STACK_BYTES;
        fiber.begin.uc_link = nullptr;
        makecontext(&fiber.begin, enter, 0);
        setcontext(&fiber.begin);
    }
    if (fiber.has_ended) {
        running--;
        events++;
    }
}

// Gives each of the threads a turn; false where nobody has come any further.
static bool turns(unsigned first, unsigned last, bool backwards) {
    const unsigned long before = events;
    for (unsigned turn = first; turn < last; turn++)
        step(backwards ? first + last - 1 - turn : turn);
    return events != before;
}

template <typename Kernel> static void run(unsigned grid, unsigned block, Kernel kernel) {
    if (block % 32 || block > MOST_THREADS) fail("blocks of 1 to 32 whole warps are expected");
    struct Holder : Body {
        Kernel& kernel;
        explicit Holder(Kernel& given) : kernel(given) {}
        void call() override { kernel(); }
    } holder(kernel);
    num_threads = block;
    blockDim.x = block;
    gridDim.x = grid;
    body = &holder;
    // A missing barrier shows only where some thread comes first: forwards and backwards in turn,
    // all threads step by step and then each warp as far as it gets before the next one.
    static unsigned order = 0;
    for (unsigned number = 0; number < grid; number++, order++) {
        const bool backwards = order & 1u, by_warps = order & 2u;
        blockIdx.x = number;
        for (Barrier& barrier : of_warp) barrier = Barrier();
        of_block = Barrier();
        for (unsigned thread = 0; thread < block; thread++) {
            Fiber& fiber = fibers[thread];
            if (!fiber.stack) fiber.stack = static_cast<char*>(std::malloc(STACK_BYTES));
            fiber.has_begun = fiber.has_ended = false;
        }
        running = block;
        while (running) {
            bool has_moved = false;
            for (unsigned turn = 0; by_warps && turn < block / 32; turn++) {
                const unsigned first = 32 * (backwards ? block / 32 - 1 - turn : turn);
                while (turns(first, first + 32, backwards)) has_moved = true;
            }
            if (!by_warps) has_moved = turns(0, block, backwards);
            if (!has_moved) fail("its threads wait for each other for ever");
        }
    }
}

}  // namespace host

template <typename Value> static Value __shfl_xor_sync(unsigned mask, Value value, int step) {
    return host::exchange(mask, value, (host::current % 32) ^ (unsigned)step);
}
static unsigned __ballot_sync(unsigned mask, bool value) {
    host::slots[host::current] = value;
    host::wait_for_warp(mask);
    unsigned found = 0;
    for (unsigned lane = 0; lane < 32; lane++)
        if (mask >> lane & 1u) found |= (unsigned)(host::slots[host::warp() * 32 + lane] != 0) << lane;
    host::wait_for_warp(mask);
    return found;
}
static bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0u; }
static bool __all_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) == mask; }
static void __syncwarp(unsigned mask = 0xffffffffu) { host::wait_for_warp(mask); }
static void __syncthreads() { host::wait(host::of_block, host::num_threads); }

template <typename Value> static Value atomicAdd(Value* at, Value more) {
    Value before = *at;
    *at += more;
    return before;
}

template <typename To, typename From> static To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From), "bits of one size");
    To found;
    std::memcpy(&found, &value, sizeof(To));
    return found;
}
static unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
static float __uint_as_float(unsigned x) { return bits_as<float>(x); }
static float __int_as_float(int x) { return bits_as<float>(x); }
static long long __double_as_longlong(double x) { return bits_as<long long>(x); }
static double __longlong_as_double(long long x) { return bits_as<double>(x); }
static int __ffs(int x) { return __builtin_ffs(x); }
static int __clzll(unsigned long long x) { return x ? __builtin_clzll(x) : 64; }
static double __dadd_rn(double x, double y) { return x + y; }
static double __dsub_rn(double x, double y) { return x - y; }
static double __dmul_rn(double x, double y) { return x * y; }
using std::erfc;
using std::exp;
using std::fabs;
using std::floor;
using std::fmax;
using std::fmin;
using std::log;
using std::log1p;
using std::rint;
using std::sqrt;
