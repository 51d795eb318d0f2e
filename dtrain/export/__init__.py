"""Export of trained models, checks of the exported model, and loading for inference.

An *artefact* is a folder with a model, ``model.json`` (its input, storage format and origin) and ``report.json`` (its
differences from the fp32 model). Loading one needs no training config.

Files in reading order:

* ``description``: the content of ``model.json``.
* ``program``: the module that maps raw rows to fp32 outputs, and the image preprocessing in it.
* ``fold_cast``: BatchNorm folding and half-precision weights.
* ``formats``: how a program is stored: safetensors, pt2, AOTInductor, ONNX.
* ``adapter``: adapters of peft, merged or separate.
* ``hub``: pushes artefacts to the Hugging Face hub, and loads them from there.
* ``model_card``: the model card, the ``README.md`` of a push.
* ``artefact``: writes, verifies and loads artefacts; decides which of them may run code.
* ``text``: continues a text with a language model.
* ``reference``: inputs, fp32 outputs and metrics on rows of the evaluation set.
* ``probe``: a process that runs one artefact and reports outputs, call times and peak memory.
* ``compare``: errors of an artefact, the tolerance, and the first module that exceeds it.
* ``benchmark``: latency, throughput and memory compared with fp32; largest batch within a budget; ``dtrain export measure``.
* ``pipeline``: one export, from the options to the published artefact.
"""

from dtrain.export.hub import from_hub

__all__ = ["from_hub"]
