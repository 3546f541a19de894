"""Links among the members of an archive: which bytes each stands for. Pure: a table in, a table out.

``tar`` writes a file that it has seen before, under another name, as a link to the first. A link is a member with the
bytes of what it leads to. Rules:

1. A hard link names a member that comes before it, from the archive's root. A symbolic link names one anywhere in the
   archive, from the folder that it is in. Names that begin with ``/`` or ``..`` name members that are stored so
   (``tar --absolute-names``).
2. Links that lead out of the archive, to nothing, or in a ring are left out, each with the reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from posixpath import dirname, join, normpath

import numpy as np

from penstock.base.dataclass import dataclass
from penstock.base.text_column import decoded
from penstock.errors import Corrupt, DataError, Missing, Unsafe
from penstock.formats.tar.members import MemberTable

WAY_OUT = (
    "Write the archive again with the files themselves (tar --dereference --hard-dereference), or pass "
    'on_error="skip" to leave it out'
)

NOTHING, OUTSIDE, RING = -1, -2, -3


@dataclass(frozen=True)
class Link:
    """A link as its header describes it."""

    target: bytes
    is_hard: bool

    def goal(self, name: bytes) -> bytes:
        """The name of the member that it leads to, from the archive's root."""
        return normpath(self.target if self.is_hard else join(dirname(name), self.target))


def resolve_links(table: MemberTable, links: Mapping[int, Link]) -> MemberTable:
    """The table with every link (by its number) replaced by the bytes of the file that it leads to."""
    names = list(table.names.raws())
    ends = _find_ends(_follow_links(names, links))
    good = np.ones(len(names), bool)
    offsets, lengths = table.offsets.copy(), table.lengths.copy()
    left_out = list(table.left_out)
    for number, end in sorted(ends.items()):
        if end < 0:
            good[number] = False
            left_out.append((names[number], _make_error(table.path, names[number], links[number], end)))
        else:
            offsets[number], lengths[number] = offsets[end], lengths[end]
    kept = table.names.take(np.flatnonzero(good))
    archives = tuple(int(np.count_nonzero(good[:first])) for first in table.archives)
    return replace(
        table, names=kept, offsets=offsets[good], lengths=lengths[good], left_out=tuple(left_out), archives=archives
    )


def _follow_links(names: Sequence[bytes], links: Mapping[int, Link]) -> dict[int, int]:
    """The member that each link leads to, by numbers; ``NOTHING`` or ``OUTSIDE``."""
    places: dict[bytes, int] = {}
    goals = {number: link.goal(names[number]) for number, link in links.items()}
    found: dict[int, int] = {}
    for number, name in enumerate(names):
        if number in links and links[number].is_hard:
            found[number] = places.get(goals[number], _why_absent(goals[number]))
        places[normpath(name)] = number
    for number, goal in goals.items():
        if not links[number].is_hard:
            found[number] = places.get(goal, _why_absent(goal))
    return found


def _why_absent(goal: bytes) -> int:
    """Why no member has this name."""
    return OUTSIDE if goal.startswith((b"/", b"../")) or goal == b".." else NOTHING


def _find_ends(following: Mapping[int, int]) -> dict[int, int]:
    """Where each link ends, through others: the number of a file, or why there is none."""
    ends: dict[int, int] = {}
    for first in following:
        chain, at = dict[int, None](), first
        while at in following and at not in ends and at not in chain:
            chain[at] = None
            at = following[at]
        end = RING if at in chain else ends.get(at, at)
        ends.update(dict.fromkeys(chain, end))
    return ends


def _make_error(path: str, name: bytes, link: Link, why: int) -> DataError:
    kind, reason = {
        NOTHING: (Missing, "which is not in the archive"),
        OUTSIDE: (Unsafe, "which lies outside of the archive"),
        RING: (Corrupt, "and so on in a ring"),
    }[why]
    what = "hard" if link.is_hard else "symbolic"
    return kind(
        f"{path}: member {decoded(name)!r:.300} is a {what} link to {decoded(link.target)!r:.300}, {reason}. {WAY_OUT}"
    )
