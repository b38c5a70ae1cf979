"""Pytest plugin of the continuous integration: runs one tier of the collected tests, within a box of time.

    pytest -m full -p tiers --tier 2/4 --time-box 1200 --rotate 57

A test belongs to the tier that the checksum of its id names, so a new test moves no other. `--rotate` turns the order
within a tier, so that what the box cuts off on one commit comes first on another. What was cut off is reported as
skipped, with the reason.
"""

from __future__ import annotations

import time
import zlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--tier", default="0/1", help="which part of how many: 2/4 is the third of four")
    group.addoption("--time-box", type=float, default=float("inf"), help="seconds after which no further test starts")
    group.addoption("--rotate", type=int, default=0, help="start the tier this many tests further on")


def pytest_configure(config: pytest.Config) -> None:
    tier, tiers = (int(part) for part in config.getoption("--tier").split("/"))
    if not 0 <= tier < tiers:
        raise pytest.UsageError(f"--tier {tier}/{tiers}: the first number must lie in 0..{tiers - 1}")
    config.pluginmanager.register(_Tier(tier, tiers, config.getoption("--time-box"), config.getoption("--rotate")))


class _Tier:
    def __init__(self, tier: int, tiers: int, seconds: float, rotate: int):
        self.tier, self.tiers, self.rotate = tier, tiers, rotate
        self.seconds, self.end = seconds, float("inf")

    @pytest.hookimpl(trylast=True)  # after the selection by marker
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        mine = [item for item in items if zlib.crc32(item.nodeid.encode()) % self.tiers == self.tier]
        others = [item for item in items if zlib.crc32(item.nodeid.encode()) % self.tiers != self.tier]
        start = self.rotate // self.tiers % max(len(mine), 1)
        items[:] = mine[start:] + mine[:start]
        if others:
            config.hook.pytest_deselected(items=others)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> None:
        self.end = time.monotonic() + self.seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.monotonic() > self.end:
            pytest.skip(f"the time box of {self.seconds:.0f} s is used up; this test runs on another commit")
