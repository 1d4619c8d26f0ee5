"""transformers' `generate` as a worker (loop.py): prompts of one length as one batch, no prefix cache."""

from __future__ import annotations

from typing import Any

from .loop import Job, serve


class TransformersSide:
    """Plain sampling in bfloat16; the drawn tokens' logprobs are gathered from the logits that `generate` returns."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import torch
        import transformers  # type: ignore[import-not-found,unused-ignore]

        self._torch = torch
        arguments: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "sdpa", **options}
        loader: Any = transformers.AutoModelForCausalLM
        self._model = loader.from_pretrained(model, local_files_only=True, **arguments).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self.facts: dict[str, Any] = {
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "arguments": {name: str(value) for name, value in arguments.items()},
            "threads": torch.get_num_threads(),
        }
        self.ops: dict[str, Any] = {}

    def forget(self) -> None:
        """Nothing is kept between calls."""

    def generate(self, job: Job) -> Any:
        torch = self._torch
        ids_BT = torch.tensor(job["prompts"])
        with torch.inference_mode():
            result = self._model.generate(
                ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=job["n"],
                max_new_tokens=job["max_tokens"],
                output_logits=True,
                return_dict_in_generate=True,
            )
            new_BT = result.sequences[:, ids_BT.shape[1] :]
            columns = [_drawn(torch, logits_BV, new_BT[:, t]) for t, logits_BV in enumerate(result.logits)]
        return new_BT.tolist(), torch.stack(columns, 1).tolist()

    def count(self, outputs: Any) -> tuple[int, int]:
        ids, logprobs = outputs
        return sum(map(len, ids)), sum(map(len, logprobs))

    def extra(self) -> dict[str, Any]:
        return {}


def _drawn(torch: Any, logits_BV: Any, ids_B: Any) -> Any:
    """Log-probabilities of the drawn ids, in float32."""
    return torch.log_softmax(logits_BV.float(), -1).gather(1, ids_B[:, None])[:, 0]


if __name__ == "__main__":
    serve(TransformersSide)
