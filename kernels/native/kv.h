// KV pages and RoPE. A unit is 32 keys of one KV head in one layer, K then V, in the layout the products read:
//   bf16  K [H/32][2 halves of 16 keys][16 pairs of h][16 keys][2]   V [H/16][16 pairs of keys][16 h][2]
//   float K [H][32 keys]                                             V [32 keys][H]
// H is padded to 32. Blocks of 32 or more tokens hold whole units; smaller ones hold plain rows, from which units are put
// together before use, so every block size gives the same bits.
#pragma once
#include <algorithm>
#include <vector>

#include "linear.h"
#include "norm.h"

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
  for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch((const char*)p + i, _MM_HINT_T1);
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

template <class T>
inline void norm_heads(const Op& op, const Step& st, T* row) {
  for (int head = 0; head < op.heads + op.kv_heads; head++, row += op.head_dim) {
    const T* weight = (const T*)st.weights[head < op.heads ? op.w : op.w2];
    norm_row(row, weight, op.head_dim, op.eps, op.one_plus, [&](int j, int n, v16 y) { store_first(row + j, n, y); });
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
    if (op.w >= 0) norm_heads<T>(op, st, row);
    if (op.cos) {
      int64_t at = (int64_t)st.positions[first + i] * (hd / 2);
      const T *cos = (const T*)op.cos + at, *sin = (const T*)op.sin + at;
      for (int head = 0; head < op.heads + op.kv_heads; head++) rotate(row + head * hd, cos, sin, hd / 2);
    }
    const T* k = row + op.heads * hd;
    const T* v = k + op.kv_heads * hd;
    for (int head = 0; head < op.kv_heads; head++)
      put_key(pages.unit(block, sub, head), hp, st.block_tokens >= 32, key0 + i, k + head * hd, v + head * hd, hd);
  }
}

}  // namespace
