// Runs workgroups: the waves of one in turns between barriers, and several workgroups if one of them waits for another.
#include <stdlib.h>
#include "wave.h"
#if defined(__AVX512DQ__)
#include <immintrin.h>
#endif

u64 pack_mask(const u32 *mask) {
  u64 bits = 0;
#if defined(__AVX512DQ__)
  for (int k = 0; k < 4; k++) bits |= (u64)_mm512_movepi32_mask(_mm512_loadu_si512(mask + 16 * k)) << 16 * k;
  return bits;
#endif
  for (int k = 0; k < 8; k++) {
    u32 octet = 0;
    for (int j = 0; j < 8; j++) octet |= mask[8 * k + j] & 1u << j;
    bits |= (u64)octet << 8 * k;
  }
  return bits;
}

const Op *fail(Wave *w, const Op *o, int fault, int lane, int size, u64 address) {
  w->state = FAILED, w->fault = fault, w->fault_lane = lane, w->fault_size = size, w->fault_address = address;
  w->fault_instruction = o->instruction;
  return NULL;
}

// Mirrored by `running.LAUNCH`.
typedef struct {
  const Op *entry;
  const u32 *scalars;    // initial contents of the scalar registers and constants
  const u32 *constants;  // rows that follow the registers and temporaries
  const Buffer *buffers;
  const u32 *positions;  // ids of the workgroups to run, three each
  i64 buffer_count, workgroups, blocks, limit, slots;
  i32 scalar_count, register_rows, rows, waves, lds_bytes, scratch_bytes, id_x, id_y, id_z, stop;
  u32 contents, pad;     // of vector registers and LDS at the start
  u64 next;              // the workgroup that is started next
} Launch;

// Mirrored by `running.WORKER`: what one thread has done.
typedef struct {
  u64 bytes[COUNTS];
  u64 fault_address;
  i64 fault_workgroup;
  i32 fault, fault_wave, fault_lane, fault_size, fault_instruction, pad;
} Worker;

// One workgroup that was started.
typedef struct {
  Wave *waves;
  u32 *registers, *scalars;
  u8 *lds, *scratch;
  i64 budget, workgroup;
  int active;
} Slot;

#define QUANTUM 4096  // blocks that a wave runs while others wait, so that one that spins cannot starve them
#define PATIENCE 64   // quanta that a workgroup uses up before another is started beside it

static void *aligned(size_t bytes) { return aligned_alloc(64, (bytes + 127) & ~(size_t)63); }

static int allocate(Slot *slot, const Launch *n) {
  size_t waves = (size_t)n->waves;
  slot->waves = aligned(sizeof(Wave) * waves);
  slot->registers = aligned(256 * (size_t)n->rows * waves);
  slot->scalars = aligned(sizeof(u32) * (size_t)n->scalar_count * waves);
  slot->lds = aligned((size_t)n->lds_bytes);
  slot->scratch = aligned(64 * (size_t)n->scratch_bytes * waves);
  return slot->waves && slot->registers && slot->scalars && slot->lds && slot->scratch;
}
static void release(Slot *slot) {
  free(slot->waves), free(slot->registers), free(slot->scalars), free(slot->lds), free(slot->scratch);
}

static void fill(u32 *words, size_t count, u32 value) { for (size_t k = 0; k < count; k++) words[k] = value; }

static void start(Slot *slot, const Launch *n, i64 workgroup, u64 *blocks) {
  slot->workgroup = workgroup, slot->active = 1, slot->budget = n->limit;
  fill((u32 *)slot->lds, ((size_t)n->lds_bytes + 3) / 4, n->contents);
  memset(slot->scratch, 0, 64 * (size_t)n->scratch_bytes * (size_t)n->waves);
  for (int k = 0; k < n->waves; k++) {
    Wave *w = slot->waves + k;
    memset(w, 0, sizeof *w);
    w->v = slot->registers + (size_t)k * 64 * (size_t)n->rows;
    w->s = slot->scalars + (size_t)k * (size_t)n->scalar_count;
    w->lds = slot->lds, w->lds_bytes = (u32)n->lds_bytes;
    w->scratch = slot->scratch + (size_t)k * 64 * (size_t)n->scratch_bytes, w->scratch_bytes = (u32)n->scratch_bytes;
    w->buffers = n->buffers, w->buffer_count = n->buffer_count, w->blocks = blocks, w->budget = &slot->budget;
    w->resume = n->entry, w->state = RUNNING;
    fill(w->v, 64 * (size_t)n->register_rows, n->contents);
    memcpy(w->v + 64 * (size_t)n->register_rows, n->constants, 256 * (size_t)(n->rows - n->register_rows));
    memcpy(w->s, n->scalars, sizeof(u32) * (size_t)n->scalar_count);
    const u32 *id = n->positions + 3 * workgroup;
    if (n->id_x >= 0) w->s[n->id_x] = id[0];
    if (n->id_y >= 0) w->s[n->id_y] = id[1];
    if (n->id_z >= 0) w->s[n->id_z] = id[2];
    EACH w->v[l] = (u32)(64 * k + l);
    set_exec(w, ~0ull);
  }
}

static void report(Worker *worker, const Slot *slot, int wave, const Wave *w) {
  worker->fault = w->fault, worker->fault_workgroup = slot->workgroup, worker->fault_wave = wave;
  worker->fault_lane = w->fault_lane, worker->fault_size = w->fault_size;
  worker->fault_instruction = w->fault_instruction, worker->fault_address = w->fault_address;
}

// Runs each wave of a workgroup up to its next barrier, end, or quantum. Returns the waves that used up their quantum, or
// -1 if one has failed.
static int turn(Slot *slot, const Launch *n, Worker *worker) {
  int waiting = 0, ended = 0, unfinished = 0;
  for (int k = 0; k < n->waves; k++) {
    Wave *w = slot->waves + k;
    if (w->state == RUNNING || w->state == OUT_OF_BLOCKS) {
      w->state = RUNNING, w->quantum = QUANTUM;
      for (const Op *o = w->resume; o;) o = o->run(w, o);
      if (w->state == AT_BARRIER && n->waves == 1) w->state = RUNNING;
      if (w->state != FAILED && slot->budget < 0) fail(w, w->resume - 1, ENDLESS, 0, 0, 0);
      if (w->state == FAILED) {
        report(worker, slot, k, w);
        return -1;
      }
    }
    unfinished += w->state == OUT_OF_BLOCKS;
    waiting += w->state == AT_BARRIER, ended += w->state == ENDED;
  }
  if (ended == n->waves) {
    slot->active = 0;
    for (int k = 0; k < n->waves; k++)
      for (int c = 0; c < COUNTS; c++) worker->bytes[c] += slot->waves[k].bytes[c];
  } else if (waiting + ended == n->waves) {
    for (int k = 0; k < n->waves; k++)
      if (slot->waves[k].state == AT_BARRIER) slot->waves[k].state = RUNNING;
  }
  return unfinished;
}

// Takes workgroups until none is left. `blocks`: executions of each block, which are added to.
void work(Launch *n, Worker *worker, u64 *blocks) {
  Slot *slots = calloc((size_t)n->slots, sizeof(Slot));
  i64 used = slots ? 0 : -1;
  int failed = !slots, left = 1;
  while (!failed) {
    int active = 0;
    for (i64 k = 0; k < used && !failed; k++) {
      for (int quanta = 0; slots[k].active && quanta < PATIENCE && !failed;) {
        int unfinished = turn(slots + k, n, worker);
        failed = unfinished < 0 || __atomic_load_n(&n->stop, __ATOMIC_RELAXED);
        quanta += unfinished;
      }
      active += slots[k].active;
    }
    if (failed) break;
    if (!active || (left && active < n->slots)) {  // none runs, or all wait for something: start another
      i64 workgroup = left ? (i64)__atomic_fetch_add(&n->next, 1, __ATOMIC_RELAXED) : n->workgroups;
      left = workgroup < n->workgroups;
      if (!left) {
        if (!active) break;
        continue;
      }
      i64 k = 0;
      while (k < used && slots[k].active) k++;
      if (k == used && !allocate(slots + used++, n)) { failed = 1; break; }
      start(slots + k, n, workgroup, blocks);
    }
  }
  if (failed && !worker->fault && !n->stop) worker->fault = NO_MEMORY;
  if (failed) __atomic_store_n(&n->stop, 1, __ATOMIC_RELAXED);
  for (i64 k = 0; k < used; k++) release(slots + k);
  free(slots);
}

size_t size_of_op(void) { return sizeof(Op); }
size_t size_of_launch(void) { return sizeof(Launch); }
size_t size_of_worker(void) { return sizeof(Worker); }
