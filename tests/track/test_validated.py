"""Where validation rows leave the stream; what the stage does is seen in `tests/test_stream.py`."""

import subprocess
import sys


def test_a_worker_of_the_light_stages_imports_no_model_library() -> None:
    modules = ("reward.stage", "track.validation", "advantage.baseline", "advantage.stage", "track.trajectories")
    code = f"import sys, {', '.join(f'pipeline.{name}' for name in modules)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert not {"torch", "transformers", "vllm", "ray.train"} & set(loaded.split())
