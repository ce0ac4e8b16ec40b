// Scalar instructions, and the ends of basic blocks.
#include "wave.h"

#define SCALAR(name, ...) \
  OP(name) { u32 A = w->s[o->a], B = w->s[o->b]; (void)A, (void)B; __VA_ARGS__; NEXT; }
#define R(x) w->s[o->d] = (u32)(x)
#define RZ(x) u32 r = (u32)(x); w->s[o->d] = r, w->scc = r != 0
#define SCALAR64(name, ...) \
  OP(name) { u64 A = pair(w, o->a), B = pair(w, o->b); (void)A, (void)B; __VA_ARGS__; NEXT; }
#define R64(x) put_pair(w, o->d, (u64)(x))
#define RZ64(x) u64 r = (u64)(x); put_pair(w, o->d, r), w->scc = r != 0
#define SHIFT64(name, ...) OP(name) { u64 A = pair(w, o->a); u32 B = w->s[o->b]; __VA_ARGS__; NEXT; }

static inline u64 reversed64(u64 x) {
  u64 r = 0;
  for (int k = 0; k < 64; k++) r |= (x >> k & 1) << (63 - k);
  return r;
}
static inline u32 leading(u32 x) { return x ? (u32)__builtin_clz(x) : ~0u; }

SCALAR(s_mov_b32, R(A))
SCALAR(s_brev_b32, R(reversed64(A) >> 32))
SCALAR(s_ff1_i32_b32, R(A ? __builtin_ctz(A) : -1))
SCALAR(s_flbit_i32_b32, R(leading(A)))
SCALAR(s_flbit_i32, R(leading((i32)A < 0 ? ~A : A)))
SCALAR(s_not_b32, RZ(~A))
SCALAR(s_bcnt1_i32_b32, RZ(__builtin_popcount(A)))
SCALAR(s_sext_i32_i8, R((i32)(i8)A))
SCALAR(s_sext_i32_i16, R((i32)(i16)A))
SCALAR(s_abs_i32, RZ((i32)A < 0 ? 0u - A : A))
SCALAR64(s_mov_b64, R64(A))
SCALAR64(s_brev_b64, R64(reversed64(A)))
SCALAR64(s_not_b64, RZ64(~A))
SCALAR64(s_bcnt1_i32_b64, RZ(__builtin_popcountll(A)))
SCALAR64(s_ff1_i32_b64, R(A ? __builtin_ctzll(A) : -1))
SCALAR64(s_flbit_i32_b64, R(A ? __builtin_clzll(A) : -1))
SCALAR(s_add_u32, u32 t = A + B; w->scc = t < A; R(t))
SCALAR(s_sub_u32, w->scc = A < B; R(A - B))
#define SHIFT_ADD(n) SCALAR(s_lshl##n##_add_u32, u64 t = ((u64)A << n) + B; w->scc = t >> 32 != 0; R(t))
SHIFT_ADD(1) SHIFT_ADD(2) SHIFT_ADD(3) SHIFT_ADD(4)
SCALAR(s_add_i32, u32 t = A + B; w->scc = ((A ^ t) & (B ^ t)) >> 31; R(t))
SCALAR(s_sub_i32, u32 t = A - B; w->scc = ((A ^ B) & (A ^ t)) >> 31; R(t))
SCALAR(s_min_i32, w->scc = (i32)A < (i32)B; R(w->scc ? A : B))
SCALAR(s_max_i32, w->scc = (i32)A >= (i32)B; R(w->scc ? A : B))
SCALAR(s_absdiff_i32, u32 t = A - B; w->scc = A != B; R((i32)t < 0 ? 0u - t : t))
SCALAR(s_min_u32, w->scc = A < B; R(w->scc ? A : B))
SCALAR(s_max_u32, w->scc = A >= B; R(w->scc ? A : B))
SCALAR(s_mul_i32, R(A * B))
SCALAR(s_mul_hi_u32, R((u64)A * B >> 32))
SCALAR(s_mul_hi_i32, R((i64)(i32)A * (i32)B >> 32))
SCALAR(s_pack_ll_b32_b16, R((A & 0xFFFF) | B << 16))
SCALAR(s_pack_lh_b32_b16, R((A & 0xFFFF) | (B & 0xFFFF0000u)))
SCALAR(s_pack_hh_b32_b16, R(A >> 16 | (B & 0xFFFF0000u)))
SCALAR(s_bfm_b32, R(((1u << (A & 31)) - 1) << (B & 31)))
#define LOGIC(name, expression) SCALAR(s_##name##_b32, RZ(expression)) SCALAR64(s_##name##_b64, RZ64(expression))
LOGIC(and, A & B) LOGIC(or, A | B) LOGIC(xor, A ^ B) LOGIC(andn2, A & ~B) LOGIC(orn2, A | ~B) LOGIC(nand, ~(A & B))
LOGIC(nor, ~(A | B)) LOGIC(xnor, ~(A ^ B))
SCALAR(s_lshl_b32, RZ(A << (B & 31)))
SCALAR(s_lshr_b32, RZ(A >> (B & 31)))
SCALAR(s_ashr_i32, RZ((i32)A >> (B & 31)))
SHIFT64(s_lshl_b64, RZ64(A << (B & 63)))
SHIFT64(s_lshr_b64, RZ64(A >> (B & 63)))
SHIFT64(s_ashr_i64, RZ64((i64)A >> (B & 63)))

// Bit fields: offset in the low bits, width in bits 22:16.
static inline u64 low_bits(u64 x, u32 n) { return n >= 64 ? x : x & ((1ull << n) - 1); }
static inline u64 extended(u64 x, u32 n) { u64 sign = n ? 1ull << (n - 1) : 0; return (low_bits(x, n) ^ sign) - sign; }
#define WIDTH(bits) u32 n = B >> 16 & 127; n = n > bits ? bits : n
SCALAR(s_bfe_u32, WIDTH(32); RZ(low_bits(A >> (B & 31), n)))
SCALAR(s_bfe_i32, WIDTH(32); RZ(extended((u64)((i32)A >> (B & 31)), n)))
SHIFT64(s_bfe_u64, WIDTH(64); RZ64(low_bits(A >> (B & 63), n)))
SHIFT64(s_bfe_i64, WIDTH(64); RZ64(extended((u64)((i64)A >> (B & 63)), n)))

#define COMPARE(op, c)                                                                            \
  SCALAR(s_cmp_##op##_u32, w->scc = A c B) SCALAR(s_cmp_##op##_i32, w->scc = (i32)A c (i32)B)      \
  SCALAR64(s_cmp_##op##_u64, w->scc = A c B) SCALAR64(s_cmp_##op##_i64, w->scc = (i64)A c (i64)B)
COMPARE(eq, ==) COMPARE(lg, !=) COMPARE(gt, >) COMPARE(ge, >=) COMPARE(lt, <) COMPARE(le, <=)
SCALAR(s_bitcmp0_b32, w->scc = !(A >> (B & 31) & 1))
SCALAR(s_bitcmp1_b32, w->scc = A >> (B & 31) & 1)
SHIFT64(s_bitcmp0_b64, w->scc = !(A >> (B & 63) & 1))
SHIFT64(s_bitcmp1_b64, w->scc = A >> (B & 63) & 1)
SCALAR(s_bitset0_b32, R(w->s[o->d] & ~(1u << (A & 31))))
SCALAR(s_bitset1_b32, R(w->s[o->d] | 1u << (A & 31)))
SCALAR(s_bitset0_b64, R64(pair(w, o->d) & ~(1ull << (A & 63))))
SCALAR(s_bitset1_b64, R64(pair(w, o->d) | 1ull << (A & 63)))
SCALAR(s_addc_u32, u64 t = (u64)A + B + w->scc; w->scc = (u32)(t >> 32); R(t))
SCALAR(s_subb_u32, i64 t = (i64)A - B - w->scc; w->scc = t < 0; R(t))
SCALAR(s_cselect_b32, R(w->scc ? A : B))
SCALAR64(s_cselect_b64, R64(w->scc ? A : B))
SCALAR(s_cmov_b32, R(w->scc ? A : w->s[o->d]))
SCALAR64(s_cmov_b64, R64(w->scc ? A : pair(w, o->d)))

// d gets EXEC, EXEC gets the result.
#define SAVE_EXEC(name, expression)                                                              \
  OP(s_##name##_saveexec_b64) {                                                                  \
    u64 s = pair(w, o->a), e = exec(w), r = expression;                                          \
    put_pair(w, o->d, e);                                                                        \
    w->scc = r != 0;                                                                             \
    set_exec(w, r);                                                                              \
    NEXT;                                                                                        \
  }
SAVE_EXEC(and, s & e) SAVE_EXEC(or, s | e) SAVE_EXEC(xor, s ^ e) SAVE_EXEC(andn2, s & ~e) SAVE_EXEC(orn2, s | ~e)
SAVE_EXEC(andn1, ~s & e) SAVE_EXEC(orn1, ~s | e) SAVE_EXEC(nand, ~(s & e)) SAVE_EXEC(nor, ~(s | e))
SAVE_EXEC(xnor, ~(s ^ e))

OP(exec_written) { set_exec(w, exec(w)); NEXT; }
OP(read_scc) { w->s[o->d] = w->scc; NEXT; }
OP(set_saturate) { w->saturate = (u32)o->x; NEXT; }
OP(fence) { (void)w; __atomic_thread_fence(__ATOMIC_SEQ_CST); NEXT; }

// ---- blocks. x: number
OP(block) {
  w->blocks[o->x]++;
  *w->budget -= 1;
  if (unlikely(--w->quantum < 0)) { w->resume = o + 1, w->state = OUT_OF_BLOCKS; return NULL; }
  NEXT;
}
OP(end_always) { (void)w; return o->p; }
#define BRANCH(name, condition) OP(end_##name) { return condition ? (const Op *)o->p : o + 1; }
BRANCH(scc0, !w->scc) BRANCH(scc1, w->scc) BRANCH(vccz, !pair(w, VCC)) BRANCH(vccnz, pair(w, VCC))
BRANCH(execz, !exec(w)) BRANCH(execnz, exec(w))
OP(end_barrier) { w->resume = o + 1, w->state = AT_BARRIER; return NULL; }
OP(end_exit) { (void)o; w->state = ENDED; return NULL; }
