"""`deadreckon bench powers`: symmetric power attention over long sequences, or its two forms against each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

import deadreckon as dr
from deadreckon.lab.bench.attention import Trial
from deadreckon.lab.bench.cases import Inputs, Shape, bytes_of, make_inputs, output_and_gradients, relative_errors
from deadreckon.lab.bench.flags import Powers
from deadreckon.lab.bench.page import Page, Row, mebibytes, microseconds, milliseconds, ratio
from deadreckon.lab.bench.rivals import Method, flash, sdpa
from deadreckon.lab.bench.timing import kernel_seconds, peak_bytes, repeated, seconds_per_step

LENGTHS = {"cpu": [2048, 4096, 8192, 16384, 32768], "cuda": [16384, 65536, 262144, 1048576]}
FORMS = {"cpu": [512, 1024, 2048, 4096, 8192], "cuda": [512, 1024, 2048, 4096, 8192, 16384]}
PATIENCE = {"cpu": 16384, "cuda": 65536}  # tokens up to which quadratic attention is timed
LIMITS = {"cpu": (1e-4, 1e-3), "cuda": (1e-2, 2e-2)}  # relative errors of the output and of gradients
TOKENS = 64  # that are decoded
BATCH_TOKENS = {"cpu": 1 << 13, "cuda": 1 << 17}  # of all rows together, where forms are compared
MODELS = {"cpu": (2, 2), "cuda": (12, 12)}  # layers and heads of whole models: GPT-2's on a GPU
PASSES = {"cpu": [1024], "cuda": [16384]}  # tokens that they read
VOCABULARY = 50257
WEAK = 0.1  # gates forget half in some 700 tokens


def gated(score: dr.Power, impl: str = "auto") -> Method:
    """Gated power attention as a benchmark method."""

    def attend(x: Inputs) -> Tensor:
        return dr.attend(x["q"], x["k"], x["v"], log_gate=x["log_gate"], score=score, impl=impl)  # type: ignore[arg-type]

    return Method(attend, "Power", "deadreckon")


def check(p: int, width: int, device: str) -> float:
    """The worst error on a short sequence against float64, as a multiple of the tolerance; raises above 1."""
    inputs = make_inputs(Shape(1, 2000, 1, width), device, WEAK)
    exact = {name: x.detach().double().requires_grad_(x.requires_grad) for name, x in inputs.items()}
    truth = output_and_gradients(gated(dr.Power(p, form="attention"), "blockwise").run, exact)
    errors = relative_errors(output_and_gradients(gated(dr.Power(p, form="chunked")).run, inputs), truth)
    worst = max(error / LIMITS[device][name != "output"] for name, error in errors.items())
    if not worst <= 1:
        raise RuntimeError(f"Power({p}) is off: output and gradients by {errors}; nothing was timed")
    return worst


@torch.no_grad()
def decode(length: int, heads: int, width: int, p: int, device: str) -> tuple[float, int]:
    """Seconds to decode one token after `length` tokens, and the size of the state in bytes."""
    past, inputs = dr.Past(), make_inputs(Shape(1, length + 2 * TOKENS, heads, width), device, WEAK)

    def attend(start: int, stop: int) -> None:
        q, k, v, log_gate = (inputs[name][:, start:stop] for name in ("q", "k", "v", "log_gate"))
        dr.attend_next(q, k, v, log_gate=log_gate, score=dr.Power(p, form="chunked"), past=past)

    for start in range(0, length, 65536):
        attend(start, min(start + 65536, length))
    time = seconds_per_step(lambda number: attend(length + number, length + number + 1), TOKENS, device)
    return time, bytes_of(past)


def form_rows(flags: Powers, lengths: Sequence[int]) -> Iterator[Row]:
    """Rows: length, time of each form, speed-up of chunked, length over the dimension of φ."""
    device, p = flags.device, flags.power
    dimension = math.comb(flags.width + p - 1, p)
    for length in lengths:
        shape = Shape(max(1, BATCH_TOKENS[device] // length), length, flags.heads, flags.width)
        inputs = make_inputs(shape, device, WEAK)
        forms = (gated(dr.Power(p, form="attention")), gated(dr.Power(p, form="chunked")))
        attention, chunked = (repeated(Trial(form, inputs, device).both, flags.rounds, device) for form in forms)
        times = [milliseconds(attention), milliseconds(chunked), ratio(attention, chunked)]
        yield [str(length), *times, f"{length / dimension:.2f}"]


def length_rows(flags: Powers, lengths: Sequence[int]) -> Iterator[Row]:
    """Rows for the chunked form over long sequences, with softmax attention up to lengths where it is not too slow."""
    device, chunked = flags.device, gated(dr.Power(flags.power, form="chunked"))
    plain = Method(flash if device == "cuda" else sdpa, "attention")
    for length in lengths:
        inputs = make_inputs(Shape(1, length, flags.heads, flags.width), device, WEAK)
        work = Trial(chunked, inputs, device).both
        time, memory = repeated(work, flags.rounds, device), peak_bytes(work, device)
        softmax = ["", ""]
        if length <= PATIENCE[device]:
            quadratic = repeated(Trial(plain, inputs, device).both, flags.rounds, device)
            softmax = [milliseconds(quadratic), ratio(quadratic, time)]
        token, state = decode(length, flags.heads, flags.width, flags.power, device)
        cells = [milliseconds(time), f"{1e9 * time / length:.1f}", *softmax, mebibytes(memory)]
        yield [str(length), *cells, microseconds(token), mebibytes(state)]


@torch.no_grad()
def model_rows(flags: Powers, lengths: Sequence[int]) -> Iterator[Row]:
    """Rows: encoding and length, parameters, time of a forward pass and its ratio to the first encoding's, and of its
    kernels alone: the host may need longer to launch them."""
    device, (layers, heads) = flags.device, MODELS[flags.device]
    for length in lengths:
        base = kernels_of_base = 0.0
        for encoding in ("sympow", "sympow-gated", "conformal-sympow"):
            options = {"p": flags.power, "form": flags.form}
            config = dr.DeadReckonConfig(
                encoding=encoding, encoding_options={encoding: options}, vocab_size=VOCABULARY,
                hidden_size=heads * flags.width, num_hidden_layers=layers, num_attention_heads=heads,
                max_position_embeddings=length, tie_word_embeddings=True,
            )  # fmt: skip
            torch.manual_seed(0)
            model = dr.DeadReckonForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else None).eval()
            tokens = torch.randint(0, VOCABULARY, (1, length), device=device)
            work = partial(model.model, tokens)
            time = repeated(work, flags.rounds, device)
            base = base or time
            cells = [f"{sum(x.numel() for x in model.parameters()) / 1e6:.2f} M", milliseconds(time), ratio(time, base)]
            alone = ["", ""]
            if device == "cuda":
                kernels = kernel_seconds(work, flags.rounds)
                kernels_of_base = kernels_of_base or kernels
                alone = [milliseconds(kernels), ratio(kernels, kernels_of_base)]
            yield [f"{encoding}, {length}", *cells, *alone]


def run(flags: Powers) -> None:
    """Checks, then measures."""
    if flags.form != "auto" and not flags.models:
        raise ValueError(f"form: expected with --models only, got {flags.form!r}")
    page = Page(flags, "Symmetric powers")
    if flags.models:
        layers, heads = MODELS[flags.device]
        powers = f"p = {flags.power}, form {flags.form}"
        page.note(f"forward; {layers} layers, {heads} heads of {flags.width}, {powers}, one sequence")
        lengths = flags.lengths or PASSES[flags.device]
        return page.table(["", "parameters", "time", "×", "kernels", "×"], model_rows(flags, lengths))
    lengths = flags.lengths or (FORMS if flags.forms else LENGTHS)[flags.device]
    error = check(flags.power, flags.width, flags.device)
    sizes = f"forward and backward; {flags.heads} heads of {flags.width}, gated"
    page.note(sizes, f"error {error:.2f} of what is allowed")
    if flags.forms:
        headings = ["tokens", "attention", "chunked", "× faster", "tokens / dimension of φ"]
        page.table(headings, form_rows(flags, lengths))
    else:
        headings = ["tokens", f"Power({flags.power})", "µs / 1000 tokens", "softmax", "× faster", "memory"]
        page.table([*headings, "one more token", "state"], length_rows(flags, lengths))
