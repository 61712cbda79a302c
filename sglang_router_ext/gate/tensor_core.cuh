// Gate GEMM for any number of rows: logits[rows, experts] = hidden[rows, hidden] x weight[experts, hidden]^T, bf16 in, fp32
// out, on a warpgroup's tensor cores (Hopper). A row's logits are bitwise the same in every batch.
//
// K is cut into kSlices slices. The tensor cores add up a slice from 0 on; slices are added by twos, and these four sums one
// after the other. Whoever adds up what, and how large a block's tile is, changes no bit.
//
// A block owns kTall warpgroups of 64 rows each, and kN experts. kSplit blocks are a cluster: they share K, 8 / kSplit slices
// each, and add up their sums through shared memory; or (kRaw) they leave that to whoever reads them. One more warpgroup, of
// which one thread, has the copy engine bring 64 k of the rows and of the experts into one of kStages stages.
//   shared      stages; then the block's sums over them, and behind them those of earlier quarters
//   registers   sums of a slice, and of two
//
// Many rows take what shared memory lets through: each 64 k are written to it once and the experts read by every warpgroup
// (with 128 rows and 144 experts 690 of its cycles, while the tensor cores multiply for 576).
//
// What lost: experts brought to several blocks at once by multicast (8,192 rows: +1.9 us), two warpgroups side by side on the
// same rows (+2.2 us), a stash of sums in global memory (+10 us), clusters of four (1,024 rows: 15.3 us where two take 12.8).
#pragma once

#include "../device/hopper.cuh"

namespace rx {

struct TensorCoreParams {
  float* out;          // logits [rows, experts]; kRaw: sums of one slice each [rows, slices, experts]
  int64_t out_stride;  // elements
  int slice_stride;
  int rows, experts;
  int chunks;   // of kTileK k
  int columns;  // blocks side by side that have all experts
  bool vector;  // out allows 16-byte stores
};

inline constexpr int kTeamRows = 64, kSlices = 8;

__device__ __forceinline__ float4 added(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

template <int kTileRows, int kExperts, int kStages, int kSplit>
struct TensorCoreMemory {
  static constexpr bool kApart = kSplit <= 2;  // a block has several quarters of the sums
  static constexpr int kPitch = kExperts + 8;  // floats; the lanes of an access are in different banks
  struct Stage {
    __nv_bfloat16 hidden[kTileRows][kTileK];
    __nv_bfloat16 weight[kExperts][kTileK];
  };
  union {
    Stage stages[kStages];
    float sums[kTileRows][kPitch];  // once nobody reads stages any more
  };
  float apart[kApart ? kTileRows : 1][kApart ? kPitch : 4];
  uint64_t full[kStages], empty[kStages];
};

template <int kN, int kTall, int kSplit, int kStages, bool kRaw>
__global__ __launch_bounds__((kTall + 1) * kWarpgroup, 1) void tensor_core_kernel(
    const __grid_constant__ CUtensorMap hidden,
    const __grid_constant__ CUtensorMap weight,
    const __grid_constant__ TensorCoreParams params) {
  constexpr int kMine = kSlices / kSplit, kTileRows = kTeamRows * kTall;
  static_assert(kSlices == 8 && kSplit * kMine == kSlices && kSplit != 4);
  static_assert(!kRaw || kMine == 1);
  constexpr bool kCluster = kSplit > 1 && !kRaw;
  using Memory = TensorCoreMemory<kTileRows, kN, kStages, kSplit>;
  extern __shared__ __align__(1024) unsigned char bytes[];
  Memory& memory = *reinterpret_cast<Memory*>(bytes);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, split = blockIdx.y;
  const int first_row = blockIdx.x / params.columns * kTileRows, first_expert = blockIdx.x % params.columns * kN;
  auto chunk_of = [&](int slice) { return static_cast<int>(static_cast<int64_t>(params.chunks) * slice / kSlices); };
  const int begin = chunk_of(split * kMine);

  if (threadIdx.x == 0) {
    prefetch_map(&hidden), prefetch_map(&weight);
    for (int i = 0; i < kStages; ++i) {
      init_barrier(&memory.full[i], 1);
      init_barrier(&memory.empty[i], kTall * (kWarpgroup / kWarp));
    }
    fence_arrivals();
  }
  if constexpr (kCluster) {
    arrive_in_cluster();
    wait_for_cluster();
  } else {
    __syncthreads();
  }
  // More registers for those that keep sums, fewer for the copying one.
  constexpr int kRegisters = kMine == 1 || kTall == 1 ? 0 : 240;
  if (warp >= kTall * (kWarpgroup / kWarp)) {
    if constexpr (kRegisters > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    let_consumer_start();
    if (threadIdx.x == kTall * kWarpgroup) {
      // Where the next copy comes from and goes to; counted on, since a division takes longer than all else here.
      struct Next {
        int k, stage = 0, parity = 1;  // parity: of the phase before, in which the stage was read
        __device__ __forceinline__ void count() {
          k += kTileK;
          if (++stage == kStages) stage = 0, parity ^= 1;
        }
      };
      const int steps = chunk_of((split + 1) * kMine) - begin, ahead = min(kStages, steps);
      auto copy_weight = [&](const Next& next) {
        typename Memory::Stage& stage = memory.stages[next.stage];
        uint64_t* full = &memory.full[next.stage];
        expect_bytes(full, sizeof(stage));
        copy_tile(stage.weight, weight, first_expert, next.k, full);
      };
      auto copy_hidden = [&](const Next& next) {
        copy_tile(memory.stages[next.stage].hidden, hidden, first_row, next.k, &memory.full[next.stage]);
      };
      Next next{begin * kTileK};
      for (int step = 0; step < ahead; ++step, next.count()) copy_weight(next);
      wait_for_producer();
      next = Next{begin * kTileK};
      for (int step = 0; step < ahead; ++step, next.count()) copy_hidden(next);
#pragma unroll 1
      for (int step = ahead; step < steps; ++step, next.count()) {
        wait_for_phase(&memory.empty[next.stage], next.parity);
        copy_weight(next);
        copy_hidden(next);
      }
    }
    __syncwarp();
    if constexpr (kCluster) arrive_in_cluster(), wait_for_cluster();
  } else {
    if constexpr (kRegisters > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
    wait_for_producer();   // who read `out` before is done
    let_consumer_start();  // not before: what comes may read its bias at once, as small_rows' consumers do
    const int tall = __shfl_sync(kAllLanes, warp / (kWarpgroup / kWarp), 0);
    constexpr int kSums = kN / 2;
    float sum[kSums], earlier[kMine > 1 ? kSums : 1];
    auto each = [](auto what) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) what(i);
    };
    // Where this lane's sums stand in a tile of the block's rows and experts.
    const int row = tall * kTeamRows + warp % 4 * 16 + lane / 4, expert = lane % 4 * 2;
    auto each_pair = [&](auto what) {
#pragma unroll
      for (int i = 0; i < kSums; i += 2) what(i, row + i % 4 * 4, expert + i / 4 * 8);
    };
    auto inside = [&](int r, int e) { return first_row + r < params.rows && first_expert + e < params.experts; };
    auto place = [&](int r, int e) {
      return params.out + (first_row + r) * params.out_stride + (split * params.slice_stride + first_expert + e);
    };
    int step = 0, at = 0, parity = 0, before = 0;  // stages: the next one, and the one before
    auto release = [&] {
      if (lane == 0) arrive(&memory.empty[before]);
    };
#pragma unroll 1
    for (int mine = 0; mine < kMine; ++mine) {
      const int past = chunk_of(split * kMine + mine + 1) - begin, first = step;
      if (step == past) each([&](int i) { sum[i] = 0.0f; });
#pragma unroll 1
      for (; step < past; ++step) {
        const typename Memory::Stage& stage = memory.stages[at];
        wait_for_phase(&memory.full[at], parity);
        const uint64_t a = describe_tile(stage.hidden[tall * kTeamRows]), b = describe_tile(stage.weight);
        fence_multiply();
#pragma unroll
        for (int k = 0; k < kTileK / 16; ++k) {
          multiply<kN>(sum, a + k * kDescribeK, b + k * kDescribeK, k > 0 || step > first);
        }
        commit_multiply();
        wait_for_multiply<1>();
        if (step > first) release();
        before = at;
        if (++at == kStages) at = 0, parity ^= 1;
      }
      wait_for_multiply<0>();
      if (step > first) release();
      if constexpr (kMine > 1) {
        if (mine % 2 == 0) {
          each([&](int i) { earlier[i] = sum[i]; });
          continue;
        }
        each([&](int i) { sum[i] = earlier[i] + sum[i]; });
      }
      if constexpr (Memory::kApart) {
        each_pair([&](int i, int r, int e) {
          float2& apart = *reinterpret_cast<float2*>(&memory.apart[r][e]);
          if (kSplit == 1 && mine > 1) sum[i] = apart.x + sum[i], sum[i + 1] = apart.y + sum[i + 1];
          if (mine + 1 < kMine) apart = make_float2(sum[i], sum[i + 1]);
        });
      }
    }
    if constexpr (!kCluster) {
      each_pair([&](int i, int r, int e) {
        if (params.vector) {
          if (inside(r, e)) *reinterpret_cast<float2*>(place(r, e)) = make_float2(sum[i], sum[i + 1]);
        } else {
          if (inside(r, e)) *place(r, e) = sum[i];
          if (inside(r, e + 1)) *(place(r, e) + 1) = sum[i + 1];
        }
      });
    } else {
      asm volatile("bar.sync 1, %0;" ::"n"(kTall * kWarpgroup) : "memory");  // nobody reads stages any more
      each_pair([&](int i, int r, int e) { *reinterpret_cast<float2*>(&memory.sums[r][e]) = make_float2(sum[i], sum[i + 1]); });
      arrive_in_cluster();
      wait_for_cluster();
      // Every kSplit-th row of the tile, four experts a thread. All that a thread needs is on its way before it adds.
      constexpr int kFours = kN / 4, kThreads = kTall * kWarpgroup, kItems = kTileRows / kSplit * kFours;
      constexpr int kAtOnce = (kItems + kThreads - 1) / kThreads < 3 ? (kItems + kThreads - 1) / kThreads : 3;
      constexpr int kEach = Memory::kApart ? 2 : 1, kValues = kEach * kSplit;  // of a block: two quarters, or one of any kind
#pragma unroll 1
      for (int first = threadIdx.x; first < kItems; first += kAtOnce * kThreads) {
        float4 value[kAtOnce][kValues];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int item = first + i * kThreads, r = split + kSplit * (item / kFours), e = item % kFours * 4;
          if (item >= kItems || !inside(r, e)) continue;
#pragma unroll
          for (int v = 0; v < kValues; ++v) {
            const float* mine = kEach == 2 && v % 2 == 0 ? &memory.apart[r][e] : &memory.sums[r][e];
            value[i][v] = load_four_of(mine, v / kEach);
          }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int item = first + i * kThreads, r = split + kSplit * (item / kFours), e = item % kFours * 4;
          if (item >= kItems || !inside(r, e)) continue;
          constexpr int kTwo = kSplit == 8 ? 2 : 1;
          float4 all;
#pragma unroll
          for (int v = 0; v < kValues; v += kTwo) {
            const float4 quarter = kTwo == 2 ? added(value[i][v], value[i][v + kTwo - 1]) : value[i][v];
            all = v == 0 ? quarter : added(all, quarter);
          }
          if (params.vector) {
            *reinterpret_cast<float4*>(place(r, e)) = all;
          } else {
            const float four[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              if (inside(r, e + c)) *(place(r, e) + c) = four[c];
            }
          }
        }
      }
    }
  }
  if constexpr (kCluster) {  // nobody leaves whose memory others read or write
    arrive_in_cluster();
    wait_for_cluster();
  }
}

// Stages of a block that may have `room` bytes, ten at most.
template <int kN, int kTall, int kSplit>
constexpr int stages_in(int room) {
  constexpr int kTileRows = kTeamRows * kTall, kStage = (kTileRows + kN) * kTileK * sizeof(__nv_bfloat16);
  constexpr int kOthers = (kSplit <= 2 ? sizeof(float) * kTileRows * (kN + 8) : 0) + 1024;  // sums apart; barriers, alignment
  return (room - kOthers) / kStage < 10 ? (room - kOthers) / kStage : 10;
}

inline constexpr int kRoom = 227 * 1024, kHalfRoom = 113 * 1024;  // shared memory of a block, alone or one of two

// Launches it; out: logits [rows, experts], or sums [rows, slices, pitch] with kRaw.
template <int kN, int kTall, int kSplit, int kStages, bool kRaw = false>
inline void launch_tensor_core(TensorView hidden, TensorView weight, TensorView out) {
  constexpr int kTileRows = kTeamRows * kTall;
  TensorCoreParams params{};
  params.out = static_cast<float*>(out.data_ptr());
  params.out_stride = out.stride(0);
  params.slice_stride = kRaw ? static_cast<int>(out.stride(1)) : 0;
  params.rows = static_cast<int>(hidden.size(0));
  params.experts = static_cast<int>(weight.size(0));
  params.chunks = static_cast<int>((hidden.size(1) + kTileK - 1) / kTileK);
  params.columns = (params.experts + kN - 1) / kN;
  params.vector = params.experts % 4 == 0 && params.out_stride % 4 == 0;
  const unsigned tiles = (params.rows + kTileRows - 1) / kTileRows;
  launch(
      &tensor_core_kernel<kN, kTall, kSplit, kStages, kRaw>,
      dim3(tiles * params.columns, kSplit),
      dim3((kTall + 1) * kWarpgroup),
      kRaw ? 1 : kSplit,
      sizeof(TensorCoreMemory<kTileRows, kN, kStages, kSplit>),
      stream_of(hidden),
      tile_map(hidden, kTileRows),
      tile_map(weight, kN),
      params);
}

// Entry point. How the work is divided; it changes no bit.
enum class Way {
  kNarrow,  // kNarrow experts a block, K shared by eight blocks
  kMiddle,  // kMiddle experts, K shared by eight; two blocks a multiprocessor
  kHalves,  // K shared by two
  kAlone,   // K for itself
  kTall     // the same, 128 rows; of more than 144 experts kAlone
};

template <int kNarrow, int kMiddle>
struct TensorCore {
  // hidden [rows, hidden] bf16, weight [experts, hidden] bf16, logits [rows, experts] fp32 (written)
  static void run(TensorView hidden, TensorView weight, TensorView logits, int64_t way) {
    switch (static_cast<Way>(way)) {
      case Way::kNarrow:
        return launch_tensor_core<kNarrow, 1, 8, stages_in<kNarrow, 1, 8>(kRoom)>(hidden, weight, logits);
      case Way::kMiddle:
        return launch_tensor_core<kMiddle, 1, 8, stages_in<kMiddle, 1, 8>(kHalfRoom)>(hidden, weight, logits);
      case Way::kHalves:
        return launch_tensor_core<kMiddle, 1, 2, stages_in<kMiddle, 1, 2>(kRoom)>(hidden, weight, logits);
      case Way::kTall:
        if constexpr (kMiddle <= 144) {  // more do not fit into registers
          return launch_tensor_core<kMiddle, 2, 1, stages_in<kMiddle, 2, 1>(kRoom)>(hidden, weight, logits);
        }
      default:
        return launch_tensor_core<kMiddle, 1, 1, stages_in<kMiddle, 1, 1>(kRoom)>(hidden, weight, logits);
    }
  }
};

}  // namespace rx
