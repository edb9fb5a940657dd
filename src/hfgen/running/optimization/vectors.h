// Vectors of the processor, and what products and attention need of them.

#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#if LANES > 4
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>


namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
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

inline Floats floats(const float* from) { return load<Floats>(from); }
inline Floats floats(const BFloat16* from) {
#if LANES == 8
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(from)), 16);
#else
  return (Floats)(__builtin_convertvector(load<Halves>(from), Bits) << 16);
#endif
}
inline Floats floats(const Half* from) {
#if LANES == 16
  return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
#elif LANES == 8 && defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
#else
  Floats values;
  for (int i = 0; i < LANES; i++) values[i] = from[i];
  return values;
#endif
}

// Writes the first width results, usually those of N vectors: a length that the compiler knows.
template <int N, class T>
inline void write(const void* results, T* y, int64_t width) {
  constexpr int64_t usual = N * LANES;
  if (width == usual) std::memcpy(y, results, usual * sizeof(T));
  else std::memcpy(y, results, width * sizeof(T));
}

template <int N>
inline void store(const Floats* results, float* y, int64_t width) {
  write<N>(results, y, width);
}

template <int N>
inline void store(const Floats* results, BFloat16* y, int64_t width) {
  Halves rounded[N];
  for (int v = 0; v < N; v++) {
    Bits bits = (Bits)results[v], nan = (Bits)(results[v] != results[v]);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    rounded[v] = __builtin_convertvector((nan & 0x7fc0) | (~nan & bits), Halves);
  }
  write<N>(rounded, y, width);
}

template <int N>
inline void store(const Floats* results, Half* y, int64_t width) {
  for (int64_t i = 0; i < width; i++) y[i] = results[i / LANES][i % LANES];
}

// The numbers of a dense tensor of float32, bfloat16 or float16.
struct Numbers {
  void* data;
  int32_t type;

  explicit Numbers(const Tensor& x) : data(x.data_ptr()) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &type));
    bool fits = type == FLOAT || type == BFLOAT16 || type == HALF;
    STD_TORCH_CHECK(fits, "hfgen's operators take numbers of float32, bfloat16 and float16");
  }

  // Returns run(data), as a pointer of the numbers' type.
  template <class Run> auto with(Run run) const {
    if (type == FLOAT) return run(static_cast<float*>(data));
    return type == BFLOAT16 ? run(static_cast<BFloat16*>(data)) : run(static_cast<Half*>(data));
  }

  inline static const int32_t FLOAT = aoti_torch_dtype_float32(), BFLOAT16 = aoti_torch_dtype_bfloat16(),
                              HALF = aoti_torch_dtype_float16();
};

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
