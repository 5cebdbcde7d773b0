"""Context parallelism: output and every gradient are those of one process, whatever is split among ranks."""

from __future__ import annotations

import os
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, relative_errors, run
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import run_world

import deadreckon as dr
from deadreckon.ops.parallel.states import sends_states

SMALL = {"width": 8, "value_width": 12, "batch": 2}
CASES = {
    "plain": Case(length=41, **SMALL),
    "gated": Case(gate="learned", length=50, **SMALL),
    "gated per key head": Case(gate="learned per key head", length=37, **SMALL),
    "alibi": Case(gate="constant", length=24, **SMALL),
    "rotation": Case("rotation", length=45, **SMALL),
    "rotation per query head, gated": Case("rotation per query head", "learned", length=29, **SMALL),
    "rotation of values": Case("rotation of values", "learned per key head", length=33, **SMALL),
    "householder": Case("householder", length=90, **SMALL),
    "householder, projections": Case("householder", beta=1.0, length=20, **SMALL),
    "householder, gated": Case("householder", "learned", length=47, **SMALL),
    "householder, gated per key head": Case("householder", "learned per key head", length=31, **SMALL),
    "rotation and householder": Case("rotation and householder", "learned", length=38, **SMALL),
    "sticks": Case(score="stick-breaking", length=43, **SMALL),
    "sticks, rotation, gated": Case("rotation", "learned", "stick-breaking", length=30, **SMALL),
    "sticks, householder, gated": Case("householder", "learned", "stick-breaking", length=35, **SMALL),
    "power": Case(score=dr.Power(2), length=39, **SMALL),
    "power, chunked, gated": Case("rotation", "learned", dr.Power(4, "chunked"), length=28, **SMALL),
    "power, states": Case(score=dr.Power(2, "chunked"), length=39, **SMALL),
    "power, states, gated per key head": Case(
        "rotation", "learned per key head", dr.Power(2, "chunked"), length=31, **SMALL
    ),
    "power, states, alibi": Case(gate="constant", score=dr.Power(2, "chunked"), length=26, **SMALL),
    "power, householder, gated": Case("householder", "learned", dr.Power(4), length=34, **SMALL),
    "one token a piece": Case("householder", "learned", length=5, **SMALL),
}
PACKED = {
    "plain": Case(length=48, batch=1, width=8, value_width=12),
    "gated": Case("rotation", "learned", length=48, batch=1, width=8, value_width=12),
    "householder": Case("householder", length=48, batch=1, width=8, value_width=12),
    "householder, gated": Case("householder", "learned per key head", length=48, batch=1, width=8, value_width=12),
    "both": Case("rotation and householder", "learned", length=48, batch=1, width=8, value_width=12),
    "sticks": Case("householder", "learned", "stick-breaking", length=48, batch=1, width=8, value_width=12),
    "power": Case("rotation", "learned", dr.Power(2), length=48, batch=1, width=8, value_width=12),
    "power, states": Case("rotation", "learned", dr.Power(2, "chunked"), length=48, batch=1, width=8, value_width=12),
}
KERNELS = {
    "plain": Case(length=40, batch=1, width=8, value_width=8),
    "gated": Case(gate="learned", length=70, batch=1, width=8, value_width=8),
    "householder, gated": Case("householder", "learned per key head", length=150, batch=1, width=8, value_width=16),
    "packed, rotation": Case("rotation", length=48, batch=1, width=8, value_width=8),
    "packed, householder, gated": Case("householder", "learned", length=48, batch=1, width=8, value_width=8),
}
DOCUMENTS = (0, 3, 3, 20, 24, 45, 48)  # some within a piece, one across several, an empty one, some at edges
SINGLE, AUTOCAST = "float32, ", "float32, autocast"
WORLDS = ((2, "contiguous"), (3, "zigzag"), (4, "zigzag"))


def divided(
    case: Case, cp: dr.ContextParallel, dtype: torch.dtype = torch.float64, device: str = "cpu", **keywords: Any
) -> dict[str, Tensor]:
    """As `cases.run`, with cp: each rank attends with its shard."""
    leaves = {name: x.to(device, dtype).requires_grad_() for name, x in case.inputs().items()}
    shards = {name: x if x.dim() == 1 else cp.shard(x) for name, x in leaves.items()}
    output = cp.gather(case.attend(shards, cp=cp, **keywords), length=case.length)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(output, list(leaves.values()), grad.to(device, dtype))
    found = {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}
    if case.gate == "constant":  # a parameter, whole on every rank, each having seen its own tokens
        dist.all_reduce(found["log_gate"])
    return found


def all_cases(layout: Any, single: bool) -> dict[str, dict[str, Tensor]]:
    """Every case on this rank, in float64, and in float32 too."""
    cp, found = dr.ContextParallel(layout=layout), dict[str, dict[str, Tensor]]()
    for prefix, dtype in (("", torch.float64), (SINGLE, torch.float32))[: 1 + single]:
        for name, case in CASES.items():
            found[prefix + name] = divided(case, cp, dtype)
        for name, case in PACKED.items():
            found[f"{prefix}packed, {name}"] = divided(case, cp, dtype, **packing("packed"))
    with torch.autocast("cpu", torch.bfloat16):  # which must not reach what is summed
        found[AUTOCAST] = divided(CASES["householder, gated"], cp, torch.float32)
    return found


def with_kernels(layout: Any) -> dict[str, dict[str, Tensor]]:
    if os.environ.get("TRITON_INTERPRET") == "1":
        from interpreter import hurry  # a rank has read no conftest.py

        hurry()
    cp = dr.ContextParallel(layout=layout)
    return {name: divided(case, cp, torch.float32, impl="triton", **packing(name)) for name, case in KERNELS.items()}


def packing(name: str) -> dict[str, Tensor]:
    return {"cu_seqlens": torch.tensor(DOCUMENTS, dtype=torch.int32)} if name.startswith("packed") else {}


@cache
def expected(name: str) -> dict[str, Tensor]:
    if name.startswith("packed, "):
        return run(PACKED[name.removeprefix("packed, ")], impl="reference", **packing("packed"))
    return run(CASES[name], impl="reference")


@pytest.mark.parametrize(("size", "layout"), WORLDS)
def test_ranks_equal_one_process(size: int, layout: str) -> None:
    """Every case in one test: two runners would each start the ranks. What float32 costs, one world shows."""
    single = size == 3
    for found in run_world(size, all_cases, layout, single):
        assert len(found) == (1 + single) * (len(CASES) + len(PACKED)) + 1
        for name, results in found.items():
            case = "householder, gated" if name == AUTOCAST else name.removeprefix(SINGLE)
            errors = relative_errors(results, expected(case))
            assert max(errors.values()) < (1e-5 if name.startswith(SINGLE) else 1e-10), (name, errors)


def test_kernels_inside_pieces() -> None:
    worlds = run_world(2, with_kernels, "zigzag")
    for name, case in KERNELS.items():
        reference = run(case, impl="reference", **packing(name))
        for found in worlds:
            errors = relative_errors(found[name], reference)
            assert max(errors.values()) < 1e-5, errors


class Largest(TorchDispatchMode):
    """The most numbers that any tensor had."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return result


def sizes_and_bytes() -> dict[str, Any]:
    """What two ranks hold and send of 1024 tokens, and four of 2048."""
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    found = dict[str, Any]()
    for ranks, cp in ((2, dr.ContextParallel(pair)), (4, dr.ContextParallel())):
        shape, saved = (1, 512, 2, 16), [0]
        q, k, v, w = (torch.randn(shape, requires_grad=True) for _ in range(4))
        beta, gate = torch.rand(shape[:3], requires_grad=True), torch.full(shape[:3], -0.1, requires_grad=True)

        def pack(x: Tensor, saved: list[int] = saved) -> Tensor:
            saved[0] += x.numel()
            return x

        with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            o = dr.attend(q, k, v, transport=dr.Householder(w, beta), log_gate=gate, cp=cp)
            forward = cp.bytes_sent
            o.sum().backward()
        found |= {f"largest {ranks}": largest.numbers, f"saved {ranks}": saved[0]}
        found |= {f"forward {ranks}": forward, f"backward {ranks}": cp.bytes_sent - forward}
    return found


def test_memory_is_linear_in_the_shard_and_bytes_are_counted() -> None:
    tokens, heads, width, number = 512, 2, 16, 4
    for found in run_world(4, sizes_and_bytes):
        # Twice the tokens on twice the ranks: a rank that held all keys would hold twice as many.
        assert found["largest 4"] == found["largest 2"]
        products = heads * width**2 * 2  # of a rank's two pieces
        assert found["saved 4"] <= found["saved 2"] + 4 * products
        for ranks in (2, 4):
            shard = tokens * heads * (2 * width + 1) * number  # keys, values, and sums of gates
            small = (products + heads * 2 * 2) * number  # products, and totals of gates in float64
            flaws = heads * 2 * 8  # of each piece, the last token with a number that is none
            assert found[f"forward {ranks}"] == (ranks - 1) * (shard + small + flaws)
            assert found[f"backward {ranks}"] == 2 * (ranks - 1) * (shard + small)


def bytes_of_states() -> dict[str, Any]:
    """What a rank sends of squares as attention and as states, forward and back."""
    cp, found = dr.ContextParallel(), dict[str, Any]()
    for form in ("attention", "chunked"):
        q, k, v = (torch.randn(1, 512, 2, 8, requires_grad=True) for _ in range(3))
        cp.bytes_sent = 0
        o = dr.attend(q, k, v, score=dr.Power(2, form), cp=cp)
        forward = cp.bytes_sent
        o.sum().backward()
        found[form] = forward, cp.bytes_sent - forward
    return found


def test_states_of_powers_are_fewer_bytes_than_the_ring() -> None:
    """One state a piece that another rank goes on from; keys and values go to all other ranks."""
    heads, width, number = 2, 8, 4
    state = heads * 36 * (width + 1) * number
    for rank, found in enumerate(run_world(4, bytes_of_states)):
        lengths = 3 * 2 * heads * number  # of each piece's longest key: powers stay in range
        lengths += 3 * 2 * heads * 8  # and of each piece, the last token with a number that is none
        ring = 3 * 512 * heads * 2 * width * number
        assert found["attention"] == (ring + lengths, 2 * ring)
        handed_on = 1 if rank in (0, 3) else 2  # not by the last piece, nor from a rank to itself
        assert found["chunked"] == (handed_on * state + lengths, handed_on * state)


def test_states_are_sent_where_they_are_fewer_bytes() -> None:
    def chosen(p: int, width: int, tokens: int, ranks: int, form: Any = "auto", gated: bool = False) -> bool:
        cp = SimpleNamespace(size=ranks, count=2 * ranks)
        k = torch.zeros(()).expand(1, tokens // (2 * ranks), width)
        gates = k[..., :1] if gated else None
        return sends_states(dr.Power(p, form), k, k, gates, cp)  # type: ignore[arg-type]

    # A state of 64 channels is 2080 · 65 floats, a shard of keys and values T / R · 128, sent to R − 1 ranks.
    assert [chosen(2, 64, tokens, 4) for tokens in (2048, 4096, 8192, 65536)] == [False, False, True, True]
    # Faster in chunks from 768 tokens on with gates, from 1056 without.
    assert chosen(2, 32, 1024, 8, gated=True) and not chosen(2, 32, 1024, 8)
    assert not chosen(4, 64, 65536, 8) and not chosen(2, 64, 1 << 20, 1)
    assert chosen(4, 64, 64, 2, "chunked") and not chosen(2, 64, 1 << 20, 8, "attention")


def refusals() -> list[str]:
    cp, said = dr.ContextParallel(), []
    q, odd = torch.randn(1, 4, 2, 8), torch.randn(1, 5, 2, 8)
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    for call in (
        lambda: dr.attend(odd, odd, odd, cp=cp),
        lambda: dr.attend(odd, odd, odd, score="stick-breaking", cp=cp),
        lambda: dr.attend(q, q, q, cu_seqlens=bounds, cp=cp),
        lambda: dr.attend(q, q, q, impl="reference", cp=cp),
        lambda: dr.attend(q, q, q, cp="zigzag"),
        lambda: dr.ContextParallel(layout="spiral"),
        lambda: dr.ContextParallel(group=7),
        lambda: dr.ContextParallel(init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))),
        lambda: dr.AttentionLayer(16, 2, "path")(cp.shard(torch.randn(1, 4, 16)), cp=cp),
        lambda: dr.AttentionLayer(16, 2)(torch.randn(1, 4, 16), cp=cp, state=None),
    ):
        with pytest.raises(ValueError, match=":") as error:
            call()
        said.append(str(error.value))
    x = torch.randn(1, 8, requires_grad=True)
    [first] = torch.autograd.grad((cp.gather(cp.shard(x) ** 3)).sum(), x)
    torch.testing.assert_close(first, 3 * x**2)
    with pytest.raises(RuntimeError, match="second derivatives need a process alone, without ContextParallel"):
        torch.autograd.grad((cp.gather(cp.shard(x) ** 3)).sum(), x, create_graph=True)
    return said


def compiled() -> None:
    """Boundaries that a tracer does not see are those of eager mode, and looked at."""
    cp, generator = dr.ContextParallel(), torch.Generator().manual_seed(0)
    inputs = [cp.shard(torch.randn(1, 16, 2, 4, generator=generator)) for _ in range(3)]

    def attended(*inputs: Tensor) -> Tensor:
        q, k, v, bounds = inputs
        return dr.attend(q, k, v, cu_seqlens=bounds, cp=cp)

    traced = torch.compile(attended, backend="eager")
    for bounds in ([0, 5, 16], [0, 11, 16]):
        boundaries = torch.tensor(bounds, dtype=torch.int32)
        torch.testing.assert_close(traced(*inputs, boundaries), attended(*inputs, boundaries))
    with pytest.raises(ValueError, match="cu_seqlens: expected it to run from 0 to T = 16, got 0 to 15"):
        traced(*inputs, torch.tensor([0, 5, 15], dtype=torch.int32))


def in_place() -> None:
    """What a collective writes into boundaries is seen, though it counts as no operation."""
    x, boundaries = torch.randn(1, 100, 1, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(3).int()
    for middle in (20, 60):
        if dist.get_rank() == 0:
            boundaries.copy_(torch.tensor([0, middle, 100]))
        dist.broadcast(boundaries, 0)
        expected = dr.attend(x, x, x, cu_seqlens=torch.tensor([0, middle, 100], dtype=torch.int32))
        torch.testing.assert_close(dr.attend(x, x, x, cu_seqlens=boundaries), expected)


def boundaries_and_refusals() -> list[str]:
    compiled()
    in_place()
    return refusals()


def test_refusals_say_what_was_expected() -> None:
    expected = (
        "cp: expected shards of a sequence padded to a multiple of 4 tokens, 12 instead of 10",
        "cp: expected shards of a sequence padded to a multiple of 4 tokens, 12 instead of 10",
        "cu_seqlens: expected it to run from 0 to T = 8, got 0 to 4",
        "impl: expected 'auto', 'blockwise' or 'triton' beside cp, got 'reference'",
        "cp: expected a ContextParallel or None, got str",
        "layout: expected 'zigzag' or 'contiguous', got 'spiral'",
        "group: expected a ProcessGroup or a DeviceMesh, got int",
        "group: expected a DeviceMesh of one dimension, got 2",
        "cp: expected pieces of at least 2 tokens, 8 in all, got 1",
        "cp: a sequence that comes in pieces is not divided among ranks",
    )
    for said in run_world(2, boundaries_and_refusals):
        assert len(said) == len(expected)
        for message, beginning in zip(said, expected, strict=True):
            assert message.startswith(beginning), message
