"""A trainer as SGLang's clients are: a process of its own that speaks HTTP, torch.distributed and torch's shared memory.

    python sglang_trainer.py URL

Commands come as lines of JSON on stdin, {"do": NAME, ...}; each is answered by a line.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import secrets
import sys
import threading
import types
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any

import httpx
import torch
import torch.distributed as dist
import torch.multiprocessing
import zmq
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d

torch.multiprocessing.set_sharing_strategy("file_system")


@dataclass
class FlattenedTensorMetadata:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


FlattenedTensorMetadata.__module__ = "sglang.srt.weight_sync.tensor_bucket"
for path in ("sglang", "sglang.srt", "sglang.srt.weight_sync", "sglang.srt.weight_sync.tensor_bucket"):
    sys.modules[path] = types.ModuleType(path)
sys.modules["sglang.srt.weight_sync.tensor_bucket"].FlattenedTensorMetadata = FlattenedTensorMetadata  # type: ignore[attr-defined]


def serialized(value: Any) -> str:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return base64.b64encode(buffer.getvalue()).decode()


def flattened(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    parts, metadata, end = [], [], 0
    for name, tensor in tensors.items():
        part = tensor.flatten().view(torch.uint8)
        metadata.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, end, end + part.numel(), part.numel()))
        parts.append(part)
        end += part.numel()
    return {"flattened_tensor": torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8), "metadata": metadata}


class Trainer:
    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=60)
        self.groups: dict[str, Any] = {}
        self.kept: list[Any] = []

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.http.post(path, json=body)
        return {"status": answer.status_code, **answer.json()}

    def join(self, group: str, path: str = "/init_weights_update_group") -> dict[str, Any]:
        """Meet the engine as torch.distributed's second process group, as slime and AReaL do."""
        if group in self.groups:
            dist.destroy_process_group(self.groups.pop(group))
        store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
        asked = {"master_address": "127.0.0.1", "master_port": str(store.port), "rank_offset": 1, "world_size": 2}
        with self.meanwhile(path, **asked, group_name=group, backend="gloo") as told:
            inner, limit = dist.PrefixStore(group, store), timedelta(seconds=60)
            made = c10d._new_process_group_helper(2, 0, [], dist.Backend("gloo"), inner, group_name=group, timeout=limit)
        self.groups[group] = made[0] if isinstance(made, tuple) else made
        c10d._world.pg_group_ranks[self.groups[group]] = {0: 0, 1: 1}
        self.kept.append(store)
        return told.reply

    def meanwhile(self, path: str, **body: Any) -> Any:
        return _Meanwhile(lambda: self.post(path, **body))

    def broadcast(self, weights: str, group: str, names: list[str] | None, flat: bool = False, **body: Any) -> dict[str, Any]:
        """One bucket: metadata by HTTP, tensors by broadcast."""
        tensors = {n: t for n, t in load_file(weights).items() if names is None or n in names}
        body.setdefault("dtypes", [str(t.dtype).replace("torch.", "") for t in tensors.values()])
        body.setdefault("shapes", [list(t.shape) for t in tensors.values()])
        send = [flattened(tensors)["flattened_tensor"]] if flat else list(tensors.values())
        more = {"load_format": "flattened_bucket"} if flat else {}
        return self._sent(send, group, "/update_weights_from_distributed", names=list(tensors), group_name=group, **more, **body)

    def areal_broadcast(self, weights: str, group: str, names: list[str]) -> dict[str, Any]:
        """The same for AReaL's vLLM servers: the tensors are named, then received."""
        tensors = {n: t for n, t in load_file(weights).items() if n in names}
        dtypes, shapes = [str(t.dtype) for t in tensors.values()], [list(t.shape) for t in tensors.values()]
        self.post("/areal_set_update_weight_meta", names=list(tensors), dtypes=dtypes, shapes=shapes, group_name=group)
        return self._sent(list(tensors.values()), group, "/areal_update_weights_xccl")

    def _sent(self, send: list[torch.Tensor], group: str, path: str, **body: Any) -> dict[str, Any]:
        with self.meanwhile(path, **body) as told:
            try:
                for work in [dist.broadcast(t.contiguous(), 0, group=self.groups[group], async_op=True) for t in send]:
                    work.wait()
            except RuntimeError as error:
                told.error = str(error)
        return told.reply

    def share(self, weights: str, names: list[str] | None, flat: bool = True, **body: Any) -> dict[str, Any]:
        """One bucket as handles of shared memory."""
        tensors = {n: t for n, t in load_file(weights).items() if names is None or n in names}
        value: Any = flattened(tensors) if flat else list(tensors.items())
        more = {"load_format": "flattened_bucket"} if flat else {}
        return self.post("/update_weights_from_tensor", serialized_named_tensors=[serialized(value)], **more, **body)

    def nothing(self, **body: Any) -> dict[str, Any]:
        """slime's filler for a rank that has no bucket."""
        return self.post(
            "/update_weights_from_tensor", serialized_named_tensors=[serialized(flattened({}))], load_format="flattened_bucket", **body
        )

    def serve_parameters(self, weights: str, path: str, ranks: int = 1, bucket_bytes: int = 40_000, spoil: str = "") -> Any:
        """checkpoint-engine's parameter server: for each rank a buffer of two halves, filled in turn, and a socket.

        Args:
            path: the route, /collective_rpc or SGLang's.
            spoil: "name": of a tensor that nobody has; "drop": leave the last bucket out; "die": give up after the first bucket;
                "copy": the buffer's bytes instead of a handle; "own": give up by an exception of its own; "none": send no tensor;
                "parts": a message of two; "leave": say garbage instead of the last word.
        """
        buckets: list[list[tuple[str, torch.Tensor, int]]] = [[]]
        used = 0
        for name, tensor in load_file(weights).items():
            size = -(-tensor.nbytes // 256) * 256
            if buckets[-1] and used + size > bucket_bytes:
                buckets.append([])
                used = 0
            buckets[-1].append((name, tensor, used))
            used += size
        half = max(max(at + t.nbytes for _, t, at in bucket) for bucket in buckets)
        half = -(-half // 256) * 256
        buffers = [torch.empty(2 * half, dtype=torch.uint8).share_memory_() for _ in range(ranks)]
        sockets = [zmq.Context.instance().socket(zmq.REQ) for _ in range(ranks)]
        where = {f"GPU-{rank}": f"ipc://@checkpoint-engine-{rank}-{secrets.token_hex(4)}.sock" for rank in range(ranks)}
        for socket, address in zip(sockets, where.values(), strict=True):
            socket.rcvtimeo, socket.linger = 20_000, 0
            socket.bind(address)
        if path == "/collective_rpc":
            body: dict[str, Any] = {"method": "update_weights_from_ipc", "args": [where], "timeout": 20}
        else:
            body = {"zmq_handles": where, "flush_cache": True, "weight_version": "step 8"}
        with self.meanwhile(path, **body) as told:
            told.error = self._converse(sockets, buffers, half, buckets, spoil)
        for socket in sockets:
            socket.close()
        return told.reply

    def _converse(self, sockets: list[Any], buffers: list[torch.Tensor], half: int, buckets: Any, spoil: str) -> str:
        def say(value: Any) -> None:
            for rank, socket in enumerate(sockets):
                sent = io.BytesIO()
                (pickle.Pickler if spoil == "copy" else ForkingPickler)(sent).dump(value(rank) if callable(value) else value)
                socket.send_multipart([sent.getvalue()] * (2 if spoil == "parts" else 1))

        def hear() -> bytes:
            return b"".join([socket.recv() for socket in sockets])

        try:
            say(lambda rank: torch.multiprocessing.reductions.reduce_tensor(buffers[rank]))
            for i, bucket in enumerate(buckets[: {"drop": -1, "none": 0}.get(spoil)]):
                for _, tensor, at in bucket:
                    begin = i % 2 * half + at
                    for buffer in buffers:
                        buffer[begin : begin + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
                words = hear()
                if words or (spoil in ("die", "own") and i == 1):
                    say(zmq.ZMQBindError("gone") if spoil == "own" else RuntimeError("Some workers failed to update weights"))
                    return words.decode() or "given up"
                entry = [{"name": n, "dtype": t.dtype, "shape": t.shape, "offset": i % 2 * half + at} for n, t, at in bucket]
                if spoil == "name" and i == 1:
                    entry[0]["name"] = "nobody.weight"
                say(entry)
            for end in range(2):  # the handle goes away; the end
                words = hear()
                if words:
                    say(RuntimeError("Some workers failed to update weights"))
                    return words.decode()
                say("garbage" if spoil == "leave" and end else None)
            return hear().decode()
        except zmq.Again:
            return "no answer"


class _Meanwhile:
    """A call that runs while the block does."""

    def __init__(self, call: Any) -> None:
        self.reply: dict[str, Any] = {}
        self.error: str | None = None
        self._thread = threading.Thread(target=lambda: self.reply.update(call()), daemon=True)

    def __enter__(self) -> _Meanwhile:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join(60 if error[0] is None else 0)
        if self.error is not None:
            self.reply["trainer_error"] = self.error


def main() -> None:
    trainer = Trainer(sys.argv[1])
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(trainer, command.pop("do"))(**command)), flush=True)


if __name__ == "__main__":
    main()
