"""Reading verl's launch scripts and settings, for `jobs/from_verl.py`."""
