"""A tokenizer as Hugging Face's folders keep it: tokenizer.json and the files beside it. Knows files; encodes nothing.

transformers' AutoTokenizer is no model for this: it rebuilds some classes and then ignores parts of tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from rvllm.errors import TokenizerError
from rvllm.model.files import LFS_HINT, is_lfs_pointer, read_json

DEFAULT_TEMPLATE = "default"
_TEMPLATE_FILE = "chat_template.jinja"
_MORE_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True, slots=True)
class TemplateText:
    """A chat template's source and where it is from, for messages."""

    text: str
    origin: str


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a folder or file says about its tokenizer.

    tokens      bos_token, eos_token, unk_token, ... -> their text, those that are set
    templates   "default", "tool_use", ... -> chat templates
    add_bos     whether raw prompts begin with BOS; None: as the backend's post-processor does
    end_ids     further ids that end a turn, beside eos_token
    vocab_size  one more than the greatest id; None: to be found out, which takes 0.2 s for 130,000 tokens
    """

    backend: tokenizers.Tokenizer
    origin: str
    tokens: Mapping[str, str]
    templates: Mapping[str, TemplateText]
    add_bos: bool | None
    end_ids: tuple[int, ...] = ()
    vocab_size: int | None = None


def read_folder(root: Path) -> TokenizerParts:
    """The tokenizer in folder `root`. Raises TokenizerError: missing, broken, or in a format that is refused."""
    path = root / "tokenizer.json"
    config = _config(root)
    return TokenizerParts(
        backend=_backend(path),
        origin=str(path),
        tokens=_special_tokens(root / "tokenizer_config.json", config),
        templates=_templates(root, config),
        add_bos=_add_bos(config),
    )


def read_template(value: str) -> TemplateText:
    """What --chat-template names: a file, or a template's own text, which has a brace. Raises TokenizerError."""
    if "{" in value:
        return TemplateText(value, "the given chat template")
    path = Path(value).expanduser()
    return TemplateText(_text(path), str(path))


def _backend(path: Path) -> tokenizers.Tokenizer:
    if not path.exists():
        raise _no_tokenizer(path)
    if is_lfs_pointer(path):
        raise TokenizerError(f"{path} is a Git-LFS pointer, not the file itself", hint=LFS_HINT)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as cause:  # the library has no error class of its own
        raise TokenizerError(
            f"{path} is not a readable tokenizer: {cause}", hint="copy the file again from its source"
        ) from None
    # Left over from training in many files; both would change prompts silently.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _no_tokenizer(path: Path) -> TokenizerError:
    other = [name for name in ("tokenizer.model", "tekken.json", "vocab.json") if (path.parent / name).exists()]
    if not other:
        return TokenizerError(f"{path} does not exist", hint="copy it from the model's source, or give --tokenizer")
    return TokenizerError(
        f"{path} does not exist, only {other[0]}, which is not read",
        hint="copy tokenizer.json from a repository of the same model, or convert the model to GGUF with "
        "llama.cpp's convert_hf_to_gguf.py, which keeps its tokenizer",
    )


def _config(root: Path) -> dict[str, object]:
    """tokenizer_config.json, its gaps filled from special_tokens_map.json; both may be missing."""
    paths = (root / "special_tokens_map.json", root / "tokenizer_config.json")
    found: dict[str, object] = {}
    for path in paths:
        if path.exists():
            found |= {key: value for key, value in read_json(path, TokenizerError).items() if value is not None}
    return found


def _special_tokens(path: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Special tokens by role; the files have them as text or as {"content": text, ...}."""
    found = {}
    for key, value in config.items():
        if not key.endswith("_token") or isinstance(value, bool):
            continue
        content = value.get("content") if isinstance(value, dict) else value
        if not isinstance(content, str):
            raise TokenizerError(f'{path}: {key} must be a text or {{"content": text}}, it is {value!r}')
        found[key] = content
    return found


def _add_bos(config: Mapping[str, object]) -> bool | None:
    """add_bos_token counts for the classes that read it; PreTrainedTokenizerFast goes by its post-processor alone."""
    value = config.get("add_bos_token")
    if not isinstance(value, bool) or config.get("tokenizer_class") == "PreTrainedTokenizerFast":
        return None
    return value


def _templates(root: Path, config: Mapping[str, object]) -> dict[str, TemplateText]:
    """Named chat templates; files win over the configuration, as in transformers.

    Where there is the default's file, the configuration's others are ignored too: they would be of an older layout.
    """
    whole = (root / _TEMPLATE_FILE).exists()
    found = {} if whole else _configured_templates(root / "tokenizer_config.json", config.get("chat_template"))
    more = root / _MORE_TEMPLATES
    for path in sorted(more.glob("*.jinja")) if more.is_dir() else ():
        found[path.stem] = TemplateText(_text(path), str(path))
    if whole:
        found[DEFAULT_TEMPLATE] = TemplateText(_text(root / _TEMPLATE_FILE), str(root / _TEMPLATE_FILE))
    return found


def _configured_templates(path: Path, value: object) -> dict[str, TemplateText]:
    if value is None:
        return {}
    listed = [{"name": DEFAULT_TEMPLATE, "template": value}] if isinstance(value, str) else value
    found = {}
    for entry in listed if isinstance(listed, list) else [None]:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise TokenizerError(f'{path}: chat_template must be a text or a list of {{"name": .., "template": ..}}')
        found[name] = TemplateText(text, f"{path}, chat_template")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as cause:
        raise TokenizerError(
            f"{path} cannot be read: {cause.strerror or cause}",
            hint="--chat-template takes a file or a template's text",
        ) from None
    except ValueError as cause:  # a NUL byte in the name, or no UTF-8 in the file
        raise TokenizerError(f"{path} is not UTF-8 text: {cause}") from None
