// The rotation as a CUDA kernel. Shape letters: B batch, T tokens, H heads, D head dim, R rotary dim (R/2 pairs).

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <type_traits>

#include "rotate.h"

namespace ropewalk {

namespace {

constexpr int kWidestAccess = 16;  // bytes
constexpr int kMaxThreads = 256;   // of a block: a row of D = 512 float64 features needs them

// CUDA's limits.
constexpr int32_t kMaxBlockTokens = 64;  // a block's third dimension
constexpr int64_t kMaxGridY = 65535;

// Chosen from runs on H200s (docs/notes/004-rotation-in-cuda-bandwidth.md).
constexpr int32_t kChunkTokens = 4096;  // of one batch row before the next one's turn
constexpr int32_t kFarHeads = 4;  // of a block, where a head's tokens are nearer to each other than a token's heads
constexpr int64_t kLargeBytes = 64 << 20;  // moved: from here on the memory's bandwidth counts, not the cache's

// What one access reads or writes. It stays packed until its numbers are needed, so that no load waits for another.
template <int kBytes>
struct Packed {
  uint32_t words[kBytes / 4];
};
template <>
struct Packed<2> {
  uint16_t words[1];
};

template <int kBytes>
__device__ __forceinline__ Packed<kBytes> load(const void* address) {
  Packed<kBytes> packed;
  if constexpr (kBytes == 16) {
    const uint4 words = *static_cast<const uint4*>(address);
    packed.words[0] = words.x, packed.words[1] = words.y, packed.words[2] = words.z, packed.words[3] = words.w;
  } else if constexpr (kBytes == 8) {
    const uint2 words = *static_cast<const uint2*>(address);
    packed.words[0] = words.x, packed.words[1] = words.y;
  } else {
    packed = *static_cast<const Packed<kBytes>*>(address);
  }
  return packed;
}

// The same of numbers that others will read too: they outlive in the caches what is read once. It takes a moment
// longer.
template <int kBytes>
__device__ __forceinline__ Packed<kBytes> load_and_keep(const void* address) {
  if constexpr (kBytes == kWidestAccess) {
    Packed<kBytes> packed;
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.global.L1::evict_last.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(packed.words[0]), "=r"(packed.words[1]), "=r"(packed.words[2]), "=r"(packed.words[3])
                 : "l"(address), "l"(policy));
    return packed;
  } else {
    return load<kBytes>(address);
  }
}

template <int kBytes>
__device__ __forceinline__ void store(void* address, const Packed<kBytes>& packed) {
  if constexpr (kBytes == 16) {
    *static_cast<uint4*>(address) = {packed.words[0], packed.words[1], packed.words[2], packed.words[3]};
  } else if constexpr (kBytes == 8) {
    *static_cast<uint2*>(address) = {packed.words[0], packed.words[1]};
  } else {
    *static_cast<Packed<kBytes>*>(address) = packed;
  }
}

// What numbers of type T are computed in.
template <typename T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Number i of those that are packed.
template <typename T, int kBytes>
__device__ __forceinline__ Compute<T> unpack(const Packed<kBytes>& packed, int i) {
  if constexpr (sizeof(T) == 8) {
    return __hiloint2double(packed.words[2 * i + 1], packed.words[2 * i]);
  } else if constexpr (sizeof(T) == 4) {
    return __uint_as_float(packed.words[i]);
  } else {
    uint32_t bits = packed.words[kBytes == 2 ? i : i / 2];
    if (i % 2 == 1) bits >>= 16;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return __uint_as_float(bits << 16);
    return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  }
}

// Round numbers to nearest and pack them.
template <typename T, int N>
__device__ __forceinline__ Packed<N * sizeof(T)> pack(const Compute<T> (&numbers)[N]) {
  Packed<N * sizeof(T)> packed;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if constexpr (sizeof(T) == 8) {
      packed.words[2 * i] = __double2loint(numbers[i]);
      packed.words[2 * i + 1] = __double2hiint(numbers[i]);
    } else if constexpr (sizeof(T) == 4) {
      packed.words[i] = __float_as_uint(numbers[i]);
    } else if constexpr (N == 1) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>)
        packed.words[0] = __bfloat16_as_ushort(__float2bfloat16_rn(numbers[0]));
      else
        packed.words[0] = __half_as_ushort(__float2half_rn(numbers[0]));
    } else if (i % 2 == 1) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const __nv_bfloat162 two = __floats2bfloat162_rn(numbers[i - 1], numbers[i]);
        packed.words[i / 2] = reinterpret_cast<const uint32_t&>(two);
      } else {
        const __half2 two = __floats2half2_rn(numbers[i - 1], numbers[i]);
        packed.words[i / 2] = reinterpret_cast<const uint32_t&>(two);
      }
    }
  }
  return packed;
}

// index / divisor == index · multiplier >> shift for every index below 2³¹.
struct Division {
  uint32_t multiplier, shift;

  static Division by(uint32_t divisor) {
    uint32_t bits = 0;
    while ((uint64_t{1} << bits) < divisor) ++bits;
    const uint64_t power = uint64_t{1} << (31 + bits);
    return {static_cast<uint32_t>((power + divisor - 1) / divisor), 31 + bits};
  }
  __device__ __forceinline__ uint32_t operator()(uint32_t index) const {
    return static_cast<uint64_t>(index) * multiplier >> shift;
  }
};

// q or k as the kernel wants it: x and out point at the first rotated feature, and strides count accesses.
template <typename Stride>
struct KernelHeads {
  const void* x;
  void* out;
  Stride x_stride_batch, x_stride_token, x_stride_head;
  Stride out_stride_batch, out_stride_token, out_stride_head;
  int32_t count;
};

// Stride is 32 bits wide where that is enough: the product of two 32-bit numbers is one instruction.
template <typename Stride>
struct Arguments {
  KernelHeads<Stride> heads[2];  // q's and k's
  const void* cos;
  const void* sin;
  const void* positions;
  const void* cu_seqlens;
  Stride cos_stride_batch, cos_stride_row, sin_stride_batch, sin_stride_row;
  Stride positions_stride_batch, positions_stride_token;
  int64_t offset, n_rows;
  int32_t n_sequences, batches, tokens;
  int32_t rotated, before, after;  // accesses of features that are rotated, that lie in front of them, and behind them
  int32_t q_groups;                // groups of heads of q; those of k follow
  int32_t chunk_blocks;            // token blocks of one batch row that follow each other
  Division by_batches, by_chunk_blocks;
  bool by_index, wide_indices, inverse, inplace;
};

template <typename Stride>
__device__ __forceinline__ uint64_t times(uint32_t index, Stride stride) {
  return static_cast<uint64_t>(index) * stride;
}

__device__ __forceinline__ int64_t read_index(const void* indices, uint64_t i, bool wide) {
  return wide ? static_cast<const int64_t*>(indices)[i] : static_cast<const int32_t*>(indices)[i];
}

// −1 where a packed token belongs to no sequence.
template <typename Stride>
__device__ __forceinline__ int64_t token_position(const Arguments<Stride>& a, uint32_t batch, uint32_t token) {
  int64_t position = a.offset;
  if (a.by_index) position += token;
  if (a.positions != nullptr) {
    position += read_index(a.positions, times(batch, a.positions_stride_batch) + times(token, a.positions_stride_token),
                           a.wide_indices);
  }
  if (a.cu_seqlens != nullptr) {
    // How many sequences end at or before the token, by bisection.
    int32_t low = 0, high = a.n_sequences;
    while (low < high) {
      const int32_t middle = (low + high) / 2;
      if (read_index(a.cu_seqlens, middle + 1, a.wide_indices) <= token) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (low == a.n_sequences) return -1;
    position -= read_index(a.cu_seqlens, low, a.wide_indices);
  }
  return position;
}

// How a thread's numbers form pairs.
enum class Pairing {
  kHalves,      // two accesses, to the first and to the second half of a row: half-split pairs
  kNeighbours,  // one access of whole pairs: interleaved pairs
  kTwoScalars,  // two accesses of one number each: interleaved pairs
};

// Up to here a kernel may overlap with the end of the one before it, and from here on the next one with it. Where few
// bytes are moved, these offsets are computed before: nothing but a use of them keeps the compiler from computing them
// after the wait. No offset has its highest bit set, so the condition always holds.
template <bool kLarge>
__device__ __forceinline__ void wait_for_last_kernel(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
#if __CUDA_ARCH__ >= 900
  if constexpr (kLarge) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
  } else {
    asm volatile(
        "{\n"
        ".reg .pred computed;\n"
        ".reg .b64 all;\n"
        "or.b64 all, %0, %1;\n"
        "or.b64 all, all, %2;\n"
        "or.b64 all, all, %3;\n"
        "setp.ne.b64 computed, all, -1;\n"
        "@computed griddepcontrol.wait;\n"
        "}" ::"l"(a),
        "l"(b), "l"(c), "l"(d)
        : "memory");
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Rotate kHeads heads of a token by each thread, blockDim.y heads apart: they share cos and sin in registers. A block
// is (accesses of a row, heads, tokens): one small tile, so that the grid sweeps through memory in order, which is what
// bandwidth wants (docs/notes/004-rotation-in-cuda-bandwidth.md). Without kLooksUp there are neither positions nor
// cu_seqlens. kLarge changes nothing but speed: it is for what moves kLargeBytes and more.
template <typename T, typename TableT, Pairing kPairing, int kLanes, int kHeads, bool kLooksUp, bool kLarge,
          typename Stride>
__global__ void __launch_bounds__(kMaxThreads) rotate_kernel(const __grid_constant__ Arguments<Stride> a) {
  constexpr int kBytes = kLanes * sizeof(T);
  constexpr int kParts = kPairing == Pairing::kNeighbours ? 1 : 2;
  constexpr int kPairs = kPairing == Pairing::kNeighbours ? kLanes / 2 : kLanes;
  constexpr int kWidestTable = kWidestAccess / sizeof(TableT);
  constexpr int kTableLanes = kPairs < kWidestTable ? kPairs : kWidestTable;
  constexpr int kTableBytes = kTableLanes * sizeof(TableT);

  const bool is_k = blockIdx.x >= a.q_groups;
  const KernelHeads<Stride>& heads = a.heads[is_k];
  const uint32_t group = blockIdx.x - (is_k ? a.q_groups : 0);
  const uint32_t head = group * (blockDim.y * kHeads) + threadIdx.y;
  // Batch rows take turns by chunks of tokens: the next row finds the chunk's part of the tables in cache.
  const uint32_t block = blockIdx.z * gridDim.y + blockIdx.y;
  const uint32_t turn = a.by_chunk_blocks(block);
  const uint32_t chunk = a.by_batches(turn);
  const uint32_t batch = turn - chunk * a.batches;
  const uint32_t token = (block - (turn - chunk) * a.chunk_blocks) * blockDim.z + threadIdx.z;
  const bool exists = token < a.tokens;
  const int32_t heads_left = exists ? heads.count - static_cast<int32_t>(head) : 0;

  const uint32_t column = threadIdx.x * (kPairing == Pairing::kTwoScalars ? 2 : 1);
  const uint64_t x_offset = kBytes * (times(batch, heads.x_stride_batch) + times(token, heads.x_stride_token) +
                                      times(head, heads.x_stride_head) + column);
  const uint64_t out_offset = kBytes * (times(batch, heads.out_stride_batch) + times(token, heads.out_stride_token) +
                                        times(head, heads.out_stride_head) + column);
  const uint32_t part_step = kBytes * (kPairing == Pairing::kTwoScalars ? 1 : blockDim.x);
  const uint64_t x_step = kBytes * times(blockDim.y, heads.x_stride_head);
  const uint64_t out_step = kBytes * times(blockDim.y, heads.out_stride_head);

  bool inside = false;
  uint64_t cos_offset = 0, sin_offset = 0;
  const auto find_row = [&](int64_t position) {
    inside = position >= 0 && position < a.n_rows;
    const uint32_t row = inside ? static_cast<uint32_t>(position) : 0;
    cos_offset =
        sizeof(TableT) * (times(batch, a.cos_stride_batch) + times(row, a.cos_stride_row) + threadIdx.x * kPairs);
    sin_offset =
        sizeof(TableT) * (times(batch, a.sin_stride_batch) + times(row, a.sin_stride_row) + threadIdx.x * kPairs);
  };
  if constexpr (!kLooksUp) find_row(exists ? a.offset + token : -1);

  wait_for_last_kernel<kLarge>(x_offset, out_offset, cos_offset, sin_offset);

  // q and k are asked for first: looking up the tables' rows takes a while.
  const char* const x = static_cast<const char*>(heads.x) + x_offset;
  char* const out = static_cast<char*>(heads.out) + out_offset;
  Packed<kBytes> tiles[kHeads][kParts];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (static_cast<int32_t>(i * blockDim.y) < heads_left) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        tiles[i][part] = load<kBytes>(x + i * x_step + part * part_step);
      }
    }
  }

  if constexpr (kLooksUp) find_row(exists ? token_position(a, batch, token) : -1);
  Packed<kTableBytes> cos[kPairs / kTableLanes] = {}, sin[kPairs / kTableLanes] = {};
  if (inside) {
#pragma unroll
    for (int i = 0; i < kPairs / kTableLanes; ++i) {
      const char* const cos_pairs = static_cast<const char*>(a.cos) + cos_offset + i * kTableBytes;
      const char* const sin_pairs = static_cast<const char*>(a.sin) + sin_offset + i * kTableBytes;
      cos[i] = kLarge ? load_and_keep<kTableBytes>(cos_pairs) : load<kTableBytes>(cos_pairs);
      sin[i] = kLarge ? load_and_keep<kTableBytes>(sin_pairs) : load<kTableBytes>(sin_pairs);
    }
  }
  // Outside the table the direction is NaN, and so is all that it turns.
  Compute<T> direction = a.inverse ? -1 : 1;
  if (!inside) direction = static_cast<Compute<T>>(NAN);

#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (static_cast<int32_t>(i * blockDim.y) >= heads_left) continue;
    Compute<T> turned[kParts][kLanes];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const Compute<T> c = unpack<TableT>(cos[pair / kTableLanes], pair % kTableLanes);
      const Compute<T> s = direction * unpack<TableT>(sin[pair / kTableLanes], pair % kTableLanes);
      const int first = kParts == 1 ? 2 * pair : pair, second = kParts == 1 ? 2 * pair + 1 : pair;
      const Compute<T> x1 = unpack<T>(tiles[i][0], first), x2 = unpack<T>(tiles[i][kParts - 1], second);
      turned[0][first] = x1 * c - x2 * s;
      turned[kParts - 1][second] = x1 * s + x2 * c;
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      store(out + i * out_step + part * part_step, pack<T>(turned[part]));
    }
  }

  // The features that are not rotated are copied; they too are NaN where the position is outside the table.
  if (a.before + a.after == 0 || (a.inplace && inside)) return;
  Compute<T> nans[kLanes];
#pragma unroll
  for (int i = 0; i < kLanes; ++i) nans[i] = static_cast<Compute<T>>(NAN);
  for (int32_t rest = threadIdx.x; rest < a.before + a.after; rest += blockDim.x) {
    const int64_t access =
        (rest < a.before ? rest - a.before : rest - a.before + a.rotated) - static_cast<int64_t>(column);
#pragma unroll
    for (int i = 0; i < kHeads; ++i) {
      if (static_cast<int32_t>(i * blockDim.y) >= heads_left) continue;
      store(out + i * out_step + kBytes * access,
            inside ? load<kBytes>(x + i * x_step + kBytes * access) : pack<T>(nans));
    }
  }
}

int current_major() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess ? compute_major(device) : 0;
}

int32_t divide_up(int64_t count, int64_t size) { return static_cast<int32_t>((count + size - 1) / size); }

int32_t power_of_two(int32_t at_least) {
  int32_t power = 1;
  while (power < at_least) power *= 2;
  return power;
}

// Blocks have about so many threads, if q and k have the rows for them.
template <typename T, typename TableT, Pairing kPairing, int kLanes, int kHeads, bool kLooksUp, bool kLarge,
          typename Stride>
cudaError_t launch(const Rotation& r, int32_t threads, cudaStream_t stream) {
  const auto stride = [](int64_t elements) { return static_cast<Stride>(elements / kLanes); };
  const auto heads = [&](const Heads& h) {
    return KernelHeads<Stride>{static_cast<const T*>(h.x) + r.rotary_offset,
                               static_cast<T*>(h.out) + r.rotary_offset,
                               stride(h.x_stride_batch),
                               stride(h.x_stride_token),
                               stride(h.x_stride_head),
                               stride(h.out_stride_batch),
                               stride(h.out_stride_token),
                               stride(h.out_stride_head),
                               h.count};
  };
  constexpr bool kWholeRows = kPairing == Pairing::kNeighbours;
  const int32_t row_threads = r.half * (kWholeRows ? 2 : 1) / kLanes;

  const bool heads_are_near = r.tokens <= 1 || r.q.count <= 1 || r.q.x_stride_head <= r.q.x_stride_token;
  const int32_t rows = std::max(1, threads / row_threads);
  const int32_t most_heads = std::max(r.q.count, r.k.count);
  const int32_t all_heads = power_of_two(std::min(divide_up(most_heads, kHeads), kMaxThreads));
  const int32_t block_heads = std::min({rows, all_heads, heads_are_near ? kMaxThreads : kFarHeads});
  const int32_t block_tokens =
      std::min({std::max(1, rows / block_heads), power_of_two(std::min(r.tokens, kMaxBlockTokens))});

  const auto groups = [&](const Heads& h) { return divide_up(h.count, block_heads * kHeads); };
  const int32_t token_blocks = divide_up(r.tokens, block_tokens);
  const int32_t n_chunks = r.batches > 1 ? std::max(1, divide_up(r.tokens - kChunkTokens / 2, kChunkTokens)) : 1;
  const int32_t chunk_blocks = divide_up(token_blocks, n_chunks);
  const int64_t blocks = int64_t{n_chunks} * r.batches * chunk_blocks;
  const int32_t grid_z = divide_up(blocks, kMaxGridY);
  if (blocks >= int64_t{1} << 31) return cudaErrorInvalidConfiguration;

  Arguments<Stride> a{};
  a.heads[0] = heads(r.q);
  a.heads[1] = heads(r.k);
  a.cos = r.cos.data;
  a.sin = r.sin.data;
  a.positions = r.positions;
  a.cu_seqlens = r.cu_seqlens;
  a.cos_stride_batch = static_cast<Stride>(r.cos.stride_batch);
  a.cos_stride_row = static_cast<Stride>(r.cos.stride_row);
  a.sin_stride_batch = static_cast<Stride>(r.sin.stride_batch);
  a.sin_stride_row = static_cast<Stride>(r.sin.stride_row);
  a.positions_stride_batch = static_cast<Stride>(r.positions_stride_batch);
  a.positions_stride_token = static_cast<Stride>(r.positions_stride_token);
  a.offset = r.offset;
  a.n_rows = r.n_rows;
  a.n_sequences = r.n_sequences;
  a.batches = r.batches;
  a.tokens = r.tokens;
  a.rotated = 2 * r.half / kLanes;
  a.before = r.rotary_offset / kLanes;
  a.after = (r.head_dim - r.rotary_offset - 2 * r.half) / kLanes;
  a.q_groups = groups(r.q);
  a.chunk_blocks = chunk_blocks;
  a.by_batches = Division::by(r.batches);
  a.by_chunk_blocks = Division::by(chunk_blocks);
  a.by_index = r.by_index;
  a.wide_indices = r.wide_indices;
  a.inverse = r.inverse;
  a.inplace = r.q.x == r.q.out && r.k.x == r.k.out;

  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(a.q_groups + groups(r.k), divide_up(blocks, grid_z), grid_z);
  config.blockDim = dim3(row_threads, block_heads, block_tokens);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = current_major() >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, rotate_kernel<T, TableT, kPairing, kLanes, kHeads, kLooksUp, kLarge, Stride>, a);
}

// Whether accesses of so many lanes to q and k, and of the pairs in them to cos and sin, hit whole aligned vectors.
template <typename T, typename TableT, int kLanes>
bool permits(const Rotation& r) {
  const int64_t part = r.interleaved ? 2 * r.half : r.half;  // what is read in accesses that follow each other
  int64_t elements = part | r.rotary_offset | r.head_dim;
  uintptr_t addresses = 0;
  int64_t largest = 0;
  for (const Heads* h : {&r.q, &r.k}) {
    if (h->count == 0) continue;
    addresses |= reinterpret_cast<uintptr_t>(h->x) | reinterpret_cast<uintptr_t>(h->out);
    for (const int64_t stride : {h->x_stride_batch, h->x_stride_token, h->x_stride_head, h->out_stride_batch,
                                 h->out_stride_token, h->out_stride_head}) {
      elements |= stride;
      largest = std::max(largest, stride / kLanes);
    }
  }
  const int64_t pairs = r.interleaved ? kLanes / 2 : kLanes;
  const int64_t table_bytes = std::min<int64_t>(pairs * sizeof(TableT), kWidestAccess);
  uintptr_t tables = reinterpret_cast<uintptr_t>(r.cos.data) | reinterpret_cast<uintptr_t>(r.sin.data);
  for (const int64_t stride : {r.cos.stride_batch, r.cos.stride_row, r.sin.stride_batch, r.sin.stride_row}) {
    tables |= static_cast<uintptr_t>(stride * sizeof(TableT));
    largest = std::max(largest, stride);
  }
  largest = std::max({largest, r.positions_stride_batch, r.positions_stride_token});
  return elements % kLanes == 0 && addresses % (kLanes * sizeof(T)) == 0 && tables % table_bytes == 0 &&
         largest < int64_t{1} << 32;
}

// The widest accesses. How many heads a thread rotates, and how many threads a block has, is from runs on H200s
// (docs/notes/004-rotation-in-cuda-bandwidth.md): blocks are many enough to fill the GPU, and few enough that starting
// them is not what takes the time.
template <typename T, typename TableT, bool kLooksUp>
cudaError_t launch_wide(const Rotation& r, cudaStream_t stream) {
  constexpr int kLanes = kWidestAccess / sizeof(T);
  constexpr Pairing kHalves = Pairing::kHalves, kNeighbours = Pairing::kNeighbours;
  const int64_t tokens = int64_t{r.batches} * r.tokens;
  const int64_t bytes = 2 * tokens * (r.q.count + r.k.count) * r.head_dim * static_cast<int64_t>(sizeof(T));
  if (r.interleaved) {
    if (bytes >= kLargeBytes) {
      return launch<T, TableT, kNeighbours, kLanes, 2, kLooksUp, true, uint32_t>(r, 128, stream);
    }
    if (bytes >= kLargeBytes / 4) {
      return launch<T, TableT, kNeighbours, kLanes, 4, kLooksUp, false, uint32_t>(r, 128, stream);
    }
    const int32_t threads = tokens <= 64 ? 64 : 128;
    return launch<T, TableT, kNeighbours, kLanes, 2, kLooksUp, false, uint32_t>(r, threads, stream);
  }
  if (bytes >= kLargeBytes) {
    constexpr int kHeads = kLooksUp ? 2 : 1;
    return launch<T, TableT, kHalves, kLanes, kHeads, kLooksUp, true, uint32_t>(r, 128 / kHeads, stream);
  }
  if (tokens >= 1024) return launch<T, TableT, kHalves, kLanes, 4, kLooksUp, false, uint32_t>(r, 64, stream);
  return launch<T, TableT, kHalves, kLanes, 2, kLooksUp, false, uint32_t>(r, 64, stream);
}

template <typename T, typename TableT>
cudaError_t launch_access(const Rotation& r, Access access, cudaStream_t stream) {
  constexpr int kWide = kWidestAccess / sizeof(T), kNarrow = kWide / 2;
  const auto may_be = [&](Access wanted) { return access == Access::kBest || access == wanted; };
  if (may_be(Access::kWide) && permits<T, TableT, kWide>(r)) {
    const bool looks_up = r.positions != nullptr || r.cu_seqlens != nullptr;
    return looks_up ? launch_wide<T, TableT, true>(r, stream) : launch_wide<T, TableT, false>(r, stream);
  }
  if constexpr (kNarrow > 1) {
    if (may_be(Access::kNarrow) && permits<T, TableT, kNarrow>(r)) {
      if (r.interleaved) {
        return launch<T, TableT, Pairing::kNeighbours, kNarrow, 2, true, false, uint32_t>(r, 128, stream);
      }
      return launch<T, TableT, Pairing::kHalves, kNarrow, 2, true, false, uint32_t>(r, 128, stream);
    }
  }
  if (!may_be(Access::kScalar)) return cudaErrorInvalidValue;
  if (r.interleaved) return launch<T, TableT, Pairing::kTwoScalars, 1, 1, true, false, uint64_t>(r, 128, stream);
  return launch<T, TableT, Pairing::kHalves, 1, 1, true, false, uint64_t>(r, 128, stream);
}

template <typename T>
cudaError_t launch_table(const Rotation& r, Access access, cudaStream_t stream) {
  if (r.table_dtype == DType::kFloat32) return launch_access<T, float>(r, access, stream);
  if constexpr (!std::is_same_v<T, float>) {
    if (r.table_dtype == r.dtype) return launch_access<T, T>(r, access, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int compute_major(int device) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> known[kMaxDevices];  // 0: not asked yet
  if (device < 0 || device >= kMaxDevices) return 0;
  int major = known[device].load(std::memory_order_relaxed);
  if (major == 0 && cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess) {
    known[device].store(major, std::memory_order_relaxed);
  }
  return major;
}

cudaError_t check_device() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, rotate_kernel<float, float, Pairing::kHalves, 1, 1, true, false, uint64_t>);
}

cudaError_t rotate(const Rotation& r, Access access, cudaStream_t stream) {
  if (r.batches == 0 || r.tokens == 0 || r.head_dim == 0 || r.q.count + r.k.count == 0) return cudaSuccess;
  switch (r.dtype) {
    case DType::kFloat16:
      return launch_table<__half>(r, access, stream);
    case DType::kBFloat16:
      return launch_table<__nv_bfloat16>(r, access, stream);
    case DType::kFloat32:
      return launch_table<float>(r, access, stream);
    case DType::kFloat64:
      return launch_table<double>(r, access, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace ropewalk
