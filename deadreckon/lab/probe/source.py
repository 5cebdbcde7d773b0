"""Inputs of a probe: the model of a run or of a folder, and the sequences that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import deadreckon as dr
from deadreckon.lab.arguments import check_counts
from deadreckon.lab.environment import check_device, check_model, quiet_transformers
from deadreckon.lab.recipes.texts import tokenizer_beside
from deadreckon.lab.training import Run
from deadreckon.tasks import TASKS
from deadreckon.tasks.task import EQUALS, NOT_SCORED, VOCAB_SIZE, spell
from deadreckon.tasks.text import read_documents


def check_vocabulary(model: dr.DeadReckonForCausalLM) -> None:
    """Raises ValueError unless a model has the vocabulary of PRISM's tasks, in which questions are asked."""
    if (known := model.config.vocab_size) != VOCAB_SIZE:
        raise ValueError(
            f"run: expected a model of PRISM's tasks, such as copy, to look at while it answers a question, got one "
            f"of {known} tokens"
        )


QUESTION = 10  # its length, where that of training is not known


class Rows(NamedTuple):
    """Whole sequences (B, T)."""

    tokens: Tensor
    labels: Tensor | None  # where the loss counts; everywhere if None
    trained: int | None  # tokens of a row in training, where that is known


def _even(tokens: Tensor, labels: Tensor, trained: int | None) -> Rows:
    """Cuts rows after the last label of the row that ends first: the rest is padding, or not scored."""
    counts = (labels != NOT_SCORED) * torch.arange(1, labels.shape[1] + 1)
    end = int(counts.amax(1).min()) or labels.shape[1]  # of a row without labels nothing is known
    return Rows(tokens[:, :end], labels[:, :end], trained)


class Source:
    """A model, and sequences for it to read.

    Args:
        folder: of a run, or of a model as save_pretrained writes it.
        checkpoint: of a run: last or best.
        length: of the sequences, for models with a limited number of positions; by default that of `rows`.
    """

    def __init__(self, folder: Path, checkpoint: str = "last", device: str = "cpu", length: int = 0) -> None:
        check_device(device)
        check_counts(length=length or None)
        if not any((folder / name).exists() for name in ("recipe.json", "config.json")):
            raise ValueError(
                "run: expected a folder with recipe.json, as train writes it, or with config.json, as save_pretrained "
                f"does, got {str(folder)!r}"
            )
        self.run = Run(folder) if (folder / "recipe.json").exists() else None
        self.folder = folder if self.run is None else self.run.checkpoint(checkpoint)
        check_model(self.folder)
        with quiet_transformers():
            load = dr.DeadReckonForCausalLM.from_pretrained
            if self.run is None:
                self.model = load(folder).to(device)
            else:
                recipe = self.run.recipe
                lengths = [one for one in (length or 4 * recipe.length,) if one in recipe.make_task().lengths]
                self.model = self.run.load(checkpoint, device, lengths)

    def rows(self, data: str, count: int, length: int, seed: int) -> Rows:
        """Rows of `data`, by default of the run's task, at four times the training length unless another is given.

        Rows of different lengths are cut to the shortest.
        """
        check_counts(rows=count, length=length or None)
        generator, trained = torch.Generator().manual_seed(seed), None
        if self.run is not None:
            recipe = self.run.recipe_in_use
            task = recipe.make_task()
            trained = recipe.longest_row(recipe.length)
            if not data:
                tokens, labels = task.sample(count, length or 4 * recipe.length, generator)
                return Rows(tokens, None, trained) if recipe.task == "language" else _even(tokens, labels, trained)
        if data in TASKS:
            return _even(*TASKS[data]().sample(count, length or 1024, generator), trained)
        return Rows(self._text(data, count, length or 1024), None, trained)

    def question(self, data: str, length: int, seed: int) -> str:
        """The question of one row, as long as in training unless a length is given."""
        check_vocabulary(self.model)
        usual = QUESTION if self.run is None else self.run.recipe.length
        row = self.rows(data, 1, length or usual, seed).tokens[0]
        places = (row == EQUALS).nonzero().flatten().tolist()
        if not places:
            raise ValueError("question: expected one in digits and words of a task, such as 12345, got none")
        return spell(row[: places[0]])

    def _text(self, data: str, rows: int, length: int) -> Tensor:
        """Stretches of a text, evenly spaced, in tokens of the tokenizer beside the model."""
        if not data or not Path(data).exists():
            raise ValueError(f"data: expected texts or one of {', '.join(TASKS)}; got {data!r}")
        ids = torch.tensor(tokenizer_beside(self.folder)("\n\n".join(read_documents(data)))["input_ids"])
        if len(ids) < rows * length:
            raise ValueError(f"data: expected {rows} × {length} tokens or more in {data!r}, got {len(ids)}")
        starts = [row * (len(ids) // rows) for row in range(rows)]
        return torch.stack([ids[start : start + length] for start in starts])
