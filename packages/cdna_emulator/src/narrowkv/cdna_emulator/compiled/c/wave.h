// The state of a wave of 64 lanes, and the form of a pre-decoded operation.
//
// An operation is a C function and the rows of registers that it works on. It returns the operation that runs next, or
// null when the wave stops (see `enum State`). Rows are 64 words, one for each lane.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t i8;
typedef int16_t i16;
typedef int32_t i32;
typedef int64_t i64;

typedef struct Wave Wave;
typedef struct Op Op;

// Mirrored by `operations.OPERATION`.
struct Op {
  const Op *(*run)(Wave *, const Op *);
  i32 d, a, b, c;   // word offsets of rows, or scalar registers
  i32 x, y, z;      // immediates
  i32 instruction;  // number of the instruction in the program
  const void *p;    // a table, or the target of a branch
};

// One mapped buffer. Mirrored by `running.BUFFER`.
typedef struct {
  u64 base, end;
  u8 *written;  // one byte for each byte of the buffer, set when it is stored; or null
  u64 readonly;
} Buffer;

enum State { RUNNING, AT_BARRIER, ENDED, FAILED, OUT_OF_BLOCKS };

// Mirrored by `errors.KINDS`.
enum Fault {
  NO_FAULT, LOAD_RANGE, STORE_RANGE, STORE_READONLY, STORE_POISON, ATOMIC_RANGE, ATOMIC_ALIGNMENT, LDS_RANGE,
  LDS_ALIGNMENT, SCALAR_RANGE, ENDLESS, NO_MEMORY,
};

enum Count { VMEM_LOADED, VMEM_STORED, LDS_READ, LDS_WRITTEN, COUNTS };

struct Wave {
  u32 *v;         // rows of vector registers, temporaries and constants
  u32 *s;         // scalar registers, then scalar constants
  u8 *lds;        // of the workgroup
  u8 *scratch;    // private memory of the wave's lanes
  const Buffer *buffers;
  i64 buffer_count, hit;  // hit: the buffer that was found last
  u64 *blocks;            // executed blocks by number
  i64 *budget;            // blocks that the workgroup may still execute
  i64 quantum;            // blocks that the wave may still execute before others run
  const Op *resume;
  u64 bytes[COUNTS];
  u64 fault_address;
  u32 lds_bytes, scratch_bytes;
  i32 state, fault, fault_lane, fault_size, fault_instruction;
  u32 full;            // all lanes are active
  u32 scc, saturate;   // saturate: MODE.FP16_OVFL
  u32 mask[64] __attribute__((aligned(64)));  // EXEC: all ones where the lane is active
};

#define POISON 0x7FF97FFBu
#define VCC 106
#define M0 124
#define EXEC 126

#define OP(name) const Op *op_##name(Wave *w, const Op *o)
#define NEXT return o + 1
#define ROW(field) (w->v + o->field)
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
#if defined(__clang__)
#define EACH _Pragma("clang loop vectorize(assume_safety)") for (int l = 0; l < 64; l++)
#else
#define EACH _Pragma("GCC ivdep") for (int l = 0; l < 64; l++)
#endif
#define UNUSED __attribute__((unused))

static inline float as_float(u32 x) { float f; memcpy(&f, &x, 4); return f; }
static inline u32 as_bits(float f) { u32 x; memcpy(&x, &f, 4); return x; }
static inline double as_double(u64 x) { double f; memcpy(&f, &x, 8); return f; }
static inline u64 as_bits64(double f) { u64 x; memcpy(&x, &f, 8); return x; }

// Scalar registers.
static inline u64 pair(const Wave *w, int r) { return (u64)w->s[r + 1] << 32 | w->s[r]; }
static inline void put_pair(Wave *w, int r, u64 value) { w->s[r] = (u32)value, w->s[r + 1] = (u32)(value >> 32); }
static inline u64 exec(const Wave *w) { return pair(w, EXEC); }
// Two rows as 64-bit lanes.
#define WIDE(rows, l) ((u64)(rows)[64 + (l)] << 32 | (rows)[l])

static inline void unpack_mask(u32 *mask, u64 bits) {
  const u32 low = (u32)bits, high = (u32)(bits >> 32);
  for (int l = 0; l < 32; l++) mask[l] = 0u - (low >> l & 1), mask[32 + l] = 0u - (high >> l & 1);
}
u64 pack_mask(const u32 *mask);
static inline void set_exec(Wave *w, u64 bits) {
  put_pair(w, EXEC, bits);
  w->full = bits == ~0ull;
  unpack_mask(w->mask, bits);
}
const Op *fail(Wave *w, const Op *o, int fault, int lane, int size, u64 address);
