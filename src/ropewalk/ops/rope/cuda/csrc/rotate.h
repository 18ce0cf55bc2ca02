// One rotation of q and k as raw pointers and strides: what the host hands to the kernel. No torch in here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ropewalk {

enum class DType : int32_t { kFloat16, kBFloat16, kFloat32, kFloat64 };

// q or k, (B, T, H, D) with dense features, and where its rotation goes. Strides count elements.
struct Heads {
  const void* x = nullptr;
  void* out = nullptr;  // may be x
  int64_t x_stride_batch = 0, x_stride_token = 0, x_stride_head = 0;
  int64_t out_stride_batch = 0, out_stride_token = 0, out_stride_head = 0;
  int32_t count = 0;  // H; 0 where there is none
};

// cos or sin: rows of R/2 dense features; one table for all batch rows where stride_batch is 0.
struct Table {
  const void* data = nullptr;
  int64_t stride_batch = 0, stride_row = 0;
};

// How the kernel accesses memory. All give the same numbers.
enum class Access : int32_t {
  kBest,    // the widest of the others that shapes, strides and addresses permit
  kScalar,  // one element at a time: permits anything
  kNarrow,  // 8 bytes
  kWide,    // 16 bytes
};

// A token's position is the sum of what applies: `offset`; its number in `positions`; its index (`by_index`), counted
// from the start of its sequence where `cu_seqlens` gives one.
struct Rotation {
  Heads q, k;
  Table cos, sin;
  const void* positions = nullptr;
  int64_t positions_stride_batch = 0, positions_stride_token = 0;
  const void* cu_seqlens = nullptr;
  int64_t offset = 0;
  int64_t n_rows = 0;  // of cos and sin
  int32_t n_sequences = 0;
  int32_t batches = 0, tokens = 0;
  int32_t head_dim = 0;  // D
  int32_t half = 0;      // R / 2, at least 1
  int32_t rotary_offset = 0;
  DType dtype = DType::kFloat32;        // of q and k
  DType table_dtype = DType::kFloat32;  // kFloat32, or that of q and k
  bool by_index = true;
  bool wide_indices = true;  // positions and cu_seqlens are int64 rather than int32
  bool interleaved = false;
  bool inverse = false;
};

// The first number of a device's compute capability, remembered; 0 where it cannot be told.
int compute_major(int device);

// Whether kernels compiled into this library run with the current device and its driver.
cudaError_t check_device();

// Launch the rotation on `stream` of the current device. It allocates nothing and waits for nothing. An `access` that
// the rotation does not permit is cudaErrorInvalidValue.
cudaError_t rotate(const Rotation& rotation, Access access, cudaStream_t stream);

}  // namespace ropewalk
