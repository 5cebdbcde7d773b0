"""Continuous batching: independent sequences of any lengths, decoded together in rows of one batch.

    read(prompts)    prefills prompts of any lengths together, into free rows
    admit(cache)     puts the sequences of a KV cache that was computed elsewhere into free rows
    step(ids)        decodes the next token of every row at once: on a GPU one CUDA graph, whatever is in the rows
    drop(row)        frees the row
    take(row)        frees the row, and returns its KV cache

On a GPU all rows share one decoder per layer, which addresses each row's segments by pointer
(`ops/streaming/fused.py`): sequences that were read together stay in one KV cache, whose memory is freed when all of
them are dropped or have closed a tail. When one tail is full all are closed at once, since the cost is kernel launches;
from then on they are full at the same step. Only joining a row's segments is done row by row; rows of equal length that
were read together share even that. Elsewhere rows are decoded one after another, each with its own cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from deadreckon.encodings.base import ALWAYS_AS_MANY, BY_PLACE
from deadreckon.models.cache import StateLayer
from deadreckon.models.graphs import CapturedStep, CudaGraph, Graph, count, switched_on
from deadreckon.models.huggingface import DeadReckonForCausalLM
from deadreckon.models.state import LayerState
from deadreckon.models.surroundings import Surroundings, hooked
from deadreckon.ops.streaming.decode import close_tail, closes
from deadreckon.ops.streaming.past import Past, StaticDecoder, lasting


def fork(cache: Cache) -> Cache:
    """A second KV cache for the same prefix, whose keys and values are shared, not copied."""
    return _with_states(cache, [layer.state.fork() for layer in cache.layers])


def _with_states(cache: Cache, states: Sequence[LayerState]) -> Cache:
    """A KV cache of the same type with other layer states."""
    other = copy(cache)
    other.layers = [copy(layer) for layer in cache.layers]
    for layer, state in zip(other.layers, states, strict=True):
        layer.state = state
    return other


@dataclass
class _Row:
    """A sequence in a KV cache, which it may share with others.

    Attributes:
        number: its index in the cache's batch; its first `masked` tokens are left padding.
        ahead: tokens that kernels have added, but that the cache has not counted yet.
        room: how many more tokens kernels can add.
    """

    cache: Cache
    number: int
    masked: int
    ahead: int = 0
    room: int = 0


def _separate(rows: Sequence[_Row]) -> Cache:
    """Moves sequences of one KV cache, with equal left padding, to a cache of their own, without the padding."""
    cache, masked = rows[0].cache, rows[0].masked
    state: LayerState = cache.layers[0].state
    if len(rows) < state.batch or state.left_out is not None:
        chosen = [row.number for row in rows]
        cache = _with_states(cache, [layer.state.alone(chosen, masked) for layer in cache.layers])
        for number, row in enumerate(rows):
            row.cache, row.number, row.masked = cache, number, 0
    return cache


class Streams:
    """A batch with a fixed number of rows for continuous batching with one model.

    Args:
        model: in evaluation mode. It is decoded row by row where decoding kernels do not support its sizes or dtype,
            where the state grows outside the KV cache (PRISM's copy branch), and where modules have hooks.
        rows: maximum number of sequences at a time.
        graph: the class that captures a step; by default CUDA graphs on a GPU, and elsewhere, or with
            ``DEADRECKON_GRAPHS=0``, none: row by row.
    """

    def __init__(self, model: DeadReckonForCausalLM, rows: int, graph: type[Graph] | None = None) -> None:
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise ValueError(f"rows: expected an integer of 1 or more, got {rows!r}")
        self.model, self.rows = model, list[_Row | None]([None] * rows)
        self.graph = CudaGraph if graph is None and model.device.type == "cuda" and switched_on() else graph
        if hooked(model.model.modules()):
            self.graph = None
        self.step_of_all: CapturedStep | None = None

    @property
    def free(self) -> list[int]:
        """Rows without a sequence."""
        return [number for number, row in enumerate(self.rows) if row is None]

    @lasting()
    def read(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Tensor]:
        """Prefills prompts of any lengths into free rows: the rows, and next-token logits (prompts, vocabulary)."""
        if not prompts or not all(prompts):
            raise ValueError("prompts: expected one or more, of at least one token each")
        self._check_free(len(prompts))
        device, longest, cache = self.model.device, max(map(len, prompts)), DynamicCache(config=self.model.config)
        masked = [longest - len(prompt) for prompt in prompts]
        ids = torch.tensor([[0] * left + list(prompt) for left, prompt in zip(masked, prompts, strict=True)])
        mask = torch.arange(longest) >= torch.tensor(masked).unsqueeze(1) if any(masked) else None
        mask = None if mask is None else mask.to(device)
        outputs = self.model(ids.to(device), mask, past_key_values=cache, logits_to_keep=1, return_dict=True)
        return self._admit(cache, masked), outputs.logits[:, -1]

    @lasting()
    def admit(self, cache: Cache) -> list[int]:
        """Puts the sequences of a KV cache into free rows, which own the cache from now on."""
        held = [layer.state for layer in cache.layers if isinstance(layer, StateLayer)]
        if not held or not all(isinstance(state, LayerState) and state.batch for state in held):
            raise ValueError("cache: expected that of sequences after their first piece, masked on the left at most")
        self._check_free(held[0].batch)
        left_out = held[0].left_out if isinstance(held[0], LayerState) else None
        return self._admit(cache, [0] * held[0].batch if left_out is None else left_out.tolist())

    def _check_free(self, wanted: int) -> None:
        if len(self.free) < wanted:
            raise ValueError(f"cache: expected {wanted} free rows of {len(self.rows)}, got {len(self.free)}")

    def _admit(self, cache: Cache, masked: list[int]) -> list[int]:
        """Puts the sequences of a KV cache, with so many masked tokens each, into free rows."""
        rows = [_Row(cache, number, left_out) for number, left_out in enumerate(masked)]
        if self.step_of_all is None and self.graph is not None:
            first = _separate([_Row(cache, 0, masked[0])])
            self.step_of_all = self._capture([layer.state for layer in first.layers], self.graph)
        numbers = self.free[: len(rows)]
        if self.step_of_all is not None:
            if self.step_of_all.surroundings != self.step_of_all.surroundings_now():
                self._capture_again(self.step_of_all)
            self._load(cache, numbers, rows, self.step_of_all)
        else:
            for row in rows:
                _separate([row])
        for number, row in zip(numbers, rows, strict=True):
            self.rows[number] = row
        return numbers

    def drop(self, number: int) -> None:
        """Frees a row. Its KV cache must not be used any more: tokens decoded since are not counted in it."""
        self._at(number)
        if self.step_of_all is not None:
            self._unload([number], self.step_of_all)
        self.rows[number] = None

    @lasting()
    def take(self, number: int) -> Cache:
        """Frees a row, and returns its KV cache, to continue the sequence elsewhere."""
        row = self._at(number)
        _separate([row])
        if self.step_of_all is not None:
            self._count([number], [row], self.step_of_all)
            for resident, layer in zip(self.step_of_all.residents, row.cache.layers, strict=True):
                state: LayerState = layer.state
                state.recent = {name: x[number : number + 1] for name, x in resident.recent.items()}
                state.past.phases = None if resident.phases is None else resident.phases[number : number + 1]
                state.detach()
        self.drop(number)
        return row.cache

    def _at(self, number: int) -> _Row:
        row = self.rows[number] if number in range(len(self.rows)) else None
        if row is None:
            raise ValueError(f"row: expected one that is taken, got {number!r}")
        return row

    @lasting()
    def step(self, ids: Tensor) -> Tensor:
        """Logits (rows, vocabulary) after the next token of each row, ids (rows,); undefined for free rows."""
        if ids.shape != (len(self.rows),):
            raise ValueError(f"ids: expected ({len(self.rows)},), one token a row, got {tuple(ids.shape)}")
        if self.step_of_all is None:
            return self._one_by_one(ids)
        if not self.step_of_all.watch.fine():
            self._capture_again(self.step_of_all)
        taken = [row for row in self.rows if row is not None]
        if not all(row.room for row in taken):
            self._renew(self.step_of_all)
        self.step_of_all.ids.copy_(ids.unsqueeze(1))
        hidden = self.step_of_all.graph.replay()
        self.step_of_all.places.add_(1)
        for row in taken:
            row.ahead, row.room = row.ahead + 1, row.room - 1
        return self.model.lm_head(hidden)[:, 0]

    def _one_by_one(self, ids: Tensor) -> Tensor:
        kind = self.model.lm_head.weight.dtype
        logits = torch.zeros(len(self.rows), self.model.config.vocab_size, device=ids.device, dtype=kind)
        for number, row in enumerate(self.rows):
            if row is not None:
                one = self.model(ids[number : number + 1, None], past_key_values=row.cache, return_dict=True)
                logits[number] = one.logits[0, 0]
        return logits

    def _capture(self, states: list[LayerState], graph: type[Graph]) -> CapturedStep | None:
        """Captures a step of all rows, initialised as copies of one sequence; None if it cannot be captured."""
        if not self._can_be_captured(states):
            return None
        from deadreckon.ops.streaming.fused import KernelDecoder

        rows, joint = len(self.rows), list[LayerState]()
        for state in states:
            past = state.past.fork()
            if past.waiting is not None and closes(past.waiting.length):  # else the captured step would do that
                close_tail(past)
            assert past.signature is not None
            assert state.origin is not None
            group = past.signature.query_heads // past.signature.heads
            decoder = KernelDecoder(past, group, rows)
            phases = None if past.phases is None else past.phases.repeat(rows, 1, 1, 1)
            whole = Past(past.signature._replace(batch=rows), 1, waiting=decoder.waiting, phases=phases)
            whole.decoder = decoder
            recent = {name: x.repeat(rows, *[1] * (x.dim() - 1)) for name, x in state.recent.items()}
            joint.append(LayerState(whole, recent, origin=state.origin._replace(batch=rows)))
        ids = torch.zeros(rows, 1, dtype=torch.int64, device=self.model.device)
        step = CapturedStep(self.model.model, self.model.model._decode, ids, joint, graph, warm=True)
        self._unload(range(rows), step)
        return step

    def _capture_again(self, step: CapturedStep) -> None:
        """Captures the step again after a change of weights or adapters, with which the rows continue."""
        if hooked(self.model.model.modules()):
            raise RuntimeError("model: expected no hooks while rows are decoded together, got one since they began")
        if Surroundings.of((), step.ids.device.type) != step.watch.expected._replace(weights=(), adapters=()):
            raise RuntimeError("autocast: expected as it was when rows began to be decoded together, got otherwise")
        step.capture()

    def _can_be_captured(self, states: list[LayerState]) -> bool:
        """Tries a step: whether decoders have fixed addresses after it, and recent inputs a fixed size."""
        tried = [state.fork() for state in states]
        start = torch.zeros(1, 1, dtype=torch.int64, device=self.model.device)
        self.model.model._decode(start, tried, start + states[0].length)
        return all(
            isinstance(state.past.decoder, StaticDecoder) and state.recent.keys() <= {*ALWAYS_AS_MANY, *BY_PLACE}
            for state in tried
        )

    def _load(self, cache: Cache, numbers: list[int], rows: list[_Row], step: CapturedStep) -> None:
        """Copies the last tokens of sequences to where the captured step reads them; segments are not copied."""
        where = torch.tensor(numbers, device=step.places.device)
        for resident, layer in zip(step.residents, cache.layers, strict=True):
            state: LayerState = layer.state
            state.detach()
            past = state.past.without_first(0, state.gated or state.left_out is None)
            if not resident.decoder.load(past, numbers, [row.masked for row in rows]):
                self._unload(numbers, step)
                raise ValueError("cache: expected fewer segments: fork a prefix less often")
            for name, x in resident.recent.items():
                x[where] = state.recent[name]
            if resident.phases is not None and past.phases is not None:
                resident.phases[where] = past.phases
        lengths = [cache.get_seq_length() - row.masked for row in rows]
        step.places[where] = torch.tensor(lengths, device=where.device).unsqueeze(1)
        for number, row in zip(numbers, rows, strict=True):
            self._loaded(number, row, step)

    def _unload(self, numbers: Iterable[int], step: CapturedStep) -> None:
        for resident in step.residents:
            for number in numbers:
                resident.decoder.unload(number)

    def _loaded(self, number: int, row: _Row, step: CapturedStep) -> None:
        row.ahead, row.room = 0, min(resident.decoder.room(number) for resident in step.residents)

    def _count(self, numbers: Sequence[int], rows: Sequence[_Row], step: CapturedStep) -> None:
        """Counts decoded tokens in the cache of these rows: not at every step, which would cost rows × layers calls."""
        for resident, layer in zip(step.residents, rows[0].cache.layers, strict=True):
            waiting = [resident.decoder.lengthen(number, row.ahead) for number, row in zip(numbers, rows, strict=True)]
            count(layer.state, waiting[0], rows[0].ahead)  # for several rows, `close` sets what waits

    def _renew(self, step: CapturedStep) -> None:
        """Closes all tails that are long enough, because one is full."""
        decoder, alike = step.residents[0].decoder, dict[tuple[int, int], list[int]]()
        for number, row in enumerate(self.rows):
            if row is not None and closes(decoder.waiting_in(number).length + row.ahead):
                alike.setdefault((id(row.cache), row.masked), []).append(number)
        caches = list[Cache]()
        for numbers in alike.values():
            rows = [self._at(number) for number in numbers]
            caches.append(_separate(rows))
            self._count(numbers, rows, step)
        for layer, resident in enumerate(step.residents):
            pasts = [cache.layers[layer].state.past for cache in caches]
            if not resident.decoder.close(pasts, list(alike.values())):
                raise RuntimeError("a sequence has more segments than a step can see")
        for numbers in alike.values():
            for number in numbers:
                self._loaded(number, self._at(number), step)
