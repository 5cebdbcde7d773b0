"""The training engine: one object with the whole state of training, which takes one step at a time.

Data come from one generator (`batches.py`), whose state is saved; random numbers of encodings are seeded by the
recipe's seed and the step. So resumed training continues exactly: on a CPU bit for bit, with as many threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

import deadreckon as dr
from deadreckon.lab.evaluation import autocast, is_wrong
from deadreckon.lab.recipes import BLOCKS, Recipe
from deadreckon.lab.recipes.texts import save_tokenizer
from deadreckon.lab.training.batches import Batches
from deadreckon.lab.training.checkpoints import weights_of
from deadreckon.lab.training.distillation import OBJECTIVES, freeze
from deadreckon.lab.training.graphs import PARTS, Graphs, captured_on
from deadreckon.lab.training.ranks import Ranks
from deadreckon.tasks.task import NOT_SCORED, Batch, Task

COMPILE = "DEADRECKON_COMPILE"  # in the environment: 1 to compile models for training


def make_model(recipe: Recipe, vocab_size: int) -> dr.DeadReckonForCausalLM:
    """The untrained model of a recipe, initialised with its seed."""
    config = make_config(recipe, vocab_size)
    torch.manual_seed(recipe.seed)
    return dr.DeadReckonForCausalLM(config)


def make_config(recipe: Recipe, vocab_size: int) -> dr.DeadReckonConfig:
    """The model configuration of a recipe."""
    options = recipe.options_in_training()
    return dr.DeadReckonConfig(
        encoding=recipe.encoding, vocab_size=vocab_size, hidden_size=recipe.width, num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads, initializer_range=recipe.initial, tie_word_embeddings=recipe.tied,
        qk_norm=recipe.qk_norm, max_position_embeddings=recipe.longest,
        sharpen_beyond=recipe.sharpen_beyond,
        encoding_options={recipe.encoding: options} if options else None, **BLOCKS[recipe.block],
    )  # fmt: skip


def config_for_tests(config: dr.DeadReckonConfig, recipe: Recipe, lengths: Sequence[int] = ()) -> dr.DeadReckonConfig:
    """A trained model's configuration with enough positions for its tests: no weight depends on them."""
    changes = recipe.options_in_tests(lengths)
    if changes:
        config = deepcopy(config)
        config.encoding_options = {recipe.encoding: (config.encoding_options or {}).get(recipe.encoding, {}) | changes}
    return config


def model_for_tests(model: dr.DeadReckonForCausalLM, recipe: Recipe) -> dr.DeadReckonForCausalLM:
    """The model itself, or a copy with enough positions for its tests."""
    config = config_for_tests(model.config, recipe)
    if config.encoding_options == model.config.encoding_options:
        return model
    tested = dr.DeadReckonForCausalLM(config).to(next(model.parameters()).device)
    tested.load_state_dict(model.state_dict())
    return tested


def make_optimizer(model: dr.DeadReckonForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW, with the parameter groups of encodings. The schedule scales each group's `initial_lr`.

    On a GPU, learning rates and step counts are device tensors, so that a captured CUDA graph sees the current values.
    Learning rates of sharded parameters, whose steps are not captured, are numbers.
    """
    first, second = recipe.betas
    groups = dr.parameter_groups(model, recipe.learning_rate, recipe.weight_decay)
    device, sharded = next(model.parameters()).device, isinstance(next(model.parameters()), DTensor)
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(groups, betas=(first, second), fused=on_gpu, capturable=on_gpu and not sharded)
    for group in optimizer.param_groups if optimizer.defaults["capturable"] else ():
        group["lr"] = torch.tensor(group["lr"], device=device)
    return optimizer


@dataclass(frozen=True)
class Step:
    """Loss and errors of one step, on fresh data. They are copied from the device on first access."""

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
        """Share of scored tokens predicted wrongly; NaN if errors are not counted."""
        return float("nan") if self.wrong is None else int(self.wrong) / max(int(self.scored), 1)


class Training:
    """A model in training.

    Args:
        model: trained in place.
        task: the source of the data.
        recipe: equal recipes see equal data.
        graphs: whether to capture steps as CUDA graphs (`graphs.py`); by default on a GPU, with a single process.
        teacher: for the recipe's objective, if that is distillation.
        ranks: the processes that train together, by default this one alone; the model is sharded over them.

    With DEADRECKON_COMPILE=1 in the environment the model is compiled: it takes a minute or so, and pays in long runs.
    """

    def __init__(
        self,
        model: dr.DeadReckonForCausalLM,
        task: Task,
        recipe: Recipe,
        graphs: bool | None = None,
        teacher: dr.DeadReckonForCausalLM | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.task, self.recipe, self.teacher, self.ranks = task, recipe, teacher, ranks or Ranks()
        if recipe.batch_size % (recipe.accumulate * self.ranks.parts):
            raise ValueError(
                f"mesh: expected dp to divide batch_size / accumulate = {recipe.batch_size // recipe.accumulate}, "
                f"got {self.ranks.parts}"
            )
        if teacher is not None and self.ranks.size > 1:
            raise ValueError(f"mesh: expected one process to learn from a teacher, got {self.ranks.size}")
        freeze(model, recipe.freeze)  # before it is sharded
        self.model = self.ranks.divide(model)
        self.forward = torch.compile(model) if os.environ.get(COMPILE, "0") != "0" else model
        self.device = next(model.parameters()).device
        self.optimizer = make_optimizer(model, recipe)
        self.batches = Batches(task, recipe, recipe.accumulate * self.ranks.parts)
        self.done = 0  # steps
        self.scheduled = self._place_scheduled()
        capture = captured_on(self.device) and self.ranks.size == 1 if graphs is None else graphs
        self.graphs = Graphs(self._step, self.device) if capture and recipe.accumulate <= PARTS else None

    def advance(self) -> Step:
        """Takes the next step."""
        recipe = self.recipe
        # Seeds encodings that draw random numbers, differently for each data-parallel part of the batch.
        torch.manual_seed(1_000_003 * (recipe.seed + 7919 * self.ranks.part) + self.done)
        self.model.train()
        self._set_rates()
        for name, value in recipe.scheduled_at(self.done).items():
            for place in self.scheduled[name]:
                place.fill_(value)
        drawn = self.batches.take(self.done)
        mine = slice(self.ranks.part * recipe.accumulate, (self.ranks.part + 1) * recipe.accumulate)
        parts = [part.to(self.device) for part in drawn[mine]]
        step = self._step if self.graphs is None or parts[0].cu_seqlens is not None else self.graphs
        losses, scored, *counted = step(*parts)
        self.done += 1
        tokens = sum(part.tokens.numel() for part in drawn)
        return Step(self.done, tokens, losses, counted[0] if counted else None, scored)

    def _place_scheduled(self) -> dict[str, list[Tensor]]:
        """Replaces scheduled numbers by tensors, so that a captured CUDA graph sees the current values.

        Numbers that are saved with the weights are tensors already: buffers.
        """
        values = {name: torch.tensor(value, device=self.device) for name, value in self.recipe.scheduled_at(0).items()}
        places: dict[str, list[Tensor]] = {name: [] for name in values}
        for encoding in (part for part in self.model.modules() if isinstance(part, dr.Encoding)):
            for part in encoding.modules():
                buffers = dict(part.named_buffers(recurse=False))
                for name in values.keys() & {*vars(part), *buffers}:
                    if name not in buffers:
                        setattr(part, name, values[name])
                    places[name].append(buffers.get(name, values[name]))
        for name, found in places.items():
            if not found:
                raise ValueError(f"schedules.{name}: expected a number that is not learned, got a parameter")
        return places

    def _set_rates(self) -> None:
        for group in self.optimizer.param_groups:
            rate = self.recipe.learning_rate_at(self.done, group["initial_lr"])
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _step(self, *parts: Batch) -> tuple[Tensor, ...]:
        """Takes one optimizer step; returns the loss, the number of scored tokens and, if counted, of errors."""
        scored = torch.stack([(part.labels[:, 1:] != NOT_SCORED).sum() for part in parts]).sum()
        if self.ranks.size > 1:  # gradients are averaged over ranks, and so is what losses are divided by
            scored = self.ranks.totals([scored])[0] / self.ranks.size
        self.optimizer.zero_grad()
        judged = [self._learn(part, scored) for part in parts]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        losses, errors = zip(*judged, strict=True)
        counted = [] if errors[0] is None else [torch.stack(errors).sum()]
        if self.ranks.size == 1:
            return torch.stack(losses).sum(), scored, *counted
        loss, *counted = self.ranks.totals([torch.stack(losses).sum(), *counted])
        # Every rank of a sequence has the loss of the whole sequence, but counts the errors of its own shard.
        return loss / self.ranks.size, scored * self.ranks.parts, *counted

    def _learn(self, part: Batch, scored: Tensor) -> tuple[Tensor, Tensor | None]:
        """Accumulates the gradients of a part of a batch; returns its share of the loss, and its errors."""
        if self.teacher is not None:
            share = (part.labels[:, 1:] != NOT_SCORED).sum() / scored.clamp(min=1)
            with autocast(part.tokens.device):
                gap = OBJECTIVES[self.recipe.objective](self.model, self.teacher, part) * share
            gap.backward()
            return gap.detach(), None
        count = scored if self.recipe.accumulate > 1 or self.ranks.size > 1 else None
        language = self.recipe.task == "language"  # its logits take most of the memory, and counting errors takes time
        with autocast(part.tokens.device):
            output = self.forward(
                part.tokens, labels=part.labels, cu_seqlens=part.cu_seqlens, num_items_in_batch=count,
                skip_logits=language,
            )  # fmt: skip
        output.loss.backward()
        if language:
            return output.loss.detach(), None
        following = pad(part.labels[:, 1:], (0, 1), value=NOT_SCORED)
        if self.model.cp is not None:
            following = self.model.cp.shard(following, value=NOT_SCORED)
        return output.loss.detach(), is_wrong(output.logits, following).sum()

    def whole_model(self) -> dr.DeadReckonForCausalLM:
        """The unsharded model on every rank, for evaluation. All ranks must call this."""
        if self.ranks.size == 1:
            return self.model
        copy = dr.DeadReckonForCausalLM(self.model.config).to(self.device)
        places = weights_of(copy)
        for name, x in self.weights().items():  # one after the other: a second copy of all might not fit
            places[name].detach().copy_(x.full_tensor() if isinstance(x, DTensor) else x)
        return copy.eval()

    def describe(self, folder: Path) -> None:
        """Writes the files of a saved model other than its weights: configuration and tokenizer."""
        with torch.device("meta"):
            dr.DeadReckonForCausalLM(self.model.config).save_pretrained(folder, state_dict={})
        save_tokenizer(self.task, folder)

    def weights(self) -> dict[str, Tensor]:
        """See :func:`deadreckon.lab.training.checkpoints.weights_of`."""
        return weights_of(self.model)

    def memory(self) -> dict[str, Tensor]:
        """The state that the next step depends on besides weights: the optimizer's, by parameter, and the generator."""
        memory = {"generator": self.batches.state}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                memory[f"{key}.{name}"] = value
        return memory

    def blank_memory(self, names: Mapping[str, object]) -> dict[str, Tensor]:
        """Blank tensors like those of `memory`, to load a checkpoint into that has these entries besides weights."""
        memory, parameters = {"generator": self.batches.state}, dict(self.model.named_parameters())
        for place in names.keys() - self.weights().keys() - memory.keys():
            key, name = place.split(".", 1)
            memory[place] = torch.zeros(()) if key == "step" else torch.zeros_like(parameters[name])
        return memory

    def remember(self, memory: dict[str, Tensor], done: int) -> None:
        """Restores what `memory` returned after `done` steps; weights are restored separately."""
        memory = dict(memory)
        self.batches.state = memory.pop("generator")
        parameters = dict(self.model.named_parameters())
        for place, value in memory.items():
            key, name = place.split(".", 1)
            parameter = parameters[name]
            # AdamW keeps its step count on the CPU, unless it is fused.
            on_cpu = key == "step" and not self.optimizer.defaults["fused"]
            self.optimizer.state[parameter][key] = value if on_cpu else value.to(parameter.device)
        self.done = done


def train(model: dr.DeadReckonForCausalLM, task: Task, recipe: Recipe) -> Iterator[Step]:
    """Trains in place, yielding each step."""
    training = Training(model, task, recipe)
    while training.done < recipe.steps:
        yield training.advance()
