"""The position schemes of `attention`: maps of features and changes of scores."""

from ropewalk.schemes.base import PositionScheme as PositionScheme
from ropewalk.schemes.base import Rotation as Rotation
from ropewalk.schemes.biases import Alibi as Alibi
from ropewalk.schemes.biases import T5Bias as T5Bias
from ropewalk.schemes.biases import alibi_slopes as alibi_slopes
from ropewalk.schemes.exposb import ExpoSB as ExpoSB
from ropewalk.schemes.rope import NoPosition as NoPosition
from ropewalk.schemes.rope import Rope as Rope
from ropewalk.schemes.two_range import ReRope as ReRope
from ropewalk.schemes.two_range import SelfExtend as SelfExtend
from ropewalk.schemes.two_range import TwoRangeScheme as TwoRangeScheme
