// Vectors of the processor, and what products and attention need of them.

#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#if LANES > 4
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>


namespace {

using torch::stable::Tensor;
// The command line defines LANES, the numbers in a vector, and PANEL: three or four vectors, two with few registers.
constexpr int VECTORS = PANEL / LANES;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef float Four __attribute__((vector_size(16)));
typedef int32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
// Products that are worth a thread.
constexpr int64_t PER_THREAD = 1 << 18;

template <class T>
inline T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline float from_bfloat16(uint16_t value) {
  uint32_t bits = static_cast<uint32_t>(value) << 16;
  return load<float>(&bits);
}

inline Floats floats(const float* from) { return load<Floats>(from); }
inline Floats floats(const uint16_t* from) {
  return (Floats)(__builtin_convertvector(load<Halves>(from), Bits) << 16);
}

// Writes the first width results of N vectors; bias (N * LANES,) or null.
template <int N>
inline void store(Floats* sums, const float* bias, float* y, int64_t width) {
  for (int v = 0; bias && v < N; v++) sums[v] += load<Floats>(bias + LANES * v);
  std::memcpy(y, sums, width * sizeof(float));
}

template <int N>
inline void store(Floats* sums, const float* bias, uint16_t* y, int64_t width) {
  for (int v = 0; bias && v < N; v++) sums[v] += load<Floats>(bias + LANES * v);
  Halves rounded[N];
  for (int v = 0; v < N; v++) {
    Bits bits = (Bits)sums[v], nan = (Bits)(sums[v] != sums[v]);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    rounded[v] = __builtin_convertvector((nan & 0x7fc0) | (~nan & bits), Halves);
  }
  std::memcpy(y, rounded, width * sizeof(uint16_t));
}

// Calls run(first row, number of rows): as many at once as one of NUMBERS, the largest first, which ends with 1.
template <int... NUMBERS, class Run>
inline void for_rows(int64_t n_rows, Run run) {
  int64_t row = 0;
  auto at_once = [&](auto n) {
    for (; row + n <= n_rows; row += n) run(row, n);
  };
  (at_once(std::integral_constant<int, NUMBERS>()), ...);
}

// sum + a * b, rounded once where the processor does. The compiler is not asked to find such places: it would find
// others, whose results are then not those of torch.
inline Floats add_product(Floats sum, Floats a, Floats b) {
#if LANES == 16
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif LANES == 8 && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
  return sum + a * b;
#endif
}

// Found by name, torch's operators take longer than a small product.
inline Tensor dense(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

// Room for results of the type of rows, with n_out numbers in place of the last dimension.
inline Tensor room(const Tensor& rows, int64_t n_out) {
  std::vector<int64_t> shape(rows.sizes().begin(), rows.sizes().end()), strides(shape.size(), 1);
  shape.back() = n_out;
  for (size_t i = shape.size(); --i > 0;) strides[i - 1] = strides[i] * std::max<int64_t>(1, shape[i]);
  int32_t dtype, cpu = aoti_torch_device_type_cpu();
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(rows.get(), &dtype));
  AtenTensorHandle result;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(shape.size(), shape.data(), strides.data(), dtype, cpu, 0, &result));
  return Tensor(result);
}

}  // namespace
