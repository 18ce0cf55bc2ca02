// The rotation as PyTorch operators, on PyTorch's stable ABI: one build serves every torch from 2.10 on.
//
// ropewalk::_rotate and ropewalk::_rotated, which allocates, are what `apply_rope` calls. Their checks are those of
// validate.py as a yes or no: where they say no, nothing has been written, and Python finds out why, raises, or asks
// again in another way. Arguments at the end have defaults: PyTorch takes 0.1 us for each that is passed.
// ropewalk::rotary_embedding is vLLM's operator of that name; it raises by itself.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "rotate.h"

// A PyTorch without CUDA lacks this function, and can load the library all the same.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace {

using ropewalk::Access;
using ropewalk::DType;
using ropewalk::Heads;
using ropewalk::Rotation;
using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kMaxHeadDim = 512;
constexpr int kLeastMajor = 8;  // of the compute capability
constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max();

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// A tensor's metadata, read once.
struct View {
  explicit View(const Tensor& tensor)
      : data(static_cast<char*>(tensor.data_ptr())),
        dims(static_cast<int32_t>(tensor.dim())),
        dtype(tensor.scalar_type()),
        device(tensor.get_device_index()),
        on_cuda(tensor.device().type() == DeviceType::CUDA),
        sizes_(tensor.sizes().data()),
        strides_(tensor.strides().data()) {}

  // Dimensions below zero count from the end.
  int64_t size(int32_t dim) const { return sizes_[dim < 0 ? dim + dims : dim]; }
  // 0 for a dimension along which nobody walks.
  int64_t stride(int32_t dim) const { return size(dim) > 1 ? raw_stride(dim) : 0; }
  int64_t raw_stride(int32_t dim) const { return strides_[dim < 0 ? dim + dims : dim]; }
  bool is_dense() const { return size(-1) <= 1 || raw_stride(-1) == 1; }
  bool is_on(const View& other) const { return on_cuda && other.on_cuda && device == other.device; }
  bool is_index() const { return dtype == ScalarType::Int || dtype == ScalarType::Long; }
  bool has_shape_of(const View& other) const {
    return dims == other.dims && std::equal(sizes_, sizes_ + dims, other.sizes_);
  }

  char* data;
  int32_t dims;
  ScalarType dtype;
  int32_t device;
  bool on_cuda;

 private:
  const int64_t* sizes_;
  const int64_t* strides_;
};

std::optional<View> view(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional<View>(View(*tensor)) : std::nullopt;
}

std::optional<DType> dtype_of(const View& x) {
  switch (x.dtype) {
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      return DType::kFloat64;
    default:
      return std::nullopt;
  }
}

size_t item_size(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

// A dimension of q or k: how many steps of how many elements.
struct Steps {
  int64_t size, stride;
};

// The strides of q or k in elements; of "thd" three.
using Strides = std::array<int64_t, 4>;

// q or k as (B, T, H, D).
using Shape = std::array<Steps, 4>;

int64_t extent(const Shape& shape) {
  int64_t elements = 0;
  for (const Steps& steps : shape) elements += (steps.size - 1) * steps.stride;
  return elements;
}

bool is_empty(const Shape& shape) {
  return std::any_of(shape.begin(), shape.end(), [](const Steps& steps) { return steps.size == 0; });
}

// Whether two indices may name the same memory; no is certain.
bool may_overlap_itself(Shape shape) {
  if (is_empty(shape)) return false;
  std::sort(shape.begin(), shape.end(), [](const Steps& a, const Steps& b) { return a.stride < b.stride; });
  int64_t reach = 0;
  for (const Steps& steps : shape) {
    if (steps.size <= 1) continue;
    if (steps.stride <= reach) return true;
    reach += steps.stride * (steps.size - 1);
  }
  return false;
}

// Whether q and k, which begins `distance` elements after q, provably share no element.
bool apart(const Shape& q, const Shape& k, int64_t distance) {
  if (is_empty(q) || is_empty(k) || distance > extent(q) || -distance > extent(k)) return true;
  // Slices of one projection: both walk the same batch rows and tokens, and each keeps to its stretch of a token.
  const Steps &batches = q[0], &tokens = q[1];
  if (batches.stride != k[0].stride || tokens.stride != k[1].stride) return false;
  const int64_t cut = tokens.size > 1 ? tokens.stride : batches.stride;
  if (cut <= 0 || (batches.size > 1 && batches.stride % cut != 0)) return false;
  const int64_t q_inner = (q[2].size - 1) * q[2].stride + (q[3].size - 1) * q[3].stride;
  const int64_t k_inner = (k[2].size - 1) * k[2].stride + (k[3].size - 1) * k[3].stride;
  const int64_t offset = (distance % cut + cut) % cut;
  return q_inner < offset && offset < cut - k_inner;
}

// What the operators are told in one number; cuda/load.py writes it.
struct Flags {
  explicit Flags(int64_t bits)
      : layout(bits & 3), interleaved(bits & 4), inverse(bits & 8), checked(bits & 16), access((bits >> 5) & 3) {}

  int64_t layout;  // one of kBthd …
  bool interleaved, inverse;
  bool checked;  // Python knows that what is overwritten overlaps nothing
  int64_t access;
};

enum Layout : int64_t { kBthd, kBhtd, kThd };

Shape as_bthd(const View& x, int64_t layout) {
  const auto steps = [&](int32_t dim) { return Steps{x.size(dim), x.stride(dim)}; };
  if (layout == kBthd) return {steps(0), steps(1), steps(2), steps(3)};
  if (layout == kBhtd) return {steps(0), steps(2), steps(1), steps(3)};
  return {Steps{1, 0}, steps(0), steps(1), steps(2)};
}

Heads heads_of(const View& x, const Shape& x_shape, const View& out, const Shape& out_shape) {
  return {x.data,
          out.data,
          x_shape[0].stride,
          x_shape[1].stride,
          x_shape[2].stride,
          out_shape[0].stride,
          out_shape[1].stride,
          out_shape[2].stride,
          static_cast<int32_t>(x_shape[2].size)};
}

// Launch on the current stream of the tensors' device.
void launch(const Rotation& rotation, Access access, int32_t device) {
  if (aoti_torch_get_current_cuda_stream == nullptr) fail("this PyTorch was built without CUDA");
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream(device, &stream) != AOTI_TORCH_SUCCESS) fail("no current CUDA stream");
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  int current = -1;
  if (cudaGetDevice(&current) != cudaSuccess || current != device) guard.emplace(device);
  const cudaError_t error = ropewalk::rotate(rotation, access, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) fail("ropewalk: the rotation could not be launched: ", cudaGetErrorString(error));
}

// The arguments of a rotation beside q and k.
struct Arguments {
  View cos, sin;
  std::optional<View> positions, cu_seqlens;
  int64_t offset, rotary_dim, rotary_offset;
};

// The rotation of q and k in place; nothing where the arguments are not supported. `overwrites`: refuse q and k that
// share memory.
std::optional<Rotation> check(const View& q, const std::optional<View>& k, const Arguments& arguments,
                              const Flags& flags, bool overwrites) {
  const auto& [cos, sin, positions, cu_seqlens, offset, rotary_dim, rotary_offset] = arguments;
  if (flags.layout > kThd) return std::nullopt;
  const int32_t dims = flags.layout == kThd ? 3 : 4;
  const std::optional<DType> dtype = dtype_of(q), table_dtype = dtype_of(cos);
  if (!q.on_cuda || q.dims != dims || !q.is_dense() || !dtype || q.size(-1) > kMaxHeadDim) return std::nullopt;
  if (ropewalk::compute_major(q.device) < kLeastMajor) return std::nullopt;
  const Shape q_shape = as_bthd(q, flags.layout);
  const int64_t batches = q_shape[0].size, tokens = q_shape[1].size, head_dim = q_shape[3].size;
  if (batches > kMaxCount || tokens > kMaxCount || q_shape[2].size > kMaxCount) return std::nullopt;

  Rotation r;
  r.q = heads_of(q, q_shape, q, q_shape);
  if (overwrites && may_overlap_itself(q_shape)) return std::nullopt;
  if (k) {
    if (k->dims != dims || !k->is_on(q) || k->dtype != q.dtype || !k->is_dense()) return std::nullopt;
    const Shape k_shape = as_bthd(*k, flags.layout);
    if (k_shape[0].size != batches || k_shape[1].size != tokens || k_shape[3].size != head_dim) return std::nullopt;
    if (k_shape[2].size > kMaxCount) return std::nullopt;
    if (overwrites) {
      const int64_t distance = (k->data - q.data) / static_cast<int64_t>(item_size(*dtype));
      if (may_overlap_itself(k_shape) || !apart(q_shape, k_shape, distance)) return std::nullopt;
    }
    r.k = heads_of(*k, k_shape, *k, k_shape);
  }

  if (!table_dtype || (*table_dtype != DType::kFloat32 && *table_dtype != *dtype)) return std::nullopt;
  if ((cos.dims != 2 && cos.dims != 3) || !cos.is_on(q) || !sin.is_on(q)) return std::nullopt;
  if (!sin.has_shape_of(cos) || sin.dtype != cos.dtype || !cos.is_dense() || !sin.is_dense()) return std::nullopt;
  const bool per_token = cos.dims == 3;
  if (per_token && !((cos.size(0) == 1 || cos.size(0) == batches) && cos.size(1) == tokens)) return std::nullopt;
  const int64_t width = 2 * cos.size(-1);
  if (width == 0 || rotary_offset < 0 || rotary_offset + width > head_dim) return std::nullopt;
  if (rotary_dim >= 0 && rotary_dim != width) return std::nullopt;
  r.cos = {cos.data, per_token ? cos.stride(0) : 0, cos.stride(-2)};
  r.sin = {sin.data, per_token ? sin.stride(0) : 0, sin.stride(-2)};
  r.n_rows = cos.size(-2);
  if (r.n_rows > kMaxCount) return std::nullopt;

  if (cu_seqlens) {
    if (flags.layout != kThd || cu_seqlens->dims != 1 || cu_seqlens->size(0) == 0) return std::nullopt;
    if (!cu_seqlens->is_index() || !cu_seqlens->is_dense() || !cu_seqlens->is_on(q)) return std::nullopt;
    if (cu_seqlens->size(0) > kMaxCount) return std::nullopt;
  }
  int64_t max_offset = 0;
  if (positions) {
    if (per_token || !positions->is_index() || !positions->is_on(q)) return std::nullopt;
    r.positions = positions->data;
    r.wide_indices = positions->dtype == ScalarType::Long;
    if (positions->dims == 1 && flags.layout != kThd) {
      if (positions->size(0) != batches) return std::nullopt;
      r.positions_stride_batch = positions->stride(0);
    } else {
      if (positions->dims != (flags.layout == kThd ? 1 : 2) || positions->size(-1) != tokens) return std::nullopt;
      if (positions->dims == 2) {
        if (positions->size(0) != 1 && positions->size(0) != batches) return std::nullopt;
        r.positions_stride_batch = positions->stride(0);
      }
      r.positions_stride_token = positions->stride(-1);
      r.by_index = false;
    }
  } else if (!per_token) {
    if (flags.layout == kThd && !cu_seqlens) return std::nullopt;
    if (cu_seqlens) {
      r.cu_seqlens = cu_seqlens->data;
      r.n_sequences = static_cast<int32_t>(cu_seqlens->size(0) - 1);
      r.wide_indices = cu_seqlens->dtype == ScalarType::Long;
    }
    // How long the longest sequence is, the host does not know: its tokens past the table become NaN.
    max_offset = r.n_rows - (cu_seqlens ? std::min<int64_t>(tokens, 1) : tokens);
  }
  if (offset < 0 || offset > max_offset) return std::nullopt;

  r.offset = offset;
  r.batches = static_cast<int32_t>(batches);
  r.tokens = static_cast<int32_t>(tokens);
  r.head_dim = static_cast<int32_t>(head_dim);
  r.half = static_cast<int32_t>(width / 2);
  r.rotary_offset = static_cast<int32_t>(rotary_offset);
  r.dtype = *dtype;
  r.table_dtype = *table_dtype;
  r.interleaved = flags.interleaved;
  r.inverse = flags.inverse;
  return r;
}

// Let the rotation of x go to `out`; false where that does not fit.
bool redirect(Heads& heads, const View& x, const View& out, const Flags& flags) {
  if (!(out.has_shape_of(x) && out.is_on(x) && out.dtype == x.dtype && out.is_dense())) return false;
  heads = heads_of(x, as_bthd(x, flags.layout), out, as_bthd(out, flags.layout));
  return true;
}

// `ropewalk::_rotate`: q and k are absent in place. False where nothing was written.
bool rotate(const Tensor& q_out_tensor, const std::optional<Tensor>& k_out_tensor, const Tensor& cos, const Tensor& sin,
            int64_t bits, const std::optional<Tensor>& q_tensor, const std::optional<Tensor>& k_tensor,
            const std::optional<Tensor>& positions, const std::optional<Tensor>& cu_seqlens, int64_t offset,
            int64_t rotary_dim, int64_t rotary_offset) {
  const Flags flags(bits);
  const bool inplace = !q_tensor;
  const View q(inplace ? q_out_tensor : *q_tensor);
  const std::optional<View> k = view(inplace ? k_out_tensor : k_tensor);
  const Arguments arguments{View(cos), View(sin), view(positions), view(cu_seqlens), offset, rotary_dim, rotary_offset};
  std::optional<Rotation> r = check(q, k, arguments, flags, inplace && !flags.checked);
  if (!r) return false;
  if (!inplace) {
    if (!redirect(r->q, q, View(q_out_tensor), flags)) return false;
    if (k && !(k_out_tensor && redirect(r->k, *k, View(*k_out_tensor), flags))) return false;
  }
  launch(*r, static_cast<Access>(flags.access), q.device);
  return true;
}

// The strides of `torch.empty_like(x)`: those of x, or where x has gaps, dense ones in the order of its dimensions.
Strides strides_like(const View& x) {
  Strides order{}, strides{};
  for (int32_t dim = 0; dim < x.dims; ++dim) order[dim] = x.dims - 1 - dim;
  // From the smallest stride to the largest, as PyTorch sorts: dimensions of stride 0 stay where they are.
  const auto comes_after = [&x](int64_t a, int64_t b) {
    const int64_t stride_a = x.raw_stride(a), stride_b = x.raw_stride(b);
    if (stride_a == 0 || stride_b == 0) return 0;
    if (stride_a != stride_b) return stride_a < stride_b ? -1 : 1;
    return x.size(a) > x.size(b) ? 1 : 0;
  };
  for (int32_t i = 1; i < x.dims; ++i) {
    int32_t moving = i;
    for (int32_t before = i - 1; before >= 0; --before) {
      const int comparison = comes_after(order[before], order[moving]);
      if (comparison < 0) break;
      if (comparison > 0) {
        std::swap(order[before], order[moving]);
        moving = before;
      }
    }
  }
  int64_t elements = 1;
  bool has_gaps = false, is_empty = false;
  for (int32_t i = 0; i < x.dims; ++i) {
    const auto dim = static_cast<int32_t>(order[i]);
    strides[dim] = elements;
    is_empty = is_empty || x.size(dim) == 0;
    if (x.size(dim) <= 1) continue;
    has_gaps = has_gaps || x.raw_stride(dim) != elements;
    elements *= x.size(dim);
  }
  if (!has_gaps || is_empty) {
    for (int32_t dim = 0; dim < x.dims; ++dim) strides[dim] = x.raw_stride(dim);
  }
  return strides;
}

// Nothing where memory is short: Python's own allocation raises PyTorch's error.
std::optional<Tensor> empty_like(const Tensor& tensor, const View& x) {
  const Strides strides = strides_like(x);
  AtenTensorHandle empty = nullptr;
  int32_t dtype = 0, device_type = 0;
  if (aoti_torch_get_dtype(tensor.get(), &dtype) != AOTI_TORCH_SUCCESS ||
      aoti_torch_get_device_type(tensor.get(), &device_type) != AOTI_TORCH_SUCCESS ||
      aoti_torch_empty_strided(x.dims, tensor.sizes().data(), strides.data(), dtype, device_type, x.device, &empty) !=
          AOTI_TORCH_SUCCESS) {
    return std::nullopt;
  }
  return Tensor(empty);
}

// `ropewalk::_rotated`: out of place, with the strides of `torch.empty_like`. Nothing where the arguments are not
// supported.
std::tuple<std::optional<Tensor>, std::optional<Tensor>> rotated(
    const Tensor& q_tensor, const std::optional<Tensor>& k_tensor, const Tensor& cos, const Tensor& sin, int64_t bits,
    const std::optional<Tensor>& positions, const std::optional<Tensor>& cu_seqlens, int64_t offset, int64_t rotary_dim,
    int64_t rotary_offset) {
  const Flags flags(bits);
  const View q(q_tensor);
  const std::optional<View> k = view(k_tensor);
  const Arguments arguments{View(cos), View(sin), view(positions), view(cu_seqlens), offset, rotary_dim, rotary_offset};
  std::optional<Rotation> r = check(q, k, arguments, flags, false);
  if (!r) return {};
  const std::optional<Tensor> q_out = empty_like(q_tensor, q);
  if (!q_out || !redirect(r->q, q, View(*q_out), flags)) return {};
  std::optional<Tensor> k_out;
  if (k) {
    k_out = empty_like(*k_tensor, *k);
    if (!k_out || !redirect(r->k, *k, View(*k_out), flags)) return {};
  }
  launch(*r, static_cast<Access>(flags.access), q.device);
  return {q_out, k_out};
}

// query or key of vLLM's operator, [T, H·D], [T, H, D], [B, T, H·D] or [B, T, H, D], as (B, T, H, D).
Shape split_heads(const char* name, const View& x, int32_t position_dims, int64_t head_size) {
  const int32_t dims = x.dims - position_dims;
  if (dims != 1 && dims != 2) {
    fail(name, " has ", x.dims, " dimensions, but must have ", position_dims + 1, " or ", position_dims + 2,
         " where positions has ", position_dims);
  }
  if (!x.is_dense()) fail(name, " has stride ", x.raw_stride(-1), " along its last dimension, but must have 1");
  const Steps batches = position_dims == 2 ? Steps{x.size(0), x.stride(0)} : Steps{1, 0};
  const Steps tokens{x.size(position_dims - 1), x.stride(position_dims - 1)};
  if (dims == 2) {
    if (x.size(-1) != head_size) fail(name, " has head dim ", x.size(-1), ", but head_size is ", head_size);
    return {batches, tokens, Steps{x.size(-2), x.stride(-2)}, Steps{head_size, 1}};
  }
  if (x.size(-1) % head_size != 0) {
    fail(name, " has ", x.size(-1), " features a token, but they must be a multiple of head_size, ", head_size);
  }
  return {batches, tokens, Steps{x.size(-1) / head_size, head_size}, Steps{head_size, 1}};
}

void rotary_embedding(Tensor positions_tensor, Tensor query_tensor, std::optional<Tensor> key_tensor, int64_t head_size,
                      Tensor cos_sin_cache, bool is_neox) {
  const View positions(positions_tensor), query(query_tensor), cache(cos_sin_cache);
  const std::optional<View> key = view(key_tensor);

  if (!query.on_cuda) fail("query must be on a CUDA device");
  if (!positions.is_on(query)) fail("positions must be on query's device");
  if (!cache.is_on(query)) fail("cos_sin_cache must be on query's device");
  if (key && !key->is_on(query)) fail("key must be on query's device");
  const std::optional<DType> dtype = dtype_of(query), table_dtype = dtype_of(cache);
  if (!dtype) fail("query must be float16, bfloat16, float32 or float64");
  if (key && key->dtype != query.dtype) fail("key must have query's dtype");
  if (!table_dtype || (*table_dtype != DType::kFloat32 && *table_dtype != *dtype)) {
    fail("cos_sin_cache must be float32 or have query's dtype");
  }
  if (!positions.is_index()) fail("positions must be int32 or int64");
  const bool per_row =
      query.dims > 1 && positions.dims == 2 && query.size(0) == positions.size(0) && query.size(1) == positions.size(1);
  if (positions.dims == 2 && positions.size(0) == 3 && query.dims > 0 && query.size(0) == positions.size(1) &&
      !per_row) {
    fail("positions must have shape [num_tokens] or [batch_size, seq_len], but has three axes for each token ",
         "(multimodal RoPE, M-RoPE): call ropewalk.apply_rope with axes, as mrope_axes makes them");
  }
  if (positions.dims != 1 && positions.dims != 2) {
    fail("positions must have shape [num_tokens] or [batch_size, seq_len]");
  }
  for (const View* x : {&query, key ? &*key : &query}) {
    if (x->dims <= positions.dims) continue;  // split_heads says what is wrong
    const bool same_tokens = x->size(positions.dims - 1) == positions.size(-1);
    if (positions.dims == 1 && !same_tokens) {
      fail("query, key and positions must have the same number of tokens");
    }
    if (positions.dims == 2 && !(same_tokens && x->size(0) == positions.size(0))) {
      fail("query, key and positions must have the same batch_size and seq_len");
    }
  }
  if (head_size < 1 || head_size > kMaxHeadDim) {
    fail("head_size is ", head_size, ", but must be from 1 to ", kMaxHeadDim);
  }
  if (cache.dims != 2) fail("cos_sin_cache must have shape [max_position, rotary_dim]");
  const int64_t width = cache.size(1);
  if (width % 2 != 0 || width < 2 || width > head_size) {
    fail("cos_sin_cache has rotary dim ", width, ", but it must be even, at least 2 and at most head_size, ",
         head_size);
  }
  if (cache.size(0) > kMaxCount) fail("cos_sin_cache has more than ", kMaxCount, " rows");
  if (!cache.is_dense()) fail("cos_sin_cache must be dense along its last dimension");

  const Shape query_shape = split_heads("query", query, positions.dims, head_size);
  for (const Steps& steps : query_shape) {
    if (steps.size > kMaxCount) fail("query has a dimension of more than ", kMaxCount);
  }
  if (may_overlap_itself(query_shape)) fail("query has elements that share memory");
  Rotation r;
  r.q = heads_of(query, query_shape, query, query_shape);
  if (key) {
    const Shape key_shape = split_heads("key", *key, positions.dims, head_size);
    const int64_t n_heads = query_shape[2].size, n_key_heads = key_shape[2].size;
    if (n_key_heads < 1 || n_heads % n_key_heads != 0) {
      fail("query has ", n_heads, " heads, but they must be a multiple of key's ", n_key_heads);
    }
    if (may_overlap_itself(key_shape)) fail("key has elements that share memory");
    const int64_t distance = (key->data - query.data) / static_cast<int64_t>(item_size(*dtype));
    if (!apart(query_shape, key_shape, distance)) fail("query and key share memory");
    r.k = heads_of(*key, key_shape, *key, key_shape);
  }
  const int64_t half = width / 2;
  r.cos = {cache.data, 0, cache.stride(0)};
  r.sin = {cache.data + half * item_size(*table_dtype), 0, cache.stride(0)};
  r.n_rows = cache.size(0);
  r.positions = positions.data;
  r.positions_stride_batch = positions.dims == 2 ? positions.stride(0) : 0;
  r.positions_stride_token = positions.stride(-1);
  r.by_index = false;
  r.wide_indices = positions.dtype == ScalarType::Long;
  r.batches = static_cast<int32_t>(query_shape[0].size);
  r.tokens = static_cast<int32_t>(query_shape[1].size);
  r.head_dim = static_cast<int32_t>(head_size);
  r.half = static_cast<int32_t>(half);
  r.dtype = *dtype;
  r.table_dtype = *table_dtype;
  r.interleaved = !is_neox;
  launch(r, Access::kBest, query.device);
}

// 0, or the CUDA error that every launch on the current device would meet.
int64_t check_device() { return ropewalk::check_device(); }

}  // namespace

namespace {

// Defines the operators when the library is loaded. Where one is defined already, by Python or by another build of this
// library, PyTorch says so on standard error and keeps that one.
const TorchLibraryHandle definitions = [] {
  TorchLibraryHandle library = nullptr;
  aoti_torch_library_init_fragment("ropewalk", __FILE__, __LINE__, &library);
#ifdef ROPEWALK_DEFINE_SCHEMA
  aoti_torch_library_def(library,
                         "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!)? key, int head_size, "
                         "Tensor cos_sin_cache, bool is_neox) -> ()");
#endif
  aoti_torch_library_def(
      library,
      "_rotate(Tensor(a!) q_out, Tensor(b!)? k_out, Tensor cos, Tensor sin, int flags, Tensor? q=None, "
      "Tensor? k=None, Tensor? positions=None, Tensor? cu_seqlens=None, int offset=0, "
      "int rotary_dim=-1, int rotary_offset=0) -> bool");
  aoti_torch_library_def(library,
                         "_rotated(Tensor q, Tensor? k, Tensor cos, Tensor sin, int flags, Tensor? positions=None, "
                         "Tensor? cu_seqlens=None, int offset=0, int rotary_dim=-1, int rotary_offset=0) -> "
                         "(Tensor? q_out, Tensor? k_out)");
  aoti_torch_library_def(library, "_check_device() -> int");
  return library;  // for as long as the process lives
}();

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ropewalk, CompositeExplicitAutograd, library) {
  library.impl("_check_device", TORCH_BOX(&check_device));
}

STABLE_TORCH_LIBRARY_IMPL(ropewalk, CUDA, library) {
  library.impl("_rotate", TORCH_BOX(&rotate));
  library.impl("_rotated", TORCH_BOX(&rotated));
  library.impl("rotary_embedding", TORCH_BOX(&rotary_embedding));
}
