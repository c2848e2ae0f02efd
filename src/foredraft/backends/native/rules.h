/* What verification computes over the whole vocabulary: races of keyed noise, and what the target's p has more than the draft's q. layer.c
 * includes this. */

#include <float.h>

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

/* -- p against q --------------------------------------------------------------------------------------------------------- */

/* The sum of [scale p - q]+ over `width` tokens, which go into `out` unless it is null; NaN if one is. */
static float excess(const float *p, const float *q, float scale, int64_t width, float *out) {
    f32 sum = f32_zero();
    for (int64_t x = 0; x < width; x += 16) {
        const lanes there = width - x >= 16 ? 0xffff : (1u << (width - x)) - 1;
        const f32 scaled = f32_mul(f32_load_some(there, p + x), f32_of(scale));
        const f32 more = f32_max(f32_zero(), f32_sub(scaled, f32_load_some(there, q + x))); /* x86 keeps NaN on the right */
        if (out) f32_store_some(out + x, there, more);
        sum = f32_add(sum, more);
    }
    return f32_sum(sum);
}

typedef struct {
    const float *p, *q;
    const int64_t *tokens, *drafted;
    int64_t rows, nodes, width, apart;
    float *survival, *chances;
} Blocks;

static void do_blocks(Worker *w, const void *job) {
    const Blocks *j = job;
    const int64_t most = j->nodes - 1;
    for (int l = first(w, j->rows * most); l >= 0; l = next(w)) {
        const int64_t row = l / most, node = l % most + 1, drafted = j->drafted[row];
        const float *p = j->p + row * j->nodes * j->width, *q = j->q + row * j->apart;
        float survival = 1.0f, chance = 0.0f;
        for (int64_t i = 0; i < node; i++) {
            const int64_t token = j->tokens[row * j->nodes + i + 1], x = i * j->width + token;
            const int both = 0 <= token && token < j->width && q[x] > 0.0f && p[x] > 0.0f; /* not where p is NaN */
            const float kept = both ? survival * (p[x] / (q[x] > FLT_MIN ? q[x] : FLT_MIN)) : 0.0f;
            survival = kept < 1.0f ? kept : 1.0f;
        }
        if (node == drafted) chance = survival;
        if (node < drafted) {
            const float Z = excess(p + node * j->width, q + node * j->width, survival, j->width, NULL);
            chance = Z > 0.0f ? Z / (Z + (1.0f - survival)) : 0.0f;
        }
        if (!mine(w)) continue;
        if (node == 1) j->survival[row * j->nodes] = 1.0f;
        j->survival[row * j->nodes + node] = survival;
        j->chances[row * most + node - 1] = chance;
    }
}

/* P_0 … into survival [rows, nodes] and h_1 … into chances [rows, nodes - 1], as block.py has them, 0 where a row `drafted` less: of chains of
 * `tokens` [rows, nodes], p [rows, nodes, width], and q of as many nodes but one, the rows of which are `apart` values apart. */
void blocks(
    const float *p, const float *q, const int64_t *tokens, const int64_t *drafted, int64_t rows, int64_t nodes, int64_t width, int64_t apart,
    float *survival, float *chances, int threads) {
    together(threads, do_blocks, &(Blocks){p, q, tokens, drafted, rows, nodes, width, apart, survival, chances});
}

/* The weights of the token after `accepted` [rows] nodes of such chains, into out [rows, width]: p after all that were `drafted`, else
 * [scale p - q]+, or p where that is nothing. */
void residuals(
    const float *p, const float *q, const float *scales, const int64_t *accepted, const int64_t *drafted, int64_t rows, int64_t nodes,
    int64_t width, int64_t apart, float *out) {
    for (int64_t row = 0; row < rows; row++, out += width) {
        const int64_t node = accepted[row];
        const float *own = p + (row * nodes + node) * width;
        const int whole = node >= drafted[row];
        if (whole || !(excess(own, q + row * apart + node * width, scales[row], width, out) > 0.0f))
            for (int64_t x = 0; x < width; x++) out[x] = own[x];
    }
}
