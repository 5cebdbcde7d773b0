"""Cursors: distributions over positions that a recurrent network moves token by token, and their superpositions.

    hidden_t = GRU(x)_t,   reset = σ(·),  move = softmax(·) over (+1, −1, stay)           for each cursor
    h_t = filter(h_{t−1}; reset, move, γ)   a distribution over P positions: see `dr.histogram_filter`
    e_t = Σ_p h_t[p] f(p),   f(p) = [sin(p · ω), cos(p · ω)],   ω_m = base^(−2m / d)

One in five key cursors (option `copy`) is fixed: it steps forward with every token, and so is at the token's position
in the document. The query cursors that are compared with it may jump (the copy branch): causal self-attention over
tokens, with one more choice, not to jump, gives the distribution of where to.

Only inner products of e_t matter, which are the same in r ≤ d dimensions: see `waves.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deadreckon.encodings.base import BY_PLACE, CROPPABLE, GROWING, Context, Sizes
from deadreckon.encodings.maps import Projection, SelfInitialised, in_step
from deadreckon.encodings.recurrence import Recurrence
from deadreckon.encodings.waves import table_of_waves, waves_in
from deadreckon.filters.histogram import filter_next, histogram_filter, superpose
from deadreckon.ops.cursors import by_kernels, jump, jumps, jumps_by_kernels, mapped, order_of, permuted
from deadreckon.ops.modules import is_plain
from deadreckon.ops.pointwise import at_least_single
from deadreckon.ops.token import maps_of_token
from deadreckon.ops.tracing import traced, without_autocast

COPY_WIDTH = 32  # channels of the copy branch's queries and keys
KEPT = CROPPABLE + 2  # slots of ring buffers: one is left after `crop` undoes CROPPABLE, one for an interrupted token
HELD = {"cpu": 1 << 24, "cuda": 1 << 28}  # pairs of a token and a jump target in memory at a time
ROOM = {"cpu": 64, "cuda": 1024}  # minimum capacity of the copy branch's cache, in tokens


class Gates(NamedTuple):
    """The gates of a group of F cursors at each token, as :func:`deadreckon.superpose` takes them."""

    reset: Tensor  # (B, T, F)
    move: Tensor  # (B, T, F, 3)
    gamma: Tensor  # (F,)
    copy: Tensor | None  # (B, T, F, P + 1)

    def between(self, start: int, end: int) -> Gates:
        """The gates at a range of tokens."""
        copy = None if self.copy is None else self.copy[:, start:end]
        return Gates(self.reset[:, start:end], self.move[:, start:end], self.gamma, copy)

    def histograms(self, positions: int, before: Tensor | None) -> Tensor:
        """The distributions over positions after each token: (B, T, F, P)."""
        return histogram_filter(self.reset, self.move, self.gamma, positions=positions, copy=self.copy, initial=before)

    def superpositions(self, table: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Their superpositions (B, T, F, d), and the last histograms (B, F, P)."""
        gates = self.reset, self.move, self.gamma
        return superpose(*gates, table, copy=self.copy, initial=before, final=True)


class Filters(NamedTuple):
    """A group of cursors: their slice, their gates at tokens start to end, and for how many tokens gates are held."""

    part: slice
    gates: Callable[[int, int], Gates]
    size: int

    def spans(self, cut: int, length: int) -> list[tuple[int, int]]:
        """Ranges of tokens to filter at a time; none straddles the cut."""
        edges = {*range(0, cut, self.size), *range(cut, length, self.size), length}
        return list(pairwise(sorted(edges)))


class Filtered(NamedTuple):
    """What the kernel that extends a layer's queries and keys takes."""

    superpositions: Tensor  # (B, T, F, r), of all filters
    table: Tensor  # (P, r)
    places: Tensor  # (B or 1, T)
    order: Tensor  # (Hq + H, C), which filter a cursor is; −1 for fixed cursors, at the token's position


class Streams(NamedTuple):
    """One number or vector for each cursor: of queries (B, T, layers, Hq, C, ·), of keys (B, T, layers, H, C, ·)."""

    queries: Tensor
    keys: Tensor

    def of_layers(self) -> list[Streams]:
        """One for each layer, without that dimension."""
        return [Streams(*pair) for pair in zip(self.queries.unbind(2), self.keys.unbind(2), strict=True)]


class Reading(NamedTuple):
    """All gates and histograms, for plots."""

    reset: Streams  # (…, 1)
    move: Streams  # (…, 3): +1, −1, stay
    histograms: Streams  # (…, P)


class Cursors(SelfInitialised, nn.Module):
    """The cursors of one or more layers, moved by one recurrent network.

    Args:
        sizes: of each of these layers.
        layers: number of layers.
        recurrence: the network.
        positions, width, cursors, copy, base, gamma, noise: see :class:`deadreckon.encodings.prism.Prism`.
    """

    def __init__(
        self, sizes: Sizes, layers: int, recurrence: Recurrence, positions: int, width: int, cursors: int, copy: int,
        base: float, gamma: float, noise: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.positions, self.width, self.base, self.gamma = positions, width, base, gamma
        self.noise: float | Tensor = noise  # a tensor if a schedule changes it: captured CUDA graphs see the new value
        self.query_shape = (layers, sizes.n_heads, cursors)
        self.key_shape = (layers, sizes.n_kv_heads, cursors)
        self.copy, self.group = copy, sizes.n_heads // sizes.n_kv_heads
        self.keys = math.prod(self.key_shape)
        self.fixed = len(range(0, self.keys, copy)) if copy else 0  # one in so many key cursors
        # Filters in this order: query cursors that walk, key cursors that walk, query cursors that also jump.
        self.jumping = self.fixed * self.group
        self.walking_queries = math.prod(self.query_shape) - self.jumping
        self.walking = self.walking_queries + self.keys - self.fixed
        self.recurrence, hidden = recurrence, recurrence.hidden_size
        self.gates = Projection(hidden, 4 * (self.walking + self.jumping))
        self.sharpness = nn.Parameter(torch.empty(self.walking + self.jumping))  # γ = 1 + exp of it
        if self.jumping:
            self.copy_query = Projection(sizes.d_model, self.jumping * COPY_WIDTH, bias=False)
            self.copy_key = Projection(sizes.d_model, self.jumping * COPY_WIDTH, bias=False)
            self.no_copy = Projection(hidden, self.jumping)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.sharpness, math.log(self.gamma - 1))
        for part in self.children():
            part.reset_parameters()  # type: ignore[operator]

    def forward(self, x: Tensor, context: Context, dtype: torch.dtype) -> list[Streams] | list[Filtered]:
        """Superpositions (B, T, heads, C, r) for each layer, in a dtype; histograms are at least single precision."""
        if not x.shape[1]:
            raise ValueError(f"x: expected at least one token, got shape {tuple(x.shape)}")
        with without_autocast(x):
            # Kernels read half precision as it is; else one single-precision copy serves all projections.
            x, context, tokens = _unpacked(x if by_kernels(x) else at_least_single(x), context)
            table = self._table(x, dtype)
            later = context.recent is not None and "histogram" in context.recent
            if later and x.shape[1] == 1 and self.recurrence.in_one_kernel(x) and not self.noisy:
                superpositions = self._step(x, context, table)
            else:
                superpositions = self._superpositions(x, context, table)
            if tokens is None and by_kernels(x):
                order = order_of(*self.query_shape[:2], *self.key_shape[1:], self.copy, x.device)
                return [Filtered(superpositions, table, context.positions, of_layer) for of_layer in order]
            places = context.positions.clamp(0, self.positions - 1)
            streams = self._sort(superpositions, table[places].expand(len(x), -1, -1))
            return Streams(*(_packed(e, tokens) for e in streams)).of_layers()

    def _table(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The encodings f(p) of all positions, (P, r)."""
        if by_kernels(x):
            return waves_in(self.positions, self.width, self.base, x.device, dtype)
        return table_of_waves(x.detach(), self.positions, self.width, self.base).to(dtype)

    def _superpositions(self, x: Tensor, context: Context, table: Tensor) -> Tensor:
        """Superpositions (B, T, F, r) of whole rows, or of a piece: then the state for the next piece is kept."""
        length, recent = x.shape[1], context.recent
        if recent is not None and length > 1:  # which would write over what `crop` may need of the state before
            recent.update({name: recent[name].clone() for name in BY_PLACE if name in recent})
        cut = 0 if recent is None else max(0, length - CROPPABLE - 1)
        last, found = _recall(context, "histogram", len(x)), []
        for filters in self._filters(x, context):
            before, kept, some = None if last is None else last[:, filters.part], [], []
            for start, end in [(0, length)] if recent is None else filters.spans(cut, length):
                gates = filters.gates(start, end)
                if recent is None or start < cut:
                    e, before = gates.superpositions(table, before)
                else:
                    h = gates.histograms(self.positions, before)
                    e, before = h.to(table.dtype) @ table, h[:, -1]
                    kept.append(h)
                some.append(e)
            found.append(_joined(some))
            if kept:
                _remember(context, "histogram", _joined(kept), filters.part, self.walking + self.jumping)
        return _joined(found, dim=2)

    def _step(self, x: Tensor, context: Context, table: Tensor) -> Tensor:
        """Superpositions (B, 1, F, r) in a decoding step, by kernels that read and write the kept state in place."""
        recent, places, copy = context.recent, context.positions, None
        assert recent is not None
        hidden = self.recurrence.by_kernel(x, places, recent["hidden"], by_place=True)
        parts = [self.gates, self.no_copy] if self.jumping else [self.gates]
        if in_step(hidden, *parts):
            actions, *none = maps_of_token(hidden, [(part.weight, part.bias, "none", 1.0) for part in parts])
        else:
            actions, *none = (_apply(part, hidden) for part in parts)
        if self.jumping:
            q, k = self._meeting(x)
            copy = jump(q, _room_for_keys(context, k), k, none[0], places, self.positions)
        actions = actions.unflatten(-1, (-1, 4))
        h = filter_next(actions, self.sharpness, copy, recent["histogram"], places, table.dtype)
        return (h @ table).unsqueeze(1)

    @torch.no_grad()
    def read(self, x: Tensor, context: Context) -> Reading:
        """Gates and histograms of all cursors on whole sequences x. Fixed key cursors always step forward."""
        x = at_least_single(x)
        gates = [filters.gates(0, x.shape[1]) for filters in self._filters(x, context)]
        histograms = [some.histograms(self.positions, None) for some in gates]
        places = context.positions.clamp(0, self.positions - 1).expand(x.shape[:2])
        fixed = {
            "reset": x.new_zeros(*x.shape[:2], 1),
            "move": x.new_tensor([1, 0, 0]).expand(*x.shape[:2], 3),
            "histograms": torch.nn.functional.one_hot(places, self.positions).to(x.dtype),
        }
        walked = {
            "reset": torch.cat([some.reset for some in gates], dim=2).unsqueeze(-1),
            "move": torch.cat([some.move for some in gates], dim=2),
            "histograms": torch.cat(histograms, dim=2),
        }
        return Reading(**{name: self._sort(walked[name], fixed[name]) for name in fixed})

    def _filters(self, x: Tensor, context: Context) -> list[Filters]:
        """The cursors that only walk, and those that also jump."""
        hidden, length = self._recur(x, context), x.shape[1]
        actions = self._decide(self.gates, hidden).unflatten(-1, (-1, 4))
        # Split, not sliced: the gradient of each slice would be padded with zeros, and then added up.
        to_start, to_move = actions.split([1, 3], dim=-1)
        reset, move = to_start.squeeze(-1).sigmoid(), to_move.softmax(-1)
        if context.recent is not None:  # padding leaves a cursor where it starts
            padding = (context.positions < 0).expand(x.shape[:2])
            reset = torch.where(padding[..., None], 1.0, reset)
            stays = torch.arange(3, device=x.device) == 2
            move = torch.where(padding[..., None, None], stays.to(move.dtype), move)
        gamma = 1 + at_least_single(self.sharpness).exp()
        groups = [size for size in (self.walking, self.jumping) if size]
        parts = zip(reset.split(groups, 2), move.split(groups, 2), gamma.split(groups), strict=True)
        gates = [Gates(*part, copy=None) for part in parts]
        found = []
        if self.walking:
            found.append(Filters(slice(self.walking), gates[0].between, length))
        if self.jumping:
            copies = self._copies(x, hidden, context)

            def jumping(start: int, end: int) -> Gates:
                return gates[-1].between(start, end)._replace(copy=copies(start, end))

            found.append(Filters(slice(self.walking, None), jumping, self._size(x, context)))
        return found

    def _size(self, x: Tensor, context: Context) -> int:
        """For how many tokens jump distributions are held in memory at a time. Whole rows are not split."""
        if context.recent is None:
            return x.shape[1]
        choices = self.positions + 1 if by_kernels(x) else context.seen + x.shape[1]
        return max(1, HELD.get(x.device.type, HELD["cpu"]) // (choices * self.jumping * len(x)))

    def _decide(self, part: nn.Linear, hidden: Tensor) -> Tensor:
        """The logits of gates; in training with noise, which only clear decisions withstand."""
        logits = _apply(part, hidden)
        return logits + self.noise * torch.randn_like(logits) if self.noisy else logits

    @property
    def noisy(self) -> bool:
        return self.training and (isinstance(self.noise, Tensor) or bool(self.noise))

    def _recur(self, x: Tensor, context: Context) -> Tensor:
        """Hidden states (B, T, hidden), at least in single precision."""
        recent, real = context.recent, (context.positions >= 0).unsqueeze(-1)
        past, first = _recall(context, "hidden", len(x)), self.recurrence.first(x)
        before = first.expand(len(x), -1) if past is None else past
        waiting = 0 if recent is None else (-context.positions[:, :1]).clamp(0, x.shape[1])  # (B, 1) tokens of padding
        if self.recurrence.in_one_kernel(x):
            hidden = self.recurrence.by_kernel(x, context.positions, before)
        elif past is not None and x.shape[1] == 1:  # without a host-device synchronisation
            hidden = torch.where(real, self.recurrence(x, before), first)
        elif isinstance(waiting, Tensor) and bool(waiting.any()):
            # Left padding: roll rows so that they start at their first real token, run the GRU, and roll them back.
            order = torch.arange(x.shape[1], device=x.device) + waiting
            rolled = x.gather(1, (order % x.shape[1]).unsqueeze(-1).expand_as(x))
            hidden = self.recurrence(rolled, before)
            back = (order - 2 * waiting).clamp(min=0).unsqueeze(-1).expand_as(hidden)
            hidden = torch.where(real, hidden.gather(1, back), first)
        else:
            hidden = self.recurrence(x, before)
        if recent is not None:
            _remember(context, "hidden", hidden)
        return hidden

    def _meeting(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys of the copy branch, (B, T, F, W): keys in the dtype of x, since they are cached and read at
        every token, queries at least in single precision.
        """
        q, k = (_apply(part, x).unflatten(-1, (-1, COPY_WIDTH)) for part in (self.copy_query, self.copy_key))
        return q, k.to(x.dtype)

    def _copies(self, x: Tensor, hidden: Tensor, context: Context) -> Callable[[int, int], Tensor]:
        """A function of (start, end): jump probabilities at these tokens, (B, n, F, P + 1), the last for no jump."""
        q, k = self._meeting(x)
        none = self._decide(self.no_copy, hidden)
        keys = k.transpose(1, 2) if context.recent is None else _kept_keys(context, k)  # (B, F, S, W), by place

        def copies(start: int, end: int) -> Tensor:
            tokens = slice(start, end)
            places = context.positions[:, tokens]
            if jumps_by_kernels(x, keys, self.positions):
                return jumps(q[:, tokens], keys, none[:, tokens], places, self.positions, x.dtype)
            return _chances(q[:, tokens], keys, none[:, tokens], places, self.positions)

        return copies

    def _sort(self, filtered: Tensor, fixed: Tensor) -> Streams:
        """Sorts filters' values (B, T, F, ·) and fixed cursors' (B, T, ·) by layer, head and cursor."""
        queries, keys, jumps = filtered.split([self.walking_queries, self.keys - self.fixed, self.jumping], dim=2)
        if self.jumping:
            # Computed on the device, so that a CUDA graph can capture it.
            key = torch.arange(self.keys, device=filtered.device)
            met = key.view(-1, 1, self.key_shape[2]).expand(-1, self.group, -1).flatten()  # by each query cursor
            fixed = fixed.unsqueeze(2).expand(-1, -1, self.fixed, -1)
            queries = permuted(torch.cat([queries, jumps], dim=2), _order(met % self.copy == 0))
            keys = permuted(torch.cat([keys, fixed], dim=2), _order(key % self.copy == 0))
        return Streams(queries.unflatten(2, self.query_shape), keys.unflatten(2, self.key_shape))


def _order(last: Tensor) -> Tensor:
    """The index of each item after those marked in `last` (booleans) have been moved to the end, in order."""
    return torch.where(last, (~last).sum() + last.cumsum(0), (~last).cumsum(0)) - 1


def _apply(part: nn.Linear, x: Tensor) -> Tensor:
    """Applies a projection, or the module that replaces it (LoRA's), to x; at least single precision."""
    if isinstance(part, nn.Linear) and is_plain(part):
        return mapped(x, part.weight, part.bias)
    return at_least_single(part(x.to(part.weight.dtype)))


def _joined(parts: list[Tensor], dim: int = 1) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _chances(q: Tensor, k: Tensor, none: Tensor, positions: Tensor, most: int) -> Tensor:
    """Jump probabilities (B, T, F, P + 1): softmax of q (B, T, F, W) over keys (B, F, S, W), in order of positions,
    and of the logit none (B, T, F) of no jump.
    """
    keys = k.shape[2]
    scores = (q.transpose(1, 2) @ k.mT.to(q.dtype)).transpose(1, 2) * COPY_WIDTH**-0.5  # (B, T, F, S)
    places = torch.arange(keys, device=q.device)
    seen = places <= positions[..., None]  # (B or 1, T, S); of padding, before 0, there are none
    scores = scores.masked_fill(~seen.unsqueeze(2), -torch.inf)
    chances = torch.cat([scores, none.unsqueeze(-1)], dim=-1).softmax(-1)
    jumps, none = chances[..., :keys], chances[..., keys:]
    # A token beyond the last position is at the last position.
    beyond = (jumps * (places >= most - 1)).sum(-1, keepdim=True)
    order = torch.arange(most - 1, device=q.device)
    within = jumps.gather(-1, order.clamp(max=keys - 1).expand(*jumps.shape[:3], -1)) * (order < keys)
    return torch.cat([within, beyond, none], dim=-1)


def _remember(context: Context, name: str, x: Tensor, part: slice = slice(None), among: int | None = None) -> None:
    """Keeps x (B, T, ...) of the last CROPPABLE + 1 tokens in a ring buffer, by position: enough to crop CROPPABLE.

    A single token overwrites a slot that the state before it does not need: in place, as a CUDA graph requires.

    Args:
        part: the slice of the dimension after T that x has; its full size is `among`.
    """
    assert context.recent is not None
    x, kept = x[:, -CROPPABLE - 1 :], context.recent.get(name)
    if kept is None:
        kept = x.new_zeros(len(x), KEPT, x.shape[2] if among is None else among, *x.shape[3:])
    rows = torch.arange(len(x), device=x.device).unsqueeze(1)
    kept[:, :, part][rows, context.positions[:, -x.shape[1] :] % KEPT] = x
    context.recent[name] = kept


def _recall(context: Context, name: str, batch: int) -> Tensor | None:
    """What was kept of the token before these, (B, ...); None if nothing was.

    Before a row's first real token that is the initial value, which padding has written to slot -1.
    """
    kept = None if context.recent is None else context.recent.get(name)
    if kept is None:
        return None
    return kept[torch.arange(batch, device=kept.device), (context.positions[:, 0] - 1).clamp(min=-1) % KEPT]


def _kept_keys(context: Context, k: Tensor) -> Tensor:
    """The copy branch's cache (B, F, S, W) after the keys of new tokens (B, T, F, W) are written at their positions."""
    kept = _room_for_keys(context, k)
    rows = torch.arange(len(k), device=k.device).unsqueeze(1)
    # Padding is written to the last slot, which no token of a padded row uses.
    kept[rows, :, torch.where(context.positions < 0, kept.shape[2] - 1, context.positions)] = k.to(kept.dtype)
    return kept


def _room_for_keys(context: Context, k: Tensor) -> Tensor:
    """The copy branch's cache (B, F, S, W) with room for new tokens (B, T, F, W).

    S is the capacity, so that a CUDA graph can be replayed until it is used up. No token reads beyond its position.
    """
    assert context.recent is not None
    kept, needed = context.recent.get(GROWING), context.seen + k.shape[1]
    if kept is None or kept.shape[2] < needed:
        grown = k.new_zeros(len(k), k.shape[2], _room(needed, k.device), COPY_WIDTH)
        if kept is not None:
            grown[:, :, : kept.shape[2]] = kept
        kept = context.recent[GROWING] = grown
    return kept


def _room(tokens: int, device: torch.device) -> int:
    """Capacity for so many tokens: few sizes, each a quarter larger, since a CUDA graph is captured for each."""
    least = room = ROOM.get(device.type, ROOM["cpu"])
    while room < tokens:
        room += max(least, room // 4 // least * least)
    return room


def _unpacked(x: Tensor, context: Context) -> tuple[Tensor, Context, tuple[Tensor, Tensor] | None]:
    """Packed documents as rows of a batch, with their context, and the row and column (T,) of each token.

    While tracing, the longest document's length is unknown: rows are then as long as all documents together.
    """
    if context.cu_seqlens is None:
        return x, context, None
    starts, lengths = (y.to(x.device, torch.int64) for y in (context.cu_seqlens[:-1], context.cu_seqlens.diff()))
    order = torch.arange(x.shape[1] if traced(x) else int(lengths.max()), device=x.device)
    real = order < lengths.unsqueeze(1)  # (N, longest)
    rows = x[0, (starts.unsqueeze(1) + order).clamp(max=x.shape[1] - 1)]
    columns = context.positions[0]
    tokens = torch.arange(x.shape[1], device=x.device)
    documents = torch.searchsorted(starts, tokens, right=True) - 1  # of empty ones, the next that is not
    return torch.where(real.unsqueeze(-1), rows, 0), Context(order.unsqueeze(0)), (documents, columns)


def _packed(x: Tensor, places: tuple[Tensor, Tensor] | None) -> Tensor:
    return x if places is None else x[places].unsqueeze(0)
