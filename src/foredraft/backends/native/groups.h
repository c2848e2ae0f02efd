/* Group-quantized weights of 4, 6 or 8 bits: each output has one scale per group of inputs. Included by layer.c.
 *
 * A weight is (q - zero) * scale, or (q - zero) * scale - zeros * mins, in which zeros may be all 1. For e2m1 floats (4 bits), q is twice the
 * float, from a table, and zero is 0.
 * A packed matrix [N, K] is [N/64][K/8][64] words of eight 4-bit weights of one output, the first input in the lowest bits; or
 * [N/64][K/4][64] words of four 8-bit weights. Sixteen 6-bit weights are three words of [N/64][K/16][3][64] and four quads: weights 0 2 4 6,
 * 1 3 5 7, 8 10 12 14 and 9 11 13 15. The lower six bits of a word's bytes are one of the first three quads; the upper two bits of the three
 * words' bytes together are the last one, from the lowest bits in the first word on. N is padded to 64. The words of 64 outputs are
 * contiguous and are read as one stream.
 *
 * Inputs are prepared once for all outputs, in parts; a part ends with its group, or after SEGMENT inputs. For each part the kernel sums
 * x * q, from -zero * sum(x) on unless there are `mins`, and multiplies the sum by the scale: cheaper than scaling every weight. A token's result
 * does not depend on the number of tokens.
 *
 * In bfloat16 these sums are sums of integers: a CPU multiplies sixteen 16-bit numbers at the cost of eight 32-bit ones, and weights need no
 * conversion. The inputs of a part become 16-bit integers times a power of two. That is exact for every input of at least 1/64 of the
 * part's largest; smaller ones are rounded. If more than a quarter would be rounded, because one input is far larger than the rest, the
 * remainders of all inputs become integers for a second sum. The integer sums are exact. Where a CPU has instructions for products of bytes
 * (VNNI), the low and the high bytes of the integers have sums of their own: four weights are then ready for their product at once.
 *
 * In float32 the products are exact, but not the sums. The bits of a weight are masked in place rather than shifted down, and its input is
 * multiplied beforehand by the inverse power of two, which is exact. A weight then costs two operations before its product.
 */
#define SEGMENT 128 /* inputs of a part at most, so that sums of their products do not overflow */
#ifdef TILED
#define CROWD 128 /* tokens per pass over the weights; they are unpacked once for all of these */
#else
#define CROWD 24 /* so many that their inputs and sums and the weights of a segment fit into the L1 cache */
#endif
#define ROOM (1 << 20) /* limit in bytes for prepared inputs, which are on a thread's stack */
/* Prefetch distances in bytes, of words and of scales. With AVX-512, both go into the L2 cache, since loads into the L1 cache wait for the few that it
 * can have under way. Beside AMX (measured on Intel) words then go into the L1 cache NEAR bytes ahead; AMD's processors are slower with that. */
#define SOON 4096
#define NEAR 1024
#define SCALES_SOON 1024
#ifdef TILED
#define prefetch(p) (__builtin_prefetch(p, 0, INTO_L2), __builtin_prefetch((const char *)(p) - (SOON - NEAR)))
#elif defined(__AVX512F__)
#define prefetch(p) __builtin_prefetch(p, 0, INTO_L2)
#else
#define prefetch(p) __builtin_prefetch(p)
#endif
#define HALF 0 /* dtypes of scales: float16, BRAIN bfloat16, SINGLE float32, BYTE int8 times a float16 of `over` */
#define BRAIN 1
#define WIDTH_OF(kind) ((kind) == GROUPS_OF_EIGHT ? 8 : 4) /* bits of a weight in a word; of 6-bit weights the lower ones */
#define INPUTS_OF(kind) ((kind) == GROUPS_OF_EIGHT ? 4 : (kind) == GROUPS_OF_SIX ? 16 : 8) /* whose weights are read together */
#define WORDS_OF(kind, inputs) ((size_t)(inputs) / INPUTS_OF(kind) * ((kind) == GROUPS_OF_SIX ? 3 : 1)) /* of one output */
#define SINGLE 2
#define BYTE 3
#define OUTPUTS (BLOCKS * 16)
/* Whether a word of weights stays in its register until all of them are multiplied. Otherwise it is read again for each digit, since sums
 * and inputs take the registers. Measured with AVX2 only. */
#if defined(BF16) && defined(__AVX2__) && !defined(__AVX512F__)
#define WORDS_STAY(kind, n) ((n) == 1 && !IN_QUADS(kind))
#else
#define WORDS_STAY(kind, n) 0
#endif
/* Makes compilers load *p from the L1 cache at each use: kept in a register, it would spill accumulators */
#define READ_AGAIN(p) __asm__ volatile("" : "+r"(p))

INLINE size_t bytes_of_scale(const Matrix *m) { return m->scales == BYTE ? 1 : m->scales == SINGLE ? 4 : 2; }

/* The scales of 16 outputs, from index `at` on (int8 ones times `over`, from index `above` on); and their zero points */
INLINE f32 scales(const Matrix *m, size_t at, size_t above) {
    if (m->scales == BYTE) return f32_mul(i32_to_f32(i32_from_8((const int8_t *)m->scale + at)), f32_from_half(m->over + above));
    if (m->scales == HALF) return f32_from_half((const uint16_t *)m->scale + at);
    if (m->scales == SINGLE) return f32_load((const float *)m->scale + at);
    return i32_as_f32(i32_left(i32_from_16((const uint16_t *)m->scale + at), 16));
}

INLINE i32 zeros(const Matrix *m, size_t at) {
    return m->zeros ? i32_and(i32_from_8((const int8_t *)m->zeros + at), i32_of(255)) : i32_of(m->zero);
}

/* What is subtracted from the weights of 16 outputs, where there are `mins` */
INLINE f32 least(const Matrix *m, size_t at, size_t above) {
    const f32 factor = f32_from_half(m->mins + above);
    return m->zeros ? f32_mul(i32_to_f32(zeros(m, at)), factor) : factor;
}

/* Inputs k to k + 16 of a token in the order of the weights */
INLINE f32 in_order(const Matrix *m, const value *x, int k) {
    value some[16];
    if (!m->order) return load(x + k);
    for (int i = 0; i < 16; i++) some[i] = x[m->order[k + i]];
    return load(some);
}

/* The end of the part that begins with input k, in a group that ends with `group_end` */
INLINE int part_end(int k, int group_end, int K) {
    const int segment_end = (k / SEGMENT + 1) * SEGMENT, end = group_end < segment_end ? group_end : segment_end;
    return end < K ? end : K;
}

INLINE int32_t times(int a, int b) { return (uint32_t)a * (uint32_t)b; } /* wraps around, for the sum of infinite inputs */

/* Types that depend on the dtype: `given`, a prepared input; `digit`, PAIR weights of each of 16 outputs; `sum`, 16 accumulators; `whole`, the
 * sum of the inputs of a Part, which also has the power of two that they were divided by. The sums of ABREAST(n) blocks for n tokens fit into
 * registers. A `quad` is four weights of each output as bytes, OFFSET more than they are, since bytes have no sign. */
#ifdef BF16
#define IN_QUADS(kind) ((kind) == GROUPS_OF_SIX || (kind) == GROUPS_OF_E2M1)
#define OFFSET(kind) ((kind) == GROUPS_OF_E2M1 ? 12 : 0)
#else
#define IN_QUADS(kind) ((kind) == GROUPS_OF_SIX)
#define OFFSET(kind) 0
#endif
#if defined(BF16) && defined(IN_BYTES)
#ifdef TILED
#define IN_TILES_OF_BYTES
#define FEW_IN_TILES(group) ((group) < SEGMENT ? 7 : 4) /* tokens from which tiles are faster; bits are the same, since sums of integers are exact */
#define IN_FLOATS -1 /* how inputs are laid out: for tiles of bfloat16 */
#endif
typedef int16_t given;
typedef i32 digit;
typedef struct {
    i32 low, high;
} sum;
typedef int32_t whole;
#define PAIR 4
#define ABREAST(n) ((n) == 1 ? BLOCKS : (n) <= 3 ? BLOCKS / 2 : 1)

/* Four weights as bytes: of eight in a word, every second one */
INLINE digit digits(i32 words, int j, int kind) { return kind == GROUPS_OF_EIGHT ? words : i32_and(j ? i32_right(words, 4) : words, i32_of(0x0f0f0f0f)); }
/* All four of a quad */
INLINE digit of_quad(i32 quad, int i) { return (void)i, quad; }
#define PLACE_OF(number, i) ((number) * 4)
INLINE sum gathered_digit(sum s, digit w, const given *x) {
    return (sum){i32_add_bytes(s.low, w, (const int8_t *)x), i32_add_bytes(s.high, w, (const int8_t *)x + 4)};
}
INLINE sum begun_sum(i32 zero, whole inputs) { return (sum){i32_mul(zero, i32_of(times(-1, inputs))), i32_zero()}; }
INLINE sum begun_alike(int zero, whole inputs) { return (sum){i32_of(times(-zero, inputs)), i32_zero()}; }
INLINE f32 ended_sum(sum s) { return i32_to_f32(i32_add(s.low, i32_left(s.high, 8))); }
#elif defined(BF16)
typedef int16_t given;
typedef i32 digit;
typedef i32 sum;
typedef int32_t whole;
#define PAIR 2
#define ABREAST(n) TOGETHER(n)

/* Weight j / PAIR of the lower half of each word, and the same weight of its upper half */
INLINE digit digits(i32 words, int j, int kind) {
    const int bits = WIDTH_OF(kind);
    if (j == 32 / bits - PAIR) return i32_halves_right(words, 16 - bits);
    return i32_and(j ? i32_right(words, bits * j / PAIR) : words, i32_of(((1 << bits) - 1) * 0x10001));
}
/* The first and the third of a quad, or for i = 2 the others */
INLINE digit of_quad(i32 quad, int i) { return i ? i32_halves_right(quad, 8) : i32_and(quad, i32_of(0x00ff00ff)); }
#define PLACE_OF(number, i) ((number) / 2 * 8 + (number) % 2 * 2 + (i) * 2)
INLINE sum gathered_digit(sum so_far, digit w, const given *x) { return i32_add_pairs(so_far, w, x); }
INLINE sum begun_sum(i32 zero, whole inputs) { return i32_mul(zero, i32_of(times(-1, inputs))); }
INLINE sum begun_alike(int zero, whole inputs) { return i32_of(times(-zero, inputs)); }
INLINE f32 ended_sum(sum s) { return i32_to_f32(s); }
#else
typedef float given;
typedef f32 digit;
typedef f32 sum;
typedef float whole;
#define PAIR 1
#define ABREAST(n) TOGETHER(n)

INLINE digit digits(i32 words, int j, int kind) {
    const int bits = WIDTH_OF(kind);
    if (kind == GROUPS_OF_E2M1) return f32_twice_e2m1(j ? i32_right(words, bits * j) : words);
    unsigned mask = ((1u << bits) - 1) << bits * j;
    READ_AGAIN(mask);
    return i32_to_f32(j + 1 < 32 / bits ? i32_and(words, i32_of(mask)) : i32_right(words, bits * j));
}
INLINE digit of_quad(i32 quad, int i) { return i32_to_f32(i == 3 ? i32_right(quad, 24) : i32_and(i32_right(quad, 8 * i), i32_of(255))); }
#define PLACE_OF(number, i) ((number) / 2 * 8 + (number) % 2 + (i) * 2)
INLINE sum gathered_digit(sum so_far, digit w, const given *x) { return f32_fma(w, f32_of(*x), so_far); }
INLINE sum begun_sum(i32 zero, whole inputs) { return f32_mul(i32_to_f32(zero), f32_of(-inputs)); }
INLINE sum begun_alike(int zero, whole inputs) { return f32_of(-zero * inputs); }
INLINE f32 ended_sum(sum s) { return s; }
#endif

#ifndef IN_TILES_OF_BYTES
#define in_row_of(m, n, K) 0
#endif

/* Quad `number` of the sixteen 6-bit weights in three words, or of the eight floats in one: of these, every second one from `number` on.
 * PLACE_OF(number, i) is where the inputs of a quad's weights from the i-th on are. */
INLINE i32 quad_of(const uint32_t *words, int number, int kind) {
    if (kind == GROUPS_OF_E2M1) return i32_bytes_of_e2m1(i32_and(number ? i32_right(i32_load(words), 4) : i32_load(words), i32_of(0x0f0f0f0f)));
    if (number < 3) return i32_and(i32_load(words + number * OUTPUTS), i32_of(0x3f3f3f3f));
    const i32 low = i32_and(i32_right(i32_load(words), 6), i32_of(0x03030303)), high = i32_and(i32_right(i32_load(words + 2 * OUTPUTS), 2), i32_of(0x30303030));
    return i32_xor(i32_xor(low, i32_and(i32_right(i32_load(words + OUTPUTS), 4), i32_of(0x0c0c0c0c))), high);
}

typedef struct {
    whole sum;
    float scale;
} Part;

#ifdef BF16
#ifdef IN_TILES_OF_BYTES
/* What all weights have as their zero point; where each output has its own, 0 */
INLINE int common_zero(const Matrix *m) { return m->mins || !m->zeros ? m->zero : 0; }

/* The largest number without its sign that a weight less common_zero() can be */
INLINE int largest_weight(const Matrix *m) {
    const int zero = common_zero(m), most = (1 << (m->kind == GROUPS_OF_EIGHT ? 8 : m->kind == GROUPS_OF_SIX ? 6 : 4)) - 1;
    return m->kind == GROUPS_OF_E2M1 ? 12 : zero > most - zero ? zero : most - zero;
}

/* How many inputs of n tokens are in a row of a tile, with first their low bytes and then their high ones, or IN_FLOATS; 0 if no tiles are used. Then,
 * and in every second sum, the bytes of four inputs are neighbours. */
INLINE int in_row_of(const Matrix *m, int n, int K) {
    if (n < FEW_IN_TILES(m->group) || K % m->group) return 0;
    const int whole = m->group == 16 || m->group == 32 ? K % (2 * m->group) == 0 : m->group == 64;
    if (whole && m->group * largest_weight(m) <= (1 << 24 >> 15)) return IN_FLOATS; /* inputs have 15 bits */
    return m->group == 32 ? 32 : m->group == 64 || m->group % SEGMENT == 0 ? 64 : 0;
}
#endif

#ifdef IN_BYTES
/* Store inputs i to i + 16 as bytes; with `in_row`, in rows or as bfloat16 */
INLINE void bytes_of(i32 integers, int bits, given *out, int i, int in_row) {
    given some[16];
#ifdef IN_TILES_OF_BYTES
    if (in_row == IN_FLOATS) {
        i32_to_alternating(out + i, i32_right_signed(f32_as_i32(i32_to_f32(integers)), 16), 4);
        return;
    }
#endif
    if (!in_row) {
        i32_to_bytes(out + i, integers, bits == 4);
        return;
    }
    i32_to_bytes(some, integers, bits == 4);
    char *low = (char *)(out + i / in_row * in_row) + i % in_row;
    for (int q = 0; q < 4; q++) __builtin_memcpy(low + 4 * q, some + 4 * q, 4), __builtin_memcpy(low + in_row + 4 * q, some + 4 * q + 2, 4);
}
#endif

/* Round inputs to integers times 2^(place - 127), in the order of digits(). x keeps the remainders; returns how many are not zero. */
INLINE int whole_numbers(f32 *x, int steps, int place, int bits, given *out, Part *part, int in_row) {
    const f32 unit = i32_as_f32(i32_of(place << 23)), inverse = i32_as_f32(i32_of((254 - place) << 23));
    i32 all = i32_zero();
    int left = 0;
    for (int i = 0; i < steps; i += 16) {
        const i32 integers = f32_to_i32(f32_mul(x[i / 16], inverse));
        x[i / 16] = f32_fnma(i32_to_f32(integers), unit, x[i / 16]);
        left += 16 - __builtin_popcount(f32_equal(x[i / 16], f32_zero()));
        all = i32_add(all, integers);
#ifdef IN_BYTES
        bytes_of(integers, bits, out, i, in_row);
#else
        (void)in_row;
        i32_to_alternating(out + i, integers, 16 / bits);
#endif
    }
    *part = (Part){i32_sum(all), f32_first(unit)};
    return left;
}

/* Prepare inputs k to `end` of a token. Returns whether they need a second sum, whose inputs are in `rest`. */
INLINE int prepared(const Matrix *m, const value *x, int k, int end, given *out, Part *part, given *rest, Part *rest_part, int in_row) {
    const int bits = WIDTH_OF(m->kind);
    f32 all[SEGMENT / 16];
    i32 most = i32_zero();
    for (int i = 0; i < end - k; i += 16) {
        all[i / 16] = in_order(m, x, k + i);
        most = i32_max(most, i32_and(f32_as_i32(all[i / 16]), i32_of(0x7fffffff)));
    }
    const unsigned largest = i32_most(most);
    const int exponent = (largest + 0x10000) >> 23; /* of the largest input, one more if its bits are all set: 15 bits would not do */
    const int place = (exponent < 15 ? 15 : exponent) - 14, finite = largest < 0x7f800000;
    const int left = whole_numbers(all, end - k, place, bits, out, part, in_row);
    if (!finite) part->scale = __builtin_nanf("");
    if (left * 4 <= end - k || place < 15 || !finite) return 0;
    whole_numbers(all, end - k, place - 14, bits, rest, rest_part, 0);
    return 1;
}
#else
INLINE int prepared(const Matrix *m, const value *x, int k, int end, given *out, Part *part, given *rest, Part *rest_part, int in_row) {
    float factors[16]; /* 2^-(bit position of the weight in its word); 1 if it is shifted down: the last one of a word, and e2m1 */
    const int bits = WIDTH_OF(m->kind), count = 32 / bits, shifted = m->kind == GROUPS_OF_E2M1 || m->kind == GROUPS_OF_SIX;
    f32 all = f32_zero();
    (void)rest, (void)rest_part, (void)in_row;
    for (int i = 0; i < 16; i++) factors[i] = shifted || i % count == count - 1 ? 1.0f : 1.0f / (1 << bits * (i % count));
    for (; k < end; k += 16, out += 16) {
        const f32 inputs = in_order(m, x, k);
        all = f32_add(all, inputs);
        f32_store(out, f32_mul(inputs, f32_load(factors)));
    }
    *part = (Part){f32_sum(all), 1.0f};
    return 0;
}
#endif

#ifdef BF16
#define ROUNDS 2
#else
#define ROUNDS 1
#endif
/* Prepared inputs of tokens x [n, K]: inputs [ROUNDS][K/SEGMENT][n][SEGMENT]; parts [at most K/16][2][n]; `twice` [n][K/16], for each part
 * whether the token has a second sum */
typedef struct {
    given *inputs;
    Part *parts;
    uint8_t *twice;
    size_t rest; /* offset of the inputs of the second sum */
} Prepared;

INLINE int in_groups(const Matrix *m) { return m->kind >= GROUPS_OF_FOUR; }

/* Where the weights of output o begin */
INLINE const char *weights_of(const Matrix *m, size_t o, int K) {
    return (const char *)m->values + o * (in_groups(m) ? WORDS_OF(m->kind, K) * sizeof(uint32_t) : K * SIZE(m->kind));
}

/* K rounded up to whole segments */
INLINE size_t segments(int K) { return (size_t)(K + SEGMENT - 1) / SEGMENT * SEGMENT; }

/* How many tokens are prepared together */
INLINE int crowd_of(int K) {
    const int fit = ROOM / (ROUNDS * K * (int)sizeof(given));
    return fit < 1 ? 1 : fit < CROWD ? fit : CROWD;
}

/* Prepare n tokens of x [.., stride]: the rows numbered `rows`, or the first n if that is null */
static void prepare(const Matrix *m, const value *x, const int32_t *rows, int stride, int n, int K, const Prepared *p) {
    const int in_row = in_row_of(m, n, K);
    Part *parts = p->parts;
    __builtin_memset(p->twice, 0, (size_t)n * (K / 16));
    for (int k = 0, end, number = 0, group_end = m->group; k < K; k = end, number++, parts += 2 * n) {
        end = part_end(k, group_end, K);
        if (end == group_end) group_end += m->group;
        for (int t = 0; t < n; t++) {
            given *out = p->inputs + ((size_t)k / SEGMENT * n + t) * SEGMENT + k % SEGMENT;
            p->twice[(size_t)t * (K / 16) + number] =
                prepared(m, x + (size_t)(rows ? rows[t] : t) * stride, k, end, out, parts + t, out + p->rest, parts + n + t, in_row);
        }
    }
}

#define AT_ONCE_OF(kind) (IN_QUADS(kind) ? 4 : PAIR) /* weights that are read from memory together */
/* Add the products of the weights from the j-th on in `some`, which is a word of each of 16 outputs or a quad */
INLINE void gathered_word(sum *sums, i32 some, const given *x, int j, int kind, int n) {
    for (int i = 0; i < AT_ONCE_OF(kind); i += PAIR) {
        const digit w = IN_QUADS(kind) ? of_quad(some, i) : digits(some, j, kind);
        for (int t = 0; t < n; t++) sums[t] = gathered_digit(sums[t], w, x + PLACE_OF(0, i) + t * SEGMENT);
    }
}

/* For `mins`, and for scales that are not float16. Not inlined, and done before the sums begin: otherwise compilers keep all sums in memory. */
static __attribute__((noinline)) void subtract_mins(const Matrix *m, size_t at, size_t above, const Part *parts, float *totals, int blocks, int n) {
    for (int o = 0; o < blocks * 16; o += 16)
        for (int t = 0; t < n; t++) {
            float *total = totals + t * OUTPUTS + o;
            f32_store(total, f32_fnma(least(m, at + o, above + o), f32_of(parts[t].sum * parts[t].scale), f32_load(total)));
        }
}

static __attribute__((noinline)) void widen_scales(const Matrix *m, size_t at, size_t above, float *found, int blocks) {
    for (int o = 0; o < blocks * 16; o += 16) f32_store(found + o, scales(m, at + o, above + o));
}

/* totals += sums times their scales, which are float16 or `widened` */
INLINE void add_sums(sum sums[BLOCKS][TOKENS], const uint16_t *halves, const float *widened, const Part *parts, float *totals, int blocks, int n) {
    const float factor = parts->scale;
    UNROLLED for (int b = 0; b < blocks; b++) {
        const f32 scale = halves ? f32_from_half(halves + b * 16) : f32_load(widened + b * 16);
        UNROLLED for (int t = 0; t < n; t++) {
            float *total = totals + t * OUTPUTS + b * 16;
            f32_store(total, f32_fma(ended_sum(sums[b][t]), f32_mul(scale, f32_of(n == 1 ? factor : parts[t].scale)), f32_load(total)));
        }
    }
}

/* Add a part of `steps` inputs x [n, SEGMENT] to totals [n, OUTPUTS]. The group's scales and zero points begin at index `at`, its `over` and
 * `mins` at `above`. Unless null, as many words from `soon` on are prefetched. */
INLINE void of_part(const Matrix *m, size_t at, size_t above, const uint32_t *words, const given *x, const Part *parts, float *totals, int steps,
                    int n, int kind, const char *soon) {
    const int count = INPUTS_OF(kind), alike = m->mins || !m->zeros, zero = m->zero + OFFSET(kind);
    for (size_t i = 0; soon && i < OUTPUTS * bytes_of_scale(m); i += LINE)
        __builtin_prefetch((const char *)m->scale + at * bytes_of_scale(m) + SCALES_SOON + i, 0, INTO_L2);
    for (int c = 0; c < BLOCKS; c += ABREAST(n)) {
        float widened[OUTPUTS];
        if (m->mins) subtract_mins(m, at + c * 16, above + c * 16, parts, totals + c * 16, ABREAST(n), n);
        if (m->scales != HALF) widen_scales(m, at + c * 16, above + c * 16, widened, ABREAST(n));
        sum sums[BLOCKS][TOKENS];
        for (int b = 0; b < ABREAST(n); b++)
            for (int t = 0; t < n; t++)
                sums[b][t] = alike ? begun_alike(zero, parts[t].sum) : begun_sum(i32_add(zeros(m, at + (c + b) * 16), i32_of(OFFSET(kind))), parts[t].sum);
        const uint32_t *w = words + c * 16;
        const given *x_k = x;
        for (int k = 0; k < steps; k += count, w += WORDS_OF(kind, count) * OUTPUTS, x_k += count) {
            for (int i = 0; soon && c == 0 && i < (int)WORDS_OF(kind, count) * OUTPUTS * 4; i += LINE, soon += LINE) prefetch(soon);
            if (WORDS_STAY(kind, n)) {
                for (int b = 0; b < ABREAST(n); b++) {
                    const i32 some = i32_kept(i32_load(w + b * 16));
                    for (int j = 0; j < count; j += PAIR) gathered_word(sums[b], some, x_k + j, j, kind, n);
                }
                continue;
            }
            UNROLLED for (int j = 0; j < count; j += AT_ONCE_OF(kind)) {
                const given *x_j = x_k + (IN_QUADS(kind) ? PLACE_OF(j / 4, 0) : j);
                for (int b = 0; b < ABREAST(n); b++) {
                    READ_AGAIN(w);
                    if (b && n > 1) READ_AGAIN(x_j);
                    gathered_word(sums[b], IN_QUADS(kind) ? quad_of(w + b * 16, j / 4, kind) : i32_load(w + b * 16), x_j, j, kind, n);
                }
            }
        }
        if (m->scales == HALF)
            add_sums(sums, (const uint16_t *)m->scale + at + c * 16, 0, parts, totals + c * 16, ABREAST(n), n);
        else
            add_sums(sums, 0, widened, parts, totals + c * 16, ABREAST(n), n);
    }
}

/* Add all parts of n tokens, of which t is the first of `all` prepared ones, to totals [n, OUTPUTS], which are of the outputs from o on; or with
 * `second`, the second sums of one token. Unless null, `after` has the words that are read next. */
INLINE void of_tokens(const Matrix *m, int o, const Prepared *p, int t, int all, float *totals, int K, const char *after, int n, int kind, int second) {
    const int groups = (K + m->group - 1) / m->group, shared = m->nested ? groups / m->nested : 0;
    const uint32_t *words = (const uint32_t *)m->values + o * WORDS_OF(kind, K);
    const char *soon = (const char *)words + SOON, *last = (const char *)(words + WORDS_OF(kind, K) * OUTPUTS);
    const Part *parts = p->parts + t + second * all;
    const given *x = p->inputs + t * SEGMENT + second * p->rest;
    const uint8_t *twice = p->twice + (size_t)t * (K / 16);
    const size_t gap = (size_t)(all - 1) * SEGMENT;
    size_t at = (size_t)o * groups, above = (size_t)o * shared;
    int in_group = m->group, in_segment = SEGMENT, nested = 0; /* inputs that are left */
    while (K) {
        int steps = in_group < in_segment ? in_group : in_segment;
        if (steps > K) steps = K;
        if (soon >= last) soon = after ? after + (soon - last) : 0, last = (const char *)UINTPTR_MAX;
        if (!second || *twice++) of_part(m, at, above, words, x, parts, totals, steps, n, kind, t == 0 && !second ? soon : 0);
        words += WORDS_OF(kind, steps) * OUTPUTS, x += steps, parts += 2 * all, K -= steps;
        if (soon) soon += WORDS_OF(kind, steps) * OUTPUTS * sizeof(uint32_t);
        in_group -= steps, in_segment -= steps;
        if (!in_segment) in_segment = SEGMENT, x += gap;
        if (in_group) continue;
        in_group = m->group, at += OUTPUTS;
        if (shared && ++nested == m->nested) nested = 0, above += OUTPUTS;
    }
}

/* Not inlined: within a larger function compilers run out of registers. */
#define OF_TOKENS(name, kind) \
    static __attribute__((noinline)) void name(const Matrix *m, int o, const Prepared *p, int t, int all, float *totals, int K, const char *after, int n, \
                                               int second) { \
        if (second) \
            of_tokens(m, o, p, t, all, totals, K, 0, 1, kind, 1); \
        else \
            FOR_KNOWN(n, of_tokens(m, o, p, t, all, totals, K, after, COUNT, kind, 0)) \
    }
OF_TOKENS(of_fours, GROUPS_OF_FOUR)
OF_TOKENS(of_eights, GROUPS_OF_EIGHT)
OF_TOKENS(of_sixes, GROUPS_OF_SIX)
OF_TOKENS(of_floats, GROUPS_OF_E2M1)

#ifdef IN_TILES_OF_BYTES
#include "group_tiles.h"
#else
#define some_tiled_groups(m, o, p, n, totals, K, after, in_row) (void)in_row
#endif

/* OUTPUTS outputs from o on, of n <= CROWD prepared tokens, into y [n, OUTPUTS]. Unless null, `after` has the words that are read next. */
static void of_groups(const Matrix *m, int o, const Prepared *p, value *y, int n, int K, const char *after) {
    const int rounds = (n + TOKENS - 1) / TOKENS, each = (n + rounds - 1) / rounds;
    const __auto_type of = m->kind == GROUPS_OF_FOUR ? of_fours : m->kind == GROUPS_OF_EIGHT ? of_eights : m->kind == GROUPS_OF_SIX ? of_sixes : of_floats;
    const int in_row = in_row_of(m, n, K);
    float totals[CROWD * OUTPUTS];
    for (int t = 0; t < n; t++)
        for (int b = 0; b < OUTPUTS; b += 16) f32_store(totals + t * OUTPUTS + b, begun(m, o + b, m->kind));
    if (in_row) some_tiled_groups(m, o, p, n, totals, K, after, in_row);
    for (int t = 0; !in_row && t < n; t += each) of(m, o, p, t, n, totals + t * OUTPUTS, K, after, n - t < each ? n - t : each, 0);
    for (int t = 0; ROUNDS > 1 && t < n; t++)
        if (__builtin_memchr(p->twice + (size_t)t * (K / 16), 1, K / 16)) of(m, o, p, t, n, totals + t * OUTPUTS, K, 0, 1, 1);
    for (int t = 0; t < n; t++)
        for (int b = 0; b < OUTPUTS; b += 16) store(y + t * OUTPUTS + b, f32_load(totals + t * OUTPUTS + b));
}
