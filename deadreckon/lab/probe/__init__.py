"""Measures on a trained model what the theory of "Why Do Accumulated Transformations Extrapolate?" is about.

    findings = run_probe(model, tokens, Path("probe"))

`deadreckon probe` does that for the model of a run. `theory` has the paper's closed forms and bounds, `transport`
estimates the mean transport of routes, `attention` recomputes the attention of a few queries, `layers` turns both into
findings on each head, and `reach` predicts a head's usable context length from them. Apart from these, `cursors` traces
PRISM's cursors, and `maps` shows attention maps.
"""

from deadreckon.lab.probe.findings import Findings
from deadreckon.lab.probe.probe import run_probe
from deadreckon.lab.probe.transport import fit_decay, mean_gates, mean_transport
