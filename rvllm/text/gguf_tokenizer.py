"""A tokenizer from a GGUF file's metadata, equal to the one the model was trained with. Knows keys; encodes nothing.

Keys and token types: the GGUF specification, `tokenizer.ggml.*`. Two kinds are read:
    gpt2    byte-level BPE from tokens and merges; `pre` names how text is split first
    llama   SentencePiece's BPE from tokens and scores: of all adjacent pieces those whose join scores best merge
            first, so merges are ranked by the score of what they make, not by its id
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from rvllm.errors import TokenizerError
from rvllm.model.gguf import GgufFile
from rvllm.text.hf_tokenizer import DEFAULT_TEMPLATE, TemplateText, TokenizerParts

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_BLANK = "\u2581"
_TEMPLATE_KEY = "tokenizer.chat_template"

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


@dataclass(frozen=True, slots=True)
class _Split:
    """How a `pre` splits text. `regex` None: GPT-2's own; `whole`: a piece that is a token needs no merges."""

    regex: str | None = None
    single_digits: bool = False
    compose: bool = False
    whole: bool = False
    add_bos: bool = False


_GPT2 = _Split()
_LLAMA3 = _Split(_LLAMA3_SPLIT, whole=True, add_bos=True)
_QWEN2 = _Split(_QWEN2_SPLIT, compose=True)
_SPLITS = {
    "default": _GPT2, "gpt-2": _GPT2, "smollm": _Split(single_digits=True),
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
}  # fmt: skip


def read_gguf(path: Path) -> TokenizerParts:
    """The tokenizer in the GGUF file `path`. Raises CheckpointError or TokenizerError."""
    return from_metadata(GgufFile.open(path).metadata, origin=str(path))


def from_metadata(metadata: Mapping[str, object], *, origin: str) -> TokenizerParts:
    """The tokenizer that `metadata`, a GGUF file's keys and values, describes; `origin` is for messages.

    Raises TokenizerError: no tokenizer in it, of a kind that is not supported, or inconsistent.
    """
    keys = _Keys(metadata, origin)
    kind = keys.text("model")
    if kind == "gpt2":
        backend, adds_bos = _byte_level(keys)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(keys), True
    elif kind is None:
        raise TokenizerError(f"{origin} has no tokenizer", hint="give one with --tokenizer")
    else:
        raise keys.wrong(f"the tokenizer model {kind!r} is not supported", hint="supported are gpt2 and llama")
    tokens = _special_texts(keys)
    _add_tokens(backend, keys, set(tokens.values()))
    template = metadata.get(_TEMPLATE_KEY)
    return TokenizerParts(
        backend=backend,
        origin=origin,
        tokens=tokens,
        templates={DEFAULT_TEMPLATE: TemplateText(template, f"{origin}, {_TEMPLATE_KEY}")}
        if isinstance(template, str)
        else {},
        add_bos=keys.flag("add_bos_token", adds_bos and "bos_token" in tokens),
        end_ids=tuple(keys.ids("eot_token_id", "eom_token_id").values()),
        vocab_size=len(keys.tokens),
    )


class _Keys:
    """The tokenizer's part of a GGUF file's metadata, with its types checked."""

    def __init__(self, metadata: Mapping[str, object], origin: str) -> None:
        self._metadata = metadata
        self._origin = origin
        self.tokens = self._list("tokens", str)
        self.types = self._list("token_type", int) or [_NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise self.wrong(f"it has {len(self.tokens):,} tokens but {len(self.types):,} token types")
        if len(set(self.tokens)) != len(self.tokens):
            raise self.wrong("two of its tokens have the same text")

    def wrong(self, message: str, *, hint: str | None = None) -> TokenizerError:
        return TokenizerError(f"{self._origin}: {message}", hint=hint)

    def text(self, key: str) -> str | None:
        value = self._metadata.get(_PREFIX + key)
        return value if isinstance(value, str) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(_PREFIX + key, default)
        if not isinstance(value, bool):
            raise self.wrong(f"{_PREFIX}{key} must be a boolean, it is {value!r}")
        return value

    def ids(self, *keys: str) -> dict[str, int]:
        """Those of `keys` that are set, each the id of a token."""
        found = {}
        for key in keys:
            value = self._metadata.get(_PREFIX + key)
            if value is None:
                continue
            if not isinstance(value, int) or not 0 <= value < len(self.tokens):
                raise self.wrong(f"{_PREFIX}{key} is {value!r}, ids are 0 to {len(self.tokens) - 1:,}")
            found[key] = value
        return found

    def merges(self) -> list[tuple[str, str]]:
        pairs = [merge.partition(" ")[::2] for merge in self._list("merges", str)]
        if not pairs:
            raise self.wrong("it has no merges", hint="convert the model again with a newer converter")
        return pairs

    def scores(self) -> list[float]:
        found = self._list("scores", float)
        if len(found) != len(self.tokens):
            raise self.wrong(f"it has {len(self.tokens):,} tokens but {len(found):,} scores")
        return found

    def _list(self, key: str, kind: type) -> list:  # type: ignore[type-arg]
        value = self._metadata.get(_PREFIX + key, [])
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self.wrong(f"{_PREFIX}{key} must be a list of {kind.__name__}")
        return value


def _byte_level(keys: _Keys) -> tuple[tokenizers.Tokenizer, bool]:
    """A byte-level BPE tokenizer, and whether its family begins prompts with BOS."""
    pre = keys.text("pre") or "default"
    if pre not in _SPLITS:
        raise keys.wrong(f"the pre-tokenizer {pre!r} is not supported", hint=f"supported are {', '.join(_SPLITS)}")
    split = _SPLITS[pre]
    vocabulary = {token: number for number, token in enumerate(keys.tokens)}
    try:
        model = models.BPE(vocabulary, keys.merges(), ignore_merges=split.whole)
    except Exception as cause:  # the library has no error class of its own
        raise keys.wrong(f"its merges do not fit its tokens: {cause}") from None
    backend = tokenizers.Tokenizer(model)
    if split.compose:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.regex is not None:
        steps.append(pre_tokenizers.Split(Regex(split.regex), behavior="isolated"))
    add_blank = keys.flag("add_space_prefix", False)
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=add_blank, use_regex=split.regex is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def _sentencepiece(keys: _Keys) -> tokenizers.Tokenizer:
    """A BPE tokenizer over characters with U+2581 for blanks, and bytes for characters it does not have."""
    vocabulary = {token: number for number, token in enumerate(keys.tokens)}
    unknown = keys.ids("unknown_token_id").get("unknown_token_id")
    if unknown is None and _UNKNOWN in keys.types:
        unknown = keys.types.index(_UNKNOWN)
    model = models.BPE(
        vocabulary,
        _merges_by_score(keys),
        unk_token=None if unknown is None else keys.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    add_blank = keys.flag("add_space_prefix", True)
    prepend = [normalizers.Prepend(_BLANK)] if add_blank else []
    strip = [decoders.Strip(" ", 1, 0)] if add_blank else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _BLANK)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_by_score(keys: _Keys) -> list[tuple[str, str]]:
    """Every way to make a token out of two others, best score first; ties as they are in the file."""
    pieces = {
        token: score
        for token, score, kind in zip(keys.tokens, keys.scores(), keys.types)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    found = []
    for token, score in pieces.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                found.append((-score, left, right))
    return [(left, right) for _, left, right in sorted(found, key=lambda merge: merge[0])]


def _special_texts(keys: _Keys) -> dict[str, str]:
    """The texts of bos_token, eos_token and the like."""
    names = {
        "bos_token_id": "bos_token",
        "eos_token_id": "eos_token",
        "unknown_token_id": "unk_token",
        "padding_token_id": "pad_token",
    }
    return {names[key]: keys.tokens[number] for key, number in keys.ids(*names).items()}


def _add_tokens(backend: tokenizers.Tokenizer, keys: _Keys, special: set[str]) -> None:
    """Make control tokens special, and both them and user-defined ones whole wherever text has them."""
    typed = list(zip(keys.tokens, keys.types))
    control = [token for token, kind in typed if kind in (_CONTROL, _UNKNOWN) or token in special]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    whole = [token for token, kind in typed if kind == _USER_DEFINED and token not in special]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in whole])
