"""Command-line options of each benchmark. `deadreckon --help` imports this file, so it imports nothing heavy."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

Mode = Literal["eager", "compiled"]
Form = Literal["auto", "attention", "chunked"]


@dataclass(frozen=True)
class Flags:
    """Options of all benchmarks."""

    device: Literal["cpu", "cuda"] = "cpu"  # where to run: float32 on a CPU, bfloat16 on a GPU
    save: Path | None = None  # also save the tables to this Markdown file

    @property
    def name(self) -> str:
        """The name of the benchmark, and of the module that runs it."""
        return type(self).__name__.lower()

    def check(self) -> None:
        """Raises ValueError for numbers below 1, or below 0 where the default is 0."""
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.default == 0 else 1
            for number in value if isinstance(value, tuple) else (value,):
                if type(number) is int and number < least:
                    raise ValueError(f"{field.name}: expected {least} or more, got {number}")

    def command(self) -> str:
        """The command line that gives these options: the device, and every value that is not the default."""
        words = ["deadreckon", "bench", self.name, "--device", self.device]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("device", "save") or value == field.default:
                continue
            words.append(f"--{field.name.replace('_', '-')}")
            words += [] if value is True else map(str, value) if isinstance(value, tuple) else [str(value)]
        return shlex.join(words)


@dataclass(frozen=True)
class Attention(Flags):
    """Time our attention and other libraries' kernels: forward, backward and peak memory, with ratios to a baseline.

    The baseline is PyTorch's causal attention on a CPU, and RoPE with FlashAttention-2 on a GPU, where
    flash-linear-attention and the FoX authors' kernel are timed too, if installed. Each of our mechanisms is checked
    against the float64 definition before anything is timed; for other libraries the error is only reported.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)  # sequence lengths T
    batch: int = 1  # batch size B
    heads: int = 4  # heads H
    head_dim: int = 64  # channels of a head D
    shapes: tuple[str, ...] = ()  # shapes BxTxHxD in place of the four options above, such as 32x4096x32x64
    documents: str = ""  # also time packed rows of documents with these mean lengths: 600,2500,10000
    row: str = "65536x16x64"  # TxHxD of a packed row; document lengths are exponentially distributed, seed 0
    rounds: int = 5  # timings of each case; reported is the best on a CPU (others may share it), the median on a GPU
    only: str = ""  # time only these methods and the baseline, comma-separated: "PaTH,fla PaTH"
    profile: bool = False  # also profile our methods: kernels on a GPU, operators on a CPU


@dataclass(frozen=True)
class Decode(Flags):
    """Time decoding of one token with a filled KV cache: PaTH against RoPE with PyTorch's attention.

    A step is one attention call, including position encoding and cache update. Up to 8192 cached tokens, the error of
    decoding against a single pass is shown. On a GPU, prefill is timed as well. With --encodings, greedy generate() of
    whole models is timed instead, against Hugging Face's LlamaForCausalLM.
    """

    batches: tuple[int, ...] = (1, 32)  # batch sizes
    caches: tuple[int, ...] = ()  # cache lengths in tokens; by default 1024 on a CPU, 4096 32768 131072 on a GPU
    encodings: str = ""  # time generate() of models with these encodings, comma-separated (see `deadreckon list`)
    size: str = ""  # size of these models, layers x width; by default 2x128 on a CPU, 16x2048 on a GPU
    prompts: tuple[str, ...] = ()  # prompts, batch x tokens; by default 1x128 on a CPU, 1x512 1x16384 16x2048 on a GPU
    tokens: int = 128  # new tokens to generate
    power: int = 2  # exponent p of symmetric-power encodings


@dataclass(frozen=True)
class Filters(Flags):
    """Time histogram filters and superpositions (PRISM) against Algorithm 1 as a plain loop of scatter_add.

    Times are of forward and backward; memory excludes inputs, the result and its gradient. If the loop runs out of
    memory, it is timed with fewer sequences, and time and memory are scaled up in proportion.
    """

    size: str = ""  # batch x tokens x cursors x positions x width; by default PRISM's on a GPU, smaller on a CPU
    rounds: int = 5  # timings of each implementation


@dataclass(frozen=True)
class Powers(Flags):
    """Time symmetric power attention over long sequences: is its cost linear, and how does it compare with softmax?

    Gated Power(p), one sequence, forward and backward, against PyTorch's causal attention (without gates) at the
    shorter lengths; then decoding of one token after a context of each length.
    """

    heads: int = 8  # attention heads
    width: int = 64  # channels of a head
    power: int = 2  # exponent p
    lengths: tuple[int, ...] = ()  # sequence lengths; by default up to 32 768 on a CPU and a million on a GPU
    # Compare form="attention" and form="chunked" instead, with the same number of tokens at every length: from which
    # length on is chunked faster, the crossover that form="auto" uses?
    forms: bool = False
    # Time whole models instead, forward only: what gates and data-dependent angles add to the cost of symmetric powers.
    models: bool = False
    form: Form = "auto"  # how whole models compute powers
    rounds: int = 3  # timings of each case


@dataclass(frozen=True)
class Drift(Flags):
    """Measure the numerical drift of decoding: PaTH, token by token in bfloat16, against float64.

    For comparison, all past keys are rewritten at every step, in place and in the cache's precision.
    """

    length: int = 16384  # sequence length
    last: int = 256  # measure errors over this many tokens at the end


@dataclass(frozen=True)
class Text(Flags):
    """Time training steps of language models on random tokens, against Hugging Face's LlamaForCausalLM.

    A step is forward, backward, gradient clipping and AdamW, with bfloat16 autocast on a GPU. Our models compute the
    loss without keeping logits (skip_logits=True), as `train` does.
    """

    encodings: str = "rope,fox,path,path-fox"  # encodings, comma-separated (see `deadreckon list`)
    head_dim: int = 64  # channels of a head
    qk_norm: bool = False  # use QK-norm in our models
    recompute: bool = False  # also time Householder encodings with recompute=True: less memory, slower backward
    sizes: tuple[str, ...] = ()  # model sizes, layers x width, such as 24x1024 16x2048
    batch: str = ""  # batch x tokens of a step, such as 8x4096
    vocab: int = 32000  # vocabulary size
    modes: tuple[Mode, ...] = ()  # eager, compiled (torch.compile) or both; by default eager only on a CPU
    rounds: int = 5  # timed steps
    profile: bool = False  # also profile our models: kernels on a GPU, operators on a CPU


@dataclass(frozen=True)
class Ranks(Flags):
    """Time training steps on several processes, data parallel and context parallel, and count the bytes cp sends.

    Sequences are split across ranks ("cp", context parallel), or the batch is ("dp", data parallel); parameters are
    sharded (FSDP2) either way. All processes run on this machine: on CPUs with gloo and one thread each, where fewer
    cores than processes show the overhead and not the speed-up; on GPUs with NCCL and one GPU each.

    With one process (--processes 1, or a single GPU) the overhead of a mesh is measured instead: steps of a plain
    model, of one on a mesh of one rank, which leaves it unchanged, and of one that is sharded nevertheless, in turns.
    """

    encodings: str = "rope,fox,path-fox"  # encodings, comma-separated (see `deadreckon list`)
    processes: tuple[int, ...] = ()  # world sizes, one after the other; by default 1 2 4 on a CPU, 1 and all on GPUs
    size: str = ""  # model size, layers x width; by default 2x128 on a CPU, 24x1024 on a GPU
    head_dim: int = 0  # channels of a head; by default 32 on a CPU, 64 on a GPU
    batch: str = ""  # batch x tokens of a step; by default 4x1024 on a CPU, 8x4096 on a GPU
    vocab: int = 0  # vocabulary size; by default 256 on a CPU, 32000 on a GPU
    rounds: int = 3  # timed steps; with one process, turns of four steps each


@dataclass(frozen=True)
class Steps(Flags):
    """Time the training steps of an experiment as `train` takes them, and estimate how long all of them take.

    The last steps of the recipe are timed, where rows are longest, with fresh batches: drawing them, CUDA graphs,
    gradient clipping and AdamW included, evaluations not. The host waits for a GPU after every tenth step, as training
    hardly ever does. Kernels are the same steps without what the GPU waits for.
    """

    recipe: str = "flipflop"  # experiment, such as flipflop, addition or mqrar-2 (see `deadreckon list`)
    size: str = "tiny"  # tiny, small or paper
    encodings: str = ""  # encodings, comma-separated; by default those of the experiment
    change: tuple[str, ...] = ()  # recipe fields to change, such as width=256 options.ignore=0.9
    rounds: int = 20  # timed steps
    profile: bool = False  # also profile one step: kernels on a GPU, operators on a CPU


Benchmark = Attention | Decode | Filters | Powers | Drift | Text | Ranks | Steps
