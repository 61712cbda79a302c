// Score rules of the contract; the only definitions.
#pragma once

namespace rx {

inline constexpr float kLog2e = 1.4426950408889634f, kLog2eLow = 1.925963033e-8f, kLn2 = 0.6931471805599453f;
inline constexpr float kMostSqrtSoftplus = 0x1p64f;  // of an infinite logit, so that weights stay finite

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

// 2^x. Volatile: under way before the rank is known, not after.
__device__ __forceinline__ float power_of_two(float x) {
  float power;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// exp(x) for x <= 88: relative error below 2 * 2^-23; 0 below -88 and for NaN. The product with log2(e) is carried to twice
// fp32: its rounding alone would grow to 2^-20 at -18.
__device__ __forceinline__ float exp_of(float x) {
  x = fmaxf(x, -88.0f);
  const float high = x * kLog2e;
  const float low = fmaf(x, kLog2e, -high) + x * kLog2eLow;
  const float power = power_of_two(high);
  return fmaf(power, low * kLn2, power);
}

// 1 / (1 + exp(-logit)) to weigh with: relative error below 4 * 2^-23; 0 where that is below 2^-126 and for NaN.
__device__ __forceinline__ float sigmoid_to_weigh(float logit) {
  const float score = reciprocal(1.0f + exp_of(-fmaxf(logit, -88.0f)));  // ftz takes what is below 2^-126 to 0
  return logit == logit ? score : 0.0f;
}

// sqrt(log(1 + exp(logit))): relative error below 4 * 2^-23; 0 where that is below 2^-126. NaN stays NaN. With h = exp(-|logit|
// / 2) it is h * sqrt(log1p(h^2) / h^2) below 0, which keeps its digits where exp(logit) has none. log1p(z) / z is a polynomial
// that is right to a rounding from 0 to 1. Behind a cold cache an instruction takes about three cycles, so they are few.
__device__ __forceinline__ float sqrt_softplus(float logit) {
  constexpr float kHalfLog2e = 0.5f * kLog2e, kHalfLog2eLow = 0.5f * kLog2eLow;
  const float distance = fminf(fabsf(logit), 176.0f), high = -distance * kHalfLog2e;
  const float low = fmaf(distance, -kHalfLog2eLow, fmaf(distance, -kHalfLog2e, -high));
  const float power = power_of_two(high), h = fmaf(power, low * kLn2, power), z = h * h;
  float ratio = 0.005364818498f;
  ratio = fmaf(z, ratio, -0.030065769330f);
  ratio = fmaf(z, ratio, 0.079204499722f);
  ratio = fmaf(z, ratio, -0.137537986040f);
  ratio = fmaf(z, ratio, 0.191536530852f);
  ratio = fmaf(z, ratio, -0.248571634293f);
  ratio = fmaf(z, ratio, 0.333213239908f);
  ratio = fmaf(z, ratio, -0.499996483326f);
  ratio = fmaf(z, ratio, 1.0f);
  const float under = logit < 0.0f ? ratio : fmaf(z, ratio, logit);
  float root, score;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(under));
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(score) : "f"(logit < 0.0f ? h * root : root), "f"(kMostSqrtSoftplus));
  return score;
}

// softcap * tanh(logit / softcap): absolute error below 4 * 2^-23 of the softcap.
__device__ __forceinline__ float capped(float logit, float softcap) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(logit * (2.0f * kLog2e / softcap)));
  return softcap * fmaf(-2.0f, reciprocal(1.0f + power), 1.0f);
}

// What a softmax key weighs beside the largest of its row, before the sum is known; 0 for NaN.
__device__ __forceinline__ float softmax_part(float key, float largest) {
  return key == largest ? 1.0f : exp_of(key - largest);
}

}  // namespace rx
