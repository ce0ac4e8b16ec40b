// Conversions to and from narrow formats. b is a row with scales (fp32 whose exponents count) when `z` says so.
#include "vector.h"

#define FROM_F32(name, expression) LANEWISE(name, u32, float, float, u32, expression)
#define BOTH(low, high) ((u32)(u16)(low) | (u32)(u16)(high) << 16)

// v_cvt_f16_f32 honours MODE.FP16_OVFL.
static inline u16 saturated_half(float x, u32 saturate) {
  u16 half = float_to_half(x);
  int overflowed = saturate && (half & 0x7FFF) == 0x7C00 && fabsf(x) != INFINITY;
  return overflowed ? (u16)((half & 0x8000) | 0x7BFF) : half;
}
FROM_F32(v_cvt_f16_f32, saturated_half(A[l], w->saturate))

static inline u16 half_toward_zero(float x) {
  u16 half = float_to_half(x);
  return fabsf(half_to_float(half)) > fabsf(x) ? (u16)(half - 1) : half;
}
static inline i32 rounded(float x, float low, float factor) {  // of a clamped number; 0 for a NaN
  float clamped = x != x ? x : x < low ? low : x > 1 ? 1 : x;
  float r = __builtin_rintf(clamped * factor);
  return r != r ? 0 : (i32)r;
}
FROM_F32(v_cvt_pk_bf16_f32, BOTH(float_to_bfloat(A[l]), float_to_bfloat(B[l])))
FROM_F32(v_cvt_pk_f16_f32, BOTH(float_to_half(A[l]), float_to_half(B[l])))
FROM_F32(v_cvt_pkrtz_f16_f32, BOTH(half_toward_zero(A[l]), half_toward_zero(B[l])))
FROM_F32(v_cvt_pknorm_i16_f32, BOTH(rounded(A[l], -1, 32767), rounded(B[l], -1, 32767)))
FROM_F32(v_cvt_pknorm_u16_f32, BOTH(rounded(A[l], 0, 65535), rounded(B[l], 0, 65535)))
static inline u32 at_most(u32 x, u32 top) { return x < top ? x : top; }
static inline i32 within(i32 x, i32 low, i32 high) { return x < low ? low : x > high ? high : x; }
WORDS(v_cvt_pk_u16_u32, BOTH(at_most(A[l], 0xFFFF), at_most(B[l], 0xFFFF)))
WORDS(v_cvt_pk_i16_i32, BOTH(within((i32)A[l], -32768, 32767), within((i32)B[l], -32768, 32767)))
WORDS(v_pack_b32_f16, BOTH(A[l], B[l]))
LANEWISE(v_cvt_f32_bf16, u32, u32, u32, u32, (A[l] & 0xFFFF) << 16)

// Two words shifted right and saturated to bytes, in the low half of a temporary.
#define SHIFTED(x) ((i32)(x) >> (C[l] & 31))
#define SHIFT_PACK(name, low, high)                                                                       \
  OP(name) {                                                                                              \
    u32 *D = ROW(d);                                                                                      \
    const u32 *A = ROW(a), *B = ROW(b), *C = ROW(c);                                                      \
    EACH D[l] = (u32)(u8)within(SHIFTED(A[l]), low, high) | (u32)(u8)within(SHIFTED(B[l]), low, high) << 8; \
    NEXT;                                                                                                 \
  }
SHIFT_PACK(v_ashr_pk_i8_i32, -128, 127)
SHIFT_PACK(v_ashr_pk_u8_i32, 0, 255)

// ---- decode two codes: p: format; x, y: their positions in the word a; z: there is a scale.
#define DECODE(name, ...)                                                                                 \
  OP(name) {                                                                                              \
    const u32 *A = ROW(a), *S = ROW(b), *M = w->mask;                                                     \
    u32 *D = ROW(d);                                                                                      \
    float low[64] __attribute__((aligned(64))), high[64] __attribute__((aligned(64)));                    \
    decode_row(A, o->x, o->p, low), decode_row(A, o->y, o->p, high);                                      \
    if (o->z) {                                                                                           \
      EACH {                                                                                              \
        float scale = scale_of(S[l] >> 23 & 255), x = low[l], y = high[l];                                \
        low[l] = x != x ? x : x * scale, high[l] = y != y ? y : y * scale;                                \
      }                                                                                                   \
    }                                                                                                     \
    __VA_ARGS__;                                                                                          \
    NEXT;                                                                                                 \
  }
DECODE(decode_pair_f32, EACH {
  u32 r0 = as_bits(low[l]), r1 = as_bits(high[l]);
  D[l] = M[l] ? r0 : D[l];
  D[64 + l] = M[l] ? r1 : D[64 + l];
})
DECODE(decode_pair_f16, EACH { u32 r = BOTH(float_to_half(low[l]), float_to_half(high[l])); D[l] = M[l] ? r : D[l]; })
DECODE(decode_pair_bf16, if (o->z) {
  EACH { u32 r = BOTH(float_to_bfloat(low[l]), float_to_bfloat(high[l])); D[l] = M[l] ? r : D[l]; }
} else {  // all codes are bf16 numbers
  EACH { u32 r = as_bits(low[l]) >> 16 | (as_bits(high[l]) & 0xFFFF0000u); D[l] = M[l] ? r : D[l]; }
})
DECODE(decode_one_f32, EACH { u32 r = as_bits(low[l]); D[l] = M[l] ? r : D[l]; })
// fp16 of one code, rounded once, in the low half of a temporary.
OP(decode_one_f16) {
  const u32 *A = ROW(a), *S = ROW(b);
  const int scaled = o->z;
  u32 *D = ROW(d);
  float value[64] __attribute__((aligned(64)));
  decode_row(A, o->x, o->p, value);
  EACH D[l] = double_to_half(scaled ? (double)value[l] * scale_of(S[l] >> 23 & 255) : value[l]);
  NEXT;
}

// ---- encode two values into the low bits of a temporary. a, b: fp32 values; c: scale if z; y: bits of a code
OP(encode_pair) {
  const Format f = *(const Format *)o->p;
  const float *A = (const float *)ROW(a), *B = (const float *)ROW(b);
  const u32 *S = ROW(c);
  const int scaled = o->z, shift = o->y;
  const u32 saturate = w->saturate;
  u32 *D = ROW(d);
  EACH {
    double scale = scaled ? scale_of(S[l] >> 23 & 255) : 1.0;
    D[l] = encode_small(A[l] / scale, &f, (int)saturate) | encode_small(B[l] / scale, &f, (int)saturate) << shift;
  }
  NEXT;
}
// A 16-bit half, at x, as fp32.
OP(half_as_float) {
  float *D = (float *)ROW(d); const u32 *A = ROW(a); const int x = o->x;
  EACH D[l] = half_to_float((u16)(A[l] >> x));
  NEXT;
}
OP(bfloat_as_float) {
  u32 *D = ROW(d); const u32 *A = ROW(a); const int x = o->x;
  EACH D[l] = A[l] >> x << 16;
  NEXT;
}
