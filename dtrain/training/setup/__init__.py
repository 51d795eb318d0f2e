"""The parts of a training run.

* ``loaders``: loaders for training and evaluation, from the config.
* ``model``: memory layout, recomputation, compilation. ``compile_cache``: what was compiled, for later starts.
* ``sharded_init``: initial weights of a sharded model, from rank 0.
* ``batchnorm``: statistics of valid rows only. ``freeze``: parameters that are not trained. ``optimizer``. ``ema``: averaged
  weights. ``buffers``: buffers on skipped steps.
"""
