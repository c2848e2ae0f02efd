/* Vectors of 16 numbers: one register with AVX-512, two with AVX2, four with NEON. Functions are named after the element type and the
 * operation, and give the same bits on every instruction set, including horizontal sums.
 *
 * An `operand` is a factor of multiply(): in bfloat16, two elements of the inner dimension for each of 16 outputs; in float32, one.
 * VDPBF16PS and BFDOT multiply such pairs directly; without them, both elements are widened to float32.
 */
#ifndef VECTORS_H
#define VECTORS_H
#include <stddef.h>
#include <stdint.h>

#ifndef INLINE
#define INLINE static inline __attribute__((always_inline))
#endif

typedef uint16_t lanes; /* a mask: one bit for each of 16 numbers */
#ifdef __aarch64__
#include "neon.h"
#else
#include "x86.h"
#endif

/* The mask of non-zero bytes among the 16 at p. Only the bytes in `there`, which is a prefix, may be read. */
INLINE lanes bytes_set(lanes there, const uint8_t *p) {
    uint8_t some[16] = {0};
    const int count = there == 0xffff ? 16 : __builtin_popcount(there);
    if (count < 16) __builtin_memcpy(some, p, count);
    return bytes_not_zero(count < 16 ? some : p);
}

/* The smallest number of x in the mask m; INT32_MAX if m is empty */
INLINE int32_t i32_least_of(lanes m, i32 x) {
    int32_t all[16], least = INT32_MAX;
    i32_store(all, x);
    for (int i = 0; i < 16; i++)
        if (m >> i & 1 && all[i] < least) least = all[i];
    return least;
}

/* A positive normal number as fraction * 2^power, 0.75 <= fraction < 1.5 */
INLINE f32 fraction(f32 x, f32 *power) {
    const i32 bits = f32_as_i32(x), half = i32_and(i32_right(bits, 22), i32_of(1)); /* 1 if the mantissa is at least 1.5 */
    const i32 exponent = i32_add(i32_sub(i32_right(bits, 23), i32_of(127)), half);
    *power = i32_to_f32(exponent);
    return i32_as_f32(i32_sub(bits, i32_left(exponent, 23)));
}

#ifdef BF16
typedef uint16_t value;
INLINE f32 load(const value *p) { return i32_as_f32(i32_left(i32_from_16(p), 16)); }
#define DEPTH 2 /* elements of the inner dimension per step */

#ifdef DOTS
INLINE void store(value *p, f32 x) { f32_to_brain(p, x); }
INLINE f32 rounded(f32 x) { return f32_rounded(x); }
typedef i32 operand;
INLINE operand weights(const value *p) { return i32_load(p); }
INLINE operand eights(const int8_t *p) { return brain_from_8(p); }
INLINE operand input(const value *p) { return i32_of(*(const int32_t *)p); }
INLINE f32 multiply(f32 sum, operand w, operand x) { return f32_add_pairs(sum, w, x); }
#else
/* The bfloat16 bits of each float32, rounded to nearest, ties to even; NaN stays NaN */
INLINE i32 halves(f32 x) {
    const i32 bits = f32_as_i32(x), odd = i32_and(i32_right(bits, 16), i32_of(1));
    const i32 near = i32_right(i32_add(bits, i32_add(odd, i32_of(0x7fff))), 16);
    return i32_pick(f32_equal(x, x), i32_of(0x7fc0), near);
}
INLINE void store(value *p, f32 x) { i32_to_16(p, halves(x)); }
INLINE f32 rounded(f32 x) { return i32_as_f32(i32_left(halves(x), 16)); }
typedef struct {
    f32 even, odd;
} operand;
INLINE operand parted(i32 pairs) { return (operand){i32_as_f32(i32_left(pairs, 16)), i32_as_f32(i32_and(pairs, i32_of(0xffff0000)))}; }
INLINE operand weights(const value *p) { return parted(i32_load(p)); }
INLINE operand eights(const int8_t *p) {
    const i32 pairs = i32_from_16((const uint16_t *)p);
    return (operand){i32_to_f32(i32_right_signed(i32_left(pairs, 24), 24)), i32_to_f32(i32_right_signed(i32_left(pairs, 16), 24))};
}
INLINE i32 brain_from_8(const int8_t *p) { /* 32 of them; bfloat16 holds them exactly */
    const operand pairs = eights(p);
    return i32_xor(i32_right(f32_as_i32(pairs.even), 16), f32_as_i32(pairs.odd));
}
#if !defined(__AVX512F__) && !defined(EMULATED)
#define HALVED /* products read the even and the odd elements of pairs one after the other: products.h */
INLINE f32 half_of_weights(const value *p, int odd) {
    const i32 pairs = i32_load(p);
    return i32_as_f32(odd ? i32_and(pairs, i32_of(0xffff0000)) : i32_left(pairs, 16));
}
INLINE f32 half_of_eights(const int8_t *p, int odd) { return i32_to_f32(i32_right_signed(i32_left(i32_from_16((const uint16_t *)p), odd ? 16 : 24), 24)); }
#endif
INLINE operand input(const value *p) { return parted(i32_of(*(const int32_t *)p)); }
INLINE f32 multiply(f32 sum, operand w, operand x) { return f32_fma(w.odd, x.odd, f32_fma(w.even, x.even, sum)); }
#endif
#else
typedef float value;
INLINE f32 load(const value *p) { return f32_load(p); }
INLINE void store(value *p, f32 x) { f32_store(p, x); }
INLINE f32 rounded(f32 x) { return x; }
typedef f32 operand;
#define DEPTH 1
INLINE operand weights(const value *p) { return f32_load(p); }
INLINE operand eights(const int8_t *p) { return i32_to_f32(i32_from_8(p)); }
INLINE operand input(const value *p) { return f32_of(*p); }
INLINE f32 multiply(f32 sum, operand w, operand x) { return f32_fma(w, x, sum); }
#endif

/* For sums of values weighted by probabilities: AT_ONCE keys at a time. The first key's product is added first, and each sum is rounded as by
 * an FMA, so bits do not depend on which keys are added at once. */
#if defined(BF16) && defined(IN_ORDER)
#define AT_ONCE 2
typedef int32_t chance; /* probabilities of two keys, the first one's in the upper half */
typedef i32 summand;    /* likewise their values, of 16 columns */
INLINE void chances_of(f32 x, chance *p) { f32_to_brain_swapped((uint16_t *)p, x); }
INLINE summand summand_of(const value *first, const value *second) {
    return i32_xor(i32_left(i32_from_16(first), 16), second ? i32_from_16(second) : i32_zero());
}
INLINE f32 add_weighted(f32 sum, chance p, summand v) { return f32_add_pairs(sum, v, i32_of(p)); }
#else
#define AT_ONCE 1
typedef float chance;
typedef f32 summand;
INLINE void chances_of(f32 x, chance *p) { f32_store(p, x); }
INLINE summand summand_of(const value *first, const value *second) { return (void)second, load(first); }
INLINE f32 add_weighted(f32 sum, chance p, summand v) { return f32_fma(f32_of(p), v, sum); }
#endif

#endif
