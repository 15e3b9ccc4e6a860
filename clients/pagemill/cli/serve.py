"""`pagemill serve`: a scheduler and its workers on this machine, until a signal."""

import asyncio

import typer

from pagemill.cli import extras, options, processes
from pagemill.cli.model_source import resolve
from pagemill.cli.program_settings import read_config, server_programs
from pagemill.cli.run_folder import run_folder
from pagemill.cli.terminal import say


def serve(
    context: typer.Context,
    model: options.ModelName,
    listen: options.Listen = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    served_model_name: options.ServedModelName = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    max_logprobs: options.MaxLogprobs = None,
    max_waiting_requests: options.MaxWaitingRequests = None,
    max_waiting_tokens: options.MaxWaitingTokens = None,
    scheduling_policy: options.SchedulingPolicy = None,
    tenant_weights: options.TenantWeights = None,
    priority_ageing: options.PriorityAgeing = None,
    preemption_victim: options.PreemptionVictim = None,
    long_prefill_token_threshold: options.LongPrefillTokenThreshold = None,
    max_long_prefills: options.MaxLongPrefills = None,
    block_size: options.BlockSize = None,
    num_gpu_blocks_override: options.NumGpuBlocksOverride = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    kv_cache_memory_bytes: options.KvCacheMemoryBytes = None,
    kv_cache_dtype: options.KvCacheDtype = None,
    calculate_kv_scales: options.CalculateKvScales = None,
    attention_backend: options.AttentionBackend = None,
    quantization: options.Quantization = None,
    enable_prefix_caching: options.EnablePrefixCaching = None,
    prefix_caching_hash_algo: options.PrefixCachingHashAlgo = None,
    eviction_policy: options.EvictionPolicy = None,
    max_pinned_share: options.MaxPinnedShare = None,
    enable_kv_cache_events: options.EnableKvCacheEvents = None,
    kv_events_buffer: options.KvEventsBuffer = None,
    kv_cache_metrics: options.KvCacheMetrics = None,
    kv_cache_metrics_sample: options.KvCacheMetricsSample = None,
    hash_seed: options.HashSeed = None,
    adapter_dir: options.AdapterDir = None,
    max_loras: options.MaxLoras = None,
    max_lora_rank: options.MaxLoraRank = None,
    max_embedding_bytes: options.MaxEmbeddingBytes = None,
    tensor_parallel_size: options.TensorParallelSize = None,
    pipeline_depth: options.PipelineDepth = None,
    speculation: options.Speculation = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    threads: options.Threads = None,
    worker_listen: options.WorkerListen = None,
    worker_wait: options.WorkerWait = None,
    step_timeout: options.StepTimeout = None,
    drain_timeout: options.DrainTimeout = None,
    ready_timeout: options.ReadyTimeout = 600.0,
    metrics_listen: options.MetricsListen = None,
    trace_steps_every: options.TraceStepsEvery = None,
    log_format: options.LogFormat = None,
    log_level: options.LogLevel = None,
    config: options.Config = None,
) -> None:
    """Serve a model: print `ready ADDRESS` when it can answer, and stay until SIGTERM.

    A second signal kills at once. Exit status: 0 after a clean stop, else that of the program
    that ended: 2 for an impossible setting, 137 for one that was killed.
    """
    extras.check_installed(*extras.SERVER)
    file = read_config(config) if config else {}
    found = resolve(model)
    with run_folder() as folder:
        programs = server_programs(
            found, context.params, file, folder, ready_timeout_s=ready_timeout
        )
        status = asyncio.run(processes.serve(programs, folder, _announce))
    raise typer.Exit(status)


def _announce(address: str) -> None:
    try:
        typer.echo(f"ready {address}")
    except OSError as error:
        say(f"ready {address}, but standard output cannot be written: {error}")
