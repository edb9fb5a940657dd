// Products of activations with packed weights for few rows, or with weights as they are for any number (``amx.h``), and
// attention (``attention.h``).
//
// Each weight is read once, in the order of memory. A panel has the weights of PANEL outputs: words with two or four
// inputs of an output, then the next inputs. Sums are float32, over the inputs in their order, or integers, which are
// exact: a row's results depend on nothing but the row. Registers hold the sums of up to eight rows; where a panel is
// narrow, those of several panels for one or two. Activations and results are float32, bfloat16 or float16.

#include "amx.h"
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

// Asks memory for the words of N vectors of outputs that are read later, BYTES each.
template <int N, int BYTES>
inline void prefetch(const void* weights, int64_t n_words) {
  for (int v = 0; v < N; v += std::max<int>(1, 64 / LANES / BYTES))
    __builtin_prefetch(static_cast<const char*>(weights) + BYTES * place(v, n_words) + AHEAD / N);
}

// Contiguous activations (n_rows, n_in), and room for the results (n_rows, n_out) of the same type.
struct Call {
  Tensor rows, result;
  Numbers inputs, outputs;
  int64_t n_in, n_out, n_rows;
  std::vector<float> bias;  // as wide as the panels, or empty

  Call(const Tensor& x, const std::optional<Tensor>& added, const Tensor& weights, int64_t n_out)
      : rows(dense(x)), result(room(rows, n_out)), inputs(rows), outputs(result), n_in(x.size(-1)), n_out(n_out),
        n_rows(n_in ? rows.numel() / n_in : 0) {
    bool fits = weights.is_contiguous() && (!added || added->numel() == n_out);
    if (weights.dim() == 2)
      fits = fits && has_tiles() && n_in && n_in % 32 == 0 && weights.size(0) == n_out && weights.size(1) == n_in;
    else
      fits = fits && weights.dim() == 4 && weights.size(0) * PANEL >= n_out && weights.size(2) == PANEL &&
             weights.size(1) * weights.size(3) >= n_in;
    STD_TORCH_CHECK(fits, "hfgen's product got shapes that do not fit each other");
    if (!added) return;
    Tensor values = dense(*added);
    bias.resize((n_out + PANEL - 1) / PANEL * PANEL);
    Numbers(values).with([&](auto* numbers) { std::copy(numbers, numbers + n_out, bias.begin()); });
  }

  // The activations as float32; those of other types are written to room.
  const float* floats(std::vector<float>& room) const {
    if (inputs.type == Numbers::FLOAT) return static_cast<const float*>(inputs.data);
    inputs.with([&](auto* numbers) { room.assign(numbers, numbers + n_rows * n_in); });
    return room.data();
  }

  // Adds the bias to N vectors of outputs of a row, and writes them as results.
  template <int N> void write(Floats* sums, int64_t row, int64_t output) const {
    for (int v = 0; !bias.empty() && v < N; v++) sums[v] += load<Floats>(&bias[output + LANES * v]);
    int64_t width = std::min<int64_t>(N * LANES, n_out - output);
    outputs.with([&](auto* y) { store<N>(sums, y + row * n_out + output, width); });
  }

  // Calls run(first, last) for parts of the outputs, of step each, which threads share.
  template <class Run> void for_parts(int64_t step, Run run) const {
    int64_t grain = std::max<int64_t>(1, PER_THREAD / std::max<int64_t>(1, n_rows * n_in * step));
    torch::stable::parallel_for(0, (n_out + step - 1) / step, grain, run);
  }

  // Calls run(first row, number of rows, first vector of outputs, number of vectors) for all results; a vector has
  // LANES outputs.
  template <class Run> void for_blocks(Run run) const {
    for_parts(PANEL, [&](int64_t first, int64_t last) {
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

// ---------------------------------------------------------------- weights of float32, bfloat16 and float16

// Inputs of an output that are next to each other: words of bfloat16 are converted in one instruction.
template <class Weight> constexpr int INPUTS = std::is_same_v<Weight, BFloat16> ? 2 : 1;

// Adds to sums the products of INPUTS inputs of rows of x (rows, n_in) with their weights.
template <int ROWS, int N, class Weight>
inline void add(Floats (&sums)[ROWS][N], const Weight* weights, const float* x, int64_t n_in) {
  for (int second = 0; second < INPUTS<Weight>; second++) {  // both at once are more than 16 registers hold
    Floats values[N];
    for (int v = 0; v < N; v++) {
      if constexpr (INPUTS<Weight> == 2) {
        Words pairs = load<Words>(weights + 2 * place(v, n_in / 2));
        values[v] = (Floats)(second ? pairs & (int32_t)0xffff0000 : pairs << 16);
      } else {
        values[v] = floats(weights + place(v, n_in));
      }
    }
    for (int row = 0; row < ROWS; row++) {
      Floats input = x[row * n_in + second] - Floats{};
      for (int v = 0; v < N; v++) sums[row][v] = add_product(sums[row][v], values[v], input);
    }
  }
}

#if LANES == 16 && defined(__AVX512BF16__)
constexpr bool HAS_BFLOAT16_PRODUCTS = true;
template <int ROWS, int N>
inline void add(Floats (&sums)[ROWS][N], const BFloat16* weights, const BFloat16* x, int64_t n_in) {
  __m512bh pairs[N];
  for (int v = 0; v < N; v++) pairs[v] = (__m512bh)load<Words>(weights + 2 * place(v, n_in / 2));
  for (int row = 0; row < ROWS; row++) {
    __m512bh inputs = (__m512bh)(load<int32_t>(x + row * n_in) - Words{});
    for (int v = 0; v < N; v++) sums[row][v] = (Floats)_mm512_dpbf16_ps((__m512)sums[row][v], pairs[v], inputs);
  }
}
#else
constexpr bool HAS_BFLOAT16_PRODUCTS = false;
#endif

// The rows x (n_rows, n_in) of a call by weights (panels, n_in / INPUTS, PANEL, INPUTS).
template <class Weight, class Input>
void multiply(const Call& call, const Weight* weights, const Input* x) {
  constexpr int WORD = INPUTS<Weight>;
  int64_t n_in = call.n_in, n_words = n_in / WORD;
  call.for_blocks([&](int64_t first, auto n_rows, int64_t vector, auto n) {
    Floats sums[n_rows][n] = {};
    const Weight* from = weights + WORD * place(vector, n_words);
    for (int64_t i = 0; i < n_in; i += WORD, from += WORD * PANEL) {
      prefetch<n, WORD * sizeof(Weight)>(from, n_words);
      add(sums, from, x + first * n_in + i, n_in);
    }
    for (int row = 0; row < n_rows; row++) call.write<n>(sums[row], first + row, vector * LANES);
  });
}

#ifdef HAS_AMX
// Writes x (n,) as three rows of bfloat16 that add up to it.
inline void split(const float* x, int64_t n, uint16_t* rows) {
  for (int64_t i = 0; i < n; i++) {
    float rest = x[i];
    for (int part = 0; part < 3; part++) {
      int32_t bits = load<int32_t>(&rest), high = bits & 0xffff0000;
      bool is_finite = (bits & 0x7f800000) != 0x7f800000;
      rows[part * n + i] = high >> 16 | (rest != rest ? 0x40 : 0);  // a NaN stays one
      rest = is_finite ? rest - load<float>(&high) : 0;
    }
  }
}

// The rows of a call by weights (n_out, n_in).
void multiply_as_they_are(const Call& call, const Tensor& weights) {
  STD_TORCH_CHECK(Numbers(weights).type == Numbers::BFLOAT16, "hfgen's tiles take weights of bfloat16");
  auto multiply = [&](const void* x, auto parts) {
    auto blocks = in_blocks(x, call.n_rows * parts, call.n_in / 2, TILE / parts * parts);
    call.for_parts(OUTPUTS, [&](int64_t first, int64_t last) {
      for_tiles<parts>(blocks.get(), call.n_rows, weights.data_ptr(), call.n_in / 2, first * OUTPUTS,
                       std::min(call.n_out, last * OUTPUTS),
                       [&](auto row, auto output, auto* sums, auto n) { call.write<n>(sums, row, output); });
    });
  };
  if (call.inputs.type == Numbers::BFLOAT16) return multiply(call.inputs.data, std::integral_constant<int, 1>());
  std::vector<float> room;
  auto parts = std::make_unique_for_overwrite<uint16_t[]>(3 * call.n_rows * call.n_in);
  const float* x = call.floats(room);
  for (int64_t row = 0; row < call.n_rows; row++) split(x + row * call.n_in, call.n_in, &parts[3 * row * call.n_in]);
  multiply(parts.get(), std::integral_constant<int, 3>());
}
#endif

// x (..., n_in) by weights (panels, n_in / INPUTS, PANEL, INPUTS), or (n_out, n_in) of bfloat16 if there are tiles.
Tensor linear(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& weights, int64_t n_out) {
  Call call(x, bias, weights, n_out);
#ifdef HAS_AMX
  if (weights.dim() == 2) return multiply_as_they_are(call, weights), call.result;
#endif
  std::vector<float> room;
  Numbers(weights).with([&](auto* packed) {
    if constexpr (HAS_BFLOAT16_PRODUCTS && std::is_same_v<decltype(packed), BFloat16*>)
      if (auto& [data, type] = call.inputs; type == Numbers::BFLOAT16)
        return multiply(call, packed, static_cast<const BFloat16*>(data));
    multiply(call, packed, call.floats(room));
  });
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

// x (..., n_in), each row rounded to int8 by its largest value, by weights (panels, n_words, PANEL, 4). scales and
// offsets (outputs of panels,): what a step of the weight is worth, and -128 times the sum of the weights. Sums of
// integers are exact, so that rows keep their bits where many are multiplied by tiles.
Tensor linear8(const Tensor& x, const std::optional<Tensor>& bias, const Tensor& weights, const Tensor& scales,
               const Tensor& offsets, int64_t n_out) {
  Call call(x, bias, weights, n_out);
  STD_TORCH_CHECK(weights.dim() == 4 && weights.size(3) == 4, "hfgen's product takes words of four weights");
  int64_t n_words = weights.size(1);
  auto packed = static_cast<const int8_t*>(weights.data_ptr());
  auto scale = static_cast<const float*>(scales.data_ptr());
  auto offset = static_cast<const int32_t*>(offsets.data_ptr());
  std::vector<float> room, steps(call.n_rows);
  std::vector<uint8_t> bytes(call.n_rows * n_words * 4);
  const float* inputs = call.floats(room);
  for (int64_t row = 0; row < call.n_rows; row++)
    steps[row] = quantize(inputs + row * call.n_in, call.n_in, &bytes[row * n_words * 4]);
  auto write = [&](int64_t row, int64_t output, const Words* sums, auto n) {
    Floats results[n];
    for (int v = 0; v < n; v++) {
      Words products = ZERO ? sums[v] + load<Words>(offset + output + LANES * v) : sums[v];
      Floats scaled = __builtin_convertvector(products, Floats) * load<Floats>(scale + output + LANES * v);
      results[v] = scaled * steps[row];
    }
    call.write<n>(results, row, output);
  };
#ifdef HAS_AMX
  if (call.n_rows > MOST_ROWS && n_words % TILE == 0 && has_tiles()) {
    auto x = reinterpret_cast<const int32_t*>(bytes.data()), panels = reinterpret_cast<const int32_t*>(packed);
    call.for_parts(PANEL, [&](int64_t first, int64_t last) {
      Words sums[VECTORS][TILE];
      int shaped = 0;
      for (int64_t panel = first; panel < last; panel++)
        for (int64_t row = 0; row < call.n_rows; row += TILE) {
          if (int n = std::min<int64_t>(TILE, call.n_rows - row); n != shaped) shape_tiles(shaped = n);
          multiply_panel(x + row * n_words, panels + panel * PANEL * n_words, n_words, sums);
          for (int i = 0; i < shaped; i++) {
            Words totals[] = {sums[0][i], sums[1][i], sums[2][i]};
            write(row + i, panel * PANEL, totals, std::integral_constant<int, VECTORS>());
          }
        }
      _tile_release();
    });
    return call.result;
  }
#endif
  call.for_blocks([&](int64_t first, auto n_rows, int64_t vector, auto n) {
    const int8_t* from = packed + 4 * place(vector, n_words);
    const uint8_t* x = &bytes[first * n_words * 4];
    Words sums[n_rows][n] = {};
    for (int64_t i = 0; i < n_words; i++, from += 4 * PANEL) {
      prefetch<n, 4>(from, n_words);
      Words words[n];
      for (int v = 0; v < n; v++) words[v] = load<Words>(from + 4 * place(v, n_words));
      for (int row = 0; row < n_rows; row++) {
        Words inputs = load<int32_t>(x + 4 * (row * n_words + i)) - Words{};
        for (int v = 0; v < n; v++) sums[row][v] = dot(sums[row][v], inputs, words[v]);
      }
    }
    for (int row = 0; row < n_rows; row++) write(first + row, vector * LANES, sums[row], n);
  });
  return call.result;
}

// ---------------------------------------------------------------- several products of the same activations

// ``linear``, or ``linear8`` with three tensors of packed for each product: a call from Python takes as long as a small
// product.
std::vector<Tensor> linears(const Tensor& x, const std::vector<std::optional<Tensor>>& biases,
                            const std::vector<Tensor>& packed, const std::vector<int64_t>& n_outs) {
  bool is_int8 = packed.size() == 3 * n_outs.size();
  STD_TORCH_CHECK(biases.size() == n_outs.size() && (is_int8 || packed.size() == n_outs.size()),
                  "hfgen's products got lists that do not fit each other");
  std::vector<Tensor> results;
  for (size_t i = 0; i < n_outs.size(); i++) {
    const Tensor* weights = &packed[is_int8 ? 3 * i : i];
    results.push_back(is_int8 ? linear8(x, biases[i], weights[0], weights[1], weights[2], n_outs[i])
                              : linear(x, biases[i], weights[0], n_outs[i]));
  }
  return results;
}

}  // namespace

STABLE_TORCH_LIBRARY(hfgen_native, library) {
  library.def("has_tiles() -> bool");
  library.def("linear(Tensor x, Tensor? bias, Tensor weights, int n_out) -> Tensor");
  library.def("linear8(Tensor x, Tensor? bias, Tensor weights, Tensor scales, Tensor offsets, int n_out) -> Tensor");
  library.def("linears(Tensor x, Tensor?[] biases, Tensor[] packed, int[] n_outs) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(hfgen_native, CompositeExplicitAutograd, library) {
  library.impl("has_tiles", TORCH_BOX(&has_tiles));
}

STABLE_TORCH_LIBRARY_IMPL(hfgen_native, CPU, library) {
  library.impl("linear", TORCH_BOX(&linear));
  library.impl("linear8", TORCH_BOX(&linear8));
  library.impl("linears", TORCH_BOX(&linears));
  library.impl("attention", TORCH_BOX(&attention));
}
