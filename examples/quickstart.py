"""Sample from a model in this process: python examples/quickstart.py MODEL (a folder, a .gguf file, or a hub id)."""

import sys

from rollsync import Engine, SamplingParams


def main(model: str) -> None:
    prompts = ["The sea at night is", "The first thing a baker does is"]
    params = SamplingParams(n=2, max_tokens=24, temperature=0.8, seed=1)
    with Engine(model) as engine:
        for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
            for sample, text in zip(output.samples, output.texts, strict=True):
                mean = sum(sample.logprobs) / len(sample.logprobs)
                print(f"{prompt}{text!r}  ({len(sample.token_ids)} tokens, mean logprob {mean:.3f}, seed {sample.seed})")


if __name__ == "__main__":
    main(sys.argv[1])
