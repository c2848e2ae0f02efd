/* Draft trees that are grown in one call, and the largest logits of a line; layer.c includes this. */

#include <stdlib.h>

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

/* How tokens are sampled: token i of a chain, or those at depth i of a tree, from line i of q, which is softmax(logits / temperature) truncated
 * by top_k, top_p and min_p. The noise of token x follows from hashes[x] and words[i]. */
typedef struct {
    const uint64_t *words;
    const int32_t *hashes; /* [columns] */
    float *q;               /* [.., columns], 0 where the draft has no such token */
    int64_t apart;          /* values from a line of q to the next; 0 where nobody reads them */
    int64_t columns, top_k; /* top_k 0: all */
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
    if (!d->top_k) return least;
    float best[KEPT];
    int64_t at[KEPT];
    int kept = d->top_k < vocab ? d->top_k : vocab;
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

#define NOTHING -80.0f /* e to the power of less is 0; `exponential` has a smallest number there */

/* The first k of the race for token i among the `vocab` tokens of the draft, the winner first, into `at`. Returns how many of them have a
 * probability: 0 if a logit is NaN. The distribution goes into q. */
static int racing(const Draws *d, int i, const value *logits, int vocab, float *q, int k, int64_t *at) {
    float largest, best[LINE];
    following(logits, vocab, __builtin_inff(), -1, &largest);
    const f32 least = f32_of(least_kept(d, logits, vocab, largest));
    const f32 most = f32_of(largest), temperature = f32_of(d->temperature);
    f32 sum = f32_zero();
    lanes numbers = 0xffff;
    for (int x = 0; x < vocab; x += 16) {
        const lanes there = vocab - x >= 16 ? 0xffff : (1u << (vocab - x)) - 1;
        const f32 logit = load(logits + x), power = f32_div(f32_sub(logit, most), temperature);
        const lanes kept = there & f32_least(logit, least);
        const f32 e = f32_keep(kept & f32_less(f32_of(NOTHING), power), exponential(power));
        f32_store_some(q + x, there, e);
        sum = f32_add(sum, e);
        numbers &= f32_equal(logit, logit) | ~there;
    }
    const f32 whole = f32_of((numbers & 0xffff) == 0xffff ? f32_sum(sum) : __builtin_nanf(""));
    int count = 0;
    for (int x = 0; x < vocab; x += 16) {
        const lanes there = vocab - x >= 16 ? 0xffff : (1u << (vocab - x)) - 1;
        const f32 p = f32_div(f32_load_some(there, q + x), whole);
        f32_store_some(q + x, there, p);
        const f32 ratio = f32_div(p, noise(i32_load_some(there, d->hashes + x), d->words[i]));
        lanes better = there & f32_less(f32_of(count < k ? 0.0f : best[k - 1]), ratio);
        if (!better) continue;
        float all[16];
        f32_store(all, ratio);
        for (; better; better &= better - 1) {
            const int lane = __builtin_ctz(better);
            if (count < k || all[lane] > best[k - 1]) count = put(best, at, count, k, all[lane], x + lane);
        }
    }
    __builtin_memset(q + vocab, 0, (d->columns - vocab) * sizeof(float));
    return count;
}

/* How likely the target's race ends with the token that is number j in the draft's and has probability q there; `chances_of_leaders` of growth.py */
INLINE float chance_of_leader(int j, float q) { return j ? 0.05f + 0.5f * q : 0.25f + 0.75f * q; }

/* Draw token i of a chain; 0 if a logit is NaN, and then q is NaN as well */
static int drawn(const Draws *d, int i, const value *logits, int vocab, float *q) {
    int64_t at;
    return racing(d, i, logits, vocab, q, 1, &at) ? at : 0;
}

typedef struct {
    const Draws *rows;
    int count, i, vocab;
    const value *logits;
    int64_t apart, *tokens;
} Drawing;

static void do_draw(Worker *w, const void *job) {
    const Drawing *j = job;
    const int64_t columns = j->rows->columns;
    float *own = malloc(columns * sizeof(float));
    for (int row = first(w, j->count); row >= 0; row = next(w)) {
        const Draws *d = j->rows + row;
        const int token = drawn(d, j->i, j->logits + row * j->apart, j->vocab, own);
        if (mine(w)) j->tokens[row] = token, __builtin_memcpy(d->q + j->i * d->apart, own, columns * sizeof(float));
    }
    free(own);
}

/* Draw token i of the chains of `count` rows, from logits that are `apart` values apart, into `tokens` */
void draw(const Draws *rows, int count, int i, const value *logits, int64_t apart, int vocab, int64_t *tokens, int threads) {
    together(threads, do_draw, &(Drawing){rows, count, i, vocab, logits, apart, tokens});
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

/* Scale and cap n lines of logits, as the model does */
static void finish(const Growth *g, int n) {
    if (!g->logit_scale && !g->logit_cap) return;
    for (int64_t i = 0; i < n * g->columns; i += 16) {
        f32 logit = load(g->logits + i);
        if (g->logit_scale) logit = rounded(f32_mul(logit, f32_of(g->logit_scale)));
        if (g->logit_cap) logit = f32_mul(rounded(capped(rounded(f32_div(logit, f32_of(g->logit_cap))), 1.0f)), f32_of(g->logit_cap));
        store(g->logits + i, logit);
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
    finish(g, n);
}

/* The target's id of the draft's token `at` */
INLINE int64_t named(const Growth *g, int at) { return g->eagle && g->eagle->ids ? g->eagle->ids[at] : at; }

/* The first pass: the last `missed` tokens of the text, the last of which is the root */
static void read_text(const Growth *g, Pass *p, const int64_t *text) {
    int64_t positions[LINE];
    if (g->medusa) g->medusa->level = 0;
    p->rows = 1, p->mask_row_stride = 0, p->mask_stride = g->stride;
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
 * root. Every node above the last level is read. Returns how many were, including the root. The children of a node are the likeliest tokens, or
 * with `draws`, which may be null, those that lead the race at their depth; -1 where no more tokens have a probability, and below that. */
int fill(const Growth *g, Pass *p, const int64_t *text, const int32_t *parents, const int32_t *ranks, int count, int64_t *out_tokens,
         const Draws *draws) {
    const int root = g->start + g->missed - 1;
    int64_t positions[LINE], wanted[LINE];
    int first = 0, n = 1, read = 1, node = 1, level = 0; /* the level above has n nodes from number `first` on */
    read_text(g, p, text);
    while (node <= count) {
        const int begin = node;
        for (int i = 0; i < n; i++) {
            const value *logits = g->logits + (size_t)i * g->columns;
            float last = __builtin_inff();
            int64_t leading[LINE];
            int end = node, some = 0;
            while (end <= count && parents[end - 1] == first + i) end++;
            if (draws && end > node && (draws->apart || first == 0 || out_tokens[first + i - 1] >= 0))
                some = racing(draws, level, logits, g->vocab, draws->q + level * draws->apart, 1 + ranks[end - 2], leading);
            for (int at = -1, rank = 0; node < end; node++) {
                for (; !draws && rank <= ranks[node - 1]; rank++) at = following(logits, g->vocab, last, at, &last);
                if (draws) at = ranks[node - 1] < some ? leading[ranks[node - 1]] : -1;
                out_tokens[node - 1] = at < 0 ? -1 : named(g, at);
            }
        }
        if (node == begin || node > count) break;
        first = begin, n = node - begin, level++;
        for (int i = 0; i < n; i++) {
            seen_from(g, begin + i, parents[begin + i - 1]);
            positions[i] = root + level, g->slots[i] = root + begin + i;
            wanted[i] = out_tokens[begin + i - 1] < 0 ? 0 : out_tokens[begin + i - 1];
        }
        read = node, p->width = root + read;
        read_tokens(g, p, wanted, positions, parents + begin - 1, n, n, begin, g->mask + (size_t)begin * g->stride);
    }
    return read;
}

/* Plain decoding: read the one token of the text that is missing, and then each token that is likeliest, or with `draws`, which may be null, drawn:
 * `most` at most and none behind one of `ends`. out_tokens has these tokens. `logits` [most, columns] is what they were chosen from before it was
 * scaled and capped. Returns how many there are. */
int decode(const Growth *g, Pass *p, const int64_t *text, int most, const int64_t *ends, int count, value *logits, int64_t *out_tokens,
           const Draws *draws) {
    Growth now = *g;
    now.logits = logits, now.logit_scale = now.logit_cap = 0.0;
    for (int n = 0;;) {
        float best;
        const value *last = now.logits;
        read_text(&now, p, n ? out_tokens + n - 1 : text);
        if (g->logit_scale || g->logit_cap) {
            __builtin_memcpy(g->logits, last, g->columns * sizeof(value));
            finish(g, 1), last = g->logits;
        }
        const int64_t token = draws ? drawn(draws, n, last, g->vocab, draws->q) : following(last, g->vocab, __builtin_inff(), -1, &best);
        out_tokens[n++] = token;
        for (int i = 0; i < count; i++)
            if (ends[i] == token) return n;
        if (n == most) return n;
        now.start++, now.logits += now.columns;
    }
}

/* Grow a dynamic tree for one row: read the `missed` tokens, the last of which is the root, and then level by level the k best nodes of each. The
 * children of a node are the likeliest tokens, or with `draws`, which may be null, those that lead the race at their depth.
 * out_tokens, out_parents and own [total] describe the proposed nodes, numbered from 1, below the root, which is 0; own[i] is the number under
 * which a node was read, in slot root + own[i], or -1. Returns how many nodes are proposed. `fed` is how many were read, including the root, and
 * `expected_tokens` the sum of the probabilities of the proposed ones. */
int grow(const Growth *g, Pass *p, const int64_t *text, int64_t *out_tokens, int64_t *out_parents, int64_t *own, int64_t *fed, double *expected_tokens,
         const Draws *draws) {
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
            int64_t leading[LINE];
            const int some = draws ? racing(draws, level, logits, g->vocab, draws->q, k, leading) : k;
            for (int j = 0, at = -1; j < some; j++, found++) {
                at = draws ? leading[j] : following(logits, g->vocab, last, at, &last);
                if (j == 0) most = last, sum = draws ? 0.0f : log_sum(logits, g->vocab, most);
                const float score = above[i] + (draws ? __builtin_logf(chance_of_leader(j, draws->q[at])) : last - most - sum);
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
        if (!n) break; /* nothing leads a race */
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
