"""Checks of a run on a shared cluster, before anything starts."""

import os
from pathlib import Path

from pipeline.config import ConfigError

PACKAGES = ("runtime_resources", "working_dir_files")
"""Names of the nested folders in which each node of a cluster keeps its copies of the upload of `--working-dir`."""


def joined() -> str | None:
    """Return the address in `RAY_ADDRESS`; None if Ray is to run on this machine."""
    address = os.environ.get("RAY_ADDRESS", "").strip()
    return None if address in ("", "local") else address


def check_address() -> None:
    """Check that a driver can join the address in `RAY_ADDRESS`.

    Raises:
        ConfigError: it is the address of a job server or of a Ray Client server.
    """
    address = joined() or ""
    if address.startswith(("http://", "https://")):
        raise ConfigError(
            f"RAY_ADDRESS={address} is the address of a job server, which takes jobs but which no driver can join; "
            f"unset it and run `ray job submit --address {address} --working-dir . -- python -m jobs.train ...`"
        )
    if address.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS={address} is the address of a Ray Client server, which is not supported; unset it and submit "
            "the run with `ray job submit`, or set RAY_ADDRESS=auto on a node of the cluster"
        )


def check_cluster(folder: Path, key: str = "trainer.default_local_dir") -> None:
    """Check that address and folder can work on a cluster.

    Args:
        folder: absolute folder that the run writes.
        key: the setting that names the folder.

    Raises:
        ConfigError: `RAY_ADDRESS` is not an address that a driver can join, or the folder is in a copy of the working
            directory, which other nodes do not see and which Ray deletes.
    """
    check_address()
    if PACKAGES in zip(folder.parts, folder.parts[1:], strict=False):
        raise ConfigError(
            f"{folder} lies in this node's copy of the uploaded working directory: other nodes do not see it, and Ray "
            f"deletes it; set {key} to an absolute path that all nodes share"
        )
