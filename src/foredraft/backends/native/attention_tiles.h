/* Attention of many queries in tiles of AMX; attention.h includes this. Keys and values of BATCH blocks are packed once for all queries of a chunk.
 * Then SHARE queries at a time take these blocks, and values of all of them are added at once: loads and stores of sums take longer than their
 * products. Scores, probabilities and sums are made in the order in which take_slots() makes them, and have the same bits.
 */
#define SHARE (2 * TILE_ROWS) /* queries at a time */

typedef struct {
    int n;                                     /* queries */
    int begin, end;                            /* blocks whose values are not added yet */
    float *sums;                               /* [n, SUMS(size)] */
    value *chances;                            /* [SHARE, BATCH * KEYS] probabilities */
    const value *values;                       /* [BATCH, KEYS * size], packed as tiles of 32 keys and 16 columns */
} Batch;

/* Whether a chunk is attended to in this way: there are enough queries, and nothing but their slots and windows says what they see */
INLINE int in_batches(const Chunk *c) { return c->n >= SHARE && IN_TILES(c) && !c->asked->mask && !c->asked->bias; }

/* Add what waits: values of the blocks `begin` to `end`, weighted by the probabilities */
static void add_batch(Batch *a, int size) {
    const int from = a->begin * KEYS, keys = (a->end - a->begin) * KEYS;
    if (keys > 0) add_values(a->chances + from, BATCH * KEYS, a->values + (size_t)from * size, keys, a->sums, size, a->n);
    a->begin = a->end;
}

/* Raw scores of query i for the positions from `start` on become probabilities. `sees` is null if it sees all of them. */
static void batch_row(Chunk *c, Batch *a, int i, int start, const float *scores, value *out, const lanes *sees) {
    f32 each[KEYS / 16];
    const float now = scaled_scores(c, i, start, scores, sees, each);
    if (now == -__builtin_inff()) {
        for (int b = 0; b < KEYS; b += 16) store(out + b, f32_zero());
        return;
    }
    if (now != c->most[i]) {
        add_batch(a, c->wide);
        raise_most(c, i, now);
    }
    f32 sum = f32_load(totals(c, i));
    for (int b = 0; b < KEYS / 16; b++) {
        const f32 e = probability(each[b], now, sees ? sees[b] : 0xffff);
        store(out + b * 16, e);
        sum = f32_add(sum, e);
    }
    f32_store(totals(c, i), sum);
}

/* Attend to `blocks` blocks of KEYS positions from `start` on, each of which is in the slot of the same number */
static void take_batch(Chunk *c, int start, int blocks) {
    const int size = c->layer->size, rest = size - c->wide;
    value *packed = c->batch, *values = packed + BATCH * KEYS * size;
    value chances[SHARE * BATCH * KEYS];
    float scores[SHARE * KEYS];
    for (int b = 0; b < blocks; b++) {
        const int first = start + b * KEYS, count = c->reach - first < KEYS ? c->reach - first : KEYS;
        const size_t at = slots_from(c, first);
        value *to = packed + b * KEYS * size;
        const int more = first + KEYS < c->end;
        const size_t behind = more ? slots_from(c, first + KEYS) : 0;
        packed_keys(c->keys + at, count, c->wide, size, to, more ? c->keys + behind : 0);
        if (rest) packed_keys(c->asked->turned + at / c->wide * rest, count, rest, size, to + c->wide * 16, 0);
        const value *rows[KEYS];
        for (int j = 0; j < count; j++) rows[j] = c->values + at + (size_t)j * c->wide;
        packed_values(rows, count, c->wide, KEYS, values + b * KEYS * c->wide, more ? c->values + behind : 0);
    }
    for (int t = 0; t < c->n; t += SHARE) {
        Batch a = {.n = c->n - t < SHARE ? c->n - t : SHARE, .sums = c->sums + t * SUMS(c->wide), .chances = chances, .values = values};
        int from = c->from[t], reach = c->slots[t] + 1;
        for (int i = t; i < t + a.n; i++) {
            if (c->from[i] < from) from = c->from[i];
            if (c->slots[i] >= reach) reach = c->slots[i] + 1;
        }
        pairs_begin(a.n);
        for (int b = 0; b < blocks; b++) {
            const int at = start + b * KEYS;
            if (at + KEYS <= from) a.begin = b + 1;
            if (at + KEYS <= from || at >= reach) continue;
            a.end = b;
            for (int j = 0; j < KEYS; j += 32)
                pair_of_tiles(c->tokens + t * size, size, packed + (b * KEYS + j) * size, packed + (b * KEYS + j + 16) * size, 16 * TILE_INPUTS, size,
                              scores + j, KEYS, a.n, 0, 0, 0, 0);
            for (int i = 0; i < a.n; i++) {
                value *out = chances + i * BATCH * KEYS + b * KEYS;
                lanes sees[KEYS / 16];
                if (c->from[t + i] <= at && c->slots[t + i] >= at + KEYS - 1) {
                    batch_row(c, &a, t + i, at, scores + i * KEYS, out, 0);
                    continue;
                }
                for (int j = 0; j < KEYS / 16; j++)
                    sees[j] = visible(0, c->slots[t + i], at + j * 16, c->pass->width) & behind(c->from[t + i], at + j * 16);
                batch_row(c, &a, t + i, at, scores + i * KEYS, out, sees);
            }
            a.end = b + 1;
        }
        add_batch(&a, c->wide);
        tiles_end();
    }
}
