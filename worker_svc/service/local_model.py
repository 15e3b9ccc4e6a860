"""The model of a path on a device of this machine, as the shell wants it."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from kernels.cpu_threads import take_threads_from_torch
from pagemill.v1 import worker_pb2
from worker_svc.errors import ConfigError, InvariantError
from worker_svc.model.checkpoint import read_model_config
from worker_svc.model.fingerprint import model_fingerprint
from worker_svc.model.native_operations import NativeOperations
from worker_svc.model.other_ranks import OtherRanks
from worker_svc.model.quantised_operations import QuantisedOperations
from worker_svc.model.weights import LoadedModel, load_model
from worker_svc.runtime.kv_form import KV_DTYPES, KvForm, choose_kv_form
from worker_svc.runtime.memory_budget import MemoryReport
from worker_svc.runtime.start_up import RunnerLimits, make_runner
from worker_svc.service.backends import check_block_size, choose_operations
from worker_svc.service.devices import choose_dtype, describe_device, usable_devices
from worker_svc.service.load_progress import LoadProgress
from worker_svc.service.local_adapters import AdapterSettings, LocalAdapters
from worker_svc.service.logs import Logger
from worker_svc.service.model_host import CacheLimits, StepRunner

QUANTIZATION_BITS: Final = {"none": 0, "int8": 8, "int4": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """What the operator says of model, device and memory; see WorkerSettings."""

    model_path: str
    device: str
    dtype: str
    kv_cache_dtype: str
    attention_backend: str
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    num_gpu_blocks_override: int | None
    quantization: str = "none"
    calculate_kv_scales: bool = True
    adapters: AdapterSettings = field(default_factory=AdapterSettings)


class LocalModel:
    """A ModelHost over `worker_svc.runtime`."""

    def __init__(self, settings: LocalSettings, log: Logger) -> None:
        """Read what is known without loading.

        Raises: ConfigError if there is no such model or device, or the types do not go together.
        """
        self._settings = settings
        self._path = Path(settings.model_path)
        if not self._path.exists():
            raise ConfigError(f"model_path is {settings.model_path!r}, where nothing is")
        usable = usable_devices(settings.device)
        self._torch_device = usable[0]
        self._dtype = choose_dtype(settings.dtype, self._torch_device)
        if settings.quantization != "none" and self._torch_device.type != "cpu":
            raise ConfigError(
                f"quantization is {settings.quantization!r}, must be 'none' on {settings.device}"
            )
        dtype_name = str(self._dtype).removeprefix("torch.")
        if settings.kv_cache_dtype not in {"auto", dtype_name, *KV_DTYPES}:
            raise ConfigError(
                f"kv_cache_dtype is {settings.kv_cache_dtype!r}, must be 'auto', the dtype "
                f"({dtype_name!r}), or one of {', '.join(KV_DTYPES)}"
            )
        self._kv_dtype = KV_DTYPES.get(settings.kv_cache_dtype, self._dtype)
        config = read_model_config(self._path)
        self._head_dim = config.head_dim
        self._log = log
        self._loaded: LoadedModel | None = None
        self.adapters = LocalAdapters(settings.adapters, self._dtype, self._torch_device)
        self._kv_form: KvForm | None = None
        self._ranks: OtherRanks | None = None
        self._usable = tuple((describe_device(device), device) for device in usable)
        self.device = self._usable[0][0]
        self.model = worker_pb2.ModelFacts(
            fingerprint=model_fingerprint(self._path, settings.quantization),
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            dtype=dtype_name,
            kv_dtype=str(self._kv_dtype).removeprefix("torch."),
            max_position_embeddings=config.max_position_embeddings,
            kv_groups=[
                worker_pb2.KvGroup(
                    num_layers=len(group.layers),
                    num_kv_heads=config.num_kv_heads,
                    head_dim=config.head_dim,
                    sliding_window=group.window or 0,
                )
                for group in config.kv_groups
            ],
        )

    @property
    def devices(self) -> tuple[worker_pb2.Device, ...]:
        """As `ModelHost.devices`."""
        if self._loaded is not None:
            return (self.device,)
        return tuple(device for device, _ in self._usable)

    def use(self, uuid: str) -> None:
        """As `ModelHost.use`."""
        for device, torch_device in self._usable:
            if device.uuid == uuid and torch_device != self._torch_device:
                self.device, self._torch_device = device, torch_device

    def load(self, ranks: OtherRanks | None = None) -> None:
        """Choose an attention backend, read the weights and, alone, find the KV scales; once.

        Raises: ConfigError if the backend that was asked for does not serve the model here; as
            ModelError, if the files are damaged.
        """
        if self._loaded is None or self._ranks is not ranks:
            # Another part than before: what is there makes room first.
            self._loaded, self._ranks = None, ranks
            wanted, device = self._settings.attention_backend, self._torch_device
            self.adapters.begin(device)
            operations = choose_operations(
                wanted, device, self._dtype, self._head_dim, self._log, kv_dtype=self._kv_dtype
            )
            if bits := QUANTIZATION_BITS[self._settings.quantization]:
                operations = QuantisedOperations(bits, self._dtype)
            progress = LoadProgress(sys.stderr, self._log)
            self._loaded = load_model(
                self._path, self._dtype, device, operations, ranks, progress, self.adapters.bank
            )
            self._say_what_few_bits_became(self._loaded)
            self._kv_form = None
            if self._loaded.ranks.shard.is_whole:
                self.agree()
            if isinstance(operations, NativeOperations):
                take_threads_from_torch()

    def agree(self) -> None:
        """As `ModelHost.agree`: find the KV scales, which may take a step of all ranks."""
        if self._loaded is None:
            raise InvariantError("ranks agree before the model is loaded")
        self._kv_form = choose_kv_form(
            self._loaded,
            self._kv_dtype,
            self._kv_form,
            measures=self._settings.calculate_kv_scales,
        )
        if self._kv_form.lacks_scales:
            self._log.warning(
                "keys and values have scales of 1: the checkpoint brings none, and "
                "calculate_kv_scales is off"
            )

    def _say_what_few_bits_became(self, loaded: LoadedModel) -> None:
        dtype, size = str(self._dtype).removeprefix("torch."), self._dtype.itemsize
        kept, found = loaded.kept, loaded.dequantised
        if kept is not None and kept.num_matrices:
            self._log.info(
                "quantised weights are kept",
                matrices=kept.num_matrices,
                bytes=kept.num_bytes,
                bytes_if_plain=kept.num_weights * size,
                dtype=dtype,
            )
        if found is not None:
            reasons = {} if kept is None else kept.refused
            self._log.info(
                "quantised weights were dequantised at loading",
                quant_method=found.method,
                matrices=found.num_matrices,
                bytes_in_file=found.file_bytes,
                bytes_if_dequantised=found.num_weights * size,
                dtype=dtype,
                reasons="; ".join(f"{count} since {why}" for why, count in reasons.items()),
            )

    def make_runner(self, limits: CacheLimits) -> tuple[StepRunner, MemoryReport]:
        """Measure memory and make an empty cache.

        Raises: ConfigError if a limit does not fit the model or the memory; InvariantError
            before `load`.
        """
        if self._loaded is None or self._kv_form is None:
            raise InvariantError("a runner is wanted before the model is loaded")
        settings = self._settings
        runner_limits = RunnerLimits(
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            kv_cache_memory_bytes=settings.kv_cache_memory_bytes,
            num_gpu_blocks_override=limits.num_blocks_override or settings.num_gpu_blocks_override,
            gpu_memory_utilization=settings.gpu_memory_utilization,
        )
        reserve = self.adapters.reserve(limits.max_adapters)
        runner, report = make_runner(
            self._loaded, runner_limits, self._kv_form, self.adapters.bank, reserve
        )
        # Ranks tell each other what was sampled, for which they wait; and only a ModelRunner
        # tells adapters which tokens are whose.
        is_alone = self._loaded.ranks.shard.is_whole and self.adapters.bank is None
        if self._torch_device.type == "cpu" or not is_alone:
            return runner, report
        check_block_size(limits.block_size)
        # Triton takes a second to import, and a worker on a CPU has no use for it.
        from worker_svc.runtime.device_runner import DeviceRunner  # noqa: PLC0415

        beside = DeviceRunner(self._loaded.model, runner)
        beside.record_graphs()
        return beside, report


def set_threads(num_threads: int | None, *, leave_one: bool = False) -> None:
    """Use so many threads for one CPU operation, and one for running operations side by side.

    Called once, before torch computes anything. None: as torch would, which is every core. With
    `leave_one` and more than one core, one is then left to the scheduler and the clients: torch's
    threads wait for each other at every barrier, and for one that shares its core with them
    longest. Threads of the native kernels wait for nobody (docs/performance.md).
    """
    if num_threads is None:
        num_threads = torch.get_num_threads()
        if leave_one and num_threads >= (os.cpu_count() or 1):
            num_threads = max(1, num_threads - 1)
    torch.set_num_threads(num_threads)
    torch.set_num_interop_threads(1)
