"""Language models that can be asked: text, and questions of the long-context suite in a fifth of the rows."""

from __future__ import annotations

from deadreckon.lab.recipes.experiment import Experiment
from deadreckon.lab.recipes.recipe import Recipe

SHARE = 0.2

MIXTURE = {
    "long-context": Experiment(
        about="Text and questions about texts of up to 2048 tokens, then the long-context suite up to 32 768, answered "
        "by generation: passkey, RULER's niah, vt, cwe and fwe, PhoneBook, and BABILong where there is data for it.",
        source="Yang et al. 2025, table 3: 760M parameters trained on text alone. The text, the size and the mixture "
        "are ours: a fifth of the rows begins with a question and its answer, of which the answer is scored; so are "
        "the questions (`deadreckon/tasks/long/`). vt, cwe and fwe score the share of the strings that are found. "
        "--change options.data=FOLDER options.babi=FILE options.books=FILE",
        encodings=("rope", "fox", "path", "path-fox"),
        paper=Recipe(
            task="language", length=4096, layers=24, width=1536, heads=24, initial=0.02, tied=True, steps=24_000,
            batch_size=512, accumulate=64, learning_rate=1e-3, warmup=480, weight_decay=0.01, betas=(0.9, 0.95),
            schedule="cosine", floor=0.03, options={"vocabulary": 32_000, "packed": True, "questions": SHARE},
            conditions={"held out": {"part": "valid", "questions": 0}}, evaluators=("perplexity", "long"),
            test_lengths=(2048, 4096, 8192, 16_384, 32_768), longest=32_768, test_rows=100, test_tokens=2**20,
            evaluate_every=500, validation_rows=8, log_every=10,
        ),
        small={
            "length": 2048, "layers": 8, "width": 512, "heads": 8, "steps": 1500, "batch_size": 64, "accumulate": 1,
            "learning_rate": 2e-3, "warmup": 100, "weight_decay": 0.1, "floor": 0.1, "evaluate_every": 250,
            "options": {"vocabulary": 16_384, "packed": True, "questions": SHARE},
        },
        tiny={
            "length": 512, "layers": 2, "width": 64, "heads": 2, "steps": 200, "batch_size": 8, "accumulate": 1,
            "learning_rate": 4e-3, "warmup": 20, "floor": 0.1, "test_lengths": (512, 1024), "test_rows": 11,
            "test_tokens": 2**13, "evaluate_every": 100, "log_every": 1,
            "options": {
                "vocabulary": 1024, "packed": True, "questions": SHARE, "tasks": ["passkey", "phonebook"],
            },
        },
        reported={"phonebook": {
            "rope": {2048: 0.323, 4096: 0.156, 8192: 0.0}, "fox": {2048: 0.625, 4096: 0.385, 8192: 0.177},
            "path": {2048: 0.552, 4096: 0.208, 8192: 0.0}, "path-fox": {2048: 0.896, 4096: 0.938, 8192: 0.666},
        }},
    ),
}  # fmt: skip
