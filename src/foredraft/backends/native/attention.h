/* Attention of the nodes of a pass over cached keys and values; layer.c includes this. */

/* Pack the first `count` of KEYS keys, `size` numbers of each, into a matrix whose keys have `whole` numbers; absent keys are zero. Prefetch the
 * keys at `next`, unless it is null, in the order of their addresses, as hardware does best. */
static void packed_keys(const value *keys, int count, int size, int whole, value *out, const value *next) {
    const int words = size / DEPTH;
    for (int b = 0; b < KEYS && b < count; b += 16)
        for (int w = 0; w < words; w += 16) {
            const int some = words - w < 16 ? words - w : 16;
            i32 r[16];
            for (int j = 0; next && j < some; j++, next += LINE / sizeof(value)) __builtin_prefetch(next, 0, INTO_L2);
            for (int j = 0; j < 16; j++) {
                const void *from = keys + (size_t)(b + j) * size + w * DEPTH;
                r[j] = b + j >= count ? i32_zero() : some == 16 ? i32_load(from) : i32_load_some((1u << some) - 1, from);
            }
            turned(r);
            for (int j = 0; j < some; j++) i32_store(out + (size_t)b * whole + (w + j) * 16 * DEPTH, r[j]);
        }
}

/* Dot products of n queries with KEYS packed keys, in float32 */
INLINE void scored(const value *keys, const entry *queries, float *scores, int size, int n) {
    for (int c = 0; c < KEYS; c += TOGETHER(n) * 16, keys += TOGETHER(n) * 16 * size, scores += TOGETHER(n) * 16) {
        f32 sums[BLOCKS][TOKENS];
        for (int b = 0; b < TOGETHER(n); b++)
            UNROLLED for (int t = 0; t < n; t++) sums[b][t] = f32_zero();
        for (int d = 0; d < size; d += DEPTH) {
#ifdef HALVED
            UNROLLED for (int odd = 0; odd < DEPTH; odd++)
                for (int b = 0; b < TOGETHER(n); b++) {
                    const f32 k = half_of_weights(keys + (size_t)b * 16 * size + d * 16, odd);
                    UNROLLED for (int t = 0; t < n; t++) f32_add_product(&sums[b][t], k, queries + t * size + d + odd);
                }
#else
            operand k[BLOCKS];
            for (int b = 0; b < TOGETHER(n); b++) k[b] = weights(keys + (size_t)b * 16 * size + d * 16);
            for (int t = 0; t < n; t++) {
                operand q = input(queries + t * size + d);
                for (int b = 0; b < TOGETHER(n); b++) sums[b][t] = multiply(sums[b][t], k[b], q);
            }
#endif
        }
        for (int b = 0; b < TOGETHER(n); b++)
            UNROLLED for (int t = 0; t < n; t++) f32_store(scores + t * KEYS + b * 16, sums[b][t]);
    }
}

#ifndef TILED
/* In `vectors` * 16 columns from d on, sums [n, SUMS(size)] += probabilities [n, KEYS] times the first `count` of `rows`, which are values of keys.
 * Prefetch as many of the values at `next`, unless it is null. */
INLINE void gathered(const chance *chances, const value *const *rows, float *sums, int count, int size, int n, int d, int vectors, const value *next) {
    f32 all[TOKENS][BLOCKS];
    for (int t = 0; t < n; t++)
        for (int i = 0; i < vectors; i++) all[t][i] = f32_load(sums + t * SUMS(size) + d + i * 16);
    for (int j = 0; j < count; j += AT_ONCE) {
        summand v[BLOCKS];
        const value *first = rows[j] + d, *second = j + 1 < count ? rows[j + 1] + d : 0;
        for (int i = 0; next && i < AT_ONCE * vectors * 16; i += LINE / (int)sizeof(value))
            __builtin_prefetch(next + KEYS * d + j * vectors * 16 + i, 0, INTO_L2);
        for (int i = 0; i < vectors; i++) v[i] = summand_of(first + i * 16, second ? second + i * 16 : 0);
        for (int t = 0; t < n; t++)
            for (int i = 0; i < vectors; i++) all[t][i] = add_weighted(all[t][i], chances[(t * KEYS + j) / AT_ONCE], v[i]);
    }
    for (int t = 0; t < n; t++)
        for (int i = 0; i < vectors; i++) f32_store(sums + t * SUMS(size) + d + i * 16, all[t][i]);
}

INLINE void gathered_all(const float *probabilities, const value *const *rows, float *sums, int count, int size, int n, const value *next) {
    chance chances[TOKENS * KEYS / AT_ONCE];
    for (int i = 0; i < n * KEYS; i += 16) chances_of(f32_load(probabilities + i), chances + i / AT_ONCE);
    int d = 0;
    for (; d + TOGETHER(n) * 16 <= size; d += TOGETHER(n) * 16) gathered(chances, rows, sums, count, size, n, d, TOGETHER(n), next);
    if (TOGETHER(n) > 2 && d + 32 <= size) gathered(chances, rows, sums, count, size, n, d, 2, next), d += 32;
    if (d < size) gathered(chances, rows, sums, count, size, n, d, 1, next);
}

static void some_gathered(const float *probabilities, const value *const *rows, float *sums, int count, int size, int n, const value *next) {
    FOR_KNOWN(n, gathered_all(probabilities, rows, sums, count, size, COUNT, next))
}
#endif

static void some_scored(const value *keys, const entry *queries, float *scores, int size, int n) {
    FOR_KNOWN(n, scored(keys, queries, scores, size, COUNT))
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
    int64_t mask_row_stride, mask_stride;  /* from row to row, from node to node */
    const value *cos, *sin;                /* [tokens, size] */
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
    int64_t *touched;                      /* out: the number of experts that some token took is added for each layer; or null */
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
    float *sums, *most;         /* [n, SUMS(wide)] sums of values, and 16 sums of probabilities; [n] scores that they are relative to; contiguous */
    value *packed;              /* [KEYS, size] */
    entry *queries;             /* [n, size]; packed as keys are if scores are made in tiles: then `tokens` has [n, size], */
    const value *tokens;
    value *batch;               /* and this is room for BATCH * KEYS packed keys and values */
    int reach, end;             /* the end of the slots that any query may see, and of those that this chunk reads */
    const int32_t *positions;   /* of the row's slots; null: slots are positions, */
    int moved, lowest;          /* as they are up to slot `moved` in a tree; the lowest position from there on */
    const uint8_t *seen[QUERIES]; /* the mask of each query, */
    int slots[QUERIES], from[QUERIES]; /* its slot, and the first position in its window */
} Chunk;

#ifdef TILED
/* Whether scores are made in tiles: parts of a key are whole tiles */
#define IN_TILES(c) (!((c)->wide % TILE_INPUTS || ((c)->layer->size - (c)->wide) % TILE_INPUTS))
#endif

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
    const value *keys = c->keys + at, *more = rest ? c->asked->turned + at / c->wide * rest : 0;
#ifdef TILED
    if (IN_TILES(c)) {
        tiled_scores(keys, c->wide, more, rest, count, c->queries, c->n, scores, c->packed, behind);
        return;
    }
#endif
    packed_keys(keys, count, c->wide, size, c->packed, behind);
    if (rest) packed_keys(more, count, rest, size, c->packed + c->wide * 16, 0);
    for (int t = 0; t < c->n; t += TOKENS)
        some_scored(c->packed, c->queries + t * size, scores + t * KEYS, size, c->n - t < TOKENS ? c->n - t : TOKENS);
}

/* Add the first `count` of `rows`, which are values of a block of positions, to the sums of n queries from `from` on; prefetch likewise */
static void gather_rows(const Chunk *c, int from, int n, const value *const *rows, int count, const value *behind) {
    const int size = c->wide;
    const float *probabilities = c->scores + from * KEYS;
    float *sums = c->sums + from * SUMS(size);
#ifdef TILED
    tiled_gather(probabilities, rows, sums, count, size, n, c->packed, behind);
#else
    for (int t = 0; t < n; t += TOKENS)
        some_gathered(probabilities + t * KEYS, rows, sums + t * SUMS(size), count, size, n - t < TOKENS ? n - t : TOKENS, t == 0 ? behind : 0);
#endif
}

/* Scores of query i from raw scores of KEYS positions from `start` on, of which it sees those in `sees`, or all if that is null. Returns what
 * they are compared with: a score near the largest one so far. It stays the same until a score is larger by more than RISE, so sums, which are
 * relative to it, seldom change. */
INLINE float scaled_scores(const Chunk *c, int i, int start, const float *scores, const lanes *sees, f32 each[KEYS / 16]) {
    const Layer *l = c->layer;
    const int group = l->heads / l->key_heads, position = c->positions ? c->positions[c->slots[i]] : c->slots[i];
    f32 largest = f32_of(-__builtin_inff());
    for (int b = 0; b < KEYS / 16; b++) {
        each[b] = f32_mul(f32_load(scores + b * 16), f32_of(l->scaling));
        if (l->cap) each[b] = capped(each[b], l->cap);
        if (sees) each[b] = f32_pick(sees[b], f32_of(-__builtin_inff()), each[b]);
        if (c->asked->bias && sees && sees[b])
            each[b] = f32_add(each[b], by_distance(l, c->asked->bias, c->head * group + (c->first + i) % group, position, start + b * 16));
        largest = f32_max(largest, each[b]);
    }
    return f32_less(f32_of(c->most[i] + RISE), largest) ? f32_most(largest) : c->most[i];
}

/* Scores of query i are compared with `now` from here on */
INLINE void raise_most(Chunk *c, int i, float now) {
    const float before = c->most[i];
    c->most[i] = now;
    if (before == -__builtin_inff()) return; /* no sums so far */
    const f32 less = exponential(f32_of(before - now));
    float *sums = c->sums + i * SUMS(c->wide);
    for (int d = 0; d < SUMS(c->wide); d += 16) f32_store(sums + d, f32_mul(less, f32_load(sums + d)));
}

/* Where probabilities of query i are summed, for every sixteenth key from each of 16 on */
INLINE float *totals(const Chunk *c, int i) { return c->sums + i * SUMS(c->wide) + c->wide; }

INLINE f32 probability(f32 score, float most, lanes sees) { return f32_keep(sees, rounded_exponential(f32_sub(score, f32_of(most)))); }

/* Online softmax: turn raw scores of KEYS positions from `start` on into probabilities. Queries see only the positions in `sees`. */
static void weigh(Chunk *c, int start, lanes sees[QUERIES][KEYS / 16]) {
    for (int i = 0; i < c->n; i++) {
        float *s = c->scores + i * KEYS;
        f32 each[KEYS / 16];
        const float now = scaled_scores(c, i, start, s, sees[i], each);
        if (now == -__builtin_inff()) { /* sees nothing so far */
            for (int b = 0; b < KEYS / 16; b++) f32_store(s + b * 16, f32_zero());
            continue;
        }
        if (now != c->most[i]) raise_most(c, i, now);
        f32 sum = f32_load(totals(c, i));
        for (int b = 0; b < KEYS / 16; b++) {
            const f32 e = probability(each[b], now, sees[i][b]);
            f32_store(s + b * 16, e);
            sum = f32_add(sum, e);
        }
        f32_store(totals(c, i), sum);
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
    const value *rows[KEYS], *values = c->values + slots_from(c, start);
    for (int j = 0; j < count; j++) rows[j] = values + (size_t)j * c->wide;
    score_slots(c, start, count, c->scores, start + KEYS < c->end ? c->keys + behind : 0);
    weigh(c, start, sees);
    gather_rows(c, 0, c->n, rows, count, start + KEYS < c->end ? c->values + behind : 0);
}

/* Iterate over the blocks of KEYS slots that hold positions from `start` on: the block at `start`, and those from slot `moved` on */
INLINE int next_block(const Chunk *c, int start, int at) {
    const int moved = c->moved / KEYS * KEYS;
    if (at < 0) return start < c->moved ? start : moved;
    return at == start && start < moved ? moved : at + KEYS;
}

/* Attend to the KEYS positions from `start` on, some of which are in other slots, as in a token tree. Plain decoding of a node's path has them
 * in slots of the same number. Scores and values are brought into that order, so that sums are made in the same order and have the same bits. */
static void take_positions(Chunk *c, int start) {
    const int group = c->layer->heads / c->layer->key_heads;
    int slot_of[QUERIES][KEYS], same[QUERIES], any = 0; /* the slot of each position; the first query of the same node */
    uint64_t still[QUERIES], moved[QUERIES];            /* positions that a query sees in slots of their number, and in others */
    lanes sees[QUERIES][KEYS / 16];
    float of_slots[QUERIES * KEYS];
    for (int i = 0; i < c->n; i++) {
        same[i] = i && (c->first + i) % group ? same[i - 1] : i, still[i] = moved[i] = 0;
        for (int b = 0; b < KEYS / 16; b++)
            still[i] |= (uint64_t)(visible(c->seen[i], 0, start + b * 16, c->moved) & behind(c->from[i], start + b * 16)) << (b * 16);
        for (int j = 0; same[i] == i && j < KEYS; j++) slot_of[i][j] = start + j;
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
    for (int at = next_block(c, start, -1); at < c->reach; at = next_block(c, start, at)) {
        int count = 0;
        for (int i = 0; i < c->n; i++) {
            if (at == start && still[i] && count < 64 - __builtin_clzll(still[i])) count = 64 - __builtin_clzll(still[i]);
            EACH_MOVED(count = slot >= count ? slot + 1 : count)
        }
        if (!count) continue;
        any = 1;
        score_slots(c, at, count, of_slots, 0);
        for (int i = 0; i < c->n; i++) {
            float *positions = c->scores + i * KEYS, *slots = of_slots + i * KEYS;
            for (int b = 0; at == start && b < KEYS; b += 16) f32_store(positions + b, f32_load(slots + b));
            EACH_MOVED(positions[lane] = slots[slot])
        }
    }
#undef EACH_MOVED
    if (!any) return;
    weigh(c, start, sees);
    for (int i = 0, n; i < c->n; i += n) {
        const uint64_t seen = still[i] | moved[i];
        const value *rows[KEYS], *some = 0;
        for (n = 1; i + n < c->n && same[i + n] == i; n++) {}
        if (!seen) continue;
        for (int j = 63 - __builtin_clzll(seen), last = j; j >= 0; j--) { /* a value with a weight of zero may be any that is seen */
            const int slot = slot_of[i][j];
            if (seen >> j & 1) some = c->values + slots_from(c, slot / KEYS * KEYS) + (size_t)(slot % KEYS) * c->wide;
            rows[j] = some;
            if (j == 0) gather_rows(c, i, n, rows, last + 1, 0);
        }
    }
}

#ifdef TILED
#include "attention_tiles.h"
#endif

/* Size of a value; a latent is only a part of its key */
INLINE int wide_of(const Layer *l, const Asked *a) { return a->turned ? l->latent->rank : l->size; }

/* The first position in the layer's window for the query in a slot */
INLINE int first_seen(const Layer *l, const int32_t *positions, int slot) {
    const int position = positions ? positions[slot] : slot;
    return l->window && position >= l->window ? position - l->window + 1 : 0;
}

static Chunk chunk_of(Worker *w, const Layer *l, const Pass *p, const Asked *a, int row, int head, int first, int n) {
    const int size = l->size, begin = p->begins[row], group = l->heads / l->key_heads;
    Chunk c; /* to clear its arrays as well would take as long as a short text does */
    __builtin_memset(&c, 0, offsetof(Chunk, seen));
    c.layer = l, c.pass = p, c.asked = a, c.row = row, c.head = head, c.first = first, c.n = n, c.wide = wide_of(l, a);
    c.keys = a->row_keys ? a->row_keys[row] : a->keys, c.values = a->row_keys ? a->row_values[row] : a->values;
    c.head_stride = a->row_keys ? a->head_strides[row] : a->head_stride;
    c.scores = own_scratch(w, l, p);
    c.packed = (value *)(c.scores + QUERIES * KEYS + 2 * QUERIES * (SUMS(size) + 1)), c.queries = (entry *)(c.packed + KEYS * size);
    for (int i = 0; i < n; i++) {
        const int node = (first + i) / group, which = head * group + (first + i) % group;
        put_entries(p->projected + ((size_t)begin + node) * a->columns + (size_t)vector_of(l, which) * size, c.queries + i * size, size);
        c.seen[i] = a->mask ? a->mask + row * p->mask_row_stride + node * p->mask_stride : 0;
        c.slots[i] = a->slots[a->by_row ? row : begin + node];
        if (c.slots[i] >= c.reach) c.reach = c.slots[i] + 1;
    }
    find_moved(&c);
    for (int i = 0; i < n; i++) c.from[i] = first_seen(l, c.positions, c.slots[i]);
#ifdef TILED
    c.tokens = c.queries, c.batch = c.queries + 2 * QUERIES * size;
    if (IN_TILES(&c) && !in_batches(&c)) {
        c.queries += QUERIES * size;
        for (int i = 0; i < n; i += KEYS) packed_keys(c.tokens + i * size, n - i, size, size, c.queries + i * size, 0);
    }
#endif
    return c;
}

/* Attend to the positions of one segment, KEYS at a time. `sums` gets `sums` and `most` as Chunk has them. A sink counts in the
 * first segment that a query sees. */
static void over_segment(Chunk *c, int segment, float *sums) {
    const Layer *l = c->layer;
    const int group = l->heads / l->key_heads, begin = segment * KEY_SEGMENT, end = begin + KEY_SEGMENT;
    int from = end;
    c->sums = sums, c->most = sums + c->n * SUMS(c->wide);
    for (int i = 0; i < c->n; i++) {
        const float *sink = l->sinks && c->from[i] / KEY_SEGMENT == segment ? l->sinks + c->head * group + (c->first + i) % group : 0;
        for (int d = 0; d < SUMS(c->wide); d += 16) f32_store(c->sums + i * SUMS(c->wide) + d, f32_zero());
        c->most[i] = sink ? *sink : -__builtin_inff(), totals(c, i)[0] = sink && *sink > -__builtin_inff() ? 1.0f : 0.0f;
        if (c->from[i] < from) from = c->from[i];
    }
    int start = from > begin ? from / KEYS * KEYS : begin;
#ifdef TILED
    for (int blocks; in_batches(c) && start < c->reach && start < end; start += blocks * KEYS) {
        blocks = ((c->reach < end ? c->reach : end) - start + KEYS - 1) / KEYS;
        take_batch(c, start, blocks = blocks < BATCH ? blocks : BATCH);
    }
#endif
    for (; start < c->reach && start < end; start += KEYS)
        if (start + KEYS <= c->lowest || c->moved == c->reach)
            take_slots(c, start);
        else
            take_positions(c, start);
}

/* Merge the result `more` of over_segment() for the next segment into `sums`, for n queries */
static void joined(float *sums, const float *more, int n, int wide) {
    for (int i = 0; i < n; i++) {
        float *all = sums + i * SUMS(wide), *most = sums + n * SUMS(wide) + i;
        const float *some = more + i * SUMS(wide), largest = more[n * SUMS(wide) + i];
        if (largest == -__builtin_inff()) continue; /* sees nothing there */
        if (*most == -__builtin_inff()) {
            __builtin_memcpy(all, some, SUMS(wide) * sizeof(float));
            *most = largest;
            continue;
        }
        const float now = largest > *most ? largest : *most;
        const f32 less = exponential(f32_of(*most - now)), share = exponential(f32_of(largest - now));
        for (int d = 0; d < SUMS(wide); d += 16) f32_store(all + d, f32_fma(share, f32_load(some + d), f32_mul(less, f32_load(all + d))));
        *most = now;
    }
}

/* Divide the sums of n queries, as over_segment() has them, by their totals, into p->attended */
static void attended(Worker *w, const Layer *l, const Pass *p, int row, int head, int first, int n, int wide, const float *sums) {
    const int begin = p->begins[row], group = l->heads / l->key_heads;
    for (int i = 0; mine(w) && i < n; i++) {
        const int node = (first + i) / group, which = head * group + (first + i) % group;
        value *out = p->attended + ((size_t)begin + node) * l->heads * wide + (size_t)which * wide;
        const float *own = sums + i * SUMS(wide), total = f32_sum(f32_load(own + wide));
        const f32 scale = f32_of(total > 0.0f ? 1.0f / total : 0.0f); /* padding tokens may see nothing */
        for (int d = 0; d < wide; d += 16) store(out + d, f32_mul(f32_load(own + d), scale));
    }
}

/* A chunk: some queries, over all segments that they see */
static void attend(Worker *w, const Layer *l, const Pass *p, const Asked *a, int row, int head, int first, int n) {
    Chunk c = chunk_of(w, l, p, a, row, head, first, n);
    float *sums = c.scores + QUERIES * KEYS, *more = sums + QUERIES * (SUMS(l->size) + 1);
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
    if (mine(w)) __builtin_memcpy(out, sums, n * (SUMS(c.wide) + 1) * sizeof(float));
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
            else if (p->cos)
                rotated(x, p->cos + (size_t)t * size, p->sin + (size_t)t * size, y, size);
            else
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
    for (; parts * rows * heads < PIECES * p->threads && share > FEWER; parts = (asked + share - 1) / share) share = share > 2 * FEWER ? share / 2 : FEWER;
    for (int row = 0; p->segments_room && row < rows && parts * rows * heads < PIECES * p->threads; row++) {
        const int count = segments_of(l, p, a, row, &begin);
        if (count > segments) segments = count;
    }
    for (; parts * rows * heads * segments < p->threads && share > 1; parts = (asked + share - 1) / share) share = (share + 1) / 2;
    const int pieces = parts * rows * heads;
    const size_t needed = (size_t)share * (SUMS(wide) + 1);
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
        __builtin_memcpy(sums, some, n * (SUMS(wide) + 1) * sizeof(float));
        for (int s = 1, count = segments_of(l, p, a, row, &begin); s < count; s++) joined(sums, some + s * pieces * needed, n, wide);
        attended(w, l, p, row, head, from, n, wide, sums);
    })
#undef EACH_PIECE
}
