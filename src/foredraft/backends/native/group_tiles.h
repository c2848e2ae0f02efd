/* Products of group-quantized weights by AMX, for some tokens at a time. Included by groups.h.
 *
 * The low and the high bytes of prepared inputs lie apart: in_row_of() bytes of each are a row of a tile. The weights of 16 outputs are unpacked to
 * rows of a tile, multiplied by both, and the sums are integers, so results have the bits of of_tokens().
 */

/* Four weights of each of 16 outputs as bytes: a row of a tile */
INLINE void rows_of(const uint32_t *words, int inputs, int kind, uint8_t *to) {
    for (int k = 0; k < inputs; k += INPUTS_OF(kind), words += WORDS_OF(kind, INPUTS_OF(kind)) * OUTPUTS)
        for (int j = 0; j < INPUTS_OF(kind); j += 4, to += 64)
            i32_store(to, IN_QUADS(kind) ? quad_of(words, j / 4, kind) : digits(i32_load(words), j, kind));
}

/* Add the sums of the tiles `low` and `high` times their scales to the totals [n, OUTPUTS] of 16 outputs */
INLINE void add_tiles(const int32_t *low, const int32_t *high, i32 zero, f32 scale, const Part *parts, float *totals, int n) {
    for (int t = 0; t < n; t++) {
        const i32 begun = i32_mul(zero, i32_of(times(-1, parts[t].sum)));
        const sum s = {i32_add(i32_load(low + t * 16), begun), i32_load(high + t * 16)};
        float *total = totals + t * OUTPUTS;
        f32_store(total, f32_fma(ended_sum(s), f32_mul(scale, f32_of(parts[t].scale)), f32_load(total)));
    }
}

/* Add all parts of n tokens to totals [n, OUTPUTS], as of_tokens() does */
INLINE void tiled_groups(const Matrix *m, int o, const Prepared *p, int n, float *totals, int K, const char *after, int kind, int in_row) {
    const int groups = K / m->group, shared = m->nested ? groups / m->nested : 0, steps = m->group < SEGMENT ? m->group : SEGMENT;
    const int first = n < TILE_ROWS ? n : TILE_ROWS, second = n - first, alike = m->mins || !m->zeros;
    const size_t words = WORDS_OF(kind, steps) * OUTPUTS;
    const uint32_t *w = (const uint32_t *)m->values + o * WORDS_OF(kind, K);
    const char *soon = (const char *)w + SOON, *last = (const char *)w + K / steps * words * sizeof(*w);
    const Part *parts = p->parts;
    tiles_with((Rows){first, first, second ? second : 1, second ? second : 1, first, second ? second : 1, in_row / 4, in_row / 4}, in_row);
    for (int k = 0; k < K; k += steps, w += words, parts += 2 * n) {
        const size_t group = k / m->group, at = (size_t)o * groups + group * OUTPUTS, above = shared ? (size_t)o * shared + group / m->nested * OUTPUTS : 0;
        const given *x = p->inputs + (size_t)k / SEGMENT * n * SEGMENT + k % SEGMENT;
        if (soon >= last) soon = after ? after + (soon - last) : 0, last = (const char *)UINTPTR_MAX;
        for (size_t i = 0; soon && i < words * sizeof(*w); i += LINE, soon += LINE) prefetch(soon);
        for (int b = 0; b < OUTPUTS; b += 16) {
            int32_t sums[4][16 * 16];
            if (m->mins) subtract_mins(m, at + b, above + b, parts, totals + b, 1, n);
            tile_zero(0);
            tile_zero(1);
            tile_zero(2);
            tile_zero(3);
            for (int s = 0; s < steps; s += in_row) {
                uint8_t weights[16 * 64];
                const char *from = (const char *)(x + s), *more = from + TILE_ROWS * SEGMENT * sizeof(given);
                rows_of(w + WORDS_OF(kind, s) * OUTPUTS + b, in_row, kind, weights);
                tile_load(6, weights, 64);
                tile_load(4, from, SEGMENT * sizeof(given));
                tile_bytes(0, 4, 6);
                tile_load(4, from + in_row, SEGMENT * sizeof(given));
                tile_bytes(1, 4, 6);
                if (!second) continue;
                tile_load(5, more, SEGMENT * sizeof(given));
                tile_bytes(2, 5, 6);
                tile_load(5, more + in_row, SEGMENT * sizeof(given));
                tile_bytes(3, 5, 6);
            }
            tile_store(0, sums[0], 64);
            tile_store(1, sums[1], 64);
            const i32 zero = i32_add(alike ? i32_of(m->zero) : zeros(m, at + b), i32_of(OFFSET(kind)));
            const f32 scale = scales(m, at + b, above + b);
            add_tiles(sums[0], sums[1], zero, scale, parts, totals + b, first);
            if (!second) continue;
            tile_store(2, sums[2], 64);
            tile_store(3, sums[3], 64);
            add_tiles(sums[2], sums[3], zero, scale, parts + TILE_ROWS, totals + TILE_ROWS * OUTPUTS + b, second);
        }
    }
    tiles_end();
}

static void some_tiled_groups(const Matrix *m, int o, const Prepared *p, int n, float *totals, int K, const char *after, int in_row) {
    switch (m->kind) {
        case GROUPS_OF_FOUR: tiled_groups(m, o, p, n, totals, K, after, GROUPS_OF_FOUR, in_row); break;
        case GROUPS_OF_EIGHT: tiled_groups(m, o, p, n, totals, K, after, GROUPS_OF_EIGHT, in_row); break;
        case GROUPS_OF_SIX: tiled_groups(m, o, p, n, totals, K, after, GROUPS_OF_SIX, in_row); break;
        default: tiled_groups(m, o, p, n, totals, K, after, GROUPS_OF_E2M1, in_row);
    }
}
