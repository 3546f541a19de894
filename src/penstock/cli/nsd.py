"""``penstock nsd``: show, prepare or synthesize the Natural Scenes Dataset."""

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from penstock.base.progress import Progress
from penstock.base.sizes import MiB
from penstock.nsd import NSD, subjects
from penstock.nsd.synthetic import SCALES, STORED, WRITTEN, steps, synthesize
from penstock.nsd.synthetic.shards import write_mindeye2, write_shards

EXAMPLES = """examples:
  penstock nsd show data/nsd --subject 1
      which data of a subject are there, and which are missing

  penstock nsd prepare data/nsd --subject 1
      copy its sessions trial by trial, once, so that training reads each trial alone

  penstock nsd synthesize data/small --scale small --signal 1
      a synthetic release, from whose voxels pictures can be told

exit codes: 0 success; 2 invalid request; 130 after Ctrl-C"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    _show_arguments(actions.add_parser("show", help="list the data of a subject, and what is missing"))
    _prepare_arguments(actions.add_parser("prepare", help="copy sessions trial by trial, once, for fast training"))
    _synthesize_arguments(actions.add_parser("synthesize", help="write a synthetic NSD in the release's layout"))


def run(args: argparse.Namespace) -> int:
    """Run the chosen action."""
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "show": _show, "prepare": _prepare, "synthesize": _synthesize,
    }  # fmt: skip
    return actions[args.action](args)


def _subject_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", help="the folder that holds nsddata_betas and nsddata")
    parser.add_argument("--subject", type=int, default=1, help="1 to 8 (%(default)s)")
    parser.add_argument("--space", default="func1pt8mm", help="func1pt8mm or func1mm (%(default)s)")
    parser.add_argument("--betas", default="b3", help="the version of betas: b1, b2, b3 or its name (%(default)s)")


def _open_subject(args: argparse.Namespace) -> NSD:
    return NSD(args.root, args.subject, args.space, args.betas, prepared=getattr(args, "folder", None))


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    _subject_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the same as JSON")


def _show(args: argparse.Namespace) -> int:
    facts = _collect_facts(_open_subject(args), args.root)
    if args.json:
        print(json.dumps(facts, indent=2))
        return 0
    print(f"subject {facts['subject']} of {facts['subjects']}, {facts['space']}, {facts['betas']}")
    print(
        f"{facts['sessions']} sessions, {facts['trials']:,} trials of {facts['pictures']:,} pictures; "
        f"{facts['shared_trials']:,} trials shared"
    )
    for name, region in facts["regions"].items():
        labels = region["labels"]
        print(f"region {name}: {region['voxels']:,} voxels{'; ' if labels else ''}{', '.join(labels)}")
    for missing in facts["missing"]:
        print(f"missing {missing}")
    return 0


def _collect_facts(nsd: NSD, root: str) -> dict[str, Any]:
    return {
        "subject": nsd.subject,
        "subjects": list(subjects(root)),
        "space": nsd.layout.space,
        "betas": nsd.layout.betas,
        "sessions": len(nsd.sessions),
        "trials": len(nsd.trials),
        "pictures": int(nsd.trials["stim_id"].nunique()),
        "shared_trials": int(nsd.trials["shared1000"].sum()),
        "regions": {
            name: {"voxels": len(nsd.voxels(name) or ()), "labels": list(labels)}
            for name, labels in nsd.regions.items()
        },
        "missing": [str(each) for each in nsd.missing],
    }


def _prepare_arguments(parser: argparse.ArgumentParser) -> None:
    _subject_arguments(parser)
    parser.add_argument("--roi", default="nsdgeneral", help="region, region:label, or a NIfTI file (%(default)s)")
    parser.add_argument("--whole-brain", action="store_true", help="whole volumes instead of a region")
    parser.add_argument("--min-ncsnr", type=float, help="leave out voxels with a lower noise ceiling")
    parser.add_argument("--sessions", type=int, nargs="+", metavar="N", help="these sessions only")
    parser.add_argument("--memory", default="256MiB", help="most memory to hold (%(default)s)")
    parser.add_argument("--folder", help="where the copies go (default: the folder penstock in the root)")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")


def _prepare(args: argparse.Namespace) -> int:
    bars: list[Progress] = []  # one, once the number of bytes is known

    def progress(bytes_: int, total: int) -> None:
        if not bars:
            bars.append(stack.enter_context(Progress("prepare", -(-total // MiB), "MiB")))
        bars[0].advance_to(-(-bytes_ // MiB))

    with ExitStack() as stack:
        folder = _open_subject(args).prepare(
            None if args.whole_brain else args.roi, min_ncsnr=args.min_ncsnr, sessions=args.sessions,
            memory=args.memory, progress=progress,
        )  # fmt: skip
    if args.json:
        print(json.dumps({"folder": str(folder), "complete_before": not bars}, indent=2))
    else:
        state = "complete" if bars else "was complete already"
        print(f"{folder}: {state}; datasets of these voxels use it from now on")
    return 0


def _synthesize_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", help="the folder to write to")
    parser.add_argument("--scale", choices=SCALES, default="tiny", help="400 KiB, 20 MiB, or all of subject 1")
    parser.add_argument("--stored", choices=STORED, default="voxel-major", help="chunk layout of the HDF5 sessions")
    parser.add_argument(
        "--written", choices=WRITTEN, default="brain", help="which voxels are written; the rest are holes"
    )
    parser.add_argument(
        "--signal",
        type=float,
        default=0,
        metavar="X",
        help="voxels depend on pictures, X times as much as on noise (0)",
    )
    parser.add_argument("--nifti", action="store_true", help="also write sessions as .nii.gz")
    parser.add_argument("--coco", type=int, default=0, metavar="PIXELS", help="write MindEye2's pictures, of this size")
    parser.add_argument("--no-stimuli", action="store_true", help="leave out nsd_stimuli.hdf5")
    parser.add_argument("--shards", action="store_true", help="write MindEye's tar shards of subject 1")
    parser.add_argument("--mindeye2", action="store_true", help="write MindEye2's betas and behaviour of subject 1")
    parser.add_argument("--seed", type=int, default=0, help="decides all values (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")


def _synthesize(args: argparse.Namespace) -> int:
    stimuli = not args.no_stimuli
    count = steps(args.scale, stimuli=stimuli, coco=args.coco) + args.shards + args.mindeye2
    with Progress("synthesize", count, "steps") as progress:
        experiment = synthesize(
            args.root, args.scale, stored=args.stored, written=args.written, nifti=args.nifti, stimuli=stimuli,
            coco=args.coco, signal=args.signal, seed=args.seed, progress=lambda _: progress.add(1),
        )  # fmt: skip
        for wanted, write in ((args.shards, write_shards), (args.mindeye2, write_mindeye2)):
            if wanted:
                write(args.root)
                progress.add(1)
    if args.json:
        print(json.dumps({"root": str(args.root), "subjects": experiment.scale.sessions}, indent=2))
        return 0
    subjects_text = ", ".join(
        f"{number} ({count} sessions)" for number, count in sorted(experiment.scale.sessions.items())
    )
    print(f"{args.root}: subjects {subjects_text}; to see it: penstock nsd show {args.root}")
    return 0
