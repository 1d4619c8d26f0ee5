// Ops on plain rows and plain weights, as a trainer's forward pass calls them: nothing is packed beforehand.
#pragma once
#include <algorithm>

#include "kv.h"

namespace {

template <class T>
void activation_rows(const Op& op, int r0, int r1) {
  auto apply = [&](v16 x) {
    if (op.epilogue == EP_STORE) return softcapped<T>(x, op.softcap);
    return x / (bc(1.f) + vexp(op.epilogue == EP_SILU_MUL ? zero16() - x : gelu_exponent(x)));
  };
  for (int r = r0; r < r1; r++) {
    const T* in = (const T*)op.in + r * op.ld_in;
    T* out = (T*)op.out + r * op.ld_out;
    for (int j = 0; j < op.k; j += 16) store_first(out + j, std::min(op.k - j, 16), apply(load_first(in + j, op.k - j)));
  }
}

// Rows whose panels stay in the second-level cache while weight blocks pass.
constexpr int64_t PANEL_BYTES = 1 << 19;

inline int blocks_that_fit(const Op& op) { return (int)std::max<int64_t>(1, PANEL_BYTES / (32 * (int64_t)op.k * (op.dtype ? 4 : 2))); }
inline int piece_rows(const Op& op) { return (int)std::max<int64_t>(32, PANEL_BYTES / ((int64_t)op.k * (op.dtype ? 4 : 2)) / 32 * 32); }

// One group of weight blocks, packed into this thread's scratch, over all rows.
template <class T, class O>
void plain_linear_item(const Op& op, const Step& s, O* out, int nb0, int nb1, int r0, int r1) {
  int64_t width = round_up(op.k, 32), block = packed_offset((T*)nullptr, 1, 0, 0, op.k);
  scratch.reset((32 * width * 4 + (nb1 - nb0) * block * sizeof(T)) + 256);
  float* wide = scratch.take<float>(32 * width);
  T* packed = scratch.take<T>((nb1 - nb0) * block);
  int n = std::min(op.n - nb0 * 32, (nb1 - nb0) * 32), piece = piece_rows(op);
  if (op.k % 32) memset(packed, 0, (nb1 - nb0) * block * sizeof(T));
  pack(packed, (const T*)s.weights[op.w] + (int64_t)nb0 * 32 * op.k, op.k, n, op.k, false, 0, n, 0, op.k, false);
  Operands<T> in{packed - nb0 * block, (const T*)op.in, op.ld_in};
  for (int r = r0; r < r1; r += piece) linear_item(op, s, in, out, nb0, nb1, r, std::min(r + piece, r1), wide);
}

}  // namespace
