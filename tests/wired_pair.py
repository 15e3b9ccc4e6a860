"""A scheduler and a runner that speak by wire, in one process: requests in, tokens out."""

# mypy: allow-untyped-calls

from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from pagemill.v1 import worker_pb2
from scheduler_svc.core.block_hash import BlockHash
from scheduler_svc.core.free_block_queue import NULL_BLOCK
from scheduler_svc.core.kv_groups import KvGroup
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.request import Request, Sampling, Stopping
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_plan import StepResult
from scheduler_svc.service.worker_wire import Epoch, decode_result, encode_plan
from worker_svc.model.operations import Operations
from worker_svc.model.weights import load_model
from worker_svc.runtime.start_up import RunnerLimits, make_runner
from worker_svc.service import wire

BLOCK_SIZE, BUDGET, MAX_LEN = 4, 12, 128


class WiredPair:
    """Both ends, with so many blocks and plans in flight. Steps have at most BUDGET tokens."""

    def __init__(self, path: Path, operations: Operations, num_blocks: int, depth: int) -> None:
        loaded = load_model(path, torch.float32, torch.device("cpu"), operations)
        self.runner, _ = make_runner(
            loaded,
            RunnerLimits(
                block_size=BLOCK_SIZE,
                max_num_seqs=4,
                max_num_batched_tokens=BUDGET,
                num_gpu_blocks_override=num_blocks,
            ),
        )
        self.config = loaded.model.config
        groups = tuple(KvGroup(window=group.window or 0) for group in self.config.kv_groups)
        self.scheduler = Scheduler(Limits(BLOCK_SIZE, 4, BUDGET, MAX_LEN, 64, depth))
        self.scheduler.start_epoch(num_blocks, BlockHash(b"root"), 0, groups)
        self.wire: deque[StepResult] = deque()
        self.most_held = 0

    def serve(self, requests: Sequence[Request]) -> None:
        """Run requests that come together to their ends."""
        for request in requests:
            self.scheduler.add(request, 0)
        self.run()

    def run(self) -> None:
        """Run until nothing is left to do, checking the core after every call."""
        scheduler = self.scheduler
        while scheduler.has_work or self.wire:
            while (plan := scheduler.schedule(0)) is not None:
                scheduler.check()
                message = worker_pb2.JoinResponse.FromString(encode_plan(plan, Epoch(1, 1), ""))
                answer = self.runner.run(wire.read_plan(message.plan))
                sent = wire.write_result(answer, wire.Epoch(1, 1)).SerializeToString()
                received = worker_pb2.StepResult.FromString(sent)
                self.wire.append(decode_result(received, self.config.vocab_size).result)
                for request in scheduler._state.rows.running:
                    held = len(request.blocks) - request.blocks.count(NULL_BLOCK)
                    self.most_held = max(self.most_held, held)
            scheduler.apply(self.wire.popleft(), 0)
            scheduler.check()


def ask(name: str, prompt: list[int], count: int, n: int = 1) -> Request:
    """Return a greedy request."""
    return Request(name, array("i", prompt), Sampling(0.0), Stopping(count), num_sequences=n)
