"""The command line. Imports what a subcommand needs when it runs, so `rollsync --help` is quick."""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

EXIT_INTERRUPTED = 130
_HELP = {
    "serve": "serve a model over HTTP",
    "generate": "sample from one prompt, in this process",
    "parity": "sample from a server and show that the stock transformers model computes the same bits",
    "replay": "compute the samples of a trace again and compare every bit",
    "verl-check": "check that verl finds Rollsync, and that a replica works",
}


def add_config_flags(parser: argparse.ArgumentParser, renamed: dict[str, str] | None = None, without: Sequence[str] = ()) -> None:
    """A flag for every field of EngineConfig (but those `without`) and its parts, named after the field (unless `renamed`), helped by
    its docstring."""
    from .engine.config import EngineConfig

    parts = {f.name: f.default_factory for f in dataclasses.fields(EngineConfig) if dataclasses.is_dataclass(f.default_factory)}
    _add_flags(parser.add_argument_group("model"), EngineConfig, "", skip={"model", *parts, *without}, renamed=renamed)
    for name, cls in parts.items():
        assert isinstance(cls, type)
        _add_flags(parser.add_argument_group(name), cls, f"{name}.")


def _add_flags(group: Any, cls: type, prefix: str, skip: set[str] | None = None, renamed: dict[str, str] | None = None) -> None:
    from .fields import field_docs

    docs, hints = field_docs(cls), get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name in (skip or set()):
            continue
        kinds = [k for k in get_args(hints[field.name]) if k is not type(None)] or [hints[field.name]]
        text = docs.get(field.name, "").replace("%", "%%")
        if field.default is not None and kinds[0] is not bool:
            text += f" (default: {field.default})"
        names = ["--" + (renamed or {}).get(field.name, field.name).replace("_", "-")]
        if prefix and kinds[0] is not bool:
            names.append("--" + (prefix + field.name).replace("_", "-").replace(".", "-"))
        extra: dict[str, Any] = {"type": kinds[0], "metavar": {int: "N", str: "NAME"}.get(kinds[0], "X")}
        if kinds[0] is bool:
            extra = {"action": argparse.BooleanOptionalAction}
        group.add_argument(*names, dest=prefix + field.name, default=argparse.SUPPRESS, help=text, **extra)


def _config(args: argparse.Namespace) -> Any:
    from .engine.config import CacheConfig, EngineConfig, NumericsConfig, SchedulerConfig

    parts = {"cache": CacheConfig, "scheduler": SchedulerConfig, "numerics": NumericsConfig}
    known = {f.name for f in dataclasses.fields(EngineConfig)} | {f"{p}.{f.name}" for p, c in parts.items() for f in dataclasses.fields(c)}
    return EngineConfig.from_flat({k: v for k, v in vars(args).items() if k in known})


def _package_version() -> str:
    from .. import __version__

    return __version__


def _exit_on(signum: int, frame: Any) -> None:
    sys.exit(128 + signum)


def _serve(args: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, _exit_on)  # until the launcher, which takes a while to import, has its own
    config = _config(args)
    from .server.launcher import ServeOptions, serve

    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(ServeOptions) if hasattr(args, f.name)}
    return serve(config, ServeOptions(**given), _package_version(), args.engine_factory)


def _generate(args: argparse.Namespace) -> int:
    """One prompt, in process: sampled text on stdout, a blank line between samples."""
    from .engine.engine import Engine
    from .engine.params import SamplingParams
    from .engine.types import RolloutRequest
    from .models.config import resolve_model_path
    from .models.tokenizer import Tokenizer

    config = _config(args) if hasattr(args, "apply") else dataclasses.replace(_config(args), apply="in_place")  # no update will come
    given = {f.name: getattr(args, f"sample_{f.name}") for f in dataclasses.fields(SamplingParams) if hasattr(args, f"sample_{f.name}")}
    params = SamplingParams(**given)
    tokenizer = Tokenizer.from_model(resolve_model_path(config.tokenizer or config.model))
    chat = [{"role": "user", "content": args.prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True) if args.chat else tokenizer.encode(args.prompt)
    engine = Engine(config)
    try:
        engine.add_request(RolloutRequest(request_id="generate", prompt_token_ids=tuple(ids), params=params))
        finals = []
        while engine.has_work:
            finals += [o for o in engine.step() if o.finished]
    finally:
        engine.close()
    finals.sort(key=lambda o: o.sample_index)
    print("\n\n".join(tokenizer.decode(o.token_ids) for o in finals))
    return 1 if any(o.finish_reason == "error" for o in finals) else 0


def _replay(args: argparse.Namespace) -> int:
    from .engine.config import EngineConfig
    from .replay_command import replay_file

    known = {f.name for f in dataclasses.fields(EngineConfig)}
    return replay_file(args, {k: v for k, v in vars(args).items() if k in known or "." in k})


def _parity(args: argparse.Namespace) -> int:
    from .parity_command import run

    return run(args)


def _verl_check(args: argparse.Namespace) -> int:
    from .verl_command import main

    return main(args)


def _selftest(args: argparse.Namespace) -> int:
    from .selftest import main as selftest

    return int(selftest(args.rest) or 0)


def _version(args: argparse.Namespace) -> int:
    print(f"rollsync {_package_version()}")
    return 0


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser("serve", help=_HELP["serve"])
    parser.set_defaults(run=_serve)
    parser.add_argument("model", metavar="MODEL", help="a local folder, a .gguf file, or a hub id (the local cache first, then the hub)")
    group = parser.add_argument_group("listener")
    group.add_argument("--host", default=argparse.SUPPRESS, help="address to listen on (default: 127.0.0.1)")
    group.add_argument("--port", type=int, default=argparse.SUPPRESS, help="port to listen on; 0 takes a free one (default: 8000)")
    group.add_argument("--api-key", default=argparse.SUPPRESS, help="key that traffic must send; @FILE or env:NAME read it from there")
    text = "token that control routes must send (@FILE, env:NAME as above); opens all other routes too"
    group.add_argument("--control-token", default=argparse.SUPPRESS, help=text)
    text = "port of a listener of its own for control routes, which the other then refuses; 0 takes a free one"
    group.add_argument("--control-port", type=int, default=argparse.SUPPRESS, help=text)
    group.add_argument("--control-host", default=argparse.SUPPRESS, help="address of that listener (default: 127.0.0.1)")
    text = "network whose callers need no control token, for trainers whose clients send none; may be given several times"
    group.add_argument("--control-allow", metavar="CIDR", action="append", default=argparse.SUPPRESS, help=text)
    group.add_argument("--max-body-bytes", type=int, default=argparse.SUPPRESS, help="largest request body accepted (default: 256 MiB)")
    text = "name of the model on OpenAI's routes (default: MODEL; that and its last part are names too)"
    group.add_argument("--served-model-name", metavar="NAME", default=argparse.SUPPRESS, help=text)
    text = "wandb: seconds, bytes, stall and age of weight updates, and version lag of tokens, go there too (as its WANDB_ variables say)"
    group.add_argument("--report-to", metavar="NAME", default=argparse.SUPPRESS, help=text)
    text = "take pickles of tensor handles on SGLang's /update_weights_from_tensor; nothing but handles is read of them"
    group.add_argument("--allow-tensor-pickle", action="store_true", default=argparse.SUPPRESS, help=text)
    group.add_argument("--engine-factory", default=None, help=argparse.SUPPRESS)
    add_config_flags(parser)


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser("generate", help=_HELP["generate"])
    parser.set_defaults(run=_generate)
    parser.add_argument("model", metavar="MODEL", help="a local folder, a .gguf file, or a hub id (the local cache first, then the hub)")
    parser.add_argument("--prompt", required=True, help="the prompt")
    parser.add_argument("--chat", action="store_true", help="render the prompt as a user's turn with the chat template")
    group = parser.add_argument_group("sampling")
    for name, kind, text in (
        ("n", int, "samples"),
        ("max-tokens", int, "new tokens at most"),
        ("temperature", float, "0 is greedy"),
        ("top-p", float, "nucleus mass"),
        ("top-k", int, "likeliest ids kept"),
        ("min-p", float, "drop ids less likely than this fraction of the likeliest"),
    ):
        group.add_argument(f"--{name}", type=kind, dest="sample_" + name.replace("-", "_"), default=argparse.SUPPRESS, help=text)
    text = "seed of the samples: the same seed, the same text"
    group.add_argument("--seed", "--sample-seed", metavar="N", type=int, dest="sample_seed", default=argparse.SUPPRESS, help=text)
    add_config_flags(parser, renamed={"seed": "engine_seed"})


def _add_replay(commands: Any) -> None:
    text = "Exit status: 0 if all is equal, 1 if not, 2 if it was refused."
    parser = commands.add_parser("replay", help=_HELP["replay"], description=text)
    parser.set_defaults(run=_replay)
    parser.add_argument("file", metavar="FILE", help="a trace, as `rollsync serve --trace FILE` writes it")
    text = "where the model is (default: where the trace says it was)"
    parser.add_argument("--model", metavar="MODEL", default=argparse.SUPPRESS, help=text)
    parser.add_argument("--limit", metavar="N", type=int, help="look at the first N lines only")
    parser.add_argument("--forced", action="store_true", help="give the tokens and score them, instead of sampling them again")
    parser.add_argument("--skip", action="store_true", help="pass over lines that cannot be replayed, and say how many and why")
    parser.add_argument("--json", action="store_true", help="the report as one JSON object")
    add_config_flags(parser, without=("trace", "apply", "weights_root", "seed", "default_pause_ttl_s"))


def _add_parity(commands: Any) -> None:
    from .parity_command import add_flags

    text = "Exit status: 0 if all is equal, 1 if not, 2 if it was refused."
    parser = commands.add_parser("parity", help=_HELP["parity"], description=text)
    parser.set_defaults(run=_parity)
    add_flags(parser)


def _add_verl_check(commands: Any) -> None:
    text = "Exit status: 0 if all of it works, 1 if not."
    parser = commands.add_parser("verl-check", help=_HELP["verl-check"], description=text)
    parser.set_defaults(run=_verl_check)
    text = "of a running Ray cluster, whose nodes are looked at too; all else happens in a Ray of its own on this machine"
    parser.add_argument("--address", metavar="ADDRESS", help=text)


ADDS = {"serve": _add_serve, "generate": _add_generate, "parity": _add_parity, "replay": _add_replay, "verl-check": _add_verl_check}
"""what makes a subcommand's flags"""


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The flags of a subcommand are made only if it is called."""
    parser = argparse.ArgumentParser(prog="rollsync", description="RL-rollout inference: same bits, same weights, same version.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    chosen = next((a for a in argv if not a.startswith("-")), None)
    for name, add in ADDS.items():
        if name == chosen:
            add(commands)
        else:
            commands.add_parser(name, help=_HELP[name])
    selftest = commands.add_parser("selftest", help="check this machine's numbers", add_help=False)
    selftest.add_argument("rest", nargs=argparse.REMAINDER)
    selftest.set_defaults(run=_selftest)
    commands.add_parser("version", help="print the version").set_defaults(run=_version)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0, 1 (failed), 2 (usage or configuration), 128 + the signal that ended it."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["selftest"]:
        args = argparse.Namespace(run=_selftest, rest=argv[1:])
    else:
        args = _parser(argv).parse_args(argv)
    from .errors import ConfigError, RollsyncError

    try:
        status: int = args.run(args)
    except RollsyncError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) or error.status == 400 else 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(main())
