"""Two virtual GPUs: run by test_on_device.py."""

import pytest
import torch


def test_each_device_has_its_own_memory_and_is_current_in_turn():
    assert torch.cuda.device_count() == 2
    x = torch.ones(1000, device="cuda:1", dtype=torch.uint8)
    assert x.device == torch.device("cuda", 1) and torch.cuda.memory_allocated(1) >= 1000
    assert (x + 1).get_device() == 1 and torch.arange(3, device="cuda:1").get_device() == 1
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1 and torch.ones(1, device="cuda").get_device() == 1
    assert torch.cuda.current_device() == 0 and x.to("cuda:0").get_device() == 0
    with pytest.raises(RuntimeError, match="cuda:1 and cuda:0"):
        x + torch.ones(1000, device="cuda:0", dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="cuda:2 .*has 2 devices"):
        torch.ones(1, device="cuda:2")
