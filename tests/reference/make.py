"""Make the project's reference set with Hugging Face transformers, by hand; tests read what it wrote and need no torch.

    pip install torch==2.13.0 transformers==5.24.0 safetensors tokenizers numpy gguf accelerate
    python -m tests.reference.make [--out FOLDER] [--only PATTERN]
    python -m tests.reference.make --smollm2 FILE.gguf

Each case becomes a folder as a hub download has it:

    config.json, config.v5.json   the old spelling, as published, and the same config as transformers 5 writes it
    *.safetensors                 weights, one case in shards with an index
    generation_config.json, tokenizer.json, tokenizer_config.json
    reference.npz                 per prompt i: prompt_i and positions_i (int64), logits_i float32 (positions, vocabulary),
                                  greedy_i 16 ids (EOS ignored), gap_i best minus second logit of each step; where a run
                                  without a cache differs (dynamic NTK): greedy_recompute_i and gap_recompute_i
    reference.json                what was made, in words

Weights are rounded to the dtype they are stored in and the logits computed from those in float32 (eager, CPU), so an
engine that computes in float32 has to agree to about 1e-5. Every parameter is random, norm weights and biases too:
ones and zeros would hide mistakes. The same versions give the same bytes on one kind of CPU.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch  # type: ignore[import-not-found,unused-ignore]
import transformers  # type: ignore[import-not-found,unused-ignore]
from safetensors.torch import load_file, save_file

from tests.reference.cases import CASES, Case
from tests.reference.smollm2 import make_smollm2
from tests.reference.tokenizers_tiny import tiny_tokenizer

NEW_TOKENS = 16
HERE = Path(__file__).parent
# Greedy steps must be no near-ties and no short loops, so that a float32 engine gives the same ids: seeds are tried in turn.
SMALLEST_GAP_IN_DEVIATIONS = 0.02
FEWEST_DISTINCT_TOKENS = 6
SEEDS_TRIED = 300

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Continuation:
    """Greedy ids (NEW_TOKENS,) and, for each, the best logit minus the second."""

    ids: Int64
    gaps: Float32


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the reference set.")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--only", default="*", metavar="PATTERN")
    parser.add_argument("--smollm2", type=Path, metavar="GGUF", help="remake smollm2.json from this file instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if options.smollm2:
        make_smollm2(options.smollm2, options.out / "smollm2.json")
        return
    for name in fnmatch.filter(CASES, options.only):
        info = make_case(name, CASES[name], options.out / name)
        size = sum(file.stat().st_size for file in (options.out / name).iterdir())
        print(f"{name:30s} {size / 1000:6.0f} kB  gap {info['smallest_greedy_gap']:.3f}  seed {info['seed']}")


def make_case(name: str, case: Case, folder: Path) -> dict[str, Any]:
    """Write one case's folder and return what reference.json says."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / "config.json", case.published_config())
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    seed, reference = search_seed(name, case, model)
    write_model(folder, case, model)
    write_tokenizer(folder, case)
    info = {
        "case": name,
        "note": case.note,
        "seed": seed,
        "stored_dtype": case.config["torch_dtype"],
        "computed_in": "float32, eager attention, CPU",
        "smallest_greedy_gap": min(float(array.min()) for key, array in reference.items() if "gap" in key),
        "logit_deviation": float(reference["logits_1"].std()),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    np.savez_compressed(folder / "reference.npz", allow_pickle=False, **reference)
    write_json(folder / "reference.json", info)
    check_both_spellings(folder, reference)
    for file in folder.iterdir():
        file.chmod(0o644)
    return info


def search_seed(name: str, case: Case, model: Any) -> tuple[int, dict[str, npt.NDArray[Any]]]:
    """The first seed whose greedy continuations are clear-cut, with the numbers of the model left filled from it."""
    first = zlib.crc32(name.encode())
    for seed in range(first, first + SEEDS_TRIED):
        fill(model, seed, getattr(torch, case.config["torch_dtype"]))
        reference: dict[str, npt.NDArray[Any]] = {}
        if all(measure(model, index, length, reference) for index, length in enumerate(case.lengths)):
            return seed, reference
    raise SystemExit(f"{name}: none of {SEEDS_TRIED} seeds gives clear-cut greedy continuations")


def fill(model: Any, seed: int, stored: Any) -> None:
    """Draw every parameter and round it to `stored`, kept as float32.

    Not model.to(stored).to(float32): that rounds the rope frequencies too, buffers which no checkpoint stores.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(scaled(name, noise, model.config.tie_word_embeddings).to(stored).to(torch.float32))
    model.tie_weights()


def scaled(name: str, noise: Any, tied: bool) -> Any:
    """Unit noise brought to a size at which every part of the model counts in the logits."""
    if name.endswith("norm.weight"):
        return 1 + 0.2 * noise
    if name.endswith(".bias"):
        return 0.3 * noise
    if "embed_tokens" in name:
        # A tied embedding is kept small, or every step repeats its input token.
        return (0.15 if tied else 0.8) * noise
    writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
    return noise * ((2.5 if tied and writes_residual else 1.3) / noise.shape[-1] ** 0.5)


def measure(model: Any, index: int, length: int, reference: dict[str, npt.NDArray[Any]]) -> bool:
    """Add prompt `index` of `length` tokens to `reference`; False if its continuation is not clear-cut."""
    prompt = np.random.default_rng(1000 + index).integers(5, model.config.vocab_size - 4, length)
    forget_lengths(model)
    logits = logits_of(model, prompt.tolist())
    recomputed = greedy_recomputed(model, prompt.tolist())
    if not clear_cut(recomputed, logits):
        return False
    forget_lengths(model)
    cached = greedy_cached(model, prompt.tolist())
    assert cached.ids[0] == logits[-1].argmax(), "an earlier pass has changed a later one"
    if not clear_cut(cached, logits):
        return False
    positions = np.arange(length) if length <= 9 else np.union1d(np.arange(0, length, 4), length - 1)
    reference[f"prompt_{index}"] = prompt
    reference[f"positions_{index}"] = positions
    reference[f"logits_{index}"] = logits[positions]
    reference[f"greedy_{index}"], reference[f"gap_{index}"] = cached.ids, cached.gaps
    if not np.array_equal(cached.ids, recomputed.ids):
        assert "dynamic" in str(model.config.rope_parameters), "the cache must not change the tokens"
        reference[f"greedy_recompute_{index}"] = recomputed.ids
        reference[f"gap_recompute_{index}"] = recomputed.gaps
    return True


def forget_lengths(model: Any) -> None:
    """Undo what longer sequences left behind: dynamic rope keeps the base of the longest pass until a short one."""
    logits_of(model, [0])


def clear_cut(continuation: Continuation, logits: Float32) -> bool:
    far = bool(continuation.gaps.min() > SMALLEST_GAP_IN_DEVIATIONS * logits.std())
    return far and len(set(continuation.ids.tolist())) >= FEWEST_DISTINCT_TOKENS


def logits_of(model: Any, ids: list[int]) -> Float32:
    """Logits of every position, float32 (tokens, vocabulary), in one forward pass without a cache."""
    logits: Float32 = model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()
    return logits


def greedy_recomputed(model: Any, ids: list[int]) -> Continuation:
    """Greedy continuation in which every step computes the whole sequence anew."""
    sequence, gaps = list(ids), []
    for _ in range(NEW_TOKENS):
        best = torch.from_numpy(logits_of(model, sequence)[-1]).topk(2)
        sequence.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
    return Continuation(np.array(sequence[len(ids) :], np.int64), np.array(gaps, np.float32))


def greedy_cached(model: Any, ids: list[int]) -> Continuation:
    """Greedy continuation as transformers' own generate gives it, with its cache, EOS ignored."""
    result = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.stack(list(result.logits))[:, 0].float().topk(2).values
    new = result.sequences[0, len(ids) :].numpy().astype(np.int64)
    return Continuation(new, (best[:, 0] - best[:, 1]).numpy())


def write_model(folder: Path, case: Case, model: Any) -> None:
    """Both config spellings, the generation defaults and the weights in their stored dtype."""
    model.to(getattr(torch, case.config["torch_dtype"]))
    model.save_pretrained(folder, **({"max_shard_size": case.shard_size} if case.shard_size else {}))
    (folder / "config.json").replace(folder / "config.v5.json")
    write_json(folder / "config.json", case.published_config())
    ids = {key: case.config[key] for key in ("bos_token_id", "eos_token_id")}
    write_json(folder / "generation_config.json", {**ids, "transformers_version": "4.44.0"})
    if case.messy:
        add_clutter(folder / "model.safetensors", model.config)


def add_clutter(file: Path, config: Any) -> None:
    """What real checkpoints carry besides: old rotary buffers, a copy of the tied head, a draft module's layer."""
    tensors = load_file(file)
    head_dim = config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        frequencies = 1.0 / 10000 ** (torch.arange(0, head_dim, 2).float() / head_dim)
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = frequencies
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    beyond = f"model.layers.{config.num_hidden_layers}.input_layernorm.weight"
    tensors[beyond] = torch.ones(config.hidden_size, dtype=torch.bfloat16)
    save_file(dict(sorted(tensors.items())), file, metadata={"format": "pt"})


def write_tokenizer(folder: Path, case: Case) -> None:
    size = 288 if case.tokenizer == "bytelevel" else 320
    text, config = tiny_tokenizer(case.tokenizer, size)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    write_json(folder / "tokenizer_config.json", config)


def check_both_spellings(folder: Path, reference: dict[str, npt.NDArray[Any]]) -> None:
    """Load what was written through either config and demand the same bits."""
    for config in ("config.json", "config.v5.json"):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=transformers.AutoConfig.from_pretrained(folder / config),
            dtype=torch.float32,
            attn_implementation="eager",
        ).eval()
        for index in prompts_of(reference):
            forget_lengths(model)
            logits = logits_of(model, reference[f"prompt_{index}"].tolist())[reference[f"positions_{index}"]]
            assert np.array_equal(logits, reference[f"logits_{index}"]), (folder.name, config, index)


def prompts_of(reference: dict[str, npt.NDArray[Any]]) -> Iterator[int]:
    return iter(range(sum(key.startswith("prompt_") for key in reference)))


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
