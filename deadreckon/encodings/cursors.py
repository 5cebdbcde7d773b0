"""Cursors: distributions over positions that a recurrent network moves token by token, and their superpositions.

    hidden_t = GRU(x)_t,   reset = σ(·),  move = softmax(·) over (+1, −1, stay)           for each cursor
    h_t = filter(h_{t−1}; reset, move, γ)   a distribution over P positions: see `dr.histogram_filter`
    e_t = Σ_p h_t[p] f(p),   f(p) = [sin(p · ω), cos(p · ω)],   ω_m = base^(−2m / d)

One in five key cursors only ever steps forward: a token is at its place in the document. The query cursors that meet
it may jump there (the copy branch), by causal self-attention over tokens with one more choice, not to jump.

Of e_t, only inner products matter, and those of f(0) … f(P − 1) are the same in fewer dimensions: most of the waves are
so long that they hardly differ. For d = 340 there are 32 for 64 positions, 80 for 256, 104 for 512.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.utils._python_dispatch import _disable_current_modes

from deadreckon.encodings.base import BY_PLACE, CROPPABLE, GROWING, Context, Sizes
from deadreckon.encodings.maps import Projection, SelfInitialised
from deadreckon.encodings.recurrence import Recurrence
from deadreckon.filters.histogram import histogram_filter, superpose
from deadreckon.ops.pointwise import at_least_single
from deadreckon.ops.tracing import operator, traced, without_autocast

COPY_WIDTH = 32  # channels of the copy branch's queries and keys
KEPT = CROPPABLE + 2  # places: one is left when `crop` has undone so many, and one more token may have been interrupted
HELD = {"cpu": 1 << 24, "cuda": 1 << 28}  # pairs of a token and one it may jump to that are held at a time
ROOM = {"cpu": 64, "cuda": 1024}  # tokens that there is room for in the copy branch's cache, at the least


@cache
@torch.inference_mode(False)  # or one that is made there would be of no use for training
def waves(positions: int, width: int, base: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """f of all positions (P, r), turned so that all but r ≤ d channels are zero to rounding, and these alike in size.

    Channels that differ in size would lose more when they are rounded to half precision.
    """
    steps = torch.arange(0, width, 2, dtype=torch.float64)
    phase = torch.arange(positions, dtype=torch.float64)[:, None] * base ** (-steps / width)
    u, s, _ = torch.linalg.svd(torch.cat([phase.sin(), phase.cos()], dim=-1), full_matrices=False)
    rank = min(8 * math.ceil(int((s > s[0] * torch.finfo(dtype).eps).sum()) / 8), len(s))
    order = torch.arange(rank, dtype=torch.float64)
    cosines = (torch.pi * (order[:, None] + 0.5) * order / rank).cos() * (2 / rank) ** 0.5  # turns, and mixes
    cosines[:, 0] *= 0.5**0.5
    return (u[:, :rank] * s[:rank] @ cosines.T).to(device, dtype)


def _table(like: Tensor, positions: int, width: int, base: float) -> Tensor:
    """`waves` as an operator, on the device and in the dtype of a tensor."""
    return waves(positions, width, base, like.device, like.dtype).clone()


def _table_room(like: Tensor, positions: int, width: int, base: float) -> Tensor:
    with _disable_current_modes():  # how many waves there are has to be computed
        channels = waves(positions, width, base, torch.device("cpu"), like.dtype).shape[1]
    return like.new_empty(positions, channels)


table_of_waves = operator("deadreckon::waves", _table, _table_room)


class Gates(NamedTuple):
    """The gates of a group of F cursors at each token, as :func:`deadreckon.superpose` takes them."""

    reset: Tensor  # (B, T, F)
    move: Tensor  # (B, T, F, 3)
    gamma: Tensor  # (F,)
    copy: Tensor | None  # (B, T, F, P + 1)

    def between(self, start: int, end: int) -> Gates:
        """Those of a range of tokens."""
        copy = None if self.copy is None else self.copy[:, start:end]
        return Gates(self.reset[:, start:end], self.move[:, start:end], self.gamma, copy)

    def histograms(self, positions: int, before: Tensor | None) -> Tensor:
        """The distributions over positions after each token: (B, T, F, P)."""
        return histogram_filter(self.reset, self.move, self.gamma, positions=positions, copy=self.copy, initial=before)

    def superpositions(self, table: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Their superpositions (B, T, F, d), and the last histograms (B, F, P)."""
        gates = self.reset, self.move, self.gamma
        return superpose(*gates, table, copy=self.copy, initial=before, final=True)


class Streams(NamedTuple):
    """One number or vector for each cursor: of queries (B, T, layers, Hq, C, ·), of keys (B, T, layers, H, C, ·)."""

    queries: Tensor
    keys: Tensor

    def of_layers(self) -> list[Streams]:
        """Each layer's, without that dimension."""
        return [Streams(*pair) for pair in zip(self.queries.unbind(2), self.keys.unbind(2), strict=True)]


class Reading(NamedTuple):
    """All gates and histograms, for pictures."""

    reset: Streams  # (…, 1)
    move: Streams  # (…, 3): +1, −1, stay
    histograms: Streams  # (…, P)


class Cursors(SelfInitialised, nn.Module):
    """The cursors of so many layers, moved by one recurrent network.

    Args:
        sizes: of each of these layers.
        layers: how many.
        recurrence: the network.
        positions, width, cursors, copy, base, gamma, noise: as the encoding `prism` has them.
    """

    def __init__(
        self, sizes: Sizes, layers: int, recurrence: Recurrence, positions: int, width: int, cursors: int, copy: int,
        base: float, gamma: float, noise: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.positions, self.width, self.base, self.gamma = positions, width, base, gamma
        self.noise: float | Tensor = noise  # a tensor where it changes in training, which a CUDA graph reads again
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

    def forward(self, x: Tensor, context: Context, dtype: torch.dtype) -> list[Streams]:
        """Superpositions (B, T, heads, C, r) for each layer, in a dtype: histograms are never of half precision."""
        with without_autocast(x):
            x, context, tokens = _unpacked(at_least_single(x), context)
            table = table_of_waves(x.detach(), self.positions, self.width, self.base).to(dtype)
            if context.recent is None:
                filters = self._filters(x, context)
                superpositions = torch.cat([gates.superpositions(table, before)[0] for gates, before in filters], dim=2)
            else:
                superpositions = self._advance(x, context, table)
            places = context.positions.clamp(0, self.positions - 1)
            streams = self._sort(superpositions, table[places].expand(len(x), -1, -1))
            return Streams(*(_packed(e, tokens) for e in streams)).of_layers()

    def _advance(self, x: Tensor, context: Context, table: Tensor) -> Tensor:
        """Superpositions (B, T, F, r) of a piece, so many tokens at a time that all of them see few keys together."""
        length, seen = x.shape[1], (context.seen + x.shape[1]) * max(1, self.jumping) * len(x)
        size = max(1, HELD.get(x.device.type, HELD["cpu"]) // seen)
        assert context.recent is not None
        if length > 1:  # which would write over what `crop` may need of the state before
            context.recent.update({name: context.recent[name].clone() for name in BY_PLACE if name in context.recent})
        found = []
        for start in range(0, length, size):
            some = context if size >= length else context.of_tokens(start, start + size)
            filters = self._filters(x[:, start : start + size], some)
            kept = [_superpose_and_keep(gates, table, before) for gates, before in filters]
            _remember(some, "histogram", torch.cat([h for _, h in kept], dim=2))
            found.append(torch.cat([e for e, _ in kept], dim=2))
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    @torch.no_grad()
    def read(self, x: Tensor, context: Context) -> Reading:
        """What the cursors do on whole sequences x: gates and histograms. Fixed key cursors always step forward."""
        x = at_least_single(x)
        filters = [gates for gates, _ in self._filters(x, context)]
        histograms = [gates.histograms(self.positions, None) for gates in filters]
        places = context.positions.clamp(0, self.positions - 1).expand(x.shape[:2])
        fixed = {
            "reset": x.new_zeros(*x.shape[:2], 1),
            "move": x.new_tensor([1, 0, 0]).expand(*x.shape[:2], 3),
            "histograms": torch.nn.functional.one_hot(places, self.positions).to(x.dtype),
        }
        walked = {
            "reset": torch.cat([gates.reset for gates in filters], dim=2).unsqueeze(-1),
            "move": torch.cat([gates.move for gates in filters], dim=2),
            "histograms": torch.cat(histograms, dim=2),
        }
        return Reading(**{name: self._sort(walked[name], fixed[name]) for name in fixed})

    def _filters(self, x: Tensor, context: Context) -> list[tuple[Gates, Tensor | None]]:
        """Gates of the cursors that only walk and of those that also jump, with their histograms so far."""
        hidden = self._recur(x, context)
        actions = self._decide(self.gates, hidden).unflatten(-1, (-1, 4))
        reset, move = actions[..., 0].sigmoid(), actions[..., 1:].softmax(-1)
        copy = self._copies(x, hidden, context) if self.jumping else None
        if context.recent is not None:  # padding leaves a cursor where it starts
            padding = (context.positions < 0).expand(x.shape[:2])
            reset = torch.where(padding[..., None], 1.0, reset)
            stays = torch.arange(3, device=x.device) == 2
            move = torch.where(padding[..., None, None], stays.to(move.dtype), move)
            if copy is not None:
                none = pad(copy.new_zeros(self.positions), (0, 1), value=1.0)
                copy = torch.where(padding[..., None, None], none, copy)
        gamma = 1 + at_least_single(self.sharpness).exp()
        kept = _recall(context, "histogram", len(x))
        filters: list[tuple[Gates, Tensor | None]] = []
        for part, jumps in ((slice(self.walking), None), (slice(self.walking, None), copy)):
            if gamma[part].numel():
                before = None if kept is None else kept[:, part]
                filters.append((Gates(reset[:, :, part], move[:, :, part], gamma[part], jumps), before))
        return filters

    def _decide(self, part: nn.Linear, hidden: Tensor) -> Tensor:
        """The logits of gates, in training with noise, which only clear decisions withstand."""
        logits = _apply(part, hidden)
        silent = not self.training or not (isinstance(self.noise, Tensor) or self.noise)
        return logits if silent else logits + self.noise * torch.randn_like(logits)

    def _recur(self, x: Tensor, context: Context) -> Tensor:
        """Hidden states (B, T, hidden)."""
        recent, real = context.recent, (context.positions >= 0).unsqueeze(-1)
        past = _recall(context, "hidden", len(x))
        before = self.recurrence.first(x).expand(len(x), -1) if past is None else past
        waiting = 0 if recent is None else (-context.positions[:, :1]).clamp(0, x.shape[1])  # (B, 1) tokens of padding
        if past is not None and x.shape[1] == 1:  # without a question to the device, for which the host would wait
            hidden = torch.where(real, self.recurrence(x, before), self.recurrence.first(x))
        elif isinstance(waiting, Tensor) and bool(waiting.any()):
            # Rows begin at their first token and end with what nobody reads; then they go back to where they were.
            order = torch.arange(x.shape[1], device=x.device) + waiting
            rolled = x.gather(1, (order % x.shape[1]).unsqueeze(-1).expand_as(x))
            hidden = self.recurrence(rolled, before)
            back = (order - 2 * waiting).clamp(min=0).unsqueeze(-1).expand_as(hidden)
            hidden = torch.where(real, hidden.gather(1, back), self.recurrence.first(x))
        else:
            hidden = self.recurrence(x, before)
        if recent is not None:
            _remember(context, "hidden", hidden)
        return hidden

    def _copies(self, x: Tensor, hidden: Tensor, context: Context) -> Tensor:
        """Where jumping cursors jump to: (B, T, F, P + 1), the last for not at all."""
        q, k = (_apply(part, x).unflatten(-1, (-1, COPY_WIDTH)) for part in (self.copy_query, self.copy_key))
        k = k.transpose(1, 2) if context.recent is None else _kept_keys(context, k)  # (B, F, S, W), each at its place
        keys = k.shape[2]
        scores = (q.transpose(1, 2) @ k.mT).transpose(1, 2) * COPY_WIDTH**-0.5  # (B, T, F, S)
        places = torch.arange(keys, device=x.device)
        seen = places <= context.positions[..., None]  # (B or 1, T, S); of padding, before 0, there are none
        scores = scores.masked_fill(~seen.unsqueeze(2), -torch.inf)
        chances = torch.cat([scores, self._decide(self.no_copy, hidden).unsqueeze(-1)], dim=-1).softmax(-1)
        jumps, none = chances[..., :keys], chances[..., keys:]
        # A token beyond the last position is at the last position.
        beyond = (jumps * (places >= self.positions - 1)).sum(-1, keepdim=True)
        order = torch.arange(self.positions - 1, device=x.device)
        within = jumps.gather(-1, order.clamp(max=keys - 1).expand(*jumps.shape[:3], -1)) * (order < keys)
        return torch.cat([within, beyond, none], dim=-1)

    def _sort(self, filtered: Tensor, fixed: Tensor) -> Streams:
        """Cursors as heads have them, from what the filters (B, T, F, ·) and fixed cursors (B, T, ·) are at."""
        queries, keys, jumps = filtered.split([self.walking_queries, self.keys - self.fixed, self.jumping], dim=2)
        if self.jumping:
            # Computed on the device, so that a CUDA graph may hold it.
            key = torch.arange(self.keys, device=filtered.device)
            met = key.view(-1, 1, self.key_shape[2]).expand(-1, self.group, -1).flatten()  # by each query cursor
            fixed = fixed.unsqueeze(2).expand(-1, -1, self.fixed, -1)
            queries = torch.cat([queries, jumps], dim=2)[:, :, _order(met % self.copy == 0)]
            keys = torch.cat([keys, fixed], dim=2)[:, :, _order(key % self.copy == 0)]
        return Streams(queries.unflatten(2, self.query_shape), keys.unflatten(2, self.key_shape))


def _order(last: Tensor) -> Tensor:
    """The index of each item after those marked in `last` (booleans) have been moved behind the others, in order."""
    return torch.where(last, (~last).sum() + last.cumsum(0), (~last).cumsum(0)) - 1


def _apply(part: nn.Linear, x: Tensor) -> Tensor:
    """A linear map in the dtype of x."""
    return linear(x, part.weight.to(x.dtype), None if part.bias is None else part.bias.to(x.dtype))


def _superpose_and_keep(gates: Gates, table: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Superpositions, and the last histograms (B, up to 65, F, P)."""
    length = gates.reset.shape[1]
    cut, earlier = max(0, length - CROPPABLE - 1), []
    if cut:
        e, before = gates.between(0, cut).superpositions(table, before)
        earlier.append(e)
    h = gates.between(cut, length).histograms(len(table), before)
    return torch.cat([*earlier, h.to(table.dtype) @ table], dim=1), h


def _remember(context: Context, name: str, x: Tensor) -> None:
    """Keeps x (B, T, ...) of the last tokens by their places, so many that `crop` can undo CROPPABLE and one is left.

    One token is written where nothing is that the state before it might need: in place, as a CUDA graph needs it.
    """
    assert context.recent is not None
    x, kept = x[:, -CROPPABLE - 1 :], context.recent.get(name)
    kept = x.new_zeros(len(x), KEPT, *x.shape[2:]) if kept is None else kept
    rows = torch.arange(len(x), device=x.device).unsqueeze(1)
    kept[rows, context.positions[:, -x.shape[1] :] % KEPT] = x
    context.recent[name] = kept


def _recall(context: Context, name: str, batch: int) -> Tensor | None:
    """What was kept of the token before these, (B, ...); None where nothing was.

    Before a row's first token that is its start, which all padding has left at place -1.
    """
    kept = None if context.recent is None else context.recent.get(name)
    if kept is None:
        return None
    return kept[torch.arange(batch, device=kept.device), (context.positions[:, 0] - 1).clamp(min=-1) % KEPT]


def _kept_keys(context: Context, k: Tensor) -> Tensor:
    """The copy branch's cache (B, F, S, W) with the keys of new tokens (B, T, F, W), each where its place says.

    S is the room there is, so that a CUDA graph serves until that is used up. Nothing looks beyond a token's place.
    """
    assert context.recent is not None
    kept, needed = context.recent.get(GROWING), context.seen + k.shape[1]
    if kept is None or kept.shape[2] < needed:
        grown = k.new_zeros(len(k), k.shape[2], _room(needed, k.device), COPY_WIDTH)
        if kept is not None:
            grown[:, :, : kept.shape[2]] = kept
        kept = grown
    rows = torch.arange(len(k), device=k.device).unsqueeze(1)
    # A row with padding has none of these tokens at the last place.
    kept[rows, :, torch.where(context.positions < 0, kept.shape[2] - 1, context.positions)] = k
    context.recent[GROWING] = kept
    return kept


def _room(tokens: int, device: torch.device) -> int:
    """For so many tokens: of few sizes, a quarter larger each, since a graph is captured for each."""
    least = room = ROOM.get(device.type, ROOM["cpu"])
    while room < tokens:
        room += max(least, room // 4 // least * least)
    return room


def _unpacked(x: Tensor, context: Context) -> tuple[Tensor, Context, tuple[Tensor, Tensor] | None]:
    """Packed documents as rows, with their context, and the row and column (T,) of each token.

    A tracer does not know how long the longest is: rows are then as long as all together.
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
