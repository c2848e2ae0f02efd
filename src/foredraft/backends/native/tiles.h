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
    for (int i = 0; i < 8; i++) tile_of[i].rows = rows[i], tile_of[i].row = i == 4 || i == 5 ? row : 64;
}
#define tiles_end()
#define tile_zero(i) __builtin_memset(tile_of[i].bytes, 0, sizeof tile_of[i].bytes)
#define tile_load(i, p, stride) \
    for (int row = 0; row < tile_of[i].rows; row++) \
        __builtin_memcpy(tile_of[i].bytes[row], (const char *)(p) + row * (size_t)(stride), tile_of[i].row)
#define tile_store(i, p, stride) \
    for (int row = 0; row < tile_of[i].rows; row++) __builtin_memcpy((char *)(p) + row * (size_t)(stride), tile_of[i].bytes[row], 64)
static void tile_product(int sum, int inputs, int weights) {
    tiles_used = 1;
    for (int t = 0; t < tile_of[sum].rows; t++) {
        const value *x = (const value *)tile_of[inputs].bytes[t];
        float *y = (float *)tile_of[sum].bytes[t];
        for (int o = 0; o < 16; o++) {
            float even = 0.0f, odd = 0.0f;
            for (int k = 0; k < 16; k++) {
                const value *w = (const value *)tile_of[weights].bytes[k] + 2 * o;
                even = __builtin_fmaf(of_brain(x[2 * k]), of_brain(w[0]), even);
                odd = __builtin_fmaf(of_brain(x[2 * k + 1]), of_brain(w[1]), odd);
            }
            y[o] += even + odd;
        }
    }
}
/* sums += signed bytes of inputs times unsigned bytes of weights */
static void tile_bytes(int sum, int inputs, int weights) {
    tiles_used = 1;
    for (int t = 0; t < tile_of[sum].rows; t++) {
        const int8_t *x = (const int8_t *)tile_of[inputs].bytes[t];
        int32_t *y = (int32_t *)tile_of[sum].bytes[t];
        for (int o = 0; o < 16; o++)
            for (int k = 0; k < tile_of[inputs].row; k++) y[o] += x[k] * tile_of[weights].bytes[k / 4][4 * o + k % 4];
    }
}
#else
/* Set the rows of each tile, which have 64 bytes, but `row` bytes in tiles 4 and 5 */
static void tiles_with(const Rows rows, int row) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = i == 4 || i == 5 ? row : 64, shape.rows[i] = rows[i];
    __asm__ volatile("" : : "m"(shape) : "memory"); /* compilers do not know that it is read */
    _tile_loadconfig(&shape);
}
#define tiles_end() _tile_release()
#define tile_zero(i) _tile_zero(i)
#define tile_load(i, p, stride) \
    do { \
        __asm__ volatile("" : : : "memory"); /* nor that this is */ \
        _tile_loadd(i, p, stride); \
    } while (0)
#define tile_store(i, p, stride) _tile_stored(i, p, stride)
#define tile_product(sum, inputs, weights) _tile_dpbf16ps(sum, inputs, weights)
#define tile_bytes(sum, inputs, weights) _tile_dpbsud(sum, inputs, weights)
#endif

#define tiles_begin(...) tiles_with(__VA_ARGS__, 64)

/* BLOCKS * 16 outputs from o on, of T tokens, into out [T, BLOCKS * 16] */
static void tiled(const Matrix *m, int o, const value *x, value *out, int T, int K) {
    const size_t block = (size_t)K * 16 * sizeof(value), line = (size_t)K * sizeof(value);
    const char *w = (const char *)m->values + (size_t)o * line;
    for (int t = 0; t < T; t += TILE_ROWS, x += TILE_ROWS * K, out += TILE_ROWS * BLOCKS * 16) {
        const int n = T - t < TILE_ROWS ? T - t : TILE_ROWS;
        float sums[BLOCKS][TILE_ROWS * 16];
        tiles_begin((Rows){n, n, n, n, n, TILE_ROWS, TILE_ROWS, TILE_ROWS});
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
        for (int k = 0; k < K; k += TILE_INPUTS) {
            const char *w_k = w + (size_t)k * 16 * sizeof(value);
            tile_load(4, x + k, line);
            tile_load(5, w_k, 64);
            tile_product(0, 4, 5);
            tile_load(6, w_k + block, 64);
            tile_product(1, 4, 6);
            tile_load(5, w_k + 2 * block, 64);
            tile_product(2, 4, 5);
            tile_load(6, w_k + 3 * block, 64);
            tile_product(3, 4, 6);
        }
        tile_store(0, sums[0], 64);
        tile_store(1, sums[1], 64);
        tile_store(2, sums[2], 64);
        tile_store(3, sums[3], 64);
        tiles_end();
        for (int b = 0; b < BLOCKS; b++)
            for (int i = 0; i < n; i++) store(out + (i * BLOCKS + b) * 16, f32_add(f32_load(sums[b] + i * 16), begun(m, o + b * 16, VALUES)));
    }
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

/* sums [n, size] += probabilities [n, KEYS] times the first `count` of `rows`. `room` has place for KEYS values. */
static void tiled_gather(const float *probabilities, const value *const *rows, float *sums, int count, int size, int n, value *room, const value *next) {
    const int halves = (count + TILE_INPUTS - 1) / TILE_INPUTS;
    value chances[QUERIES * KEYS], *to = room;
    for (int i = 0; i < n * KEYS; i += 16) store(chances + i, f32_load(probabilities + i));
    for (int j = 0; j < halves * TILE_INPUTS; j += 2, to += TILE_INPUTS)
        for (int d = 0; d < size; d += 16) {
            const i32 low = j < count ? i32_from_16(rows[j] + d) : i32_zero();
            value *pairs = to + (size_t)(j / TILE_INPUTS * (size / 16 - 1) + d / 16) * 16 * TILE_INPUTS;
            if (next) __builtin_prefetch(next + j * size + d * 2, 0, INTO_L2);
            i32_store(pairs, j + 1 < count ? i32_xor(low, i32_left(i32_from_16(rows[j + 1] + d), 16)) : low);
        }
    const size_t half = TILE_INPUTS * size;
    const value *from = chances;
    for (int t = 0; t < n; t += 2 * TILE_ROWS, from += 2 * TILE_ROWS * KEYS, sums += 2 * TILE_ROWS * size) {
        const int first = n - t < TILE_ROWS ? n - t : TILE_ROWS, second = n - t - first < TILE_ROWS ? n - t - first : TILE_ROWS;
        tiles_begin((Rows){first, second ? second : 1, first, first, second ? second : 1, second ? second : 1, 16, 16});
        tile_load(2, from, KEYS * sizeof(value));
        if (halves > 1) tile_load(3, from + TILE_INPUTS, KEYS * sizeof(value));
        if (second) {
            tile_load(4, from + TILE_ROWS * KEYS, KEYS * sizeof(value));
            if (halves > 1) tile_load(5, from + TILE_ROWS * KEYS + TILE_INPUTS, KEYS * sizeof(value));
        }
        for (int d = 0; d < size; d += 16) {
            tile_load(0, sums + d, size * sizeof(float));
            tile_load(6, room + d * TILE_INPUTS, 64);
            tile_product(0, 2, 6);
            if (halves > 1) {
                tile_load(7, room + half + d * TILE_INPUTS, 64);
                tile_product(0, 3, 7);
            }
            tile_store(0, sums + d, size * sizeof(float));
            if (!second) continue;
            tile_load(1, sums + TILE_ROWS * size + d, size * sizeof(float));
            tile_product(1, 4, 6);
            if (halves > 1) tile_product(1, 5, 7);
            tile_store(1, sums + TILE_ROWS * size + d, size * sizeof(float));
        }
        tiles_end();
    }
}
