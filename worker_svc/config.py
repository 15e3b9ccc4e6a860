"""The worker's settings: each with its meaning, unit and bound, read once at start."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import yaml
from pydantic import AfterValidator, Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliImplicitFlag,
    CliPositionalArg,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from worker_svc.errors import ConfigError

ElementTypeName = Literal["auto", "float32", "bfloat16", "float16"]
KvTypeName = Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"]

JOIN_AS_TOLD: Final = "-"


def _model_path(text: str) -> str:
    if not text:
        raise ValueError("must be the path of a GGUF file or of a model's directory")
    return text


def _address(text: str) -> str:
    """Check HOST:PORT or unix:PATH."""
    host, _, port = text.rpartition(":")
    if host == "unix" or text.startswith("unix:/"):
        if text == "unix:":
            raise ValueError("must be unix: and the path of a socket")
        return text
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise ValueError("must be HOST:PORT with a port of 1 to 65535, or unix:PATH")
    return text


def _join(text: str) -> str:
    return text if text == JOIN_AS_TOLD else _address(text)


def _device(text: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", text) is None:
        raise ValueError("must be auto, cpu, cuda or cuda:N")
    return text


class WorkerSettings(BaseSettings):
    """A worker of Pagemill: it holds a model and its KV cache, and runs step plans.

    Settings come from their defaults, the YAML file of --config, the environment (PAGEMILL_JOIN
    and so on) and the command line; what is named later wins.

    Exit status: 0 asked to stop; 1 a step failed; 2 a setting or the model is impossible;
    3 refused by the scheduler; 4 no scheduler for --join-timeout seconds, or none that standard
    input told of.
    """

    # Constructing one reads nothing but its arguments; `read_settings` reads the world.
    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="PAGEMILL_",
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    model_path: CliPositionalArg[Annotated[str, AfterValidator(_model_path)]] = Field(
        default="", validate_default=True
    )
    """A GGUF file, or a directory with config.json and safetensors."""

    config: str = ""
    """YAML file of settings by these names. Empty: none."""

    join: Annotated[str, AfterValidator(_join)] = "127.0.0.1:50052"
    """The scheduler's listener for workers: HOST:PORT or unix:PATH. -: standard input says
    it in a line, within 600 s."""

    join_secret: SecretStr = SecretStr("")
    """Shared with the scheduler. Empty: none. PAGEMILL_JOIN_SECRET keeps it out of `ps`."""

    join_timeout: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Seconds without a scheduler after which to give up, with exit status 4. 0: never."""

    rank_host: str = Field(default="127.0.0.1", min_length=1)
    """Address at which the other ranks of a group reach this worker. Not for the public."""

    device: Annotated[str, AfterValidator(_device)] = "auto"
    """auto (CUDA if there is any), cpu, cuda (any GPU that no other rank has) or cuda:N."""

    dtype: ElementTypeName = "auto"
    """Type of weights and activations. auto: bfloat16 where the device computes in it."""

    kv_cache_dtype: KvTypeName = "auto"
    """Type of the cached keys and values. auto: as dtype. fp8 (e4m3; scales per head from the
    checkpoint, or measured at start) and fp8_e5m2 hold twice the tokens of bfloat16."""

    calculate_kv_scales: CliImplicitFlag[bool] = True
    """Measure the scales of an fp8 (e4m3) cache where the checkpoint brings none. Off: they are 1,
    with a warning."""

    kv_cache_memory_bytes: int | None = Field(default=None, gt=0)
    """Bytes of the KV cache, whatever memory is free. Unset: as memory allows; on a CPU 0.4 of what
    is free, at most 4 GiB."""

    attention_backend: Literal["auto", "native", "torch"] = "auto"
    """auto (the best that serves), native (compiled code, on a CPU) or torch (anywhere; on a CPU
    some ten times slower at decoding)."""

    quantization: Literal["none", "int8", "int4"] = "none"
    """Of linear layers, on a CPU: none, int8 or int4 (in groups of 32 weights, rounded at loading;
    a Q4_1 or Q8_0 file and checkpoints of as few bits keep their values)."""

    gpu_memory_utilization: float = Field(default=0.92, gt=0, le=1)
    """Share of a GPU's memory for weights, activations and KV cache together."""

    num_gpu_blocks_override: int | None = Field(default=None, gt=0)
    """Usable blocks of the KV cache, whatever memory says. The scheduler's wish goes first."""

    adapter_dir: str = ""
    """Directory below which adapters lie; nothing outside it is read. Unset: no adapters are
    loaded."""

    max_lora_rank: int = Field(default=64, ge=1, le=512)
    """Largest rank of an adapter that is loaded. Memory is kept for as many of it as the
    scheduler's max_loras."""

    threads: int | None = Field(default=None, ge=1, le=4096)
    """Threads of one CPU operation. Unset: all cores; with attention_backend torch all but one."""

    log_format: Literal["text", "json"] = "text"
    """Of the lines on standard error."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important lines to write. debug writes one for every step."""

    bench_forward: CliImplicitFlag[bool] = False
    """Join nobody: time bare forward loops, asked for in JSON lines on standard input."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read arguments only."""
        return (init_settings,)


def read_settings(argv: Sequence[str]) -> WorkerSettings:
    """Return the settings of a command line, with environment and YAML file behind it.

    Raises: ConfigError, one line that names field, value and bound. SystemExit(0) after --help.
    """
    try:
        flags = _read_flags(argv)
        environment = EnvSettingsSource(WorkerSettings, env_ignore_empty=True)()
    except SettingsError as error:
        raise ConfigError(str(error).replace("error parsing CLI: ", "")) from error
    path = flags.get("config") or environment.get("config")
    file = _read_yaml(str(path)) if path else {}
    try:
        return WorkerSettings.model_validate({**file, **environment, **flags})
    except ValidationError as error:
        raise ConfigError(_first_complaint(error)) from None


def settled_join(line: str) -> str:
    """Return the address to join, which a line of standard input says.

    Raises: ConfigError if that is no address.
    """
    line = line.strip()
    try:
        return _address(line)
    except ValueError as error:
        raise ConfigError(f"join is '-', and standard input says {line!r}, {error}") from None


def _read_flags(argv: Sequence[str]) -> dict[str, object]:
    source: CliSettingsSource[WorkerSettings] = CliSettingsSource(
        WorkerSettings,
        cli_prog_name="python -m worker_svc",
        cli_parse_args=list(argv),
        cli_parse_none_str="null",
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_kebab_case=True,
        cli_exit_on_error=False,
    )
    return source()


def _read_yaml(path: str) -> dict[str, object]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"config is {path!r}, which cannot be read: {reason}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"config is {path!r}, which must hold a mapping of settings")
    return {str(name).replace("-", "_"): value for name, value in content.items()}


def _first_complaint(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"][:1])
    if first["type"] == "extra_forbidden":
        return f"{field} is no setting of a worker"
    bound = first["msg"].removeprefix("Value error, ").replace("Input should", "must")
    value = "hidden" if field == "join_secret" else repr(first["input"])
    return f"{field} is {value}, {bound}"
