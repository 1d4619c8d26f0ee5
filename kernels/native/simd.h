// Sixteen float lanes on AVX-512 or AVX2, with only exactly rounded operations, so both give the same bits.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

typedef uint16_t bf16;

inline float to_float(bf16 b) {
  uint32_t u = (uint32_t)b << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline float to_float(float f) { return f; }

#if defined(__AVX512F__)

struct v16 {
  __m512 v;
};
inline v16 bc(float x) { return {_mm512_set1_ps(x)}; }
inline v16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, v16 a) { _mm512_storeu_ps(p, a.v); }
inline v16 operator+(v16 a, v16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline v16 operator-(v16 a, v16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline v16 operator*(v16 a, v16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline v16 operator/(v16 a, v16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline v16 fma(v16 a, v16 b, v16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// x86 max and min return the second operand when either is a NaN; callers put the value there that must survive.
inline v16 vmax(v16 a, v16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline v16 vmin(v16 a, v16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline v16 load(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline __m256i pack_bf16(v16 a) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(a.v);
#else
  __m512i u = _mm512_castps_si512(a.v);
  __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1))));
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
#endif
}
inline void store(bf16* p, v16 a) { _mm256_storeu_si256((__m256i*)p, pack_bf16(a)); }
inline v16 round_bf16(v16 a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(pack_bf16(a)), 16))}; }
// p * 2^n for whole n in [-126, 127], by exponent bits
inline v16 scale2(v16 p, v16 n) {
  __m512i e = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
  return p * v16{_mm512_castsi512_ps(e)};
}
inline bool any_nan(v16 a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) != 0; }
inline unsigned equal_mask(v16 a, v16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
inline unsigned at_least_mask(v16 a, v16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline v16 replace_equal(v16 a, v16 what, v16 by) { return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, what.v, _CMP_EQ_OQ), a.v, by.v)}; }
inline v16 first_lanes(v16 a, int n, float other) { return {_mm512_mask_blend_ps((__mmask16)((1u << n) - 1), _mm512_set1_ps(other), a.v)}; }
inline v16 where_below(v16 a, v16 bound, v16 yes, v16 no) { return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, bound.v, _CMP_LT_OQ), no.v, yes.v)}; }
// A row of interleaved pairs: 16 even elements, 16 odd elements.
inline void load_pairs(const bf16* p, v16& even, v16& odd) {
  __m512i x = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)));
}

#else

struct v16 {
  __m256 lo, hi;
};
inline v16 bc(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline v16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, v16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline v16 operator+(v16 a, v16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline v16 operator-(v16 a, v16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline v16 operator*(v16 a, v16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline v16 operator/(v16 a, v16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline v16 fma(v16 a, v16 b, v16 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline v16 vmax(v16 a, v16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline v16 vmin(v16 a, v16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline __m256 widen8(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
inline v16 load(const bf16* p) {
  return {widen8(_mm_loadu_si128((const __m128i*)p)), widen8(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline __m256i round8(__m256 a) {
  __m256i u = _mm256_castps_si256(a);
  __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1))));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_or_si256(u, _mm256_set1_epi32(0x400000)), nan);
  return _mm256_srli_epi32(r, 16);
}
inline void store(bf16* p, v16 a) {
  __m256i x = _mm256_packus_epi32(round8(a.lo), round8(a.hi));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(x, 0xd8));
}
inline v16 round_bf16(v16 a) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(round8(a.lo), 16)), _mm256_castsi256_ps(_mm256_slli_epi32(round8(a.hi), 16))};
}
inline __m256 scale8(__m256 p, __m256 n) {
  __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(e));
}
inline v16 scale2(v16 p, v16 n) { return {scale8(p.lo, n.lo), scale8(p.hi, n.hi)}; }
inline unsigned mask8(__m256 m) { return (unsigned)_mm256_movemask_ps(m); }
inline bool any_nan(v16 a) {
  return (mask8(_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q)) | mask8(_mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q))) != 0;
}
inline unsigned equal_mask(v16 a, v16 b) {
  return mask8(_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ)) | mask8(_mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ)) << 8;
}
inline unsigned at_least_mask(v16 a, v16 b) { return mask8(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ)) | mask8(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ)) << 8; }
inline v16 replace_equal(v16 a, v16 what, v16 by) {
  return {_mm256_blendv_ps(a.lo, by.lo, _mm256_cmp_ps(a.lo, what.lo, _CMP_EQ_OQ)), _mm256_blendv_ps(a.hi, by.hi, _mm256_cmp_ps(a.hi, what.hi, _CMP_EQ_OQ))};
}
inline v16 where_below(v16 a, v16 bound, v16 yes, v16 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, bound.lo, _CMP_LT_OQ)), _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, bound.hi, _CMP_LT_OQ))};
}
inline v16 first_lanes(v16 a, int n, float other) {
  alignas(32) float t[16];
  store(t, a);
  for (int i = n; i < 16; i++) t[i] = other;
  return load(t);
}
inline void load_pairs(const bf16* p, v16& even, v16& odd) {
  __m256i a = _mm256_loadu_si256((const __m256i*)p), b = _mm256_loadu_si256((const __m256i*)(p + 16));
  __m256i m = _mm256_set1_epi32((int)0xffff0000);
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(a, m)), _mm256_castsi256_ps(_mm256_and_si256(b, m))};
}

#endif

inline v16 zero16() { return bc(0.f); }

// The lanes by halving: v[i] += v[i + w] for w = 8, 4, 2, 1.
inline float hsum(v16 a) {
  float t[16];
  store(t, a);
  for (int w = 8; w; w >>= 1)
    for (int i = 0; i < w; i++) t[i] += t[i + w];
  return t[0];
}
inline float hmax(v16 a) {
  float t[16];
  store(t, a);
  float m = t[0];
  for (int i = 1; i < 16; i++) m = t[i] > m ? t[i] : m;
  return m;
}

// exp by docs/numerics.md; NaN stays NaN (the clamp's constants stand first).
inline v16 vexp(v16 x) {
  x = vmax(bc(-87.f), x);
  x = vmin(bc(88.f), x);
  v16 n = (x * bc(1.44269504f) + bc(12582912.f)) - bc(12582912.f);
  v16 r = fma(n, bc(-0.693359375f), x);
  r = fma(n, bc(2.12194440e-4f), r);
  v16 p = bc(1.9875691500e-4f);
  p = fma(p, r, bc(1.3981999507e-3f));
  p = fma(p, r, bc(8.3334519073e-3f));
  p = fma(p, r, bc(4.1665795894e-2f));
  p = fma(p, r, bc(1.6666665459e-1f));
  p = fma(p, r, bc(5.0000001201e-1f));
  p = fma(p, r * r, r + bc(1.f));
  return scale2(p, n);
}

// gelu_tanh(g) = g / (1 + exp of this)
inline v16 gelu_exponent(v16 g) { return fma(g * g * g, bc(0.044715f), g) * bc(-1.5957691216f); }

// tanh by docs/numerics.md: a polynomial near 0, else by exp. NaN stays NaN.
inline v16 vtanh(v16 x) {
  v16 minus = zero16() - x, a = where_below(x, zero16(), minus, x), w = x * x;
  v16 p = bc(-5.70498872745e-3f);
  p = fma(p, w, bc(2.06390887954e-2f));
  p = fma(p, w, bc(-5.37397155531e-2f));
  p = fma(p, w, bc(1.33314422036e-1f));
  p = fma(p, w, bc(-3.33332819422e-1f));
  v16 far = bc(1.f) - bc(2.f) / (vexp(a + a) + bc(1.f));
  return where_below(a, bc(0.625f), fma(p * w, x, x), where_below(x, zero16(), zero16() - far, far));
}

// Round to the model's dtype and back.
template <class T>
inline v16 rounded(v16 x) {
  if constexpr (sizeof(T) == 4)
    return x;
  else
    return round_bf16(x);
}

// cap * tanh(x / cap), each step rounded to O
template <class O>
inline v16 softcapped(v16 x, float cap) {
  return rounded<O>(rounded<O>(vtanh(rounded<O>(x / bc(cap)))) * bc(cap));
}

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
inline int round_up(int a, int b) { return ceil_div(a, b) * b; }

}  // namespace
