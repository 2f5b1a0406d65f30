"""What a body asks to continue, as token ids: texts, ids, or a chat through its template. Knows no engine."""

from __future__ import annotations

from typing import Any

from rvllm.api.front import Prompt, Served
from rvllm.api.requests import ChatBody, CompletionBody, SamplingBody, TokenizeBody
from rvllm.errors import BadRequest, PromptTooLong

SHRINKAGE = 4
"""How much shorter than a text its normal form may be: three characters may become one."""

TEMPLATE_ARGUMENTS = (
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
    "content_format", "self",
)  # fmt: skip


def completion_prompts(served: Served, body: CompletionBody) -> list[Prompt]:
    """The prompts of a completion, in the order given. Raises BadRequest."""
    given = body.prompt
    if given is None:
        raise BadRequest("prompt is missing", param="prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(item) is int for item in given)):
        given = [given]
    if not isinstance(given, list) or not given:
        raise _wrong_prompt()
    if all(isinstance(item, str) for item in given):
        special = body.add_special_tokens is not False
        if body.truncate_prompt_tokens is None:
            _check_characters(served, given)
        return [Prompt(text, tuple(encoded(served, text, special))) for text in given]
    if all(isinstance(item, list) and all(type(token) is int for token in item) for item in given):
        return [Prompt(None, tuple(ids)) for ids in given]
    raise _wrong_prompt()


def _check_characters(served: Served, texts: list[str]) -> None:
    """Raise PromptTooLong for a text that cannot fit however it is encoded, which would take seconds for megabytes."""
    length = served.facts.limits.max_model_len
    most = length * served.tokenizer.longest_token * SHRINKAGE
    longest = max(map(len, texts))
    if longest > most:
        raise PromptTooLong(
            f"the prompt has {longest:,} characters, which are more than the context's {length:,} tokens",
            param="prompt",
            hint="shorten the prompt, or raise --max-model-len where the model allows it",
        )


def encoded(served: Served, text: str, special: bool) -> list[int]:
    """A raw prompt's ids; special tokens' text in it is special tokens."""
    try:
        return served.tokenizer.encode(text, add_special_tokens=special)
    except BadRequest as cause:
        raise BadRequest(cause.message, param="prompt", hint=cause.hint) from None


def chat_ids(served: Served, body: ChatBody | TokenizeBody, tools: Any = None) -> list[int]:
    """A conversation's ids through the chat template. Raises BadRequest."""
    more = dict(body.chat_template_kwargs or {})
    if clash := sorted(set(more).intersection(TEMPLATE_ARGUMENTS)):
        raise BadRequest(f"chat_template_kwargs must not set {clash[0]}", param="chat_template_kwargs")
    if isinstance(body, ChatBody):
        more = dict(served.template_kwargs) | more | {"documents": body.documents}
        if body.reasoning_effort is not None:
            more["reasoning_effort"] = body.reasoning_effort
    if body.messages is None:
        raise BadRequest("messages is missing", param="messages")
    goes_on = bool(body.continue_final_message)
    begins = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    return served.tokenizer.apply_chat_template(
        body.messages,
        tools=tools,
        add_generation_prompt=begins,
        continue_final_message=goes_on,
        chat_template=body.chat_template,
        content_format=served.content_format,
        **more,
    )


def tokenize_ids(served: Served, body: TokenizeBody) -> list[int]:
    if body.prompt is None:
        return chat_ids(served, body, body.tools)
    return encoded(served, body.prompt, body.add_special_tokens is not False)


def cut(served: Served, body: SamplingBody, prompts: list[Prompt]) -> list[Prompt]:
    """The prompts' last truncate_prompt_tokens tokens, or first; -1: as many as leave room for one more."""
    most = body.truncate_prompt_tokens
    if most is None:
        return prompts
    room = served.facts.limits.max_model_len - 1
    if most != -1 and not 1 <= most <= room:
        raise BadRequest(
            f"truncate_prompt_tokens is {most}, the limit is 1 to {room:,}, or -1", param="truncate_prompt_tokens"
        )
    most = room if most == -1 else most
    kept = slice(most) if body.truncation_side == "right" else slice(-most, None)
    return [prompt if len(prompt.ids) <= most else Prompt(None, prompt.ids[kept]) for prompt in prompts]


def _wrong_prompt() -> BadRequest:
    return BadRequest(
        "prompt must be a text, a list of texts, a list of token ids, or a list of lists of them, and not empty",
        param="prompt",
    )
