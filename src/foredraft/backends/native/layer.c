/* Decoder layers of language models, T5, BART and Whisper for a few tokens at a time, on CPUs with AVX-512, AVX2 or NEON.
 *
 * A pass over a few tokens is bound by the bandwidth at which weights can be read. Matrices are packed so that every read is a whole cache
 * line, which serves all tokens while it is in a register. crew.h has the threads. Sums are in float32; results are rounded to the model's
 * dtype where torch rounds them.
 *
 * Compiled once per dtype: -DBF16 for bfloat16, without it for float32. Each Matrix states the kind of its weights; those of 8 and 4 bits
 * are widened in registers, which is exact. Head sizes are multiples of 16, all other sizes of 32.
 *
 * A packed matrix [N, K] is [N/16][K/2][16][2] in bfloat16 (pairs for VDPBF16PS and BFDOT) and [N/16][K][16] in float32, N padded to 64.
 * 8-bit weights with one scale per output have the layout of the dtype in which they are multiplied. groups.h has that of groups.
 */
#define _GNU_SOURCE
#include "crew.h"
#include "vectors.h"

#define BLOCKS 4 /* blocks of 16 outputs in a tile */
#define TOKENS 6 /* tokens in a micro-kernel */
#define FEW 3 /* up to so many tokens, reading the weights takes all the time */
/* Register blocking: the sums of TOGETHER(n) blocks for n tokens fit into registers, and those of ASIDE blocks for WIDE tokens. */
#ifdef __AVX512F__
#define TOGETHER(n) BLOCKS
#define ASIDE (BLOCKS / 2)
#define WIDE 12
#ifdef BF16
#define WIDEST(kind) WIDE
#else
#define WIDEST(kind) ((kind) == EIGHTS ? 8 : WIDE) /* weights take registers while they are widened */
#endif
#else
#define TOGETHER(n) ((n) == 1 ? BLOCKS : (n) <= 3 ? 2 : 1)
#define ASIDE 1
#define WIDE 6
#define WIDEST(kind) WIDE
#endif
#define VALUES 0 /* kinds of weights: the model's dtype; */
#define EIGHTS 1 /* 8-bit integers with one scale per output; */
#define GROUPS_OF_FOUR 2 /* 4-bit and */
#define GROUPS_OF_EIGHT 3 /* 8-bit integers with one scale per group of inputs; */
#define GROUPS_OF_E2M1 4 /* 4-bit floats in groups; */
#define GROUPS_OF_SIX 5 /* 6-bit integers in groups */
#define SOME 32 /* up to so many tokens, weights are read from memory once, and from the L2 cache for every further WIDE tokens */
#define AHEAD 4096 /* prefetch distance in bytes within each block of weights: a page */
#define MANY 48 /* most tokens for which weights are kept in the L1 cache */
#define STEP (64 * DEPTH) /* inputs at a time in many_tokens(): their weights for a tile take a third of the L1 cache */
#define GROUP 8 /* inner steps between prefetches; K is a multiple of GROUP * DEPTH */
#define LINE 64 /* bytes of a cache line */
#define TAKEN 8192 /* values per chunk outside of products: enough to make the cost of sharing work small */
#define HEADS 64 /* heads per chunk, likewise */
#define WHOLE 256 /* tokens per chunk of a product, for which weights are read from memory once */
#define ATTENTION 1 /* bits of `parts`: the sublayers to run */
#define MLP 2
#define GELU 1 /* activations: 0 is silu, GELU is the one with tanh, and EXACT with erf */
#define RELU 2
#define EXACT 3
#define ALONE 4 /* a flag beside these: the MLP has no `up` */
#define SQUARED 8 /* another activation: relu squared */
#define CENTRED 1 /* bits of a norm's kind: subtract the mean; */
#define PLUS_ONE 2 /* the weights are 1 + weight; */
#define ONCE 4 /* round once, after the weights */
#define INTERLEAVED 1 /* bits of a RoPE's kind: pairs are adjacent numbers, rather than one of each half; */
#define TURNED_ONCE 2 /* round once; */
#define IN_PAIRS 4 /* interleaved pairs stay so in what latent attention caches */
#define WHOLE_HEADS 1 /* norms of queries and keys: over all heads together, */
#define BEHIND 2 /* or over each head after RoPE */
#define KEYS 64 /* keys of a head in a tile, and slots in a page of the cache: BLOCKS * 16 */
#define QUERIES 24 /* queries per pass over the keys */
#define KEY_SEGMENT 1024 /* positions in a partial sum of attention, from a multiple of it on; partial sums are merged in order */
#define PIECES 4 /* chunks per thread from which attention need not be divided by segments as well */
#define SCRATCH(size) (QUERIES * KEYS + (KEYS + 3 * QUERIES) * (size) + 4 * QUERIES) /* floats that a thread needs for attention */
#define KEPT 128 /* largest top_k */
#define PATH 4 /* tokens of the longest context that Medusa looks up in its text */
#define MATCHES 32 /* the latest matches of each length that count */

/* e^x, relative error below 2e-7 for x <= 0 */
INLINE f32 exponential(f32 x) {
    x = f32_max(x, f32_of(-126.0f * 0.69314718f));
    f32 n = f32_nearest(f32_mul(x, f32_of(1.44269504f)));
    f32 r = f32_fnma(n, f32_of(0.693359375f), x);
    r = f32_fnma(n, f32_of(-2.12194440e-4f), r);
    f32 p = f32_of(1.9875691500e-4f);
    p = f32_fma(p, r, f32_of(1.3981999507e-3f));
    p = f32_fma(p, r, f32_of(8.3334519073e-3f));
    p = f32_fma(p, r, f32_of(4.1665795894e-2f));
    p = f32_fma(p, r, f32_of(1.6666665459e-1f));
    p = f32_fma(p, r, f32_of(5.0000001201e-1f));
    p = f32_fma(f32_mul(p, r), r, f32_add(r, f32_of(1.0f)));
    return f32_power_of_two(p, n);
}

/* -- products ---------------------------------------------------------------------------------------------------------- */

#define FOR_KNOWN(n, call) /* with a constant n, accumulators stay in registers */ \
    switch (n) { \
        case 1: { enum { COUNT = 1 }; call; } break; \
        case 2: { enum { COUNT = 2 }; call; } break; \
        case 3: { enum { COUNT = 3 }; call; } break; \
        case 4: { enum { COUNT = 4 }; call; } break; \
        case 5: { enum { COUNT = 5 }; call; } break; \
        default: { enum { COUNT = TOKENS }; call; } \
    }

typedef struct Matrix {
    const void *values;   /* packed */
    const void *scale;    /* EIGHTS: [N] in the model's dtype; groups: [N/64][groups][64] */
    const uint16_t *over; /* [N/64][groups / nested][64] float16, factors of int8 scales; or null */
    const uint16_t *mins; /* likewise, factors of `zeros` in place of the scale; or null */
    const value *bias;    /* or null */
    const uint8_t *zeros; /* groups: [N/64][groups][64] zero points; null: `zero` for all */
    const int32_t *order; /* groups: [K] the input of each column of the weights; null: in order */
    int64_t kind, group;  /* `group`: inputs per group; the last one may be shorter */
    int64_t zero, scales; /* `scales`: dtype of `scale`, for groups */
    int64_t nested;       /* groups per number of `over` and `mins` */
    const struct Matrix *next; /* groups: the matrix below this one, which has `outputs` outputs; or null */
    int64_t outputs;
} Matrix;

#define SIZE(kind) ((kind) == EIGHTS ? sizeof(int8_t) : sizeof(value)) /* bytes of a weight */
INLINE operand read_weights(const char *p, int kind) { return kind == EIGHTS ? eights((const int8_t *)p) : weights((const value *)p); }

#ifdef HALVED
INLINE f32 half_of(const char *p, int odd, int kind) {
    return kind == EIGHTS ? half_of_eights((const int8_t *)p, odd) : half_of_weights((const value *)p, odd);
}
#endif

/* The initial value and the last step of the sums of 16 outputs. torch adds a bias within a product; with a scale per output it rounds, scales,
 * rounds again and then adds the bias. */
INLINE f32 begun(const Matrix *m, int o, int kind) { return kind != EIGHTS && m->bias ? load(m->bias + o) : f32_zero(); }
INLINE f32 ended(f32 sum, const Matrix *m, int o, int kind) {
    if (kind != EIGHTS) return sum;
    sum = f32_mul(rounded(sum), load((const value *)m->scale + o));
    return m->bias ? f32_add(rounded(sum), load(m->bias + o)) : sum;
}

#include "groups.h"

#if defined(TILES) && defined(BF16)
#define TILED /* AMX multiplies weights of the dtype */
#include "tiles.h"
#endif

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

/* ASIDE * 16 outputs from o on, of n tokens. `asking` prefetches weights AHEAD bytes before their use, so that reading and computing overlap.
 * Without it, a CPU reads less far ahead when there are more tokens, and hardware prefetchers stop at the end of a page. */
INLINE void wide_tile(const Matrix *m, int o, const value *x, value *y, int K, int N, int n, int asking, int kind) {
    f32 sums[ASIDE][WIDE];
    const size_t block = (size_t)K * 16 * SIZE(kind);
    const char *w = (const char *)m->values + (size_t)o * K * SIZE(kind);
    for (int b = 0; b < ASIDE; b++)
        for (int t = 0; t < n; t++) sums[b][t] = begun(m, o + b * 16, kind);
    for (int k = 0; k < K; k += DEPTH) {
        operand w_k[ASIDE];
        for (int b = 0; asking && b < ASIDE; b++) __builtin_prefetch(w + b * block + (size_t)k * 16 * SIZE(kind) + AHEAD);
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
    case n: wide_tile(m, o, x, y, K, N, n, asking, kind); break;
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

static void asking_tokens(const Matrix *m, int o, const value *x, value *y, int K, int N, int n) { FOR_BOTH(1) }
static void further_tokens(const Matrix *m, int o, const value *x, value *y, int K, int N, int n) { FOR_BOTH(0) }

/* BLOCKS * 16 outputs from o on, of FEW < T <= SOME tokens */
static void wide_tokens(const Matrix *m, int o, const value *x, value *y, int T, int K, int N) {
    const int wide = WIDEST(m->kind), rounds = (T + wide - 1) / wide, each = (T + rounds - 1) / rounds;
    for (int end = o + BLOCKS * 16; o < end; o += ASIDE * 16, y += ASIDE * 16) {
        asking_tokens(m, o, x, y, K, N, each);
        for (int t = each; t < T; t += each) further_tokens(m, o, x + (size_t)t * K, y + (size_t)t * N, K, N, T - t < each ? T - t : each);
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

#ifdef HALVED
/* The same with float32 inputs [n, STEP], and with one weight of each pair after the other: accumulators for TOKENS tokens and both weights do
 * not fit into registers. */
INLINE void halved_part(const char *w, size_t block, const float *x, float *sums_so_far, int n, int steps, const char *next, int from,
                        int lines, int kind) {
    for (int b = 0; b < BLOCKS; b++, w += block, sums_so_far += 16) {
        f32 sums[TOKENS];
        for (int t = 0; t < n; t++) sums[t] = f32_load(sums_so_far + t * BLOCKS * 16);
        for (int k = 0; k < steps; k += GROUP * DEPTH) {
            for (int i = 0; b == 0 && i < lines; i++, from++) __builtin_prefetch(next + from % BLOCKS * block + from / BLOCKS * LINE);
            for (int j = k; j < k + GROUP * DEPTH; j += DEPTH)
                for (int odd = 0; odd < DEPTH; odd++) {
                    const f32 w_k = half_of(w + (size_t)j * 16 * SIZE(kind), odd, kind);
                    for (int t = 0; t < n; t++) sums[t] = f32_fma(w_k, f32_of(x[t * STEP + j + odd]), sums[t]);
                }
        }
        for (int t = 0; t < n; t++) f32_store(sums_so_far + t * BLOCKS * 16, sums[t]);
    }
}

/* Not inlined: within a larger function compilers run out of registers. */
static __attribute__((noinline)) void halved_values(const char *w, size_t block, const float *x, float *sums, int n, int steps, const char *next, int from,
                                                    int lines) {
    FOR_KNOWN(n, halved_part(w, block, x, sums, COUNT, steps, next, from, lines, VALUES))
}

static __attribute__((noinline)) void halved_eights(const char *w, size_t block, const float *x, float *sums, int n, int steps, const char *next, int from,
                                                    int lines) {
    FOR_KNOWN(n, halved_part(w, block, x, sums, COUNT, steps, next, from, lines, EIGHTS))
}
#endif

static void some_parts(const char *w, size_t block, const value *x, float *sums, int K, int n, int steps, const char *next, int from,
                       int lines, int kind) {
#ifdef HALVED
    float wide[TOKENS * STEP];
    for (int t = 0; t < n; t++)
        for (int k = 0; k < steps; k += 16) f32_store(wide + t * STEP + k, load(x + (size_t)t * K + k));
    (kind == EIGHTS ? halved_eights : halved_values)(w, block, wide, sums, n, steps, next, from, lines);
#else
    if (kind == EIGHTS)
        FOR_KNOWN(n, part(w, block, x, sums, K, COUNT, steps, next, from, lines, EIGHTS))
    else
        FOR_KNOWN(n, part(w, block, x, sums, K, COUNT, steps, next, from, lines, VALUES))
#endif
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

INLINE void copied(const value *from, value *to, int size) {
    for (int i = 0; i < size; i += 16) store(to + i, load(from + i));
}

INLINE void add(value *x, const value *y, int size) {
    for (int i = 0; i < size; i += 16) store(x + i, f32_add(load(x + i), load(y + i)));
}

/* BLOCKS * 16 outputs from o on, of T tokens, into out [T, BLOCKS * 16]; not for group-quantized weights */
static void outputs(const Matrix *m, int o, const value *x, value *out, int T, int K, const char *after) {
    enum { WIDTH = BLOCKS * 16 };
    const int rounds = (T + TOKENS - 1) / TOKENS, each = (T + rounds - 1) / rounds;
#ifdef TILED
    if (m->kind == VALUES) {
        tiled(m, o, x, out, T, K);
        return;
    }
#endif
#ifdef HALVED
    for (int t = 0; T > WIDE && t < T; t += MANY) many_tokens(m, o, x + (size_t)t * K, out + t * WIDTH, T - t < MANY ? T - t : MANY, K, WIDTH, after);
    if (T > WIDE) return;
#endif
    if (T > FEW && T <= SOME)
        wide_tokens(m, o, x, out, T, K, WIDTH);
    else if (T > SOME && T <= MANY)
        many_tokens(m, o, x, out, T, K, WIDTH, after);
    else
        for (int t = 0; t < T; t += each) some_tokens(m, o, x + (size_t)t * K, out + t * WIDTH, K, WIDTH, T - t < each ? T - t : each);
}

/* A phase: y [T, N] = x [T, K] W^T + bias, or with `adding` y += that; N is padded to 64 */
static void product(Worker *w, const Matrix *m, const value *x, value *y, int T, int K, int N, int adding) {
    enum { WIDTH = BLOCKS * 16 };
    const int grouped = in_groups(m), most = grouped ? crowd_of(K) : WHOLE, parts = (T + most - 1) / most;
    const int tiles = N / WIDTH, ahead = w->threads * WIDTH, crowd = grouped ? T < most ? T : most : 0, rest = crowd * segments(K);
    given inputs[ROUNDS * rest + 1];
    Part numbers[2 * crowd * (K / 16) + 1];
    uint8_t twice[grouped ? K / 16 : 1];
    const Prepared prepared = {inputs, numbers, twice, rest};
    const Matrix *before = 0;
    for (int i = first(w, tiles * parts), tokens = 0; i >= 0; i = next(w)) {
        const int o = (grouped ? i % tiles : i / parts) * WIDTH, from = (grouped ? i / tiles : i % parts) * most;
        const int n = T - from < most ? T - from : most;
        value out[WHOLE * WIDTH], *to = y + (size_t)from * N + o;
        for (int t = 0; t < n; t++)
            for (int b = 0; b < WIDTH; b += LINE / (int)sizeof(value)) __builtin_prefetch(to + (size_t)t * N + b, 1);
        if (grouped) {
            const Matrix *here = m;
            int row = o;
            for (; here->next && row >= here->outputs; here = here->next) row -= here->outputs;
            if (here != before || from != tokens) prepare(here, x + (size_t)from * K, 0, K, n, K, &prepared);
            of_groups(here, row, &prepared, out, n, K, row + ahead < here->outputs ? weights_of(here, row + ahead, K) : 0);
            before = here, tokens = from;
        } else
            outputs(m, o, x + (size_t)from * K, out, n, K, o + ahead < N ? weights_of(m, o + ahead, K) : 0);
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

/* -- between the products ---------------------------------------------------------------------------------------------- */

/* Weights and bias of `size` values. Without a bias it is an RMSNorm, with one a LayerNorm; without weights no norm. `kind` has CENTRED etc. */
typedef struct {
    const value *weight, *bias;
    int64_t kind;
} Norm;

/* Columns `from` to `to` of the norm of x [size] */
INLINE void normed_part(const value *x, Norm norm, value *out, int size, float eps, int from, int to) {
    f32 sum = f32_zero(), mean = sum;
    const int centred = norm.bias || norm.kind & CENTRED;
    const f32 plus = f32_of(norm.kind & PLUS_ONE ? 1.0f : 0.0f);
    for (int i = 0; centred && i < size; i += 16) sum = f32_add(sum, load(x + i));
    if (centred) mean = f32_of(f32_sum(sum) / size), sum = f32_zero();
    for (int i = 0; i < size; i += 16) {
        f32 v = f32_sub(load(x + i), mean);
        sum = f32_fma(v, v, sum);
    }
    const f32 scale = f32_of(1.0f / __builtin_sqrtf(f32_sum(sum) / size + eps));
    for (int i = from; i < to; i += 16)
        if (!norm.weight)
            store(out + i - from, load(x + i));
        else if (norm.kind) {
            const f32 y = f32_mul(f32_sub(load(x + i), mean), scale), weight = f32_add(load(norm.weight + i), plus);
            store(out + i - from, norm.bias ? f32_fma(y, weight, load(norm.bias + i)) : f32_mul(y, weight));
        } else if (norm.bias)
            store(out + i - from, f32_fma(f32_mul(f32_sub(load(x + i), mean), scale), load(norm.weight + i), load(norm.bias + i)));
        else
            store(out + i - from, f32_mul(load(norm.weight + i), rounded(f32_mul(load(x + i), scale))));
}

INLINE void normed(const value *x, Norm norm, value *out, int size, float eps) { normed_part(x, norm, out, size, eps, 0, size); }

/* How T tokens of `size` values become chunks of TAKEN values: several tokens each, or some columns of one */
typedef struct {
    int tokens, columns, parts, chunks;
} Cut;

INLINE Cut cut(int T, int size) {
    const int columns = size < TAKEN ? size : TAKEN, parts = (size + columns - 1) / columns, tokens = TAKEN / columns;
    return (Cut){tokens, columns, parts, (T + tokens - 1) / tokens * parts};
}

/* A phase: out = norm(x) for T tokens. `out` may be `x` if a chunk has whole tokens. */
static void norms(Worker *w, const value *x, Norm norm, value *out, int T, int size, float eps) {
    const Cut c = cut(T, size);
    for (int i = first(w, c.chunks); i >= 0; i = next(w)) {
        const int from = i % c.parts * c.columns, to = size - from < c.columns ? size : from + c.columns, begin = i / c.parts * c.tokens;
        value part[TAKEN];
        for (int t = begin; t < T && t < begin + c.tokens; t++) normed_part(x + (size_t)t * size, norm, part + (t - begin) * c.columns, size, eps, from, to);
        for (int t = begin; mine(w) && t < T && t < begin + c.tokens; t++) copied(part + (t - begin) * c.columns, out + (size_t)t * size + from, to - from);
    }
}

/* RoPE of one head: x * cos + (second half negated, first half) * sin */
INLINE void rotated(const value *x, const value *cos, const value *sin, value *out, int size) {
    const int half = size / 2;
    for (int i = 0; i < half; i += 16) {
        f32 a = load(x + i), b = load(x + half + i);
        f32 left = rounded(f32_mul(a, load(cos + i))), right = rounded(f32_mul(b, load(cos + half + i)));
        store(out + i, f32_sub(left, rounded(f32_mul(b, load(sin + i)))));
        store(out + half + i, f32_add(right, rounded(f32_mul(a, load(sin + half + i)))));
    }
}

/* RoPE of the first `count` of a head's `size` numbers, with the cos and sin of its position */
static void turned_by(const value *x, const float *cos, const float *sin, value *out, int count, int size, int rotation) {
    const int half = count / 2, once = rotation & TURNED_ONCE;
    if (rotation & INTERLEAVED || half % 16)
        for (int i = 0; i < count; i++) {
            const int pair = rotation & INTERLEAVED ? i ^ 1 : i < half ? i + half : i - half;
            const float one = number(x + i) * cos[i], other = (pair > i ? -number(x + pair) : number(x + pair)) * sin[i];
            put_number(out + i, once ? one + other : rounded_number(one) + rounded_number(other));
        }
    else
        for (int i = 0; i < half; i += 16) {
            const f32 a = load(x + i), b = load(x + half + i);
            const f32 aa = f32_mul(a, f32_load(cos + i)), bb = f32_mul(b, f32_load(cos + half + i));
            const f32 ab = f32_mul(a, f32_load(sin + half + i)), ba = f32_mul(b, f32_load(sin + i));
            store(out + i, once ? f32_sub(aa, ba) : f32_sub(rounded(aa), rounded(ba)));
            store(out + half + i, once ? f32_add(bb, ab) : f32_add(rounded(bb), rounded(ab)));
        }
    for (int i = count; i < size; i++) out[i] = x[i];
}

INLINE f32 sigmoid(f32 x) {
    const f32 one = f32_of(1.0f), e = exponential(f32_sub(f32_zero(), f32_abs(x))); /* e^-|x| */
    const lanes negative = f32_less(x, f32_zero());
    return f32_div(f32_pick(negative, one, e), f32_add(one, e));
}

INLINE f32 silu(f32 x) { return rounded(f32_mul(x, sigmoid(x))); }

INLINE f32 gelu(f32 x) { /* x (1 + tanh(y)) / 2 with y = sqrt(2 / pi) (x + 0.044715 x^3) is x sigmoid(2 y) */
    const f32 slope = f32_fma(f32_mul(x, x), f32_of(0.071354816f), f32_of(1.5957691f));
    return rounded(f32_mul(x, sigmoid(f32_mul(x, slope))));
}

/* x (1 + erf(x / sqrt(2))) / 2. With z = |x| / sqrt(2), erfc(z) is e^(-z z) times a polynomial of t = 1 / (1 + p z) (Abramowitz and Stegun
 * 7.1.26), within 1.5e-7. The result is off by less than 3e-7 times |x|. */
INLINE f32 exact_gelu(f32 x) {
    const f32 one = f32_of(1.0f), z = f32_mul(f32_abs(x), f32_of(0.70710678f));
    const f32 t = f32_div(one, f32_fma(z, f32_of(0.3275911f), one));
    f32 p = f32_of(1.061405429f);
    p = f32_fma(p, t, f32_of(-1.453152027f));
    p = f32_fma(p, t, f32_of(1.421413741f));
    p = f32_fma(p, t, f32_of(-0.284496736f));
    p = f32_fma(p, t, f32_of(0.254829592f));
    const f32 tail = f32_mul(f32_mul(p, t), exponential(f32_fnma(z, z, f32_zero()))); /* erfc(z) */
    const lanes negative = f32_less(x, f32_zero());
    const f32 twice = f32_pick(negative, f32_sub(f32_of(2.0f), tail), tail);
    return rounded(f32_mul(f32_mul(x, f32_of(0.5f)), twice));
}

INLINE f32 activated(f32 x, int activation) {
    switch (activation) {
        case GELU: return gelu(x);
        case RELU: return f32_max(f32_zero(), x);  // of NaN and a number the second is kept
        case EXACT: return exact_gelu(x);
        case SQUARED: x = f32_max(f32_zero(), x); return rounded(f32_mul(x, x));
        default: return silu(x);
    }
}

INLINE void gated(const value *gate, const value *up, value *out, int size, int activation) {
    for (int i = 0; i < size; i += 16) {
        const f32 x = activated(load(gate + i), activation & ~ALONE);
        store(out + i, activation & ALONE ? x : f32_mul(x, load(up + i)));
    }
}

/* -- attention --------------------------------------------------------------------------------------------------------- */

/* Pack the first `count` of KEYS keys, `size` numbers of each, into a matrix whose keys have `whole` numbers; absent keys are zero. Prefetch the
 * keys at `next`, unless it is null. */
static void packed_keys(const value *keys, int count, int size, int whole, value *out, const value *next) {
    const int words = size / DEPTH;
    for (int b = 0; b < KEYS && b < count; b += 16)
        for (int w = 0; w < words; w += 16) {
            const int some = words - w < 16 ? words - w : 16;
            i32 r[16];
            for (int j = 0; next && j < 16; j++) __builtin_prefetch((const char *)(next + (size_t)(b + j) * size + w * DEPTH));
            for (int j = 0; j < 16; j++) {
                const void *from = keys + (size_t)(b + j) * size + w * DEPTH;
                r[j] = b + j >= count ? i32_zero() : some == 16 ? i32_load(from) : i32_load_some((1u << some) - 1, from);
            }
            turned(r);
            for (int j = 0; j < some; j++) i32_store(out + (size_t)b * whole + (w + j) * 16 * DEPTH, r[j]);
        }
}

/* Dot products of n queries with KEYS packed keys, in float32 */
INLINE void scored(const value *keys, const value *queries, float *scores, int size, int n) {
    for (int c = 0; c < KEYS; c += TOGETHER(n) * 16, keys += TOGETHER(n) * 16 * size, scores += TOGETHER(n) * 16) {
        f32 sums[BLOCKS][TOKENS];
        for (int b = 0; b < TOGETHER(n); b++)
            for (int t = 0; t < n; t++) sums[b][t] = f32_zero();
        for (int d = 0; d < size; d += DEPTH) {
            operand k[BLOCKS];
            for (int b = 0; b < TOGETHER(n); b++) k[b] = weights(keys + (size_t)b * 16 * size + d * 16);
            for (int t = 0; t < n; t++) {
                operand q = input(queries + t * size + d);
                for (int b = 0; b < TOGETHER(n); b++) sums[b][t] = multiply(sums[b][t], k[b], q);
            }
        }
        for (int b = 0; b < TOGETHER(n); b++)
            for (int t = 0; t < n; t++) f32_store(scores + t * KEYS + b * 16, sums[b][t]);
    }
}

/* sums [n, size] += probabilities [n, KEYS] times the first `count` values, `vectors` * 16 columns at a time. Prefetch the values at `next`,
 * unless it is null. */
INLINE void gathered(const float *probabilities, const value *values, float *sums, int count, int size, int n, int vectors, const value *next) {
    for (int d = 0; d < size; d += vectors * 16) {
        f32 all[TOKENS][4];
        for (int t = 0; t < n; t++)
            for (int i = 0; i < vectors; i++) all[t][i] = f32_load(sums + t * size + d + i * 16);
        for (int j = 0; j < count; j++) {
            f32 v[4];
            for (int i = 0; next && i < vectors * 16; i += LINE / (int)sizeof(value))
                __builtin_prefetch((const char *)(next + (size_t)j * size + d + i));
            for (int i = 0; i < vectors; i++) v[i] = load(values + (size_t)j * size + d + i * 16);
            for (int t = 0; t < n; t++) {
                const f32 p = f32_of(probabilities[t * KEYS + j]);
                for (int i = 0; i < vectors; i++) all[t][i] = f32_fma(p, v[i], all[t][i]);
            }
        }
        for (int t = 0; t < n; t++)
            for (int i = 0; i < vectors; i++) f32_store(sums + t * size + d + i * 16, all[t][i]);
    }
}

INLINE void gathered_all(const float *probabilities, const value *values, float *sums, int count, int size, int n, const value *next) {
    if (size % 64)
        gathered(probabilities, values, sums, count, size, n, TOGETHER(n) < 2 || size % 32 ? 1 : 2, next);
    else
        gathered(probabilities, values, sums, count, size, n, TOGETHER(n), next);
}

static void some_scored(const value *keys, const value *queries, float *scores, int size, int n) {
    FOR_KNOWN(n, scored(keys, queries, scores, size, COUNT))
}

static void some_gathered(const float *probabilities, const value *values, float *sums, int count, int size, int n, const value *next) {
    FOR_KNOWN(n, gathered_all(probabilities, values, sums, count, size, COUNT, next))
}

/* Latent attention, see latent.h */
typedef struct Latent {
    int64_t rank, turned, plain, values, query_rank; /* numbers of a query with RoPE (`turned`) and without (`plain`), and of a value, per head */
    Matrix kept, query_in, query;                    /* [rank + turned, hidden]; [query_rank, hidden], its values may be null; of all heads */
    const value *to_latents, *to_values;             /* packed, for each head [rank, plain] and [values, rank] */
} Latent;

typedef struct {
    int64_t hidden, inner, heads, key_heads, size; /* sizes of the model and of the MLP; query heads, key heads, size of a head */
    double eps, head_eps, scaling;
    Matrix qkv, output, gate_up, down;
    Norm before, after, query_norm, key_norm; /* of the attention, the MLP, a head's query and key */
    Norm between;                          /* cross-attention: its norm, */
    Matrix cross_query, cross_output;      /* and its matrices; values null without it */
    const float *bias;                     /* [heads, reach] added to scores, by the distance of query and key; or null */
    int64_t reach, activation;             /* longer distances count as the longest */
    int64_t behind;                        /* post-norm: norms apply to the sum of x and a sublayer's output, rather than to its input */
    const float *sinks;                    /* [heads] attention sinks: one more score, without a value; or null */
    double cap;                            /* scores become cap tanh(score / cap); 0: no cap */
    Norm attention_given, mlp_given;       /* norms of a sublayer's output, before it is added */
    double residual;                       /* factor of this output after these norms; 0: none */
    int64_t kind;                          /* index into Pass.kinds */
    int64_t window;                        /* sliding window in tokens, including the token itself; 0: all */
    int64_t rotary, rotation;              /* numbers of a head with RoPE, and its kind */
    int64_t head_norms;                    /* 0, WHOLE_HEADS or BEHIND */
    int64_t parallel;                      /* attention and MLP read the same x; the MLP's norm is `after`, or else `before` */
    int64_t grouped;                       /* qkv has query, key and value of each head together, rather than all queries first */
    const struct Experts *experts;         /* in place of the MLP; gate_up and down are then a shared expert; or null */
    const struct Latent *latent;           /* in place of qkv: the cache has latents as keys, and RoPE keys as values; or null */
} Layer;

/* What layers of one kind share in a pass: the layout of their cache, and RoPE tables or null */
typedef struct {
    int64_t row_stride, head_stride, table_stride, page_stride, spare; /* as in Pass */
    const int32_t *table;
    const float *cos, *sin; /* [.., rotary] */
    const float *factor;    /* [..] factor of queries by position, or null */
} Kind;

typedef struct {
    int64_t threads;
    int64_t rows, tokens, nodes, width;    /* `tokens` of all rows, `nodes` of a row at most; `width`: slots that keys span */
    int64_t row_stride, head_stride;       /* of the cache, in values */
    int64_t table_stride, page_stride;     /* a cache in pages of KEYS slots: from row to row of its page table, and from page to page */
    int64_t spare;                         /* the page that stands for those that rows lack; filler goes there, and is not written */
    int64_t own_angles;                    /* cos and sin are [tokens, size]; 0: [nodes, size], rows share them */
    int64_t mask_row_stride, mask_stride;  /* from row to row, from node to node */
    const value *cos, *sin;
    const int32_t *begins, *row_of;        /* [rows + 1] first token of each row; [tokens] row of each */
    const int32_t *slots;                  /* [tokens] cache slot of each */
    value *states, *projected, *attended, *wide, *thin; /* scratch: [T, hidden], [T, qkv], [T, heads * size], [T, 2 inner], [T, inner] */
    float *scratch;                        /* [threads, SCRATCH(size)] */
    int32_t *positions;                    /* [rows, width] position of the token in each slot; null: slots are positions */
    const int32_t *ends;                   /* [rows] last slot of each row's source */
    const value *const *cross_keys, *const *cross_values; /* [layers, rows] cross-attention keys [heads, ..., size] of a row's source */
    const int64_t *cross_head_strides;     /* [rows] of these, in values */
    const int32_t *table;                  /* [rows, ...] page table: the pages of each row in order; null: a row's slots are contiguous */
    const Kind *kinds;                     /* kinds of layers; null: all are alike, and described here */
    const int64_t *places;                 /* [tokens] their rows in the RoPE tables of `kinds` */
    void *experts;                         /* scratch: the largest experts_room() of the layers, in bytes */
    float *segments;                       /* scratch: partial sums over segments, */
    int64_t segments_room;                 /* of so many floats; attention is divided by segments only if that is enough */
} Pass;

/* The keys and values that queries attend to: those of the text, or of the source */
typedef struct {
    const value *keys, *values;
    int64_t row_stride, head_stride, columns; /* `columns`: from one token's queries to the next one's */
    const int32_t *slots;                     /* without a mask, the last slot that a token sees; `by_row`: one for each row */
    int by_row;
    const uint8_t *mask;
    const float *bias;
    const int32_t *table;                     /* as in Pass */
    const value *turned;                      /* latent attention: RoPE keys, which follow the latents in a key; or null */
    const value *const *row_keys, *const *row_values; /* in place of the former: those of each row, */
    const int64_t *head_strides;              /* with a stride for each; or null */
} Asked;

/* Offset in a cache of a head's keys in the KEYS slots from `start` on, a multiple of KEYS */
INLINE size_t block(const Pass *p, const int32_t *table, int64_t row_stride, int64_t head_stride, int row, int head, int start, int size) {
    const size_t begin = table ? (size_t)table[row * p->table_stride + start / KEYS] * p->page_stride : (size_t)row * row_stride + (size_t)start * size;
    return begin + (size_t)head * head_stride;
}

/* Whether a slot of a row lies on the spare page. All rows read it, with a weight of zero, and a NaN times zero is NaN. */
INLINE int spared(const Pass *p, int row, int slot) { return p->table && p->table[row * p->table_stride + slot / KEYS] == p->spare; }

/* The mask of the 16 slots from `first` on that a query sees: those set in `seen`, or all up to its own `slot` if that is null */
INLINE lanes visible(const uint8_t *seen, int slot, int first, int width) {
    const int left = (seen ? width : slot + 1) - first;
    const lanes there = left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
    if (!seen) return there;
    return bytes_set(there, seen + first);
}

/* The mask of the 16 positions from `first` on that are at least `from` */
INLINE lanes behind(int from, int first) { return from <= first ? 0xffff : from - first >= 16 ? 0 : (lanes)(0xffff << (from - first)); }

/* Index of a head's vector in a token's qkv product; `head` counts query heads first, then key heads, then value heads */
INLINE int vector_of(const Layer *l, int head) { return l->grouped ? head % l->heads * 3 + head / l->heads : head; }

INLINE float *own_scratch(const Worker *w, const Layer *l, const Pass *p) {
    return p->scratch + (size_t)w->number * SCRATCH(l->size);
}

/* The bias of a head by distance, for the scores of a query at `position` with the 16 positions from `first` on */
INLINE f32 by_distance(const Layer *l, const float *bias, int head, int position, int first) {
    i32 distance = i32_sub(i32_of(position), i32_add(i32_count(), i32_of(first)));
    distance = i32_max(i32_min(distance, i32_of(l->reach - 1)), i32_zero());
    return f32_gather(bias + (size_t)head * l->reach, distance);
}

/* cap tanh(x / cap) */
INLINE f32 capped(f32 x, float cap) {
    const f32 one = f32_of(1.0f), e = exponential(f32_mul(f32_abs(x), f32_of(-2.0f / cap)));
    const f32 y = f32_mul(f32_div(f32_sub(one, e), f32_add(one, e)), f32_of(cap));
    return f32_pick(f32_less(x, f32_zero()), y, f32_sub(f32_zero(), y));
}

/* The state of online softmax for queries `first` to first + n of one key head of one row, n <= QUERIES. Query i is query head i % group of node
 * i / group. */
typedef struct {
    const Layer *layer;
    const Pass *pass;
    const Asked *asked;
    const value *keys, *values; /* as in `asked`, for this row */
    int64_t head_stride;
    int row, head, first, n, wide; /* `wide`: size of a value */
    float *scores;              /* [n, KEYS] */
    float *sums, *most, *total; /* [n, wide] sums of values, [n] largest score so far, [n] sums of probabilities; contiguous */
    value *packed, *queries;    /* [KEYS, size], [n, size] */
    const uint8_t *seen[QUERIES];
    int slots[QUERIES], from[QUERIES]; /* the slot of each query, and the first position in its window */
    int reach, end;             /* the end of the slots that any query may see, and of those that this chunk reads */
    const int32_t *positions;   /* of the row's slots; null: slots are positions, */
    int moved, lowest;          /* as they are up to slot `moved` in a tree; the lowest position from there on */
} Chunk;

/* Positions of a row's slots; null if slots are positions */
INLINE const int32_t *positions_of(const Pass *p, const Asked *a, int row) {
    return a->mask && p->positions ? p->positions + (size_t)row * p->width : 0;
}

/* Nodes of a token tree are in slots in their order. While they form a chain, node k has k ancestors; after the first branch, every node has
 * fewer. So slots are positions up to some slot, and never from there on. */
static void find_moved(Chunk *c) {
    c->moved = c->lowest = c->reach;
    if (!(c->positions = positions_of(c->pass, c->asked, c->row))) return;
    for (; c->moved > 0 && c->positions[c->moved - 1] != c->moved - 1; c->moved--)
        if (c->positions[c->moved - 1] < c->lowest) c->lowest = c->positions[c->moved - 1];
}

INLINE size_t slots_from(const Chunk *c, int start) {
    return block(c->pass, c->asked->table, c->asked->row_stride, c->head_stride, c->row, c->head, start, c->wide);
}

/* Raw scores of the first `count` slots from `start` on; prefetch the keys at `behind`, unless it is null */
static void score_slots(const Chunk *c, int start, int count, float *scores, const value *behind) {
    const int size = c->layer->size, rest = size - c->wide;
    const size_t at = slots_from(c, start);
    packed_keys(c->keys + at, count, c->wide, size, c->packed, behind);
    if (rest) packed_keys(c->asked->turned + at / c->wide * rest, count, rest, size, c->packed + c->wide * 16, 0);
    for (int t = 0; t < c->n; t += TOKENS)
        some_scored(c->packed, c->queries + t * size, scores + t * KEYS, size, c->n - t < TOKENS ? c->n - t : TOKENS);
}

static void gather_slots(const Chunk *c, int start, int count, const float *probabilities, const value *behind) {
    const int size = c->wide;
    for (int t = 0; t < c->n; t += TOKENS)
        some_gathered(probabilities + t * KEYS, c->values + slots_from(c, start), c->sums + t * size, count, size,
                      c->n - t < TOKENS ? c->n - t : TOKENS, t == 0 ? behind : 0);
}

/* Online softmax: turn raw scores of KEYS positions from `start` on into probabilities relative to the largest score so far. Queries see only the
 * positions in `sees`. */
static void weigh(Chunk *c, int start, lanes sees[QUERIES][KEYS / 16]) {
    const Layer *l = c->layer;
    const int size = c->wide, group = l->heads / l->key_heads;
    const f32 none = f32_of(-__builtin_inff());
    for (int i = 0; i < c->n; i++) {
        float *s = c->scores + i * KEYS;
        f32 each[KEYS / 16], largest = f32_of(c->most[i]), sum = f32_zero();
        const int position = c->positions ? c->positions[c->slots[i]] : c->slots[i];
        for (int b = 0; b < KEYS / 16; b++) {
            each[b] = f32_mul(f32_load(s + b * 16), f32_of(l->scaling));
            if (l->cap) each[b] = capped(each[b], l->cap);
            each[b] = f32_pick(sees[i][b], none, each[b]);
            if (c->asked->bias && sees[i][b])
                each[b] = f32_add(each[b], by_distance(l, c->asked->bias, c->head * group + (c->first + i) % group, position, start + b * 16));
            largest = f32_max(largest, each[b]);
        }
        const float before = c->most[i], now = f32_most(largest);
        if (now == -__builtin_inff()) { /* sees nothing so far */
            for (int b = 0; b < KEYS / 16; b++) f32_store(s + b * 16, sum);
            continue;
        }
        for (int b = 0; b < KEYS / 16; b++) {
            const f32 e = f32_keep(sees[i][b], exponential(f32_sub(each[b], f32_of(now))));
            f32_store(s + b * 16, e);
            sum = f32_add(sum, e);
        }
        if (now > before && before > -__builtin_inff()) {
            const f32 less = exponential(f32_of(before - now));
            c->total[i] *= f32_first(less);
            for (int d = 0; d < size; d += 16) f32_store(c->sums + i * size + d, f32_mul(less, f32_load(c->sums + i * size + d)));
        }
        c->most[i] = now, c->total[i] += f32_sum(sum);
    }
}

/* Attend to the KEYS positions from `start` on, each of which is in the slot of the same number */
static void take_slots(Chunk *c, int start) {
    lanes sees[QUERIES][KEYS / 16];
    int count = 0; /* keys up to the last one that a query sees */
    for (int i = 0; i < c->n; i++)
        for (int b = 0; b < KEYS / 16; b++) {
            sees[i][b] = visible(c->seen[i], c->slots[i], start + b * 16, c->pass->width) & behind(c->from[i], start + b * 16);
            const int last = sees[i][b] ? b * 16 + 32 - __builtin_clz(sees[i][b]) : 0;
            if (last > count) count = last;
        }
    if (count == 0) return;
    const size_t behind = start + KEYS < c->end ? slots_from(c, start + KEYS) : 0;
    score_slots(c, start, count, c->scores, start + KEYS < c->end ? c->keys + behind : 0);
    weigh(c, start, sees);
    gather_slots(c, start, count, c->scores, start + KEYS < c->end ? c->values + behind : 0);
}

/* Iterate over the blocks of KEYS slots that hold positions from `start` on: the block at `start`, and those from slot `moved` on */
INLINE int next_block(const Chunk *c, int start, int at) {
    const int moved = c->moved / KEYS * KEYS;
    if (at < 0) return start < c->moved ? start : moved;
    return at == start && start < moved ? moved : at + KEYS;
}

/* Attend to the KEYS positions from `start` on, some of which are in other slots, as in a token tree. Plain decoding of a node's path has them
 * in slots of the same number. Scores are brought into that order, so that sums are made in the same order and have the same bits. */
static void take_positions(Chunk *c, int start) {
    const int group = c->layer->heads / c->layer->key_heads;
    int slot_of[QUERIES][KEYS], same[QUERIES], any = 0; /* slots of moved positions; the first query of the same node */
    uint64_t still[QUERIES], moved[QUERIES];            /* positions that a query sees in slots of their number, and in others */
    lanes sees[QUERIES][KEYS / 16];
    float of_slots[QUERIES * KEYS];
    for (int i = 0; i < c->n; i++) {
        same[i] = i && (c->first + i) % group ? same[i - 1] : i, still[i] = moved[i] = 0;
        for (int b = 0; b < KEYS / 16; b++)
            still[i] |= (uint64_t)(visible(c->seen[i], 0, start + b * 16, c->moved) & behind(c->from[i], start + b * 16)) << (b * 16);
        for (int s = c->moved; same[i] == i && s < c->reach; s++) {
            const int at = c->positions[s] - start;
            if (at >= 0 && at < KEYS && c->seen[i][s] && c->positions[s] >= c->from[i]) moved[i] |= 1ull << at, slot_of[i][at] = s;
        }
        moved[i] = moved[same[i]];
        for (int b = 0; b < KEYS / 16; b++) sees[i][b] = (still[i] | moved[i]) >> (b * 16);
    }
#define EACH_MOVED(action) /* for each moved position in block `at`: its `slot` there, its `lane` among these positions */ \
    for (uint64_t left = moved[i]; left; left &= left - 1) { \
        const int lane = __builtin_ctzll(left), slot = slot_of[same[i]][lane] - at; \
        if (slot >= 0 && slot < KEYS) action; \
    }
    for (int weighed = 0; weighed < 2; weighed++) {
        for (int at = next_block(c, start, -1); at < c->reach; at = next_block(c, start, at)) {
            int count = 0;
            for (int i = 0; i < c->n; i++) {
                if (at == start && still[i] && count < 64 - __builtin_clzll(still[i])) count = 64 - __builtin_clzll(still[i]);
                EACH_MOVED(count = slot >= count ? slot + 1 : count)
            }
            if (!count) continue;
            any = 1;
            if (!weighed) score_slots(c, at, count, of_slots, 0);
            for (int i = 0; i < c->n; i++) {
                float *positions = c->scores + i * KEYS, *slots = of_slots + i * KEYS;
                for (int b = 0; !weighed && at == start && b < KEYS; b += 16) f32_store(positions + b, f32_load(slots + b));
                for (int b = 0; weighed && b < KEYS; b += 16) f32_store(slots + b, at == start ? f32_keep(still[i] >> b, f32_load(positions + b)) : f32_zero());
                if (weighed)
                    EACH_MOVED(slots[slot] = positions[lane])
                else
                    EACH_MOVED(positions[lane] = slots[slot])
            }
            if (weighed) gather_slots(c, at, count, of_slots, 0);
        }
        if (!any) return;
        if (!weighed) weigh(c, start, sees);
    }
#undef EACH_MOVED
}

/* Size of a value; a latent is only a part of its key */
INLINE int wide_of(const Layer *l, const Asked *a) { return a->turned ? l->latent->rank : l->size; }

/* The first position in the layer's window for the query in a slot */
INLINE int first_seen(const Layer *l, const int32_t *positions, int slot) {
    const int position = positions ? positions[slot] : slot;
    return l->window && position >= l->window ? position - l->window + 1 : 0;
}

static Chunk chunk_of(Worker *w, const Layer *l, const Pass *p, const Asked *a, int row, int head, int first, int n) {
    const int size = l->size, begin = p->begins[row], group = l->heads / l->key_heads;
    Chunk c = {.layer = l, .pass = p, .asked = a, .row = row, .head = head, .first = first, .n = n, .wide = wide_of(l, a)};
    c.keys = a->row_keys ? a->row_keys[row] : a->keys, c.values = a->row_keys ? a->row_values[row] : a->values;
    c.head_stride = a->row_keys ? a->head_strides[row] : a->head_stride;
    c.scores = own_scratch(w, l, p);
    c.packed = (value *)(c.scores + QUERIES * KEYS + 2 * QUERIES * (size + 2)), c.queries = c.packed + KEYS * size;
    for (int i = 0; i < n; i++) {
        const int node = (first + i) / group, which = head * group + (first + i) % group;
        copied(p->projected + ((size_t)begin + node) * a->columns + (size_t)vector_of(l, which) * size, c.queries + i * size, size);
        c.seen[i] = a->mask ? a->mask + row * p->mask_row_stride + node * p->mask_stride : 0;
        c.slots[i] = a->slots[a->by_row ? row : begin + node];
        if (c.slots[i] >= c.reach) c.reach = c.slots[i] + 1;
    }
    find_moved(&c);
    for (int i = 0; i < n; i++) c.from[i] = first_seen(l, c.positions, c.slots[i]);
    return c;
}

/* Attend to the positions of one segment, KEYS at a time. `sums` gets sums, largest scores and totals as Chunk has them. A sink counts in the
 * first segment that a query sees. */
static void over_segment(Chunk *c, int segment, float *sums) {
    const Layer *l = c->layer;
    const int group = l->heads / l->key_heads, begin = segment * KEY_SEGMENT, end = begin + KEY_SEGMENT;
    int from = end;
    c->sums = sums, c->most = sums + c->n * c->wide, c->total = c->most + c->n;
    for (int i = 0; i < c->n; i++) {
        const float *sink = l->sinks && c->from[i] / KEY_SEGMENT == segment ? l->sinks + c->head * group + (c->first + i) % group : 0;
        c->most[i] = sink ? *sink : -__builtin_inff(), c->total[i] = sink && *sink > -__builtin_inff() ? 1.0f : 0.0f;
        for (int d = 0; d < c->wide; d += 16) f32_store(c->sums + i * c->wide + d, f32_zero());
        if (c->from[i] < from) from = c->from[i];
    }
    for (int start = from > begin ? from / KEYS * KEYS : begin; start < c->reach && start < end; start += KEYS)
        if (start + KEYS <= c->lowest || c->moved == c->reach)
            take_slots(c, start);
        else
            take_positions(c, start);
}

/* Merge the result `more` of over_segment() for the next segment into `sums`, for n queries */
static void joined(float *sums, const float *more, int n, int wide) {
    for (int i = 0; i < n; i++) {
        float *all = sums + i * wide, *most = sums + n * wide + i, *total = most + n;
        const float *some = more + i * wide, largest = more[n * wide + i], sum = more[n * wide + n + i];
        if (largest == -__builtin_inff()) continue; /* sees nothing there */
        if (*most == -__builtin_inff()) {
            __builtin_memcpy(all, some, wide * sizeof(float));
            *most = largest, *total = sum;
            continue;
        }
        const float now = largest > *most ? largest : *most;
        const f32 less = exponential(f32_of(*most - now)), share = exponential(f32_of(largest - now));
        for (int d = 0; d < wide; d += 16) f32_store(all + d, f32_fma(share, f32_load(some + d), f32_mul(less, f32_load(all + d))));
        *total = *total * f32_first(less) + sum * f32_first(share), *most = now;
    }
}

/* Divide the sums of n queries, as over_segment() has them, by their totals, into p->attended */
static void attended(Worker *w, const Layer *l, const Pass *p, int row, int head, int first, int n, int wide, const float *sums) {
    const int begin = p->begins[row], group = l->heads / l->key_heads;
    for (int i = 0; mine(w) && i < n; i++) {
        const int node = (first + i) / group, which = head * group + (first + i) % group;
        value *out = p->attended + ((size_t)begin + node) * l->heads * wide + (size_t)which * wide;
        const float total = sums[n * wide + n + i];
        const f32 scale = f32_of(total > 0.0f ? 1.0f / total : 0.0f); /* padding tokens may see nothing */
        for (int d = 0; d < wide; d += 16) store(out + d, f32_mul(f32_load(sums + i * wide + d), scale));
    }
}

/* A chunk: some queries, over all segments that they see */
static void attend(Worker *w, const Layer *l, const Pass *p, const Asked *a, int row, int head, int first, int n) {
    Chunk c = chunk_of(w, l, p, a, row, head, first, n);
    float *sums = c.scores + QUERIES * KEYS, *more = sums + QUERIES * (l->size + 2);
    int begin = c.from[0] / KEY_SEGMENT;
    for (int i = 1; i < n; i++)
        if (c.from[i] / KEY_SEGMENT < begin) begin = c.from[i] / KEY_SEGMENT;
    c.end = c.reach;
    for (int s = begin; s == begin || s * KEY_SEGMENT < c.reach; s++) {
        over_segment(&c, s, s == begin ? sums : more);
        if (s > begin) joined(sums, more, n, c.wide);
    }
    attended(w, l, p, row, head, first, n, c.wide, sums);
}

/* A chunk: some queries over one segment, whose partial sums go to `out` */
static void attend_segment(Worker *w, const Layer *l, const Pass *p, const Asked *a, int row, int head, int first, int n, int segment, float *out) {
    Chunk c = chunk_of(w, l, p, a, row, head, first, n);
    float *sums = c.scores + QUERIES * KEYS;
    c.end = (segment + 1) * KEY_SEGMENT < c.reach ? (segment + 1) * KEY_SEGMENT : c.reach;
    over_segment(&c, segment, sums);
    if (mine(w)) __builtin_memcpy(out, sums, n * (c.wide + 2) * sizeof(float));
}

/* A phase: RoPE of queries and keys; keys and values go to the cache */
static void turn(Worker *w, const Layer *l, const Pass *p, value *keys, value *values) {
    const int size = l->size, queries = l->heads, turning = queries + l->key_heads, items = p->tokens * turning;
    const Kind *k = p->kinds ? p->kinds + l->kind : 0;
    value *out = (value *)own_scratch(w, l, p), *behind = out + HEADS * size;
    for (int i = first(w, (items + HEADS - 1) / HEADS); i >= 0; i = next(w)) {
        const int from = i * HEADS, to = items - from < HEADS ? items : from + HEADS;
        for (int item = from; item < to; item++) {
            const int t = item / turning, head = item % turning;
            const value *x = p->projected + ((size_t)t * (turning + l->key_heads) + vector_of(l, head)) * size;
            const Norm norm = head < queries ? l->query_norm : l->key_norm;
            value *y = out + (item - from) * size;
            if (norm.weight && !l->head_norms) normed(x, norm, behind, size, l->head_eps), x = behind;
            if (k && k->cos)
                turned_by(x, k->cos + p->places[t] * l->rotary, k->sin + p->places[t] * l->rotary, y, l->rotary, size, l->rotation);
            else if (p->cos) {
                const size_t angle = (size_t)(p->own_angles ? t : t - p->begins[p->row_of[t]]) * size;
                rotated(x, p->cos + angle, p->sin + angle, y, size);
            } else
                copied(x, y, size);
            for (int j = 0; k && k->factor && head < queries && j < size; j += 16) store(y + j, f32_mul(load(y + j), f32_of(k->factor[p->places[t]])));
            if (norm.weight && l->head_norms == BEHIND) normed(y, norm, y, size, l->head_eps);
        }
        for (int item = from; mine(w) && item < to; item++) {
            const int t = item / turning, head = item % turning;
            value *x = p->projected + (size_t)t * (turning + l->key_heads) * size;
            if (head < queries) {
                copied(out + (item - from) * size, x + vector_of(l, head) * size, size);
                continue;
            }
            if (spared(p, p->row_of[t], p->slots[t])) continue;
            const int slot = p->slots[t] % KEYS;
            const size_t place = block(p, p->table, p->row_stride, p->head_stride, p->row_of[t], head - queries, p->slots[t] - slot, size) + (size_t)slot * size;
            copied(out + (item - from) * size, keys + place, size);
            copied(x + vector_of(l, head + l->key_heads) * size, values + place, size);
        }
    }
}

/* A phase: norm of all queries of a token together, and of all its keys */
static void whole_heads(Worker *w, const Layer *l, const Pass *p) {
    const int queries = l->heads * l->size, keys = l->key_heads * l->size;
    for (int i = first(w, 2 * p->tokens); i >= 0; i = next(w)) {
        value part[TAKEN], *x = p->projected + (size_t)(i / 2) * (queries + 2 * keys) + (i % 2 ? queries : 0);
        const int size = i % 2 ? keys : queries;
        normed(x, i % 2 ? l->key_norm : l->query_norm, part, size, l->head_eps);
        if (mine(w)) copied(part, x, size);
    }
}

/* How many segments the tokens of a row see, from segment `begin` on */
static int segments_of(const Layer *l, const Pass *p, const Asked *a, int row, int *begin) {
    int end = 0;
    *begin = INT_MAX;
    for (int t = p->begins[row]; t < p->begins[row + 1]; t++) {
        const int slot = a->slots[a->by_row ? row : t], first = first_seen(l, positions_of(p, a, row), slot) / KEY_SEGMENT;
        if (first < *begin) *begin = first;
        if (slot / KEY_SEGMENT >= end) end = slot / KEY_SEGMENT + 1;
    }
    return end > *begin ? end - *begin : 0;
}

/* Attention of all queries to the keys that they see. One phase; with few queries over long texts two: partial sums over each segment, then
 * their merge. Both ways make the same partial sums and merge them in the same order, so bits are equal. */
static void attention(Worker *w, const Layer *l, const Pass *p, const Asked *a) {
    const int group = l->heads / l->key_heads, heads = l->key_heads, asked = p->nodes * group, rows = p->rows, wide = wide_of(l, a);
    int share = asked < QUERIES ? asked : QUERIES, parts = (asked + share - 1) / share; /* queries of a key head per chunk; chunks per key head */
    int segments = 1, begin;
    for (int row = 0; p->segments_room && row < rows && parts * rows * heads < PIECES * p->threads; row++) {
        const int count = segments_of(l, p, a, row, &begin);
        if (count > segments) segments = count;
    }
    for (; parts * rows * heads * segments < p->threads && share > 1; parts = (asked + share - 1) / share) share = (share + 1) / 2;
    const int pieces = parts * rows * heads;
    const size_t needed = (size_t)share * (wide + 2);
    if ((int64_t)needed * pieces * segments > p->segments_room) segments = 1;
#define EACH_PIECE(count, action) /* for each piece of the queries, `count` times */ \
    for (int i = first(w, pieces * count); i >= 0; i = next(w)) { \
        const int piece = i % pieces, from = piece % parts * share, head = piece / parts % heads, row = piece / parts / heads; \
        const int left = (p->begins[row + 1] - p->begins[row]) * group - from, n = left < share ? left : share; \
        if (left > 0) action; \
        mine(w); \
    }
    if (segments == 1) {
        EACH_PIECE(1, attend(w, l, p, a, row, head, from, n))
        return;
    }
    EACH_PIECE(segments, {
        const int number = i / pieces; /* chunks that read the same keys follow each other */
        if (number < segments_of(l, p, a, row, &begin)) attend_segment(w, l, p, a, row, head, from, n, begin + number, p->segments + i * needed);
    })
    EACH_PIECE(1, {
        float *sums = own_scratch(w, l, p);
        const float *some = p->segments + i * needed;
        __builtin_memcpy(sums, some, n * (wide + 2) * sizeof(float));
        for (int s = 1, count = segments_of(l, p, a, row, &begin); s < count; s++) joined(sums, some + s * pieces * needed, n, wide);
        attended(w, l, p, row, head, from, n, wide, sums);
    })
#undef EACH_PIECE
}

/* A phase: thin [T, size] = act(gate) * up, where `wide` has rows [gate, up]; or act(wide) if ALONE */
static void gates(Worker *w, const value *wide, value *thin, int T, int size, int activation) {
    const Cut c = cut(T, size);
    const int columns = activation & ALONE ? size : 2 * size;
    for (int i = first(w, c.chunks); i >= 0; i = next(w)) {
        const int from = i % c.parts * c.columns, n = size - from < c.columns ? size - from : c.columns, begin = i / c.parts * c.tokens;
        value part[TAKEN];
        for (int t = begin; t < T && t < begin + c.tokens; t++) {
            const value *gate = wide + (size_t)t * columns + from;
            gated(gate, gate + size, part + (t - begin) * c.columns, n, activation);
        }
        for (int t = begin; mine(w) && t < T && t < begin + c.tokens; t++) copied(part + (t - begin) * c.columns, thin + (size_t)t * size + from, n);
    }
}

#include "experts.h"

/* The input of a sublayer, and (left) x after its output was added: one of them is normed */
static const value *entered(Worker *w, const Layer *l, const Pass *p, Norm norm, const value *x) {
    if (l->behind || !norm.weight) return x;
    norms(w, x, norm, p->states, p->tokens, l->hidden, l->eps);
    return p->states;
}

static void left(Worker *w, const Layer *l, const Pass *p, Norm norm, value *x) {
    if (l->behind) norms(w, x, norm, x, p->tokens, l->hidden, l->eps);
}

/* A phase: x += norm(y) * factor, for y [T, size]; a factor of 0 is ignored */
static void added(Worker *w, const value *y, Norm norm, float factor, value *x, int T, int size, float eps) {
    const Cut c = cut(T, size);
    for (int i = first(w, c.chunks); i >= 0; i = next(w)) {
        const int from = i % c.parts * c.columns, to = size - from < c.columns ? size : from + c.columns, begin = i / c.parts * c.tokens;
        value part[TAKEN];
        for (int t = begin; t < T && t < begin + c.tokens; t++) {
            value *some = part + (t - begin) * c.columns;
            normed_part(y + (size_t)t * size, norm, some, size, eps, from, to);
            for (int j = 0; factor && j < to - from; j += 16) store(some + j, f32_mul(load(some + j), f32_of(factor)));
        }
        for (int t = begin; mine(w) && t < T && t < begin + c.tokens; t++) add(x + (size_t)t * size + from, part + (t - begin) * c.columns, to - from);
    }
}

/* Add a sublayer's output, the product of inputs [T, K], to x */
static void give(Worker *w, const Layer *l, const Pass *p, const Matrix *m, const value *inputs, int K, Norm norm, value *x) {
    const int plain = !norm.weight && !l->residual;
    product(w, m, inputs, plain ? x : p->states, p->tokens, K, l->hidden, plain);
    if (!plain) added(w, p->states, norm, l->residual, x, p->tokens, l->hidden, l->eps);
}

/* The experts of a layer in place of its MLP */
static void mixture(Worker *w, const Layer *l, const Pass *p, value *x) {
    const int T = p->tokens, H = l->hidden;
    const Experts *e = l->experts;
    const Routed r = divided(e, T, H, p->threads, p->experts);
    const value *inputs = entered(w, l, p, l->after, x);
    if (e->router32)
        logits32(w, e, &r, inputs, T, H);
    else
        product(w, &e->router, inputs, r.logits, T, H, routes(e), 0);
    route(w, e, &r, T, 0, 0);
    if (e->shared) {
        product(w, &l->gate_up, inputs, p->wide, T, H, 2 * l->inner, 0);
        gates(w, p->wide, p->thin, T, l->inner, l->activation);
        product(w, &l->down, p->thin, r.shared, T, l->inner, H, 0);
    }
    by_experts(w, e, &r, inputs, x, T, H);
    left(w, l, p, l->after, x);
}

#include "latent.h"

/* Run a layer on x [T, hidden], in place; its keys and values go to their slots in the cache.
 * mask: [rows, 1, nodes, width] bytes, or null if a node sees every slot up to its own within the layer's window.
 * The attention reads inputs [T, K], or norm(x) if that is null. Only the sublayers in `parts` run. `number` is the layer's index among the
 * decoder's, for cross-attention. */
static void through(Worker *w, const Layer *l, const Pass *p, const uint8_t *mask, value *x, const value *inputs, int K, value *keys,
                    value *values, int parts, int number) {
    const int T = p->tokens, H = l->hidden, I = l->inner, size = l->size, heads = l->heads * size, all = heads + 2 * l->key_heads * size;
    const int widened = l->activation & ALONE ? I : 2 * I;
    if (l->latent && parts & ATTENTION) {
        latent_attention(w, l, p, mask, x, keys, values);
        parts &= ~ATTENTION;
    }
    if (parts & ATTENTION) product(w, &l->qkv, inputs ? inputs : entered(w, l, p, l->before, x), p->projected, T, inputs ? K : H, all, 0);
    if (l->parallel && parts & MLP) {
        const value *read = parts & ATTENTION && !l->after.weight ? p->states : entered(w, l, p, l->after.weight ? l->after : l->before, x);
        product(w, &l->gate_up, read, p->wide, T, H, widened, 0);
    }
    if (parts & ATTENTION) {
        if (l->head_norms == WHOLE_HEADS) whole_heads(w, l, p);
        turn(w, l, p, keys, values);
        attention(w, l, p, &(Asked){keys, values, p->row_stride, p->head_stride, all, p->slots, 0, mask, l->bias, p->table, 0});
        give(w, l, p, &l->output, p->attended, heads, l->attention_given, x);
        left(w, l, p, l->before, x);
    }
    if (l->cross_query.values) {
        product(w, &l->cross_query, entered(w, l, p, l->between, x), p->projected, T, H, heads, 0);
        attention(w, l, p, &(Asked){.columns = heads, .slots = p->ends, .by_row = 1, .row_keys = p->cross_keys + number * p->rows,
                                    .row_values = p->cross_values + number * p->rows, .head_strides = p->cross_head_strides});
        product(w, &l->cross_output, p->attended, x, T, heads, H, 1);
        left(w, l, p, l->between, x);
    }
    if (!(parts & MLP)) return;
    if (l->experts) {
        mixture(w, l, p, x);
        return;
    }
    if (!l->parallel) product(w, &l->gate_up, entered(w, l, p, l->after, x), p->wide, T, H, widened, 0);
    gates(w, p->wide, p->thin, T, I, l->activation);
    give(w, l, p, &l->down, p->thin, I, l->mlp_given, x);
    left(w, l, p, l->after, x);
}

typedef struct {
    const Layer *layer;
    const Pass *pass;
    const uint8_t *mask;
    value *x;
    const value *inputs;
    int K;
    value *keys, *values;
    int parts;
} OneLayer;

static void do_layer(Worker *w, const void *job) {
    const OneLayer *o = job;
    through(w, o->layer, o->pass, o->mask, o->x, o->inputs, o->K, o->keys, o->values, o->parts, 0);
}

void layer_over(const Layer *l, const Pass *p, const uint8_t *mask, value *x, const value *inputs, int K, value *keys, value *values) {
    together(p->threads, do_layer, &(OneLayer){l, p, mask, x, inputs, K, keys, values, ATTENTION | MLP});
}

void layer(const Layer *l, const Pass *p, const uint8_t *mask, value *x, value *keys, value *values, int parts) {
    together(p->threads, do_layer, &(OneLayer){l, p, mask, x, 0, 0, keys, values, parts});
}

typedef struct {
    const Layer *layer;
    const Pass *pass;
    Asked asked;
} Attention;

static void do_attention(Worker *w, const void *job) {
    const Attention *a = job;
    attention(w, a->layer, a->pass, &a->asked);
}

/* Attention alone: p->projected [tokens, heads * size] over keys and values, into p->attended of that shape. Heads, size, scaling, sinks and cap
 * of the layer must be set, and the other fields 0. */
void attend_over(const Layer *l, const Pass *p, const uint8_t *mask, const value *keys, const value *values) {
    const Asked asked = {keys, values, p->row_stride, p->head_stride, l->heads * l->size, p->slots, 0, mask, 0, p->table, 0};
    together(p->threads, do_attention, &(Attention){l, p, asked});
}

/* Copy vectors [rows, heads, nodes, size] with these strides into their tokens' slots of a cache in pages */
void write_over(const Pass *p, const value *from, int64_t row_step, int64_t head_step, int64_t step, int heads, int size, value *to) {
    for (int t = 0; t < p->tokens; t++) {
        const int row = p->row_of[t], slot = p->slots[t] % KEYS;
        const value *vector = from + row * row_step + (t - p->begins[row]) * step;
        if (spared(p, row, p->slots[t])) continue;
        for (int h = 0; h < heads; h++) {
            const size_t place = block(p, p->table, p->row_stride, p->head_stride, row, h, p->slots[t] - slot, size) + (size_t)slot * size;
            __builtin_memcpy(to + place, vector + h * head_step, size * sizeof(value));
        }
    }
}

/* Hidden states that a pass returns: out [T, count * hidden], those of `numbers` side by side. 0 is the input of the first layer, i the output
 * of the i-th, -1 the output of the last norm. */
typedef struct {
    int64_t count;
    const int64_t *numbers;
    value *out;
} States;

/* A phase for each time that `s` asks for hidden state `number`, which is x [T, H] */
static void hand_out(Worker *w, const States *s, int number, const value *x, int T, int H) {
    for (int f = 0; s && f < s->count; f++)
        if (s->numbers[f] == number)
            for (int t = first(w, T); t >= 0; t = next(w))
                if (mine(w)) __builtin_memcpy(s->out + ((size_t)t * s->count + f) * H, x + (size_t)t * H, H * sizeof(value));
}

typedef struct {
    const Layer *const *layers;
    int count;
    const Pass *pass;
    const uint8_t *mask;
    value *x, *const *keys, *const *values;
    int64_t offset;
    Norm norm;
    double eps;
    value *out;
    const States *states;
    const uint8_t *parts;
} Model;

static void do_model(Worker *w, const void *job) {
    const Model *m = job;
    const int T = m->pass->tokens, H = m->layers[0]->hidden;
    for (int i = 0; i < m->count; i++) {
        const Layer *l = m->layers[i];
        Pass p = *m->pass;
        if (p.kinds) {
            const Kind *k = p.kinds + l->kind;
            p.row_stride = k->row_stride, p.head_stride = k->head_stride, p.table_stride = k->table_stride, p.spare = k->spare;
            p.page_stride = k->page_stride, p.table = k->table;
        }
        hand_out(w, m->states, i, m->x, T, H);
        const int64_t to_values = l->latent ? m->offset / l->latent->rank * l->latent->turned : m->offset;
        through(w, l, &p, m->mask, m->x, 0, 0, m->keys[i] + m->offset, m->values[i] + to_values,
                m->parts ? m->parts[i] : ATTENTION | MLP, i);
    }
    norms(w, m->x, m->norm, m->out, T, H, m->eps);
    hand_out(w, m->states, -1, m->out, T, H);
}

/* All layers and the last norm: out [T, hidden] from x [T, hidden], which is overwritten. Keys and values of layer i begin `offset` values after
 * keys[i] and values[i]. `states` may be null, and so may `parts` [count], the sublayers of each layer to run. */
void model(const Layer *const *layers, int count, const Pass *p, const uint8_t *mask, value *x, value *const *keys, value *const *values,
           int64_t offset, const Norm *norm, double eps, value *out, const States *states, const uint8_t *parts) {
    together(p->threads, do_model, &(Model){layers, count, p, mask, x, keys, values, offset, *norm, eps, out, states, parts});
}

/* Input embeddings of a decoder */
typedef struct {
    const value *tokens, *positions; /* tables [.., hidden]; the latter or null */
    Norm norm;                       /* of the sum; with `before`, of the token embedding alone */
    int64_t hidden, before, padding; /* `padding`: a token without a position embedding, or -1 */
    double scale, eps;               /* `scale`: factor of the token embedding */
} Embedded;

/* Input embeddings x [T, hidden] of tokens [T] at positions [T] */
void embed(const Embedded *e, const int64_t *tokens, const int64_t *positions, value *x, int T) {
    const int H = e->hidden;
    const f32 scale = f32_of(e->scale);
    for (int t = 0; t < T; t++, x += H) {
        const value *token = e->tokens + (size_t)tokens[t] * H;
        if (e->scale == 1.0)
            copied(token, x, H);
        else
            for (int i = 0; i < H; i += 16) store(x + i, f32_mul(load(token + i), scale));
        if (e->before) normed(x, e->norm, x, H, e->eps);
        if (e->positions && tokens[t] != e->padding) add(x, e->positions + (size_t)positions[t] * H, H);
        if (e->norm.weight && !e->before) normed(x, e->norm, x, H, e->eps);
    }
}

/* -- a draft tree, grown in one call --------------------------------------------------------------------------------------- */

/* What an EAGLE-3 head has besides a decoder of one layer. A step reads the embedding of a token and the hidden state of the step before; the
 * first steps of a round read the fused features of the target. */
typedef struct {
    Matrix fuse;                                  /* [hidden, width] */
    const value *of_embedding, *of_state;         /* norms, [hidden] each */
    const value *features;                        /* [missed, width] */
    const int64_t *ids;                           /* [vocab] the target's id of each draft token, or null if they are equal */
    value *inputs, *states;                       /* scratch: [n, 2 * hidden]; [nodes that are read, hidden] their states, for the next step */
    int64_t width, residual_normed, output_normed; /* `width` of the features; whether the residual, and the states, are normed */
} Eagle;

/* What is added to logits after certain tokens, as a sparse matrix (CSR): after context i, which is one or two tokens as a number, odds[j] is
 * added to the logit of tokens[j], for first[i] <= j < first[i + 1]. */
typedef struct {
    const int64_t *contexts; /* [count], ascending */
    const int32_t *first;
    const int64_t *tokens;
    const float *odds;
    int64_t count;
} Lists;

/* Medusa heads in place of a decoder, one per level. All of them read one hidden state; only `lists` and `text` depend on the path. */
typedef struct {
    const value *state;      /* [hidden] of which the root was predicted */
    const Matrix *layers;    /* [heads][count]: x <- x + SiLU(W x + b) */
    const Matrix *lm_heads;  /* [heads] */
    int64_t hidden, count, vocabulary; /* `count`: layers per head; `vocabulary`: the base in which contexts are numbers */
    const Lists *lists;      /* [reach], those for contexts of one token first */
    const float *weights;    /* [heads] factors of the odds */
    int64_t reach;
    const int64_t *text;     /* [length] committed tokens, the last of which is the root */
    int64_t length, heed;    /* `heed`: mix in what followed the same tokens in the text */
    const float *shares;     /* [PATH - 1] probability for what followed the last 2, 3, .. tokens */
    value *x, *y, *own;      /* scratch: [hidden], [hidden], [columns] logits of the newest level, nothing added */
    int64_t *read, *above;   /* scratch: [nodes that are read]: their tokens and parents */
    int64_t level;           /* level of the nodes to read next; guess() updates it */
} Medusa;

typedef struct {
    const Layer *const *layers;
    Embedded embedded;
    Norm norm;
    const value *cos, *sin;                    /* by position [.., size] or null */
    const Matrix *head;
    value *const *keys, *const *values;
    int64_t count, vocab, columns;             /* layers; tokens that may be drafted; padded outputs of the LM head */
    int64_t offset, start, missed, most;       /* offset into keys and values; slots that hold text; tokens to read after it; most positions */
    int64_t depth, k, total;
    double eps, delta, least;                  /* growth stops after a level that adds at most `delta` tokens; lowest log-probability of a node */
    const double *prices;                      /* [total + 1] cost of verifying so many nodes, in accepted tokens, or null */
    value *x, *out, *logits;                   /* scratch: [n, hidden] twice, [n, columns], for passes of n tokens */
    value *angles;                             /* scratch: [2, n, size] */
    uint8_t *mask;                             /* scratch: [nodes that are read, stride] */
    int64_t stride;
    int32_t *slots, *begins;                   /* scratch: [n], [2] */
    int32_t *candidates;                       /* scratch: [4, k + k * k * (depth - 1)]: tokens, parents, own numbers, marks */
    float *scores;                             /* scratch: [k + k * k * (depth - 1)] */
    int32_t *order;                            /* scratch: likewise */
    const Eagle *eagle;                        /* or null */
    Medusa *medusa;                            /* or null; if set, there is no cache, start is 0 and missed is 1 */
    double logit_scale, logit_cap;             /* factor and cap of the logits, the latter as Layer.cap; 0: none */
} Growth;

/* How a chain is sampled: token i from q[i], which is softmax(logits / temperature) truncated by top_k, top_p and min_p. The noise of token x
 * follows from hashes[x] and words[i]. */
typedef struct {
    const uint64_t *words;
    const int32_t *hashes; /* [columns] */
    float *q;              /* [.., columns], 0 where the draft has no such token */
    int64_t columns, top_k;     /* top_k 0: all */
    double temperature, top_p, min_p;
} Draws;

/* Of `count` values in decreasing order, equal ones by index: the one that follows value `above` at index `at`. Returns its index; `best` is its
 * value. */
INLINE int following(const value *x, int count, float above, int at, float *best) {
    const f32 limit = f32_of(above), none = f32_of(-__builtin_inff());
    const i32 last = i32_of(at);
    f32 most = none;
    i32 which = i32_of(INT32_MAX), index = i32_count();
    for (int i = 0; i < count; i += 16) {
        const lanes there = count - i >= 16 ? 0xffff : (1u << (count - i)) - 1;
        const f32 v = f32_pick(there, none, load(x + i));
        const lanes open = f32_less(v, limit) |
                               (f32_equal(v, limit) & i32_more(index, last));
        const lanes better = open & f32_less(most, v);
        most = f32_pick(better, most, v);
        which = i32_pick(better, which, index);
        index = i32_add(index, i32_of(16));
    }
    *best = f32_most(most);
    const lanes equal = f32_equal(most, f32_of(*best));
    const int found = i32_least_of(equal, which);
    return found < count ? found : 0;
}

/* log(sum of e^(x - most)) over `count` values; `most` is the largest */
INLINE float log_sum(const value *x, int count, float most) {
    f32 sum = f32_zero();
    for (int i = 0; i < count; i += 16) {
        const lanes there = count - i >= 16 ? 0xffff : (1u << (count - i)) - 1;
        sum = f32_add(sum, f32_keep(there, exponential(f32_sub(load(x + i), f32_of(most)))));
    }
    return __builtin_logf(f32_sum(sum));
}

/* Index of the best unmarked score in [from, to), the first of equal ones; -1 if all are marked */
static int best_open(const float *scores, const int32_t *marks, int from, int to) {
    int best = -1;
    for (int i = from; i < to; i++)
        if (!marks[i] && (best < 0 || scores[i] > scores[best])) best = i;
    return best;
}

/* One step of an EAGLE-3 head over T tokens, into g->out [T, hidden], which its LM head reads. Token t goes on from the state of node above[t],
 * or without `above` from the target's features. The states of the last n tokens are kept as those of nodes `first`... */
static void steps(const Growth *g, Pass *p, const int64_t *tokens, const int32_t *above, int T, int n, int first, const uint8_t *mask) {
    const Eagle *e = g->eagle;
    const int H = g->layers[0]->hidden;
    if (!above) linear(&e->fuse, e->features, g->x, T, e->width, H, p->threads);
    for (int t = 0; t < T; t++) {
        value *x = g->x + (size_t)t * H, *inputs = e->inputs + (size_t)t * 2 * H;
        if (above) __builtin_memcpy(x, e->states + (size_t)above[t] * H, H * sizeof(value));
        normed(g->embedded.tokens + (size_t)tokens[t] * H, (Norm){e->of_embedding}, inputs, H, g->eps);
        normed(x, (Norm){e->of_state}, inputs + H, H, g->eps);
        if (e->residual_normed) __builtin_memcpy(x, inputs + H, H * sizeof(value));
    }
    layer_over(g->layers[0], p, mask, g->x, e->inputs, 2 * H, g->keys[0] + g->offset, g->values[0] + g->offset);
    for (int t = 0; t < T; t++) normed(g->x + (size_t)t * H, g->norm, g->out + (size_t)t * H, H, g->eps);
    const value *handed = (e->output_normed ? g->out : g->x) + (size_t)(T - n) * H;
    __builtin_memcpy(e->states + (size_t)first * H, handed, (size_t)n * H * sizeof(value));
}

/* Insert x, found at index `place`, before the first smaller of `count` sorted numbers; if there are k already, the last one is dropped */
INLINE int put(float *best, int64_t *at, int count, int k, float x, int64_t place) {
    int i = count < k ? count++ : k - 1;
    for (; i > 0 && best[i - 1] < x; i--) best[i] = best[i - 1], at[i] = at[i - 1];
    best[i] = x, at[i] = place;
    return count;
}

/* The k <= width largest numbers of a line and their indices: largest first, the first of equal ones first */
static void largest_of(const value *line, int64_t width, int k, float *best, int64_t *at) {
    int64_t i = 0;
    int count = 0;
    for (; i < k; i++) count = put(best, at, count, k, number(line + i), i);
    for (; i + 64 <= width; i += 64) {
        const f32 least = f32_of(best[k - 1]);
        uint64_t more = 0;
        for (int b = 0; b < 4; b++) more |= (uint64_t)f32_less(least, load(line + i + 16 * b)) << (16 * b);
        for (; more; more &= more - 1) {
            const int64_t place = i + __builtin_ctzll(more);
            if (number(line + place) > best[k - 1]) put(best, at, k, k, number(line + place), place);
        }
    }
    for (; i < width; i++)
        if (number(line + i) > best[k - 1]) put(best, at, k, k, number(line + i), i);
}

/* The smallest logit that top_k, top_p and min_p keep; `most` is the largest. top_p applies only within top_k. */
static float least_kept(const Draws *d, const value *logits, int vocab, float most) {
    float least = d->min_p > 0.0 ? most + (float)(d->temperature * __builtin_log(d->min_p)) : -__builtin_inff();
    if (!d->top_k || d->top_k >= vocab) return least;
    float best[KEPT];
    int64_t at[KEPT];
    int kept = d->top_k;
    largest_of(logits, vocab, kept, best, at);
    double whole = 0.0, gone = 0.0;
    for (int i = 0; i < kept; i++) whole += __builtin_exp((best[i] - most) / d->temperature);
    while (kept > 1 && (gone += __builtin_exp((best[kept - 1] - most) / d->temperature)) <= (1.0 - d->top_p) * whole) kept--;
    return best[kept - 1] > least ? best[kept - 1] : least;
}

/* -log(1 + x) for -1 < x < 0, relative error below 3e-7 */
INLINE f32 minus_log(f32 x) {
    const f32 one = f32_of(1.0f), y = f32_add(x, one), lost = f32_sub(x, f32_sub(y, one));
    f32 power;
    const f32 m = fraction(y, &power);
    const f32 s = f32_div(f32_sub(m, one), f32_add(m, one)), square = f32_mul(s, s);
    f32 sum = f32_of(1.0f / 11.0f); /* log(m) = 2 artanh(s) */
    for (int i = 9; i > 0; i -= 2) sum = f32_fma(sum, square, f32_of(1.0f / i));
    const f32 log = f32_fma(power, f32_of(0.69314718f), f32_mul(f32_add(s, s), sum));
    return f32_sub(f32_zero(), f32_add(log, f32_div(lost, y)));
}

/* 16 numbers of an exponential distribution: `_negative_exponentials` of noise.py, negated */
INLINE f32 noise(i32 hashes, uint64_t word) {
    i32 bits = i32_mul(i32_xor(hashes, i32_of((int32_t)word)), i32_of((int32_t)(word >> 32) | 1));
    bits = i32_mul(i32_xor(bits, i32_right(bits, 15)), i32_of(0x2C1B3C6D));
    bits = i32_mul(i32_xor(bits, i32_right(bits, 12)), i32_of(0x297A2D39));
    bits = i32_and(i32_xor(bits, i32_right(bits, 15)), i32_of(0x7FFFFFFF));
    const f32 unit = f32_mul(f32_add(i32_to_f32(bits), f32_of(0.5f)), f32_of(-0x1p-31f));
    return minus_log(f32_max(unit, f32_of(0x1p-24f - 1.0f)));
}

/* Draw token i of a chain from the `vocab` tokens of the draft */
static int drawn(const Draws *d, int i, const value *logits, int vocab) {
    float *q = d->q + (size_t)i * d->columns, largest;
    following(logits, vocab, __builtin_inff(), -1, &largest);
    const f32 least = f32_of(least_kept(d, logits, vocab, largest));
    const f32 most = f32_of(largest), temperature = f32_of(d->temperature), none = f32_of(-1.0f);
    f32 sum = f32_zero(), best = none;
    for (int x = 0; x < vocab; x += 16) {
        const lanes there = vocab - x >= 16 ? 0xffff : (1u << (vocab - x)) - 1;
        const f32 logit = load(logits + x);
        const lanes kept = there & f32_least(logit, least);
        const f32 e = f32_keep(kept, exponential(f32_div(f32_sub(logit, most), temperature)));
        f32_store_some(q + x, there, e);
        sum = f32_add(sum, e);
    }
    const f32 whole = f32_of(f32_sum(sum));
    i32 which = i32_zero(), index = i32_count();
    for (int x = 0; x < vocab; x += 16) {
        const lanes there = vocab - x >= 16 ? 0xffff : (1u << (vocab - x)) - 1;
        const f32 p = f32_div(f32_load_some(there, q + x), whole);
        f32_store_some(q + x, there, p);
        const f32 ratio = f32_div(p, noise(i32_load_some(there, d->hashes + x), d->words[i]));
        const lanes better = there & f32_less(best, ratio);
        best = f32_pick(better, best, ratio);
        which = i32_pick(better, which, index);
        index = i32_add(index, i32_of(16));
    }
    __builtin_memset(q + vocab, 0, (d->columns - vocab) * sizeof(float));
    const lanes equal = f32_equal(best, f32_of(f32_most(best)));
    return i32_least_of(equal, which); /* 0 if logits are NaN, and then q is NaN as well */
}

/* Index of `wanted` among `count` ascending numbers, or -1 */
INLINE int64_t place_of(const int64_t *numbers, int64_t count, int64_t wanted) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (numbers[middle] < wanted)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && numbers[low] == wanted ? low : -1;
}

/* Logits of Medusa head k, nothing added */
static void guess_alone(const Growth *g, Pass *p, int64_t k) {
    const Medusa *m = g->medusa;
    const value *x = m->state;
    for (int64_t l = 0; l < m->count; l++, x = m->x) {
        linear(&m->layers[k * m->count + l], x, m->y, 1, m->hidden, m->hidden, p->threads);
        for (int64_t i = 0; i < m->hidden; i += 16) store(m->x + i, f32_add(load(x + i), silu(load(m->y + i))));
    }
    linear(&m->lm_heads[k], x, m->own, 1, m->hidden, g->columns, p->threads);
}

/* The PATH tokens that end with node `number`, the last one first, into path; -1 before the text */
static void path_to(const Medusa *m, int64_t number, int64_t *path) {
    for (int i = 0; i < PATH; i++) {
        path[i] = number >= 0 ? m->read[number] : m->length - 1 + number >= 0 ? m->text[m->length - 1 + number] : -1;
        number = number > 0 ? m->above[number] : number - 1;
    }
}

/* Mix into logits what followed the last tokens of `path` elsewhere in the text; the latest MATCHES matches of each length count */
static void heed_text(const Growth *g, value *logits, const int64_t *path) {
    const Medusa *m = g->medusa;
    int64_t tokens[(PATH - 1) * MATCHES];
    float mass[(PATH - 1) * MATCHES];
    int64_t found[PATH - 1][MATCHES];
    int many[PATH - 1] = {0}, different = 0;
    if (path[1] < 0) return;
    for (int64_t j = m->length - 1; j >= 2; j--) {
        if (m->text[j - 1] != path[0] || m->text[j - 2] != path[1] || m->text[j] >= g->vocab) continue;
        int reach = 2;
        while (reach < PATH && j > reach && m->text[j - 1 - reach] == path[reach]) reach++;
        if (many[reach - 2] < MATCHES) found[reach - 2][many[reach - 2]++] = m->text[j];
    }
    float left = 1.0f, weights[PATH - 1];
    int count = 0;
    for (int r = PATH - 2; r >= 0; r--) { /* the weight of a match of this length: its part of this share and of those of shorter ones */
        weights[r] = 0.0f;
        count += many[r];
        if (!count) continue;
        for (int longer = r; longer < PATH - 1; longer++) weights[longer] += left * m->shares[r] / count;
        left *= 1.0f - m->shares[r];
    }
    for (int r = PATH - 2; r >= 0; r--)
        for (int i = 0; i < many[r]; i++) {
            int at = 0;
            while (at < different && tokens[at] != found[r][i]) at++;
            if (at == different) tokens[different] = found[r][i], mass[different++] = 0.0f;
            mass[at] += weights[r];
        }
    if (!different) return;
    float most;
    following(logits, g->vocab, __builtin_inff(), -1, &most);
    const float whole = most + log_sum(logits, g->vocab, most);
    for (int i = 0; i < different; i++) {
        value *logit = logits + tokens[i];
        const float one = number(logit), other = whole + __builtin_logf(mass[i] / left), high = one > other ? one : other;
        put_number(logit, high + __builtin_logf(__builtin_expf(one - high) + __builtin_expf(other - high)));
    }
}

/* Logits of n nodes, numbered from `first` on, below nodes above[t]: those of their level, plus what their paths add */
static void guess(const Growth *g, Pass *p, const int64_t *tokens, const int32_t *above, int n, int first) {
    Medusa *m = g->medusa;
    const int64_t level = m->level++;
    guess_alone(g, p, level);
    for (int t = 0; t < n; t++) {
        value *logits = g->logits + (size_t)t * g->columns;
        __builtin_memcpy(logits, m->own, g->columns * sizeof(value));
        const int64_t number_of = above ? first + t : 0;
        int64_t path[PATH], context = 0, scale = 1;
        m->read[number_of] = tokens[t], m->above[number_of] = above ? above[t] : -1;
        path_to(m, number_of, path);
        for (int64_t r = 0; r < m->reach && path[r] >= 0; r++, scale *= m->vocabulary) {
            context += path[r] * scale;
            const Lists *l = m->lists + r;
            const int64_t at = place_of(l->contexts, l->count, context);
            if (at < 0) continue;
            for (int32_t j = l->first[at]; j < l->first[at + 1]; j++)
                if (l->tokens[j] < g->vocab) {
                    value *logit = logits + l->tokens[j], odds;
                    put_number(&odds, l->odds[j] * m->weights[level]);
                    put_number(logit, number(logit) + number(&odds));
                }
        }
        if (m->heed) heed_text(g, logits, path);
    }
}

/* One pass over T tokens in g->slots, at `positions`; `mask` is null for a chain. It makes the logits of the last n tokens, which are nodes
 * `first`... of the tree, below nodes above[t]; `above` is null for text. */
static void read_tokens(const Growth *g, Pass *p, const int64_t *tokens, const int64_t *positions, const int32_t *above, int T, int n, int first,
                        const uint8_t *mask) {
    if (g->medusa) {
        guess(g, p, tokens, above, n, first);
        return;
    }
    const int H = g->layers[0]->hidden, size = g->layers[0]->size;
    int64_t places[LINE];
    for (int t = 0; t < T; t++) {
        const int64_t position = places[t] = positions[t] < g->most ? positions[t] : g->most - 1;
        if (p->positions) p->positions[g->slots[t]] = position;
        for (int i = 0; g->cos && i < size; i += 16) {
            store(g->angles + (size_t)t * size + i, load(g->cos + (size_t)position * size + i));
            store(g->angles + (size_t)(T + t) * size + i, load(g->sin + (size_t)position * size + i));
        }
    }
    g->begins[0] = 0, g->begins[1] = p->tokens = p->nodes = T;
    p->cos = g->cos ? g->angles : 0, p->sin = g->angles + (size_t)T * size, p->places = places;
    if (g->eagle)
        steps(g, p, tokens, above, T, n, first, mask);
    else {
        embed(&g->embedded, tokens, places, g->x, T);
        model(g->layers, g->count, p, mask, g->x, g->keys, g->values, g->offset, &g->norm, g->eps, g->out, 0, 0);
    }
    linear(g->head, g->out + (size_t)(T - n) * H, g->logits, n, H, g->columns, p->threads);
    for (int64_t i = 0; (g->logit_scale || g->logit_cap) && i < n * g->columns; i += 16) {
        f32 logit = load(g->logits + i);
        if (g->logit_scale) logit = rounded(f32_mul(logit, f32_of(g->logit_scale)));
        if (g->logit_cap) logit = f32_mul(rounded(capped(rounded(f32_div(logit, f32_of(g->logit_cap))), 1.0f)), f32_of(g->logit_cap));
        store(g->logits + i, logit);
    }
}

/* The target's id of the draft's token `at` */
INLINE int64_t named(const Growth *g, int at) { return g->eagle && g->eagle->ids ? g->eagle->ids[at] : at; }

/* The first pass: the last `missed` tokens of the text, the last of which is the root */
static void read_text(const Growth *g, Pass *p, const int64_t *text) {
    int64_t positions[LINE];
    if (g->medusa) g->medusa->level = 0;
    p->rows = 1, p->own_angles = 1, p->mask_row_stride = 0, p->mask_stride = g->stride;
    p->slots = g->slots, p->begins = g->begins, p->width = g->start + g->missed;
    for (int t = 0; t < g->missed; t++) positions[t] = g->slots[t] = g->start + t;
    read_tokens(g, p, text, positions, 0, g->missed, 1, 0, 0);
}

/* The mask of node `number`: what its parent sees, and itself */
static void seen_from(const Growth *g, int number, int parent) {
    if (g->medusa) return;
    const int root = g->start + g->missed - 1;
    uint8_t *seen = g->mask + (size_t)number * g->stride;
    if (parent)
        __builtin_memcpy(seen, g->mask + (size_t)parent * g->stride, g->stride);
    else {
        __builtin_memset(seen, 1, root + 1);
        __builtin_memset(seen + root + 1, 0, g->stride - root - 1);
    }
    seen[root + number] = 1;
}

/* Fill in a static tree, whose nodes are in the order of levels: node i of `count` is the one of rank ranks[i] below node parents[i]; 0 is the
 * root. Every node above the last level is read. Returns how many were, including the root. With `draws`, which may be null, the tokens of a
 * chain are sampled. */
int fill(const Growth *g, Pass *p, const int64_t *text, const int32_t *parents, const int32_t *ranks, int count, int64_t *out_tokens,
         const Draws *draws) {
    const int root = g->start + g->missed - 1;
    int64_t positions[LINE];
    int first = 0, n = 1, read = 1, node = 1, level = 0; /* the level above has n nodes from number `first` on */
    read_text(g, p, text);
    while (node <= count) {
        const int begin = node;
        for (int i = 0; i < n; i++) {
            const value *logits = g->logits + (size_t)i * g->columns;
            float last = __builtin_inff();
            for (int at = -1, rank = 0; node <= count && parents[node - 1] == first + i; node++)
                for (; rank <= ranks[node - 1]; rank++) {
                    at = draws ? drawn(draws, node - 1, logits, g->vocab) : following(logits, g->vocab, last, at, &last);
                    out_tokens[node - 1] = named(g, at);
                }
        }
        if (node == begin || node > count) break;
        first = begin, n = node - begin, level++;
        for (int i = 0; i < n; i++) {
            seen_from(g, begin + i, parents[begin + i - 1]);
            positions[i] = root + level, g->slots[i] = root + begin + i;
        }
        read = node, p->width = root + read;
        read_tokens(g, p, out_tokens + begin - 1, positions, parents + begin - 1, n, n, begin, g->mask + (size_t)begin * g->stride);
    }
    return read;
}

/* Grow a dynamic tree for one row: read the `missed` tokens, the last of which is the root, and then level by level the k best nodes of each.
 * out_tokens, out_parents and own [total] describe the proposed nodes, numbered from 1, below the root, which is 0; own[i] is the number under
 * which a node was read, in slot root + own[i], or -1. Returns how many nodes are proposed. `fed` is how many were read, including the root, and
 * `expected_tokens` the sum of the probabilities of the proposed ones. */
int grow(const Growth *g, Pass *p, const int64_t *text, int64_t *out_tokens, int64_t *out_parents, int64_t *own, int64_t *fed, double *expected_tokens) {
    const int k = g->k, root = g->start + g->missed - 1, room = k + k * k * ((int)g->depth - 1);
    int32_t *tokens = g->candidates, *parents = tokens + room, *numbers = parents + room, *marks = numbers + room;
    int64_t positions[LINE], wanted[LINE];
    float *scores = g->scores, above[LINE];
    int newest[LINE], n = 1, found = 0, read = 1;
    double expected = 0.0;
    newest[0] = -1, above[0] = 0.0f;
    read_text(g, p, text);
    for (int level = 0; level < g->depth; level++) {
        const int begin = found;
        for (int i = 0; i < n; i++) {
            const value *logits = g->logits + (size_t)i * g->columns;
            float most = 0.0f, sum = 0.0f, last = __builtin_inff();
            for (int j = 0, at = -1; j < k; j++, found++) {
                at = following(logits, g->vocab, last, at, &last);
                if (j == 0) most = last, sum = log_sum(logits, g->vocab, most);
                const float score = above[i] + (last - most - sum);
                tokens[found] = named(g, at), parents[found] = newest[i], numbers[found] = -1, marks[found] = 0;
                scores[found] = score == score ? score : -__builtin_inff(); /* propose nothing if logits are NaN */
            }
        }
        if (level + 1 == g->depth) break;
        if (g->delta >= 0.0) {
            double now = 0.0;
            for (int i = 0; i < g->total; i++) {
                const int best = best_open(scores, marks, 0, found);
                if (best < 0) break;
                marks[best] = 1, now += __builtin_expf(scores[best]);
            }
            for (int i = 0; i < found; i++) marks[i] = 0;
            if (!(now - expected > g->delta)) break;
            expected = now;
        }
        int picked[LINE], count = 0;
        int32_t below[LINE];
        while (count < k && (picked[count] = best_open(scores, marks, begin, found)) >= 0) marks[picked[count++]] = 1;
        const int from = read;
        for (n = 0; n < count; n++) {
            const int c = picked[n];
            seen_from(g, read, below[n] = parents[c] < 0 ? 0 : numbers[parents[c]]);
            marks[c] = 0, numbers[c] = read, newest[n] = c, above[n] = scores[c];
            wanted[n] = tokens[c], positions[n] = root + level + 1, g->slots[n] = root + read++;
        }
        p->width = root + read;
        read_tokens(g, p, wanted, positions, below, n, n, from, g->mask + (size_t)from * g->stride);
    }
    int kept = 0, worth = 0;
    double so_far = 0.0, most = g->prices ? -g->prices[0] : 0.0;
    int32_t *order = g->order;
    while (kept < g->total) {
        const int best = best_open(scores, marks, 0, found);
        if (best < 0 || !(scores[best] >= g->least)) break;
        marks[best] = 1, order[kept++] = best, so_far += __builtin_expf(scores[best]);
        if (!g->prices)
            worth = kept;
        else if (so_far - g->prices[kept] > most)
            worth = kept, most = so_far - g->prices[kept];
    }
    for (; kept > worth; kept--) marks[order[kept - 1]] = 0, so_far -= __builtin_expf(scores[order[kept - 1]]);
    *expected_tokens = so_far;
    for (int i = 0, node = 0; i < found; i++)
        if (marks[i]) {
            marks[i] = ++node; /* its number in the tree; parents come first */
            out_tokens[node - 1] = tokens[i];
            out_parents[node - 1] = parents[i] < 0 ? 0 : marks[parents[i]];
            own[node - 1] = numbers[i];
        }
    *fed = read;
    return kept;
}

/* -- the largest ------------------------------------------------------------------------------------------------------- */

#define MOST 16 /* largest k */

typedef struct {
    const value *x;
    int64_t lines, width, stride;
    int k;
    int64_t *out;
    float *logs;
} Largest;

/* log(sum of e^x) over a line; `most` is its largest number */
static float log_total(const value *line, int64_t width, float most) {
    f32 sum = f32_zero();
    float rest = 0.0f;
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) sum = f32_add(sum, exponential(f32_sub(load(line + i), f32_of(most))));
    for (; i < width; i++) rest += f32_first(exponential(f32_of(number(line + i) - most)));
    return most + __builtin_logf(f32_sum(sum) + rest);
}

static void do_largest(Worker *w, const void *job) {
    const Largest *j = job;
    for (int l = first(w, j->lines); l >= 0; l = next(w)) {
        float best[MOST];
        int64_t at[MOST];
        const value *line = j->x + l * j->stride;
        largest_of(line, j->width, j->k, best, at);
        const float total = j->logs ? log_total(line, j->width, best[0]) : 0.0f;
        for (int i = 0; i < j->k; i++) best[i] -= total;
        if (!mine(w)) continue;
        __builtin_memcpy(j->out + l * j->k, at, j->k * sizeof(int64_t));
        if (j->logs) __builtin_memcpy(j->logs + l * j->k, best, j->k * sizeof(float));
    }
}

/* Indices of the k <= MOST largest of each of `lines` lines of `width` >= k values, largest first, the first of equal ones first, into out
 * [lines, k], and, unless `logs` is null, their logarithms of softmax into logs [lines, k]. Lines are `stride` values apart. A value that is
 * no larger than the k-th so far costs one comparison. */
void largest(const value *x, int64_t lines, int64_t width, int64_t stride, int k, int64_t *out, float *logs, int threads) {
    together(threads, do_largest, &(Largest){x, lines, width, stride, k, out, logs});
}

/* -- races ------------------------------------------------------------------------------------------------------------- */

#define CLEAR 4e-6f /* relative distance of two quotients above which their order does not depend on how the noise was rounded */
#define SMALLEST 1e-30f /* quotient that is surely not rounded more coarsely, as those near 1e-38 are */

typedef struct {
    const float *weights;
    const uint64_t *words;
    const int32_t *hashes;
    int64_t lines, width;
    int64_t *out;
} Race;

static void do_race(Worker *w, const void *job) {
    const Race *j = job;
    const f32 none = f32_of(-1.0f);
    for (int l = first(w, j->lines); l >= 0; l = next(w)) {
        const float *weights = j->weights + l * j->width;
        f32 best = none, beaten = none, sum = f32_zero();
        i32 which = i32_zero(), index = i32_count();
        for (int64_t x = 0; x < j->width; x += 16) {
            const lanes there = j->width - x >= 16 ? 0xffff : (1u << (j->width - x)) - 1;
            const f32 weight = f32_load_some(there, weights + x);
            const f32 ratio = f32_pick(there, none, f32_div(weight, noise(i32_load_some(there, j->hashes + x), j->words[l])));
            const lanes better = f32_less(best, ratio);
            beaten = f32_max(beaten, f32_pick(better, ratio, best));
            best = f32_pick(better, best, ratio);
            which = i32_pick(better, which, index);
            index = i32_add(index, i32_of(16));
            sum = f32_add(sum, weight);
        }
        const float most = f32_most(best);
        const lanes winner = f32_equal(best, f32_of(most));
        const float second = f32_most(f32_max(beaten, f32_pick(winner, best, none)));
        const int clear = !(winner & (winner - 1)) && most >= SMALLEST && second < most - CLEAR * most;
        const int sound = f32_sum(sum) < __builtin_inff(); /* not of NaN */
        if (mine(w)) j->out[l] = clear && sound ? i32_least_of(winner, which) : -1;
    }
}

/* The winners of `lines` races of `width` tokens, as `_computed` of noise.py has them, into out [lines]: the largest of weights [lines, width]
 * over noise, which follows from words [lines] and hashes [width]. -1 where two are so close that rounding decides, where all weights are
 * almost nothing, and where one is infinite or NaN. */
void race(const float *weights, const uint64_t *words, const int32_t *hashes, int64_t lines, int64_t width, int64_t *out, int threads) {
    together(threads, do_race, &(Race){weights, words, hashes, lines, width, out});
}
