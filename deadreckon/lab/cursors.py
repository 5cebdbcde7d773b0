"""Where `lab/prism.py` finds what `deadreckon probe --cursors` draws."""

from deadreckon.lab.probe.cursors_picture import show

__all__ = ["show"]
