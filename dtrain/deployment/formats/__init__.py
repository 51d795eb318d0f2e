"""The forms in which a model is stored: one file here for each, and one row in ``FORMATS``.

* *Weights* need the code of their model: ``safetensors``.
* A *program* needs none. It is traced with example rows, whose number stays free while everything else is fixed by them:
  a graph for torch (``pt2``), the same compiled for one kind of device (``aotinductor``), a graph for other runtimes
  (``onnx``).
"""

from __future__ import annotations

from dtrain.deployment.formats.aotinductor import AotInductor
from dtrain.deployment.formats.format import Format
from dtrain.deployment.formats.onnx import Onnx
from dtrain.deployment.formats.pt2 import Pt2
from dtrain.deployment.formats.safetensors import Safetensors

#: By the name that ``export.format`` has for each.
FORMATS: dict[str, Format] = {form.name: form for form in (Safetensors(), Pt2(), AotInductor(), Onnx())}
