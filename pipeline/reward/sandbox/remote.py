"""Run a program on a SandboxFusion server (`reward.sandbox.url`), with one request per test.

If the server fails (no connection, an HTTP error, status `SandboxError`), the request is repeated with growing pauses
until `url_timeout_s` is over. Then the row has an error, not a score of 0. Calls are sent as a script, which passes
them to the same driver as in the local sandbox; script and program run as the same user there. Expected outputs are
not sent.
"""

import json
import secrets
import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import httpx

from pipeline.config.sandbox import SandboxConfig
from pipeline.reward.sandbox.inside import driver, values
from pipeline.reward.sandbox.isolation import PACKAGE, SandboxError
from pipeline.reward.sandbox.outcome import ProgramRun

PAUSE_S = 0.5  # before the second attempt; doubled for each further one
MAX_PAUSE_S = 10.0
MAX_FAILURES = 3  # named in an error
SERVER_S = 10.0  # that the server may take in addition to the program's time
INNER = ("__init__.py", "values.py", "driver.py", "dialogue.py")

# Writes the files of `inside/` and the program to a folder, starts the program in its own process (without the mark),
# removes the script's own file, sends the calls, removes the folder, and prints the mark and then the results.
_SCRIPT = """\
import json, os, shutil, subprocess, sys, tempfile
job = json.loads({job!r})
folder = tempfile.mkdtemp()
os.mkdir(folder + "/inside")
for name, text in job["files"].items():
    with open(folder + "/" + name, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)
try:
    os.unlink(os.path.abspath(__file__))
except (NameError, OSError):
    pass
sys.path.append(folder)
from inside.dialogue import Dialogue
reads, asks = os.pipe()
hears, replies = os.pipe()
packages = [path for path in sys.path if path.endswith("-packages")]
start = f"import sys; sys.path.append({{folder!r}}); from inside.driver import main; "
start += f"main('calls', {{packages!r}}, {{reads}}, {{replies}})"
program = subprocess.Popen([sys.executable, "-I", "-S", "-c", start], cwd=folder, stdin=subprocess.DEVNULL,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(reads, replies))
os.close(reads)
os.close(replies)
answers = []
Dialogue(job["calls"], asks, hears, answers.append).run()
program.kill()
program.wait()
shutil.rmtree(folder, ignore_errors=True)
print(job["mark"] + b"".join(answers).decode(errors="replace"))
"""


def run_tests(code: str, tests: list[dict[str, Any]], config: SandboxConfig) -> Generator[ProgramRun, None, None]:
    """Yield one result per test of the program `code`, like `runner.run_tests`.

    Raises:
        SandboxError: the server did not return all results within `url_timeout_s`.
    """
    # Only the programs' running time counts towards the time that all tests share, not the waiting for the server.
    left = config.total_timeout_s
    # Certificates take long to load, and plain HTTP has none to check.
    with httpx.Client(verify=str(config.url).startswith("https")) as client:
        deadline = time.monotonic() + config.url_timeout_s
        for test in tests:
            if left <= 0:
                return
            source, stdin, mark = code, test["stdin"], ""
            if test["kind"] != "script":
                mark = secrets.token_hex(16)
                source, stdin = _with_driver(code, test, mark), ""
            limit = min(config.timeout_s, left)
            outcome = _ask(client, source, stdin, limit, deadline, config)
            left -= limit if outcome.ended == "time" else outcome.seconds
            yield _checked(outcome, mark, config)


def _with_driver(code: str, test: dict[str, Any], mark: str) -> str:
    files = {f"inside/{name}": (PACKAGE / "inside" / name).read_text(encoding="utf-8") for name in INNER}
    job = {"files": files | {driver.PROGRAM: code}, "calls": test["calls"], "mark": mark}
    return _SCRIPT.format(job=json.dumps(job))


def _checked(outcome: ProgramRun, mark: str, config: SandboxConfig) -> ProgramRun:
    """Apply the output limit to a run on the server, and move the results of calls, which follow `mark` in stdout, to
    `result`."""
    if mark and mark in outcome.stdout and outcome.ended == "exit":
        return replace(outcome, result=outcome.stdout.rpartition(mark)[2].encode(errors="replace"))
    most = config.output_kb << 10
    ended = "output" if max(len(outcome.stdout), len(outcome.stderr)) > most else outcome.ended
    return replace(outcome, ended=ended, stdout=outcome.stdout[:most], stderr=outcome.stderr[:most])


def _ask(
    client: httpx.Client, code: str, stdin: str, limit: float, deadline: float, config: SandboxConfig
) -> ProgramRun:
    """Run the program once on the server, and repeat the request after failures until `deadline`.

    Args:
        client: HTTP client.
        code: the program.
        stdin: its input.
        limit: time limit of the program, in seconds.
        deadline: time on the monotonic clock after which requests are not repeated.
        config: the section `reward.sandbox`.

    Raises:
        SandboxError: the server did not run the program.
    """
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
    failures: dict[str, None] = {}
    while (left := deadline - time.monotonic()) > 0:
        attempts += 1
        try:
            return _post(client, body, min(left, 2 * limit + SERVER_S), config)
        except _ServerFailure as error:
            failures[str(error)[:300]] = None
            if error.final:
                break
        except httpx.HTTPError as error:
            failures[f"{type(error).__name__}: {error}"[:300]] = None
        time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
        pause = min(2 * pause, MAX_PAUSE_S)
    raise SandboxError(
        f"reward.sandbox.url: the server at {config.url} did not run all tests within {config.url_timeout_s:g} s; "
        f"the {attempts} attempts at the last one failed with: "
        + ("; ".join(list(failures)[-MAX_FAILURES:]) or "no time was left")
    )


class _ServerFailure(Exception):
    """The server did not run the program. `final` is True if a further request would fail in the same way."""

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


def _post(client: httpx.Client, body: bytes, timeout: float, config: SandboxConfig) -> ProgramRun:
    """Send one request, and return the run of the program.

    Raises `_ServerFailure` or `httpx.HTTPError` if the server did not run it.
    """
    # JSON may write each character of stdout and stderr in six bytes.
    most = 2 * 6 * max(config.output_kb << 10, values.MAX_FRAME)
    ends = time.monotonic() + timeout
    received = bytearray()
    headers = {"content-type": "application/json"}
    with client.stream("POST", str(config.url), content=body, headers=headers, timeout=timeout) as response:
        for part in response.iter_bytes():
            received += part
            if len(received) > most:
                return ProgramRun("output")  # so much can only be what the program has printed
            if time.monotonic() > ends:
                raise _ServerFailure("an answer that did not end in time")
    text = received[:200].decode(errors="replace")
    if response.status_code != 200:
        final = 400 <= response.status_code < 500 and response.status_code not in (408, 425, 429)
        raise _ServerFailure(f"HTTP {response.status_code}: {text}", final)
    try:
        answer = json.loads(received)
        result = answer.get("run_result") or answer.get("compile_result")
    except (ValueError, AttributeError) as error:
        raise _ServerFailure(f"an answer that is not a JSON object: {text!r}") from error
    if answer.get("status") not in ("Success", "Failed") or not isinstance(result, dict):
        raise _ServerFailure(f"status {answer.get('status')!r}, message {str(answer.get('message'))[:200]!r}")
    stdout, stderr = str(result.get("stdout") or ""), str(result.get("stderr") or "")
    seconds = float(result.get("execution_time") or 0.0)
    if result.get("status") == "TimeLimitExceeded":
        return ProgramRun("time", None, stdout, stderr, seconds)
    code = result.get("return_code")
    if result.get("status") != "Finished" or not isinstance(code, int):
        raise _ServerFailure(f"the run's status is {result.get('status')!r} and its return code {code!r}")
    return ProgramRun("exit", code, stdout, stderr, seconds)
