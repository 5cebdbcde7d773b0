"""Independent sequences of any lengths, decoded together: rows of a batch that come and go.

    read(prompts)    prompts of any lengths, read together, take free rows
    admit(cache)     the sequences of a KV cache that was computed elsewhere, too
    step(ids)        the next token of every row at once: on a GPU one CUDA graph, whoever is in the rows
    drop(row)        the row is free again

A row keeps a past of its own. On a GPU all rows share one decoder a layer, which knows each row's segments by where
they lie (`ops/streaming/fused.py`); elsewhere rows are decoded one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from deadreckon.models.cache import StateLayer
from deadreckon.models.graphs import CapturedStep, CudaGraph, Graph, count
from deadreckon.models.huggingface import DeadReckonForCausalLM
from deadreckon.models.state import LayerState
from deadreckon.ops.streaming.decode import close_tail
from deadreckon.ops.streaming.past import Past


def fork(cache: Cache) -> Cache:
    """Another continuation of the same prefix, whose keys and values are shared."""
    return _with_states(cache, [layer.state.fork() for layer in cache.layers])


def _with_states(cache: Cache, states: Sequence[LayerState]) -> Cache:
    """Another KV cache of the same kind."""
    other = copy(cache)
    other.layers = [copy(layer) for layer in cache.layers]
    for layer, state in zip(other.layers, states, strict=True):
        layer.state = state
    return other


class Streams:
    """A batch of so many rows for one model.

    Args:
        model: in evaluation mode. Encodings whose steps are no kernels (stick-breaking, PRISM, higher powers) are
            decoded row by row.
        rows: how many sequences at a time.
        graph: what captures a step; None to decode row by row.
    """

    def __init__(self, model: DeadReckonForCausalLM, rows: int, graph: type[Graph] | None = None) -> None:
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise ValueError(f"rows: expected an integer of 1 or more, got {rows!r}")
        self.model, self.caches = model, list[Cache | None]([None] * rows)
        self.ahead = [0] * rows  # tokens that kernels have added to a row, but that its cache has not counted
        self.room = [0] * rows  # more tokens that they can add
        self.graph = CudaGraph if graph is None and model.device.type == "cuda" else graph
        self.step_of_all: CapturedStep | None = None

    @property
    def free(self) -> list[int]:
        """Rows without a sequence."""
        return [row for row, cache in enumerate(self.caches) if cache is None]

    @torch.no_grad()
    def read(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Tensor]:
        """Gives prompts of any lengths rows: these, and the logits (prompts, vocabulary) of what comes next."""
        if not prompts or not all(prompts):
            raise ValueError("prompts: expected one or more, of at least one token each")
        self._check_free(len(prompts))
        device, longest, cache = self.model.device, max(map(len, prompts)), DynamicCache(config=self.model.config)
        masked = [longest - len(prompt) for prompt in prompts]
        ids = torch.tensor([[0] * left + list(prompt) for left, prompt in zip(masked, prompts, strict=True)])
        mask = torch.arange(longest) >= torch.tensor(masked).unsqueeze(1) if any(masked) else None
        mask = None if mask is None else mask.to(device)
        logits = self.model(ids.to(device), mask, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        return self._admit(cache, masked), logits

    @torch.no_grad()
    def admit(self, cache: Cache) -> list[int]:
        """Gives the sequences of a KV cache rows. If there is one only, the cache belongs to its row until `drop`."""
        held = [layer.state for layer in cache.layers if isinstance(layer, StateLayer)]
        if not held or not all(isinstance(state, LayerState) and state.batch for state in held):
            raise ValueError("cache: expected that of sequences after their first piece, masked on the left at most")
        self._check_free(held[0].batch)
        left_out = held[0].left_out if isinstance(held[0], LayerState) else None
        return self._admit(cache, [0] * held[0].batch if left_out is None else left_out.tolist())

    def _check_free(self, wanted: int) -> None:
        if len(self.free) < wanted:
            raise ValueError(f"cache: expected {wanted} free rows of {len(self.caches)}, got {len(self.free)}")

    def _admit(self, cache: Cache, masked: list[int]) -> list[int]:
        """Gives the sequences of a KV cache, of which so many tokens are masked, rows."""
        caches = [cache]
        if len(masked) > 1 or any(masked):
            caches = [
                _with_states(cache, [layer.state.alone(number, left) for layer in cache.layers])
                for number, left in enumerate(masked)
            ]
        if self.step_of_all is None and self.graph is not None:
            self.step_of_all = self._capture([layer.state for layer in caches[0].layers], self.graph)
        rows = self.free[: len(caches)]
        for row, one in zip(rows, caches, strict=True):
            self.caches[row] = one
            if self.step_of_all is not None:
                self._load(row, one, self.step_of_all)
        return rows

    def drop(self, row: int) -> Cache:
        """Frees a row. Returns its KV cache, which counts all tokens now, and with which the sequence may go on."""
        cache = self.caches[row] if row in range(len(self.caches)) else None
        if cache is None:
            raise ValueError(f"row: expected one that is taken, got {row!r}")
        if self.step_of_all is not None:
            self._count(row, cache, self.step_of_all)
            for resident, layer in zip(self.step_of_all.residents, cache.layers, strict=True):
                state: LayerState = layer.state
                state.recent = {name: x[row : row + 1] for name, x in resident.recent.items()}
                state.past.phases = None if resident.phases is None else resident.phases[row : row + 1]
                state.detach()
                resident.decoder.unload(row)
        self.caches[row] = None
        return cache

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Logits (rows, vocabulary) after the next token of each row, ids (rows,); of free rows they mean nothing."""
        if ids.shape != (len(self.caches),):
            raise ValueError(f"ids: expected ({len(self.caches)},), one token a row, got {tuple(ids.shape)}")
        if self.step_of_all is None:
            return self._one_by_one(ids)
        for row, cache in enumerate(self.caches):
            if cache is not None and not self.room[row]:
                self._renew(row, cache, self.step_of_all)
        self.step_of_all.ids.copy_(ids.unsqueeze(1))
        hidden = self.step_of_all.graph.replay()
        self.step_of_all.places.add_(1)
        self.ahead = [tokens + 1 for tokens in self.ahead]
        self.room = [max(0, tokens - 1) for tokens in self.room]
        return self.model.lm_head(hidden)[:, 0]

    def _count(self, row: int, cache: Cache, step: CapturedStep) -> None:
        """Counts a row's tokens in its cache: not at every step, since rows times layers would take longer than it."""
        for resident, layer in zip(step.residents, cache.layers, strict=True):
            count(layer.state, resident.decoder, row, self.ahead[row])
        self.ahead[row] = 0

    def _one_by_one(self, ids: Tensor) -> Tensor:
        logits = torch.zeros(len(self.caches), self.model.config.vocab_size, device=ids.device)
        for row, cache in enumerate(self.caches):
            if cache is not None:
                logits[row] = self.model(ids[row : row + 1, None], past_key_values=cache).logits[0, 0]
        return logits

    def _capture(self, states: list[LayerState], graph: type[Graph]) -> CapturedStep | None:
        """A step of all rows, which begin as copies of one sequence."""
        from deadreckon.ops.streaming.fused import KernelDecoder

        rows, joint = len(self.caches), list[LayerState]()
        for state in states:
            past = state.past
            assert past.signature is not None
            assert state.origin is not None
            if past.signature.score not in ("softmax", 2):
                return None
            group = past.signature.query_heads // past.signature.heads
            decoder = KernelDecoder(past, group, rows)
            phases = None if past.phases is None else past.phases.repeat(rows, 1, 1, 1)
            whole = Past(past.signature._replace(batch=rows), 1, waiting=decoder.waiting, phases=phases)
            whole.decoder = decoder
            recent = {name: x.repeat(rows, *[1] * (x.dim() - 1)) for name, x in state.recent.items()}
            joint.append(LayerState(whole, recent, origin=state.origin._replace(batch=rows)))
        ids = torch.zeros(rows, 1, dtype=torch.int64, device=self.model.device)
        return CapturedStep(self.model.model._decode, ids, joint, graph, warm=True)

    def _load(self, row: int, cache: Cache, step: CapturedStep) -> None:
        """Copies a row's states to where the step reads them. What it shares with other sequences stays where it is."""
        for resident, layer in zip(step.residents, cache.layers, strict=True):
            state: LayerState = layer.state
            state.detach()
            if not resident.decoder.load(state.past, row):
                raise ValueError("cache: expected fewer segments: fork a prefix less often")
            for name, x in resident.recent.items():
                x[row].copy_(state.recent[name][0])
            if resident.phases is not None and state.past.phases is not None:
                resident.phases[row].copy_(state.past.phases[0])
        step.places[row].fill_(cache.get_seq_length())
        self._loaded(row, step)

    def _loaded(self, row: int, step: CapturedStep) -> None:
        self.ahead[row], self.room[row] = 0, min(resident.decoder.room(row) for resident in step.residents)

    def _renew(self, row: int, cache: Cache, step: CapturedStep) -> None:
        """Closes the tails of a row, which are full."""
        self._count(row, cache, step)
        for resident, layer in zip(step.residents, cache.layers, strict=True):
            past: Past = layer.state.past
            past.waiting = resident.decoder.waiting_in(row).map(torch.clone)
            close_tail(past)
            if not resident.decoder.load(past, row):
                raise RuntimeError("a sequence has more segments than a step can see")
        self._loaded(row, step)
