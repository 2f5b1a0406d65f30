"""What each field of a body means and what it may hold, for OpenAPI's document. Knows JSON Schema; decodes nothing.

Types are those of the bodies' structs. What stands here beside them is what is checked behind them, from the same
numbers where there are numbers; tests ask a server whether it is true.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rvllm.api.front import MOST_CHOICES
from rvllm.api.prompts import TEMPLATE_ARGUMENTS
from rvllm.api.requests import REFUSED
from rvllm.api.responses import REFUSED as REFUSED_RESPONSES
from rvllm.api.tools import MOST_TOOLS
from rvllm.link.messages import Facts
from rvllm.sampling.params import BIAS_LIMIT, REAL_RANGES, WHOLE_RANGES
from rvllm.sampling.tags import KIND, MOST_TAGS
from rvllm.text.messages import ROLES
from rvllm.text.stop import LONGEST_STOP, MOST_STOPS

Json = dict[str, Any]
Field = tuple[str, Json | None]
"""What it means; its schema but for null, None: that of its type."""

NO_CHANGE = "Accepted: it changes nothing here."
REQUIRED = {
    "CompletionBody": ("prompt",),
    "ChatBody": ("messages",),
    "ResponsesBody": ("input",),
    "MessagesBody": ("messages",),
    "CountBody": ("messages",),
}
"""Fields that a body must have, though its struct has a default, for the sake of what is then said."""

ONE_OF = {"TokenizeBody": ("prompt", "messages")}
EXAMPLES: Mapping[str, Json] = {
    "CompletionBody": {"prompt": "Once upon a time", "max_tokens": 16},
    "ChatBody": {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 60},
    "ResponsesBody": {"input": "Why is the sky blue?", "max_output_tokens": 60},
    "MessagesBody": {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 60},
    "CountBody": {"messages": [{"role": "user", "content": "Why is the sky blue?"}]},
    "TokenizeBody": {"prompt": "Why is the sky blue?"},
    "DetokenizeBody": {"tokens": [1, 2, 3]},
}


def a_list(items: Json, **more: Any) -> Json:
    return {"type": "array", "items": items, **more}


def an_object(required: Sequence[str] = (), **properties: Json) -> Json:
    return {"type": "object", "properties": properties} | ({"required": list(required)} if required else {})


def any_of(*schemas: Json) -> Json:
    return {"anyOf": list(schemas)}


STRING: Json = {"type": "string"}
WORDS: Json = {"type": "string", "minLength": 1}
OBJECT: Json = {"type": "object"}
MAYBE_OBJECT: Json = {"type": ["object", "null"]}
NULL: Json = {"type": "null"}
SWITCH: Json = {"type": ["boolean", "null"]}
STOP: Json = {"type": "string", "minLength": 1, "maxLength": LONGEST_STOP}


def a_text(*kinds: str, key: str = "text") -> Json:
    return an_object(("type", key), type={"enum": list(kinds)}, **{key: STRING})


PARTS = a_list(any_of(a_text("text", "input_text", "output_text"), a_text("refusal", key="refusal")))
ARGUMENTS: Json = {"type": ["string", "object", "null"], "description": "JSON text of an object."}
FUNCTION_CALL = an_object(("name",), name=STRING, arguments=ARGUMENTS)
CALLS = a_list(an_object(("function",), function=FUNCTION_CALL))
MESSAGES = a_list(
    any_of(
        an_object(
            ("role", "content"),
            role={"enum": list(ROLES)},
            content=any_of(STRING, PARTS),
            tool_calls=any_of(CALLS, NULL),
        ),
        an_object(
            ("role", "tool_calls"), role={"const": "assistant"}, content=NULL, tool_calls=CALLS | {"minItems": 1}
        ),
    ),
    minItems=1,
)
FUNCTION = an_object(("name",), name=WORDS, description={}, parameters={"type": ["object", "null"]})
TOOLS = a_list(an_object(("function",), type={"const": "function"}, function=FUNCTION), maxItems=MOST_TOOLS)
NAMED = an_object(("name",), name=STRING)
TOOL_CHOICE = any_of(
    {"enum": ["none", "auto", "required"]}, an_object(("function",), type={"const": "function"}, function=NAMED)
)
TAG_CONTENT = an_object(("type", "json_schema"), type={"const": "json_schema"}, json_schema=OBJECT)
IN_FORMAT = an_object(("begin", "content", "end"), type={"const": "tag"}, begin=WORDS, content=TAG_CONTENT, end=STRING)
TRIGGERED = an_object(
    ("type", "triggers", "tags"),
    type={"const": "triggered_tags"},
    triggers=a_list(WORDS, minItems=1),
    tags=a_list(IN_FORMAT, minItems=1, maxItems=MOST_TAGS),
    at_least_one={"const": False},
    stop_after_first={"type": "boolean"},
)
STRUCTURES = a_list(
    an_object(("begin", "schema", "end"), begin=WORDS, schema=OBJECT, end=STRING), minItems=1, maxItems=MOST_TAGS
)


def tags(*more: str) -> list[Json]:
    """Structural tags in both spellings, with what they need to have besides."""
    kind: Json = {"const": KIND}
    return [
        an_object((*more, "format"), type=kind, format=TRIGGERED),
        an_object(
            (*more, "structures", "triggers"), type=kind, structures=STRUCTURES, triggers=a_list(WORDS, minItems=1)
        ),
    ]


FORMAT = any_of(
    an_object(("type",), type={"enum": ["text", "json_object"]}),
    *tags("type"),
    an_object(
        ("type", "json_schema"), type={"const": "json_schema"}, json_schema=an_object(("schema",), schema=OBJECT)
    ),
)
SCHEMA: Json = {"type": ["object", "string"], "description": "A JSON schema, or the text of one."}
CHOICE = a_list(WORDS, minItems=1)
STRUCTURED = an_object(
    json=any_of(SCHEMA, NULL),
    regex=any_of(WORDS, NULL),
    choice=any_of(CHOICE, NULL),
    grammar=any_of(WORDS, NULL),
    json_object=SWITCH,
    structural_tag=any_of(*tags(), WORDS, NULL),
    disable_any_whitespace=SWITCH,
    disable_additional_properties=SWITCH,
    whitespace_pattern=any_of(WORDS, NULL),
    after=any_of(WORDS, NULL),
) | {"additionalProperties": False}

# OpenAI's Responses API.
ITEMS = a_list(
    any_of(
        an_object(
            ("role", "content"),
            type={"const": "message"},
            role={"enum": list(ROLES)},
            content=any_of(STRING, PARTS),
        ),
        an_object(("type", "name"), type={"const": "function_call"}, name=STRING, arguments=ARGUMENTS),
        an_object(("type", "output"), type={"const": "function_call_output"}, output=any_of(STRING, PARTS)),
        an_object(("type",), type={"const": "reasoning"}),
    ),
    minItems=1,
)  # fmt: skip
FLAT_FORMAT = an_object(("type", "schema"), type={"const": "json_schema"}, schema=OBJECT)
FLAT_FUNCTION = an_object(("type", "name"), type={"const": "function"}, **FUNCTION["properties"])
FLAT_CHOICE = any_of(TOOL_CHOICE["anyOf"][0], an_object(("type", "name"), type={"const": "function"}, name=STRING))

# Anthropic's.
TEXT_BLOCK = a_text("text")
TEXT_BLOCKS = any_of(STRING, a_list(TEXT_BLOCK))
RESULT = an_object(("type",), type={"const": "tool_result"}, tool_use_id={}, content=any_of(TEXT_BLOCKS, NULL))
USE = an_object(("type", "name"), type={"const": "tool_use"}, name=STRING, input={"type": ["object", "null"]})
THOUGHT = an_object(("type",), type={"enum": ["thinking", "redacted_thinking"]})
TURNS = a_list(
    any_of(
        an_object(("role", "content"), role={"const": "system"}, content=TEXT_BLOCKS),
        an_object(
            ("role", "content"),
            role={"const": "user"},
            content=any_of(STRING, a_list(any_of(TEXT_BLOCK, RESULT))),
        ),
        an_object(
            ("role", "content"),
            role={"const": "assistant"},
            content=any_of(STRING, a_list(any_of(TEXT_BLOCK, USE, THOUGHT))),
        ),
    ),
    minItems=1,
)
TOOL = an_object(
    ("name",), type={"const": "custom"}, name=WORDS, description={}, input_schema={"type": ["object", "null"]}
)


def fields(names: Sequence[str], facts: Facts | None, *, trusted: bool = False) -> Mapping[str, Field]:
    """By a field's name, or by BODY.FIELD where a body has it another way.

    facts: None while they are not known. trusted: chat templates of requests are.
    """
    vocabulary: Json = {} if facts is None else {"maximum": facts.limits.vocab_limit - 1}
    context: Json = {} if facts is None else {"maximum": facts.limits.max_model_len - 1}
    scores: Json = {"type": "integer", "minimum": 0} | ({} if facts is None else {"maximum": facts.max_logprobs})
    token: Json = {"type": "integer", "minimum": 0, **vocabulary}
    tokens = a_list(token)
    prompt = tokens | {"minItems": 1}
    biases = {"type": "number", "minimum": -BIAS_LIMIT, "maximum": BIAS_LIMIT}
    ranges: dict[str, Json] = {
        name: {"type": "number", "minimum": low, "maximum": high} for name, (low, high) in REAL_RANGES.items()
    } | {name: {"type": "integer", "minimum": low, "maximum": high} for name, (low, high) in WHOLE_RANGES.items()}
    told: dict[str, Field] = {
        "model": ("The model's name; absent: the first.", {"enum": list(names)}),
        "prompt": (
            "A text, a list of texts, token ids, or a list of lists of them.",
            any_of(STRING, a_list(STRING, minItems=1), prompt, a_list(prompt, minItems=1)),
        ),
        "messages": ("The chat, in OpenAI's form.", MESSAGES),
        "n": ("Completions of each prompt.", ranges["n"] | {"maximum": MOST_CHOICES}),
        "max_tokens": ("A cap; absent: 16 in completions, in chats the end of the context.", ranges["max_tokens"]),
        "max_completion_tokens": ("The same as max_tokens.", ranges["max_tokens"]),
        "min_tokens": ("The text does not end before as many.", ranges["min_tokens"]),
        "temperature": ("0: the likeliest token, else a draw from logits divided by it.", ranges["temperature"]),
        "top_p": ("Draw from the likeliest tokens that have this share together; 0: the likeliest.", ranges["top_p"]),
        "top_k": ("Draw from as many; 0 or -1: from all.", ranges["top_k"]),
        "min_p": ("Draw from tokens that are at least this part as likely as the likeliest.", ranges["min_p"]),
        "presence_penalty": ("Taken off the logits of tokens that were written.", ranges["presence_penalty"]),
        "frequency_penalty": ("The same for each time.", ranges["frequency_penalty"]),
        "repetition_penalty": ("Divides logits of tokens in prompt and text; 1: none.", ranges["repetition_penalty"]),
        "seed": ("The same one draws the same text; -1: none.", ranges["seed"]),
        "stop": ("Texts at which the text ends, before them.", any_of(STOP, a_list(STOP, maxItems=MOST_STOPS))),
        "stop_token_ids": ("Tokens at which it ends.", tokens),
        "ignore_eos": ("The model's own end does not end it.", None),
        "logit_bias": (
            "By token id: what is added to its logit.",
            {"type": "object", "propertyNames": {"pattern": "^[0-9]{1,19}$"}, "additionalProperties": biases},
        ),
        "allowed_token_ids": ("The only tokens that are drawn.", tokens | {"minItems": 1}),
        "bad_words": ("Texts that are not written.", a_list(WORDS)),
        "include_stop_str_in_output": ("The stop text is told.", None),
        "skip_special_tokens": ("Special tokens have no text; on by default.", None),
        "truncate_prompt_tokens": (
            "Keep as many tokens of the prompt; -1: as many as fit.",
            any_of({"const": -1}, {"type": "integer", "minimum": 1, **context}),
        ),
        "truncation_side": ("Where tokens are taken away.", {"enum": ["left", "right"]}),
        "priority": (
            "The lowest goes first, with --scheduling-policy priority.",
            {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        ),
        "cache_salt": ("Share the cache of prompts only with those that have the same.", WORDS),
        "request_id": ("The reply's id has it.", STRING | {"pattern": "^[!-~]{1,128}$"}),
        "stream": ("Reply with events as the text comes.", None),
        "stream_options": ("For stream: true.", None),
        "response_format": ("OpenAI's: the text is JSON, by a schema or any; or a structural tag.", FORMAT),
        "structured_outputs": (
            "vLLM's: json, regex, choice, grammar, json_object or structural_tag, one of them.",
            STRUCTURED,
        ),
        "guided_json": ("structured_outputs.json.", SCHEMA),
        "guided_regex": ("structured_outputs.regex.", WORDS),
        "guided_choice": ("structured_outputs.choice.", CHOICE),
        "guided_grammar": ("structured_outputs.grammar.", WORDS),
        "prompt_logprobs": ("Log-probabilities of the prompt, and of as many likeliest of each place.", scores),
        "return_token_ids": ("Tell ids of prompt and text.", None),
        "return_tokens_as_token_ids": ("Show tokens as token_id:ID.", None),
        "best_of": ("Refused unless it is n.", ranges["n"]),
        "echo": ("The prompt comes first.", None),
        "CompletionBody.logprobs": ("As many likeliest of each token.", scores),
        "add_special_tokens": ("The tokenizer adds what it adds; on by default.", None),
        "logprobs": ("Tell each token's log-probability.", None),
        "top_logprobs": ("As many likeliest of each token; for logprobs: true.", scores),
        "add_generation_prompt": ("The template begins an answer; on by default.", None),
        "continue_final_message": ("The last message is continued.", None),
        "chat_template_kwargs": (
            "Names that the template sees.",
            OBJECT | {"propertyNames": {"not": {"enum": list(TEMPLATE_ARGUMENTS)}}},
        ),
        "documents": ("Handed to the template.", None),
        "reasoning_effort": ("Handed to the template.", None),
        "tools": ("Functions that may be called.", TOOLS),
        "tool_choice": ("Which must be: none, auto, required, or one by name.", TOOL_CHOICE),
        "parallel_tool_calls": ("false: only the first call is told.", None),
        "include_reasoning": ("false: thoughts are not told.", None),
        "return_token_strs": ("Tell how the tokenizer spells each.", None),
        "tokens": ("Token ids.", tokens),
        # The Responses API.
        "input": ("A text, or a list of items.", any_of(STRING, ITEMS)),
        "instructions": ("A system message.", None),
        "max_output_tokens": ("A cap.", ranges["max_tokens"] | {"minimum": 1}),
        "text": (
            "Its format: text, json_object or json_schema.",
            an_object(format=any_of(NULL, FORMAT["anyOf"][0], FLAT_FORMAT)),
        ),
        "reasoning": ("Its effort is handed to the template.", an_object(effort={"type": ["string", "null"]})),
        "ResponsesBody.tools": (
            "Functions that may be called.",
            a_list(FLAT_FUNCTION, maxItems=MOST_TOOLS),
        ),
        "ResponsesBody.tool_choice": (
            "Which must be: none, auto, required, or one by name.",
            FLAT_CHOICE,
        ),
        "ResponsesBody.stream_options": (NO_CHANGE, None),
        "ResponsesBody.store": (NO_CHANGE, None),
        # The Messages API.
        "MessagesBody.max_tokens": ("A cap.", ranges["max_tokens"] | {"minimum": 1}),
        "MessagesBody.service_tier": (NO_CHANGE, None),
        "stop_sequences": ("Texts at which the text ends, before them.", a_list(STOP, maxItems=MOST_STOPS)),
    }
    for body in ("CountBody", "MessagesBody"):
        told |= {
            f"{body}.messages": ("The chat, in Anthropic's form.", TURNS),
            f"{body}.system": ("A system message.", TEXT_BLOCKS),
            f"{body}.tools": ("Tools that may be called.", a_list(TOOL, maxItems=MOST_TOOLS)),
            f"{body}.tool_choice": (
                "Which must be: auto, any, none, or one by name.",
                any_of(
                    an_object(("type",), type={"enum": ["auto", "any", "none"]}),
                    an_object(("type", "name"), type={"const": "tool"}, name=STRING),
                ),
            ),
            f"{body}.thinking": (
                "Becomes the template's enable_thinking.",
                an_object(type={"enum": ["enabled", "disabled", "adaptive", None]}),
            ),
        }
    told |= dict.fromkeys(("user", "metadata", "safety_identifier", "prompt_cache_key"), (NO_CHANGE, None))
    told |= {name: _refused(*given) for name, given in REFUSED.items() if name not in told}
    if trusted:
        told["chat_template"] = ("A Jinja template in place of the model's.", None)
    told |= {f"ResponsesBody.{name}": _refused(*given) for name, given in REFUSED_RESPONSES.items()}
    return told


def _refused(harmless: tuple[Any, ...], why: str) -> Field:
    return f"Refused unless it asks for nothing: {why}.", {"enum": [None, *harmless]}
