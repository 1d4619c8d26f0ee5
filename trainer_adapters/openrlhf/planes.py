"""The three ways on which OpenRLHF sends a parameter: Ray's collectives, the pair of classes it takes from vLLM, CUDA IPC handles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...rollout.errors import BadRequest, IllegalState


class Plane:
    """One engine's end. Calls block: they are made on threads beside the event loop.

    Args:
        device: where the engine computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ray_group: str | None = None
        self._pair: Any = None
        self._closed_because = ""

    def close(self, reason: str) -> None:
        """Leave the group, and refuse until `join` is called again. Waits for nobody; who still receives fails soon, where it can be."""
        pair, self._pair, self._ray_group, self._closed_because = self._pair, None, None, reason
        if pair is not None and hasattr(pair, "close"):
            pair.close()

    def join(self, master_address: str, master_port: int, rank: int, world_size: int, group_name: str, backend: str, use_ray: bool) -> None:
        """Meet the trainer (rank 0) and the other engines; returns once all are there.

        Raises:
            BadRequest: naming the argument. GroupError, or Ray's own error: somebody did not come in time.
        """
        if not group_name:
            raise BadRequest("group_name must not be empty", field="group_name")
        if not 1 <= rank < world_size:
            raise BadRequest(f"rank_offset must be in [1, world_size) = [1, {world_size}), got {rank}", field="rank_offset")
        if use_ray:
            if backend == "nccl" and self._device.type != "cuda":
                raise BadRequest(
                    f"backend nccl needs engines on a GPU, this one is on {self._device}: --vllm.sync_backend gloo", field="backend"
                )
            from ray.util import collective

            self._pair = None
            if collective.is_group_initialized(group_name):
                collective.destroy_collective_group(group_name)
            collective.init_collective_group(world_size=world_size, rank=rank, backend=backend, group_name=group_name)
            self._ray_group, self._backend = group_name, backend
            return
        from openrlhf.utils.distributed_util import stateless_init_process_group

        self.close("the trainer's group is formed anew")
        self._pair = stateless_init_process_group(master_address, master_port, rank, world_size, self._device)

    def receive(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The parameter that rank 0 broadcasts now."""
        if self._ray_group is not None:
            from ray.util import collective

            on = self._device if self._backend == "nccl" else torch.device("cpu")
            tensor = torch.empty(shape, dtype=dtype, device=on)
            collective.broadcast(tensor, 0, group_name=self._ray_group)
            return tensor
        if self._pair is None:
            why = f" (the last was left: {self._closed_because})" if self._closed_because else ""
            raise IllegalState(f"no group is formed with the trainer{why}: init_process_group comes first")
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        self._pair.broadcast(tensor, src=0, stream=stream)
        return tensor


def open_handle(handles: Mapping[str, Any], device: torch.device) -> torch.Tensor:
    """The tensor that a trainer on this engine's GPU shares: by the GPU's UUID, what torch's `reduce_tensor` gave.

    Raises:
        BadRequest: the engine has no GPU, no trainer shares its, or the handle is not one of torch's.
    """
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    if device.type != "cuda":
        words = "memory of a GPU cannot be opened by an engine on the CPU: --vllm.sync_backend gloo sends it"
        raise BadRequest(f"ipc_handles: {words}", field="ipc_handles")
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    if uuid not in handles:
        raise BadRequest(f"ipc_handles must name this engine's GPU {uuid}, got {', '.join(sorted(handles)) or 'none'}", field="ipc_handles")
    rebuild, args = handles[uuid]
    if rebuild is not rebuild_cuda_tensor:
        raise BadRequest(f"ipc_handles must be of CUDA tensors, got {getattr(rebuild, '__name__', rebuild)}", field="ipc_handles")
    own = list(args)
    own[6] = index  # the trainer's number of the device may be another
    tensor: torch.Tensor = rebuild_cuda_tensor(*own)
    return tensor
