// Compares: lane masks in the scalar pair d.
#include "vector.h"

#define COMPARE(name, condition)                                               \
  OP(name) {                                                                   \
    const u32 *A = ROW(a), *B = ROW(b), *M = w->mask;                          \
    u32 lanes[64] __attribute__((aligned(64)));                                \
    EACH lanes[l] = (condition) ? M[l] : 0;                                    \
    put_pair(w, o->d, pack_mask(lanes));                                       \
    NEXT;                                                                      \
  }
#define ORDER(kind, X, Y)                                                      \
  COMPARE(v_cmp_lt_##kind, X < Y) COMPARE(v_cmp_eq_##kind, X == Y)             \
  COMPARE(v_cmp_le_##kind, X <= Y) COMPARE(v_cmp_gt_##kind, X > Y)             \
  COMPARE(v_cmp_ge_##kind, X >= Y)
#define INTEGERS(kind, X, Y) ORDER(kind, X, Y) COMPARE(v_cmp_ne_##kind, X != Y)
#define REALS(kind, X, Y)                                                      \
  ORDER(kind, X, Y)                                                            \
  COMPARE(v_cmp_lg_##kind, X < Y || X > Y) COMPARE(v_cmp_o_##kind, X == X && Y == Y) \
  COMPARE(v_cmp_u_##kind, X != X || Y != Y) COMPARE(v_cmp_nge_##kind, !(X >= Y)) \
  COMPARE(v_cmp_nlg_##kind, !(X < Y || X > Y)) COMPARE(v_cmp_ngt_##kind, !(X > Y)) \
  COMPARE(v_cmp_nle_##kind, !(X <= Y)) COMPARE(v_cmp_neq_##kind, X != Y)       \
  COMPARE(v_cmp_nlt_##kind, !(X < Y))

INTEGERS(u32, A[l], B[l])
INTEGERS(i32, (i32)A[l], (i32)B[l])
INTEGERS(u16, (u16)A[l], (u16)B[l])
INTEGERS(i16, (i16)A[l], (i16)B[l])
INTEGERS(u64, A64, B64)
INTEGERS(i64, (i64)A64, (i64)B64)
REALS(f32, as_float(A[l]), as_float(B[l]))
REALS(f16, half_to_float((u16)A[l]), half_to_float((u16)B[l]))
REALS(f64, DA, DB)

// Bits: 0 signalling NaN, 1 quiet NaN, 2 -inf, 3 -normal, 4 -denormal, 5 -0, 6 +0, 7 +denormal, 8 +normal, 9 +inf.
static inline u32 class_bit(u64 x, int exponent_bits, int mantissa_bits) {
  u64 top = (1ull << exponent_bits) - 1, e = x >> mantissa_bits & top, m = x & ((1ull << mantissa_bits) - 1);
  int negative = x >> (exponent_bits + mantissa_bits) & 1;
  if (e == top) return m ? (m >> (mantissa_bits - 1) ? 1 : 0) : negative ? 2 : 9;
  if (e) return negative ? 3 : 8;
  return m ? (negative ? 4 : 7) : negative ? 5 : 6;
}
COMPARE(v_cmp_class_f32, B[l] >> class_bit(A[l], 8, 23) & 1)
COMPARE(v_cmp_class_f16, B[l] >> class_bit(A[l] & 0xFFFF, 5, 10) & 1)
COMPARE(v_cmp_class_f64, B[l] >> class_bit(A64, 11, 52) & 1)
