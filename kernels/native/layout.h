// How rows and weights of linear layers lie. Activations that feed one lie in panels; weights are packed once into blocks of 32 outputs.
//   bf16 panels  [M/16][K/32][16 rows][32 k]      (one AMX tile is 1 KiB in a row)
//   float panels [M][round_up(K, 32)]
//   bf16 weights [N/32][K/32][2 halves][16 pairs][16 n][2]
//   float weights [N/32][K][32 n]
#pragma once
#include "program.h"
#include "simd.h"

namespace {

inline bf16* panel_at(bf16* base, int k_blocks, int row, int col) {
  return base + ((int64_t)(row / 16) * k_blocks + col / 32) * 512 + (row % 16) * 32 + col % 32;
}
inline float* panel_at(float* base, int k_blocks, int row, int col) { return base + (int64_t)row * k_blocks * 32 + col; }

// Sixteen columns of one row; `n` of them count when `col` is no multiple of 16 or the width ends inside.
template <class T>
inline void panel_store(T* base, int k_blocks, int row, int col, v16 x, int n) {
  if (n == 16 && col % 16 == 0) {
    store(panel_at(base, k_blocks, row, col), x);
    return;
  }
  T t[16];
  store(t, x);
  for (int i = 0; i < n; i++) *panel_at(base, k_blocks, row, col + i) = t[i];
}

// Where a logical weight row lives: its block of 32 and its lane there. `interleave` puts 16 gate beside 16 up rows.
inline void weight_lane(int row, int n, bool interleave, int& block, int& lane) {
  if (!interleave) {
    block = row / 32;
    lane = row % 32;
  } else {
    int half = n / 2, i = row < half ? row : row - half;
    block = i / 16;
    lane = i % 16 + (row < half ? 0 : 16);
  }
}
inline bool gated(const Op& op) { return op.epilogue == EP_SILU_MUL || op.epilogue == EP_GELU_MUL; }
inline int num_weight_blocks(int n, bool interleave) { return interleave ? ceil_div(n / 2, 16) : ceil_div(n, 32); }

inline int64_t packed_offset(bf16*, int block, int lane, int k, int width) {
  return ((int64_t)block * ceil_div(width, 32) + k / 32) * 1024 + (lane / 16) * 512 + (k % 32 / 2) * 32 + (lane % 16) * 2 + k % 2;
}
inline int64_t packed_offset(float*, int block, int lane, int k, int width) { return ((int64_t)block * width + k) * 32 + lane; }

// Sixteen rows of sixteen words, stored as their columns: what takes weights into their blocks, and out. To STREAM is to write past
// the caches, on the way in: nobody reads there soon, and memory need not be read first. `dst` then lies on whole cache lines.
#if defined(__AVX512F__)
template <bool STREAM>
inline void transpose16(const char* src, int64_t src_bytes, char* dst, int64_t dst_bytes) {
  auto put = [](char* to, __m512i x) {
    if constexpr (STREAM)
      _mm512_stream_si512((__m512i*)to, x);
    else
      _mm512_storeu_si512(to, x);
  };
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(src + i * src_bytes);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // a[i + c]: column c of every four, of rows i to i + 3
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int c = 0; c < 4; c++) {
    __m512i x = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), y = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
    __m512i z = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd), w = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    put(dst + c * dst_bytes, _mm512_shuffle_i32x4(x, y, 0x88));
    put(dst + (c + 4) * dst_bytes, _mm512_shuffle_i32x4(z, w, 0x88));
    put(dst + (c + 8) * dst_bytes, _mm512_shuffle_i32x4(x, y, 0xdd));
    put(dst + (c + 12) * dst_bytes, _mm512_shuffle_i32x4(z, w, 0xdd));
  }
}
#else
inline void transpose8(const char* src, int64_t src_bytes, char* dst, int64_t dst_bytes) {
  __m256i a[8], b[8];
  for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_si256((const __m256i*)(src + i * src_bytes));
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int c = 0; c < 4; c++) {
    _mm256_storeu_si256((__m256i*)(dst + c * dst_bytes), _mm256_permute2x128_si256(a[c], a[4 + c], 0x20));
    _mm256_storeu_si256((__m256i*)(dst + (c + 4) * dst_bytes), _mm256_permute2x128_si256(a[c], a[4 + c], 0x31));
  }
}
template <bool>  // half lines are not worth streaming
inline void transpose16(const char* src, int64_t src_bytes, char* dst, int64_t dst_bytes) {
  for (int r = 0; r < 16; r += 8)
    for (int c = 0; c < 16; c += 8) transpose8(src + r * src_bytes + c * 4, src_bytes, dst + c * dst_bytes + r * 4, dst_bytes);
}
#endif

inline void copy_cached(char* dst, const char* src, int64_t bytes) { memcpy(dst, src, (size_t)bytes); }

// memcpy past the caches
inline void copy_streamed(char* dst, const char* src, int64_t bytes) {
  int64_t i = std::min(bytes, (int64_t)(-(uintptr_t)dst % 64));
  memcpy(dst, src, (size_t)i);
  for (; i + 64 <= bytes; i += 64) {
    _mm256_stream_si256((__m256i*)(dst + i), _mm256_loadu_si256((const __m256i*)(src + i)));
    _mm256_stream_si256((__m256i*)(dst + i + 32), _mm256_loadu_si256((const __m256i*)(src + i + 32)));
  }
  memcpy(dst + i, src + i, (size_t)(bytes - i));
}

// Calls tile(row, col, block, lane) for what of a slice lies in whole tiles of 16 lanes by 16 words, one(row, col, block, lane) for
// every other element. Rows and columns count from the slice's corner.
template <class T, class Tile, class One>
inline void walk_weights(int n, bool interleave, int row0, int rows, int col0, int cols, Tile tile, One one) {
  constexpr int TILE_COLS = 64 / sizeof(T), ALIGN_COLS = sizeof(T) == 2 ? 32 : 1;
  int c0 = std::min(cols, (ALIGN_COLS - col0 % ALIGN_COLS) % ALIGN_COLS), c1 = c0 + (cols - c0) / TILE_COLS * TILE_COLS;
  for (int r = 0; r < rows;) {
    int block, lane, last_block, last_lane;
    weight_lane(row0 + r, n, interleave, block, lane);
    bool strip = lane % 16 == 0 && r + 16 <= rows;
    if (strip) {
      weight_lane(row0 + r + 15, n, interleave, last_block, last_lane);
      strip = last_block == block && last_lane == lane + 15;
    }
    if (strip)
      for (int c = c0; c < c1; c += TILE_COLS) tile(r, c, block, lane);
    for (int end = r + (strip ? 16 : 1); r < end; r++) {
      weight_lane(row0 + r, n, interleave, block, lane);
      for (int c = 0; c < (strip ? c0 : cols); c++) one(r, c, block, lane);
      for (int c = strip ? c1 : cols; c < cols; c++) one(r, c, block, lane);
    }
  }
}
template <class T>
constexpr int64_t column_bytes() {
  return sizeof(T) == 2 ? 64 : 128;
}

template <class T>
void pack(T* dst, const T* src, int64_t ld_src, int n, int width, bool interleave, int row0, int rows, int col0, int cols, bool stream = true) {
  const bool whole_lines = stream && (uintptr_t)dst % 64 == 0;
  walk_weights<T>(
      n, interleave, row0, rows, col0, cols,
      [&](int r, int c, int block, int lane) {
        char* to = (char*)(dst + packed_offset(dst, block, lane, col0 + c, width));
        const char* from = (const char*)(src + r * ld_src + c);
        whole_lines ? transpose16<true>(from, ld_src * sizeof(T), to, column_bytes<T>()) : transpose16<false>(from, ld_src * sizeof(T), to, column_bytes<T>());
      },
      [&](int r, int c, int block, int lane) { dst[packed_offset(dst, block, lane, col0 + c, width)] = src[r * ld_src + c]; });
  _mm_sfence();  // streamed lines are there for other threads now
}

template <class T>
void unpack(const T* src, T* dst, int64_t ld_dst, int n, int width, bool interleave, int row0, int rows, int col0, int cols) {
  walk_weights<T>(
      n, interleave, row0, rows, col0, cols,
      [&](int r, int c, int block, int lane) {
        const T* from = src + packed_offset((T*)nullptr, block, lane, col0 + c, width);
        transpose16<false>((const char*)from, column_bytes<T>(), (char*)(dst + r * ld_dst + c), ld_dst * sizeof(T));
      },
      [&](int r, int c, int block, int lane) { dst[r * ld_dst + c] = src[packed_offset((T*)nullptr, block, lane, col0 + c, width)]; });
}

}  // namespace
