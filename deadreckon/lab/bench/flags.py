"""What each benchmark takes on the command line. Nothing heavy is imported here: `deadreckon --help` reads it too."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

Mode = Literal["eager", "compiled"]


@dataclass(frozen=True)
class Flags:
    """What all have in common."""

    device: Literal["cpu", "cuda"] = "cpu"  # where to run; float32 on a CPU, bfloat16 on a GPU
    save: Path | None = None  # also write the tables as Markdown

    @property
    def name(self) -> str:
        """Of the benchmark, and of the module that runs it."""
        return type(self).__name__.lower()

    def check(self) -> None:
        """Raises ValueError for numbers that cannot be: all count something, those that are 0 by default, if given."""
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.default == 0 else 1
            for number in value if isinstance(value, tuple) else (value,):
                if type(number) is int and number < least:
                    raise ValueError(f"{field.name}: expected {least} or more, got {number}")

    def command(self) -> str:
        """The command line that these flags are: the device, and what is not the default."""
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
    """Time every mechanism beside other people's attention in one run, with peak memory, as ratios.

    The baseline is PyTorch's causal attention on a CPU, and RoPE with FlashAttention-2 on a GPU, where
    flash-linear-attention and the FoX authors' kernel run too, if installed. Each mechanism is checked against the
    float64 definition before anything is timed; the errors of the others are shown.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)  # sequence lengths T
    batch: int = 1  # B
    heads: int = 4  # H
    head_dim: int = 64  # D
    shapes: tuple[str, ...] = ()  # in place of these four, any of BxTxHxD, such as 32x4096x32x64
    documents: str = ""  # packed rows too, of documents with these mean lengths: 600,2500,10000
    row: str = "65536x16x64"  # TxHxD of a packed row; the lengths of its documents are exponential, seed 0
    rounds: int = 5  # timings of each case; the best counts on a CPU, which others may share, the median on a GPU
    only: str = ""  # names to run beside the baseline, separated by commas: "PaTH,fla PaTH"
    profile: bool = False  # also show where the time of ours goes: kernels on a GPU, operators on a CPU


@dataclass(frozen=True)
class Decode(Flags):
    """Time one more token over a filled KV cache: PaTH beside RoPE through PyTorch's attention.

    Each token is an attention of its own, with its position and its entry into the cache. Up to 8192 tokens, the error
    of what is decoded against one pass over everything is shown. On a GPU prefill is timed as well. With --encodings
    whole models generate instead, greedily, beside Hugging Face's LlamaForCausalLM.
    """

    batches: tuple[int, ...] = (1, 32)  # sequences at a time
    caches: tuple[int, ...] = ()  # tokens in the cache; by default 1024 on a CPU, up to 131 072 on a GPU
    encodings: str = ""  # names (see `deadreckon list`), separated by commas: time `generate()` of models with these
    size: str = ""  # of these models, layers x width; by default 2x128 on a CPU, 16x2048 on a GPU
    prompts: tuple[str, ...] = ()  # batch x tokens; by default 1x128 on a CPU, 1x512 1x16384 16x2048 on a GPU
    tokens: int = 128  # that are generated
    power: int = 2  # p, of encodings that are powers


@dataclass(frozen=True)
class Filters(Flags):
    """Time histogram filters and superpositions beside the loop of scatter_add that Algorithm 1 is when written down.

    Times are of forward and backward pass; memory is what these took beyond inputs, the result and its gradient. Where
    the loop runs out of memory it is timed with fewer sequences, and time and memory are scaled up in proportion.
    """

    size: str = ""  # batch x tokens x cursors x positions x width; PRISM's on a GPU, smaller on a CPU by default
    rounds: int = 5  # timings of each


@dataclass(frozen=True)
class Powers(Flags):
    """Time symmetric power attention over long sequences: whether its cost is linear, and how it compares with softmax.

    Power(p) with learned gates, one sequence, forward and backward, beside PyTorch's own causal attention, which has
    none, at the shorter lengths; then one more token after a context of each length.
    """

    heads: int = 8  # of attention
    width: int = 64  # channels of a head
    power: int = 2  # p
    lengths: tuple[int, ...] = ()  # of sequences; up to 32 768 on a CPU and a million on a GPU by default
    # Compare the forms "attention" and "chunked" instead, over as many tokens in rows of growing length: from where on
    # is chunked the faster, which form="auto" goes by?
    forms: bool = False
    # Time whole models instead, forward only: what gates, and angles that each token chooses, add to symmetric powers.
    models: bool = False
    rounds: int = 3  # timings of each


@dataclass(frozen=True)
class Drift(Flags):
    """Measure how far decoding drifts from the truth: PaTH, token by token in bfloat16, against float64.

    Beside ours runs the rule that rewrites every past key at every step, in place and in the cache's precision.
    """

    length: int = 16384  # tokens
    last: int = 256  # tokens at the end that errors are measured over


@dataclass(frozen=True)
class Text(Flags):
    """Time training steps of language models on random tokens, beside Hugging Face's LlamaForCausalLM.

    A step is forward, backward, clipping and AdamW; in bfloat16 by autocast on a GPU. Ours compute their loss without
    keeping logits (skip_logits=True), as `train` does.
    """

    encodings: str = "rope,fox,path,path-fox"  # names (see `deadreckon list`), separated by commas
    head_dim: int = 64  # channels of a head
    qk_norm: bool = False  # ours with normalised queries and keys
    recompute: bool = False  # those with Householder steps with recompute=True, too: less memory, longer backward pass
    sizes: tuple[str, ...] = ()  # layers x width, such as 24x1024 16x2048
    batch: str = ""  # rows x tokens of a step, such as 8x4096
    vocab: int = 32000  # tokens of the vocabulary
    modes: tuple[Mode, ...] = ()  # eager, compiled (by torch.compile) or both; on a CPU eager alone by default
    rounds: int = 5  # steps that are timed
    profile: bool = False  # also show where the time of ours goes: kernels on a GPU, operators on a CPU


@dataclass(frozen=True)
class Ranks(Flags):
    """Time training steps that processes share, and count the bytes sent.

    Sequences are divided among them ("cp", context parallel), or rows of the batch ("dp"); parameters are sharded
    (FSDP2) either way. Processes are on this machine: on CPUs they speak gloo, a thread each, and where there are fewer
    cores than processes this shows what dividing costs and not what it gains; on GPUs, one each, NCCL.

    One process alone (--processes 1, or where there is one GPU) has nothing to divide. What a mesh costs it is shown
    instead: steps of a plain model, of one on a mesh of one rank, which stays as it is, and of one that is sharded all
    the same, in turns.
    """

    encodings: str = "rope,fox,path-fox"  # names (see `deadreckon list`), separated by commas
    processes: tuple[int, ...] = ()  # how many share a step, one after the other; 1 2 4 on a CPU, 1 and all on GPUs
    size: str = ""  # layers x width of the model; by default 2x128 on a CPU, 24x1024 on a GPU
    head_dim: int = 0  # channels of a head; by default 32 on a CPU, 64 on a GPU
    batch: str = ""  # rows x tokens of a step; by default 4x1024 on a CPU, 8x4096 on a GPU
    vocab: int = 0  # tokens of the vocabulary; by default 256 on a CPU, 32000 on a GPU
    rounds: int = 3  # steps that are timed; of one process alone, turns of four steps each


Benchmark = Attention | Decode | Filters | Powers | Drift | Text | Ranks
