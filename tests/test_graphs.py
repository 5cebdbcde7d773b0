"""Tracers: torch.compile, torch.export, FakeTensorMode and the meta device, over every encoding, factor and score."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import AWAKE, DEVICE, TRANSPORTS, Case
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import deadreckon as dr
from deadreckon.encodings.recurrence import Recurrence
from deadreckon.ops.attention import check_documents

VOCABULARY = 20
ROTATING = [name for name in dr.ENCODINGS if "rot" in name or "rope" in name or "sympow" in name]


def model(name: str) -> dr.DeadReckonForCausalLM:
    """One layer of 16 channels."""
    torch.manual_seed(0)
    options = {"positions": 16, "width": 8, "hidden": 8} if name == "prism" else AWAKE.get(name, {})
    config = dr.DeadReckonConfig(
        encoding=name, vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=32, max_position_embeddings=64, encoding_options={name: options},
    )  # fmt: skip
    return dr.DeadReckonForCausalLM(config)


def tokens(length: int, batch: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


def trained(net: Any, model: dr.DeadReckonForCausalLM, **inputs: Any) -> list[Tensor]:
    """Loss and gradients; random draws are alike."""
    torch.manual_seed(3)
    loss = net(**inputs).loss
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [loss.detach(), *(x for x in found if x is not None)]


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch.compiler.reset()


def layer(name: str) -> dr.AttentionLayer:
    torch.manual_seed(0)
    options = {"positions": 16, "width": 8, "hidden": 8} if name == "prism" else AWAKE.get(name)
    return dr.AttentionLayer(8, 2, name, 1, vocab_size=VOCABULARY, max_length=64, encoding_options=options)


ONE_OF_EACH = ("nope", "fox", "path-fox", "stickbreaking", "learned-rotation-values", "conformal-sympow", "prism")
"""Encodings that between them use every operator."""
TRACED_BACK = [name for name in ONE_OF_EACH if name != "prism"]
"""Those whose backward pass is compiled as a layer's; PRISM's is of hundreds of operations, its operators' is below."""
MADE_OF_OTHERS = (
    "sinusoidal", "randomized", "rope", "rope-values", "path", "rope-fox", "rope-path", "random-rotation-values",
    "learned-rotation", "sympow", "sympow-gated",
)  # fmt: skip
"""Encodings whose layers have no line that no other layer has. They are exported, which traces them too."""
OTHERS = [name for name in dr.ENCODINGS if name not in ONE_OF_EACH + MADE_OF_OTHERS]
"""Encodings that have: they are compiled."""


@pytest.mark.parametrize("name", [*ONE_OF_EACH, *OTHERS])
def test_layers_compile_for_any_length(name: str) -> None:
    """One graph. It calls the operators that eager mode calls: they differ by rounding alone.

    The graph of the backward pass takes twice as long again: one of each operator, for any length.
    """
    net = layer(name)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager" if name in TRACED_BACK else "eager")
    for length in (24, 47):
        x = torch.randn(2, length, 8, generator=torch.Generator().manual_seed(length), requires_grad=True)
        ids = tokens(length)
        for row in (x, ids):
            torch._dynamo.mark_dynamic(row, 1)
        found = []
        for run in (compiled, net):
            torch.manual_seed(3)
            y = run(x, token_ids=ids)
            found.append([y, *torch.autograd.grad(y.square().sum(), [x, *net.parameters()], allow_unused=True)])
        torch.testing.assert_close(*found)


def test_models_compile_for_one_length_and_any() -> None:
    net = model("fox")
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    for length in (24, 31, 47):  # the second makes it a symbol
        row = tokens(length)
        inputs = {"input_ids": row, "labels": row}
        torch.testing.assert_close(trained(compiled, net, **inputs), trained(net, net, **inputs))


@pytest.mark.parametrize("name", ["rope", "path-fox", "stickbreaking", "conformal-sympow", "randomized", "prism"])
def test_compiles_packed_and_padded_rows(name: str) -> None:
    """What eager mode cuts apart, graphs keep apart by gates: the same up to rounding."""
    net = model(name)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager" if name == "path-fox" else "eager")
    row = tokens(70, 1)
    for bounds in ([0, 1, 30, 30, 70], [0, 20, 41, 64, 70]):  # one graph serves both
        packed = {"input_ids": row, "labels": row, "cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
        torch.testing.assert_close(trained(compiled, net, **packed), trained(net, net, **packed), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"cu_seqlens: expected it to run from 0 to T = 70, got 0 to 60"):
        compiled(**{**packed, "cu_seqlens": torch.tensor([0, 1, 2, 3, 60], dtype=torch.int32)})
    with pytest.raises(ValueError, match=r"cu_seqlens: expected sorted boundaries, got \[0, 40, 30, 50, 70\]"):
        compiled(**{**packed, "cu_seqlens": torch.tensor([0, 40, 30, 50, 70], dtype=torch.int32)})
    if name == "randomized":  # a graph draws for all T tokens, eager mode for the longest row
        return
    rows, mask = tokens(24), torch.ones(2, 24)
    mask[0, :5] = mask[1, 20:] = mask[1, 3] = 0
    with torch.no_grad():  # another graph of the backward pass would find nothing more
        torch.testing.assert_close(
            compiled(input_ids=rows, attention_mask=mask).logits, net(input_ids=rows, attention_mask=mask).logits
        )


@pytest.mark.parametrize("name", [*ONE_OF_EACH, *MADE_OF_OTHERS])
def test_layers_export_for_any_length(name: str) -> None:
    """One program for 2 to 2000 tokens: powers in both forms, filters in chunks of several sizes."""
    net = layer(name).eval()
    x, ids = torch.randn(1, 900, 8), tokens(900, 1)
    length = torch.export.Dim("length", min=2, max=2000)
    program = torch.export.export(
        net, (x[:, :24],), {"token_ids": ids[:, :24]}, dynamic_shapes={"x": {1: length}, "token_ids": {1: length}}
    ).module()
    for count in (5, 150) if name == "prism" else (5, 900):
        found = []
        for run in (program, net):
            torch.manual_seed(3)
            found.append(run(x[:, :count], token_ids=ids[:, :count]))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["path-fox", "sympow-gated", "fox"])
def test_kernels_export_for_any_length(name: str) -> None:
    """What their operators return must not depend on the length by a branch."""
    net = dr.AttentionLayer(32, 2, name, 1, vocab_size=VOCABULARY, max_length=64, impl="triton").eval().to(DEVICE)
    x, length = torch.randn(1, 100, 32, device=DEVICE), torch.export.Dim("length", min=2, max=4000)
    program = torch.export.export(net, (x[:, :24],), dynamic_shapes={"x": {1: length}}).module()
    for count in (24, 100):
        torch.testing.assert_close(program(x[:, :count]), net(x[:, :count]))


@torch.no_grad()
def test_layers_export_for_one_token_of_any_batch() -> None:
    """How many sequences there are decides which kernels are used, but not here."""
    net, x, batch = layer("path-fox"), torch.randn(80, 1, 8), torch.export.Dim("batch", min=2, max=200)
    program = torch.export.export(net, (x[:3],), dynamic_shapes={"x": {0: batch}}).module()
    torch.testing.assert_close(program(x), net(x))


@pytest.mark.gpu
@pytest.mark.parametrize("name", dr.ENCODINGS)
def test_layers_compile_and_export_on_a_gpu(name: str) -> None:
    """As on a CPU, with heads that the kernels take."""
    options = {"positions": 16, "width": 8, "hidden": 8} if name == "prism" else None
    net = (
        dr.AttentionLayer(32, 2, name, 1, vocab_size=VOCABULARY, max_length=64, encoding_options=options).cuda().eval()
    )
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=True)
    x, ids = torch.randn(1, 300, 32, device="cuda"), tokens(300, 1).cuda()
    length = torch.export.Dim("length", min=2, max=2000)
    program = torch.export.export(
        net, (x[:, :24],), {"token_ids": ids[:, :24]}, dynamic_shapes={"x": {1: length}, "token_ids": {1: length}}
    ).module()
    for count in (24, 150):
        outputs = []
        for run in (program, compiled, net):
            torch.manual_seed(3)
            outputs.append(run(x[:, :count], token_ids=ids[:, :count]))
        torch.testing.assert_close(outputs[0], outputs[2])
        torch.testing.assert_close(outputs[1], outputs[2])


@pytest.mark.parametrize("name", dr.ENCODINGS)
def test_models_without_data(name: str) -> None:
    net = model(name).to("meta")
    row = torch.empty(2, 24, dtype=torch.long, device="meta")
    output = net(input_ids=row, labels=row, attention_mask=torch.ones(2, 24, device="meta"))
    output.loss.backward()
    assert output.logits.shape == (2, 24, VOCABULARY)
    with FakeTensorMode():
        row = torch.zeros(1, 24, dtype=torch.long)
        output = model(name)(input_ids=row, labels=row, cu_seqlens=torch.tensor([0, 5, 24], dtype=torch.int32))
        output.loss.backward()
    assert output.logits.shape == (1, 24, VOCABULARY) and output.logits.device.type == "cpu"


POWERS = [dr.Power(2), dr.Power(4), dr.Power(2, "chunked"), dr.Power(2, "recurrent")]


@pytest.mark.parametrize("score", ["softmax", "stick-breaking", *POWERS], ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_attention_without_data(score: Any, transport: str | None) -> None:
    """Shapes and dtypes of outputs and gradients, on the meta device and in FakeTensorMode, which take turns."""
    form = score.form if isinstance(score, dr.Power) else "auto"
    if "householder" in (transport or "") and form != "auto":
        pytest.skip("Householder steps have no such form")
    length = {"auto": 20, "chunked": 300, "recurrent": 3}[form]
    turn = TRANSPORTS.index(transport) + (score == "softmax" or form == "chunked")
    for number, (gate, dtype) in enumerate(((None, torch.bfloat16), ("learned", torch.float32)), turn):
        case = Case(transport=transport, gate=gate, score=score, length=length)
        real = {name: x.to(dtype) for name, x in case.inputs().items()}
        modes = (FakeTensorMode(allow_non_fake_inputs=False), "cpu"), (torch.enable_grad(), "meta")
        mode, device = modes[number % 2]
        with mode:
            leaves = {n: torch.empty(x.shape, dtype=dtype, device=device).requires_grad_() for n, x in real.items()}
            output = case.attend(leaves)
            gradients = torch.autograd.grad(output.sum(), list(leaves.values()))
        assert output.dtype == dtype and output.device.type == device
        assert output.shape == (*real["q"].shape[:3], real["v"].shape[3])
        assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in real.values()]
        assert case.attend(real).isfinite().all()  # nothing that has no data is remembered for those that have


CHECKED = {
    "softmax gated": Case(gate="learned", length=70),
    "routes": Case(transport="householder", gate="learned per key head", length=70),
    "routes to a power": Case(transport="householder", score=dr.Power(2), length=70),
    "stick": Case(score="stick-breaking", length=70),
    "power": Case(score=dr.Power(2), gate="learned", length=70),
    "power in chunks": Case(score=dr.Power(2, "chunked"), gate="learned", length=300, width=4, value_width=6),
}


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Operators of ours that are called, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Any, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "deadreckon":
            self.found[function] = args
        return function(*args, **(kwargs or {}))


def check_operators(calls: Calls) -> None:
    """What torch asks of operators: schemas, shapes, strides and gradients. That they compile is tested above."""
    some = ("test_schema", "test_autograd_registration", "test_faketensor")
    for function, args in calls.found.items():
        differentiable = "backward" not in str(function) and "waves" not in str(function)
        fresh = [x.detach().clone() if isinstance(x, Tensor) else x for x in args]
        for x in fresh:
            if differentiable and isinstance(x, Tensor) and x.is_floating_point():
                x.requires_grad_()
        torch.library.opcheck(function, tuple(fresh), test_utils=some)


@pytest.mark.parametrize("case", CHECKED.values(), ids=CHECKED)
def test_operators(case: Case) -> None:
    leaves = {name: x.float().requires_grad_() for name, x in case.inputs().items()}
    with Calls() as calls:
        case.attend(leaves).sum().backward()
    assert len(calls.found) == 2  # forward and backward
    check_operators(calls)


def test_operators_of_cursors() -> None:
    """The recurrent network, its table, filters and packed documents."""
    bounds, row = torch.tensor([0, 5, 12]), tokens(12, 1)
    with Calls() as calls:
        model("prism")(input_ids=row, labels=row, cu_seqlens=bounds).loss.backward()
        torch.ops.deadreckon.first_tokens(bounds, 12)
        torch.ops.deadreckon.gru(
            *(torch.randn(*shape) for shape in ((2, 7, 3), (2, 4), (12, 3), (12, 4), (12,), (12,)))
        )
    assert {"first_tokens", "gru", "waves"} <= {function.name().partition("::")[2] for function in calls.found}
    check_operators(calls)


def test_graphs_compute_states_of_powers_again() -> None:
    """In eager mode they are kept for the backward pass; a graph for any length cannot know how many there are."""
    case = CHECKED["power in chunks"]
    leaves = {name: x.float().requires_grad_() for name, x in case.inputs().items()}
    for x in leaves.values():
        torch._dynamo.mark_dynamic(x, 1)
    found = []
    for attend in (case.attend, torch.compile(case.attend, fullgraph=True, backend="aot_eager")):
        output = attend(leaves)
        found.append([output, *torch.autograd.grad(output.square().sum(), list(leaves.values()))])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_operators_of_cursors_compile_for_any_length() -> None:
    """Forward and backward: the recurrent network, which is PyTorch's, and filters, with and without their table."""
    torch.manual_seed(0)
    network, table = Recurrence(5, 4, start=True).double(), torch.randn(6, 7, dtype=torch.float64)
    weights = [w for name, w in network.named_parameters() if name != "start"]

    def run(x: Tensor, before: Tensor) -> Tensor:
        hidden = network(x, before)
        case = {"reset": hidden.sigmoid(), "move": (hidden.unsqueeze(3) * torch.arange(3)).softmax(-1)}
        gamma = torch.ones(4, dtype=torch.float64)
        positions = dr.histogram_filter(**case, gamma=gamma, positions=6)
        return hidden.sin().sum() + dr.superpose(**case, gamma=gamma, table=table).sin().sum() + positions.sin().sum()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for length in (9, 14):
        x = torch.randn(3, length, 5, dtype=torch.float64, requires_grad=True)
        before = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 1)
        found = [torch.autograd.grad(f(x, before), [x, before, *weights]) for f in (run, compiled)]
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ROTATING)
def test_odd_heads_do_not_rotate(name: str) -> None:
    with pytest.raises(ValueError, match="head_dim: rotations turn pairs of channels, expected an even one, got 5"):
        dr.AttentionLayer(10, 2, name, vocab_size=VOCABULARY)


def test_documents_are_checked_when_they_are_known() -> None:
    q = torch.randn(1, 7, 1, 2)
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32)
    assert check_documents(bounds, q) == [0, 3, 7]
    assert check_documents(bounds.to("meta"), q.to("meta")) is None


@pytest.mark.parametrize("impl", ["auto", "blockwise"])
def test_filters_refuse_transforms(impl: Any) -> None:
    reset, move, gamma = torch.rand(1, 5, 2), torch.rand(1, 5, 2, 3).softmax(-1), torch.full((2,), 2.0)

    def loss(gamma: Tensor, impl: Any = impl) -> Tensor:
        return dr.histogram_filter(reset, move, gamma, positions=4, impl=impl).square().sum()

    with pytest.raises(ValueError, match=f"impl: derivatives of torch.func .* need 'reference', got '{impl}'"):
        torch.func.grad(loss)(gamma)
    expected = torch.autograd.grad(loss(gamma.requires_grad_()), gamma)[0]
    torch.testing.assert_close(torch.func.grad(lambda x: loss(x, "reference"))(gamma.detach()), expected)


@pytest.mark.integration
def test_inductor() -> None:
    """With a C++ compiler. Operators are as opaque to Inductor as to the backends above."""
    net = model("path-fox")
    row = tokens(24)
    inputs = {"input_ids": row, "labels": row}
    compiled = torch.compile(net, fullgraph=True)
    torch.testing.assert_close(trained(compiled, net, **inputs), trained(net, net, **inputs), rtol=1e-4, atol=1e-5)
