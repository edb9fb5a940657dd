// Products of activations with packed weights, and attention, for few rows: what is read, is read once, in the order of
// memory.
//
// A panel has the weights of PANEL outputs: words with two or four inputs of an output, then the next inputs. Sums are
// float32, over the inputs in their order, or integers, which are exact: a row's results depend on nothing but the
// row. Registers hold the sums of up to eight rows; where a panel is narrow, those of several panels for one or two.
// Activations and results are float32 or bfloat16.

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
// Vectors of outputs that are summed at once for a number of rows: as many as registers hold, and enough that a sum
// does not wait for itself.
constexpr int vectors_for(int rows) { return VECTORS > 2 || rows > 2 ? VECTORS : 8 / rows; }
constexpr int MOST_ROWS = VECTORS == 3 ? 8 : 6;
// Bytes between what is read and what memory is asked for.
constexpr int64_t AHEAD = 16384;
// Panels whose rows are done before the next ones.
constexpr int64_t GROUP = vectors_for(1) / VECTORS;
// Products that are worth a thread.
constexpr int64_t PER_THREAD = 1 << 18;

template <class T>
inline T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Where the words of a vector of outputs begin, in panels of n_words words per output.
inline int64_t place(int64_t vector, int64_t n_words) {
  return vector / VECTORS * n_words * PANEL + vector % VECTORS * LANES;
}

// Asks memory for the words of N vectors of outputs that are read later.
template <int N>
inline void prefetch(const void* weights, int64_t n_words) {
  for (int v = 0; v < N; v += std::max<int>(1, 16 / LANES))
    __builtin_prefetch(static_cast<const char*>(weights) + 4 * place(v, n_words) + AHEAD / N);
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

// Contiguous activations (n_rows, n_in), and room for the results (n_rows, n_out) of the same type.
struct Call {
  Tensor rows, result;
  int64_t n_in, n_out, n_rows;
  bool is_half;
  std::vector<float> bias;  // as wide as the panels, or empty

  // Found by name, torch's operators take longer than a small product.
  static Tensor contiguous(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

  static Tensor room(const Tensor& rows, int64_t n_out) {
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

  Call(const Tensor& x, const std::optional<Tensor>& added, int64_t n_out)
      : rows(contiguous(x)), result(room(rows, n_out)), n_in(x.size(-1)), n_out(n_out),
        n_rows(n_in ? rows.numel() / n_in : 0), is_half(x.element_size() == 2) {
    if (!added) return;
    Tensor values = contiguous(*added);
    bias.resize((n_out + PANEL - 1) / PANEL * PANEL);
    const void* data = values.data_ptr();
    for (int64_t i = 0; i < n_out; i++)
      bias[i] = values.element_size() == 2 ? from_bfloat16(static_cast<const uint16_t*>(data)[i])
                                           : static_cast<const float*>(data)[i];
  }

  const float* bias_of(int64_t output) const { return bias.empty() ? nullptr : &bias[output]; }

  template <class T> const T* from() const { return static_cast<const T*>(rows.data_ptr()); }
  template <class T> T* to() const { return static_cast<T*>(result.data_ptr()); }

  // The activations as float32; those of bfloat16 are written to room.
  const float* floats(std::vector<float>& room) const {
    if (!is_half) return from<float>();
    room.resize(n_rows * n_in);
    const uint16_t* halves = from<uint16_t>();
    for (int64_t i = 0; i < n_rows * n_in; i++) room[i] = from_bfloat16(halves[i]);
    return room.data();
  }

  // Calls run(first row, number of rows, first vector of outputs, number of vectors) for all results, which threads
  // share; a vector has LANES outputs.
  template <class Run> void for_blocks(Run run) const {
    int64_t n_panels = (n_out + PANEL - 1) / PANEL;
    int64_t grain = std::max<int64_t>(1, PER_THREAD / std::max<int64_t>(1, n_rows * n_in * PANEL));
    torch::stable::parallel_for(0, n_panels, grain, [&](int64_t first, int64_t last) {
      for (int64_t panel = first; panel < last; panel += GROUP)
        for_rows<MOST_ROWS, 6, 4, 2, 1>(n_rows, [&](int64_t row, auto rows) {
          constexpr int most = vectors_for(rows);
          int64_t vector = panel * VECTORS, end = std::min(last, panel + GROUP) * VECTORS;
          for (; vector + most <= end; vector += most) run(row, rows, vector, std::integral_constant<int, most>());
          for (; vector < end; vector += VECTORS) run(row, rows, vector, std::integral_constant<int, VECTORS>());
        });
    });
  }
};

// ---------------------------------------------------------------- weights of bfloat16

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

// Adds to sums the products of two inputs of rows of x (rows, n_in) with their weights, which are n_words words per
// output in panels. One input after the other: both at once are more than 16 registers hold.
template <int ROWS, int N>
inline void add(Floats (&sums)[ROWS][N], const uint16_t* weights, int64_t n_words, const float* x, int64_t n_in) {
  for (int second = 0; second < 2; second++) {
    Floats values[N];
    for (int v = 0; v < N; v++) {
      Words pairs = load<Words>(weights + 2 * place(v, n_words));
      values[v] = (Floats)(second ? pairs & (int32_t)0xffff0000 : pairs << 16);
    }
    for (int row = 0; row < ROWS; row++) {
      Floats input = x[row * n_in + second] - Floats{};
      for (int v = 0; v < N; v++) sums[row][v] = add_product(sums[row][v], values[v], input);
    }
  }
}

#if LANES == 16 && defined(__AVX512BF16__)
constexpr bool HAS_HALF_PRODUCTS = true;
template <int ROWS, int N>
inline void add(Floats (&sums)[ROWS][N], const uint16_t* weights, int64_t n_words, const uint16_t* x, int64_t n_in) {
  __m512bh pairs[N];
  for (int v = 0; v < N; v++) pairs[v] = (__m512bh)load<Words>(weights + 2 * place(v, n_words));
  for (int row = 0; row < ROWS; row++) {
    __m512bh inputs = (__m512bh)(load<int32_t>(x + row * n_in) - Words{});
    for (int v = 0; v < N; v++) sums[row][v] = (Floats)_mm512_dpbf16_ps((__m512)sums[row][v], pairs[v], inputs);
  }
}
#else
constexpr bool HAS_HALF_PRODUCTS = false;
template <int ROWS, int N>
inline void add(Floats (&)[ROWS][N], const uint16_t*, int64_t, const uint16_t*, int64_t) {}
#endif

// ROWS rows of x (rows, n_in) by N vectors of outputs of weights (panels, n_in / 2, PANEL, 2); y has rows of n_out.
template <int ROWS, int N, class Input, class Output>
inline void block(const Input* x, const uint16_t* weights, const float* bias, Output* y, int64_t n_in, int64_t n_out,
                  int64_t width) {
  Floats sums[ROWS][N] = {};
  for (int64_t i = 0; i < n_in; i += 2, weights += 2 * PANEL) {
    prefetch<N>(weights, n_in / 2);
    add(sums, weights, n_in / 2, x + i, n_in);
  }
  for (int row = 0; row < ROWS; row++) store<N>(sums[row], bias, y + row * n_out, width);
}

template <class Input, class Output>
void multiply(const Call& call, const Input* x, const uint16_t* weights, Output* y) {
  int64_t n_in = call.n_in, n_out = call.n_out;
  call.for_blocks([&](int64_t row, auto rows, int64_t vector, auto n) {
    int64_t output = vector * LANES;
    block<rows, n>(x + row * n_in, weights + 2 * place(vector, n_in / 2), call.bias_of(output),
                   y + row * n_out + output, n_in, n_out, std::min<int64_t>(n * LANES, n_out - output));
  });
}

// x (..., n_in) by weights (panels, n_in / 2, PANEL, 2) of bfloat16.
Tensor linear16(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& weights, int64_t n_out) {
  Call call(x, bias, n_out);
  auto packed = static_cast<const uint16_t*>(weights.data_ptr());
  std::vector<float> room;
  if (!call.is_half)
    multiply(call, call.from<float>(), packed, call.to<float>());
  else if (HAS_HALF_PRODUCTS)
    multiply(call, call.from<uint16_t>(), packed, call.to<uint16_t>());
  else
    multiply(call, call.floats(room), packed, call.to<uint16_t>());
  return call.result;
}

// ---------------------------------------------------------------- weights and activations of int8

// What stands for zero in a byte of activations.
#if LANES == 16 && defined(__AVX512VNNI__)
constexpr int ZERO = 128;
#else
constexpr int ZERO = 0;
#endif

// sums plus the products of four bytes of activations with four of weights.
inline Words dot(Words sums, Words bytes, Words weights) {
#if LANES == 16 && defined(__AVX512VNNI__)
  return (Words)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)bytes, (__m512i)weights);
#elif LANES == 8  // a half word holds two products of a magnitude up to 127 with a weight
  __m256i x = (__m256i)bytes, pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8((__m256i)weights, x));
  return sums + (Words)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  for (int shift = 0; shift < 32; shift += 8) sums += (bytes << (24 - shift) >> 24) * (weights << (24 - shift) >> 24);
  return sums;
#endif
}

// Rounds x (n,) to bytes from ZERO - 127 to ZERO + 127; returns what a step is worth, NaN if x is not finite.
inline float quantize(const float* x, int64_t n, uint8_t* bytes) {
  int32_t bits = 0;  // of the largest magnitude: they are in the order of the numbers
  for (int64_t i = 0; i < n; i++) bits = std::max(bits, load<int32_t>(x + i) & 0x7fffffff);
  float largest = load<float>(&bits);
  if (!std::isfinite(largest)) {
    std::memset(bytes, ZERO, n);
    return std::numeric_limits<float>::quiet_NaN();
  }
  largest = std::max(largest, 1e-12f);
  float steps = 127 / largest;
  constexpr float whole = 3 << 22;  // the sum has no bits behind the point
  for (int64_t i = 0; i < n; i++) bytes[i] = static_cast<uint8_t>(static_cast<int32_t>(x[i] * steps + whole - whole) + ZERO);
  return largest / 127;
}

// ROWS rows of x (rows, n_words, 4) by N vectors of outputs of weights (panels, n_words, PANEL, 4).
template <int ROWS, int N, class Output>
inline void block(const uint8_t* x, const int8_t* weights, const int32_t* offsets, const float* scales,
                  const float* bias, const float* steps, Output* y, int64_t n_words, int64_t n_out, int64_t width) {
  Words sums[ROWS][N] = {};
  for (int row = 0; ZERO && row < ROWS; row++) std::memcpy(sums[row], offsets, sizeof sums[row]);
  for (int64_t i = 0; i < n_words; i++, weights += 4 * PANEL) {
    prefetch<N>(weights, n_words);
    Words words[N];
    for (int v = 0; v < N; v++) words[v] = load<Words>(weights + 4 * place(v, n_words));
    for (int row = 0; row < ROWS; row++) {
      Words bytes = load<int32_t>(x + 4 * (row * n_words + i)) - Words{};
      for (int v = 0; v < N; v++) sums[row][v] = dot(sums[row][v], bytes, words[v]);
    }
  }
  for (int row = 0; row < ROWS; row++) {
    Floats results[N];
    for (int v = 0; v < N; v++)
      results[v] = __builtin_convertvector(sums[row][v], Floats) * load<Floats>(scales + LANES * v) * steps[row];
    store<N>(results, bias, y + row * n_out, width);
  }
}

// x (..., n_in), each row rounded to int8 by its largest value, by weights (panels, n_words, PANEL, 4). scales and
// offsets (outputs,): what a step of the weight is worth, and -128 times the sum of the weights.
Tensor linear8(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& weights, const Tensor& scales,
               const Tensor& offsets, int64_t n_out) {
  Call call(x, bias, n_out);
  int64_t n_words = weights.size(1);
  auto packed = static_cast<const int8_t*>(weights.data_ptr());
  auto scale = static_cast<const float*>(scales.data_ptr());
  auto offset = static_cast<const int32_t*>(offsets.data_ptr());
  std::vector<float> room, steps(call.n_rows);
  std::vector<uint8_t> bytes(call.n_rows * n_words * 4);
  const float* from = call.floats(room);
  for (int64_t row = 0; row < call.n_rows; row++)
    steps[row] = quantize(from + row * call.n_in, call.n_in, &bytes[row * n_words * 4]);
  auto multiply = [&](auto* y) {
    call.for_blocks([&](int64_t row, auto rows, int64_t vector, auto n) {
      int64_t output = vector * LANES;
      block<rows, n>(&bytes[row * n_words * 4], packed + 4 * place(vector, n_words), offset + output, scale + output,
                     call.bias_of(output), &steps[row], y + row * n_out + output, n_words, n_out,
                     std::min<int64_t>(n * LANES, n_out - output));
    });
  };
  if (call.is_half)
    multiply(call.to<uint16_t>());
  else
    multiply(call.to<float>());
  return call.result;
}

// ---------------------------------------------------------------- attention

// e to the power of x (LANES,), 0 below -87; NaN stays.
inline Floats exponential(Floats x) {
  constexpr float whole = 3 << 22;  // the sum has no bits behind the point
  Floats power = x * 1.44269504f + whole - whole;
  Floats rest = x - power * 0.693359375f - power * -2.12194440e-4f, result = rest * 0 + 1;
#pragma GCC unroll 7
  for (int k = 7; k; k--) result = add_product(Floats{} + 1, result, rest * (1.0f / k));
  Bits bits = (Bits)result + ((Bits)__builtin_convertvector(power, Words) << 23), is_zero = (Bits)(x < -87);
  return (Floats)(bits & ~is_zero);
}

// What four vectors add up to, each in the same order.
inline Four totals(const Floats* sums) {
  Four parts[4][LANES / 4];
  std::memcpy(parts, sums, sizeof parts);
  for (auto& part : parts)
    for (int n = LANES / 8; n; n /= 2)
      for (int i = 0; i < n; i++) part[i] += part[i + n];
#if LANES > 4
  __m128 low = _mm_hadd_ps((__m128)parts[0][0], (__m128)parts[1][0]);
  return (Four)_mm_hadd_ps(low, _mm_hadd_ps((__m128)parts[2][0], (__m128)parts[3][0]));
#else
  Four result;
  for (int i = 0; i < 4; i++) {
    Four part = parts[i][0];
    result[i] = (part[0] + part[1]) + (part[2] + part[3]);
  }
  return result;
#endif
}

// Scores (N, n_scores) of N queries (N, size) with K keys of up to four, stride apart.
template <int N, int K, class T>
inline void score(const float* queries, const T* keys, int64_t stride, float* scores, int64_t n_scores, int64_t size) {
  Floats sums[N][4] = {};
  for (int64_t i = 0; i < size; i += LANES) {
    Floats values[K];
    for (int k = 0; k < K; k++) values[k] = floats(keys + k * stride + i);
    for (int n = 0; n < N; n++) {
      Floats query = floats(queries + n * size + i);
      for (int k = 0; k < K; k++) sums[n][k] = add_product(sums[n][k], query, values[k]);
    }
  }
  for (int n = 0; n < N; n++) {
    Four results = totals(sums[n]);
    std::memcpy(scores + n * n_scores, &results, K * sizeof(float));
  }
}

// Sums of n_keys values, stride apart, by weights (N, n_scores) over the sum of the weights: V vectors of each result.
template <int N, int V, class T>
inline void average(const float* weights, int64_t n_scores, const T* values, int64_t stride, int64_t n_keys,
                    T* const* results, int64_t place) {
  Floats sums[N][V] = {}, totals[N] = {};
  for (int64_t key = 0; key < n_keys; key++, values += stride)
    for (int n = 0; n < N; n++) {
      Floats weight = weights[n * n_scores + key] - Floats{};
      totals[n] += weight;
      for (int v = 0; v < V; v++) sums[n][v] = add_product(sums[n][v], weight, floats(values + place + v * LANES));
    }
  for (int n = 0; n < N; n++) {
    for (int v = 0; v < V; v++) sums[n][v] /= totals[n][0] == 0 ? 1 : totals[n][0];
    store<V>(sums[n], nullptr, results[n] + place, V * LANES);
  }
}

// What is added to scores: bools that show a key, or numbers; (rows or 1, heads or 1, queries or 1, keys) or nothing.
struct Mask {
  std::optional<Tensor> mask;
  int64_t strides[3] = {};

  explicit Mask(const std::optional<Tensor>& given) {
    if (!given) return;
    mask = given->stride(3) == 1 ? *given : torch::stable::contiguous(*given);
    for (int i = 0; i < 3; i++) strides[i] = mask->size(i) == 1 ? 0 : mask->stride(i);
  }

  void add_to(float* scores, int64_t n_keys, int64_t row, int64_t head, int64_t query) const {
    if (!mask) return;
    const void* data = mask->data_ptr();
    int64_t first = row * strides[0] + head * strides[1] + query * strides[2];
    auto bools = static_cast<const uint8_t*>(data) + first;
    auto halves = static_cast<const uint16_t*>(data) + first;
    auto numbers = static_cast<const float*>(data) + first;
    switch (mask->element_size()) {
      case 1: for (int64_t i = 0; i < n_keys; i++) scores[i] = bools[i] ? scores[i] : -INFINITY; break;
      case 2: for (int64_t i = 0; i < n_keys; i++) scores[i] += from_bfloat16(halves[i]); break;
      default: for (int64_t i = 0; i < n_keys; i++) scores[i] += numbers[i];
    }
  }
};

// Replaces scores (n,) by e to the power of what they are above the largest one; n is a multiple of LANES.
inline void exponentials(float* scores, int64_t n) {
  Floats most = std::numeric_limits<float>::lowest() - Floats{};  // finite: all may be hidden
  for (int64_t i = 0; i < n; i += LANES) {
    Floats some = load<Floats>(scores + i);
    Bits is_more = (Bits)(some > most);  // not if it is NaN
    most = (Floats)(((Bits)some & is_more) | ((Bits)most & ~is_more));
  }
  float largest = most[0];
  for (int i = 1; i < LANES; i++) largest = std::max(largest, most[i]);
  for (int64_t i = 0; i < n; i += LANES) {
    Floats powers = exponential(load<Floats>(scores + i) - largest);
    std::memcpy(scores + i, &powers, sizeof powers);
  }
}

template <class T>
void attend(const Tensor& queries, const Tensor& keys, const Tensor& values, const Mask& mask, float scale, T* y) {
  int64_t n_new = queries.size(1), n_heads = queries.size(2), size = queries.size(3), n_out = values.size(3);
  int64_t n_kv = keys.size(1), n_keys = keys.size(2), group = n_heads / n_kv;
  int64_t n_scores = (n_keys + LANES - 1) / LANES * LANES, key_stride = keys.stride(2), value_stride = values.stride(2);
  int64_t grain = std::max<int64_t>(1, PER_THREAD / std::max<int64_t>(1, group * n_new * n_keys * (size + n_out)));
  torch::stable::parallel_for(0, keys.size(0) * n_kv, grain, [&](int64_t first_task, int64_t last_task) {
    std::vector<float> inputs(4 * size), scores(4 * n_scores);
    for (int64_t task = first_task; task < last_task; task++) {
      int64_t row = task / n_kv, shared = task % n_kv;
      auto from = static_cast<const T*>(queries.data_ptr()) + row * queries.stride(0);
      auto key = static_cast<const T*>(keys.data_ptr()) + row * keys.stride(0) + shared * keys.stride(1);
      auto value = static_cast<const T*>(values.data_ptr()) + row * values.stride(0) + shared * values.stride(1);
      for_rows<4, 3, 2, 1>(group * n_new, [&](int64_t first, auto n) {
        T* results[n];
        for (int i = 0; i < n; i++) {
          int64_t token = (first + i) / group, head = shared * group + (first + i) % group;
          const T* query = from + token * queries.stride(1) + head * queries.stride(2);
          for (int64_t j = 0; j < size; j += LANES) {
            Floats scaled = floats(query + j) * scale;
            std::memcpy(&inputs[i * size + j], &scaled, sizeof scaled);
          }
          results[i] = y + ((row * n_new + token) * n_heads + head) * n_out;
        }
        int64_t j = 0;
        for (; j + 4 <= n_keys; j += 4)
          score<n, 4>(inputs.data(), key + j * key_stride, key_stride, scores.data() + j, n_scores, size);
        for (; j < n_keys; j++)
          score<n, 1>(inputs.data(), key + j * key_stride, key_stride, scores.data() + j, n_scores, size);
        for (int i = 0; i < n; i++) {
          float* of_query = scores.data() + i * n_scores;
          mask.add_to(of_query, n_keys, row, shared * group + (first + i) % group, (first + i) / group);
          std::fill(of_query + n_keys, of_query + n_scores, -INFINITY);
          exponentials(of_query, n_scores);
        }
        int64_t place = 0;
        for (; place + VECTORS * LANES <= n_out; place += VECTORS * LANES)
          average<n, VECTORS>(scores.data(), n_scores, value, value_stride, n_keys, results, place);
        for (; place < n_out; place += LANES)
          average<n, 1>(scores.data(), n_scores, value, value_stride, n_keys, results, place);
      });
    }
  });
}

// queries (rows, new, heads, size) see keys (rows, shared heads, tokens, size) and values (…, size of a result),
// where mask lets them; sizes are multiples of LANES. A query's result depends on its keys, in their order, alone.
Tensor attention(const Tensor& queries, const Tensor& keys, const Tensor& values, const std::optional<Tensor>& mask,
                 double scale) {
  int64_t shape[] = {queries.size(0), queries.size(2), queries.size(1), keys.size(2)};
  bool fits = keys.size(1) && shape[1] % keys.size(1) == 0;
  fits = fits && queries.size(3) % LANES == 0 && values.size(3) % LANES == 0;
  fits = fits && queries.size(3) == keys.size(3) && values.size(2) == shape[3] && values.size(1) == keys.size(1);
  fits = fits && keys.size(0) == shape[0] && values.size(0) == shape[0] && (!mask || mask->size(3) == shape[3]);
  for (int i = 0; mask && i < 3; i++) fits = fits && (mask->size(i) == 1 || mask->size(i) == shape[i]);
  STD_TORCH_CHECK(fits, "hfgen's attention got shapes that do not fit each other");
  auto rows = [](const Tensor& x) { return x.stride(3) == 1 ? x : torch::stable::contiguous(x); };
  Tensor result = Call::room(queries, values.size(3));
  Mask hidden(mask);
  if (queries.element_size() == 2)
    attend(rows(queries), rows(keys), rows(values), hidden, scale, static_cast<uint16_t*>(result.data_ptr()));
  else
    attend(rows(queries), rows(keys), rows(values), hidden, scale, static_cast<float*>(result.data_ptr()));
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY(hfgen_native, library) {
  library.def("linear16(Tensor x, Tensor? bias, Tensor weights, int n_out) -> Tensor");
  library.def("linear8(Tensor x, Tensor? bias, Tensor weights, Tensor scales, Tensor offsets, int n_out) -> Tensor");
  library.def("attention(Tensor queries, Tensor keys, Tensor values, Tensor? mask, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hfgen_native, CPU, library) {
  library.impl("linear16", TORCH_BOX(&linear16));
  library.impl("linear8", TORCH_BOX(&linear8));
  library.impl("attention", TORCH_BOX(&attention));
}
