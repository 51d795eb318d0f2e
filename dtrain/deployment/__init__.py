"""Trained models outside training.

* An *artefact* is a folder with everything that using the model needs, and no training config: the model in one of three
  forms (weights with the way to build their model, a traced program, a compiled one), ``model.json`` (what it is, what it
  takes in, where it comes from), ``report.json`` (how it compares with fp32).
* Its weights are *folded* (BatchNorm merged into the convolution before it), then *cast*; modules that the config keeps
  in fp32 are left out of both.
* A *program* goes from rows as the loader hands them over to fp32 outputs, whatever the form.
* The *reference* is the fp32 model on rows of the evaluation set. The *comparison* runs the artefact as it was read from
  disk, in a fresh process, on the same rows. What is beyond *tolerance* is refused, and a *departure* says which module went
  wrong first.
* Its *cost* is measured beside the same weights in fp32, by *probes*: fresh processes, one an artefact, that take turns.
* Only artefacts that this user exported, or that are harmless, have the *trust* to run without being asked for.
"""
