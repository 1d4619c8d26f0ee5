// The C ABI: a program is a list of ops with fixed buffers, made once at load; a step holds what changes with each call.
// kernels/native_lib.py mirrors these structs field by field; rs_abi() lets it check that it does.
#pragma once
#include <cstdint>

enum OpKind : int32_t {
  OP_EMBED = 1,       // out[t] = row ids[t] of weight w (plain rows, or packed when `packed`) * scale
  OP_RMSNORM = 2,     // out (panels; EP_ROWS: rows) = rmsnorm(in (rows)) * w, or with EP_RESIDUAL out (rows) += that; rows_mode 1 reads in[hidden_row[r]]
  OP_LINEAR = 3,      // in (panels) -> out, by epilogue
  OP_ROPE_STORE = 4,  // norm the q heads of in (rows) by w and its k heads by w2, rotate both, all in place; store k and v into the pages
  OP_ATTENTION = 5,   // q of in (rows), pages -> out (panels; EP_ROWS: rows)
  OP_COPY_BLOCKS = 6, // KV block copies, all layers
  OP_LOGITS = 7,      // head linear and sampler over hidden panels, in pieces of `piece_rows`
  OP_PANELS = 8,      // in (rows) -> out (panels)
  OP_SAMPLE = 9,      // sampler over given logits, num_rows of them
  // Where several ranks share a model:
  OP_ADD_PARTS = 10,    // the sums of `parts` ranks in float32, at in + part * part_stride -> out (rows), by epilogue; same tree as inside a rank
  OP_LOGITS_PART = 11,  // head linear of logits rows [row_begin, row_end), this rank's ids only -> the top of out
  OP_SAMPLE_PARTS = 12, // logits of those rows, `k` ids of each rank, side by side; then the sampler
  // Where a trainer computes:
  OP_LINEAR_PLAIN = 13, // OP_LINEAR of weights in plain rows; in: rows where ld_in is set (bfloat16: k % 32 == 0), else panels
  OP_ACTIVATION = 14,   // in (rows) -> out (rows): the activation of a gated epilogue alone; EP_STORE: the soft cap
};
enum Epilogue : int32_t { EP_STORE = 0, EP_RESIDUAL = 1, EP_SILU_MUL = 2, EP_GELU_MUL = 3, EP_ROWS = 4 };

struct Op {
  int32_t kind, dtype;       // dtype: 0 bfloat16, 1 float32
  int32_t out_dtype;         // OP_LINEAR with EP_STORE, OP_LOGITS: 1 leaves the sums in float32; any other op, and by default: dtype
  int32_t w, bias, w2;       // indices into Step.weights, -1 for none
  int32_t window;            // OP_ATTENTION: keys a token sees, itself included; 0: all
  int32_t n, k;              // output and input width
  int32_t shards, epilogue;
  void* in;
  void* out;                 // EP_RESIDUAL: the residual rows, read and written
  const void* cos;           // OP_ROPE_STORE: tables [P, head_dim / 2], dtype; null: heads are not rotated
  const void* sin;
  int64_t ld_in, ld_out;     // row strides in elements, for row-major buffers
  int32_t layer, rows_mode;  // rows_mode 0: the step's tokens, 1: its logits rows
  float eps, scale;
  float softcap;             // OP_ATTENTION: of the scores, OP_LOGITS: of the logits; 0: none
  int32_t one_plus;          // OP_RMSNORM, OP_ROPE_STORE: norms multiply by 1 + w, in float32
  int32_t heads, kv_heads, head_dim, packed;
  int32_t parts;             // OP_ADD_PARTS, OP_SAMPLE_PARTS: ranks
  int32_t first_block;       // OP_LINEAR, OP_LOGITS_PART: block of 32 outputs that `w` is read from
  int64_t part_stride;       // elements from one rank's part to the next
};

// What a request changes about the logit of one id: x + bias, by `factor` towards or away from 0, less `subtract`.
struct Adjust {
  int32_t id;
  float bias, factor, subtract;
};
constexpr int TOP_MAX = 20;  // likeliest ids a row can report

struct Step {
  int32_t num_tokens, num_rows;
  int32_t row_begin, row_end;  // logits rows of OP_LOGITS_PART and OP_SAMPLE_PARTS
  const int32_t* ids;
  const int32_t* positions;
  // KV pool
  char* kv;
  int64_t kv_block_bytes, kv_layer_bytes;
  int32_t block_tokens, num_layers;
  int32_t num_runs, num_items, num_copies, table_stride;
  const int32_t* runs;        // [num_runs][4]: first token, tokens, block, offset; within one unit of min(32, block_tokens)
  const int32_t* items;       // [num_items][4]: first token, tokens, leading key blocks (32 keys) they share, most keys
  const int32_t* num_keys;    // [T] keys each token sees
  const int32_t* first_key;   // [T] first key each token sees
  const int32_t* token_slot;  // [T] row of `tables`
  const int32_t* tables;      // [slots][table_stride] block ids
  const int32_t* copies;      // [num_copies][2]: source, destination
  void* const* weights;
  // logits rows
  const int32_t* hidden_row;  // [R] token whose hidden state the row reads
  void* logits;               // [piece_rows][ld_logits]
  int64_t ld_logits;
  int32_t piece_rows, vocab_limit;
  const double* temperature;  // [R]
  const double* top_p;
  const float* min_p;
  const int64_t* top_k;
  const uint64_t* seed;
  const uint32_t* sample_index;
  const uint32_t* row_position;
  const int64_t* forced;      // -1 draws
  const uint8_t* want;        // 1 model logprob, 2 entropy, 4 mask
  const int32_t* ban_offset;  // [R + 1] into banned
  const int32_t* banned;
  const int32_t* adjust_offset;  // [R + 1] into adjust
  const Adjust* adjust;          // one per id of a row
  const int32_t* allowed_row;    // row of `allowed`; -1 allows all ids
  const uint32_t* allowed;       // [slots][allowed_words], bit i % 32 of word i / 32; ids beyond are not allowed
  int64_t allowed_words;
  const uint8_t* top_n;          // how many of the likeliest ids to report
  int64_t* out_token;
  float* out_logprob;
  float* out_temperature_logprob;
  float* out_model_logprob;
  float* out_entropy;
  int32_t* out_top_id;        // [R][TOP_MAX], of which top_n are written
  float* out_top_logprob;
  uint8_t* out_nonfinite;
  int32_t* out_mask;          // [R][mask_words], which ids a row could be drawn from, as kernels/sampling_mask.py has it
  int64_t mask_words;
};

typedef void (*ParallelFn)(void (*fn)(void*), void* data, unsigned threads, unsigned flags);
