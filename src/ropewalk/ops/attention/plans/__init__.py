"""Plans of eager calls by kernels: found by what a call's launches depend on, made at the second call of a kind.

A plan depends neither on values on a device nor on a tensor's version: whatever derives from tensors is an input of it.
Calls that no plan is for, such as those with misaligned tensors, run without one, by the same launchers.

============  =========================================================================================
`find`        a call of `attention` to its key and plan, before its arguments are validated
`note`        a call without a plan to the plan of its kind, once it was seen twice
`planned`     the kinds that kernels run; also over caches that grow
`made`        those whose tables, parameters or sinks are made in each call
`norms`       the norm beside a rotation, before such a kind
`library`     the kinds that a library runs, and the rotation before it
`record`      the run of a kind, and what autograd keeps of it
`directions`  the launches of a forward, and of a backward
`launchers`   those of other launchers
`cache`       plans by key, and their limits
`leaves`      the tensors and the numbers of a call by their names, and what a key holds of them
============  =========================================================================================
"""

from ropewalk.ops.attention.plans import cache
from ropewalk.ops.attention.plans.cache import CALLS, FORWARDS, NORMS, Cache
from ropewalk.ops.attention.plans.directions import BackwardPlan, Backwards, ForwardPlan, forward
from ropewalk.ops.attention.plans.find import find_call
from ropewalk.ops.attention.plans.launchers import run_launcher
from ropewalk.ops.attention.plans.leaves import Flags, Given, call_of, pick_numbers, pick_tensors
from ropewalk.ops.attention.plans.library import LibraryCall
from ropewalk.ops.attention.plans.made import MadeCall
from ropewalk.ops.attention.plans.norms import find_norm, note_norm
from ropewalk.ops.attention.plans.note import note_call
from ropewalk.ops.attention.plans.planned import FIXED, GrowingCall, PlannedCall
from ropewalk.ops.attention.plans.record import NODE, run_plan

__all__ = [
    "CALLS",
    "FIXED",
    "FORWARDS",
    "NODE",
    "NORMS",
    "BackwardPlan",
    "Backwards",
    "Cache",
    "Flags",
    "ForwardPlan",
    "Given",
    "GrowingCall",
    "LibraryCall",
    "MadeCall",
    "PlannedCall",
    "cache",
    "call_of",
    "find_call",
    "find_norm",
    "forward",
    "note_call",
    "note_norm",
    "pick_numbers",
    "pick_tensors",
    "run_launcher",
    "run_plan",
]
