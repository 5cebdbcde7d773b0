"""CUDA graphs of decoding steps: one graph for the whole model, since launching its kernels takes longer than running
them.

    prefill, first token       eager: compiles kernels, and each layer's decoder allocates its tensors
    second token               captured, then replayed
    every token from then on   replayed; when a decoder's tail is full it is first closed, eagerly, and loaded again

What a step writes has fixed addresses: decoders (`ops/streaming/fused.py`), recent inputs and phases. The host counts
tokens; kernels read counts and addresses from memory. So a graph outlives its sequence: the next one of the same
structure is loaded into the same decoders, in a few launches per layer, and the previous one keeps copies of its data.

``DEADRECKON_GRAPHS=0`` in the environment turns graphs off.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from deadreckon.encodings.base import CROPPABLE, GROWING
from deadreckon.models.cache import StateLayer
from deadreckon.models.state import LayerState, Origin
from deadreckon.models.surroundings import Surroundings, Watch, hooked
from deadreckon.ops.streaming.decode import renew
from deadreckon.ops.streaming.past import Past, StaticDecoder, lasting
from deadreckon.ops.streaming.segments import Segment
from deadreckon.ops.streaming.signature import Signature
from deadreckon.ops.tracing import traced

SWITCH = "DEADRECKON_GRAPHS"  # environment variable: 0 for no graphs
MOST = 4  # graphs per model; the one that was captured first is dropped for a new one

Advance = Callable[[Tensor, list[LayerState], Tensor], Tensor]
"""The model: tokens (B, 1), states, which it advances, and positions (B or 1, 1) of the tokens -> hidden states."""


class Graph(Protocol):
    """A captured step: `replay` runs it, and returns the same output tensor each time."""

    def __init__(self, step: Callable[[], Tensor]) -> None: ...

    def replay(self) -> Tensor: ...


class CudaGraph:
    """A CUDA graph on the current device. (PyTorch's default capture stream belongs to the device of its first use.)"""

    def __init__(self, step: Callable[[], Tensor]) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
            self.output = step()

    def replay(self) -> Tensor:
        self.graph.replay()
        return self.output


class Resident(NamedTuple):
    """One layer's part of a captured step: the tensors that it reads and writes, at fixed addresses."""

    decoder: StaticDecoder
    recent: dict[str, Tensor]
    phases: Tensor | None
    signature: Signature | None
    origin: Origin | None

    @classmethod
    def of(cls, state: LayerState) -> Resident:
        """From a state that has a StaticDecoder."""
        recent, phases = {name: x.clone() for name, x in state.recent.items()}, state.past.phases
        phases = None if phases is None else phases.clone()
        assert isinstance(state.past.decoder, StaticDecoder)
        return cls(state.past.decoder, recent, phases, state.past.signature, state.origin)

    def draft(self, left_out: Tensor | None) -> LayerState:
        """A state for the step to capture. Its lengths do not matter, except that they are not zero."""
        past = Past(self.signature, 1, waiting=self.decoder.waiting, phases=self.phases, decoder=self.decoder)
        return LayerState(past, dict(self.recent), left_out=left_out, origin=self.origin)

    def moved(self, state: LayerState) -> list[tuple[Tensor, Tensor]]:
        """What a step has computed outside the decoder, with its destination: (there, new)."""
        pairs = [(x, state.recent[name]) for name, x in self.recent.items()]
        if self.phases is not None and state.past.phases is not None:
            pairs.append((self.phases, state.past.phases))
        return [(there, new) for there, new in pairs if new is not there]

    def holds(self, state: LayerState) -> bool:
        """Whether a state's tensors are these."""
        past = state.past
        return past.decoder is self.decoder and state.recent is self.recent and past.phases is self.phases

    def load(self, state: LayerState) -> bool:
        """Copies a state into these tensors, and makes it use them; False if it has too many segments."""
        if state.past.decoder is not self.decoder:
            state.past.detach()
            if not self.decoder.load(state.past):
                return False
            state.past.decoder, state.past.waiting = self.decoder, self.decoder.waiting
        if state.recent is not self.recent:
            for name, x in self.recent.items():
                x.copy_(state.recent[name])
            state.recent = self.recent
        if self.phases is not None and state.past.phases is not None and state.past.phases is not self.phases:
            self.phases.copy_(state.past.phases)
            state.past.phases = self.phases
        return True


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies pairs (there, new), in one launch per dtype: there may be one pair for every layer."""
    by_dtype = dict[torch.dtype, list[tuple[Tensor, Tensor]]]()
    for pair in pairs:
        by_dtype.setdefault(pair[0].dtype, []).append(pair)
    for alike in by_dtype.values():
        torch._foreach_copy_([there for there, _ in alike], [new for _, new in alike])


class CapturedStep:
    """A captured decoding step, for states of one structure.

    Args:
        warm: whether to run the step once before capture, since its kernels have not been compiled yet.
    """

    def __init__(
        self,
        model: nn.Module,
        advance: Advance,
        ids: Tensor,
        states: list[LayerState],
        graph: type[Graph],
        warm: bool = False,
    ) -> None:
        self.model, self.advance, self.kind, self.ids = model, advance, graph, ids.clone()
        self.places = torch.zeros_like(ids) if warm else torch.zeros(1, 1, dtype=torch.int64, device=ids.device)
        self.left_out = None if states[0].left_out is None else states[0].left_out.clone()
        self.residents = [Resident.of(state) for state in states]
        self.owners: list[weakref.ref[StateLayer] | None] = [None] * len(states)
        if warm:  # this overwrites the decoders, which are loaded afterwards
            self._run()
        self.capture()

    def capture(self) -> None:
        """Captures the step, or captures it again after its surroundings have changed: loaded states stay loaded."""
        with torch.cuda.device_of(self.ids):
            self.graph = self.kind(self._run)
        self.watch = Watch(self.model, self.ids.device.type)
        self.surroundings = self.surroundings_now()

    def surroundings_now(self) -> Surroundings:
        """Everything that the step depends on, as it is now."""
        return Surroundings.of(self.model.modules(), self.ids.device.type)

    def _run(self) -> Tensor:
        """The step to capture: its effects on the host are undone, only work on the device counts."""
        drafts = [resident.draft(self.left_out) for resident in self.residents]
        waiting = [resident.decoder.waiting for resident in self.residents]
        try:
            with casting_anew(self.ids.device.type):
                output = self.advance(self.ids, drafts, self.places)
            # Layers read these tensors while they compute: only then are they overwritten, for the next step.
            moved = (resident.moved(draft) for resident, draft in zip(self.residents, drafts, strict=True))
            copy_all(pair for pairs in moved for pair in pairs)
        finally:
            for resident, before in zip(self.residents, waiting, strict=True):  # the host has not counted the token
                resident.decoder.rewind(before)
        return output

    def holds(self, layers: list[StateLayer]) -> bool:
        """Whether the states of a cache are loaded."""
        for owner, resident, layer in zip(self.owners, self.residents, layers, strict=True):
            state = layer.state
            if owner is None or owner() is not layer or not isinstance(state, LayerState) or not resident.holds(state):
                return False
        return True

    def load(self, layers: list[StateLayer]) -> bool:
        """Loads the states of a cache, and detaches those loaded before; False if they do not fit."""
        for number, (layer, resident) in enumerate(zip(layers, self.residents, strict=True)):
            owner = self.owners[number]
            before = None if owner is None else owner()
            assert isinstance(layer.state, LayerState)
            if before is not layer:
                if before is not None and isinstance(before.state, LayerState):
                    before.state.detach()
                layer.state.detach()
                self.owners[number] = weakref.ref(layer, partial(_forgotten, resident.decoder))
            if not resident.load(layer.state):
                return False
        if self.left_out is not None:
            left_out = layers[0].state.left_out  # type: ignore[union-attr]
            assert left_out is not None
            self.left_out.copy_(left_out)
        return True

    def replay(self, ids: Tensor, states: list[LayerState]) -> Tensor:
        """Hidden states of the next tokens (B, 1); advances the loaded states."""
        length = states[0].length + 1
        self.ids.copy_(ids)
        self.places.fill_(length - 1)
        try:
            output = self.graph.replay().clone()
            for state, resident in zip(states, self.residents, strict=True):
                count(state, resident.decoder.lengthen())
        except BaseException:
            self._undo(states, length)
            raise
        return output

    def _undo(self, states: list[LayerState], length: int) -> None:
        """Restores states after an interruption: asks the device whether kernels have added the token, and crops it."""
        for state, resident in zip(states, self.residents, strict=True):
            if state.length < length and resident.decoder.ahead():
                count(state, resident.decoder.lengthen())
            if state.length == length:
                state.crop(1)


def casting_anew(kind: str) -> AbstractContextManager[Any]:
    """Autocast as it is, but without its weight cache, which is freed when the caller leaves autocast: a graph would
    read freed memory.
    """
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)


def _forgotten(decoder: StaticDecoder, _: object) -> None:
    """Releases the memory of a KV cache that has been garbage-collected.

    That may happen while another graph is captured, so no kernel may be launched here: it would become part of it.
    """
    decoder.release()


def count(state: LayerState, waiting: Segment, tokens: int = 1) -> None:
    """Counts tokens that kernels have added to the tail (`waiting`)."""
    past = state.past
    past.waiting = waiting
    if past.phases is not None:
        past.turned = min(past.turned + tokens, CROPPABLE + 1)
    past.length += tokens
    state.kept = min(state.kept + tokens, CROPPABLE)


class Steps:
    """The CUDA graphs of a model's decoding steps, by the structure of the states that they are for.

    Threads may share the model, each with its own KV cache: a lock is held for each step.
    """

    def __init__(self, model: nn.Module, advance: Advance, graph: type[Graph] = CudaGraph) -> None:
        self.model, self.advance, self.graph, self.turn = model, advance, graph, Lock()
        self.captured: dict[Any, CapturedStep] = {}
        self.latest: CapturedStep | None = None
        self.eager: Any = None  # the structure of the last eager step

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # copies and pickles of a model have no graphs

    def __call__(self, ids: Tensor, layers: list[StateLayer]) -> Tensor | None:
        """Hidden states of the next token of each row, ids (B, 1); None if an eager step is needed."""
        with self.turn, lasting():
            return self._advance(ids, layers)

    def _advance(self, ids: Tensor, layers: list[StateLayer]) -> Tensor | None:
        states: list[Any] = [layer.state for layer in layers]
        step = self.latest if self.latest is not None and self.latest.holds(layers) else None
        changed = step is not None and not step.watch.fine()
        if changed or not all(has_room(state) for state in states if isinstance(state, LayerState)):
            for state in states:  # an eager step makes room, and another graph has a decoder of its own
                state.detach()
            return None
        if step is None:
            step = self.latest = self._step_for(ids, layers)
        if step is None:
            return None
        full = [state for state in states if state.past.decoder.full]
        for state in full:
            renew(state.past)
        if full and not step.holds(layers):
            self._drop(step)
            return None
        return step.replay(ids, states)

    def _step_for(self, ids: Tensor, layers: list[StateLayer]) -> CapturedStep | None:
        """A step for these states, loaded; captured now if the last eager step had the same structure."""
        states = [layer.state for layer in layers if isinstance(layer.state, LayerState)]
        parts = list(self.model.modules())
        if len(states) < len(layers) or not states[0].length or hooked(parts):
            return None
        key, before = structure(parts, ids, states), self.eager
        step, self.eager = self.captured.get(key), key
        if step is None:
            decoders = [state.past.decoder for state in states]
            if key != before or not all(isinstance(x, StaticDecoder) for x in decoders):
                return None
            for stale in [step for other, step in self.captured.items() if other[0] != key[0]]:
                self._drop(stale)
            if len(self.captured) == MOST:
                self._drop(next(iter(self.captured.values())))
            for state in states:
                if state.past.decoder is not None and state.past.decoder.full:
                    renew(state.past)
            step = self.captured[key] = CapturedStep(self.model, self.advance, ids, states, self.graph)
        if step.load(layers):
            return step
        self._drop(step)
        return None

    def _drop(self, step: CapturedStep) -> None:
        self.captured = {key: other for key, other in self.captured.items() if other is not step}
        self.latest = None


def has_room(state: LayerState) -> bool:
    """Whether one more token fits into the caches of all inputs, which have a fixed capacity."""
    return GROWING not in state.recent or state.length < state.recent[GROWING].shape[2]


def structure(parts: Sequence[nn.Module], ids: Tensor, states: list[LayerState]) -> tuple[Any, ...]:
    """The key of a graph: what steps must have in common to share it; first, the addresses of the weights."""
    shapes = tuple(tuple((name, x.shape) for name, x in state.recent.items()) for state in states)
    phases = tuple(None if state.past.phases is None else state.past.phases.shape for state in states)
    signatures = tuple(state.past.signature for state in states)
    surroundings = Surroundings.of(parts, ids.device.type)
    return (*surroundings, ids.dtype, states[0].left_out is None, signatures, shapes, phases)


def switched_on() -> bool:
    """Whether the environment allows CUDA graphs."""
    return os.environ.get(SWITCH, "1") != "0"


def wanted(ids: Tensor, model: nn.Module) -> bool:
    """Whether a decoding step with these tokens may use a CUDA graph."""
    return (
        ids.is_cuda
        and not torch.is_grad_enabled()
        and not model.training
        and switched_on()
        and not traced(ids)
        and not torch.cuda.is_current_stream_capturing()
    )
