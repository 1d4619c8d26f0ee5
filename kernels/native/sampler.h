// Logprobs and draws by docs/numerics.md.
#pragma once
#include "attention.h"
#include "truncate.h"

namespace {

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

inline float adjusted(float x, const Adjust& a) {
  x += a.bias;
  x = x > 0.f ? x / a.factor : x * a.factor;
  return x - a.subtract;
}

// Ids that a row's list does not allow drop to -inf.
inline void keep_allowed(float* z, int padded, const uint32_t* words, int64_t num_words) {
  const float low = -__builtin_inff();
  for (int j = 0; j < padded; j += 32) {
    uint32_t word = j / 32 < num_words ? words[j / 32] : 0;
    if (word == 0) {
      store(z + j, bc(low));
      store(z + j + 16, bc(low));
    } else {
      for (uint32_t out = ~word; out; out &= out - 1) z[j + __builtin_ctz(out)] = low;
    }
  }
}

// What a row asks to be other than the model's distribution.
struct Changes {
  const Adjust *adjust, *adjust_end;
  const int32_t *banned, *banned_end;
  const uint32_t* allowed;
  int64_t allowed_words;
  Changes(const Step& st, int r)
      : adjust(st.adjust + st.adjust_offset[r]), adjust_end(st.adjust + st.adjust_offset[r + 1]),
        banned(st.banned + st.ban_offset[r]), banned_end(st.banned + st.ban_offset[r + 1]),
        allowed(st.allowed_row[r] < 0 ? nullptr : st.allowed + st.allowed_row[r] * st.allowed_words), allowed_words(st.allowed_words) {}
  bool any() const { return adjust != adjust_end || restricts(); }
  bool restricts() const { return banned != banned_end || allowed; }
};

// Logits change by their list; ids that do not take part drop to -inf; the maximum of the rest.
template <class T>
inline float change_row(const Changes& c, const T* logits, int n, float inv, float* z, int limit, int padded) {
  const float low = -__builtin_inff();
  for (const Adjust* a = c.adjust; a < c.adjust_end; a++)
    if (a->id < n) z[a->id] = adjusted(to_float(logits[a->id]), *a) * inv;
  if (c.allowed) keep_allowed(z, padded, c.allowed, c.allowed_words);
  for (const int32_t* id = c.banned; id < c.banned_end; id++)
    if (*id < padded) z[*id] = low;
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
  MassSum sum;
  v16 mx = bc(m), low = bc(-__builtin_inff());
  for (int j = 0; j < padded; j += 16) {
    v16 x = load(z + j);
    sum.add_product(vexp(x - mx), replace_equal(x, low, mx), m);  // -inf becomes m, and adds nothing
  }
  return (float)(ln_mass(q) - (double)sum.total() / (double)q);
}

inline int pick(const float* z, float m, const uint64_t* blocks, uint64_t r) {
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
  // Why: 1 broken numbers, 2 nothing is left that may be drawn.
  void fail(int64_t token, uint8_t why = 1) const {
    float nan = __builtin_nanf("");
    st.out_nonfinite[r] = why;
    st.out_token[r] = token < 0 ? 0 : token;
    st.out_logprob[r] = st.out_temperature_logprob[r] = st.out_model_logprob[r] = st.out_entropy[r] = nan;
    top_from(0);
    if (mask()) *mask() = 0;
  }
  // Reported ids from place `i` on: there are none.
  void top_from(int i) const {
    for (; i < st.top_n[r]; i++) {
      st.out_top_id[r * TOP_MAX + i] = -1;
      st.out_top_logprob[r * TOP_MAX + i] = -__builtin_inff();
    }
  }
  int32_t* mask() const { return st.want[r] & 4 ? st.out_mask + r * st.mask_words : nullptr; }
  bool truncated(int limit) const { return (st.top_k[r] > 0 && st.top_k[r] < limit) || st.top_p[r] < 1.0 || st.min_p[r] > 0.f; }
};

inline float logprob_of(float z, float m, double ln) { return (float)(((double)z - (double)m) - ln + 0.0); }  // a zero is +0

struct Rank {
  float z;
  int id;
};

// The first k ranks among ids with a finite z; how many there are.
inline int top_ranks(const float* z, int padded, int k, Rank* top) {
  int count = 0;
  float floor = -3.4028234663852886e38f;
  for (int j = 0; j < padded; j += 16) {
    for (unsigned mask = at_least_mask(load(z + j), bc(floor)); mask; mask &= mask - 1) {
      int id = j + __builtin_ctz(mask), at = count;
      if (count < k)
        count++;
      else if (z[id] > top[k - 1].z)  // of equals, the first come ranks first
        at = k - 1;
      else
        continue;
      for (; at > 0 && top[at - 1].z < z[id]; at--) top[at] = top[at - 1];
      top[at] = {z[id], id};
      if (count == k) floor = top[k - 1].z;
    }
  }
  return count;
}

inline void report_top(const RowOut& out, const float* z, float m, int padded, const Kept& kept, double ln) {
  Rank top[TOP_MAX];
  const Step& st = out.st;
  int found = top_ranks(z, padded, st.top_n[out.r], top), place = 0;
  for (int i = 0; i < found; i++) {
    if (!kept.holds(top[i].z, exp_of(top[i].z - m), top[i].id)) continue;
    st.out_top_id[out.r * TOP_MAX + place] = top[i].id;
    st.out_top_logprob[out.r * TOP_MAX + place++] = logprob_of(top[i].z, m, ln);
  }
  out.top_from(place);
}

// The mask of `count` ids of [0, limit), in the smallest of its forms; `walk` calls what it is given with each, ascending.
template <class Walk>
inline void write_mask(int32_t* out, int limit, int count, Walk walk) {
  int words = ceil_div(limit, 32), rest = limit - count, next = 0;
  int32_t* at = out + 1;
  if (rest == 0) {
    out[0] = 0;
  } else if (std::min(count, rest) > words) {
    out[0] = (int32_t)0x80000000;
    memset(at, 0, (size_t)words * 4);
    walk([&](int id) { at[id / 32] |= (int32_t)(1u << id % 32); });
  } else if (count <= rest) {
    out[0] = count;
    walk([&](int id) { *at++ = id; });
  } else {
    out[0] = -rest;
    walk([&](int id) {
      while (next < id) *at++ = next++;
      next = id + 1;
    });
    while (next < limit) *at++ = next++;
  }
}

// Which ids a row could be drawn from: the candidates, or all that take part; everything where nothing leaves any out.
inline void report_mask(int32_t* out, const float* z, int limit, int padded, bool truncated, bool restricted) {
  if (truncated) {
    write_mask(out, limit, (int)candidates.size(), [&](auto keep) {
      for (const Candidate& c : candidates) keep(c.id);
    });
  } else if (restricted) {
    auto finite = [&](int j) { return at_least_mask(load(z + j), bc(-3.4028234663852886e38f)); };
    int count = 0;
    for (int j = 0; j < padded; j += 16) count += __builtin_popcount(finite(j));
    if (int rest = limit - count; 0 < rest && rest < count && rest <= ceil_div(limit, 32)) {  // few are left out: those alone
      *out++ = -rest;
      for (int j = 0; j < limit; j += 16) {
        unsigned real = limit - j < 16 ? (1u << (limit - j)) - 1 : 0xFFFF;
        for (unsigned mask = ~finite(j) & real; mask; mask &= mask - 1) *out++ = j + __builtin_ctz(mask);
      }
      return;
    }
    write_mask(out, limit, count, [&](auto keep) {
      for (int j = 0; j < padded; j += 16)
        for (unsigned mask = finite(j); mask; mask &= mask - 1) keep(j + __builtin_ctz(mask));
    });
  } else {
    *out = 0;
  }
}

// Draw by inverse CDF over the ids in order.
inline int64_t draw_token(const Step& st, int r, const float* z, float m, const uint64_t* blocks, uint64_t mass, bool truncated) {
  uint64_t random = draw64(st.seed[r], st.sample_index[r], st.row_position[r]);
  uint64_t at = (uint64_t)(((unsigned __int128)random * mass) >> 64);
  if (!truncated) return pick(z, m, blocks, at);
  for (const Candidate& c : candidates) {
    if (at < c.q) return c.id;
    at -= c.q;
  }
  return candidates.back().id;
}

template <class T>
void sample_row(const Op& op, const Step& st, const T* logits, int r) {
  int n = op.n, limit = st.vocab_limit, padded = round_up(n, MASS_BLOCK);
  scratch.reset((size_t)padded * 4 + padded / MASS_BLOCK * 8 + 512);
  float* z = scratch.take<float>(padded);
  uint64_t* blocks = scratch.take<uint64_t>(padded / MASS_BLOCK);
  const Changes changes(st, r);
  double temperature = st.temperature[r];
  bool greedy = temperature == 0.0, want_model = st.want[r] & 1, want_entropy = st.want[r] & 2;
  float m, whole_m, inv = greedy ? 1.f : (float)(1.0 / temperature), nan = __builtin_nanf("");
  RowOut out{st, r};
  int64_t token = st.forced[r];
  if (!scaled_row(logits, n, inv, z, whole_m)) return out.fail(token);
  m = whole_m;
  uint64_t whole = greedy && !want_model ? 0 : total_mass(z, m, padded, blocks), mass = whole;
  float entropy = want_entropy ? (greedy ? 0.f : entropy_of(z, m, padded, whole)) : nan;
  if (changes.any() || limit < n) {
    m = change_row(changes, logits, n, inv, z, limit, padded);
    if (!__builtin_isfinite(m)) return out.fail(token, m == -__builtin_inff() ? 2 : 1);
    if (!greedy) mass = total_mass(z, m, padded, blocks);
  }
  Kept kept;
  if (greedy) {
    int best = 0;
    while (z[best] != m) best++;
    if (token < 0) token = best;
    if (out.mask()) write_mask(out.mask(), limit, 1, [&](auto keep) { keep(best); });
    st.out_logprob[r] = st.out_temperature_logprob[r] = token == best ? 0.f : -__builtin_inff();
  } else {
    bool truncated = out.truncated(limit);
    if (truncated) mass = truncate(z, m, limit, padded, st.top_k[r], st.top_p[r], st.min_p[r], mass, kept);
    if (out.mask()) report_mask(out.mask(), z, limit, padded, truncated, changes.restricts());
    if (token < 0) token = draw_token(st, r, z, m, blocks, mass, truncated);
    bool in = z[token] > -__builtin_inff() && (!truncated || kept.holds(z[token], exp_of(z[token] - m), (int)token));
    st.out_logprob[r] = in ? logprob_of(z[token], m, ln_mass(mass)) : -__builtin_inff();
    float zt = to_float(logits[token]) * inv;
    st.out_temperature_logprob[r] = logprob_of(zt, whole_m, ln_mass(whole));
  }
  if (st.top_n[r]) report_top(out, z, m, padded, kept, ln_mass(greedy ? total_mass(z, m, padded, nullptr) : mass));
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
