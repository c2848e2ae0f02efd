/* Vectors of 16 numbers on x86-64: one register with AVX-512, two with AVX2. Included by vectors.h. */
#include <immintrin.h>

#ifdef __AVX512F__
typedef __m512 f32;
typedef __m512i i32;

INLINE f32 f32_of(float x) { return _mm512_set1_ps(x); }
INLINE f32 f32_zero(void) { return _mm512_setzero_ps(); }
INLINE f32 f32_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void f32_store(float *p, f32 x) { _mm512_storeu_ps(p, x); }
INLINE f32 f32_load_some(lanes m, const float *p) { return _mm512_maskz_loadu_ps(m, p); }
INLINE void f32_store_some(float *p, lanes m, f32 x) { _mm512_mask_storeu_ps(p, m, x); }
INLINE f32 f32_add(f32 a, f32 b) { return _mm512_add_ps(a, b); }
INLINE f32 f32_sub(f32 a, f32 b) { return _mm512_sub_ps(a, b); }
INLINE f32 f32_mul(f32 a, f32 b) { return _mm512_mul_ps(a, b); }
INLINE f32 f32_div(f32 a, f32 b) { return _mm512_div_ps(a, b); }
INLINE f32 f32_max(f32 a, f32 b) { return _mm512_max_ps(a, b); }
INLINE f32 f32_abs(f32 x) { return _mm512_abs_ps(x); }
INLINE f32 f32_fma(f32 a, f32 b, f32 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE f32 f32_fnma(f32 a, f32 b, f32 c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE f32 f32_nearest(f32 x) { return _mm512_roundscale_ps(x, 0); }
INLINE f32 f32_power_of_two(f32 x, f32 n) { return _mm512_scalef_ps(x, n); } /* x 2^n, if the result is a normal number */
INLINE f32 f32_keep(lanes m, f32 x) { return _mm512_maskz_mov_ps(m, x); }      /* 0 where m is not set */
INLINE f32 f32_pick(lanes m, f32 no, f32 yes) { return _mm512_mask_blend_ps(m, no, yes); }
INLINE lanes f32_less(f32 a, f32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INLINE lanes f32_equal(f32 a, f32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
INLINE lanes f32_least(f32 a, f32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
INLINE float f32_sum(f32 x) { return _mm512_reduce_add_ps(x); }
INLINE float f32_most(f32 x) { return _mm512_reduce_max_ps(x); }
INLINE float f32_first(f32 x) { return _mm512_cvtss_f32(x); }
INLINE f32 f32_from_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); } /* of float16 */
INLINE f32 f32_gather(const float *p, i32 index) { return _mm512_i32gather_ps(index, p, 4); }

INLINE i32 i32_of(int32_t x) { return _mm512_set1_epi32(x); }
INLINE i32 i32_zero(void) { return _mm512_setzero_si512(); }
INLINE i32 i32_count(void) { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE i32 i32_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE void i32_store(void *p, i32 x) { _mm512_storeu_si512(p, x); }
INLINE i32 i32_kept(i32 x) { return x; } /* in a register, from which compilers take it */
INLINE i32 i32_load_some(lanes m, const int32_t *p) { return _mm512_maskz_loadu_epi32(m, p); }
INLINE i32 i32_add(i32 a, i32 b) { return _mm512_add_epi32(a, b); }
INLINE i32 i32_sub(i32 a, i32 b) { return _mm512_sub_epi32(a, b); }
INLINE i32 i32_sub_bytes(i32 a, i32 b) { return _mm512_sub_epi8(a, b); }
INLINE i32 i32_mul(i32 a, i32 b) { return _mm512_mullo_epi32(a, b); }
INLINE i32 i32_and(i32 a, i32 b) { return _mm512_and_si512(a, b); }
INLINE i32 i32_xor(i32 a, i32 b) { return _mm512_xor_si512(a, b); }
INLINE i32 i32_min(i32 a, i32 b) { return _mm512_min_epi32(a, b); }
INLINE i32 i32_max(i32 a, i32 b) { return _mm512_max_epi32(a, b); }
INLINE i32 i32_pick(lanes m, i32 no, i32 yes) { return _mm512_mask_mov_epi32(no, m, yes); }
INLINE lanes i32_more(i32 a, i32 b) { return _mm512_cmpgt_epi32_mask(a, b); }
INLINE i32 i32_right(i32 x, int by) { return _mm512_srli_epi32(x, by); } /* logical shift */
INLINE i32 i32_left(i32 x, int by) { return _mm512_slli_epi32(x, by); }
INLINE i32 i32_halves_right(i32 x, int by) { return _mm512_srli_epi16(x, by); } /* shifts both 16-bit halves of each word separately */
INLINE i32 i32_add_pairs(i32 sum, i32 a, const int16_t *p) { /* sum += the signed 16-bit halves of a, times p[0] and p[1] */
    const i32 b = i32_of(*(const int32_t *)p);
#ifdef __AVX512VNNI__
    return _mm512_dpwssd_epi32(sum, a, b);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
INLINE int32_t i32_sum(i32 x) { return _mm512_reduce_add_epi32(x); }
INLINE int32_t i32_most(i32 x) { return _mm512_reduce_max_epi32(x); }
INLINE __m256i i32_narrowed(i32 x) { return _mm512_cvtsepi32_epi16(x); }
INLINE i32 i32_right_signed(i32 x, int by) { return _mm512_srai_epi32(x, by); }
INLINE f32 i32_to_f32(i32 x) { return _mm512_cvtepi32_ps(x); }
INLINE i32 f32_to_i32(f32 x) { return _mm512_cvtps_epi32(x); }
INLINE f32 i32_as_f32(i32 x) { return _mm512_castsi512_ps(x); }
INLINE i32 f32_as_i32(f32 x) { return _mm512_castps_si512(x); }
INLINE i32 i32_from_8(const int8_t *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE i32 i32_from_16(const uint16_t *p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void i32_to_16(uint16_t *p, i32 x) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(x)); } /* the lower halves */
/* Both halves of each word replaced by the numbers of a table at their lowest five or six bits */
INLINE i32 halves_from_32(const uint16_t *table, i32 x) { return _mm512_permutexvar_epi16(x, i32_load(table)); }
INLINE i32 halves_from_64(const uint16_t *table, i32 x) { return _mm512_permutex2var_epi16(i32_load(table), x, i32_load(table + 32)); }
/* 12 plus twice the e2m1 float in the lowest four bits of each byte; the other bits must be zero */
INLINE i32 i32_bytes_of_e2m1(i32 x) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)), x);
}
/* Twice the e2m1 float in the lowest four bits of each word; other bits are ignored */
INLINE f32 f32_twice_e2m1(i32 x) {
    static const float numbers[] = {0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12};
    return _mm512_permutexvar_ps(x, f32_load(numbers));
}

/* Transpose 16 x 16 words */
INLINE void turned(i32 r[16]) {
    i32 s[16];
    for (int i = 0; i < 16; i += 2) {
        s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(s[i], s[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(s[i], s[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(s[i + 1], s[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(s[i + 1], s[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        s[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        s[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        s[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        s[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(s[i], s[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(s[i], s[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0xdd);
    }
}

#else
typedef struct {
    __m256 low, high;
} f32;
typedef struct {
    __m256i low, high;
} i32;

#define BOTH(type, call_low, call_high) ((type){call_low, call_high})
#define EACH(type, name, a) BOTH(type, name((a).low), name((a).high))
#define PAIRS(type, name, a, b) BOTH(type, name((a).low, (b).low), name((a).high, (b).high))

/* The 8 bits of m from `first` on as masks of whole words */
INLINE __m256i spread(lanes m, int first) {
    const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(m >> first), bits), bits);
}
INLINE lanes gathered_bits(__m256 low, __m256 high) { return _mm256_movemask_ps(low) | _mm256_movemask_ps(high) << 8; }

INLINE f32 f32_of(float x) { return BOTH(f32, _mm256_set1_ps(x), _mm256_set1_ps(x)); }
INLINE f32 f32_zero(void) { return BOTH(f32, _mm256_setzero_ps(), _mm256_setzero_ps()); }
INLINE f32 f32_load(const float *p) { return BOTH(f32, _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
INLINE void f32_store(float *p, f32 x) { _mm256_storeu_ps(p, x.low), _mm256_storeu_ps(p + 8, x.high); }
INLINE f32 f32_load_some(lanes m, const float *p) {
    return BOTH(f32, _mm256_maskload_ps(p, spread(m, 0)), _mm256_maskload_ps(p + 8, spread(m, 8)));
}
INLINE void f32_store_some(float *p, lanes m, f32 x) {
    _mm256_maskstore_ps(p, spread(m, 0), x.low), _mm256_maskstore_ps(p + 8, spread(m, 8), x.high);
}
INLINE f32 f32_add(f32 a, f32 b) { return PAIRS(f32, _mm256_add_ps, a, b); }
INLINE f32 f32_sub(f32 a, f32 b) { return PAIRS(f32, _mm256_sub_ps, a, b); }
INLINE f32 f32_mul(f32 a, f32 b) { return PAIRS(f32, _mm256_mul_ps, a, b); }
INLINE f32 f32_div(f32 a, f32 b) { return PAIRS(f32, _mm256_div_ps, a, b); }
INLINE f32 f32_max(f32 a, f32 b) { return PAIRS(f32, _mm256_max_ps, a, b); }
INLINE f32 f32_abs(f32 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return BOTH(f32, _mm256_andnot_ps(sign, x.low), _mm256_andnot_ps(sign, x.high));
}
INLINE f32 f32_fma(f32 a, f32 b, f32 c) { return BOTH(f32, _mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)); }
/* *sum += a times *x. In assembler, since compilers move sums to other registers and then to memory. */
INLINE void f32_add_product(f32 *sum, f32 a, const float *x) {
    __m256 b;
    __asm__("vbroadcastss %5, %2\n\tvfmadd231ps %2, %3, %0\n\tvfmadd231ps %2, %4, %1"
            : "+&x"(sum->low), "+&x"(sum->high), "=&x"(b)
            : "x"(a.low), "x"(a.high), "m"(*x));
}
INLINE f32 f32_fnma(f32 a, f32 b, f32 c) { return BOTH(f32, _mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)); }
INLINE f32 f32_nearest(f32 x) {
    return BOTH(f32, _mm256_round_ps(x.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                _mm256_round_ps(x.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE f32 f32_keep(lanes m, f32 x) {
    return BOTH(f32, _mm256_and_ps(_mm256_castsi256_ps(spread(m, 0)), x.low), _mm256_and_ps(_mm256_castsi256_ps(spread(m, 8)), x.high));
}
INLINE f32 f32_pick(lanes m, f32 no, f32 yes) {
    return BOTH(f32, _mm256_blendv_ps(no.low, yes.low, _mm256_castsi256_ps(spread(m, 0))),
                _mm256_blendv_ps(no.high, yes.high, _mm256_castsi256_ps(spread(m, 8))));
}
INLINE lanes f32_less(f32 a, f32 b) { return gathered_bits(_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ)); }
INLINE lanes f32_equal(f32 a, f32 b) { return gathered_bits(_mm256_cmp_ps(a.low, b.low, _CMP_EQ_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_EQ_OQ)); }
INLINE lanes f32_least(f32 a, f32 b) { return gathered_bits(_mm256_cmp_ps(a.low, b.low, _CMP_GE_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_GE_OQ)); }
INLINE float f32_first(f32 x) { return _mm256_cvtss_f32(x.low); }
INLINE float f32_sum(f32 x) { /* in the order of _mm512_reduce_add_ps */
    const __m256 eight = _mm256_add_ps(x.low, x.high);
    const __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE float f32_most(f32 x) {
    const __m256 eight = _mm256_max_ps(x.low, x.high);
    const __m128 four = _mm_max_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
INLINE f32 f32_from_half(const uint16_t *p) {
    return BOTH(f32, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8))));
}
INLINE f32 f32_gather(const float *p, i32 index) { return BOTH(f32, _mm256_i32gather_ps(p, index.low, 4), _mm256_i32gather_ps(p, index.high, 4)); }

INLINE i32 i32_of(int32_t x) { return BOTH(i32, _mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
INLINE i32 i32_zero(void) { return BOTH(i32, _mm256_setzero_si256(), _mm256_setzero_si256()); }
INLINE i32 i32_count(void) { return BOTH(i32, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)); }
INLINE i32 i32_load(const void *p) { return BOTH(i32, _mm256_loadu_si256(p), _mm256_loadu_si256((const __m256i *)p + 1)); }
INLINE void i32_store(void *p, i32 x) { _mm256_storeu_si256(p, x.low), _mm256_storeu_si256((__m256i *)p + 1, x.high); }
INLINE i32 i32_kept(i32 x) {
    __asm__("" : "+x"(x.low), "+x"(x.high));
    return x;
}
INLINE i32 i32_load_some(lanes m, const int32_t *p) {
    return BOTH(i32, _mm256_maskload_epi32(p, spread(m, 0)), _mm256_maskload_epi32(p + 8, spread(m, 8)));
}
INLINE i32 i32_add(i32 a, i32 b) { return PAIRS(i32, _mm256_add_epi32, a, b); }
INLINE i32 i32_sub(i32 a, i32 b) { return PAIRS(i32, _mm256_sub_epi32, a, b); }
INLINE i32 i32_mul(i32 a, i32 b) { return PAIRS(i32, _mm256_mullo_epi32, a, b); }
INLINE i32 i32_and(i32 a, i32 b) { return PAIRS(i32, _mm256_and_si256, a, b); }
INLINE i32 i32_xor(i32 a, i32 b) { return PAIRS(i32, _mm256_xor_si256, a, b); }
INLINE i32 i32_min(i32 a, i32 b) { return PAIRS(i32, _mm256_min_epi32, a, b); }
INLINE i32 i32_max(i32 a, i32 b) { return PAIRS(i32, _mm256_max_epi32, a, b); }
INLINE i32 i32_pick(lanes m, i32 no, i32 yes) {
    return BOTH(i32, _mm256_blendv_epi8(no.low, yes.low, spread(m, 0)), _mm256_blendv_epi8(no.high, yes.high, spread(m, 8)));
}
INLINE lanes i32_more(i32 a, i32 b) {
    return gathered_bits(_mm256_castsi256_ps(_mm256_cmpgt_epi32(a.low, b.low)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(a.high, b.high)));
}
INLINE i32 i32_right(i32 x, int by) { return BOTH(i32, _mm256_srli_epi32(x.low, by), _mm256_srli_epi32(x.high, by)); }
INLINE i32 i32_left(i32 x, int by) { return BOTH(i32, _mm256_slli_epi32(x.low, by), _mm256_slli_epi32(x.high, by)); }
INLINE i32 i32_halves_right(i32 x, int by) { return BOTH(i32, _mm256_srli_epi16(x.low, by), _mm256_srli_epi16(x.high, by)); }
INLINE i32 i32_add_pairs(i32 sum, i32 a, const int16_t *p) {
    const i32 b = i32_of(*(const int32_t *)p);
    sum = i32_add(sum, PAIRS(i32, _mm256_madd_epi16, a, b));
    __asm__("" : "+x"(sum.low), "+x"(sum.high)); /* add now: compilers reorder integer sums and then run out of registers */
    return sum;
}
INLINE int32_t i32_sum(i32 x) {
    const __m256i eight = _mm256_add_epi32(x.low, x.high);
    const __m128i four = _mm_add_epi32(_mm256_extracti128_si256(eight, 1), _mm256_castsi256_si128(eight));
    const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}
INLINE int32_t i32_most(i32 x) {
    const __m256i eight = _mm256_max_epi32(x.low, x.high);
    const __m128i four = _mm_max_epi32(_mm256_extracti128_si256(eight, 1), _mm256_castsi256_si128(eight));
    const __m128i two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 1)));
}
INLINE __m256i i32_narrowed(i32 x) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8); }
INLINE i32 i32_right_signed(i32 x, int by) { return BOTH(i32, _mm256_srai_epi32(x.low, by), _mm256_srai_epi32(x.high, by)); }
INLINE f32 i32_to_f32(i32 x) { return EACH(f32, _mm256_cvtepi32_ps, x); }
INLINE i32 f32_to_i32(f32 x) { return EACH(i32, _mm256_cvtps_epi32, x); }
INLINE f32 i32_as_f32(i32 x) { return EACH(f32, _mm256_castsi256_ps, x); }
INLINE i32 f32_as_i32(f32 x) { return EACH(i32, _mm256_castps_si256, x); }
INLINE i32 i32_from_8(const int8_t *p) {
    return BOTH(i32, _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)), _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8))));
}
INLINE i32 i32_from_16(const uint16_t *p) {
    return BOTH(i32, _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 8))));
}
INLINE void i32_to_16(uint16_t *p, i32 x) { /* keeps the lower halves; the upper ones must be zero */
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(x.low, x.high), 0xd8));
}
INLINE i32 i32_bytes_of_e2m1(i32 x) {
    const __m256i numbers = _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    return BOTH(i32, _mm256_shuffle_epi8(numbers, x.low), _mm256_shuffle_epi8(numbers, x.high));
}
INLINE f32 f32_twice_e2m1(i32 x) {
    const __m256 sizes = _mm256_setr_ps(0, 1, 2, 3, 4, 6, 8, 12);
    const i32 sign = i32_and(i32_left(x, 28), i32_of(0x80000000));
    const f32 size = BOTH(f32, _mm256_permutevar8x32_ps(sizes, x.low), _mm256_permutevar8x32_ps(sizes, x.high));
    return i32_as_f32(i32_xor(f32_as_i32(size), sign));
}
INLINE f32 f32_power_of_two(f32 x, f32 n) { return f32_mul(x, i32_as_f32(i32_left(i32_add(f32_to_i32(n), i32_of(127)), 23))); }

/* Transpose 8 x 8 words */
INLINE void turned_8(__m256i r[8]) {
    __m256i s[8];
    for (int i = 0; i < 8; i += 2) s[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]), s[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm256_unpacklo_epi64(s[i + j], s[i + j + 2]);
            r[i + 2 * j + 1] = _mm256_unpackhi_epi64(s[i + j], s[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {
        s[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
        s[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
    }
    for (int i = 0; i < 8; i++) r[i] = s[i];
}

/* Transpose 16 x 16 words */
INLINE void turned(i32 r[16]) {
    __m256i a[8], b[8], c[8], d[8];
    for (int i = 0; i < 8; i++) a[i] = r[i].low, b[i] = r[i].high, c[i] = r[i + 8].low, d[i] = r[i + 8].high;
    turned_8(a), turned_8(b), turned_8(c), turned_8(d);
    for (int i = 0; i < 8; i++) r[i] = (i32){a[i], c[i]}, r[i + 8] = (i32){b[i], d[i]};
}
#endif

/* Store as 16 bits with saturation. Within each 2 * apart numbers (4 or 8), the two halves alternate: 0 2 1 3, or 0 4 1 5 2 6 3 7. */
INLINE void i32_to_alternating(int16_t *p, i32 x, int apart) {
    const __m128i by_four = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    const __m128i by_two = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    const __m256i order = _mm256_broadcastsi128_si256(apart == 4 ? by_four : by_two);
    _mm256_storeu_si256((__m256i *)p, _mm256_shuffle_epi8(i32_narrowed(x), order));
}

#ifdef __AVX512VNNI__
#define IN_BYTES /* products of bytes: groups.h */
/* Low and high bytes of 16 integers x = low + 256 * high, low signed, as p [4][8]: of four of them low and then high. These four are
 * neighbours, or if `apart` every second of eight, first the even ones. */
INLINE void i32_to_bytes(int16_t *p, i32 x, int apart) {
    const __m128i every = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m128i near = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const i32 carried = i32_add(x, i32_and(i32_left(x, 1), i32_of(256))); /* the high byte is one more where the low one is negative */
    _mm256_storeu_si256((__m256i *)p, _mm256_shuffle_epi8(_mm512_cvtepi32_epi16(carried), _mm256_broadcastsi128_si256(apart ? every : near)));
}
INLINE i32 i32_add_bytes(i32 sum, i32 a, const int8_t *p) { /* sum += the unsigned bytes of a, times p[0] to p[3] */
    return _mm512_dpbusd_epi32(sum, a, i32_of(*(const int32_t *)p));
}
#endif

/* The mask of non-zero bytes among 16 */
INLINE lanes bytes_not_zero(const uint8_t *p) {
    return ~_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)p), _mm_setzero_si128()));
}

#ifdef __AVX512BF16__
#define DOTS /* this CPU has bfloat16 instructions, used below */
INLINE void f32_to_brain(uint16_t *p, f32 x) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x)); }
INLINE f32 f32_rounded(f32 x) { return i32_as_f32(i32_left(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16)); }
INLINE i32 brain_from_8(const int8_t *p) { return (i32)_mm512_cvtne2ps_pbh(i32_to_f32(i32_from_8(p + 16)), i32_to_f32(i32_from_8(p))); } /* 32 of them */
INLINE void f32_to_brain_swapped(uint16_t *p, f32 x) { /* with the two numbers of each word in each other's place */
    _mm256_storeu_si256((__m256i *)p, _mm256_rol_epi32((__m256i)_mm512_cvtneps_pbh(x), 16));
}
#define IN_ORDER /* adds the products of the upper halves, rounds, adds those of the lower ones and rounds again, unlike BFDOT */
INLINE f32 f32_add_pairs(f32 sum, i32 a, i32 b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); } /* adds the products of both halves */
#endif
