// Matrix instructions. The layouts are those of `matrix.py`: products and sums in fp64, rounded once.
#include "number.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum Element { F32, XF32, F64, F16, BF16, I8, F8, F6, F4 };  // mirrored by `matrices.ELEMENTS`
enum Result { TO_F32, TO_I32, TO_F64 };
typedef struct {
  i32 element, bits, least;  // least: exponent of subnormal numbers
  i32 count, run;            // elements of a lane, of which the first `run` have consecutive k, as have the others
  i32 start[16];             // where the first element of lane 4 v is unpacked to
  Format format;
} Factor;
typedef struct {
  i32 m, k, blocks, result;
  i32 group, scale_a, scale_b;  // group: products of a group of the hardware's sums, or 0
  i32 sharing[16];              // the block whose A each block multiplies
  Factor a, b;
} Shape;
#define MOST 2048  // elements of A or B

typedef float EightFloats __attribute__((vector_size(32)));
typedef double EightDoubles __attribute__((vector_size(64)));
// Vectors of doubles as wide as the processor's.
#if defined(__AVX512F__)
#define PER 8
typedef __m512d Vector;
#define BROADCAST _mm512_set1_pd
#define MULTIPLY_ADD _mm512_fmadd_pd
#elif defined(__AVX2__) && defined(__FMA__)
#define PER 4
typedef __m256d Vector;
#define BROADCAST _mm256_set1_pd
#define MULTIPLY_ADD _mm256_fmadd_pd
#else
#define PER 2
typedef double Vector __attribute__((vector_size(16)));
#define BROADCAST(x) ((Vector){x, x})
#define MULTIPLY_ADD(x, y, z) ((x) * (y) + (z))
#endif

// One element of each lane as fp32, which holds all types but fp64.
static inline void element(const u32 *rows, const Factor *f, int e, float *t) {
  const int at = f->bits * e, shift = at % 32;
  const u32 *row = rows + 64 * (at / 32);
  switch (f->element) {
    case F32: EACH t[l] = as_float(row[l]); break;
    case XF32: EACH t[l] = truncated_xf32(row[l]); break;
    case F16: EACH t[l] = half_to_float((u16)(row[l] >> shift)); break;
    case BF16: EACH t[l] = bfloat_to_float((u16)(row[l] >> shift)); break;
    case I8: EACH t[l] = (float)(i8)(row[l] >> shift); break;
    case F6:
      if (shift > 26) {
        u32 joined[64] __attribute__((aligned(64)));
        EACH joined[l] = row[l] >> shift | row[64 + l] << (32 - shift);
        decode_row(joined, 0, &f->format, t);
        break;
      }  // fall through
    default: decode_row(row, shift, &f->format, t);
  }
}

// A or B as [blocks][k][rows].
static void unpack(const u32 *rows, const Shape *s, const Factor *f, double *out) {
  float t[64] __attribute__((aligned(64)));
  for (int e = 0; e < f->count; e++) {
    double *to = out + s->m * (e < f->run ? e : s->k / 2 + e - f->run);
    if (f->element == F64) {
      for (int l = 0; l < 64; l++) to[f->start[l / 4] + l % 4] = as_double(WIDE(rows + 128 * e, l));
      continue;
    }
    element(rows, f, e, t);
    if (s->m == 4) {
      for (int v = 0; v < 16; v++) for (int j = 0; j < 4; j++) to[f->start[v] + j] = t[4 * v + j];
    } else {
      for (int v = 0; v < 16; v += 2)
        *(EightDoubles *)(to + f->start[v]) = __builtin_convertvector(*(const EightFloats *)(t + 4 * v), EightDoubles);
    }
  }
}

// Multiplies by block scales: the lanes of group g have those of k in [32 g, 32 g + 32). shift: the byte's position
static void apply_scales(double *values, const u32 *row, int shift, const Shape *s) {
  double scales[64];
  EACH scales[l] = scale_of(row[l] >> shift & 255);
  for (int k = 0; k < s->k; k++)
    for (int i = 0; i < s->m; i++) values[k * s->m + i] *= scales[k / 32 * s->m + i];
}

// Register and first lane of row i of a block's result of m x m.
static inline int register_of(int m, int block, int i) {
  return m == 16 ? 4 * block + i % 4 : m == 32 ? 16 * block + i / 8 * 4 + i % 4 : i;
}
static inline int lane_of(int m, int block, int i) {
  return m == 16 ? i / 4 * 16 : m == 32 ? i / 4 % 2 * 32 : 4 * block;
}

// Row i of a block's result, from sums t and the addend. The place of the addend is that of the result, or its first
// register if that is the `same` for all.
static inline __attribute__((always_inline)) void store_row(
    int m, const Shape *s, const double *t, const u32 *C, int same, u32 *out, int block, int i) {
  const int lane = lane_of(m, block, i), at = 64 * register_of(m, block, i) + lane, from = same ? lane : at;
  if (s->result == TO_F64) {  // i = 4 * register + lane // 16
    const int low = 128 * (i / 4) + 16 * (i % 4), addend = same ? 16 * (i % 4) : low;
    for (int j = 0; j < m; j++) {
      u64 r = as_bits64(t[j] + as_double(WIDE(C, addend + j)));
      out[low + j] = (u32)r, out[low + 64 + j] = (u32)(r >> 32);
    }
  } else if (s->result == TO_I32) {
    for (int j = 0; j < m; j++) out[at + j] = (u32)(i64)(C ? t[j] + (double)(i32)C[from + j] : t[j]);
  } else if (C) {
    for (int j = 0; j < m; j++) out[at + j] = as_bits((float)(t[j] + (double)as_float(C[from + j])));
  } else {
    for (int j = 0; j < m; j++) out[at + j] = as_bits((float)t[j]);
  }
}

// Blocks of M x M, STEP rows of A at a time, in vectors of N columns of B: each sum is formed in the order of k.
#define BLOCKS(M, STEP, N, TYPE, ONE, ADD)                                                                \
  static void blocks_of_##M(const double *blocks, const double *b, const u32 *C, const Shape *s, int same, u32 *out) { \
    double t[STEP * M] __attribute__((aligned(64)));                                                      \
    for (int block = 0; block < s->blocks; block++, b += s->k * M) {                                      \
      const double *a = blocks + s->sharing[block] * s->k * M;                                            \
      for (int first = 0; first < M; first += STEP) {                                                     \
        TYPE sum[STEP][M / N];                                                                            \
        for (int u = 0; u < STEP; u++)                                                                    \
          for (int j = 0; j < M / N; j++) sum[u][j] = ONE(0.0);                                           \
        for (int k = 0; k < s->k; k++) {                                                                  \
          const TYPE *row = (const TYPE *)(b + k * M);                                                    \
          for (int u = 0; u < STEP; u++) {                                                                \
            TYPE x = ONE(a[k * M + first + u]);                                                           \
            for (int j = 0; j < M / N; j++) sum[u][j] = ADD(x, row[j], sum[u][j]);                        \
          }                                                                                               \
        }                                                                                                 \
        memcpy(t, sum, sizeof sum);                                                                       \
        for (int u = 0; u < STEP; u++) store_row(M, s, t + u * M, C, same, out, block, first + u);        \
      }                                                                                                   \
    }                                                                                                     \
  }
#define SAME_NUMBER(x) (x)
#define ADD_PRODUCT(x, y, z) ((z) + (x) * (y))
BLOCKS(4, 4, 1, double, SAME_NUMBER, ADD_PRODUCT)
BLOCKS(16, (PER == 8 ? 8 : 2), PER, Vector, BROADCAST, MULTIPLY_ADD)
BLOCKS(32, (PER == 8 ? 4 : 1), PER, Vector, BROADCAST, MULTIPLY_ADD)

// C: the addend, or null; same: the addend is one row for all registers (a constant).
static void multiply(u32 *D, const u32 *A, const u32 *B, const u32 *C, const u32 *SA, const u32 *SB, const Shape *s, int same) {
  double a[MOST] __attribute__((aligned(64))), b[MOST] __attribute__((aligned(64)));
  u32 out[64 * 32] __attribute__((aligned(64)));
  unpack(A, s, &s->a, a);
  unpack(B, s, &s->b, b);
  if (s->scale_a >= 0) apply_scales(a, SA, s->scale_a, s), apply_scales(b, SB, s->scale_b, s);
  if (s->m == 16) blocks_of_16(a, b, C, s, same, out);
  else if (s->m == 32) blocks_of_32(a, b, C, s, same, out);
  else blocks_of_4(a, b, C, s, same, out);
  memcpy(D, out, sizeof(u32) * (size_t)(s->m * s->m * s->blocks) * (s->result == TO_F64 ? 2 : 1));
}

// ---- sums as CDNA3 forms them: see `matrix_sums.py`

static inline i32 binary_exponent(double x, i32 least) {  // of x, at least that of the format's subnormal numbers
  int e;
  if (x == 0) return -126;
  frexp(x, &e);
  return e - 1 < least ? least : e - 1;
}
// Sum of products cut off 24 bits below the largest exponent, in multiples of the last kept bit.
static double group_sum(const double *products, const i32 *exponents, int first, int step, int count, i32 *largest) {
  double sum = 0;
  *largest = INT32_MIN;
  for (int k = first; k < count; k += step) if (exponents[k] > *largest) *largest = exponents[k];
  for (int k = first; k < count; k += step) sum += trunc(ldexp(products[k], 24 - *largest));
  return sum;
}
static double hardware_sum(const double *a, const double *b, double total, const Shape *s) {
  const int size = s->group, m = s->m;
  for (int first = 0; first < s->k; first += size) {
    double products[16], plain = 0, overflow = 0;
    i32 exponents[16], largest;
    for (int e = 0; e < size; e++) {
      double x = a[(first + e) * m], y = b[(first + e) * m], p = x * y;
      plain += p;
      exponents[e] = binary_exponent(x, s->a.least) + binary_exponent(y, s->b.least);
      int large = fabs(p) >= 0x1p128;
      overflow += large ? copysign(INFINITY, p) : 0.0;
      products[e] = fabs(p) < 0x1p128 ? p : 0.0;
    }
    plain += total;
    if (size == 1) {
      total = (double)(float)plain;
      continue;
    }
    double group;
    if (size == 16) {
      i32 even, odd;
      double x = group_sum(products, exponents, 0, 2, size, &even), y = group_sum(products, exponents, 1, 2, size, &odd);
      largest = even > odd ? even : odd;
      group = floor(ldexp(x, even - largest)) + floor(ldexp(y, odd - largest));
    } else {
      group = group_sum(products, exponents, 0, 1, size, &largest);
    }
    double addend = isfinite(total) ? total : 0.0;
    i32 own = binary_exponent(addend, -126), most = largest > own ? largest : own;
    double sum = ldexp(floor(ldexp(group, largest + 7 - most)), most - 31);
    double kept = ldexp(floor(ldexp(addend, 24 - most)), most - 24);
    if (size == 16 && own < most - 25) kept = 0.0;
    double added = (double)(float)(sum + kept);
    total = isfinite(plain) ? added + overflow : plain;
  }
  return total;
}
static void multiply_as_hardware(u32 *D, const u32 *A, const u32 *B, const u32 *C, const Shape *s, int same) {
  double a[MOST] __attribute__((aligned(64))), b[MOST] __attribute__((aligned(64)));
  u32 out[64 * 32];
  unpack(A, s, &s->a, a);
  unpack(B, s, &s->b, b);
  const int m = s->m;
  for (int block = 0; block < s->blocks; block++) {
    for (int i = 0; i < m; i++) {
      for (int j = 0; j < m; j++) {
        const int lane = lane_of(m, block, i) + j, at = 64 * register_of(m, block, i) + lane;
        const double *x = a + s->sharing[block] * s->k * m + i, *y = b + block * s->k * m + j;
        double addend = C ? (double)as_float(C[same ? lane : at]) : 0.0;
        out[at] = as_bits((float)hardware_sum(x, y, addend, s));
      }
    }
  }
  memcpy(D, out, sizeof(u32) * (size_t)(s->m * s->m * s->blocks));
}

// x, z: rows of the scales of A and B; y: see `multiply`; p: shape
OP(matrix) {
  const Shape *s = o->p;
  const u32 *C = o->c < 0 ? NULL : ROW(c);
  if (s->group) multiply_as_hardware(ROW(d), ROW(a), ROW(b), C, s, o->y);
  else multiply(ROW(d), ROW(a), ROW(b), C, w->v + o->x, w->v + o->z, s, o->y);
  NEXT;
}
