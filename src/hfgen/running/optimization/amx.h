// Products by the tiles of AMX: 16 rows with 16 words of inputs, the words of 16 outputs, and their 16 x 16 sums.
//
// The processor adds the products of a row in an order of its own, the same for one row as for many.

#pragma once

#include "vectors.h"

#if LANES == 16 && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define HAS_AMX

#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int TILE = 16;
// Bytes of panels that are done for all rows before the next ones: they stay in the cache.
constexpr int64_t NEAR = 1 << 20;

// Whether n_words fill tiles, and the system lets this process use them: it has to be asked.
inline bool has_tiles(int64_t n_words) {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  static const bool may = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return may && n_words % TILE == 0;
}

// Gives n_rows rows to tiles 0 to 6, of sums and of inputs; tile 7 has weights.
inline void shape_tiles(int n_rows) {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  } shape;
  std::fill(shape.rows, shape.rows + 7, n_rows);
  shape.rows[7] = TILE;
  _tile_loadconfig(&shape);
}

// sums (N * n_rows, PANEL) = start (PANEL,) + rows of x (N * n_rows, n_words) by a panel of weights. The first rows that
// read a panel ask memory for what is read next.
template <int N, class Sum>
inline void multiply_tiles(const int32_t* x, int n_rows, const int32_t* weights, int64_t n_words, const Sum* start,
                           Sum* sums, bool is_first) {
// Tiles are numbers in an instruction: they cannot be arguments.
#define FOR_VECTORS(call, first, second, third, memory, stride) \
  call(first, memory, stride);                                  \
  call(second, (memory) + TILE, stride);                        \
  call(third, (memory) + 2 * TILE, stride)
#define ADD(sums)                                                     \
  if constexpr (std::is_same_v<Sum, float>) _tile_dpbf16ps(sums, 6, 7); \
  else _tile_dpbusd(sums, 6, 7)
  constexpr int64_t WIDTH = 4 * PANEL;
  const int64_t stride = 4 * n_words;
  FOR_VECTORS(_tile_loadd, 0, 1, 2, start, 0);
  if constexpr (N == 2) {
    FOR_VECTORS(_tile_loadd, 3, 4, 5, start, 0);
  }
  for (int64_t i = 0; i < n_words; i += TILE, x += TILE, weights += TILE * PANEL) {
    for (int line = 0; is_first && line < 3 * TILE; line++)
      __builtin_prefetch(reinterpret_cast<const char*>(weights) + 64 * line + AHEAD);
    _tile_loadd(6, x, stride);
    _tile_loadd(7, weights, WIDTH);
    ADD(0);
    _tile_loadd(7, weights + TILE, WIDTH);
    ADD(1);
    _tile_loadd(7, weights + 2 * TILE, WIDTH);
    ADD(2);
    if constexpr (N == 2) {
      _tile_loadd(6, x + n_rows * n_words, stride);
      ADD(5);
      _tile_loadd(7, weights, WIDTH);
      ADD(3);
      _tile_loadd(7, weights + TILE, WIDTH);
      ADD(4);
    }
  }
  FOR_VECTORS(_tile_stored, 0, 1, 2, sums, WIDTH);
  if constexpr (N == 2) {
    FOR_VECTORS(_tile_stored, 3, 4, 5, sums + n_rows * PANEL, WIDTH);
  }
#undef ADD
#undef FOR_VECTORS
}

// Calls use(row, panel, sums (PARTS, PANEL)) for the rows of x (n_rows, PARTS, n_words) and the panels from first to last
// of weights (panels, n_words, PANEL). Sums begin with start(panel) (PANEL,).
template <int PARTS, class Sum, class Start, class Use>
void for_tiles(const int32_t* x, int64_t n_rows, const int32_t* weights, int64_t n_words, int64_t first, int64_t last,
               Start start, Use use) {
  constexpr int MOST = TILE / PARTS;
  alignas(64) Sum sums[2 * TILE * PANEL];
  const int64_t group = std::max<int64_t>(1, NEAR / (4 * n_words * PANEL));
  int shaped = 0;
  for (; first < last; first += group)
    for (int64_t row = 0, n; row < n_rows; row += n) {
      bool is_pair = n_rows - row > MOST;
      n = std::min<int64_t>(MOST, (n_rows - row) >> is_pair);
      if (n != shaped) shape_tiles((shaped = n) * PARTS);
      auto multiply = is_pair ? multiply_tiles<2, Sum> : multiply_tiles<1, Sum>;
      n <<= is_pair;
      for (int64_t panel = first; panel < std::min(last, first + group); panel++) {
        multiply(x + row * PARTS * n_words, shaped * PARTS, weights + panel * n_words * PANEL, n_words, start(panel),
                 sums, row == 0);
        for (int64_t i = 0; i < n; i++) use(row + i, panel, sums + i * PARTS * PANEL);
      }
    }
  _tile_release();
}

}  // namespace

#endif
