"""The training engine: one object that holds all that training goes on from, and takes one step at a time.

Data come from one generator, whose state is kept; what encodings draw in a forward pass follows from the seed and the
step. So a training that was stored and restored goes on as if nothing had happened: on a CPU, bit for bit, with as many
threads as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

import deadreckon as dr
from deadreckon.lab.evaluation import autocast, wrongly
from deadreckon.lab.graphs import Graphs, recorded_on
from deadreckon.lab.recipe import Recipe
from deadreckon.tasks.task import NOT_SCORED, Batch, Task, draw


def check_device(name: str) -> None:
    """Says so if there is no such device here."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device: expected one that is here, got {name!r} ({str(error).splitlines()[0]})") from error


def check_model(folder: Path) -> None:
    """Says so if no model has been saved in a folder: from_pretrained would look for it elsewhere."""
    if not (folder / "config.json").exists():
        raise ValueError(
            f"model: expected a folder with config.json, as save_pretrained writes it, got {str(folder)!r}"
        )


def make_model(recipe: Recipe, vocab_size: int) -> dr.DeadReckonForCausalLM:
    """The model of a recipe as it begins, which its seed decides."""
    torch.manual_seed(recipe.seed)
    options = recipe.encoding_options
    config = dr.DeadReckonConfig(
        encoding=recipe.encoding, vocab_size=vocab_size, hidden_size=recipe.width, num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads, initializer_range=recipe.initial, tie_word_embeddings=recipe.tied,
        max_position_embeddings=recipe.longest, encoding_options={recipe.encoding: options} if options else None,
    )  # fmt: skip
    return dr.DeadReckonForCausalLM(config)


def make_optimizer(model: dr.DeadReckonForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW, with what encodings ask for. The schedule scales each group's `initial_lr`.

    On a GPU its rates and counts of steps are tensors there, so that a CUDA graph reads those of the day.
    """
    first, second = recipe.betas
    groups = dr.parameter_groups(model, recipe.learning_rate, recipe.weight_decay)
    device = next(model.parameters()).device
    if device.type != "cuda":
        return torch.optim.AdamW(groups, betas=(first, second))
    optimizer = torch.optim.AdamW(groups, betas=(first, second), fused=True, capturable=True)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], device=device)
    return optimizer


@dataclass(frozen=True)
class Step:
    """What one step showed, on data the model had not seen. Figures leave the device when they are asked for."""

    number: int  # counted from 1
    tokens: int
    losses: Tensor
    wrong: Tensor | None
    scored: Tensor

    @cached_property
    def loss(self) -> float:
        return float(self.losses)

    @cached_property
    def error(self) -> float:
        """The share of scored tokens that were predicted wrongly; not a number where nobody counted."""
        return float("nan") if self.wrong is None else int(self.wrong) / max(int(self.scored), 1)


class Training:
    """A model in training.

    Args:
        model: is trained in place.
        task: where its data come from.
        recipe: equal recipes see equal data.
        graphs: whether steps are recorded as CUDA graphs (`graphs.py`); on a GPU they are, unless this says no.
    """

    def __init__(self, model: dr.DeadReckonForCausalLM, task: Task, recipe: Recipe, graphs: bool | None = None) -> None:
        self.model, self.task, self.recipe = model, task, recipe
        self.device = next(model.parameters()).device
        self.optimizer = make_optimizer(model, recipe)
        self.generator = torch.Generator().manual_seed(recipe.seed)
        self.done = 0  # steps
        record = recorded_on(self.device) if graphs is None else graphs
        self.graphs = Graphs(self._step, self.device) if record and recipe.accumulate == 1 else None

    def advance(self) -> Step:
        """Takes the next step."""
        recipe = self.recipe
        torch.manual_seed(1_000_003 * recipe.seed + self.done)  # for encodings that draw numbers
        self.model.train()
        self._set_rates()
        drawn = draw(self.task, recipe.batch_size, recipe.lengths_at(self.done), self.generator, recipe.accumulate)
        parts = [part.to(self.device) for part in drawn]
        if self.graphs is not None and parts[0].cu_seqlens is None:
            losses, scored, *counted = self.graphs(parts[0])
        else:
            losses, scored, *counted = self._step(*parts)
        self.done += 1
        tokens = sum(part.tokens.numel() for part in parts)
        return Step(self.done, tokens, losses, counted[0] if counted else None, scored)

    def _set_rates(self) -> None:
        for group in self.optimizer.param_groups:
            rate = self.recipe.learning_rate_at(self.done, group["initial_lr"])
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _step(self, *parts: Batch) -> tuple[Tensor, ...]:
        """From a batch to changed weights: the loss, how many tokens were scored and, where that is counted, errors."""
        scored = torch.stack([(part.labels[:, 1:] != NOT_SCORED).sum() for part in parts]).sum()
        self.optimizer.zero_grad()
        judged = [self._learn(part, scored) for part in parts]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        losses, errors = zip(*judged, strict=True)
        counted = [] if errors[0] is None else [torch.stack(errors).sum()]
        return torch.stack(losses).sum(), scored, *counted

    def _learn(self, part: Batch, scored: Tensor) -> tuple[Tensor, Tensor | None]:
        """Adds to the gradients what a part of a batch has to say: its share of the loss, and its errors."""
        count = scored if self.recipe.accumulate > 1 else None  # by what a part's summed loss is divided
        with autocast(part.tokens.device):
            output = self.model(part.tokens, labels=part.labels, cu_seqlens=part.cu_seqlens, num_items_in_batch=count)
        output.loss.backward()
        if self.recipe.metric == "perplexity":  # counting errors among many words takes time
            return output.loss.detach(), None
        return output.loss.detach(), wrongly(output.logits[:, :-1], part.labels[:, 1:]).sum()

    def memory(self) -> dict[str, Tensor]:
        """All but the weights that the next step depends on: the optimiser's state by parameter, and the generator."""
        found = {"generator": self.generator.get_state()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"{key}.{name}"] = value
        return found

    def remember(self, memory: dict[str, Tensor], done: int) -> None:
        """Goes on from what `memory` gave after so many steps; the weights are the model's."""
        memory = dict(memory)
        self.generator.set_state(memory.pop("generator"))
        parameters = dict(self.model.named_parameters())
        for place, value in memory.items():
            key, name = place.split(".", 1)
            parameter = parameters[name]
            # Without graphs AdamW keeps its count of steps on the CPU.
            here = key == "step" and not self.optimizer.defaults["capturable"]
            self.optimizer.state[parameter][key] = value if here else value.to(parameter.device)
        self.done = done


def train(model: dr.DeadReckonForCausalLM, task: Task, recipe: Recipe) -> Iterator[Step]:
    """Trains in place, a step for each item that is asked for."""
    training = Training(model, task, recipe)
    while training.done < recipe.steps:
        yield training.advance()
