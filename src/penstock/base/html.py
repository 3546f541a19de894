"""What notebooks show in place of ``repr``: small tables of HTML. Every text is escaped: names come from files."""

from collections.abc import Iterable, Mapping, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; all cells are plain text."""
    head = "".join(f"<th style='text-align:left'>{_escape(each)}</th>" for each in headings)
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(_row(map(_cell, row)) for row in rows)}</tbody></table>"
    )


def field_table(fields: Mapping[str, object]) -> str:
    """Fields, and what each holds."""
    return table(("field", "holds"), fields.items())


def share_table(rows: Sequence[tuple[str, int, str, str]], whole: int) -> str:
    """Names, sizes in bytes and as text, explanations; each with a bar as long as its share of ``whole``."""
    return "".join(
        ["<table><tbody>"]
        + [
            _row([_cell(name), _cell(size), _bar(bytes_ / max(1, whole)), _cell(why)])
            for name, bytes_, size, why in rows
        ]
        + ["</tbody></table>"]
    )


def paragraph(text: str) -> str:
    """Text with its line breaks."""
    return f"<p>{_escape(text).replace(chr(10), '<br/>')}</p>"


def _row(cells: Iterable[str]) -> str:
    return f"<tr>{''.join(cells)}</tr>"


def _cell(value: object) -> str:
    return f"<td style='text-align:left'>{_escape(str(value))}</td>"


def _bar(share: float) -> str:
    percent = 100 * min(1.0, max(0.0, share))
    return (
        "<td style='text-align:left'><div style='width:12em'>"
        f"<div style='background:#0b6bcb;height:0.8em;width:{percent:.1f}%'></div></div></td>"
    )


def _escape(text: str) -> str:
    from html import escape  # with a table of all entities: only where HTML is shown

    return escape(text)
