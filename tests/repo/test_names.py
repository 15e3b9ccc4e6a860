"""Our import roots are ours alone: nothing installed provides them, or takes them for its own."""

import sys
from importlib.metadata import packages_distributions

from commands import run

OURS = ("pagemill", "scheduler_svc", "worker_svc", "kernels")


def test_no_installed_distribution_provides_our_names() -> None:
    providers = packages_distributions()
    others = {name: {*providers.get(name, ())} - {"pagemill"} for name in OURS}
    assert not any(others.values()), others


def test_transformers_does_not_take_our_kernels_for_its_own() -> None:
    """It looks for a distribution of that name; ours is a folder on the path."""
    program = (
        "from transformers.utils.import_utils import is_kernels_available\n"
        "from transformers import LlamaForCausalLM\n"
        "import kernels, sys\n"
        "sys.exit(is_kernels_available())"
    )
    run(sys.executable, "-c", program)
