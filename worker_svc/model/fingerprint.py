"""A name for a model's weights that is cheap to compute and differs when they do."""

import hashlib
from pathlib import Path

from worker_svc.errors import ModelError
from worker_svc.model.gguf_file import read_gguf
from worker_svc.model.safetensors_weights import weight_files

_NUM_SAMPLES = 256
_SAMPLE_BYTES = 4096


def model_fingerprint(path: Path, quantization: str = "none") -> str:
    """Return a SHA-256 in hex of what identifies a Hugging Face directory or a GGUF file.

    It covers the config or metadata, the names, shapes and places of all tensors, the files'
    sizes, and 256 evenly spaced samples of 4 KiB of the weights: two fine-tunes of one model
    differ in nothing else. Paths and times are left out, so copies have the same name; weights that
    are rounded at loading have another.

    Raises: ModelError if a file is missing or damaged.
    Cost: reads the heads and 1 MiB, whatever the model's size.
    """
    digest = hashlib.sha256(b"pagemill model 1")
    try:
        if path.is_dir():
            _add(digest, (path / "config.json").read_bytes())
            files = weight_files(path)
            heads = [_safetensors_head(file) for file in files]
        else:
            files = [path]
            heads = [read_gguf(path).data_start]
        for file, head in zip(files, heads, strict=True):
            _add_file(digest, file, head, _NUM_SAMPLES // len(files) + 1)
    except OSError as error:
        # The one that is missing, of how many there may be.
        name = Path(error.filename or path).name
        raise ModelError(f"{name} cannot be read: {error.strerror}") from error
    if quantization != "none":
        _add(digest, quantization.encode())
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", part: bytes) -> None:
    """Hash a part behind its length, so that no two lists of parts are alike."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _add_file(digest: "hashlib._Hash", path: Path, head: int, num_samples: int) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        _add(digest, size.to_bytes(8, "little"))
        _add(digest, file.read(head))
        for sample in range(num_samples):
            file.seek(head + (size - head) * sample // num_samples)
            _add(digest, file.read(_SAMPLE_BYTES))


def _safetensors_head(path: Path) -> int:
    """Return the length of the head: 8 bytes that give the length of the JSON behind them."""
    with path.open("rb") as file:
        head = 8 + int.from_bytes(file.read(8), "little")
    if head > path.stat().st_size:
        raise ModelError(f"{path.name} is damaged or cut short: its head has {head} bytes")
    return head
