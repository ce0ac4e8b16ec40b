// Integer instructions of the vector ALU.
#include "vector.h"

#define LOW24(x) ((i32)((u32)(x) << 8) >> 8)
#define MIN(x, y) ((x) < (y) ? (x) : (y))
#define MAX(x, y) ((x) > (y) ? (x) : (y))
#define MEDIAN(x, y, z) MAX(MIN(x, y), MIN(MAX(x, y), z))
#define CLIP(x, low, high) MIN(MAX(x, low), high)

static inline u32 reversed(u32 x) {
  x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
  x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
  x = (x >> 4 & 0x0F0F0F0F) | (x & 0x0F0F0F0F) << 4;
  x = (x >> 8 & 0x00FF00FF) | (x & 0x00FF00FF) << 8;
  return x >> 16 | x << 16;
}
static inline u32 leading_zeros(u32 x) { return x ? (u32)__builtin_clz(x) : ~0u; }

WORDS(v_mov_b32, A[l])
WORDS(v_not_b32, ~A[l])
WORDS(v_bfrev_b32, reversed(A[l]))
WORDS(v_ffbh_u32, leading_zeros(A[l]))
WORDS(v_ffbh_i32, leading_zeros((i32)A[l] < 0 ? ~A[l] : A[l]))
WORDS(v_ffbl_b32, A[l] ? (u32)__builtin_ctz(A[l]) : ~0u)
WORDS(v_prng_b32, A[l] << 1 ^ (A[l] >> 31 ? 0xC5u : 0))
WORDS(v_add_u32, A[l] + B[l])
WORDS(v_sub_u32, A[l] - B[l])
WORDS(v_subrev_u32, B[l] - A[l])
WORDS(v_and_b32, A[l] & B[l])
WORDS(v_or_b32, A[l] | B[l])
WORDS(v_xor_b32, A[l] ^ B[l])
WORDS(v_xnor_b32, ~(A[l] ^ B[l]))
WORDS(v_min_u32, MIN(A[l], B[l]))
WORDS(v_max_u32, MAX(A[l], B[l]))
INTS(v_min_i32, MIN(A[l], B[l]))
INTS(v_max_i32, MAX(A[l], B[l]))
WORDS(v_mul_lo_u32, A[l] * B[l])
WORDS(v_mul_hi_u32, (u64)A[l] * B[l] >> 32)
INTS(v_mul_hi_i32, (i64)A[l] * B[l] >> 32)
WORDS(v_mul_u32_u24, (A[l] & 0xFFFFFF) * (B[l] & 0xFFFFFF))
WORDS(v_mul_hi_u32_u24, (u64)(A[l] & 0xFFFFFF) * (B[l] & 0xFFFFFF) >> 32)
WORDS(v_mul_i32_i24, (u32)LOW24(A[l]) * (u32)LOW24(B[l]))
WORDS(v_lshlrev_b32, B[l] << (A[l] & 31))
WORDS(v_lshrrev_b32, B[l] >> (A[l] & 31))
WORDS(v_ashrrev_i32, (i32)B[l] >> (A[l] & 31))
WORDS(v_bfm_b32, ((1u << (A[l] & 31)) - 1) << (B[l] & 31))
WORDS(v_bcnt_u32_b32, (u32)__builtin_popcount(A[l]) + B[l])
WORDS(v_add3_u32, A[l] + B[l] + C[l])
WORDS(v_or3_b32, A[l] | B[l] | C[l])
WORDS(v_and_or_b32, (A[l] & B[l]) | C[l])
WORDS(v_xad_u32, (A[l] ^ B[l]) + C[l])
WORDS(v_lshl_add_u32, (A[l] << (B[l] & 31)) + C[l])
WORDS(v_add_lshl_u32, (A[l] + B[l]) << (C[l] & 31))
WORDS(v_lshl_or_b32, A[l] << (B[l] & 31) | C[l])
WORDS(v_bfi_b32, (A[l] & B[l]) | (~A[l] & C[l]))
WORDS(v_bfe_u32, A[l] >> (B[l] & 31) & ((1u << (C[l] & 31)) - 1))
static inline u32 signed_field(u32 x, u32 offset, u32 width) {
  u32 sign = 1u << width >> 1, field = (u32)((i32)x >> offset) & ((1u << width) - 1);
  return (field ^ sign) - sign;
}
WORDS(v_bfe_i32, signed_field(A[l], B[l] & 31, C[l] & 31))
WORDS(v_alignbit_b32, ((u64)A[l] << 32 | B[l]) >> (C[l] & 31))
WORDS(v_alignbyte_b32, ((u64)A[l] << 32 | B[l]) >> 8 * (C[l] & 3))
WORDS(v_min3_u32, MIN(MIN(A[l], B[l]), C[l]))
WORDS(v_max3_u32, MAX(MAX(A[l], B[l]), C[l]))
WORDS(v_med3_u32, MEDIAN(A[l], B[l], C[l]))
INTS(v_min3_i32, MIN(MIN(A[l], B[l]), C[l]))
INTS(v_max3_i32, MAX(MAX(A[l], B[l]), C[l]))
INTS(v_med3_i32, MEDIAN(A[l], B[l], C[l]))
WORDS(v_mad_u32_u24, (A[l] & 0xFFFFFF) * (B[l] & 0xFFFFFF) + C[l])
WORDS(v_mad_i32_i24, (u32)LOW24(A[l]) * (u32)LOW24(B[l]) + C[l])
WORDS(v_mad_u32_u16, (A[l] & 0xFFFF) * (B[l] & 0xFFFF) + C[l])
WORDS(v_mad_i32_i16, (u32)((i32)(i16)A[l] * (i32)(i16)B[l]) + C[l])
LANEWISE64(v_mov_b64, A64)
LANEWISE64(v_lshlrev_b64, B64 << (A[l] & 63))
LANEWISE64(v_lshrrev_b64, B64 >> (A[l] & 63))
LANEWISE64(v_ashrrev_i64, (i64)B64 >> (A[l] & 63))
LANEWISE64(v_lshl_add_u64, (A64 << (B[l] & 7)) + C64)

// With the modifier clamp.
WORDS(v_add_u32_clamp, A[l] + B[l] < A[l] ? ~0u : A[l] + B[l])
WORDS(v_sub_u32_clamp, A[l] > B[l] ? A[l] - B[l] : 0)
WORDS(v_subrev_u32_clamp, B[l] > A[l] ? B[l] - A[l] : 0)
WORDS(v_add_i32_clamp, CLIP((i64)(i32)A[l] + (i32)B[l], INT32_MIN, INT32_MAX))
WORDS(v_sub_i32_clamp, CLIP((i64)(i32)A[l] - (i32)B[l], INT32_MIN, INT32_MAX))
WORDS(v_mad_u32_u24_clamp, MIN((u64)(A[l] & 0xFFFFFF) * (B[l] & 0xFFFFFF) + C[l], 0xFFFFFFFFull))
HALVES(v_add_u16_clamp, MIN((u32)a + b, 0xFFFF))
HALVES(v_sub_u16_clamp, a > b ? a - b : 0)
HALVES(v_subrev_u16_clamp, b > a ? b - a : 0)
HALVES(v_add_i16_clamp, CLIP((i32)(i16)a + (i16)b, -32768, 32767))
HALVES(v_sub_i16_clamp, CLIP((i32)(i16)a - (i16)b, -32768, 32767))

HALVES(v_add_u16, a + b)
HALVES(v_sub_u16, a - b)
HALVES(v_subrev_u16, b - a)
HALVES(v_mul_lo_u16, (u32)a * b)
HALVES(v_min_u16, MIN(a, b))
HALVES(v_max_u16, MAX(a, b))
HALVES(v_lshlrev_b16, (u32)b << (a & 15))
HALVES(v_lshrrev_b16, b >> (a & 15))
HALVES(v_ashrrev_i16, (i16)b >> (a & 15))
HALVES(v_min_i16, MIN((i16)a, (i16)b))
HALVES(v_max_i16, MAX((i16)a, (i16)b))
HALVES(v_mad_u16, (u32)a * b + c)
HALVES(v_min3_u16, MIN(MIN(a, b), c))
HALVES(v_max3_u16, MAX(MAX(a, b), c))
HALVES(v_med3_u16, MEDIAN(a, b, c))
HALVES(v_min3_i16, MIN(MIN((i16)a, (i16)b), (i16)c))
HALVES(v_max3_i16, MAX(MAX((i16)a, (i16)b), (i16)c))
HALVES(v_med3_i16, MEDIAN((i16)a, (i16)b, (i16)c))

static inline u32 dot4(u32 a, u32 b, u32 c) {
  return (u32)((i8)a * (i8)b + (i8)(a >> 8) * (i8)(b >> 8) + (i8)(a >> 16) * (i8)(b >> 16) + (i8)(a >> 24) * (i8)(b >> 24)) + c;
}
static inline u32 dot4u(u32 a, u32 b, u32 c) {
  return (u8)a * (u8)b + (u8)(a >> 8) * (u8)(b >> 8) + (u8)(a >> 16) * (u8)(b >> 16) + (a >> 24) * (b >> 24) + c;
}
WORDS(v_dot4_i32_i8, dot4(A[l], B[l], C[l]))
WORDS(v_dot4_u32_u8, dot4u(A[l], B[l], C[l]))
WORDS(v_dot2_i32_i16, (u32)((i16)A[l] * (i16)B[l]) + (u32)((i16)(A[l] >> 16) * (i16)(B[l] >> 16)) + C[l])
WORDS(v_dot2_u32_u16, (A[l] & 0xFFFF) * (B[l] & 0xFFFF) + (A[l] >> 16) * (B[l] >> 16) + C[l])

// x: the truth table; bit 4 a + 2 b + c is the result.
#define TERM(k) (0u - (u32)(o->x >> (k) & 1))
static inline u32 two(u32 t0, u32 t1, u32 t2, u32 t3, u32 b, u32 c) {
  return (t0 & ~b & ~c) | (t1 & ~b & c) | (t2 & b & ~c) | (t3 & b & c);
}
WORDS(v_bitop3_b32, (~A[l] & two(TERM(0), TERM(1), TERM(2), TERM(3), B[l], C[l])) |
                        (A[l] & two(TERM(4), TERM(5), TERM(6), TERM(7), B[l], C[l])))

// Each selector byte picks a byte of (A:B), a replicated sign, 0x00 or 0xFF.
static inline u32 picked(u64 wide, u32 choice) {
  u32 byte = (u32)(wide >> 8 * (choice & 7)) & 255;
  u32 sign = 0u - (u32)(wide >> (16 * (choice & 3) + 15) & 1);
  u32 constant = choice > 12 ? 255 : 0;
  return choice < 8 ? byte : choice < 12 ? sign & 255 : constant;
}
static inline u32 permuted(u32 high, u32 low, u32 selector) {
  u64 wide = (u64)high << 32 | low;
  return picked(wide, selector & 255) | picked(wide, selector >> 8 & 255) << 8 |
         picked(wide, selector >> 16 & 255) << 16 | picked(wide, selector >> 24) << 24;
}
WORDS(v_perm_b32, permuted(A[l], B[l], C[l]))
OP(v_perm_b32_scalar) {  // the same with the selector in the scalar register c
  const u32 *A = ROW(a), *B = ROW(b), *M = w->mask, selector = w->s[o->c];
  u32 *D = ROW(d), r[64] __attribute__((aligned(64))) = {0};
  for (int k = 0; k < 32; k += 8) {
    u32 choice = selector >> k & 255, at = 8 * (choice & 3), sign = 16 * (choice & 1) + 15;
    if (choice < 8) {
      const u32 *from = choice < 4 ? B : A;
      EACH r[l] |= (from[l] >> at & 255) << k;
    } else if (choice < 12) {
      const u32 *from = choice < 10 ? B : A;
      EACH r[l] |= ((0u - (from[l] >> sign & 1)) & 255) << k;
    } else if (choice > 12) {
      EACH r[l] |= 255u << k;
    }
  }
  EACH D[l] = M[l] ? r[l] : D[l];
  NEXT;
}

// ---- with a carry. x: subtract; c: scalar pair of the carry in, or -1; y: of the carry out
OP(v_addc) {
  const u32 *A = ROW(a), *B = ROW(b), *M = w->mask;
  u32 *D = ROW(d), carry[64], in[64], r[64];
  unpack_mask(in, o->c >= 0 ? pair(w, o->c) : 0);
  if (o->x) {
    EACH { i64 t = (i64)A[l] - B[l] - (in[l] & 1); r[l] = (u32)t; carry[l] = t < 0 ? M[l] : 0; }
  } else {
    EACH { u64 t = (u64)A[l] + B[l] + (in[l] & 1); r[l] = (u32)t; carry[l] = t >> 32 ? M[l] : 0; }
  }
  EACH D[l] = M[l] ? r[l] : D[l];
  put_pair(w, o->y, pack_mask(carry));
  NEXT;
}
#define MAD64(name, product_of, carry_of)                                                    \
  OP(name) {                                                                                 \
    const u32 *A = ROW(a), *B = ROW(b), *C = ROW(c), *M = w->mask;                           \
    u32 *D = ROW(d), carry[64], low[64], high[64];                                           \
    EACH {                                                                                   \
      u64 product = product_of, addend = C64, total = product + addend;                      \
      low[l] = (u32)total, high[l] = (u32)(total >> 32);                                     \
      carry[l] = (carry_of) ? M[l] : 0;                                                      \
    }                                                                                        \
    EACH { D[l] = M[l] ? low[l] : D[l]; D[64 + l] = M[l] ? high[l] : D[64 + l]; }            \
    put_pair(w, o->y, pack_mask(carry));                                                     \
    NEXT;                                                                                    \
  }
MAD64(v_mad_u64_u32, (u64)A[l] * B[l], total < product)
MAD64(v_mad_i64_i32, (u64)((i64)(i32)A[l] * (i32)B[l]),
      (total >> 63) != (((product ^ total) & (addend ^ total)) >> 63))

OP(v_cndmask_b32) {  // c: scalar pair
  const u32 *A = ROW(a), *B = ROW(b), *M = w->mask;
  u32 *D = ROW(d), chosen[64] __attribute__((aligned(64)));
  unpack_mask(chosen, pair(w, o->c));
  EACH { u32 r = chosen[l] ? B[l] : A[l]; D[l] = M[l] ? r : D[l]; }
  NEXT;
}
