/* Vectors of 16 numbers on ARM (aarch64): four registers of NEON. Included by vectors.h. Where NEON differs, the functions do what x86-64
 * does: for the maximum with NaN, and for the order of horizontal sums. */
#include <arm_neon.h>

typedef struct {
    float32x4_t a, b, c, d;
} f32;
typedef struct {
    int32x4_t a, b, c, d;
} i32;

#define EACH(type, call, x) ((type){call((x).a), call((x).b), call((x).c), call((x).d)})
#define PAIRS(type, call, x, y) ((type){call((x).a, (y).a), call((x).b, (y).b), call((x).c, (y).c), call((x).d, (y).d)})
#define TRIPLES(type, call, x, y, z) \
    ((type){call((x).a, (y).a, (z).a), call((x).b, (y).b, (z).b), call((x).c, (y).c, (z).c), call((x).d, (y).d, (z).d)})

typedef struct {
    uint32x4_t a, b, c, d;
} mask; /* all bits of a number are set, or none */

INLINE uint32x4_t spread_four(lanes m, int first) {
    const uint32x4_t bits = {1, 2, 4, 8};
    return vtstq_u32(vdupq_n_u32(m >> first), bits);
}
INLINE mask spread(lanes m) { return (mask){spread_four(m, 0), spread_four(m, 4), spread_four(m, 8), spread_four(m, 12)}; }
INLINE lanes gathered_bits(mask m) {
    const uint32x4_t a = {1, 2, 4, 8}, b = {16, 32, 64, 128}, c = {256, 512, 1024, 2048}, d = {4096, 8192, 16384, 32768};
    return vaddvq_u32(vorrq_u32(vorrq_u32(vandq_u32(m.a, a), vandq_u32(m.b, b)), vorrq_u32(vandq_u32(m.c, c), vandq_u32(m.d, d))));
}

/* Numbers whose mask bit is clear are neither read nor written. */
INLINE int32x4_t load_some_of_four(lanes m, const int32_t *p) {
    if ((m & 15) == 15) return vld1q_s32(p);
    int32_t some[4] = {0};
    for (int i = 0; i < 4; i++)
        if (m >> i & 1) some[i] = p[i];
    return vld1q_s32(some);
}
INLINE i32 i32_kept(i32 x) { return x; }
INLINE i32 i32_load_some(lanes m, const int32_t *p) {
    return (i32){load_some_of_four(m, p), load_some_of_four(m >> 4, p + 4), load_some_of_four(m >> 8, p + 8), load_some_of_four(m >> 12, p + 12)};
}
INLINE void store_some_of_four(float *p, lanes m, float32x4_t x) {
    if ((m & 15) == 15) {
        vst1q_f32(p, x);
        return;
    }
    float all[4];
    vst1q_f32(all, x);
    for (int i = 0; i < 4; i++)
        if (m >> i & 1) p[i] = all[i];
}

INLINE f32 f32_of(float x) { return (f32){vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
INLINE f32 f32_zero(void) { return f32_of(0.0f); }
INLINE f32 f32_load(const float *p) { return (f32){vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
INLINE void f32_store(float *p, f32 x) { vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b), vst1q_f32(p + 8, x.c), vst1q_f32(p + 12, x.d); }
INLINE void f32_store_some(float *p, lanes m, f32 x) {
    store_some_of_four(p, m, x.a), store_some_of_four(p + 4, m >> 4, x.b);
    store_some_of_four(p + 8, m >> 8, x.c), store_some_of_four(p + 12, m >> 12, x.d);
}
INLINE f32 f32_add(f32 x, f32 y) { return PAIRS(f32, vaddq_f32, x, y); }
INLINE f32 f32_sub(f32 x, f32 y) { return PAIRS(f32, vsubq_f32, x, y); }
INLINE f32 f32_mul(f32 x, f32 y) { return PAIRS(f32, vmulq_f32, x, y); }
INLINE f32 f32_div(f32 x, f32 y) { return PAIRS(f32, vdivq_f32, x, y); }
INLINE float32x4_t larger(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); } /* y if either is NaN, as MAXPS */
INLINE f32 f32_max(f32 x, f32 y) { return PAIRS(f32, larger, x, y); }
INLINE f32 f32_abs(f32 x) { return EACH(f32, vabsq_f32, x); }
INLINE f32 f32_fma(f32 x, f32 y, f32 z) { return TRIPLES(f32, vfmaq_f32, z, x, y); }
INLINE void f32_add_product(f32 *sum, f32 a, const float *x) { *sum = f32_fma(a, f32_of(*x), *sum); }
INLINE f32 f32_fnma(f32 x, f32 y, f32 z) { return TRIPLES(f32, vfmsq_f32, z, x, y); }
INLINE f32 f32_nearest(f32 x) { return EACH(f32, vrndnq_f32, x); }
INLINE f32 f32_pick(lanes m, f32 no, f32 yes) { return TRIPLES(f32, vbslq_f32, spread(m), yes, no); }
INLINE f32 f32_keep(lanes m, f32 x) { return f32_pick(m, f32_zero(), x); }
INLINE lanes f32_less(f32 x, f32 y) { return gathered_bits(PAIRS(mask, vcltq_f32, x, y)); }
INLINE lanes f32_equal(f32 x, f32 y) { return gathered_bits(PAIRS(mask, vceqq_f32, x, y)); }
INLINE lanes f32_least(f32 x, f32 y) { return gathered_bits(PAIRS(mask, vcgeq_f32, x, y)); }
INLINE float f32_first(f32 x) { return vgetq_lane_f32(x.a, 0); }
INLINE float f32_sum(f32 x) { /* in the order of _mm512_reduce_add_ps */
    const float32x4_t four = vaddq_f32(vaddq_f32(x.b, x.d), vaddq_f32(x.a, x.c));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
INLINE float f32_most(f32 x) {
    const float32x4_t four = larger(larger(x.b, x.d), larger(x.a, x.c)), two = larger(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(larger(two, vdupq_laneq_f32(two, 1)), 0);
}
INLINE float32x4_t halves_to_floats(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE f32 f32_from_half(const uint16_t *p) { /* of float16 */
    return (f32){halves_to_floats(p), halves_to_floats(p + 4), halves_to_floats(p + 8), halves_to_floats(p + 12)};
}

INLINE i32 i32_of(int32_t x) { return (i32){vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x), vdupq_n_s32(x)}; }
INLINE i32 i32_zero(void) { return i32_of(0); }
INLINE i32 i32_count(void) { return (i32){{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}}; }
INLINE int32x4_t load_four(const char *p) { return vreinterpretq_s32_u8(vld1q_u8((const uint8_t *)p)); }
INLINE i32 i32_load(const void *p) {
    const char *bytes = p;
    return (i32){load_four(bytes), load_four(bytes + 16), load_four(bytes + 32), load_four(bytes + 48)};
}
INLINE void store_four(char *p, int32x4_t x) { vst1q_u8((uint8_t *)p, vreinterpretq_u8_s32(x)); }
INLINE void i32_store(void *p, i32 x) {
    char *bytes = p;
    store_four(bytes, x.a), store_four(bytes + 16, x.b), store_four(bytes + 32, x.c), store_four(bytes + 48, x.d);
}
/* Unsigned, because these must wrap around, and signed overflow is undefined in C */
INLINE int32x4_t sum_of_four(int32x4_t x, int32x4_t y) { return (int32x4_t)vaddq_u32((uint32x4_t)x, (uint32x4_t)y); }
INLINE int32x4_t difference_of_four(int32x4_t x, int32x4_t y) { return (int32x4_t)vsubq_u32((uint32x4_t)x, (uint32x4_t)y); }
INLINE int32x4_t product_of_four(int32x4_t x, int32x4_t y) { return (int32x4_t)vmulq_u32((uint32x4_t)x, (uint32x4_t)y); }
INLINE i32 i32_add(i32 x, i32 y) { return PAIRS(i32, sum_of_four, x, y); }
INLINE i32 i32_sub(i32 x, i32 y) { return PAIRS(i32, difference_of_four, x, y); }
INLINE i32 i32_mul(i32 x, i32 y) { return PAIRS(i32, product_of_four, x, y); }
INLINE i32 i32_and(i32 x, i32 y) { return PAIRS(i32, vandq_s32, x, y); }
INLINE i32 i32_xor(i32 x, i32 y) { return PAIRS(i32, veorq_s32, x, y); }
INLINE i32 i32_min(i32 x, i32 y) { return PAIRS(i32, vminq_s32, x, y); }
INLINE i32 i32_max(i32 x, i32 y) { return PAIRS(i32, vmaxq_s32, x, y); }
INLINE i32 i32_pick(lanes m, i32 no, i32 yes) { return TRIPLES(i32, vbslq_s32, spread(m), yes, no); }
INLINE lanes i32_more(i32 x, i32 y) { return gathered_bits(PAIRS(mask, vcgtq_s32, x, y)); }
INLINE i32 i32_right(i32 x, int by) { /* logical shift */
    return (i32){(int32x4_t)((uint32x4_t)x.a >> by), (int32x4_t)((uint32x4_t)x.b >> by), (int32x4_t)((uint32x4_t)x.c >> by), (int32x4_t)((uint32x4_t)x.d >> by)};
}
INLINE i32 i32_right_signed(i32 x, int by) { return (i32){x.a >> by, x.b >> by, x.c >> by, x.d >> by}; }
INLINE i32 i32_left(i32 x, int by) {
    return (i32){(int32x4_t)((uint32x4_t)x.a << by), (int32x4_t)((uint32x4_t)x.b << by), (int32x4_t)((uint32x4_t)x.c << by), (int32x4_t)((uint32x4_t)x.d << by)};
}
INLINE i32 i32_halves_right(i32 x, int by) { /* shifts both 16-bit halves of each word separately */
    return (i32){(int32x4_t)((uint16x8_t)x.a >> by), (int32x4_t)((uint16x8_t)x.b >> by), (int32x4_t)((uint16x8_t)x.c >> by), (int32x4_t)((uint16x8_t)x.d >> by)};
}

/* 12 plus twice the e2m1 float in the lowest four bits of each byte; the other bits must be zero */
INLINE int32x4_t four_bytes_of_e2m1(int32x4_t x) {
    const uint8x16_t numbers = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return vreinterpretq_s32_u8(vqtbl1q_u8(numbers, vreinterpretq_u8_s32(x)));
}
INLINE i32 i32_bytes_of_e2m1(i32 x) { return EACH(i32, four_bytes_of_e2m1, x); }
/* Twice the e2m1 float in the lowest four bits of each word; other bits are ignored */
INLINE float32x4_t four_of_twice_e2m1(int32x4_t x) {
    const int32x4_t size = vsubq_s32(vandq_s32(four_bytes_of_e2m1(vandq_s32(x, vdupq_n_s32(7))), vdupq_n_s32(255)), vdupq_n_s32(12));
    const uint32x4_t sign = vshlq_n_u32(vshrq_n_u32(vreinterpretq_u32_s32(vshlq_n_s32(x, 28)), 31), 31);
    return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(vcvtq_f32_s32(size)), sign));
}
INLINE f32 f32_twice_e2m1(i32 x) { return EACH(f32, four_of_twice_e2m1, x); }

/* sum += the signed 16-bit halves of x, times p[0] and p[1]. x is separated into lower and upper halves first, which compilers hoist out of
 * loops over tokens. */
INLINE i32 i32_add_pairs(i32 sum, i32 x, const int16_t *p) {
    const int16x8_t lower = vuzp1q_s16((int16x8_t)x.a, (int16x8_t)x.b), upper = vuzp2q_s16((int16x8_t)x.a, (int16x8_t)x.b);
    const int16x8_t lower_2 = vuzp1q_s16((int16x8_t)x.c, (int16x8_t)x.d), upper_2 = vuzp2q_s16((int16x8_t)x.c, (int16x8_t)x.d);
    const int16x4_t y = vreinterpret_s16_s32(vdup_n_s32(*(const int32_t *)p));
    sum.a = vmlal_lane_s16(vmlal_lane_s16(sum.a, vget_low_s16(lower), y, 0), vget_low_s16(upper), y, 1);
    sum.b = vmlal_high_lane_s16(vmlal_high_lane_s16(sum.b, lower, y, 0), upper, y, 1);
    sum.c = vmlal_lane_s16(vmlal_lane_s16(sum.c, vget_low_s16(lower_2), y, 0), vget_low_s16(upper_2), y, 1);
    sum.d = vmlal_high_lane_s16(vmlal_high_lane_s16(sum.d, lower_2, y, 0), upper_2, y, 1);
    return sum;
}
INLINE int32_t i32_sum(i32 x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.a, x.b), vaddq_s32(x.c, x.d))); }
INLINE int32_t i32_most(i32 x) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.a, x.b), vmaxq_s32(x.c, x.d))); }
INLINE f32 i32_to_f32(i32 x) { return EACH(f32, vcvtq_f32_s32, x); }
INLINE i32 f32_to_i32(f32 x) { return EACH(i32, vcvtnq_s32_f32, x); }
INLINE f32 i32_as_f32(i32 x) { return EACH(f32, vreinterpretq_f32_s32, x); }
INLINE i32 f32_as_i32(f32 x) { return EACH(i32, vreinterpretq_s32_f32, x); }
INLINE f32 f32_load_some(lanes m, const float *p) { return i32_as_f32(i32_load_some(m, (const int32_t *)p)); }
INLINE f32 f32_power_of_two(f32 x, f32 n) { return f32_mul(x, i32_as_f32(i32_left(i32_add(f32_to_i32(n), i32_of(127)), 23))); }
INLINE f32 f32_gather(const float *p, i32 index) {
    int32_t at[16];
    float all[16];
    i32_store(at, index);
    for (int i = 0; i < 16; i++) all[i] = p[at[i]];
    return f32_load(all);
}
INLINE i32 i32_from_8(const int8_t *p) {
    const int8x16_t x = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_high_s8(x);
    return (i32){vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)};
}
INLINE i32 i32_from_16(const uint16_t *p) {
    const uint16x8_t low = vld1q_u16(p), high = vld1q_u16(p + 8);
    return (i32){(int32x4_t)vmovl_u16(vget_low_u16(low)), (int32x4_t)vmovl_high_u16(low), (int32x4_t)vmovl_u16(vget_low_u16(high)),
                 (int32x4_t)vmovl_high_u16(high)};
}
INLINE void i32_to_16(uint16_t *p, i32 x) { /* the lower halves */
    vst1q_u16(p, vuzp1q_u16((uint16x8_t)x.a, (uint16x8_t)x.b)), vst1q_u16(p + 8, vuzp1q_u16((uint16x8_t)x.c, (uint16x8_t)x.d));
}

/* Transpose 4 x 4 words */
INLINE void turned_4(int32x4_t *p, int32x4_t *q, int32x4_t *r, int32x4_t *s) {
    const int64x2_t a = (int64x2_t)vtrn1q_s32(*p, *q), b = (int64x2_t)vtrn2q_s32(*p, *q);
    const int64x2_t c = (int64x2_t)vtrn1q_s32(*r, *s), d = (int64x2_t)vtrn2q_s32(*r, *s);
    *p = (int32x4_t)vtrn1q_s64(a, c), *q = (int32x4_t)vtrn1q_s64(b, d), *r = (int32x4_t)vtrn2q_s64(a, c), *s = (int32x4_t)vtrn2q_s64(b, d);
}

/* Transpose 16 x 16 words */
INLINE void turned(i32 r[16]) {
    for (int i = 0; i < 16; i += 4) {
        turned_4(&r[i].a, &r[i + 1].a, &r[i + 2].a, &r[i + 3].a), turned_4(&r[i].b, &r[i + 1].b, &r[i + 2].b, &r[i + 3].b);
        turned_4(&r[i].c, &r[i + 1].c, &r[i + 2].c, &r[i + 3].c), turned_4(&r[i].d, &r[i + 1].d, &r[i + 2].d, &r[i + 3].d);
    }
    for (int i = 0; i < 4; i++) {
        const i32 a = r[i], b = r[i + 4], c = r[i + 8], d = r[i + 12];
        r[i] = (i32){a.a, b.a, c.a, d.a}, r[i + 4] = (i32){a.b, b.b, c.b, d.b};
        r[i + 8] = (i32){a.c, b.c, c.c, d.c}, r[i + 12] = (i32){a.d, b.d, c.d, d.d};
    }
}

/* Store as 16 bits with saturation. Within each 2 * apart numbers (4 or 8), the two halves alternate: 0 2 1 3, or 0 4 1 5 2 6 3 7. */
INLINE void i32_to_alternating(int16_t *p, i32 x, int apart) {
    const uint8x16_t by_four = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};
    const uint8x16_t by_two = {0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15};
    const uint8x16_t order = apart == 4 ? by_four : by_two;
    const int16x8_t low = vqmovn_high_s32(vqmovn_s32(x.a), x.b), high = vqmovn_high_s32(vqmovn_s32(x.c), x.d);
    vst1q_s16(p, (int16x8_t)vqtbl1q_u8((uint8x16_t)low, order)), vst1q_s16(p + 8, (int16x8_t)vqtbl1q_u8((uint8x16_t)high, order));
}

/* The mask of non-zero bytes among 16 */
INLINE lanes bytes_not_zero(const uint8_t *p) {
    const uint8x16_t bits = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128}, x = vld1q_u8(p), set = vandq_u8(vtstq_u8(x, x), bits);
    return vaddv_u8(vget_low_u8(set)) | vaddv_u8(vget_high_u8(set)) << 8;
}

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define DOTS /* this CPU has bfloat16 instructions, used below */
INLINE bfloat16x8_t brains(float32x4_t x, float32x4_t y) { return vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(x), y); }
INLINE void f32_to_brain(uint16_t *p, f32 x) { vst1q_bf16((bfloat16_t *)p, brains(x.a, x.b)), vst1q_bf16((bfloat16_t *)p + 8, brains(x.c, x.d)); }
INLINE float32x4_t rounded_four(float32x4_t x) { return vcvt_f32_bf16(vcvt_bf16_f32(x)); }
INLINE f32 f32_rounded(f32 x) { return EACH(f32, rounded_four, x); }
INLINE int32x4_t upper_halves(int32x4_t x, int32x4_t y) { return (int32x4_t)vuzp2q_u16((uint16x8_t)x, (uint16x8_t)y); }
INLINE i32 brain_from_8(const int8_t *p) { /* 32 of them; bfloat16 holds them exactly */
    const i32 x = f32_as_i32(i32_to_f32(i32_from_8(p))), y = f32_as_i32(i32_to_f32(i32_from_8(p + 16)));
    return (i32){upper_halves(x.a, x.b), upper_halves(x.c, x.d), upper_halves(y.a, y.b), upper_halves(y.c, y.d)};
}
INLINE float32x4_t dotted(float32x4_t sum, int32x4_t x, int32x4_t y) { return vbfdotq_f32(sum, (bfloat16x8_t)x, (bfloat16x8_t)y); }
INLINE f32 f32_add_pairs(f32 sum, i32 x, i32 y) { return TRIPLES(f32, dotted, sum, x, y); } /* adds the products of both halves */
#endif
