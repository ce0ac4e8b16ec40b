// Narrow number formats and functions that C lacks. Every function is branch-free, so that loops over lanes vectorise:
// conditions on floating-point numbers are joined by & and |.
#pragma once
#include "wave.h"

// ---- fp16 and bf16

static inline float half_to_float(u16 h) {
  u32 magnitude = (u32)(h & 0x7FFF) << 13;
  u32 bits = as_bits(as_float(magnitude) * 0x1p112f);
  bits = magnitude >= 0x7C00u << 13 ? magnitude | 0x7F800000u : bits;
  return as_float(bits | (u32)(h & 0x8000) << 16);
}

static inline u16 float_to_half(float x) {  // to nearest even; the payload of a NaN is cut off, as numpy does
  u32 bits = as_bits(x), magnitude = bits & 0x7FFFFFFF;
  u32 normal = (magnitude + 0xFFF + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
  u32 denormal = as_bits(as_float(magnitude) + 0.5f) - 0x3F000000u;
  u32 nan = 0x7C00u | (magnitude >> 13 & 0x3FF);
  u32 half = magnitude < 0x38800000u ? denormal : normal;
  half = magnitude >= 0x47800000u ? 0x7C00u : half;
  half = magnitude > 0x7F800000u ? (nan == 0x7C00u ? 0x7C01u : nan) : half;
  return (u16)(half | (bits >> 16 & 0x8000));
}

static inline float bfloat_to_float(u16 b) { return as_float((u32)b << 16); }

static inline u16 float_to_bfloat(float x) {
  u32 bits = as_bits(x);
  u32 rounded = bits + 0x7FFF + (bits >> 16 & 1);
  return (u16)(((bits & 0x7FFFFFFF) > 0x7F800000u ? bits | 0x400000u : rounded) >> 16);
}

static inline float truncated_xf32(u32 bits) { return as_float(bits & 0xFFFFE000u); }

// ---- formats of at most 16 bits by their fields. Mirrored by `formats.FORMAT`.

enum Specials { FN, IEEE, FNUZ, FINITE };
typedef struct {
  i32 mantissa_bits, bias, sign_bit, max_code, nan, beyond, specials, pad;
  float decode_factor;  // 2**(127 - bias)
} Format;

// `specials` is that of the format: a constant where loops over lanes are to be fast.
static inline float decode_small(u32 code, const Format *f, enum Specials specials) {
  const u32 magnitude = code & (u32)(f->sign_bit - 1), top = (u32)f->max_code, quiet = 0x7FC00000u;
  u32 bits = as_bits(as_float(magnitude << (23 - f->mantissa_bits)) * f->decode_factor);
  if (specials == FN || specials == IEEE) {
    u32 special = specials == IEEE && magnitude == top + 1 ? 0x7F800000u : quiet;
    bits = magnitude > top ? special : bits;
  }
  bits |= code & (u32)f->sign_bit ? 0x80000000u : 0;
  if (specials == FNUZ) bits = code == (u32)f->sign_bit ? quiet : bits;
  return as_float(bits);
}

// The code of each lane that begins at bit `shift` of its word.
static inline void decode_row(const u32 *words, int shift, const Format *format, float *out) {
  const Format f = *format;
  const u32 keep = (u32)(2 * f.sign_bit - 1);
  switch (f.specials) {
    case FN: EACH out[l] = decode_small(words[l] >> shift & keep, &f, FN); break;
    case IEEE: EACH out[l] = decode_small(words[l] >> shift & keep, &f, IEEE); break;
    case FNUZ: EACH out[l] = decode_small(words[l] >> shift & keep, &f, FNUZ); break;
    default: EACH out[l] = decode_small(words[l] >> shift & keep, &f, FINITE);
  }
}

// Rounds to nearest even. `saturate`: finite values that are too large become the greatest finite value.
static inline u32 encode_small(double value, const Format *f, int saturate) {
  u64 bits = as_bits64(value), magnitude = bits & 0x7FFFFFFFFFFFFFFFull;
  i64 lowest = 1 - f->bias, exponent = (i64)(magnitude >> 52) - 1023;
  exponent = exponent < lowest ? lowest : exponent;
  i64 capped = exponent > 512 ? 512 : exponent;
  // Adding 1.5 * 2**52 units of the last place rounds to a whole number of them.
  u64 magic = (u64)(capped - f->mantissa_bits + 52 + 1023) << 52 | 1ull << 51;
  i64 units = (i64)(as_bits64(as_double(magnitude) + as_double(magic)) - magic);
  i64 code = units + ((capped - lowest) << f->mantissa_bits);
  int nan = magnitude > 0x7FF0000000000000ull, infinite = magnitude == 0x7FF0000000000000ull;
  int large = (exponent > 512) | (code > f->max_code);
  u32 sign = bits >> 63 ? (u32)f->sign_bit : 0;
  u32 result = large ? (u32)(saturate || f->specials == FINITE ? f->max_code : f->beyond) : (u32)code;
  result = infinite ? (u32)(f->specials == FINITE ? f->max_code : f->beyond) : result;
  result = nan ? (u32)f->nan : result;
  int unsigned_code = f->specials == FNUZ && (result == 0 || result == (u32)f->nan);
  return unsigned_code ? result : result | sign;
}

static const Format HALF UNUSED = {10, 15, 0x8000, 0x7BFF, 0x7E00, 0x7C00, IEEE, 0, 0x1p112f};

static inline u16 double_to_half(double x) {
  u64 bits = as_bits64(x), magnitude = bits & 0x7FFFFFFFFFFFFFFFull;
  u32 code = encode_small(x, &HALF, 0), payload = 0x7C00u | (u32)(magnitude >> 42 & 0x3FF);
  u32 nan = (payload == 0x7C00u ? 0x7C01u : payload) | (u32)(bits >> 48 & 0x8000);
  return (u16)(magnitude > 0x7FF0000000000000ull ? nan : code);
}

// An E8M0 scale: 2**(code - 127), and NaN for 0xFF.
static inline float scale_of(u32 code) {
  u32 bits = code == 0 ? 0x400000u : code == 255 ? 0x7FC00000u : code << 23;
  return as_float(bits);
}

// ---- extrema, of numbers as bits: +0 is above -0; of a number and a quiet NaN the number, of a signalling NaN a quiet one

// a where the condition holds, else b; compilers make branches of ?: where that looks shorter, which do not vectorise.
#define PICK(U, condition, a, b) ((U)(((a) ^ (b)) & (U)((U)0 - (U)(condition))) ^ (b))
#define EXTREMA(kind, U, I, infinity, quiet_bit, quiet_nan)                                                           \
  static inline U magnitude_##kind(U x) { return x & (U)((U)~(U)0 >> 1); }                                            \
  static inline int is_nan_##kind(U x) { return magnitude_##kind(x) > (infinity); }                                   \
  static inline int signals_##kind(U x) { return is_nan_##kind(x) & !(x & (quiet_bit)); }                             \
  static inline I rank_##kind(U x) { return (I)(x ^ magnitude_##kind((U)((I)x >> (8 * sizeof(U) - 1)))); }            \
  static inline int equal_##kind(U x, U y) { return (x == y) | !magnitude_##kind(x | y); }                            \
  static inline U number_##kind(U r, U x, U y) { /* r if both are numbers */                                          \
    r = PICK(U, is_nan_##kind(y), x, r);                                                                              \
    r = PICK(U, is_nan_##kind(x) & !is_nan_##kind(y), y, r);                                                          \
    return PICK(U, signals_##kind(x) | signals_##kind(y), (U)(quiet_nan), r);                                         \
  }                                                                                                                   \
  static inline U nan_##kind(U r, U x, U y) { /* r if none is a NaN, which stays one */                               \
    r = PICK(U, is_nan_##kind(y), y, r);                                                                              \
    r = PICK(U, is_nan_##kind(x), x, r);                                                                              \
    return PICK(U, signals_##kind(x) | signals_##kind(y), (U)(quiet_nan), r);                                         \
  }                                                                                                                   \
  static inline U largest_##kind(U x, U y) {                                                                          \
    return number_##kind(PICK(U, rank_##kind(x) > rank_##kind(y), x, y), x, y);                                       \
  }                                                                                                                   \
  static inline U smallest_##kind(U x, U y) {                                                                         \
    return number_##kind(PICK(U, rank_##kind(x) < rank_##kind(y), x, y), x, y);                                       \
  }                                                                                                                   \
  static inline UNUSED U maximum_##kind(U x, U y) {                                                                   \
    return nan_##kind(PICK(U, rank_##kind(x) > rank_##kind(y), x, y), x, y);                                          \
  }                                                                                                                   \
  static inline UNUSED U minimum_##kind(U x, U y) {                                                                   \
    return nan_##kind(PICK(U, rank_##kind(x) < rank_##kind(y), x, y), x, y);                                          \
  }                                                                                                                   \
  static inline UNUSED U median_##kind(U x, U y, U z) { /* with a NaN, the least of the others */                     \
    U top = largest_##kind(largest_##kind(x, y), z);                                                                  \
    U middle = PICK(U, equal_##kind(top, y), largest_##kind(x, z), largest_##kind(x, y));                             \
    middle = PICK(U, equal_##kind(top, x), largest_##kind(y, z), middle);                                             \
    int nan = is_nan_##kind(x) | is_nan_##kind(y) | is_nan_##kind(z);                                                 \
    return PICK(U, nan, smallest_##kind(smallest_##kind(x, y), z), middle);                                           \
  }
EXTREMA(f16, u16, i16, 0x7C00, 0x200, 0x7E00)
EXTREMA(f32, u32, i32, 0x7F800000u, 0x400000u, 0x7FC00000u)
EXTREMA(f64, u64, i64, 0x7FF0000000000000ull, 0x8000000000000ull, 0x7FF8000000000000ull)

// ---- exponential and logarithm in fp64, accurate to about an ulp of it

static inline float flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

#if defined(__FMA__) || defined(__aarch64__)
#define FUSED(x, y, z) __builtin_fma(x, y, z)
#else
#define FUSED(x, y, z) ((x) * (y) + (z))
#endif
static inline double exp2_f64(float x32) {
  double x = x32, n = x < -200 ? -200 : x > 200 ? 200 : x;
  double shifted = n + 0x1.8p52, whole = shifted - 0x1.8p52, r = (n - whole) * 0x1.62e42fefa39efp-1;
  double low = (n - whole) * 0x1.abc9e3b39803fp-56;  // the rest of ln 2
  double p = 0x1.6124613a86d09p-33;                   // 1 / 13!, then 1 / 12! and so on
  p = FUSED(p, r, 0x1.1eed8eff8d898p-29);
  p = FUSED(p, r, 0x1.ae64567f544e4p-26);
  p = FUSED(p, r, 0x1.27e4fb7789f5cp-22);
  p = FUSED(p, r, 0x1.71de3a556c734p-19);
  p = FUSED(p, r, 0x1.a01a01a01a01ap-16);
  p = FUSED(p, r, 0x1.a01a01a01a01ap-13);
  p = FUSED(p, r, 0x1.6c16c16c16c17p-10);
  p = FUSED(p, r, 0x1.1111111111111p-7);
  p = FUSED(p, r, 0x1.5555555555555p-5);
  p = FUSED(p, r, 0x1.5555555555555p-3);
  p = FUSED(p, r, 0.5);
  double e = 1.0 + (r + (low + p * r * r));
  double result = e * as_double((as_bits64(shifted) + 1023) << 52);
  return x32 != x32 ? x : result;
}

static inline double log2_f64(float x32) {  // of zero and normal numbers
  double x = x32;
  u64 bits = as_bits64(x);
  i64 shifted = (i64)(bits - 0x3FE6A09E667F3BCDull) >> 52;  // the mantissa becomes one of [sqrt(1/2), sqrt(2))
  double m = as_double(bits - ((u64)shifted << 52)), e = (double)(i32)shifted;
  double s = (m - 1.0) / (m + 1.0), t = s * s;
  double p = 1.0 / 23;
  p = FUSED(p, t, 1.0 / 21);
  p = FUSED(p, t, 1.0 / 19);
  p = FUSED(p, t, 1.0 / 17);
  p = FUSED(p, t, 1.0 / 15);
  p = FUSED(p, t, 1.0 / 13);
  p = FUSED(p, t, 1.0 / 11);
  p = FUSED(p, t, 1.0 / 9);
  p = FUSED(p, t, 1.0 / 7);
  p = FUSED(p, t, 1.0 / 5);
  p = FUSED(p, t, 1.0 / 3);
  // 2 s (1 + t p) / ln 2, with 2 / ln 2 in two parts.
  double q = s * (t * p), high = s * 0x1.71547652b82fep+1, low = s * 0x1.777d0ffda0d24p-55;
  double result = e + (high + (q * 0x1.71547652b82fep+1 + low));
  result = x32 == 0 ? -INFINITY : result;
  result = x32 < 0 ? as_double(0xFFF8000000000000ull) : result;
  result = x32 == INFINITY ? x : result;
  return x32 != x32 ? x : result;
}

// Sine of 2 pi x; the argument is first brought to a quarter of a turn, exactly.
static inline double quarter_turn(double x) {
  x -= __builtin_rint(x);
  return fabs(x) > 0.25 ? copysign(0.5, x) - x : x;
}
static inline double sine_of(double x) { return sin(2 * 3.141592653589793 * quarter_turn(x)); }
static inline double cosine_of(double x) { return sine_of(x - __builtin_rint(x) + 0.25); }
static inline long double exact_sine(double x) { return sinl(2 * 3.14159265358979323846264338327950288L * quarter_turn(x)); }

static inline float ldexp_f32(float x, i32 n) {  // one rounding, in the conversion
  i64 e = n < -600 ? -600 : n > 600 ? 600 : n;
  return (float)((double)x * as_double((u64)(e + 1023) << 52));
}
