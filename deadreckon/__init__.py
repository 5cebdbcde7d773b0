"""Attention with data-dependent position encodings.

    import deadreckon as dr
    o = dr.attend(q, k, v, transport=dr.Householder(w, beta), log_gate=log_gate)

Public names load on first use: `import deadreckon` depends on torch alone, and only the models need transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deadreckon.encodings import ENCODINGS
    from deadreckon.encodings.base import Context, Encoding, Sizes, parameter_groups
    from deadreckon.filters.histogram import histogram_filter, superpose
    from deadreckon.models.convert import convert_model
    from deadreckon.models.huggingface import DeadReckonConfig, DeadReckonForCausalLM, DeadReckonModel
    from deadreckon.models.interface import register_attention
    from deadreckon.models.layer import AttentionLayer
    from deadreckon.models.parallelize import parallelize
    from deadreckon.models.state import LayerState
    from deadreckon.ops.attention import IMPLEMENTATIONS, attend, attend_next, share_in_reach
    from deadreckon.ops.factors import Factors, Householder, Power, Rotation
    from deadreckon.ops.parallel.context import ContextParallel
    from deadreckon.ops.streaming.past import Past

__version__ = "0.1.0"

_HOME = {
    "attend": "ops.attention",
    "attend_next": "ops.attention",
    "IMPLEMENTATIONS": "ops.attention",
    "share_in_reach": "ops.attention",
    "Rotation": "ops.factors",
    "Householder": "ops.factors",
    "Power": "ops.factors",
    "Factors": "ops.factors",
    "ContextParallel": "ops.parallel.context",
    "Encoding": "encodings.base",
    "Sizes": "encodings.base",
    "Context": "encodings.base",
    "parameter_groups": "encodings.base",
    "ENCODINGS": "encodings",
    "histogram_filter": "filters.histogram",
    "superpose": "filters.histogram",
    "AttentionLayer": "models.layer",
    "LayerState": "models.state",
    "Past": "ops.streaming.past",
    "parallelize": "models.parallelize",
    "convert_model": "models.convert",
    "register_attention": "models.interface",
    "DeadReckonConfig": "models.huggingface",
    "DeadReckonModel": "models.huggingface",
    "DeadReckonForCausalLM": "models.huggingface",
}
"""Public name -> the module it lives in."""

__all__ = [
    "ENCODINGS",
    "IMPLEMENTATIONS",
    "AttentionLayer",
    "Context",
    "ContextParallel",
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
    "convert_model",
    "histogram_filter",
    "parallelize",
    "parameter_groups",
    "register_attention",
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
