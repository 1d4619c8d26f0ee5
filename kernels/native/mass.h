// Probability masses as 40-bit integers: their sums do not depend on any order.
#pragma once
#include <cmath>

#include "simd.h"

namespace {

constexpr double LN2 = 0.6931471805599453, MASS_LN = 40 * 0.6931471805599453, MASS_SCALE = 1099511627776.0;  // 2^40
constexpr int MASS_BLOCK = 512;

inline double ln64(double x) {
  int k;
  double f = frexp(x, &k) * 2;
  k -= 1;
  if (f > 1.4142135623730951) {
    f *= 0.5;
    k += 1;
  }
  double s = (f - 1) / (f + 1), w = s * s, p = 1.0 / 21;
  for (int d = 19; d >= 3; d -= 2) p = p * w + 1.0 / d;
  p = p * w + 1.0;
  return k * LN2 + (2 * s) * p;
}
inline double ln_mass(uint64_t q) { return ln64((double)q) - MASS_LN; }

// rint of doubles in [0, 2^51] by adding 1.5 * 2^52: the sum's low bits are the integer. Sixteen masses, added up.
constexpr double MAGIC = 6755399441055744.0;
inline int64_t bits_of(double d) {
  int64_t i;
  memcpy(&i, &d, 8);
  return i;
}
inline uint64_t mass_of(float e) { return (uint64_t)(bits_of((double)e * MASS_SCALE + MAGIC) - bits_of(MAGIC)); }

#if defined(__AVX512F__)
struct MassSum {
  __m512i v = _mm512_setzero_si512();
  void add8(__m512d x) {
    __m512i i = _mm512_castpd_si512(_mm512_add_pd(_mm512_mul_pd(x, _mm512_set1_pd(MASS_SCALE)), _mm512_set1_pd(MAGIC)));
    v = _mm512_add_epi64(v, _mm512_sub_epi64(i, _mm512_set1_epi64(bits_of(MAGIC))));
  }
  void add(v16 e) {
    add8(_mm512_cvtps_pd(_mm512_castps512_ps256(e.v)));
    add8(_mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(e.v), 1))));
  }
  // adds rint(e (z - m) 2^40)
  void add_product(v16 e, v16 z, float m) {
    __m512d mx = _mm512_set1_pd((double)m);
    __m256 e_hi = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(e.v), 1));
    __m256 z_hi = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(z.v), 1));
    add8(_mm512_mul_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(e.v)), _mm512_sub_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(z.v)), mx)));
    add8(_mm512_mul_pd(_mm512_cvtps_pd(e_hi), _mm512_sub_pd(_mm512_cvtps_pd(z_hi), mx)));
  }
  int64_t total() const { return _mm512_reduce_add_epi64(v); }
};
#else
struct MassSum {
  __m256i v = _mm256_setzero_si256();
  void add4(__m256d x) {
    __m256i i = _mm256_castpd_si256(_mm256_add_pd(_mm256_mul_pd(x, _mm256_set1_pd(MASS_SCALE)), _mm256_set1_pd(MAGIC)));
    v = _mm256_add_epi64(v, _mm256_sub_epi64(i, _mm256_set1_epi64x(bits_of(MAGIC))));
  }
  void add8(__m256 e) {
    add4(_mm256_cvtps_pd(_mm256_castps256_ps128(e)));
    add4(_mm256_cvtps_pd(_mm256_extractf128_ps(e, 1)));
  }
  void add(v16 e) {
    add8(e.lo);
    add8(e.hi);
  }
  void add_product4(__m128 e, __m128 z, __m256d mx) { add4(_mm256_mul_pd(_mm256_cvtps_pd(e), _mm256_sub_pd(_mm256_cvtps_pd(z), mx))); }
  // adds rint(e (z - m) 2^40)
  void add_product(v16 e, v16 z, float m) {
    __m256d mx = _mm256_set1_pd((double)m);
    add_product4(_mm256_castps256_ps128(e.lo), _mm256_castps256_ps128(z.lo), mx);
    add_product4(_mm256_extractf128_ps(e.lo, 1), _mm256_extractf128_ps(z.lo, 1), mx);
    add_product4(_mm256_castps256_ps128(e.hi), _mm256_castps256_ps128(z.hi), mx);
    add_product4(_mm256_extractf128_ps(e.hi, 1), _mm256_extractf128_ps(z.hi, 1), mx);
  }
  int64_t total() const {
    int64_t t[4];
    _mm256_storeu_si256((__m256i*)t, v);
    return t[0] + t[1] + t[2] + t[3];
  }
};
#endif

}  // namespace
