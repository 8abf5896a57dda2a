"""Parse and import user code that settings name as `package.module:Name` or `file.py:Name`.

This module must run on Python 3.9 with only the standard library, since environment processes import it too.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
from types import ModuleType

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


class NotCode(ValueError):
    """Error for a name that is neither a file nor a module. The message continues the sentence "KEY is NAME, which"."""


def split(spec: str) -> tuple[str, str]:
    """Split `CODE:NAME` into (file or module, name after the colon). Without a colon, the name is empty."""
    code, colon, name = spec.rpartition(":")
    return (code, name) if colon and "/" not in name else (spec, "")


def is_file(code: str) -> bool:
    """Return True if `code` is the path of a Python file, False if it is the name of a module."""
    return code.endswith(".py")


def is_spec(spec: str) -> bool:
    """Return True if the text has the form `package.module:Name` or `file.py:Name`."""
    code, name = split(spec)
    return name.isidentifier() and (is_file(code) or bool(_MODULE.fullmatch(code)))


def load(code: str) -> ModuleType:
    """Import the file or module `code`, once per process, and return the module.

    Raises:
        NotCode: the file does not exist, or the text cannot be the name of a module.
        BaseException: any exception that the code raises, also `SystemExit`.
    """
    if not is_file(code) and _MODULE.fullmatch(code):
        return importlib.import_module(code)
    file = os.path.realpath(os.path.expanduser(code))
    if not (is_file(code) and os.path.isfile(file)):
        raise NotCode(_why_not(code))
    # Two files with the same name in different folders are two modules.
    digest = hashlib.blake2b(file.encode(), digest_size=4).hexdigest()
    name = f"{os.path.basename(file)[:-3]}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _why_not(code: str) -> str:
    file = os.path.abspath(os.path.expanduser(code))
    if not os.path.exists(file) and (is_file(code) or "/" in code):
        return f"does not exist (no {file}); check the path"
    if code and os.path.isdir(file):
        return "is a folder; name one that exists"
    return "is neither a Python file (.py) nor a module (package.module); name one that exists"
