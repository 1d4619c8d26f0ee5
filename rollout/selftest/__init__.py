"""`rollsync selftest`: whether this machine, this build and a model keep the promise of docs/numerics.md; and how fast each op is."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..engine.config import EngineConfig
    from ..engine.runner_info import RunnerInfo
    from .cells import Cell
    from .matrix import Matrix

DTYPES = ("float32", "bfloat16")
Wrong = list[str]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rollsync selftest",
        description="Check bit by bit that a sample does not depend on batch, chunks, cache, preemption or prefill; time every op.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model folder or .gguf file (default: a tiny one made for the purpose)")
    parser.add_argument("--dtype", choices=("both", *DTYPES), default="both", help="(default: both)")
    parser.add_argument("--kernels", metavar="NAME", help="amx, avx512, avx2 or reference (default: the best this machine runs)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all; the tiny model runs on 1)")
    parser.add_argument("--k-shards", type=int, default=4, metavar="N", help="partial sums of a row-parallel layer (default: 4)")
    parser.add_argument(
        "--full",
        action="store_true",
        help="also after a weight update, over 1, 2 and 4 ranks, and by a Hugging Face trainer under parity; more page sizes and thread "
        "counts, and the reference in plain torch (some five minutes)",
    )
    return parser


class _Status:
    """One line on stderr while something runs; where no terminal looks, a new one now and then."""

    EVERY_S = 15.0

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._said = time.monotonic()

    def __call__(self, text: str = "") -> None:
        now = time.monotonic()
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{text[:100]}")
            sys.stderr.flush()
        elif text and now - self._said > self.EVERY_S:
            self._said = now
            print(text, file=sys.stderr, flush=True)


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _why(kernels: str, wanted: str | None, available: list[str]) -> str:
    if wanted is not None:
        return "as asked"
    if kernels == "reference":
        return "no native build is compiled, or this CPU lacks AVX2"
    return f"the best of {', '.join([*available, 'reference'])} on this CPU"


def _print_head(info: RunnerInfo, name: str, wanted: str | None, num_requests: int) -> None:
    from ...kernels.native_lib import available_builds
    from .matrix import OUTPUT

    print(f"model        {name}, {num_requests} requests of {OUTPUT} tokens")
    print(f"kernels      {info.kernels} ({_why(info.kernels, wanted, available_builds())}), {_count(info.threads, 'thread')}")
    print(f"fingerprint  {info.fingerprint}, as the specification says")


def _print_matrix(results: dict[str, dict[Cell, Wrong]], full: bool) -> None:
    """One table over all dtypes; of the full matrix, one for each."""
    from .cells import ENGINE_PATHS, PATHS, TPS

    tables = [[dtype] for dtype in results] if full else [list(results)]
    paths, syncs, tps = (PATHS, (False, True), TPS) if full else (ENGINE_PATHS, (False,), (1,))
    for dtypes in tables:
        columns = [
            (dtype, {"tp": tp, "batch": batch, "chunked": chunked})
            for dtype in dtypes
            for tp in tps
            for batch in (False, True)
            for chunked in (False, True)
        ]
        print()
        heads = [dtype + f", tp {tp}" * full for dtype in dtypes for tp in tps]
        _print_row([], heads, 36)
        _print_row([], ["batch" if c["batch"] else "alone" for _, c in columns])
        _print_row([], ["chunked" if c["chunked"] else "whole" for _, c in columns])
        for path, cached, preempted, synced in product(paths, (False, True), (False, True), syncs):
            row = {"path": path, "cached": cached, "preempted": preempted, "synced": synced}
            words = [path, "cached" * cached, "preempted" * preempted, "after a sync" * synced]
            _print_row(words, [_word(results[dtype].get(_cell(**row, **column))) for dtype, column in columns])


def _print_row(words: list[str], entries: list[str], width: int = 9) -> None:
    name = "".join(f"{word:{w}}" for word, w in zip(words, (13, 7, 10, 13), strict=False))
    print(f"{name:44}{''.join(f'{entry:{width}}' for entry in entries)}".rstrip())


def _cell(**conditions: Any) -> Cell:
    from .cells import Cell

    return Cell(**conditions)


def _word(wrong: Wrong | None) -> str:
    if wrong is None:
        return "-"
    if not wrong:
        return "yes"
    return "error" if wrong[0].startswith("not tested") else "NO"


def _other_runs(info: RunnerInfo, full: bool, tiny: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and engine options under which the bits have to be the same as well."""
    from ...kernels.native_lib import available_builds

    builds = [b for b in [*available_builds(), *(["reference"] if full else [])] if b != info.kernels]
    yield from ((f"{build} kernels", {"kernels": build}) for build in builds)
    yield "requests in reverse", {"reverse": True}
    if tiny or full:
        pages, threads = ((4, 16, 64, 128), (1, 2, 3, 8)) if full else ((4, 64), (2, 3))
        yield from ((f"pages of {size} tokens", {"block_tokens": size}) for size in pages)
        yield from ((_count(count, "thread"), {"threads": count}) for count in threads)


def _run_others(matrix: Matrix, full: bool, tiny: bool, status: _Status) -> dict[str, Wrong]:
    results: dict[str, Wrong] = {}
    for name, options in _other_runs(matrix.info, full, tiny):
        status(f"{matrix.info.dtype}: {name}")
        results[name] = matrix.other(**options)
    if tiny:
        # The test of the test: another order of a sum has to show.
        shards = 1 if matrix.info.config.numerics.k_shards > 1 else 2
        seen = len(matrix.other(k_shards=shards)) == len(matrix.requests)
        results[f"k_shards {shards} shows as other bits"] = [] if seen else ["the model does not show a change of order"]
    return results


def _print_others(results: dict[str, dict[str, Wrong]]) -> None:
    print()
    for name in next(iter(results.values())):
        _print_row([name], [_word(found[name]) for found in results.values()], 36)


def _print_timings(info: RunnerInfo, path: str | None, dtypes: Sequence[str], threads: int) -> None:
    """At the shapes of the model in `path`, or of a small real one."""
    import torch

    from ...kernels.native_lib import load_build
    from ..models.config import load_decoder_config
    from .timing import SMOLLM2_135M, time_ops

    if info.kernels == "reference":
        print("\nno op times: the reference is not built for speed")
        return
    cfg = load_decoder_config(path) if path else SMOLLM2_135M
    shapes = "its" if path else "SmolLM2-135M's"
    print(f"\nmicroseconds at {shapes} shapes: {info.kernels} / plain torch {torch.__version__}, {_count(threads, 'thread')}")
    titles = [f"{dtype}, {_count(tokens, 'token')}" for dtype in dtypes for tokens in (1, 32)]
    print(" " * 50 + "".join(f"{title:>22}" for title in titles))
    columns = [
        time_ops(load_build(info.kernels), cfg, getattr(torch, dtype), tokens, threads, info.config.numerics.k_shards)
        for dtype in dtypes
        for tokens in (1, 32)
    ]
    for row in zip(*columns, strict=True):
        cells = "".join(f"{t.native_s * 1e6:>12.1f} /{t.torch_s * 1e6:>8.1f}" for t in row)
        print(f"{row[0].op:16}{row[0].shape:34}{cells}")


def _check(
    config: EngineConfig, name: str, args: argparse.Namespace, dtypes: Sequence[str], folder: str | None
) -> tuple[RunnerInfo, list[str]]:
    """Print everything but times. Returns what the first engine said of itself, and all that is wrong."""
    from ..engine.devices import choose_kernels
    from .matrix import Matrix
    from .updates import Folders

    tiny = args.model is None
    slow = not tiny or choose_kernels(args.kernels) == "reference"
    status, (num_requests, num_alone) = _Status(), (4, 1) if slow or args.full else (6, 4)
    folders = Folders(config.model, folder) if folder else None
    matrices: dict[str, dict[Cell, Wrong]] = {}
    others: dict[str, dict[str, Wrong]] = {}
    for dtype in dtypes:
        status(f"{dtype}: baseline")
        matrix = Matrix(replace(config, dtype=dtype), num_requests, num_alone, folders)
        if dtype == dtypes[0]:
            status()
            info = matrix.info
            _print_head(info, name, args.kernels, num_requests)
        cells = _cells(dtype, args.full, config)
        matrices[dtype] = dict(matrix.verdicts(cells, lambda cell, dtype=dtype: status(f"{dtype}: {cell}")))  # type: ignore[misc]
        others[dtype] = _run_others(matrix, args.full, tiny, status)
    status()
    _print_matrix(matrices, args.full)
    _print_others(others)
    wrong = [f"{dtype}, {cell}: {w}" for dtype, found in matrices.items() for cell, ws in found.items() for w in ws]
    wrong += [f"{dtype}, {what}: {w}" for dtype, found in others.items() for what, ws in found.items() for w in ws]
    return info, wrong


def _cells(dtype: str, full: bool, config: EngineConfig) -> list[Cell]:
    """What is run in a dtype: of the full matrix, what as many ranks as the model allows can be."""
    from ..models.config import load_decoder_config
    from ..models.params import check_tp
    from .cells import PATHS, TPS, cells

    if not full:
        return list(cells())
    model, tps = load_decoder_config(config.model), []
    for tp in TPS:
        try:
            check_tp(model, tp, 0, config.numerics.k_shards)
            tps.append(tp)
        except ConfigError as error:
            print(f"no cells of tp {tp}: {error}")
    return list(cells(PATHS, (False, True), tps))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the self-test and return the exit status: 0 only if every cell is a yes.

    Raises:
        ConfigError: the model or the kernels cannot be used here, or the kernels give other bits than the specification.
        SystemExit: the arguments do not parse.
    """
    args = _parser().parse_args(argv)
    from ..engine.config import EngineConfig, NumericsConfig
    from ..models.config import resolve_model_path
    from ..models.loader import cached_checkpoint
    from .model import write_model

    start = time.perf_counter()
    dtypes = DTYPES if args.dtype == "both" else (args.dtype,)
    with tempfile.TemporaryDirectory(prefix="rollsync-selftest-") as folder:
        tiny = args.model is None
        path = write_model(folder) if tiny else str(resolve_model_path(args.model))
        if path.endswith(".gguf"):
            path = str(cached_checkpoint(Path(path)))
        threads = args.threads or (1 if tiny else None)
        numerics = NumericsConfig(k_shards=args.k_shards, threads=threads, kernels=args.kernels)
        config = EngineConfig(model=path, device="cpu", numerics=numerics)  # a GPU has benchmarks/gpu_check.py
        name = "tiny llama whose sums cancel" if tiny else args.model
        info, wrong = _check(config, name, args, dtypes, folder if args.full else None)
        _print_timings(info, None if tiny else path, dtypes, args.threads or len(os.sched_getaffinity(0)))
    for line in wrong[:20]:
        print(f"WRONG  {line}")
    if len(wrong) > 20:
        print(f"WRONG  and {len(wrong) - 20} more")
    verdict = _count(len(wrong), "problem") if wrong else "all the same, bit by bit"
    print(f"\n{verdict}; {time.perf_counter() - start:.1f} s")
    return 1 if wrong else 0

