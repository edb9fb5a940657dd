// Attention of few queries: keys and values are read once for the queries of a group of heads. Numbers are float32,
// bfloat16 or float16, and all sums float32.

#pragma once

#include "vectors.h"

namespace {

// Queries that are computed together, and keys whose scores are.
constexpr int QUERIES = 4, KEYS = 4;

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

// What KEYS vectors add up to, each in the same order.
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

// Scores (N, n_scores) of N queries (N, size) with K keys, of up to KEYS, stride apart.
template <int N, int K, class T>
inline void score(const float* queries, const T* keys, int64_t stride, float* scores, int64_t n_scores, int64_t size) {
  Floats sums[N][KEYS] = {};
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
    store<V>(sums[n], results[n] + place, V * LANES);
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
    int64_t first = row * strides[0] + head * strides[1] + query * strides[2];
    if (mask->element_size() == 1) {
      auto bools = static_cast<const uint8_t*>(mask->data_ptr()) + first;
      for (int64_t i = 0; i < n_keys; i++) scores[i] = bools[i] ? scores[i] : -INFINITY;
    } else {
      Numbers(*mask).with([&](auto* numbers) {
        for (int64_t i = 0; i < n_keys; i++) scores[i] += numbers[first + i];
      });
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

// Writes y (rows, new, heads, size of a value). A task is a row and a head of keys, with the queries of its group.
template <class T>
void attend(const Tensor& queries, const Tensor& keys, const Tensor& values, const Mask& mask, float scale, T* y) {
  int64_t n_new = queries.size(1), n_heads = queries.size(2), size = queries.size(3), n_out = values.size(3);
  int64_t n_kv = keys.size(1), n_keys = keys.size(2), group = n_heads / n_kv;
  int64_t n_scores = (n_keys + LANES - 1) / LANES * LANES, key_stride = keys.stride(2), value_stride = values.stride(2);
  int64_t grain = std::max<int64_t>(1, PER_THREAD / std::max<int64_t>(1, group * n_new * n_keys * (size + n_out)));
  torch::stable::parallel_for(0, keys.size(0) * n_kv, grain, [&](int64_t first_task, int64_t last_task) {
    std::vector<float> inputs(QUERIES * size), scores(QUERIES * n_scores);
    for (int64_t task = first_task; task < last_task; task++) {
      int64_t row = task / n_kv, shared = task % n_kv;
      auto from = static_cast<const T*>(queries.data_ptr()) + row * queries.stride(0);
      auto key = static_cast<const T*>(keys.data_ptr()) + row * keys.stride(0) + shared * keys.stride(1);
      auto value = static_cast<const T*>(values.data_ptr()) + row * values.stride(0) + shared * values.stride(1);
      for_rows<QUERIES, 3, 2, 1>(group * n_new, [&](int64_t first, auto n) {
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
        for (; j + KEYS <= n_keys; j += KEYS)
          score<n, KEYS>(inputs.data(), key + j * key_stride, key_stride, scores.data() + j, n_scores, size);
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
  Tensor result = room(queries, values.size(3));
  Mask hidden(mask);
  Numbers(result).with([&](auto* y) { attend(rows(queries), rows(keys), rows(values), hidden, scale, y); });
  return result;
}

}  // namespace
