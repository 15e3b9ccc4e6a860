"""What can go wrong in a worker, by whose fault it is."""


class ConfigError(ValueError):
    """A setting is impossible: the operator's. One line, and the process exits with status 2."""


class ModelError(ConfigError):
    """The model's files are damaged or of a kind we cannot run. Names what was found and known."""


class InvariantError(AssertionError):
    """A promise between scheduler and worker is broken: ours. Never caught; the process ends."""


class AdapterError(ValueError):
    """An adapter cannot be loaded: the operator's. One line; nobody else is harmed."""


class RanksLostError(Exception):
    """The other ranks of the group are gone, or given up: the environment's fault. Join again."""
