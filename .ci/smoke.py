"""An installed package, from outside its sources: operation, layer, model, files beside the code, command line."""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import deadreckon as dr
from deadreckon.tasks.long import LONG_TASKS

assert "site-packages" in dr.__file__, dr.__file__
folder = Path(dr.__file__).parent
for name in ("py.typed", "filters/histogram.c"):
    assert (folder / name).exists(), name
assert LONG_TASKS
q, k, v, w = torch.randn(4, 1, 70, 2, 16).unbind()
route = dr.Householder(torch.nn.functional.normalize(w, dim=-1), torch.rand(1, 70, 2))
error = (dr.attend(q, k, v, transport=route) - dr.attend(q, k, v, transport=route, impl="reference")).abs().max()
assert error < 1e-4, error
for name in dr.ENCODINGS:
    dr.AttentionLayer(32, 2, name, vocab_size=50)
model = dr.DeadReckonForCausalLM(
    dr.DeadReckonConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
)
ids = torch.randint(0, 50, (1, 9))
with tempfile.TemporaryDirectory() as saved:
    model.save_pretrained(saved)
    assert torch.equal(dr.DeadReckonForCausalLM.from_pretrained(saved)(ids).logits, model.eval()(ids).logits)
model.generate(ids, max_new_tokens=3)
subprocess.run([sys.executable, "-m", "deadreckon", "list"], check=True, stdout=subprocess.DEVNULL)
