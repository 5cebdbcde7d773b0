"""Independent sequences of any lengths, decoded together: rows of a batch that come and go.

    admit(cache)     a prompt's KV cache, computed alone, takes a free row
    step(ids)        the next token of every row at once: on a GPU one CUDA graph, whoever is in the rows
    drop(row)        the row is free again

A row keeps a past of its own. On a GPU all rows share one decoder a layer, which knows each row's segments by where
they lie (`ops/streaming/fused.py`); elsewhere rows are decoded one after another.
"""

from __future__ import annotations

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


def fork(cache: Cache) -> DynamicCache:
    """Another continuation of the same prefix, whose keys and values are shared."""
    other = copy(cache)
    other.layers = [copy(layer) for layer in cache.layers]
    for layer in other.layers:
        layer.state = layer.state.fork()
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
        self.graph = CudaGraph if graph is None and model.device.type == "cuda" else graph
        self.step_of_all: CapturedStep | None = None

    @property
    def free(self) -> list[int]:
        """Rows without a sequence."""
        return [row for row, cache in enumerate(self.caches) if cache is None]

    @torch.no_grad()
    def admit(self, cache: Cache) -> int:
        """Gives a sequence a row. Its KV cache (batch size 1, no masked tokens) belongs to the row until `drop`."""
        held = [layer.state for layer in cache.layers if isinstance(layer, StateLayer)]
        states = [state for state in held if isinstance(state, LayerState)]
        if not held or len(states) < len(held) or any(s.batch != 1 or s.left_out is not None for s in states):
            raise ValueError("cache: expected that of one sequence without masked tokens, after its first piece")
        if not self.free:
            raise ValueError(f"cache: expected a free row, all {len(self.caches)} are taken")
        row = self.free[0]
        if self.step_of_all is None and self.graph is not None:
            self.step_of_all = self._capture(states, self.graph)
        self.caches[row] = cache
        if self.step_of_all is not None:
            self._load(row)
        return row

    def drop(self, row: int) -> Cache:
        """Frees a row. Returns its KV cache, with which the sequence may go on later."""
        cache = self.caches[row] if row in range(len(self.caches)) else None
        if cache is None:
            raise ValueError(f"row: expected one that is taken, got {row!r}")
        if self.step_of_all is not None:
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
        taken = [(row, cache) for row, cache in enumerate(self.caches) if cache is not None]
        for row, cache in taken:
            if any(resident.decoder.is_full(row) for resident in self.step_of_all.residents):
                self._renew(row, cache)
        places = [0 if cache is None else cache.get_seq_length() for cache in self.caches]
        self.step_of_all.ids.copy_(ids.unsqueeze(1))
        self.step_of_all.places.copy_(torch.tensor(places).unsqueeze(1))
        hidden = self.step_of_all.graph.replay()
        for row, cache in taken:
            for resident, layer in zip(self.step_of_all.residents, cache.layers, strict=True):
                count(layer.state, resident.decoder, row)
        return self.model.lm_head(hidden)[:, 0]

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

    def _load(self, row: int) -> None:
        """Copies a row's states to where the step reads them. What it shares with other sequences stays where it is."""
        cache = self.caches[row]
        assert cache is not None
        assert self.step_of_all is not None
        for resident, layer in zip(self.step_of_all.residents, cache.layers, strict=True):
            state: LayerState = layer.state
            state.detach()
            if not resident.decoder.load(state.past, row):
                raise ValueError("cache: expected fewer segments: fork a prefix less often")
            for name, x in resident.recent.items():
                x[row].copy_(state.recent[name][0])
            if resident.phases is not None and state.past.phases is not None:
                resident.phases[row].copy_(state.past.phases[0])

    def _renew(self, row: int, cache: Cache) -> None:
        """Closes the tails of a row, which are full."""
        assert self.step_of_all is not None
        for resident, layer in zip(self.step_of_all.residents, cache.layers, strict=True):
            past: Past = layer.state.past
            past.waiting = resident.decoder.waiting_in(row).map(torch.clone)
            close_tail(past)
            if not resident.decoder.load(past, row):
                raise RuntimeError("a sequence has more segments than a step can see")
