"""Folders of hostile code are removed without a word."""

import subprocess
import sys

CLOSED = """
import os, tempfile
from pipeline.reward.sandbox.inside import folders
if os.geteuid() == 0:
    os.setuid(65534)  # root may enter every folder
work = tempfile.mkdtemp()
os.makedirs(f"{work}/closed/" + "n" * 200)
os.chmod(f"{work}/closed", 0)
folders.remove(work)
assert not os.path.exists(work)
"""


def test_names_of_closed_folders_are_not_printed() -> None:
    """The supervisor's stderr is in memory, which no limit bounds."""
    done = subprocess.run([sys.executable, "-c", CLOSED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
