// Logprobs and draws by docs/numerics.md. Masses are integers, so their sums do not depend on any order.
#pragma once
#include <algorithm>
#include <cmath>

#include "attention.h"

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
  int64_t total() const {
    int64_t t[4];
    _mm256_storeu_si256((__m256i*)t, v);
    return t[0] + t[1] + t[2] + t[3];
  }
};
#endif

inline uint64_t draw64(uint64_t seed, uint32_t sample, uint32_t position) {
  uint32_t c[4] = {position, 0, sample, 0}, k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
  for (int i = 0; i < 10; i++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    uint64_t p0 = (uint64_t)0xD2511F53u * c[0], p1 = (uint64_t)0xCD9E8D57u * c[2];
    uint32_t n[4] = {(uint32_t)(p1 >> 32) ^ c[1] ^ k0, (uint32_t)p1, (uint32_t)(p0 >> 32) ^ c[3] ^ k1, (uint32_t)p0};
    memcpy(c, n, sizeof c);
  }
  return (uint64_t)c[1] << 32 | c[0];
}

// z = logits * inv, -inf past the last id; its maximum; false if it is not finite enough to sample.
template <class T>
inline bool scaled_row(const T* logits, int n, float inv, float* z, float& m) {
  const float low = -__builtin_inff();
  v16 mx = bc(low), scale = bc(inv);
  bool bad = false;
  for (int j = 0; j < n; j += 16) {
    int count = n - j < 16 ? n - j : 16;
    T tail[16] = {};
    const T* p = logits + j;
    if (count < 16) {
      memcpy(tail, p, count * sizeof(T));
      p = tail;
    }
    v16 x = load(p) * scale;
    if (count < 16) x = first_lanes(x, count, low);
    bad |= any_nan(x);
    mx = vmax(mx, x);
    store(z + j, x);
  }
  for (int j = round_up(n, 16); j < round_up(n, MASS_BLOCK); j += 16) store(z + j, bc(low));
  m = hmax(mx);
  return !bad && m < __builtin_inff() && m > low;
}

// Ids that do not take part drop to -inf; the maximum of the rest.
inline float restrict_row(float* z, int limit, int padded, const int32_t* banned, int num_banned) {
  const float low = -__builtin_inff();
  for (int i = 0; i < num_banned; i++)
    if (banned[i] < padded) z[banned[i]] = low;
  for (int j = limit; j < padded; j++) z[j] = low;
  v16 mx = bc(low);
  for (int j = 0; j < padded; j += 16) mx = vmax(mx, load(z + j));
  return hmax(mx);
}

inline uint64_t total_mass(const float* z, float m, int padded, uint64_t* blocks) {
  uint64_t sum = 0;
  v16 mx = bc(m);
  for (int b = 0; b < padded; b += MASS_BLOCK) {
    MassSum q;
    for (int j = b; j < b + MASS_BLOCK; j += 16) q.add(vexp(load(z + j) - mx));
    uint64_t t = (uint64_t)q.total();
    if (blocks) blocks[b / MASS_BLOCK] = t;
    sum += t;
  }
  return sum;
}

inline float entropy_of(const float* z, float m, int padded, uint64_t q) {
  int64_t sum = 0;
  v16 mx = bc(m);
  for (int j = 0; j < padded; j += 16) {
    float e[16];
    store(e, vexp(load(z + j) - mx));
    for (int i = 0; i < 16; i++)
      if (z[j + i] > -__builtin_inff()) sum += bits_of((double)e[i] * ((double)z[j + i] - (double)m) * MASS_SCALE + MAGIC) - bits_of(MAGIC);
  }
  return (float)(ln_mass(q) - (double)sum / (double)q);
}

// The kept set of a truncated row: ids ranked at or above (z, id), and with e >= min_e.
struct Kept {
  float z = -__builtin_inff();
  int id = 0x7fffffff;
  float min_e = 0.f;
  bool holds(float zi, float e, int i) const { return (zi > z || (zi == z && i <= id)) && e >= min_e; }
};

// Ranks in order; -0 and 0 are equal, so that their ids decide.
inline uint32_t sort_key(float z) {
  z += 0.f;
  uint32_t u;
  memcpy(&u, &z, 4);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// Histogram of ids by the leading bits of their rank, so that a cut needs only one bin in order.
struct RankBins {
  static constexpr int BITS = 11;
  std::vector<uint32_t> count = std::vector<uint32_t>(1 << BITS);
  std::vector<uint64_t> mass = std::vector<uint64_t>(1 << BITS);
  std::vector<int> inside;
};
thread_local RankBins bins;

// Move `kept` to the first rank at which the running count reaches `want_count` or the running mass reaches `want_mass`.
inline uint64_t cut(const float* z, const float* e, int n, Kept& kept, uint64_t want_count, uint64_t want_mass) {
  std::fill(bins.count.begin(), bins.count.end(), 0);
  std::fill(bins.mass.begin(), bins.mass.end(), 0);
  for (int i = 0; i < n; i++) {
    if (!kept.holds(z[i], e[i], i) || z[i] == -__builtin_inff()) continue;
    uint32_t b = sort_key(z[i]) >> (32 - RankBins::BITS);
    bins.count[b]++;
    bins.mass[b] += mass_of(e[i]);
  }
  uint64_t count = 0, mass = 0;
  int b = (1 << RankBins::BITS) - 1;
  for (; b >= 0; b--) {
    if (count + bins.count[b] >= want_count || mass + bins.mass[b] >= want_mass) break;
    count += bins.count[b];
    mass += bins.mass[b];
  }
  if (b < 0) return mass;  // fewer than asked for: all stay
  bins.inside.clear();
  for (int i = 0; i < n; i++)
    if (sort_key(z[i]) >> (32 - RankBins::BITS) == (uint32_t)b && kept.holds(z[i], e[i], i)) bins.inside.push_back(i);
  std::sort(bins.inside.begin(), bins.inside.end(), [&](int i, int j) { return z[i] > z[j] || (z[i] == z[j] && i < j); });
  for (int i : bins.inside) {
    count++;
    mass += mass_of(e[i]);
    if (count >= want_count || mass >= want_mass) {
      kept.z = z[i];
      kept.id = i;
      break;
    }
  }
  return mass;
}

inline uint64_t truncate(const float* z, float* e, float m, int limit, int padded, int64_t top_k, double top_p, float min_p, uint64_t q, Kept& kept) {
  v16 mx = bc(m);
  for (int j = 0; j < padded; j += 16) store(e + j, vexp(load(z + j) - mx));
  constexpr uint64_t ALL = ~(uint64_t)0;
  if (top_k > 0 && top_k < limit) q = cut(z, e, limit, kept, (uint64_t)top_k, ALL);
  if (top_p < 1.0) {
    double want = ceil(top_p * (double)q);
    uint64_t target = want < 1.0 ? 1 : (uint64_t)want;
    cut(z, e, limit, kept, ALL, target < q ? target : q);
  }
  kept.min_e = min_p;
  q = 0;
  for (int i = 0; i < limit; i++)
    if (z[i] > -__builtin_inff() && kept.holds(z[i], e[i], i)) q += mass_of(e[i]);
  return q;
}

inline int pick(const float* z, float m, int limit, const uint64_t* blocks, uint64_t r) {
  int b = 0;
  for (; r >= blocks[b]; b++) r -= blocks[b];
  int last = 0, end = (b + 1) * MASS_BLOCK;
  for (int j = b * MASS_BLOCK; j < end; j += 16) {
    float e[16];
    store(e, vexp(load(z + j) - bc(m)));
    for (int i = 0; i < 16; i++) {
      uint64_t q = mass_of(e[i]);
      if (q == 0) continue;
      last = j + i;
      if (r < q) return last;
      r -= q;
    }
  }
  return last;
}

// What one row asks for and where its answers go.
struct RowOut {
  const Step& st;
  int r;
  void fail(int64_t token) const {
    float nan = __builtin_nanf("");
    st.out_nonfinite[r] = 1;
    st.out_token[r] = token < 0 ? 0 : token;
    st.out_logprob[r] = st.out_temperature_logprob[r] = st.out_model_logprob[r] = st.out_entropy[r] = nan;
  }
  bool truncated(int limit) const { return (st.top_k[r] > 0 && st.top_k[r] < limit) || st.top_p[r] < 1.0 || st.min_p[r] > 0.f; }
};

inline float logprob_of(float z, float m, double ln) { return (float)(((double)z - (double)m) - ln + 0.0); }  // a zero is +0

// Draw by inverse CDF over the ids in order; `kept` and `e` only count when the row is truncated.
inline int64_t draw_token(const Step& st, int r, const float* z, const float* e, float m, int limit, const uint64_t* blocks, uint64_t mass, bool truncated, const Kept& kept) {
  uint64_t random = draw64(st.seed[r], st.sample_index[r], st.row_position[r]);
  uint64_t at = (uint64_t)(((unsigned __int128)random * mass) >> 64);
  if (!truncated) return pick(z, m, limit, blocks, at);
  int64_t token = 0;
  for (int i = 0; i < limit; i++) {
    if (z[i] == -__builtin_inff() || !kept.holds(z[i], e[i], i)) continue;
    uint64_t w = mass_of(e[i]);
    token = i;
    if (at < w) break;
    at -= w;
  }
  return token;
}

template <class T>
void sample_row(const Op& op, const Step& st, const T* logits, int r) {
  int n = op.n, limit = st.vocab_limit, padded = round_up(n, MASS_BLOCK);
  scratch.reset((size_t)padded * 8 + padded / MASS_BLOCK * 8 + 512);
  float* z = scratch.take<float>(padded);
  float* e = scratch.take<float>(padded);
  uint64_t* blocks = scratch.take<uint64_t>(padded / MASS_BLOCK);
  const int32_t* banned = st.banned + st.ban_offset[r];
  int num_banned = st.ban_offset[r + 1] - st.ban_offset[r];
  double temperature = st.temperature[r];
  bool greedy = temperature == 0.0, want_model = st.want[r] & 1, want_entropy = st.want[r] & 2;
  float m, whole_m, inv = greedy ? 1.f : (float)(1.0 / temperature), nan = __builtin_nanf("");
  RowOut out{st, r};
  int64_t token = st.forced[r];
  if (!scaled_row(logits, n, inv, z, whole_m)) return out.fail(token);
  m = whole_m;
  uint64_t whole = greedy && !want_model ? 0 : total_mass(z, m, padded, blocks), mass = whole;
  float entropy = want_entropy ? (greedy ? 0.f : entropy_of(z, m, padded, whole)) : nan;
  if (num_banned || limit < n) {
    m = restrict_row(z, limit, padded, banned, num_banned);
    if (m == -__builtin_inff()) return out.fail(token);
    if (!greedy) mass = total_mass(z, m, padded, blocks);
  }
  if (greedy) {
    int best = 0;
    while (z[best] != m) best++;
    if (token < 0) token = best;
    st.out_logprob[r] = st.out_temperature_logprob[r] = token == best ? 0.f : -__builtin_inff();
  } else {
    Kept kept;
    bool truncated = out.truncated(limit);
    if (truncated) mass = truncate(z, e, m, limit, padded, st.top_k[r], st.top_p[r], st.min_p[r], mass, kept);
    if (token < 0) token = draw_token(st, r, z, e, m, limit, blocks, mass, truncated, kept);
    bool in = z[token] > -__builtin_inff() && (!truncated || kept.holds(z[token], e[token], (int)token));
    st.out_logprob[r] = in ? logprob_of(z[token], m, ln_mass(mass)) : -__builtin_inff();
    float zt = to_float(logits[token]) * inv;
    st.out_temperature_logprob[r] = logprob_of(zt, whole_m, ln_mass(whole));
  }
  st.out_nonfinite[r] = 0;
  st.out_token[r] = token;
  st.out_entropy[r] = entropy;
  st.out_model_logprob[r] = nan;
  if (want_model && inv != 1.f) {
    scaled_row(logits, n, 1.f, z, whole_m);
    whole = total_mass(z, whole_m, padded, nullptr);
  }
  if (want_model) st.out_model_logprob[r] = logprob_of(to_float(logits[token]), whole_m, ln_mass(whole));
}

}  // namespace
