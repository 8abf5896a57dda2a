"""Import hook for torchvision's build for CUDA next to torch's build for CPUs.

torch's own index has a torchvision for CPUs, and the ordinary index has only one that is linked with CUDA. Without CUDA
its compiled part does not load, and its import fails at the schemas of two operators. This hook defines them. The
operators themselves stay missing; image processors do not use them.

`install.sh` copies this file into an environment whose torchvision cannot be imported, with a `.pth` file that imports
it.
"""

import importlib.abc
import sys

AFTER_THE_COMPILED_PART = ("torchvision._autograd_registrations", "torchvision._meta_registrations")


class Schemas(importlib.abc.MetaPathFinder):
    """Defines the schemas when torchvision has tried to load its compiled part; it finds no module."""

    def find_spec(self, name, path=None, target=None):
        if name in AFTER_THE_COMPILED_PART:
            sys.meta_path.remove(self)
            import torch

            if not hasattr(torch.ops.torchvision, "nms"):
                # torch forgets the schemas when the library is deleted.
                self.library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                sys.modules[__name__].schemas = self


sys.meta_path.insert(0, Schemas())
