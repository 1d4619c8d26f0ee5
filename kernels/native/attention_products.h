// The products of attention: query rows by keys, probabilities by values, over units of 32 keys (kv.h).
#pragma once
#include "kv.h"

namespace {

// The units a thread reads next. Each is asked for while the unit at the same place is at work: decoding is mostly waiting for
// pages that nobody has read since the last step.
template <class T>
struct Upcoming {
  T* const* units;
  int n;
  void key(int i, int hp) const {
    if (i < n) prefetch(units[i], 32 * hp * sizeof(T));
  }
  void value(int i, int hp) const {
    if (i < n) prefetch(units[i] + 32 * hp, 32 * hp * sizeof(T));
  }
};

// Rows (at most 16) of q by K, rows of p by V

#if defined(__AMX_BF16__)

inline void score_rows(const bf16* q, int rows, bf16* const* units, int n, int hp, float* s, int64_t ld, Upcoming<bf16> next) {
  configure(rows, rows);
  if (hp == 64) {
    _tile_loadd(4, q, 128);
    _tile_loadd(5, q + 32, 128);
    for (int i = 0; i < n; i++) {
      const bf16* k = units[i];
      next.key(i, hp);
      _tile_zero(0);
      _tile_zero(1);
      _tile_loadd(6, k, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, k + 512, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(6, k + 1024, 64);
      _tile_dpbf16ps(0, 5, 6);
      _tile_loadd(7, k + 1536, 64);
      _tile_dpbf16ps(1, 5, 7);
      _tile_stored(0, s + i * 32, ld * 4);
      _tile_stored(1, s + i * 32 + 16, ld * 4);
    }
    return;
  }
  for (int i = 0; i < n; i++) {
    const bf16* k = units[i];
    next.key(i, hp);
    _tile_zero(0);
    _tile_zero(1);
    for (int h = 0; h < hp; h += 32, k += 1024) {
      _tile_loadd(4, q + h, hp * 2);
      _tile_loadd(6, k, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, k + 512, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, s + i * 32, ld * 4);
    _tile_stored(1, s + i * 32 + 16, ld * 4);
  }
}

// acc [rows][hp] += p [rows][32 n] V
inline void value_rows(const bf16* p, int64_t ld, int rows, bf16* const* units, int n, int hp, float* acc, Upcoming<bf16> next) {
  configure(rows, rows);
  for (int h = 0; h < hp; h += 64) {
    bool wide = h + 64 <= hp;
    float* c = acc + h;
    _tile_loadd(0, c, hp * 4);
    _tile_loadd(1, c + 16, hp * 4);
    if (wide) {
      _tile_loadd(2, c + 32, hp * 4);
      _tile_loadd(3, c + 48, hp * 4);
    }
    for (int i = 0; i < n; i++) {
      const bf16* v = units[i] + 32 * hp + (int64_t)(h / 16) * 512;
      if (h == 0) next.value(i, hp);
      _tile_loadd(4, p + i * 32, ld * 2);
      _tile_loadd(6, v, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, v + 512, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (wide) {
        _tile_loadd(6, v + 1024, 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, v + 1536, 64);
        _tile_dpbf16ps(3, 4, 7);
      }
    }
    _tile_stored(0, c, hp * 4);
    _tile_stored(1, c + 16, hp * 4);
    if (wide) {
      _tile_stored(2, c + 32, hp * 4);
      _tile_stored(3, c + 48, hp * 4);
    }
  }
}

#else

// c [rows][16] += a [rows][32] by one tile [16 pairs][16][2]: what one AMX tile product computes
inline void tile_product(const bf16* a, int64_t lda, int rows, const bf16* b, float* c, int64_t ldc) {
  for (int r = 0; r < rows; r++) {
    v16 e = zero16(), o = zero16();
    for (int p = 0; p < 16; p++) {
      v16 be, bo;
      load_pairs(b + p * 32, be, bo);
      e = fma(bc(to_float(a[r * lda + 2 * p])), be, e);
      o = fma(bc(to_float(a[r * lda + 2 * p + 1])), bo, o);
    }
    store(c + r * ldc, load(c + r * ldc) + (e + o));
  }
}

inline void score_rows(const bf16* q, int rows, bf16* const* units, int n, int hp, float* s, int64_t ld, Upcoming<bf16> next) {
  for (int i = 0; i < n; i++)
    for (int half = 0; half < 2; half++) {
      float* c = s + i * 32 + half * 16;
      for (int r = 0; r < rows; r++) store(c + r * ld, zero16());
      for (int h = 0; h < hp; h += 32) tile_product(q + h, hp, rows, units[i] + (h / 32 * 2 + half) * 512, c, ld);
    }
}

inline void value_rows(const bf16* p, int64_t ld, int rows, bf16* const* units, int n, int hp, float* acc, Upcoming<bf16> next) {
  for (int i = 0; i < n; i++)
    for (int h = 0; h < hp; h += 16) tile_product(p + i * 32, ld, rows, units[i] + 32 * hp + (int64_t)(h / 16) * 512, acc + h, hp);
}

#endif

inline void score_rows(const float* q, int rows, float* const* units, int n, int hp, float* s, int64_t ld, Upcoming<float> next) {
  for (int i = 0; i < n; i++)
    for (int r = 0; r < rows; r++) {
      v16 lo = zero16(), hi = zero16();
      const float* k = units[i];
      for (int h = 0; h < hp; h++) {
        v16 x = bc(q[(int64_t)r * hp + h]);
        lo = fma(x, load(k + h * 32), lo);
        hi = fma(x, load(k + h * 32 + 16), hi);
      }
      store(s + r * ld + i * 32, lo);
      store(s + r * ld + i * 32 + 16, hi);
    }
}

inline void value_rows(const float* p, int64_t ld, int rows, float* const* units, int n, int hp, float* acc, Upcoming<float> next) {
  for (int r = 0; r < rows; r++)
    for (int h = 0; h < hp; h += 32) {
      float* c = acc + (int64_t)r * hp + h;
      v16 a = load(c), b = load(c + 16);
      for (int i = 0; i < n; i++) {
        const float* v = units[i] + 32 * (int64_t)hp + h;
        for (int j = 0; j < 32; j++) {
          v16 x = bc(p[r * ld + i * 32 + j]);
          a = fma(x, load(v + (int64_t)j * hp), a);
          b = fma(x, load(v + (int64_t)j * hp + 16), b);
        }
      }
      store(c, a);
      store(c + 16, b);
    }
}

}  // namespace
