// The HIP runtime of the virtual GPU: the functions that Triton's backends/amd/driver.c looks up, over host memory.
//
// Device memory is host memory, so a device address is a host address. Every allocation is known with its exact
// size. Code objects and launches go to callbacks, which Python sets (runtime.py).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <hip/hip_runtime_api.h>
#include <pthread.h>
#include <search.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define EXPORT __attribute__((visibility("default")))
enum { MAX_DEVICES = 16, HOST = -1 };

// Values of a new allocation: the contents of torch.empty are arbitrary on a GPU. Larger allocations are zero.
static const unsigned char FILL = 0xC7;
static const size_t LARGE = 64u << 20;

// ---------------------------------------------------------------------------------------------- errors
static __thread hipError_t last_error;
static __thread char last_message[4096];

static hipError_t result(hipError_t code) { return last_error = code; }

static hipError_t failure(hipError_t code, const char *message) {
  snprintf(last_message, sizeof last_message, "%s", message);
  return result(code);
}

EXPORT void virtual_gpu_set_message(const char *message) {
  snprintf(last_message, sizeof last_message, "%s", message);
}

EXPORT hipError_t hipGetLastError(void) {
  hipError_t code = last_error;
  last_error = hipSuccess;
  return code;
}

EXPORT const char *hipGetErrorString(hipError_t code) {
  if (last_message[0] && code == last_error) return last_message;
  switch (code) {
  case hipSuccess: return "no error";
  case hipErrorInvalidValue: return "invalid argument";
  case hipErrorOutOfMemory: return "out of memory";
  case hipErrorInvalidConfiguration: return "invalid configuration argument";
  case hipErrorInvalidDevice: return "invalid device ordinal";
  case hipErrorInvalidImage: return "device kernel image is invalid";
  case hipErrorNoBinaryForGpu: return "no kernel image is available for execution on the device";
  case hipErrorNotFound: return "named symbol not found";
  case hipErrorLaunchFailure: return "unspecified launch failure";
  default: return "unknown error";
  }
}

// ---------------------------------------------------------------------------------------------- devices
static hipDeviceProp_t properties;
static int device_count;
static __thread int current_device;

typedef struct {
  uint64_t module;
  int number_of_registers, private_bytes, max_threads, shared_bytes;
} FunctionAttributes;
typedef struct {
  int (*load)(const void *image, size_t size, uint64_t module);
  int (*function)(uint64_t module, const char *name, uint64_t function, FunctionAttributes *attributes);
  int (*launch)(uint64_t function, const unsigned *grid, const unsigned *block, unsigned shared, void *stream,
                void **params);
} Callbacks;
static Callbacks callbacks;

typedef struct {
  const char *name, *arch;
  int devices, compute_units, clock_khz, memory_clock_khz, memory_bus_bits;
  uint64_t lds_bytes, memory_bytes, l2_bytes;
} Description;

EXPORT void virtual_gpu_setup(const Description *chip, const Callbacks *functions) {
  memset(&properties, 0, sizeof properties);
  snprintf(properties.name, sizeof properties.name, "%s", chip->name);
  snprintf(properties.gcnArchName, sizeof properties.gcnArchName, "%s:sramecc+:xnack-", chip->arch);
  properties.warpSize = 64;
  properties.sharedMemPerBlock = properties.sharedMemPerMultiprocessor = chip->lds_bytes;
  properties.maxSharedMemoryPerMultiProcessor = chip->lds_bytes;
  properties.totalGlobalMem = chip->memory_bytes;
  properties.multiProcessorCount = chip->compute_units;
  properties.regsPerBlock = properties.regsPerMultiprocessor = 65536;
  properties.maxThreadsPerBlock = 1024;
  properties.maxThreadsPerMultiProcessor = 2048;
  for (int axis = 0; axis < 3; axis++) properties.maxThreadsDim[axis] = 1024;
  properties.maxGridSize[0] = 2147483647;
  properties.maxGridSize[1] = properties.maxGridSize[2] = 65536;
  properties.clockRate = chip->clock_khz;
  properties.memoryClockRate = chip->memory_clock_khz;
  properties.memoryBusWidth = chip->memory_bus_bits;
  properties.l2CacheSize = chip->l2_bytes;
  properties.major = 9, properties.minor = strcmp(chip->arch, "gfx950") ? 4 : 5;
  properties.cooperativeLaunch = 1;
  properties.canMapHostMemory = 1;
  device_count = chip->devices < MAX_DEVICES ? chip->devices : MAX_DEVICES;
  callbacks = *functions;
}

EXPORT hipError_t hipInit(unsigned flags) { return result(hipSuccess); }
EXPORT hipError_t hipDriverGetVersion(int *version) { return *version = HIP_VERSION, result(hipSuccess); }
EXPORT hipError_t hipRuntimeGetVersion(int *version) { return *version = HIP_VERSION, result(hipSuccess); }
EXPORT hipError_t hipGetDeviceCount(int *count) { return *count = device_count, result(hipSuccess); }
EXPORT hipError_t hipGetDevice(int *device) { return *device = current_device, result(hipSuccess); }

EXPORT hipError_t hipSetDevice(int device) {
  if (device < 0 || device >= device_count) return failure(hipErrorInvalidDevice, "invalid device ordinal");
  return current_device = device, result(hipSuccess);
}

EXPORT hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_t *out, int device) {
  if (device < 0 || device >= device_count) return failure(hipErrorInvalidDevice, "invalid device ordinal");
  return *out = properties, result(hipSuccess);
}

EXPORT hipError_t hipDeviceSynchronize(void) { return result(hipSuccess); }
EXPORT hipError_t hipStreamSynchronize(hipStream_t stream) { return result(hipSuccess); }

// ---------------------------------------------------------------------------------------------- memory
typedef struct {
  char *base;
  size_t size;
  int device;  // HOST: pinned memory
} Allocation;
typedef struct {
  uint64_t allocated, peak, blocks, peak_blocks, all_bytes, all_blocks, out_of_memory;
} Usage;

static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static void *allocations;  // tree of Allocation by address
static size_t allocation_count;
static uint64_t generation;  // changes with every allocation and release
static Usage usage[MAX_DEVICES];

static int compare(const void *left, const void *right) {
  const Allocation *a = left, *b = right;
  if (a->base + a->size <= b->base) return -1;
  if (b->base + b->size <= a->base) return 1;
  return 0;
}

static Allocation *find(const void *pointer) {
  Allocation key = {(char *)pointer, 1, 0};
  Allocation **found = tfind(&key, &allocations, compare);
  return found ? *found : NULL;
}

// Compilers read the whole dword around a byte or a 16-bit number: it cannot fault on a GPU.
static size_t whole_dwords(size_t size) { return (size + 3) & ~(size_t)3; }

// Returns NULL if the host has no memory left. Large blocks are mapped, so that only touched pages exist.
static char *host_memory(size_t size) {
  if (size >= LARGE) {
    char *mapped = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return mapped == MAP_FAILED ? NULL : mapped;
  }
  void *base = NULL;
  if (posix_memalign(&base, 512, whole_dwords(size))) return NULL;
  return memset(base, FILL, whole_dwords(size));
}

static hipError_t allocate(void **pointer, size_t size, int device) {
  *pointer = NULL;
  if (!size) return result(hipSuccess);
  pthread_mutex_lock(&memory_lock);
  Usage *used = device == HOST ? NULL : &usage[device];
  hipError_t code = hipSuccess;
  char *base = NULL;
  if (used && (size > properties.totalGlobalMem || used->allocated > properties.totalGlobalMem - size)) {
    used->out_of_memory++;
    code = failure(hipErrorOutOfMemory, "out of memory");
  } else if (!(base = host_memory(size))) {
    code = failure(hipErrorOutOfMemory, "the machine has no memory left for the virtual GPU's");
  } else {
    Allocation *entry = malloc(sizeof *entry);
    *entry = (Allocation){base, size, device};
    tsearch(entry, &allocations, compare);
    allocation_count++, generation++;
    if (used) {
      used->allocated += size, used->all_bytes += size, used->blocks++, used->all_blocks++;
      if (used->allocated > used->peak) used->peak = used->allocated;
      if (used->blocks > used->peak_blocks) used->peak_blocks = used->blocks;
    }
    *pointer = base;
  }
  pthread_mutex_unlock(&memory_lock);
  return result(code);
}

static hipError_t release(void *pointer) {
  if (!pointer) return result(hipSuccess);
  pthread_mutex_lock(&memory_lock);
  Allocation *entry = find(pointer);
  int known = entry && entry->base == pointer;
  if (known) {
    tdelete(entry, &allocations, compare);
    allocation_count--, generation++;
    if (entry->device != HOST) usage[entry->device].allocated -= entry->size, usage[entry->device].blocks--;
    if (entry->size >= LARGE) munmap(entry->base, entry->size);
    else free(entry->base);
    free(entry);
  }
  pthread_mutex_unlock(&memory_lock);
  return known ? result(hipSuccess) : failure(hipErrorInvalidValue, "the pointer is not an allocation's first byte");
}

EXPORT int virtual_gpu_allocate(void **pointer, size_t size, int device) { return allocate(pointer, size, device); }
EXPORT int virtual_gpu_release(void *pointer) { return release(pointer); }
EXPORT hipError_t hipMalloc(void **pointer, size_t size) { return allocate(pointer, size, current_device); }
EXPORT hipError_t hipFree(void *pointer) { return release(pointer); }
EXPORT hipError_t hipHostMalloc(void **pointer, size_t size, unsigned flags) { return allocate(pointer, size, HOST); }
EXPORT hipError_t hipHostFree(void *pointer) { return release(pointer); }

EXPORT uint64_t virtual_gpu_memory_generation(void) { return generation; }

static __thread struct {
  uint64_t *out;
  size_t at, room;
} walk;

static void visit(const void *node, VISIT which, int depth) {
  if (which != postorder && which != leaf) return;
  const Allocation *entry = *(const Allocation *const *)node;
  if (walk.at < walk.room) {
    walk.out[2 * walk.at] = (uint64_t)entry->base;
    walk.out[2 * walk.at + 1] = whole_dwords(entry->size);
  }
  walk.at++;
}

// Writes address and size, in whole dwords, of at most `room` allocations, by address; returns how many there are.
EXPORT size_t virtual_gpu_allocations(uint64_t *out, size_t room) {
  pthread_mutex_lock(&memory_lock);
  walk.out = out, walk.at = 0, walk.room = room;
  twalk(allocations, visit);
  size_t count = walk.at;
  pthread_mutex_unlock(&memory_lock);
  return count;
}

EXPORT void virtual_gpu_usage(int device, Usage *out) { *out = usage[device]; }

// what: 0 sets the peaks to the present values, 1 also forgets the totals.
EXPORT void virtual_gpu_reset_usage(int device, int what) {
  Usage *used = &usage[device];
  used->peak = used->allocated, used->peak_blocks = used->blocks;
  if (what) used->all_bytes = used->all_blocks = used->out_of_memory = 0;
}

EXPORT int virtual_gpu_is_pinned(const void *pointer) {
  pthread_mutex_lock(&memory_lock);
  Allocation *entry = find(pointer);
  int pinned = entry && entry->device == HOST;
  pthread_mutex_unlock(&memory_lock);
  return pinned;
}

// The device of an address; -1 for memory that is not the virtual GPU's.
EXPORT int virtual_gpu_device_of(const void *pointer) {
  pthread_mutex_lock(&memory_lock);
  Allocation *entry = find(pointer);
  int device = entry ? entry->device : HOST;
  pthread_mutex_unlock(&memory_lock);
  return device;
}

EXPORT hipError_t hipPointerGetAttribute(void *data, hipPointer_attribute attribute, hipDeviceptr_t pointer) {
  pthread_mutex_lock(&memory_lock);
  // A tensor without elements may point behind the last byte of its storage.
  int known = find(pointer) || find((char *)pointer - 1);
  pthread_mutex_unlock(&memory_lock);
  if (!known) return failure(hipErrorInvalidValue, "the pointer is not to memory of the device");
  if (attribute == HIP_POINTER_ATTRIBUTE_DEVICE_POINTER) *(hipDeviceptr_t *)data = pointer;
  return result(hipSuccess);
}

EXPORT hipError_t hipMemcpy(void *to, const void *from, size_t size, hipMemcpyKind kind) {
  return memcpy(to, from, size), result(hipSuccess);
}

EXPORT hipError_t hipMemGetInfo(size_t *available, size_t *total) {
  *total = properties.totalGlobalMem;
  *available = *total - usage[current_device].allocated;
  return result(hipSuccess);
}

// ---------------------------------------------------------------------------------------------- modules
typedef struct { uint64_t id; } Module;
typedef struct { uint64_t id; FunctionAttributes attributes; } Function;
static uint64_t next_id = 1;

static uint64_t new_id(void) { return __atomic_fetch_add(&next_id, 1, __ATOMIC_RELAXED); }

EXPORT hipError_t hipModuleLoadDataEx(hipModule_t *module, const void *image, unsigned count, hipJitOption *options,
                                      void **values) {
  const unsigned char *elf = image;
  if (memcmp(elf, "\177ELF", 4)) return failure(hipErrorInvalidImage, "the code object is not an ELF file");
  // The section table ends the file.
  uint64_t table;
  uint16_t size, number;
  memcpy(&table, elf + 40, 8), memcpy(&size, elf + 58, 2), memcpy(&number, elf + 60, 2);
  Module *loaded = malloc(sizeof *loaded);
  loaded->id = new_id();
  int code = callbacks.load(image, table + (uint64_t)size * number, loaded->id);
  if (code) return free(loaded), result(code);
  return *module = (hipModule_t)loaded, result(hipSuccess);
}

EXPORT hipError_t hipModuleLoadData(hipModule_t *module, const void *image) {
  return hipModuleLoadDataEx(module, image, 0, NULL, NULL);
}

// Functions of a module stay valid: whoever holds one may still launch it.
EXPORT hipError_t hipModuleUnload(hipModule_t module) { return result(hipSuccess); }

EXPORT hipError_t hipModuleGetFunction(hipFunction_t *function, hipModule_t module, const char *name) {
  Function *found = calloc(1, sizeof *found);
  found->id = new_id();
  int code = callbacks.function(((Module *)module)->id, name, found->id, &found->attributes);
  if (code) return free(found), result(code);
  return *function = (hipFunction_t)found, result(hipSuccess);
}

EXPORT hipError_t hipFuncGetAttribute(int *value, hipFunction_attribute attribute, hipFunction_t function) {
  const FunctionAttributes *attributes = &((Function *)function)->attributes;
  switch (attribute) {
  case HIP_FUNC_ATTRIBUTE_NUM_REGS: *value = attributes->number_of_registers; break;
  case HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = attributes->private_bytes; break;
  case HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = attributes->max_threads; break;
  case HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = attributes->shared_bytes; break;
  default: return failure(hipErrorInvalidValue, "the virtual GPU does not know this attribute of a function");
  }
  return result(hipSuccess);
}

// ---------------------------------------------------------------------------------------------- launches
static hipError_t launch(hipFunction_t function, const unsigned grid[3], const unsigned block[3], unsigned shared,
                         void *stream, void **params) {
  char text[512];
  for (int axis = 0; axis < 3; axis++) {
    if (!grid[axis] || !block[axis])
      return failure(hipErrorInvalidConfiguration, "invalid configuration argument: an empty grid or block");
    if ((uint64_t)grid[axis] * block[axis] > UINT32_MAX) {
      snprintf(text, sizeof text, "invalid configuration argument: the grid has %u x %u threads on axis %d, a "
               "dispatch at most 2^32 - 1", grid[axis], block[axis], axis);
      return failure(hipErrorInvalidConfiguration, text);
    }
  }
  const FunctionAttributes *attributes = &((Function *)function)->attributes;
  uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
  if (threads > (uint64_t)attributes->max_threads) {
    snprintf(text, sizeof text, "invalid configuration argument: a workgroup of %lu threads of a kernel compiled "
             "for at most %d", threads, attributes->max_threads);
    return failure(hipErrorInvalidConfiguration, text);
  }
  if ((size_t)shared + attributes->shared_bytes > properties.sharedMemPerBlock) {
    snprintf(text, sizeof text, "invalid argument: a workgroup needs %u bytes of LDS, a compute unit of %s has %zu",
             shared + attributes->shared_bytes, properties.gcnArchName, properties.sharedMemPerBlock);
    return failure(hipErrorInvalidValue, text);
  }
  return result(callbacks.launch(((Function *)function)->id, grid, block, shared, stream, params));
}

EXPORT hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                        unsigned by, unsigned bz, unsigned shared, hipStream_t stream, void **params,
                                        void **extra) {
  if (extra) return failure(hipErrorInvalidValue, "the virtual GPU takes arguments by kernelParams only");
  return launch(function, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, shared, stream, params);
}

EXPORT hipError_t hipModuleLaunchCooperativeKernel(hipFunction_t function, unsigned gx, unsigned gy, unsigned gz,
                                                   unsigned bx, unsigned by, unsigned bz, unsigned shared,
                                                   hipStream_t stream, void **params) {
  return launch(function, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, shared, stream, params);
}

EXPORT hipError_t hipDrvLaunchKernelEx(const HIP_LAUNCH_CONFIG *config, hipFunction_t function, void **params,
                                       void **extra) {
  return failure(hipErrorInvalidValue, "invalid argument: gfx942 and gfx950 have no clusters of workgroups");
}

// The driver asks for every other function through this one.
EXPORT hipError_t hipGetProcAddress(const char *symbol, void **pointer, int version, uint64_t flags,
                                    hipDriverProcAddressQueryResult *status) {
  const char *name = strcmp(symbol, "hipGetDeviceProperties") ? symbol : "hipGetDevicePropertiesR0600";
  Dl_info here;
  dladdr((void *)&hipGetProcAddress, &here);
  void *self = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  *pointer = self ? dlsym(self, name) : NULL;
  return *pointer ? hipSuccess : hipErrorNotFound;
}
