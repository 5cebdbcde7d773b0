"""PRISM's cursor kernels, used where there are no gradients: against PyTorch in float64, and in models."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from test_prism import VOCABULARY, make_model
from torch import Tensor
from transformers import DynamicCache

from deadreckon.encodings.cursors import COPY_WIDTH, KEPT, _chances
from deadreckon.encodings.recurrence import Recurrence
from deadreckon.filters.histogram import filter_next, histogram_filter
from deadreckon.ops import cursors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPSILON = torch.finfo(torch.float32).eps


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    for module in ("ops.cursors", "ops.gru", "encodings.maps"):
        monkeypatch.setattr(f"deadreckon.{module}.has_kernels", lambda x: x.dtype != torch.float64)


def draw(*shape: int) -> Tensor:
    """In float64, numbers that float32 has."""
    return torch.randn(*shape).double()


def single(*given: Tensor) -> list[Tensor]:
    """As kernels get them."""
    return [x.float().to(DEVICE) for x in given]


@pytest.mark.parametrize(("hidden", "norm", "start"), [(5, None, False), (70, 3.0, True)])
@pytest.mark.usefixtures("with_kernels")
@torch.no_grad()
def test_gru_is_one_kernel(hidden: int, norm: float | None, start: bool) -> None:
    """Of rows with padding, from the state that it leaves there; a state's error is at most T times that of a step."""
    torch.manual_seed(0)
    network, x, before = Recurrence(8, hidden, norm, start).double(), draw(2, 7, 8), draw(2, hidden)
    for parameter in network.parameters():
        parameter.copy_(parameter.float() + 0.3 * torch.randn(parameter.shape))
    places = torch.arange(7) + torch.tensor([[3], [-2]])
    expected = network(x, before)
    expected[1, :2] = network.first(x)
    expected[1:, 2:] = network(x[1:, 2:], network.first(x).expand(1, -1))
    found = network.float().to(DEVICE).by_kernel(*single(x), places.to(DEVICE), *single(before))
    limit: dict[str, Any] = {"rtol": 0, "atol": 7 * hidden * EPSILON, "check_dtype": False}
    torch.testing.assert_close(found.cpu(), expected, **limit)
    kept = torch.zeros(2, KEPT, hidden, device=DEVICE)
    kept[0, 2], kept[1, -1] = single(before)[0]
    for t in range(7):  # token by token: states are found, and left, by place
        one = network.by_kernel(*single(x[:, t : t + 1]), places[:, t : t + 1].to(DEVICE), kept, by_place=True)
        torch.testing.assert_close(one.cpu(), expected[:, t : t + 1], **limit)
    for row in range(2):
        assert torch.equal(kept[row, places[row] % KEPT][-1], one[row, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("positions", [6, 150])
def test_jumps_are_what_softmax_gives(positions: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the last position, too, of rows with padding; probabilities are off by what their logits are, about 8.

    Keys are of either precision, and no two looks at them see all.
    """
    monkeypatch.setattr("deadreckon.ops.triton.cursors.KEYS", 64)
    torch.manual_seed(0)
    (batch, length, jumping), room = (2, 140, 3), 200
    q, k, none = draw(batch, length, jumping, COPY_WIDTH), draw(batch, jumping, room, COPY_WIDTH), draw(2, length, 3)
    k = k.to(dtype).double()
    places = torch.arange(length) + torch.tensor([[20], [-5]])
    expected = _chances(q, k, none, places, positions)
    limit: dict[str, Any] = {"rtol": 0, "atol": 8 * COPY_WIDTH * EPSILON, "check_dtype": False}
    given = single(q)[0], k.to(DEVICE, dtype), single(none)[0]
    found = cursors.jumps(*given, places.to(DEVICE), positions, torch.float32)
    torch.testing.assert_close(found.cpu(), expected, **limit)
    one_row = _chances(q, k, none, places[:1], positions)
    found = cursors.jumps(*given, places[:1].to(DEVICE), positions, torch.float32)
    torch.testing.assert_close(found.cpu(), one_row, **limit)
    for t in (0, 4, 5, 6, 139):
        keys, token = k.to(DEVICE, dtype), slice(t, t + 1)
        new = torch.stack([k[row, :, max(0, int(places[row, t]))] for row in range(2)]).unsqueeze(1)
        for row in range(2):
            keys[row, :, max(0, int(places[row, t])) :] = torch.nan  # nobody has been there
        one_q, one_k, one_none = single(q[:, token], new, none[:, token])
        found = cursors.jump(one_q, keys, one_k, one_none, places[:, token].to(DEVICE), positions)
        torch.testing.assert_close(found.cpu(), expected[:, token], **limit)
        for row in range(2):
            place = int(places[row, t])
            assert torch.equal(keys[row, :, place].cpu().double(), k[row, :, place]) or place < 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("positions", [70, 150])
def test_gradients_of_jumps(positions: int, dtype: torch.dtype) -> None:
    """In training, where each key has a position of its own; with padding, which jumps nowhere."""
    torch.manual_seed(0)
    length, jumping = 70, 3
    q, k, none = draw(2, length, jumping, COPY_WIDTH), draw(2, length, jumping, COPY_WIDTH), draw(2, length, jumping)
    k, grad = k.to(dtype).double(), draw(2, length, jumping, positions + 1)
    places = torch.arange(length) + torch.tensor([[0], [-5]])
    exact = [x.requires_grad_() for x in (q, k, none)]
    expected = _chances(q, k.transpose(1, 2), none, places, positions)
    given = [
        x.detach().to(DEVICE, kind).requires_grad_()
        for x, kind in zip(exact, (torch.float32, dtype, torch.float32), strict=True)
    ]
    found = cursors.jumps(given[0], given[1].transpose(1, 2), given[2], places.to(DEVICE), positions, torch.float32)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=8 * COPY_WIDTH * EPSILON)
    gradients = torch.autograd.grad(found, given, grad.to(found))
    for x, y in zip(gradients, torch.autograd.grad(expected, exact, grad), strict=True):
        unit = max(torch.finfo(x.dtype).eps, 32 * EPSILON)
        assert (x.cpu().double() - y).norm() <= unit * y.norm(), x.dtype


def test_which_jumps_are_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.zeros(1, 2, 40, COPY_WIDTH)
    assert not cursors.jumps_by_kernels(keys, keys, 41)  # on a CPU
    monkeypatch.setattr(cursors, "has_kernels", lambda x: True)
    assert cursors.jumps_by_kernels(keys, keys, 40) and not cursors.jumps_by_kernels(keys, keys, 39)
    with torch.no_grad():
        assert cursors.jumps_by_kernels(keys, keys, 39)


@pytest.mark.parametrize("jumping", [0, 3])
def test_histograms_of_one_token(jumping: int) -> None:
    """Of four rows: one goes on, one begins behind padding, one is padding, and one has been round the ring."""
    torch.manual_seed(0)
    filters, positions, places = 5, 11, torch.tensor([[7], [0], [-3], [KEPT + 2]])
    actions, sharpness = draw(4, 1, filters, 4), draw(filters)
    copy = draw(4, 1, jumping, positions + 1).softmax(-1) if jumping else None
    kept = draw(4, KEPT, filters, positions).softmax(-1)
    kept[2, :-1] = 0  # of padding, nothing but the start at place -1 has been left
    before = torch.stack([kept[row, (max(-1, int(places[row]) - 1)) % KEPT] for row in range(4)])
    reset, move = actions[..., 0].sigmoid(), actions[..., 1:].softmax(-1)
    reset[2], move[2] = 1, torch.tensor([0, 0, 1])
    gamma, walking = 1 + sharpness.exp(), filters - jumping
    if copy is not None:
        copy[2] = torch.tensor([0.0] * positions + [1])
    parts = ((slice(walking), None), (slice(walking, None), copy))
    expected = torch.cat(
        [
            histogram_filter(
                reset[:, :, part], move[:, :, part], gamma[part], positions=positions, copy=jumps,
                initial=before[:, part], impl="reference",
            )
            for part, jumps in parts if gamma[part].numel()
        ], dim=2,
    )  # fmt: skip
    ring = kept.float().to(DEVICE)
    given = None if copy is None else single(copy)[0]
    found = filter_next(*single(actions, sharpness), given, ring, places.to(DEVICE), torch.float32)
    # A logarithm is off by 2^-22, times γ below 1 + e³; a sum of as many numbers as there are positions.
    torch.testing.assert_close(found.cpu(), expected[:, 0], rtol=0, atol=1e-5, check_dtype=False)
    for row in range(4):
        slot = int(places[row]) % KEPT
        assert torch.equal(ring[row, slot], found[row])
        kept[row, slot] = ring[row, slot].double()
    assert torch.equal(ring.cpu(), kept.float())


@pytest.mark.parametrize("options", [{}, {"copy": 0}, {"copy": 2, "start": True}], ids=str)
@torch.no_grad()
def test_models_give_what_they_give_without(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A whole pass, pieces that are cut further, single tokens, and a row that is padded.

    At most four times the error that PyTorch makes in float32: sums are in another order, and pieces have their own.
    On a GPU four times that: filters take logarithms and powers by one instruction each.
    """
    monkeypatch.setattr("deadreckon.encodings.cursors.HELD", {"cpu": 600, "cuda": 600})
    model, ids = make_model(layers=2, content=0.3, **options).eval(), torch.randint(1, VOCABULARY, (2, 18))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected, real = model.double()(ids, attention_mask=mask).logits, mask.bool()
    plain = model.float()(ids, attention_mask=mask).logits
    request.getfixturevalue("with_kernels")  # from here on
    allowed = (4 if DEVICE == "cpu" else 16) * float((plain - expected)[real].abs().max())
    limit: dict[str, Any] = {"rtol": 0, "atol": allowed, "check_dtype": False}
    model, ids, mask = model.to(DEVICE), ids.to(DEVICE), mask.to(DEVICE)
    whole = model(ids, attention_mask=mask).logits.cpu()
    torch.testing.assert_close(whole[real], expected[real], **limit)
    for pieces in ((0, 2, 11, 15, 16, 17, 18), (0, 1, 2, 3, 4, 5, 18)):
        cache, found = DynamicCache(config=model.config), []
        for start, end in pairwise(pieces):
            piece, seen = ids[:, start:end], mask[:, :end]
            found.append(model(piece, attention_mask=seen, past_key_values=cache).logits)
        torch.testing.assert_close(torch.cat(found, dim=1).cpu()[real], expected[real], **limit)


@pytest.mark.usefixtures("with_kernels")
def test_pieces_of_halves() -> None:
    """Keys of the copy branch are kept as halves, too: at most four times the error of a whole pass by PyTorch."""
    model, ids = make_model(layers=2, copy=2).eval(), torch.randint(1, VOCABULARY, (2, 18))
    with torch.no_grad():
        expected = model.double()(ids).logits
    model, ids = model.half().to(DEVICE), ids.to(DEVICE)
    limit: dict[str, Any] = {"atol": 4 * float((model(ids).logits.cpu() - expected).abs().max()), "rtol": 0}
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        found = [model(ids[:, start:end], past_key_values=cache).logits for start, end in pairwise((0, 12, 16, 17, 18))]
        for logits in (model(ids).logits, torch.cat(found, dim=1)):
            torch.testing.assert_close(logits.cpu(), expected, check_dtype=False, **limit)


@pytest.mark.usefixtures("with_kernels")
@torch.no_grad()
def test_a_step_is_so_many_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of cursors: network, gates, jumps and filters; and one for each layer."""
    launched = list[str]()

    def counted(name: str, launch: Any) -> Any:
        return lambda *arguments, **more: (launched.append(name), launch(*arguments, **more))[1]

    for module, name in (
        ("encodings.recurrence", "gru_from"), ("encodings.cursors", "maps_of_token"), ("encodings.cursors", "jump"),
        ("encodings.cursors", "filter_next"), ("encodings.prism", "gathered"),
    ):  # fmt: skip
        where = f"deadreckon.{module}.{name}"
        monkeypatch.setattr(where, counted(name, pytest.importorskip(f"deadreckon.{module}").__dict__[name]))
    model, ids = make_model().eval().to(DEVICE), torch.randint(1, VOCABULARY, (2, 6), device=DEVICE)
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    launched.clear()
    model(ids[:, :1], past_key_values=cache)
    layers = model.config.num_hidden_layers
    assert launched == ["gru_from", "maps_of_token", "jump", "filter_next", *["gathered"] * layers]


@pytest.mark.parametrize(("layers", "heads", "kv_heads", "pairs", "copy"), [(3, 4, 2, 3, 5), (1, 2, 2, 2, 0)])
def test_each_cursor_is_one_filter(layers: int, heads: int, kv_heads: int, pairs: int, copy: int) -> None:
    """Query cursors that walk, key cursors that walk, query cursors that jump, each in order."""
    order = cursors.order_of(layers, heads, kv_heads, pairs, copy, torch.device("cpu"))
    walks, walking_keys, jumping = [], [], []
    for layer in range(layers):
        for head in range(heads):
            for pair in range(pairs):
                met = (layer * kv_heads + head // (heads // kv_heads)) * pairs + pair
                (jumping if copy and met % copy == 0 else walks).append((layer, head, pair))
        for head in range(kv_heads):
            for pair in range(pairs):
                if copy and ((layer * kv_heads + head) * pairs + pair) % copy == 0:
                    assert order[layer, heads + head, pair] == -1
                else:
                    walking_keys.append((layer, heads + head, pair))
    for number, cursor in enumerate([*walks, *walking_keys, *jumping]):
        assert order[cursor] == number


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "width", "count", "waves"), [(41, 2, 24, 4, 13), (3, 1, 5, 1, 2)])
@pytest.mark.usefixtures("with_kernels")
def test_widened_heads(
    tokens: int, heads: int, width: int, count: int, waves: int, scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, and the gradient of everything, in several tiles of tokens: errors are those of sums of products."""
    monkeypatch.setattr("deadreckon.ops.triton.widen.NUMBERS", 256)
    torch.manual_seed(0)
    given = [draw(2, heads, tokens, width), draw(2, tokens, 2 * heads, count, waves)]
    given += [torch.rand(heads), draw(heads, count)] if scaled else []
    grad, found = draw(2, tokens, heads, width + count * waves).float(), []
    for dtype in (torch.float64, torch.float32):
        inputs = [x.float().to(DEVICE, dtype).requires_grad_() for x in given]
        x, e = inputs[0].transpose(1, 2), inputs[1][:, :, heads:]  # beside what is of others
        wide = cursors.widened(x, e, *(inputs[2:] or (None, None)), 3.0)
        assert ("Widened" in type(wide.grad_fn).__name__) == (dtype == torch.float32)
        laid_out = grad.to(DEVICE, dtype)
        # As attention's gradient may lie in memory; the last is copied.
        for order in ((0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2)):
            back = sorted(range(4), key=order.__getitem__)
            laid_out = laid_out.permute(order).contiguous().permute(back)
            grads = torch.autograd.grad(wide, inputs, laid_out, retain_graph=True)
            found.append([x.detach().double().cpu() for x in (wide, *grads)])
    for exact, single_ in ((exact, x) for some in found[4:] for exact, x in zip(found[0], some, strict=True)):
        limit = 4 * EPSILON * (count * waves * (tokens if exact.dim() < 3 else 1)) ** 0.5
        torch.testing.assert_close(single_, exact, rtol=0, atol=limit * max(1.0, float(exact.abs().max())))


@pytest.mark.parametrize("copy", [0, 2])
def test_training_by_kernels(copy: int, monkeypatch: Any) -> None:
    """Gradients of a whole model are as near to those in float64 as without kernels, up to a factor."""
    found = []
    for dtype, kernels in ((torch.float64, False), (torch.float32, False), (torch.float32, True)):
        model, called = make_model(copy=copy, positions=12).to(DEVICE, dtype), list[bool]()
        ids = torch.randint(VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(1)).to(DEVICE)
        monkeypatch.setattr("deadreckon.ops.cursors.has_kernels", lambda x, on=kernels, to=called: to.append(on) or on)
        monkeypatch.setattr("deadreckon.encodings.cursors._chances", None if kernels else _chances)
        loss = model(ids, labels=ids).loss
        found.append([x.double() for x in torch.autograd.grad(loss, list(model.parameters()))])
        assert called
    plain, by_kernel = (
        max(float((x - exact).abs().max() / exact.abs().max()) for exact, x in zip(found[0], some, strict=True))
        for some in found[1:]
    )
    assert by_kernel <= 4 * plain


def test_permutations_go_back() -> None:
    x, order = torch.randn(2, 3, 5, 4, requires_grad=True), torch.tensor([3, 0, 4, 1, 2])
    grad = torch.randn(2, 3, 5, 4)
    expected = torch.autograd.grad(x[:, :, order], x, grad)
    found = cursors._Permuted.apply(x, order)
    assert torch.equal(found, x[:, :, order]) and torch.equal(torch.autograd.grad(found, x, grad)[0], expected[0])
