"""Text to token ids and back, for one model. Knows special tokens and who wrote them; not where ids go.

In a raw prompt special tokens' text becomes control tokens, as in every engine. In a chat only what the template
writes does: in what a user sent it stays text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

import tokenizers

from rvllm.errors import BadRequest, TokenizerError
from rvllm.model.files import ModelFiles, locate
from rvllm.text.chat_template import ChatTemplate
from rvllm.text.gguf_tokenizer import read_gguf
from rvllm.text.hf_tokenizer import DEFAULT_TEMPLATE, TemplateText, TokenizerParts, read_folder, read_template
from rvllm.text.messages import Message, check_tools, json_escape, map_strings, normalise, unused_character
from rvllm.text.plain_tokens import PlainTexts

_TOOL_TEMPLATE = "tool_use"
_LONG = 4096  # characters


class Tokenizer:
    """A model's tokenizer, safe to use from several threads.

    vocab_size      one more than the greatest id that has a token; ids from there on are padding of the weights
    special_tokens  text -> id of the tokens that decoding hides
    eos_token_ids   eos_token_id first, then other ids that the tokenizer's own file says end a turn
    add_bos         whether encode(add_special_tokens=True) begins with BOS
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._backend = parts.backend
        added = self._backend.get_added_tokens_decoder()
        self.special_tokens: Mapping[str, int] = MappingProxyType(
            {token.content: number for number, token in added.items() if token.special}
        )
        self.special_ids = frozenset(self.special_tokens.values())
        self.vocab_size: int = parts.vocab_size or 1 + max(self._backend.get_vocab().values(), default=-1)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        eos = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*eos, *parts.end_ids)))
        # Of an empty text only what the post-processor adds is left.
        self._post_processor_adds_bos = self._backend.encode("").ids[:1] == [self.bos_token_id]
        self.add_bos = self._post_processor_adds_bos if parts.add_bos is None else parts.add_bos
        if self.add_bos and self.bos_token_id is None:
            raise TokenizerError(f"{parts.origin}: prompts shall begin with a BOS token, but there is no bos_token")
        self._templates = {name: self._compiled(text) for name, text in parts.templates.items()}

    @classmethod
    def from_pretrained(cls, name_or_path: str, *, offline: bool = False) -> Tokenizer:
        """By a model's path or name, found as `locate` finds it. Raises ModelNotFound, TokenizerError."""
        return cls.from_files(locate(name_or_path, offline=offline, progress=None))

    @classmethod
    def from_files(cls, files: ModelFiles) -> Tokenizer:
        """From a folder's tokenizer.json or a GGUF file. Raises TokenizerError, CheckpointError."""
        return cls(read_gguf(files.root) if files.is_gguf else read_folder(files.root))

    def with_chat_template(self, file_or_text: str) -> Tokenizer:
        """The same tokenizer with this chat template only, a file's name or the text. Raises TokenizerError."""
        return Tokenizer(replace(self._parts, templates={DEFAULT_TEMPLATE: read_template(file_or_text)}))

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The template of conversations without tools; None for models that have none."""
        return self._templates.get(DEFAULT_TEMPLATE)

    def info(self) -> dict[str, object]:
        """What clients that make prompts themselves need to know, by the names of tokenizer_config.json."""
        template, added = self.chat_template, self._backend.get_added_tokens_decoder()
        tokens = {f"{name}_token": self._parts.tokens.get(f"{name}_token") for name in ("bos", "eos", "unk", "pad")}
        return tokens | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": self.vocab_size,
            "add_bos_token": self.add_bos,
            "added_tokens_decoder": {
                str(number): {"content": token.content, "special": token.special} for number, token in added.items()
            },
            "chat_template": None if template is None else template.source,
        }

    def check_fits(self, vocab_size: int) -> None:
        """Raises TokenizerError when there are token ids that a model of `vocab_size` rows has no row for."""
        if self.vocab_size > vocab_size:
            raise TokenizerError(
                f"{self._parts.origin} has token ids up to {self.vocab_size - 1:,}, the model's vocabulary ends at "
                f"{vocab_size - 1:,}",
                hint="use the tokenizer that belongs to the model",
            )

    def encode(self, text: str, *, add_special_tokens: bool = False, parse_special: bool = True) -> list[int]:
        """Ids of `text`.

        add_special_tokens: put what the tokenizer puts around a raw prompt, at most one BOS: none is added to a
        text that begins with one itself. parse_special: special tokens' text becomes these tokens, else plain text.
        Characters outside the vocabulary become byte tokens where the tokenizer has them, else its unknown token.
        Raises BadRequest for text that is not valid Unicode.
        """
        backend = self._backend if parse_special else self._literal
        ids: list[int] = self._encoding(backend, text, add_special_tokens).ids
        return self._one_bos(ids) if add_special_tokens else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids without a token nothing."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_of(self, token_id: int) -> str | None:
        """The token as the tokenizer's file spells it; None for an id that has none."""
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def apply_chat_template(
        self,
        messages: object,
        *,
        tools: object = None,
        documents: object = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        content_format: str = "auto",
        **kwargs: object,
    ) -> list[int]:
        """Ids of a conversation in OpenAI's format; `kwargs` are further names for the template.

        No BOS is added: templates write their own. Special-token text in messages, tools or documents stays text.
        content_format: as ChatTemplate.render has it.
        chat_template: used in place of the model's. With tools, the model's `tool_use` template where it has one.
        Raises BadRequest as ChatTemplate.render does, and when there is no template or the given one is broken.
        """
        template = self._template(chat_template, with_tools=check_tools(tools) is not None)
        guard = _Guard(self.special_tokens, normalise(messages), tools, documents, kwargs)
        text = template.render(
            guard.messages,
            tools=guard.tools,
            documents=guard.documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            content_format=content_format,
            kwargs=guard.kwargs,
        )
        # Templates may have written it as ASCII.
        text = text.replace(json_escape(guard.breaker), guard.breaker)
        return self._encode_guarded(text, guard.breaker) if guard.breaker in text else self.encode(text)

    def _encode_guarded(self, text: str, breaker: str) -> list[int]:
        """Ids of `text` in which `breaker` keeps apart what must stay plain text.

        Sections between control tokens keep their ids, but those with a breaker are encoded again without it and
        without special tokens: whole sections, so that nothing changes at the places where breakers were.
        """
        ids: list[int] = []
        section: list[int] = []
        start = 0
        encoding = self._encoding(self._backend, text, False)
        for token_id, (begin, end) in zip(encoding.ids, encoding.offsets):
            # The unknown token is special too, but its text is not what it stands for.
            if token_id in self.special_ids and text[begin:end].strip() == str(self.token_of(token_id)).strip():
                ids += self._section(text[start:begin], section, breaker)
                ids.append(token_id)
                section, start = [], end
            else:
                section.append(token_id)
        return ids + self._section(text[start:], section, breaker)

    def _section(self, text: str, ids: list[int], breaker: str) -> list[int]:
        return self.encode(text.replace(breaker, ""), parse_special=False) if breaker in text else ids

    def _one_bos(self, ids: list[int]) -> list[int]:
        """`ids` from the post-processor with the BOS that is wanted in place of the one that it added."""
        body = ids[1:] if self._post_processor_adds_bos else ids
        if self.add_bos and self.bos_token_id is not None and body[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *body]
        return body

    def _encoding(self, backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            if len(text) > _LONG:
                # Only the call for several texts lets other threads run meanwhile: a megabyte takes a second.
                return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
            return backend.encode(text, add_special_tokens=add_special_tokens)
        except TypeError:
            half = re.search("[\ud800-\udfff]", text)
            if half is None:
                raise
            raise BadRequest(
                f"the text is not valid Unicode: character {half.start():,} is half of a surrogate pair",
                hint="send the whole character, or cut text between characters",
            ) from None

    def _template(self, given: str | None, *, with_tools: bool) -> ChatTemplate:
        if given is not None:
            try:
                return self._compiled(TemplateText(given, "chat_template"))
            except TokenizerError as cause:
                raise BadRequest(cause.message, param="chat_template") from None
        found = self._templates.get(_TOOL_TEMPLATE) if with_tools else None
        found = found or self.chat_template
        if found is None:
            raise BadRequest(
                "the model has no chat template",
                param="messages",
                hint="start with --chat-template, or use completions",
            )
        return found

    def _compiled(self, template: TemplateText) -> ChatTemplate:
        return ChatTemplate(template.text, origin=template.origin, tokens=self._parts.tokens)

    def _id_of(self, role: str) -> int | None:
        text = self._parts.tokens.get(role)
        if text is None:
            return None
        found: int | None = self._backend.token_to_id(text)
        if found is None:
            raise TokenizerError(f"{self._parts.origin} has no token {text!r}, which is to be its {role}")
        return found

    @cached_property
    def plain_texts(self) -> PlainTexts:
        """What those ids add to a text that need not be decoded."""
        return PlainTexts(self._backend)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token as its file spells it, where a character is a byte or more."""
        return max(map(len, self._backend.get_vocab()), default=1)

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """A twin that takes special tokens' text as text. It shares the model, so it costs milliseconds."""
        twin = tokenizers.Tokenizer(self._backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if (value := getattr(self._backend, part)) is not None:
                setattr(twin, part, value)
        added = self._backend.get_added_tokens_decoder()
        twin.add_tokens([added[number] for number in sorted(added)])
        if twin.get_added_tokens_decoder().keys() != added.keys():
            # Ids with gaps between them cannot be added one after the other.
            twin = tokenizers.Tokenizer.from_str(self._backend.to_str())
        twin.encode_special_tokens = True
        return twin


class _Guard:
    """What a user sent, with `breaker` put wherever it could otherwise turn into special tokens.

    After each character of special-token text, and of a text's end that could begin one: a template may join two
    texts. A breaker is a character that nothing sent has, so that taking it out again restores the text.
    Special tokens of a single character cannot be broken; no model is known that has one.
    """

    def __init__(
        self,
        special_tokens: Mapping[str, int],
        messages: list[Message],
        tools: object,
        documents: object,
        kwargs: Mapping[str, object],
    ) -> None:
        self._texts = frozenset(text for text in special_tokens if len(text) > 1)
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        self._starts = frozenset(text[:end] for text in self._texts for end in range(1, len(text)))
        firsts = "".join(sorted({re.escape(text[0]) for text in self._texts}))
        self._first = re.compile(f"[{firsts}]") if firsts else re.compile(r"(?!)")
        try:
            self.breaker = unused_character(messages, tools, documents, kwargs)
            self.messages = [self._object(message) for message in messages]
            self.tools, self.documents = map_strings(tools, self._broken), map_strings(documents, self._broken)
            self.kwargs = self._object(kwargs)
        except RecursionError:
            raise BadRequest("the messages are nested too deeply", param="messages") from None

    def _object(self, value: Mapping[str, object]) -> Message:
        return {self._broken(key): map_strings(item, self._broken) for key, item in value.items()}

    def _broken(self, text: str) -> str:
        found = []
        start = 0
        for match in self._first.finditer(text):
            at = match.start()
            if at < start or not (length := self._dangerous_length(text, at)):
                continue
            found.append(text[start:at])
            found += [character + self.breaker for character in text[at : at + length]]
            start = at + length
        return "".join(found) + text[start:] if found else text

    def _dangerous_length(self, text: str, at: int) -> int:
        """Length of the special-token text at `at`, or of the text's end if one could begin there; else 0."""
        for length in self._lengths:
            if text[at : at + length] in self._texts:
                return length
        left = len(text) - at
        return left if left < self._lengths[0] and text[at:] in self._starts else 0
