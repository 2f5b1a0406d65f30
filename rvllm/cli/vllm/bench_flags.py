"""What becomes of the flags of `vllm bench serve` that `rvllm benchmark serve` has not. Tables only."""

from __future__ import annotations

from rvllm.cli.vllm.flag import accepted, honoured, refused

FLAGS = (
    *honoured("""
        --header LIST = None
        --metadata LIST = None
        --goodput LIST = None
    """),
    *accepted("tokenizers are read from files, no code is run", """
        --trust-remote-code/ = False
        --tokenizer-mode = auto
    """),
    *accepted("texts are sent as they are", """
        --skip-chat-template/ = False
    """),
    *refused("only streams are measured", """
        --no-stream/ = False
    """),
    *refused("data sets are random, sharegpt and custom, of texts", """
        --enable-multimodal-chat/ = False
        --custom-ensure-client-side-data/ = False
        --spec-bench-output-len = 256
        --spec-bench-category = None
        --timed-trace-chunk-hash-size = 16
        --timed-trace-sec-multiplier = 1
        --timed-trace-label-timestamp = timestamp
        --timed-trace-label-input-length = input_length
        --timed-trace-label-output-length = output_length
        --timed-trace-label-hash-ids = hash_ids
        --blazedit-min-distance = 0
        --blazedit-max-distance = 1
        --asr-max-audio-len-sec = inf
        --asr-min-audio-len-sec = 0
        --random-batch-size = 1
        --no-reranker/ = False
        --random-mm-base-items-per-request = 1
        --random-mm-num-mm-items-range-ratio = 0
        --random-mm-limit-mm-per-prompt = None
        --random-mm-bucket-config = None
        --hf-subset = None
        --hf-split = None
        --hf-name = None
        --hf-output-len = None
        --bfcl-categories = None
        --prefix-repetition-prefix-len = 256
        --prefix-repetition-suffix-len = 256
        --prefix-repetition-num-prefixes = 10
        --prefix-repetition-output-len = 128
        --speed-bench-dataset-subset = qualitative
        --speed-bench-output-len = 4096
        --speed-bench-category = None
        --self-timed/--no-self-timed = None | False
    """, "write the prompts as lines for --dataset-name custom"),
    *refused("beam search is not done", """
        --use-beam-search/ = False
    """),
    *refused("no second stream of requests is sent beside the first", """
        --probe-request-rate = 0
    """),
    *refused("the server is not told to profile", """
        --profile/ = False
    """, "run the server under nsys"),
    *refused("requests are for one model", """
        --lora-modules LIST = None
        --lora-assignment = random
    """),
    *refused("charts are not drawn here", """
        --plot-timeline/ = False
        --timeline-itl-thresholds = 25,50
        --plot-dataset-stats/ = False
    """, "--save-result --save-detailed has all times"),
)  # fmt: skip
"""Flags of `vllm bench serve` that it does not do, and those that take several values."""
