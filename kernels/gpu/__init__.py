"""The GPU path: Triton kernels on torch tensors, one module per op. docs/numerics.md says what they compute, and what differs from the CPU.

Nothing here is imported before a GPU is used: `from rollsync.kernels.gpu import ops` brings Triton in.

Every function takes `out=` (or writes in place): given it, nothing is allocated and the host waits for nothing, so a CUDA graph can
record it. Tensors must be contiguous in their last dimension with rows that begin at multiples of 16 bytes; `launch.check_rows` names
the one that is not. The number of rows never chooses a kernel or a tile, so a row's bits do not depend on it.

A batch may be padded to a fixed size: tokens with `token_slot` -1 store nothing, items of 0 tokens and copies from block -1 do nothing,
and what other ops make of padding rows is never read.
"""
