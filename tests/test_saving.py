"""Memory saved for the backward pass: cheap results are recomputed from inputs; gradients stay the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import deadreckon as dr
from deadreckon.encodings import base
from deadreckon.ops import pointwise
from deadreckon.ops.saving import Formula, saving
from deadreckon.ops.triton.directions import directions_forward
from deadreckon.ops.triton.householder import operator
from deadreckon.ops.triton.rotation import turn_by, turn_by_steps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def watched() -> Iterator[list[Tensor]]:
    """All tensors that are saved for the backward pass, one for each storage."""
    found = dict[int, Tensor]()

    def pack(x: Tensor) -> Tensor:
        found.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    kept = list[Tensor]()
    with saved_tensors_hooks(pack, lambda x: x):
        yield kept
    kept.extend(found.values())


def has(kept: list[Tensor], x: Tensor) -> bool:
    """Whether x is among them, in whatever shape."""
    return any(y.dtype == x.dtype and y.numel() == x.numel() and torch.equal(y.flatten(), x.flatten()) for y in kept)


def leaves(count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(5, 7, generator=generator, requires_grad=True) for _ in range(count)]


def product(a: Tensor, b: Tensor, *, plainly: bool = False) -> tuple[Tensor, weakref.ref[Tensor]]:
    """A function of y = ab, which is used three times, in two shapes; and a weak reference to y."""
    y = a * b
    with nullcontext() if plainly else saving(Formula(y, torch.mul, (a, b))):
        z = y.sin() + y.view(-1).cos().view_as(y) + a.exp() * y
    return z, weakref.ref(y)


def test_inputs_are_saved_in_place_of_the_result() -> None:
    a, b = leaves()
    expected = torch.autograd.grad(product(a, b, plainly=True)[0].sum(), (a, b))
    with watched() as kept:
        z, y = product(a, b)
    assert not has(kept, (a * b).detach()) and has(kept, a.exp().detach())
    assert y() is None
    for _ in range(2):  # the graph is there for as long as it is retained
        assert all(
            torch.equal(one, other)
            for one, other in zip(torch.autograd.grad(z.sum(), (a, b), retain_graph=True), expected, strict=True)
        )


def test_nothing_is_held_after_the_backward_pass() -> None:
    a, b = leaves()
    c = 2 * a
    z, _ = product(c, b)
    held = weakref.ref(c)
    del c
    z.sum().backward()
    assert held() is None and a.grad is not None


def test_a_result_that_changes_in_the_region_is_saved() -> None:
    a, w = (x.requires_grad_() for x in torch.randn(2, 4, generator=torch.Generator().manual_seed(0)))
    y = a.detach() * 2
    with saving(Formula(y, lambda x: x * 2, (a,))):
        y.mul_(3)
        z = y * w
    z.sum().backward()
    assert torch.equal(w.grad, y)  # type: ignore[arg-type]


def test_what_is_saved_must_not_change() -> None:
    a, b, c = leaves(3)
    y = a * b
    with saving(Formula(y, torch.mul, (a, b))):
        z = y * c
    with torch.no_grad():
        c.mul_(2)
    with pytest.raises(RuntimeError, match="needed for gradients was changed in place"):
        z.sum().backward()


def test_a_graph_that_is_dropped_is_gone() -> None:
    """Without the garbage collector, which knows nothing of what a GPU holds: no operation keeps itself alive."""
    a, b = leaves()

    class Held:
        def __call__(self, grad: Tensor) -> Tensor:
            return grad

    c, hook = 2 * a, Held()
    c.register_hook(hook)
    graph = weakref.ref(hook)
    gc.disable()
    try:
        z, _ = product(c, b)
        del c, hook
        assert graph() is not None
        del z
        assert graph() is None
    finally:
        gc.enable()


def test_gradients_of_gradients() -> None:
    a, b = (x.double().detach().requires_grad_() for x in leaves())
    assert torch.autograd.gradgradcheck(lambda *inputs: product(*inputs)[0], (a, b))


def test_a_result_of_a_result() -> None:
    """And a formula whose result is another tensor by now changes nothing."""
    a, b, c = leaves(3)

    def run(use: Callable[[Formula], Formula | None]) -> Tensor:
        y = a * b
        z = y + c
        with saving(use(Formula(y, torch.mul, (a, b)).then(z, torch.add, c))):
            return (z.sin() * z[:, :3].sum()).sum()

    expected = torch.autograd.grad(run(lambda formula: None), (a, b, c))
    with watched() as kept:
        loss = run(lambda formula: formula)
    assert not has(kept, (a * b + c).detach())
    assert all(
        torch.equal(one, other) for one, other in zip(torch.autograd.grad(loss, (a, b, c)), expected, strict=True)
    )
    other = run(lambda formula: formula._replace(result=formula.result.clone()))
    assert all(
        torch.equal(one, other) for one, other in zip(torch.autograd.grad(other, (a, b, c)), expected, strict=True)
    )


def test_inside_activation_checkpointing() -> None:
    """Which then holds neither the result nor its inputs."""
    a, b = leaves()
    expected = torch.autograd.grad(product(2 * a, b, plainly=True)[0].sum(), (a, b))
    inner = list[weakref.ref[Tensor]]()

    def run(a: Tensor, b: Tensor) -> Tensor:
        c = 2 * a
        z, y = product(c, b)
        inner.extend((weakref.ref(c), y))
        return z

    z = checkpoint(run, a, b, use_reentrant=False)
    assert len(inner) == 2 and all(x() is None for x in inner)
    found = torch.autograd.grad(z.sum(), (a, b))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_inside_transforms() -> None:
    """These allow no hooks."""
    a, b = leaves()
    found = torch.func.grad(lambda a: product(a, b)[0].sum())(a)
    torch.testing.assert_close(found, torch.autograd.grad(product(a, b)[0].sum(), a)[0])


def attention(encoding: str, **options: Any) -> dr.AttentionLayer:
    torch.manual_seed(0)
    layer = dr.AttentionLayer(32, 2, encoding, 1, head_dim=16, impl="triton", encoding_options=options).to(DEVICE)
    for name, parameter in layer.named_parameters():
        if name.endswith("strength.weight"):  # which an encoding may begin with at 0
            torch.nn.init.normal_(parameter, std=0.3)
    return layer


@pytest.mark.parametrize(
    ("encoding", "packed", "recompute"),
    [("path", False, True), ("path", True, False), ("path-fox", False, True), ("rope-path", True, True)],
)
def test_directions_are_not_held(encoding: str, packed: bool, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads, one leaf and more, packed rows; the same bits as if they were."""
    layer, length = attention(encoding, recompute=recompute), 70 if packed else 40
    x = torch.randn(1 if packed else 2, length, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x.requires_grad_()
    bounds = torch.tensor([0, 3, 50, length], dtype=torch.int32, device=DEVICE) if packed else None
    directions = list[Tensor]()

    def by_kernel(x: Tensor, filters: Tensor, places: Tensor, heads: int, **options: Any) -> Tensor:
        return directions_forward(x, filters, places, heads, False, 0.0)

    def trained() -> tuple[list[Tensor], list[Tensor]]:
        with watched() as kept:
            y = layer(x, cu_seqlens=bounds)
        weight = torch.linspace(-1, 1, y.numel(), device=DEVICE).view_as(y)
        found = torch.autograd.grad(y, [x, *layer.parameters()], weight)
        return [y.detach(), *found], kept

    def forward(original: Callable[..., Any], *inputs: Any) -> Any:
        directions.append(inputs[3].detach().clone())
        return original(*inputs)

    monkeypatch.setattr(base, "directions", by_kernel)  # as on a GPU
    monkeypatch.setattr(operator, "householder_forward", partial(forward, operator.householder_forward))
    less, kept = trained()
    monkeypatch.setattr(operator, "saving", lambda formula: nullcontext())
    more, all_kept = trained()
    assert all(torch.equal(one, other) for one, other in zip(less, more, strict=True))
    assert directions[0].dtype == torch.float32 and torch.equal(*directions)
    assert has(all_kept, directions[0]) and not has(kept, directions[0])
    assert sum(x.numel() for x in all_kept) - sum(x.numel() for x in kept) == directions[0].numel()


@pytest.mark.parametrize("learned", [False, True])
def test_angles_that_do_not_learn_cost_nothing(learned: bool) -> None:
    """A phase is made of angles alone: what turns by it is saved for the angles' sake, not for that of q and k."""
    generator = torch.Generator().manual_seed(0)
    q, k, w = (torch.randn(1, 20, heads, 8, generator=generator).to(DEVICE) for heads in (2, 1, 1))
    q, k, w = (x.requires_grad_() for x in (q, k, w))
    angles = torch.rand(1, 20, 1, 4, generator=generator).to(DEVICE).requires_grad_(learned)
    with watched() as kept:
        q_turned, k_turned, _, phase = turn_by_steps(q, k, k, angles, False)
        w_turned = turn_by(w, phase, 1)
    assert phase.requires_grad is learned
    assert [has(kept, x.detach()) for x in (q, k, w)] == [learned] * 3
    (q_turned.sum() + k_turned.sum() + w_turned.sum()).backward()
    assert all(x.grad is not None for x in (q, k, w)) and (angles.grad is not None) is learned


@pytest.mark.parametrize("checkpointing", [False, True])
def test_mlps_save_their_two_inputs(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third, silu(gate) ⊙ up, is computed again. The same bits; with activation checkpointing, nothing is held."""
    monkeypatch.setattr(pointwise, "has_kernels", lambda x: not torch.compiler.is_compiling())
    torch.manual_seed(0)
    config = dr.DeadReckonConfig(
        encoding="rope", vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
    )
    model = dr.DeadReckonForCausalLM(config).to(DEVICE).train()
    ids = torch.randint(20, (2, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    inner = list[tuple[Tensor, weakref.ref[Tensor]]]()
    for layer in model.model.layers:
        down: Any = layer.get_submodule("mlp.down_proj")
        down.register_forward_pre_hook(
            lambda _, inputs: inner.append((inputs[0].detach().clone(), weakref.ref(inputs[0])))
        )

    def trained() -> tuple[list[Tensor], list[Tensor]]:
        with watched() as kept:
            loss = model(ids, labels=ids).loss
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))], kept

    less, kept = trained()
    values, references = zip(*inner, strict=True)
    assert len(values) == (4 if checkpointing else 2) and all(y() is None for y in references)
    assert not any(has(kept, y) for y in values)
    monkeypatch.setattr(pointwise, "saving", lambda formula: nullcontext())
    more, all_kept = trained()
    assert all(torch.equal(one, other) for one, other in zip(less, more, strict=True))
    saved = sum(x.numel() for x in all_kept) - sum(x.numel() for x in kept)
    assert saved == (0 if checkpointing else 2 * ids.numel() * 24)


@pytest.mark.parametrize(
    ("heads", "tokens", "width", "parts"),
    [
        (1024, 4096, 64, 2),
        (512, 4096, 64, 1),
        (512, 4096, 32, 1),
        (512, 4096, 128, 4),
        (1024, 1024, 128, 2),
        (3, 1 << 22, 128, 3),
    ],
)  # fmt: skip
def test_heads_are_worked_on_in_slices(heads: int, tokens: int, width: int, parts: int) -> None:
    """What lies between kernels of 16x4096x32x128 is a quarter of what it would be: 9.1 GiB at the peak, not 16."""
    found = list(operator.slices(heads, heads * tokens, width))
    assert len(found) == parts
    assert [head for part in found for head in range(heads)[part]] == list(range(heads))
    assert len({part.stop - part.start for part in found}) == 1
