/* Decoder layers of language models, T5, BART and Whisper for a few tokens at a time, on CPUs with AVX-512, AVX2 or NEON.
 *
 * A pass over a few tokens is bound by the bandwidth at which weights can be read. Matrices are packed so that every read is a whole cache
 * line, which serves all tokens while it is in a register. crew.h has the threads, products.h the products, tiles.h those of AMX, attention.h
 * attention, growth.h draft trees that are grown in one call, and rules.h what verification computes over the vocabulary. Sums are in float32;
 * results are rounded to the model's dtype where torch rounds them.
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
/* Register blocking: the sums of TOGETHER(n) blocks for n tokens fit into registers, and those of ASIDE blocks for WIDE tokens. In bfloat16
 * without instructions for it, and without AVX-512, there is halved_tile() instead. */
#ifdef __AVX512F__
#define TOGETHER(n) BLOCKS
#define ASIDE (BLOCKS / 2)
#define WIDE 12
#define FEW(kind) ((kind) == EIGHTS ? 3 : TOKENS) /* up to so many tokens, the hardware prefetches weights well enough by itself */
#ifdef BF16
#define WIDEST(kind) WIDE
#else
#define WIDEST(kind) ((kind) == EIGHTS ? 8 : WIDE) /* weights take registers while they are widened */
#endif
#else
#define TOGETHER(n) ((n) == 1 ? BLOCKS : (n) <= 3 ? 2 : 1)
#define ASIDE 1
#define WIDE 6
#define FEW(kind) 3
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
#define INTO_L2 2 /* as a prefetch's locality: what a kernel reads next would not fit into the L1 cache beside what it reads now */
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
#define QUERIES 256 /* queries per pass over the keys, */
#define FEWER 64 /* or down to so many, if threads would have too little to share */
#define KEY_SEGMENT 1024 /* positions in a partial sum of attention, from a multiple of it on; partial sums are merged in order */
#define PIECES 4 /* chunks per thread from which attention need not be divided by segments as well */
#define BATCH 4 /* blocks of KEYS keys whose values are added at once for many queries, in tiles */
#define RISE 8.0f /* how much larger a score must be for sums of attention to become relative to it */
#define SUMS(size) ((size) + 16) /* sums of a query: of values, and of probabilities, so that all change together */
#define SCRATCH(size) (QUERIES * KEYS + ((BATCH + 1) * KEYS + 3 * QUERIES) * (size) + 34 * QUERIES) /* floats that a thread needs for attention */
#define KEPT 128 /* largest top_k */
#define PATH 4 /* tokens of the longest context that Medusa looks up in its text */
#define MATCHES 32 /* the latest matches of each length that count */

/* e^x, relative error below 2e-7 for x <= RISE */
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

/* e^x for x <= RISE, rounded to the model's dtype: in bfloat16, relative error below 3e-6 before it is rounded to 8 bits */
INLINE f32 rounded_exponential(f32 x) {
#ifdef BF16
    const f32 power = f32_mul(f32_max(x, f32_of(-126.0f * 0.69314718f)), f32_of(1.44269504f)), n = f32_nearest(power), r = f32_sub(power, n);
    f32 p = f32_of(9.582853e-3f);
    p = f32_fma(p, r, f32_of(5.5906426e-2f));
    p = f32_fma(p, r, f32_of(2.4024099e-1f));
    p = f32_fma(p, r, f32_of(6.931242e-1f));
    p = f32_power_of_two(f32_fma(p, r, f32_of(1.0f)), n);
    const f32 more = f32_mul(p, f32_of(65537.0f)); /* Veltkamp's splitting */
    return f32_sub(more, f32_sub(more, p));
#else
    return exponential(x);
#endif
}

#include "products.h"

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

#include "attention.h"

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

/* A phase: thin [T, I] = act(gate) * up, where gate and up are the first I outputs and the last I of x [T, K] W^T. Neither is written to memory, as
 * product() would. */
static void gated_product(Worker *w, const Matrix *m, const value *x, value *thin, int T, int K, int I, int activation) {
    enum { WIDTH = BLOCKS * 16 };
    const int most = rows_at_once(m, K), parts = (T + most - 1) / most, tiles = I / WIDTH, rows = T < most ? T : most;
    entry room[GAP ? ENTRIES(rows, K) : 1];
    const entry *read = 0;
    for (int i = first_in_range(w, tiles * parts), tokens = 0; i >= 0; i = next(w)) {
        const int o = (GAP ? i % tiles : i / parts) * WIDTH, from = (GAP ? i / tiles : i % parts) * most;
        const int n = T - from < most ? T - from : most;
        value gate[WHOLE * WIDTH], up[WHOLE * WIDTH], *to = thin + (size_t)from * I + o;
        for (int t = 0; t < n; t++)
            for (int b = 0; b < WIDTH; b += LINE / (int)sizeof(value)) __builtin_prefetch(to + (size_t)t * I + b, 1);
        if (!read || from != tokens) read = entries(x + (size_t)from * K, n, K, room);
        outputs(m, o, read, gate, n, K, weights_of(m, I + o, K));
        outputs(m, I + o, read, up, n, K, o + WIDTH < I ? weights_of(m, o + WIDTH, K) : 0);
        tokens = from;
        gated(gate, up, gate, n * WIDTH, activation);
        for (int t = 0; mine(w) && t < n; t++) copied(gate + t * WIDTH, to + (size_t)t * I, WIDTH);
    }
}

/* p->thin [T, inner] = what the MLP's activation makes of its first products, for x [T, hidden] */
static void widened(Worker *w, const Layer *l, const Pass *p, const value *x) {
    const int T = p->tokens, H = l->hidden, I = l->inner, alone = l->activation & ALONE;
    if (!alone && !in_groups(&l->gate_up) && I % (BLOCKS * 16) == 0) {
        gated_product(w, &l->gate_up, x, p->thin, T, H, I, l->activation);
        return;
    }
    product(w, &l->gate_up, x, p->wide, T, H, alone ? I : 2 * I, 0);
    gates(w, p->wide, p->thin, T, I, l->activation);
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
    route(w, e, &r, T, 0, 0, p->touched);
    if (e->shared) {
        widened(w, l, p, inputs);
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
    if (l->latent && parts & ATTENTION) {
        latent_attention(w, l, p, mask, x, keys, values);
        parts &= ~ATTENTION;
    }
    if (parts & ATTENTION) product(w, &l->qkv, inputs ? inputs : entered(w, l, p, l->before, x), p->projected, T, inputs ? K : H, all, 0);
    if (l->parallel && parts & MLP) {
        const value *read = parts & ATTENTION && !l->after.weight ? p->states : entered(w, l, p, l->after.weight ? l->after : l->before, x);
        widened(w, l, p, read);
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
    if (!l->parallel) widened(w, l, p, entered(w, l, p, l->after, x));
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

/* Copy keys and values [rows, heads, nodes, size], each with its strides (from row to row, head to head, node to node), into their tokens' slots of
 * a cache in pages */
void write_over(const Pass *p, int heads, int size, const value *keys, int64_t key_row, int64_t key_head, int64_t key_node, value *to_keys,
                const value *values, int64_t value_row, int64_t value_head, int64_t value_node, value *to_values) {
    for (int t = 0; t < p->tokens; t++) {
        const int row = p->row_of[t], node = t - p->begins[row], slot = p->slots[t] % KEYS;
        if (spared(p, row, p->slots[t])) continue;
        for (int h = 0; h < heads; h++) {
            const size_t place = block(p, p->table, p->row_stride, p->head_stride, row, h, p->slots[t] - slot, size) + (size_t)slot * size;
            __builtin_memcpy(to_keys + place, keys + row * key_row + h * key_head + node * key_node, size * sizeof(value));
            __builtin_memcpy(to_values + place, values + row * value_row + h * value_head + node * value_node, size * sizeof(value));
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

#include "growth.h"
#include "rules.h"

/* The instructions that the compiler was allowed to use, as far as the bits of results may depend on them */
const char *instructions(void) {
    return
#if defined(__aarch64__)
        "neon"
#elif defined(__AVX512F__)
        "avx512"
#else
        "avx2"
#endif
#ifdef IN_BYTES
        " bytes"
#endif
#ifdef DOTS
        " dots"
#endif
#ifdef TILED
        " tiles"
#endif
        ;
}
