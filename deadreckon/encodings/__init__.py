"""All position encodings, by name. To add one: a file here and a line below."""

from __future__ import annotations

from deadreckon.encodings.alibi import ALiBi
from deadreckon.encodings.base import Encoding
from deadreckon.encodings.conformal_sympow import ConformalSympow
from deadreckon.encodings.fox import FoX
from deadreckon.encodings.learned_rotation import LearnedRotation, LearnedRotationValues
from deadreckon.encodings.nope import NoPE
from deadreckon.encodings.path import PaTH
from deadreckon.encodings.path_fox import PaTHFoX
from deadreckon.encodings.prism import Prism
from deadreckon.encodings.random_rotation import RandomRotation, RandomRotationValues
from deadreckon.encodings.randomized import Randomized
from deadreckon.encodings.rope import RoPE
from deadreckon.encodings.rope_fox import RoPEFoX
from deadreckon.encodings.rope_path import RoPEPaTH
from deadreckon.encodings.rope_path_fox import RoPEPaTHFoX
from deadreckon.encodings.rope_values import RoPEValues
from deadreckon.encodings.selective_rope import SelectiveRoPE
from deadreckon.encodings.sinusoidal import Sinusoidal
from deadreckon.encodings.stickbreaking import StickBreaking
from deadreckon.encodings.sympow import Sympow
from deadreckon.encodings.sympow_gated import SympowGated

ENCODINGS: dict[str, type[Encoding]] = {
    "nope": NoPE,
    "sinusoidal": Sinusoidal,
    "randomized": Randomized,
    "rope": RoPE,
    "rope-values": RoPEValues,
    "alibi": ALiBi,
    "fox": FoX,
    "stickbreaking": StickBreaking,
    "path": PaTH,
    "path-fox": PaTHFoX,
    "rope-fox": RoPEFoX,
    "rope-path": RoPEPaTH,
    "rope-path-fox": RoPEPaTHFoX,
    "random-rotation": RandomRotation,
    "random-rotation-values": RandomRotationValues,
    "learned-rotation": LearnedRotation,
    "learned-rotation-values": LearnedRotationValues,
    "selective-rope": SelectiveRoPE,
    "sympow": Sympow,
    "sympow-gated": SympowGated,
    "conformal-sympow": ConformalSympow,
    "prism": Prism,
}
