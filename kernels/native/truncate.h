// Truncation by top_k, top_p and min_p: which ids a row may draw, found among the likeliest few instead of the vocabulary.
#pragma once
#include <algorithm>
#include <vector>

#include "mass.h"

namespace {

struct Candidate {
  float z, e;
  int id;
  uint64_t q;
};

// The kept set: ids ranked at or above (z, id), and with e >= min_e.
struct Kept {
  float z = -__builtin_inff();
  int id = 0x7fffffff;
  float min_e = 0.f;
  bool holds(float zi, float e, int i) const { return (zi > z || (zi == z && i <= id)) && e >= min_e; }
};

thread_local std::vector<Candidate> candidates;  // of the row at hand, ids ascending

inline float exp_of(float x) {
  float e[16];
  store(e, vexp(bc(x)));
  return e[0];
}

// Every id with z >= m - depth (any finite z when depth is infinite); the mass of them all.
inline uint64_t collect(const float* z, float m, int padded, float depth) {
  candidates.clear();
  uint64_t mass = 0;
  v16 floor = bc(depth < __builtin_inff() ? m - depth : -3.4028234663852886e38f), mx = bc(m);
  for (int j = 0; j < padded; j += 16) {
    v16 x = load(z + j);
    unsigned mask = at_least_mask(x, floor);
    if (!mask) continue;
    float e[16];
    store(e, vexp(x - mx));
    for (; mask; mask &= mask - 1) {
      int i = __builtin_ctz(mask);
      candidates.push_back({z[j + i], e[i], j + i, mass_of(e[i])});
      mass += candidates.back().q;
    }
  }
  return mass;
}

// Histogram by distance from the maximum, which falls as the rank does; so a cut sorts one bin only.
struct RankBins {
  static constexpr int NUM = 2048;
  static constexpr float PER_NAT = 64.f;
  std::vector<uint32_t> count = std::vector<uint32_t>(NUM);
  std::vector<uint64_t> mass = std::vector<uint64_t>(NUM);
  std::vector<Candidate> inside;
  static int of(float z, float m) {
    float b = (m - z) * PER_NAT;
    return b < (float)(NUM - 1) ? (int)b : NUM - 1;
  }
};
thread_local RankBins bins;

// Keep the shortest prefix of ranks whose count reaches `want_count` or whose mass reaches `want_mass`; all if none does.
inline void cut(float m, Kept& kept, uint64_t want_count, uint64_t want_mass) {
  std::fill(bins.count.begin(), bins.count.end(), 0);
  std::fill(bins.mass.begin(), bins.mass.end(), 0);
  for (const Candidate& c : candidates) {
    int b = RankBins::of(c.z, m);
    bins.count[b]++;
    bins.mass[b] += c.q;
  }
  uint64_t count = 0, mass = 0;
  int b = 0;
  for (; b < RankBins::NUM && count + bins.count[b] < want_count && mass + bins.mass[b] < want_mass; b++) {
    count += bins.count[b];
    mass += bins.mass[b];
  }
  if (b == RankBins::NUM) return;
  bins.inside.clear();
  for (const Candidate& c : candidates)
    if (RankBins::of(c.z, m) == b) bins.inside.push_back(c);
  std::sort(bins.inside.begin(), bins.inside.end(), [](const Candidate& x, const Candidate& y) { return x.z > y.z || (x.z == y.z && x.id < y.id); });
  for (const Candidate& c : bins.inside) {
    mass += c.q;
    if (++count < want_count && mass < want_mass) continue;
    kept.z = c.z;
    kept.id = c.id;
    return;
  }
}

// Drop what is not kept; the mass of the rest.
inline uint64_t keep(const Kept& kept) {
  uint64_t mass = 0;
  auto end = std::remove_if(candidates.begin(), candidates.end(), [&](const Candidate& c) { return !kept.holds(c.z, c.e, c.id); });
  candidates.erase(end, candidates.end());
  for (const Candidate& c : candidates) mass += c.q;
  return mass;
}

inline uint64_t mass_target(double top_p, uint64_t q) {
  double want = __builtin_ceil(top_p * (double)q);
  uint64_t target = want < 1.0 ? 1 : (uint64_t)want;
  return target < q ? target : q;
}

// Fills `candidates` with the ids to draw from; their mass. `q` is the mass of the whole row.
inline uint64_t truncate(const float* z, float m, int limit, int padded, int64_t top_k, double top_p, float min_p, uint64_t q, Kept& kept) {
  constexpr uint64_t ALL = ~(uint64_t)0;
  bool by_count = top_k > 0 && top_k < limit, by_mass = top_p < 1.0;
  for (float depth : {6.f, 14.f, __builtin_inff()}) {  // deeper until the cut falls inside
    uint64_t mass = collect(z, m, padded, depth);
    bool enough = by_count ? candidates.size() >= (size_t)top_k : by_mass ? mass >= mass_target(top_p, q) : exp_of(-depth + 1.f) < min_p;
    if (enough) break;
  }
  if (by_count) {
    cut(m, kept, (uint64_t)top_k, ALL);
    q = keep(kept);
  }
  if (by_mass) cut(m, kept, ALL, mass_target(top_p, q));
  kept.min_e = min_p;
  return keep(kept);
}

}  // namespace
