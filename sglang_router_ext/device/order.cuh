// The order of rank keys, the tie rule and the NaN rule of the contract; the only definitions.
#pragma once

#include <bit>
#include <cstdint>

namespace rx {

// Ranks below every key, minus infinity included: an expert that is taken or does not exist.
inline constexpr uint32_t kNoKey = 0u;
inline constexpr float kNanKey = -1e30f;

inline constexpr uint32_t kNanOrder = ~std::bit_cast<uint32_t>(kNanKey);  // order_of(kNanKey)

// fp32 -> uint32 so that unsigned order is the order of the contract; NaN ranks as `nan`. A key is a score, never -0, plus a
// bias, so it is never -0 itself.
__device__ __forceinline__ uint32_t order_of(float key, float nan = kNanKey) {
  key = key == key ? key : nan;
  const uint32_t bits = __float_as_uint(key);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

// The other way round, of what order_of gave.
__device__ __forceinline__ float key_of(uint32_t order) {
  return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

}  // namespace rx
