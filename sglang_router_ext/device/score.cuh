// Score rules of the contract; the only definitions.
#pragma once

namespace rx {

inline constexpr float kLog2e = 1.4426950408889634f;

// 1 / x, relative error below 2^-23; infinity for 0 and for what is below 2^-126.
__device__ __forceinline__ float reciprocal(float x) {
  float result;
  asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / (1 + exp(-logit)) to rank with: absolute error below 2 * 2^-23, which is what a key needs. NaN stays NaN.
__device__ __forceinline__ float sigmoid_to_rank(float logit) {
  float power, score;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-logit * kLog2e));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(score) : "f"(1.0f + power));
  return score;
}

// 1 / (1 + exp(-logit)) to weigh with: relative error below 4 * 2^-23; 0 where that is below 2^-126 and for NaN.
// The product with log2(e) is carried to twice fp32: its rounding alone would grow to 2^-20 of the score at logit -18.
__device__ __forceinline__ float sigmoid_to_weigh(float logit) {
  constexpr float kLog2eLow = 1.925963033e-8f, kLn2 = 0.6931471805599453f;
  const float x = fminf(fmaxf(logit, -88.0f), 88.0f);
  const float high = -x * kLog2e;
  const float low = fmaf(-x, kLog2e, -high) - x * kLog2eLow;
  float power, score;
  // Volatile: under way before the rank is known, not after.
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(high));
  power = fmaf(power, low * kLn2, power);
  asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(score) : "f"(1.0f + power));  // ftz takes what is below 2^-126 to 0
  return logit == logit ? score : 0.0f;
}

}  // namespace rx
