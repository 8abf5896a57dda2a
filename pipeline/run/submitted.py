"""Checks of a run on a shared cluster, before anything starts."""

import os
from pathlib import Path

from pipeline.config import ConfigError

PACKAGES = ("runtime_resources", "working_dir_files")
"""Nested folders in which each node of a cluster keeps its copies of the upload of `--working-dir`."""


def joined() -> str | None:
    """Return the address in `RAY_ADDRESS`; None for a Ray on this machine."""
    address = os.environ.get("RAY_ADDRESS", "").strip()
    return None if address in ("", "local") else address


def check_address() -> None:
    """Refuse a `RAY_ADDRESS` that no driver can join.

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
    """Refuse an address or a folder that cannot work on a cluster.

    Args:
        folder: absolute folder that the run writes.
        key: the setting of that folder.

    Raises:
        ConfigError: `RAY_ADDRESS` is not an address that a driver can join, or the folder lies in a copy of the working
            directory, which no other node sees and which Ray deletes.
    """
    check_address()
    if PACKAGES in zip(folder.parts, folder.parts[1:], strict=False):
        raise ConfigError(
            f"{folder} lies in this node's copy of the uploaded working directory: other nodes do not see it, and Ray "
            f"deletes it; set {key} to an absolute path that all nodes share"
        )
