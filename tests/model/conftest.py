"""Tensors of these tests never need gradients."""

import pytest
import torch


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield
