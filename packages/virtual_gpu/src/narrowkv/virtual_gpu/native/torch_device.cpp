// torch's device "cuda" over host memory, for a CPU build of torch.
//
// Tensors have torch's own CUDA dispatch key and lie in the memory of the virtual GPU's HIP runtime. An operation on
// them runs torch's CPU kernel over the same bytes (`fallback`). The library may be loaded before or after torch's
// Python part is imported.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <unordered_map>

namespace {
using at::Tensor;
using c10::DeviceIndex;

constexpr int kHost = -1, kMaxDevices = 16;
const c10::DispatchKeySet kCudaKeys(c10::DispatchKey::CUDA), kCpuKeys(c10::DispatchKey::CPU);

int device_count = 0;
int (*allocate)(void**, size_t, int);
int (*release)(void*);
int (*is_pinned)(const void*);
int (*device_of)(const void*);

thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[kMaxDevices] = {};

DeviceIndex checked(c10::Device device) {
  const int index = device.index() < 0 ? current_device : device.index();
  TORCH_CHECK(index < device_count, "HIP error: invalid device ordinal: cuda:", index, " was asked for and the virtual "
              "GPU has ", device_count, " device", device_count == 1 ? "" : "s",
              "; TRITON_VIRTUAL_GPU_COUNT sets how many there are");
  return static_cast<DeviceIndex>(index);
}

// ------------------------------------------------------------------------------------------- allocators
void drop(void* pointer) { release(pointer); }

struct MemoryAllocator final : c10::Allocator {
  explicit MemoryAllocator(bool pinned) : pinned(pinned) {}
  c10::DataPtr allocate(size_t size) override {
    void* pointer = nullptr;
    const int status = ::allocate(&pointer, size, pinned ? kHost : current_device);
    if (pinned) {
      TORCH_CHECK(!status, "the machine has no memory for ", size, " bytes of pinned memory");
      return {pointer, pointer, &drop, at::kCPU};
    }
    TORCH_CHECK_WITH(OutOfMemoryError, !status, "HIP out of memory. Tried to allocate ", size,
                     " bytes on the virtual GPU cuda:", int(current_device));
    return {pointer, pointer, &drop, at::Device(at::kCUDA, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  const bool pinned;
} device_memory(false), pinned_memory(true);

// ---------------------------------------------------------------------------- devices, streams and events
// All work is done when a call returns: a stream is a number, an event a time.
struct Event {
  std::chrono::steady_clock::time_point time;
};

std::atomic<c10::StreamId> last_stream{0};

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  at::Device exchangeDevice(at::Device device) const override {
    const DeviceIndex old = current_device;
    current_device = checked(device);
    return at::Device(at::kCUDA, old);
  }
  at::Device getDevice() const override { return at::Device(at::kCUDA, current_device); }
  void setDevice(at::Device device) const override { current_device = checked(device); }
  void uncheckedSetDevice(at::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(device_count); }

  c10::Stream getStream(at::Device device) const noexcept override {
    const DeviceIndex index = device.index() < 0 ? current_device : device.index();
    return c10::Stream(c10::Stream::UNSAFE, at::Device(at::kCUDA, index), current_stream[index]);
  }
  c10::Stream getDefaultStream(at::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, at::Device(at::kCUDA, checked(device)));
  }
  c10::Stream getNewStream(at::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, at::Device(at::kCUDA, checked(device)), ++last_stream);
  }
  c10::Stream getStreamFromGlobalPool(at::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    const c10::Stream old = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}

  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->time = std::chrono::steady_clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    TORCH_CHECK(first && second, "Both events must be recorded before calculating elapsed time.");
    const std::chrono::duration<double, std::milli> passed =
        static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return passed.count();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, DeviceGuard);

// What torch's own C++ asks a GPU build for.
struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasROCM() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count); }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { ::current_device = checked(at::Device(at::kCUDA, device)); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const DeviceIndex old = ::current_device;
    setCurrentDevice(device);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? ::current_device : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Device getDeviceFromPtr(void* pointer) const override {
    const int device = device_of(pointer);
    TORCH_CHECK(device >= 0, "the pointer is not to memory of the virtual GPU");
    return at::Device(at::kCUDA, static_cast<DeviceIndex>(device));
  }
};

// torch makes its hooks once, when it is first asked about CUDA, and never looks again. The object has no state, so
// another of the same interface can take its place.
void replace_hooks() {
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface), "hooks have no state");
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks;
}

// -------------------------------------------------------------------------------------------- operations
using TensorImpl = c10::intrusive_ptr<c10::TensorImpl>;

TensorImpl like(const Tensor& tensor, TensorImpl impl) {
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  impl->_set_conj(tensor.is_conj());
  impl->_set_neg(tensor.is_neg());
  return impl;
}

TensorImpl same_view(const Tensor& tensor, c10::Storage storage, c10::DispatchKeySet keys) {
  return like(tensor, c10::make_intrusive<c10::TensorImpl>(std::move(storage), keys, tensor.dtype()));
}

// A view of `base`, which is an inference tensor only if `base` is one, in inference mode too.
TensorImpl view_of(const Tensor& base, const Tensor& tensor) {
  return like(tensor, c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                           base.key_set(), tensor.dtype()));
}

// The CPU tensors that stand for the GPU tensors of one call, over the same bytes.
class Aliases {
 public:
  explicit Aliases(const char* operation) : operation_(operation) {}

  Tensor to_cpu(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) {
      cpu_operand_ |= tensor.defined() && tensor.is_cpu() && tensor.dim() > 0;
      return tensor;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, operation_, ": the virtual GPU has no ",
                                tensor.layout(), " tensors, only strided ones");
    device_ = device_ < 0 ? tensor.get_device() : device_;
    TORCH_CHECK(device_ == tensor.get_device() || may_mix(), "Expected all tensors to be on the same device, but found "
                "at least two devices, cuda:", device_, " and cuda:", tensor.get_device(), "! (", operation_, ")");
    auto* key = tensor.storage().unsafeGetStorageImpl();
    auto found = cpu_of_.find(key);
    if (found == cpu_of_.end()) {
      c10::DataPtr bytes(tensor.storage().mutable_data(), at::kCPU);  // `pairs_` keeps their owner
      c10::Storage cpu(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(bytes),
                       at::getCPUAllocator(), true);
      gpu_of_.emplace(cpu.unsafeGetStorageImpl(), tensor);
      found = cpu_of_.emplace(key, cpu).first;
    }
    Tensor alias(same_view(tensor, found->second, kCpuKeys));
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    original_.emplace(alias.unsafeGetTensorImpl(), tensor);
    pairs_.emplace_back(tensor, alias);
    return alias;
  }

  Tensor to_gpu(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, operation_, ": the virtual GPU has no ",
                                tensor.layout(), " tensors, only strided ones");
    auto same = original_.find(tensor.unsafeGetTensorImpl());
    if (same != original_.end()) return same->second;
    auto view = gpu_of_.find(tensor.storage().unsafeGetStorageImpl());
    if (view != gpu_of_.end()) return Tensor(view_of(view->second, tensor));
    const c10::OptionalDeviceGuard guard(target());
    const size_t size = tensor.storage().nbytes();
    c10::Storage storage(c10::Storage::use_byte_size_t(), size, device_memory.allocate(size), &device_memory, true);
    if (size) std::memcpy(storage.mutable_data(), tensor.storage().data(), size);
    return Tensor(same_view(tensor, storage, kCudaKeys));
  }

  // The GPU tensors follow what the CPU kernel did to their aliases' sizes and storages: out= and resize_.
  void write_back() {
    for (auto& [gpu, cpu] : pairs_) {
      const c10::Storage& now = cpu.storage();
      if (now.data() != gpu.storage().data() || now.nbytes() != gpu.storage().nbytes()) {
        const c10::OptionalDeviceGuard guard(gpu.device());
        auto fresh = device_memory.allocate(now.nbytes());
        if (now.nbytes()) std::memcpy(fresh.get(), now.data(), now.nbytes());
        gpu.storage().set_data_ptr_noswap(std::move(fresh));
        gpu.storage().set_nbytes(now.nbytes());
      }
      if (cpu.sizes() != gpu.sizes() || cpu.strides() != gpu.strides() || cpu.storage_offset() != gpu.storage_offset())
        gpu.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }

  void check_devices() const {
    TORCH_CHECK(device_ < 0 || !cpu_operand_ || may_mix(), "Expected all tensors to be on the same device, but found "
                "at least two devices, cuda:", device_, " and cpu! (", operation_, ")");
  }

  void set_target(at::Device device) { target_ = device; }
  bool has_gpu() const { return device_ >= 0; }

 private:
  // As on a GPU: copies, and indices, which may be on the CPU.
  bool may_mix() const {
    return std::strstr(operation_, "copy") || std::strstr(operation_, "::index") ||
           std::strstr(operation_, "index_put") || std::strstr(operation_, "::set_");
  }
  at::Device target() const {
    if (target_) return *target_;
    return at::Device(at::kCUDA, device_ < 0 ? current_device : static_cast<DeviceIndex>(device_));
  }

  const char* operation_;
  int device_ = -1;
  bool cpu_operand_ = false;
  std::optional<at::Device> target_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> cpu_of_;
  std::unordered_map<c10::StorageImpl*, Tensor> gpu_of_;
  std::unordered_map<c10::TensorImpl*, Tensor> original_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;
};

// Runs the CPU kernel of an operation. The results lie on the device that the call names, or that its operands are on.
void fallback(const c10::OperatorHandle& operation, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  Aliases aliases(schema.name().c_str());
  bool results_on_gpu = true;
  for (size_t i = 0; i < count; i++) {
    c10::IValue& value = (*stack)[begin + i];
    if (value.isTensor()) {
      value = aliases.to_cpu(value.toTensor());
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (Tensor& tensor : tensors) tensor = aliases.to_cpu(tensor);
      value = c10::IValue(std::move(tensors));
    } else if (value.isList() && schema.arguments()[i].type()->isSubtypeOf(*c10::ListType::ofOptionalTensors())) {
      c10::List<std::optional<Tensor>> tensors;
      for (const c10::IValue& item : value.toListRef())
        tensors.push_back(item.isNone() ? std::optional<Tensor>() : aliases.to_cpu(item.toTensor()));
      value = c10::IValue(std::move(tensors));
    } else if (value.isDevice()) {
      results_on_gpu = value.toDevice().is_cuda();
      if (results_on_gpu) {
        aliases.set_target(at::Device(at::kCUDA, checked(value.toDevice())));
        value = c10::IValue(at::Device(at::kCPU));
      }
    }
  }
  aliases.check_devices();
  operation.redispatchBoxed(kCpuKeys, stack);
  aliases.write_back();
  if (!results_on_gpu) return;
  const size_t results = schema.returns().size(), first = stack->size() - results;
  for (size_t i = 0; i < results; i++) {
    c10::IValue& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = aliases.to_gpu(value.toTensor());
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (Tensor& tensor : tensors) tensor = aliases.to_gpu(tensor);
      value = c10::IValue(std::move(tensors));
    }
  }
}

bool is_narrow(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() &&
         (value.toTensor().scalar_type() == at::kHalf || value.toTensor().scalar_type() == at::kBFloat16);
}

// Runs an operation in fp32, because the CPU kernel sums 16-bit values in 16 bits and a GPU's in fp32. The first
// `narrowed` results take the operands' type; the others, means and deviations, stay in fp32 as on a GPU.
template <size_t narrowed>
void in_float(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t count = operation.schema().arguments().size(), results = operation.schema().returns().size();
  std::optional<at::ScalarType> narrow;
  for (size_t i = stack->size() - count; i < stack->size(); i++) {
    c10::IValue& value = (*stack)[i];
    if (!is_narrow(value)) continue;
    narrow = value.toTensor().scalar_type();
    value = value.toTensor().to(at::kFloat);
  }
  fallback(operation, keys, stack);
  for (size_t i = 0; narrow && i < std::min(results, narrowed); i++) {
    c10::IValue& value = (*stack)[stack->size() - results + i];
    if (value.isTensor() && value.toTensor().defined()) value = value.toTensor().to(*narrow);
  }
}

void refuse_layout(const c10::OperatorHandle& operation, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, operation.schema().name(), ": the virtual GPU has no sparse or quantized tensors, "
                              "only strided ones");
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == at::kStrided, "the virtual GPU has no ",
                              c10::layout_or_default(layout), " tensors, only strided ones");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_memory, kCudaKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_memory, kCudaKeys, c10::dtype_or_default(dtype));
}

Tensor& set_storage(Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "set_: the tensor is on ", self.device(), " and the storage on ",
              source.device());
  auto* impl = self.unsafeGetTensorImpl();
  const size_t bytes = at::detail::computeStorageNbytes(size, stride, self.itemsize(), offset);
  TORCH_CHECK(bytes <= source.nbytes(), "set_: a storage of ", source.nbytes(), " bytes is too small for ", bytes);
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  const int64_t count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Scalar item(const Tensor& tensor) {
  Aliases aliases("aten::_local_scalar_dense");
  return aliases.to_cpu(tensor).item();
}

// torch counts integers on a GPU and not on the CPU.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  Aliases aliases("aten::histc");
  const Tensor values = aliases.to_cpu(self);
  const bool whole = at::isIntegralType(self.scalar_type(), true);
  return aliases.to_gpu(at::histc(whole ? values.to(at::kDouble) : values, bins, low, high).to(self.scalar_type()));
}

// scaled_dot_product_attention becomes matrix products and a softmax, which have gradients.
int64_t choose_math_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                              std::optional<double>, bool) {
  return static_cast<int64_t>(at::SDPBackend::math);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, SparseCUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_layout>());
}
TORCH_LIBRARY_IMPL(_, SparseCsrCUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_layout>());
}
TORCH_LIBRARY_IMPL(_, QuantizedCUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_layout>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_local_scalar_dense", item);
  library.impl("histc", histc);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  // torch has one kernel of these for all devices, which ends in a table of kernels by device; the table has no entry
  // for CUDA in a CPU build.
  for (const char* name : {
           "copy_", "_copy_from", "isin.Tensor_Tensor", "sort", "sort.stable", "repeat_interleave.Tensor", "embedding",
           "embedding_dense_backward", "mean", "cumsum", "cumprod", "index_put_", "index_put", "_index_put_impl_",
           "_log_softmax", "_softmax", "nan_to_num", "kthvalue", "norm.ScalarOpt_dim"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  for (const char* name : {"native_layer_norm", "native_group_norm"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_float<1>>());
  for (const char* name : {"native_layer_norm_backward", "native_group_norm_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_float<3>>());
}
}  // namespace

extern "C" void virtual_gpu_torch_setup(const char* runtime, int devices) {
  void* library = dlopen(runtime, RTLD_LAZY | RTLD_GLOBAL);
  allocate = reinterpret_cast<decltype(allocate)>(dlsym(library, "virtual_gpu_allocate"));
  release = reinterpret_cast<decltype(release)>(dlsym(library, "virtual_gpu_release"));
  is_pinned = reinterpret_cast<decltype(is_pinned)>(dlsym(library, "virtual_gpu_is_pinned"));
  device_of = reinterpret_cast<decltype(device_of)>(dlsym(library, "virtual_gpu_device_of"));
  device_count = devices;
  c10::SetAllocator(c10::DeviceType::CUDA, &device_memory, 0);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_math_attention);
  replace_hooks();
}

extern "C" int virtual_gpu_get_device() { return current_device; }

extern "C" int virtual_gpu_exchange_device(int device) {
  const int old = current_device;
  if (device >= device_count) return -2;
  if (device >= 0) current_device = static_cast<DeviceIndex>(device);
  return old;
}

extern "C" int64_t virtual_gpu_get_stream(int device) { return current_stream[device]; }
extern "C" void virtual_gpu_set_stream(int device, int64_t stream) { current_stream[device] = stream; }
