// Addresses of the lanes of a wave, and moves of data between them and rows of registers.
//
// Lanes that do not access memory point to `nowhere`, which reads as zero, so that loads need no branch for each lane.
#pragma once
#include "number.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

extern u8 nowhere[64];

typedef struct {
  u64 at[64] __attribute__((aligned(64)));
  u32 on[64] __attribute__((aligned(64)));  // all ones where the lane accesses memory
  u64 low, high;                            // least and greatest address
  u64 low_bits;                             // all addresses or'ed
  const Buffer *buffer;                     // holds all addresses, or null
} Lanes;

// `address` is an expression of the lane l, `active` whether it is accessed.
#define ADDRESSES(lanes, address, active)                                    \
  {                                                                          \
    u64 low = ~0ull, high = 0, bits = 0;                                     \
    EACH {                                                                   \
      u64 t = (address);                                                     \
      u64 on = (active) ? ~0ull : 0;                                         \
      u64 when_low = t | ~on, when_high = t & on;                            \
      lanes->at[l] = when_high | ((u64)(uintptr_t)nowhere & ~on);            \
      lanes->on[l] = (u32)on;                                                \
      low = when_low < low ? when_low : low;                                 \
      high = when_high > high ? when_high : high;                            \
      bits |= when_high;                                                     \
    }                                                                        \
    lanes->low = low, lanes->high = high, lanes->low_bits = bits, lanes->buffer = NULL; \
  }

// Raw buffers: base + soffset + voffset + offset, checked against num_records.
// a: row of offsets, or -1; b: descriptor; c: scalar offset; y: offset
static inline void buffer_lanes(Wave *w, const Op *o, Lanes *lanes, u64 size) {
  u64 base = pair(w, o->b) & 0xFFFFFFFFFFFFull, add = (u64)w->s[o->c] + (u64)(i64)o->y, records = w->s[o->b + 2];
  const u32 *M = w->mask;
  if (o->a >= 0) {
    const u32 *A = ROW(a);
    ADDRESSES(lanes, base + add + A[l], M[l] && add + A[l] + size <= records)
  } else {
    u32 inside = add + size <= records;
    ADDRESSES(lanes, base + add, M[l] && inside)
  }
}
// Global and flat: a: row of 32-bit offsets from the scalar base b, or -1; without b: rows of 64-bit addresses; y: offset
static inline void global_lanes(Wave *w, const Op *o, Lanes *lanes, u64 size) {
  const u32 *M = w->mask;
  (void)size;
  if (o->b < 0) {
    const u32 *A = ROW(a);
    u64 add = (u64)(i64)o->y;
    ADDRESSES(lanes, WIDE(A, l) + add, M[l])
  } else {
    u64 base = pair(w, o->b) + (u64)(i64)o->y;
    if (o->a >= 0) {
      const u32 *A = ROW(a);
      ADDRESSES(lanes, base + A[l], M[l])
    } else {
      ADDRESSES(lanes, base, M[l])
    }
  }
}
// Private memory, a segment for each lane. a: row of offsets or -1; b: scalar offset or -1; y: offset
static inline void scratch_lanes(Wave *w, const Op *o, Lanes *lanes, u64 size) {
  const u32 *M = w->mask;
  u64 add = (u64)(i64)o->y + (o->b >= 0 ? w->s[o->b] : 0), base = (u64)(uintptr_t)w->scratch, stride = w->scratch_bytes;
  (void)size;
  if (o->a >= 0) {
    const u32 *A = ROW(a);
    ADDRESSES(lanes, base + stride * (u64)l + add + A[l], M[l])
  } else {
    ADDRESSES(lanes, base + stride * (u64)l + add, M[l])
  }
}

const Buffer *search(Wave *w, u64 low, u64 high);
static inline const Buffer *find(Wave *w, u64 low, u64 high) {  // the last buffer in order of bases that holds [low, high)
  const Buffer *b = w->buffers + w->hit;
  if (likely(low >= b->base && high <= b->end && (w->hit + 1 == w->buffer_count || b[1].base > low))) return b;
  return search(w, low, high);
}
static inline u64 count_on(const Lanes *lanes) {
  u64 n = 0;
  EACH n += lanes->on[l] & 1;
  return n;
}
static inline int first_on(const Lanes *lanes, u64 bits) {  // first lane whose address has one of these bits
  for (int l = 0; l < 64; l++) if (lanes->on[l] && (!bits || lanes->at[l] & bits)) return l;
  return 0;
}

// ---- the common case: all lanes are active, and each accesses base + A[l], which one check of the greatest A[l] allows

// Greatest offset, and all offsets or'ed.
static inline void extent(const u32 *A, u32 *most, u32 *bits) {
  u32 m = 0, n = 0;
  EACH { m = A[l] > m ? A[l] : m; n |= A[l]; }
  *most = m, *bits = n;
}
// Whether the lanes access `size` bytes each, less than `limit` bytes from the base on, in one buffer.
// If they are to be stored, the buffer must be writable and be the only one there.
static inline int all_inside(Wave *w, u64 base, const u32 *A, int size, u64 limit, const Buffer **stored) {
  u32 most, bits;
  if (!w->full) return 0;
  extent(A, &most, &bits);
  const u64 end = base + most + (u64)size;
  if (most + (u64)size > limit) return 0;
  const Buffer *b = find(w, base, end);
  if (!stored || !b) return b != NULL;
  *stored = b;
  return !b->readonly && (b + 1 == w->buffers + w->buffer_count || b[1].base >= end);
}
// The base of a raw buffer's or a global access with a row of offsets, and how many bytes from there on are accessible.
static inline int buffer_base(const Wave *w, const Op *o, u64 *base, u64 *limit) {
  u64 add = (u64)w->s[o->c] + (u64)(i64)o->y, records = w->s[o->b + 2];
  *base = (pair(w, o->b) & 0xFFFFFFFFFFFFull) + add, *limit = records > add ? records - add : 0;
  return o->a >= 0;
}
static inline int global_base(const Wave *w, const Op *o, u64 *base, u64 *limit) {
  if (o->a < 0 || o->b < 0) return 0;
  *base = pair(w, o->b) + (u64)(i64)o->y, *limit = ~0ull;
  return 1;
}
static inline int scratch_base(const Wave *w, const Op *o, u64 *base, u64 *limit) {
  (void)w, (void)o, (void)base, (void)limit;
  return 0;
}

// ---- moves. Lane l is at base + offsets[l], or at addresses[l] if there are no offsets.
#define PLACE(l) ((uintptr_t)(offsets ? base + offsets[l] : addresses[l]))
#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
// Four words of 16 lanes: word k of the lanes in d[k], and lane 4 j + i in chunk j of x[i]. Each way is its own inverse.
INLINE void transpose(const __m512i x[4], __m512i d[4]) {
  __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
  __m512i e = _mm512_unpacklo_epi32(x[2], x[3]), f = _mm512_unpackhi_epi32(x[2], x[3]);
  d[0] = _mm512_unpacklo_epi64(a, e), d[1] = _mm512_unpackhi_epi64(a, e);
  d[2] = _mm512_unpacklo_epi64(b, f), d[3] = _mm512_unpackhi_epi64(b, f);
}
#endif

// Rows of registers from memory, for all lanes; `D` has size / 4 rows (at least one). It may hold the offsets.
INLINE void gather(u32 *D, u64 base, const u32 *offsets, const u64 *addresses, int size) {
  if (size == 1) {
    for (int l = 0; l < 64; l++) D[l] = *(const u8 *)PLACE(l);
  } else if (size == 2) {
    for (int l = 0; l < 64; l++) { u16 t; memcpy(&t, (const void *)PLACE(l), 2); D[l] = t; }
  } else if (size == 4) {
    for (int l = 0; l < 64; l++) memcpy(D + l, (const void *)PLACE(l), 4);
  } else if (size == 8) {
    u64 t[64] __attribute__((aligned(64)));
    for (int l = 0; l < 64; l++) memcpy(t + l, (const void *)PLACE(l), 8);
    EACH { D[l] = (u32)t[l]; D[64 + l] = (u32)(t[l] >> 32); }
  } else if (size == 12) {
    for (int l = 0; l < 64; l++) {
      u32 t[3];
      memcpy(t, (const void *)PLACE(l), 12);
      D[l] = t[0], D[64 + l] = t[1], D[128 + l] = t[2];
    }
  } else {
#if defined(__AVX512F__)
    for (int l = 0; l < 64; l += 16) {
      __m512i x[4], d[4];
      for (int i = 0; i < 4; i++) {
        __m512i t = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)PLACE(l + i)));
        t = _mm512_inserti32x4(t, _mm_loadu_si128((const __m128i *)PLACE(l + i + 4)), 1);
        t = _mm512_inserti32x4(t, _mm_loadu_si128((const __m128i *)PLACE(l + i + 8)), 2);
        x[i] = _mm512_inserti32x4(t, _mm_loadu_si128((const __m128i *)PLACE(l + i + 12)), 3);
      }
      transpose(x, d);
      for (int k = 0; k < 4; k++) _mm512_storeu_si512(D + 64 * k + l, d[k]);
    }
#else
    for (int l = 0; l < 64; l++) {
      u32 t[4];
      memcpy(t, (const void *)PLACE(l), 16);
      D[l] = t[0], D[64 + l] = t[1], D[128 + l] = t[2], D[192 + l] = t[3];
    }
#endif
  }
}

// Stores rows in the order of the lanes, those that are `on` if that is not null. shift: of data of one or two bytes
INLINE void scatter(const u32 *D, u64 base, const u32 *offsets, const u64 *addresses, const u32 *on, int size, int shift) {
#if defined(__AVX512F__)
  if (size == 16 && !on) {
    for (int l = 0; l < 64; l += 16) {
      __m512i x[4], d[4];
      for (int k = 0; k < 4; k++) d[k] = _mm512_loadu_si512(D + 64 * k + l);
      transpose(d, x);
      for (int i = 0; i < 4; i++) _mm_storeu_si128((__m128i *)PLACE(l + i), _mm512_castsi512_si128(x[i]));
      for (int i = 0; i < 4; i++) _mm_storeu_si128((__m128i *)PLACE(l + i + 4), _mm512_extracti32x4_epi32(x[i], 1));
      for (int i = 0; i < 4; i++) _mm_storeu_si128((__m128i *)PLACE(l + i + 8), _mm512_extracti32x4_epi32(x[i], 2));
      for (int i = 0; i < 4; i++) _mm_storeu_si128((__m128i *)PLACE(l + i + 12), _mm512_extracti32x4_epi32(x[i], 3));
    }
    return;
  }
#endif
  for (int l = 0; l < 64; l++) {
    u32 t[4];
    if (on && !on[l]) continue;
    for (int k = 0; k < (size + 3) / 4; k++) t[k] = size < 4 ? D[l] >> shift : D[64 * k + l];
    memcpy((void *)PLACE(l), t, (size_t)size);
  }
}

// Copies loaded rows to registers under EXEC.
static inline void commit(const Wave *w, u32 *D, const u32 *rows, int count) {
  if (likely(w->full)) {
    memcpy(D, rows, 256 * (size_t)count);
  } else {
    const u32 *M = w->mask;
    for (int k = 0; k < count; k++) EACH D[64 * k + l] = M[l] ? rows[64 * k + l] : D[64 * k + l];
  }
}

enum Fill { ZERO, SIGN, LOW, HIGH, LOW_SIGN, HIGH_SIGN };  // mirrored by `memory.FILLS`
static inline void extend(u32 *rows, const u32 *old, int size, int fill) {
  int up = 32 - 8 * size;
  if (fill == SIGN || fill >= LOW_SIGN) EACH rows[l] = (u32)((i32)(rows[l] << up) >> up);
  if (fill == LOW || fill == LOW_SIGN) EACH rows[l] = (old[l] & 0xFFFF0000u) | (rows[l] & 0xFFFF);
  if (fill == HIGH || fill == HIGH_SIGN) EACH rows[l] = (old[l] & 0xFFFF) | rows[l] << 16;
}
