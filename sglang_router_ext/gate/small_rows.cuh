// Gate GEMM for few rows: logits[rows, experts] = hidden[rows, hidden] x weight[experts, hidden]^T, bf16 in, fp32 out; or with
// kWide an fp32 weight, which three bf16 make up exactly. Each of their products with a bf16 is exact in fp32, so nothing is
// lost but what the additions round, of which there are three times as many. A block splits what it has read, in registers:
// no second copy of the weight goes stale.
//
// A block owns 8 * kTiles experts and one of kSlices slices of K; its kWarps warps split the slice. Grid: (experts, slices).
// With more than 16 rows it keeps its weights in registers and goes through the rows, 16 at a time; of each row it reads its
// slice only, and the next 16 are on their way while these are added up.
//   registers   each lane holds 16-byte pieces of 8 experts and of the rows; nothing of the operands goes through shared memory
//   shared      GateMemory: one partial tile per warp, added up by up to four lanes per logit
//   cluster     (kCluster) the slices of a tile are one cluster; slices 1.. send their sums to slice 0 with st.async
// The order of additions depends on (experts, hidden) alone, so a row's logits are bitwise the same in every batch.
// kHalved: with more than 16 rows half of the warps multiply, half a slice, and the slices are twice as many; so a block can
// have more experts, and each multiprocessor reads less. The others add up with them.
//
// mma.m16n8k16 fixes which lane holds which k, but a dot product may take its k in any order as long as both operands do:
// lane t of a quad takes 8 consecutive k with one 16-byte load and feeds them to two instructions.
#pragma once

#include <type_traits>

#include "../device/launch.cuh"

namespace rx {

struct SmallRowsParams {
  const __nv_bfloat16* hidden;  // [rows, hidden]
  const void* weight;           // [experts, hidden]
  float* out;                   // kCluster: logits [rows, experts]; else sums of one slice each [rows, slices, experts]
  int hidden_stride, weight_stride, out_stride, slice_stride;  // elements
  int rows, experts;
  int vectors;  // 16-byte pieces of one row: hidden / 8
};

__device__ __forceinline__ void mma_16x8x16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 0, which ptxas does not know: for each mma it would copy the operand that they share anew, into the four registers in a row
// that it wants (88 copies beside 24 mma). Through an addition of nothing it takes one copy.
__device__ __forceinline__ uint32_t unknown_zero(int count) {
  return static_cast<uint32_t>(count) >> 31;
}

// Eight consecutive elements of a weight, as they are read.
template <bool kWide>
struct Piece {
  uint4 vectors[kWide ? 2 : 1];
};

// Keeps it as it is, and its parts out of registers until they are used: the compiler would split it once for all rows.
__device__ __forceinline__ void hold(Piece<true>& piece) {
#pragma unroll
  for (int v = 0; v < 2; ++v)
    pin(piece.vectors[v].x), pin(piece.vectors[v].y), pin(piece.vectors[v].z), pin(piece.vectors[v].w);
}

// The same as bf16, two in a register; the part number kPart of three, the first eight bits of what the parts before left.
template <int kPart>
__device__ __forceinline__ uint4 part_of(const Piece<true>& piece) {
  auto pair = [](uint32_t low, uint32_t high) {
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      low = __float_as_uint(__uint_as_float(low) - __uint_as_float(low & 0xffff0000u));
      high = __float_as_uint(__uint_as_float(high) - __uint_as_float(high & 0xffff0000u));
    }
    return __byte_perm(low, high, 0x7632);
  };
  const uint4 &a = piece.vectors[0], &b = piece.vectors[1];
  return uint4{pair(a.x, a.y), pair(a.z, a.w), pair(b.x, b.y), pair(b.z, b.w)};
}

// How many rows a launch has: the operand of an mma is half empty, full, or there are several.
enum class RowCount { kEight, kSixteen, kMany };

inline RowCount row_count(int rows) {
  return rows <= 8 ? RowCount::kEight : rows <= 16 ? RowCount::kSixteen : RowCount::kMany;
}

// Whether half of a block's warps multiply, half a slice each.
template <RowCount kCount, bool kHalved>
inline constexpr bool kHalfSlicesOf = kHalved && kCount == RowCount::kMany;

// How many of kWarps warps multiply.
template <int kWarps, RowCount kCount, bool kHalved>
inline constexpr int kBusyWarps = kHalfSlicesOf<kCount, kHalved> ? kWarps / 2 : kWarps;

// What a block has in shared memory. kWarps: those that multiply.
template <int kWarps, int kTiles, RowCount kCount, bool kCluster>
struct alignas(16) GateMemory {
  static constexpr int kLogits = (kCount == RowCount::kEight ? 8 : 16) * 8 * kTiles;
  // Two, so that the next rows' are written while these are read, and one barrier a tile of rows is enough.
  static constexpr int kBuffers = kCount == RowCount::kMany ? 2 : 1;
  float partial[kBuffers][kWarps][kLogits + 8];  // 8: the lanes of a logit read from different banks
  float arrived[kCluster ? 8 : 1][kLogits];
  uint64_t barrier;
};

// One block's part: the columns [8 * kTiles * columns, ..) and the slice `slice`; with kMany the 16 rows number `first`, and
// every `step`-th 16 after them.
// kDepth: 32-wide chunks of K that a warp has in flight. kExact: the warps' shares are kDepth whole chunks each, which leaves
// out every bound on K; a cold GPU fetches the instructions from memory too.
// kWords: sums are read as they come, by blocks of this grid, so none is stored that nobody reads.
template <
    int kWarps,
    int kTiles,
    int kDepth,
    bool kExact,
    bool kHalved,
    bool kWide,
    RowCount kCount,
    bool kCluster,
    bool kWords = false>
__device__ __forceinline__ void gate_block(
    const SmallRowsParams& params,
    GateMemory<kBusyWarps<kWarps, kCount, kHalved>, kTiles, kCount, kCluster>& block_memory,
    int columns,
    int slice,
    int slices,
    int first = 0,
    int step = 1) {
  constexpr bool kTall = kCount != RowCount::kEight, kMany = kCount == RowCount::kMany;
  static_assert(!(kMany && kCluster), "the barrier of a cluster counts one tile of rows");
  constexpr int kHalves = kTall ? 2 : 1, kExperts = 8 * kTiles, kLogits = 8 * kHalves * kExperts, kThreads = kWarps * kWarp;
  static_assert(!kCluster || kLogits <= kThreads, "a thread of a cluster's block adds up one logit at most");
  constexpr int kLanes = 4 * kLogits <= kThreads ? 4 : 2 * kLogits <= kThreads ? 2 : 1;  // per logit
  constexpr int kBusy = kBusyWarps<kWarps, kCount, kHalved>;
  constexpr int kBuffers = GateMemory<kBusy, kTiles, kCount, kCluster>::kBuffers;
  // By a shuffle it stays in a register; ptxas asks where shared memory starts in every round, and what follows waits for it.
  uint32_t address = shared_address(&block_memory);
  if constexpr (kMany) address = __shfl_sync(kAllLanes, address, 0);
  using Memory = std::remove_reference_t<decltype(block_memory)>;
  Memory& memory = *static_cast<Memory*>(__cvta_shared_to_generic(address));
  auto& partial = memory.partial;
  auto& arrived = memory.arrived;
  auto& barrier = memory.barrier;

  const int warp = threadIdx.x / kWarp, group = threadIdx.x % kWarp / 4, lane = threadIdx.x % 4;
  const int first_expert = columns * kExperts;

  // This warp's 16-byte pieces of K, contiguous in memory: [begin, past).
  const int share = slice * kBusy + warp;
  const bool busy = kBusy == kWarps || warp < kBusy;
  int begin = share * kDepth * 4, past = begin + kDepth * 4;
  if constexpr (!kExact) {
    const int chunks = (params.vectors + 3) / 4, shares = slices * kBusy;
    begin = chunks * share / shares * 4;
    past = min(chunks * (share + 1) / shares * 4, params.vectors);
  }

  // Rows and experts past the end read the last one again; what comes of it is not stored.
  Piece<kWide> weight[kDepth][kTiles];
  constexpr int kBytes = kWide ? sizeof(float) : sizeof(__nv_bfloat16);
  const unsigned char* weight_row[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int expert = min(first_expert + tile * 8 + group, params.experts - 1);
    const int64_t element = static_cast<int64_t>(expert) * params.weight_stride + (begin + lane) * 8;
    weight_row[tile] = static_cast<const unsigned char*>(params.weight) + element * kBytes;
  }
  auto load_weight = [&](int done) {  // `done` pieces of this lane's lie behind
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int step = done + 4 * i;
        const bool inside = kExact || begin + lane + step < past;
#pragma unroll
        for (int v = 0; v < (kWide ? 2 : 1); ++v) {
          weight[i][tile].vectors[v] = inside ? load_once(weight_row[tile] + step * 8 * kBytes + v * sizeof(uint4)) : uint4{};
        }
      }
    }
  };
  if (busy) load_weight(0);

  const __nv_bfloat16* hidden_row[kHalves];
  auto go_to = [&](int first_row) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int row = min(first_row + group + 8 * half, params.rows - 1);
      hidden_row[half] = params.hidden + static_cast<int64_t>(row) * params.hidden_stride + (begin + lane) * 8;
    }
  };
  go_to(16 * first);

  // One row only: -0.13 us with 256 x 7168 weights, but with 16 rows the requests cost up to 0.6 us.
  if (params.rows == 1) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      if (kExact || begin + lane + 4 * i < past) ask_for(hidden_row[0] + 4 * i * 8);
    }
  }

  if constexpr (kCluster) {
    if (slice == 0 && threadIdx.x == 0) {
      const uint32_t bytes = (slices - 1) * params.rows * kExperts * sizeof(float);
      init_arrival(&barrier);
      fence_arrivals();
      expect_bytes(&barrier, bytes);
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  }
  if (!kCluster && threadIdx.x == 0) ask_for(params.out + (slice * params.slice_stride + first_expert));
  wait_for_producer();
  let_consumer_start();

  const uint32_t zero = unknown_zero(params.rows);
  uint4 row[kDepth][kHalves];
  auto load_rows = [&](int done) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int step = done + 4 * i;
        const bool inside = kExact || begin + lane + step < past;
        row[i][half] = inside ? load_shared_by_grids(hidden_row[half] + step * 8) : uint4{};
      }
    }
  };
  if (busy) load_rows(0);
#pragma unroll 1
  for (int n = 0;; ++n) {
    const int tile_of_rows = first + n * step, buffer = n % kBuffers;
    float sum[kTiles][2][4] = {};
    auto multiply = [&] {
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        const uint4 low = row[i][0], high = kTall ? row[i][kHalves - 1] : uint4{};
        const uint32_t first[4] = {low.x | zero, high.x | zero, low.y | zero, high.y | zero};
        const uint32_t second[4] = {low.z | zero, high.z | zero, low.w | zero, high.w | zero};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          auto add = [&](const uint4& part) {
            mma_16x8x16(sum[tile][0], first, part.x, part.y);
            mma_16x8x16(sum[tile][1], second, part.z, part.w);
          };
          if constexpr (kWide) {
            auto add_part = [&]<int kPart>() {
              if constexpr (kMany) hold(weight[i][tile]);
              add(part_of<kPart>(weight[i][tile]));
            };
            add_part.template operator()<0>(), add_part.template operator()<1>(), add_part.template operator()<2>();
          } else {
            add(weight[i][tile].vectors[0]);
          }
        }
      }
    };
    const bool more = kMany && 16 * (tile_of_rows + step) < params.rows;
    if (busy) {
      multiply();
      if constexpr (!kExact) {
        for (int done = 4 * kDepth; begin + done < past; done += 4 * kDepth) {
          load_weight(done);
          load_rows(done);
          multiply();
        }
      }

#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int at = group * kExperts + tile * 8 + lane * 2;
        *reinterpret_cast<float2*>(&partial[buffer][warp][at]) =
            make_float2(sum[tile][0][0] + sum[tile][1][0], sum[tile][0][1] + sum[tile][1][1]);
        if constexpr (kTall) {
          *reinterpret_cast<float2*>(&partial[buffer][warp][at + 8 * kExperts]) =
              make_float2(sum[tile][0][2] + sum[tile][1][2], sum[tile][0][3] + sum[tile][1][3]);
        }
      }
      if (more) {
        go_to(16 * (tile_of_rows + step));
        if constexpr (!kExact) load_weight(0);
        load_rows(0);
      }
    }
    __syncthreads();
    if constexpr (kCluster) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");

    // Four running sums for each half of a halved block, of its warps 4 i + {0..3}, shared out to the lanes of a logit; then
    // these by twos, and their sums by twos.
    constexpr int kRunning = kHalved && kBusy == kWarps ? 8 : 4, kChainWarps = kBusy / (kRunning / 4);
    const int first_row = kMany ? 16 * tile_of_rows : 0, rows = kMany ? min(16, params.rows - first_row) : params.rows;
    const int logits = rows * kExperts, part = threadIdx.x % kLanes;
#pragma unroll
    for (int at_once = kThreads / kLanes, before = 0; before < kLogits; before += at_once) {
      const int logit = before + threadIdx.x / kLanes;
      if (before + warp * (kWarp / kLanes) >= logits) break;
      constexpr int kSums = kRunning / kLanes;
      float sums[kSums] = {};
#pragma unroll
      for (int w = 0; w < kChainWarps; w += 4) {
#pragma unroll
        for (int c = 0; c < kSums; ++c) {
          const int running = part * kSums + c, from = running / 4 * kChainWarps + w + running % 4;
          if (kChainWarps % 4 != 0 && w + running % 4 >= kChainWarps) continue;
          sums[c] = w == 0 ? partial[buffer][from][logit] : sums[c] + partial[buffer][from][logit];
        }
      }
#pragma unroll
      for (int width = 1; width < kSums; width *= 2) {
#pragma unroll
        for (int c = 0; c < kSums; c += 2 * width) sums[c] += sums[c + width];
      }
      float total = sums[0];
#pragma unroll
      for (int apart = 1; apart < kLanes; apart *= 2) total += __shfl_xor_sync(kAllLanes, total, apart);
      const bool mine = part == 0 && logit < logits;
      if constexpr (kCluster) {
        if (!mine) return;
        if (slice > 0) {
          uint32_t target, remote_barrier;
          asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(target) : "r"(shared_address(&arrived[slice][logit])));
          asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(remote_barrier) : "r"(shared_address(&barrier)));
          asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(target),
                       "r"(__float_as_uint(total)),
                       "r"(remote_barrier)
                       : "memory");
          return;
        }
        wait_for_bytes(&barrier);
        for (int s = 1; s < slices; ++s) total += arrived[s][logit];
      }
      const int expert = first_expert + logit % kExperts;
      const int at = slice * params.slice_stride + (first_row + logit / kExperts) * params.out_stride + expert;
      if constexpr (kWords) {
        send_word_if(mine && expert < params.experts, params.out + at, total);
      } else {
        store_if(mine && (!kCluster || expert < params.experts), params.out + at, total);
      }
    }
    if (!more) return;
  }
}

template <int kWarps, int kTiles, int kDepth, bool kExact, bool kHalved, bool kWide, RowCount kCount, bool kCluster>
__global__ __launch_bounds__(kWarps * kWarp) void small_rows_kernel(const __grid_constant__ SmallRowsParams params) {
  __shared__ GateMemory<kWarps, kTiles, kCount, kCluster> memory;
  gate_block<kWarps, kTiles, kDepth, kExact, kHalved, kWide, kCount, kCluster>(
      params, memory, blockIdx.x, blockIdx.y, gridDim.y);
}

// Launches the kernel for 1 to 16 rows; the template follows from the shape (see small_rows.py) and the row count.
template <int kWarps, int kTiles, int kDepth, bool kExact, bool kHalved, bool kWide, bool kCluster>
inline void launch_small_rows(const SmallRowsParams& params, int slices, cudaStream_t stream) {
  const dim3 grid((params.experts + 8 * kTiles - 1) / (8 * kTiles), slices);
  auto* kernel = params.rows <= 8
                     ? &small_rows_kernel<kWarps, kTiles, kDepth, kExact, kHalved, kWide, RowCount::kEight, kCluster>
                     : &small_rows_kernel<kWarps, kTiles, kDepth, kExact, kHalved, kWide, RowCount::kSixteen, kCluster>;
  launch(kernel, grid, dim3(kWarps * kWarp), kCluster ? slices : 1, 0, stream, params);
}

// What both entry points fill in alike; the caller adds the output and its strides.
inline SmallRowsParams small_rows_params(TensorView hidden, TensorView weight) {
  SmallRowsParams params{};
  params.hidden = static_cast<const __nv_bfloat16*>(hidden.data_ptr());
  params.weight = weight.data_ptr();
  params.hidden_stride = static_cast<int>(hidden.stride(0));
  params.weight_stride = static_cast<int>(weight.stride(0));
  params.rows = static_cast<int>(hidden.size(0));
  params.experts = static_cast<int>(weight.size(0));
  params.vectors = static_cast<int>(hidden.size(1) / 8);
  return params;
}

// Entry point of the gate alone: complete logits.
template <int kWarps, int kTiles, int kDepth, bool kExact, bool kHalved, bool kWide>
struct SmallRows {
  // hidden [rows, hidden] bf16, weight [experts, hidden] bf16 or fp32, logits [rows, experts] fp32 (written); slices 1 to 8
  static void run(TensorView hidden, TensorView weight, TensorView logits, int64_t slices) {
    SmallRowsParams params = small_rows_params(hidden, weight);
    params.out = static_cast<float*>(logits.data_ptr());
    params.out_stride = static_cast<int>(logits.stride(0));
    launch_small_rows<kWarps, kTiles, kDepth, kExact, kHalved, kWide, true>(
        params, static_cast<int>(slices), stream_of(hidden));
  }
};

}  // namespace rx
