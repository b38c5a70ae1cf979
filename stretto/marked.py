"""Parts of hand-written pages that are generated: what stands between two marks is replaced."""

from __future__ import annotations


def with_part(page: str, start: str, end: str, part: str) -> str:
    """The page with `part` between its marks. Raises ValueError where they are missing."""
    before, opened, rest = page.partition(start)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise ValueError(f"the page lacks the marks {start} and {end}")
    return f"{before}{start}\n{part}\n{end}{after}"
