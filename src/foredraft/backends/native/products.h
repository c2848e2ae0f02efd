/* Products of packed matrices with a few tokens and with many; layer.c includes this. */

#define FOR_KNOWN(n, call) /* with a constant n, accumulators stay in registers */ \
    switch (n) { \
        case 1: { enum { COUNT = 1 }; call; } break; \
        case 2: { enum { COUNT = 2 }; call; } break; \
        case 3: { enum { COUNT = 3 }; call; } break; \
        case 4: { enum { COUNT = 4 }; call; } break; \
        case 5: { enum { COUNT = 5 }; call; } break; \
        default: { enum { COUNT = TOKENS }; call; } \
    }

#define UNROLLED _Pragma("GCC unroll 16")

typedef struct Matrix {
    const void *values;   /* packed */
    const void *scale;    /* EIGHTS: [N] in the model's dtype; groups: [N/64][groups][64] */
    const uint16_t *over; /* [N/64][groups / nested][64] float16, factors of int8 scales; or null */
    const uint16_t *mins; /* likewise, what is subtracted, times `zeros`; or null */
    const value *bias;    /* or null */
    const uint8_t *zeros; /* groups: [N/64][groups][64] zero points, or factors of `mins`; null: `zero` for all, or 1 */
    const int32_t *order; /* groups: [K] the input of each column of the weights; null: in order */
    int64_t kind, group;  /* `group`: inputs per group; the last one may be shorter */
    int64_t zero, scales; /* `scales`: dtype of `scale`, for groups */
    int64_t nested;       /* groups per number of `over` and `mins` */
    const struct Matrix *next; /* groups: the matrix below this one, which has `outputs` outputs; or null */
    int64_t outputs;
} Matrix;

#define SIZE(kind) ((kind) == EIGHTS ? sizeof(int8_t) : sizeof(value)) /* bytes of a weight */
INLINE operand read_weights(const char *p, int kind) { return kind == EIGHTS ? eights((const int8_t *)p) : weights((const value *)p); }

/* An `entry` is an input as products read it. Where they widen one weight of a pair after the other (HALVED), it is a float32. */
#ifdef HALVED
INLINE f32 half_of(const char *p, int odd, int kind) {
    return kind == EIGHTS ? half_of_eights((const int8_t *)p, odd) : half_of_weights((const value *)p, odd);
}
typedef float entry;
#define GAP 16 /* entries between rows: with a power of two from row to row, all rows would compete for the same lines of the L1 cache */
#else
typedef value entry;
#define GAP 0
#endif
#define ENTRIES(n, K) ((size_t)(n) * ((K) + GAP)) /* of n rows of K inputs */

INLINE void put_entries(const value *x, entry *to, int K) {
#ifdef HALVED
    for (int k = 0; k < K; k += 16) f32_store(to + k, load(x + k));
#else
    for (int k = 0; k < K; k += 16) store(to + k, load(x + k));
#endif
}

/* x [n, K] as entries: x itself, or copied to `room`, which has place for ENTRIES(n, K) */
INLINE const entry *entries(const value *x, int n, int K, entry *room) {
#ifdef HALVED
    for (int t = 0; t < n; t++) put_entries(x + (size_t)t * K, room + ENTRIES(t, K), K);
    return room;
#else
    return (void)n, (void)K, (void)room, x;
#endif
}

/* The initial value and the last step of the sums of 16 outputs. torch adds a bias within a product; with a scale per output it rounds, scales,
 * rounds again and then adds the bias. */
INLINE f32 begun(const Matrix *m, int o, int kind) { return kind != EIGHTS && m->bias ? load(m->bias + o) : f32_zero(); }
INLINE f32 ended(f32 sum, const Matrix *m, int o, int kind) {
    if (kind != EIGHTS) return sum;
    sum = f32_mul(rounded(sum), load((const value *)m->scale + o));
    return m->bias ? f32_add(rounded(sum), load(m->bias + o)) : sum;
}

#if defined(BF16) && !defined(NO_TILES) && (defined(__AMX_BF16__) || defined(EMULATED))
#define TILED /* products in tiles of AMX */
#include "tiles.h"
#endif

#include "groups.h"

#ifdef HALVED
/* `abreast` blocks of 16 outputs from o on, of n tokens; y points to the first output and has rows of N. If `asking`, weights are prefetched
 * AHEAD bytes before their use. */
INLINE void halved_tile(const Matrix *m, int o, const entry *x, value *y, int K, int N, int n, int abreast, int asking, int kind) {
    const size_t block = (size_t)K * 16 * SIZE(kind);
    const char *w = (const char *)m->values + (size_t)o * K * SIZE(kind);
    f32 sums[BLOCKS][TOKENS];
    UNROLLED for (int b = 0; b < abreast; b++)
        UNROLLED for (int t = 0; t < n; t++) sums[b][t] = begun(m, o + b * 16, kind);
    for (int k = 0; k < K; k += DEPTH, w += DEPTH * 16 * SIZE(kind), x += DEPTH) {
        UNROLLED for (int b = 0; asking && b < abreast; b++) __builtin_prefetch(w + b * block + AHEAD);
        UNROLLED for (int odd = 0; odd < DEPTH; odd++)
            UNROLLED for (int b = 0; b < abreast; b++) {
                const f32 w_k = half_of(w + b * block, odd, kind);
                UNROLLED for (int t = 0; t < n; t++) f32_add_product(&sums[b][t], w_k, x + ENTRIES(t, K) + odd);
            }
    }
    UNROLLED for (int b = 0; b < abreast; b++)
        UNROLLED for (int t = 0; t < n; t++) store(y + (size_t)t * N + b * 16, ended(sums[b][t], m, o + b * 16, kind));
}

/* Not inlined: within a larger function compilers run out of registers. */
#define HALVED_TILE(name, n, abreast, asking, kind) \
    static __attribute__((noinline)) void name(const Matrix *m, int o, const entry *x, value *y, int K, int N) { \
        halved_tile(m, o, x, y, K, N, n, abreast, asking, kind); \
    }
#define HALVED_TILES(n) \
    HALVED_TILE(asking_##n, n, 1, 1, VALUES) HALVED_TILE(again_##n, n, 1, 0, VALUES) \
    HALVED_TILE(asking_eights_##n, n, 1, 1, EIGHTS) HALVED_TILE(again_eights_##n, n, 1, 0, EIGHTS)
HALVED_TILE(alone, 1, BLOCKS, 0, VALUES)
HALVED_TILE(alone_eights, 1, BLOCKS, 0, EIGHTS)
HALVED_TILE(two, 2, 2, 1, VALUES) HALVED_TILE(two_eights, 2, 2, 1, EIGHTS) /* two streams are read faster than one */
HALVED_TILES(1) HALVED_TILES(2) HALVED_TILES(3) HALVED_TILES(4) HALVED_TILES(5) HALVED_TILES(6)

/* BLOCKS * 16 outputs from o on, of T tokens, into out [T, BLOCKS * 16]; not for group-quantized weights. Rounds of up to TOKENS tokens go over
 * the same block of weights. The first round prefetches as it reads, beyond the end of the block, too. */
static void outputs(const Matrix *m, int o, const entry *x, value *out, int T, int K, const char *after) {
#define OF(name) {name##_1, name##_2, name##_3, name##_4, name##_5, name##_6}
    static void (*const tiles[2][2][TOKENS])(const Matrix *, int, const entry *, value *, int, int) = {
        {OF(again), OF(asking)}, {OF(again_eights), OF(asking_eights)}};
    const int rounds = (T + TOKENS - 1) / TOKENS, each = (T + rounds - 1) / rounds, N = BLOCKS * 16;
    (void)after;
    if (T == 1) (m->kind == EIGHTS ? alone_eights : alone)(m, o, x, out, K, N);
    for (int b = 0; T == 2 && b < BLOCKS; b += 2) (m->kind == EIGHTS ? two_eights : two)(m, o + b * 16, x, out + b * 16, K, N);
    if (T <= 2) return;
    for (int b = 0; b < BLOCKS; b++)
        for (int t = 0; t < T; t += each)
            tiles[m->kind == EIGHTS][t == 0][(T - t < each ? T - t : each) - 1](m, o + b * 16, x + ENTRIES(t, K), out + t * N + b * 16, K, N);
}
#else
/* BLOCKS * 16 outputs from o on, of n tokens; y points to the first of them and has rows of N */
INLINE void tile(const Matrix *m, int o, const value *x, value *y, int K, int N, int n, int kind) {
    const size_t block = (size_t)K * 16 * SIZE(kind);
    for (int end = o + BLOCKS * 16; o < end; o += TOGETHER(n) * 16, y += TOGETHER(n) * 16) {
        f32 sums[BLOCKS][TOKENS];
        const char *w = (const char *)m->values + (size_t)o * K * SIZE(kind);
        for (int b = 0; b < TOGETHER(n); b++)
            for (int t = 0; t < n; t++) sums[b][t] = begun(m, o + b * 16, kind);
        for (int k = 0; k < K; k += DEPTH) {
            operand w_k[BLOCKS];
            for (int b = 0; b < TOGETHER(n); b++) w_k[b] = read_weights(w + b * block + (size_t)k * 16 * SIZE(kind), kind);
            for (int t = 0; t < n; t++) {
                operand x_k = input(x + (size_t)t * K + k);
                for (int b = 0; b < TOGETHER(n); b++) sums[b][t] = multiply(sums[b][t], w_k[b], x_k);
            }
        }
        for (int b = 0; b < TOGETHER(n); b++)
            for (int t = 0; t < n; t++) store(y + (size_t)t * N + b * 16, ended(sums[b][t], m, o + b * 16, kind));
    }
}

static void some_tokens(const Matrix *m, int o, const value *x, value *y, int K, int N, int n) {
    if (m->kind == EIGHTS)
        FOR_KNOWN(n, tile(m, o, x, y, K, N, COUNT, EIGHTS))
    else
        FOR_KNOWN(n, tile(m, o, x, y, K, N, COUNT, VALUES))
}

/* ASIDE * 16 outputs from o on, of n tokens. Reading and computing overlap: `asking` prefetches weights AHEAD bytes before their use; and unless
 * null, a block of weights from `soon` on is prefetched. Without either, a CPU reads less far ahead when there are more tokens, and hardware
 * prefetchers stop at the end of a page. */
INLINE void wide_tile(const Matrix *m, int o, const value *x, value *y, int K, int N, int n, const char *soon, int asking, int kind) {
    f32 sums[ASIDE][WIDE];
    const size_t block = (size_t)K * 16 * SIZE(kind);
    const char *w = (const char *)m->values + (size_t)o * K * SIZE(kind);
    for (int b = 0; b < ASIDE; b++)
        for (int t = 0; t < n; t++) sums[b][t] = begun(m, o + b * 16, kind);
    for (int k = 0; k < K; k += DEPTH) {
        operand w_k[ASIDE];
        for (int b = 0; asking && b < ASIDE; b++) __builtin_prefetch(w + b * block + (size_t)k * 16 * SIZE(kind) + AHEAD, 0, INTO_L2);
        if (soon) __builtin_prefetch(soon + (size_t)k * 16 * SIZE(kind), 0, INTO_L2);
        for (int b = 0; b < ASIDE; b++) w_k[b] = read_weights(w + b * block + (size_t)k * 16 * SIZE(kind), kind);
        for (int t = 0; t < n; t++) {
            operand x_k = input(x + (size_t)t * K + k);
            for (int b = 0; b < ASIDE; b++) sums[b][t] = multiply(sums[b][t], w_k[b], x_k);
        }
    }
    for (int b = 0; b < ASIDE; b++)
        for (int t = 0; t < n; t++) store(y + (size_t)t * N + b * 16, ended(sums[b][t], m, o + b * 16, kind));
}

#define WITH(n, asking, kind) \
    case n: wide_tile(m, o, x, y, K, N, n, soon, asking, kind); break;
#if WIDE > 6
#define MORE(a, kind) WITH(7, a, kind) WITH(8, a, kind) WITH(9, a, kind) WITH(10, a, kind) WITH(11, a, kind) WITH(12, a, kind)
#else
#define MORE(a, kind)
#endif
#define FOR_EACH(a, kind) \
    switch (n) { \
        WITH(1, a, kind) WITH(2, a, kind) WITH(3, a, kind) WITH(4, a, kind) WITH(5, a, kind) WITH(6, a, kind) MORE(a, kind) \
    }
#define FOR_BOTH(a) \
    if (m->kind == EIGHTS) \
        FOR_EACH(a, EIGHTS) \
    else \
        FOR_EACH(a, VALUES)

static void alone_tokens(const Matrix *m, int o, const value *x, value *y, int K, int N, int n) {
    const char *soon = 0;
    FOR_BOTH(1)
}
static void round_of_tokens(const Matrix *m, int o, const value *x, value *y, int K, int N, int n, const char *soon) { FOR_BOTH(0) }

/* BLOCKS * 16 outputs from o on, of FEW(kind) < T <= SOME tokens. In several rounds, each over the same weights, the first ASIDE rounds prefetch
 * a block each of the next outputs' weights: otherwise the first would wait for memory, and memory for the others. `after` as below. */
static void wide_tokens(const Matrix *m, int o, const value *x, value *y, int T, int K, int N, const char *after) {
    const int wide = WIDEST(m->kind), rounds = (T + wide - 1) / wide, each = (T + rounds - 1) / rounds;
    const size_t block = (size_t)K * 16 * SIZE(m->kind);
    for (int end = o + BLOCKS * 16; o < end; o += ASIDE * 16, y += ASIDE * 16) {
        const char *soon = o + ASIDE * 16 < end ? (const char *)m->values + (size_t)(o + ASIDE * 16) * K * SIZE(m->kind) : after;
        if (rounds == 1) alone_tokens(m, o, x, y, K, N, T);
        for (int t = 0, round = 0; rounds > 1 && t < T; t += each, round++)
            round_of_tokens(m, o, x + (size_t)t * K, y + (size_t)t * N, K, N, T - t < each ? T - t : each,
                            soon && round < ASIDE ? soon + round * block : 0);
    }
}

/* Add the products of STEP inputs or fewer to sums [n, BLOCKS * 16], which are in memory: there are more tokens than registers have room for.
 * After every GROUP steps, prefetch `lines` cache lines of the weights at `next`, from line number `from` on. */
INLINE void part(const char *w, size_t block, const value *x, float *sums_so_far, int K, int n, int steps, const char *next, int from,
                 int lines, int kind) {
    for (int c = 0; c < BLOCKS; c += TOGETHER(n), w += TOGETHER(n) * block, sums_so_far += TOGETHER(n) * 16) {
        f32 sums[BLOCKS][TOKENS];
        for (int b = 0; b < TOGETHER(n); b++)
            for (int t = 0; t < n; t++) sums[b][t] = f32_load(sums_so_far + (t * BLOCKS + b) * 16);
        for (int k = 0; k < steps; k += GROUP * DEPTH) {
            for (int i = 0; c == 0 && i < lines; i++, from++) __builtin_prefetch(next + from % BLOCKS * block + from / BLOCKS * LINE);
            for (int j = k; j < k + GROUP * DEPTH; j += DEPTH) {
                operand w_k[BLOCKS];
                for (int b = 0; b < TOGETHER(n); b++) w_k[b] = read_weights(w + b * block + (size_t)j * 16 * SIZE(kind), kind);
                for (int t = 0; t < n; t++) {
                    operand x_k = input(x + (size_t)t * K + j);
                    for (int b = 0; b < TOGETHER(n); b++) sums[b][t] = multiply(sums[b][t], w_k[b], x_k);
                }
            }
        }
        for (int b = 0; b < TOGETHER(n); b++)
            for (int t = 0; t < n; t++) f32_store(sums_so_far + (t * BLOCKS + b) * 16, sums[b][t]);
    }
}

static void some_parts(const char *w, size_t block, const value *x, float *sums, int K, int n, int steps, const char *next, int from,
                       int lines, int kind) {
    if (kind == EIGHTS)
        FOR_KNOWN(n, part(w, block, x, sums, K, COUNT, steps, next, from, lines, EIGHTS))
    else
        FOR_KNOWN(n, part(w, block, x, sums, K, COUNT, steps, next, from, lines, VALUES))
}

/* BLOCKS * 16 outputs from o on, of T <= MANY tokens. The weights of STEP inputs stay in the L1 cache for all tokens while the next ones are
 * prefetched, so that reading and computing overlap. `after` points to the weights that are probably read next, or is null. */
static void many_tokens(const Matrix *m, int o, const value *x, value *y, int T, int K, int N, const char *after) {
    const int kind = m->kind;
    float sums[MANY * BLOCKS * 16];
    const size_t block = (size_t)K * 16 * SIZE(kind);
    const char *w = (const char *)m->values + (size_t)o * K * SIZE(kind);
    const int chunks = (T + TOKENS - 1) / TOKENS, each = (T + chunks - 1) / chunks; /* of about equal size */
    const int groups = STEP / (GROUP * DEPTH), whole = BLOCKS * STEP * 16 * (int)SIZE(kind) / LINE;
    for (int t = 0; t < T; t++)
        for (int b = 0; b < BLOCKS; b++) f32_store(sums + (t * BLOCKS + b) * 16, begun(m, o + b * 16, kind));
    for (int k = 0; k < K; k += STEP) {
        const char *next = k + STEP < K ? w + (size_t)(k + STEP) * 16 * SIZE(kind) : after;
        const int steps = K - k < STEP ? K - k : STEP, lines = next ? (whole + chunks * groups - 1) / (chunks * groups) : 0;
        for (int t = 0, from = 0; t < T; t += each, from += lines * groups)
            some_parts(w + (size_t)k * 16 * SIZE(kind), block, x + (size_t)t * K + k, sums + t * BLOCKS * 16, K, T - t < each ? T - t : each, steps,
                       next, from, lines, kind);
    }
    for (int t = 0; t < T; t++)
        for (int b = 0; b < BLOCKS; b++)
            store(y + (size_t)t * N + b * 16, ended(f32_load(sums + (t * BLOCKS + b) * 16), m, o + b * 16, kind));
}

/* BLOCKS * 16 outputs from o on, of T tokens, into out [T, BLOCKS * 16]; not for group-quantized weights */
static void outputs(const Matrix *m, int o, const value *x, value *out, int T, int K, const char *after) {
    enum { WIDTH = BLOCKS * 16 };
    const int rounds = (T + TOKENS - 1) / TOKENS, each = (T + rounds - 1) / rounds;
#ifdef TILED
    if (K % TILE_INPUTS == 0) {
        if (m->kind == VALUES)
            tiled(m, o, x, out, T, K, after);
        else if (T <= TILE_ROWS)
            few_eights(m, o, x, out, T, K, after);
        else
            tiled_eights(m, o, x, out, T, K);
        return;
    }
#endif
    if (T > FEW(m->kind) && T <= SOME)
        wide_tokens(m, o, x, out, T, K, WIDTH, after);
    else if (T > SOME && T <= MANY)
        many_tokens(m, o, x, out, T, K, WIDTH, after);
    else
        for (int t = 0; t < T; t += each) some_tokens(m, o, x + (size_t)t * K, out + t * WIDTH, K, WIDTH, T - t < each ? T - t : each);
}
#endif /* HALVED */

INLINE void copied(const value *from, value *to, int size) {
    for (int i = 0; i < size; i += 16) store(to + i, load(from + i));
}

INLINE void add(value *x, const value *y, int size) {
    for (int i = 0; i < size; i += 16) store(x + i, f32_add(load(x + i), load(y + i)));
}

/* How many rows of K inputs a product takes at a time */
INLINE int rows_at_once(const Matrix *m, int K) {
    const int fit = GAP ? ROOM / (int)(ENTRIES(1, K) * sizeof(entry)) : WHOLE;
    return in_groups(m) ? crowd_of(K) : fit < 1 ? 1 : fit < WHOLE ? fit : WHOLE;
}

/* A phase: y [T, N] = x [T, K] W^T + bias, or with `adding` y += that; N is padded to 64 */
static void product(Worker *w, const Matrix *m, const value *x, value *y, int T, int K, int N, int adding) {
    enum { WIDTH = BLOCKS * 16 };
    const int grouped = in_groups(m), most = rows_at_once(m, K), parts = (T + most - 1) / most, prepares = grouped || GAP;
    const int tiles = N / WIDTH, rows = T < most ? T : most, crowd = grouped ? rows : 0, rest = crowd * segments(K);
    given inputs[ROUNDS * rest + 1];
    Part numbers[2 * crowd * (K / 16) + 1];
    uint8_t twice[crowd * (K / 16) + 1];
    entry room[GAP && !grouped ? ENTRIES(rows, K) : 1];
    const entry *read = 0;
    const Prepared prepared = {inputs, numbers, twice, rest};
    const Matrix *before = 0;
    for (int i = first_in_range(w, tiles * parts), tokens = 0; i >= 0; i = next(w)) {
        const int o = (prepares ? i % tiles : i / parts) * WIDTH, from = (prepares ? i / tiles : i % parts) * most;
        const int n = T - from < most ? T - from : most;
        value out[WHOLE * WIDTH], *to = y + (size_t)from * N + o;
        for (int t = 0; t < n; t++)
            for (int b = 0; b < WIDTH; b += LINE / (int)sizeof(value)) __builtin_prefetch(to + (size_t)t * N + b, 1);
        if (grouped) {
            const Matrix *here = m;
            int row = o;
            for (; here->next && row >= here->outputs; here = here->next) row -= here->outputs;
            if (here != before || from != tokens) prepare(here, x + (size_t)from * K, 0, K, n, K, &prepared);
            of_groups(here, row, &prepared, out, n, K, row + WIDTH < here->outputs ? weights_of(here, row + WIDTH, K) : 0);
            before = here, tokens = from;
        } else {
            if (!read || from != tokens) read = entries(x + (size_t)from * K, n, K, room);
            outputs(m, o, read, out, n, K, o + WIDTH < N ? weights_of(m, o + WIDTH, K) : 0);
            tokens = from;
        }
        if (!mine(w)) continue;
        for (int t = 0; t < n; t++)
            if (adding)
                add(to + (size_t)t * N, out + t * WIDTH, WIDTH);
            else
                copied(out + t * WIDTH, to + (size_t)t * N, WIDTH);
    }
}

typedef struct {
    const Matrix *matrix;
    const value *x;
    value *y;
    int tokens, inputs, outputs;
} Linear;

static void do_linear(Worker *w, const void *job) {
    const Linear *l = job;
    product(w, l->matrix, l->x, l->y, l->tokens, l->inputs, l->outputs, 0);
}

void linear(const Matrix *m, const value *x, value *y, int T, int K, int N, int threads) {
    together(threads, do_linear, &(Linear){m, x, y, T, K, N});
}

INLINE float number(const value *p) {
#ifdef BF16
    union {
        uint32_t bits;
        float number;
    } as = {(uint32_t)*p << 16};
    return as.number;
#else
    return *p;
#endif
}

INLINE void put_number(value *p, float x) {
#ifdef BF16
    union {
        float number;
        uint32_t bits;
    } as = {x};
    *p = (as.bits + 0x7fff + (as.bits >> 16 & 1)) >> 16;
#else
    *p = x;
#endif
}

INLINE float rounded_number(float x) {
    value held;
    put_number(&held, x);
    return number(&held);
}
