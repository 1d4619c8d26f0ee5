"""An agent of two turns, as `--train.agent_func_path` takes it."""

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class TwoTurns(AgentInstanceBase):
    def __init__(self):
        self.turns = 0

    async def step(self, states, **kwargs):
        self.turns += 1
        return {
            "rewards": torch.tensor(1.0),
            "scores": torch.tensor(0.5),
            "environment_feedback": " go on ",
            "done": self.turns == 2,
            "sampling_params": None,
            "extra_logs": {"turns": torch.tensor(float(self.turns))},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(TwoTurns)
