// Digest and finite check of tensor elements on their way in, one pass; the sum is that of weight_sync/digest.py.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int DIGEST_BLOCK = 128;
constexpr int AHEAD = 4096;  // bytes: what is read next is fetched meanwhile, across pages, where the processor's own prefetch stops

struct DigestKeys {
  int32_t key[DIGEST_BLOCK];
  constexpr DigestKeys() : key() {
    uint32_t power = 1;
    for (int i = 0; i < DIGEST_BLOCK; i++) key[i] = (int32_t)(power = power * 10829 % 16384);
  }
};
alignas(64) constexpr DigestKeys DIGEST_KEYS;

inline uint64_t block_key(uint64_t block) {
  uint64_t x = (block + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return (x ^ x >> 31) | 1;
}

// float32 to bfloat16, to nearest even. By integers, as the processor's own instruction drops numbers below the normal ones.
inline void round_bits(const uint32_t* src, uint16_t* dst, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t x = src[i], up = (x + 0x7fff + (x >> 16 & 1)) >> 16;
    dst[i] = (uint16_t)((x & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : up);
  }
}

inline bool not_finite(uint32_t x, uint32_t exponent) { return (x & exponent) == exponent; }

// Sum of word * key over `n` words; those whose elements (of U) are not finite are counted. Below 2**53, so nothing is lost.
template <class U>
inline int64_t digest_words(const char* words, const int32_t* keys, int n, U exponent, uint64_t& bad) {
  int i = 0;
  int64_t sum = 0;
#if defined(__AVX512BW__)
  __m512i mask = sizeof(U) == 2 ? _mm512_set1_epi16((short)exponent) : _mm512_set1_epi32((int)exponent), even = _mm512_setzero_si512(), odd = even;
  for (; i + 16 <= n; i += 16) {
    _mm_prefetch(words + i * 4 + AHEAD, _MM_HINT_T0);
    __m512i x = _mm512_loadu_si512(words + i * 4), k = _mm512_loadu_si512(keys + i), e = _mm512_and_si512(x, mask);
    uint64_t broken = sizeof(U) == 2 ? (uint64_t)_mm512_cmpeq_epi16_mask(e, mask) : (uint64_t)_mm512_cmpeq_epi32_mask(e, mask);
    bad += (uint64_t)__builtin_popcountll(broken);
    even = _mm512_add_epi64(even, _mm512_mul_epi32(x, k));
    odd = _mm512_add_epi64(odd, _mm512_mul_epi32(_mm512_srli_epi64(x, 32), _mm512_srli_epi64(k, 32)));
  }
  sum = _mm512_reduce_add_epi64(_mm512_add_epi64(even, odd));
#else
  __m256i mask = sizeof(U) == 2 ? _mm256_set1_epi16((short)exponent) : _mm256_set1_epi32((int)exponent), even = _mm256_setzero_si256(), odd = even;
  for (; i + 8 <= n; i += 8) {
    if (i % 16 == 0) _mm_prefetch(words + i * 4 + AHEAD, _MM_HINT_T0);
    __m256i x = _mm256_loadu_si256((const __m256i*)(words + i * 4)), k = _mm256_loadu_si256((const __m256i*)(keys + i)), e = _mm256_and_si256(x, mask);
    unsigned broken = (unsigned)_mm256_movemask_epi8(sizeof(U) == 2 ? _mm256_cmpeq_epi16(e, mask) : _mm256_cmpeq_epi32(e, mask));
    bad += (uint64_t)__builtin_popcount(broken) / sizeof(U);
    even = _mm256_add_epi64(even, _mm256_mul_epi32(x, k));
    odd = _mm256_add_epi64(odd, _mm256_mul_epi32(_mm256_srli_epi64(x, 32), _mm256_srli_epi64(k, 32)));
  }
  alignas(32) int64_t lanes[4];
  _mm256_store_si256((__m256i*)lanes, _mm256_add_epi64(even, odd));
  sum = lanes[0] + lanes[1] + lanes[2] + lanes[3];
#endif
  for (; i < n; i++) {
    int32_t x;
    memcpy(&x, words + i * 4, 4);
    sum += (int64_t)x * keys[i];
    for (size_t part = 0; part < 4 / sizeof(U); part++) bad += not_finite((U)((uint32_t)x >> part * 16), exponent);
  }
  return sum;
}

// Elements that lie one behind the other, from row-major place `first` of the whole tensor on.
template <class U>
inline void digest_run(const U* src, int64_t n, uint64_t first, U exponent, uint64_t& sum, uint64_t& bad) {
  constexpr int per_word = 4 / sizeof(U);
  auto half = [&](U x, uint64_t place) {  // an element whose neighbour in the word is not here
    int64_t value = place % 2 ? (int64_t)(int16_t)x * 65536 : (int64_t)x;
    sum += (uint64_t)(value * DIGEST_KEYS.key[place / 2 % DIGEST_BLOCK]) * block_key(place / 2 / DIGEST_BLOCK);
    bad += not_finite(x, exponent);
  };
  if (per_word == 2 && first % 2 && n) {
    half(*src++, first++);
    n--;
  }
  const char* words = (const char*)src;
  uint64_t word = first / per_word, left = (uint64_t)n / per_word;
  while (left) {
    int at = (int)(word % DIGEST_BLOCK), count = (int)(left < (uint64_t)(DIGEST_BLOCK - at) ? left : DIGEST_BLOCK - at);
    sum += (uint64_t)digest_words(words, DIGEST_KEYS.key + at, count, exponent, bad) * block_key(word / DIGEST_BLOCK);
    words += count * 4;
    word += (uint64_t)count;
    left -= (uint64_t)count;
  }
  if (per_word == 2 && n % 2) half(src[n - 1], first + (uint64_t)n - 1);
}

// Rows of `cols` elements whose places begin at `first` and lie `width` apart.
template <class U>
inline void digest_rows(const U* src, int64_t ld, int64_t rows, int64_t cols, uint64_t first, uint64_t width, U exponent, uint64_t& sum, uint64_t& bad) {
  if (ld == cols && width == (uint64_t)cols) {
    cols *= rows;
    rows = rows ? 1 : 0;
  }
  for (int64_t r = 0; r < rows; r++) digest_run(src + r * ld, cols, first + (uint64_t)r * width, exponent, sum, bad);
}

}  // namespace
