"""The command line and what it imports."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import rollsync
from rollsync import EngineConfig
from rollsync.rollout.cli import _config, _parser, main
from rollsync.rollout.errors import sent_errors

HEAVY = ("torch", "fastapi", "uvicorn", "zmq", "httpx", "tokenizers", "numpy", "transformers", "pydantic", "asyncio")


def modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('|', *sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.rsplit("|", 1)[1].split())


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["generate", "--help"], ["version"]])
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    call = f"try:\n    main({argv!r})\nexcept SystemExit as e:\n    assert e.code == 0"
    found = modules_after(f"from rollsync.rollout.cli import main\n{call}")
    assert not found & set(HEAVY)


def test_front_and_client_import_no_torch() -> None:
    front = modules_after("import rollsync.rollout.server.launcher, rollsync.rollout.engine.process, rollsync.rollout.client")
    assert "fastapi" in front and not front & {"torch", "transformers", "numpy"}
    assert "fastapi" not in modules_after("import rollsync.rollout.client")


def test_every_setting_has_a_flag_with_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    config = EngineConfig(model="m")
    for part in (config, config.cache, config.scheduler, config.numerics):
        for field in dataclasses.fields(part):
            if field.name not in ("model", "cache", "scheduler", "numerics"):
                assert f"--{field.name.replace('_', '-')}" in text
    assert "tokens per KV block" in text and "--no-prefix-cache" in text


def test_flags_become_the_config() -> None:
    argv = ["serve", "m", "--block-tokens", "16", "--scheduler-max-num-seqs", "8", "--no-prefix-cache", "--dtype", "float32", "--seed", "3"]
    config = _config(_parser(argv).parse_args(argv))
    assert (config.cache.block_tokens, config.scheduler.max_num_seqs, config.cache.prefix_cache) == (16, 8, False)
    assert (config.dtype, config.seed, config.model) == ("float32", 3, "m")


def test_the_seed_of_generate_is_that_of_the_samples() -> None:
    for name in ("--seed", "--sample-seed"):
        args = _parser(argv := ["generate", "m", "--prompt", "a", name, "4", "--engine-seed", "9"]).parse_args(argv)
        assert (args.sample_seed, _config(args).seed) == (4, 9)


def test_the_errors_a_caller_catches_are_exported_without_imports() -> None:
    found = modules_after("import rollsync; assert issubclass(rollsync.PromptTooLong, rollsync.BadRequest)")
    assert not found & set(HEAVY)
    assert all(getattr(rollsync, name) for name in rollsync.__all__)
    exported = {cls.__name__ for cls in sent_errors()} & set(rollsync.__all__)
    assert {"RollsyncError", "Overloaded", "EngineDead", "NotReady", "DuplicateRequest"} <= exported


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--kernels", "mmx"]) == 2
    assert capsys.readouterr().err == "error: numerics.kernels must be amx, avx512, avx2 or reference, got 'mmx'\n"
    assert main(["version"]) == 0
    with pytest.raises(SystemExit) as usage:
        main(["serve"])
    assert usage.value.code == 2
