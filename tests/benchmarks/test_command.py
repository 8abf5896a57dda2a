"""The exit code of a benchmark."""

import pytest

from benchmarks.command import exit_code


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (None, 1, ""),
        (OSError("no room"), 2, "no room\n"),
        (RuntimeError("a run failed"), 2, "a run failed\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted; the same command continues\n"),
    ],
)
def test_the_exit_code_says_how_it_ended(
    error: BaseException | None, code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure() -> int:
        if error is not None:
            raise error
        return 1

    assert exit_code(measure, RuntimeError) == code
    assert capsys.readouterr().err == text


def test_other_errors_are_faults() -> None:
    with pytest.raises(ZeroDivisionError):
        exit_code(lambda: 1 // 0, RuntimeError)
