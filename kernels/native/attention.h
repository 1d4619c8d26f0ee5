// Attention over KV pages: one function for decode, chunk and trainer. Query rows that share pages are walked together.
#pragma once
#include "attention_products.h"

namespace {

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

  void put(int64_t token, int col, v16 x, int n) const {
    if (op.epilogue == EP_ROWS)
      store_first((T*)op.out + token * op.ld_out + col, n, x);
    else
      panel_store((T*)op.out, ceil_div(op.heads * hd, 32), token, col, x, n);
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
          put(t0 + t, (head * rep + g) * hd + h, load(acc + ((int64_t)t * rep + g) * hp + h), std::min(hd - h, 16));
    }
  }
};

template <class T>
void attention_item(const Op& op, const Step& st, int index) {
  AttentionItem<T>(op, st, index).run();
}

}  // namespace
