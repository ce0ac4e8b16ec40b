// Floating-point instructions of the vector ALU, and conversions between wide types.
#include "vector.h"

FLOATS(v_add_f32, A[l] + B[l])
FLOATS(v_sub_f32, A[l] - B[l])
FLOATS(v_subrev_f32, B[l] - A[l])
FLOATS(v_mul_f32, A[l] * B[l])
WORDS(v_min_f32, smallest_f32(A[l], B[l]))
WORDS(v_max_f32, largest_f32(A[l], B[l]))
FLOATS(v_mul_legacy_f32, (A[l] == 0) | (B[l] == 0) ? 0.0f : A[l] * B[l])
FLOATS(v_mad_legacy_f32, ((A[l] == 0) | (B[l] == 0) ? 0.0f : A[l] * B[l]) + C[l])
FLOATS(v_fma_f32, __builtin_fmaf(A[l], B[l], C[l]))
WORDS(v_min3_f32, smallest_f32(smallest_f32(A[l], B[l]), C[l]))
WORDS(v_max3_f32, largest_f32(largest_f32(A[l], B[l]), C[l]))
WORDS(v_med3_f32, median_f32(A[l], B[l], C[l]))
WORDS(v_minimum3_f32, minimum_f32(minimum_f32(A[l], B[l]), C[l]))
WORDS(v_maximum3_f32, maximum_f32(maximum_f32(A[l], B[l]), C[l]))
FLOATS(v_trunc_f32, __builtin_truncf(A[l]))
FLOATS(v_ceil_f32, __builtin_ceilf(A[l]))
FLOATS(v_floor_f32, __builtin_floorf(A[l]))
FLOATS(v_rndne_f32, __builtin_rintf(A[l]))
static inline float fraction(float x) {
  float r = x - __builtin_floorf(x);
  return r > 0x1.fffffep-1f ? 0x1.fffffep-1f : r;
}
FLOATS(v_fract_f32, fraction(A[l]))
LANEWISE(v_ldexp_f32, float, float, i32, u32, ldexp_f32(A[l], B[l]))
FLOATS(v_rcp_f32, flush(1.0f / flush(A[l])))
FLOATS(v_sqrt_f32, flush(__builtin_sqrtf(flush(A[l]))))

// Correctly rounded functions of x: in fp64, and where that is next to the middle of two fp32 numbers in extended precision.
#define ROUNDED(name, input, output, value, exact)                                                  \
  OP(name) {                                                                                        \
    const float *A = (const float *)ROW(a);                                                         \
    const u32 *M = w->mask;                                                                         \
    float *D = (float *)ROW(d), r[64] __attribute__((aligned(64)));                                 \
    u32 close[64] __attribute__((aligned(64))), any = 0;                                            \
    EACH {                                                                                          \
      const float x = input(A[l]);                                                                  \
      const double v = value;                                                                       \
      r[l] = (float)v;                                                                              \
      close[l] = ((as_bits64(v) + 64 - 0x10000000) & 0x1FFFFFFF) <= 128;                            \
      any |= close[l];                                                                              \
    }                                                                                               \
    for (int l = 0; unlikely(any) && l < 64; l++) {                                                 \
      const float x = input(A[l]);                                                                  \
      if (close[l]) r[l] = (float)(exact);                                                          \
    }                                                                                               \
    EACH { float t = output(r[l]); D[l] = M[l] ? t : D[l]; }                                        \
    NEXT;                                                                                           \
  }
#define AS_IT_IS(x) (x)
ROUNDED(v_exp_f32, flush, flush, exp2_f64(x), exp2l(x))
ROUNDED(v_log_f32, flush, flush, log2_f64(x), log2l(x))
ROUNDED(v_rsq_f32, flush, flush, 1.0 / __builtin_sqrt((double)x), 1.0L / sqrtl(x))
ROUNDED(v_sin_f32, AS_IT_IS, AS_IT_IS, sine_of(x), exact_sine(x))
ROUNDED(v_cos_f32, AS_IT_IS, AS_IT_IS, cosine_of(x), exact_sine(x - __builtin_rint((double)x) + 0.25))
static inline float mantissa_of(float x) { int e; return frexpf(x, &e); }
static inline i32 exponent_of(double x) { int e; frexp(x, &e); return isfinite(x) ? e : 0; }
FLOATS(v_frexp_mant_f32, mantissa_of(A[l]))
LANEWISE(v_frexp_exp_i32_f32, i32, float, u32, u32, exponent_of(A[l]))

// Output modifiers: b is a row with the factor. A clamped -0 of fp16 stays -0, as numpy has it.
FLOATS(omod_f32, A[l] * B[l])
FLOATS(clamp_f32, A[l] != A[l] ? 0.0f : A[l] > 0 ? (A[l] < 1 ? A[l] : 1.0f) : 0.0f)
HALF_FLOATS(omod_f16, FA * FB)
HALF_FLOATS(clamp_f16, FA != FA ? 0.0f : FA >= 0 ? (FA < 1 ? FA : 1.0f) : 0.0f)
DOUBLES(omod_f64, DA * DB)
DOUBLES(clamp_f64, DA != DA ? 0.0 : DA > 0 ? (DA < 1 ? DA : 1.0) : 0.0)

// ---- the division sequence
#define FIXED_UP(name, T, copy_sign, infinity, nan)                                               \
  static inline T name(T quotient, T denominator, T numerator) {                                  \
    T sign = !signbit(denominator) != !signbit(numerator) ? -1 : 1, r = copy_sign(quotient, sign); \
    int infinite = isinf(denominator) != 0, endless = isinf(numerator) != 0;                      \
    r = infinite | (numerator == 0) ? copy_sign(0, sign) : r;                                     \
    r = (denominator == 0) | endless | (r != r) ? copy_sign(infinity, sign) : r;                  \
    int invalid = ((denominator == 0) & (numerator == 0)) | (infinite & endless);                 \
    return invalid | (denominator != denominator) | (numerator != numerator) ? nan : r;           \
  }
FIXED_UP(fixed_up, float, copysignf, INFINITY, as_float(0x7FC00000u))
FIXED_UP(fixed_up64, double, copysign, INFINITY, as_double(0x7FF8ull << 48))
FLOATS(v_div_fixup_f32, fixed_up(A[l], B[l], C[l]))
DOUBLES(v_div_fixup_f64, fixed_up64(DA, DB, DC))
static inline u16 fixed_up_half(u16 quotient, u16 denominator, u16 numerator) {
  float r = fixed_up(half_to_float(quotient), half_to_float(denominator), half_to_float(numerator));
  return r != r ? 0x7E00 : float_to_half(r);
}
HALVES(v_div_fixup_f16, fixed_up_half(a, b, c))

static inline int exponent32(float x) { return as_bits(x) >> 23 & 255; }
static inline int exponent64(double x) { return as_bits64(x) >> 52 & 2047; }
// x scaled, and whether the lane's quotient is. apart: difference of exponents; least: small exponent of a numerator
#define SCALED(name, T, exponent, tiny, nan, apart, least, factor)                                \
  static inline T name(T x, T denominator, T numerator, u32 *lanes) {                             \
    int n = exponent(numerator), d = exponent(denominator);                                       \
    double quotient = (double)numerator / denominator;                                            \
    int zero = (numerator == 0) | (denominator == 0), far = !zero & (n - d >= apart);             \
    int denormal = !zero & !far & (fabs(denominator) < tiny), rest = !zero & !far & !denormal;    \
    int small_reciprocal = fabs(1.0 / (double)denominator) < tiny, small_quotient = fabs(quotient) < tiny; \
    int small_numerator = rest & !small_reciprocal & !small_quotient & (n <= least);              \
    *lanes = far | (rest & small_quotient) ? ~0u : 0;                                             \
    int up = denormal | (far & (x == denominator)) | small_numerator |                            \
             (rest & !small_reciprocal & small_quotient & (x == numerator));                      \
    int down = rest & small_reciprocal & (!small_quotient | (x == denominator));                  \
    return zero ? nan : x * (T)(up ? factor : down ? 1 / factor : 1);                             \
  }
SCALED(scaled, float, exponent32, 0x1p-126, as_float(0x7FC00000u), 96, 23, 0x1p64)
SCALED(scaled64, double, exponent64, 0x1p-1022, as_double(0x7FF8ull << 48), 768, 53, 0x1p128)
OP(v_div_scale_f32) {  // y: scalar pair of the lanes that were scaled
  const float *A = (const float *)ROW(a), *B = (const float *)ROW(b), *C = (const float *)ROW(c);
  const u32 *M = w->mask;
  float *D = (float *)ROW(d);
  u32 lanes[64] __attribute__((aligned(64)));
  EACH {
    u32 on;
    float r = scaled(A[l], B[l], C[l], &on);
    D[l] = M[l] ? r : D[l];
    lanes[l] = on & M[l];
  }
  put_pair(w, o->y, pack_mask(lanes));
  NEXT;
}
OP(v_div_scale_f64) {
  const u32 *A = ROW(a), *B = ROW(b), *C = ROW(c), *M = w->mask;
  u32 *D = ROW(d), lanes[64];
  for (int l = 0; l < 64; l++) {
    u32 on;
    u64 r = as_bits64(scaled64(DA, DB, DC, &on));
    if (M[l]) D[l] = (u32)r, D[64 + l] = (u32)(r >> 32);
    lanes[l] = on & M[l];
  }
  put_pair(w, o->y, pack_mask(lanes));
  NEXT;
}
// The sum, of the two neighbours of an inexact one that whose last bit is set: rounding it again rounds the exact sum.
static inline double sum_to_odd(double x, double y) {
  double total = x + y, back = total - x, error = (x - (total - back)) + (y - back);
  u64 bits = as_bits64(total), nudge = (error > 0) == (total > 0) ? 1 : ~0ull;
  return as_double(bits + ((error != 0) & (fabs(error) < INFINITY) & !(bits & 1) ? nudge : 0));
}
OP(v_div_fmas_f32) {
  const float *A = (const float *)ROW(a), *B = (const float *)ROW(b), *C = (const float *)ROW(c);
  const u32 *M = w->mask;
  float *D = (float *)ROW(d);
  u32 vcc[64];
  unpack_mask(vcc, pair(w, VCC));
  EACH {
    double factor = vcc[l] ? (exponent32(C[l]) > 127 ? 0x1p64 : 0x1p-64) : 1;
    float r = (float)(sum_to_odd((double)A[l] * (double)B[l], C[l]) * factor);
    D[l] = M[l] ? r : D[l];
  }
  NEXT;
}
// (x * y + z) * 2**-128 with one rounding: if the first one ends halfway between two subnormal results, its error decides.
static double scaled_down(double x, double y, double z) {
  double r = fma(x, y, z), v = r * 0x1p-128;
  if (fabs(v) < 0x1p-1022 && fabs(r - v * 0x1p128) == 0x1p-947) {
    double error = fma(x, y, z - r);
    if (error != 0) v = nextafter(r, error > 0 ? INFINITY : -INFINITY) * 0x1p-128;
  }
  return v;
}
OP(v_div_fmas_f64) {
  const u32 *A = ROW(a), *B = ROW(b), *C = ROW(c), *M = w->mask;
  u32 *D = ROW(d), vcc[64];
  unpack_mask(vcc, pair(w, VCC));
  for (int l = 0; l < 64; l++) {
    int down = exponent64(DC) <= 1023;
    u64 r = as_bits64(vcc[l] && down ? scaled_down(DA, DB, DC) : fma(DA, DB, DC) * (vcc[l] ? 0x1p128 : 1.0));
    if (M[l]) D[l] = (u32)r, D[64 + l] = (u32)(r >> 32);
  }
  NEXT;
}

// ---- fp16
HALF_FLOATS(v_add_f16, FA + FB)
HALF_FLOATS(v_sub_f16, FA - FB)
HALF_FLOATS(v_subrev_f16, FB - FA)
HALF_FLOATS(v_mul_f16, FA * FB)
HALVES(v_min_f16, smallest_f16(a, b))
HALVES(v_max_f16, largest_f16(a, b))
HALVES(v_min3_f16, smallest_f16(smallest_f16(a, b), c))
HALVES(v_max3_f16, largest_f16(largest_f16(a, b), c))
HALVES(v_med3_f16, median_f16(a, b, c))
HALVES(v_minimum3_f16, minimum_f16(minimum_f16(a, b), c))
HALVES(v_maximum3_f16, maximum_f16(maximum_f16(a, b), c))
HALVES(v_fma_f16, double_to_half((double)FA * (double)FB + (double)FC))
HALVES(v_ldexp_f16, float_to_half(ldexp_f32(FA, (i16)b)))
HALVES(v_exp_f16, double_to_half(exp2_f64(FA)))
HALVES(v_log_f16, double_to_half(log2_f64(FA)))
HALF_FLOATS(v_rcp_f16, 1.0f / FA)
HALVES(v_rsq_f16, double_to_half(1.0 / __builtin_sqrt((double)FA)))
HALF_FLOATS(v_sqrt_f16, __builtin_sqrtf(FA))
HALF_FLOATS(v_trunc_f16, __builtin_truncf(FA))
HALF_FLOATS(v_ceil_f16, __builtin_ceilf(FA))
HALF_FLOATS(v_floor_f16, __builtin_floorf(FA))
HALF_FLOATS(v_rndne_f16, __builtin_rintf(FA))
static inline u16 fraction_half(float x) {
  u16 r = float_to_half(x - __builtin_floorf(x));
  return half_to_float(r) > 0x1.ffcp-1f ? 0x3BFF : r;
}
HALVES(v_fract_f16, fraction_half(FA))
HALVES(v_sin_f16, double_to_half(sine_of(FA)))
HALVES(v_cos_f16, double_to_half(cosine_of(FA)))

// ---- fp64
DOUBLES(v_add_f64, DA + DB)
DOUBLES(v_mul_f64, DA * DB)
LANEWISE64(v_min_f64, smallest_f64(A64, B64))
LANEWISE64(v_max_f64, largest_f64(A64, B64))
DOUBLES(v_fma_f64, __builtin_fma(DA, DB, DC))
DOUBLES(v_ldexp_f64, ldexp(DA, (i32)B[l]))
DOUBLES(v_rcp_f64, 1.0 / DA)
DOUBLES(v_rsq_f64, 1.0 / __builtin_sqrt(DA))
DOUBLES(v_sqrt_f64, __builtin_sqrt(DA))
DOUBLES(v_trunc_f64, __builtin_trunc(DA))
DOUBLES(v_ceil_f64, __builtin_ceil(DA))
DOUBLES(v_floor_f64, __builtin_floor(DA))
DOUBLES(v_rndne_f64, __builtin_rint(DA))
static inline double fraction64(double x) {
  double r = x - __builtin_floor(x);
  return r > 0x1.fffffffffffffp-1 ? 0x1.fffffffffffffp-1 : r;
}
DOUBLES(v_fract_f64, fraction64(DA))
static inline double mantissa64(double x) { int e; return frexp(x, &e); }
DOUBLES(v_frexp_mant_f64, mantissa64(DA))
LANEWISE(v_frexp_exp_i32_f64, i32, u32, u32, u32, exponent_of(DA))

// 1201 bits of 2 / pi, then zeros; segment: which 53 of them
static const u64 TWO_OVER_PI[64] = {
  0xA2F9836E4E441529, 0xFC2757D1F534DDC0, 0xDB6295993C439041, 0xFE5163ABDEBBC561, 0xB7246E3A424DD2E0, 0x06492EEA09D1921C,
  0xFE1DEB1CB129A73E, 0xE88235F52EBB4484, 0xE99C7026B45F7E41, 0x3991D639835339F4, 0x9C845F8BBDF9283B, 0x1FF897FFDE05980F,
  0xEF2F118B5A0A6D1F, 0x6D367ECF27CB09B7, 0x4F463F669E5FEA2D, 0x7527BAC7EBE5F17B, 0x3D0739F78A5292EA, 0x6BFB5FB11F8D5D08,
  0x56033046FC7B0000,
};
static inline double two_over_pi(double x, u32 segment) {
  const int exponent = exponent64(x), shift = 53 * (int)(segment & 31) + (exponent > 1077 ? exponent - 1077 : 0);
  const u64 *word = TWO_OVER_PI + shift / 64;
  const u64 bits = shift % 64 ? word[0] << shift % 64 | word[1] >> (64 - shift % 64) : word[0];
  return ldexp((double)(bits >> 11), (exponent >= 1968 ? 75 : -53) - shift);
}
DOUBLES(v_trig_preop_f64, two_over_pi(DA, B[l]))

// ---- conversions: out of range saturates, NaN gives 0
static inline i32 to_i32(double x) { return x != x ? 0 : x <= -0x1p31 ? INT32_MIN : x >= 0x1p31 - 1 ? INT32_MAX : (i32)x; }
static inline u32 to_u32(double x) { return x != x || x <= 0 ? 0 : x >= 0x1p32 - 1 ? UINT32_MAX : (u32)x; }
LANEWISE(v_cvt_f32_i32, float, i32, u32, u32, A[l])
LANEWISE(v_cvt_f32_u32, float, u32, u32, u32, A[l])
LANEWISE(v_cvt_i32_f32, i32, float, u32, u32, to_i32(__builtin_truncf(A[l])))
LANEWISE(v_cvt_u32_f32, u32, float, u32, u32, to_u32(__builtin_truncf(A[l])))
LANEWISE(v_cvt_flr_i32_f32, i32, float, u32, u32, to_i32(__builtin_floorf(A[l])))
LANEWISE(v_cvt_rpi_i32_f32, i32, float, u32, u32, to_i32(__builtin_floorf(A[l] + 0.5f)))
LANEWISE(v_cvt_f32_f16, float, u32, u32, u32, half_to_float((u16)A[l]))
HALVES(v_cvt_f16_u16, float_to_half((float)a))
HALVES(v_cvt_f16_i16, float_to_half((float)(i16)a))
static inline u16 to_u16(float x) { return x != x || x <= 0 ? 0 : x >= 65535 ? 65535 : (u16)x; }
static inline u16 to_i16(float x) { return x != x ? 0 : (u16)(i16)(x <= -32768 ? -32768 : x >= 32767 ? 32767 : x); }
HALVES(v_cvt_u16_f16, to_u16(__builtin_truncf(FA)))
HALVES(v_cvt_i16_f16, to_i16(__builtin_truncf(FA)))
LANEWISE64(v_cvt_f64_f32, as_bits64((double)as_float(A[l])))
LANEWISE(v_cvt_f32_f64, float, u32, u32, u32, DA)
LANEWISE64(v_cvt_f64_i32, as_bits64((double)(i32)A[l]))
LANEWISE64(v_cvt_f64_u32, as_bits64((double)A[l]))
LANEWISE(v_cvt_i32_f64, i32, u32, u32, u32, to_i32(__builtin_trunc(DA)))
LANEWISE(v_cvt_u32_f64, u32, u32, u32, u32, to_u32(__builtin_trunc(DA)))
LANEWISE(v_cvt_f32_ubyte0, float, u32, u32, u32, A[l] & 255)
LANEWISE(v_cvt_f32_ubyte1, float, u32, u32, u32, A[l] >> 8 & 255)
LANEWISE(v_cvt_f32_ubyte2, float, u32, u32, u32, A[l] >> 16 & 255)
LANEWISE(v_cvt_f32_ubyte3, float, u32, u32, u32, A[l] >> 24)

// ---- mixed precision: sources are fp32 already
WORDS(v_fma_mixlo_f16, (D[l] & 0xFFFF0000u) | float_to_half(as_float(A[l])))
WORDS(v_fma_mixhi_f16, (D[l] & 0xFFFFu) | (u32)float_to_half(as_float(A[l])) << 16)

#define HALF_OF(x, shift) ((double)half_to_float((u16)((x) >> (shift))))
#define BFLOAT_OF(x, shift) ((double)bfloat_to_float((u16)((x) >> (shift))))
LANEWISE(v_dot2_f32_f16, float, u32, u32, float,
         0.0 + HALF_OF(A[l], 0) * HALF_OF(B[l], 0) + HALF_OF(A[l], 16) * HALF_OF(B[l], 16) + (double)C[l])
LANEWISE(v_dot2_f32_bf16, float, u32, u32, float,
         0.0 + BFLOAT_OF(A[l], 0) * BFLOAT_OF(B[l], 0) + BFLOAT_OF(A[l], 16) * BFLOAT_OF(B[l], 16) + (double)C[l])

// ---- sources: scalars in all lanes, modifiers, parts of words
OP(broadcast) { u32 *D = ROW(d), x = w->s[o->a]; EACH D[l] = x; NEXT; }
OP(broadcast64) {
  u32 *D = ROW(d), x = w->s[o->a], y = w->s[o->a + 1];
  EACH { D[l] = x; D[64 + l] = y; }
  NEXT;
}
OP(widen64) { u32 *D = ROW(d); const u32 *A = ROW(a); EACH { D[l] = A[l]; D[64 + l] = 0; } NEXT; }
EVERY(copy, A[l])
EVERY(flip_bits, A[l] ^ (u32)o->x)
EVERY(keep_bits, A[l] & (u32)o->x)
EVERY(negate_32, 0u - A[l])
EVERY(negate_16, (u16)(0u - A[l]))
OP(negate_64) {
  u32 *D = ROW(d); const u32 *A = ROW(a);
  EACH { u64 r = 0ull - A64; D[l] = (u32)r; D[64 + l] = (u32)(r >> 32); }
  NEXT;
}
EVERY(select, A[l] << o->x >> o->y)
EVERY(select_signed, (i32)(A[l] << o->x) >> o->y)
EVERY(join_halves, (A[l] >> o->x & 0xFFFF) | B[l] >> o->y << 16)

// Part of a word, under EXEC. x: shift; y: mask of the part, in place; z: mask of the old bits that stay.
WORDS(insert, (A[l] << o->x & (u32)o->y) | (D[l] & (u32)o->z))
WORDS(insert_signed, (u32)((i32)(A[l] << o->x << o->y) >> o->y))
