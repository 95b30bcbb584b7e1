"""Measure learning curves of config variants over many seeds, and store them as JSON.

    python benchmarks/learning.py --config sac/mujoco --env HalfCheetah-v5 --seeds 16
        --steps 300000 --eval-interval 25000 --variant float32:float32_precision=highest
        --variant tf32:float32_precision=high [--parallel 2] [--device cuda] [--out FOLDER]
    python benchmarks/learning.py --plan benchmarks/plans/online.yaml --device cuda
        [--minutes 60] [--parallel 2] [--work FOLDER] [--list]
    python benchmarks/learning.py --summary [--out FOLDER] [--against float32]
        [--published FILE.csv --published-method SAC]

A single variant can also be given as --name NAME --set KEY=VALUE ...; together with --variant,
--set applies to all variants. Several variants run in separate processes, `--parallel` at a time,
which share the cores. Each process rewrites FOLDER/ENV__NAME.json after every evaluation of a seed,
so an interrupted run keeps its results. With --first-seed 16 the file is ENV__NAME__from16.json,
and the summary pools it with the other runs of that name.

Run folders are temporary (see TMPDIR), unless --work names a folder for them: then a run that was
stopped continues when the same command is given again, also on another machine that has the
folder. A plan always has a work folder, leaves out what is done, and stops after --minutes.

Every file holds the numbers of a short rehearsal (see curves/mathematics.py). If the code computes
other numbers today, a plan measures the run again, and the summary leaves it out as stale.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from curves.data import ABOUT, FILES, NAMES
from curves.peer_runs import learn_peer
from curves.plan import measure_plan
from curves.processes import INTERRUPTED, run_processes
from curves.run import learn
from curves.settings import Variant, process_options, variant_config
from curves.stored import why_stale
from learning_summary import print_summary
from reporting import RESULTS

from rl_training.errors import TrainingInterrupted, UserError

WORK = Path(".bench/learning")
"""Where a plan keeps run folders that are not finished"""


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="sac/mujoco")
    parser.add_argument("--env", help="default: as in the config")
    parser.add_argument("--seeds", type=int, default=16, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="the lowest seed")
    parser.add_argument("--steps", type=int, help="default: as in the config")
    parser.add_argument("--eval-interval", type=int, default=25_000)
    parser.add_argument("--eval-episodes", type=int, default=10)
    parser.add_argument("--device")
    parser.add_argument("--name", help="name of a single variant")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--variant", action="append", metavar="NAME:KEY=VALUE,...")
    parser.add_argument("--data", choices=NAMES, metavar="NAME", help="recorded data to learn from")
    parser.add_argument("--data-folder", type=Path, default=FILES, help=f"default: {FILES}")
    parser.add_argument("--data-about", type=Path, default=ABOUT, help="what the files contain")
    parser.add_argument("--init-from", metavar="NAME", help="a run in --work, of the same seeds")
    parser.add_argument("--keep", action="store_true", help="keep the last checkpoints in --work")
    parser.add_argument("--peer", type=json.loads, metavar="JSON", help="let this package learn")
    parser.add_argument("--parallel", type=int, default=1, help="variants or runs at a time")
    parser.add_argument("--plan", type=Path, metavar="FILE.yaml", help="measure a plan of runs")
    parser.add_argument("--list", action="store_true", help="only print what of a plan is done")
    parser.add_argument("--minutes", type=float, help="stop a plan after this time, and save")
    parser.add_argument("--work", type=Path, help=f"keep run folders here; with --plan: {WORK}")
    parser.add_argument("--commit", help="commit of this code, where git is not available")
    parser.add_argument("--out", type=Path, default=RESULTS / "learning")
    parser.add_argument("--summary", action="store_true", help="print the curves in --out")
    parser.add_argument("--against", metavar="NAME", help="the variant to compare with")
    parser.add_argument("--published", type=Path, metavar="FILE.csv")
    parser.add_argument("--published-method", default="SAC")
    arguments = parser.parse_args(words)
    if arguments.variant and arguments.name:
        parser.error("--name is for a single variant; --variant contains the name")
    if arguments.parallel < 1 or arguments.seeds < 1:
        parser.error("--parallel and --seeds: at least 1")
    if arguments.keep and arguments.work is None:
        parser.error("--keep: needs --work")
    if arguments.plan is None and (arguments.list or arguments.minutes is not None):
        parser.error("--list and --minutes belong to --plan")
    if arguments.minutes is not None and not 0 < arguments.minutes < math.inf:
        parser.error("--minutes: must be more than 0")
    if arguments.plan is not None:
        if any(
            getattr(arguments, key)
            for key in ("variant", "name", "set", "data", "init_from", "peer")
        ):
            parser.error("--plan: the plan contains names, settings and data")
        arguments.work = arguments.work or WORK
    return arguments


def main() -> None:
    arguments = parse_arguments()
    try:
        if arguments.summary:
            print_summary(
                arguments.out,
                arguments.against,
                arguments.published,
                arguments.published_method,
                why_stale(),
            )
        elif arguments.plan is not None:
            sys.exit(0 if measure_plan(arguments.plan, arguments) else 1)
        else:
            measure_variants(arguments)
    except UserError as error:
        sys.exit(str(error))
    except TrainingInterrupted as stopped:
        kept = f"; the same command continues it from {arguments.work}" if arguments.work else ""
        step = min(int(result.metrics["global_step"]) for result in stopped.results)
        print(f"stopped at step {step:,}{kept}", flush=True)
        sys.exit(INTERRUPTED)


def measure_variants(arguments: argparse.Namespace) -> None:
    texts = arguments.variant or [arguments.name or "packaged"]
    variants = [Variant.parse(text, arguments.set) for text in texts]
    if len({variant.name for variant in variants}) < len(variants):
        raise UserError("--variant: each name may be given once, because it names a file")
    for variant in variants:
        variant_config(variant, arguments)  # report errors before any run starts
    if len(variants) == 1:
        measure = learn if arguments.peer is None else learn_peer
        print(f"written to {measure(variants[0], arguments)}")
        return
    words = [process_options(variant, arguments) for variant in variants]
    codes = run_processes(words, arguments.parallel)
    failed = [variant.name for variant, code in zip(variants, codes, strict=True) if code != 0]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
