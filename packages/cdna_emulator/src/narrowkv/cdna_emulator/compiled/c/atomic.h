// What an atomic writes, from what memory holds.
#pragma once
#include "number.h"

// Mirrored by `memory.ATOMIC_KINDS`.
enum Atomic {
  ADD, SUB, SWAP, CMPSWAP, SMIN, SMAX, UMIN, UMAX, AND, OR, XOR, INC, DEC, ADD_F, MIN_F, MAX_F, PK_ADD_F16, PK_ADD_BF16,
};

#define INTEGER_ATOMICS(U, I)                                  \
  case ADD: return old + data;                                 \
  case SUB: return old - data;                                 \
  case SWAP: return data;                                      \
  case CMPSWAP: return old == comparand ? data : old;          \
  case SMIN: return (I)data < (I)old ? data : old;             \
  case SMAX: return (I)data > (I)old ? data : old;             \
  case UMIN: return data < old ? data : old;                   \
  case UMAX: return data > old ? data : old;                   \
  case AND: return old & data;                                 \
  case OR: return old | data;                                  \
  case XOR: return old ^ data;                                 \
  case INC: return old >= data ? 0 : old + 1;                  \
  case DEC: return old == 0 || old > data ? data : old - 1;

static inline u32 modified32(int kind, u32 old, u32 data, u32 comparand) {
  float x = as_float(old), y = as_float(data);
  switch (kind) {
    INTEGER_ATOMICS(u32, i32)
    case ADD_F: return as_bits(x + y);
    case MIN_F: return as_bits(y != y ? x : x != x ? y : x < y ? x : y);
    case MAX_F: return as_bits(y != y ? x : x != x ? y : x > y ? x : y);
    case PK_ADD_F16:
      return float_to_half(half_to_float((u16)old) + half_to_float((u16)data)) |
             (u32)float_to_half(half_to_float((u16)(old >> 16)) + half_to_float((u16)(data >> 16))) << 16;
    case PK_ADD_BF16:
      return float_to_bfloat(bfloat_to_float((u16)old) + bfloat_to_float((u16)data)) |
             (u32)float_to_bfloat(bfloat_to_float((u16)(old >> 16)) + bfloat_to_float((u16)(data >> 16))) << 16;
  }
  return old;
}
static inline u64 modified64(int kind, u64 old, u64 data, u64 comparand) {
  double x = as_double(old), y = as_double(data);
  switch (kind) {
    INTEGER_ATOMICS(u64, i64)
    case ADD_F: return as_bits64(x + y);
    case MIN_F: return as_bits64(y != y ? x : x != x ? y : x < y ? x : y);
    case MAX_F: return as_bits64(y != y ? x : x != x ? y : x > y ? x : y);
  }
  return old;
}
