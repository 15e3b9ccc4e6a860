"""From a rank's place to a group that works together, for the length of one stream."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pagemill.v1 import worker_pb2
from worker_svc.errors import InvariantError
from worker_svc.service.plan_relay import PlanReceiver, PlanSender, dial_store, open_store
from worker_svc.service.process_group import ProcessGroup
from worker_svc.service.shutdown import Shutdown
from worker_svc.service.step_stream import StepStream


@contextmanager
def meeting(
    stream: StepStream, group: ProcessGroup, rank_host: str, shutdown: Shutdown
) -> Iterator[bool]:
    """Meet the other ranks, once all have loaded, and leave them with the block.

    Plans come from rank 0 then, whichever rank this is. Yields False if the worker is asked to
    stop before.

    Raises: StreamLostError or RefusedError as the stream does; RanksLostError if the others do
        not come.
    """
    shard = group.shard
    store = open_store(rank_host) if shard.leads else None
    stream.send_loaded(store.port if store else 0)
    with shutdown.waking(stream.wake):
        # Without a deadline: the last rank may load for minutes, and a lost scheduler ends it.
        message = stream.receive(timeout_s=None)
    if message is None or isinstance(message, worker_pb2.StopWorker):
        yield False
        return
    if not isinstance(message, worker_pb2.Rendezvous):
        raise InvariantError(f"a {type(message).__name__} came before the rendezvous")
    store = store or dial_store(message.address)
    with ExitStack() as stack:
        stack.callback(group.disconnect)
        group.connect(store, rank_host, stream.over)
        if shard.leads:
            stream.pass_plans_to(PlanSender(store, shard.world_size))
        else:
            plans = dial_store(message.address)
            stack.enter_context(
                PlanReceiver(plans, shard.rank, stream.take_passed_plan, stream.lose_ranks)
            )
        yield True
