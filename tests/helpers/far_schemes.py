"""Schemes with another encoding of far pairs, which the kernels of Triton and of Gluon are tested with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ropewalk.schemes import ReRope, Rope, Rotation, SelfExtend, TwoRangeScheme


@dataclass(frozen=True, eq=False)
class Jump(TwoRangeScheme):
    """Far pairs are a hundred positions further apart than they are: to take one for a near one, or behind for ahead,
    shows at any distance, and at the window's end more than anywhere. Published schemes are continuous there.
    """

    def far_rotation(self, positions: Tensor, head_dim: int, of: str) -> Rotation:
        table = self.rotation(positions + {"keys": 0, "past": 100, "future": -170}[of], head_dim)
        return table if of == "keys" else self._scale_by_log(table, positions)


SCHEMES = {
    "rerope": ReRope(9),
    "leaky": ReRope(9, leak=2.5),
    "extend": SelfExtend(9, 4),
    "jump": Jump(9),
    "rerope-log": ReRope(9, log_n=16),
    "leaky-log": ReRope(9, leak=2.5, log_n=16),
    "extend-log": SelfExtend(9, 4, log_n=16),
    "rerope-factor": ReRope(9, rope=Rope(attention_factor=1.2)),
    "leaky-factor": ReRope(9, leak=2.5, rope=Rope(attention_factor=1.2)),
    "extend-factor": SelfExtend(9, 4, rope=Rope(attention_factor=1.2)),
    "rerope-interleaved": ReRope(9, rope=Rope(interleaved=True)),
    "leaky-interleaved": ReRope(9, leak=2.5, rope=Rope(interleaved=True, attention_factor=1.2)),
    "rerope-partial-interleaved": ReRope(9, rope=Rope(rotary_dim=8, interleaved=True)),
    "jump-partial-interleaved": Jump(9, rope=Rope(rotary_dim=6, interleaved=True, attention_factor=1.2)),
    # From here on the kernels cannot undo the rotation: gradients of far features are stored apart.
    "rerope-partial": ReRope(9, rope=Rope(rotary_dim=8)),
    "leaky-partial": ReRope(9, leak=2.5, rope=Rope(rotary_dim=8, attention_factor=1.2), log_n=32),
    "rerope-offset": ReRope(9, rope=Rope(rotary_dim=8, rotary_offset=4)),
    "extend-offset-interleaved": SelfExtend(9, 4, rope=Rope(rotary_offset=10, interleaved=True)),
}

# What causal attention leaves out, full attention has too, but for gradients that turn from past to near at once.
CAUSAL = ["rerope", "leaky-log", "extend", "leaky-interleaved", "rerope-partial", "extend-offset-interleaved"]
