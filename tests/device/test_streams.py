"""The thread that runs a CPU's steps ends with whoever has it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import torch

from stretto.device.runner import HalfStep
from stretto.device.streams import ThreadDevice

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
