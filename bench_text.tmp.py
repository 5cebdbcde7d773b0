"""Times training steps of the `code` recipe on random tokens; not part of the tree."""
import os, random, sys, tempfile, time, traceback
from pathlib import Path
import numpy as np, torch
from deadreckon.lab.recipes import find_recipe
from deadreckon.lab.training.engine import Training, make_model
from deadreckon.tasks.tokens import fit_tokenizer, end_of
import transformers, triton
print(torch.__version__, triton.__version__, transformers.__version__, torch.cuda.get_device_name(), flush=True)
folder = Path(tempfile.mkdtemp())
random.seed(0)
words = ["".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(40000)]
tok = fit_tokenizer([" ".join(random.choices(words, k=2000)) for _ in range(150)], 16384, "random")
tok.save(str(folder / "tokenizer.json"))
print("vocabulary", tok.get_vocab_size(), flush=True)
rng = np.random.default_rng(0)
ids = rng.integers(1, tok.get_vocab_size(), 4_000_000).astype(np.uint16)
ids[::50_000] = end_of(tok)
for part in ("train", "valid", "test"):
    np.save(folder / f"{part}.npy", ids)
began = time.time()
def bench(encoding, packed, graphs, steps=12, compiled=False, profile=False):
    recipe = find_recipe("code", "small", encoding, changes=(f"options.data={folder}", f"options.packed={str(packed).lower()}"))
    task = recipe.make_task()
    model = make_model(recipe, task.vocab_size).cuda()
    t = Training(model, task, recipe, graphs=graphs)
    if compiled:
        model.model.forward = torch.compile(model.model.forward)
    torch.cuda.reset_peak_memory_stats()
    s = time.time()
    for _ in range(4): t.advance()
    torch.cuda.synchronize(); warm = time.time() - s
    s = time.time(); host = 0.0
    for _ in range(steps):
        h = time.time(); last = t.advance(); host += time.time() - h
    torch.cuda.synchronize(); e = (time.time() - s) / steps
    print(f"{encoding:9} packed={packed!s:5} graphs={graphs!s:5} compiled={compiled!s:5} {1e3*e:7.1f} ms  {last.tokens/e:10,.0f} tokens/s  host {1e3*host/steps:6.1f} ms  {torch.cuda.max_memory_allocated()/2**30:.1f} GiB  warm-up {warm:.1f} s  loss {last.loss:.3f}  [{time.time()-began:.0f} s]", flush=True)
    if profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
            t.advance(); torch.cuda.synchronize()
        print(p.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=70)[:6000], flush=True)
    del t, model; torch.cuda.empty_cache()
for case in [("rope", True, False), ("rope", False, False), ("rope", False, True), ("fox", True, False), ("fox", False, True),
             ("path", True, False), ("path", False, False), ("path", False, True), ("path-fox", True, False), ("path-fox", False, True)]:
    if time.time() - began > 75: break
    try: bench(*case, profile=case in [("rope", False, False), ("path", True, False)])
    except Exception: traceback.print_exc()
if time.time() - began < 80:
    for case in (("rope", False, False), ("path", False, False)):
        try: bench(*case, compiled=True)
        except Exception: traceback.print_exc()
