"""Attention whose positions are reckoned from content.

    import deadreckon as dr
    o = dr.attend(q, k, v, transport=dr.Householder(w, beta), log_gate=log_gate)

Public names are loaded when they are first used: `import deadreckon` needs torch alone, and models need transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deadreckon.attention import IMPLEMENTATIONS, attend, attend_next, share_in_reach
    from deadreckon.blockwise.past import Past
    from deadreckon.encoding import Context, Encoding, Sizes, parameter_groups
    from deadreckon.encodings import ENCODINGS
    from deadreckon.factors import Factors, Householder, Power, Rotation
    from deadreckon.histogram import histogram_filter, superpose
    from deadreckon.layer import AttentionLayer
    from deadreckon.model import DeadReckonConfig, DeadReckonForCausalLM, DeadReckonModel
    from deadreckon.state import LayerState

__version__ = "0.1.0"

_HOME = {
    "attend": "attention",
    "attend_next": "attention",
    "IMPLEMENTATIONS": "attention",
    "share_in_reach": "attention",
    "Rotation": "factors",
    "Householder": "factors",
    "Power": "factors",
    "Factors": "factors",
    "Encoding": "encoding",
    "Sizes": "encoding",
    "Context": "encoding",
    "parameter_groups": "encoding",
    "ENCODINGS": "encodings",
    "histogram_filter": "histogram",
    "superpose": "histogram",
    "AttentionLayer": "layer",
    "LayerState": "state",
    "Past": "blockwise.past",
    "DeadReckonConfig": "model",
    "DeadReckonModel": "model",
    "DeadReckonForCausalLM": "model",
}
"""Public name -> the module it lives in."""

__all__ = [
    "ENCODINGS",
    "IMPLEMENTATIONS",
    "AttentionLayer",
    "Context",
    "DeadReckonConfig",
    "DeadReckonForCausalLM",
    "DeadReckonModel",
    "Encoding",
    "Factors",
    "Householder",
    "LayerState",
    "Past",
    "Power",
    "Rotation",
    "Sizes",
    "attend",
    "attend_next",
    "histogram_filter",
    "parameter_groups",
    "share_in_reach",
    "superpose",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'deadreckon' has no attribute {name!r}")
    value = getattr(import_module(f"deadreckon.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
