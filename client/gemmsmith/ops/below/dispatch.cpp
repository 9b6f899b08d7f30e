/* torch's `mm`, `bmm`, `_int_mm`, `addmm` of a bias and `_grouped_mm` by tuned kernels, below autograd
 * and without Python.
 *
 * Takes the place of their kernels for one dispatch key, so that forward and backward products of
 * unchanged code come here, from any thread. Whatever has no plan goes on to the kernel that was
 * there, by torch's C shim, which does not dispatch. A product is decided once by `resolve`, in
 * Python, and remembered by types, device, sizes, strides and torch's settings; after that a call
 * takes no lock and allocates nothing but the output and the kernel's workspace, both from torch's
 * allocator.
 *
 * Of torch its C shim is used (torch/csrc/inductor/aoti_torch/c/shim.h) and functions that tell its
 * settings, by addresses that Python looks up: the shared object is linked to nothing and outlives
 * torch's versions. The shim passes no Scalar, and cannot call torch's grouped products everywhere, so
 * these operators are overridden in Python (`gemmsmith.ops.below.adding`, `experts`). An override gets
 * a second entry here, for compiled callers (`gs_dispatch_enter`). It never enters Python, and makes no
 * handles, which in a small model cost more than the decision.
 */
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <typeinfo>

#include <cxxabi.h>

namespace {

using Tensor = void*;                                           /* AtenTensorHandle */
using Stable = void (*)(uint64_t* stack, uint64_t, uint64_t);   /* StableIValue is 64 bits */

constexpr int kDims = 3;
constexpr int kWords = 3 + 4 * kDims;
constexpr int kBuckets = 4096;
constexpr int64_t kMostDecisions = 1 << 16; /* sizes without end must not fill the memory */
constexpr int64_t kMostGroups = 1 << 16;
constexpr int kArgumentsBytes = 1024;       /* room for gs_arguments, whatever it grows to */
/* c10::ScalarType */
constexpr int32_t kByte = 0, kInt = 3, kLong = 4, kFloat = 6, kDouble = 7;
/* at::Float32Backend::CUDA, at::Float32Op::MATMUL, at::Float32Precision::TF32 */
constexpr int32_t kCudaBackend = 1, kMatmulOp = 3, kTf32Precision = 2;
constexpr int32_t kCpu = 0, kCuda = 1; /* c10::DeviceType */

struct SourceLocation { /* c10's */
  const char* function;
  const char* file;
  uint32_t line;
};

/* c10::KernelFunction begins so, and is smaller. `layouts_hold` checks it. */
struct KernelFunction {
  void *functor, *boxed, *unboxed, *symbolic;
  void* further[28];
};

struct NoSignature { /* std::nullopt of a c10::impl::CppSignature, which is one pointer */
  const void* type;
  bool is_there;
};

/* What C++ returns by an address that the caller passes. */
template <class Content>
struct Returned : Content {
  Returned() = default;
  explicit Returned(Content content) : Content(content) {}
  Returned(Returned const&) = delete;
  ~Returned() {}
};

struct TensorContent { /* at::Tensor's */
  void* pointer;
};

struct OptionalTensor { /* std::optional<at::Tensor> */
  TensorContent content;
  bool is_there;
  Tensor handle() const { return is_there ? const_cast<TensorContent*>(&content) : nullptr; }
};

struct OptionalType { /* std::optional<c10::ScalarType> */
  int8_t type;
  bool is_there;
};

struct alignas(16) ScalarContent { /* c10::Scalar's, which is smaller. `layouts_hold` checks it. */
  int32_t type;
  int64_t padding;
  int64_t value;
  int64_t further[5];
};

}  // namespace

extern "C" {

/* torch's shim, in the order of dispatch.py's list. Statuses: 0 is success. */
struct gs_torch {
  int32_t (*get_dim)(Tensor, int64_t*);
  int32_t (*get_sizes)(Tensor, int64_t**);
  int32_t (*get_strides)(Tensor, int64_t**);
  int32_t (*get_dtype)(Tensor, int32_t*);
  int32_t (*get_device_type)(Tensor, int32_t*);
  int32_t (*get_device_index)(Tensor, int32_t*);
  int32_t (*get_data_ptr)(Tensor, void**);
  int32_t (*empty_strided)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t,
                           Tensor*);
  int32_t (*delete_tensor)(Tensor);
  int32_t (*new_handle)(Tensor, Tensor*); /* a further one of the same tensor */
  int32_t (*library_init)(const char*, const char*, const char*, uint32_t, void**);
  int32_t (*library_impl)(void*, const char*, Stable);
  int32_t (*mm_out)(Tensor, Tensor, Tensor);
  int32_t (*bmm_out)(Tensor, Tensor, Tensor);
  /* Of torch's C++: at::globalContext, and of at::Context what forbids kernels. The last two are
   * booleans in some versions and enumerations in others: only whether they changed counts. */
  const void* (*context)();
  bool (*deterministic)(const void* context);
  uint8_t (*bf16_reduction)(const void* context);
  uint8_t (*fp16_reduction)(const void* context);
  int32_t (*get_stream)(int32_t, void**);
  /* Null where this torch has no such function: then what needs it stays torch's. */
  int32_t (*int_mm_out)(Tensor, Tensor, Tensor);
  int32_t (*mm_dtype_out)(Tensor, Tensor, Tensor, int32_t);
  /* Of torch's C++: at::Context::float32Precision and at::NoTF32Guard's. */
  int32_t (*float32_precision)(const void* context, int32_t backend, int32_t op);
  bool (*no_tf32)();
  /* Of torch's C++: the constructor of c10::Error, and c10::OutOfMemoryError's virtual functions
   * and type. */
  void (*make_error)(void* self, SourceLocation, std::string);
  const void* const* out_of_memory_functions;
  std::type_info* out_of_memory_type;
  /* Of torch's C++: c10::KernelFunction's dumpState, torch::CppFunction's constructor and destructor,
   * torch::Library's _impl, and the reader of a tensor's only element; the shim's end of a library. */
  std::string (*state_of)(KernelFunction const*);
  void (*make_function)(void* self, KernelFunction* moved, NoSignature, void** no_schema);
  void (*delete_function)(void* self);
  void* (*add_function)(void* library, const char* name, void* function, int32_t registers);
  Returned<ScalarContent> (*element_of)(Tensor);
  int32_t (*delete_library)(void*);
};

/* A product's kernel and everything of its launch that does not change. Python keeps it alive. */
struct gs_plan {
  int32_t (*run)(int32_t, const void* arguments, void* workspace, void* stream); /* gs_run */
  int32_t kernel;
  int32_t dtype; /* of the output, as torch numbers it */
  int64_t workspace;
  uint64_t mask_a, mask_b, mask_d; /* bits that aligned addresses have not */
  /* Of gs_arguments, in bytes: the pack's ABI is Python's. */
  uint64_t size, at_a, at_b, at_c, at_d, at_bias, at_offsets;
  unsigned char arguments[kArgumentsBytes]; /* `size` of them are used */
};

/* The plan for a product; null: torch computes it under these settings; 1: torch, and ask again next
 * time; 2: the product is refused, for the reason that was passed to gs_dispatch_refuse; 3: Python
 * computes it, because operands are copied first. The last word is no part of the question. */
typedef const gs_plan* (*gs_resolve)(const int64_t words[kWords]);
/* Computes a product by Python, in `out`. All handles are Python's. 0: done; 1: torch computes it; 2:
 * it is refused. */
typedef int32_t (*gs_by_python)(Tensor a, Tensor b, Tensor out, int32_t dtype);
/* A grouped product by Python, which reports it; null: torch computes it. All handles are the taker's. */
typedef Tensor (*gs_grouped_by_python)(Tensor a, Tensor b, Tensor offs);
typedef void (*gs_failed)(const gs_plan*, int32_t status);

}  // extern "C"

namespace {

struct Decision;

const gs_plan* const kAskAgain = reinterpret_cast<const gs_plan*>(1);
const gs_plan* const kRefused = reinterpret_cast<const gs_plan*>(2);
const gs_plan* const kByPython = reinterpret_cast<const gs_plan*>(3);

gs_torch torch_;
gs_resolve resolve_;
gs_failed failed_;
gs_by_python by_python_;
gs_grouped_by_python grouped_by_python_;
const int32_t* watched_; /* Python's: whether products are reported, which Python alone does */
int32_t device_type_;
std::string dispatch_key_;
/* Of plain products and of grouped ones, as they are switched on and decided apart. */
std::atomic<bool> enabled_[2] = {};
std::atomic<uint32_t> generation_[2] = {}; /* of decisions: a key finds those of its own alone */
std::atomic<bool> strict_{false}; /* torch must not compute what has a plan */
thread_local std::string refusal_;
std::atomic<Decision*> decisions_[kBuckets];
std::atomic<int64_t> decided_{0};

/* An owned tensor handle. */
class Owned {
 public:
  explicit Owned(Tensor handle = nullptr) : handle_(handle) {}
  ~Owned() {
    if (handle_) torch_.delete_tensor(handle_);
  }
  Owned(Owned const&) = delete;
  Owned& operator=(Owned const&) = delete;
  Tensor get() const { return handle_; }
  Tensor* address() { return &handle_; }
  Tensor release() {
    Tensor handle = handle_;
    handle_ = nullptr;
    return handle;
  }

 private:
  Tensor handle_;
};

struct View {
  int64_t dim = 0;
  int64_t *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0, device_type = 0, device = 0;

  explicit View(Tensor tensor) {
    torch_.get_dim(tensor, &dim);
    torch_.get_sizes(tensor, &sizes);
    torch_.get_strides(tensor, &strides);
    torch_.get_dtype(tensor, &dtype);
    torch_.get_device_type(tensor, &device_type);
    torch_.get_device_index(tensor, &device);
  }
  std::string shape() const {
    std::string text;
    for (int64_t i = 0; i < dim; ++i) text += (i ? "x" : "") + std::to_string(sizes[i]);
    return text;
  }
};

/* torch's settings that forbid kernels, as Python's `settings` lists them, but TF32's. */
int64_t settings() {
  const void* context = torch_.context();
  return int64_t{torch_.deterministic(context)} | int64_t{torch_.bf16_reduction(context)} << 8 |
         int64_t{torch_.fp16_reduction(context)} << 16;
}

struct Key {
  int64_t words[kWords] = {};
  /* `groups` is 0 where there are none; of a symmetric product, right is left transposed. */
  Key(View const& left, View const& right, int32_t dtype, bool bias = false, int64_t groups = 0,
      bool symmetric = false) {
    words[0] = left.dim | right.dim << 4 | int64_t{left.dtype} << 8 | int64_t{dtype} << 16 |
               int64_t{bias} << 24 | int64_t{symmetric} << 25 | groups << 32;
    words[1] = left.device;
    words[kWords - 1] = settings() | int64_t{generation_[groups != 0].load()} << 32;
    put(2, left);
    put(2 + 2 * kDims, right);
  }
  void put(int at, View const& view) {
    for (int i = 0; i < view.dim; ++i) {
      words[at + i] = view.sizes[i];
      words[at + kDims + i] = view.strides[i];
    }
  }
  uint64_t hash() const {
    uint64_t h = 0x9e3779b97f4a7c15u;
    for (int64_t word : words) h = (h ^ static_cast<uint64_t>(word)) * 0xff51afd7ed558ccdu, h ^= h >> 32;
    return h;
  }
  bool operator==(Key const& other) const {
    return std::memcmp(words, other.words, sizeof words) == 0;
  }
};

struct Decision {
  Key key;
  std::atomic<const gs_plan*> plan;
  Decision* next;
};

/* Which operator of torch's a product is, by the element type of its output. */
enum class Output {
  kSame,  /* mm, bmm: that of the operands */
  kInt32, /* _int_mm */
  kAsked, /* mm.dtype: an argument */
};

/* Whether torch itself would multiply FP32 matrices in TF32 now, in this thread. */
bool allows_tf32() {
  return torch_.float32_precision && torch_.no_tf32 && !torch_.no_tf32() &&
         torch_.float32_precision(torch_.context(), kCudaBackend, kMatmulOp) == kTf32Precision;
}

bool may_be_ours(View const& left, bool is_grouped = false) {
  return enabled_[is_grouped].load(std::memory_order_relaxed) && left.device_type == device_type_ &&
         (left.dtype != kFloat || allows_tf32());
}

uint64_t address(Tensor tensor) {
  void* pointer = nullptr;
  torch_.get_data_ptr(tensor, &pointer);
  return reinterpret_cast<uint64_t>(pointer);
}

/* Whether b is a's transposed view, as `gemmsmith.program.calls.is_mirrored` knows it, and `out` elsewhere. */
template <int kDim>
bool is_mirrored(View const& left, Tensor a, View const& right, Tensor b, Tensor out) {
  constexpr int kRow = kDim - 2, kColumn = kDim - 1;
  if (left.sizes[kRow] != right.sizes[kColumn] || left.strides[kRow] != right.strides[kColumn] ||
      left.strides[kColumn] != right.strides[kRow] ||
      (kDim == 3 && left.strides[0] != right.strides[0])) {
    return false;
  }
  const uint64_t at = address(a);
  return at == address(b) && !(out && at == address(out));
}

/* Whether these are matrices, or with `dim` of 3 batches of them, that can be multiplied. */
bool fits(View const& a, View const& b, int dim) {
  return a.dim == dim && b.dim == dim && a.sizes[dim - 1] == b.sizes[dim - 2] &&
         (dim == 2 || a.sizes[0] == b.sizes[0]) && a.dtype == b.dtype &&
         a.device_type == b.device_type && a.device == b.device;
}

/* If they do not fit, what torch's own kernel would say first; the shim tells no reason. */
void check(View const& a, View const& b, int dim) {
  auto matrix = [dim](const char* flat, const char* batch, View const& view) {
    if (view.dim == dim) return;
    throw std::runtime_error(
        dim == 2 ? std::string(flat) + " must be a matrix, got " + std::to_string(view.dim) +
                       "-D tensor"
                 : std::string(batch) + " must be a 3D tensor");
  };
  matrix("mat1", "batch1", a);
  matrix("mat2", "batch2", b);
  if (dim == 2 && a.sizes[1] != b.sizes[0]) {
    throw std::runtime_error("mat1 and mat2 shapes cannot be multiplied (" + a.shape() +
                             " and " + b.shape() + ")");
  }
  if (dim == 3 && (a.sizes[0] != b.sizes[0] || a.sizes[2] != b.sizes[1])) {
    throw std::runtime_error("Expected size for first two dimensions of batch2 tensor to be: [" +
                             std::to_string(a.sizes[0]) + ", " + std::to_string(a.sizes[2]) +
                             "] but got: [" + std::to_string(b.sizes[0]) + ", " +
                             std::to_string(b.sizes[1]) + "].");
  }
  if (a.dtype != b.dtype) {
    throw std::runtime_error("mat1 and mat2 must have the same dtype");
  }
  if (a.device_type != b.device_type || a.device != b.device) {
    throw std::runtime_error("Expected all tensors to be on the same device, but found two");
  }
}

/* The sizes that torch's `_int_mm` takes on CUDA; kernels may take others. */
void check_int(View const& a, View const& b) {
  if (device_type_ != kCuda) return;
  auto multiple = [](const char* what, int64_t size) {
    if (size > 0 && size % 8 == 0) return;
    throw std::runtime_error(std::string(what) +
                             " needs to be greater than 0 and a multiple of 8, but got " +
                             std::to_string(size));
  };
  if (a.sizes[0] <= 16) {
    throw std::runtime_error("self.size(0) needs to be greater than 16, but got " +
                             std::to_string(a.sizes[0]));
  }
  multiple("self.size(1)", a.sizes[1]);
  multiple("mat2.size(1)", b.sizes[1]);
}

Decision* find(Key const& key, std::atomic<Decision*>& bucket) {
  Decision* at = bucket.load(std::memory_order_acquire);
  while (at && !(at->key == key)) at = at->next;
  return at;
}

/* Torch's answer may come more than once, if threads ask at once: the plans are the same. */
const gs_plan* decide(Key const& key, Decision** where) {
  std::atomic<Decision*>& bucket = decisions_[key.hash() % kBuckets];
  if (Decision* known = find(key, bucket)) {
    *where = known;
    return known->plan.load(std::memory_order_acquire);
  }
  const bool is_full = decided_.load(std::memory_order_relaxed) >= kMostDecisions;
  if (is_full && !strict_.load()) return nullptr;
  const gs_plan* plan = resolve_(key.words);
  if (plan == kRefused) throw std::runtime_error("gemmsmith: " + refusal_);
  if (plan == kAskAgain) return nullptr;
  if (is_full) return plan;
  Decision* made = new (std::nothrow) Decision{key, {plan}, bucket.load()};
  if (!made) return plan;
  while (!bucket.compare_exchange_weak(made->next, made, std::memory_order_release)) {
  }
  decided_.fetch_add(1, std::memory_order_relaxed);
  *where = made;
  return plan;
}

/* What a kernel has beside a, b and d: a row that it adds, or where its groups end. */
struct Beside {
  uint64_t gs_plan::*at = nullptr;
  Tensor tensor = nullptr;
};

bool launch(const gs_plan* plan, Decision* decision, Tensor a, Tensor b, Tensor out,
            int32_t device, Beside beside = {}) {
  uint64_t at_a = address(a), at_b = address(b), at_d = address(out);
  if ((at_a & plan->mask_a) | (at_b & plan->mask_b) | (at_d & plan->mask_d)) return false;
  alignas(16) unsigned char arguments[kArgumentsBytes];
  std::memcpy(arguments, plan->arguments, plan->size);
  std::memcpy(arguments + plan->at_a, &at_a, 8);
  std::memcpy(arguments + plan->at_b, &at_b, 8);
  std::memcpy(arguments + plan->at_c, &at_d, 8);
  std::memcpy(arguments + plan->at_d, &at_d, 8);
  if (beside.tensor) {
    uint64_t where = address(beside.tensor);
    std::memcpy(arguments + plan->*beside.at, &where, 8);
  }
  /* Freed on return, but to this stream only: the next owner's work comes after ours. */
  Owned workspace;
  void* scratch = nullptr;
  if (plan->workspace) {
    const int64_t one = 1;
    if (torch_.empty_strided(1, &plan->workspace, &one, kByte, device_type_, device,
                             workspace.address()) != 0) {
      return false;
    }
    scratch = reinterpret_cast<void*>(address(workspace.get()));
  }
  void* stream = nullptr;
  if (torch_.get_stream(device, &stream) != 0) return false;
  int32_t status = plan->run(plan->kernel, arguments, scratch, stream);
  if (status == 0) return true;
  failed_(plan, status);
  if (decision) decision->plan.store(nullptr, std::memory_order_release);
  return false;
}

/* A product that has a plan and cannot run it as it is: torch must not compute it if it must have the
 * plan's bits. Whether Python has computed it in `out`. */
bool by_python(Tensor a, Tensor b, Tensor out, int32_t dtype) {
  if (!strict_.load(std::memory_order_relaxed)) return false;
  Owned left, right, into;
  if (torch_.new_handle(a, left.address()) != 0 || torch_.new_handle(b, right.address()) != 0 ||
      torch_.new_handle(out, into.address()) != 0) {
    throw std::runtime_error("gemmsmith: torch could not hand on a product's operands");
  }
  const int32_t status = by_python_(left.release(), right.release(), into.release(), dtype);
  if (status == 2) throw std::runtime_error("gemmsmith: " + refusal_);
  return status == 0;
}

/* Whether `out` is what kernels write: contiguous, of the right size, type and device. */
bool writable(View const& out, View const& a, const int64_t* size, const int64_t* stride, int dim,
              int32_t dtype) {
  if (out.dim != dim || out.dtype != dtype || out.device_type != a.device_type ||
      out.device != a.device) {
    return false;
  }
  return std::memcmp(out.sizes, size, dim * sizeof *size) == 0 &&
         std::memcmp(out.strides, stride, dim * sizeof *stride) == 0;
}

/* torch's own product into `out`; a status of its shim. */
template <int kDim, Output kOutput>
int32_t fallback(Tensor out, View const& left, Tensor a, View const& right, Tensor b,
                 int32_t dtype) {
  if (kOutput == Output::kInt32) {
    check_int(left, right);
    return torch_.int_mm_out(out, a, b);
  }
  if (kOutput == Output::kAsked) {
    if (!torch_.mm_dtype_out) throw std::runtime_error("torch has no mm with out_dtype here");
    return torch_.mm_dtype_out(out, a, b, dtype);
  }
  return (kDim == 2 ? torch_.mm_out : torch_.bmm_out)(out, a, b);
}

/* The shim says only that an allocation failed. Programs catch torch's own error, so it is made from
 * torch's parts: it is a c10::Error with other virtual functions. */
[[noreturn]] void throw_out_of_memory(int32_t device_type, double bytes) {
  char text[128];
  snprintf(text, sizeof text, "%s out of memory. Tried to allocate %.2f GiB for a product's output.",
           device_type == kCuda ? "CUDA" : "CPU", bytes / (1 << 30));
  if (!torch_.make_error || !torch_.out_of_memory_functions || !torch_.out_of_memory_type) {
    throw std::runtime_error(text);
  }
  constexpr size_t kErrorBytes = 1024; /* room for a c10::Error, of about 150 bytes */
  void* error = abi::__cxa_allocate_exception(kErrorBytes);
  torch_.make_error(error, {__func__, __FILE__, __LINE__}, text);
  /* A table of virtual functions begins after two words; its first function destroys. */
  const void* const* functions = torch_.out_of_memory_functions + 2;
  *static_cast<const void* const**>(error) = functions;
  abi::__cxa_throw(error, torch_.out_of_memory_type,
                   reinterpret_cast<void (*)(void*)>(const_cast<void*>(functions[0])));
}

/* Sizes and strides of the product of these, contiguous as torch's are, also where there is nothing. */
template <int kDim>
struct Extents {
  int64_t size[kDims], stride[kDims];
  Extents(View const& left, View const& right) {
    size[0] = left.sizes[0];
    size[1] = kDim == 2 ? right.sizes[1] : left.sizes[1];
    size[2] = right.sizes[kDim - 1];
    stride[2] = 1;
    stride[1] = kDim == 2 ? 1 : std::max<int64_t>(size[2], 1);
    stride[0] = stride[1] * std::max<int64_t>(size[1], 1);
  }
  int32_t empty(View const& left, int32_t dtype, Tensor* made) const {
    return torch_.empty_strided(kDim, size, stride, dtype, left.device_type, left.device, made);
  }
};

/* `a · b` in `into` or, where that is null, in a new tensor, which is the caller's. Null: torch is to
 * compute it. */
template <int kDim>
Tensor multiply(View const& left, View const& right, Tensor a, Tensor b, Tensor into,
                int32_t dtype) {
  if (!may_be_ours(left)) return nullptr;
  const bool symmetric = dtype == left.dtype && is_mirrored<kDim>(left, a, right, b, into);
  Decision* decision = nullptr;
  const gs_plan* plan = decide(Key(left, right, dtype, false, 0, symmetric), &decision);
  if (!plan) return nullptr;
  const Extents<kDim> extents(left, right);
  Owned made;
  if (!into && extents.empty(left, dtype, made.address()) != 0) return nullptr;
  Tensor out = into ? into : made.get();
  const bool is_launched =
      plan != kByPython &&
      (!into || writable(View(into), left, extents.size, extents.stride, kDim, plan->dtype)) &&
      launch(plan, decision, a, b, out, left.device);
  if (!is_launched && !by_python(a, b, out, dtype)) return nullptr;
  made.release();
  return out;
}

/* stack: a, b, then an asked type and, with `kInto`, out. All handles on it are ours. */
template <int kDim, bool kInto, Output kOutput = Output::kSame>
void product(uint64_t* stack, uint64_t, uint64_t) {
  Owned a(reinterpret_cast<Tensor>(stack[0])), b(reinterpret_cast<Tensor>(stack[1]));
  constexpr int kAtOut = kOutput == Output::kAsked ? 3 : 2;
  Owned out(kInto ? reinterpret_cast<Tensor>(stack[kAtOut]) : nullptr);
  View left(a.get()), right(b.get());
  check(left, right, kDim);
  int32_t dtype = left.dtype;
  if (kOutput == Output::kInt32) dtype = kInt;
  if (kOutput == Output::kAsked) dtype = static_cast<int32_t>(stack[2]);
  Tensor done = multiply<kDim>(left, right, a.get(), b.get(), out.get(), dtype);
  if (!done) {
    const Extents<kDim> extents(left, right);
    if (!kInto && extents.empty(left, dtype, out.address()) != 0) {
      const int64_t rows = kDim == 2 ? extents.size[0] : extents.size[0] * extents.size[1];
      const int element = dtype == kFloat || dtype == kInt ? 4 : 2;
      throw_out_of_memory(left.device_type,
                          double(rows) * double(extents.size[kDim - 1]) * element);
    }
    if (fallback<kDim, kOutput>(out.get(), left, a.get(), right, b.get(), dtype) != 0) {
      throw std::runtime_error("torch's own product failed; the reason is on standard error");
    }
    done = out.get();
  }
  out.release();
  stack[0] = reinterpret_cast<uint64_t>(done);
}

/* Whether `bias` is one row, also an expanded one, of what the product of these gives. */
bool is_row(View const& bias, View const& left, View const& right) {
  if (bias.dtype != left.dtype || bias.device_type != left.device_type ||
      bias.device != left.device || bias.dim < 1 || bias.dim > 2) {
    return false;
  }
  if (bias.dim == 2 && (bias.strides[0] != 0 || bias.sizes[0] != left.sizes[0])) return false;
  const int64_t n = bias.sizes[bias.dim - 1];
  return n == right.sizes[1] && (n == 1 || bias.strides[bias.dim - 1] == 1);
}

/* `row + a · b` in `into` or, where that is null, in a new tensor, which is the caller's. Null: torch is
 * to compute it. */
Tensor add_row(Tensor row, Tensor a, Tensor b, Tensor into) {
  View left(a), right(b);
  if (!fits(left, right, 2) || !may_be_ours(left) || !is_row(View(row), left, right)) return nullptr;
  Decision* decision = nullptr;
  const gs_plan* plan = decide(Key(left, right, left.dtype, true), &decision);
  if (!plan || plan == kByPython) return nullptr;
  const Extents<2> extents(left, right);
  Owned made;
  const bool is_there =
      into ? writable(View(into), left, extents.size, extents.stride, 2, left.dtype)
           : extents.empty(left, left.dtype, made.address()) == 0;
  Tensor out = into ? into : made.get();
  if (!is_there || !launch(plan, decision, a, b, out, left.device, {&gs_plan::at_bias, row})) {
    return nullptr;
  }
  made.release();
  return out;
}

/* `a · b` by the groups that end at `offs`, which the caller owns. Null: torch is to compute it. */
Tensor multiply_groups(Tensor a, Tensor b, Tensor offs) {
  View left(a), right(b), ends(offs);
  if (left.dim != 2 || right.dim < 2 || right.dim > 3 || left.dtype != right.dtype ||
      left.device_type != right.device_type || left.device != right.device ||
      ends.device_type != left.device_type || ends.device != left.device || ends.dtype != kInt ||
      ends.dim != 1 || ends.sizes[0] < 1 || ends.sizes[0] > kMostGroups ||
      (ends.sizes[0] > 1 && ends.strides[0] != 1) || !may_be_ours(left, true)) {
    return nullptr;
  }
  if (*watched_) {
    Owned handles[3];
    const Tensor tensors[3] = {a, b, offs};
    for (int i = 0; i < 3; ++i) {
      if (torch_.new_handle(tensors[i], handles[i].address()) != 0) return nullptr;
    }
    return grouped_by_python_(handles[0].release(), handles[1].release(), handles[2].release());
  }
  const int64_t groups = ends.sizes[0], m = left.sizes[0], n = right.sizes[right.dim - 1];
  Decision* decision = nullptr;
  const gs_plan* plan = decide(Key(left, right, left.dtype, false, groups), &decision);
  if (!plan || plan == kByPython) return nullptr;
  /* By rows one matrix of all tokens, by depth one for each group. */
  const int64_t size[kDims] = {groups, m, n}, stride[kDims] = {m * n, n, 1};
  const int first = right.dim == 3 ? 1 : 0;
  Owned out;
  const bool is_done =
      torch_.empty_strided(kDims - first, size + first, stride + first, plan->dtype,
                           left.device_type, left.device, out.address()) == 0 &&
      launch(plan, decision, a, b, out.get(), left.device, {&gs_plan::at_offsets, offs});
  return is_done ? out.release() : nullptr;
}

/* Functions that torch calls for operators, as compiled code calls them. Tensors come by reference: a
 * handle is the address of one. `keys` is a c10::DispatchKeySet. */
using Result = Returned<TensorContent>;
using Product = Result (*)(void* functor, uint64_t keys, Tensor a, Tensor b);
using ProductInto = Tensor (*)(void* functor, uint64_t keys, Tensor a, Tensor b, Tensor out);
using Sum = Result (*)(void* functor, uint64_t keys, Tensor row, Tensor a, Tensor b,
                       ScalarContent const& beta, ScalarContent const& alpha);
using SumInto = Tensor (*)(void* functor, uint64_t keys, Tensor row, Tensor a, Tensor b,
                           ScalarContent const& beta, ScalarContent const& alpha, Tensor out);
using Grouped = Result (*)(void* functor, uint64_t keys, Tensor a, Tensor b,
                           OptionalTensor const& offs, OptionalTensor const& bias, OptionalType);

using Boxed = void (*)(void* functor, const void* operation, uint64_t keys, void* stack);

/* An operator whose compiled callers come here. */
struct Entry {
  const char* name;
  void *compiled, *boxed;             /* its functions here */
  KernelFunction original, override;  /* torch's own kernel, and the one in its place */
  bool is_known;
};
enum { kMm, kMmInto, kBmm, kBmmInto, kSum, kSumInto, kGrouped, kEntries };
extern Entry entries_[kEntries];
void* entered_ = nullptr; /* the library of their registrations */
bool are_left_ = false;
ScalarContent one_;

bool is_one(ScalarContent const& factor) {
  return factor.type == one_.type && factor.value == one_.value;
}

/* The tensor of a handle, which ends. */
Result content(Tensor handle) {
  TensorContent content = *static_cast<TensorContent*>(handle);
  ::operator delete(handle);
  return Result(content);
}

template <int kDim>
Tensor multiply(Tensor a, Tensor b, Tensor into) {
  View left(a), right(b);
  return fits(left, right, kDim) ? multiply<kDim>(left, right, a, b, into, left.dtype) : nullptr;
}

template <int kDim>
Result product_of(void*, uint64_t keys, Tensor a, Tensor b) {
  Tensor made = multiply<kDim>(a, b, nullptr);
  if (made) return content(made);
  KernelFunction const& torchs = entries_[kDim == 2 ? kMm : kBmm].original;
  return reinterpret_cast<Product>(torchs.unboxed)(torchs.functor, keys, a, b);
}

template <int kDim>
Tensor product_into(void*, uint64_t keys, Tensor a, Tensor b, Tensor out) {
  if (multiply<kDim>(a, b, out)) return out;
  KernelFunction const& torchs = entries_[kDim == 2 ? kMmInto : kBmmInto].original;
  return reinterpret_cast<ProductInto>(torchs.unboxed)(torchs.functor, keys, a, b, out);
}

Result sum(void*, uint64_t keys, Tensor row, Tensor a, Tensor b, ScalarContent const& beta,
           ScalarContent const& alpha) {
  Tensor made = is_one(beta) && is_one(alpha) ? add_row(row, a, b, nullptr) : nullptr;
  if (made) return content(made);
  KernelFunction const& torchs = entries_[kSum].original;
  return reinterpret_cast<Sum>(torchs.unboxed)(torchs.functor, keys, row, a, b, beta, alpha);
}

Tensor sum_into(void*, uint64_t keys, Tensor row, Tensor a, Tensor b, ScalarContent const& beta,
                ScalarContent const& alpha, Tensor out) {
  if (is_one(beta) && is_one(alpha) && add_row(row, a, b, out)) return out;
  KernelFunction const& torchs = entries_[kSumInto].original;
  return reinterpret_cast<SumInto>(torchs.unboxed)(torchs.functor, keys, row, a, b, beta, alpha, out);
}

Result grouped(void*, uint64_t keys, Tensor a, Tensor b, OptionalTensor const& offs,
               OptionalTensor const& bias, OptionalType type) {
  const bool is_plain =
      offs.is_there && !bias.is_there && (!type.is_there || type.type == View(a).dtype);
  Tensor made = is_plain ? multiply_groups(a, b, offs.handle()) : nullptr;
  if (made) return content(made);
  KernelFunction const& torchs = entries_[kGrouped].original;
  return reinterpret_cast<Grouped>(torchs.unboxed)(torchs.functor, keys, a, b, offs, bias, type);
}

/* Other callers than compiled ones, which pass operands on a stack, go on to the override. */
template <int kEntry>
void boxed(void*, const void* operation, uint64_t keys, void* stack) {
  KernelFunction const& override = entries_[kEntry].override;
  reinterpret_cast<Boxed>(override.boxed)(override.functor, operation, keys, stack);
}

template <class Compiled>
Entry entry(const char* name, Compiled compiled, Boxed boxed) {
  return {name, reinterpret_cast<void*>(compiled), reinterpret_cast<void*>(boxed), {}, {}, false};
}

Entry entries_[kEntries] = {entry("mm", product_of<2>, boxed<kMm>),
                            entry("mm.out", product_into<2>, boxed<kMmInto>),
                            entry("bmm", product_of<3>, boxed<kBmm>),
                            entry("bmm.out", product_into<3>, boxed<kBmmInto>),
                            entry("addmm", sum, boxed<kSum>),
                            entry("addmm.out", sum_into, boxed<kSumInto>),
                            entry("_grouped_mm", grouped, boxed<kGrouped>)};

void enter(Entry const& entry) {
  constexpr size_t kFunctionBytes = 4096; /* room for a torch::CppFunction, of about 120 bytes */
  alignas(16) unsigned char function[kFunctionBytes] = {};
  if (!entered_ && torch_.library_init("aten", dispatch_key_.c_str(), __FILE__, __LINE__,
                                       &entered_) != 0) {
    throw std::runtime_error("torch made no library");
  }
  KernelFunction entered = {};
  entered.boxed = entry.boxed;
  entered.unboxed = entry.compiled;
  void* no_schema = nullptr;
  torch_.make_function(function, &entered, {}, &no_schema);
  torch_.add_function(entered_, entry.name, function, 0);
  torch_.delete_function(function);
}

struct Polymorphic {
  virtual ~Polymorphic() = default;
};

/* Whether torch's classes lie in memory as assumed here. `override` is in Python, or of the shim. */
bool layouts_hold(KernelFunction const& original, KernelFunction const& override) {
  if (!torch_.state_of || !torch_.make_function || !torch_.delete_function ||
      !torch_.add_function || !torch_.element_of || !torch_.delete_library) {
    return false;
  }
  KernelFunction empty = {}, boxed = {}, unboxed = {};
  boxed.boxed = unboxed.unboxed = &empty;
  if (torch_.state_of(&empty) != "" || torch_.state_of(&boxed) != "boxed " ||
      torch_.state_of(&unboxed) != "unboxed " || torch_.state_of(&override) != "boxed " ||
      torch_.state_of(&original) != "boxed unboxed " || original.symbolic || override.symbolic) {
    return false;
  }
  const char* name = typeid(*static_cast<Polymorphic*>(override.functor)).name();
  if (!std::strstr(name, "PythonKernelHolder") && !std::strstr(name, "StableIValueBoxedKernel")) {
    return false;
  }
  /* Reads back two integers of a tensor, and a double. */
  Owned integer, real;
  if (torch_.empty_strided(0, nullptr, nullptr, kLong, kCpu, 0, integer.address()) != 0 ||
      torch_.empty_strided(0, nullptr, nullptr, kDouble, kCpu, 0, real.address()) != 0) {
    return false;
  }
  int64_t seven = 7, one = 1;
  double half = 0.5;
  std::memcpy(reinterpret_cast<void*>(address(integer.get())), &seven, sizeof seven);
  const Returned<ScalarContent> first(torch_.element_of(integer.get()));
  std::memcpy(reinterpret_cast<void*>(address(integer.get())), &one, sizeof one);
  const Returned<ScalarContent> second(torch_.element_of(integer.get()));
  std::memcpy(reinterpret_cast<void*>(address(real.get())), &half, sizeof half);
  const Returned<ScalarContent> third(torch_.element_of(real.get()));
  one_ = second;
  return first.type == second.type && first.type != third.type && first.value == seven &&
         second.value == one && std::memcmp(&third.value, &half, sizeof half) == 0;
}

}  // namespace

#define GS_API extern "C" __attribute__((visibility("default")))

/* Of gs_plan and gs_torch: Python's are compared, as a binding may be older than its Python. */
GS_API uint64_t gs_dispatch_bytes(void) { return sizeof(gs_plan) + sizeof(gs_torch); }

/* Puts the products in the place of torch's for `dispatch_key`. Once a process; a torch status. */
GS_API int32_t gs_dispatch_install(const gs_torch* torch, int32_t device_type,
                                   const char* dispatch_key, gs_resolve resolve, gs_failed failed,
                                   gs_by_python by_python,
                                   gs_grouped_by_python grouped_by_python,
                                   const int32_t* watched) {
  torch_ = *torch;
  device_type_ = device_type;
  resolve_ = resolve;
  failed_ = failed;
  by_python_ = by_python;
  grouped_by_python_ = grouped_by_python;
  watched_ = watched;
  dispatch_key_ = dispatch_key;
  void* library = nullptr; /* torch keeps it for ever */
  int32_t status = torch_.library_init("aten", dispatch_key, __FILE__, __LINE__, &library);
  const bool ints = torch_.int_mm_out != nullptr;
  /* A kernel is replaced only if it can still be called; torch's CPU has none for these. */
  const bool asked = torch_.mm_dtype_out || device_type == kCpu;
  const struct {
    bool wanted;
    const char* name;
    Stable function;
  } kernels[] = {{true, "mm", product<2, false>},
                 {true, "mm.out", product<2, true>},
                 {true, "bmm", product<3, false>},
                 {true, "bmm.out", product<3, true>},
                 {ints, "_int_mm", product<2, false, Output::kInt32>},
                 {ints, "_int_mm.out", product<2, true, Output::kInt32>},
                 {asked, "mm.dtype", product<2, false, Output::kAsked>},
                 {asked, "mm.dtype_out", product<2, true, Output::kAsked>}};
  for (auto const& kernel : kernels) {
    if (status == 0 && kernel.wanted) {
      status = torch_.library_impl(library, kernel.name, kernel.function);
    }
  }
  return status;
}

/* Has compiled callers of an operator come here instead of to its override, which keeps all others: by
 * the shim, which makes handles and boxes, or in Python. Both kernels are torch's, by the addresses of their c10::KernelFunction; they and what they
 * own must live for ever. Returns 0, or another number if this torch's kernels are not as assumed: then
 * nothing has changed. */
GS_API int32_t gs_dispatch_enter(const char* name, KernelFunction const* original,
                                 KernelFunction const* override) {
  try {
    if (!layouts_hold(*original, *override)) return 1;
    for (Entry& entry : entries_) {
      if (std::strcmp(name, entry.name) != 0) continue;
      std::memcpy(&entry.original, original, 4 * sizeof(void*));
      std::memcpy(&entry.override, override, 4 * sizeof(void*));
      if (!are_left_) enter(entry);
      entry.is_known = true;
      return 0;
    }
    return 2;
  } catch (std::exception const&) {
    return 3;
  }
}

/* Has all callers of these operators go to the overrides, or compiled ones come here again. */
GS_API int32_t gs_dispatch_leave(int32_t left) {
  if (are_left_ == (left != 0)) return 0;
  are_left_ = left != 0;
  try {
    if (!left) {
      for (Entry const& entry : entries_) {
        if (entry.is_known) enter(entry);
      }
    } else if (entered_) {
      torch_.delete_library(entered_);
      entered_ = nullptr;
    }
    return 0;
  } catch (std::exception const&) {
    return 3;
  }
}

/* Whether products with a plan must run it. */
GS_API void gs_dispatch_strict(int32_t strict) { strict_.store(strict != 0); }

/* Why the product that this thread's `resolve` is asked for must not be computed. */
GS_API void gs_dispatch_refuse(const char* reason) { refusal_ = reason; }

GS_API void gs_dispatch_enable(int32_t grouped, int32_t enabled) {
  enabled_[grouped].store(enabled != 0);
}

/* Decide everything anew. Decisions in use elsewhere stay in memory: there are few, and few times. */
GS_API void gs_dispatch_forget(int32_t grouped) {
  generation_[grouped].fetch_add(1);
  for (auto& bucket : decisions_) bucket.store(nullptr, std::memory_order_release);
  decided_.store(0);
}
