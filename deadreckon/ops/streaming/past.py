"""`Past`: the KV cache, for every transport, gate and score."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad

from deadreckon.ops.blockwise.precision import faded
from deadreckon.ops.blockwise.runs import LEAF
from deadreckon.ops.streaming.fold import Folded, fold, tokens_worth
from deadreckon.ops.streaming.segments import Change, Segment
from deadreckon.ops.streaming.signature import Signature
from deadreckon.ops.tracing import traced


class Decoder(Protocol):
    """Decodes single tokens from a past, in place: after an interruption it has to be loaded again."""

    plain: bool  # whether it serves without Householder steps, too
    group: int  # query heads a key head

    def __init__(self, past: Past, group: int) -> None:
        """Loads the waiting tokens and the segments."""

    def load(self, past: Past) -> bool:
        """Continues from another past of the same sizes; False if there is no room for its segments."""

    @property
    def waiting(self) -> Segment:
        """The tokens that are not in a closed segment, as they came."""

    @property
    def full(self) -> bool:
        """Whether it is time to close a segment and reload."""

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, w: Tensor | None, beta: Tensor | None, gate: Tensor | None, scale: float
    ) -> Tensor:
        """The next token's output (N, G, E): q (N, G, D), k and w (N, D), v (N, E), beta (N,), gate (N, 1 | G).

        All of them contiguous.
        """

    def tensors(self) -> list[Tensor]:
        """Everything held, except the waiting tokens."""


@contextmanager
def lasting() -> Iterator[None]:
    """No gradients, but normal tensors: inference tensors could be written to in `torch.inference_mode` only."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@runtime_checkable
class StaticDecoder(Decoder, Protocol):
    """A decoder whose tensors keep their addresses: a CUDA graph may replay its steps, and the host counts them."""

    def load(self, past: Past, rows: Sequence[int] = (0,), masked: Sequence[int] = (0,)) -> bool:
        """As in `Decoder`; a decoder of several rows loads the past's sequences into these, all at once.

        The first `masked` tokens of each are not read.
        """

    def close(self, pasts: Sequence[Past], rows: Sequence[Sequence[int]]) -> bool:
        """Closes the tails of rows, all at once, and reloads them; False if there is no room for their segments.

        Each past, whose tokens are already counted, holds the sequences of its rows, whose tails are equally long. At
        least one tail is full, the others have two leaves at least.
        """

    def lengthen(self, row: int = 0, tokens: int = 1) -> Segment:
        """Counts tokens that the kernels have added to a row, and returns all that wait there."""

    def room(self, row: int = 0) -> int:
        """How many more tokens a row takes before it is time to close a segment of it."""

    def waiting_in(self, row: int) -> Segment:
        """The tokens of a row that are not in a closed segment."""

    def rewind(self, waiting: Segment) -> None:
        """Forgets a token that was counted, but that no kernel has added."""

    def ahead(self) -> bool:
        """Whether the kernels have added a token that is not counted. Synchronises with the device."""

    def unload(self, row: int = 0) -> None:
        """Releases the segments of a row, which the kernels no longer read."""

    def release(self) -> None:
        """Releases all segments before the next `load`. Nothing happens on the device."""

    def select(self, change: Change, past: Past) -> None:
        """Continues with other batch rows, which `change` selects; `past` already holds those."""


@dataclass
class Past:
    """The KV cache of :func:`deadreckon.attend_next`: all it needs of the preceding tokens; `Past()` to begin with.

    A piece is computed on a :meth:`draft`, which replaces the past once the output is there: after any exception the
    same piece can be passed again.

    Attributes:
        signature: what every piece must have in common with the first.
        length: the number of tokens so far.
        segments: from the oldest to the youngest.
        waiting: the last tokens as they came: with Householder steps, and while a decoder is in use.
        phases: (B or 1, 65, ...) sums of step angles up to each of the last tokens, one more than `crop` can undo.
        turned: how many of them are valid, at the end; the others are zeros.
        longest: the unit that keys are divided by, with powers.
        folded: the state of all tokens before the segments, with powers.
        decoder: decodes single tokens. It works in place, so that it moves from the past to a draft; without one, the
            next token creates another.
    """

    signature: Signature | None = None
    length: int = 0
    segments: list[Segment] = field(default_factory=list)
    waiting: Segment | None = None
    phases: Tensor | None = None
    turned: int = 0
    longest: Tensor | None = None
    folded: Folded | None = None
    decoder: Decoder | None = None

    def draft(self) -> Past:
        """A copy to compute the next piece on, which takes the decoder along; see :meth:`become`."""
        if self.decoder is not None and self.decoder.full and self.waiting is not None:
            self.waiting = self.waiting.kept()  # the decoder will write where they are
        draft = Past.__new__(Past)
        draft.become(self)
        draft.segments, self.decoder = list(self.segments), None
        return draft

    def become(self, draft: Past) -> None:
        """Takes over all of a draft in a single C call, which a KeyboardInterrupt cannot split."""
        vars(self).update(vars(draft))

    def fork(self) -> Past:
        """A past for another continuation. Segments are shared from here on, not copied."""
        for segment in self.segments:
            segment.shared = True
        waiting = None if self.waiting is None else self.waiting.kept()
        phases = None if self.phases is None else self.phases.clone()
        return replace(self, segments=list(self.segments), waiting=waiting, phases=phases, decoder=None)

    def __deepcopy__(self, memo: object) -> Past:
        """A copy of all but the decoder, which holds addresses of segments."""
        if self.signature is None:
            return Past()
        return self._map(torch.clone, None if self.phases is None else self.phases.clone(), self.signature)

    def detach(self) -> None:
        """Gives up the decoder, in place, for another past to take over."""
        waiting = None if self.waiting is None else self.waiting.kept()
        phases = None if self.phases is None else self.phases.clone()
        self.become(replace(self, waiting=waiting, phases=phases, decoder=None))

    def turn(self, phases: Tensor, tokens: int) -> None:
        """Appends the phases (B or 1, ..., Hr, D/2) of a piece of `tokens` tokens, or of the last of them."""
        new = phases[:, -LEAF - 1 :]
        if self.phases is not None:
            before = self.phases[:, new.shape[1] :]  # of the LEAF + 1 that are always kept
            new = torch.cat([before.expand(new.shape[0], -1, *new.shape[2:]), new], dim=1)
        missing = LEAF + 1 - new.shape[1]
        if missing or new.untyped_storage().nbytes() > new.nbytes:
            new = pad(new, (0, 0, 0, 0, missing, 0))  # and no view of a whole prefill
        self.phases = new
        self.turned = min(self.turned + tokens, LEAF + 1)

    def select(self, rows: Tensor) -> Past:
        """The past of these sequences of the batch, in this order; a row may be repeated.

        Args:
            rows: (new batch,) integers.
        """
        if not isinstance(rows, Tensor) or rows.dim() != 1 or rows.dtype not in (torch.int32, torch.int64):
            came = f"shape {tuple(rows.shape)}, {rows.dtype}" if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(f"rows: expected a tensor of integers of one dimension, got {came}")
        if self.signature is None:
            return Past()
        signature, rows = self.signature, rows.to(self.signature.device)
        on_cpu = rows.device.type == "cpu" and not traced(rows)  # elsewhere to ask would take longer than to select
        if on_cpu and bool(((rows < 0) | (rows >= signature.batch)).any()):
            raise ValueError(f"rows: expected numbers from 0 to {signature.batch - 1}, got {rows.tolist()!s:.80}")

        def change(x: Tensor) -> Tensor:
            return x.unflatten(0, (signature.batch, -1)).index_select(0, rows).flatten(0, 1)

        # One row of phases serves any batch.
        phases = self.phases if self.phases is None or self.phases.shape[0] == 1 else self.phases[rows]
        decoder = self.decoder if isinstance(self.decoder, StaticDecoder) and len(rows) == signature.batch else None
        chosen = self._map(change, phases, signature._replace(batch=len(rows)))
        if decoder is not None:  # beam search reorders at every token: it goes over to the rows that are chosen
            self.detach()
            decoder.select(change, chosen)
            chosen.decoder, chosen.waiting = decoder, decoder.waiting
        return chosen

    def without_first(self, tokens: int, gated: bool = True) -> Past:
        """Without its first tokens, which a closed gate hides from all that follow; or without any gates."""
        segments, waiting, folded = list(self.segments), self.waiting, self.length
        for held in (*segments, *([] if waiting is None else [waiting])):
            folded -= held.length
        left = max(0, tokens - folded)  # powers forget what is folded and cannot be seen
        while segments and left >= segments[0].length:
            left -= segments.pop(0).length
        if left and segments:
            segments[0], left = segments[0].without_first(left), 0
        if left and waiting is not None:
            waiting = waiting.without_first(left)
        past = replace(self, length=self.length - tokens, segments=segments, waiting=waiting, decoder=None)
        if not gated and self.signature is not None:
            past.signature = self.signature._replace(gate_heads=None)
            past.segments = [segment.without_gates() for segment in segments]
            past.waiting = None if waiting is None else waiting.without_gates()
            past.folded = None if self.folded is None else self._folded_without_gates(self.folded)
        return past

    def _folded_without_gates(self, folded: Folded) -> Folded:
        """The state as the last token sees it, where gates are open except for one that may be closed before it all."""
        totals = [gates[1] for segment in self.segments if (gates := segment.gates()) is not None]
        if self.waiting is not None and "gates" in self.waiting.storage:
            totals.append(self.waiting["gates"].sum(1, keepdim=True))
        state = folded.state * faded(torch.stack(totals).sum(0), folded.state.dtype).unsqueeze(-1)
        return folded._replace(state=state[:, :, :1].contiguous())  # that of all query heads

    def to(self, device: torch.device | str) -> Past:
        """A copy of the past, on any device."""
        if not isinstance(device, torch.device | str):
            raise ValueError(f"device: expected a torch.device or its name, got {device!r}")
        if self.signature is None:
            return Past()
        phases = None if self.phases is None else self.phases.to(device, copy=True)
        moved = torch.empty(0, device=device).device  # with its index
        return self._map(lambda x: x.to(device, copy=True), phases, self.signature._replace(device=moved))

    def _map(self, change: Change, phases: Tensor | None, signature: Signature) -> Past:
        return Past(
            signature,
            self.length,
            [segment.map(change) for segment in self.segments],
            None if self.waiting is None else self.waiting.kept().map(change),
            phases,
            self.turned,
            None if self.longest is None else change(self.longest),
            None if self.folded is None else Folded(*map(change, self.folded)),
        )

    def tensors(self) -> list[Tensor]:
        """Everything held, once."""
        holders = [*self.segments, *(part for part in (self.waiting, self.decoder) if part is not None)]
        held = [x for holder in holders for x in holder.tensors()]
        return held + [x for x in (self.phases, self.longest, *(self.folded or ())) if x is not None]

    @property
    def croppable(self) -> int:
        """The number of tokens that :meth:`crop` can undo now (it can also undo all).

        At least back to any of the last 64 tokens of the sequence at its longest: tokens that were undone before count.
        Often more; tokens that are folded or in a closed segment of Householder steps cannot be undone.
        """
        waiting = 0 if self.waiting is None else self.waiting.length
        allowed = waiting + sum(segment.length for segment in self.segments if segment.product is None)
        return allowed if self.phases is None else min(allowed, self.turned - 1)

    def crop(self, tokens: int) -> None:
        """Undoes the last tokens, in place: up to `croppable`, or all.

        Raises:
            ValueError: if that is more than there are, or than can be undone.
        """
        check_crop(tokens, self.length, self.croppable)
        self.become(self._cropped(tokens))

    def _cropped(self, tokens: int) -> Past:
        if tokens == self.length:
            return Past()
        cropped = replace(self, length=self.length - tokens, segments=list(self.segments))
        if tokens and self.phases is not None:
            cropped.phases = pad(self.phases[:, : self.phases.shape[1] - tokens], (0, 0, 0, 0, tokens, 0))
            cropped.turned = self.turned - tokens
        if tokens and self.waiting is not None:
            left = max(0, self.waiting.length - tokens)
            tokens -= self.waiting.length - left
            cropped.waiting = self.waiting.of_length(left).kept() if left else None
            cropped.decoder = None
        while tokens and tokens >= cropped.segments[-1].length:
            tokens -= cropped.segments.pop().length
        if tokens:
            last = cropped.segments[-1]
            cropped.segments[-1] = last.of_length(last.length - tokens)
        return cropped

    def fold(self, p: int) -> None:
        """Folds all but the last leaf of tokens, where that saves memory: a leaf at a time once there is a state."""
        assert self.longest is not None
        first = self.segments[0]
        gates = first.gates()
        worth = LEAF if self.folded else tokens_worth(first["k"], first["v"], None if gates is None else gates[0], p)
        tokens = sum(segment.length for segment in self.segments) - LEAF
        while tokens >= worth:
            segment = self.segments.pop(0)
            taken = min(tokens, segment.length)
            k, v, gates, to_end = segment["k"][:, :taken], segment["v"][:, :taken], segment.gates(), None
            if gates is not None:
                sums, total = gates
                to_end = torch.cat([total, sums[:, :taken].to(total.dtype)], dim=1) - sums[:, taken - 1 : taken]
            self.folded = fold(self.folded, k, v, to_end, self.longest, p)
            if taken < segment.length:
                self.segments.insert(0, segment.without_first(taken))
            tokens, worth = tokens - taken, 1


def check_crop(tokens: int, length: int, croppable: int) -> None:
    """Raises a ValueError unless so many of `length` tokens can be undone: up to `croppable`, or all."""
    if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens <= length:
        raise ValueError(f"crop: expected 0 to {length} tokens, which have been, got {tokens!r}")
    if croppable < tokens < length:
        raise ValueError(f"crop: expected at most {croppable} tokens, got {tokens}")
