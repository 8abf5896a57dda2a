"""Config files: `train.yaml`, `sft.yaml`, `reward_model.yaml` and the experiments."""
