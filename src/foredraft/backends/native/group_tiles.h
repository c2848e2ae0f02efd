/* Products of group-quantized weights by AMX, for some tokens at a time. Included by groups.h. Results have the bits of of_tokens(), since all sums
 * are exact. While tiles are multiplied, the sums before them are added to the totals.
 *
 * Where no sum of a part can reach 2^24 (IN_FLOATS), a tile of bfloat16 has the prepared inputs, and its sums are float32: integers of at most 15 bits that
 * were rounded to bfloat16 before are bfloat16 numbers, and so are weights. A table has the numbers that the bits of a weight stand for.
 *
 * Otherwise the low and the high bytes of prepared inputs lie apart: a row of a tile has so many of each. Weights are signed bytes, and there are two
 * sums for each token and output.
 */
/* What is subtracted from weights of more than four bits as bytes, whatever their zero point: the difference must be a signed byte */
#define MIDDLE(kind) ((kind) == GROUPS_OF_EIGHT ? 128 : 32)
#define IN_FOUR_BITS(kind) ((kind) == GROUPS_OF_FOUR || (kind) == GROUPS_OF_E2M1)
#define NUMBERS 64 /* of a table */

/* What the bits of a weight stand for less common_zero(), in bfloat16; bits above its own are ignored */
INLINE void find_numbers(const Matrix *m, int kind, uint16_t *table) {
    for (int i = 0; i < NUMBERS; i += 16) {
        const i32 bits = i32_and(i32_add(i32_count(), i32_of(i)), i32_of(kind == GROUPS_OF_SIX ? 63 : 15));
        const f32 number = kind == GROUPS_OF_E2M1 ? f32_twice_e2m1(bits) : i32_to_f32(i32_sub(bits, i32_of(common_zero(m))));
        i32_to_16(table + i, i32_right(f32_as_i32(number), 16));
    }
}

/* The weights of `inputs` inputs of 16 outputs as rows of a tile of bfloat16, two of each output: of eight inputs 0 and 4, 1 and 5, 2 and 6, 3 and 7 */
INLINE void pairs_of(const uint32_t *words, int inputs, int kind, const uint16_t *table, char *to) {
    for (int k = 0; k < inputs; k += 8, to += 4 * 64)
        for (int i = 0; i < 4; i++) {
            i32 bits;
            if (kind == GROUPS_OF_SIX)
                bits = i32_right(quad_of(words + k / 16 * 3 * OUTPUTS, k % 16 / 4 + i % 2, kind), i / 2 * 8);
            else
                bits = i32_right(i32_load(words + k / 8 * OUTPUTS), 4 * i);
            i32_store(to + i * 64, kind == GROUPS_OF_SIX ? halves_from_64(table, bits) : halves_from_32(table, bits));
        }
}

/* What is subtracted from the weights of 16 outputs as bytes, in each byte of a word */
INLINE i32 subtracted(const Matrix *m, size_t at, int kind) {
    const i32 zero = !IN_FOUR_BITS(kind) ? i32_of(MIDDLE(kind)) : m->mins ? i32_of(m->zero) : zeros(m, at);
    return i32_mul(i32_add(zero, i32_of(OFFSET(kind))), i32_of(0x01010101));
}

/* The weights of `inputs` inputs of 16 outputs as rows of tiles of bytes: four of each output */
INLINE void bytes_in_rows(const uint32_t *words, int inputs, int kind, i32 less, char *to) {
    for (int k = 0; k < inputs; k += INPUTS_OF(kind), words += WORDS_OF(kind, INPUTS_OF(kind)) * OUTPUTS)
        for (int j = 0; j < INPUTS_OF(kind); j += 4, to += 64)
            i32_store(to, i32_sub_bytes(IN_QUADS(kind) ? quad_of(words, j / 4, kind) : digits(i32_load(words), j, kind), less));
}

/* Sums for n tokens and 16 outputs: of one part or two as floats, or those of the low and the high bytes of one */
typedef struct {
    const char *sums[2];
    size_t at[2], above[2]; /* where the scales and zero points of a part begin, and `over` and `mins` */
    const Part *parts[2];
    float *totals; /* [n, OUTPUTS] */
    int n;
} Sums;

enum { AS_BYTES, ONE_PART, TWO_PARTS }; /* kinds of sums */
#define WITH_ZEROS 1 /* whether something is still to be subtracted for the zero points; and for `mins` */
#define WITH_MINS 2

/* Add the sums times their scales to the totals */
INLINE void add_some(const Matrix *m, const Sums *s, int sums, int how) {
    const int parts = sums == TWO_PARTS ? 2 : 1, n = s->n;
    const char *low = s->sums[0], *high = s->sums[1];
    float *totals = s->totals;
    f32 scale[2], less[2];
    i32 zero[2];
    UNROLLED for (int i = 0; i < parts; i++) {
        scale[i] = scales(m, s->at[i], s->above[i]), less[i] = how & WITH_MINS ? least(m, s->at[i], s->above[i]) : f32_zero(), zero[i] = i32_zero();
        if (how & WITH_ZEROS) zero[i] = m->mins ? i32_of(m->zero) : zeros(m, s->at[i]);
        if (how & WITH_ZEROS && sums == AS_BYTES) zero[i] = i32_sub(zero[i], i32_of(MIDDLE(m->kind)));
    }
    const Part *first = s->parts[0], *second = s->parts[1];
    for (int t = 0; t < n; t++, totals += OUTPUTS, low += 64, high += 64) {
        f32 total = f32_load(totals);
        UNROLLED for (int i = 0; i < parts; i++) {
            const Part part = i ? second[t] : first[t];
            f32 found;
            if (sums != AS_BYTES) {
                found = f32_load((const float *)(i ? high : low));
                if (how & WITH_ZEROS) found = f32_fnma(i32_to_f32(zero[i]), f32_of(part.sum), found);
            } else {
                sum bytes = {i32_load(low), i32_load(high)};
                if (how & WITH_ZEROS) bytes.low = i32_add(bytes.low, i32_mul(zero[i], i32_of(times(-1, part.sum))));
                found = ended_sum(bytes);
            }
            if (how & WITH_MINS) total = f32_fnma(less[i], f32_of(part.sum * part.scale), total);
            total = f32_fma(found, f32_mul(scale[i], f32_of(part.scale)), total);
        }
        f32_store(totals, total);
    }
}

/* Not inlined: within a larger function compilers run out of registers. */
#define ADD(name, sums, how) \
    static __attribute__((noinline)) void name(const Matrix *m, const Sums *s) { add_some(m, s, sums, how); }
#define ADD_EACH(name, sums) \
    ADD(name##_0, sums, 0) ADD(name##_1, sums, WITH_ZEROS) ADD(name##_2, sums, WITH_MINS) ADD(name##_3, sums, WITH_ZEROS | WITH_MINS)
ADD_EACH(add_bytes, AS_BYTES)
ADD_EACH(add_part, ONE_PART)
ADD_EACH(add_parts, TWO_PARTS)

/* The weights of `inputs` inputs of 16 outputs, whose zero points begin at index `at`, as rows of tiles */
INLINE void unpack(const Matrix *m, const uint32_t *words, size_t at, int inputs, int kind, const uint16_t *table, char *to) {
    if (table)
        pairs_of(words, inputs, kind, table, to);
    else
        bytes_in_rows(words, inputs, kind, subtracted(m, at, kind), to);
}

/* Add all parts of n tokens to totals [n, OUTPUTS], as of_tokens() does */
INLINE void tiled_groups(const Matrix *m, int o, const Prepared *p, int n, float *totals, int K, const char *after, int kind, int in_row) {
    static void (*const adding[3][4])(const Matrix *, const Sums *) = {{add_bytes_0, add_bytes_1, add_bytes_2, add_bytes_3},
                                                                       {add_part_0, add_part_1, add_part_2, add_part_3},
                                                                       {add_parts_0, add_parts_1, add_parts_2, add_parts_3}};
    const int groups = K / m->group, shared = m->nested ? groups / m->nested : 0, part = m->group < SEGMENT ? m->group : SEGMENT;
    const int floats = in_row == IN_FLOATS, both = floats && part <= 32, sums_of = both ? TWO_PARTS : floats ? ONE_PART : AS_BYTES;
    const int steps = both ? 2 * part : part, two = floats || steps > in_row; /* inputs at a time; whether they are two rows of a tile */
    const int row = !floats ? in_row : part < 32 ? 32 : 64;                     /* in bytes */
    const int still = floats ? m->zeros && !m->mins : !IN_FOUR_BITS(kind) && (m->zero != MIDDLE(kind) || (m->zeros && !m->mins));
    const __auto_type add = adding[sums_of][(still ? WITH_ZEROS : 0) | (m->mins ? WITH_MINS : 0)];
    const int rounds = (n + TILE_ROWS - 1) / TILE_ROWS, rows = (n + rounds - 1) / rounds;
    const size_t words = WORDS_OF(kind, steps) * OUTPUTS;
    const uint32_t *w = (const uint32_t *)m->values + o * WORDS_OF(kind, K);
    const char *soon = (const char *)w + SOON, *last = (const char *)w + K / steps * words * sizeof(*w);
    char sums[2][2][TILE_ROWS * 64], weights[2][BLOCKS][2 * TILE_ROWS * 64];
    uint16_t numbers[NUMBERS], *table = floats ? numbers : 0;
    Sums before = {.n = 0};
    int turn = 0, now = 0;
    if (floats) find_numbers(m, kind, numbers);
    for (int b = 0; b < BLOCKS; b++) unpack(m, w + b * 16, (size_t)o * groups + b * 16, steps, kind, table, weights[0][b]);
    tiles_with((Rows){rows, rows, rows, rows, rows, rows, row / 4, row / 4}, row);
    for (int k = 0; k < K; k += steps, now = !now) {
        const size_t group = k / m->group, at = (size_t)o * groups + group * OUTPUTS, next = (size_t)o * groups + (k + steps) / m->group * OUTPUTS;
        const size_t above = shared ? (size_t)o * shared + group / m->nested * OUTPUTS : 0;
        const size_t second = shared ? (size_t)o * shared + (group + 1) / m->nested * OUTPUTS : 0; /* the same for the second part */
        const Part *parts = p->parts + (size_t)k / part * 2 * n;
        const given *x = p->inputs + (size_t)k / SEGMENT * n * SEGMENT + k % SEGMENT;
        w += words;
        if (soon >= last) soon = after ? after + (soon - last) : 0, last = (const char *)UINTPTR_MAX;
        for (size_t i = 0; soon && i < words * sizeof(*w); i += LINE, soon += LINE) prefetch(soon);
        for (int first = 0; first < n; first += rows) {
            const int from = first + rows > n ? n - rows : first; /* some tokens may be in two rounds */
            const char *low = (const char *)(x + from * SEGMENT), *high = low + row;
            tile_load(4, low, SEGMENT * sizeof(given));
            tile_load(5, high, SEGMENT * sizeof(given));
            if (!floats && two) {
                tile_load(2, low + 2 * row, SEGMENT * sizeof(given));
                tile_load(3, high + 2 * row, SEGMENT * sizeof(given));
            }
            for (int b = 0; b < BLOCKS; b++, turn = !turn) {
                const char *some = weights[now][b], *more = some + row * 16;
                tile_zero(0);
                if (sums_of != ONE_PART) tile_zero(1);
                tile_load(6, some, 64);
                if (two) tile_load(7, more, 64);
                if (floats) {
                    tile_product(0, 4, 6);
                    if (both)
                        tile_product(1, 5, 7);
                    else
                        tile_product(0, 5, 7);
                } else {
                    tile_bytes(0, 4, 6);
                    tile_bytes(1, 5, 6);
                    if (two) tile_bytes(0, 2, 7);
                    if (two) tile_bytes(1, 3, 7);
                }
                tile_store(0, sums[turn][0], 64);
                if (sums_of != ONE_PART) tile_store(1, sums[turn][1], 64);
                if (before.n) add(m, &before);
                if (first == 0 && k + steps < K) unpack(m, w + b * 16, next + b * 16, steps, kind, table, weights[!now][b]);
                const size_t skipped = (size_t)(first - from) * 64, begin = at + b * 16;
                before = (Sums){{sums[turn][0] + skipped, sums[turn][1] + skipped}, {begin, begin + OUTPUTS}, {above + b * 16, second + b * 16},
                                {parts + first, parts + 2 * n + first}, totals + first * OUTPUTS + b * 16, n - first < rows ? n - first : rows};
            }
        }
    }
    add(m, &before);
    tiles_end();
}

#define SOME_TILED(name, kind, in_row) \
    static __attribute__((noinline)) void name(const Matrix *m, int o, const Prepared *p, int n, float *totals, int K, const char *after, int row) { \
        (void)row; \
        tiled_groups(m, o, p, n, totals, K, after, kind, in_row); \
    }
SOME_TILED(fours_in_tiles, GROUPS_OF_FOUR, IN_FLOATS)
SOME_TILED(sixes_in_tiles, GROUPS_OF_SIX, IN_FLOATS)
SOME_TILED(floats_in_tiles, GROUPS_OF_E2M1, IN_FLOATS)
SOME_TILED(fours_as_bytes, GROUPS_OF_FOUR, row)
SOME_TILED(sixes_as_bytes, GROUPS_OF_SIX, row)
SOME_TILED(floats_as_bytes, GROUPS_OF_E2M1, row)
SOME_TILED(eights_as_bytes, GROUPS_OF_EIGHT, row)

static void some_tiled_groups(const Matrix *m, int o, const Prepared *p, int n, float *totals, int K, const char *after, int in_row) {
    const int exact = in_row == IN_FLOATS;
    switch (m->kind) {
        case GROUPS_OF_FOUR: (exact ? fours_in_tiles : fours_as_bytes)(m, o, p, n, totals, K, after, in_row); break;
        case GROUPS_OF_SIX: (exact ? sixes_in_tiles : sixes_as_bytes)(m, o, p, n, totals, K, after, in_row); break;
        case GROUPS_OF_EIGHT: eights_as_bytes(m, o, p, n, totals, K, after, in_row); break;
        default: (exact ? floats_in_tiles : floats_as_bytes)(m, o, p, n, totals, K, after, in_row);
    }
}
