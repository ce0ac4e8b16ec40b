// The local data share of a workgroup.
#include "access.h"
#include "atomic.h"

static inline u64 unaligned_bits(int size) { return size >= 4 ? 3 : (u64)size - 1; }

// Addresses of LDS: the row a plus an offset. False: `o` has failed.
static inline int lds_lanes(Wave *w, const Op *o, Lanes *lanes, i32 offset, int size) {
  const u32 *A = ROW(a), *M = w->mask;
  u64 base = (u64)(uintptr_t)w->lds, add = (u64)(i64)offset;
  ADDRESSES(lanes, add + A[l], M[l])
  if (lanes->low > lanes->high) return 1;
  if (unlikely(lanes->high + (u64)size > w->lds_bytes)) {
    for (int l = 0; l < 64; l++)
      if (lanes->on[l] && lanes->at[l] + (u64)size > w->lds_bytes) { fail(w, o, LDS_RANGE, l, size, lanes->at[l]); return 0; }
  }
  const u64 unit = unaligned_bits(size);
  if (unlikely(lanes->low_bits & unit)) {
    int l = first_on(lanes, unit);
    fail(w, o, LDS_ALIGNMENT, l, size, lanes->at[l]);
    return 0;
  }
  EACH lanes->at[l] = lanes->on[l] ? lanes->at[l] + base : lanes->at[l];
  return 1;
}

// Whether all lanes access LDS inside its bounds, and aligned, at the offset from the row A.
static inline int all_in_lds(const Wave *w, const u32 *A, i32 offset, int size) {
  u32 most, bits;
  if (!w->full || offset < 0) return 0;
  extent(A, &most, &bits);
  return (u64)most + (u64)offset + (u64)size <= w->lds_bytes && !((bits | (u32)offset) & unaligned_bits(size));
}
#define LDS(offset) ((u64)(uintptr_t)w->lds + (u64)(offset))

// d: rows; z: fill, or shift of the data; y: offset
#define SIZES(size)                                                                          \
  static __attribute__((noinline)) const Op *read_some_##size(Wave *w, const Op *o) {        \
    Lanes lanes[1];                                                                          \
    u32 rows[64 * ((size + 3) / 4)] __attribute__((aligned(64)));                            \
    if (unlikely(!lds_lanes(w, o, lanes, o->y, size))) return NULL;                          \
    gather(rows, 0, NULL, lanes->at, size);                                                  \
    if (size < 4 && o->z) extend(rows, ROW(d), size, o->z);                                  \
    commit(w, ROW(d), rows, (size + 3) / 4);                                                 \
    w->bytes[LDS_READ] += size * count_on(lanes);                                            \
    NEXT;                                                                                    \
  }                                                                                          \
  OP(lds_read_##size) {                                                                      \
    if ((size < 4 && o->z) || !all_in_lds(w, ROW(a), o->y, size)) return read_some_##size(w, o); \
    gather(ROW(d), LDS(o->y), ROW(a), NULL, size);                                           \
    w->bytes[LDS_READ] += 64 * size;                                                         \
    NEXT;                                                                                    \
  }                                                                                          \
  static __attribute__((noinline)) const Op *write_some_##size(Wave *w, const Op *o) {       \
    Lanes lanes[1];                                                                          \
    if (unlikely(!lds_lanes(w, o, lanes, o->y, size))) return NULL;                          \
    scatter(ROW(d), 0, NULL, lanes->at, lanes->on, size, o->z);                              \
    w->bytes[LDS_WRITTEN] += size * count_on(lanes);                                         \
    NEXT;                                                                                    \
  }                                                                                          \
  OP(lds_write_##size) {                                                                     \
    if (!all_in_lds(w, ROW(a), o->y, size)) return write_some_##size(w, o);                  \
    scatter(ROW(d), LDS(o->y), ROW(a), NULL, NULL, size, o->z);                              \
    w->bytes[LDS_WRITTEN] += 64 * size;                                                      \
    NEXT;                                                                                    \
  }
SIZES(1) SIZES(2) SIZES(4) SIZES(8) SIZES(12) SIZES(16)

// Two addresses. x, y: offsets, multiples of the size; b: rows of the second data
#define TWO(size)                                                                            \
  static __attribute__((noinline)) const Op *read2_some_##size(Wave *w, const Op *o) {       \
    Lanes lanes[1];                                                                          \
    u32 rows[128 * (size / 4)] __attribute__((aligned(64)));                                 \
    if (unlikely(!lds_lanes(w, o, lanes, o->x, size))) return NULL;                          \
    gather(rows, 0, NULL, lanes->at, size);                                                  \
    if (unlikely(!lds_lanes(w, o, lanes, o->y, size))) return NULL;                          \
    gather(rows + 16 * size, 0, NULL, lanes->at, size);                                      \
    commit(w, ROW(d), rows, size / 2);                                                       \
    w->bytes[LDS_READ] += 2 * size * count_on(lanes);                                        \
    NEXT;                                                                                    \
  }                                                                                          \
  OP(lds_read2_##size) {                                                                     \
    u32 at[64] __attribute__((aligned(64)));  /* the result may overwrite the offsets */     \
    if (!all_in_lds(w, ROW(a), o->x > o->y ? o->x : o->y, size)) return read2_some_##size(w, o); \
    memcpy(at, ROW(a), sizeof at);                                                           \
    gather(ROW(d), LDS(o->x), at, NULL, size);                                               \
    gather(ROW(d) + 16 * size, LDS(o->y), at, NULL, size);                                   \
    w->bytes[LDS_READ] += 2 * 64 * size;                                                     \
    NEXT;                                                                                    \
  }                                                                                          \
  static __attribute__((noinline)) const Op *write2_some_##size(Wave *w, const Op *o) {      \
    Lanes lanes[1];                                                                          \
    if (unlikely(!lds_lanes(w, o, lanes, o->x, size))) return NULL;                          \
    scatter(ROW(d), 0, NULL, lanes->at, lanes->on, size, 0);                                 \
    if (unlikely(!lds_lanes(w, o, lanes, o->y, size))) return NULL;                          \
    scatter(ROW(b), 0, NULL, lanes->at, lanes->on, size, 0);                                 \
    w->bytes[LDS_WRITTEN] += 2 * size * count_on(lanes);                                     \
    NEXT;                                                                                    \
  }                                                                                          \
  OP(lds_write2_##size) {                                                                    \
    if (!all_in_lds(w, ROW(a), o->x > o->y ? o->x : o->y, size)) return write2_some_##size(w, o); \
    scatter(ROW(d), LDS(o->x), ROW(a), NULL, NULL, size, 0);                                 \
    scatter(ROW(b), LDS(o->y), ROW(a), NULL, NULL, size, 0);                                 \
    w->bytes[LDS_WRITTEN] += 2 * 64 * size;                                                  \
    NEXT;                                                                                    \
  }
TWO(4) TWO(8)

// 16 lanes read a matrix with rows of 16 elements; lane i gets column i. x: bits of an element
OP(lds_read_transposed) {
  Lanes lanes[1];
  u32 rows[128] __attribute__((aligned(64))), out[128];
  if (unlikely(!lds_lanes(w, o, lanes, o->y, 8))) return NULL;
  gather(rows, 0, NULL, lanes->at, 8);
  const int bits = o->x, elements = 64 / bits;
  const u64 keep = (1ull << bits) - 1;
  for (int l = 0; l < 64; l++) {
    u64 column = 0;
    for (int e = 0; e < elements; e++) {  // element e of the column is number 16 e + l % 16 of the group's matrix
      int at = 16 * e + l % 16, from = (l & ~15) + at / elements;
      column |= (WIDE(rows, from) >> bits * (at % elements) & keep) << bits * e;
    }
    out[l] = (u32)column, out[64 + l] = (u32)(column >> 32);
  }
  commit(w, ROW(d), out, 2);
  w->bytes[LDS_READ] += 8 * count_on(lanes);
  NEXT;
}

// b: data; d: row of the result, or -1; z: kind
#define ATOMICS(U, bits)                                                                     \
  OP(lds_atomic_##bits) {                                                                    \
    Lanes lanes[1];                                                                          \
    const u32 *B = ROW(b);                                                                   \
    u32 low[64], high[64];                                                                   \
    if (unlikely(!lds_lanes(w, o, lanes, o->y, bits / 8))) return NULL;                      \
    for (int l = 0; l < 64; l++) {                                                           \
      if (!lanes->on[l]) continue;                                                           \
      U old, new;                                                                            \
      memcpy(&old, (const void *)(uintptr_t)lanes->at[l], sizeof old);                       \
      new = modified##bits(o->z, old, (U)(bits == 32 ? B[l] : WIDE(B, l)), 0);               \
      memcpy((void *)(uintptr_t)lanes->at[l], &new, sizeof new);                             \
      low[l] = (u32)old, high[l] = (u32)((u64)old >> 32);                                    \
    }                                                                                        \
    for (int l = 0; o->d >= 0 && l < 64; l++) {                                              \
      if (!lanes->on[l]) continue;                                                           \
      w->v[o->d + l] = low[l];                                                               \
      if (bits == 64) w->v[o->d + 64 + l] = high[l];                                         \
    }                                                                                        \
    w->bytes[LDS_READ] += bits / 8 * count_on(lanes);                                        \
    w->bytes[LDS_WRITTEN] += bits / 8 * count_on(lanes);                                     \
    NEXT;                                                                                    \
  }
ATOMICS(u32, 32)
ATOMICS(u64, 64)
