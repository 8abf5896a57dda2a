"""The code that runs inside the sandbox: only the standard library, imported as a package of its own by `-I -S`
Python."""
