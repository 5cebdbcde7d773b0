"""Continues a text with a saved model, through transformers alone: nothing here imports deadreckon.

python examples/pipeline.py runs/book "It was a dark and stormy"
"""

from __future__ import annotations

import sys

from transformers import pipeline

write = pipeline("text-generation", model=sys.argv[1], trust_remote_code=True)
print(write(sys.argv[2], max_new_tokens=40, do_sample=False)[0]["generated_text"])
