"""Errors of the shell and of its settings. The core has its own in `core/errors.py`."""


class ConfigError(ValueError):
    """A setting or a model file is impossible: the operator's fault.

    Its text is one line that names the field or file, its value and its bound. The program
    prints it on standard error and exits with status 2.
    """
