"""What a slot's request changes about its logits: bias and penalties, as one entry per id, kept up as tokens come."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...kernels.step import ADJUST, Array
from .types import SlotInit


class Adjustments:
    """Entries of one slot. Those of a row follow from the tokens before its position alone, in whatever steps these were fed."""

    def __init__(self, init: SlotInit) -> None:
        self._init = init
        self.first_position = init.prompt_tokens
        """rows from here on are output; prompt tokens are scored by the model alone"""
        self.follows = bool(init.history)
        """whether entries change as tokens come; else a bias is all, and slots may share it"""
        self._tokens = list(init.history)
        self._reset()

    @staticmethod
    def wanted(init: SlotInit) -> bool:
        return bool(init.logit_bias or init.history)

    def serves(self, init: SlotInit) -> bool:
        """Whether the entries of `init` are these, for good."""
        return not (self.follows or init.history) and (init.logit_bias, init.prompt_tokens) == (self._init.logit_bias, self.first_position)

    def _reset(self) -> None:
        """Entries at the end of the prompt."""
        init = self._init
        bias = dict(init.logit_bias)
        prompt = set(init.history[: init.prompt_tokens]) if init.repetition_penalty != 1.0 else set()
        ids = [*bias, *prompt.difference(bias)]
        self._index = {token: at for at, token in enumerate(ids)}
        self._counts = [0] * len(ids)
        self._entries = np.zeros(len(ids) + 64, ADJUST)
        known = self._entries[: len(ids)]
        known["id"], known["bias"][: len(bias)] = ids, [*bias.values()]
        known["factor"] = [init.repetition_penalty if token in prompt else 1.0 for token in ids]
        self._position = init.prompt_tokens

    def _at(self, token: int) -> int:
        """Where the entry of an id is; it is made if there is none."""
        at = self._index.get(token)
        if at is None:
            at = self._index[token] = len(self._counts)
            self._counts.append(0)
            if at == len(self._entries):
                self._entries = np.concatenate([self._entries, np.zeros(at, ADJUST)])
            self._entries[at] = (token, 0.0, 1.0, 0.0)
        return at

    def feed(self, start: int, token_ids: Sequence[int]) -> None:
        """Tokens from position `start` on are fed; a sequence that is computed anew feeds some that are known."""
        if self.follows:
            assert start <= len(self._tokens), "a token before these was never fed"
            self._tokens += token_ids[len(self._tokens) - start :]

    def at(self, position: int) -> Array:
        """Entries of the row that draws the token at `position`, dtype ADJUST; valid until the next call."""
        if self.follows:
            if position < self._position:
                self._reset()
            for token in self._tokens[self._position : position]:
                self._count(token)
            self._position = position
        return self._entries[: len(self._counts)]

    def _count(self, token: int) -> None:
        init, at = self._init, self._at(token)
        count = self._counts[at] = self._counts[at] + 1
        self._entries["factor"][at] = init.repetition_penalty
        self._entries["subtract"][at] = init.frequency_penalty * count + init.presence_penalty
