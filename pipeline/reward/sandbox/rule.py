"""Reward for programs: the fraction of tests that pass, or 1.0 only if all pass (`reward.sandbox.score`).

If the program fails (a syntax error, a time limit, a crash), the test fails. If the sandbox fails, or the ground truth
cannot be used, an exception is raised, so the row has an error and not a score of 0. Tests that have not started after
`total_timeout_s` fail. The program never gets the expected outputs.
"""

from contextlib import closing
from typing import Any

from pipeline.config.sandbox import SandboxConfig
from pipeline.reward.sandbox import answer, runner, truth

DATA_SOURCES = ("codecontests", "apps", "codeforces", "taco")  # the names in verl's files
MAX_REASON = 200  # characters


def compute_score(solution_str: str, ground_truth: Any, config: SandboxConfig) -> dict[str, Any]:
    """Score a response to a programming problem.

    In addition to the parts of every rule, the result has `passed` and `total` (numbers of tests) and `reason`, the
    first failure in a few words.

    Args:
        solution_str: the response, any text.
        ground_truth: the tests, see `truth.read`.
        config: the section `reward.sandbox`.

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
