"""PRISM: the layer against the paper's formulas as loops, its parameters, modules that serve several layers, pieces."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import deadreckon as dr
from deadreckon.encodings.cursors import COPY_WIDTH, Cursors
from deadreckon.encodings.prism import Prism
from deadreckon.encodings.waves import waves

SMALL = {"positions": 9, "width": 6, "cursors": 3, "hidden": 5}
VOCABULARY = 13


def make_layer(heads: int = 2, kv_heads: int = 2, width: int = 8, **options: Any) -> dr.AttentionLayer:
    """In float64, with parameters that are all of them far from where they begin."""
    torch.manual_seed(0)
    layer = dr.AttentionLayer(width, heads, "prism", kv_heads, encoding_options={**SMALL, **options}).double()
    with torch.no_grad():
        for name, parameter in layer.encoding.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (3 if name.endswith("alpha") else 0.5))
    return layer


def cursors_of(layer: dr.AttentionLayer) -> Cursors:
    assert isinstance(layer.encoding, Prism) and layer.encoding.cursors is not None
    return layer.encoding.cursors


# The paper, literally -------------------------------------------------------------------------------------------------


def gru(cursors: Cursors, x: Tensor) -> list[Tensor]:
    """Hidden states after each token of x (T, d), by the GRU's own equations."""
    w_i, w_h, b_i, b_h = cursors.recurrence.all_weights[0]
    start = cursors.recurrence.start
    h, found = x.new_zeros(cursors.recurrence.hidden_size) if start is None else start, []
    for token in x:
        from_x, from_h = (w_i @ token + b_i).chunk(3), (w_h @ h + b_h).chunk(3)
        r, z = (from_x[0] + from_h[0]).sigmoid(), (from_x[1] + from_h[1]).sigmoid()
        h = (1 - z) * (from_x[2] + r * from_h[2]).tanh() + z * h
        found.append(h)
    return found


def filter_step(h: list[float], reset: float, move: list[float], gamma: float, copy: list[float] | None) -> list[float]:
    """Algorithm 1."""
    up, down, stay = move
    total, last = sum(h), len(h) - 1
    new = [0.0] * len(h)
    new[1] += total * reset * up
    new[0] += total * reset * (down + stay)
    for i, mass in enumerate(h):
        new[i] += mass * (1 - reset) * stay
        new[min(i + 1, last)] += mass * (1 - reset) * up
        new[max(i - 1, 0)] += mass * (1 - reset) * down
    if copy is not None:
        new = [x * copy[-1] + total * p for x, p in zip(new, copy, strict=False)]
    sharp = [(x + 1e-8) ** gamma for x in new]
    return [x / sum(sharp) for x in sharp]


def jumps(cursors: Cursors, x: Tensor, hidden: list[Tensor], number: int) -> list[list[float]]:
    """The copy distributions of one jumping cursor."""
    rows = slice(number * COPY_WIDTH, (number + 1) * COPY_WIDTH)
    w_q, w_k = cursors.copy_query.weight[rows], cursors.copy_key.weight[rows]
    found = []
    for t in range(len(x)):
        scores = [float((w_q @ x[t]) @ (w_k @ x[s])) / math.sqrt(COPY_WIDTH) for s in range(t + 1)]
        scores.append(float(cursors.no_copy.weight[number] @ hidden[t] + cursors.no_copy.bias[number]))
        total = sum(math.exp(score) for score in scores)
        chances = [0.0] * (cursors.positions + 1)
        for s, score in enumerate(scores[:-1]):
            chances[min(s, cursors.positions - 1)] += math.exp(score) / total
        chances[-1] = math.exp(scores[-1]) / total
        found.append(chances)
    return found


def histograms(layer: dr.AttentionLayer, x: Tensor) -> tuple[dict[Any, list[Any]], dict[Any, list[Any]]]:
    """(head, cursor) -> a histogram for each token, of queries and of keys."""
    cursors = cursors_of(layer)
    hidden = gru(cursors, x)
    heads, kv_heads, pairs = layer.sizes.n_heads, layer.sizes.n_kv_heads, cursors.key_shape[2]
    fixed = {
        (h, c) for h in range(kv_heads) for c in range(pairs) if cursors.copy and (h * pairs + c) % cursors.copy == 0
    }
    query_names, key_names = (list(itertools.product(range(n), range(pairs))) for n in (heads, kv_heads))
    jumping = [(h, c) for h, c in query_names if (h * kv_heads // heads, c) in fixed]
    order = [("query", name) for name in query_names if name not in jumping]
    order += [("key", name) for name in key_names if name not in fixed] + [("query", name) for name in jumping]
    found: dict[str, dict[Any, list[Any]]] = {"query": {}, "key": {}}
    for number, (kind, name) in enumerate(order):
        h, steps = [1.0] + [0.0] * (cursors.positions - 1), []
        copies = jumps(cursors, x, hidden, jumping.index(name)) if kind == "query" and name in jumping else None
        for t, state in enumerate(hidden):
            action = cursors.gates.weight[4 * number : 4 * number + 4] @ state
            action = action + cursors.gates.bias[4 * number : 4 * number + 4]
            gamma = 1 + float(cursors.sharpness[number].exp())
            move = action[1:].softmax(-1).tolist()
            h = filter_step(h, float(action[0].sigmoid()), move, gamma, copies[t] if copies else None)
            steps.append(h)
        found[kind][name] = steps
    for name in fixed:
        found["key"][name] = [
            [float(p == min(t, cursors.positions - 1)) for p in range(cursors.positions)] for t in range(len(x))
        ]
    return found["query"], found["key"]


def test_compiled_layers_are_the_same() -> None:
    """A table that is kept for all calls has to come through a break in the graph."""
    layer, x = make_layer(), torch.randn(2, 6, 8, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(layer, backend="eager")(x), layer(x), rtol=0, atol=0)


def superposition(h: list[float], width: int) -> list[float]:
    e = [0.0] * width
    for p, mass in enumerate(h):
        for i in range(width // 2):
            angle = p * math.exp(-math.log(10000) * 2 * i / width)
            e[2 * i] += mass * math.sin(angle)
            e[2 * i + 1] += mass * math.cos(angle)
    return e


def attention(layer: dr.AttentionLayer, x: Tensor) -> Tensor:
    """The output of the layer on x (T, d_model)."""
    encoding, sizes = layer.encoding, layer.sizes
    assert isinstance(encoding, Prism)
    width, pairs = cursors_of(layer).width, encoding.alpha.shape[1]
    query_histograms, key_histograms = histograms(layer, x)

    def stream(found: dict[Any, list[Any]], head: int, t: int) -> list[list[float]]:
        e = [superposition(found[head, c][t], width) for c in range(pairs)]
        norm = math.sqrt(sum(value**2 for row in e for value in row))
        return [[value * math.sqrt(width) / norm for value in row] for row in e]

    q, k, v = (part(x).unflatten(-1, (-1, sizes.head_dim)) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    outputs = torch.zeros(len(x), sizes.n_heads, sizes.head_dim, dtype=x.dtype)
    for head in range(sizes.n_heads):
        kv_head = head * sizes.n_kv_heads // sizes.n_heads
        mix = float(encoding.mix[head].sigmoid())
        keys = [stream(key_histograms, kv_head, s) for s in range(len(x))]
        for t in range(len(x)):
            query, logits = stream(query_histograms, head, t), []
            for s in range(t + 1):
                similarity = sum(
                    abs(float(encoding.alpha[head, c])) * sum(a * b for a, b in zip(query[c], keys[s][c], strict=True))
                    for c in range(pairs)
                )
                content = float(q[t, head] @ k[s, kv_head]) / math.sqrt(sizes.head_dim)
                logits.append(mix * content + (1 - mix) * similarity / math.sqrt(pairs * width))
            outputs[t, head] = torch.tensor(logits, dtype=x.dtype).softmax(0) @ v[: t + 1, kv_head]
    return layer.o_proj(outputs.flatten(1))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "copy", "start"), [(2, 2, 0, False), (2, 2, 5, False), (4, 2, 2, False), (2, 2, 0, True)]
)
def test_a_layer_is_the_papers_formula(heads: int, kv_heads: int, copy: int, start: bool) -> None:
    """With twelve tokens and nine positions, so that cursors and places meet the end."""
    layer = make_layer(heads, kv_heads, copy=copy, start=start)
    x = torch.randn(2, 12, 8, dtype=torch.float64)
    with torch.no_grad():
        expected = torch.stack([attention(layer, row) for row in x])
        torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-11)
        reading = cursors_of(layer).read(x, dr.Context.of(x))
        queries, keys = histograms(layer, x[1])
    for (head, cursor), steps in queries.items():
        found = reading.histograms.queries[1, :, 0, head, cursor]
        torch.testing.assert_close(found, torch.tensor(steps, dtype=x.dtype), rtol=0, atol=1e-11)
    for (head, cursor), steps in keys.items():
        found = reading.histograms.keys[1, :, 0, head, cursor]
        torch.testing.assert_close(found, torch.tensor(steps, dtype=x.dtype), rtol=0, atol=1e-11)


def test_position_decides_where_content_does_not() -> None:
    """Equal tokens: heads tell them apart by their cursors alone, and not at all with μ = 1."""
    layer = make_layer()
    x = torch.ones(1, 6, 8, dtype=torch.float64)
    context = dr.Context.of(x)
    q, k = (part(x).unflatten(-1, (2, -1)) for part in (layer.q_proj, layer.k_proj))
    wide_q, wide_k = layer.encoding.widen(q, k, x, context)
    assert wide_q.shape == wide_k.shape == (1, 6, 2, 4 + 3 * 6)
    logits = torch.einsum("bthd,bshd->bhts", wide_q, wide_k)
    assert logits[0, :, -1].std(-1).min() > 1e-3
    with torch.no_grad():
        layer.encoding.mix.fill_(50)
    logits = torch.einsum("bthd,bshd->bhts", *layer.encoding.widen(q, k, x, context))
    torch.testing.assert_close(logits, torch.einsum("bthd,bshd->bhts", q, k))


# Parameters -----------------------------------------------------------------------------------------------------------


def test_how_parameters_begin() -> None:
    layer = dr.AttentionLayer(16, 4, "prism")
    encoding, cursors = layer.encoding, cursors_of(layer)
    assert isinstance(encoding, Prism)
    w = cursors.recurrence.weight_hh_l0
    assert w.shape == (300, 100)
    torch.testing.assert_close(w.T @ w, torch.eye(100), rtol=0, atol=1e-5)
    assert (encoding.mix.sigmoid() == 0.5).all() and (encoding.alpha == 1).all() and encoding.alpha.shape == (4, 4)
    assert (1 + cursors.sharpness.exp() == 2).all()
    assert cursors.jumping == 4 and cursors.walking_queries == 12  # one in five of 16, rounded up
    with torch.no_grad():
        encoding.mix.copy_(torch.tensor([-1e4, -1.0, 1.0, 1e4]))
    assert encoding.mix.sigmoid().min() >= 0 and encoding.mix.sigmoid().max() <= 1
    reading = cursors.read(torch.randn(1, 30, 16), dr.Context.of(torch.randn(1, 30, 16)))
    assert (reading.reset.queries - 0.5).abs().max() < 0.2 and (reading.move.queries - 1 / 3).abs().max() < 0.2
    other = dr.AttentionLayer(16, 4, "prism", encoding_options={"gamma": 1.25, "content": 0.2, "similarity": 3.0})
    assert isinstance(other.encoding, Prism) and (other.encoding.alpha == 3).all()
    torch.testing.assert_close(1 + cursors_of(other).sharpness.exp(), torch.full_like(cursors.sharpness, 1.25))
    torch.testing.assert_close(other.encoding.mix.sigmoid(), torch.full((4,), 0.2))


def test_orthogonality_is_part_of_the_loss_in_training() -> None:
    model, ids = make_model(), torch.randint(0, VOCABULARY, (2, 9))
    plain, penalty = model.eval()(ids, labels=ids).loss, model.model.penalty()
    assert penalty is not None and penalty < 1e-9
    w = model.model.layers[0].self_attn.encoding.cursors.recurrence.weight_hh_l0
    with torch.no_grad():
        w.mul_(2)  # WᵀW = 4 I
    penalty = model.model.penalty()
    torch.testing.assert_close(penalty, torch.tensor(1e-3 * 9 * 5))
    model.train()(ids, labels=ids).loss.backward()
    pull = 4 * 1e-3 * w @ (w.T @ w - torch.eye(5))  # its gradient
    with_penalty = w.grad.clone()
    model.eval()
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    torch.testing.assert_close(with_penalty - w.grad, pull, rtol=1e-3, atol=1e-5)
    assert plain.isfinite()
    assert make_model("rope").model.penalty() is None
    several = make_model(modules=[0, 1])
    with torch.no_grad():
        for layer in several.model.layers:
            if layer.self_attn.encoding.cursors is not None:
                layer.self_attn.encoding.cursors.recurrence.weight_hh_l0.mul_(2)
    torch.testing.assert_close(several.model.penalty(), torch.tensor(2 * 1e-3 * 9 * 5))  # that of both modules


def test_noise_is_for_training() -> None:
    """With gates that are 0 but for noise, moves differ from token to token; in tests nothing is drawn."""
    layer, x = make_layer(noise=2.0, copy=2), torch.randn(1, 1000, 8, dtype=torch.float64)
    cursors, quiet = cursors_of(layer), cursors_of(make_layer(copy=2))
    with torch.no_grad():
        for part in (cursors.gates, quiet.gates, cursors.no_copy, quiet.no_copy):
            part.weight.zero_()
            part.bias.zero_()
    context = dr.Context.of(x)
    still, moved = (cursors.train(mode).read(x, context) for mode in (False, True))
    assert torch.equal(still.reset.queries, torch.full_like(still.reset.queries, 0.5))
    assert torch.equal(still.histograms.queries, quiet.read(x, context).histograms.queries)
    logits = moved.reset.queries.logit()
    assert abs(float(logits.mean())) < 5 * 2 / logits.numel() ** 0.5  # five standard errors
    assert abs(float(logits.std()) - 2) < 5 * 2 / (2 * logits.numel()) ** 0.5
    assert not torch.equal(moved.histograms.queries, cursors.read(x, context).histograms.queries)


@pytest.mark.parametrize("copy", [0, 2])
@torch.no_grad()
def test_superpositions_in_half_precision(copy: int) -> None:
    """As near to those in float64 as roundings let them.

    With u = 2⁻⁹ and m the table's largest: histograms, the table and their products are rounded, 3 u m in all. That
    moves a norm ‖e‖ of n channels by √n as much, and channels by their share in it. What comes out is rounded again.
    Single precision's part, the filter's, is small beside all this.
    """
    layer, x = make_layer(heads=4, copy=copy), torch.randn(2, 9, 8, dtype=torch.float64)
    q, k = torch.randn(2, 9, 4, 2, dtype=torch.float64), torch.randn(2, 9, 2, 2, dtype=torch.float64)
    context, half, width = dr.Context.of(x), torch.bfloat16, SMALL["width"]
    assert isinstance(layer.encoding, Prism)
    exact, streams = layer.encoding.widen(q, k, x, context), cursors_of(layer)(x, context, torch.float64)[0]
    gain = (1 - layer.encoding.mix.sigmoid())[:, None, None] * layer.encoding.alpha.abs()[..., None]
    gains = gain * (2 / (SMALL["cursors"] * width)) ** 0.5, torch.ones(())
    found = layer.float().encoding.widen(q.to(half), k.to(half), x.float(), context)
    largest = waves(9, width, 10000.0, torch.device("cpu"), torch.float64).abs().max()
    for mine, true, e, gain in zip(found, exact, streams, gains, strict=True):
        norm = e.norm(dim=(-2, -1), keepdim=True)
        torch.testing.assert_close(true[..., 2:].unflatten(-1, e.shape[-2:]), e * gain * width**0.5 / norm)
        moved = 3 * 2**-9 * largest * (1 + e.abs() / norm * e[0, 0, 0].numel() ** 0.5) * gain * width**0.5 / norm
        bound = moved.flatten(-2) + 2**-9 * true[..., 2:].abs()
        assert mine.dtype == half and ((mine[..., 2:] - true[..., 2:]).abs() <= 1.01 * bound).all()


def test_alpha_has_its_own_group() -> None:
    model = make_model()
    rest, *own = dr.parameter_groups(model, 1e-3, 0.1)
    alphas = [layer.self_attn.encoding.alpha for layer in model.model.layers]
    assert [group["params"] for group in own] == [[alpha] for alpha in alphas]
    assert all((g["lr"], g["betas"], g["weight_decay"]) == (0.03, (0.8, 0.92), 0.0) for g in own)
    assert (rest["lr"], rest["initial_lr"], rest["weight_decay"]) == (1e-3, 1e-3, 0.1)
    together = [id(p) for group in (rest, *own) for p in group["params"]]
    assert sorted(together) == sorted(id(p) for p in model.parameters())
    optimizer = torch.optim.AdamW([rest, *own])
    assert optimizer.param_groups[1]["betas"] == (0.8, 0.92) and optimizer.param_groups[0]["betas"] == (0.9, 0.999)


# Modules and layers ---------------------------------------------------------------------------------------------------


def make_model(encoding: str = "prism", layers: int = 3, **options: Any) -> dr.DeadReckonForCausalLM:
    torch.manual_seed(0)
    config = dr.DeadReckonConfig(
        encoding=encoding, vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3,
        encoding_options={"prism": {**SMALL, "similarity": 5.0, **options}} if encoding == "prism" else None,
    )  # fmt: skip
    return dr.DeadReckonForCausalLM(config)


def test_one_module_serves_the_layers_up_to_the_next() -> None:
    model, ids = make_model(modules=[0, 2], start=True), torch.randint(0, VOCABULARY, (2, 20))
    encodings = [layer.self_attn.encoding for layer in model.model.layers]
    assert [encoding.cursors is not None for encoding in encodings] == [True, False, True]
    assert [encodings[n].cursors.query_shape for n in (0, 2)] == [(2, 4, 3), (1, 4, 3)]
    assert encodings[0].cursors.fixed == 3  # of 12: each fifth, over both layers
    seen: list[Tensor] = []
    encodings[0].cursors.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    model(ids, labels=ids).loss.backward()
    assert len(seen) == 1  # reckoned once
    torch.testing.assert_close(seen[0], model.model.layers[0].input_layernorm(model.model.embed_tokens(ids)))
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    # The second layer's cursors are the second half of the first module's.
    before = model(ids).logits
    with torch.no_grad():
        encodings[1].mix.fill_(50)  # deaf to positions
    deaf = model(ids).logits
    assert not torch.allclose(before, deaf)
    with torch.no_grad():
        first = encodings[0].cursors
        met = [query // 3 // 2 * 3 + query % 3 for query in range(24)]  # the key cursor, of two heads a key head
        walking = [n for n, query in enumerate(q for q in range(24) if met[q] % 5) if query >= 12]
        first.gates.weight.view(-1, 4, 5)[walking] += 1
    torch.testing.assert_close(model(ids).logits, deaf)


@pytest.mark.parametrize(("copy", "start"), [(0, False), (2, True)])
def test_models_stream_and_pad(copy: int, start: bool) -> None:
    """Two modules, pieces of any length, rows that begin late: as each row alone, all at once."""
    model = make_model(modules=[0, 2], copy=copy, positions=30, start=start).eval()
    ids = torch.randint(0, VOCABULARY, (3, 150))
    for name, parameter in model.named_parameters():
        if name.endswith("start"):
            torch.nn.init.normal_(parameter)
    padding = torch.tensor([0, 75, 21])
    mask = (torch.arange(150) >= padding[:, None]).long()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        outputs = [
            model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache).logits
            for start, end in itertools.pairwise([0, 20, 21, 70, 80, 81, 82, 150])
        ]
        found = torch.cat(outputs, dim=1)
        for row, begin in enumerate(padding.tolist()):
            alone = model(ids[row : row + 1, begin:]).logits
            torch.testing.assert_close(found[row, begin:], alone[0], rtol=0, atol=1e-4)
        cache.crop(-50)
        again = model(ids[:, 100:130], attention_mask=mask[:, :130], past_key_values=cache).logits
        torch.testing.assert_close(again, found[:, 100:130], rtol=0, atol=1e-4)
        packed = model(ids[:1, :90], cu_seqlens=torch.tensor([0, 1, 1, 40, 90], dtype=torch.int32)).logits
        parts = [model(ids[:1, a:b]).logits for a, b in ((0, 1), (1, 40), (40, 90))]
        torch.testing.assert_close(packed, torch.cat(parts, dim=1), rtol=0, atol=1e-4)


def test_kernels_serve_the_cursors(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: whole, with gradients, and in pieces."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = make_layer(copy=2, cursors=1).to(device, torch.float32)
    x, grad = torch.randn(2, 1, 70, 8, device=device).unbind()
    cuts = [0, 1, 68, 70]

    def run() -> list[Tensor]:
        layer.zero_grad()
        (layer(x[:, :15]) * grad[:, :15]).sum().backward()
        gradients = [p.grad for p in layer.encoding.parameters() if p.grad is not None]
        state, outputs = None, []
        for start, end in itertools.pairwise(cuts):
            y, state = layer(x[:, start:end], state=state)
            outputs.append(y)
        return [torch.cat(outputs, dim=1), *(gradient.clone() for gradient in gradients)]

    expected = run()
    for name in ("superpose", "histogram_filter"):
        monkeypatch.setattr(f"deadreckon.encodings.cursors.{name}", partial(getattr(dr, name), impl="triton"))
    found = run()
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1:], expected[1:], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": 1}, "prism: expected positions to be an integer of 2 or more, got 1"),
        ({"width": 7}, "prism: expected an even width, sines and cosines, got 7"),
        ({"norm": 0.0}, "prism: expected norm to be positive or None, got 0.0"),
        ({"gamma": 1.0}, "prism: expected gamma to be above 1, got 1.0"),
        ({"content": 1.0}, "prism: expected content to be above 0 and below 1, got 1.0"),
        ({"start": 1}, "prism: expected start to be True or False, got 1"),
        ({"noise": -1.0}, "prism: expected noise to be 0 or more, got -1.0"),
        ({"cursors": 0}, "prism: expected cursors to be an integer of 1 or more, got 0"),
        ({"copy": 1}, "prism: expected copy to be 0 or 2 or more, so that some cursors walk, got 1"),
        ({"modules": [0, 3]}, r"prism: expected modules to be layers from 0 to 2, sorted, got \[0, 3\]"),
        ({"modules": []}, r"prism: expected modules to be layers from 0 to 2, sorted, got \[\]"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model(**options)


def test_rows_without_tokens_say_so() -> None:
    """Whatever moves the cursors: a kernel would read what is not there."""
    with pytest.raises(ValueError, match=r"x: expected at least one token, got shape \(2, 0, 8\)"):
        make_layer()(torch.zeros(2, 0, 8, dtype=torch.float64))


def test_layers_before_the_first_module_say_so() -> None:
    with pytest.raises(ValueError, match="prism: expected a module of cursors before layer 0, got none; say where by"):
        make_model(modules=[1])(torch.zeros(1, 3, dtype=torch.int64))
