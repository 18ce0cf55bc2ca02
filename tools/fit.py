"""Compile random calls of attention for each GPU, and print every kernel that takes more memory than the GPU has.

Usage, from a checkout (no GPU is needed; a call takes a second)::

    python tools/fit.py                              100 calls for each GPU
    python tools/fit.py --gpu sm_90 --start 400 --n 50    50 others, for one

A seed and a number name a call: a long run goes on with `--start`. A kernel that is printed runs with smaller tiles
than those of its table (`launch_fitting`); if these do not fit either, or there are none, the call is printed as an
error. The exit status is 1 if anything was printed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
if str(TESTS) not in sys.path:
    sys.path.append(str(TESTS))

from helpers.fit import compile_case, draw_case  # noqa: E402
from helpers.targets import GPUS, SHARED_MEMORY  # noqa: E402


def main() -> int:
    """Compile, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=GPUS, action="append", help="one or several; all by default")
    parser.add_argument("--n", type=int, default=100, help="calls for each GPU")
    parser.add_argument("--start", type=int, default=0, help="the number of the first call")
    parser.add_argument("--seed", default="fit")
    options = parser.parse_args()
    n_bad = 0
    for target in options.gpu or GPUS:
        n_kernels = 0
        most: dict[str, int] = {}
        for index in range(options.start, options.start + options.n):
            case = draw_case(options.seed, index)
            try:
                steps = compile_case(case, target)
            except Exception as error:
                print(f"{target} {index} {type(error).__name__}: {error}\n    {case.shown}", flush=True)
                n_bad += 1
                continue
            for backend, on in steps.items():
                n_kernels += len(on.fit)
                for used in on.fit:
                    most[used.kernel] = max(used.shared, most.get(used.kernel, 0))
                for used in on.over:
                    print(f"{target} {index} {backend}: {used.kernel} takes {used.shared} bytes\n    {case.shown}")
                    n_bad += 1
        print(f"{target}: {n_kernels} kernels fit {SHARED_MEMORY[target]} bytes; at most {most}", flush=True)
    return int(n_bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
