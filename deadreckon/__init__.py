"""Attention whose positions are reckoned from content."""

from deadreckon.attention import attend
from deadreckon.factors import Factors, Householder, Power, Rotation

__all__ = ["Factors", "Householder", "Power", "Rotation", "attend"]
