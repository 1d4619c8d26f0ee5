"""Our server as a process: started on a free port, driven by our own client."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from typing import Any

from .processes import LOAD_DEADLINE_S, Group, Reaper

READY_DEADLINE_S = 60.0


def serve_command(model: str, options: dict[str, Any]) -> list[str]:
    """`rollsync serve` on a free port; engine options become flags."""
    flags = [word for name, value in options.items() for word in ("--" + name.replace("_", "-").replace(".", "-"), str(value))]
    return [sys.executable, "-m", "rollsync.rollout.cli", "serve", model, "--port", "0", *flags]


class Served(Group):
    """A server that is ready, and a client whose connections stay open.

    Attributes:
        ready_s: from the command to /health/ready.
    """

    def __init__(self, reaper: Reaper, model: str, options: dict[str, Any]) -> None:
        super().__init__("rollsync serve", serve_command(model, options), reaper)
        try:
            self.url = self._announced()
            from rollsync import AsyncRolloutClient

            self._runner = asyncio.Runner()
            self._client = AsyncRolloutClient(self.url)
            self._runner.run(self._client.wait_until_ready(READY_DEADLINE_S))
            self.ready_s = time.perf_counter() - self.began
        except BaseException:
            super().close()
            raise

    def _announced(self) -> str:
        """The URL in the line that ends start-up."""
        while True:
            found = re.search(r"listening on (http://\S+)", self.line(LOAD_DEADLINE_S, "starting"))
            if found:
                return found.group(1)

    def generate(self, job: dict[str, Any], *, one_call: bool = False) -> dict[str, Any]:
        """The job's prompts as concurrent calls of one prompt each, or all in one call. Seconds until ids and logprobs are lists."""
        params = {"max_tokens": job["max_tokens"], "seed": job.get("seed"), "ignore_eos": True}
        prompts = job["prompts"]
        calls = [prompts] if one_call else [[prompt] for prompt in prompts]

        async def run() -> tuple[float, list[Any]]:
            began = time.perf_counter()
            results = await asyncio.gather(*(self._client.rollouts(call, job["n"], params) for call in calls))
            return time.perf_counter() - began, results

        seconds, results = self._runner.run(run())
        for error in (p.error for r in results for p in r.results if p.error is not None):
            raise error
        samples = [s for r in results for p in r.results for s in p.samples]
        return {"seconds": seconds, "tokens": sum(len(s.token_ids) for s in samples), "logprobs": sum(len(s.logprobs) for s in samples)}

    def status(self) -> dict[str, Any]:
        return self._runner.run(self._client.status())

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()
        self.process.terminate()
        super().close()
