"""The adapters of a model on this machine: where their files lie, and how large they may be."""

from dataclasses import dataclass
from pathlib import Path

import torch

from worker_svc.errors import AdapterError, ConfigError
from worker_svc.model.adapters import AdapterBank, LoadedAdapter
from worker_svc.model.peft_checkpoint import find_directory, read_checkpoint
from worker_svc.runtime.adapter_reserve import AdapterReserve, reserve_for


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What the operator says of adapters; see WorkerSettings."""

    directory: str = ""
    """Empty: none are loaded, and the model's layers look for none."""

    max_rank: int = 64


class LocalAdapters:
    """An AdapterHost over a bank."""

    def __init__(self, settings: AdapterSettings, dtype: torch.dtype, device: torch.device) -> None:
        """Raise ConfigError if a directory is wanted and not there."""
        if settings.directory and not Path(settings.directory).is_dir():
            raise ConfigError(f"adapter_dir is {settings.directory!r}, must be a directory")
        self._settings = settings
        self._dtype = dtype
        self.bank = AdapterBank(dtype, device) if settings.directory else None
        """What the model must be loaded with. None: adapters are off."""

    def begin(self, device: torch.device) -> None:
        """Forget all adapters: a model, or another part of it, is about to be loaded."""
        if self.bank is not None:
            self.bank = AdapterBank(self._dtype, device)

    def reserve(self, max_adapters: int) -> AdapterReserve:
        """Return what has to be kept for so many adapters. The model must be loaded."""
        return reserve_for(self.bank, max_adapters, self._settings.max_rank)

    def read(self, path: str) -> LoadedAdapter:
        """Return the adapter of a directory below ours, ready to run.

        Raises: AdapterError if there is none, or it does not fit the model.
        """
        directory = find_directory(self._settings.directory, path)
        bank = self.bank
        if bank is None or not bank.targets:
            raise AdapterError("the model is not loaded yet")
        checkpoint = read_checkpoint(directory, bank.targets, self._settings.max_rank)
        return bank.prepare(checkpoint.generation, checkpoint.matrices)

    def publish(self, slot: int, adapter: LoadedAdapter) -> None:
        """Put an adapter into a slot."""
        if self.bank is not None:
            self.bank.publish(slot, adapter)

    def drop(self, slot: int) -> None:
        """Empty a slot."""
        if self.bank is not None:
            self.bank.drop(slot)

    def generation(self, slot: int) -> int:
        """Return the generation of what is in a slot. 0: nothing is."""
        return self.bank.generation(slot) if self.bank is not None else 0
