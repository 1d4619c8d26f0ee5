"""A worker_process_setup_hook that lets OpenRLHF's trainer run where there is no GPU: it calls CUDA only to name a device or wait for one.

What DeepSpeed would compile for the CPU is left out, so that the tests need no minutes for it.
"""

import torch


class _Device(str):
    """The CPU, also where OpenRLHF writes "cuda:" before it."""

    def __format__(self, spec):
        return "0"


class _Adam(torch.optim.AdamW):
    """In the place of DeepSpeed's, with its arguments."""

    def __init__(self, params, adam_w_mode=True, bias_correction=True, **options):
        super().__init__(params, **options)


def _before_deepspeed_starts(device):
    import deepspeed.comm.torch
    import deepspeed.ops.adam
    import deepspeed.runtime.engine

    deepspeed.comm.torch.build_shm_op = lambda: None
    deepspeed.ops.adam.FusedAdam = _Adam


def hook():
    import torch.distributed.device_mesh as meshes

    torch.cuda.current_device = lambda: _Device("cpu")
    torch.cuda.current_stream = lambda device=None: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.set_device = _before_deepspeed_starts
    made = meshes.init_device_mesh
    meshes.init_device_mesh = lambda kind, *shape, **names: made("cpu", *shape, **names)
    torch.distributed.init_device_mesh = meshes.init_device_mesh
