// Products by the tiles of AMX: 16 outputs with 16 words of their weights, 16 words of 16 rows, and the 16 x 16 sums.
//
// Weights of bfloat16 are read as they are: (outputs, inputs). The processor adds an output's products in an order of
// its own, the same for one row as for many. Weights of int8 are read in panels.

#pragma once

#include "vectors.h"

#if LANES == 16 && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define HAS_AMX
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int TILE = 16;
// Outputs that are done at once.
constexpr int64_t OUTPUTS = 2 * TILE;
// Bytes of weights that are done for all rows before the next ones: they stay in the cache.
constexpr int64_t NEAR = 1 << 20;

// Whether the system lets this process use tiles: it has to be asked.
bool has_tiles() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  static const bool may = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return may;
}

// Exchanges rows and columns: of blocks of STEP rows and columns, then of those within.
template <int STEP = TILE / 2>
inline __attribute__((always_inline)) void transpose(Words (&square)[TILE]) {
  Words low, high;
  for (int i = 0; i < TILE; i++) low[i] = i & STEP ? TILE + i - STEP : i, high[i] = low[i] + STEP;
#pragma GCC unroll 16
  for (int i = 0; i < TILE; i++) {
    if (i & STEP) continue;
    __m512i first = (__m512i)square[i], second = (__m512i)square[i + STEP];
    square[i] = (Words)_mm512_permutex2var_epi32(first, (__m512i)low, second);
    square[i + STEP] = (Words)_mm512_permutex2var_epi32(first, (__m512i)high, second);
  }
  if constexpr (STEP > 1) transpose<STEP / 2>(square);
}

// x (n_rows, n_words) as (blocks, n_words, TILE): a block has up to n rows, and zeros.
inline std::unique_ptr<Words[]> in_blocks(const void* x, int64_t n_rows, int64_t n_words, int64_t n) {
  auto blocks = std::make_unique_for_overwrite<Words[]>((n_rows + n - 1) / n * n_words);
  auto words = static_cast<const int32_t*>(x);
  for (int64_t row = 0; row < n_rows; row += n)
    for (int64_t i = 0; i < n_words; i += TILE) {
      Words square[TILE] = {};
      for (int64_t j = 0; j < std::min(n, n_rows - row); j++) square[j] = load<Words>(words + (row + j) * n_words + i);
      transpose(square);
      std::copy(square, square + TILE, &blocks[row / n * n_words + i]);
    }
  return blocks;
}

// Gives the tiles of weights and of sums n_outputs rows.
inline void shape_tiles(int n_outputs) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  } shape;
  std::fill(shape.rows, shape.rows + 8, n_outputs);
  shape.rows[6] = shape.rows[7] = TILE;
  _tile_loadconfig(&shape);
}

// sums (vectors of outputs, blocks, outputs, rows) of BLOCKS blocks (n_words, TILE) by VECTORS vectors of outputs.
template <int VECTORS, int BLOCKS>
inline void multiply_tiles(const Words* x, const int32_t* weights, int64_t n_words, Words (*sums)[TILE]) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < n_words; i += TILE) {
    _tile_loadd(6, x + i, 64);
    _tile_loadd(4, weights + i, 4 * n_words);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (BLOCKS == 2) {
      _tile_loadd(7, x + n_words + i, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (VECTORS == 2) {
      _tile_loadd(5, weights + TILE * n_words + i, 4 * n_words);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (BLOCKS == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
}

// Calls use(row, output, sums, number of vectors) for n_rows rows of x, which are PARTS columns of its blocks each, and
// the outputs from first to last of weights (outputs, n_words) of bfloat16.
template <int PARTS, class Use>
void for_tiles(const Words* x, int64_t n_rows, const void* weights, int64_t n_words, int64_t first, int64_t last,
               Use use) {
  constexpr int MOST = TILE / PARTS;
  const int64_t group = std::max<int64_t>(1, NEAR / (4 * n_words * OUTPUTS)) * OUTPUTS;
  const int32_t* near;  // the weights of a group
  // Tiles whose rows cross cache lines take longer. Weights that a checkpoint's file is mapped to are of that kind.
  bool is_copied = n_rows > 64 && reinterpret_cast<uintptr_t>(weights) % 64;
  auto copy = std::make_unique_for_overwrite<Words[]>(is_copied ? group * n_words / LANES : 0);
  Words sums[4][TILE];
  int shaped = 0;
  auto at_once = [&](int64_t row, int64_t output, auto vectors) {
    if (int n = std::min<int64_t>(TILE, last - output); n != shaped) shape_tiles(shaped = n);
    bool is_pair = n_rows - row > MOST;
    auto multiply = is_pair ? multiply_tiles<vectors, 2> : multiply_tiles<vectors, 1>;
    multiply(x + row / MOST * n_words, near + (output - first) * n_words, n_words, sums);
    for (int block = 0; block <= is_pair; block++, row += MOST) {
      for (int v = 0; v < vectors; v++) transpose(sums[2 * v + block]);
      for (int64_t i = 0; i < std::min<int64_t>(MOST, n_rows - row); i++) {
        Floats totals[vectors] = {};
        for (int part = PARTS - 1; part >= 0; part--)
          for (int v = 0; v < vectors; v++) totals[v] += (Floats)sums[2 * v + block][i * PARTS + part];
        use(row + i, output, totals, vectors);
      }
    }
  };
  for (; first < last; first += group) {
    int64_t end = std::min(last, first + group);
    near = static_cast<const int32_t*>(weights) + first * n_words;
    if (is_copied) {
      std::memcpy(copy.get(), near, 4 * (end - first) * n_words);
      near = reinterpret_cast<const int32_t*>(copy.get());
    }
    for (int64_t row = 0; row < n_rows; row += 2 * MOST) {
      int64_t output = first;
      for (; output + OUTPUTS <= end; output += OUTPUTS) at_once(row, output, std::integral_constant<int, 2>());
      for (; output < end; output += TILE) at_once(row, output, std::integral_constant<int, 1>());
    }
  }
  _tile_release();
}

// Writes sums (vectors of outputs, rows) of bytes x (rows, n_words) by a panel (n_words, PANEL): of as many rows as the
// tiles have.
inline void multiply_panel(const int32_t* x, const int32_t* panel, int64_t n_words, Words (*sums)[TILE]) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  for (int64_t i = 0; i < n_words; i += TILE, panel += TILE * PANEL) {
    _tile_loadd(4, x + i, 4 * n_words);
    _tile_loadd(6, panel, 4 * PANEL);
    _tile_dpbusd(0, 4, 6);
    _tile_loadd(7, panel + TILE, 4 * PANEL);
    _tile_dpbusd(1, 4, 7);
    _tile_loadd(6, panel + 2 * TILE, 4 * PANEL);
    _tile_dpbusd(2, 4, 6);
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
}

}  // namespace
#else
namespace {
bool has_tiles() { return false; }
}  // namespace
#endif
