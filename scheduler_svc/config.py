"""Every setting of the scheduler: meaning, unit, bound and effect; read once at start."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    CliImplicitFlag,
    CliPositionalArg,
    CliSettingsSource,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from scheduler_svc.errors import ConfigError

ENV_PREFIX = "PAGEMILL_"
DEFAULT_MAX_NUM_SEQS = 256
MIN_TENANT_WEIGHT, MAX_TENANT_WEIGHT = 1e-3, 1e3


def _address(text: str) -> str:
    if text.startswith("unix:"):
        if text == "unix:":
            raise ValueError("must have the path of a socket behind unix:")
        return text
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError("must be HOST:PORT with a port of 0 (any free one) to 65535, or unix:PATH")
    return text


def _names(given: object) -> object:
    """Split a text at commas, so that the environment can hold a list."""
    parts = given if isinstance(given, list) else [given]
    return [name.strip() for part in parts for name in str(part).split(",")]


def _names_are_not_empty(names: list[str]) -> list[str]:
    if not all(names):
        raise ValueError("must be names of at least one character, parted by commas")
    return names


def _entries(given: object) -> object:
    """Take a mapping as NAME=VALUE entries, so that a file can hold one."""
    if isinstance(given, Mapping):
        return [f"{name}={value}" for name, value in given.items()]
    return _names(given)


def _tenant_weights(entries: list[str]) -> list[str]:
    weights = dict[str, float]()
    for entry in entries:
        name, equals, number = entry.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not equals or not MIN_TENANT_WEIGHT <= weight <= MAX_TENANT_WEIGHT:
            raise ValueError(
                "must be NAME=WEIGHT, parted by commas, each weight in "
                f"[{MIN_TENANT_WEIGHT:g}, {MAX_TENANT_WEIGHT:g}]"
            )
        if name in weights:
            raise ValueError(f"must name each tenant once, and names {name!r} twice")
        weights[name] = weight
    return entries


def _tcp_address(text: str) -> str:
    if text.startswith("unix:"):
        raise ValueError("must be HOST:PORT; the page has no Unix socket")
    return _address(text)


Address = Annotated[str, AfterValidator(_address)]
TcpAddress = Annotated[str, AfterValidator(_tcp_address)]


class SchedulerSettings(BaseSettings):
    """The scheduler of Pagemill: clients ask it for tokens, workers dial in to compute them.

    Settings come from their defaults, the YAML file of --config, the environment
    (PAGEMILL_LISTEN and so on) and the command line; what is named later wins.
    """

    # Constructing one reads nothing but its arguments; `read_settings` reads the world.
    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    model_path: CliPositionalArg[str] = Field(min_length=1)
    """GGUF file, or directory with config.json and tokenizer.json. Weights are not read."""

    config: str = ""
    """YAML file of settings by these names. Empty: none."""

    served_model_name: Annotated[
        list[str], NoDecode, BeforeValidator(_names), AfterValidator(_names_are_not_empty)
    ] = []
    """Names that requests may use, the first the default. Unset: the model file's own name."""

    listen: Address = "127.0.0.1:50051"
    """Where clients connect: HOST:PORT or unix:PATH."""

    worker_listen: Address = "127.0.0.1:50052"
    """Where workers dial in: HOST:PORT or unix:PATH. Not for the public."""

    metrics_listen: TcpAddress | None = None
    """HOST:PORT of the Prometheus page. Unset: no page."""

    join_secret: SecretStr = SecretStr("")
    """Workers must show it. Empty: none. PAGEMILL_JOIN_SECRET keeps it out of `ps`."""

    block_size: int = Field(default=16, ge=1, le=1024)
    """Tokens in a KV block. Smaller shares shorter prefixes; larger makes shorter tables."""

    num_gpu_blocks_override: int | None = Field(default=None, ge=1, le=2**24)
    """Usable blocks of a worker, whatever its memory says. Unset: as memory allows."""

    max_model_len: int | None = Field(default=None, ge=2, le=2**31 - 1)
    """Most tokens of a request, prompt and output. Unset: what the model was made for."""

    max_num_seqs: int = Field(default=DEFAULT_MAX_NUM_SEQS, ge=1, le=65536)
    """Most sequences in a step. Lowered to max-num-batched-tokens unless given."""

    max_num_batched_tokens: int = Field(default=2048, ge=1, le=2**24)
    """Most tokens in a step. More raises throughput, and the time between two tokens."""

    max_logprobs: int = Field(default=20, ge=0, le=100)
    """Most candidates that a request may ask for at each position, of output or prompt."""

    max_waiting_requests: int = Field(default=4096, ge=1, le=2**20)
    """Most requests in the queue. Further ones are refused with RESOURCE_EXHAUSTED."""

    max_waiting_tokens: int | None = Field(default=None, ge=1, le=2**40)
    """Most tokens in the queue; one request alone may have more. Unset: any number."""

    scheduling_policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    """Who goes next: by arrival; lower priority first; the tenant with fewest tokens."""

    tenant_weights: Annotated[
        list[str], NoDecode, BeforeValidator(_entries), AfterValidator(_tenant_weights)
    ] = []
    """NAME=WEIGHT of tenants, parted by commas: their shares under fair. Unnamed tenants: 1."""

    priority_ageing: float = Field(default=30.0, ge=0, le=86400, allow_inf_nan=False)
    """Seconds in the queue that lower a request's priority value by one. 0: none do."""

    preemption_victim: Literal["cheapest", "newest"] = "cheapest"
    """Whose blocks are taken when there are too few. Lower priority always goes first. Under
    `cheapest`, rows may pause for some steps first."""

    long_prefill_token_threshold: int = Field(default=0, ge=0, le=2**31 - 1)
    """Most tokens of one request in a step. 0: as many as the step has."""

    max_long_prefills: int = Field(default=0, ge=0, le=65536)
    """Most requests at once with more to compute than that threshold. 0: any number."""

    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)
    """Workers that hold one copy of the model together, each a part of its heads. At most as many
    as the model has query heads."""

    pipeline_depth: int = Field(default=2, ge=1, le=2)
    """Plans in flight. 2 hides the way to the worker; 1 is easier to read in traces."""

    speculation: Literal["off", "prompt-lookup"] = "off"
    """Draft tokens that followed the latest ones when they came before, and verify them in the same
    step. Changes no token."""

    num_speculative_tokens: int = Field(default=4, ge=1, le=16)
    """Most tokens of a draft."""

    enable_prefix_caching: CliImplicitFlag[bool] = True
    """Share blocks among requests with equal prefixes."""

    prefix_caching_hash_algo: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] = "sha256"
    """How blocks get their names: sha256 or xxhash; with _cbor equal to vLLM's names. xxhash is
    faster, and for trusted input of a single tenant only."""

    eviction_policy: Literal["lru", "reuse-aware"] = "lru"
    """Which idle block dies first. lru: used longest ago. reuse-aware: hit least."""

    max_pinned_share: float = Field(default=0.0, ge=0, le=0.9, allow_inf_nan=False)
    """Share of the blocks that may be pinned. A request must fit beside them, pinned or not."""

    enable_kv_cache_events: CliImplicitFlag[bool] = False
    """Tell subscribers which prefixes are cached. Costs memory for each block's tokens."""

    kv_events_buffer: int = Field(default=65536, ge=1, le=2**24)
    """Events kept for replay; a subscriber that falls further behind is ended."""

    kv_cache_metrics: CliImplicitFlag[bool] = False
    """Measure how long a sample of the blocks lives and how it is reused: three histograms."""

    kv_cache_metrics_sample: float = Field(default=0.01, gt=0, le=1, allow_inf_nan=False)
    """Share of allocations that are measured then."""

    hash_seed: str = Field(default="", coerce_numbers_to_str=True)
    """Enters every block's name; servers that compare names must agree on it. With _cbor it is
    vLLM's PYTHONHASHSEED."""

    max_loras: int = Field(default=8, ge=0, le=256)
    """Most adapters at once, those that are unloaded and still in use among them. Workers with an
    adapter_dir keep memory for as many."""

    max_embedding_bytes: int = Field(default=2**30, ge=0, le=2**40)
    """Most bytes of embeddings that live requests hold together."""

    worker_wait: float = Field(default=60.0, ge=0, allow_inf_nan=False)
    """Seconds that requests wait for a worker before they end with UNAVAILABLE."""

    step_timeout: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """Seconds without a step's result after which its worker is dropped and the requests wait for
    another. Twenty times the slowest recent step, if that is more."""

    drain_timeout: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    """Seconds that running requests get to end after SIGTERM."""

    trace_steps_every: int = Field(default=100, ge=0)
    """Trace one step in so many, if OTEL_* exports traces. 0: only slow and preempting ones."""

    log_format: Literal["text", "json"] = "text"
    """Of the lines on standard error."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important lines to write."""

    @model_validator(mode="before")
    @classmethod
    def _fit_rows_to_budget(cls, given: dict[str, object]) -> dict[str, object]:
        """Lower the default of max_num_seqs to a smaller token budget."""
        budget = str(given.get("max_num_batched_tokens", ""))
        if "max_num_seqs" in given or not budget.isdecimal():
            return given
        return {**given, "max_num_seqs": max(1, min(DEFAULT_MAX_NUM_SEQS, int(budget)))}

    @model_validator(mode="after")
    def _every_row_can_decode(self) -> "SchedulerSettings":
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, must be at least "
                f"max_num_seqs ({self.max_num_seqs}), or some requests could never decode"
            )
        return self

    @model_validator(mode="after")
    def _long_has_a_meaning(self) -> "SchedulerSettings":
        if self.max_long_prefills and not self.long_prefill_token_threshold:
            raise ValueError(
                f"max_long_prefills is {self.max_long_prefills}, must be 0 unless "
                "long_prefill_token_threshold says what is long"
            )
        return self

    def weights_by_tenant(self) -> dict[str, float]:
        """Return `tenant_weights` by name. The empty name is the default tenant's."""
        entries = (entry.rpartition("=") for entry in self.tenant_weights)
        return {name: float(weight) for name, _, weight in entries}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take arguments only; `read_settings` gathers the rest."""
        return (init_settings,)


def read_settings(argv: Sequence[str]) -> SchedulerSettings:
    """Return the settings of a command line, with environment and YAML file behind it.

    Raises: ConfigError, one line that names field, value and bound. SystemExit(0) after --help.
    """
    try:
        flags = _read_flags(argv)
        environment = EnvSettingsSource(SchedulerSettings)()
    except SettingsError as error:
        complaint = " ".join(str(error).split())
        raise ConfigError(complaint.removeprefix("error parsing CLI: ")) from error
    path = flags.get("config") or environment.get("config")
    file = _read_yaml(str(path)) if path else {}
    try:
        return SchedulerSettings(**{**file, **environment, **flags})
    except ValidationError as error:
        raise ConfigError(_first_complaint(error)) from None


def _read_flags(argv: Sequence[str]) -> dict[str, object]:
    source: CliSettingsSource[SchedulerSettings] = CliSettingsSource(
        SchedulerSettings,
        cli_prog_name="python -m scheduler_svc",
        cli_parse_args=list(argv),
        cli_parse_none_str="null",
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_kebab_case=True,
        cli_exit_on_error=False,
    )
    return source()


def _read_yaml(path: str) -> Mapping[str, object]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"config is {path!r}, which cannot be read: {reason}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"config is {path!r}, which must hold a mapping of settings")
    return {str(name).replace("-", "_"): value for name, value in content.items()}


def _first_complaint(error: ValidationError) -> str:
    """Return the first error as one line: field, value, bound."""
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "must")
    if not first["loc"]:
        return message
    field = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return f"{field} is no setting of the scheduler"
    if first["type"] == "missing":
        return f"{field} is missing, must be the path of a model"
    value = "set" if field == "join_secret" else repr(first["input"])
    return f"{field} is {value}, {message}"
