"""``penstock nsd``: what can be done with the Natural Scenes Dataset from the command line."""

import argparse
from collections.abc import Callable

from penstock.cli.progress import Progress
from penstock.nsd import NSD, subjects
from penstock.nsd.synthetic import SCALES, STORED, WRITTEN, steps, synthesize
from penstock.nsd.synthetic.shards import write_mindeye2, write_shards
from penstock.sizes import MiB

EXAMPLES = """examples:
  penstock nsd show data/nsd --subject 1
      what of a subject is there, and what is missing

  penstock nsd prepare data/nsd --subject 1
      copy its sessions by trial, once, so that training reads each trial by itself

  penstock nsd synthesize data/small --scale tiny
      a synthetic release, to try things on

exit codes: 0 done; 2 it cannot be done as asked; 130 after Ctrl-C"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One action or another."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    _show_arguments(actions.add_parser("show", help="what of a subject is there, and what is missing"))
    _prepare_arguments(actions.add_parser("prepare", help="copy sessions by trial, once, for quick training"))
    _synthesize_arguments(actions.add_parser("synthesize", help="write a synthetic NSD in the release's layout"))


def run(args: argparse.Namespace) -> int:
    """Do it."""
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "show": _show, "prepare": _prepare, "synthesize": _synthesize,
    }  # fmt: skip
    return actions[args.action](args)


def _subject_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", help="the folder that holds nsddata_betas and nsddata")
    parser.add_argument("--subject", type=int, default=1, help="1 to 8 (%(default)s)")
    parser.add_argument("--space", default="func1pt8mm", help="(%(default)s)")
    parser.add_argument("--betas", default="b3", help="the version of betas: b1, b2, b3 or its name (%(default)s)")


def _subject(args: argparse.Namespace) -> NSD:
    return NSD(args.root, args.subject, args.space, args.betas, prepared=getattr(args, "folder", None))


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    _subject_arguments(parser)


def _show(args: argparse.Namespace) -> int:
    nsd = _subject(args)
    print(f"subject {nsd.subject} of {subjects(args.root)}, {nsd.layout.space}, {nsd.layout.betas}")
    shared = int(nsd.trials["shared1000"].sum())
    pictures = nsd.trials["stim_id"].nunique()
    print(
        f"{len(nsd.sessions)} sessions, {len(nsd.trials):,} trials of {pictures:,} pictures; {shared:,} trials shared"
    )
    for name, labels in nsd.regions.items():
        print(f"region {name}: {len(nsd.voxels(name) or ()):,} voxels{'; ' if labels else ''}{', '.join(labels)}")
    for told in nsd.missing:
        print(f"missing {told}")
    return 0


def _prepare_arguments(parser: argparse.ArgumentParser) -> None:
    _subject_arguments(parser)
    parser.add_argument("--roi", default="nsdgeneral", help="region, region:label, or a NIfTI file (%(default)s)")
    parser.add_argument("--whole-brain", action="store_true", help="whole volumes instead of a region")
    parser.add_argument("--min-ncsnr", type=float, help="leave out voxels with a lower noise ceiling")
    parser.add_argument("--sessions", type=int, nargs="+", metavar="N", help="these alone")
    parser.add_argument("--memory", default="256MiB", help="the most to hold (%(default)s)")
    parser.add_argument("--folder", help="where copies go; a folder penstock in the root by default")


def _prepare(args: argparse.Namespace) -> int:
    bar: list[Progress] = []
    done = 0

    def progress(bytes_: int, total: int) -> None:
        nonlocal done
        if not bar:
            bar.append(Progress("prepare", -(-total // MiB), "MiB"))
        megabytes = -(-bytes_ // MiB)
        bar[0].add(megabytes - done)
        done = megabytes

    roi = None if args.whole_brain else args.roi
    try:
        folder = _subject(args).prepare(
            roi, min_ncsnr=args.min_ncsnr, sessions=args.sessions, memory=args.memory, progress=progress
        )
    finally:
        for each in bar:
            each.__exit__()
    print(f"{folder}: {'all there' if bar else 'was all there already'}; datasets of these voxels use it from now on")
    return 0


def _synthesize_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", help="folder to write it into")
    parser.add_argument("--scale", choices=SCALES, default="tiny", help="400 KB, 20 MB, or all of subject 1")
    parser.add_argument("--stored", choices=STORED, default="voxel-major", help="how sessions lie in HDF5")
    parser.add_argument("--written", choices=WRITTEN, default="brain", help="what is filled; the rest is holes")
    parser.add_argument("--nifti", action="store_true", help="write sessions as .nii.gz too")
    parser.add_argument("--coco", type=int, default=0, metavar="PIXELS", help="write MindEye2's pictures, of this size")
    parser.add_argument("--no-stimuli", action="store_true", help="leave nsd_stimuli.hdf5 out")
    parser.add_argument("--shards", action="store_true", help="write MindEye's tar shards of subject 1")
    parser.add_argument("--mindeye2", action="store_true", help="write MindEye2's betas and behaviour of subject 1")
    parser.add_argument("--seed", type=int, default=0)


def _synthesize(args: argparse.Namespace) -> int:
    stimuli = not args.no_stimuli
    count = steps(args.scale, stimuli=stimuli, coco=args.coco) + args.shards + args.mindeye2
    with Progress("synthesize", count, "steps") as progress:
        experiment = synthesize(
            args.root, args.scale, stored=args.stored, written=args.written, nifti=args.nifti, stimuli=stimuli,
            coco=args.coco, seed=args.seed, progress=lambda _: progress.add(1),
        )  # fmt: skip
        for wanted, write in ((args.shards, write_shards), (args.mindeye2, write_mindeye2)):
            if wanted:
                write(args.root)
                progress.add(1)
    told = ", ".join(f"{number} ({count} sessions)" for number, count in sorted(experiment.scale.sessions.items()))
    print(f"{args.root}: subjects {told}; look at it with: penstock nsd show {args.root}")
    return 0
