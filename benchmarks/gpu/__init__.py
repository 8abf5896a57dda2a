"""First measurements on a machine with a GPU, in three stages; `docs/gpus.md` has the commands."""
