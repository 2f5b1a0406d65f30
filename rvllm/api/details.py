"""What vLLM's fields add to OpenAI's replies: token ids, and log-probabilities of the prompt. Knows shapes of JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rvllm.api.front import Choice
from rvllm.text.completion import Delta, Logprobs
from rvllm.text.token_text import TokenTexts

Json = dict[str, Any]

LEAST_LOGPROB = -9999.0
"""Told in place of -inf, which JSON has no word for; as in vLLM."""


@dataclass(slots=True)
class Details:
    """ids: return_token_ids. prompt_top: prompt_logprobs, how many likeliest tokens of each place; None: none.

    of_prompt: whether what is told of a prompt stands in its choices, as in completions, or in the reply.
    """

    texts: TokenTexts
    ids: bool = False
    prompt_top: int | None = None
    of_prompt: bool = True
    _begun: set[int] = field(default_factory=set)
    _untold: dict[int, list[int]] = field(default_factory=dict)

    def of_choice(self, choice: Choice) -> Json:
        """In a choice of a whole reply."""
        ids = {"token_ids": choice.writer.output(choice.index).token_ids} if self.ids else {}
        return (self._prompt(choice) if self.of_prompt else {}) | ids

    def of_reply(self, choices: Sequence[Choice]) -> Json:
        """In a whole reply."""
        return {} if self.of_prompt else self._prompt(choices[0])

    def of_pieces(self, choice: Choice, delta: Delta, pieces: list[Json]) -> None:
        """Put ids into the last of the pieces that a delta became; what has none goes with the next."""
        if not self.ids:
            return
        untold = self._untold.setdefault(choice.index, [])
        untold += delta.token_ids
        if pieces:
            pieces[-1]["token_ids"] = list(untold)
            untold.clear()
            if self.of_prompt and choice.index not in self._begun:
                self._begun.add(choice.index)
                pieces[0]["prompt_token_ids"] = choice.prompt.ids

    def of_chunk(self, choice: Choice) -> Json:
        """In the first chunk of a reply."""
        if not self.ids or self.of_prompt or self._begun:
            return {}
        self._begun.add(choice.index)
        return {"prompt_token_ids": choice.prompt.ids}

    def _prompt(self, choice: Choice) -> Json:
        told: Json = {"prompt_token_ids": choice.prompt.ids} if self.ids else {}
        scores = choice.writer.prompt_logprobs
        if self.prompt_top is not None and scores is not None:
            told["prompt_logprobs"] = [
                None if entry is None else self._place(token, entry, choice.request.params.prompt_logprobs or 0)
                for token, entry in zip(choice.prompt.ids, scores)
            ]
        return told

    def _place(self, token: int, entry: Logprobs, known: int) -> Json:
        """The likeliest and the prompt's own token by their ids; its rank is null where it is not among the `known`."""
        order = list(entry)
        ranks: dict[int, int | None] = {one: rank for rank, one in enumerate(order[: self.prompt_top], 1)}
        own = order.index(token)
        ranks.setdefault(token, own + 1 if own < known else None)
        return {
            str(one): {
                "logprob": max(entry[one], LEAST_LOGPROB),
                "rank": rank,
                "decoded_token": self.texts.of(one)[0],
            }
            for one, rank in ranks.items()
        }


class IdTexts:
    """Stands for TokenTexts where tokens are shown as their ids: return_tokens_as_token_ids."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self.decode = texts.decode

    def of(self, token: int) -> tuple[str, bytes]:
        return f"token_id:{token}", self._texts.of(token)[1]
