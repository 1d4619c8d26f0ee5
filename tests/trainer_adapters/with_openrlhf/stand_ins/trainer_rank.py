"""Rank 0 of OpenRLHF's trainer on the CPU: its own code that meets the engines and sends weights, around a model of transformers."""

from types import SimpleNamespace as Space

import ray
import torch


class _Stream:
    """What `torch.cuda.current_stream()` gives where there is no GPU."""


def without_gpu():
    """Let code run that calls CUDA only to wait for it, or to name a device."""
    torch.cuda.current_stream = lambda device=None: _Stream()
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: "cpu"


@ray.remote(num_cpus=1)
class TrainerRank:
    """One with the weights of a folder, in float32."""

    def __init__(self, folder):
        import torch.distributed as dist
        from transformers import AutoModelForCausalLM

        without_gpu()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        args = Space(
            vllm=Space(tensor_parallel_size=1, enable_prefix_caching=True, sync_with_ray=False),
            ds=Space(zero_stage=2, tensor_parallel_size=1),
        )
        self.trainer = Space(
            strategy=Space(args=args), use_cuda_ipc=False, actor=Space(model=Space(module=self.model), is_vlm=False)
        )

    def meet(self, engines, backend="nccl"):
        from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

        self.trainer.vllm_engines, self.trainer.strategy.args.vllm.num_engines = engines, len(engines)
        ActorPPOTrainer._init_vllm_sync_group(self.trainer, backend)

    def change(self, by, name=None):
        """Add to all parameters, or to one of them."""
        with torch.no_grad():
            for key, parameter in self.model.named_parameters():
                if name in (None, key):
                    parameter.add_(by)

    def sync(self):
        from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

        ActorPPOTrainer.broadcast_to_vllm(self.trainer)

    def weights(self):
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def rename(self, old, new):
        """Give a module's parameter another name, as a wrong wrapper would."""
        parent, _, last = old.rpartition(".")
        module = self.model.get_submodule(parent)
        module.register_parameter(new, module._parameters.pop(last))


    def cast(self, dtype):
        self.model.to(getattr(torch, dtype))

    def drop(self, name):
        """Lose a parameter, as a wrong filter would."""
        parent, _, last = name.rpartition(".")
        del self.model.get_submodule(parent)._parameters[last]


@ray.remote(num_cpus=1)
class RaySender:
    """What OpenRLHF's rank 0 does with `--vllm.sync_with_ray`: one collective of Ray a parameter."""

    def sync(self, folder, engines, by):
        import ray.util.collective as collective
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        size, group = len(engines) + 1, "openrlhf"
        how = {"backend": "gloo", "use_ray": True}
        refs = [engine.init_process_group.remote("127.0.0.1", 0, i, size, group, **how) for i, engine in enumerate(engines, 1)]
        collective.init_collective_group(world_size=size, rank=0, backend="gloo", group_name=group)
        ray.get(refs, timeout=60)
        parameters = list(model.named_parameters())
        for i, (name, parameter) in enumerate(parameters, 1):
            parameter.data.add_(by)
            what = {"dtype": parameter.dtype, "shape": parameter.shape, "empty_cache": i == len(parameters)}
            refs = [engine.update_weight.remote(name, **what) for engine in engines]
            collective.broadcast(parameter.data, 0, group_name=group)
            ray.get(refs, timeout=60)
        return {name: parameter.detach().clone() for name, parameter in parameters}
