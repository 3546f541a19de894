"""``penstock verify``: whether files are what they were, and which samples suffer where they are not."""

import argparse
import os

import penstock
from penstock.cli.checking import checked, read_all, tell_end, tell_samples
from penstock.cli.progress import Progress
from penstock.fileio import Files
from penstock.manifest import NAME
from penstock.paths import paths_of
from penstock.sizes import format_size
from penstock.verification import bytes_of, default_manifest, write_manifest

EXAMPLES = f"""examples:
  penstock verify "betas_session*.hdf5" --write
      write down sizes and digests of these files, in {NAME} beside them

  penstock verify "betas_session*.hdf5"
      hold them against it; where there is none, read and decode everything, which finds what the
      format's own checksums notice

  penstock verify "train-{{000..017}}.tar" --manifest copy.json
      hold them against another

A loader does the same as it reads: penstock.open(…, manifest="{NAME}")

exit codes: 0 all well; 1 something is not as it was, or cannot be read; 2 nothing can be said (no such file, say)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A path or several, and where the manifest is or goes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("path", nargs="+", help='files, or a pattern in quotes: "betas_session*.hdf5"')
    parser.add_argument(
        "--write", nargs="?", const="", metavar="FILE", help=f"write a manifest: {NAME} beside the files, or FILE"
    )
    parser.add_argument("--manifest", metavar="FILE", help=f"the manifest to compare with; {NAME} beside the files")
    parser.add_argument("--memory", metavar="SIZE", help="the most that reading may hold; little, if left out")


def run(args: argparse.Namespace) -> int:
    """Write, compare or read; 1 if something is wrong."""
    source = args.path[0] if len(args.path) == 1 else args.path
    if args.write is not None:
        return _write(source, args.write or None)
    manifest = args.manifest or default_manifest(paths_of(source, Files()))
    if args.manifest is None and not os.path.isfile(manifest):
        print(f"there is no {manifest} to compare with (--write makes one): reading everything", flush=True)
        return _read(source, args.memory)
    return _compare(source, manifest, args.memory)


def _write(source: str | list[str], goal: str | None) -> int:
    total = bytes_of(source)
    with Progress("digesting", max(1, total), "bytes") as progress:
        written = write_manifest(source, goal, progress=lambda more, bad: progress.add(more))
    print(f"written: {written}, of {format_size(total)}")
    return 0


def _compare(source: str | list[str], manifest: str, memory: str | None) -> int:
    total = bytes_of(source)
    verdict = checked("comparing", total, "bytes", "wrong", source, manifest=manifest, memory=memory)
    for damage in verdict.damages:
        print(f"not as it was: {damage}")
    tell_samples(verdict)
    told = f"{len(verdict.damages):,} places are not as they were" if verdict.damages else "all is as it was"
    print(f"verified: {format_size(total)} against {manifest}, {told}")
    return 0 if verdict.sound else 1


def _read(source: str | list[str], memory: str | None) -> int:
    ds = penstock.open(source, on_error="skip")
    verdict = read_all(ds, memory)
    for why in ds.left_out:
        print(f"left out: {why}")
    if verdict.unchecked:
        print(
            f"not checked: {', '.join(verdict.unchecked)}: the format has no checksum there, so that a damaged byte "
            f"passes for data; --write makes a manifest"
        )
    tell_end(ds, verdict)
    return 0 if verdict.sound and not ds.left_out else 1
