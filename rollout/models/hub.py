"""Where the files of a model are: a folder, a .gguf file, or a hub id in the local Hugging Face cache. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ConfigError


def resolve_model_path(model: str, what: str = "model") -> Path:
    """The local folder or .gguf file `model` means; errors call it `what`.

    Looked for in this order: a folder or file of that path; the hub id in the local Hugging Face cache (its `main`, else its
    newest snapshot); a download, if huggingface_hub is installed and HF_HUB_OFFLINE is not set.

    Raises:
        ConfigError: nothing was found; the message says where it was looked for.
    """
    path = Path(model).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path.resolve()
    if path.is_file():
        raise ConfigError(f"{what} {model} is a file, but not a .gguf: give a folder with config.json, a .gguf file or a hub id")
    looked = [f"the path {path.absolute()}"]
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        cache = _hub_cache() / f"models--{model.replace('/', '--')}"
        if (snapshot := _cached_snapshot(cache)) is not None:
            return snapshot
        looked.append(f"the Hugging Face cache {cache}")
        downloaded, outcome = _download(model)
        if downloaded is not None:
            return downloaded
        looked.append(f"the hub ({outcome})")
    raise ConfigError(f"{what} {model!r} was not found; looked for {', '.join(looked)}")


def _hub_cache() -> Path:
    """The hub cache by huggingface_hub's own variables and their order."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{base}/huggingface").expanduser() / "hub"


def _cached_snapshot(cache: Path) -> Path | None:
    ref = cache / "refs" / "main"
    named = [cache / "snapshots" / ref.read_text().strip()] if ref.is_file() else []
    snapshots = cache / "snapshots"
    newest = sorted(snapshots.iterdir(), key=lambda p: p.stat().st_mtime, reverse=True) if snapshots.is_dir() else []
    return next(
        (folder for folder in (*named, *newest) if any((folder / name).exists() for name in ("config.json", "tokenizer.json"))), None
    )


def _download(model: str) -> tuple[Path | None, str]:
    """(folder, how it went)."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return None, "not asked: HF_HUB_OFFLINE is set"
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None, "not asked: huggingface_hub is not installed"
    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja"])), "downloaded"
    except Exception as error:  # any of the hub's and the network's errors means: not available there
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
