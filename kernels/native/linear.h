// Linear layers: products of rows and packed weights, and what becomes of their sums.
#pragma once
#include "layout.h"

namespace {

// ---- products: 32 rows by 32 outputs over k blocks [k0, k1), float results in c[(row / 16) * 2 + half][row % 16][16]
constexpr int TILE = 256;
#if defined(__AVX512F__)
constexpr int ROWS_AT_ONCE = 8;  // what the vector registers hold
#else
constexpr int ROWS_AT_ONCE = 2;
#endif

#if defined(__AMX_BF16__)

struct TileConfig {
  uint8_t palette, start, reserved[14];
  uint16_t colsb[16];
  uint8_t rows[16];
};
thread_local int tile_rows = -1;

// Tiles 0, 1 (results) and 4 (rows) hold m0 rows, tiles 2, 3 and 5 hold m1; 6 and 7 are weights.
inline void configure(int m0, int m1) {
  if (tile_rows == m0 * 32 + m1) return;
  tile_rows = m0 * 32 + m1;
  TileConfig c;
  memset(&c, 0, sizeof c);
  c.palette = 1;
  for (int t = 0; t < 8; t++) {
    c.colsb[t] = 64;
    c.rows[t] = 16;
  }
  c.rows[0] = c.rows[1] = c.rows[4] = (uint8_t)m0;
  c.rows[2] = c.rows[3] = c.rows[5] = (uint8_t)(m1 ? m1 : 16);
  _tile_loadconfig(&c);
}

// Weights come from memory once per step: asked for this far ahead into the second-level cache, whose queue is longer than
// the first level's, and from there shortly before they are needed.
constexpr int PREFETCH_BYTES = 32768;

template <bool FULL, bool STREAM>
inline void product_tiles(const bf16* a0, const bf16* a1, int64_t a_step, int64_t a_stride, const bf16* b, const bf16* end, float* c) {
  _tile_zero(0);
  _tile_zero(1);
  if (FULL) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (; b < end; b += 1024, a0 += a_step, a1 += a_step) {
    if (STREAM)
      for (int i = 0; i < 2048; i += 64) {
        _mm_prefetch((const char*)b + PREFETCH_BYTES + i, _MM_HINT_T1);
        _mm_prefetch((const char*)b + 4096 + i, _MM_HINT_T0);
      }
    _tile_loadd(6, b, 64);
    _tile_loadd(4, a0, a_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + 512, 64);
    _tile_dpbf16ps(1, 4, 7);
    if (FULL) {
      _tile_loadd(5, a1, a_stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, 64);
  _tile_stored(1, c + TILE, 64);
  if (FULL) {
    _tile_stored(2, c + 2 * TILE, 64);
    _tile_stored(3, c + 3 * TILE, 64);
  }
}

// `ld` is 0 where x lies in panels, else the stride of its rows.
inline void product(const bf16* x, int64_t ld, int k_blocks, int m, const bf16* w, int kb0, int kb1, float* c, float*, bool stream) {
  int m0 = m < 16 ? m : 16, m1 = m - m0;
  configure(m0, m1);
  const bf16 *a0 = x + (int64_t)kb0 * (ld ? 32 : 512), *a1 = a0 + (ld ? ld * 16 : (int64_t)k_blocks * 512);
  const bf16 *b = w + (int64_t)kb0 * 1024, *end = w + (int64_t)kb1 * 1024;
  int64_t step = ld ? 32 : 512, stride = ld ? ld * 2 : 64;
  if (m1 && stream)
    product_tiles<true, true>(a0, a1, step, stride, b, end, c);
  else if (m1)
    product_tiles<true, false>(a0, a1, step, stride, b, end, c);
  else if (stream)
    product_tiles<false, true>(a0, a1, step, stride, b, end, c);
  else
    product_tiles<false, false>(a0, a1, step, stride, b, end, c);
}
constexpr bool WIDEN_ROWS = false;

#else

template <int R>
inline void product_rows(const float* a, int64_t lda, const bf16* w, int kb0, int kb1, float* c) {
  v16 acc[R];
  for (int r = 0; r < R; r++) acc[r] = zero16();
  for (int kb = kb0; kb < kb1; kb++) {
    v16 e[R], o[R];
    for (int r = 0; r < R; r++) e[r] = o[r] = zero16();
    const bf16* b = w + (int64_t)kb * 1024;
    for (int p = 0; p < 16; p++) {
      v16 be, bo;
      load_pairs(b + p * 32, be, bo);
      for (int r = 0; r < R; r++) {
        e[r] = fma(bc(a[r * lda + kb * 32 + 2 * p]), be, e[r]);
        o[r] = fma(bc(a[r * lda + kb * 32 + 2 * p + 1]), bo, o[r]);
      }
    }
    for (int r = 0; r < R; r++) acc[r] = acc[r] + (e[r] + o[r]);
  }
  for (int r = 0; r < R; r++) store(c + r * 16, acc[r]);
}

// `wide` holds the same rows as float [32][32 k_blocks].
inline void product(const bf16*, int64_t, int k_blocks, int m, const bf16* w, int kb0, int kb1, float* c, float* wide, bool) {
  constexpr int R = ROWS_AT_ONCE;
  int64_t lda = (int64_t)k_blocks * 32;
  for (int h = 0; h < 2; h++)
    for (int r = 0; r < m;) {
      float* out = c + ((r / 16) * 2 + h) * TILE + (r % 16) * 16;
      if (r + R <= m) {
        product_rows<R>(wide + r * lda, lda, w + h * 512, kb0, kb1, out);
        r += R;
      } else {
        product_rows<1>(wide + r * lda, lda, w + h * 512, kb0, kb1, out);
        r += 1;
      }
    }
}
constexpr bool WIDEN_ROWS = true;

#endif

template <int R>
inline void product_rows_f32(const float* a, int64_t lda, const float* w, int k0, int k1, float* c0, float* c1) {
  v16 lo[R], hi[R];
  for (int r = 0; r < R; r++) lo[r] = hi[r] = zero16();
  for (int k = k0; k < k1; k++) {
    v16 b0 = load(w + (int64_t)k * 32), b1 = load(w + (int64_t)k * 32 + 16);
    for (int r = 0; r < R; r++) {
      v16 x = bc(a[r * lda + k]);
      lo[r] = fma(x, b0, lo[r]);
      hi[r] = fma(x, b1, hi[r]);
    }
  }
  for (int r = 0; r < R; r++) {
    store(c0 + r * 16, lo[r]);
    store(c1 + r * 16, hi[r]);
  }
}

inline void product(const float* x, int64_t lda, int m, const float* w, int k0, int k1, float* c) {
  constexpr int R = ROWS_AT_ONCE;
  for (int r = 0; r < m;) {
    float* out = c + (r / 16) * 2 * TILE + (r % 16) * 16;
    int step = r + R <= m ? R : 1;
    if (step == R)
      product_rows_f32<R>(x + r * lda, lda, w, k0, k1, out, out + TILE);
    else
      product_rows_f32<1>(x + r * lda, lda, w, k0, k1, out, out + TILE);
    r += step;
  }
}

// ---- one work item of a linear op: blocks [nb0, nb1) of 32 outputs, rows [r0, r1), r0 a multiple of 32
// Rows of type T give outputs of type O: T's own, or float where sums are not to be rounded.
template <class T, class O>
struct LinearItem {
  const Op& op;
  const T* weights;
  const float* bias;
  O* out;
  int k_blocks;

  void finish(int nb, int row, int m, const float* c) const {
    for (int r = 0; r < m; r++) {
      const float* p = c + (r / 16) * 2 * TILE + (r % 16) * 16;
      v16 lo = load(p), hi = load(p + TILE);
      if (gated(op)) {
        v16 g = rounded<T>(lo), u = rounded<T>(hi);
        v16 s = rounded<T>(g / (bc(1.f) + vexp(op.epilogue == EP_SILU_MUL ? zero16() - g : gelu_exponent(g))));
        int width = op.n / 2, col = nb * 16;
        panel_store(out, ceil_div(width, 32), row + r, col, s * u, width - col < 16 ? width - col : 16);
        continue;
      }
      for (int h = 0; h < 2; h++) {
        int col = nb * 32 + h * 16, n = op.n - col < 16 ? op.n - col : 16;
        if (n <= 0) break;
        v16 y = h ? hi : lo;
        if (bias) y = y + load(bias + col);
        if (op.softcap) y = softcapped<O>(rounded<O>(y), op.softcap);
        put(row + r, col, n, y);
      }
    }
  }
  void put(int row, int col, int n, v16 y) const {
    O* dst = out + row * op.ld_out + col;
    O t[16];
    if (op.epilogue == EP_RESIDUAL) {
      if (n == 16) {
        store(dst, load(dst) + rounded<O>(y));
        return;
      }
      memcpy(t, dst, sizeof(O) * n);
      for (int i = n; i < 16; i++) t[i] = 0;
      y = load(t) + rounded<O>(y);
    }
    if (n == 16) {
      store(dst, y);
    } else {
      store(t, y);
      memcpy(dst, t, sizeof(O) * n);
    }
  }
};

// The balanced tree over `shards` partial results of `size` floats, left in part 0.
inline void add_tree(float* parts, int shards, int size) {
  for (int w = 1; w < shards; w *= 2)
    for (int i = 0; i < shards; i += 2 * w)
      for (int j = 0; j < size; j += 16) store(parts + i * size + j, load(parts + i * size + j) + load(parts + (i + w) * size + j));
}

// The same tree over the sums of `op.parts` ranks, then what follows a sum: rows [r0, r1).
template <class T>
inline void add_parts(const Op& op, int r0, int r1) {
  LinearItem<T, T> item{op, nullptr, nullptr, (T*)op.out, 0};
  for (int r = r0; r < r1; r++)
    for (int j = 0; j < op.n; j += 16) {
      v16 sum[16];
      for (int p = 0; p < op.parts; p++) sum[p] = load((const float*)op.in + p * op.part_stride + r * op.ld_in + j);
      for (int w = 1; w < op.parts; w *= 2)
        for (int i = 0; i < op.parts; i += 2 * w) sum[i] = sum[i] + sum[i + w];
      item.put(r, j, op.n - j < 16 ? op.n - j : 16, sum[0]);
    }
}

// What of a linear op's weights and rows the kernels read: `weights` packed, from the op's first block on; `ld` as in `product`.
template <class T>
struct Operands {
  const T *weights, *x;
  int64_t ld;
};

template <class T>
inline Operands<T> packed_operands(const Op& op, const Step& st) {
  return {(const T*)st.weights[op.w] + packed_offset((T*)nullptr, op.first_block, 0, 0, op.k), (const T*)op.in, 0};
}
inline const float* bias_of(const Op& op, const Step& st) { return op.bias < 0 ? nullptr : (const float*)st.weights[op.bias]; }

template <class O>
inline void linear_item(const Op& op, const Step& st, Operands<bf16> in, O* y, int nb0, int nb1, int r0, int r1, float* scratch) {
  int kb = ceil_div(op.k, 32), per = kb / op.shards;
  LinearItem<bf16, O> item{op, in.weights, bias_of(op, st), y, kb};
  alignas(64) float c[16 * 4 * TILE];
  auto one = [&](int nb, int r) {
    int m = r1 - r < 32 ? r1 - r : 32;
    const bf16* w = item.weights + (int64_t)nb * kb * 1024;
    const bf16* a = in.x + (in.ld ? r * in.ld : (int64_t)(r / 16) * kb * 512);
    for (int s = 0; s < op.shards; s++) product(a, in.ld, kb, m, w, s * per, (s + 1) * per, c + s * 4 * TILE, scratch, r == r0);
    if (op.shards > 1) add_tree(c, op.shards, 4 * TILE);
    item.finish(nb, r, m, c);
  };
  if (!WIDEN_ROWS) {  // a weight block stays in the nearest cache while the rows stream past
    for (int nb = nb0; nb < nb1; nb++)
      for (int r = r0; r < r1; r += 32) one(nb, r);
    return;
  }
  for (int r = r0; r < r1; r += 32) {
    int m = r1 - r < 32 ? r1 - r : 32;
    for (int i = 0; i < m; i++)
      for (int k = 0; k < kb * 32; k += 16)
        store(scratch + (int64_t)i * kb * 32 + k, load(in.ld ? in.x + (r + i) * in.ld + k : panel_at((bf16*)in.x, kb, r + i, k)));
    for (int nb = nb0; nb < nb1; nb++) one(nb, r);
  }
}

inline void linear_item(const Op& op, const Step& st, Operands<float> in, float* y, int nb0, int nb1, int r0, int r1, float*) {
  int64_t lda = in.ld ? in.ld : round_up(op.k, 32);
  int per = op.k / op.shards;
  LinearItem<float, float> item{op, in.weights, bias_of(op, st), y, 0};
  alignas(64) float c[16 * 4 * TILE];
  for (int nb = nb0; nb < nb1; nb++)
    for (int r = r0; r < r1; r += 32) {
      int m = r1 - r < 32 ? r1 - r : 32;
      const float* w = item.weights + (int64_t)nb * op.k * 32;
      for (int s = 0; s < op.shards; s++) product(in.x + r * lda, lda, m, w, s * per, (s + 1) * per, c + s * 4 * TILE);
      if (op.shards > 1) add_tree(c, op.shards, 4 * TILE);
      item.finish(nb, r, m, c);
    }
}

}  // namespace
