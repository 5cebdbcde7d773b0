"""Perplexity by context length, and loss by position.

All figures are means of −log p(token | tokens before it in its row), in nats. A row of L + 1 tokens gives L of them,
the t-th from t tokens of context. Rows of L tile rows of the greatest length, the last of them shorter where L does not
divide it, so that **the same tokens are predicted at every length**: only the start of their context differs.

- The mean over all positions of rows of L is what the rotations' paper reports ("all positions, no burn-in").
- The mean over the last quarter of the positions shows what the far end of a row gains or loses. It is over other
  tokens at every length, so that a comparison takes more text.
- With a sliding window of W, a token is predicted from its last W − stride to W tokens (from all, if there are fewer),
  by overlapping rows of W, as in Hugging Face's guide to perplexity: a model whose context is limited to W.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

import deadreckon as dr
from deadreckon.lab.arguments import check_counts
from deadreckon.lab.evaluation.scores import Share, alone, autocast, isolated_rng, judge
from deadreckon.tasks.language import Corpus

LAST = 4  # one part in so many, at the end of a row
ENOUGH = 1 << 18


@dataclass(frozen=True)
class LengthScore:
    """Loss and perplexity of rows of one length."""

    length: int
    window: int | None
    tokens: int  # that were predicted
    loss: float
    perplexity: float  # cut off at the greatest that a double holds
    last_loss: float  # in the last quarter of a row
    texts: tuple[float, ...]  # the loss on each row of the greatest length, for comparisons on the same tokens
    digest: str  # of these tokens


@dataclass(frozen=True)
class PositionScore:
    """Mean loss of tokens with `first` to `last` tokens of context in their row."""

    first: int
    last: int
    loss: float


@dataclass(frozen=True)
class Reader:
    """Computes token losses of a model on rows of tokens.

    Attributes:
        piece: tokens per forward pass, through the KV cache; whole rows by default.
        batch_tokens: about how many tokens make a batch, at least one row.
        seed: of encodings that draw random positions.
        share: splits rows among processes.
    """

    model: dr.DeadReckonForCausalLM
    piece: int | None = None
    batch_tokens: int = 1 << 16
    seed: int = 0
    share: Share = alone

    def __post_init__(self) -> None:
        check_counts(piece=self.piece)

    @torch.no_grad()
    def losses(self, rows: Tensor) -> Tensor:
        """−log p of every token of rows (count, L + 1) but the first, given all before it: (count, L), on the CPU.

        In float32; on a GPU with bfloat16 autocast, except for the loss. The state of global generators is restored.
        """
        training = self.model.training
        self.model.eval()
        losses = self.share(len(rows), partial(self._losses_of_part, rows))
        self.model.train(training)
        return losses

    def _losses_of_part(self, rows: Tensor, part: slice) -> Tensor:
        device, at_once = next(self.model.parameters()).device, max(1, self.batch_tokens // rows.shape[1])
        with isolated_rng(device, self.seed + part.start), autocast(device):
            return torch.cat([self._losses_of_batch(batch.to(device)) for batch in rows[part].split(at_once)])

    def _losses_of_batch(self, batch: Tensor) -> Tensor:
        width = self.piece or batch.shape[1]
        cache = None if self.piece is None else DynamicCache(config=self.model.config)
        losses = []
        for tokens, labels in zip(batch[:, :-1].split(width, 1), batch[:, 1:].split(width, 1), strict=True):
            hidden = self.model.model(tokens, past_key_values=cache).last_hidden_state
            losses.append(judge(self.model, hidden, labels)[0])
        return torch.cat(losses, dim=1).cpu()

    def windowed_losses(self, rows: Tensor, window: int, stride: int | None = None) -> Tensor:
        """As `losses`, with a sliding window: from at most the last `window` tokens and at least window − stride.

        Args:
            stride: half a window by default.
        """
        length = rows.shape[1] - 1
        stride = max(1, window // 2) if stride is None else stride
        if not 1 <= window <= length:
            raise ValueError(f"window: expected 1 to {length}, the length of a row, got {window}")
        if not 1 <= stride <= window:
            raise ValueError(f"stride: expected 1 to window = {window}, got {stride}")
        stops = [*range(window, length, stride), length]
        short = torch.cat([rows[:, stop - window : stop + 1] for stop in stops])  # (stops · count, window + 1)
        by_window = replace(self, piece=None).losses(short).chunk(len(stops))
        new = [stop - before for stop, before in zip(stops, [0, *stops[:-1]], strict=True)]
        return torch.cat([losses[:, window - count :] for losses, count in zip(by_window, new, strict=True)], dim=1)


def perplexity_by_length(
    reader: Reader,
    corpus: Corpus,
    lengths: Sequence[int],
    *,
    tokens: int | None = ENOUGH,
    window: int | None = None,
    stride: int | None = None,
    across: bool = False,
    longest: int | None = None,
) -> list[LengthScore]:
    """Perplexity at each length, over the same text.

    Args:
        tokens: about how many tokens to predict at each length; None for all that fit in rows of the greatest length.
        window: sliding window, by overlapping rows; None for the full context of a row.
        stride: of the sliding window, half a window by default.
        across: rows may cross document boundaries; otherwise they are from documents that are long enough.
        longest: take the text from rows of this length; by default of the greatest of `lengths`.
    """
    if not lengths:
        raise ValueError("lengths: expected one or more, got none")
    text = corpus.rows(longest or max(lengths), tokens, across=across)
    digest = hashlib.sha256(text.numpy().tobytes()).hexdigest()[:12]

    def read(rows: Tensor) -> Tensor:  # (R, n + 1) to losses (R, n)
        if window is None or window >= rows.shape[1] - 1:
            return reader.losses(rows)
        return reader.windowed_losses(rows, window, stride)

    scores = []
    for length in lengths:
        losses = read(text.unfold(1, length + 1, length).flatten(0, 1))
        last = _mean(losses[:, length - math.ceil(length / LAST) :])
        losses = losses.reshape(len(text), -1)
        if (rest := text[:, losses.shape[1] :]).shape[1] > 1:
            losses = torch.cat([losses, read(rest)], dim=1)
        loss, texts = _mean(losses), tuple(losses.double().mean(1).tolist())
        scores.append(
            LengthScore(length, window, losses.numel(), loss, math.exp(min(loss, 700.0)), last, texts, digest)
        )
    return scores


def loss_by_position(
    reader: Reader,
    corpus: Corpus,
    length: int,
    bins: int = 32,
    *,
    logarithmic: bool = True,
    tokens: int | None = ENOUGH,
    across: bool = False,
) -> list[PositionScore]:
    """Mean loss by number of tokens before a token, from 1 to `length`, in bins of equal or growing width.

    Args:
        bins: number of bins; fewer where the first of growing bins would be empty.
        logarithmic: bins grow by a constant factor.

    The rest is as in :func:`perplexity_by_length`.
    """
    if not 1 <= bins <= length:
        raise ValueError(f"bins: expected 1 to length = {length}, got {bins}")
    by_position = reader.losses(corpus.rows(length, tokens, across=across)).double().mean(0)
    parts = [number / bins for number in range(1, bins + 1)]
    edges = sorted({0, *(round(length**part if logarithmic else length * part) for part in parts)})
    return [PositionScore(start + 1, stop, _mean(by_position[start:stop])) for start, stop in pairwise(edges)]


def _mean(losses: Tensor) -> float:
    return float(losses.double().mean())
