"""``penstock nsd``: what can be done with the Natural Scenes Dataset from the command line."""

import argparse

from penstock.cli.progress import Progress
from penstock.nsd.synthetic import SCALES, STORED, WRITTEN, steps, synthesize


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One action or the other."""
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    made = actions.add_parser("synthesize", help="write a synthetic NSD in the release's layout")
    made.add_argument("root", help="folder to write it into")
    made.add_argument(
        "--scale", choices=SCALES, default="tiny", help="400 KB, 20 MB, or all of subject 1 (%(default)s)"
    )
    made.add_argument("--stored", choices=STORED, default="voxel-major", help="how sessions lie in HDF5 (%(default)s)")
    made.add_argument("--written", choices=WRITTEN, default="brain", help="what is filled; else holes (%(default)s)")
    made.add_argument("--nifti", action="store_true", help="write sessions as .nii.gz too")
    made.add_argument("--coco", type=int, default=0, metavar="PIXELS", help="write MindEye2's pictures, of this size")
    made.add_argument("--no-stimuli", action="store_true", help="leave nsd_stimuli.hdf5 out")
    made.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Do it."""
    return _synthesize(args)


def _synthesize(args: argparse.Namespace) -> int:
    stimuli = not args.no_stimuli
    with Progress("synthesize", steps(args.scale, stimuli=stimuli, coco=args.coco), "files") as progress:
        experiment = synthesize(
            args.root, args.scale, stored=args.stored, written=args.written, nifti=args.nifti, stimuli=stimuli,
            coco=args.coco, seed=args.seed, progress=lambda _: progress.add(1),
        )  # fmt: skip
    subjects = ", ".join(f"{number} ({count} sessions)" for number, count in sorted(experiment.scale.sessions.items()))
    print(
        f"{args.root}: subjects {subjects}; try: python -c \"from penstock.nsd import NSD; print(NSD('{args.root}'))\""
    )
    return 0
