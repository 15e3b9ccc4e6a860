"""The likeliest tokens behind a row, with their log-probabilities: what beams choose from."""

import numpy as np
import torch

from kernels import cpu_told, reference_told
from worker_svc.runtime.step_plan import Candidates, Int64Array


def find_candidates(logits: torch.Tensor, counts: Int64Array) -> Candidates:
    """Return so many of each row's likeliest tokens, or all if there are not as many.

    Shapes: logits [S, V] fp32, finite or -inf; counts [S]. At least one count is not 0.

    Numerics: log-probabilities are the log-softmax in fp32. Among equal logits the lower id is
        the more likely one, as in `sample`.

    Cost: on the device three passes over the logits of the rows that are asked for; what comes
        back are the candidates, and from a GPU tokens that tie with a row's last.
    """
    asked = np.flatnonzero(counts)
    wanted = np.minimum(counts[asked], logits.shape[1]).astype(np.int64)
    places = torch.from_numpy(asked).to(logits.device)
    tell = cpu_told if logits.device.type == "cpu" else reference_told
    ids, logprobs = tell.tell_likeliest(logits, places, torch.from_numpy(wanted).to(logits.device))
    num_candidates = np.zeros(len(counts), dtype=np.int32)
    num_candidates[asked] = wanted
    return Candidates(ids=ids.numpy(), logprobs=logprobs.numpy(), counts=num_candidates)
