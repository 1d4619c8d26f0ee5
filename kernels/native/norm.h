// RMSNorm of one row by docs/numerics.md.
#pragma once
#include <cmath>

#include "simd.h"

namespace {

// Sixteen elements from p, of which the first n count; zeros stand for the rest.
template <class T>
inline v16 load_first(const T* p, int n) {
  if (n >= 16) return load(p);
  T tail[16] = {};
  memcpy(tail, p, n * sizeof(T));
  return load(tail);
}

template <class T>
inline v16 inverse_rms(const T* x, int width, float eps) {
  v16 a[4] = {zero16(), zero16(), zero16(), zero16()};
  for (int j = 0; j < width; j += 16) {
    v16 v = load_first(x + j, width - j);
    a[j / 16 % 4] = fma(v, v, a[j / 16 % 4]);
  }
  float mean = hsum((a[0] + a[1]) + (a[2] + a[3])) / (float)width;
  return bc(1.f / sqrtf(mean + eps));
}

// Calls put(first column, columns, values yet to be rounded) for every sixteen columns. `one_plus` is Gemma's norm.
template <class T, class Put>
inline void norm_row(const T* x, const T* weight, int width, float eps, bool one_plus, Put put) {
  v16 scale = inverse_rms(x, width, eps);
  for (int j = 0; j < width; j += 16) {
    int n = width - j < 16 ? width - j : 16;
    v16 y = load_first(x + j, n) * scale, w = load_first(weight + j, n);
    put(j, n, one_plus ? y * (bc(1.f) + w) : rounded<T>(y) * w);
  }
}

template <class T>
inline void store_first(T* p, int n, v16 x) {
  if (n == 16) return store(p, x);
  T t[16];
  store(t, x);
  memcpy(p, t, n * sizeof(T));
}

}  // namespace
