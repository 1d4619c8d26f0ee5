// KV pages, RoPE and attention. A unit is 32 keys of one KV head in one layer, K then V, in the layout the products read:
//   bf16  K [H/32][2 halves of 16 keys][16 pairs of h][16 keys][2]   V [H/16][16 pairs of keys][16 h][2]
//   float K [H][32 keys]                                             V [32 keys][H]
// H is padded to 32. Blocks of 32 or more tokens hold whole units; smaller ones hold plain rows, from which units are put
// together before use, so every block size gives the same bits.
#pragma once
#include <algorithm>
#include <vector>

#include "linear.h"

namespace {

struct Scratch {
  std::vector<char> memory;
  size_t used = 0;
  void reset(size_t bytes) {
    if (memory.size() < bytes + 64) memory.resize(bytes + 64);
    used = (64 - ((uintptr_t)memory.data() & 63)) & 63;
  }
  template <class T>
  T* take(int64_t count) {
    T* p = (T*)(memory.data() + used);
    used += (count * sizeof(T) + 63) & ~(size_t)63;
    return p;
  }
};
thread_local Scratch scratch;

// Ask for memory that is needed soon: most of decoding is waiting for pages nobody has read since the last step.
inline void prefetch(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch((const char*)p + i, _MM_HINT_T0);
}

template <class T>
struct Pages {
  const Step& st;
  int layer, kv_heads, hp;  // hp: head size padded to 32
  int unit_tokens() const { return st.block_tokens < 32 ? st.block_tokens : 32; }
  int64_t unit_elems() const { return (int64_t)unit_tokens() * hp * 2; }
  T* unit(int block, int sub, int head) const {
    char* base = st.kv + block * st.kv_block_bytes + layer * st.kv_layer_bytes;
    return (T*)base + ((int64_t)sub * kv_heads + head) * unit_elems();
  }
};

// One key into a unit's layout. bf16 moves pairs of h at once.
inline void put_k(bf16* unit, int hp, int key, const bf16* k, int head_dim) {
  bf16* at = unit + (key / 16) * 512 + (key % 16) * 2;
  for (int h = 0; h < head_dim; h += 32, at += 1024)
    for (int p = 0, pairs = head_dim - h < 32 ? (head_dim - h) / 2 : 16; p < pairs; p++) memcpy(at + p * 32, k + h + 2 * p, 4);
}
inline void put_k(float* unit, int hp, int key, const float* k, int head_dim) {
  for (int h = 0; h < head_dim; h++) unit[h * 32 + key] = k[h];
}
inline void put_v(bf16* unit, int hp, int key, const bf16* v, int head_dim) {
  bf16* at = unit + (key / 2) * 32 + key % 2;
  for (int h = 0; h < head_dim; h += 16, at += 512)
    for (int i = 0, n = head_dim - h < 16 ? head_dim - h : 16; i < n; i++) at[2 * i] = v[h + i];
}
inline void put_v(float* unit, int hp, int key, const float* v, int head_dim) { memcpy(unit + (int64_t)key * hp, v, head_dim * sizeof(float)); }

// The lines that one key's values go to.
inline void prefetch_key(const bf16* unit, int hp, int key) {
  for (int h = 0; h < hp; h += 32) prefetch(unit + (h / 32 * 2 + key / 16) * 512, 1024);
  for (int h = 0; h < hp; h += 16) prefetch(unit + 32 * (int64_t)hp + h / 16 * 512 + key / 2 * 32, 64);
}
inline void prefetch_key(const float* unit, int hp, int key) {
  for (int h = 0; h < hp; h++) prefetch(unit + h * 32 + key, 64);
  prefetch(unit + 32 * (int64_t)hp + (int64_t)key * hp, hp * 4);
}

template <class T>
inline void put_key(T* unit, int hp, bool whole, int key, const T* k, const T* v, int head_dim) {
  if (!whole) {  // plain rows: all K, then all V; `key` counts within the block
    memcpy(unit + (int64_t)key * hp * 2, k, head_dim * sizeof(T));
    memcpy(unit + (int64_t)key * hp * 2 + hp, v, head_dim * sizeof(T));
    return;
  }
  put_k(unit, hp, key, k, head_dim);
  put_v(unit + 32 * (int64_t)hp, hp, key, v, head_dim);
}

template <class T>
inline void rotate(T* x, const T* cos, const T* sin, int half) {
  for (int j = 0; j < half; j += 16) {
    if (j + 16 <= half) {
      v16 a = load(x + j), b = load(x + half + j), c = load(cos + j), s = load(sin + j);
      store(x + j, rounded<T>(a * c) + rounded<T>((zero16() - b) * s));
      store(x + half + j, rounded<T>(b * c) + rounded<T>(a * s));
      continue;
    }
    float a[16] = {}, b[16] = {}, c[16] = {}, s[16] = {};
    int n = half - j;
    for (int i = 0; i < n; i++) {
      a[i] = to_float(x[j + i]);
      b[i] = to_float(x[half + j + i]);
      c[i] = to_float(cos[j + i]);
      s[i] = to_float(sin[j + i]);
    }
    T lo[16], hi[16];
    store(lo, rounded<T>(load(a) * load(c)) + rounded<T>((zero16() - load(b)) * load(s)));
    store(hi, rounded<T>(load(b) * load(c)) + rounded<T>(load(a) * load(s)));
    memcpy(x + j, lo, n * sizeof(T));
    memcpy(x + half + j, hi, n * sizeof(T));
  }
}

// A run is tokens of one sequence that fall into one unit. A run at offset 0 clears the unit first: what a page held before
// (an Inf of some other request, say) can then never meet a zero probability.
template <class T>
void rope_store_item(const Op& op, const Step& st, int index) {
  const int32_t* run = st.runs + index * 4;
  int first = run[0], count = run[1], block = run[2], offset = run[3];
  int hd = op.head_dim, hp = round_up(hd, 32);
  Pages<T> pages{st, op.layer, op.kv_heads, hp};
  int unit_tokens = pages.unit_tokens(), sub = offset / unit_tokens, key0 = offset % unit_tokens;
  if (index + 2 < st.num_runs && st.block_tokens >= 32) {
    const int32_t* next = run + 8;
    for (int head = 0; head < op.kv_heads; head++) prefetch_key(pages.unit(next[2], next[3] / 32, head), hp, next[3] % 32);
  }
  for (int head = 0; head < op.kv_heads && key0 == 0 && count < unit_tokens; head++)
    memset(pages.unit(block, sub, head), 0, pages.unit_elems() * sizeof(T));
  for (int i = 0; i < count; i++) {
    T* row = (T*)op.in + (first + i) * op.ld_in;
    if (st.cos) {
      int64_t at = (int64_t)st.positions[first + i] * (hd / 2);
      const T *cos = (const T*)st.cos + at, *sin = (const T*)st.sin + at;
      for (int head = 0; head < op.heads + op.kv_heads; head++) rotate(row + head * hd, cos, sin, hd / 2);
    }
    const T* k = row + op.heads * hd;
    const T* v = k + op.kv_heads * hd;
    for (int head = 0; head < op.kv_heads; head++)
      put_key(pages.unit(block, sub, head), hp, st.block_tokens >= 32, key0 + i, k + head * hd, v + head * hd, hd);
  }
}

// ---- products over units: rows (at most 16) of q by K, rows of p by V

#if defined(__AMX_BF16__)

inline void score_rows(const bf16* q, int rows, bf16* const* units, int n, int hp, float* s, int64_t ld) {
  configure(rows, rows);
  if (hp == 64) {
    _tile_loadd(4, q, 128);
    _tile_loadd(5, q + 32, 128);
    for (int i = 0; i < n; i++) {
      const bf16* k = units[i];
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
inline void value_rows(const bf16* p, int64_t ld, int rows, bf16* const* units, int n, int hp, float* acc) {
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

inline void score_rows(const bf16* q, int rows, bf16* const* units, int n, int hp, float* s, int64_t ld) {
  for (int i = 0; i < n; i++)
    for (int half = 0; half < 2; half++) {
      float* c = s + i * 32 + half * 16;
      for (int r = 0; r < rows; r++) store(c + r * ld, zero16());
      for (int h = 0; h < hp; h += 32) tile_product(q + h, hp, rows, units[i] + (h / 32 * 2 + half) * 512, c, ld);
    }
}

inline void value_rows(const bf16* p, int64_t ld, int rows, bf16* const* units, int n, int hp, float* acc) {
  for (int i = 0; i < n; i++)
    for (int h = 0; h < hp; h += 16) tile_product(p + i * 32, ld, rows, units[i] + 32 * hp + (int64_t)(h / 16) * 512, acc + h, hp);
}

#endif

inline void score_rows(const float* q, int rows, float* const* units, int n, int hp, float* s, int64_t ld) {
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

inline void value_rows(const float* p, int64_t ld, int rows, float* const* units, int n, int hp, float* acc) {
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
inline void softmax_row(float* s, T* p, int first, int keys, int key0, int key1, float scale) {
  int j0 = first / 16 * 16, j1 = round_up(keys, 16);
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

// One item: tokens [t0, t0 + nt) whose first `shared` key blocks are the same pages, one KV head. Pages outside, rows inside.
template <class T>
void attention_item(const Op& op, const Step& st, int index) {
  const int32_t* it = st.items + (index / op.kv_heads) * 4;
  int head = index % op.kv_heads, t0 = it[0], nt = it[1], shared = it[2], num_blocks = ceil_div(it[3], 32);
  int rep = op.heads / op.kv_heads, rows = nt * rep, hd = op.head_dim, hp = round_up(hd, 32);
  int64_t width = (int64_t)num_blocks * 32;
  Pages<T> pages{st, op.layer, op.kv_heads, hp};
  bool plain = st.block_tokens < 32;
  int64_t built = plain ? ((int64_t)shared + (int64_t)nt * (num_blocks - shared)) * 64 * hp : 0;
  scratch.reset((rows * (int64_t)hp + rows * width + built) * sizeof(T) + (rows * width + rows * (int64_t)hp) * 4 + num_blocks * sizeof(T*) + 1024);
  T* q = scratch.take<T>(rows * (int64_t)hp);
  T* p = scratch.take<T>(rows * width);
  float* s = scratch.take<float>(rows * width);
  float* acc = scratch.take<float>(rows * (int64_t)hp);
  T** units = scratch.take<T*>(num_blocks);
  T* spare = scratch.take<T>(built);
  memset(q, 0, rows * (int64_t)hp * sizeof(T));
  memset(acc, 0, rows * (int64_t)hp * 4);
  for (int r = 0; r < rows; r++)
    memcpy(q + (int64_t)r * hp, (T*)op.in + (t0 + r / rep) * op.ld_in + (head * rep + r % rep) * hd, hd * sizeof(T));
  auto table = [&](int t) { return st.tables + (int64_t)st.token_slot[t0 + t] * st.table_stride; };
  auto keys = [&](int t) { return st.num_keys[t0 + t]; };
  auto first = [&](int t) { return st.first_key[t0 + t]; };
  auto own_begin = [&](int t) { return std::max(shared, first(t) / 32); };
  gather_units(pages, table(nt - 1), head, 0, shared, it[3], units, spare);
  // The last unit of a sequence, which only it reads.
  auto prefetch_own = [&](int token) {
    int last = (st.num_keys[token] - 1) / 32, per = st.block_tokens / 32;
    if (!plain) prefetch(pages.unit(st.tables[(int64_t)st.token_slot[token] * st.table_stride + last / per], last % per, head), 64 * hp * sizeof(T));
  };
  if (nt == 1 && t0 + 1 < st.num_tokens) prefetch_own(t0 + 1);
  // [begin, end) of the shared blocks that rows r .. r + m of a tile see
  auto shared_range = [&](int r, int m, int& begin, int& end) {
    begin = num_blocks;
    end = 0;
    for (int t = r / rep; t <= (r + m - 1) / rep; t++) {
      int b = first(t) / 32, e = ceil_div(keys(t), 32);
      begin = b < begin ? b : begin;
      end = e > end ? e : end;
    }
    end = end < shared ? end : shared;
    begin = begin < end ? begin : end;
  };
  for (int r = 0; r < rows; r += 16) {
    int m = rows - r < 16 ? rows - r : 16, b, e;
    shared_range(r, m, b, e);
    score_rows(q + (int64_t)r * hp, m, units + b, e - b, hp, s + r * width + b * 32, width);
  }
  for (int r = 0; r < rows; r += 16) {
    int m = rows - r < 16 ? rows - r : 16, b, e;
    shared_range(r, m, b, e);
    for (int i = r; i < r + m; i++) {
      int t = i / rep, own = ceil_div(keys(t), 32);
      if (own > shared && i % rep == 0) {  // this token's own pages: all its heads at once
        int from = own_begin(t);
        if (t + 1 < nt) prefetch_own(t0 + t + 1);
        gather_units(pages, table(t), head, from, own, keys(t), units, spare);
        for (int g = 0; g < rep; g += 16)
          score_rows(q + (int64_t)(i + g) * hp, std::min(rep - g, 16), units + from, own - from, hp, s + (i + g) * width + from * 32, width);
      }
    }
    for (int i = r; i < r + m; i++) {
      int t = i / rep, own = ceil_div(keys(t), 32);
      softmax_row(s + i * width, p + i * width, first(t), keys(t), b * 32, (own > e ? own : e) * 32, op.scale);
    }
    value_rows(p + r * width + b * 32, width, m, units + b, e - b, hp, acc + (int64_t)r * hp);
  }
  for (int t = 0; t < nt; t++) {
    int own = ceil_div(keys(t), 32);
    if (own > shared) {
      int from = own_begin(t);
      T* again = spare - (plain ? (int64_t)(own - from) * 64 * hp : 0);
      gather_units(pages, table(t), head, from, own, keys(t), units, again);
      for (int g = 0; g < rep; g += 16)
        value_rows(p + ((int64_t)t * rep + g) * width + from * 32, width, std::min(rep - g, 16), units + from, own - from, hp,
                   acc + ((int64_t)t * rep + g) * hp);
    }
    for (int g = 0; g < rep; g++)
      for (int h = 0; h < hd; h += 16)
        panel_store((T*)op.out, ceil_div(op.heads * hd, 32), t0 + t, (head * rep + g) * hd + h, load(acc + ((int64_t)t * rep + g) * hp + h), hd - h < 16 ? hd - h : 16);
  }
}

}  // namespace
