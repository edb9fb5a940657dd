// Products of activations with packed weights for few rows, and attention (``attention.h``).
//
// Each weight is read once, in the order of memory. A panel has the weights of PANEL outputs: words with two or four
// inputs of an output, then the next inputs. Sums are float32, over the inputs in their order, or integers, which are
// exact: a row's results depend on nothing but the row. Registers hold the sums of up to eight rows; where a panel is
// narrow, those of several panels for one or two. Activations and results are float32 or bfloat16.

#include "attention.h"

namespace {

// Vectors of outputs that are summed at once for a number of rows: as many as registers hold, and enough that a sum
// does not wait for itself.
constexpr int vectors_for(int rows) { return VECTORS > 2 || rows > 2 ? VECTORS : 8 / rows; }
constexpr int MOST_ROWS = VECTORS == 3 ? 8 : 6;
// Bytes between what is read and what memory is asked for.
constexpr int64_t AHEAD = 16384;
// Panels whose rows are done before the next ones.
constexpr int64_t GROUP = vectors_for(1) / VECTORS;

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

// Contiguous activations (n_rows, n_in), and room for the results (n_rows, n_out) of the same type.
struct Call {
  Tensor rows, result;
  int64_t n_in, n_out, n_rows;
  bool is_half;
  std::vector<float> bias;  // as wide as the panels, or empty

  Call(const Tensor& x, const std::optional<Tensor>& added, int64_t n_out)
      : rows(dense(x)), result(room(rows, n_out)), n_in(x.size(-1)), n_out(n_out),
        n_rows(n_in ? rows.numel() / n_in : 0), is_half(x.element_size() == 2) {
    if (!added) return;
    Tensor values = dense(*added);
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
  for (int64_t i = 0; i < n; i++)
    bytes[i] = static_cast<uint8_t>(static_cast<int32_t>(x[i] * steps + whole - whole) + ZERO);
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
