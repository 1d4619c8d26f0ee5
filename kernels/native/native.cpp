// One step of a program: a flat list of phases, each a number of work items that threads take by an atomic counter.
// Compiled once per instruction set (amx.cpp, avx512.cpp, avx2.cpp); every build gives the same bits.
#include "program.h"

#include <sched.h>

#include <atomic>
#include <memory>

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "digest.h"
#include "plain.h"
#include "sampler.h"

namespace {

template <class T>
inline T* panels_in(const Op& op) {
  return (T*)op.in;
}

template <class T>
void embed_rows(const Op& op, const Step& st, int t0, int t1) {
  const T* w = (const T*)st.weights[op.w];
  for (int t = t0; t < t1; t++) {
    T* out = (T*)op.out + t * op.ld_out;
    if (op.packed)
      unpack(w, out, op.ld_out, op.n, op.k, false, st.ids[t], 1, 0, op.k);
    else
      memcpy(out, w + (int64_t)st.ids[t] * op.k, op.k * sizeof(T));
    for (int j = 0; op.scale != 1.f && j < op.k; j += 16) store(out + j, load(out + j) * bc(op.scale));  // rows are padded to 16
  }
}

template <class T>
void panel_rows(const Op& op, int t0, int t1) {
  for (int t = t0; t < t1; t++)
    for (int c = 0; c < op.k; c += 32)
      memcpy(panel_at((T*)op.out, ceil_div(op.k, 32), t, c), (const T*)op.in + t * op.ld_in + c, (op.k - c < 32 ? op.k - c : 32) * sizeof(T));
}

template <class T>
void norm_rows(const Op& op, const Step& st, int r0, int r1) {
  const T* weight = (const T*)st.weights[op.w];
  int kb = ceil_div(op.k, 32);
  for (int r = r0; r < r1; r++) {
    const T* x = (const T*)op.in + (op.rows_mode ? st.hidden_row[r] : r) * op.ld_in;
    T* residual = (T*)op.out + r * op.ld_out;  // or plain rows, which it need not be added to
    if (op.epilogue == EP_ROWS)
      norm_row(x, weight, op.k, op.eps, op.one_plus, [&](int j, int n, v16 y) { store_first(residual + j, n, y); });
    else if (op.epilogue == EP_RESIDUAL)
      norm_row(x, weight, op.k, op.eps, op.one_plus, [&](int j, int n, v16 y) { store_first(residual + j, n, load_first(residual + j, n) + rounded<T>(y)); });
    else
      norm_row(x, weight, op.k, op.eps, op.one_plus, [&](int j, int n, v16 y) { panel_store((T*)op.out, kb, r, j, y, n); });
  }
}

// Logits of a row, of which every rank has `k` ids, side by side.
template <class T>
const T* join_parts(const Op& op, const Step& st, int row) {
  T* out = (T*)st.logits + row * st.ld_logits;
  for (int p = 0; p * op.k < op.n; p++)
    memcpy(out + p * op.k, (const T*)op.in + p * op.part_stride + row * op.ld_in, std::min(op.k, op.n - p * op.k) * sizeof(T));
  return out;
}

// One layer of every copy, in order: a later copy may write where an earlier one did.
void copy_blocks(const Step& st, int layer) {
  char* base = st.kv + layer * st.kv_layer_bytes;
  for (int i = 0; i < st.num_copies; i++)
    memcpy(base + st.copies[2 * i + 1] * st.kv_block_bytes, base + st.copies[2 * i] * st.kv_block_bytes, st.kv_layer_bytes);
}

struct Phase {
  const Op* op;
  int kind;        // op kind; the second half of OP_LOGITS is an OP_SAMPLE
  int dtype;       // of the rows it reads
  int items, row0, row1, per;
};

// A phase's items lie in one stretch per thread. A thread works through its own, where each item follows the one before in memory
// and what is prefetched past an item's end is needed next; then it helps the others.
constexpr int MAX_STRETCHES = 8;
struct alignas(64) Counter {
  std::atomic<int> value{0};
};
struct Progress {
  Counter next[MAX_STRETCHES], done;
};

struct Run {
  const Step* st;
  std::vector<Phase> phases;
  std::unique_ptr<Progress[]> progress;
  int stretches = 1;
  mutable std::atomic<int> arrived{0};

  void add(const Op& op, const Step& s, int threads) {
    int rows = op.rows_mode ? s.num_rows : s.num_tokens;
    int per = rows <= 4 * threads ? 1 : rows <= 64 * threads ? 4 : 16;
    switch (op.kind) {
      case OP_EMBED:
      case OP_RMSNORM:
      case OP_ADD_PARTS:
      case OP_PANELS: phases.push_back({&op, op.kind, op.dtype, ceil_div(rows, per), 0, rows, per}); break;
      case OP_ACTIVATION: phases.push_back({&op, op.kind, op.dtype, ceil_div(rows, per), 0, rows, per}); break;
      case OP_LINEAR: add_linear(op, 0, rows, threads); break;
      case OP_LINEAR_PLAIN: add_plain_linear(op, rows, threads); break;
      case OP_ROPE_STORE: phases.push_back({&op, op.kind, op.dtype, s.num_runs, 0, 0, 1}); break;
      case OP_ATTENTION: phases.push_back({&op, op.kind, op.dtype, s.num_items * op.kv_heads, 0, 0, 1}); break;
      case OP_COPY_BLOCKS: phases.push_back({&op, op.kind, op.dtype, s.num_copies ? s.num_layers : 0, 0, 0, 1}); break;
      case OP_LOGITS:
        for (int r = 0; r < s.num_rows; r += s.piece_rows) {
          int end = r + s.piece_rows < s.num_rows ? r + s.piece_rows : s.num_rows;
          add_linear(op, r, end, threads);
          phases.push_back({&op, OP_SAMPLE, op.out_dtype, end - r, r, end, 1});
        }
        break;
      case OP_SAMPLE: phases.push_back({&op, op.kind, op.dtype, s.num_rows, 0, s.num_rows, 1}); break;
      case OP_LOGITS_PART: add_linear(op, s.row_begin, s.row_end, threads); break;
      case OP_SAMPLE_PARTS: phases.push_back({&op, op.kind, op.out_dtype, s.row_end - s.row_begin, s.row_begin, s.row_end, 1}); break;
    }
  }
  // Items are (piece of rows) x (group of weight blocks): few rows, long groups, so that each reads one stretch of memory.
  void add_linear(const Op& op, int row0, int row1, int threads) {
    if (row1 <= row0 || op.n == 0) return;  // a rank may have no id of a small vocabulary
    int blocks = num_weight_blocks(op.n, gated(op)), per = ceil_div(blocks, threads * 16);
    int piece = piece_rows(op);
    for (int r = row0; r < row1; r += piece)
      phases.push_back({&op, op.kind, op.dtype, ceil_div(blocks, per), r, r + piece < row1 ? r + piece : row1, per});
  }

  // Items are groups of weight blocks, packed into what the second-level cache holds beside the rows that then pass.
  void add_plain_linear(const Op& op, int rows, int threads) {
    if (rows == 0) return;
    int blocks = ceil_div(op.n, 32), per = std::min(ceil_div(blocks, threads * 4), blocks_that_fit(op));
    phases.push_back({&op, op.kind, op.dtype, ceil_div(blocks, per), 0, rows, per});
  }

  template <class T>
  void item(const Phase& ph, int i) const {
    const Op& op = *ph.op;
    const Step& s = *st;
    int r0 = ph.row0 + i * ph.per, r1 = std::min(r0 + ph.per, ph.row1);
    switch (ph.kind) {
      case OP_EMBED: embed_rows<T>(op, s, r0, r1); break;
      case OP_PANELS: panel_rows<T>(op, r0, r1); break;
      case OP_RMSNORM: norm_rows<T>(op, s, r0, r1); break;
      case OP_ROPE_STORE: rope_store_item<T>(op, s, i); break;
      case OP_ATTENTION: attention_item<T>(op, s, i); break;
      case OP_COPY_BLOCKS: copy_blocks(s, i); break;
      case OP_ADD_PARTS: add_parts<T>(op, r0, r1); break;
      case OP_ACTIVATION: activation_rows<T>(op, r0, r1); break;
      case OP_LINEAR_PLAIN: {
        int nb0 = i * ph.per, nb1 = std::min(nb0 + ph.per, ceil_div(op.n, 32));
        if (op.out_dtype)
          plain_linear_item<T>(op, s, (float*)op.out, nb0, nb1, ph.row0, ph.row1);
        else
          plain_linear_item<T>(op, s, (T*)op.out, nb0, nb1, ph.row0, ph.row1);
        break;
      }
      case OP_LINEAR:
      case OP_LOGITS_PART:
      case OP_LOGITS: {
        int blocks = num_weight_blocks(op.n, gated(op)), nb0 = i * ph.per, nb1 = std::min(nb0 + ph.per, blocks);
        scratch.reset((size_t)32 * round_up(op.k, 32) * 4 + 64);
        float* wide = scratch.take<float>((int64_t)32 * round_up(op.k, 32));
        auto run = [&](auto* out) {
          if (ph.kind == OP_LOGITS) out -= (int64_t)ph.row0 * s.ld_logits;  // rows of a piece stand at the top of the logits buffer
          if (ph.kind == OP_LOGITS_PART) out -= (int64_t)s.row_begin * op.ld_out;
          linear_item(op, s, packed_operands<T>(op, s), out, nb0, nb1, ph.row0, ph.row1, wide);
        };
        if (op.out_dtype)
          run((float*)op.out);
        else
          run((T*)op.out);
        break;
      }
      case OP_SAMPLE: sample_row<T>(op, s, (const T*)s.logits + (int64_t)i * s.ld_logits, ph.row0 + i); break;
      case OP_SAMPLE_PARTS: sample_row<T>(op, s, join_parts<T>(op, s, i), ph.row0 + i); break;
    }
  }

  // Every thread walks all phases; a phase is over when its items are done, whoever did them.
  void work() const {
    unsigned csr = _mm_getcsr();
    _mm_setcsr(csr | 0x8040);  // subnormals read and written as zero
#if defined(__AMX_BF16__)
    tile_rows = -1;
#endif
    int home = arrived.fetch_add(1) % stretches;
    for (size_t p = 0; p < phases.size(); p++) {
      const Phase& ph = phases[p];
      Progress& pr = progress[p];
      for (int k = 0; k < stretches; k++) {
        int64_t stretch = (home + k) % stretches;
        int i, begin = (int)(ph.items * stretch / stretches), end = (int)(ph.items * (stretch + 1) / stretches);
        while ((i = begin + pr.next[stretch].value.fetch_add(1, std::memory_order_relaxed)) < end) {
          if (ph.dtype)
            item<float>(ph, i);
          else
            item<bf16>(ph, i);
          pr.done.value.fetch_add(1, std::memory_order_release);
        }
      }
      for (int spins = 0; pr.done.value.load(std::memory_order_acquire) < ph.items; spins++) {
        if (spins < 4000)
          _mm_pause();
        else
          sched_yield();
      }
    }
#if defined(__AMX_BF16__)
    if (tile_rows >= 0) _tile_release();
#endif
    _mm_setcsr(csr);
  }
};

void run_threads(void* data) { ((const Run*)data)->work(); }

}  // namespace

extern "C" {
#pragma GCC visibility push(default)

// What the loader checks: a mismatch means the library and the Python side are of different versions.
void rs_abi(int64_t* out) {
  out[0] = sizeof(Op);
  out[1] = sizeof(Step);
  out[2] = OP_ACTIVATION;  // the last kind of op
}

// Whether this build runs here (and, for AMX, leave to use it). 0 is yes.
int rs_init(void) {
#if defined(__AMX_BF16__)
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return (int)syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
#else
  return 0;
#endif
}

int64_t rs_packed_elems(int dtype, int n, int k, int interleave) {
  int64_t blocks = num_weight_blocks(n, interleave);
  return blocks * 32 * (dtype ? k : round_up(k, 32));
}

void rs_pack(int dtype, void* dst, const void* src, int64_t ld_src, int n, int k, int interleave, int row0, int rows, int col0, int cols) {
  if (dtype)
    pack((float*)dst, (const float*)src, ld_src, n, k, interleave, row0, rows, col0, cols);
  else
    pack((bf16*)dst, (const bf16*)src, ld_src, n, k, interleave, row0, rows, col0, cols);
}

void rs_unpack(int dtype, const void* src, void* dst, int64_t ld_dst, int n, int k, int interleave, int row0, int rows, int col0, int cols) {
  if (dtype)
    unpack((const float*)src, (float*)dst, ld_dst, n, k, interleave, row0, rows, col0, cols);
  else
    unpack((const bf16*)src, (bf16*)dst, ld_dst, n, k, interleave, row0, rows, col0, cols);
}

// Adds to out[0] the digest of a piece of a tensor and to out[1] how many of its elements are not finite. dtype: 0 bfloat16,
// 1 float32, 2 float16.
void rs_digest(int dtype, const void* src, int64_t ld, int64_t rows, int64_t cols, uint64_t first, uint64_t width, uint64_t* out) {
  if (dtype == 1)
    digest_rows((const uint32_t*)src, ld, rows, cols, first, width, 0x7F800000u, out[0], out[1]);
  else
    digest_rows((const uint16_t*)src, ld, rows, cols, first, width, (uint16_t)(dtype ? 0x7C00 : 0x7F80), out[0], out[1]);
}

// rs_digest, and the piece written to [row0 + rows, col0 + cols] of a weight [n, k], in one pass over `src`, whose rows follow each
// other. layout: 0 packed, 1 packed and interleaved, 2 plain rows, 3 likewise, with the digest of what is written instead of what came, and
// left in the caches for whoever reads it next.
// dtypes as in rs_digest: equal, or float32 into bfloat16 (rounded to nearest even); what is not finite counts as written. Plain rows may be
// float16.
void rs_take(int src_dtype, int dtype, int layout, void* dst, const void* src, int n, int k, int row0, int rows, int col0, int cols, uint64_t first,
             uint64_t width, uint64_t* out) {
  bool cast = src_dtype != dtype;
  int64_t src_bytes = (int64_t)cols * (src_dtype == 1 ? 4 : 2), dst_item = dtype == 1 ? 4 : 2;
  std::unique_ptr<bf16[]> rounded(cast ? new bf16[(int64_t)16 * cols] : nullptr);
  for (int r = 0, count; r < rows; r += count) {  // strips that stay in the cache, cut where those of packed weights begin
    count = std::min(16 - (row0 + r) % 16, rows - r);
    const char* strip = (const char*)src + r * src_bytes;
    auto digest = [&](int of, uint64_t* to) { rs_digest(of, strip, cols, count, cols, first + (uint64_t)r * width, width, to); };
    uint64_t came[2] = {0, 0}, written[2] = {0, 0};
    if (layout != 3) digest(src_dtype, came);
    if (cast) {
      round_bits((const uint32_t*)strip, rounded.get(), (int64_t)count * cols);
      strip = (const char*)rounded.get();
    }
    if (layout == 3 || cast) digest(dtype, written);
    out[0] += layout == 3 ? written[0] : came[0];
    out[1] += layout == 3 || cast ? written[1] : came[1];  // a finite value may be none once it is rounded
    if (layout >= 2)
      for (int i = 0; i < count; i++)
        (layout == 3 ? copy_cached : copy_streamed)((char*)dst + ((int64_t)(row0 + r + i) * k + col0) * dst_item, strip + i * cols * dst_item, cols * dst_item);
    else
      rs_pack(dtype, dst, strip, cols, n, k, layout == 1, row0 + r, count, col0, cols);
  }
  _mm_sfence();  // streamed lines are there for other threads now
}

// Ops [begin, end) of a program on one step, in one parallel region. `parallel` is GOMP_parallel of the OpenMP runtime that
// torch has loaded already (null: this thread alone).
void rs_run(const Op* ops, int begin, int end, const Step* step, int threads, ParallelFn parallel) {
  Run run;
  run.st = step;
  for (int i = begin; i < end; i++) run.add(ops[i], *step, threads);
  run.progress.reset(new Progress[run.phases.size()]);
  run.stretches = std::min(threads, MAX_STRETCHES);
  if (threads > 1 && parallel)
    parallel(run_threads, &run, (unsigned)threads, 0);
  else
    run.work();
}

#pragma GCC visibility pop
}  // extern "C"
