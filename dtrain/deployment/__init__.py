"""Trained models outside training.

* An *artefact* is a folder with everything that using the model needs, and no training config: ``model.safetensors``,
  ``model.json`` (how to build the model, its dtype, what it takes in, where it comes from), ``report.json`` (how it
  compares with fp32).
* Its weights are *folded* (BatchNorm merged into the convolution before it), then *cast*; modules that the config keeps
  in fp32 are left out of both.
* The *comparison* runs the artefact as it was read from disk, in a fresh process, on rows of the evaluation set.
"""
