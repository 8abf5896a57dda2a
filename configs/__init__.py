"""Config files: `train.yaml`, `sft.yaml` and the experiments."""
