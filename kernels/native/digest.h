// Digest and finite check of tensor elements on their way in; the sum is that of weight_sync/digest.py.
#pragma once
#include <cstdint>
#include <cstring>

namespace {

// Rows of `cols` elements whose row-major places in the whole tensor begin at `first` and lie `width` apart.
template <class U>
inline void digest_rows(const U* src, int64_t ld, int64_t rows, int64_t cols, uint64_t first, uint64_t width, U exponent, uint64_t& sum, uint64_t& bad) {
  for (int64_t r = 0; r < rows; r++) {
    const U* row = src + r * ld;
    uint64_t x = (first + (uint64_t)r * width + 1) * 0x9E3779B97F4A7C15u, s = 0, b = 0;
    for (int64_t c = 0; c < cols; c++) {
      uint32_t v = (uint32_t)row[c] * 0x85EBCA6Bu + (uint32_t)x;
      s += (uint64_t)v * (x >> 32 | 1);
      b += (row[c] & exponent) == exponent;
      x += 0x9E3779B97F4A7C15u;
    }
    sum += s;
    bad += b;
  }
}

}  // namespace
