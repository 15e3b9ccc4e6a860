"""`python -m pagemill.cli.hub_download ORG/NAME`: a model of the Hugging Face hub, to disk.

Prints the folder, or one line that says what went wrong, and ends with status 1 then. A program
of its own: huggingface_hub takes longer to import than most commands run.
"""

import sys

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

# Weights, tokenizer and their settings; not the copies of them in other formats.
_WANTED = ["*.safetensors", "*.json", "*.jinja"]
_UNWANTED = ["*/*"]


def main(model: str) -> int:
    """Download a model unless it is in the hub's cache; return the exit status."""
    try:
        folder = snapshot_download(model, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
    except GatedRepoError:
        reason = (
            f"{model} is gated: accept its terms on the hub, and set HF_TOKEN to a token of yours"
        )
    except RepositoryNotFoundError:
        reason = f"the hub has no model {model}, or only for those who set HF_TOKEN"
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        reason = f"{model} is not in the hub's cache on this machine, and the hub was not reached"
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = f"{model} could not be fetched from the hub: {' '.join(str(error).split())}"
    else:
        sys.stdout.write(f"{folder}\n")
        return 0
    sys.stdout.write(f"{reason}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
