"""Tiny trained tokenizers for the reference set: byte-level and SentencePiece-style BPE. Knows nothing of models."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

_TEXT = (
    "The quick brown fox jumps over the lazy dog. Once upon a time there was a little model that could not say "
    "much, but it said it quickly. In the beginning the tokens were counted, and the counting was good. "
)
_MORE_TEXT = "def main(): return 0\nnaïve café déjà vu, 12345 67890, 你好世界 привет мир 👋🌍 "

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_INST = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)


def _byte_level(size: int) -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT + _MORE_TEXT], trainer)
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return tokenizer, {**names, "unk_token": None, "chat_template": _CHATML}


def _sentencepiece_style(size: int) -> tuple[Tokenizer, dict[str, Any]]:
    special = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)],
        max_token_length=8,
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    # The trainer knows byte pieces only as special tokens; in a real file they are ordinary pieces.
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] in special]
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None, "unk_token": "<unk>"}
    return tokenizer, {**names, "add_bos_token": True, "chat_template": _INST}


def tiny_tokenizer(kind: str, size: int) -> tuple[str, dict[str, Any]]:
    """tokenizer.json's text and tokenizer_config.json's content; at most `size` tokens, specials first from id 0."""
    tokenizer, config = {"bytelevel": _byte_level, "spm": _sentencepiece_style}[kind](size)
    assert tokenizer.get_vocab_size() <= size, (kind, size, tokenizer.get_vocab_size())
    config |= {
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return tokenizer.to_str(pretty=False), config
