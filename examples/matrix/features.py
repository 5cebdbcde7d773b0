"""Makes the feature table of other libraries by calling them: `python examples/matrix/features.py [PAGE]`.

A cell is the result of a check, run when the table is made:
    yes             it ran on this machine and, where deadreckon computes the same, agreed with its definition to 1e-4
    needs CUDA      the function and its argument exist, but refuse CPU tensors, and were not run
    no              there is no such function or argument (the checks below say which was looked for), or it refused
    not installed   the library is not installed here

    pip install flash-linear-attention x-transformers retention
    git clone https://github.com/zhixuan-lin/forgetting-transformer; export PYTHONPATH=forgetting-transformer/src
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import deadreckon as dr

ROWS = {
    "path": "PaTH: a product of Householder steps",
    "path-fox": "PaTH with forget gates",
    "fox": "forget gates (FoX)",
    "stick": "stick-breaking",
    "power": "even powers in place of exp, p = 2 and 4",
    "powers-state": "powers in linear time, as a recurrent state",
    "combine": "these in any combination (PaTH with stick-breaking)",
    "values": "values that turn along the route",
    "gqa": "GQA",
    "widths": "values wider than keys, with gradients",
    "packed": "packed sequences (varlen)",
    "cpu": "runs on CPUs, with gradients",
    "double": "computes in float64",
    "cache": "KV cache: pieces give what the whole gives",
    "ring": "context parallel for PaTH, gates or powers",
    "model": "a Hugging Face causal language model with PaTH or FoX",
    "convert": "takes a RoPE checkpoint without changing its logits",
}
YES, NO, CUDA, UNCHECKED = "yes", "no", "needs CUDA", "not checked here"
BY_DEFINITION = f"{CUDA}; its definition agrees"  # a slow function of the same library, in plain PyTorch
Checks = dict[str, Callable[[], str]]
SOUGHT = {  # arguments by which one function would offer it
    "path": ("w", "beta"), "path-fox": ("w", "beta"), "stick": ("score",), "combine": ("score",),
    "values": ("angles",), "packed": ("cu_seqlens",), "ring": ("group",),
}  # fmt: skip
T, D = 40, 16


def inputs(heads: int = 2, width: int = D, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """q (1, T, 2, D), k and v with so many heads, w, β and log f."""
    torch.manual_seed(0)
    q, k, w = (torch.randn(1, T, h, D, dtype=dtype) for h in (2, heads, heads))
    v = torch.randn(1, T, heads, width, dtype=dtype)
    beta, gate = torch.rand(2, 1, T, heads, dtype=dtype).unbind()
    return q, k, v, torch.nn.functional.normalize(w, dim=-1), 2 * beta, torch.nn.functional.logsigmoid(4 * gate)


def agrees(found: Tensor, *arguments: Tensor, **factors: Any) -> str:
    """Whether a result agrees with the definition."""
    error = float((found - dr.attend(*arguments, impl="reference", **factors)).abs().max())
    return YES if error < 1e-4 else f"{NO}: differs by {error:.1e}"


def by_definition(cell: str) -> str:
    """The cell of a kernel that needs CUDA, with the library's own reference run in its place."""
    return BY_DEFINITION if cell == YES else cell


def offers(function: Callable[..., Any], *arguments: str) -> str:
    """The cell of a kernel that needs CUDA, if it has these arguments."""
    return CUDA if set(arguments) <= set(inspect.signature(function).parameters) else NO


def has_none(module: Any, *parts: str) -> str:
    """Checks that no public name of a module contains these parts; fails if one turns up."""
    found = [name for name in dir(module) if any(part in name.lower() for part in parts)]
    return f"{CUDA}: {', '.join(found)}" if found else NO


def runs(work: Callable[[], Any]) -> str:
    """Whether something works at all."""
    work()
    return YES


def deadreckon() -> Checks:
    q, k, v, w, beta, gate = inputs()
    route, turn = dr.Householder(w, beta), dr.Rotation(torch.rand(1, T, 1, D // 2), values=True)

    def power_state() -> str:
        form = dr.Power(2, form="recurrent")
        return agrees(dr.attend(q, k, v, score=form, log_gate=gate), q, k, v, score=dr.Power(2), log_gate=gate)

    def wide() -> str:
        q, k, v, w, beta, _ = (x.requires_grad_() for x in inputs(width=24))
        dr.attend(q, k, v, transport=dr.Householder(w, beta)).sum().backward()
        return YES if v.grad is not None and w.grad is not None else NO

    def packed() -> str:
        o = dr.attend(q, k, v, transport=route, cu_seqlens=torch.tensor([0, 15, T], dtype=torch.int32))
        return agrees(o[:, :15], *(x[:, :15] for x in (q, k, v)), transport=dr.Householder(w[:, :15], beta[:, :15]))

    def cache() -> str:
        layer, x = dr.AttentionLayer(32, 2, "path-fox"), torch.randn(1, T, 32)
        first, state = layer(x[:, :23], state=dr.LayerState())
        rest, _ = layer(x[:, 23:], state=state)
        return YES if torch.allclose(torch.cat([first, rest], 1), layer(x), atol=1e-5) else NO

    def ring() -> str:
        with tempfile.TemporaryDirectory() as folder:
            torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
            cp = dr.ContextParallel(torch.distributed.group.WORLD)
            result = agrees(dr.attend(q, k, v, transport=route, cp=cp), q, k, v, transport=route)
            torch.distributed.destroy_process_group()
        return result

    def model() -> str:
        from transformers import GenerationMixin, PreTrainedModel

        return YES if issubclass(dr.DeadReckonForCausalLM, (PreTrainedModel, GenerationMixin)) else NO

    def convert() -> str:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        llama, ids = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).eval(), torch.randint(0, 50, (1, T))
        new = dr.convert_model(llama, "rope-path-fox").eval()
        return YES if torch.allclose(new(ids).logits, llama(ids).logits, atol=1e-5) else NO

    grouped, double = inputs(heads=1), inputs(dtype=torch.float64)
    both = {"transport": route, "score": "stick-breaking"}
    return {
        "path": lambda: agrees(dr.attend(q, k, v, transport=route), q, k, v, transport=route),
        "path-fox": lambda: agrees(
            dr.attend(q, k, v, transport=route, log_gate=gate), q, k, v, transport=route, log_gate=gate
        ),
        "fox": lambda: agrees(dr.attend(q, k, v, log_gate=gate), q, k, v, log_gate=gate),
        "stick": lambda: agrees(dr.attend(q, k, v, score="stick-breaking"), q, k, v, score="stick-breaking"),
        "power": lambda: agrees(dr.attend(q, k, v, score=dr.Power(4)), q, k, v, score=dr.Power(4)),
        "powers-state": power_state,
        "combine": lambda: agrees(dr.attend(q, k, v, **both), q, k, v, **both),
        "values": lambda: agrees(dr.attend(q, k, v, transport=turn), q, k, v, transport=turn),
        "gqa": lambda: agrees(
            dr.attend(*grouped[:3], transport=dr.Householder(*grouped[3:5])),
            *grouped[:3], transport=dr.Householder(*grouped[3:5]),
        ),
        "widths": wide,
        "packed": packed,
        "cpu": wide,
        "double": lambda: YES if dr.attend(*double[:3], log_gate=double[5]).dtype == torch.float64 else NO,
        "cache": cache,
        "ring": ring,
        "model": model,
        "convert": convert,
    }  # fmt: skip


def flash_linear_attention() -> Checks:
    import fla.models
    import fla.ops
    from fla.layers import PaTHAttention
    from fla.ops.forgetting_attn import naive_forgetting_attn, parallel_forgetting_attn
    from fla.ops.path_attn import parallel_path_attn
    from fla.ops.stickbreaking_attn import parallel_stickbreaking_attn

    q, k, v, _, _, gate = inputs()
    double = [x.double() for x in (q, k, v, gate)]

    def model() -> str:  # it can be made here; its layers need CUDA
        sizes = {"hidden_size": 32, "num_heads": 2, "num_hidden_layers": 1, "vocab_size": 50}
        fla.models.PaTHAttentionForCausalLM(fla.models.PaTHAttentionConfig(**sizes))
        return CUDA

    return {
        "path": lambda: offers(parallel_path_attn, "w", "beta"),
        "path-fox": lambda: offers(parallel_path_attn, "w", "beta", "g"),
        "fox": lambda: by_definition(agrees(naive_forgetting_attn(q, k, v, gate), q, k, v, log_gate=gate)),
        "stick": lambda: offers(parallel_stickbreaking_attn, "q", "k", "v"),
        "power": lambda: has_none(fla.ops, "power", "sympow"),
        "powers-state": lambda: has_none(fla.ops, "power", "sympow"),
        "combine": lambda: offers(parallel_stickbreaking_attn, "w", "beta"),
        "values": lambda: offers(parallel_path_attn, "angles"),
        "gqa": lambda: offers(PaTHAttention.__init__, "num_kv_heads"),
        "widths": lambda: UNCHECKED,
        "packed": lambda: offers(parallel_path_attn, "cu_seqlens"),
        "cpu": lambda: runs(lambda: parallel_forgetting_attn(q, k, v, gate)),
        "double": lambda: YES if naive_forgetting_attn(*double).dtype == torch.double else NO,
        "cache": lambda: offers(PaTHAttention.forward, "past_key_values"),
        "ring": lambda: max(offers(parallel_path_attn, "cp_context"), offers(parallel_forgetting_attn, "cp_context")),
        "model": model,
        "convert": lambda: has_none(fla.models, "convert"),
    }  # fmt: skip


def official_fox() -> Checks:
    import forgetting_transformer
    from forgetting_transformer.ops.forgetting_attention import forgetting_attention

    folder = Path(forgetting_transformer.__path__[0])
    q, k, v, _, _, gate = inputs()
    return {row: partial(offers, forgetting_attention, *names) for row, names in SOUGHT.items()} | {
        "fox": lambda: offers(forgetting_attention, "log_fgate"),
        "power": lambda: offers(forgetting_attention, "deg"),
        "powers-state": lambda: offers(forgetting_attention, "deg"),
        "gqa": lambda: UNCHECKED,
        "widths": lambda: UNCHECKED,
        "cpu": lambda: runs(lambda: forgetting_attention(q.half(), k.half(), v.half(), gate)),
        "double": lambda: runs(lambda: forgetting_attention(*(x.double() for x in (q, k, v, gate)))),
        "cache": lambda: UNCHECKED,
        "model": lambda: CUDA if list(folder.rglob("modeling_forgetting_transformer.py")) else NO,
        "convert": lambda: UNCHECKED if list(folder.rglob("*convert*llama*")) else NO,
    }


def x_transformers() -> Checks:
    from x_transformers import Decoder, TransformerWrapper
    from x_transformers.x_transformers import Attention, DataDependentAlibi

    names = set(inspect.signature(Attention.__init__).parameters)

    def without(*parts: str) -> str:
        found = [name for name in names if any(part in name for part in parts)]
        return f"{UNCHECKED}: {found}" if found else NO

    def decoder(**options: Any) -> Any:
        torch.manual_seed(0)
        return Decoder(dim=32, depth=1, heads=2, attn_dim_head=16, **options)

    def learns(**options: Any) -> str:
        x = torch.randn(1, T, 32, requires_grad=True)
        decoder(**options)(x).sum().backward()
        return YES if x.grad is not None and bool(x.grad.isfinite().all()) else NO

    def fox() -> str:
        gates, x = DataDependentAlibi(32, 2), torch.randn(1, T, 32)
        q, k, v, *_ = inputs()
        logits = torch.einsum("bihd,bjhd->bhij", q, k) * D**-0.5 + gates(x)
        weights = logits.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)
        log_gate = gates.to_forget_gates(x).transpose(1, 2)
        same = agrees(torch.einsum("bhij,bjhd->bihd", weights, v), q, k, v, log_gate=log_gate)
        return same if same != YES else learns(attn_data_dependent_alibi=True)

    @torch.no_grad()
    def cached(**options: Any) -> bool:
        layers = decoder(**options)
        model = TransformerWrapper(num_tokens=50, max_seq_len=T, attn_layers=layers, use_abs_pos_emb=False).eval()
        ids = torch.randint(0, 50, (1, T))
        _, kept = model(ids[:, :-1], return_intermediates=True)
        return torch.allclose(model(ids, cache=kept)[:, -1], model(ids)[:, -1], atol=1e-4)

    def cache() -> str:
        if cached(attn_data_dependent_alibi=True):
            return YES
        return "not with forget gates" if cached(rotary_pos_emb=True) else NO

    return {
        "path": lambda: without("householder", "path"),
        "path-fox": lambda: without("householder", "path"),
        "fox": fox,
        "stick": lambda: without("stick"),
        "power": lambda: without("power", "degree"),
        "powers-state": lambda: without("power", "degree"),
        "combine": lambda: without("stick", "householder"),
        "values": lambda: without("rotate_value", "value_rot"),
        "gqa": lambda: learns(attn_kv_heads=1),
        "widths": lambda: learns(attn_value_dim_head=24),
        "packed": lambda: CUDA if "flash_pack_seq" in names else NO,
        "cpu": lambda: learns(attn_data_dependent_alibi=True),
        "double": lambda: runs(lambda: decoder().double()(torch.randn(1, T, 32).double())),
        "cache": cache,
        "ring": lambda: without("ring", "context_parallel"),
        "model": lambda: YES if any("PreTrained" in base.__name__ for base in TransformerWrapper.__mro__) else NO,
        "convert": lambda: has_none(importlib.import_module("x_transformers"), "convert", "llama"),
    }  # fmt: skip


def retention() -> Checks:
    from retention import power_retention, power_retention_inference
    from retention.reference import power_retention as definition

    q, k, v, _, _, gate = inputs()
    wrapped = [cell.cell_contents for cell in power_retention.__closure__ if callable(cell.cell_contents)]
    (names,) = (set(inspect.signature(one).parameters) for one in wrapped if "deg" in inspect.signature(one).parameters)

    def power() -> str:
        known = [
            agrees(definition(q, k, v, log_G=gate, deg=p, scale=D**-0.5), q, k, v, log_gate=gate, score=dr.Power(p))
            for p in (2, 4)
        ]
        return BY_DEFINITION if known == [YES, YES] else f"{CUDA}; its definition: {known}"

    def state() -> str:
        found = definition(q, k, v, log_G=gate, deg=2, scale=D**-0.5, chunk_size=8)
        return by_definition(agrees(found, q, k, v, log_gate=gate, score=dr.Power(2)))

    def argument(*wanted: str) -> str:
        return CUDA if set(wanted) <= names else NO

    return {row: partial(argument, *wanted) for row, wanted in SOUGHT.items()} | {
        "fox": lambda: argument("softmax"),
        "power": power,
        "powers-state": state,
        "gqa": lambda: by_definition(
            agrees(definition(*inputs(1)[:3], deg=2, scale=D**-0.5), *inputs(1)[:3], score=dr.Power(2))
        ),
        "widths": lambda: UNCHECKED,
        "cpu": lambda: runs(lambda: power_retention(q, k, v, deg=2)),
        "double": lambda: runs(lambda: power_retention(*(x.double() for x in (q, k, v)), deg=2)),
        "cache": lambda: CUDA if callable(power_retention_inference) else NO,
        "model": lambda: has_none(importlib.import_module("retention"), "causallm", "model"),
        "convert": lambda: has_none(importlib.import_module("retention"), "convert"),
    }  # fmt: skip


def flex_attention() -> Checks:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, _, _, gate = inputs()

    def attend(q: Tensor, k: Tensor, v: Tensor, change: Any = None, together: Any = None) -> Tensor:
        def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (i >= j) if together is None else (i >= j) & together(i, j)

        mask = create_block_mask(causal, None, None, T, T, device="cpu")
        heads = (x.transpose(1, 2) for x in (q, k, v))
        o = flex_attention(*heads, score_mod=change, block_mask=mask, enable_gqa=q.shape[2] != k.shape[2])
        return o.transpose(1, 2)

    def fox() -> str:
        total = gate.cumsum(1)
        return agrees(
            attend(q, k, v, lambda s, b, h, i, j: s + total[b, i, h] - total[b, j, h]), q, k, v, log_gate=gate
        )

    def power() -> str:  # exp(p log|s|) = s^p
        found = [attend(q, k, v, lambda s, b, h, i, j, p=p: p * s.abs().log()) for p in (2, 4)]
        cells = [agrees(o, q, k, v, score=dr.Power(p)) for o, p in zip(found, (2, 4), strict=True)]
        return f"{YES}, by a score_mod" if cells == [YES, YES] else str(cells)

    def packed() -> str:
        o = attend(q, k, v, together=lambda i, j: (i < 15) == (j < 15))
        return agrees(o[:, 15:], *(x[:, 15:] for x in (q, k, v)))

    def backward() -> str:
        assert agrees(attend(q, k, v), q, k, v) == YES
        try:
            attend(q, k, v.clone().requires_grad_()).sum().backward()
        except NotImplementedError:
            return "forward alone"
        return YES

    def wide() -> str:
        forward = agrees(attend(*inputs(width=32)[:3]), *inputs(width=32)[:3])
        return "forward; gradients need CUDA" if forward == YES else forward

    names = set(inspect.signature(flex_attention).parameters)
    one = f"{NO}: score_mod sees one logit" if "score_mod" in names else UNCHECKED
    return {
        "path": lambda: one,
        "path-fox": lambda: one,
        "fox": lambda: f"{fox()}, by a score_mod",
        "stick": lambda: f"{NO}: score_mod sees one logit",
        "power": power,
        "powers-state": lambda: NO if not {"chunk_size", "initial_state"} & names else UNCHECKED,
        "combine": lambda: one,
        "values": lambda: NO if "value_mod" not in names else UNCHECKED,
        "gqa": lambda: agrees(attend(*inputs(1)[:3]), *inputs(1)[:3]),
        "widths": wide,
        "packed": packed,
        "cpu": backward,
        "double": lambda: runs(lambda: attend(*(x.double() for x in (q, k, v)))),
        "cache": lambda: UNCHECKED,
        "ring": lambda: UNCHECKED,
        "model": lambda: NO,
        "convert": lambda: NO,
    }


LIBRARIES: dict[str, tuple[str, Callable[[], Checks]]] = {  # heading: package, checks
    "deadreckon": ("deadreckon", deadreckon),
    "flash-linear-attention": ("flash-linear-attention", flash_linear_attention),
    "official FoX": ("forgetting_transformer", official_fox),
    "x-transformers": ("x-transformers", x_transformers),
    "retention": ("retention", retention),
    "FlexAttention": ("torch", flex_attention),
}


def look(name: str) -> dict[str, str]:
    """The cells of a column; prints the message of a check that was refused."""
    try:
        checks = LIBRARIES[name][1]()
    except ImportError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return dict.fromkeys(ROWS, "not installed")
    cells = {}
    for row in ROWS:
        try:
            cells[row] = checks[row]()
        except Exception as error:  # a refusal, whatever its kind, is an answer
            print(f"{name}, {row}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            cells[row] = NO
    return cells


def version_of(package: str) -> str:
    """The version of a distribution, or the commit of a checkout."""
    try:
        return version(package)
    except importlib.metadata.PackageNotFoundError:
        try:
            folder = importlib.import_module(package).__path__[0]
        except ImportError:
            return "not installed"
        found = subprocess.run(["git", "-C", folder, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        return found.stdout.strip() or "a checkout"


def table() -> str:
    """The table as a Markdown page."""
    columns = {name: look(name) for name in LIBRARIES}
    versions = ", ".join(f"{name} {version_of(package)}" for name, (package, _) in LIBRARIES.items())
    lines = [f"{date.today()}: {versions}.", "", "| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [
        f"| {title} | " + " | ".join(cells[row] for cells in columns.values()) + " |" for row, title in ROWS.items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    written = table()
    print(written)
    if len(sys.argv) > 1:  # a page: what is between its marks is replaced
        page = Path(sys.argv[1])
        before, _, rest = page.read_text().partition("<!-- features -->\n")
        page.write_text(f"{before}<!-- features -->\n{written}<!-- end -->{rest.partition('<!-- end -->')[2]}")
