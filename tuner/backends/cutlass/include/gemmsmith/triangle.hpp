/* The tiles of a square matrix that meet its lower triangle, numbered. No CUTLASS: tests compile it
 * for the host.
 *
 * A tile has `kM` rows and `kN` columns; for a cluster, those of all its blocks. Row r of tiles has
 * the columns of tiles that begin before its last row ends. Rows are taken in bands of `band`, and a
 * band column by column, so that tiles with neighbouring numbers read few rows of A: those of the
 * band, and as many beside them.
 */
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define GS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define GS_HOST_DEVICE inline
#endif

namespace gemmsmith {

template <int kM, int kN>
struct Triangle {
  struct Tile {
    int32_t row, column;
  };

  int32_t extent = 0; /* rows and columns of the matrix */
  int32_t rows = 0;   /* of tiles */
  int32_t band = 1;   /* rows of tiles */
  int32_t tiles = 0;

  Triangle() = default;

  GS_HOST_DEVICE Triangle(int32_t extent_, int32_t band_)
      : extent(extent_), rows(ceil_div(extent_, kM)), band(band_), tiles(before(rows)) {}

  /* Tile number `index` of 0 … tiles - 1. */
  GS_HOST_DEVICE Tile tile(int32_t index) const {
    int32_t first = row_of(index) / band * band;
    int32_t height = first + band < rows ? band : rows - first;
    int32_t left = index - before(first), column = 0;
    /* The columns that all rows of the band have, then those that all but the first have, … */
    for (;; ++first, --height) {
      int32_t columns = width(first) - column;
      if (left < columns * height) return {first + left % height, column + left / height};
      left -= columns * height;
      column += columns;
    }
  }

 private:
  static constexpr int32_t gcd(int32_t a, int32_t b) { return b == 0 ? a : gcd(b, a % b); }
  /* kM / kN in lowest terms: `kQ` rows more have `kP` columns more. */
  static constexpr int32_t kP = kM / gcd(kM, kN), kQ = kN / gcd(kM, kN);
  /* Columns in the first kQ rows. */
  static constexpr int32_t kPeriod = (kP * kQ + kP + kQ - 1) / 2;

  static GS_HOST_DEVICE int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }

  /* Columns of tiles in row `row`; only the last row may end beyond the matrix. */
  GS_HOST_DEVICE int32_t width(int32_t row) const {
    return row + 1 < rows ? ceil_div((row + 1) * kP, kQ) : ceil_div(extent, kN);
  }

  /* Tiles in the rows before `row`. */
  GS_HOST_DEVICE int32_t before(int32_t row) const {
    int32_t last = row == rows && rows > 0 ? width(--row) : 0;
    int32_t periods = row / kQ, rest = row % kQ;
    int32_t sum = kP * kQ * (periods * (periods - 1) / 2) + periods * (kPeriod + rest * kP);
    for (int32_t r = 1; r <= rest; ++r) sum += ceil_div(r * kP, kQ);
    return sum + last;
  }

  GS_HOST_DEVICE int32_t row_of(int32_t index) const {
    /* A row r has about r² · kP / (2 · kQ) tiles before it. */
    int32_t row = static_cast<int32_t>(sqrtf(2.0f * kQ / kP * static_cast<float>(index)));
    if (row >= rows) row = rows - 1;
    while (before(row) > index) --row;
    while (before(row + 1) <= index) ++row;
    return row;
  }
};

}  // namespace gemmsmith
