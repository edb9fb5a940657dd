// Products of activations with packed weights, for few rows: each weight is read once, in the order of memory.
//
// A panel has the weights of PANEL outputs, one or four inputs after the other. Sums are float32, over the inputs in
// their order, or integers, which are exact: a row's results depend on nothing but the row. Registers hold the sums
// of up to six rows.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

using torch::stable::Tensor;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Words __attribute__((vector_size(64)));
constexpr int64_t LANES = 16, PANEL = 64;
constexpr int VECTORS = PANEL / LANES;
// Products that are worth a thread.
constexpr int64_t PER_THREAD = 1 << 18;

template <class T>
inline T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Calls run(panel, its first output, its width) for all panels, which threads share.
template <class Run>
void for_panels(int64_t n_rows, int64_t n_in, int64_t n_out, Run run) {
  int64_t grain = std::max<int64_t>(1, PER_THREAD / (n_rows * n_in * PANEL));
  torch::stable::parallel_for(0, (n_out + PANEL - 1) / PANEL, grain, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; p++) run(p, p * PANEL, std::min(PANEL, n_out - p * PANEL));
  });
}

// Calls run for six rows at once, and for what remains in smaller blocks: run(first row, number of rows).
template <class Run>
inline void for_rows(int64_t n_rows, Run run) {
  int64_t row = 0;
  for (; row + 6 <= n_rows; row += 6) run(row, std::integral_constant<int, 6>());
  for (; row + 4 <= n_rows; row += 4) run(row, std::integral_constant<int, 4>());
  for (; row + 2 <= n_rows; row += 2) run(row, std::integral_constant<int, 2>());
  for (; row < n_rows; row++) run(row, std::integral_constant<int, 1>());
}

// ---------------------------------------------------------------- weights of bfloat16

// ROWS rows of x (rows, n_in) by a panel; a word of it has the weights of two vectors. y has rows of n_out.
template <int ROWS>
inline void block(const float* x, const uint16_t* panel, float* y, int64_t n_in, int64_t n_out, int64_t width) {
  Floats sums[ROWS][VECTORS] = {};
  for (int64_t i = 0; i < n_in; i++, panel += PANEL) {
    Floats weights[VECTORS];
    for (int v = 0; v < VECTORS; v += 2) {
      Words pairs = load<Words>(panel + LANES * v);
      weights[v] = (Floats)(pairs << 16);
      weights[v + 1] = (Floats)(pairs & (int32_t)0xffff0000);
    }
    for (int row = 0; row < ROWS; row++) {
      Floats value = x[row * n_in + i] - Floats{};
      for (int v = 0; v < VECTORS; v++) sums[row][v] += weights[v] * value;
    }
  }
  for (int row = 0; row < ROWS; row++) std::memcpy(y + row * n_out, sums[row], width * sizeof(float));
}

// x (rows, n_in) float32 by weights (panels, n_in, PANEL) bfloat16.
Tensor linear16(const Tensor& x, const Tensor& weights, int64_t n_out) {
  Tensor rows = torch::stable::contiguous(x);
  std::vector<int64_t> shape(rows.sizes().begin(), rows.sizes().end());
  shape.back() = n_out;
  Tensor result = torch::stable::new_empty(rows, shape);
  int64_t n_in = weights.size(1), n_rows = rows.numel() / n_in;
  auto from = static_cast<const float*>(rows.data_ptr());
  auto to = static_cast<float*>(result.data_ptr());
  auto packed = static_cast<const uint16_t*>(weights.data_ptr());
  for_panels(n_rows, n_in, n_out, [&](int64_t panel, int64_t output, int64_t width) {
    for_rows(n_rows, [&](int64_t row, auto n) {
      block<n>(from + row * n_in, packed + panel * PANEL * n_in, to + row * n_out + output, n_in, n_out, width);
    });
  });
  return result;
}

// ---------------------------------------------------------------- weights and activations of int8

// sums plus the products of four unsigned bytes of a word with four signed ones.
inline Words dot(Words sums, Words bytes, Words weights) {
#ifdef __AVX512VNNI__
  return (Words)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)bytes, (__m512i)weights);
#else
  for (int shift = 0; shift < 32; shift += 8) sums += (bytes >> shift & 0xff) * (weights << (24 - shift) >> 24);
  return sums;
#endif
}

// Rounds x (n,) to bytes from 1 to 255, of which 128 is zero; returns what a step is worth, NaN if x is not finite.
inline float quantize(const float* x, int64_t n, uint8_t* bytes) {
  int32_t bits = 0;  // of the largest magnitude: they are in the order of the numbers
  for (int64_t i = 0; i < n; i++) bits = std::max(bits, load<int32_t>(x + i) & 0x7fffffff);
  float largest = load<float>(&bits);
  if (!std::isfinite(largest)) {
    std::memset(bytes, 128, n);
    return std::numeric_limits<float>::quiet_NaN();
  }
  largest = std::max(largest, 1e-12f);
  float steps = 127 / largest;
  constexpr float whole = 3 << 22;  // the sum has no bits behind the point
  for (int64_t i = 0; i < n; i++) bytes[i] = static_cast<uint8_t>(static_cast<int32_t>(x[i] * steps + whole - whole) + 128);
  return largest / 127;
}

// ROWS rows of x (rows, n_words, 4) by a panel (n_words, PANEL, 4).
template <int ROWS>
inline void block(const uint8_t* x, const int8_t* panel, const int32_t* offsets, const float* scales,
                  const float* steps, float* y, int64_t n_words, int64_t n_out, int64_t width) {
  Words sums[ROWS][VECTORS];
  for (int row = 0; row < ROWS; row++) std::memcpy(sums[row], offsets, sizeof sums[row]);
  for (int64_t i = 0; i < n_words; i++, panel += 4 * PANEL) {
    Words weights[VECTORS];
    for (int v = 0; v < VECTORS; v++) weights[v] = load<Words>(panel + 4 * LANES * v);
    for (int row = 0; row < ROWS; row++) {
      Words bytes = load<int32_t>(x + 4 * (row * n_words + i)) - Words{};
      for (int v = 0; v < VECTORS; v++) sums[row][v] = dot(sums[row][v], bytes, weights[v]);
    }
  }
  for (int row = 0; row < ROWS; row++) {
    Floats results[VECTORS];
    for (int v = 0; v < VECTORS; v++)
      results[v] = __builtin_convertvector(sums[row][v], Floats) * load<Floats>(scales + LANES * v) * steps[row];
    std::memcpy(y + row * n_out, results, width * sizeof(float));
  }
}

// x (rows, n_in) float32, each row rounded to int8 by its largest value, by weights (panels, n_words, PANEL, 4).
// scales and offsets (outputs,): what a step of the weight is worth, and -128 times the sum of the weights.
Tensor linear8(const Tensor& x, const Tensor& weights, const Tensor& scales, const Tensor& offsets, int64_t n_out) {
  Tensor rows = torch::stable::contiguous(x);
  std::vector<int64_t> shape(rows.sizes().begin(), rows.sizes().end());
  int64_t n_in = shape.back(), n_words = weights.size(1), n_rows = rows.numel() / n_in;
  shape.back() = n_out;
  Tensor result = torch::stable::new_empty(rows, shape);
  auto from = static_cast<const float*>(rows.data_ptr());
  auto to = static_cast<float*>(result.data_ptr());
  auto packed = static_cast<const int8_t*>(weights.data_ptr());
  auto scale = static_cast<const float*>(scales.data_ptr());
  auto offset = static_cast<const int32_t*>(offsets.data_ptr());
  std::vector<uint8_t> bytes(n_rows * n_words * 4);
  std::vector<float> steps(n_rows);
  for (int64_t row = 0; row < n_rows; row++) steps[row] = quantize(from + row * n_in, n_in, &bytes[row * n_words * 4]);
  for_panels(n_rows, n_in, n_out, [&](int64_t panel, int64_t output, int64_t width) {
    for_rows(n_rows, [&](int64_t row, auto n) {
      block<n>(&bytes[row * n_words * 4], packed + panel * PANEL * n_words * 4, offset + output, scale + output,
               &steps[row], to + row * n_out + output, n_words, n_out, width);
    });
  });
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY(hfgen_native, library) {
  library.def("linear16(Tensor x, Tensor weights, int n_out) -> Tensor");
  library.def("linear8(Tensor x, Tensor weights, Tensor scales, Tensor offsets, int n_out) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hfgen_native, CPU, library) {
  library.impl("linear16", TORCH_BOX(&linear16));
  library.impl("linear8", TORCH_BOX(&linear8));
}
