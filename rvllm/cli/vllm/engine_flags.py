"""Flags of `vllm serve` about the model and the engine: commands without a server have them too. Data only.

They are those of vLLM 0.33, and of older versions that guides still name. A line is read by `flag.read`.
"""

from __future__ import annotations

from rvllm.cli.vllm.flag import Flag, accepted, honoured, refused

ENGINE: tuple[Flag, ...] = (
    *honoured("""
        --model = smollm2
        --tokenizer = None
        --dtype = auto
        --seed = None
        --max-model-len = None | auto | -1
        --enforce-eager/--no-enforce-eager = False
        --max-logprobs = 20
        --generation-config = auto
        --chat-template = None
        --load-format = auto
        --block-size = None
        --gpu-memory-utilization --device-memory-utilization = 0.92
        --kv-cache-memory-bytes = None
        --kv-cache-dtype = auto
        --num-gpu-blocks-override = None
        --enable-prefix-caching/--disable-prefix-caching = None
        --max-num-batched-tokens = None
        --max-num-seqs = None
        --scheduling-policy = fcfs
        --speculative-config -sc = None
    """),
    *refused("one GPU computes", """
        --tensor-parallel-size -tp = 1
        --pipeline-parallel-size -pp = 1
        --data-parallel-size -dp = 1
        --data-parallel-size-local -dpl = None | 1
        --data-parallel-rank -dpn = None | 0
        --data-parallel-start-rank -dpr = None | 0
        --decode-context-parallel-size -dcp = 1
        --prefill-context-parallel-size -pcp = 1
        --nnodes -n = 1
        --node-rank -r = 0
        --data-parallel-hybrid-lb -dph/--no-data-parallel-hybrid-lb = False
        --data-parallel-external-lb -dpe/--no-data-parallel-external-lb = False
        --data-parallel-multi-port-external-lb -dpm/ = False
        --enable-elastic-ep/--disable-elastic-ep = False
        --elastic-ep-max-dp-size = None
        --enable-fault-tolerance/--disable-fault-tolerance = False
    """, "start one for each GPU, with CUDA_VISIBLE_DEVICES, or take a smaller or quantised model"),
    *refused("the device is the first that CUDA shows", """
        --device-ids = None | 0
    """, "set CUDA_VISIBLE_DEVICES"),
    *refused("processes are not bound to memory nodes", """
        --numa-bind/--no-numa-bind = False
        --numa-bind-nodes LIST = None
        --numa-bind-cpus LIST = None
    """, "run the command under numactl"),
    *accepted("one GPU computes, so there is nothing to distribute", """
        --distributed-executor-backend = None | mp | uni
        --master-addr = 127.0.0.1
        --master-port = 29501
        --distributed-timeout-seconds = None
        --cpu-distributed-timeout-seconds = None
        --dcp-comm-backend = None
        --dcp-q-replicate/--no-dcp-q-replicate = None
        --dcp-kv-cache-interleave-size = 1
        --cp-kv-cache-interleave-size = None
        --data-parallel-address -dpa = None
        --data-parallel-rpc-port -dpp = None
        --data-parallel-backend -dpb = mp
        --enable-hc-sp/--disable-hc-sp = False
        --enable-batch-sharded-sampling/--disable-batch-sharded-sampling = None
        --enable-shm-tensor-arena/--disable-shm-tensor-arena = False
        --dp-sync-interval = 16
        --disable-nccl-for-dp-synchronization/--enable-nccl-for-dp-synchronization = None
        --ray-workers-use-nsight/--no-ray-workers-use-nsight = False
        --disable-custom-all-reduce/--enable-custom-all-reduce = False
        --enable-nccl-comm-suspend/--disable-nccl-comm-suspend = False
        --fault-tolerance-config = None
        --max-parallel-loading-workers = None
        --enable-expert-parallel -ep/--disable-expert-parallel = False
        --enable-ep-weight-filter/--disable-ep-weight-filter = False
        --all2all-backend = allgather_reducescatter
        --enable-eplb/--disable-eplb = False
        --eplb-config = None
        --expert-placement-strategy = linear
        --enable-dbo/--disable-dbo = False
        --ubatch-size = 0
        --dbo-decode-token-threshold = 32
        --dbo-prefill-token-threshold = 512
    """),
    *refused("no code is loaded but rvllm's own", """
        --worker-cls = auto
        --worker-extension-cls = ''
        --scheduler-cls = None
        --logits-processors LIST = None
        --io-processor-plugin = None
        --model-class-overrides = {}
        --reasoning-parser-plugin = ''
    """),
    *accepted("no code of a model's folder is ever run, and no model that is done needs any", """
        --trust-remote-code/--no-trust-remote-code = False
        --code-revision = None
    """),
    *refused("the revision in Hugging Face's cache is taken", """
        --revision = None | main
        --tokenizer-revision = None | main
    """, "name the folder of that snapshot as the model"),
    *refused("models are found in Hugging Face's cache or by their path", """
        --download-dir = None
    """, "set HF_HUB_CACHE to that folder, or name the model's folder"),
    *accepted("nothing is fetched that needs a token", """
        --hf-token = None
    """),
    *refused("the model's own configuration is taken as it is", """
        --hf-overrides = {}
        --hf-config-path = None
        --config-format = auto | hf
        --model-loader-extra-config = {}
        --additional-config = {}
    """, "change config.json in a copy of the model's folder"),
    *refused("the format of the weights is that of their file, nothing is quantised at the start", """
        --quantization -q = None | gguf
        --quantization-config = None
    """, "take a GGUF file (Q4_0 to Q8_0, Q4_K to Q6_K)"),
    *accepted("no deprecated format is read in any case", """
        --allow-deprecated-quantization/--no-allow-deprecated-quantization = False
    """),
    *refused("tokenizer.json or the tokenizer inside a GGUF file is read", """
        --tokenizer-mode = auto | hf | fast
    """, "name a model that has it by --tokenizer"),
    *refused("text is always read and written", """
        --skip-tokenizer-init/--no-skip-tokenizer-init = False
    """),
    *refused("models generate text, there are no pooling models", """
        --runner = auto | generate
        --convert = auto | none
        --task = auto | generate
        --pooler-config = None
    """),
    *refused("models run by rvllm's own programs alone", """
        --model-impl = auto | vllm
    """),
    *refused("it is not done", """
        --enable-return-routed-experts/--disable-return-routed-experts = False
        --return-sampling-mask/--no-return-sampling-mask = False
        --enable-trace-replay/--disable-trace-replay = False
        --enable-prompt-embeds/--disable-prompt-embeds = False
        --enable-sleep-mode/--disable-sleep-mode = False
        --watermark-config = None
        --diffusion-config -dc = None
        --engram-config = None
        --reasoning-config = None
        --aux-output-config = None
        --kv-transfer-config = None
        --kv-events-config = None
        --ec-transfer-config = None
        --weight-transfer-config = None
    """),
    *refused("log-probabilities are those before temperature and penalties", """
        --logprobs-mode = raw_logprobs
    """),
    *refused("sampling defaults come from --generation-config", """
        --override-generation-config = {}
    """, "put them into a generation_config.json and name its folder by --generation-config, or send them in requests"),
    *accepted("random numbers are Philox's, keyed by seed and position: no seed draws what it draws in vLLM", """
        --use-fp64-gumbel/--no-use-fp64-gumbel = False
    """),
    *refused("a model's windows belong to its definition", """
        --disable-sliding-window/--enable-sliding-window = False
    """, "--max-model-len of the window's size does without"),
    *accepted("there is no sleep mode to configure", """
        --sleep-mode-backend = cumem
        --sleep-mode-offload-cudagraph/--no-sleep-mode-offload-cudagraph = False
        --sleep-preserve-parameter-names LIST = []
        --enable-cumem-allocator/--disable-cumem-allocator = False
    """),
    *accepted("weights go from the file's pages to the device, always in one way", """
        --safetensors-load-strategy = None
        --safetensors-prefetch-num-threads = 8
        --safetensors-prefetch-block-size = 16777216
        --ignore-patterns LIST = ['original/**/*']
        --pt-load-map-location = cpu
    """),
    *accepted("progress is shown on a terminal, for what takes over a second; --quiet switches it off", """
        --use-tqdm-on-load/--no-use-tqdm-on-load = True
    """),
    *accepted("kernels are rvllm's own, chosen by GPU and shape", """
        --attention-backend = None
        --attention-config -ac = None
        --disable-cascade-attn/--enable-cascade-attn = None
        --ir-op-priority = None
        --kernel-config = None
        --monokernel/--no-monokernel = False
        --moe-backend = auto
        --linear-backend = auto
        --sparse-indexer-topk-backend = auto
    """),
    *accepted("kernels are compiled ahead of time, there is nothing to compile or tune at the start", """
        --compilation-config -cc = None
        --optimization-level -O = 2 | O2
        --performance-mode = balanced
        --enable-flashinfer-autotune/--disable-flashinfer-autotune = None
        --jit-monitor-mode = warn
        --jit-monitor-verbose/--no-jit-monitor-verbose = False
    """),
    *accepted("there is a graph for every step", """
        --cudagraph-capture-sizes LIST = None
        --max-cudagraph-capture-size = None
        --max-seq-len-to-capture = None
        --max-context-len-to-capture = None
    """),
    *accepted("it is about models with state layers, which are refused when they are loaded", """
        --gdn-prefill-backend = None
        --kda-prefill-backend = None
        --kda-decode-backend = None
        --mamba-backend = triton
        --mamba-ssu-algorithm = None
        --enable-mamba-cache-stochastic-rounding/--disable-mamba-cache-stochastic-rounding = False
        --mamba-cache-philox-rounds = 0
        --mamba-cache-dtype = auto
        --mamba-ssm-cache-dtype = auto
        --mamba-block-size = None
        --mamba-cache-mode = None
        --enable-mamba-shared-prefix-checkpoint/--disable-mamba-shared-prefix-checkpoint = False
        --replayssm-buffer-len = 16
        --use-replayssm/--no-use-replayssm = False
    """),
    *accepted("blocks of the cache are known by 256-bit hashes and kept as long as there is room", """
        --prefix-caching-hash-algo = sha256
        --prefix-cache-retention-interval = 0
        --prefix-match-unit = None
        --swa-bounded-replay/--no-swa-bounded-replay = True
        --disable-hybrid-kv-cache-manager/--enable-hybrid-kv-cache-manager = None
        --use-v2-block-manager/ = True
    """),
    *refused("all layers have the same cache", """
        --kv-cache-dtype-skip-layers LIST = []
        --kv-sharing-fast-prefill/--no-kv-sharing-fast-prefill = False
    """),
    *accepted("every row of an FP8 cache has a scale of its own", """
        --calculate-kv-scales/--no-calculate-kv-scales = False
    """),
    *refused("weights and cache stay on the device", """
        --cpu-offload-gb = 0
        --kv-offloading-size = None | 0
        --offload-backend = auto
        --offload-group-size = 0
    """, "take a quantised model, --kv-cache-dtype fp8, or a lower --max-model-len"),
    *accepted("nothing is offloaded; a sequence that gives way is computed again", """
        --kv-offloading-backend = native
        --cpu-offload-params LIST = set()
        --offload-num-in-group = 1
        --offload-prefetch-step = 1
        --offload-params LIST = set()
        --swap-space = 4 | 0
        --preemption-mode = None | recompute
    """),
    *accepted("only text is read: a request with images or sound is refused", """
        --language-model-only/--no-language-model-only = False | True
        --limit-mm-per-prompt = {}
        --allowed-local-media-path = ''
        --allowed-media-domains LIST = None
        --media-io-kwargs = {}
        --mm-processor-kwargs = None
        --mm-processor-cache-gb = 4 | 0
        --mm-processor-cache-type = lru
        --mm-hasher-algorithm = blake3
        --mm-shm-cache-max-object-size-mb = 128
        --mm-encoder-tp-mode = weights
        --mm-encoder-attn-backend = None
        --mm-encoder-attn-dtype = None
        --mm-encoder-fp8-scale-path = None
        --mm-encoder-fp8-scale-save-path = None
        --mm-encoder-fp8-scale-save-margin = 1.5
        --interleave-mm-strings/--no-interleave-mm-strings = False
        --skip-mm-profiling/--no-skip-mm-profiling = False | True
        --video-pruning-rate = None
        --video-pruning-method = evs
        --mm-tensor-ipc = direct_rpc
        --mm-processor-device = auto
        --mm-ipc-gpu-memory-gb = 0
        --mm-device-do-normalize/--no-mm-device-do-normalize = None
        --disable-chunked-mm-input/--enable-chunked-mm-input = False
        --ec-manager-config = None
    """),
    *refused("only text is read", """
        --enable-mm-embeds/--disable-mm-embeds = False
        --mm-encoder-only/--no-mm-encoder-only = False
    """),
    *refused("there are no adapters", """
        --enable-lora/--disable-lora = None | False
        --default-mm-loras = None
    """, "merge the adapter into the weights"),
    *accepted("there are no adapters to configure", """
        --max-loras = 1
        --max-lora-rank = 16
        --lora-dtype = auto
        --enable-tower-connector-lora/--disable-tower-connector-lora = False
        --max-cpu-loras = None
        --fully-sharded-loras/--no-fully-sharded-loras = False
        --lora-target-modules LIST = None
        --specialize-active-lora/--no-specialize-active-lora = False
        --enable-mixed-moe-lora-format/--disable-mixed-moe-lora-format = False
        --enable-moe-shared-loras/--disable-moe-shared-loras = False
        --max-lora-cls-labels = None
    """),
    *accepted("prompts are always read in pieces, beside what decodes", """
        --enable-chunked-prefill/--disable-chunked-prefill = None | True
        --long-prefill-token-threshold = 0
        --long-prefill-token-threshold-adaptive/--no-long-prefill-token-threshold-adaptive = False
        --prefill-schedule-interval = 1
        --scheduler-reserve-full-isl/--no-scheduler-reserve-full-isl = True
        --watermark = 0
        --max-paddings = None
    """),
    *accepted("the next step starts before this one is read, wherever that can be", """
        --async-scheduling/--no-async-scheduling = None | True
        --num-scheduler-steps = 1
    """),
    *refused("one limit holds for all steps", """
        --max-num-scheduled-tokens = None
    """, "--max-num-batched-tokens"),
    *refused("one limit holds for all sequences", """
        --max-num-active-seqs = None
    """, "--max-num-seqs"),
    *refused("speculation is told in one piece", """
        --spec-method = None
        --spec-model = None
        --spec-tokens = None
    """, """--speculative-config '{"method": "ngram", "num_speculative_tokens": 7}'"""),
    *refused("no traces are sent", """
        --otlp-traces-endpoint = None
        --collect-detailed-traces LIST = None
    """),
    *refused("there is no such metric", """
        --show-hidden-metrics-for-version = None
        --per-request-spec-decode-metrics = none
        --kv-cache-metrics/--no-kv-cache-metrics = False
        --custom-histogram-buckets LIST = None
        --cudagraph-metrics/--no-cudagraph-metrics = False
        --enable-mfu-metrics/--disable-mfu-metrics = False
        --enable-logging-iteration-details/--disable-logging-iteration-details = False
    """),
    *accepted("there are no metrics of single blocks", """
        --kv-cache-metrics-sample = 0.01
    """),
    *refused("there is no profiler inside", """
        --enable-layerwise-nvtx-tracing/--disable-layerwise-nvtx-tracing = False
        --profiler-config = None
    """, "run the command under nsys"),
    *accepted("an engine that ends is known at once to all that wait for it", """
        --watchdog-config = None
    """),
)  # fmt: skip
