// RMSNorm by docs/numerics.md: the scale of a row, and a row normed in place.
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

template <class T>
inline v16 normed(v16 x, v16 scale, v16 weight) {
  return rounded<T>(x * scale) * weight;
}

template <class T>
inline void norm_in_place(T* x, const T* weight, int width, float eps) {
  v16 scale = inverse_rms(x, width, eps);
  for (int j = 0; j < width; j += 16) {
    int n = width - j < 16 ? width - j : 16;
    T out[16];
    store(out, normed<T>(load_first(x + j, n), scale, load_first(weight + j, n)));
    memcpy(x + j, out, n * sizeof(T));
  }
}

}  // namespace
