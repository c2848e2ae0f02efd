/* Products of bfloat16 weights, and attention in bfloat16, by AMX: a tile has the sums of 16 tokens and 16 outputs, of 16 keys and 16 queries, or of
 * 16 queries and 16 columns of values. group_tiles.h has group-quantized weights.
 *
 * 32 inputs of 16 outputs of a packed matrix lie behind one another, in the order in which TDPBF16PS reads a tile of weights. It adds the
 * first numbers of 16 pairs, and the second ones, and then both to the sum, so bits are not those of other instructions. So all products of
 * such weights are made here, those of one token too: the result of a token does not depend on how many there are.
 *
 * EMULATED computes the same without the instructions, to test what is around them on other CPUs.
 */
#define TILE_INPUTS 32 /* inputs of a tile */
#define TILE_ROWS 16 /* tokens of a tile, and outputs */
typedef uint8_t Rows[8]; /* of each tile */
#define OF_INPUTS(i) ((i) >= 2 && (i) <= 5) /* whether tile number i has inputs as bytes, where there are any */

#ifdef EMULATED
typedef struct {
    int rows, row;
    uint8_t bytes[TILE_ROWS][64];
} Tile;
static __thread Tile tile_of[8];
static _Atomic int tiles_used;

INLINE float of_brain(value x) {
    const uint32_t bits = (uint32_t)x << 16;
    float found;
    __builtin_memcpy(&found, &bits, sizeof found);
    return found;
}

static void tiles_with(const Rows rows, int row) {
    for (int i = 0; i < 8; i++) tile_of[i].rows = rows[i], tile_of[i].row = OF_INPUTS(i) ? row : 64;
}
#define tiles_end() (void)0
#define tile_zero(i) __builtin_memset(tile_of[i].bytes, 0, sizeof tile_of[i].bytes)
static void tile_load(int i, const void *p, size_t stride) {
    for (int row = 0; row < tile_of[i].rows; row++) __builtin_memcpy(tile_of[i].bytes[row], (const char *)p + row * stride, tile_of[i].row);
}
static void tile_store(int i, void *p, size_t stride) {
    for (int row = 0; row < tile_of[i].rows; row++) __builtin_memcpy((char *)p + row * stride, tile_of[i].bytes[row], 64);
}
static void tile_product(int sum, int inputs, int weights) {
    tiles_used = 1;
    for (int t = 0; t < tile_of[sum].rows; t++) {
        const value *x = (const value *)tile_of[inputs].bytes[t];
        float *y = (float *)tile_of[sum].bytes[t];
        for (int o = 0; o < 16; o++) {
            float even = 0.0f, odd = 0.0f;
            for (int k = 0; k < tile_of[inputs].row / 4; k++) {
                const value *w = (const value *)tile_of[weights].bytes[k] + 2 * o;
                even = __builtin_fmaf(of_brain(x[2 * k]), of_brain(w[0]), even);
                odd = __builtin_fmaf(of_brain(x[2 * k + 1]), of_brain(w[1]), odd);
            }
            y[o] += even + odd;
        }
    }
}
/* sums += signed bytes of inputs times signed bytes of weights */
static void tile_bytes(int sum, int inputs, int weights) {
    tiles_used = 1;
    for (int t = 0; t < tile_of[sum].rows; t++) {
        const int8_t *x = (const int8_t *)tile_of[inputs].bytes[t];
        int32_t *y = (int32_t *)tile_of[sum].bytes[t];
        for (int o = 0; o < 16; o++)
            for (int k = 0; k < tile_of[inputs].row; k++) y[o] += x[k] * (int8_t)tile_of[weights].bytes[k / 4][4 * o + k % 4];
    }
}
#else
/* Set the rows of each tile, which have 64 bytes, but `row` bytes in tiles of inputs */
static void tiles_with(const Rows rows, int row) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = OF_INPUTS(i) ? row : 64, shape.rows[i] = rows[i];
    __asm__ volatile("" : : "m"(shape) : "memory"); /* compilers do not know that it is read */
    _tile_loadconfig(&shape);
}
#define tiles_end() _tile_release()
#define tile_zero(i) _tile_zero(i)
#define tile_load(i, p, stride) \
    do { \
        __asm__ volatile("" : : : "memory"); /* nor that this is: neither stores before it */ \
        _tile_loadd(i, p, stride); \
        __asm__ volatile("" : : : "memory"); /* nor those after it may pass it */ \
    } while (0)
#define tile_store(i, p, stride) _tile_stored(i, p, stride)
#define tile_product(sum, inputs, weights) _tile_dpbf16ps(sum, inputs, weights)
#define tile_bytes(sum, inputs, weights) _tile_dpbssd(sum, inputs, weights)
#endif

#define tiles_begin(...) tiles_with(__VA_ARGS__, 64)

/* Set the rows of tiles for n tokens of pair_of_tiles() */
static void pairs_begin(int n) {
    const int first = n < TILE_ROWS ? n : TILE_ROWS, second = n > TILE_ROWS ? n - TILE_ROWS : 1;
    tiles_begin((Rows){first, first, second, second, first, second, TILE_ROWS, TILE_ROWS});
}

/* For n <= 2 * TILE_ROWS tokens and 32 columns: out [n, 32], or if `adding` out +=, is x [n, inputs] times the weights at `some`, for 16 columns, and
 * at `others`, which are null if there are only 16. `line` and `row` are the strides of x and out; weights of 32 inputs are `step` after those of
 * the 32 before. Each tile that is loaded is used twice. Meanwhile, so many `lines` from `soon` on are prefetched for each 32 inputs, and as many
 * from `apart` bytes behind it on, unless that is 0. */
INLINE void pair_of_tiles(const value *x, size_t line, const value *some, const value *others, size_t step, int inputs, float *out, size_t row, int n,
                          int adding, const char *soon, size_t apart, int lines) {
    const int second = n > TILE_ROWS;
    const value *more = x + TILE_ROWS * line;
    float *below = out + TILE_ROWS * row;
    line *= sizeof(value), row *= sizeof(float);
    if (!adding) {
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
    } else {
        tile_load(0, out, row);
        if (others) tile_load(1, out + 16, row);
        if (second) tile_load(2, below, row);
        if (second && others) tile_load(3, below + 16, row);
    }
    for (int k = 0; k < inputs; k += TILE_INPUTS, some += step) {
        for (int i = 0; i < lines; i++, soon += LINE) {
            __builtin_prefetch(soon, 0, INTO_L2);
            if (apart) __builtin_prefetch(soon + apart, 0, INTO_L2);
        }
        tile_load(4, x + k, line);
        tile_load(6, some, 64);
        tile_product(0, 4, 6);
        if (second) {
            tile_load(5, more + k, line);
            tile_product(2, 5, 6);
        }
        if (!others) continue;
        tile_load(7, others, 64);
        tile_product(1, 4, 7);
        if (second) tile_product(3, 5, 7);
        others += step;
    }
    tile_store(0, out, row);
    if (others) tile_store(1, out + 16, row);
    if (second) tile_store(2, below, row);
    if (second && others) tile_store(3, below + 16, row);
}

/* Widen 8-bit weights of `inputs` inputs of BLOCKS * 16 outputs, which are `block` bytes apart, to tiles; those of 16 outputs are `apart` values apart */
INLINE void widened_tiles(const char *w, size_t block, int inputs, value *to, size_t apart) {
    for (int k = 0; k < inputs; k += DEPTH, w += DEPTH * 16, to += DEPTH * 16)
        for (int b = 0; b < BLOCKS; b++) i32_store(to + b * apart, brain_from_8((const int8_t *)w + b * block));
}

/* BLOCKS * 16 outputs from o on, of n <= TILE_ROWS tokens, into out [n, BLOCKS * 16]: all at once, so that weights come from four places, as memory
 * is read fastest. `after` points to the weights that are probably read next, or is null. Loads of tiles wait for few cache lines at a time, so
 * weights are prefetched if `asking`; without it they are in the L2 cache already, where prefetches take half of the time. */
INLINE void few_tiled(const Matrix *m, int o, const value *x, value *out, int n, int K, const char *after, int asking, int kind) {
    enum { TILE = 16 * TILE_INPUTS };
    const int lines = TILE * (int)SIZE(kind) / LINE;
    const size_t block = (size_t)K * 16 * SIZE(kind), apart = kind == EIGHTS ? TILE : (size_t)K * 16;
    const char *w = (const char *)m->values + o / 16 * block, *soon = w + AHEAD;
    value room[kind == EIGHTS ? BLOCKS * TILE : 1];
    float sums[BLOCKS][TILE_ROWS * 16];
    tiles_begin((Rows){n, n, n, n, n, TILE_ROWS, TILE_ROWS, TILE_ROWS});
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int k = 0; k < K; k += TILE_INPUTS, w += TILE * SIZE(kind), soon += lines * LINE) {
        const value *tiles = kind == EIGHTS ? room : (const value *)w;
        if (after && AHEAD >= (K - k) * 16 * (int)SIZE(kind)) soon = after, after = 0;
        for (int i = 0; asking && i < lines * BLOCKS; i++) __builtin_prefetch(soon + i % BLOCKS * block + i / BLOCKS * LINE, 0, INTO_L2);
        if (kind == EIGHTS) widened_tiles(w, block, TILE_INPUTS, room, TILE);
        tile_load(4, x + k, K * sizeof(value));
        tile_load(5, tiles, 64);
        tile_product(0, 4, 5);
        tile_load(6, tiles + apart, 64);
        tile_product(1, 4, 6);
        tile_load(5, tiles + 2 * apart, 64);
        tile_product(2, 4, 5);
        tile_load(6, tiles + 3 * apart, 64);
        tile_product(3, 4, 6);
    }
    tile_store(0, sums[0], 64);
    tile_store(1, sums[1], 64);
    tile_store(2, sums[2], 64);
    tile_store(3, sums[3], 64);
    tiles_end();
    for (int b = 0; b < BLOCKS; b++)
        for (int i = 0; i < n; i++)
            store(out + (i * BLOCKS + b) * 16, ended(f32_add(f32_load(sums[b] + i * 16), begun(m, o + b * 16, kind)), m, o + b * 16, kind));
}

static void few_values(const Matrix *m, int o, const value *x, value *out, int n, int K, const char *after) { few_tiled(m, o, x, out, n, K, after, 1, VALUES); }
static void rest_values(const Matrix *m, int o, const value *x, value *out, int n, int K) { few_tiled(m, o, x, out, n, K, 0, 0, VALUES); }
static void few_eights(const Matrix *m, int o, const value *x, value *out, int n, int K, const char *after) { few_tiled(m, o, x, out, n, K, after, 1, EIGHTS); }

/* Likewise of T tokens. If they are many, what is read next is prefetched meanwhile; if not, these weights while the first tokens are multiplied. */
static void tiled(const Matrix *m, int o, const value *x, value *out, int T, int K, const char *after) {
    enum { AT_A_TIME = 2 * TILE_ROWS, ENOUGH = 96, EACH = 32 * TILE_INPUTS * sizeof(value) / LINE }; /* EACH: lines of weights that a step reads */
    const size_t block = (size_t)K * 16;
    const value *w = (const value *)m->values + o / 16 * block;
    const int groups = (T + AT_A_TIME - 1) / AT_A_TIME, lines = after && T >= ENOUGH ? (EACH + groups - 1) / groups : 0;
    float sums[AT_A_TIME * 32];
    int t = 0;
    for (int n, set = 0; T - t > TILE_ROWS; t += n, x += (size_t)n * K, out += n * BLOCKS * 16) {
        n = T - t < AT_A_TIME ? T - t : AT_A_TIME;
        if (n != set) pairs_begin(set = n);
        for (int b = 0; b < BLOCKS; b += 2) {
            const value *here = w + b * block;
            if (lines || t)
                pair_of_tiles(x, K, here, here + block, 16 * TILE_INPUTS, K, sums, 32, n, 0, after, 0, lines);
            else
                pair_of_tiles(x, K, here, here + block, 16 * TILE_INPUTS, K, sums, 32, n, 0, (const char *)here + AHEAD, block * sizeof(value), EACH / 2);
            if (lines) after += (size_t)lines * (K / TILE_INPUTS) * LINE;
            for (int c = 0; c < 2; c++) {
                const f32 begin = begun(m, o + (b + c) * 16, VALUES);
                for (int i = 0; i < n; i++) store(out + (i * BLOCKS + b + c) * 16, f32_add(f32_load(sums + i * 32 + c * 16), begin));
            }
        }
    }
    if (t) tiles_end();
    if (t && t < T)
        rest_values(m, o, x, out, T - t, K);
    else if (t < T)
        few_values(m, o, x, out, T, K, after);
}

/* Likewise of 8-bit weights, widened for TILE_ROWS < T <= WHOLE tokens. Between two pieces of the inputs, sums are in memory. */
static void tiled_eights(const Matrix *m, int o, const value *x, value *out, int T, int K) {
    enum { AT_A_TIME = 2 * TILE_ROWS, PIECE = 512, WIDTH = BLOCKS * 16 };
    const size_t block = (size_t)K * 16;
    value room[WIDTH * PIECE];
    float sums[WHOLE * WIDTH];
    int set = 0;
    for (int k = 0; k < K; k += PIECE) {
        const int inputs = K - k < PIECE ? K - k : PIECE;
        widened_tiles((const char *)m->values + o / 16 * block + k * 16, block, inputs, room, 16 * PIECE);
        for (int t = 0, n; t < T; t += n) {
            n = T - t < AT_A_TIME ? T - t : AT_A_TIME;
            if (n != set) pairs_begin(set = n);
            for (int b = 0; b < BLOCKS; b += 2) {
                const value *some = room + b * 16 * PIECE;
                pair_of_tiles(x + (size_t)t * K + k, K, some, some + 16 * PIECE, 16 * TILE_INPUTS, inputs, sums + t * WIDTH + b * 16, WIDTH, n, k > 0, 0, 0, 0);
            }
        }
    }
    tiles_end();
    for (int t = 0; t < T; t++)
        for (int b = 0; b < WIDTH; b += 16) store(out + t * WIDTH + b, ended(f32_load(sums + t * WIDTH + b), m, o + b, EIGHTS));
}

/* Dot products of n <= QUERIES queries with the first `count` of KEYS keys, into scores [n, KEYS]. `queries` are packed as keys are in
 * packed_keys(). A key has `size` numbers in `keys`, and `rest` more in `more`. `room` has place for 16 keys. Keys are read as they lie in the
 * cache, so a tile has the sums of 16 keys and 16 queries. */
static void tiled_scores(const value *keys, int size, const value *more, int rest, int count, const value *queries, int n, float *scores, value *room,
                         const value *next) {
    const int last = count / TILE_ROWS * TILE_ROWS, whole = size + rest; /* of keys from `last` on there are fewer than 16 */
    const int lines = KEYS * size * (int)sizeof(value) / LINE, each = (lines + whole / TILE_INPUTS - 1) / (whole / TILE_INPUTS);
    for (int j = last; j < count; j++) {
        __builtin_memcpy(room + (j - last) * size, keys + (size_t)j * size, size * sizeof(value));
        if (rest) __builtin_memcpy(room + TILE_ROWS * size + (j - last) * rest, more + (size_t)j * rest, rest * sizeof(value));
    }
    tiles_begin((Rows){16, 16, 16, 16, 16, 16, 16, 16});
    for (int t = 0; t < n; t += TILE_ROWS, queries += TILE_ROWS * whole) {
        float sums[KEYS / 16][16 * 16];
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
        for (int d = 0; d < whole; d += TILE_INPUTS) {
            const int line = (d < size ? size : rest) * (int)sizeof(value);
            const char *from = (const char *)(d < size ? keys + d : more + d - size);
            const char *end = (const char *)(d < size ? room + d : room + TILE_ROWS * size + d - size);
            for (int i = 0; t == 0 && next && i < each; i++, next += LINE / sizeof(value)) __builtin_prefetch(next, 0, INTO_L2);
#define OF_KEYS(b, keys_tile) \
    if (b * 16 < count) { \
        tile_load(keys_tile, b * 16 == last ? end : from + b * 16 * line, line); \
        tile_product(b, keys_tile, 6); \
    }
            tile_load(6, queries + d * 16, 64);
            OF_KEYS(0, 4)
            OF_KEYS(1, 5)
            OF_KEYS(2, 4)
            OF_KEYS(3, 5)
#undef OF_KEYS
        }
        tile_store(0, sums[0], 64);
        tile_store(1, sums[1], 64);
        tile_store(2, sums[2], 64);
        tile_store(3, sums[3], 64);
        for (int b = 0; b * 16 < count; b++) {
            i32 r[16];
            for (int j = 0; j < 16; j++) r[j] = i32_load(sums[b] + j * 16);
            turned(r);
            for (int i = 0; i < 16 && t + i < n; i++) i32_store(scores + (t + i) * KEYS + b * 16, r[i]);
        }
    }
    tiles_end();
}

/* Pack the values at the first `count` of `rows`, `size` numbers of each, as tiles of 32 of `keys` keys and 16 columns; absent ones are zero */
static void packed_values(const value *const *rows, int count, int size, int keys, value *to, const value *next) {
    for (int j = 0; j < keys; j += 2, to += TILE_INPUTS)
        for (int d = 0; d < size; d += 16) {
            const i32 low = j < count ? i32_from_16(rows[j] + d) : i32_zero();
            value *pairs = to + (size_t)(j / TILE_INPUTS * (size / 16 - 1) + d / 16) * 16 * TILE_INPUTS;
            if (next) __builtin_prefetch(next + j * size + d * 2, 0, INTO_L2);
            i32_store(pairs, j + 1 < count ? i32_xor(low, i32_left(i32_from_16(rows[j + 1] + d), 16)) : low);
        }
}

/* sums [n, SUMS(size)] += chances [n, keys] times packed values; n <= 2 * TILE_ROWS, `row` is the stride of chances */
static void add_values(const value *chances, int row, const value *values, int keys, float *sums, int size, int n) {
    const size_t columns = 16 * TILE_INPUTS, step = (size_t)size * TILE_INPUTS;
    for (int d = 0; d < size; d += 32, values += 2 * columns)
        pair_of_tiles(chances, row, values, d + 16 < size ? values + columns : 0, step, keys, sums + d, SUMS(size), n, 1, 0, 0, 0);
}

/* sums [n, SUMS(size)] += probabilities [n, KEYS] times the first `count` of `rows`. `room` has place for KEYS values. */
static void tiled_gather(const float *probabilities, const value *const *rows, float *sums, int count, int size, int n, value *room, const value *next) {
    const int keys = (count + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS;
    value chances[QUERIES * KEYS];
    for (int i = 0; i < n * KEYS; i += 16) store(chances + i, f32_load(probabilities + i));
    packed_values(rows, count, size, keys, room, next);
    for (int t = 0, some; t < n; t += some) {
        some = n - t < 2 * TILE_ROWS ? n - t : 2 * TILE_ROWS;
        pairs_begin(some);
        add_values(chances + t * KEYS, KEYS, room, keys, sums + t * SUMS(size), size, some);
        tiles_end();
    }
}
