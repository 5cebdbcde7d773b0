"""Estimates the mean transport of routes: ‖E[T_ℓ]‖ by route length, its sampling noise, and its rate of decay."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import deadreckon as dr
from deadreckon.lab.probe.attention import Both, Transport, turn

GROUPS = 4  # of routes, at least: the spread of their means says how noisy the mean of all is
DRAWS = 8  # of that noise
SHORTEST = 32  # tokens, below which there is nothing to average
LANCZOS = 30  # steps of Lanczos' method, after which norms of heads of 64 channels are right to 1e-4


@dataclass(frozen=True, eq=False)
class MeanTransport:
    """The mean transport of routes, by length and head."""

    lengths: list[int]  # L route lengths
    norm: Tensor  # (L, H) the largest singular value of the mean route, ‖E[T_ℓ]‖
    typical: Tensor  # (L, H) the root of the mean squared singular value, with the square of its noise taken away
    noise: Tensor  # (L, H) what `norm` would be, for so many routes that spread as these do, if the true mean were zero
    size: Tensor  # (L, H) the same root for single routes: 1 if steps are orthogonal, less if they shrink
    pairs: Tensor | None = None  # (L, H, D/2) for rotations, the size of each pair's mean phasor, its noise taken away
    pairs_noise: Tensor | None = None  # (L, H, D/2) of these

    def decay(self, head: int) -> Decay:
        """How fast the mean route decays; for rotations, that of the slowest pair, which is what is left of it.

        The slowest as measured: if many are equally slow, it errs on the slow side.
        """
        if self.pairs is None:
            return fit_decay(self.lengths, self.norm[:, head], self.noise[:, head])
        return max(self.pair_decays(head), key=lambda decay: decay.rate)

    def pair_decays(self, head: int) -> list[Decay]:
        """For rotations, how fast the mean phasor of each pair decays."""
        assert self.pairs is not None
        assert self.pairs_noise is not None
        return [
            fit_decay(self.lengths, self.pairs[:, head, pair], self.pairs_noise[:, head, pair])
            for pair in range(self.pairs.shape[-1])
        ]


@dataclass(frozen=True)
class Decay:
    """A fit of C · rate^ℓ to norms of mean routes."""

    rate: float  # per step; exp of the slope
    error: float  # standard error of the rate
    used: int  # how many lengths stood clear of the noise

    @property
    def gap(self) -> float | None:
        """1 − rate, the spectral gap; None if it cannot be told from zero."""
        return 1 - self.rate if self.rate < 1 - 3 * self.error else None

    @property
    def gap_ceiling(self) -> float:
        """An upper bound of the gap, at three standard errors."""
        return max(1 - self.rate, 0.0) + 3 * self.error


def route_lengths(longest: int) -> list[int]:
    """1, 2, 4, … up to the longest."""
    return [1 << k for k in range(longest.bit_length())]


@torch.no_grad()
def mean_transport(
    steps: Transport | Tensor, lengths: Sequence[int] | None = None, routes: int = 1024
) -> MeanTransport:
    """Averages the routes of each length that begin anywhere in a sequence.

    Rotations are sums of angles and cost next to nothing. Other steps are multiplied up in float64 along routes that
    begin on a grid, longer ones from shorter ones: one product for each doubling.

    Args:
        steps: of T tokens: a transport as `attend` takes it, or matrices (B, T, H, D, D). The first
            token's step is on no route.
        lengths: up to T / 2; powers of two by default.
        routes: about how many to average for steps that do not commute; more cost more.
    """
    last = steps[1] if isinstance(steps, tuple) else steps
    first = last.w if isinstance(last, dr.Householder) else last.angles if isinstance(last, dr.Rotation) else last
    rows, tokens, *_ = first.shape
    if tokens < SHORTEST:
        raise ValueError(f"steps: expected {SHORTEST} tokens or more, got {tokens}")
    lengths = route_lengths(tokens // 2) if lengths is None else list(lengths)
    if not lengths or min(lengths) < 1 or max(lengths) > tokens // 2:
        raise ValueError(f"lengths: expected numbers between 1 and T / 2 = {tokens // 2}, got {lengths}")
    segments = -(-GROUPS // rows)
    if isinstance(steps, dr.Rotation):
        return _rotations(steps.angles, lengths, segments)
    return _products(steps, first, lengths, segments, routes)


def _rotations(angles: Tensor, lengths: list[int], segments: int) -> MeanTransport:
    phases = angles.double().cumsum(1)
    phasors = torch.polar(torch.ones_like(phases), phases)  # (B, T, H, M)
    figures = []  # of each length, as fields of MeanTransport
    for length in lengths:
        routes = phasors[:, length:] * phasors[:, :-length].conj()
        means, counts = _segment_means(routes, segments)
        mean = (means * counts).sum(0)  # (H, M)
        drawn = _noise(means, counts).abs()  # (draws, H, M)
        noise = drawn.amax(-1).square().mean(0).sqrt()
        squares = drawn.square().mean(0)
        left = mean.abs().square() - squares
        typical, pairs = left.mean(-1).clamp(min=0).sqrt(), left.clamp(min=0).sqrt()
        figures.append((mean.abs().amax(-1), typical, noise, torch.ones_like(noise), pairs, squares.sqrt()))
    return MeanTransport(lengths, *_columns(figures))


def _products(
    steps: dr.Householder | Both | Tensor, first: Tensor, lengths: list[int], segments: int, routes: int
) -> MeanTransport:
    (rows, tokens), dim = first.shape[:2], first.shape[-1]
    grid = 1 << max((rows * (tokens - 1) // routes).bit_length() - 1, 0)
    while any(length % grid for length in lengths if length > grid) or (tokens - 1) // grid < 2 * segments:
        grid //= 2
    figures = {}  # of each length, as fields of MeanTransport
    for length, products in _routes(steps, first, grid, lengths):
        groups = _segment_means(products.transpose(0, 1), segments)
        means, counts = (x.unflatten(0, (segments, -1)).transpose(0, 1).flatten(0, 1) for x in groups)  # row by row
        mean, drawn = (means * counts).sum(0), _noise(means, counts)  # (H, D, D), (draws, H, D, D)
        norms = largest_singular_value(torch.cat([mean.unsqueeze(0), drawn]))
        squares = mean.square().sum((-2, -1)) - drawn.square().sum((-2, -1)).mean(0)
        size = torch.linalg.vector_norm(products, dim=(0, 1, -2, -1)) / math.sqrt(products.shape[:2].numel() * dim)
        figures[length] = norms[0], (squares / dim).clamp(min=0).sqrt(), norms[1:].square().mean(0).sqrt(), size
    return MeanTransport(lengths, *_columns([figures[length] for length in lengths]))


def largest_singular_value(x: Tensor) -> Tensor:
    """Of matrices (…, D, D), by the size of xᵀx to the powers 1, 2, 4, …: a GPU is quick at products, not at SVDs."""
    scale = x.abs().amax((-2, -1), keepdim=True).clamp(min=1e-300)  # squares of what has decayed would be zero
    power, log = (x / scale).mT @ (x / scale), 2 * scale.log()
    for squarings in range(50):  # then log √D / 2^50 is left
        size = torch.linalg.matrix_norm(power, keepdim=True).clamp(min=1e-300)
        more = size.log() / 2**squarings
        power, log = power / size, log + more
        if squarings and float(more.abs().max()) < 1e-16:
            break
        power = power @ power
    return (log / 2).exp()[..., 0, 0]


def _routes(
    steps: dr.Householder | Both | Tensor, first: Tensor, grid: int, lengths: list[int]
) -> Iterator[tuple[int, Tensor]]:
    """The routes (count, B, H, D, D) of each length that begin on the grid, in memory that the next ones overwrite."""
    advance, cells = _stepper(steps), (first.shape[1] - 1) // grid
    product = torch.eye(first.shape[-1], device=first.device).double().repeat(cells, len(first), first.shape[2], 1, 1)
    for step in range(grid):
        advance(product, slice(1 + step, 1 + step + (cells - 1) * grid + 1, grid))
        if step + 1 in lengths:
            yield step + 1, product
    # Longer routes are made of those of 1, 2, 4, … cells, the binary digits of their length, lowest first.
    wanted = {length // grid: product for length in lengths if length > grid}
    spare = torch.empty_like(product)  # to allocate each product would take longer than the product
    for reach in route_lengths(max(wanted, default=0)):
        if half := reach // 2:
            product, spare = torch.matmul(product[:-half], product[half:], out=spare[: len(product) - half]), product
        for count in wanted:
            if count & reach:
                if before := count & (reach - 1):
                    wanted[count] = wanted[count][: len(product) - before] @ product[before:]
                else:
                    wanted[count] = product if count == reach else product.clone()
                if count < 2 * reach:
                    yield count * grid, wanted[count]


def _stepper(steps: dr.Householder | Both | Tensor) -> Callable[[Tensor, slice], Tensor]:
    """A function that applies the steps of some tokens to products (count, B, H, D, D), in place."""
    if isinstance(steps, Tensor):
        matrices = steps.double().transpose(0, 1)
        return lambda product, which: product.copy_(product @ matrices[which])
    if isinstance(steps, tuple):
        angles, reflected = steps[0].angles.double().transpose(0, 1).unsqueeze(3), _stepper(steps[1])
        # P R is Rᵀ applied to the rows of P.
        return lambda product, which: reflected(product.copy_(turn(product, -angles[which])), which)
    w, beta = (x.double().transpose(0, 1).unsqueeze(-1) for x in (steps.w, steps.beta.unsqueeze(-1)))
    return lambda product, which: product.addcmul_(product @ w[which], beta[which] * w[which].mT, value=-1)


def _segment_means(routes: Tensor, segments: int) -> tuple[Tensor, Tensor]:
    """Means over stretches of starting points, (B · segments, H, …), and the share of routes in each."""
    parts = routes.tensor_split(segments, dim=1)
    means = torch.cat([part.mean(1) for part in parts])
    counts = torch.tensor([part.shape[1] for part in parts for _ in range(len(routes))], dtype=torch.float64)
    return means, (counts / counts.sum()).view(-1, *[1] * (means.dim() - 1)).to(means.device)


def _noise(means: Tensor, shares: Tensor) -> Tensor:
    """Samples the error of a mean of groups (draws, …) by wild bootstrap: each group's deviation × a random normal."""
    groups = len(means)
    off = (means - (means * shares).sum(0)) * shares * math.sqrt(groups / (groups - 1))
    factors = torch.randn(DRAWS, groups, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.tensordot(factors.to(means.device, means.dtype), off, dims=1)


def _columns(rows: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    return [torch.stack(column).cpu() for column in zip(*rows, strict=True)]


def fit_decay(lengths: Sequence[int], norms: Tensor, noise: Tensor) -> Decay:
    """Fits C · rate^ℓ to norms (L,), up to where they sink into three times their noise (L,).

    Weighted least squares of log norm on ℓ; the error is scaled up where the fit is worse than the noise explains.
    Norms of nested routes are not independent, so it is a guide.
    """
    clear = int((norms > 3 * noise).long().cumprod(0).sum())
    if clear < 2:
        return Decay(float(norms[0]), float(noise[0]), clear)
    x, y = torch.tensor(lengths[:clear], dtype=torch.float64), norms[:clear].double().log()
    weight = (noise[:clear].double() / norms[:clear].double()).clamp(min=1e-14).square().reciprocal()
    centre = (weight * x).sum() / weight.sum()
    spread = (weight * (x - centre).square()).sum()
    slope = float((weight * (x - centre) * y).sum() / spread)
    residual = y - (weight * y).sum() / weight.sum() - slope * (x - centre)
    misfit = float((weight * residual.square()).sum()) / (clear - 2) if clear > 2 else 1.0
    return Decay(math.exp(slope), math.exp(slope) * math.sqrt(max(misfit, 1.0) / float(spread)), clear)


@torch.no_grad()
def second_moment(steps: dr.Householder, most: int = 4096) -> Tensor:
    """‖E[T ⊗ T]‖ of single steps on matrices without a trace, (H,): whether routes forget pairs of directions, too.

    Under Assumption 2 of the theory routes tend to Haar measure, and this is below 1. A first moment below 1 is not
    enough: reflections at planes of few directions have one and never mix (Remark 3); here they have 1. It says nothing
    of higher moments, and errs on the slow side, the more so the fewer steps there are. For w uniform on the sphere and
    β = 2 it is 1 − 4/D + 8/(D(D + 2)), and 1/3 if D is 3.

    With M = E[β w wᵀ] a step takes X to X − MX − XM + E[β² (wᵀ X w) w wᵀ] on average: a symmetric map, whose extreme
    eigenvalues Lanczos' method finds from products alone.

    Args:
        steps: w (B, T, H, D), beta (B, T, H). The first token's step is on no route.
        most: steps to look at, evenly spread.
    """
    w, beta = (x[:, 1:].flatten(0, 1).double() for x in (steps.w, steps.beta))  # (N, H, D), (N, H)
    w, beta = (x[:: -(-len(w) // most)] for x in (w, beta))
    return torch.stack([_second_moment(*head) for head in zip(w.unbind(1), beta.unbind(1), strict=True)]).cpu()


def _second_moment(w: Tensor, beta: Tensor) -> Tensor:
    """Of one head: w (N, D), beta (N,)."""
    strength, eye = beta.unsqueeze(-1), torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    weighted = strength * w / len(w)
    moment = weighted.mT @ w

    def without_trace(x: Tensor) -> Tensor:
        return x - eye * x.trace() / len(eye)

    def apply(x: Tensor) -> Tensor:
        x = without_trace(x)  # of which rounding brings some back
        along = ((w @ x) * w).sum(-1, keepdim=True)  # wᵀ X w
        return without_trace(x - moment @ x - x @ moment + weighted.mT @ (along * strength * w))

    start = torch.randn(eye.shape, generator=torch.Generator().manual_seed(0), dtype=w.dtype)
    return _extreme(apply, without_trace(start.to(w.device)))


def _extreme(apply: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """The largest size of an eigenvalue of a symmetric map of matrices, by Lanczos' method from a random start."""
    basis, diagonal, beside = [start / start.norm()], list[Tensor](), list[Tensor]()
    for _ in range(min(LANCZOS, start.numel())):
        y = apply(basis[-1])
        diagonal.append((y * basis[-1]).sum())
        known = torch.stack(basis).flatten(1)
        for _ in range(2):  # rounding undoes what is taken away only once
            y = y - (known.mT @ (known @ y.flatten())).view_as(y)
        beside.append(y.norm())
        if float(beside[-1]) < 1e-12:
            break
        basis.append(y / beside[-1])
    side = torch.stack(beside[: len(diagonal) - 1]) if len(diagonal) > 1 else diagonal[0].new_empty(0)
    small = torch.diag(torch.stack(diagonal)) + torch.diag(side, 1) + torch.diag(side, -1)
    return torch.linalg.eigvalsh(small).abs().max()


def mean_gates(log_gate: Tensor, lengths: Sequence[int]) -> Tensor:
    """E[Π f] over routes of each length, (L, H), for log_gate (B, T, H)."""
    total = log_gate.double().cumsum(1)
    return torch.stack([(total[:, n:] - total[:, :-n]).exp().mean((0, 1)) for n in lengths]).cpu()
