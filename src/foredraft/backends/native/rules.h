/* What verification computes over the whole vocabulary: the likeliest token, races of keyed noise, and what the target's p has more than the
 * draft's q. layer.c includes this. */

#include <float.h>

/* -- greedy choices ------------------------------------------------------------------------------------------------------ */

typedef struct {
    const value *scores;
    const int64_t *places;
    int64_t lines, width, *out;
} Choices;

/* Index of the first largest of `width` numbers; -1 if that is not finite or if one is NaN */
static int64_t choice(const value *x, int64_t width) {
    float best = -__builtin_inff();
    int64_t found = -1;
    for (int64_t i = 0; i < width; i += 64) {
        uint64_t others = 0; /* those that are neither less nor equal */
        for (int64_t b = 0; b < 64 && i + b + 16 <= width; b += 16) {
            const f32 v = load(x + i + b);
            others |= (uint64_t)(0xffff & ~(f32_less(v, f32_of(best)) | f32_equal(v, f32_of(best)))) << b;
        }
        for (int64_t j = i > width - 64 ? width / 16 * 16 : width; j < width; j++) others |= 1ull << (j - i);
        for (; others; others &= others - 1) {
            const int64_t at = i + __builtin_ctzll(others);
            const float one = number(x + at);
            if (one != one) return -1;
            if (one > best) best = one, found = at;
        }
    }
    return best < __builtin_inff() ? found : -1;
}

static void do_choose(Worker *w, const void *job) {
    const Choices *j = job;
    for (int l = first(w, j->lines); l >= 0; l = next(w)) {
        const int64_t found = choice(j->scores + j->places[l], j->width);
        if (mine(w)) j->out[l] = found;
    }
}

/* What `choice` finds in each of `lines` lines, which begin at scores + places[..], into out [lines] */
void choose_all(const value *scores, const int64_t *places, int64_t lines, int64_t width, int64_t *out, int threads) {
    together(threads, do_choose, &(Choices){scores, places, lines, width, out});
}

/* -- races ------------------------------------------------------------------------------------------------------------- */

#define CLEAR 4e-6f /* relative distance of two quotients above which their order does not depend on how the noise was rounded */
#define SMALLEST 1e-30f /* quotient that is surely not rounded more coarsely, as those near 1e-38 are */

/* [scale p - q]+; NaN if one is */
INLINE f32 more(f32 p, f32 q, float scale) {
    return f32_max(f32_zero(), f32_sub(f32_mul(p, f32_of(scale)), q)); /* x86 keeps NaN on the right */
}

/* The winner among `width` tokens of a race of weights over the noise of `word` and `hashes`. Weights are p, or [scale p - q]+ unless q is null.
 * -1 where two are so close that rounding decides, where all weights are almost nothing, and where one is infinite or NaN. `sum`: of the weights. */
INLINE int64_t winner(const float *p, const float *q, float scale, uint64_t word, const int32_t *hashes, int64_t width, float *sum) {
    const f32 none = f32_of(-1.0f);
    f32 best = none, beaten = none, sums = f32_zero();
    i32 which = i32_zero(), index = i32_count();
    for (int64_t x = 0; x < width; x += 16) {
        const lanes there = width - x >= 16 ? 0xffff : (1u << (width - x)) - 1;
        f32 weight = f32_load_some(there, p + x);
        if (q) weight = more(weight, f32_load_some(there, q + x), scale);
        const f32 ratio = f32_pick(there, none, f32_div(weight, noise(i32_load_some(there, hashes + x), word)));
        const lanes better = f32_less(best, ratio);
        beaten = f32_max(beaten, f32_pick(better, ratio, best));
        best = f32_pick(better, best, ratio);
        which = i32_pick(better, which, index);
        index = i32_add(index, i32_of(16));
        sums = f32_add(sums, weight);
    }
    const float most = f32_most(best);
    const lanes first = f32_equal(best, f32_of(most));
    const float second = f32_most(f32_max(beaten, f32_pick(first, best, none)));
    const int clear = !(first & (first - 1)) && most >= SMALLEST && second < most - CLEAR * most;
    *sum = f32_sum(sums);
    return clear && *sum < __builtin_inff() /* not of NaN */ ? i32_least_of(first, which) : -1;
}

typedef struct {
    const float *weights;
    const uint64_t *words;
    const int32_t *hashes;
    int64_t lines, width;
    int64_t *out;
} Race;

static void do_race(Worker *w, const void *job) {
    const Race *j = job;
    for (int l = first(w, j->lines); l >= 0; l = next(w)) {
        float sum;
        const int64_t found = winner(j->weights + l * j->width, NULL, 1.0f, j->words[l], j->hashes, j->width, &sum);
        if (mine(w)) j->out[l] = found;
    }
}

/* The winners of `lines` races of `width` tokens, as `_computed` of noise.py has them, into out [lines], or -1 where `winner` does not tell: of
 * weights [lines, width] over noise, which follows from words [lines] and hashes [width]. */
void race(const float *weights, const uint64_t *words, const int32_t *hashes, int64_t lines, int64_t width, int64_t *out, int threads) {
    together(threads, do_race, &(Race){weights, words, hashes, lines, width, out});
}

/* -- chains ---------------------------------------------------------------------------------------------------------------- */

#define GOLDEN 0x9E3779B97F4A7C15u
#define ACCEPT 3
#define RESIDUAL 4

INLINE uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* `Noise.words` of noise.py, at a row's root */
INLINE uint64_t word_of(int64_t key, int64_t position, uint64_t purpose, uint64_t node) {
    return mixed(mixed(key + position * GOLDEN) + purpose * 0xD1B54A32D192ED03u + node * 0xABC98388FB8FAC03u);
}

/* `Noise._uniforms` */
INLINE float uniform(uint64_t word) {
    const float unit = ((float)(int32_t)(word & 0x7FFFFFFF) + 0.5f) * 0x1p-31f;
    return unit < 1.0f - 0x1p-24f ? unit : 1.0f - 0x1p-24f;
}

typedef struct {
    const float *p, *q;
    const int64_t *tokens, *drafted, *keys, *positions;
    const int32_t *hashes;
    int64_t rows, nodes, width, apart; /* the rows of q are `apart` values apart */
    int64_t blocks;                    /* or token by token */
    float *survival, *chances;         /* [rows, nodes - 1] P_1 … and h_1 … of block.py; token by token min(1, p / q), twice */
    int64_t *wrong;                    /* [rows, nodes - 1] whether q is no distribution where the next node was drafted from it */
    int64_t *accepted, *chosen;        /* [rows]; the token that follows, or -1 where `winner` does not tell */
} Chains;

/* p(x) / q(x) of the token that `node` of a row drafted; 0 where either is none, or NaN */
INLINE float quotient(const Chains *j, int64_t row, int64_t node) {
    const int64_t token = j->tokens[row * j->nodes + node + 1];
    if (token < 0 || token >= j->width) return 0.0f;
    const float p = j->p[(row * j->nodes + node) * j->width + token], q = j->q[row * j->apart + node * j->width + token];
    return q > 0.0f && p > 0.0f ? p / (q > FLT_MIN ? q : FLT_MIN) : 0.0f;
}

/* The sum of [scale p - q]+; NaN if one is */
static float excess(const float *p, const float *q, float scale, int64_t width) {
    f32 sum = f32_zero();
    for (int64_t x = 0; x < width; x += 16) {
        const lanes there = width - x >= 16 ? 0xffff : (1u << (width - x)) - 1;
        sum = f32_add(sum, more(f32_load_some(there, p + x), f32_load_some(there, q + x), scale));
    }
    return f32_sum(sum);
}

/* Whether q is a distribution, as `TokenTree.wrong_q` asks */
static int sound(const float *q, int64_t width) {
    f32 sum = f32_zero(), most = f32_zero();
    for (int64_t x = 0; x < width; x += 16) {
        const lanes there = width - x >= 16 ? 0xffff : (1u << (width - x)) - 1;
        const f32 value = f32_load_some(there, q + x);
        sum = f32_add(sum, value), most = f32_max(most, f32_sub(f32_zero(), value));
    }
    const float all = f32_sum(sum);
    return all >= 1.0f - 1e-3f && all <= 1.0f + 1e-3f && !(f32_most(most) > 0.0f);
}

static void do_chains(Worker *w, const void *job) {
    const Chains *j = job;
    const int64_t most = j->nodes - 1, width = j->width;
    for (int l = first(w, j->rows * most); l >= 0; l = next(w)) {
        const int64_t row = l / most, node = l % most + 1, drafted = j->drafted[row];
        const float *p = j->p + (row * j->nodes + node) * width, *q = j->q + row * j->apart + node * width;
        float survival = 1.0f, chance = 0.0f;
        for (int64_t i = j->blocks ? 0 : node - 1; i < node; i++) {
            survival *= quotient(j, row, i);
            survival = survival < 1.0f ? survival : 1.0f;
        }
        if (node == drafted || !j->blocks) {
            chance = node <= drafted ? survival : 0.0f;
        } else if (node < drafted) {
            const float Z = excess(p, q, survival, width);
            chance = Z > 0.0f ? Z / (Z + (1.0f - survival)) : 0.0f;
        }
        const int wrong = node <= drafted && !sound(q - width, width);
        if (mine(w)) j->survival[l] = survival, j->chances[l] = chance, j->wrong[l] = wrong;
    }
    for (int row = first(w, j->rows); row >= 0; row = next(w)) {
        int64_t accepted = 0;
        for (int64_t i = 0; i < most && (j->blocks || accepted == i); i++)
            if (uniform(word_of(j->keys[row], j->positions[row], ACCEPT, i)) < j->chances[row * most + i]) accepted = i + 1;
        const float scale = j->blocks && accepted ? j->survival[row * most + accepted - 1] : 1.0f;
        const float *p = j->p + (row * j->nodes + accepted) * width, *q = j->q + row * j->apart + accepted * width;
        const uint64_t word = word_of(j->keys[row], j->positions[row], RESIDUAL, 0);
        float sum = 0.0f;
        int64_t chosen = 0;
        if (accepted < j->drafted[row]) chosen = winner(p, q, scale, word, j->hashes, width, &sum);
        if (!(sum > 0.0f)) chosen = winner(p, NULL, 1.0f, word, j->hashes, width, &sum);
        if (mine(w)) j->accepted[row] = accepted, j->chosen[row] = chosen;
    }
}

/* Verdicts on chains of `tokens` [rows, nodes], p [rows, nodes, width] and q of as many nodes but one, judged by `blocks` as block.py has it, or
 * token by token as rejection.py has it. */
void chains(const Chains *job, int threads) { together(threads, do_chains, job); }
