"""How ranks that share the rows of a pair tensor send parts of it to each other, for
:mod:`torchops.distributed.triangle.hopper`.

`Collectives` works everywhere. `Peers` is for GPUs of one machine that can read each other's memory: each rank writes
what others need to a workspace in symmetric memory, and the others copy it from there. Copy engines do that, so
products run beside it at full speed: on two H100, an (8192, 8192, 8192) product in bfloat16 takes 1.43 ms, 1.48 ms
while 256 MiB arrive that way, and 2.20 ms while an all-gather of the same size runs, whose kernel occupies
multiprocessors.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["ALIGNMENT", "Block", "Collectives", "Peers", "peers", "room"]

# all_gather_into_tensor and reduce_scatter_tensor are the names in older versions of torch.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

ALIGNMENT = 256  # bytes, of what a rank sends
# After this, a barrier that a rank didn't reach fails on the others, as NCCL's collectives do by default.
_TIMEOUT_MS = 600_000

# Writes the part of the result that a rank asked for to a tensor, or adds it.
Make = Callable[[Tensor, int, bool], None]


class Block(NamedTuple):
    """What all ranks have of one thing, by rank. This rank writes its own part and calls send(); the others' are there
    after wait()."""

    parts: Sequence[Tensor]
    send: Callable[[], None]
    wait: Callable[[], None]


class Collectives:
    """By the collectives of the group, which must be called in the same order on all ranks."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.count = group, dist.get_rank(group), dist.get_world_size(group)

    def __enter__(self) -> Collectives:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def begin(self) -> None:
        """Before the first of several exchanges, and again before what came before them may be overwritten."""

    def block(self, like: Tensor, *shape: int) -> Block:
        """With parts of this shape."""
        whole, works = like.new_empty(self.count, *shape), []

        def send() -> None:
            works.append(_all_gather(whole.flatten(0, 1), whole[self.rank], group=self.group, async_op=True))

        return Block(whole.unbind(), send, lambda: works.pop().wait())

    def summed(self, make: Make, total: Tensor) -> Callable[[], None]:
        """Writes the sum of what all ranks make for this one to `total`, which has no gaps. It is there after a call of
        the function that is returned."""
        sent = total.new_empty(self.count, *total.shape)
        for rank, part in enumerate(sent.unbind()):
            make(part, rank, False)
        work: Any = _reduce_scatter(total, sent.flatten(0, 1), group=self.group, async_op=True)

        def wait(_held: Tensor = sent) -> None:
            work.wait()

        return wait


# --- memory of other GPUs --------------------------------------------------------------------------------------------


class _Workspace:
    """Symmetric memory of a group, for one call at a time. It is kept for the next one, because all ranks must take
    part when it is made."""

    def __init__(self, memory: Tensor, handle: Any) -> None:
        self.memory, self.handle, self.size = memory, handle, memory.numel()
        self.used_by: torch.cuda.Event | None = None

    def barrier(self, channel: int) -> None:
        """Of all ranks, on the current stream. Each purpose has its own channel: ranks that wait for different things,
        because one has raised, wait in vain instead of reading what isn't there yet. As with collectives, a rank that
        raised alone and goes on may still meet the others in another call."""
        self.handle.barrier(channel, _TIMEOUT_MS)


_BEGIN, _PUBLISH, _REPLACE = range(3)  # channels


class Peers(Collectives):
    """By reading from the others' workspaces. Barriers run on the current stream, not beside its kernels: there they
    would wait for a multiprocessor that these leave."""

    def __init__(self, group: Any, device: torch.device, workspace: _Workspace) -> None:
        super().__init__(group)
        self.workspace, self.stream, self.used = workspace, _stream(device), 0
        self.others = [(self.rank + step) % self.count for step in range(1, self.count)]

    def __enter__(self) -> Peers:
        if self.workspace.used_by is not None:  # maybe on another stream
            torch.cuda.current_stream().wait_event(self.workspace.used_by)
        return self

    def __exit__(self, *_: Any) -> None:
        current = torch.cuda.current_stream()
        current.wait_stream(self.stream)  # before what was received is freed, even by an exception
        self.workspace.used_by = current.record_event()

    def begin(self) -> None:
        torch.cuda.current_stream().wait_stream(self.stream)
        self.workspace.barrier(_BEGIN)
        self.used = 0

    def _take(self, like: Tensor, *shape: int) -> tuple[int, Tensor]:
        """The next part of this rank's workspace, and where in all workspaces that is, in elements."""
        at = self.used // like.element_size()
        self.used += room(like, *shape)
        if self.used > self.workspace.size:
            raise RuntimeError(f"expected at most {self.workspace.size} bytes to send, got {self.used}")
        return at, self.workspace.handle.get_buffer(self.rank, shape, like.dtype, at)

    def _publish(self) -> None:
        """Lets other ranks read what the current stream has written, and this rank read what theirs have."""
        self.workspace.barrier(_PUBLISH)
        self.stream.wait_stream(torch.cuda.current_stream())

    def _pull(self, to: Tensor, rank: int, at: int) -> None:
        with torch.cuda.stream(self.stream):
            to.copy_(self.workspace.handle.get_buffer(rank, to.shape, to.dtype, at))

    def _arrival(self) -> Callable[[], None]:
        event = self.stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(event)

    def block(self, like: Tensor, *shape: int) -> Block:
        at, own = self._take(like, *shape)
        parts = [own if rank == self.rank else like.new_empty(shape) for rank in range(self.count)]
        waits: list[Callable[[], None]] = []

        def send() -> None:
            self._publish()
            for rank in self.others:
                self._pull(parts[rank], rank, at)
            waits.append(self._arrival())

        return Block(parts, send, lambda: waits.pop()())

    def summed(self, make: Make, total: Tensor) -> Callable[[], None]:
        at, sent = self._take(total, self.count - 1, *total.shape)
        for rank, part in zip(self.others, sent.unbind(), strict=True):
            make(part, rank, False)
        rest = [torch.empty_like(total) for _ in self.others[1:]]  # before the other stream waits for this one
        self._publish()
        # A rank has what it sends to this one in the order of its own `others`.
        for step, (rank, part) in enumerate(zip(self.others, (total, *rest), strict=True), 1):
            self._pull(part, rank, at + (self.count - step - 1) * total.numel())
        arrived = self._arrival()

        def wait() -> None:
            arrived()
            for part in rest:
                total.add_(part)
            make(total, self.rank, True)

        return wait


def room(like: Tensor, *shape: int) -> int:
    """Bytes of a workspace that parts of this shape take."""
    return -(-math.prod(shape) * like.element_size() // ALIGNMENT) * ALIGNMENT


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _sees(device: torch.device, others: Sequence[str]) -> bool:
    """Whether `device` can read the memory of these GPUs, by UUID."""
    index = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    return all(
        uuid in index and (index[uuid] == device.index or torch.cuda.can_device_access_peer(device.index, index[uuid]))
        for uuid in others
    )


def _agreed(group: Any, own: Any) -> list[Any]:
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return everyone


def _reachable(group: Any, device: torch.device) -> bool:
    """Whether every rank can read the memory of all others; the same answer on all of them."""
    able = os.environ.get("TORCHOPS_SYMMETRIC_MEMORY", "1") != "0" and os.environ.get("NCCL_P2P_DISABLE", "0") == "0"
    try:
        from torch._C._distributed_c10d import _SymmetricMemory

        able = able and _SymmetricMemory.get_backend(device) == "CUDA"
    except (ImportError, AttributeError):  # it may change with each version of torch
        able = False
    uuids = _agreed(group, str(torch.cuda.get_device_properties(device).uuid) if able else "")
    return all(_agreed(group, all(uuids) and len({*uuids}) == len(uuids) and _sees(device, uuids)))


_reachable_groups: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
_workspaces: WeakKeyDictionary[Any, _Workspace] = WeakKeyDictionary()


def peers(group: Any, device: torch.device, size: int) -> Collectives:
    """`Peers` with a workspace of at least `size` bytes on each rank, if there can be one, otherwise `Collectives`. All
    ranks of the group must call it with the same size."""
    # A graph would replay events that were recorded outside it.
    if device.type != "cuda" or dist.get_world_size(group) == 1 or torch.cuda.is_current_stream_capturing():
        return Collectives(group)
    if group not in _reachable_groups:
        _reachable_groups[group] = _reachable(group, device)
    if not _reachable_groups[group]:
        return Collectives(group)
    workspace = _workspaces.get(group)
    if workspace is None or workspace.size < size:
        workspace = _new_workspace(group, device, size)
        if workspace is None:
            return Collectives(group)
    return Peers(group, device, workspace)


def _new_workspace(group: Any, device: torch.device, size: int) -> _Workspace | None:
    """On all ranks or on none, which is remembered: a rank that gave up alone would leave the others waiting, and the
    store through which they exchange handles out of step."""
    if group in _workspaces:
        _drop_workspace(group, device)
    memory: Tensor | None = None
    handle: Any = None
    reason: BaseException | None = None
    try:
        memory = _allocate(_rounded(size), device)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        reason = error
    if all(_agreed(group, memory is not None)):
        try:
            handle = _rendezvous(memory, group)
        except Exception as error:
            reason = error
        if all(_agreed(group, handle is not None)) and memory is not None:
            _workspaces[group] = made = _Workspace(memory, handle)
            return made
    if reason is not None:
        warnings.warn(f"torchops: no symmetric memory; this process group uses collectives: {reason}", stacklevel=2)
    _reachable_groups[group] = False
    return None


def _drop_workspace(group: Any, device: torch.device) -> None:
    """Frees it on all ranks: what one has exported lasts until the others have let it go."""
    torch.cuda.synchronize(device)  # this rank's reads, on any stream
    _workspaces[group].barrier(_REPLACE)
    torch.cuda.synchronize(device)
    del _workspaces[group]
    _agreed(group, True)


def _rounded(size: int) -> int:
    """Up to a quarter more, so that sizes that grow slowly don't need a new workspace each."""
    step = 1 << max(size.bit_length() - 3, 0)
    return -(-size // step) * step


def _allocate(size: int, device: torch.device) -> Tensor:
    from torch._C._distributed_c10d import _SymmetricMemory

    def allocate() -> Tensor:
        return _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)

    try:
        return allocate()
    except RuntimeError:
        torch.cuda.empty_cache()  # it isn't the caching allocator's
        return allocate()


def _rendezvous(memory: Any, group: Any) -> Any:
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.rendezvous(memory, group.group_name)
