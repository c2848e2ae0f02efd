/* Products of bfloat16 weights by AMX: a tile has the sums of 16 tokens and 16 outputs. Included by products.h.
 *
 * 32 inputs of 16 outputs of a packed matrix lie behind one another, in the order in which TDPBF16PS reads a tile of weights. It adds the
 * first numbers of 16 pairs, and the second ones, and then both to the sum, so bits are not those of other instructions. So all products of
 * such weights are made here, those of one token too: the result of a token does not depend on how many there are.
 *
 * EMULATED computes the same without the instructions, to test what is around them on other CPUs.
 */
#define TILE_INPUTS 32 /* inputs of a tile */
#define TILE_ROWS 16 /* tokens of a tile, and outputs */

#ifdef EMULATED
typedef struct {
    int rows;
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

static void tiles_begin(int tokens) {
    for (int i = 0; i < 8; i++) tile_of[i].rows = i < 5 ? tokens : TILE_ROWS;
}
#define tiles_end()
#define tile_zero(i) __builtin_memset(tile_of[i].bytes, 0, sizeof tile_of[i].bytes)
#define tile_load(i, p, stride) \
    for (int row = 0; row < tile_of[i].rows; row++) __builtin_memcpy(tile_of[i].bytes[row], (const char *)(p) + row * (stride), 64)
#define tile_store(i, p, stride) \
    for (int row = 0; row < tile_of[i].rows; row++) __builtin_memcpy((char *)(p) + row * (stride), tile_of[i].bytes[row], 64)
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
#else
static void tiles_begin(int tokens) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = i < 5 ? tokens : TILE_ROWS;
    _tile_loadconfig(&shape);
}
#define tiles_end() _tile_release()
#define tile_zero(i) _tile_zero(i)
#define tile_load(i, p, stride) _tile_loadd(i, p, stride)
#define tile_store(i, p, stride) _tile_stored(i, p, stride)
#define tile_product(sum, inputs, weights) _tile_dpbf16ps(sum, inputs, weights)
#endif

/* BLOCKS * 16 outputs from o on, of T tokens, into out [T, BLOCKS * 16] */
static void tiled(const Matrix *m, int o, const value *x, value *out, int T, int K) {
    const size_t block = (size_t)K * 16 * sizeof(value), line = (size_t)K * sizeof(value);
    const char *w = (const char *)m->values + (size_t)o * line;
    for (int t = 0; t < T; t += TILE_ROWS, x += TILE_ROWS * K, out += TILE_ROWS * BLOCKS * 16) {
        const int n = T - t < TILE_ROWS ? T - t : TILE_ROWS;
        float sums[BLOCKS][TILE_ROWS * 16];
        tiles_begin(n);
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
