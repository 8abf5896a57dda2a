"""Reward of a program: the share of its tests that it passes, or 1.0 only for all of them.

Failures of the program (a syntax error, a time limit, a crash) fail its test. Failures of the sandbox or the data raise
an exception, so that the row counts as failed and not as 0. Tests that do not start in `total_timeout_s` have failed.
The program never gets the expected output, so it can only compute it.
"""

from contextlib import closing
from typing import Any

from pipeline.config.sandbox import SandboxConfig
from pipeline.reward.sandbox import answer, runner, truth

DATA_SOURCES = ("codecontests", "apps", "codeforces", "taco")  # the names in verl's files
MAX_REASON = 200  # characters


def compute_score(solution_str: str, ground_truth: Any, config: SandboxConfig) -> dict[str, Any]:
    """Score a response, any text, to a programming problem with the tests `ground_truth` (see `truth.read`).

    In addition to the parts of every rule: `passed` and `total` (tests) and `reason`, the first failure in a few words.

    Raises:
        ValueError: `ground_truth` cannot be used.
        SandboxError: the sandbox failed.
    """
    tests = truth.read(ground_truth)
    code = answer.extract_code(solution_str)
    result: dict[str, Any] = {"score": 0.0, "acc": 0, "format": 0, "passed": 0, "total": len(tests), "reason": ""}
    if code is None or not code.strip():
        return result | {"reason": "no code in the response"}
    result["format"] = 1
    if len(code) > answer.MAX_CODE:
        return result | {"reason": f"the code has {len(code)} characters, more than {answer.MAX_CODE}"}
    passed, seen, reason = 0, 0, ""
    with closing(runner.run_tests(code, [test.job for test in tests], config)) as outcomes:
        for test, outcome in zip(tests, outcomes, strict=False):
            failure = test.failure(outcome)
            seen += 1
            passed += not failure
            if failure:
                reason = reason or f"test {seen}: {failure}"
                if config.score == "all":
                    break
    if not reason and seen < len(tests):
        reason = f"test {seen + 1}: time limit of all tests exceeded"
    correct = passed == len(tests)
    score = float(correct) if config.score == "all" else passed / len(tests)
    # Half a surrogate pair, which a program may name in an error, is text that files cannot hold.
    reason = reason[:MAX_REASON].encode(errors="replace").decode()
    return result | {"score": score, "acc": int(correct), "passed": passed, "reason": reason}
