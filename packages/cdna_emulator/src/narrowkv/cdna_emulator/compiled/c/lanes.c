// Instructions that move values across lanes, and those between vector and scalar registers.
#include "vector.h"

// DPP. p: for each lane the lane that it reads; whether there is one; whether its row and bank are enabled.
typedef struct { u8 from[64], exists[64], enabled[64]; } Dpp;
OP(dpp_read) {  // lanes that read nothing get 0
  const Dpp *plan = o->p;
  const u32 *A = ROW(a), *M = w->mask;
  u32 *D = ROW(d), r[64];
  for (int l = 0; l < 64; l++) r[l] = plan->exists[l] && M[plan->from[l]] ? A[plan->from[l]] : 0;
  memcpy(D, r, sizeof r);
  NEXT;
}
OP(dpp_write) {  // x: bound_ctrl, which writes lanes that read nothing too
  const Dpp *plan = o->p;
  const u32 *A = ROW(a), *M = w->mask;
  u32 *D = ROW(d);
  for (int l = 0; l < 64; l++) {
    int valid = plan->exists[l] && M[plan->from[l]];
    if (M[l] && plan->enabled[l] && (o->x || valid)) D[l] = A[l];
  }
  NEXT;
}

OP(v_readfirstlane_b32) {
  u64 active = exec(w);
  w->s[o->d] = ROW(a)[active ? __builtin_ctzll(active) : 0];
  NEXT;
}
OP(v_readlane_b32) { w->s[o->d] = ROW(a)[w->s[o->b] & 63]; NEXT; }
OP(v_writelane_b32) { ROW(d)[w->s[o->b] & 63] = w->s[o->a]; NEXT; }

static inline void swap_rows(Wave *w, const Op *o, int size) {
  u32 *D = ROW(d), *B = ROW(b);
  const u32 *M = w->mask;
  for (int l = 0; l < 64; l++) {
    if (l & size) continue;
    u32 x = D[l + size], y = B[l];
    D[l + size] = M[l + size] ? y : x;
    B[l] = M[l] ? x : y;
  }
}
OP(v_permlane32_swap_b32) { swap_rows(w, o, 32); NEXT; }
OP(v_permlane16_swap_b32) { swap_rows(w, o, 16); NEXT; }
OP(v_swap_b32) {
  u32 *D = ROW(d), *B = ROW(b);
  const u32 *M = w->mask;
  EACH { u32 x = D[l], y = B[l]; D[l] = M[l] ? y : x; B[l] = M[l] ? x : y; }
  NEXT;
}

// Through the LDS hardware, without LDS memory. a: addresses; b: data; x: offset.
OP(ds_bpermute_b32) {
  const u32 *A = ROW(a), *B = ROW(b), *M = w->mask;
  u32 *D = ROW(d), from[64] __attribute__((aligned(64))), active[64] __attribute__((aligned(64))), x = (u32)o->x;
  EACH { from[l] = (A[l] + x) >> 2 & 63; active[l] = B[l] & M[l]; }
  if (likely(w->full)) {
    for (int l = 0; l < 64; l++) D[l] = active[from[l]];
  } else {
    for (int l = 0; l < 64; l++) if (M[l]) D[l] = active[from[l]];
  }
  NEXT;
}
OP(ds_permute_b32) {
  const u32 *A = ROW(a), *B = ROW(b), *M = w->mask;
  u32 *D = ROW(d), r[64] = {0}, x = (u32)o->x;
  for (int l = 0; l < 64; l++) if (M[l]) r[(A[l] + x) >> 2 & 63] = B[l];
  EACH D[l] = M[l] ? r[l] : D[l];
  NEXT;
}
OP(ds_swizzle_b32) {  // p: the lane that each lane reads
  const u8 *from = o->p;
  const u32 *A = ROW(a), *M = w->mask;
  u32 *D = ROW(d), r[64];
  for (int l = 0; l < 64; l++) r[l] = A[from[l]] & M[from[l]];
  EACH D[l] = M[l] ? r[l] : D[l];
  NEXT;
}
