"""Options that several commands have, or that one has many of: flag, meaning, unit."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

ModelName = Annotated[
    str,
    Argument(
        metavar="MODEL",
        help="demo, demo-gemma, a GGUF file, a Hugging Face directory, or a hub id ORG/NAME.",
    ),
]

# Where a client finds its server.
Server = Annotated[
    str,
    Option(metavar="ADDRESS", help="HOST:PORT or unix:PATH.", envvar="PAGEMILL_SERVER"),
]
DEFAULT_SERVER = "127.0.0.1:50051"
ServedModel = Annotated[str, Option("--model", help="A served name. Unset: the default one.")]
Timeout = Annotated[float, Option(help="Seconds until the answer is given up.")]
Json = Annotated[bool, Option("--json", help="Print one JSON object.")]

Adapter = Annotated[str, Option(help="Name of a loaded adapter. Unset: none.")]

# What a generation is asked to be. Unset: the model's default.
MaxTokens = Annotated[int | None, Option(help="Most tokens to generate.")]
Temperature = Annotated[float | None, Option(help="0 takes the most likely token.")]
TopK = Annotated[int | None, Option(help="Draw from the k likeliest only. 0: all.")]
TopP = Annotated[float | None, Option(help="Draw from the likeliest of this probability.")]
MinP = Annotated[float | None, Option(help="Draw from those this likely, of the likeliest.")]
Seed = Annotated[int | None, Option(help="Makes the draw reproducible.")]
N = Annotated[int | None, Option("--n", help="Sequences for the one prompt.")]
BeamWidth = Annotated[
    int | None, Option(help="Search for the likeliest output with so many beams.")
]
LengthPenalty = Annotated[float | None, Option(help="Of beams: above 0 favours long outputs.")]
EarlyStopping = Annotated[
    str | None, Option(metavar="WHEN", help="Of beams: false, true or never, as in transformers.")
]
NumReturned = Annotated[int | None, Option(help="Of beams: the best to print.")]
PresencePenalty = Annotated[float | None, Option(help="Subtracted once from tokens put out.")]
FrequencyPenalty = Annotated[float | None, Option(help="Subtracted once per occurrence.")]
RepetitionPenalty = Annotated[float | None, Option(help="Divides logits of tokens seen.")]
LogitBias = Annotated[
    list[str] | None, Option(metavar="ID=VALUE", help="Added to this id's logit. Repeatable.")
]
AllowedTokenIds = Annotated[list[int] | None, Option(help="Only these are drawn. Repeatable.")]
BadWords = Annotated[list[str] | None, Option(help="Text that must not appear. Repeatable.")]
MinTokens = Annotated[int | None, Option(help="Tokens before anything ends the output.")]
Logprobs = Annotated[
    int | None, Option(help="Tell log-probabilities, of so many candidates too. Needs --json.")
]
PromptLogprobs = Annotated[int | None, Option(help="The same of the prompt. Needs --json.")]
Echo = Annotated[bool, Option("--echo", help="The output begins with the prompt.")]
Stop = Annotated[list[str] | None, Option(help="Text that ends the output. Repeatable.")]
IgnoreEos = Annotated[bool, Option("--ignore-eos", help="Go on after an end of sequence.")]
System = Annotated[str | None, Option(help="The system message.")]

# How a server is set. Unset: the programs' own default.
Device = Annotated[str | None, Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str | None, Option(help="auto, float32, bfloat16 or float16.")]
KvCacheDtype = Annotated[str | None, Option(help="auto (as dtype), fp8 or fp8_e5m2.")]
CalculateKvScales = Annotated[
    bool | None, Option(help="Measure fp8 scales that no checkpoint brings; else they are 1.")
]
KvCacheMemoryBytes = Annotated[int | None, Option(help="Of the KV cache, whatever is free.")]
AttentionBackend = Annotated[str | None, Option(help="Of the worker: auto, native or torch.")]
Quantization = Annotated[str | None, Option(help="Of linear layers: none, int8 or int4.")]
GpuMemoryUtilization = Annotated[float | None, Option(help="Share of the device's memory.")]
Threads = Annotated[int | None, Option(help="Threads of a CPU operation.")]
Listen = Annotated[str | None, Option(metavar="ADDRESS", help="For clients; port 0: any free.")]
WorkerListen = Annotated[
    str | None, Option(metavar="ADDRESS", help="For workers. Unset: a private socket.")
]
MetricsListen = Annotated[str | None, Option(metavar="ADDRESS", help="Of the Prometheus page.")]
ServedModelName = Annotated[str | None, Option(help="Names in requests, parted by commas.")]
BlockSize = Annotated[int | None, Option(help="Tokens in a KV block.")]
NumGpuBlocksOverride = Annotated[int | None, Option(help="Usable blocks, whatever memory says.")]
MaxModelLen = Annotated[int | None, Option(help="Most tokens of prompt and output.")]
MaxNumSeqs = Annotated[int | None, Option(help="Most sequences in a step.")]
MaxNumBatchedTokens = Annotated[int | None, Option(help="Most tokens in a step.")]
MaxLogprobs = Annotated[int | None, Option(help="Most candidates told at a position.")]
MaxWaitingRequests = Annotated[int | None, Option(help="Most requests in the queue.")]
MaxWaitingTokens = Annotated[int | None, Option(help="Most tokens in the queue.")]
SchedulingPolicy = Annotated[str | None, Option(help="fcfs, priority or fair.")]
TenantWeights = Annotated[str | None, Option(help="NAME=WEIGHT, parted by commas.")]
PriorityAgeing = Annotated[float | None, Option(help="Seconds of waiting worth one priority.")]
PreemptionVictim = Annotated[str | None, Option(help="cheapest or newest.")]
LongPrefillTokenThreshold = Annotated[int | None, Option(help="Most of one request in a step.")]
MaxLongPrefills = Annotated[int | None, Option(help="Most requests above it at once.")]
TensorParallelSize = Annotated[
    int | None,
    Option(
        help="Workers, each with a part of the model's heads.",
        envvar="PAGEMILL_TENSOR_PARALLEL_SIZE",
    ),
]
PipelineDepth = Annotated[int | None, Option(help="Plans in flight, 1 or 2.")]
EnablePrefixCaching = Annotated[bool | None, Option(help="Share blocks of equal prefixes.")]
PrefixCachingHashAlgo = Annotated[
    str | None, Option(help="Of block names: sha256, sha256_cbor, xxhash or xxhash_cbor.")
]
EvictionPolicy = Annotated[str | None, Option(help="lru or reuse-aware.")]
MaxPinnedShare = Annotated[float | None, Option(help="Share of the blocks for pins.")]
EnableKvCacheEvents = Annotated[bool | None, Option(help="Tell which prefixes are cached.")]
KvEventsBuffer = Annotated[int | None, Option(help="Events kept for replay.")]
KvCacheMetrics = Annotated[bool | None, Option(help="Measure how long blocks live.")]
KvCacheMetricsSample = Annotated[float | None, Option(help="Share of blocks measured.")]
HashSeed = Annotated[str | None, Option(help="Of block names; equal where names are compared.")]
AdapterDir = Annotated[
    str | None, Option(metavar="DIRECTORY", help="Adapters lie below it. Unset: none are loaded.")
]
MaxLoras = Annotated[int | None, Option(help="Most adapters at once.")]
MaxLoraRank = Annotated[int | None, Option(help="Largest rank of an adapter.")]
MaxEmbeddingBytes = Annotated[int | None, Option(help="Of embeddings that live requests hold.")]
Speculation = Annotated[str | None, Option(help="off or prompt-lookup; changes no token.")]
NumSpeculativeTokens = Annotated[int | None, Option(help="Most tokens of a draft.")]
WorkerWait = Annotated[float | None, Option(help="Seconds requests wait for a worker.")]
StepTimeout = Annotated[float | None, Option(help="Seconds a step may take.")]
DrainTimeout = Annotated[float | None, Option(help="Seconds requests get after SIGTERM.")]
TraceStepsEvery = Annotated[int | None, Option(help="Trace one step in so many.")]
LogFormat = Annotated[str | None, Option(help="text or json.")]
LogLevel = Annotated[str | None, Option(help="debug, info, warning or error.")]
Config = Annotated[
    Path | None, Option(help="YAML file of these settings.", envvar="PAGEMILL_CONFIG")
]
ReadyTimeout = Annotated[float, Option(help="Seconds until the server must be able to answer.")]
