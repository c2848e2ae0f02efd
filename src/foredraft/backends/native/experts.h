/* Mixtures of experts: a router chooses for each token some of the experts, each of which is an MLP.
 *
 * Tokens are grouped by expert, so a pass reads the weights of a chosen expert once, and those of the others not at all. Each sum is made for
 * one token, in an order that does not depend on other tokens: its bits are the same whoever shares its experts.
 *
 * `gate_up` is one matrix with the outputs of all experts, for each [inner / 64][64 outputs of the gate, 64 of `up`]; `down` is one matrix
 * with `hidden` outputs for each. inner is padded to 64 with zeros. Inputs of group-quantized weights are prepared once for all outputs of
 * an expert.
 */
#define MOST_EXPERTS 1024
#define MOST_CHOSEN 32
#define TILE (BLOCKS * 16)
#define OF_ALL 0 /* softmax over all experts, then the largest are chosen */
#define OF_CHOSEN 1 /* the largest logits are chosen, then softmax over these */
#define OF_EACH 2 /* sigmoid of each logit, then the largest are chosen */
#define CLAMPED 16 /* activation of gpt_oss: (up + 1) gate sigmoid(alpha gate), with up and gate clamped to the limit */
#define UNGATED 1 /* a shared expert is added as it is, or (GATED) times a sigmoid, whose input is one more output of the router */
#define GATED 2

typedef struct Experts {
    int64_t count, chosen, inner;
    Matrix router;                           /* `count` outputs, one more for a gated shared expert; values may be null */
    Matrix gate_up, down;                    /* without biases; `down` reads `width` inputs: inner, or fewer if it is group-quantized */
    int64_t width;
    const value *gate_up_bias, *down_bias;   /* [count, 2 inner] in the order of the weights, [count, hidden]; or null */
    int64_t routing, normed;                 /* OF_ALL, OF_CHOSEN or OF_EACH; whether the chosen scores are divided by their sum */
    int64_t exact, by_number;                /* scores stay in float32; outputs are added in the order of the experts, each sum rounded */
    int64_t activation, shared;              /* `shared`: 0 (none), UNGATED or GATED */
    double alpha, limit;
    const float *router32;                   /* [outputs / 16][hidden][16] a float32 router; null: `router` is used */
    const float *correction;                 /* [count] added to scores for the choice only, not for the sum; or null */
    int64_t groups, open;                    /* groups of consecutive experts; only the `open` ones whose best two sum to most are chosen from; */
    int64_t by_best;                         /* or those whose best one is largest */
    int64_t unsorted;                        /* the chosen experts are in the order of torch.topk(sorted=False) */
    double least, factor;                    /* lower bound of the sum that scores are divided by; what they are multiplied by in the end */
} Experts;

/* How the scratch memory of a pass is divided. A place is a row number when the tokens of each expert are together. */
typedef struct {
    int32_t *active, *experts, *begins; /* number of experts in use; these, those with most tokens first; [count + 1] the first place of each */
    int32_t *tokens, *places;           /* [T * chosen] the token in each place; the places of each token, in the order of its sum */
    float *scores;                      /* [T * chosen] in the order of `places` */
    value *logits, *inputs, *thin;      /* [T, outputs of the router], [T * chosen, hidden], [T * chosen, inner] */
    float *logits32;                    /* [T, outputs of the router], of `router32` */
    value *shared, *own;                /* [T, hidden]; [threads][T * (chosen + 1), TILE] */
    given *ready;                       /* inputs prepared for group-quantized weights, by place; */
    Part *parts;                        /* their parts; those of a crowd begin at its first place */
    uint8_t *twice;
    size_t bytes;
} Routed;

INLINE int routes(const Experts *e) { return (e->count + (e->shared == GATED) + TILE - 1) / TILE * TILE; }

static Routed divided(const Experts *e, int T, int H, int threads, char *memory) {
    const size_t n = (size_t)T * e->chosen, numbers = n * sizeof(int32_t), own = (size_t)threads * (n + T) * TILE;
    const int most = H > e->width ? H : e->width, inputs = in_groups(&e->gate_up) || in_groups(&e->down) ? most : 0;
    const size_t sizes[] = {sizeof(int32_t), e->count * sizeof(int32_t), (e->count + 1) * sizeof(int32_t), numbers, numbers, numbers,
                            T * routes(e) * sizeof(value), n * H * sizeof(value), n * e->inner * sizeof(value),
                            (e->router32 ? T * routes(e) : 0) * sizeof(float), (e->shared ? T * (size_t)H : 0) * sizeof(value),
                            own * sizeof(value), n * ROUNDS * segments(inputs) * sizeof(given), n * 2 * (inputs / 16) * sizeof(Part),
                            n * (inputs / 16)};
    char *parts[15];
    size_t at = 0;
    for (int i = 0; i < 15; i++) parts[i] = memory + at, at += (sizes[i] + LINE - 1) / LINE * LINE;
    return (Routed){(void *)parts[0], (void *)parts[1], (void *)parts[2], (void *)parts[3], (void *)parts[4], (void *)parts[5],
                    (void *)parts[6], (void *)parts[7], (void *)parts[8], (void *)parts[9], (void *)parts[10], (void *)parts[11],
                    (void *)parts[12], (void *)parts[13], (void *)parts[14], at};
}

/* Bytes of scratch memory for a pass over T tokens */
int64_t experts_room(const Experts *e, int T, int H, int threads) { return divided(e, T, H, threads, 0).bytes; }

INLINE value *own_tiles(const Worker *w, const Experts *e, const Routed *r, int T) {
    return r->own + (size_t)w->number * T * (e->chosen + 1) * TILE;
}

/* -- the router -------------------------------------------------------------------------------------------------------- */

/* 16 outputs of a float32 router for n inputs [n, H]; y points to the first of them and has rows of `columns` */
INLINE void tile32(const float *weights, const value *x, float *y, int H, int columns, int n) {
    f32 sums[TOKENS][2];
    for (int t = 0; t < n; t++) sums[t][0] = sums[t][1] = f32_zero();
    for (int k = 0; k < H; k += 2)
        for (int odd = 0; odd < 2; odd++) {
            const f32 w_k = f32_load(weights + (size_t)(k + odd) * 16);
            for (int t = 0; t < n; t++) sums[t][odd] = f32_fma(w_k, f32_of(number(x + (size_t)t * H + k + odd)), sums[t][odd]);
        }
    for (int t = 0; t < n; t++) f32_store(y + (size_t)t * columns, f32_add(sums[t][0], sums[t][1]));
}

/* A phase: the logits of x [T, H] by `router32` */
static void logits32(Worker *w, const Experts *e, const Routed *r, const value *x, int T, int H) {
    const int columns = routes(e), parts = (T + TOKENS - 1) / TOKENS;
    for (int i = first(w, columns / 16 * parts); i >= 0; i = next(w)) {
        const int o = i / parts * 16, begin = i % parts * TOKENS, n = T - begin < TOKENS ? T - begin : TOKENS;
        float out[TOKENS * 16];
        FOR_KNOWN(n, tile32(e->router32 + (size_t)o * H, x + (size_t)begin * H, out, H, 16, COUNT))
        for (int t = 0; mine(w) && t < n; t++) f32_store(r->logits32 + (size_t)(begin + t) * columns + o, f32_load(out + t * 16));
    }
}

typedef struct {
    float score;
    int32_t expert;
} Choice;

INLINE int before(Choice a, Choice b) { return (a.score != a.score && b.score == b.score) || a.score > b.score; }

INLINE void swap(Choice *a, Choice *b) {
    const Choice kept = *a;
    *a = *b, *b = kept;
}

static void sorted(Choice *all, int count) {
    for (int i = 1; i < count; i++) {
        const Choice one = all[i];
        int j = i;
        for (; j > 0 && before(one, all[j - 1]); j--) all[j] = all[j - 1];
        all[j] = one;
    }
}

/* Move the k largest to the front, largest first unless `unsorted`. Ties are in the order of torch.topk: if k is more than a 64th of all,
 * that is nth_element of the C++ library over all, and sort over the first k - 1. */
static void largest_first(Choice *all, int count, int k, int unsorted) {
    int low = 0, high = count;
    while (high - low > 3) {
        Choice *first = all + low, *a = first + 1, *b = first + (high - low) / 2, *c = all + high - 1, *middle;
        if (before(*a, *b))
            middle = before(*b, *c) ? b : before(*a, *c) ? c : a;
        else
            middle = before(*a, *c) ? a : before(*b, *c) ? c : b;
        swap(first, middle);
        int i = low + 1, j = high;
        for (;; i++) {
            while (before(all[i], *first)) i++;
            j--;
            while (before(*first, all[j])) j--;
            if (i >= j) break;
            swap(all + i, all + j);
        }
        if (i <= k - 1)
            low = i;
        else
            high = i;
    }
    sorted(all + low, high - low);
    if (!unsorted || k * 64 <= count) sorted(all, k - 1);
}

/* Set the scores of experts outside of the open groups to -inf */
static void close_groups(const Experts *e, Choice *all) {
    const int size = e->count / e->groups;
    Choice groups[MOST_EXPERTS];
    for (int g = 0; g < e->groups; g++) {
        Choice best = {-__builtin_inff(), 0}, second = best;
        for (int i = g * size; i < (g + 1) * size; i++)
            if (before(all[i], best))
                second = best, best = all[i];
            else if (before(all[i], second))
                second = all[i];
        groups[g] = (Choice){e->by_best ? best.score : best.score + second.score, g};
    }
    largest_first(groups, e->groups, e->open, 1);
    for (int g = e->open; g < e->groups; g++)
        for (int i = 0; i < size; i++) all[groups[g].expert * size + i].score = -__builtin_inff();
}

/* Choose the experts of token t and compute their scores, from its logits */
static void choose(const Experts *e, const Routed *r, int t, int32_t *experts, float *scores) {
    const size_t line = (size_t)t * routes(e);
    float numbers[MOST_EXPERTS + 16];
    Choice all[MOST_EXPERTS];
    const int count = e->count, k = e->chosen;
    f32 most = f32_of(-__builtin_inff()), sum = f32_zero();
    for (int i = 0; i < count; i += 16) {
        const lanes there = count - i >= 16 ? 0xffff : (1u << (count - i)) - 1;
        const f32 logits = e->router32 ? f32_load(r->logits32 + line + i) : load(r->logits + line + i);
        const f32 x = f32_pick(there, f32_of(-__builtin_inff()), e->routing == OF_EACH ? sigmoid(logits) : logits);
        f32_store(numbers + i, x), most = f32_max(most, x);
    }
    if (e->routing == OF_ALL) {
        most = f32_of(f32_most(most));
        for (int i = 0; i < count; i += 16) {
            const lanes there = count - i >= 16 ? 0xffff : (1u << (count - i)) - 1;
            const f32 p = f32_keep(there, exponential(f32_sub(f32_load(numbers + i), most)));
            f32_store(numbers + i, p), sum = f32_add(sum, p);
        }
        sum = f32_of(f32_sum(sum));
        for (int i = 0; i < count; i += 16) f32_store(numbers + i, f32_div(f32_load(numbers + i), sum));
    }
    for (int i = 0; i < count; i++) all[i] = (Choice){e->correction ? numbers[i] + e->correction[i] : numbers[i], i};
    if (e->open < e->groups) close_groups(e, all);
    largest_first(all, count, k, e->unsorted);
    float whole = 0.0f;
    for (int j = 0; j < k; j++) {
        if (e->routing == OF_CHOSEN) scores[j] = f32_first(exponential(f32_of(all[j].score - all[0].score)));
        experts[j] = all[j].expert;
        scores[j] = e->routing == OF_CHOSEN ? scores[j] : numbers[all[j].expert];
        whole += scores[j];
    }
    if (whole < e->least) whole = e->least;
    if (e->routing == OF_EACH) whole += 1e-20f; /* as in the classes */
    for (int j = 0; j < k; j++) {
        const f32 score = f32_of((e->routing == OF_CHOSEN || e->normed ? scores[j] / whole : scores[j]) * (float)e->factor);
        scores[j] = f32_first(e->exact ? score : rounded(score));
    }
}

/* A phase: assign tokens to experts, by the router's logits or as `given`, and give each token a place among those of each expert. The number
 * of experts in use is added to `touched`, unless that is null. */
static void route(Worker *w, const Experts *e, const Routed *r, int T, const int64_t *given, const float *weights, int64_t *touched) {
    const int k = e->chosen, n = T * k;
    for (int i = first(w, 1); i >= 0; i = next(w)) {
        int32_t *chosen = (int32_t *)own_tiles(w, e, r, T), *tokens = chosen + n, *places = tokens + n, active = 0;
        float *scores = (float *)(places + n);
        int32_t counts[MOST_EXPERTS] = {0}, experts[MOST_EXPERTS], begins[MOST_EXPERTS + 1], at[MOST_EXPERTS];
        for (int t = 0; t < T; t++) {
            int32_t *of = chosen + t * k;
            float *much = scores + t * k;
            for (int j = 0; given && j < k; j++) of[j] = given[t * k + j], much[j] = weights[t * k + j];
            if (!given) choose(e, r, t, of, much);
            for (int j = 1; e->by_number && j < k; j++)
                for (int b = j; b > 0 && of[b] < of[b - 1]; b--) {
                    const int32_t expert = of[b];
                    const float score = much[b];
                    of[b] = of[b - 1], much[b] = much[b - 1], of[b - 1] = expert, much[b - 1] = score;
                }
            for (int j = 0; j < k; j++) counts[of[j]]++;
        }
        for (int expert = 0; expert < e->count; expert++) {
            if (!counts[expert]) continue;
            int b = active++;
            for (; b > 0 && counts[experts[b - 1]] < counts[expert]; b--) experts[b] = experts[b - 1];
            experts[b] = expert;
        }
        begins[0] = 0;
        for (int a = 0; a < active; a++) at[experts[a]] = begins[a], begins[a + 1] = begins[a] + counts[experts[a]];
        for (int j = 0; j < n; j++) places[j] = at[chosen[j]]++, tokens[places[j]] = j / k;
        if (!mine(w)) continue;
        *r->active = active;
        if (touched) *touched += active;
        __builtin_memcpy(r->experts, experts, active * sizeof(int32_t));
        __builtin_memcpy(r->begins, begins, (active + 1) * sizeof(int32_t));
        __builtin_memcpy(r->tokens, tokens, n * sizeof(int32_t));
        __builtin_memcpy(r->places, places, n * sizeof(int32_t));
        __builtin_memcpy(r->scores, scores, n * sizeof(float));
    }
}

/* -- the experts ------------------------------------------------------------------------------------------------------- */

/* Number of tokens of the a-th active expert. A preempted thread may read begins[] while the next layer overwrites it: the number is then
 * wrong, but kept within the memory. */
INLINE int taken_by(const Routed *r, int a, int begin, int all) {
    const int count = r->begins[a + 1] - begin;
    return count < 0 ? 0 : count > all - begin ? all - begin : count;
}

/* A phase: copy inputs x [T, H] into the order of their places */
static void gather(Worker *w, const Experts *e, const Routed *r, const value *x, int T, int H) {
    const int n = T * e->chosen;
    const Cut c = cut(n, H);
    for (int i = first(w, c.chunks); i >= 0; i = next(w)) {
        const int from = i % c.parts * c.columns, size = H - from < c.columns ? H - from : c.columns, begin = i / c.parts * c.tokens;
        const int end = n < begin + c.tokens ? n : begin + c.tokens;
        value part[TAKEN];
        for (int p = begin; p < end; p++) copied(x + (size_t)r->tokens[p] * H + from, part + (p - begin) * c.columns, size);
        for (int p = begin; mine(w) && p < end; p++) copied(part + (p - begin) * c.columns, r->inputs + (size_t)p * H + from, size);
    }
}

INLINE f32 clamped(f32 gate, f32 up, float alpha, float limit) {
    const f32 most = f32_of(limit), least = f32_of(-limit);
    gate = f32_pick(f32_less(most, gate), gate, most);
    up = f32_pick(f32_less(most, up), f32_pick(f32_less(up, least), up, least), most);
    const f32 glu = rounded(f32_mul(gate, rounded(sigmoid(rounded(f32_mul(gate, f32_of(alpha)))))));
    return f32_mul(rounded(f32_add(up, f32_of(1.0f))), glu);
}

/* Combine TILE outputs of the gate and of `up`, after adding their biases, into inputs of `down` */
static void expert_gated(const Experts *e, value *gate, value *up, const value *bias, value *out) {
    if (bias) add(gate, bias, TILE), add(up, bias + TILE, TILE);
    if (e->activation == CLAMPED)
        for (int i = 0; i < TILE; i += 16) store(out + i, clamped(load(gate + i), load(up + i), e->alpha, e->limit));
    else
        gated(gate, up, out, TILE, e->activation);
}

/* The prepared inputs [K] from place `begin` on */
INLINE Prepared ready_from(const Routed *r, int begin, int all, int K) {
    return (Prepared){r->ready + (size_t)begin * segments(K), r->parts + (size_t)begin * 2 * (K / 16), r->twice + (size_t)begin * (K / 16),
                      (size_t)all * segments(K)};
}

/* A phase: prepare inputs x, rows of `stride` values, for group-quantized weights, crowd by crowd. Row tokens[p] is for place p, or row p if
 * `tokens` is null; with `one`, a single row is for all experts. Threads prepare in place, since copying takes about as long. */
static void ready(Worker *w, const Matrix *m, const Routed *r, const value *x, const int32_t *tokens, int one, int all, int stride, int K) {
    const int most = crowd_of(K), active = one ? 1 : *r->active, crowds = one ? 1 : (r->begins[1] + most - 1) / most;
    for (int i = first(w, active * crowds); i >= 0; i = next(w)) {
        if (!mine(w)) continue;
        const int a = i % active, from = one ? 0 : r->begins[a] + i / active * most, left = one ? 1 : r->begins[a + 1] - from;
        const Prepared to = ready_from(r, from, all, K);
        if (left > 0) prepare(m, tokens ? x : x + (size_t)from * stride, tokens ? tokens + from : 0, stride, left < most ? left : most, K, &to);
    }
}

/* TILE outputs from o on of n tokens: from `prepared` if the weights are group-quantized, otherwise from x [n, K] */
static void expert_outputs(const Matrix *m, int o, const entry *x, const Prepared *prepared, value *out, int n, int K, const char *after) {
    if (in_groups(m))
        of_groups(m, o, prepared, out, n, K, after);
    else
        outputs(m, o, x, out, n, K, after);
}

/* A phase: gate and `up`, in chunks of one expert and TILE inner columns */
static void widen(Worker *w, const Experts *e, const Routed *r, const value *x, int T, int H) {
    const int I = e->inner, tiles = I / TILE, all = T * e->chosen, most = rows_at_once(&e->gate_up, H);
    const int grouped = in_groups(&e->gate_up);
    entry room[GAP && !grouped ? ENTRIES(all < most ? all : most, H) : 1];
    for (int i = first_in_range(w, *r->active * tiles); i >= 0; i = next(w)) {
        const int begin = r->begins[i / tiles], count = taken_by(r, i / tiles, begin, all), o = i % tiles * TILE;
        const int row = (r->experts[i / tiles] * I + o) * 2;
        const int later = i % tiles < tiles - 1 ? row + 2 * TILE : i / tiles + 1 < *r->active ? r->experts[i / tiles + 1] * 2 * I : -1;
        const char *values_of_up = weights_of(&e->gate_up, row + TILE, H), *after = later < 0 ? 0 : weights_of(&e->gate_up, later, H);
        for (int from = 0; from < count; from += most) {
            const int n = count - from < most ? count - from : most;
            const value *rows = T == 1 ? x : r->inputs + (size_t)(begin + from) * H;
            const entry *inputs = grouped ? 0 : entries(rows, n, H, room);
            const Prepared prepared = ready_from(r, T == 1 ? 0 : begin + from, all, H);
            value gate[WHOLE * TILE], up[WHOLE * TILE];
            expert_outputs(&e->gate_up, row, inputs, &prepared, gate, n, H, values_of_up);
            expert_outputs(&e->gate_up, row + TILE, inputs, &prepared, up, n, H, after);
            for (int t = 0; t < n; t++)
                expert_gated(e, gate + t * TILE, up + t * TILE, e->gate_up_bias ? e->gate_up_bias + row : 0, gate + t * TILE);
            for (int t = 0; mine(w) && t < n; t++) copied(gate + t * TILE, r->thin + (size_t)(begin + from + t) * I + o, TILE);
        }
    }
}

/* TILE columns from o on of the weighted sum for token t, into out; `tiles` holds the experts' outputs by place */
static void summed(const Experts *e, const Routed *r, int t, const value *tiles, int o, int H, value *out) {
    for (int i = 0; i < TILE; i += 16) {
        f32 sum = f32_zero();
        for (int j = t * e->chosen; j < (t + 1) * e->chosen; j++) {
            f32 x = f32_mul(load(tiles + (size_t)r->places[j] * TILE + i), f32_of(r->scores[j]));
            if (!e->exact || e->by_number) x = rounded(x);
            sum = f32_add(sum, x);
            if (e->by_number) sum = rounded(sum);
        }
        if (e->shared) {
            f32 more = load(r->shared + (size_t)t * H + o + i);
            if (e->shared == GATED) more = rounded(f32_mul(rounded(sigmoid(f32_of(number(r->logits + (size_t)t * routes(e) + e->count)))), more));
            sum = f32_add(rounded(sum), more);
        }
        store(out + i, sum);
    }
}

/* A phase: `down` of all experts, in chunks of TILE columns; the weighted sums are added to y */
static void narrow(Worker *w, const Experts *e, const Routed *r, value *y, int T, int H) {
    const int I = e->inner, all = T * e->chosen, most = rows_at_once(&e->down, e->width), grouped = in_groups(&e->down);
    entry room[GAP && !grouped ? ENTRIES(all < most ? all : most, e->width) : 1];
    for (int i = first_in_range(w, H / TILE); i >= 0; i = next(w)) {
        value *tiles = own_tiles(w, e, r, T), *out = tiles + (size_t)all * TILE;
        const int o = i * TILE, active = *r->active;
        for (int a = 0; a < active; a++) {
            const int begin = r->begins[a], count = taken_by(r, a, begin, all), expert = r->experts[a];
            const int later = a + 1 < active ? r->experts[a + 1] * H + o : o + TILE < H ? r->experts[0] * H + o + TILE : -1;
            const char *after = later < 0 ? 0 : weights_of(&e->down, later, e->width);
            for (int p = begin; p < begin + count; p += most) {
                const Prepared prepared = ready_from(r, p, all, e->width);
                const int n = begin + count - p < most ? begin + count - p : most;
                const entry *inputs = grouped ? 0 : entries(r->thin + (size_t)p * I, n, I, room);
                expert_outputs(&e->down, expert * H + o, inputs, &prepared, tiles + (size_t)p * TILE, n, e->width, after);
            }
            for (int p = begin; e->down_bias && p < begin + count; p++) add(tiles + (size_t)p * TILE, e->down_bias + (size_t)expert * H + o, TILE);
        }
        for (int t = 0; t < T; t++) summed(e, r, t, tiles, o, H, out + (size_t)t * TILE);
        for (int t = 0; mine(w) && t < T; t++) add(y + (size_t)t * H + o, out + (size_t)t * TILE, TILE);
    }
}

/* Add the experts' outputs for x [T, H] to y; tokens are already routed */
static void by_experts(Worker *w, const Experts *e, const Routed *r, const value *x, value *y, int T, int H) {
    const int all = T * e->chosen;
    if (in_groups(&e->gate_up))
        ready(w, &e->gate_up, r, x, T > 1 ? r->tokens : 0, T == 1, all, H, H);
    else if (T > 1)
        gather(w, e, r, x, T, H);
    widen(w, e, r, x, T, H);
    if (in_groups(&e->down)) ready(w, &e->down, r, r->thin, 0, 0, all, e->inner, e->width);
    narrow(w, e, r, y, T, H);
}

typedef struct {
    const Experts *experts;
    Routed routed;
    const value *x;
    value *y;
    int T, H;
    const int64_t *chosen;
    const float *scores;
} Given;

static void do_experts(Worker *w, const void *job) {
    const Given *g = job;
    route(w, g->experts, &g->routed, g->T, g->chosen, g->scores, 0);
    by_experts(w, g->experts, &g->routed, g->x, g->y, g->T, g->H);
}

/* Add the outputs of the experts `chosen` [T, e->chosen] for x [T, H], weighted by `scores` of that shape, to y */
void experts_over(const Experts *e, const value *x, value *y, int T, int H, const int64_t *chosen, const float *scores, void *memory, int threads) {
    together(threads, do_experts, &(Given){e, divided(e, T, H, threads, memory), x, y, T, H, chosen, scores});
}
