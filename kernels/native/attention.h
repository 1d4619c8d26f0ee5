// Attention over KV pages: one function for decode, chunk and trainer. Query rows that share pages are walked together.
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

// ---- products over units: rows (at most 16) of q by K, rows of p by V

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

// Scores of keys [first, keys) become probabilities in p over [key0, key1), zero outside; key0, key1 multiples of 32.
template <class T>
inline void softmax_row(float* s, T* p, int first, int keys, int key0, int key1, float scale, float softcap) {
  int j0 = first / 16 * 16, j1 = round_up(keys, 16);
  if (softcap) {
    for (int j = j0; j < j1; j += 16) store(s + j, softcapped<float>(load(s + j) * bc(scale), softcap));
    scale = 1.f;
  }
  for (int j = j0; j < first; j++) s[j] = -__builtin_inff();
  for (int j = keys; j < j1; j++) s[j] = -__builtin_inff();
  v16 m = bc(-__builtin_inff());
  for (int j = j0; j < j1; j += 16) m = vmax(m, load(s + j));
  v16 mx = bc(hmax(m) * scale), l = zero16();
  for (int j = j0; j < j1; j += 16) {
    v16 e = vexp(load(s + j) * bc(scale) - mx);
    if (j < first || j + 16 > keys) {
      float t[16];
      store(t, e);
      for (int i = 0; i < 16; i++)
        if (j + i < first || j + i >= keys) t[i] = 0.f;
      e = load(t);
    }
    l = l + e;
    store(s + j, e);
  }
  v16 inv = bc(1.f / hsum(l));
  for (int j = key0; j < j0; j += 16) store(p + j, zero16());
  for (int j = j0; j < j1; j += 16) store(p + j, load(s + j) * inv);
  for (int j = j1; j < key1; j += 16) store(p + j, zero16());
}

// Units of a sequence, built from plain rows where blocks are smaller than a unit.
template <class T>
inline void gather_units(const Pages<T>& pages, const int32_t* table, int head, int kb0, int kb1, int keys, T** units, T*& spare) {
  const Step& st = pages.st;
  for (int kb = kb0; kb < kb1; kb++) {
    if (st.block_tokens >= 32) {
      int per = st.block_tokens / 32;
      units[kb] = pages.unit(table[kb / per], kb % per, head);
      continue;
    }
    int per = 32 / st.block_tokens, hp = pages.hp;
    T* unit = spare;
    spare += 64 * (int64_t)hp;
    memset(unit, 0, 64 * (int64_t)hp * sizeof(T));
    for (int b = 0; b < per; b++) {
      if ((kb * per + b) * st.block_tokens >= keys) break;  // the table ends there
      const T* rows = pages.unit(table[kb * per + b], 0, head);
      for (int i = 0; i < st.block_tokens; i++)
        put_key(unit, hp, true, b * st.block_tokens + i, rows + (int64_t)i * hp * 2, rows + (int64_t)i * hp * 2 + hp, hp);
    }
    units[kb] = unit;
  }
}

// One item: tokens [t0, t0 + nt) whose first `shared` key blocks are the same pages, one KV head. Row t * rep + g is query
// head g of token t. Pages outside, rows inside: first the shared blocks with all rows, then each token's own.
template <class T>
struct AttentionItem {
  const Op& op;
  const Step& st;
  int head, t0, nt, shared, most_keys, num_blocks, rep, rows, hd, hp;
  int64_t width;  // keys of a score row
  bool plain;     // blocks smaller than a unit
  Pages<T> pages;
  T *q, *p, *spare, **units;
  float *s, *acc;
  static constexpr int MAX_AHEAD = 32;
  T* ahead[MAX_AHEAD];

  AttentionItem(const Op& o, const Step& step, int index) : op(o), st(step), pages{step, o.layer, o.kv_heads, round_up(o.head_dim, 32)} {
    const int32_t* it = st.items + (index / op.kv_heads) * 4;
    head = index % op.kv_heads, t0 = it[0], nt = it[1], shared = it[2], most_keys = it[3], num_blocks = ceil_div(most_keys, 32);
    rep = op.heads / op.kv_heads, rows = nt * rep, hd = op.head_dim, hp = pages.hp;
    width = (int64_t)num_blocks * 32;
    plain = st.block_tokens < 32;
    int64_t built = plain ? ((int64_t)shared + (int64_t)nt * (num_blocks - shared)) * 64 * hp : 0;
    int64_t q_elems = rows * (int64_t)hp, s_elems = rows * width;
    scratch.reset((q_elems + s_elems + built) * sizeof(T) + (s_elems + q_elems) * 4 + num_blocks * sizeof(T*) + 1024);
    q = scratch.take<T>(q_elems);
    p = scratch.take<T>(s_elems);
    s = scratch.take<float>(s_elems);
    acc = scratch.take<float>(q_elems);
    units = scratch.take<T*>(num_blocks);
    spare = scratch.take<T>(built);
    memset(q, 0, q_elems * sizeof(T));
    memset(acc, 0, q_elems * 4);
    for (int r = 0; r < rows; r++)
      memcpy(q + (int64_t)r * hp, (T*)op.in + (t0 + r / rep) * op.ld_in + (head * rep + r % rep) * hd, hd * sizeof(T));
  }

  const int32_t* table(int t) const { return st.tables + (int64_t)st.token_slot[t0 + t] * st.table_stride; }
  int keys(int t) const { return st.num_keys[t0 + t]; }
  int first(int t) const { return first_seen(t0 + t); }
  int first_seen(int token) const { return op.window ? std::max(st.first_key[token], st.num_keys[token] - op.window) : st.first_key[token]; }
  int own_begin(int t) const { return std::max(shared, first(t) / 32); }
  int own_end(int t) const { return ceil_div(keys(t), 32); }

  // [begin, end) of the shared blocks that rows r .. r + m of a tile see
  void shared_range(int r, int m, int& begin, int& end) const {
    begin = num_blocks;
    end = 0;
    for (int t = r / rep; t <= (r + m - 1) / rep; t++) {
      begin = std::min(begin, first(t) / 32);
      end = std::max(end, own_end(t));
    }
    end = std::min(end, shared);
    begin = std::min(begin, end);
  }

  // What follows token t's own units: those of the item's next token, or, where an item is one token, those of the next item.
  Upcoming<T> after(int t) {
    int token = t0 + t + 1, next_head = head, from = shared;
    if (nt == 1 && head + 1 < op.kv_heads) {
      token = t0, next_head = head + 1;
    } else if (nt == 1) {
      next_head = 0, from = 0;
    }
    bool mine = nt > 1 ? t + 1 < nt : token < st.num_tokens;
    if (plain || !mine) return {nullptr, 0};
    const int32_t* blocks = st.tables + (int64_t)st.token_slot[token] * st.table_stride;
    from = std::max(from, first_seen(token) / 32);
    int end = std::min(ceil_div(st.num_keys[token], 32), from + MAX_AHEAD), per = st.block_tokens / 32, n = 0;
    for (int kb = from; kb < end; kb++) ahead[n++] = pages.unit(blocks[kb / per], kb % per, next_head);
    return {ahead, n};
  }

  void score_own(int t) {
    int from = own_begin(t), end = own_end(t), r = t * rep;
    gather_units(pages, table(t), head, from, end, keys(t), units, spare);
    Upcoming<T> next = after(t);
    for (int g = 0; g < rep; g += 16)
      score_rows(q + (int64_t)(r + g) * hp, std::min(rep - g, 16), units + from, end - from, hp, s + (r + g) * width + from * 32, width, next);
  }

  void value_own(int t) {
    int from = own_begin(t), end = own_end(t);
    T* again = spare - (plain ? (int64_t)(end - from) * 64 * hp : 0);
    gather_units(pages, table(t), head, from, end, keys(t), units, again);
    Upcoming<T> next = after(t);
    for (int g = 0; g < rep; g += 16) {
      int64_t r = (int64_t)t * rep + g;
      value_rows(p + r * width + from * 32, width, std::min(rep - g, 16), units + from, end - from, hp, acc + r * hp, next);
    }
  }

  // The first shared block that any token sees
  int shared_begin() const {
    int begin = shared;
    for (int t = 0; t < nt && begin > 0; t++) begin = std::min(begin, first(t) / 32);
    return begin;
  }

  // Probabilities of a tile's rows, and their sum over the shared blocks.
  void tile(int r, int m) {
    int begin, end;
    shared_range(r, m, begin, end);
    for (int i = r; i < r + m; i++)
      if (i % rep == 0 && own_end(i / rep) > shared) score_own(i / rep);
    for (int i = r; i < r + m; i++) {
      int t = i / rep;
      int from = begin < end ? std::min(begin, own_begin(t)) : own_begin(t);
      softmax_row(s + i * width, p + i * width, first(t), keys(t), from * 32, std::max(own_end(t), end) * 32, op.scale, op.softcap);
    }
    value_rows(p + r * width + begin * 32, width, m, units + begin, end - begin, hp, acc + (int64_t)r * hp, {nullptr, 0});
  }

  void run() {
    gather_units(pages, table(nt - 1), head, shared_begin(), shared, most_keys, units, spare);
    for (int r = 0; r < rows; r += 16) {
      int m = std::min(rows - r, 16), begin, end;
      shared_range(r, m, begin, end);
      score_rows(q + (int64_t)r * hp, m, units + begin, end - begin, hp, s + r * width + begin * 32, width, {nullptr, 0});
    }
    for (int r = 0; r < rows; r += 16) tile(r, std::min(rows - r, 16));
    for (int t = 0; t < nt; t++) {
      if (own_end(t) > shared) value_own(t);
      for (int g = 0; g < rep; g++)
        for (int h = 0; h < hd; h += 16)
          panel_store((T*)op.out, ceil_div(op.heads * hd, 32), t0 + t, (head * rep + g) * hd + h, load(acc + ((int64_t)t * rep + g) * hp + h), std::min(hd - h, 16));
    }
  }
};

template <class T>
void attention_item(const Op& op, const Step& st, int index) {
  AttentionItem<T>(op, st, index).run();
}

}  // namespace
