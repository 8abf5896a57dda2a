"""Code that runs inside the sandbox. It uses only the standard library, and is imported as the package `inside` by
Python with `-I -S`."""
