"""Models that no worker of ours runs: their files may lack anything, so that is what to say."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from scheduler_svc.errors import ConfigError
from scheduler_svc.service.text.file_fields import read_json_fields
from scheduler_svc.service.text.gguf_header import read_gguf_header

# What the workers say they run. A scheduler serves whatever its workers can, and asks here only
# when it has failed to read a model: a name that is lacking here refuses nothing.
HF_ARCHITECTURES: Final = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
)
GGUF_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3", "gemma3", "qwen3moe")


@contextmanager
def blaming_the_architecture(path: Path) -> Iterator[None]:
    """Let a model that cannot be read in the block be refused for its architecture, if unknown.

    Raises: ConfigError, with what was wrong in the block behind it.
    """
    try:
        yield
    except ConfigError as error:
        field, named, known = _declared(path)
        if not named or any(name in known for name in named):
            raise
        raise ConfigError(
            f"{path}: {field} is {', '.join(named):.100}, which is not supported; "
            f"known: {', '.join(known)} ({error})"
        ) from error


def _declared(path: Path) -> tuple[str, list[str], tuple[str, ...]]:
    """Return the field that names a model's architectures, these, and those that are known.

    None are named where the file cannot be read that far.
    """
    with suppress(ConfigError):
        if path.is_dir():
            config = read_json_fields(path / "config.json")
            return "architectures", config.texts("architectures") or [], HF_ARCHITECTURES
        name = read_gguf_header(path).fields.text("general.architecture")
        return "general.architecture", [name] if name else [], GGUF_ARCHITECTURES
    return "", [], ()
