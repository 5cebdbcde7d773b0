"""Compiles every kernel of a few typical calls for a GPU, without having one; run by test_without_interpreter.py.

For an H100 or H200, or with --gpu 80 (A100), 86, 89 (RTX 3090, 4090), 100 or 120 (Blackwell) for that architecture.
Prints a line for each kernel: its name and its shared memory. Exits with an error if a kernel does not compile or needs
more shared memory than a program may have. With --spills it also prints registers per thread and spilled bytes, which
is what to look at first in a slow kernel. All kernels take five minutes.

With --quick, as in tests, it compiles one width and precision of each mechanism. Wrong names, shapes and types are
found on the way to Triton IR, a tenth of the work: only the kernels in `WHOLE`, one or two of each mechanism, are
compiled to machine code and have their shared memory checked.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from triton import compile as compile_kernel
from triton import knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction

import deadreckon.ops.triton.gated.gates
import deadreckon.ops.triton.householder.levels
import deadreckon.ops.triton.tiles
from deadreckon.filters.triton import filter_fused, step, superpose_fused
from deadreckon.ops.factors import Factors, Form, Householder, Power, Rotation, Score
from deadreckon.ops.streaming.fused import STREAM
from deadreckon.ops.streaming.past import Past
from deadreckon.ops.streaming.stream import PYTORCH, attend_stream
from deadreckon.ops.triton import cursors, gru, pointwise, token, widen
from deadreckon.ops.triton.attend import attend_fused
from deadreckon.ops.triton.directions import directions_forward
from deadreckon.ops.triton.loss import cross_entropy_
from deadreckon.ops.triton.norm import ResidualNorm
from deadreckon.ops.triton.power.operator import attend_power

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
NAMES |= {torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64"}
ARCHITECTURE = int(sys.argv[sys.argv.index("--gpu") + 1]) if "--gpu" in sys.argv else 90
SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}[ARCHITECTURE]  # bytes of a program
TARGET = GPUTarget("cuda", ARCHITECTURE, 32)
WHOLE = ("_walk_forward", "_gather", "_forward", "_combine", "_turn_by_phase", "_filter_forward")
QUICK = "--quick" in sys.argv
deadreckon.ops.triton.gated.gates.PRUNED = 1  # short rows ask what is in reach as well
shared: dict[str, int] = {}


def signature(value: Any, path: tuple[int, ...], special: bool, constants: dict, attributes: dict) -> Any:
    """The type of an argument as Triton would specialise it, if it may."""
    if isinstance(value, tuple):
        parts = [signature(part, (*path, i), special, constants, attributes) for i, part in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if value is None or (special and isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    if special and (isinstance(value, torch.Tensor) or value % 16 == 0):
        attributes[path] = [["tt.divisibility", 16]]
    if isinstance(value, torch.Tensor):
        return "*" + NAMES[value.dtype]
    return "i32" if value < 2**31 else "i64"


def compile_only(self: JITFunction, *arguments: Any, grid: Any = None, warmup: bool = False, **keywords: Any) -> None:
    options = {name: keywords.pop(name) for name in list(keywords) if name not in self.arg_names}
    values = {**dict(zip(self.arg_names, arguments, strict=False)), **keywords}
    types, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(self.params):
        if parameter.is_constexpr:
            types[parameter.name], constants[(i,)] = "constexpr", values[parameter.name]
        else:
            types[parameter.name] = signature(
                values[parameter.name], (i,), not parameter.do_not_specialize, constants, attributes
            )
    key = f"{self.fn.__name__} {types} {constants} {options}"
    if key not in shared:
        source = ASTSource(self, types, constants, attributes)
        if QUICK and self.fn.__name__ not in WHOLE:
            translate(source, options)
            shared[key] = 0
            print(self.fn.__name__, flush=True)
            return
        for stages in range(options.get("num_stages", 3), 0, -1):  # as `Kernel` does it
            kernel = compile_kernel(source, target=TARGET, options=options | {"num_stages": stages})
            if kernel.metadata.shared <= SHARED:
                break
        shared[key] = kernel.metadata.shared
        more = f" {spills(kernel.asm['ptx'])} {options}" if "--spills" in sys.argv else ""
        print(f"{self.fn.__name__} {shared[key]}{more}", flush=True)


def translate(source: ASTSource, options: dict[str, Any]) -> None:
    """The first stage of compiling: from Python to verified Triton IR."""
    backend, context = make_backend(TARGET), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(options | source.parse_options())
    source.make_ir(TARGET, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)


def spills(ptx: str) -> str:
    """Registers per thread, and bytes spilled."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        target = f"--gpu-name=sm_{ARCHITECTURE}{'a' if ARCHITECTURE >= 90 else ''}"
        words = [knobs.nvidia.ptxas.path, "-v", target, str(path), "-o", str(path.with_suffix(".cubin"))]
        report = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", report), re.search(r"(\d+) bytes spill stores", report)
    assert registers is not None
    assert spilled is not None
    return f"{registers[1]} registers, {spilled[1]} bytes spilled"


def call(
    dtype: torch.dtype, length: int, group: int, width: int, transport: str | None, gated: bool, **more: Any
) -> None:
    q = torch.randn(1, length, group, width).to(dtype).requires_grad_()
    k = torch.randn(1, length, 1, width).to(dtype).requires_grad_()
    v = torch.randn(1, length, 1, more.get("values", width)).to(dtype).requires_grad_()
    factors: Any = None
    if transport == "householder":
        factors = Householder(torch.randn(1, length, 1, width), torch.rand(1, length, 1))
    elif transport:
        factors = Rotation(torch.rand(1, length, 1, width // 2).requires_grad_(), values=True)
    gate = -torch.rand(1, length, group) if gated else None
    bounds = torch.tensor([0, length // 3, length], dtype=torch.int32) if more.get("packed") else None
    output = attend_fused(q, k, v, Factors(factors, gate, more.get("score", "softmax")), 0.1, bounds)
    output.sum().backward()


def decode(
    dtype: torch.dtype, width: int, gated: bool, routes: bool, score: Score = "softmax", *, turns: bool = False
) -> None:
    past = Past()
    for tokens in (192, 1):
        q, k, v, w = (torch.randn(1, tokens, heads, width).to(dtype) for heads in (4, 1, 1, 1))
        beta, gate = torch.rand(1, tokens, 1), -torch.rand(1, tokens, 4) if gated else None
        rotation, steps = Rotation(torch.rand(1, tokens, 1, width // 2), values=not routes), Householder(w, beta)
        transport = (rotation, steps) if turns and routes else rotation if turns else steps if routes else None
        factors = Factors(transport, gate, score)
        attend_stream(q, k, v, factors, 0.1, past, PYTORCH if tokens > 1 else STREAM)


def call_filter(dtype: torch.dtype, length: int, positions: int, copy: bool) -> None:
    reset, move, gamma = torch.rand(2, length, 3), torch.rand(2, length, 3, 3), torch.ones(3).requires_grad_()
    jumps = torch.rand(2, length, 3, positions + 1).to(dtype) if copy else None
    initial = torch.rand(positions).expand(2, 3, -1)
    h = filter_fused(reset.to(dtype), move.to(dtype), gamma, jumps, initial, 1e-8)
    e, _ = superpose_fused(reset, move, gamma, jumps, initial, torch.rand(positions, 8).to(dtype), 1e-8)
    (h.float().sum() + e.float().sum()).backward()


def call_cursors(dtype: torch.dtype, hidden: int, positions: int) -> None:
    """PRISM's kernels: for a piece of several tokens, and for one token."""
    u, bias, places = (
        torch.randn(3 * hidden, hidden).to(dtype),
        torch.randn(3 * hidden).to(dtype),
        torch.arange(70)[None],
    )
    table, order, weights = (
        torch.randn(positions, 104).to(dtype),
        torch.zeros(3, 4, dtype=torch.int32),
        torch.ones(2, 4),
    )
    for tokens in (70, 1):
        x, here = torch.randn(2, tokens, 3 * hidden), places[:, :tokens]
        state = torch.zeros(2, 66, hidden) if tokens == 1 else torch.zeros(2, hidden)
        gru.forward(x, bias, u, bias, None, here, state, tokens == 1)
        q, keys, none = torch.randn(2, tokens, 5, 32), torch.randn(2, 5, 128, 32).to(dtype), torch.randn(2, tokens, 5)
        heads = [torch.randn(2, tokens, n, 64).to(dtype) for n in (2, 1)]
        e = torch.randn(2, tokens, 9, 104).to(dtype)
        widen.gathered(*heads, e, table, here, order, weights[:, 0].contiguous().to(dtype), weights.to(dtype), 1.0, 1.0)
    gates = torch.randn(2, 70, 3 * hidden)
    gru.backward(gates, gates, gates[..., :hidden], gates[..., :hidden], u.float())
    e, weights = torch.randn(2, 70, 2, 4, 104).to(dtype).requires_grad_(), weights.requires_grad_()
    x = torch.randn(2, 70, 2, 64).to(dtype)
    for scales in ((weights[:, 0], weights), (None, None)):
        widen.Widened.apply(x, e, *scales, 1.0).sum().backward()
    cursors.jumps(torch.randn(2, 70, 5, 32), keys, torch.randn(2, 70, 5), places, positions, dtype)
    copy = cursors.jump(q, keys, q, none, here, positions)
    step(torch.randn(2, 1, 9, 4), torch.ones(9).to(dtype), copy, torch.zeros(2, 66, 9, positions), here, dtype, 1e-8)


def call_power(
    dtype: torch.dtype, length: int, group: int, width: int, p: int, gated: bool, form: Form = "chunked"
) -> None:
    q = torch.randn(1, length, group, width).to(dtype).requires_grad_()
    k, v = (torch.randn(1, length, 1, width).to(dtype).requires_grad_() for _ in range(2))
    gate = (-torch.rand(1, length, 1)).requires_grad_() if gated else None
    attend_power(q, k, v, gate, 0.1, p, form)[0].sum().backward()


def call_directions(dtype: torch.dtype, width: int) -> None:
    x = torch.randn(1, 40, 2 * width).to(dtype).requires_grad_()
    places = torch.arange(40)[None]
    directions_forward(x, torch.randn(3, 2 * width), places, 2, True, 0.0).sum().backward()
    directions_forward(x, torch.randn(4, 2 * width), places, 2, False, 0.0, False).sum().backward()


def call_token(dtype: torch.dtype, width: int) -> None:
    x, weight = torch.randn(1, 1, 2048).to(dtype), torch.randn(32, 2048).to(dtype)
    parts = [(weight, None, "none", 1.0), (weight[:8], weight[:8, 0].contiguous(), "strength", 1.0)]
    token.maps(x, parts)
    token.maps(x, [*parts, (weight, None, "log gate", 1.0)])
    up, recent = torch.randn(8 * width, 32).to(dtype), torch.randn(1, 66, 8 * width).to(dtype)
    token.directions(x[..., :32], up, recent, torch.randn(3, 8 * width), torch.zeros(1, 1).long(), 8, "none", 0.0)
    token.directions(
        x[..., :32], up, recent, torch.randn(4, 8 * width), torch.zeros(1, 1).long(), 8, "none", 0.0, False
    )


def call_pointwise(dtype: torch.dtype) -> None:
    gate, up = (torch.randn(100).to(dtype).requires_grad_() for _ in range(2))
    pointwise.swiglu(gate, up).sum().backward()
    pointwise.log_gate(gate.detach(), 1.0)
    pointwise.strength(gate.detach())


def call_around(dtype: torch.dtype, width: int) -> None:
    """The kernels around attention and MLPs: residuals with their norms, and the loss."""
    x, y = torch.randn(40, width, requires_grad=True), torch.randn(40, width).to(dtype).requires_grad_()
    total, normed = ResidualNorm.apply(x, y, torch.ones(width), 1e-6, dtype)
    (total.sum() + normed.sum()).backward()
    ResidualNorm.apply(x, None, torch.ones(width), 1e-6, dtype)[1].sum().backward()
    cross_entropy_(torch.randn(40, 4 * width).to(dtype), torch.zeros(40, 1).long(), True)


JITFunction.run = compile_only  # type: ignore[method-assign]
deadreckon.ops.triton.householder.levels.backend_for = lambda x: None  # type: ignore[attr-defined]
deadreckon.ops.triton.tiles.shared_memory = lambda x: SHARED >> 10
call(torch.bfloat16, 1100, 2, 64, "householder", True)
call(torch.float16, 100, 1, 64, "rotation", False)
call(torch.bfloat16, 100, 1, 64, None, False, score="stick-breaking")
call(torch.bfloat16, 100, 1, 184, None, False, values=24)
decode(torch.bfloat16, 64, gated=True, routes=True)
decode(torch.bfloat16, 64, gated=True, routes=False, score=Power(2))
decode(torch.bfloat16, 64, gated=False, routes=True, turns=True)
decode(torch.bfloat16, 64, gated=False, routes=False, score="stick-breaking")
call_directions(torch.bfloat16, 64)
call_token(torch.bfloat16, 64)
call_pointwise(torch.bfloat16)
call_around(torch.bfloat16, 512)
call_filter(torch.bfloat16, 20, 512, copy=True)
call_cursors(torch.bfloat16, 100, 512)
call_power(torch.bfloat16, 1100, 2, 64, 2, True)
if not QUICK:
    call(torch.bfloat16, 1100, 1, 64, "householder", False, packed=True)
    call(torch.bfloat16, 1100, 1, 128, "householder", False)
    call(torch.float32, 100, 2, 64, "householder", False)
    call(torch.bfloat16, 100, 1, 256, None, True)
    call(torch.bfloat16, 100, 1, 256, None, False, packed=True)
    call(torch.bfloat16, 100, 1, 128, None, False, score="stick-breaking")
    call(torch.bfloat16, 100, 1, 256, None, False, score="stick-breaking")
    for width in (64, 128, 256) if SHARED > 99 * 1024 else (64, 128):  # wider ones are refused there
        call(torch.float32, 100, 1, width, None, False, score="stick-breaking")
    call(torch.float32, 100, 1, 128, None, True)
    decode(torch.bfloat16, 128, gated=False, routes=True)
    decode(torch.float16, 256, gated=False, routes=False)
    decode(torch.float32, 64, gated=True, routes=True)
    decode(torch.float32, 128, gated=True, routes=False)
    decode(torch.bfloat16, 128, gated=True, routes=False, score="stick-breaking")
    decode(torch.bfloat16, 64, gated=True, routes=False, score=Power(4))
    if SHARED > 99 * 1024:  # keys as wide are left to PyTorch there
        decode(torch.float32, 256, gated=False, routes=False, turns=True)
        decode(torch.bfloat16, 480, gated=False, routes=False)
        wide = (torch.randn(1, 300, 1, n).bfloat16().requires_grad_() for n in (480, 480, 128))
        attend_fused(*wide, Factors(), 0.1, None).sum().backward()
        gated = (torch.randn(1, 300, 1, n).bfloat16().requires_grad_() for n in (480, 480, 128))
        attend_fused(*gated, Factors(log_gate=-torch.rand(1, 300, 1)), 0.1, None).sum().backward()
    call_filter(torch.float32, 1, 99, copy=False)
    for positions in (66, 642):  # two side by side, in one warp and in several
        call_filter(torch.bfloat16, 20, positions, copy=True)
    call_cursors(torch.float32, 32, 4096)
    call_filter(torch.float32, 20, 4096, copy=False)
    call_power(torch.bfloat16, 2100, 1, 128, 2, False)
    call_power(torch.bfloat16, 4100, 1, 32, 4, True)
    call_power(torch.float32, 2100, 1, 128, 2, True)
    call_power(torch.bfloat16, 600, 2, 64, 4, True, "attention")
too_large = [f"{key.split()[0]}: {size}" for key, size in shared.items() if size > SHARED]
if too_large:
    sys.exit(f"more than {SHARED} bytes of shared memory: {', '.join(too_large)}")
