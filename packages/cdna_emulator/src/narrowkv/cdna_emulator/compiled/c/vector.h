// How operations on vector registers are written: a row of results from rows of sources, under EXEC.
#pragma once
#include "number.h"

#define LANEWISE(name, T, TA, TB, TC, expression)                                                    \
  OP(name) {                                                                                         \
    T *D = (T *)ROW(d);                                                                              \
    const TA *A = (const TA *)ROW(a);                                                                \
    const TB *B = (const TB *)ROW(b);                                                                \
    const TC *C = (const TC *)ROW(c);                                                                \
    (void)A, (void)B, (void)C;                                                                       \
    if (likely(w->full)) {                                                                           \
      EACH D[l] = (T)(expression);                                                                   \
    } else {                                                                                         \
      const u32 *M = w->mask;                                                                        \
      EACH { T r = (T)(expression); D[l] = M[l] ? r : D[l]; }                                        \
    }                                                                                                \
    NEXT;                                                                                            \
  }
#define WORDS(name, expression) LANEWISE(name, u32, u32, u32, u32, expression)
#define INTS(name, expression) LANEWISE(name, i32, i32, i32, i32, expression)
#define FLOATS(name, expression) LANEWISE(name, float, float, float, float, expression)

// 16-bit instructions: the low halves, with the upper half of the result cleared; and the packed form on both.
#define HALVES(name, expression)                                                                     \
  static inline u16 half_##name(u16 a, u16 b, u16 c) {                                               \
    (void)a, (void)b, (void)c;                                                                       \
    return (u16)(expression);                                                                        \
  }                                                                                                  \
  WORDS(name, half_##name((u16)A[l], (u16)B[l], (u16)C[l]))                                          \
  WORDS(pk_##name, half_##name((u16)A[l], (u16)B[l], (u16)C[l]) |                                    \
                       (u32)half_##name((u16)(A[l] >> 16), (u16)(B[l] >> 16), (u16)(C[l] >> 16)) << 16)
#define FA half_to_float(a)
#define FB half_to_float(b)
#define FC half_to_float(c)
#define HALF_FLOATS(name, expression) HALVES(name, float_to_half(expression))

// Results of 64 bits in two rows.
#define LANEWISE64(name, expression)                                                                 \
  OP(name) {                                                                                         \
    u32 *D = ROW(d);                                                                                 \
    const u32 *A = ROW(a), *B = ROW(b), *C = ROW(c), *M = w->mask;                                   \
    (void)A, (void)B, (void)C;                                                                       \
    EACH {                                                                                           \
      u64 r = (u64)(expression);                                                                     \
      u32 low = (u32)r, high = (u32)(r >> 32);                                                       \
      D[l] = M[l] ? low : D[l];                                                                      \
      D[64 + l] = M[l] ? high : D[64 + l];                                                           \
    }                                                                                                \
    NEXT;                                                                                            \
  }
#define A64 WIDE(A, l)
#define B64 WIDE(B, l)
#define C64 WIDE(C, l)
#define DA as_double(A64)
#define DB as_double(B64)
#define DC as_double(C64)
#define DOUBLES(name, expression) LANEWISE64(name, as_bits64(expression))

// All lanes, whatever EXEC says: for temporaries.
#define EVERY(name, expression)                                                                      \
  OP(name) {                                                                                         \
    u32 *D = ROW(d);                                                                                 \
    const u32 *A = ROW(a), *B = ROW(b);                                                              \
    (void)B;                                                                                         \
    EACH D[l] = (u32)(expression);                                                                   \
    NEXT;                                                                                            \
  }
