"""`ContextParallel`: how a sequence is sharded among ranks, and the communication between them.

A sequence is cut into equal *pieces* of neighbouring tokens. In the layout "contiguous" rank r of R holds piece r of R;
in the layout "zigzag" pieces r and 2R − 1 − r of 2R, which balances causal attention:

    contiguous, R = 3    | 0       | 1       | 2       |
    zigzag, R = 3        | 0  | 1  | 2  | 2  | 1  | 0  |

A rank's shard is its pieces, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from deadreckon.ops.layout import sent
from deadreckon.ops.tracing import first_derivatives_only

Layout = Literal["zigzag", "contiguous"]
ONE_PROCESS = "a process alone, without ContextParallel"  # that second derivatives need


class ContextParallel:
    """How the tokens of a sequence are divided among the ranks of a group.

        cp = dr.ContextParallel(mesh["cp"])
        o = cp.gather(dr.attend(cp.shard(q), cp.shard(k), cp.shard(v), log_gate=cp.shard(log_gate), cp=cp), length=T)

    All ranks of the group must make the same calls in the same order.

    Args:
        group: a process group, a DeviceMesh of one dimension, or None for all ranks.
        layout: ``"zigzag"`` (rank r of R holds pieces r and 2R − 1 − r of 2R, which balances causal work) or
            ``"contiguous"`` (piece r of R).

    Attributes:
        rank, size: this rank among those of the group.
        pieces: how many pieces a rank holds, 1 or 2.
        held: the numbers of this rank's pieces.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None = None, layout: Layout = "zigzag") -> None:
        if layout not in ("zigzag", "contiguous"):
            raise ValueError(f"layout: expected 'zigzag' or 'contiguous', got {layout!r}")
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("group: expected torch.distributed.init_process_group() to have been called, it was not")
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"group: expected a DeviceMesh of one dimension, got {group.ndim}: {group}")
            group = group.get_group()
        elif group is not None and not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"group: expected a ProcessGroup or a DeviceMesh, got {type(group).__name__}")
        self.group, self.layout = group or dist.distributed_c10d._get_default_group(), layout
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.pieces = 2 if layout == "zigzag" else 1
        self.held = self.pieces_of(self.rank)
        self._sent = [0]  # shared with the same ranks in another layout
        by_rank = [piece for rank in range(self.size) for piece in self.pieces_of(rank)]
        self._by_rank = torch.tensor(by_rank)  # the pieces as they lie, rank after rank
        self._in_order = self._by_rank.argsort()  # where each piece lies
        # Gloo has no point-to-point sends of CUDA tensors; a group may use it for CPU tensors alone, beside NCCL.
        self._on_host = "cuda:gloo" in dist.get_backend_config(self.group)

    def __repr__(self) -> str:
        return f"ContextParallel(rank {self.rank} of {self.size}, layout={self.layout!r})"

    def pieces_of(self, rank: int) -> list[int]:
        """The numbers of a rank's pieces."""
        return [rank, 2 * self.size - 1 - rank] if self.layout == "zigzag" else [rank]

    def rank_of(self, piece: int) -> int:
        """The rank that holds a piece."""
        return min(piece, 2 * self.size - 1 - piece) if self.layout == "zigzag" else piece

    @property
    def bytes_sent(self) -> int:
        """Bytes sent by this rank so far, counted once per receiver; set it to 0 to restart."""
        return self._sent[0]

    @bytes_sent.setter
    def bytes_sent(self, value: int) -> None:
        self._sent[0] = value

    @property
    def count(self) -> int:
        """The number of pieces of a sequence, on all ranks."""
        return self.pieces * self.size

    def padded(self, length: int) -> int:
        """The least number of tokens, `length` or more, that divides into equal pieces."""
        return -(-length // self.count) * self.count

    def contiguous(self) -> ContextParallel:
        """The same ranks in the layout "contiguous"."""
        if self.layout == "contiguous":
            return self
        twin = ContextParallel(self.group, "contiguous")
        twin._sent = self._sent
        return twin

    # Cut and join -----------------------------------------------------------------------------------------------------

    def shard(self, x: Tensor, dim: int = 1, value: float = 0.0) -> Tensor:
        """This rank's shard of x, which every rank holds in full; x is padded at the end of dim to equal pieces.

        In the backward pass every rank gets the full gradient of x.
        """
        return _Shard.apply(x, dim, value, self)

    def gather(self, x: Tensor, dim: int = 1, length: int | None = None) -> Tensor:
        """All-gathers the shards into the full tensor, cut to `length`, without the padding, if that is given.

        In the backward pass each rank takes its shard of the gradient: it is assumed that all ranks compute the same
        from the full tensor.
        """
        whole: Tensor = _Gather.apply(x, dim, self)
        return whole if length is None else whole.narrow(dim, 0, length)

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """(length,) the sequence positions of the tokens of this rank's shard."""
        size = self.piece_length(length)
        firsts = sent(self.held, device or torch.get_default_device()).unsqueeze(1) * size
        return (firsts + torch.arange(size, device=device)).flatten()

    def piece_length(self, length: int) -> int:
        """Tokens of a piece, if a shard has `length`; raises unless pieces are equal."""
        if length % self.pieces:
            total = length * self.size
            raise ValueError(
                f"cp: expected shards of a sequence padded to a multiple of {self.count} tokens, {self.padded(total)} "
                f"instead of {total} ({self.layout}, {self.size} ranks; cp.shard pads), got {length} tokens a rank"
            )
        return length // self.pieces

    # Pieces as rows of a batch ----------------------------------------------------------------------------------------

    def as_rows(self, x: Tensor) -> Tensor:
        """(B, pieces · C, ...) -> (pieces · B, C, ...)."""
        return x.unflatten(1, (self.pieces, -1)).transpose(0, 1).flatten(0, 1)

    def from_rows(self, x: Tensor) -> Tensor:
        """(pieces · B, C, ...) -> (B, pieces · C, ...)."""
        return x.unflatten(0, (self.pieces, -1)).transpose(0, 1).flatten(1, 2)

    def rows_with_tails(self, x: Tensor, tokens: int) -> Tensor:
        """(B, pieces · C, ...) -> (pieces · B, tokens + C, ...): each piece, led by the last tokens of the previous."""
        rows = self.as_rows(x)
        if rows.shape[1] < tokens:
            raise ValueError(
                f"cp: expected pieces of at least {tokens} tokens, {tokens * self.count} in all, got {rows.shape[1]}"
            )
        tails = rows[:, rows.shape[1] - tokens :].unflatten(0, (self.pieces, -1))
        return torch.cat([_TailsBefore.apply(tails, self).flatten(0, 1), rows], dim=1)

    # Collectives on small tensors -------------------------------------------------------------------------------------

    def every(self, x: Tensor) -> Tensor:
        """All-gather: (pieces, ...) of each rank -> (count, ...), all pieces in order. No gradients."""
        mine = self._to_wire(x)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.group)
        self._count(mine, self.size - 1)
        return torch.cat(parts).to(x.device)[sent(self._in_order, x.device)]

    def total_of_own(self, x: Tensor) -> Tensor:
        """Reduce-scatter: (count, ...) on each rank -> (pieces, ...), sums over ranks of its pieces. No gradients."""
        mine = self._to_wire(x[sent(self._by_rank, x.device)])
        received = torch.empty_like(mine)
        dist.all_to_all_single(received, mine, group=self.group)
        self._count(mine[: -self.pieces], 1)
        return received.to(x.device).unflatten(0, (self.size, self.pieces)).sum(0)

    def sums_before(self, x: Tensor) -> Tensor:
        """(pieces, ...): the sum of x over all pieces before each of this rank's."""
        return _SumsBefore.apply(x, self)

    def same(self, x: Tensor) -> Tensor:
        """Broadcast: the x of the group's first rank, on every rank. No gradients."""
        mine = self._to_wire(x).clone()
        dist.broadcast(mine, dist.get_global_rank(self.group, 0), group=self.group)
        self._count(mine, self.size - 1 if self.rank == 0 else 0)
        return mine.to(x.device)

    def total(self, x: Tensor) -> Tensor:
        """All-reduce: the sum of x over ranks, on every rank. No gradients."""
        mine = self._to_wire(x).clone()
        dist.all_reduce(mine, group=self.group)
        self._count(mine, 1)
        return mine.to(x.device)

    def sum_of_losses(self, x: Tensor) -> Tensor:
        """The sum of x over ranks, on every rank; its gradient is times `size`, for averaging over ranks later."""
        return _SumOfLosses.apply(x, self)

    # Point to point ---------------------------------------------------------------------------------------------------

    def exchange(self, tensors: Sequence[Tensor], direction: int) -> OnTheWay:
        """Sends tensors to the next rank (direction 1) or the previous (−1), receives their likes from the other."""
        to, of = ((self.rank + step) % self.size for step in (direction, -direction))
        return self._post([(x, to) for x in tensors], [(x, of) for x in tensors])

    def passed_on(self, tensors: Sequence[Tensor], direction: int) -> Iterator[tuple[int, list[Tensor]]]:
        """Each rank and its tensors, this one first, then the others as they come around the ring.

        Direction 1 brings rank − 1, rank − 2, …; the next transfer overlaps with the caller's computation.
        """
        held, coming = list(tensors), None
        for step in range(self.size):
            if step < self.size - 1:
                coming = self.exchange(held, direction)
            yield (self.rank - direction * step) % self.size, held
            if step < self.size - 1:
                assert coming is not None
                held = coming.wait()

    def relay(self, like: Tensor, advance: Callable[[int, Tensor], Tensor], direction: int) -> None:
        """Passes a tensor along all pieces, in order (direction 1) or backwards (−1), starting with zeros.

        advance(slot, x) takes the tensor that arrives at this rank's piece `slot` and returns the one to pass on. No
        gradients.
        """
        x, leaving = torch.zeros_like(like), list[OnTheWay]()
        for piece in self.held[::direction]:
            before, after = piece - direction, piece + direction
            if 0 <= before < self.count and before not in self.held:
                (x,) = self._post([], [(like, self.rank_of(before))]).wait()
            x = advance(self.held.index(piece), x)
            if 0 <= after < self.count and after not in self.held:
                leaving.append(self._post([(x, self.rank_of(after))], []))
        for one in leaving:
            one.wait()

    def moved(self, x: Tensor, to: ContextParallel, dim: int = 1) -> Tensor:
        """A shard of x in another layout of the same ranks."""
        return _Moved.apply(x, dim, self, to)

    def move_pieces(self, x: Tensor, to: ContextParallel, dim: int) -> Tensor:
        """As `moved`, without gradients. Pieces are those of the finer layout."""
        count = max(self.count, to.count)
        mine, theirs = (layout._halves(self.size, count) for layout in (self, to))  # rank -> numbers of its parts
        parts = dict(zip(mine[self.rank], x.chunk(count // self.size, dim), strict=True))
        owner = {part: rank for rank, held in enumerate(mine) for part in held}
        sends = [(parts[part], rank) for rank, held in enumerate(theirs) for part in held if part in parts]
        wanted = [part for part in theirs[self.rank] if part not in parts]
        like = next(iter(parts.values()))
        received = self._post([(y, to) for y, to in sends if to != self.rank], [(like, owner[part]) for part in wanted])
        parts.update(zip(wanted, received.wait(), strict=True))
        return torch.cat([parts[part] for part in theirs[self.rank]], dim)

    def _halves(self, size: int, count: int) -> list[list[int]]:
        """Each rank's parts, where a sequence has `count` of them."""
        finer = count // self.count
        return [
            [piece * finer + part for piece in self.pieces_of(rank) for part in range(finer)] for rank in range(size)
        ]

    def _post(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> OnTheWay:
        """Starts sending tensors to ranks, and receiving tensors of given shapes from ranks."""
        out = [(self._to_wire(x), rank) for x, rank in sends]
        devices = [x.device for x, _ in receives]
        room = [torch.empty(x.shape, dtype=x.dtype, device="cpu" if self._on_host else x.device) for x, _ in receives]
        operations = [self._operation(dist.isend, x, rank) for x, rank in out]
        operations += [self._operation(dist.irecv, x, rank) for x, (_, rank) in zip(room, receives, strict=True)]
        for x, _ in out:
            self._count(x, 1)
        requests = dist.batch_isend_irecv(operations) if operations else []
        return OnTheWay(requests, room, devices, [x for x, _ in out])

    def _operation(self, kind: Any, x: Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(kind, x, dist.get_global_rank(self.group, rank), self.group)

    def _to_wire(self, x: Tensor) -> Tensor:
        """x as the backend can send it: detached, contiguous and, with Gloo, on the CPU."""
        x = x.detach().contiguous()
        return x.cpu() if self._on_host else x

    def _count(self, x: Tensor, times: int) -> None:
        self._sent[0] += times * x.numel() * x.element_size()


class OnTheWay(NamedTuple):
    """Sends and receives in flight."""

    requests: list[dist.Work]
    room: list[Tensor]
    devices: list[torch.device]
    sent: list[Tensor]  # kept until they have left

    def wait(self) -> list[Tensor]:
        """Waits for them; returns the received tensors."""
        for request in self.requests:
            request.wait()
        return [x.to(device) for x, device in zip(self.room, self.devices, strict=True)]


def _pieces_first(x: Tensor, dim: int, count: int) -> Tensor:
    """(..., T, ...) -> (count, ..., T / count, ...)."""
    return x.unflatten(dim, (count, -1)).movedim(dim, 0)


def _joined(x: Tensor, dim: int) -> Tensor:
    """The inverse of `_pieces_first`."""
    return x.movedim(0, dim).flatten(dim, dim + 1)


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, value: float, cp: ContextParallel) -> Tensor:
        dim = dim % x.dim()
        ctx.cp, ctx.dim, ctx.length = cp, dim, x.shape[dim]
        padding = cp.padded(x.shape[dim]) - x.shape[dim]
        if padding:
            x = pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, padding), value=value)
        return _joined(_pieces_first(x, dim, cp.count)[cp.held], dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        first_derivatives_only(ONE_PROCESS)
        whole = _joined(ctx.cp.every(_pieces_first(grads[0], ctx.dim, ctx.cp.pieces)), ctx.dim)
        return whole.narrow(ctx.dim, 0, ctx.length), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, cp: ContextParallel) -> Tensor:
        ctx.cp, ctx.dim = cp, dim % x.dim()
        cp.piece_length(x.shape[ctx.dim])
        return _joined(cp.every(_pieces_first(x, ctx.dim, cp.pieces)), ctx.dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _joined(_pieces_first(grads[0], ctx.dim, ctx.cp.count)[ctx.cp.held], ctx.dim), None, None


class _SumsBefore(torch.autograd.Function):
    """The exclusive prefix sum over pieces; its gradient is the exclusive suffix sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: ContextParallel) -> Tensor:
        ctx.cp = cp
        every = cp.every(x)
        return (every.cumsum(0) - every)[cp.held]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        first_derivatives_only(ONE_PROCESS)
        every = ctx.cp.every(grads[0])
        return (every.sum(0) - every.cumsum(0))[ctx.cp.held], None


class _TailsBefore(torch.autograd.Function):
    """(pieces, ...): the x of the piece preceding each of this rank's; zeros before the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: ContextParallel) -> Tensor:
        ctx.cp = cp
        every = cp.every(x)
        return torch.cat([torch.zeros_like(every[:1]), every[:-1]])[cp.held]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        first_derivatives_only(ONE_PROCESS)
        every = ctx.cp.every(grads[0])
        return torch.cat([every[1:], torch.zeros_like(every[:1])])[ctx.cp.held], None


class _SumOfLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: ContextParallel) -> Tensor:
        ctx.size = cp.size
        return cp.total(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.size, None


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, cp: ContextParallel, to: ContextParallel) -> Tensor:
        ctx.dim, ctx.cp, ctx.to = dim, cp, to
        return cp.move_pieces(x, to, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        first_derivatives_only(ONE_PROCESS)
        return ctx.to.move_pieces(grads[0].contiguous(), ctx.cp, ctx.dim), None, None, None
