"""Configurations of the Hopper forward with lists at 64 features, beside the default, and how a test takes one."""

from __future__ import annotations

from ropewalk.ops.attention import plans
from ropewalk.ops.attention.hopper import launch
from ropewalk.ops.attention.hopper.launch import ForwardConfig

HALVES = ForwardConfig(2, 64, 4, 4, 112, 32, PIN_EXP2=False, CONVERT_P_EARLY=True, PINGPONG=False, HALVES=2)
PROGRAMS = ForwardConfig(
    2, 64, 4, 4, 104, 32, False, CONVERT_P_EARLY=True, PINGPONG=False, OVERLAP=False, PROGRAMS_PER_SM=2
)
# Each has four compute warp groups on a multiprocessor, two for each block of queries.
LIST_CONFIGS = {
    "halves": HALVES,
    "halves in turns": HALVES._replace(PINGPONG=True),
    "programs": PROGRAMS,
}


def take_list_config(monkeypatch, name):
    """Let calls with lists at 64 features run by a configuration, also those that a plan was made of."""
    monkeypatch.setitem(launch.FORWARD_LISTS, 64, LIST_CONFIGS[name])
    for cache in (plans.CALLS, plans.FORWARDS):
        cache.clear()
