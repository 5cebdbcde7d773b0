"""The theory of "Why Do Accumulated Transformations Extrapolate?" made measurable on a trained model.

    findings = run_probe(model, tokens, Path("probe"))

`deadreckon probe` does that for the model of a run. `theory` has the paper's closed forms and bounds, `transport`
estimates means of routes, `attention` looks at a few queries, `layers` makes a head's findings of both, and `reach`
says how long a context that bears. Apart from these, `cursors` reads what PRISM's cursors do, and
`maps` what heads look at.
"""

from deadreckon.lab.probe.findings import Findings
from deadreckon.lab.probe.probe import run_probe
from deadreckon.lab.probe.transport import fit_decay, mean_gates, mean_transport
