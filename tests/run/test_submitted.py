from pathlib import Path

import pytest

from pipeline.config import ConfigError
from pipeline.run.submitted import check_cluster, joined

COPY = Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_01")


def test_a_run_folder_in_the_uploaded_working_directory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"_ray_pkg_01/runs/mine lies in.*set trainer\.default_local_dir"):
        check_cluster(COPY / "runs" / "mine")
    with pytest.raises(ConfigError, match="set out to an absolute path"):
        check_cluster(COPY / "models" / "mine", "out")


@pytest.mark.parametrize("address", [None, "auto", "head:6379"])
@pytest.mark.parametrize("folder", ["/shared/runs/mine", "/shared/runtime_resources/mine/working_dir_files"])
def test_other_folders_and_addresses_pass(monkeypatch: pytest.MonkeyPatch, folder: str, address: str | None) -> None:
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    check_cluster(Path(folder))


@pytest.mark.parametrize(
    ("address", "remedy"),
    [("http://head:8265", "ray job submit --address http://head:8265"), ("ray://head:10001", "RAY_ADDRESS=auto")],
)
def test_addresses_that_no_driver_can_join_are_refused(
    monkeypatch: pytest.MonkeyPatch, address: str, remedy: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=remedy):
        check_cluster(Path("/shared/runs/mine"))


@pytest.mark.parametrize(
    ("address", "expected"), [(None, None), ("", None), ("local", None), (" head:6379 ", "head:6379"), ("auto", "auto")]
)
def test_which_cluster_a_run_joins(address: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    assert joined() == expected
