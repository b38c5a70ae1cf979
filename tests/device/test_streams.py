"""The thread that runs a CPU's steps: it ends with whoever has it, and how long it worked is known."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stretto.device.runner import HalfStep
from stretto.device.streams import InlineDevice, ThreadDevice

LEFT = """
import sys
from types import SimpleNamespace
import numpy, torch
from stretto.device.streams import ThreadDevice
a = torch.randn(2000, 2000)
begun = []
def begin(packed):
    begun.append(1)
    body = a @ a @ a @ a
    return SimpleNamespace(body=body, packed=lambda numbers: numbers)
device = ThreadDevice(SimpleNamespace(pages=SimpleNamespace(host=None), begin=begin))
device.launch(numpy.zeros(1))
while not begun:
    pass
"""


def test_an_interpreter_ends_quietly_while_a_step_runs() -> None:
    """A kernel that comes back to an interpreter that has gone would end the process by std::terminate."""
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_device_that_nobody_has_any_more_ends_its_thread() -> None:
    """One of its steps waits for a mask; the model's memory is free again."""
    half = HalfStep.__new__(HalfStep)
    weights = torch.zeros(4)
    runner = SimpleNamespace(pages=SimpleNamespace(host=None), begin=lambda packed: half, weights=weights)
    before, kept = threading.active_count(), weakref.ref(weights)
    device = ThreadDevice(runner)
    assert threading.active_count() == before + 1
    device.launch(np.zeros(1))
    del device, runner, weights
    gc.collect()
    assert threading.active_count() == before and kept() is None


@pytest.mark.parametrize("device", [InlineDevice, ThreadDevice])
def test_what_a_step_worked_is_what_its_thread_did(device: type[InlineDevice | ThreadDevice]) -> None:
    """Serial work counts in full however many threads there are; waiting, other threads and other steps do not."""

    def begin(packed: np.ndarray) -> SimpleNamespace:
        until = time.thread_time() + float(packed[0])
        while time.thread_time() < until:
            pass
        time.sleep(0.05)
        return SimpleNamespace(body=torch.zeros(1), packed=lambda numbers: numbers)

    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        steps = device(SimpleNamespace(pages=SimpleNamespace(host=None), begin=begin))
    finally:
        torch.set_num_threads(threads)
    worked = [steps.worked()]
    steps.launch(np.asarray([0.06]))
    steps.launch(np.asarray([0.03]))
    for _ in range(2):
        steps.collect()
        worked.append(steps.worked())
    steps.close()
    if device is ThreadDevice:  # each step for itself, whenever its result is collected
        assert worked[1] - worked[0] == pytest.approx(0.06, abs=0.015)
    assert worked[2] - worked[0] == pytest.approx(0.09, abs=0.02)
