"""A reward for `--reward.remote_url`: the share of vowels in what was sampled."""

import torch


def reward_func(queries, prompts, labels):
    texts = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    rewards = torch.tensor([sum(c in "aeiou" for c in text) / max(1, len(text)) for text in texts])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
