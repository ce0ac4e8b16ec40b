"""What importing the package costs and needs."""

import subprocess
import sys


def test_import_needs_no_triton_and_asks_no_device() -> None:
    program = (
        "import sys\n"
        "sys.modules['triton'] = None\n"  # any import of it fails
        "import torch, narrowkv.quant as q\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert all(hasattr(q, name) for name in q.__all__)\n"
        "q.quantize_per_tensor(torch.ones(2), 'fp8_e4m3fn')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
