"""First measurements on a machine with a GPU, in three stages; `docs/gpu.md` has the commands."""
