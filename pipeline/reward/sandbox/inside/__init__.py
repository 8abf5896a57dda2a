"""What runs inside the sandbox: the standard library only, imported as a package of its own by `-I -S` Python."""
