"""The ring all-reduce over point-to-point sends, and as a communication hook of DistributedDataParallel.

It is written to be read; docs/ring_allreduce.md draws it. To train, use the library's own all-reduce.
"""

# No `from __future__ import annotations`: DistributedDataParallel checks the annotations of a hook and refuses strings.
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket  # torch.distributed.GradBucket, which type checkers do not see

PIECE_BYTES = 2**22


def ring_all_reduce_(x: Tensor, group: dist.ProcessGroup | None = None, piece_bytes: int = PIECE_BYTES) -> Tensor:
    """Overwrites `x` with its sum over the processes of `group`, and returns it.

    The p processes form a ring, and `x` is cut into p chunks. In each of p - 1 steps (reduce-scatter) a process sends a
    chunk to the next one and adds the one that comes from the one before it; then each chunk has its sum in one
    process, and p - 1 further steps (all-gather) pass the sums round. Each process sends 2 (p - 1) chunks, which are
    2 (p - 1) / p of the bytes of `x`: no all-reduce can do with fewer (Patarasuk and Yuan, Bandwidth optimal all-reduce
    algorithms for clusters of workstations, 2009, https://doi.org/10.1016/j.jpdc.2008.09.002).

    Chunk c is summed in the order c, c + 1, ..., c - 1 of the processes, so all of them get the same bits.

    x: contiguous, of the same shape and type in all processes; on the CPU with gloo, on CUDA with NCCL. On CUDA the
    call returns before the sum is there, and the current stream waits for it, as with `dist.all_reduce`. `piece_bytes`:
    a chunk travels in pieces of at most this size, so that one is added while the next is on its way. Raises
    `ValueError` if `x` is not contiguous.

    Example (with a process group of any size)::

        >>> ring_all_reduce_(torch.ones(3)) / dist.get_world_size()
        tensor([1., 1., 1.])
    """
    if not x.is_contiguous():
        raise ValueError(f"ring_all_reduce_: expected x contiguous, got strides {x.stride()}")
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if size == 1 or x.numel() == 0:
        return x
    # Where the size is not divisible the first chunks are one element longer; the last ones may be empty.
    chunks = x.view(-1).tensor_split(size)
    piece = max(1, piece_bytes // x.element_size())
    arriving = torch.empty_like(chunks[0])
    for step in range(size - 1):
        partial = chunks[(rank - step - 1) % size]
        _exchange(chunks[(rank - step) % size], arriving[: partial.numel()], partial, piece, group)
    # Now chunk rank + 1 is the sum, and is the first to be passed on.
    for step in range(size - 1):
        _exchange(chunks[(rank + 1 - step) % size], chunks[(rank - step) % size], None, piece, group)
    return x


def _exchange(
    send: Tensor, receive: Tensor, add_to: Tensor | None, piece: int, group: dist.ProcessGroup | None
) -> None:
    """Sends to the next process while receiving from the one before; adds to `add_to` what has arrived."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    pending = []
    for leaving, arriving in zip_longest(send.split(piece), receive.split(piece), fillvalue=send[:0]):
        # In one batch, since two NCCL processes that both send first would wait for each other.
        pair = [
            dist.P2POp(dist.isend, leaving, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % size),
        ]
        batch = [operation for operation in pair if operation.tensor.numel()]
        pending.append(dist.batch_isend_irecv(batch) if batch else [])
    sums = add_to.split(piece) if add_to is not None else ()
    for works, total, arrived in zip_longest(pending, sums, receive.split(piece)):
        for work in works:
            work.wait()
        if total is not None:
            total += arrived


@dataclass
class RingState:
    """What `ring_hook` keeps: the group, the size of pieces and, on CUDA, the stream that the ring runs on."""

    group: dist.ProcessGroup | None = None
    piece_bytes: int = PIECE_BYTES
    stream: torch.cuda.Stream | None = None


def ring_hook(state: RingState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Averages a bucket of gradients with the ring: `model.register_comm_hook(RingState(), ring_hook)`.

    On CUDA the ring has its own stream, so the rest of the backward pass goes on meanwhile. With gloo it is done when
    this returns.
    """
    x = bucket.buffer()
    if not x.is_cuda:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(_average(x, state))
        return done
    if state.stream is None:
        state.stream = torch.cuda.Stream(x.device)
    state.stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(state.stream):
        # Whoever waits for this future has their stream wait for what is on this stream now.
        done = torch.futures.Future(devices=[x.device])
        done.set_result(_average(x, state))
    return done


def _average(x: Tensor, state: RingState) -> Tensor:
    # First the factor, as without a hook: the sum cannot overflow, and the rounding is the same.
    x *= 1.0 / dist.get_world_size(state.group)
    return ring_all_reduce_(x, state.group, state.piece_bytes)
