// Loads, stores and atomics of device memory and private memory.
#include "access.h"
#include "atomic.h"

u8 nowhere[64];

const Buffer *search(Wave *w, u64 low, u64 high) {
  i64 first = 0, last = w->buffer_count;
  while (first < last) {
    i64 middle = (first + last) / 2;
    if (w->buffers[middle].base <= low) first = middle + 1;
    else last = middle;
  }
  while (first-- > 0) {
    if (high <= w->buffers[first].end && high >= low) {
      w->hit = first;
      return w->buffers + first;
    }
  }
  return NULL;
}

enum Kind { LOAD, STORE };

// Checks the addresses of all lanes. False: `o` has failed.
static inline int checked(Wave *w, const Op *o, Lanes *lanes, int size, enum Kind kind) {
  if (lanes->low > lanes->high) return 1;
  lanes->buffer = find(w, lanes->low, lanes->high + (u64)size);
  if (unlikely(!lanes->buffer)) {
    for (int l = 0; l < 64; l++) {
      if (lanes->on[l] && !find(w, lanes->at[l], lanes->at[l] + (u64)size)) {
        fail(w, o, kind == LOAD ? LOAD_RANGE : STORE_RANGE, l, size, lanes->at[l]);
        return 0;
      }
    }
  }
  if (kind == STORE) {
    for (int l = 0; l < 64; l++) {
      const Buffer *b = lanes->buffer ? lanes->buffer : lanes->on[l] ? find(w, lanes->at[l], lanes->at[l] + (u64)size) : NULL;
      if (unlikely(b && b->readonly && lanes->on[l])) {
        fail(w, o, STORE_READONLY, l, size, lanes->at[l]);
        return 0;
      }
      if (lanes->buffer && !lanes->buffer->readonly) break;
    }
  }
  return 1;
}

static inline void mark(Wave *w, const Lanes *lanes, int size) {
  if (lanes->buffer && !lanes->buffer->written) return;
  for (int l = 0; l < 64; l++) {
    if (!lanes->on[l]) continue;
    const Buffer *b = lanes->buffer ? lanes->buffer : find(w, lanes->at[l], lanes->at[l] + (u64)size);
    if (b->written) memset(b->written + (lanes->at[l] - b->base), 1, (size_t)size);
  }
}

static inline int in_scratch(Wave *w, const Op *o, const Lanes *lanes, int size, int fault) {
  for (int l = 0; l < 64; l++) {
    u64 within = lanes->at[l] - (u64)(uintptr_t)w->scratch - (u64)w->scratch_bytes * (u64)l;
    if (lanes->on[l] && within + (u64)size > w->scratch_bytes) { fail(w, o, fault, l, size, within); return 0; }
  }
  return 1;
}

// d: rows; z: fill
#define LOADS(space, size, check)                                                            \
  static __attribute__((noinline)) const Op *space##_load_some_##size(Wave *w, const Op *o) { \
    Lanes lanes[1];                                                                          \
    u32 rows[64 * ((size + 3) / 4)] __attribute__((aligned(64)));                            \
    space##_lanes(w, o, lanes, size);                                                        \
    if (unlikely(!(check))) return NULL;                                                     \
    gather(rows, 0, NULL, lanes->at, size);                                                  \
    if (size < 4 && o->z) extend(rows, ROW(d), size, o->z);                                  \
    commit(w, ROW(d), rows, (size + 3) / 4);                                                 \
    w->bytes[VMEM_LOADED] += size * count_on(lanes);                                         \
    NEXT;                                                                                    \
  }                                                                                          \
  OP(space##_load_##size) {                                                                  \
    u64 base, limit;                                                                         \
    if ((size < 4 && o->z) || !space##_base(w, o, &base, &limit) ||                          \
        !all_inside(w, base, ROW(a), size, limit, NULL))                                     \
      return space##_load_some_##size(w, o);                                                 \
    gather(ROW(d), base, ROW(a), NULL, size);                                                \
    w->bytes[VMEM_LOADED] += 64 * size;                                                      \
    NEXT;                                                                                    \
  }
static inline int holds_poison(const u32 *D, int rows) {
  u32 poisoned = 0;
  for (int k = 0; k < rows; k++) EACH poisoned |= D[64 * k + l] == POISON;
  return (int)poisoned;
}
// d: rows; z: shift of the data
#define STORES(space, size, check, is_scratch)                                               \
  static __attribute__((noinline)) const Op *space##_store_some_##size(Wave *w, const Op *o) { \
    Lanes lanes[1];                                                                          \
    const u32 *D = ROW(d);                                                                   \
    space##_lanes(w, o, lanes, size);                                                        \
    if (size >= 4 && !is_scratch) {                                                          \
      u32 poisoned = 0;                                                                      \
      for (int k = 0; k < size / 4; k++) EACH poisoned |= D[64 * k + l] == POISON ? lanes->on[l] : 0; \
      if (unlikely(poisoned)) return store_of_poison(w, o, lanes, size);                     \
    }                                                                                        \
    if (unlikely(!(check))) return NULL;                                                     \
    scatter(D, 0, NULL, lanes->at, lanes->on, size, o->z);                                   \
    if (!is_scratch) mark(w, lanes, size);                                                   \
    w->bytes[VMEM_STORED] += size * count_on(lanes);                                         \
    NEXT;                                                                                    \
  }                                                                                          \
  OP(space##_store_##size) {                                                                 \
    u64 base, limit;                                                                         \
    const Buffer *buffer;                                                                    \
    if (!space##_base(w, o, &base, &limit) || holds_poison(ROW(d), size / 4) ||              \
        !all_inside(w, base, ROW(a), size, limit, &buffer))                                  \
      return space##_store_some_##size(w, o);                                                \
    scatter(ROW(d), base, ROW(a), NULL, NULL, size, o->z);                                   \
    if (buffer->written)                                                                     \
      for (int l = 0; l < 64; l++) memset(buffer->written + (base + ROW(a)[l] - buffer->base), 1, size); \
    w->bytes[VMEM_STORED] += 64 * size;                                                      \
    NEXT;                                                                                    \
  }
static __attribute__((noinline)) const Op *store_of_poison(Wave *w, const Op *o, const Lanes *lanes, int size) {
  const u32 *D = ROW(d);
  for (int l = 0; l < 64; l++)
    for (int k = 0; k < size / 4; k++)
      if (lanes->on[l] && D[64 * k + l] == POISON) return fail(w, o, STORE_POISON, l, size, lanes->at[l]);
  return NULL;
}
#define SIZES(n)                                                                             \
  LOADS(buffer, n, checked(w, o, lanes, n, LOAD))                                            \
  LOADS(global, n, checked(w, o, lanes, n, LOAD))                                            \
  LOADS(scratch, n, in_scratch(w, o, lanes, n, LOAD_RANGE))                                  \
  STORES(buffer, n, checked(w, o, lanes, n, STORE), 0)                                       \
  STORES(global, n, checked(w, o, lanes, n, STORE), 0)                                       \
  STORES(scratch, n, in_scratch(w, o, lanes, n, STORE_RANGE), 1)
SIZES(1) SIZES(2) SIZES(4) SIZES(8) SIZES(12) SIZES(16)

// Loads to LDS: the data of lane l go to M0 + offset + l * stride. y: offset, of the address too
#define TO_LDS(space, size)                                                                  \
  static __attribute__((noinline)) const Op *space##_to_lds_some_##size(Wave *w, const Op *o) { \
    Lanes lanes[1];                                                                          \
    u32 rows[64 * ((size + 3) / 4)] __attribute__((aligned(64)));                            \
    space##_lanes(w, o, lanes, size);                                                        \
    if (unlikely(!checked(w, o, lanes, size, LOAD))) return NULL;                            \
    gather(rows, 0, NULL, lanes->at, size);                                                  \
    w->bytes[VMEM_LOADED] += size * count_on(lanes);                                         \
    i64 first = (i64)w->s[M0] + o->y;                                                        \
    const int stride = size < 4 ? 4 : size;                                                  \
    for (int l = 0; l < 64; l++) {                                                           \
      i64 at = first + l * stride;                                                           \
      if (!w->mask[l]) continue;                                                             \
      if (at < 0 || at + stride > (i64)w->lds_bytes) return fail(w, o, LDS_RANGE, l, 4, (u64)at); \
      if (at & 3) return fail(w, o, LDS_ALIGNMENT, l, 4, (u64)at);                           \
      for (int k = 0; k < stride / 4; k++) memcpy(w->lds + at + 4 * k, rows + 64 * k + l, 4); \
      w->bytes[LDS_WRITTEN] += (u64)stride;                                                  \
    }                                                                                        \
    NEXT;                                                                                    \
  }                                                                                          \
  OP(space##_to_lds_##size) {                                                                \
    const i64 first = (i64)w->s[M0] + o->y;                                                  \
    u64 base, limit;                                                                         \
    if (size < 4 || first < 0 || first & 3 || first + 64 * size > (i64)w->lds_bytes ||       \
        !space##_base(w, o, &base, &limit) || !all_inside(w, base, ROW(a), size, limit, NULL)) \
      return space##_to_lds_some_##size(w, o);                                               \
    const u32 *A = ROW(a);                                                                   \
    for (int l = 0; l < 64; l++) memcpy(w->lds + first + size * l, (const void *)(uintptr_t)(base + A[l]), size); \
    w->bytes[VMEM_LOADED] += 64 * size, w->bytes[LDS_WRITTEN] += 64 * size;                  \
    NEXT;                                                                                    \
  }
#define TO_LDS_SIZES(n) TO_LDS(buffer, n) TO_LDS(global, n)
TO_LDS_SIZES(1) TO_LDS_SIZES(2) TO_LDS_SIZES(4) TO_LDS_SIZES(8) TO_LDS_SIZES(12) TO_LDS_SIZES(16)

// Atomics. d: data (and comparand); x: row of the result, or -1; z: kind
#define ATOMICS(space, addresses, U, bits)                                                   \
  OP(space##_atomic_##bits) {                                                                \
    Lanes lanes[1];                                                                          \
    const int size = bits / 8, words = bits / 32, rows = o->z == CMPSWAP ? 2 * words : words; \
    const u32 *D = ROW(d);                                                                   \
    addresses(w, o, lanes, bits / 8);                                                        \
    for (int l = 0; l < 64; l++) {                                                           \
      if (!lanes->on[l]) continue;                                                           \
      for (int k = 0; k < rows; k++)                                                         \
        if (unlikely(D[64 * k + l] == POISON)) return fail(w, o, STORE_POISON, l, size, lanes->at[l]); \
    }                                                                                        \
    for (int l = 0; l < 64; l++) {                                                           \
      if (!lanes->on[l]) continue;                                                           \
      u64 at = lanes->at[l];                                                                 \
      const Buffer *b = find(w, at, at + (u64)size);                                         \
      if (!b || b->readonly) return fail(w, o, b ? STORE_READONLY : ATOMIC_RANGE, l, size, at); \
      if (at % (u64)size) return fail(w, o, ATOMIC_ALIGNMENT, l, size, at);                  \
      U data = (U)(bits == 32 ? D[l] : WIDE(D, l));                                          \
      U comparand = o->z != CMPSWAP ? 0 : (U)(bits == 32 ? D[64 + l] : WIDE(D + 128, l));    \
      U old = __atomic_load_n((U *)(uintptr_t)at, __ATOMIC_SEQ_CST);                         \
      while (!__atomic_compare_exchange_n((U *)(uintptr_t)at, &old, modified##bits(o->z, old, data, comparand), 0, \
                                          __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {             \
      }                                                                                      \
      if (b->written) memset(b->written + (at - b->base), 1, (size_t)size);                  \
      w->bytes[VMEM_STORED] += (u64)size;                                                    \
      if (o->x >= 0) {                                                                       \
        w->v[o->x + l] = (u32)old;                                                           \
        if (bits == 64) w->v[o->x + 64 + l] = (u32)((u64)old >> 32);                         \
      }                                                                                      \
    }                                                                                        \
    NEXT;                                                                                    \
  }
ATOMICS(buffer, buffer_lanes, u32, 32)
ATOMICS(buffer, buffer_lanes, u64, 64)
ATOMICS(global, global_lanes, u32, 32)
ATOMICS(global, global_lanes, u64, 64)

// d: first register; a: base pair; b: scalar offset; x: words; y: offset
OP(s_load) {
  u64 at = (pair(w, o->a) + (u64)(i64)(i32)w->s[o->b] + (u64)(i64)o->y) & ~3ull;
  if (unlikely(!find(w, at, at + 4 * (u64)o->x))) return fail(w, o, SCALAR_RANGE, 0, 4 * o->x, at);
  memcpy(w->s + o->d, (const void *)(uintptr_t)at, 4 * (size_t)o->x);
  NEXT;
}
