/* Decoder layers of the llama family over a few tokens, for CPUs with AVX-512.
 *
 * A pass over a few tokens is bound by how fast the weights can be read. Matrices are laid out so that every read is a whole
 * cache line, used for all tokens at once while it is in a register; everything between two matrices happens in the same
 * parallel region, in registers and the first cache. Sums are in float32; results are rounded to the model's dtype at the
 * places where torch rounds them.
 *
 * Compiled once per dtype: -DBF16 for bfloat16, without it for float32. All sizes are multiples of 32.
 *
 * A packed matrix [N, K] is [N/16][K/2][16][2] in bfloat16 (pairs for VDPBF16PS) and [N/16][K][16] in float32, N padded to 64.
 */
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define BLOCKS 4 /* of 16 outputs computed together */
#define TOKENS 6 /* computed together: BLOCKS * TOKENS + BLOCKS + 1 registers */
#define QUERIES 8 /* that share a reading of the keys */

#ifdef BF16
typedef uint16_t value;
INLINE __m512 load(const value *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE void store(value *p, __m512 x) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x)); }
INLINE __m512 rounded(__m512 x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}
typedef __m512bh operand;
#define DEPTH 2 /* elements of the inner dimension per step */
INLINE operand weights(const value *p) { return (__m512bh)_mm512_loadu_si512(p); }
INLINE operand input(const value *p) { return (__m512bh)_mm512_set1_epi32(*(const int32_t *)p); }
INLINE __m512 multiply(__m512 sum, operand w, operand x) { return _mm512_dpbf16_ps(sum, w, x); }
INLINE float dot(const value *a, const value *b, int size) {
    __m512 sum = _mm512_setzero_ps();
    for (int d = 0; d < size; d += 32)
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(a + d), (__m512bh)_mm512_loadu_si512(b + d));
    return _mm512_reduce_add_ps(sum);
}
#else
typedef float value;
INLINE __m512 load(const value *p) { return _mm512_loadu_ps(p); }
INLINE void store(value *p, __m512 x) { _mm512_storeu_ps(p, x); }
INLINE __m512 rounded(__m512 x) { return x; }
typedef __m512 operand;
#define DEPTH 1
INLINE operand weights(const value *p) { return _mm512_loadu_ps(p); }
INLINE operand input(const value *p) { return _mm512_set1_ps(*p); }
INLINE __m512 multiply(__m512 sum, operand w, operand x) { return _mm512_fmadd_ps(w, x, sum); }
INLINE float dot(const value *a, const value *b, int size) {
    __m512 sum = _mm512_setzero_ps();
    for (int d = 0; d < size; d += 16) sum = _mm512_fmadd_ps(_mm512_loadu_ps(a + d), _mm512_loadu_ps(b + d), sum);
    return _mm512_reduce_add_ps(sum);
}
#endif

/* e^x, relative error below 2e-7 for x <= 0 */
INLINE __m512 exponential(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-126.0f * 0.69314718f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

/* -- products ---------------------------------------------------------------------------------------------------------- */

/* BLOCKS * 16 outputs of n tokens; y has N columns */
INLINE void tile(const value *w, const value *x, const value *bias, value *y, int K, int N, int n) {
    __m512 sums[BLOCKS][TOKENS];
    const size_t block = (size_t)K * 16;
    for (int b = 0; b < BLOCKS; b++)
        for (int t = 0; t < n; t++) sums[b][t] = bias ? load(bias + b * 16) : _mm512_setzero_ps();
    for (int k = 0; k < K; k += DEPTH) {
        operand w_k[BLOCKS];
        for (int b = 0; b < BLOCKS; b++) w_k[b] = weights(w + b * block + (size_t)k * 16);
        for (int t = 0; t < n; t++) {
            operand x_k = input(x + (size_t)t * K + k);
            for (int b = 0; b < BLOCKS; b++) sums[b][t] = multiply(sums[b][t], w_k[b], x_k);
        }
    }
    for (int b = 0; b < BLOCKS; b++)
        for (int t = 0; t < n; t++) store(y + (size_t)t * N + b * 16, sums[b][t]);
}

static void some_tokens(const value *w, const value *x, const value *bias, value *y, int K, int N, int n) {
    switch (n) { /* with n known, the sums stay in registers */
        case 1: tile(w, x, bias, y, K, N, 1); break;
        case 2: tile(w, x, bias, y, K, N, 2); break;
        case 3: tile(w, x, bias, y, K, N, 3); break;
        case 4: tile(w, x, bias, y, K, N, 4); break;
        case 5: tile(w, x, bias, y, K, N, 5); break;
        default: tile(w, x, bias, y, K, N, TOKENS);
    }
}

/* y [T, N] = x [T, K] W^T + bias, by all threads of the region; N is padded to 64. Ends with a barrier. */
static void product(const value *w, const value *x, const value *bias, value *y, int T, int K, int N) {
    const int rounds = (T + TOKENS - 1) / TOKENS, each = (T + rounds - 1) / rounds; /* of about equal size */
#pragma omp for schedule(dynamic, 1)
    for (int o = 0; o < N; o += BLOCKS * 16)
        for (int t = 0; t < T; t += each)
            some_tokens(w + (size_t)o * K, x + (size_t)t * K, bias ? bias + o : 0, y + (size_t)t * N + o, K, N, T - t < each ? T - t : each);
}

void linear(const value *w, const value *x, const value *bias, value *y, int T, int K, int N) {
#pragma omp parallel
    product(w, x, bias, y, T, K, N);
}

/* -- between the products ---------------------------------------------------------------------------------------------- */

INLINE void normed(const value *x, const value *weight, value *out, int size, float eps) {
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < size; i += 16) {
        __m512 v = load(x + i);
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(sum) / size + eps));
    for (int i = 0; i < size; i += 16) store(out + i, _mm512_mul_ps(load(weight + i), rounded(_mm512_mul_ps(load(x + i), scale))));
}

/* One head turned by its position: x * cos + (second half negated, first half) * sin */
INLINE void rotated(const value *x, const value *cos, const value *sin, value *out, int size) {
    const int half = size / 2;
    for (int i = 0; i < half; i += 16) {
        __m512 a = load(x + i), b = load(x + half + i);
        __m512 left = rounded(_mm512_mul_ps(a, load(cos + i))), right = rounded(_mm512_mul_ps(b, load(cos + half + i)));
        store(out + i, _mm512_sub_ps(left, rounded(_mm512_mul_ps(b, load(sin + i)))));
        store(out + half + i, _mm512_add_ps(right, rounded(_mm512_mul_ps(a, load(sin + half + i)))));
    }
}

INLINE void add(value *x, const value *y, int size) {
    for (int i = 0; i < size; i += 16) store(x + i, _mm512_add_ps(load(x + i), load(y + i)));
}

INLINE void gated(const value *gate, const value *up, value *out, int size) {
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int i = 0; i < size; i += 16) {
        __m512 g = load(gate + i), e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(g))); /* e^-|g| */
        __mmask16 negative = _mm512_cmp_ps_mask(g, _mm512_setzero_ps(), _CMP_LT_OQ);
        __m512 sigmoid = _mm512_div_ps(_mm512_mask_blend_ps(negative, one, e), _mm512_add_ps(one, e));
        store(out + i, _mm512_mul_ps(rounded(_mm512_mul_ps(g, sigmoid)), load(up + i)));
    }
}

/* -- attention --------------------------------------------------------------------------------------------------------- */

/* Scores of one query into probabilities; unseen keys have -inf. Returns 1 / sum. */
INLINE float weighed(float *scores, int padded) {
    __m512 most = _mm512_set1_ps(-__builtin_inff()), sum = _mm512_setzero_ps();
    for (int j = 0; j < padded; j += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(scores + j));
    const float largest = _mm512_reduce_max_ps(most);
    if (largest == -__builtin_inff()) return 0.0f; /* filler that sees nothing */
    const __m512 shift = _mm512_set1_ps(largest), none = _mm512_set1_ps(-__builtin_inff());
    for (int j = 0; j < padded; j += 16) {
        __m512 s = _mm512_loadu_ps(scores + j);
        __m512 e = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(s, none, _CMP_NEQ_OQ), exponential(_mm512_sub_ps(s, shift)));
        _mm512_storeu_ps(scores + j, e);
        sum = _mm512_add_ps(sum, e);
    }
    return 1.0f / _mm512_reduce_add_ps(sum);
}

INLINE void gathered(const float *weights_, float scale, const value *values, value *out, int width, int size) {
    for (int d = 0; d < size; d += 32) {
        __m512 a = _mm512_setzero_ps(), b = a;
        for (int j = 0; j < width; j++) {
            const __m512 w = _mm512_set1_ps(weights_[j]);
            a = _mm512_fmadd_ps(w, load(values + (size_t)j * size + d), a);
            b = _mm512_fmadd_ps(w, load(values + (size_t)j * size + d + 16), b);
        }
        store(out + d, _mm512_mul_ps(a, _mm512_set1_ps(scale)));
        store(out + d + 16, _mm512_mul_ps(b, _mm512_set1_ps(scale)));
    }
}

typedef struct {
    int64_t hidden, inner, heads, key_heads, size; /* of the model, of the MLP, query heads, key heads, of a head */
    double eps, head_eps, scaling;
    const value *qkv, *output, *gate_up, *down;                         /* packed */
    const value *qkv_bias, *output_bias, *gate_up_bias, *down_bias;     /* or null */
    const value *before, *after, *query_norm, *key_norm;                /* norms; the last two or null */
} Layer;

typedef struct {
    int64_t threads;
    int64_t rows, nodes, width;            /* slots that keys span */
    int64_t row_stride, head_stride;       /* of the cache, in values */
    int64_t angle_stride;                  /* of cos and sin from row to row; 0 if rows share them */
    int64_t mask_row_stride, mask_stride;  /* from row to row, from node to node */
    const value *cos, *sin;                /* [rows or 1, nodes, size] */
    const int32_t *slots;                  /* [rows, nodes] where each node's keys go */
    value *states, *projected, *attended, *wide, *thin; /* scratch: [T, hidden], [T, qkv], [T, heads * size], [T, 2 inner], [T, inner] */
    float *scores;                         /* scratch: [threads, QUERIES, width + 16] */
} Pass;

extern int omp_get_thread_num(void);

/* Nodes first to last of one head of one row. */
static void attend(const Layer *l, const Pass *p, const uint8_t *mask, const value *keys, const value *values, int row, int head, float *scores) {
    const int size = l->size, nodes = p->nodes, width = p->width, padded = (width + 15) / 16 * 16;
    const int all = (l->heads + 2 * l->key_heads) * size;
    const size_t place = (size_t)row * p->row_stride + (size_t)(head / (l->heads / l->key_heads)) * p->head_stride;
    const value *k = keys + place, *v = values + place;
    for (int first = 0; first < nodes; first += QUERIES) {
        const int n = nodes - first < QUERIES ? nodes - first : QUERIES;
        int reach = 0; /* keys behind the last one that a query sees */
        for (int t = 0; t < n; t++) {
            const int slot = p->slots[row * nodes + first + t];
            const uint8_t *seen = mask ? mask + row * p->mask_row_stride + (first + t) * p->mask_stride : 0;
            const value *q = p->projected + ((size_t)row * nodes + first + t) * all + head * size;
            float *s = scores + (size_t)t * padded;
            const int end = mask ? width : slot + 1;
            for (int j = 0; j < padded; j++)
                s[j] = j < end && (!seen || seen[j]) ? dot(q, k + (size_t)j * size, size) * (float)l->scaling : -__builtin_inff();
            if (end > reach) reach = end;
        }
        for (int t = 0; t < n; t++) {
            float *s = scores + (size_t)t * padded;
            const float scale = weighed(s, padded);
            value *out = p->attended + ((size_t)row * nodes + first + t) * l->heads * size + head * size;
            gathered(s, scale, v, out, scale == 0.0f ? 0 : reach, size);
        }
    }
}

/* x [T, hidden] becomes what the layer makes of it; its keys and values go to their slots.
 * mask: [rows, 1, nodes, width] bytes, or null where a node sees every slot up to its own. */
void layer(const Layer *l, const Pass *p, const uint8_t *mask, value *x, value *keys, value *values) {
    const int T = p->rows * p->nodes, H = l->hidden, I = l->inner, size = l->size, nodes = p->nodes;
    const int queries = l->heads, all = (queries + 2 * l->key_heads) * size, padded = (p->width + 15) / 16 * 16;
#pragma omp parallel num_threads(p->threads)
    {
        float *scores = p->scores + (size_t)omp_get_thread_num() * QUERIES * padded;
#pragma omp for schedule(static)
        for (int t = 0; t < T; t++) normed(x + (size_t)t * H, l->before, p->states + (size_t)t * H, H, l->eps);
        product(l->qkv, p->states, l->qkv_bias, p->projected, T, H, all);
#pragma omp for schedule(static) collapse(2)
        for (int t = 0; t < T; t++)
            for (int head = 0; head < (int)(queries + l->key_heads); head++) {
                value *from = p->projected + (size_t)t * all + head * size, *to = from;
                const int row = t / nodes, node = t % nodes;
                const size_t angle = (size_t)row * p->angle_stride + (size_t)node * size;
                const value *norm = head < queries ? l->query_norm : l->key_norm;
                if (norm) normed(from, norm, from, size, l->head_eps);
                if (head >= queries) {
                    const size_t place = (size_t)row * p->row_stride + (size_t)(head - queries) * p->head_stride + (size_t)p->slots[t] * size;
                    const value *v = from + l->key_heads * size;
                    for (int i = 0; i < size; i += 16) store(values + place + i, load(v + i));
                    to = keys + place;
                }
                rotated(from, p->cos + angle, p->sin + angle, to, size);
            }
#pragma omp for schedule(dynamic, 1)
        for (int item = 0; item < (int)p->rows * queries; item++) attend(l, p, mask, keys, values, item / queries, item % queries, scores);
        product(l->output, p->attended, l->output_bias, p->states, T, queries * size, H);
#pragma omp for schedule(static)
        for (int t = 0; t < T; t++) {
            add(x + (size_t)t * H, p->states + (size_t)t * H, H);
            normed(x + (size_t)t * H, l->after, p->states + (size_t)t * H, H, l->eps);
        }
        product(l->gate_up, p->states, l->gate_up_bias, p->wide, T, H, 2 * I);
#pragma omp for schedule(static)
        for (int t = 0; t < T; t++) gated(p->wide + (size_t)t * 2 * I, p->wide + (size_t)t * 2 * I + I, p->thin + (size_t)t * I, I);
        product(l->down, p->thin, l->down_bias, p->states, T, I, H);
#pragma omp for schedule(static)
        for (int t = 0; t < T; t++) add(x + (size_t)t * H, p->states + (size_t)t * H, H);
    }
}

/* All layers, and the norm behind them: out [T, hidden] from x [T, hidden], which is overwritten. Keys and values of layer i begin
 * `offset` values behind keys[i] and values[i]. */
void model(const Layer *const *layers, int count, const Pass *p, const uint8_t *mask, value *x, value *const *keys, value *const *values,
           int64_t offset, const value *norm, double eps, value *out) {
    const int T = p->rows * p->nodes, H = layers[0]->hidden;
    for (int i = 0; i < count; i++) layer(layers[i], p, mask, x, keys[i] + offset, values[i] + offset);
    for (int t = 0; t < T; t++) normed(x + (size_t)t * H, norm, out + (size_t)t * H, H, eps);
}
