"""Runs a program on a SandboxFusion server (`reward.sandbox.url`), one request for each test.

A failure of the server (no connection, an HTTP error, its status `SandboxError`) is tried again with growing pauses
until `url_timeout_s` is over, and is then an error of the reward, never a 0.

Tests on functions are sent as a script that runs the same judge as the local sandbox and starts the program beside it.
How well the judge is kept apart from the program is up to the server: both run as one user there.
"""

import json
import secrets
import time
from collections.abc import Generator
from typing import Any

import httpx

from pipeline.reward.sandbox.config import SandboxConfig, problems
from pipeline.reward.sandbox.isolation import PACKAGE, SandboxError
from pipeline.reward.sandbox.runner import Outcome

PAUSE_S = 0.5  # before the second attempt; doubled for each further one
MAX_PAUSE_S = 10.0
MAX_FAILURES = 3  # named in an error
SERVER_S = 10.0  # that the server may take beside running the program
INNER = ("__init__.py", "values.py", "driver.py", "responder.py", "judge.py")

# Writes the judge and the program to a folder, starts both, removes the folder and itself, prints the verdict.
_JUDGE = """\
import json, os, shutil, subprocess, sys, tempfile
job = json.loads({job!r})
folder = tempfile.mkdtemp()
os.mkdir(folder + "/inside")
for name, text in job["files"].items():
    with open(folder + "/inside/" + name, "w", encoding="utf-8") as file:
        file.write(text)
with open(folder + "/solution.py", "w", encoding="utf-8", errors="surrogatepass") as file:
    file.write(job["code"])
try:
    os.unlink(os.path.abspath(__file__))
except (NameError, OSError):
    pass
sys.path.append(folder)
from inside import judge
reads, asks = os.pipe()
hears, replies = os.pipe()
start = "import os, sys; os.dup2(%d, 13); os.dup2(%d, 14); os.dup2(13, 3); os.dup2(14, 4); os.closerange(5, 64); "
start += "sys.path.append(%r); from inside.driver import main; main('serve', %r)"
start %= (reads, replies, folder, [path for path in sys.path if path.endswith("-packages")])
program = subprocess.Popen([sys.executable, "-I", "-S", "-c", start], cwd=folder, stdin=subprocess.DEVNULL,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(reads, replies))
os.close(reads)
os.close(replies)
verdict = judge.verdict(job["test"], asks, hears)
program.kill()
program.wait()
shutil.rmtree(folder, ignore_errors=True)
print(job["mark"] + json.dumps(verdict))
"""


def run_tests(code: str, tests: list[dict[str, Any]], config: SandboxConfig) -> Generator[Outcome, None, None]:
    """Outcomes of the tests of one program, as `runner.run_tests`.

    Raises:
        SandboxError: the server gave not all outcomes within `url_timeout_s`.
        ValueError: the config means nothing.
    """
    if found := problems(config):
        raise ValueError("; ".join(found))
    # Of the time that all tests share, only what the programs ran counts, not the waiting for the server.
    left = config.total_timeout_s
    # Certificates take long to load, and plain HTTP has none to check.
    with httpx.Client(verify=str(config.url).startswith("https")) as client:
        deadline = time.monotonic() + config.url_timeout_s
        for test in tests:
            if left <= 0:
                return
            mark = secrets.token_hex(16)
            script = test["kind"] == "script"
            source = code if script else _judged(code, test, mark)
            limit = min(config.timeout_s, left)
            outcome = _ask(client, source, test.get("stdin", ""), limit, deadline, config)
            left -= limit if outcome.ended == "time" else outcome.seconds
            yield outcome if script else _with_verdict(outcome, mark)


def _judged(code: str, test: dict[str, Any], mark: str) -> str:
    files = {name: (PACKAGE / "inside" / name).read_text(encoding="utf-8") for name in INNER}
    return _JUDGE.format(job=json.dumps({"files": files, "code": code, "test": test, "mark": mark}))


def _with_verdict(outcome: Outcome, mark: str) -> Outcome:
    verdict = None
    _, found, text = outcome.stdout.rpartition(mark)
    if found and outcome.ended == "exit":
        try:
            verdict = json.loads(text)
        except ValueError:
            verdict = None
    return Outcome(outcome.ended, outcome.returncode, outcome.stdout, outcome.stderr, outcome.seconds, verdict)


def _ask(client: httpx.Client, code: str, stdin: str, limit: float, deadline: float, config: SandboxConfig) -> Outcome:
    """One run on the server, tried until it has an outcome or the time is over."""
    request = {
        "code": code,
        "stdin": stdin,
        "language": "python",
        "compile_timeout": limit,
        "run_timeout": limit,
        "memory_limit_MB": config.memory_mb,
        "files": {},
        "fetch_files": [],
    }
    body = json.dumps(request).encode()
    pause, attempts = PAUSE_S, 0
    failures: list[str] = []
    while (left := deadline - time.monotonic()) > 0:
        attempts += 1
        try:
            return _read(_post(client, body, min(left, 2 * limit + SERVER_S), config), config)
        except _ServerFailure as error:
            if str(error) not in failures[-MAX_FAILURES:]:
                failures.append(str(error))
            if error.final:
                break
        time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
        pause = min(2 * pause, MAX_PAUSE_S)
    raise SandboxError(
        f"reward.sandbox.url: the server at {config.url} did not run all tests within "
        f"{config.url_timeout_s:g} s; "
        f"the {attempts} attempts at the last one failed with: "
        + ("; ".join(failures[-MAX_FAILURES:]) or "no time was left")
    )


class _ServerFailure(Exception):
    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message[:300])
        self.final = final


def _post(client: httpx.Client, body: bytes, timeout: float, config: SandboxConfig) -> dict[str, Any]:
    # Of an answer, JSON may write each character of stdout and stderr in six bytes.
    most = 2 * 6 * (config.output_kb << 10) + (4 << 20)
    ends = time.monotonic() + timeout
    found = bytearray()
    try:
        headers = {"content-type": "application/json"}
        with client.stream("POST", str(config.url), content=body, headers=headers, timeout=timeout) as response:
            for part in response.iter_bytes():
                found += part
                if len(found) > most or time.monotonic() > ends:
                    raise _ServerFailure(f"an answer of more than {most} bytes, or one that did not end in time")
    except httpx.HTTPError as error:
        raise _ServerFailure(f"{type(error).__name__}: {error}") from error
    if response.status_code != 200:
        text = found[:200].decode(errors="replace")
        # The server is there and does not want this request; asking again changes nothing.
        final = 400 <= response.status_code < 500 and response.status_code not in (408, 425, 429)
        raise _ServerFailure(f"HTTP {response.status_code}: {text}", final)
    try:
        answer = json.loads(found)
    except ValueError as error:
        raise _ServerFailure(f"an answer that is no JSON: {found[:100].decode(errors='replace')!r}") from error
    if not isinstance(answer, dict):
        raise _ServerFailure("an answer that is no JSON object")
    return answer


def _read(answer: dict[str, Any], config: SandboxConfig) -> Outcome:
    status, result = answer.get("status"), answer.get("run_result") or answer.get("compile_result")
    if status not in ("Success", "Failed") or not isinstance(result, dict):
        raise _ServerFailure(f"status {status!r}, message {str(answer.get('message'))[:200]!r}")
    stdout, stderr = str(result.get("stdout") or ""), str(result.get("stderr") or "")
    seconds = float(result.get("execution_time") or 0.0)
    if result.get("status") == "TimeLimitExceeded":
        return Outcome("time", None, stdout, stderr, seconds)
    code = result.get("return_code")
    if result.get("status") != "Finished" or not isinstance(code, int):
        raise _ServerFailure(f"the run's status is {result.get('status')!r} and its return code {code!r}")
    most = config.output_kb << 10
    ended = "output" if len(stdout) > most or len(stderr) > most else "exit"
    return Outcome(ended, code, stdout[:most], stderr[:most], seconds)
